"""A change of one bit on one rank is found, and the rank is named on all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from pool import Pool
from test_strategy import Net, fit
from torch import Tensor

from ringstrategy import AllReduce, BlockInt, Gossip, LocalSGD, Nesterov, ReplicaCheck, RingStrategy
from ringstrategy.kernels.sample import checksums


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.uint8]
    some = [torch.randn(7, 5, generator=generator).mul(9).to(dtype) for dtype in dtypes]
    return [*some, some[0].T, torch.tensor(1.5), torch.empty(0, 3)]


@pytest.mark.parametrize("bit", [0, 6, 7])
def test_any_bit_shows_in_the_sum_of_its_tensor_and_of_no_other(bit: int) -> None:
    expected = checksums(tensors())
    assert (expected.dtype, expected.shape) == (torch.int64, (len(tensors()),))
    assert torch.equal(checksums(tensors()), expected)
    for place, tensor in enumerate(tensors()):
        for where in range(0, tensor.numel(), 11):
            changed = [each.contiguous() for each in tensors()]
            changed[place].view(-1).view(torch.uint8)[where] ^= 1 << bit
            assert (checksums(changed) != expected).tolist() == [other == place for other in range(len(changed))]
    assert checksums([]).shape == (0,)


class Flips(Callback):
    """One bit of one parameter on one rank, unnoticed."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == (self.rank, self.step):
            module.layers[2].weight.detach().view(torch.int32)[1, 3] ^= 1


def _found(rank: int) -> str:
    strategy = RingStrategy(AllReduce(BlockInt(8)))
    with pytest.raises(RuntimeError) as caught:
        fit(strategy, Net(), callbacks=[Flips(rank, 4), ReplicaCheck(3)])
    return str(caught.value)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_flipped_bit_is_found_at_the_next_check_and_named_everywhere(ranks: Pool, rank: int) -> None:
    first, *others = ranks(3, _found, rank)
    # the flipped bit changes this rank's gradients only, whose means all ranks share
    assert first.startswith(f"the replicas differ after step 6: rank {rank} in layers.2.weight (1 in all).")
    assert others == [first, first]


class FlipsShared(Flips):
    """The same of the shared parameters."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == (self.rank, self.step):
            shared = trainer.strategy.algorithm.shared_values()
            shared["layers.2.weight"].view(torch.int32)[1, 3] ^= 1 << 12  # the lowest would be rounded away


def _found_seldom() -> str:
    """The check after step 3 says nothing."""
    with pytest.raises(RuntimeError) as caught:
        fit(RingStrategy(LocalSGD(2, Nesterov())), Net(), callbacks=[ReplicaCheck(3), FlipsShared(1, 4)])
    return str(caught.value)


def test_of_ranks_that_train_apart_the_shared_parameters_are_compared(ranks: Pool) -> None:
    for found in ranks(3, _found_seldom):
        assert found.startswith("the replicas differ after step 6: rank 1 in layers.2.weight")


def test_what_cannot_be_checked_is_refused() -> None:
    for strategy in ("auto", RingStrategy(Gossip())):
        with pytest.raises(ValueError, match="strategy='ring'"):
            fit(strategy, Net(), callbacks=[ReplicaCheck()])
