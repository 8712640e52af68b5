"""Process groups of ours in the hands of torch: its collectives beside gloo's, HSDP, Lightning, and refusals."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from pool import Pool
from test_session import MINUTE
from torch.distributed._functional_collectives import all_reduce, reduce_scatter_tensor

from ringstrategy import AllReduce, BlockInt, GroupOptions, Identity, Native, PlanMismatchError
from ringstrategy.integrations.backends import BACKENDS
from ringstrategy.integrations.process_group import RingProcessGroup, _Works
from ringstrategy.names import STRATEGIES

BOUNDS = {"ring": 1e-6, "ring_fp16": 2e-3, "ring_bf16": 2e-2, "ring_fp8": 0.2, "ring_int8": 0.03}  # of the largest
BOUNDS |= {"ring_int4": 0.5, "ring_int2": 1.5, "ring_sign": 2.0}
SMALLER = {"ring": 0.99, "ring_fp16": 1.9, "ring_bf16": 1.9, "ring_fp8": 3.8, "ring_int8": 3.8}  # times fewer bytes
SMALLER |= {"ring_int4": 7, "ring_int2": 13, "ring_sign": 22}
NUMEL = 3 * 2 * 10_007  # not whole blocks


def data(rank: int, numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 + rank))


def begin() -> tuple[int, int]:
    dist.init_process_group("gloo", timeout=MINUTE)
    return dist.get_rank(), dist.get_world_size()


def made(backend: str, **kwargs: Any) -> RingProcessGroup:
    group = dist.new_group(backend=backend, **kwargs)
    assert isinstance(group, RingProcessGroup)
    return group


def sent_by(group: RingProcessGroup, collective: Callable[[], Any]) -> int:
    before = group.stats.bytes_sent or 0
    collective()
    return (group.stats.bytes_sent or 0) - before


def test_the_backends_are_the_names_that_average_at_once_without_residuals() -> None:
    averaging = {name for name, algorithm in STRATEGIES.items() if isinstance(algorithm(), AllReduce)}
    assert set(BACKENDS) == averaging - {"ring_topk"} == set(BOUNDS)


def check_equal(tensors: list[torch.Tensor], message: str = "") -> None:
    """On all ranks, bit for bit."""
    for mine in tensors:
        theirs = mine.clone()
        dist.broadcast(theirs, 0)
        assert torch.equal(mine, theirs), message


@on_ranks(2, 3)
def test_sums_and_means_of_floats_travel_encoded() -> None:
    rank, size = begin()
    everyone = torch.stack([data(rank).double() for rank in range(size)])
    exact, largest, whole = everyone.sum(0), everyone.abs().max() * size, NUMEL * 4 * (size - 1) / size
    for backend in BACKENDS:
        group, values, means = made(backend), data(rank), data(rank)
        shard, given, gathered = torch.empty(NUMEL // size), data(rank), torch.empty(NUMEL)

        def averages(group: Any = group, means: torch.Tensor = means) -> None:
            work = dist.all_reduce(means, dist.ReduceOp.AVG, group=group, async_op=True)
            assert work is not None
            assert torch.equal(work.get_future().wait()[0], means)
            assert work.is_completed()

        sent = [
            sent_by(group, lambda: dist.all_reduce(values, group=group)),  # noqa: B023
            sent_by(group, averages),
            sent_by(group, lambda: dist.reduce_scatter_tensor(shard, given, group=group)),  # noqa: B023
            sent_by(group, lambda: dist.all_gather_into_tensor(gathered, shard, group=group)),  # noqa: B023
        ]
        assert torch.equal(given, data(rank)), "the input of a reduce-scatter stays as it is"
        functional = all_reduce(data(rank), "avg", group) + 0
        check_equal([values, means, gathered, functional], backend)
        bound = BOUNDS[backend] * largest
        for found in (values, means * size, gathered, functional * size):
            error = (found - exact).abs().max()
            assert (0 if backend == "ring" else 1e-4) <= error < bound, backend
        mean_shard = reduce_scatter_tensor(data(rank), "avg", 0, group) + 0
        assert (mean_shard * size - exact.chunk(size)[rank]).abs().max() < bound, backend
        assert sent[0] == sent[1] < 2 * whole / SMALLER[backend], backend
        assert sent[2] < 1.01 * whole / SMALLER[backend], "a reduce-scatter is half an all-reduce"
        assert sent[3] == whole, backend


@on_ranks(3)
def test_all_else_is_torchs_and_counts_no_bytes() -> None:
    """What it gives is that of gloo: see the random programs."""
    rank, size = begin()
    group = made("ring_int4")
    for values, op in (
        (data(rank, (1 << 14) - 1), dist.ReduceOp.SUM),  # short
        (data(rank), dist.ReduceOp.MAX),
        ((data(rank) * 100).long(), dist.ReduceOp.SUM),
    ):
        dist.all_reduce(values, op, group=group)
    dist.broadcast(values, 1, group=group)
    dist.all_gather([torch.empty_like(values) for _ in range(size)], values, group=group)
    dist.barrier(group=group)
    assert (group.stats.bytes_sent, group.stats.exchanges) == (0, 0)
    dist.all_reduce(data(rank, 1 << 14), group=group)  # of as many bytes as travel encoded
    assert group.stats.bytes_sent
    assert (group.stats.exchanges, group.stats.steps, group.stats.exposed_seconds) == (1, None, None)


@on_ranks(3)
def test_kinds_and_shapes_of_tensors() -> None:
    rank, size = begin()
    encoded = made("ring", pg_options=GroupOptions(AllReduce(BlockInt(8)), exact_below=0))
    group = made("ring", pg_options=GroupOptions(AllReduce(), 0))
    for numel in (0, 1, 2, 255, 257):
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            values = data(rank, numel).to(dtype)
            dist.all_reduce(values, group=encoded)
            check_equal([values])
    transposed = data(rank, 600).view(20, 30).t()
    dist.all_reduce(transposed, group=made("ring", pg_options=AllReduce(Identity(), Native())))
    several = [data(rank, 100), data(rank, 33).view(3, 11)]
    dist.all_reduce_coalesced(several, group=group)
    parts = [torch.empty(5, 2), torch.empty(2)]
    dist.reduce_scatter_tensor(parts[0], data(rank, 30).view(15, 2), dist.ReduceOp.AVG, group=group)
    with dist._coalescing_manager(group):
        dist.reduce_scatter_tensor(parts[1], data(rank, 6), group=group)
    means, sums = torch.empty(15, 2), torch.empty(6)
    for whole, part in zip((means, sums), parts, strict=True):
        dist.all_gather_into_tensor(whole, part, group=group)
    for found, scale in ((transposed.t(), 1), *((each, 1) for each in several), (means, 1 / 3), (sums, 1)):
        exact = sum(data(r, found.numel()).double() for r in range(size)).view(found.shape)
        assert (found - exact * scale).abs().max() < 1e-5, found.shape
    half = data(rank, 40_000).bfloat16()
    assert sent_by(group, lambda: dist.all_reduce(half, group=group)) < 2 * 2 * 40_000
    rounded = sum(data(r, 40_000).bfloat16().double() for r in range(size))
    assert 0 < (half.double() - rounded).abs().max() < 0.1
    noisy = made("ring", pg_options=GroupOptions(AllReduce(BlockInt(4, rounding="stochastic")), 0))
    one, other = data(rank), data(rank)
    for values in (one, other):
        dist.all_reduce(values, group=noisy)
    assert not torch.equal(one, other), "the noise of two calls is the same"
    check_equal([one, other, transposed.contiguous(), *several, means, sums, half])


@on_ranks(2)
def test_sparse_tensors_are_torchs() -> None:
    rank, _ = begin()
    sums = [torch.sparse_coo_tensor([[rank, 2]], data(rank, 6).view(2, 3), (4, 3)) for _ in range(2)]
    dist.all_reduce(sums[0], group=made("ring", pg_options=GroupOptions(AllReduce(), 0)))
    dist.all_reduce(sums[1])
    assert torch.equal(*(total.to_dense() for total in sums))


# Random programs, beside gloo


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
DTYPES += [torch.int32, torch.int64, torch.uint8, torch.bool]
OPS = [*[dist.ReduceOp.SUM] * 4, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT, dist.ReduceOp.BAND]


class Step(NamedTuple):
    thread: int
    group: int
    call: str
    dtype: torch.dtype
    numel: int
    kind: str
    mode: Any
    op: dist.ReduceOp.RedOpType
    root: int


# Each gets a step, a group, a tensor, as many of them in a row as there are ranks, and apart, where results go too.
Calls = dict[str, Callable[..., Any]]
IN_PLACE: Calls = {
    "all_reduce": lambda s, g, x, *_: dist.all_reduce(x, s.op, group=g),
    "all_reduce_async": lambda s, g, x, *_: dist.all_reduce(x, s.op, group=g, async_op=True).wait(),
    "broadcast": lambda s, g, x, *_: dist.broadcast(x, s.root, group=g),
}
OTHERS: Calls = {  # no barrier: one of gloo raises the error of a reduction that it just refused, or not
    "coalesced": lambda s, g, x, row, _: dist.all_reduce_coalesced([x, row], s.op, group=g),
    "reduce": lambda s, g, x, *_: dist.reduce(x, s.root, s.op, group=g),
    "all_gather": lambda s, g, x, row, parts: dist.all_gather(parts, x, group=g),
    "all_gather_into_tensor": lambda s, g, x, row, _: dist.all_gather_into_tensor(row, x, group=g),
    "reduce_scatter": lambda s, g, x, row, parts: dist.reduce_scatter(x, list(row.chunk(len(parts))), s.op, group=g),
    "reduce_scatter_tensor": lambda s, g, x, row, _: dist.reduce_scatter_tensor(x, row, s.op, group=g),
    "coalesced_scatters": lambda *given: _scatter_together(*given),
    "wrong_scatter": lambda s, g, *_: dist.reduce_scatter_tensor(torch.empty(7), torch.empty(13), group=g),
    "wrong_gather": lambda s, g, *_: dist.all_gather_into_tensor(torch.empty(7), torch.empty(13), group=g),
    "gather": lambda s, g, x, row, parts: dist.gather(x, parts if dist.get_rank() == s.root else None, s.root, g),
    "scatter": lambda s, g, x, row, parts: dist.scatter(x, parts if dist.get_rank() == s.root else None, s.root, g),
    "all_to_all": lambda s, g, x, row, _: dist.all_to_all_single(row, row.clone(), group=g),
    "send": lambda *given: _send_around(*given),
    "objects": lambda s, g, x, row, parts: dist.all_gather_object(parts, x, group=g),
}


def _scatter_together(s: Step, group: Any, x: torch.Tensor, row: torch.Tensor, parts: list[torch.Tensor]) -> None:
    with dist._coalescing_manager(group):
        dist.reduce_scatter_tensor(x, row, s.op, group=group)
        dist.reduce_scatter_tensor(parts[0], row * 2, s.op, group=group)


def _send_around(s: Step, group: Any, x: torch.Tensor, row: torch.Tensor, parts: list[torch.Tensor]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    works = dist.isend(x, (rank + 1) % size, group=group), dist.irecv(parts[0], (rank - 1) % size, group=group)
    for work in works:
        work.wait()


def _steps(seed: int, size: int) -> list[Step]:
    draw = random.Random(seed)
    steps = []
    for _ in range(10):
        group, call = draw.randrange(3), draw.choice([*[*IN_PLACE] * 3, *OTHERS])
        # torch's own calls with other results make nodes of a graph for them, or refuse them outside of the mode
        kinds = ["plain", "inference", "graph", "leaf"] if call in IN_PLACE else ["plain"]
        mode = draw.choice([nullcontext, torch.no_grad, torch.inference_mode])
        drawn = draw.choice(DTYPES), draw.choice([0, 1, 2, 5, 300]), draw.choice(kinds), mode, draw.choice(OPS)
        steps.append(Step(group // 2, group, call, *drawn, draw.randrange(size)))
    return steps


def _left_behind(step: Step, x: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """By the call."""
    row = x.repeat(dist.get_world_size())
    parts = [part.clone() for part in row.chunk(dist.get_world_size())] if step.call == "scatter" else None
    parts = parts or [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    (IN_PLACE | OTHERS)[step.call](step, group, x, row, parts)
    if step.call == "reduce" and dist.get_rank() != step.root:
        return []
    return [x, row, *parts]


def _seen(tensor: torch.Tensor, in_place: bool) -> tuple[Any, ...]:
    """Its values, and what autograd knows of it."""
    version = tensor._version if in_place and not tensor.is_inference() else None
    return tensor.tolist(), tensor.requires_grad, tensor.is_inference(), version


def _outcome(step: Step, number: int, group: dist.ProcessGroup) -> Any:
    """Of a step. Sums of these numbers are exact in all dtypes."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + number)
    drawn = torch.randint(0, 3, (step.numel,), generator=generator).to(step.dtype)
    leaf = None
    if step.kind == "inference":
        with torch.inference_mode():
            drawn = drawn + 0
    elif step.kind != "plain" and (drawn.is_floating_point() or drawn.is_complex()):
        leaf = drawn.requires_grad_()
    try:
        x = leaf * 2 if leaf is not None and step.kind == "graph" else drawn
        with step.mode():
            x = x + 0 if step.kind == "plain" else x
            left = [_seen(tensor, step.call in IN_PLACE) for tensor in _left_behind(step, x, group)]
        if leaf is not None and step.kind == "graph":
            x.abs().sum().backward()
            left.append(leaf.grad.tolist())
        return left
    except (TypeError, ValueError, RuntimeError):
        return "an error"


def _programs(first: int, count: int) -> list[str]:
    """How the outcomes of random programs differ from those of gloo."""
    begin()
    groups = [made("ring", pg_options=GroupOptions(AllReduce(), draw)) for draw in (0, 0, 64)]
    twins = [dist.new_group(backend="gloo") for _ in groups]
    for group in groups:  # they connect in one order
        dist.all_reduce(torch.zeros(64), group=group)
    differ = []
    for seed in range(first, first + count):
        steps = _steps(seed, dist.get_world_size())
        outcomes: list[dict[int, Any]] = [{}, {}]

        def run(thread: int, of: list[Any], found: dict[int, Any], steps: list[Step] = steps) -> None:
            for number, step in enumerate(steps):
                if step.thread == thread:
                    found[number] = _outcome(step, number, of[step.group])

        for found, of in zip(outcomes, (groups, twins), strict=True):
            other = threading.Thread(target=run, args=(1, of, found))
            other.start()
            run(0, of, found)
            other.join()
        differ += [
            f"{seed}: {step}: {outcomes[0].get(number)} but gloo {outcomes[1].get(number)}"
            for number, step in enumerate(steps)
            if outcomes[0].get(number) != outcomes[1].get(number)
        ]
    return differ


@pytest.mark.skipif(torch.__version__ < "2.10", reason="its gloo ends the process where programs err on purpose")
@pytest.mark.parametrize(
    ("size", "first", "count"),
    [
        *((size, 0, 30) for size in (2, 3)),
        # a task may take 300 seconds
        *(pytest.param(2, first, 250, marks=pytest.mark.nightly) for first in range(1000, 3000, 250)),
    ],
)
def test_random_programs_have_gloos_results(ranks: Pool, size: int, first: int, count: int) -> None:
    assert ranks(size, _programs, first, count) == [[]] * size


# Threads and errors


@on_ranks(2)
def test_groups_have_two_threads_each_and_end_alone() -> None:
    rank, _ = begin()

    others = set(threading.enumerate())  # of earlier tests

    def ours() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread not in others and "ring" in thread.name]

    dist.all_reduce(data(rank), group=dist.new_group(backend="gloo"))
    assert ours() == []
    options = AllReduce(BlockInt(8), codec_threads=2)
    first, second = made("ring", pg_options=options), made("ring", pg_options=options)
    for group in (first, second):
        dist.all_reduce(data(rank, 4_000_000), group=group)
    working = [name for name in ours() if "codec" not in name]
    assert len(working) == 2 * 2, working
    dist.destroy_process_group(first)
    dist.all_reduce(data(rank, 4_000_000), group=second)  # on two threads still
    assert any("ringstrategy-codec" in name for name in ours())
    dist.destroy_process_group(second)
    assert ours() == [], ours()


@on_ranks(2)
def test_ranks_that_differ_are_told_how() -> None:
    rank, _ = begin()
    for numel, of_group, said in (
        (60_000 + 4 * rank, AllReduce(BlockInt(8)), "of process group"),
        (60_000, GroupOptions(AllReduce(BlockInt(8)), exact_below=rank), "exact_below: 1"),
    ):
        with pytest.raises((PlanMismatchError, RuntimeError), match="the ranks differ") as caught:
            dist.all_reduce(data(0, numel), group=made("ring", pg_options=of_group))
        assert said in str(caught.value)


@on_ranks(2)
def test_a_work_answers_as_gloos() -> None:
    rank, _ = begin()
    for group in (made("ring"), dist.new_group(backend="gloo")):
        dist.all_reduce(data(rank), group=group)  # connects
        for _ in range(20):
            values = data(rank)
            if rank == 1:
                dist.barrier()
            work = dist.all_reduce(values, group=group, async_op=True)
            assert work is not None
            if rank == 0:  # alone, so far
                assert not work.is_completed()
                with pytest.raises(RuntimeError, match=r"wait\(\) before result\(\)"):
                    work.result()
                dist.barrier()
            work.wait()
            assert work.is_completed()
            assert [tensor.data_ptr() for tensor in work.result()] == [values.data_ptr()]
        group.monitored_barrier(MINUTE, False)


def test_several_works_are_waited_for_each() -> None:
    works = [Mock(is_completed=Mock(return_value=done)) for done in (True, False)]
    both = _Works(works)
    assert not both.is_completed()
    assert both.wait()
    assert all(work.wait.called for work in works)


def test_torch_never_calls_a_backend_for_us() -> None:
    """It would hold Python's lock, which gloo's threads want while they hold a lock that the call wants."""
    (header,) = Path(torch.__file__).with_name("include").rglob("PyProcessGroup.hpp")  # in c10d, later in c10d/py
    text = header.read_text()
    overridden = set(re.findall(r"WORK_OVERRIDE\(\s*(?://.*\n\s*)?ProcessGroup,[^\n]*\n\s*(\w+),", text))
    assert {"allgather", "broadcast", "send", "recv", "barrier", "allreduce"} <= overridden
    either = re.findall(r'get_override\(\s*static_cast<const ProcessGroup\*>\(this\),\s*"(\w+)"', text)
    missing = {name for name in overridden | set(either) if not callable(vars(RingProcessGroup).get(name))}
    older = {"all_gather_single_coalesced", "reduce_scatter_single_coalesced"}  # where there is none, the older name is
    nccls = {"start_coalescing", "end_coalescing"}  # gloo has none
    assert missing <= older | nccls
