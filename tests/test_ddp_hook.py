"""The communication hook for DDP: what torch's DDP and our strategies promise holds for both together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool, reserve_port
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ringstrategy
from ringstrategy import BlockInt, Direct, Gaussian, Identity, Ring, Rotated, Sign, SmallExact, TopK
from ringstrategy.codecs import Codec
from ringstrategy.integrations.ddp_hook import DdpHookState

MINUTE = timedelta(minutes=1)
LOSSY = {
    "int8": (BlockInt(8), Ring()),
    "int4": (Rotated(BlockInt(4)), None),
    "sign": (Sign(), None),
    "topk": (TopK(16), Direct()),
    "small": (SmallExact(Rotated(Gaussian(2)), below=64), None),
}


@contextmanager
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", timeout=MINUTE)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Net(nn.Module):
    """Awkward sizes, one parameter in channels_last, and a part that is used now and then."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.convolution = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(5 * 4 * 4, 61), nn.ReLU(), nn.Linear(61, 257))
        self.tail = nn.Linear(257, 3)
        self.sometimes = nn.Linear(3, 3)

    def forward(self, x: Tensor, more: bool = True) -> Tensor:
        y = self.tail(torch.tanh(self.head(self.convolution(x))))
        return self.sometimes(y) if more else y


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Another one on each rank."""
    generator = torch.Generator().manual_seed(100 * step + int(os.environ["RANK"]))
    return torch.randn(4, 3, 6, 6, generator=generator), torch.randn(4, 3, generator=generator)


@contextmanager
def hooked(
    codec: Any = None, collective: Any = None, *, seed: int = 0, feedback: bool | None = None, **of_ddp: Any
) -> Iterator[tuple[DistributedDataParallel, DdpHookState]]:
    model = DistributedDataParallel(Net(seed), **{"bucket_cap_mb": 0.01, **of_ddp})
    state, hook = ringstrategy.ddp_hook(codec, collective, error_feedback=feedback, module=model, timeout=MINUTE)
    model.register_comm_hook(state, hook)
    try:
        yield model, state
    finally:
        state.close()


def loss(model: nn.Module, step: int, more: bool = True) -> Tensor:
    inputs, targets = batch(step)
    return nn.functional.mse_loss(model(inputs, more), targets)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def values(module: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in module.parameters()]


def everyones(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors of each rank in one, by rank."""
    flat = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, flat)
    return gathered


def _beside_plain_ddp(of_ddp: dict[str, Any], accumulated: bool) -> tuple[float, int | None]:
    """The largest difference, and the bytes sent while gradients only accumulated."""
    unused = of_ddp.get("find_unused_parameters", False)
    quiet: int | None = 0
    with process_group(), hooked(**of_ddp) as (model, state):
        twin = DistributedDataParallel(Net(), **{"bucket_cap_mb": 0.01, **of_ddp})
        both = [(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)) for net in (model, twin)]
        for step in range(4):
            for net, optimizer in both:
                optimizer.zero_grad()
                before = state.stats.bytes_sent
                with net.no_sync() if accumulated else nullcontext():
                    loss(net, step, more=not unused).backward()
                if accumulated and net is model:
                    quiet = state.stats.bytes_sent - before
                    assert quiet == 0
                if accumulated:
                    loss(net, step + 10, more=not unused).backward()
                optimizer.step()
        assert state.stats.steps == 4
        assert state.stats.bytes_sent is not None
        assert state.stats.bytes_sent > 0
        assert dist.get_world_size() == len(set(everyones([torch.tensor(float(dist.get_rank()))])))
        return max(float((a - b).abs().max()) for a, b in zip(values(model), values(twin), strict=True)), quiet


@pytest.mark.parametrize(
    ("of_ddp", "accumulated"),
    [
        ({"gradient_as_bucket_view": True}, False),
        ({"gradient_as_bucket_view": False, "bucket_cap_mb": 25}, True),
        ({"find_unused_parameters": True}, False),
        ({"static_graph": True, "gradient_as_bucket_view": True}, True),
    ],
    ids=str,
)
def test_two_ranks_train_as_with_plain_ddp_bit_for_bit(ranks: Pool, of_ddp: dict[str, Any], accumulated: bool) -> None:
    if of_ddp.get("static_graph"):  # torch itself refuses no_sync before the first step
        accumulated = False
    assert ranks(2, _beside_plain_ddp, of_ddp, accumulated) == [(0.0, 0)] * 2


def test_three_ranks_train_as_with_plain_ddp_to_rounding(ranks: Pool) -> None:
    assert max(far for far, _ in ranks(3, _beside_plain_ddp, {}, True)) < 1e-6


def _conserved(name: str, feedback: bool | None) -> list[tuple[float, float, int, bool]]:
    """What gradients and residuals lack of the exact sums, and how many buckets there were, by step."""
    codec, collective = LOSSY[name]
    found = []
    with process_group(), hooked(codec, collective, feedback=feedback) as (model, state):
        alone, inner = Net(), model.module
        given = [torch.zeros_like(p, dtype=torch.float64) for p in alone.parameters()]
        got = [torch.zeros_like(tensor) for tensor in given]
        for step in range(4):
            for net in (model, alone):
                net.zero_grad()
                loss(net, step).backward()
            for total, parameter in zip(given, alone.parameters(), strict=True):
                total += parameter.grad / dist.get_world_size()
            for total, parameter in zip(got, inner.parameters(), strict=True):
                total += parameter.grad
            equal = everyones([p.grad for p in inner.parameters()])
            assert all(torch.equal(equal[0], one) for one in equal), "replicas differ"
            residuals = state.state_dict()["residuals"]
            kept = [residuals.get(n, torch.zeros_like(p)) for n, p in inner.named_parameters()]
            missing = sum(everyones(given)) - equal_sum(got) - sum(everyones(kept))
            lost = sum(everyones(given)) - equal_sum(got)
            found.append((float(missing.abs().max()), float(lost.abs().max()), len(state.state_dict()["buckets"])))
    return found


def equal_sum(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


@pytest.mark.parametrize(("name", "size"), [("int8", 3), ("int4", 2), ("sign", 2), ("topk", 3), ("small", 2)])
def test_what_is_not_sent_is_in_the_residuals_also_when_ddp_changes_its_buckets(
    ranks: Pool, name: str, size: int
) -> None:
    for steps in ranks(size, _conserved, name, True):
        buckets = [count for *_, count in steps]
        assert buckets[0] == 1
        assert buckets[1] > 2, "DDP did not cut its buckets anew"
        for missing, lost, _ in steps:
            assert missing < 1e-6
            assert lost > 1e-4, "nothing was lost, so nothing was tested"


def _resumed() -> tuple[bool, bool, bool]:
    with process_group():

        def begun(seed: int) -> Any:
            return hooked(Rotated(BlockInt(4)), seed=seed, feedback=True)

        with begun(0) as (model, state):
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            train(model, optimizer, range(3))
            saved = {key: [p.clone() for p in values(model)] for key in ["model"]}
            saved_state, saved_optimizer = state.state_dict(), optimizer.state_dict()["state"]
            saved_optimizer = {k: {n: v.clone() for n, v in one.items()} for k, one in saved_optimizer.items()}
            train(model, optimizer, range(3, 7))
            straight = values(model)

        def again(given: dict[str, Any]) -> list[Tensor]:
            with begun(1) as (model, state):
                optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
                with torch.no_grad():
                    for parameter, value in zip(model.parameters(), saved["model"], strict=True):
                        parameter.copy_(value)
                optimizer.load_state_dict({**optimizer.state_dict(), "state": saved_optimizer})
                if given:
                    state.load_state_dict(given)
                    assert state.state_dict()["buckets"] == given["buckets"]
                train(model, optimizer, range(3, 5))
                assert len(state.state_dict()["buckets"]) == len(saved_state["buckets"])
                train(model, optimizer, range(5, 7))
                return values(model)

        def same(given: dict[str, Any]) -> bool:
            return all(torch.equal(one, other) for one, other in zip(straight, again(given), strict=True))

        emptied = {**saved_state, "residuals": {}}
        in_one = {**saved_state, "buckets": [[name for bucket in saved_state["buckets"] for name in bucket]]}
        return same(saved_state), same(emptied), same(in_one)


def test_a_run_that_is_resumed_goes_on_bit_for_bit(ranks: Pool) -> None:
    for whole, without_residuals, in_one_bucket in ranks(2, _resumed):
        assert whole
        assert not without_residuals, "residuals do not matter here, so nothing was tested"
        assert not in_one_bucket, "buckets do not matter here, so nothing was tested"


GATE = threading.Event()


class Gated(Direct):
    """Exchanges nothing before the last bucket is there."""

    def sum_(self, *args: Any, **kwargs: Any) -> None:
        assert GATE.wait(20), "the hook waited for an exchange"
        super().sum_(*args, **kwargs)


def _beside_backward() -> int:
    with process_group():
        model, seen = DistributedDataParallel(Net(), bucket_cap_mb=0.01), []
        state, hook = ringstrategy.ddp_hook(collective=Gated(), timeout=MINUTE)

        def watched(state: DdpHookState, bucket: Any) -> Any:
            future = hook(state, bucket)
            seen.append(bucket.index())
            if bucket.is_last():
                GATE.set()
            return future

        watched.__annotations__ = {}  # DDP compares them with types, and here they are strings
        model.register_comm_hook(state, watched)
        for step in range(2):
            GATE.clear()
            seen.clear()
            loss(model, step).backward()
        state.close()
        return len(seen)


def test_backward_goes_on_during_exchanges(ranks: Pool) -> None:
    assert min(ranks(2, _beside_backward)) > 2


class Mixed(nn.Module):
    """Layers of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.narrow = nn.Linear(6, 40).bfloat16()
        self.wide = nn.Linear(40, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.narrow(x.bfloat16()).float())


def _mixed() -> None:
    with process_group():
        for codec in (None, BlockInt(8)):
            model = DistributedDataParallel(Mixed())
            state, hook = ringstrategy.ddp_hook(codec, error_feedback=True, module=model, timeout=MINUTE)
            model.register_comm_hook(state, hook)
            alone, (inputs, targets) = Mixed(), batch(0)
            for net in (model, alone):
                nn.functional.mse_loss(net(inputs[:, 0, 0]), targets).backward()
            for (name, one), other in zip(model.module.named_parameters(), alone.parameters(), strict=True):
                assert one.grad.dtype == one.dtype
                exact = (sum(everyones([other.grad])) / 3).view(one.shape)
                # of 16 bits: rounded once, and not at each addition
                bound = 1e-6 if one.dtype == torch.float32 else exact.abs() * 2**-8 + 1e-7
                bound = bound if codec is None else exact.abs().max() * 0.02
                assert ((one.grad.double() - exact).abs() <= bound).all(), (codec, name)
                assert all(torch.equal(one.grad.double().flatten(), each) for each in everyones([one.grad]))
            residuals = state.state_dict()["residuals"].values()
            assert {residual.dtype for residual in residuals} == (set() if codec is None else {torch.float32})
            state.close()


def test_parameters_of_16_bits_are_summed_in_float32(ranks: Pool) -> None:
    ranks(3, _mixed)


def _in_groups() -> tuple[float, float]:
    with process_group():
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group = groups[dist.get_rank() // 2]
        means = []
        for hook in (None, ringstrategy.ddp_hook(process_group=group, timeout=MINUTE)):
            model = DistributedDataParallel(Net(), process_group=group)
            if hook is not None:
                model.register_comm_hook(*hook)
            loss(model, 0).backward()
            means.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        hook[0].close()
        dist.barrier()  # the store ends with rank 0
        return float((means[0] - means[1]).abs().max()), float(means[1].sum())


def test_a_process_group_averages_alone(ranks: Pool) -> None:
    found = ranks(4, _in_groups)
    assert [far for far, _ in found] == [0.0] * 4
    assert found[0] == found[1] != found[2] == found[3]


def _dropped() -> int:
    with process_group():
        before = threading.active_count()
        for step in range(2):
            model = DistributedDataParallel(Net())
            state, hook = ringstrategy.ddp_hook(BlockInt(8), timeout=MINUTE)
            model.register_comm_hook(state, hook)
            loss(model, step).backward()
            assert threading.active_count() > before
            state.close()
            state.close()
            loss(model, step).backward()  # connects anew
            state.close()
        return threading.active_count() - before


def test_close_leaves_no_thread(ranks: Pool) -> None:
    assert ranks(2, _dropped) == [0, 0]


def _unused() -> tuple[bool, bool, bool]:
    with process_group(), hooked(BlockInt(4), feedback=True, find_unused_parameters=True) as (model, state):
        loss(model, 0).backward()
        model.zero_grad()
        before = state.state_dict()["residuals"]
        loss(model, 1, more=False).backward()
        after, weight = state.state_dict()["residuals"], "sometimes.weight"
        kept = torch.equal(before[weight], after[weight])
        return bool(before[weight].any()), model.module.sometimes.weight.grad is None, kept


def test_what_no_rank_used_loses_its_residual_as_the_page_says(ranks: Pool) -> None:
    for had_one, unused, kept in ranks(2, _unused):
        assert had_one
        assert unused
        assert not kept


def _alone() -> None:
    with process_group(), hooked(Sign()) as (model, state):
        loss(model, 0).backward()
        twin = Net()
        loss(twin, 0).backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        assert state.stats.bytes_sent == 0


def test_one_process_is_plain_training(ranks: Pool) -> None:
    ranks(1, _alone)


def _refused() -> None:
    with process_group(), hooked(BlockInt(8), feedback=True) as (model, state):
        train(model, torch.optim.SGD(model.parameters(), 0.1), range(2))
        saved = state.state_dict()
        with pytest.raises(ValueError, match=r"is of rank .*give each rank what it saved itself"):
            state.load_state_dict({**saved, "rank": 1 - saved["rank"]})
        with pytest.raises(ValueError, match=r"no place for the residual of gone"):
            state.load_state_dict({**saved, "residuals": {"gone": torch.zeros(1)}})
        other, _ = ringstrategy.ddp_hook(Identity(), module=model)
        with pytest.raises(ValueError, match=r"no place for the residual of \w+.*error_feedback"):
            other.load_state_dict(saved)


def test_states_of_others_are_refused(ranks: Pool) -> None:
    ranks(2, _refused)


def test_names_are_asked_for_where_they_are_needed() -> None:
    with pytest.raises(ValueError, match="pass module=model"):
        ringstrategy.ddp_hook(SmallExact(BlockInt(8)))
    with pytest.raises(ValueError, match="pass module=model"):
        ringstrategy.ddp_hook(BlockInt(8))[0].state_dict()
    with pytest.raises(ValueError, match=r"pass collective=Direct\(\)"):
        ringstrategy.ddp_hook(TopK(16))


def _sparse() -> None:
    with process_group():
        model = DistributedDataParallel(nn.Embedding(5, 3, sparse=True))
        state, hook = ringstrategy.ddp_hook(timeout=MINUTE)
        model.register_comm_hook(state, hook)
        with pytest.raises(Exception, match="sparse=False"):
            model(torch.tensor([1, 2])).sum().backward()
        dist.barrier()


def test_a_sparse_gradient_is_refused(ranks: Pool) -> None:
    ranks(2, _sparse)


def _different() -> str:
    with process_group():
        codec: Codec = BlockInt(8) if os.environ["RANK"] == "0" else Identity()
        with hooked(codec) as (model, state), pytest.raises(RuntimeError, match="PlanMismatchError") as raised:
            loss(model, 0).backward()
        assert isinstance(state.error, ringstrategy.PlanMismatchError)
        return str(raised.value)


def test_ranks_with_different_codecs_are_told(ranks: Pool) -> None:
    for said in ranks(2, _different):
        assert "rank 1 has" in said
        assert "Identity" in said


def _killed() -> tuple[str, int, float]:
    dist.init_process_group("gloo", timeout=MINUTE)
    with hooked(BlockInt(8)) as (model, state):
        train(model, torch.optim.SGD(model.parameters(), 0.1), range(2))
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match="PeerLostError: lost rank 1") as raised:
            train(model, torch.optim.SGD(model.parameters(), 0.1), range(2, 4))
        assert isinstance(state.error, ringstrategy.PeerLostError)
        return str(raised.value), state.error.rank, time.monotonic() - begin


def test_a_rank_that_dies_is_named(ranks: Pool) -> None:
    outcomes = ranks.outcomes(3, _killed, limit=50)
    assert outcomes[1][1] is not None
    for outcome, error in (outcomes[0], outcomes[2]):
        assert error is None, error
        said, rank, seconds = outcome
        assert rank == 1
        assert "in bucket 0" in said
        assert seconds < 30


ENDS = """
import os, sys, torch, torch.distributed as dist, ringstrategy
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(300, 300))
model.register_comm_hook(*ringstrategy.ddp_hook(ringstrategy.BlockInt(8)))
for step in range(5):
    if sys.argv[1] == "raise" and step == 3 and dist.get_rank() == 1:
        raise KeyError("of rank 1")
    model(torch.randn(2, 300)).sum().backward()
if sys.argv[1] == "destroy":
    dist.destroy_process_group()
"""


FORKS = """
import multiprocessing, os, sys
import torch, torch.distributed as dist, ringstrategy
from torch.nn.parallel import DistributedDataParallel

def run(rank):
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(300, 300))
    model.register_comm_hook(*ringstrategy.ddp_hook(ringstrategy.BlockInt(8)))
    for step in range(3):
        model(torch.randn(2, 300)).sum().backward()

processes = [multiprocessing.get_context("fork").Process(target=run, args=(rank,)) for rank in range(2)]
for process in processes:
    process.start()
for process in processes:
    process.join()
print([process.exitcode for process in processes])
"""


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_forked_processes_end_too_and_leave_whole_timelines(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    with reserve_port() as holder:
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(holder.getsockname()[1]), "WORLD_SIZE": "2"}
        asked = {"RINGSTRATEGY_TIMELINE": str(tmp_path / "timeline.json")}
        done = subprocess.run(
            [sys.executable, script],
            env={**os.environ, **world, **asked},
            capture_output=True,
            text=True,
            check=False,
            timeout=50,
        )
    assert done.stdout == "[0, 0]\n", done.stderr
    for rank in range(2):
        names = {event["name"] for event in json.loads((tmp_path / f"timeline.rank{rank}.json").read_text())}
        assert {"at step 2, in bucket 0", f"bucket 0: encode chunk {rank} hop 1", "bucket 0: wait hop 1"} <= names


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["return", "destroy", "raise"])
def test_processes_end_without_close(how: str, tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    with reserve_port() as holder:
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(holder.getsockname()[1]), "WORLD_SIZE": "2"}
        started = [
            subprocess.Popen(
                [sys.executable, script, how],
                env={**os.environ, **world, "RANK": str(rank)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            said = [process.communicate(timeout=50)[1] for process in started]
        finally:
            for process in started:
                process.kill()
    if how == "raise":
        assert "KeyError: 'of rank 1'" in said[1]
        assert "lost rank 1" in said[0]
        assert "KeyError: 'of rank 1'" in said[0]
    else:
        assert [process.returncode for process in started] == [0, 0], said
        assert said == ["", ""]
