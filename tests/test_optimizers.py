"""Muon and AdamW as one optimizer: it equals both apart, and trains under each strategy as any other does."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from on_ranks import on_ranks
from test_strategy import Net, fit, same_everywhere
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import StepLR

from ringstrategy import AllReduce, BlockInt, Gossip, LocalSGD, MuonAdamW, Nesterov, RingStrategy
from ringstrategy.algorithms.base import Algorithm
from ringstrategy.session.optimizers import options


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.multihead, self.out = nn.Linear(6, 5), nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.multihead(self.embedding(x)).tanh())


class MuonNet(Net):
    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.layers = Embedded()  # with the seed of this rank

    def configure_optimizers(self) -> Any:
        optimizer = MuonAdamW(self.named_parameters(), 0.02)
        return [optimizer], [StepLR(optimizer, 1)]


@pytest.mark.parametrize("kept", ["state_dict", "pickle", "deepcopy"])
def test_it_steps_as_both_apart_also_after_it_was_saved(kept: str) -> None:
    torch.manual_seed(0)
    mine = Embedded()
    twin = copy.deepcopy(mine)
    one = MuonAdamW(mine.named_parameters(), 0.1, 0.02, 0.9, (0.8, 0.99))
    muon = torch.optim.Muon(
        [twin.multihead.weight, twin.out.weight], 0.1, 0.02, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    others = [twin.embedding.weight, twin.embedding.bias, twin.multihead.bias, twin.out.bias]
    apart = muon, torch.optim.AdamW(others, 0.1, (0.8, 0.99), weight_decay=0.02)
    for step in range(6):
        for parameter, same in zip(mine.parameters(), twin.parameters(), strict=True):
            parameter.grad = torch.randn(parameter.shape)
            same.grad = parameter.grad.clone()
        for optimizer in (one, *apart):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + step)
            optimizer.step()
        assert all(map(torch.equal, mine.parameters(), twin.parameters()))
        if step != 2:
            continue
        if kept == "state_dict":
            saved = copy.deepcopy(one.state_dict())
            said, one = list(options([one], set(mine.parameters()))), MuonAdamW(mine.named_parameters())
            one.load_state_dict(saved)
            assert list(options([one], set(mine.parameters()))) == said, "ranks compare them"
        else:
            mine, one = copy.deepcopy((mine, one)) if kept == "deepcopy" else pickle.loads(pickle.dumps((mine, one)))
    assert [sorted(one.state[parameter]) for parameter in (mine.multihead.weight, mine.multihead.bias)] == [
        ["momentum_buffer"],
        ["exp_avg", "exp_avg_sq", "step"],
    ]
    assert one.step(lambda: 7) == 7
    with pytest.raises(ValueError, match="takes all parameters when it is built"):
        one.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})


@on_ranks(2)
def test_matrices_that_fsdp_has_cut_are_refused() -> None:
    dist.init_process_group("gloo")
    module = fully_shard(Embedded(), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(TypeError, match=r"Muon needs whole matrices, and embedding.weight is cut .* with FSDP2"):
        MuonAdamW(module.named_parameters())
    dist.barrier()


@pytest.mark.parametrize(
    "algorithm",
    [
        LocalSGD(3, Nesterov(0.9, 0.8), BlockInt(8), overlap=1, fragments=2, error_feedback=True),
        LocalSGD(3, within_host=True),
        Gossip(),
        AllReduce(BlockInt(8)),
    ],
    ids=["diloco", "within", "gossip", "ring_int8"],
)
@on_ranks(2)
def test_a_trainer_resumes_bit_for_bit(algorithm: Algorithm, tmp_path: Path) -> None:
    def trained(epochs: int, begin: str | None = None) -> L.Trainer:
        saves = [ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)] if begin is None else []
        how: dict[str, Any] = {"callbacks": saves, "enable_checkpointing": begin is None}
        return fit(RingStrategy(algorithm), MuonNet(), max_epochs=epochs, ckpt_path=begin, **how)

    whole, resumed = trained(2), trained(2, str(tmp_path / "epoch=0.ckpt"))
    assert resumed.global_step == whole.global_step == 12
    for parameter, same in zip(resumed.lightning_module.parameters(), whole.lightning_module.parameters(), strict=True):
        assert torch.equal(parameter, same)
        assert same_everywhere(parameter) or isinstance(algorithm, Gossip)
    states = [trainer.optimizers[0].state_dict()["state"] for trainer in (resumed, whole)]
    assert all(torch.equal(states[0][0][key], value) for key, value in states[1][0].items())
