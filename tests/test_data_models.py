"""Data of the examples are the same on every rank and in every run, models learn, published numbers come out."""

import itertools
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from on_ranks import on_ranks
from pool import Pool
from test_strategy import check_replicas, fit, gathered, trainer_with, world
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ringstrategy.horovod as hvd
from ringstrategy.examples.data.digits import Digits
from ringstrategy.examples.data.regression import Regression
from ringstrategy.examples.data.stdlib_text import StdlibText, read_stdlib_text
from ringstrategy.examples.models.cnn import CNN
from ringstrategy.examples.models.example import SGD
from ringstrategy.examples.models.gpt import GPT
from ringstrategy.examples.models.linear import Linear
from ringstrategy.examples.models.mlp import MLP


def ready(data):
    data.setup("fit")
    return data


def rows(images):
    return {image.numpy().tobytes() for image in images}


def test_digits_split_follows_its_seed_only():
    first = ready(Digits())
    torch.manual_seed(123)
    again, other = ready(Digits()), ready(Digits(seed=1))
    for part, size in (("training", 1437), ("validation", 360)):
        images, labels = getattr(first, part).tensors
        assert images.shape == (size, 1, 8, 8)
        assert 0 <= images.min() < images.max() == 1
        assert torch.equal(images, getattr(again, part).tensors[0])
        assert torch.equal(labels, getattr(again, part).tensors[1])
        assert not torch.equal(labels, getattr(other, part).tensors[1])
    # two of the 1,797 images could be alike, but none is
    assert rows(first.training.tensors[0]).isdisjoint(rows(first.validation.tensors[0]))


def on_rank(rank, ranks, skew):
    """The loader that a trainer on this rank would get."""
    data = ready(Digits(skew=skew))
    data.trainer = SimpleNamespace(global_rank=rank, world_size=ranks)
    return data.train_dataloader()


def test_skewed_shards_are_disjoint_and_equally_long():
    for ranks, skew in itertools.product([1, 3, 4, 8], [1e-9, 0.4, 1.0]):
        loaders = [on_rank(rank, ranks, skew) for rank in range(ranks)]
        shares = [rows(torch.cat([images for images, _ in loader])) for loader in loaders]
        assert {len(share) for share in shares} == {1437 // ranks}, (ranks, skew)
        assert len(set.union(*shares)) == 1437 // ranks * ranks, (ranks, skew)
        assert len({len(loader) for loader in loaders}) == 1, "or ranks would wait for ever"


def test_skew_is_the_share_of_a_run_of_labels():
    for ranks, most in ((4, 4), (8, 3)):
        for rank in range(ranks):
            none, half, full = (
                torch.cat([labels for _, labels in on_rank(rank, ranks, skew)]).bincount(minlength=10)
                for skew in (1e-9, 0.5, 1.0)
            )
            mine = full > 0
            assert 2 <= mine.sum() <= most
            assert mine.nonzero().diff(dim=0).eq(1).all(), "neighbouring labels"
            assert none.min() > 0
            assert half.min() > 0
            assert none[mine].sum() < half.sum() / 2 < half[mine].sum() < half.sum()


def test_no_skew_is_lightnings_to_share_out():
    data = ready(Digits())
    torch.manual_seed(5)
    mine = list(data.train_dataloader())
    torch.manual_seed(5)
    plain = list(DataLoader(data.training, 32, shuffle=True))
    torch.testing.assert_close(mine, plain, rtol=0, atol=0)
    for skew in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"skew is a share .* 0 .* to 1, got"):
            Digits(skew=skew)


class Labels(MLP):
    """Of its batches, by epoch."""

    def on_train_epoch_start(self):
        self.labels = [*getattr(self, "labels", []), []]

    def on_train_batch_start(self, batch, batch_idx):
        self.labels[-1] += batch[1].tolist()


@on_ranks(2)
def test_lightning_leaves_skewed_shards_alone():
    trainer_with("gossip", limit_val_batches=0).fit(model := Labels(), Digits(batch_size=200, skew=1.0))
    one, other = model.labels
    assert len(one) == len(other) == 718
    assert one != other
    assert sorted(one) == sorted(other)
    low, high = gathered(torch.tensor([min(one), max(one)]))
    assert low[1] <= high[0]


def test_stdlib_text_windows():
    options = {"context": 32, "windows": 100, "max_bytes": 20_000, "validation_bytes": 4000}
    first, again, other = (ready(StdlibText(**options, seed=seed)) for seed in (0, 0, 1))
    assert len(first.training) == 100
    assert torch.equal(first.training.starts, again.training.starts)
    assert not torch.equal(first.training.starts, other.training.starts)
    for part in (first.training, first.validation):
        for index in (0, len(part) - 1):  # the last one must not run over the end
            window, following = part[index]
            assert window.shape == following.shape == (32,)
            assert torch.equal(window[1:], following[:-1])
    text = torch.cat([first.training.text, first.validation.text])
    assert len(text) == 20_000, "cut at the asked size; nobody trains on what validates"
    assert torch.equal(text, read_stdlib_text(30_000)[:20_000])
    assert b"import" in bytes(text.tolist())
    with pytest.raises(ValueError, match="does not fit"):
        StdlibText(context=4000, max_bytes=20_000, validation_bytes=4000)


def overfit(model, batch, steps):
    model.log = lambda *args, **kwargs: None  # no trainer
    optimizer = model.configure_optimizers()
    losses = []
    for _ in range(steps):
        loss = model.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_models_learn_a_batch_by_heart():
    text = torch.tensor(list(b"def ring(values): return values "))
    windows = torch.stack([text[:16], text[8:24]]), torch.stack([text[1:17], text[9:25]])
    adamw = partial(torch.optim.AdamW, lr=5e-3)
    gpts = [partial(GPT, context=16, width=32, layers=2, heads=2, tied=tied, optimizer=adamw) for tied in (False, True)]
    images = ready(Digits()).training[:16]
    for make, batch, choices, steps, most in (
        *((make, windows, 256, 60, 0.5) for make in gpts),
        *((make, images, 10, 100, 0.05) for make in (MLP, CNN)),
    ):
        torch.manual_seed(0)
        losses = overfit(make(), batch, steps)
        assert losses[0] == pytest.approx(math.log(choices), abs=0.3), make
        assert losses[-1] < most, make


def test_gpt_does_not_look_ahead():
    model = GPT(context=16, width=32, layers=2, heads=2)
    window = torch.randint(256, (1, 16))
    changed = window.clone()
    changed[0, 10] ^= 1
    before, after = model(window), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10], after[:, 10])


# Examples whose numbers were published beside the systems that this project follows, to 1e-5

# One dense layer on two ranks: Horovod's example of an averaged gradient

LOCAL_ROWS = [(2.0128188, 2.7977395), (0.75015247, 1.4605565)]
MEAN_ROWS = (1.3814857, 2.129148)


def check_dense(weight: Tensor, rows: tuple[float, float], bias: Tensor | None = None, value: float = 0) -> None:
    """Rows of the 2x3 kernel, in the layout of `nn.Linear.weight` (3x2)."""
    torch.testing.assert_close(weight, torch.tensor(rows).expand(3, 2), rtol=0, atol=1e-5)
    assert bias is None or bias.tolist() == [value] * 3


@on_ranks(2)
def test_two_ranks_that_start_different_average_their_gradients() -> None:
    hvd.init()
    rank = hvd.rank()
    layer, drawn = nn.Linear(2, 3), np.random.RandomState(rank).random_sample((4, 2))
    x = torch.from_numpy(drawn).float()
    for parameter in layer.parameters():
        nn.init.constant_(parameter, 1.0 - rank)
    check_dense(torch.autograd.grad(layer(x).sum(), layer.weight)[0], LOCAL_ROWS[rank])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), 1.0), layer.named_parameters())
    layer(x).sum().backward()
    optimizer.synchronize()
    check_dense(layer.weight.grad, MEAN_ROWS, layer.bias.grad, 4)
    with optimizer.skip_synchronize():
        optimizer.step()
    after = [(-0.3814857, -1.129148), (-1.3814857, -2.129148)]
    check_dense(layer.weight.data, after[rank], layer.bias.data, -3 - rank)
    hvd.broadcast_parameters(layer.state_dict(), 0)
    check_dense(layer.weight.data, after[0], layer.bias.data, -3)
    hvd.shutdown()


# Linear regression on four nodes, and accumulation over shards


def _regression(accumulate: int, epochs: int = 25) -> None:
    """Beside gradient descent on one node in float64."""
    data, model = Regression(), Linear(optimizer=lambda parameters: SGD(parameters, lr=0.01))
    batches = DataLoader(TensorDataset(data.rows, data.targets), batch_size=1000 // (world() * accumulate))
    trainer = fit("ring", model, data=batches, max_epochs=epochs, accumulate_grad_batches=accumulate)
    assert trainer.global_step == epochs
    if world() > 1:
        check_replicas(trainer)
    rows, targets, weights = data.rows.double(), data.targets.double(), torch.zeros(4, dtype=torch.float64)
    for _ in range(epochs):
        weights -= 0.01 * 2 * rows.T @ (rows @ weights - targets) / len(rows)
    torch.testing.assert_close(model.weights.detach().double(), weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("size", "accumulate"), [(1, 4), (2, 2), (4, 1)])
def test_shards_of_nodes_or_of_accumulation_are_the_full_batch(ranks: Pool, size: int, accumulate: int) -> None:
    ranks(size, _regression, accumulate)
