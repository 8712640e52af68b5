"""FSDP2 through codecs with error feedback: sums, residuals, HSDP, refusals."""

from __future__ import annotations

import copy
import shutil
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from test_session import MINUTE, gathered
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, zeros

import ringstrategy
from ringstrategy import BlockInt, Direct, Gaussian, GroupOptions, Identity, Rotated, Sign, TopK
from ringstrategy.codecs import Codec
from ringstrategy.names import STRATEGIES

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


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 61, generator=torch.Generator().manual_seed(1000 * step + rank))


def linear(rows: int = 40, mesh: DeviceMesh | None = None) -> nn.Module:
    """Its weights differ between ranks, and so between replicas."""
    torch.manual_seed(dist.get_rank())
    return fully_shard(nn.Linear(61, rows, bias=False), mesh=None if mesh is None else mesh["shard"])


def replicas(count: int) -> DeviceMesh:
    return init_device_mesh("cpu", (count, dist.get_world_size() // count), mesh_dim_names=("replicate", "shard"))


def gradient_of(module: nn.Module, step: int) -> torch.Tensor:
    module.weight.grad = None
    module(batch(dist.get_rank(), step)).sum().backward()
    return module.weight.grad.full_tensor()


@on_ranks(2, 3, 4)
def test_what_was_delivered_and_what_is_left_is_all_there_was() -> None:
    """What was delivered over all steps, and the residuals left, are what ranks had to deliver, of a linear model.

    Four ranks are two replicas.
    """
    dist.init_process_group("gloo", timeout=MINUTE)
    size = dist.get_world_size()
    mesh = replicas(2) if size == 4 else None
    holders, shards = (size, size) if mesh is None else (2, 2)
    for codec, collective in CODECS:
        for rows in (40, 41, 1):  # shared out alike, not alike, and fewer than ranks
            module = linear(rows, mesh)
            residuals = ringstrategy.fsdp(module, codec, collective=collective, exact_below=0, mesh=mesh)
            before, *delivered = [
                module.weight.full_tensor().detach(),
                *(gradient_of(module, step) for step in range(5)),
            ]
            for value in (before, *delivered):  # replicas begin alike, and stay so
                assert all(torch.equal(value.double().flatten(), other) for other in gathered([value])), codec
            due = sum(batch(rank, step).sum(0) / size for rank in range(size) for step in range(5)).expand(rows, 61)
            left = torch.zeros(1, rows * 61)
            for state in residuals.state_dict().values():
                assert state["calls"] == 5
                left = state["residual"].full_tensor()
                assert (len(left), left[0].numel()) == (holders, shards * -(-rows // shards) * 61)
            # FSDP2 lays the parts one behind the other, and padding last
            left = left.sum(0).reshape(-1)[: rows * 61].view(rows, 61)
            assert (left.abs().max() > 1e-3) == (not codec.lossless), codec
            assert (sum(delivered) + left - due).abs().max() < 1e-4, (codec, rows)
            residuals.close()


@pytest.mark.parametrize("between", [False, True], ids=["shards", "replicas"])
@on_ranks(2)
def test_a_run_goes_on_bit_for_bit_with_its_residuals_and_its_noise(between: bool) -> None:
    """From copies; by `torch.distributed.checkpoint` see the laws of all doors."""
    dist.init_process_group("gloo", timeout=MINUTE)
    both = replicas(2) if between else None

    def made(feedback: bool) -> Any:
        module, noisy = linear(mesh=both), BlockInt(4, 64, rounding="stochastic")
        return module, ringstrategy.fsdp(module, noisy, error_feedback=feedback, exact_below=0, mesh=both)

    module, residuals = made(True)
    for step in range(3):
        gradient_of(module, step)
    kept = copy.deepcopy(residuals.state_dict())
    whole = gradient_of(module, 3)
    residuals.close()
    for state in (kept, {"root": {**kept["root"], "calls": 0}}, None):
        module, residuals = made(True)
        if state is not None:
            residuals.load_state_dict(state)
        assert torch.equal(gradient_of(module, 3), whole) == (state is kept)
        residuals.close()
    wrong = zeros(2, 7, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])
    with pytest.raises(ValueError, match="load residuals with as many ranks as saved them"):
        residuals.load_state_dict({"root": {"residual": wrong, "calls": 0}})
    module, residuals = made(False)
    assert residuals.state_dict() == {}
    assert not torch.equal(gradient_of(module, 0), gradient_of(module, 0)), "the noise of two steps is the same"
    residuals.close()


@on_ranks(4)
def test_replicas_and_residuals_come_back_from_one_distributed_checkpoint() -> None:
    dist.init_process_group("gloo", timeout=MINUTE)
    mesh, folder = replicas(2), [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)

    def made() -> Any:
        module = linear(41, mesh)
        return module, ringstrategy.fsdp(module, BlockInt(4, 64), exact_below=0, mesh=mesh)

    module, residuals = made()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(3):
        gradient_of(module, step)
        optimizer.step()
    saved = {"model": module.state_dict(), "residuals": residuals.state_dict()}
    checkpoint.save(saved, checkpoint_id=folder[0])
    weights, whole = module.weight.full_tensor(), gradient_of(module, 3)
    residuals.close()
    module, residuals = made()
    state = {"model": module.state_dict(), "residuals": residuals.state_dict()}
    checkpoint.load(state, checkpoint_id=folder[0])
    module.load_state_dict(state["model"])
    residuals.load_state_dict(state["residuals"])
    assert torch.equal(module.weight.full_tensor(), weights)
    assert torch.equal(gradient_of(module, 3), whole)
    residuals.close()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


@pytest.mark.parametrize("mixed", [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)])
@on_ranks(4)
def test_hsdp_encodes_within_hosts_or_between_them(mixed: MixedPrecisionPolicy) -> None:
    """Over gloo; through codecs within hosts; and between hosts, by a backend of ours or with feedback."""
    dist.init_process_group("gloo", timeout=MINUTE)
    found, sent = {}, {}
    for name in ("gloo", "within", "exact", "fed", "ring", "ring_int8"):
        backend = (name, GroupOptions(STRATEGIES[name](), exact_below=1 << 10)) if name in STRATEGIES else "gloo"
        mesh = init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("replicate", "shard"), backend_override={"replicate": backend}
        )
        module, between = net(), name in ("exact", "fed")
        for part in (*module[::2], module):
            fully_shard(part, mesh=mesh["shard"] if between else mesh, mp_policy=mixed)
            part.set_gradient_divide_factor(2.0)
            part.set_force_sum_reduction_for_comms(True)
        assert dist.get_backend(mesh.get_group("shard")) == "gloo"
        if name == "within":
            residuals = ringstrategy.fsdp(module, BlockInt(8), exact_below=0, residual_dtype=torch.bfloat16)
        if between:
            codec = BlockInt(8) if name == "fed" else Identity()
            hook = ringstrategy.fsdp(module, codec, exact_below=1 << 10, mesh=mesh)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        for step in range(5):
            for last in (False, True):
                module.set_requires_gradient_sync(last)
                module(batch(dist.get_rank() + 4 * last, step)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found[name] = torch.cat([parameter.full_tensor().detach().reshape(-1) for parameter in module.parameters()])
        counts = mesh.get_group("replicate") if name in STRATEGIES else hook if between else None
        sent[name] = 0 if counts is None else counts.stats.bytes_sent
        if between:
            hook.close()
        # the sum of two 16-bit values is rounded once, by gloo too
        low, high = (0, 1e-6) if name in ("gloo", "ring", "exact") else (1e-6, 1e-2)
        assert low <= (found[name] - found["gloo"]).abs().max() < high, name
        assert name == "gloo" or all(torch.equal(found[name].double(), other) for other in gathered([found[name]])), (
            name
        )
    if mixed.reduce_dtype is None:
        assert 3 < sent["ring"] / sent["ring_int8"] < 4
        assert 3 < sent["exact"] / sent["fed"] < 4
    # 203 rows of 61 and the bias, padded for two shards
    assert list(residuals.state_dict()["0"]["residual"].shape) == [2, 2, 204 * 62]
    residuals.close()


@on_ranks(2)
def test_errors_name_the_cure() -> None:
    dist.init_process_group("gloo", timeout=MINUTE)
    mesh = replicas(2)
    with torch.device("meta"):
        empty = linear(mesh=mesh)
    for module, given, said in (
        (linear(), mesh, r'mesh\["shard"\], and both to ringstrategy.fsdp'),
        (linear(mesh=mesh), mesh["shard"], "two dimensions, replicas and shards"),
        (empty, mesh, "initialise the model first"),
    ):
        with pytest.raises(ValueError, match=said):
            ringstrategy.fsdp(module, mesh=given)
    half, divided = nn.Linear(61, 5), linear()
    half.unused = nn.Parameter(torch.ones(61))
    fully_shard(half)
    opened = [ringstrategy.fsdp(module, exact_below=0) for module in (half, divided)]
    divided.set_gradient_divide_factor(3.0)
    for module, said in (
        (half, "nobody could tell whose residuals are whose"),
        (divided, r"set_force_sum_reduction_for_comms\(True\)"),
    ):
        with pytest.raises(ValueError, match=said):
            module(batch(0, 0)).sum().backward()
    dist.barrier()
    for residuals in opened:
        residuals.close()
