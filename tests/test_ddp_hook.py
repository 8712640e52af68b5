"""The communication hook for DDP: what DDP's buckets and options ask of it, how it ends, and what it refuses."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from jobs import Job
from jobs import job as job
from on_ranks import on_ranks
from test_session import MINUTE, gathered
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ringstrategy
from ringstrategy import BlockInt, Codec, Collective, Direct, Gaussian, Identity, Native, PlanMismatchError, Rotated
from ringstrategy.integrations.ddp_hook import DdpHookState
from ringstrategy.transport.futures import Futures, Promise

LOSSY = {
    "int8": (BlockInt(8), ringstrategy.Ring()),
    "int4": (Rotated(BlockInt(4)), None),
    "sign": (ringstrategy.Sign(), None),
    "topk": (ringstrategy.TopK(16), Direct()),
    "small": (ringstrategy.SmallExact(Rotated(Gaussian(2)), below=64), None),
}


@contextmanager
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", timeout=MINUTE)
    yield
    dist.barrier()  # or the store, which is rank 0's, may end before the others need it no more


class Net(nn.Module):
    """Awkward sizes, and one parameter in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(5 * 4 * 4, 61), nn.ReLU(), nn.Linear(61, 257))
        self.tail = nn.Linear(257, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(torch.tanh(self.head(self.convolution(x))))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Another one on each rank."""
    generator = torch.Generator().manual_seed(100 * step + int(os.environ["RANK"]))
    return torch.randn(4, 3, 6, 6, generator=generator), torch.randn(4, 3, generator=generator)


@contextmanager
def hooked(
    codec: Any = None,
    collective: Any = None,
    *,
    group: dist.ProcessGroup | None = None,
    module: nn.Module | None = None,
    feedback: bool = False,
    **of_ddp: Any,
) -> Iterator[tuple[DistributedDataParallel, DdpHookState]]:
    model = DistributedDataParallel(module or Net(), process_group=group, **{"bucket_cap_mb": 0.01, **of_ddp})
    state, hook = ringstrategy.ddp_hook(
        codec, collective, error_feedback=feedback, process_group=group, module=model, timeout=MINUTE
    )
    model.register_comm_hook(state, hook)
    try:
        yield model, state
    finally:
        state.close()


def loss(model: nn.Module, step: int) -> Tensor:
    inputs, targets = batch(step)
    return nn.functional.mse_loss(model(inputs), targets)


OPTIONS: list[dict[str, Any]] = [
    {"gradient_as_bucket_view": True},
    {"gradient_as_bucket_view": False, "bucket_cap_mb": 25},
    {"static_graph": True, "gradient_as_bucket_view": True},
]


@on_ranks(3)
def test_gradients_are_those_of_plain_ddp_whatever_its_options_in_a_process_group() -> None:
    """Of two ranks, which add in one order: bit for bit."""
    with process_group():
        pair = dist.new_group([0, 2])
        for of_ddp in OPTIONS if dist.get_rank() != 1 else ():
            with hooked(group=pair, **of_ddp) as (model, state):
                twin = DistributedDataParallel(Net(), process_group=pair, **{"bucket_cap_mb": 0.01, **of_ddp})
                for step in range(4):
                    for net in (model, twin):
                        net.zero_grad()
                        loss(net, step).backward()
                    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
                        assert torch.equal(one.grad, other.grad), (of_ddp, step)
                assert (state.stats.exchanges, state.stats.steps, state.stats.exposed_seconds) == (4, None, None)
                assert state.stats.bytes_sent


@on_ranks(2, 3)
def test_what_is_not_sent_is_in_the_residuals_also_when_ddp_changes_its_buckets() -> None:
    """What was delivered, and what residuals keep, is all there was, also when DDP cuts its buckets anew."""
    with process_group():
        for name, (codec, collective) in LOSSY.items():
            with hooked(codec, collective, feedback=True) as (model, state):
                alone, inner, counts = Net(), model.module, []
                saved: dict[str, Any] = {}
                copies: list[Tensor] = []
                given, got = (torch.zeros(sum(p.numel() for p in alone.parameters())).double() for _ in range(2))
                for step in range(4):
                    for net in (model, alone):
                        net.zero_grad()
                        loss(net, step).backward()
                    given += sum(gathered([p.grad for p in alone.parameters()])) / dist.get_world_size()
                    equal = gathered([p.grad for p in inner.parameters()])
                    assert all(torch.equal(equal[0], one) for one in equal), f"{name}: replicas differ"
                    got += equal[0]
                    assert all(map(torch.equal, saved.get("residuals", {}).values(), copies)), "it goes on with the run"
                    saved = state.state_dict()
                    copies = [residual.clone() for residual in saved["residuals"].values()]
                    kept = [saved["residuals"].get(n, torch.zeros_like(p)) for n, p in inner.named_parameters()]
                    counts.append(len(saved["buckets"]))
                    assert (given - got - sum(gathered(kept))).abs().max() < 1e-6, (name, step)
                    assert (given - got).abs().max() > 1e-4, "nothing was lost, so nothing was tested"
            assert counts[0] == 1
            assert counts[1] > 2, "DDP did not cut its buckets anew"


@on_ranks(2)
def test_each_step_has_another_rotation() -> None:
    with process_group(), hooked(Rotated(BlockInt(4))) as (model, _):
        found = []
        for _ in range(3):  # the first one is in other buckets
            model.zero_grad()
            loss(model, 0).backward()
            found.append(model.module.tail.weight.grad.clone())
        assert not torch.equal(found[1], found[2])


@on_ranks(2)
def test_backward_goes_on_during_exchanges() -> None:
    """They exchange nothing before the last bucket is there."""
    gate, sums = threading.Event(), Direct.sum_

    def gated(*args: Any, **kwargs: Any) -> None:
        assert gate.wait(60), "the hook waited for an exchange"
        sums(*args, **kwargs)

    with process_group(), patch.object(Direct, "sum_", gated):
        model, seen = DistributedDataParallel(Net(), bucket_cap_mb=0.01), []
        state, hook = ringstrategy.ddp_hook(collective=Direct(), timeout=MINUTE)

        def watched(state: DdpHookState, bucket: Any) -> Any:
            future = hook(state, bucket)
            seen.append(bucket.index())
            if bucket.is_last():
                gate.set()
            return future

        watched.__annotations__ = {}  # DDP compares them with types, and here they are strings
        model.register_comm_hook(state, watched)
        for step in range(2):
            gate.clear()
            seen.clear()
            loss(model, step).backward()
        state.close()
        assert len(seen) > 2


def mixed() -> nn.Module:
    """Layers of two dtypes."""
    torch.manual_seed(0)
    narrow, wide = nn.Linear(6, 40).bfloat16(), nn.Linear(40, 3)
    wide.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    return nn.Sequential(narrow, wide)


@on_ranks(3)
def test_parameters_of_16_bits_are_summed_in_float32() -> None:
    with process_group():
        for codec in (None, BlockInt(8)):
            with hooked(codec, module=mixed(), feedback=True) as (model, state):
                alone, (inputs, targets) = mixed(), batch(0)
                for net in (model, alone):
                    nn.functional.mse_loss(net(inputs[:, 0, 0].bfloat16()), targets).backward()
            for (name, one), other in zip(model.module.named_parameters(), alone.parameters(), strict=True):
                assert one.grad.dtype == one.dtype
                summands = [each.view(one.shape) / 3 for each in gathered([other.grad])]
                exact = sum(summands)
                # of 16 bits: rounded where they are sent, and not at each addition
                bound = 1e-6 if one.dtype == torch.float32 else 3 * 2**-8 * sum(each.abs() for each in summands)
                bound = bound if codec is None else exact.abs().max() * 0.02
                assert ((one.grad.double() - exact).abs() <= bound).all(), (codec, name)
                assert all(torch.equal(one.grad.double().flatten(), each) for each in gathered([one.grad]))
            if codec is None:  # and sent in 16
                assert state.stats.bytes_sent < 1.1 * 2 * 2 / 3 * (2 * 280 + 4 * 123)
            residuals = state.state_dict()["residuals"].values()
            assert {residual.dtype for residual in residuals} == (set() if codec is None else {torch.float32})


@pytest.mark.parametrize(
    ("codec", "collective"), [(BlockInt(8), None), (Identity(), Native())], ids=["tagged", "native"]
)
@on_ranks(2)
def test_two_hooks_on_one_group_average_in_one_backward(codec: Codec, collective: Collective | None) -> None:
    """As of twin critics, whose plans read alike."""
    with process_group(), ExitStack() as open_:
        one, other = (open_.enter_context(hooked(codec, collective, group=dist.group.WORLD))[0] for _ in range(2))
        for step in range(4):
            one.zero_grad()
            other.zero_grad()
            (loss(one, step) + 1024 * loss(other, step)).backward()
            mine, *others = gathered([p.grad for p in one.parameters() if p.grad is not None])
            assert all(torch.equal(mine, theirs) for theirs in others)
            for a, b in zip(one.parameters(), other.parameters(), strict=True):
                assert torch.equal(b.grad, 1024 * a.grad), step


# Errors


def test_a_future_raises_the_error_of_its_exchange_and_the_first_error_stays() -> None:
    futures, cpu = Futures(torch.device("cpu")), torch.device("cpu")
    promises = [Promise(number, cpu) for number in range(4)]
    first, second = Mock(**{"wait.side_effect": KeyError("first")}), Mock(**{"wait.side_effect": KeyError("second")})
    exchanges = [[Mock(), Mock()], [first], [Mock(), second], [Mock()]]
    for promise, each in zip(promises, exchanges, strict=True):
        futures.keep(promise, each)
    assert futures.close(60)
    assert all(exchange.wait.called for each in exchanges for exchange in each)
    assert (promises[0].future.wait(), promises[3].future.wait()) == (0, 3)
    for promise, said in ((promises[1], "first"), (promises[2], "second")):
        with pytest.raises(Exception, match=said):
            promise.future.wait()
    assert str(futures.error) == "'first'"


def test_an_exchange_waits_for_the_agreement_of_the_ranks_also_on_another_thread() -> None:
    """As over NCCL, where messages cannot carry it: plans are compared over gloo."""
    layer = nn.Linear(2, 2)
    state, _ = ringstrategy.ddp_hook(module=layer)
    peers = Mock(size=2, only_with=Mock(return_value=None), submit=lambda task, where: task())
    peers.control.submit.return_value.wait.side_effect = PlanMismatchError("the ranks differ")
    with patch.object(state, "_connect", return_value=peers), pytest.raises(PlanMismatchError):
        state._exchange(0, [(layer.bias, torch.zeros(2))], None)


@on_ranks(2)
def test_other_codecs_and_sparse_gradients_are_refused() -> None:
    with process_group():
        with hooked(BlockInt(8) if dist.get_rank() else Identity()) as (model, state):
            with pytest.raises(RuntimeError, match=r"PlanMismatchError.*rank 1 has"):
                loss(model, 0).backward()
            assert isinstance(state.error, PlanMismatchError)
        assert isinstance(state.error, PlanMismatchError), "it is forgotten when the hook is closed"
        model = DistributedDataParallel(nn.Embedding(5, 3, sparse=True))
        model.register_comm_hook(*ringstrategy.ddp_hook(timeout=MINUTE))
        with pytest.raises(Exception, match="sparse=False"):
            model(torch.tensor([1, 2])).sum().backward()


# The end of the process


def _ends(how: str) -> None:
    os.environ["RINGSTRATEGY_TIMELINE"] = "timeline.json"
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = DistributedDataParallel(nn.Linear(300, 300))
    model.register_comm_hook(*ringstrategy.ddp_hook(BlockInt(8)))
    for step in range(3):
        if how == "raise" and step == 2 and rank == 1:
            raise KeyError("of rank 1")
        model(torch.randn(2, 300)).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["return", "raise"])
def test_processes_end_without_close(how: str, job: Callable[..., Job]) -> None:
    ranks = job(2, _ends, how)
    codes = ranks.wait([0, 1])
    if how == "raise":
        assert "KeyError: 'of rank 1'" in ranks.output(1)
        assert "lost rank 1" in ranks.output(0)
        assert "KeyError: 'of rank 1'" in ranks.output(0)
        return
    assert codes == [0, 0]
    assert [ranks.output(rank) for rank in range(2)] == ["", ""]
    for rank in range(2):
        names = {event["name"] for event in json.loads((ranks.folder / f"timeline.rank{rank}.json").read_text())}
        assert {"at step 2, in bucket 0", f"bucket 0: encode chunk {rank} hop 1", "bucket 0: wait hop 1"} <= names
