"""FSDP2 through codecs with error feedback: sums, residuals, checkpoints, refusals."""

from __future__ import annotations

import copy
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pool import Pool
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ringstrategy
from ringstrategy import (
    BlockFloat8,
    BlockInt,
    Direct,
    Gaussian,
    Identity,
    Native,
    PeerLostError,
    PlanMismatchError,
    Rotated,
    Sign,
    TopK,
)
from ringstrategy.codecs import Codec
from ringstrategy.integrations.fsdp import FsdpResiduals

TIMEOUT = timedelta(seconds=30)
CODECS: list[tuple[Codec, Any]] = [
    (Identity(), None),
    (BlockInt(8), None),
    (BlockInt(4, 64), None),
    (Rotated(Gaussian(4)), Direct()),
    (Sign(), Direct()),
    (TopK(16), Direct()),
]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(61, 203), nn.Tanh(), nn.Linear(203, 70), nn.Tanh(), nn.Linear(70, 5))


def sharded(module: nn.Module, **options: Any) -> nn.Module:
    for part in (*module.children(), module):
        if any(True for _ in part.parameters()):
            fully_shard(part, **options)
    return module


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 61, generator=torch.Generator().manual_seed(1000 * step + rank))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        module(batch(dist.get_rank(), step)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.full_tensor().detach().reshape(-1) for p in module.parameters()])  # type: ignore[attr-defined]


def _trains() -> dict[str, torch.Tensor]:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    found = {}
    for codec, collective in [(None, None), *CODECS]:
        for feedback in (True, False):
            module = sharded(net())
            if codec is not None:
                residuals = ringstrategy.fsdp(
                    module, codec, collective=collective, error_feedback=feedback, exact_below=0, timeout=TIMEOUT
                )
            train(module, torch.optim.SGD(module.parameters(), lr=0.02), range(30))
            found[f"{codec} {feedback}"] = weights(module)
            if codec is not None:
                assert residuals.stats.bytes_sent
                assert bool(residuals.state_dict()) == (feedback and codec != Identity())
                residuals.close()
    return found


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_modules_train_as_over_gloo_and_feedback_brings_them_closer(ranks: Pool, size: int) -> None:
    results = ranks(size, _trains)
    for result in results[1:]:
        assert all(torch.equal(result[name], results[0][name]) for name in result)
    true = results[0]["None True"]
    moved = (true - weights_at_start()).norm()
    for codec, _ in CODECS:
        error, without = ((results[0][f"{codec} {feedback}"] - true).norm() / moved for feedback in (True, False))
        if codec == Identity():
            assert error < 1e-5
        else:
            assert 0 < error < 0.7 * without, codec
            assert error < 0.25, codec


def weights_at_start() -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net().parameters()])


def _conserves() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What was delivered over all steps, the residuals left, and what ranks had to deliver, of a linear model."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, size = dist.get_rank(), dist.get_world_size()
    module = nn.Linear(61, 40, bias=False)
    fully_shard(module)
    residuals = ringstrategy.fsdp(module, BlockInt(4, 64), exact_below=0)
    delivered, due = torch.zeros(40, 61), torch.zeros(40, 61)
    for step in range(5):
        inputs = batch(rank, step)
        module(inputs).sum().backward()
        assert module.weight.grad is not None
        delivered += module.weight.grad.full_tensor()  # type: ignore[attr-defined]
        due += inputs.sum(0).expand(40, 61) / size
        module.weight.grad = None
    (state,) = residuals.state_dict().values()
    return delivered, state["residual"].full_tensor(), due


def test_what_was_delivered_and_what_is_left_is_all_there_was(ranks: Pool) -> None:
    results = ranks(2, _conserves)
    due = sum(result[2] for result in results)
    delivered, rows, _ = results[0]
    assert rows.shape == (2, 40 * 61)
    assert torch.equal(rows, results[1][1])
    left = rows.sum(0).view(40, 61)  # 40 rows need no padding, and FSDP2 lays the parts one behind the other
    assert left.abs().max() > 1e-3
    assert (delivered + left - due).abs().max() < 1e-4


def _resumes(folder: str) -> list[torch.Tensor]:
    dist.init_process_group("gloo", timeout=TIMEOUT)

    def made() -> tuple[nn.Module, torch.optim.Optimizer, FsdpResiduals]:
        module = sharded(net())
        residuals = ringstrategy.fsdp(module, BlockInt(4, 64, rounding="stochastic"), exact_below=0)
        return module, torch.optim.Adam(module.parameters(), lr=0.01), residuals

    module, optimizer, residuals = made()
    train(module, optimizer, range(4))
    of_module, of_optimizer = get_state_dict(module, optimizer)
    dcp.save({"model": of_module, "optimizer": of_optimizer, "residuals": residuals}, checkpoint_id=folder)
    kept = copy.deepcopy(residuals.state_dict())
    train(module, optimizer, range(4, 8))
    ends = [weights(module)]
    for how in ("by dcp", "by hand", "not"):
        module, optimizer, residuals = made()
        of_module, of_optimizer = get_state_dict(module, optimizer)
        state: dict[str, Any] = {"model": of_module, "optimizer": of_optimizer}
        if how == "by dcp":
            state["residuals"] = residuals
        dcp.load(state, checkpoint_id=folder)
        if how == "by hand":
            residuals.load_state_dict(kept)
        set_state_dict(module, optimizer, model_state_dict=of_module, optim_state_dict=of_optimizer)
        train(module, optimizer, range(4, 8))
        ends.append(weights(module))
    return ends


def test_a_run_resumes_bit_for_bit_with_its_residuals(ranks: Pool, tmp_path: Path) -> None:
    for whole, resumed, by_hand, forgetful in ranks(2, _resumes, str(tmp_path / "checkpoint")):
        assert torch.equal(whole, resumed)
        assert torch.equal(whole, by_hand)
        assert not torch.equal(whole, forgetful)


def _resumes_on_two(folder: str) -> None:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    module = sharded(net())
    residuals = ringstrategy.fsdp(module)
    with pytest.raises(CheckpointException, match=r"Size mismatch .*residuals"):
        dcp.load({"residuals": residuals}, checkpoint_id=folder)


def _saves(folder: str) -> None:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    dcp.save({"residuals": ringstrategy.fsdp(sharded(net()))}, checkpoint_id=folder)


def test_residuals_of_another_number_of_ranks_are_refused(ranks: Pool, tmp_path: Path) -> None:
    ranks(3, _saves, str(tmp_path / "checkpoint"))
    ranks(2, _resumes_on_two, str(tmp_path / "checkpoint"))


def _hybrid() -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ends = []
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for feedback in (False, True):
        module = sharded(net(), mesh=mesh, mp_policy=policy)
        if feedback:
            residuals = ringstrategy.fsdp(module, BlockInt(8), exact_below=0, residual_dtype=torch.bfloat16)
        train(module, torch.optim.SGD(module.parameters(), lr=0.05), range(6))
        ends.append(weights(module))
    shapes = [list(state["residual"].shape) for state in residuals.state_dict().values()]
    return ends[0], ends[1], shapes[0]


def test_hsdp_and_16_bits(ranks: Pool) -> None:
    results = ranks(4, _hybrid)
    for exact, encoded, shape in results:
        assert torch.equal(encoded, results[0][1])
        assert 0 < (encoded - exact).abs().max() < 1e-2
        assert shape == [2, 2, 204 * 62]  # 203 rows of 61 and the bias, padded for two shards
    assert len(results) == 4


def _refuses() -> None:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    with pytest.raises(ValueError, match=r"call torch.distributed.fsdp.fully_shard on it first"):
        ringstrategy.fsdp(net())
    module = sharded(net())
    with pytest.raises(ValueError, match=r"pass collective=Direct\(\)"):
        ringstrategy.fsdp(module, TopK())
    with pytest.raises(ValueError, match=r"no reduce-scatter; pass collective=Ring\(\)"):
        ringstrategy.fsdp(module, Identity(), collective=Native())
    with pytest.raises(TypeError, match="codec is a ringstrategy codec"):
        ringstrategy.fsdp(module, 8)  # type: ignore[arg-type]

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(61, 5), nn.Linear(61, 5)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.used(inputs)
            return result

    half = Half()
    fully_shard(half)
    ringstrategy.fsdp(half, exact_below=0)
    with pytest.raises(ValueError, match="nobody could tell whose residuals are whose"):
        half(batch(0, 0)).sum().backward()
    dist.barrier()


def _other_codecs() -> str:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    module = nn.Linear(61, 50)
    fully_shard(module)
    ringstrategy.fsdp(module, BlockInt(8) if dist.get_rank() else BlockFloat8(), exact_below=0)
    with pytest.raises(PlanMismatchError) as caught:
        module(batch(0, 0)).sum().backward()
    return str(caught.value)


def test_ranks_with_other_codecs_are_told_so(ranks: Pool) -> None:
    for text in ranks(2, _other_codecs):
        assert "BlockInt" in text
        assert "BlockFloat8" in text


def test_errors_name_the_cure(ranks: Pool) -> None:
    ranks(2, _refuses)


def _loses_a_rank() -> str:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    module = nn.Linear(61, 50)
    fully_shard(module, reshard_after_forward=False)
    ringstrategy.fsdp(module, exact_below=0)
    loss = module(batch(0, 0)).sum()
    loss.backward()
    loss = module(batch(0, 0)).sum()
    if dist.get_rank() == 1:
        os._exit(1)
    with pytest.raises(PeerLostError) as caught:
        loss.backward()
    return str(caught.value)


def test_a_lost_rank_is_named(ranks: Pool) -> None:
    zero, _, two = ranks.outcomes(3, _loses_a_rank)
    for text, error in (zero, two):
        assert error is None
        assert text.startswith("lost rank 1")
        assert "of module 'root'" in text
