"""Horovod's shape, on real processes with other data on each, against plain torch."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel
from on_ranks import on_ranks
from pairs import all_pairs
from pool import Pool
from test_session import MINUTE
from test_strategy import trainer_with
from torch import Tensor, nn

import ringstrategy
import ringstrategy.horovod as hvd
from ringstrategy.integrations.horovod import elastic, named, operations, world


@contextlib.contextmanager
def horovod(**how: Any) -> Iterator[int]:
    hvd.init(timeout=MINUTE, **how)
    try:
        yield hvd.rank()
    except BaseException as error:
        hvd.tell(error)
        raise
    finally:
        hvd.shutdown()


def data(rank: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + rank))


def everyones(size: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.stack([data(rank, *shape, seed=seed).double() for rank in range(size)])


def close(found: Tensor, expected: Tensor, bound: float = 1e-5, cell: object = "") -> None:
    assert found.shape == expected.shape, cell
    assert found.numel() == 0 or (found.double() - expected.double()).abs().max() <= bound, cell


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


# Operations

FORMS = [
    *("allreduce", "allreduce_", "allreduce_async", "allreduce_async_"),
    *("grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"),
    *("reducescatter", "reducescatter_async", "grouped_reducescatter", "grouped_reducescatter_async"),
    *("allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async"),
    *("broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "alltoall", "alltoall_async"),
]
KINDS = ["allreduce", "reducescatter", "allgather", "broadcast", "alltoall"]
EXACT: dict[Any, Callable[[Tensor], Tensor]] = {
    hvd.Average: lambda rows: rows.mean(0),
    hvd.Sum: lambda rows: rows.sum(0),
    hvd.Min: lambda rows: rows.amin(0),
    hvd.Max: lambda rows: rows.amax(0),
    hvd.Product: lambda rows: rows.prod(0),
}
SHAPES = [(1,), (0,), (), (2, 0), (2, 3), (3, 257), (4, 1), (5,), (6, 2)]  # rows that 2 or 3 ranks cannot share alike
ADDED = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int16]
MOVED = [torch.bool, torch.uint8, torch.complex64]
FACTORS = [(1.0, 1.0), (2.0, 1.0), (1.0, 0.25)]


def kind_of(form: str) -> str:
    return next(kind for kind in KINDS if kind in form)


def called(form: str, tensors: list[Tensor], **how: Any) -> list[Tensor]:
    """Of a group its results, else the one result."""
    arguments = [1] if kind_of(form) == "broadcast" else []
    grouped = form.startswith("grouped")
    result = getattr(hvd, form)(tensors if grouped else tensors[0], *arguments, **how)
    result = hvd.synchronize(result) if "async" in form else result
    return result if grouped else [result]


def twin_of(kind: str, xs: list[Tensor], op: Any, before: float = 1, after: float = 1) -> list[Tensor]:
    """Each rank's result, of all ranks' tensors."""
    size = len(xs)
    if kind == "allgather":
        return [torch.cat(xs)] * size
    if kind == "broadcast":
        return [xs[1]] * size
    if kind == "alltoall":
        return [torch.cat([x.chunk(size)[rank] if len(x) else x for x in xs]) for rank in range(size)]
    whole = EXACT[op](torch.stack(xs) * before) * after
    if kind == "allreduce":
        return [whole] * size
    return list(whole.split([len(whole) // size + (rank < len(whole) % size) for rank in range(size)]))


def inputs(kind: str, shape: tuple[int, ...], dtype: torch.dtype, size: int, seed: int) -> list[Tensor]:
    """Of each rank; other rows on each where that may be."""
    if kind in ("allgather", "alltoall"):
        rows = [rank if kind == "allgather" else size for rank in range(size)]
        shapes = [(shape[0] * each, *shape[1:]) for each in rows]
    else:
        shapes = [shape] * size
    values = [4 * data(rank, *each, seed=seed) for rank, each in enumerate(shapes)]
    return [(each if dtype.is_floating_point or dtype.is_complex else each.long()).to(dtype) for each in values]


@on_ranks(2, 3)
def test_operations_have_the_results_of_one_process() -> None:
    with horovod() as rank:
        size = hvd.size()
        for cell in all_pairs(FORMS, EXACT, SHAPES, ADDED + MOVED, FACTORS):
            form, op, shape, dtype, factors = cell
            kind, floats = kind_of(form), dtype.is_floating_point
            moves = kind in ("allgather", "broadcast", "alltoall")
            if (not shape and kind not in ("allreduce", "broadcast")) or (dtype in MOVED and not moves):
                continue
            before, after = factors if floats and not moves else (1.0, 1.0)
            how = {} if moves else {"op": op, "prescale_factor": before, "postscale_factor": after}
            shapes = [shape, (3, 2)] if form.startswith("grouped") else [shape]
            everyones = [inputs(kind, each, dtype, size, seed) for seed, each in enumerate(shapes)]
            given = [xs[rank].clone() for xs in everyones]
            results = called(form, given, **how)
            for found, mine, xs in zip(results, given, everyones, strict=True):
                exact = twin_of(kind, xs if moves else [x.double() for x in xs], op, before, after)[rank]
                assert found.dtype == dtype, cell
                assert (found is mine) == form.endswith("_"), cell
                assert form.endswith("_") or torch.equal(mine, xs[rank]), cell
                if moves:
                    assert torch.equal(found, exact), cell
                    continue
                exact = exact if floats else exact.floor()
                rounding = max(torch.finfo(dtype).eps, 1e-6) if floats else 0
                close(found, exact, rounding * max(1, exact.abs().max().item() if exact.numel() else 1), cell)


@on_ranks(2, 3)
def test_gradients_flow_back_as_in_one_process() -> None:
    """Each rank's loss is the product with weights of its own; the twin sums them over all ranks, in float64."""
    with horovod() as rank:
        size = hvd.size()
        times = {"reducescatter": size, "allgather": 1 / size, "broadcast": 1 / size}  # Horovod's factors
        forms = [form for form in FORMS if "async" not in form and not form.endswith("_")]
        for form, op, (before, after) in all_pairs(forms, [hvd.Average, hvd.Sum], FACTORS):
            kind, cell = kind_of(form), (form, op)
            reduces = {"op": op, "prescale_factor": before, "postscale_factor": after}
            seeds = range(2 if form.startswith("grouped") else 1)  # two tensors travel as one operation
            mine = [data(rank, 2 * size, 2, seed=seed).requires_grad_() for seed in seeds]
            found = called(form, mine, **(reduces if "reduce" in kind else {}))
            for y in found:
                y.add_(0)  # not views of one memory, which autograd would refuse
            weights = [[data(r, *y.shape, seed=7 + i) for r in range(size)] for i, y in enumerate(found)]
            sum((y * w[rank]).sum() for y, w in zip(found, weights, strict=True)).backward()
            for i, (x, y) in enumerate(zip(mine, found, strict=True)):
                xs = [data(r, 2 * size, 2, seed=i).double().requires_grad_() for r in range(size)]
                ys = twin_of(kind, xs, op, before, after)
                close(y, ys[rank], cell=cell)
                sum((each * w).sum() for each, w in zip(ys, weights[i], strict=True)).backward()
                exact = torch.zeros_like(x) if xs[rank].grad is None else times.get(kind, 1) * xs[rank].grad
                close(x.grad, exact, cell=cell)
        features, mask = hvd.grouped_allgather([data(rank, 2).requires_grad_(), torch.tensor([True])])
        features.sum().backward()
        assert mask.all()
        uneven = data(rank, rank + 1, 2).requires_grad_()
        hvd.allgather(uneven).square().sum().backward()
        close(uneven.grad, 2 * uneven)


@on_ranks(2, 3)
def test_sums_are_wide_and_each_rank_may_get_another_number_of_rows() -> None:
    with horovod() as rank:
        size = hvd.size()
        large = torch.full((9,), 40_000.0 + 32 * rank, dtype=torch.float16)  # whose sum has no place in 16 bits
        found = [hvd.allreduce(large), hvd.allreduce(large, op=hvd.Sum, postscale_factor=1 / size)]
        for average in (*found, hvd.reducescatter(large.repeat(size))):
            assert average.tolist() == torch.full((9,), 40_000.0 + 16 * (size - 1)).half().tolist()
        close(hvd.allreduce_(data(rank, 6, 4).T), everyones(size, 6, 4).mean(0).T)
        splits = torch.tensor([(rank + to) % 3 for to in range(size)])  # to each another number, to some none
        for exchange in (hvd.alltoall, lambda *given: hvd.alltoall_async(*given)()):
            arrived, received = exchange(torch.full((int(splits.sum()), 2), float(rank)), splits)
            assert received.tolist() == [(r + rank) % 3 for r in range(size)]
            assert arrived.tolist() == [[float(r)] * 2 for r in range(size) for _ in range((r + rank) % 3)]
        hvd.barrier()


BOUNDS = {"none": 1e-5, "fp16": 5e-3, "bf16": 5e-2, "fp8": 0.3, "int8": 0.06, "int4": 1.0, "top": 4.0}
CODECS = {name: getattr(hvd.Compression, name, ringstrategy.TopK(4)) for name in BOUNDS}


@on_ranks(3)
def test_averages_travel_through_codecs_and_all_ranks_get_the_same_bits() -> None:
    with horovod() as rank:
        mean, sizes = everyones(3, 9000).mean(0), {}
        for name, codec in CODECS.items():
            before = hvd.stats().bytes_sent
            whole = hvd.allreduce(data(rank, 9000), compression=codec)
            sizes[name] = hvd.stats().bytes_sent - before
            assert torch.equal(whole, hvd.broadcast(whole, 0)), name
            shares = hvd.allgather(hvd.reducescatter(data(rank, 9000), compression=codec))
            for found in (whole, shares):
                close(found, mean, BOUNDS[name], name)
                assert name == "none" or (found - mean).abs().max() > 1e-5, name
            smaller = {"none": 1, "top": 0, "int8": 3.4}.get(name, 1.7)  # times fewer bytes than float32
            assert 0 < smaller * sizes[name] <= sizes["none"] or (name == "top" and sizes[name]), name
        noisy = ringstrategy.BlockInt(4, rounding="stochastic")
        one, other = (hvd.allreduce(data(rank, 9000), compression=noisy) for _ in range(2))
        assert not torch.equal(one, other), "the noise of two operations is the same"


@on_ranks(3)
def test_sparse_sums_may_have_other_rows_on_each_rank() -> None:
    with horovod() as rank:
        size = hvd.size()
        mine = [torch.zeros(7, 2).index_add(0, torch.tensor([r, r + 2]), data(r, 2, 2)) for r in range(size)]
        for op in (hvd.Sum, hvd.Average):
            handle = hvd.sparse_allreduce_async(mine[rank].to_sparse(1), "rows", op)
            total = hvd.synchronize(handle)
            assert hvd.poll(handle)
            assert handle() is total
            assert total.is_sparse
            close(total.to_dense(), EXACT[op](torch.stack(mine)))
        whole = torch.tensor([0, 2**60 + rank]).to_sparse()
        total = hvd.synchronize(hvd.sparse_allreduce_async(whole, "whole", hvd.Sum))
        assert total.to_dense().tolist() == [0, 2**60 * size + sum(range(size))]
        rows = mine[rank].to_sparse(1)
        for other, op in ((rows, (hvd.Sum, hvd.Average)[rank % 2]), (mine[rank][: 7 - rank].to_sparse(1), hvd.Sum)):
            with pytest.raises(ringstrategy.PlanMismatchError):
                hvd.synchronize(hvd.sparse_allreduce_async(other, None, op))
        for tensor, op in ((mine[rank], hvd.Sum), (rows, hvd.Max), (whole, hvd.Average)):
            with pytest.raises(ValueError, match=r"takes a sparse tensor|averages floating-point"):
                hvd.sparse_allreduce_async(tensor, "rows", op)


POSITIONS = {  # of Horovod 0.28.1's arguments
    "tensor name process_set": [hvd.allgather, hvd.allgather_async],
    "tensor average name compression op prescale_factor postscale_factor process_set": [hvd.allreduce],
    "tensor average name op prescale_factor postscale_factor process_set": [hvd.allreduce_, hvd.allreduce_async],
    "tensor splits name process_set": [hvd.alltoall],
    "tensor root_rank name process_set": [hvd.broadcast, hvd.broadcast_],
    "tensors name process_set": [hvd.grouped_allgather],
    "tensors average name compression op prescale_factor postscale_factor process_set": [hvd.grouped_allreduce],
    "tensors average name op prescale_factor postscale_factor process_set": [hvd.grouped_allreduce_],
    "tensors name compression op process_set prescale_factor postscale_factor": [hvd.grouped_reducescatter],
    "tensor name compression op process_set prescale_factor postscale_factor": [hvd.reducescatter],
    "tensor name op process_set prescale_factor postscale_factor": [hvd.reducescatter_async],
    "tensor name op process_set": [hvd.sparse_allreduce_async],
    "file_path mark_cycles": [hvd.start_timeline],
}


def test_arguments_have_horovods_places() -> None:
    for theirs, functions in POSITIONS.items():
        for function in functions:
            names = list(inspect.signature(function).parameters)
            assert " ".join(names).startswith(theirs), function


@on_ranks(2)
def test_results_go_into_any_tensor_and_autograd_sees_no_change() -> None:
    with horovod() as rank:
        for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
            leaf = torch.ones(5, requires_grad=True)
            in_graph = leaf * (rank + 1)
            square = in_graph.square()  # keeps it for backward
            with mode():
                made_here = torch.full((5,), rank + 1.0)
                parameter = nn.Parameter(torch.full((5,), rank + 1.0))
                for values in (in_graph, made_here, parameter):
                    assert hvd.allreduce_(values) is values
                    assert hvd.grouped_allreduce_([values])[0] is values
                    assert values.tolist() == [1.5] * 5
                for values, scale in ((made_here, 1), (parameter, 2)):
                    values.data.fill_(scale * rank)
                    assert hvd.broadcast_(values, 1) is values
                    assert values.tolist() == [scale] * 5
                    values.data.fill_(3 * rank)
                hvd.broadcast_parameters({"weight": parameter, "made": made_here}, 1)
                assert made_here.tolist() == parameter.tolist() == [3.0] * 5
            square.sum().backward()
            assert leaf.grad.tolist() == [2 * 1.5 * (rank + 1)] * 5


# Names


@on_ranks(3)
def test_operations_belong_together_by_name() -> None:
    with horovod() as rank:
        names = [f"layer{i}.weight" for i in range(40)]
        mine = names if rank == 0 else names[::-1] if rank == 1 else names[1::2] + names[::2]
        for round_ in range(2):  # names may come again
            values = {name: torch.tensor([float((i + round_) * 10**rank)]) for i, name in enumerate(names)}
            handles = {name: hvd.allreduce_async(values[name], name=name) for name in mine}
            for i, name in enumerate(names):
                assert hvd.synchronize(handles[name]).item() == pytest.approx((i + round_) * 111 / 3, abs=1e-4)
        assert all(map(hvd.poll, handles.values()))
        # some wait for one before they submit the other
        if rank == 0:
            first, second = (hvd.allreduce_async(torch.ones(1), name=name) for name in ("first", "second"))
            hvd.synchronize(first)
            hvd.synchronize(second)
        else:
            hvd.allreduce(torch.ones(1), name="second")
            hvd.allreduce(torch.ones(1), name="first")
        hvd.barrier()
        before = store().num_keys()
        hvd.barrier()
        for i in range(2 * named._TOGETHER):  # what was done is deleted from the store
            hvd.allreduce(torch.ones(1), name=f"noname {i}")
        assert store().num_keys() < before + named._TOGETHER
        hvd.barrier()


DIFFERENT: dict[str, Callable[[int], Any]] = {  # what is said of the ranks
    "float32 (3) on cpu; rank 1 has allreduce: Average, float32 (4)": lambda rank: hvd.allreduce(torch.ones(3 + rank)),
    "Sum, float32": lambda rank: hvd.allreduce(torch.ones(3), op=(hvd.Sum, hvd.Average)[rank]),
    "(rows, 3)": lambda rank: hvd.allgather(torch.ones(2, 3 + rank)),
    "from rank 0": lambda rank: hvd.broadcast(torch.ones(2), rank),
    "BlockInt(": lambda rank: hvd.allreduce(torch.ones(3), compression=CODECS[("int8", "none")[rank]]),
    "rank 0 has allgather": lambda rank: (hvd.allreduce if rank else hvd.allgather)(torch.ones(3), name="kind"),
}


@on_ranks(2)
def test_ranks_that_differ_are_told_how() -> None:
    with horovod() as rank:
        for words, call in DIFFERENT.items():
            with pytest.raises(ringstrategy.PlanMismatchError, match=re.escape(words)):
                call(rank)
        close(hvd.allreduce(torch.ones(1) * rank), torch.tensor([0.5]))  # it goes on


@on_ranks(2)
def test_ranks_that_wait_for_different_names_are_told_which_and_exchange_nothing_more() -> None:
    with mock.patch.object(named, "_LOOK_SECONDS", 0.05), horovod() as rank:
        if rank == 0:  # looks around in vain while rank 1 computes, which is no reason to give up
            looks: list[str] = []

            def look(where: str) -> None:
                looks.append(where)
                if len(looks) == 2 * named._LOOKS_FOR_DEADLOCK:
                    store().set("looked", "")

            with mock.patch.object(hvd.global_process_set.members.operations, "_look", look):
                hvd.allreduce(torch.ones(1), name="late")
        else:
            store().wait(["looked"])
            hvd.allreduce(torch.ones(1), name="late")
        with pytest.raises(ringstrategy.PlanMismatchError) as raised:
            hvd.allreduce(torch.ones(1), name=("loss", "accuracy")[rank])
        if rank == 1:
            store().wait(["rank 0 goes on"])
        for name in ("loss", "later"):  # the first would get what was meant for an earlier call
            with pytest.raises(ringstrategy.PlanMismatchError, match=r"rank \d waits for"):
                hvd.allreduce(torch.ones(1), name=name)
        store().set("rank 0 goes on", "")
        hvd.tell(raised.value)
        said = [f"rank {r} waits for {name!r}" for r, name in enumerate(("loss", "accuracy"))]
        assert f"{said[rank]}, which rank {1 - rank} has not submitted; {said[1 - rank]}" in str(raised.value)


@on_ranks(2)
def test_it_begins_anew_if_somebody_has_destroyed_the_process_group() -> None:
    hvd.init(timeout=MINUTE)
    layer = nn.Linear(2, 3)
    hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), 1.0), layer.named_parameters())
    assert hvd.allreduce(torch.tensor(hvd.rank() + 1.0), op=hvd.Sum) == 3
    hvd.barrier()
    dist.destroy_process_group()
    with horovod() as rank:
        assert hvd.allreduce(torch.tensor(rank + 1.0), op=hvd.Sum) == 3


def _one_dies() -> str:
    hvd.init(timeout=MINUTE)
    hvd.barrier()
    with mock.patch.object(named, "_LOOK_SECONDS", 0.05):
        if hvd.rank() == 1:
            while len(hvd.global_process_set.members.operations._waiting()) < 2:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(hvd.HorovodInternalError) as raised:
            hvd.allreduce(torch.ones(1), name="loss")
    hvd.tell(raised.value)
    hvd.shutdown()
    return str(raised.value)


def test_who_waits_for_a_dead_rank_is_told(ranks: Pool) -> None:
    outcomes = ranks.outcomes(3, _one_dies)
    for rank in (0, 2):
        said, error = outcomes[rank]
        assert error is None, error
        assert re.match(r"lost rank 1 .* in 'loss'", said), said


# Who the ranks are


NODES = {  # by where ranks are: what each has as rank, size, local rank and size, number of its node and of nodes
    (0, 0, 1): [[0, 3, 0, 2, 0, 2], [1, 3, 1, 2, 0, 1], [2, 3, 0, 1, 1, 2]],
    (0, 1): [[0, 2, 0, 1, 0, 2], [1, 2, 0, 1, 1, 2]],
}


@on_ranks(2, 3)
def test_ranks_of_nodes() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    nodes = next(nodes for nodes in NODES if len(nodes) == size)
    os.environ["GROUP_RANK"] = str(nodes[rank])
    with horovod():
        hvd.init()  # does nothing
        assert hvd.is_initialized()
        hvd.barrier()  # or one may leave while another still connects
        local = hvd.local_rank(), hvd.local_size()
        assert [hvd.rank(), hvd.size(), *local, hvd.cross_rank(), hvd.cross_size()] == NODES[nodes][rank]
        assert hvd.is_homogeneous() == (size == 2)


def test_who_has_the_store_leaves_last() -> None:
    store = mock.Mock(add=mock.Mock(side_effect=[1, 2, 2, 3]))  # what it says, each time that it is asked
    with mock.patch.object(world, "has_agent_store", return_value=False):
        world.World(0, 3, ["host"] * 3, MINUTE, dist.group.WORLD, True, store).say_goodbye()
    assert store.add.call_count == 4


@on_ranks(1)
def test_one_process_needs_no_launcher() -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    for _ in range(2):  # it can begin anew
        with horovod() as rank:
            assert (rank, hvd.size(), hvd.local_size(), hvd.cross_size()) == (0, 1, 1, 1)
            values = data(0, 5)
            for same in (hvd.allreduce, hvd.allgather, hvd.reducescatter, hvd.alltoall, lambda x: hvd.broadcast(x, 0)):
                close(same(values), values, 0)
        assert not hvd.is_initialized()
        assert not dist.is_initialized()
    assert not any(built() for built in (hvd.mpi_built, hvd.mpi_enabled, hvd.mpi_threads_supported, hvd.ddl_built))
    assert hvd.gloo_built()


# Wrong calls


def bad_calls(ones: Tensor, model: nn.Module) -> list[tuple[str, Callable[[], Any]]]:
    pairs, outside = [*model.named_parameters()], hvd.add_process_set([0])
    joins, int8 = ringstrategy.AllReduce(uneven="join"), CODECS["int8"]
    return [
        ("not both", lambda: hvd.allreduce(ones, average=True, op=hvd.Sum)),
        ("floating-point tensors, got torch.int64", lambda: hvd.allreduce(ones.long(), compression=int8)),
        (r"root_rank is one of the ranks \[0, 1\], got 2", lambda: hvd.broadcast(ones, 2)),
        ("there is no average of bools", lambda: hvd.allreduce(ones.bool())),
        ("does not come out even: pass splits=", lambda: hvd.alltoall(ones)),
        ("how many of 3 rows each of 2 ranks gets", lambda: hvd.alltoall(ones, [1, 1])),
        ("Max is not differentiable", lambda: hvd.allreduce(ones.clone().requires_grad_(), op=hvd.Max)),
        ("is in use already", lambda: hvd.add_process_set([0, 1])),
        (r"\['0.weight'\] twice", lambda: hvd.DistributedOptimizer(momentum(model), pairs + pairs[:1])),
        (
            r"hvd.join\(\) is for all ranks",
            lambda: hvd.DistributedOptimizer(momentum(model), pairs, algorithm=joins, process_set=outside),
        ),
    ]


@on_ranks(2)
def test_what_would_go_wrong_gets_the_cure() -> None:
    for early in (hvd.rank, hvd.barrier, lambda: hvd.allreduce(torch.ones(1)), hvd.global_process_set.size):
        with pytest.raises(ValueError, match=r"call hvd.init\(\) first"):
            early()
    with pytest.raises(ValueError, match="\"dynamic\", got 'static'"):
        hvd.init(process_sets="static")
    with horovod() as rank:
        ones, model = torch.ones(3), network()
        for message, call in bad_calls(ones, model):
            with pytest.raises(ValueError, match=message):
                call()
        with pytest.raises(ringstrategy.PlanMismatchError, match="broadcast_parameters"):
            hvd.broadcast_parameters({f"name{rank}": torch.ones(2)}, 0)
        if rank == 0:
            held = hvd.allreduce_async(ones, name="held")
            with pytest.raises(ValueError, match="an operation named 'held' is under way"):
                hvd.allreduce_async(ones, name="held")
            hvd.barrier()
        else:
            hvd.barrier()
            held = hvd.allreduce_async(ones, name="held")
        hvd.synchronize(held)

        optimizer = wrapped(model)
        with pytest.raises(ValueError, match="wrap it once"):
            hvd.DistributedOptimizer(optimizer, model.named_parameters())
        with pytest.raises(ValueError, match=r"these parameters already: call its close\(\)"):
            wrapped(model)
        optimizer.close()
        optimizer = wrapped(model)
        loss_of(model, rank, 0).backward()
        with pytest.raises(RuntimeError, match=r"zero_grad\(\) came after backward\(\) and before step"):
            optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"call optimizer\.synchronize"), optimizer.skip_synchronize():
            optimizer.step()
        with pytest.raises(RuntimeError, match="more than backward_passes_per_step=1 times"):
            loss_of(model, rank, 0).backward()

        for change in (
            lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
            lambda model: model[2].weight.grad.mul_(2),
            lambda model: setattr(model[2].weight, "grad", torch.zeros(30, 40)),
        ):
            model = network()
            optimizer = wrapped(model)
            loss_of(model, rank, 0).backward()
            change(model)
            with pytest.raises(RuntimeError, match=r"changed between backward\(\) and .* call optimizer.synchronize"):
                optimizer.step()
        hvd.tell(RuntimeError("the end of a test"))  # exchanges that were begun do not end
        model = network()  # a rank with parameters of its own clips gradients of its own
        optimizer = wrapped(model, algorithm="local_sgd")
        loss_of(model, rank, 0).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


# Optimizers


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs, targets = data(rank, 8, 6, seed=10 + step), data(rank, 8, 3, seed=50 + step)
    loss: Tensor = nn.functional.mse_loss(model(inputs), targets)
    return loss


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def wrapped(model: nn.Module, **how: Any) -> Any:
    return hvd.DistributedOptimizer(momentum(model), model.named_parameters(), **how)


def trained(
    model: nn.Module, optimizer: Any, ranks: list[int], steps: int, *, factor: float = 1, clip: float | None = None
) -> dict[str, Tensor]:
    """Steps with the gradients of these ranks' data; their sum is ours if `ranks` is this one alone."""
    for step in range(steps):
        optimizer.zero_grad()
        for rank in ranks:
            (loss_of(model, rank, step) * factor / len(ranks)).backward()
        if clip is None:
            optimizer.step()
            continue
        distributed = hasattr(optimizer, "skip_synchronize")
        if distributed:
            optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        with optimizer.skip_synchronize() if distributed else contextlib.nullcontext():
            optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def twin(size: int, steps: int, **how: Any) -> dict[str, Tensor]:
    """One process that computes the gradients of all ranks."""
    model = network()
    return trained(model, momentum(model), [*range(size)], steps, **how)


def same_everywhere(model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        assert torch.equal(value, hvd.broadcast(value, 0)), name


def check_twin(model: nn.Module, expected: dict[str, Tensor], bound: float = 1e-5, cell: object = "") -> None:
    same_everywhere(model)
    for name, value in model.named_parameters():
        close(value.detach(), expected[name], bound, (cell, name))


@on_ranks(2, 3)
def test_sums_clipping_closures_and_warnings() -> None:
    """Means, accumulation and codecs are laws of all doors."""
    with horovod() as rank:
        size = hvd.size()
        for how, ours, of_twin in (
            ({"op": hvd.Sum}, {"factor": 0.1}, {"factor": 0.1 * size}),
            ({}, *[{"clip": 0.3}] * 2),
        ):
            model = network()
            optimizer = wrapped(model, **how)
            trained(model, optimizer, [rank], 3, **ours)
            check_twin(model, twin(size, 3, **of_twin), cell=ours)

        model = network()
        inner = momentum(model)
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), hvd.Compression.fp16, 2)
        assert optimizer is inner
        assert type(optimizer).__name__ == "SGD"
        assert optimizer.session.algorithm.codec == hvd.Compression.fp16
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)  # which patches `step`
        optimizer.set_backward_passes_per_step(1)

        def closure(step: int) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            loss.backward()
            return loss

        close(optimizer.step(lambda: closure(0)), loss_of(network(), rank, 0).detach())
        optimizer.step(closure=lambda: closure(1))
        closure(2)
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="skip_synchronize"):
            optimizer.step()
        check_twin(model, twin(size, 3), 1e-3)
        assert optimizer.session.stats.steps == 3


@on_ranks(2)
def test_buckets_travel_while_backward_goes_on() -> None:
    begun, last = threading.Event(), []

    def noted(*args: Any, **kwargs: Any) -> None:
        begun.set()
        sums(*args, **kwargs)

    sums = ringstrategy.Direct.sum_
    with mock.patch.object(ringstrategy.Direct, "sum_", noted), horovod() as rank:
        model = network()
        algorithm = ringstrategy.AllReduce(collective=ringstrategy.Direct(), bucket_mb=1e-4)
        optimizer = wrapped(model, algorithm=algorithm)
        begun.clear()  # the agreement on parameters is over
        model[0].weight.register_hook(lambda gradient: last.append(begun.wait(60)))
        loss_of(model, rank, 0).backward()
        optimizer.step()
        assert last == [True], "exchanges wait for the end of backward"


def bag() -> nn.Module:
    """With a parameter that nobody uses."""
    model = nn.Sequential(nn.EmbeddingBag(50, 4, sparse=True, mode="sum"), nn.Linear(4, 2))
    model.gate = nn.Parameter(torch.ones(2))
    return model


@on_ranks(2)
def test_sparse_parameters() -> None:
    with horovod() as rank:
        index, sgd = [torch.tensor([[r, 7, 3 * r + 1]]) for r in range(hvd.size())], partial(torch.optim.SGD, lr=0.5)
        rows: list[tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = [
            (bag, sgd, {"sparse_as_dense": True}),
            (bag, sgd, {"sparse": ["0.weight"]}),
            (lambda: nn.Embedding(50, 4, sparse=True), torch.optim.SparseAdam, {}),  # its class says that rows travel
        ]
        for make, made, how in rows:
            model, single = make(), make()
            hvd.broadcast_parameters(model.state_dict(), 0)
            single.load_state_dict(model.state_dict())
            names = model.named_parameters() if how else None
            optimizer, own = hvd.DistributedOptimizer(made(model.parameters()), names, **how), made(single.parameters())
            for _ in range(2):
                for one, its, members in ((model, optimizer, [rank]), (single, own, [0, 1])):
                    its.zero_grad()
                    for r in members:
                        (one(index[r]).square().sum() / len(members)).backward()
                    its.step()
            check_twin(model, dict(single.named_parameters()))
            assert make is not bag or model.gate.grad is None  # unused by all
        wrapped(model := bag())
        with pytest.raises(ValueError, match=r"is sparse: pass sparse_as_dense=True, or sparse=\['0.weight'"):
            model(index[rank]).sum().backward()


@on_ranks(2)
def test_local_and_new_parameters() -> None:
    with horovod() as rank:
        model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 1))
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizer = wrapped(model, local=["1.weight"])
        optimizer.register_local_var(model[0].weight)
        model(data(rank, 8, 6)).sum().backward()
        optimizer.step()
        same = [torch.equal(value, hvd.broadcast(value.detach(), 0)) for value in model.parameters()]
        assert hvd.allgather_object(same)[1] == [False, True, False, True]
        later = nn.Linear(2, 2)
        optimizer.add_param_group({"params": later.parameters()})
        same_everywhere(later)
        before = later.weight.detach().clone()
        optimizer.zero_grad()
        (later(data(rank, 4, 2)).sum() + model(data(rank, 8, 6)).sum()).backward()
        optimizer.step()
        close(later.weight, before - 0.1 * everyones(2, 4, 2).sum(1).mean(0).expand(2, 2).float())
        same_everywhere(later)


@on_ranks(2)
def test_state_and_objects_of_one_rank_go_to_all() -> None:
    with horovod() as rank:
        model = network(seed=rank)
        optimizer = torch.optim.Adam(model.parameters(), 0.1 * (rank + 1))
        if rank == 1:
            loss_of(model, rank, 0).backward()
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        assert optimizer.param_groups[0]["lr"] == 0.2
        moment = optimizer.state[model[0].weight]["exp_avg"]
        assert torch.equal(moment, hvd.broadcast(moment, 1))
        assert moment.any()
        norm = nn.BatchNorm1d(3)
        norm.num_batches_tracked += rank
        hvd.broadcast_parameters(norm.state_dict(), root_rank=1)
        assert norm.num_batches_tracked == 1
        hvd.broadcast_parameters(model.named_parameters(), root_rank=1)
        same_everywhere(model)
        assert all(map(torch.equal, model.parameters(), network(1).parameters())) == (rank == 2)
        assert hvd.broadcast_object({"epoch": rank, "name": "x" * 1000 * rank}, 1) == {"epoch": 1, "name": "x" * 1000}
        assert hvd.broadcast_object(None) is None
        assert hvd.allgather_object(["a" * rank, rank]) == [["a" * r, r] for r in range(hvd.size())]
        metrics = {"loss": rank, "right": torch.tensor(0.5)}
        in_any_order = dict(sorted(metrics.items(), reverse=bool(rank)))
        assert hvd.average_metrics(in_any_order) == {"loss": (hvd.size() - 1) / 2, "right": 0.5}
        mean, none = hvd.average_gradients([data(rank, 4), None])
        assert none is None
        close(mean, everyones(hvd.size(), 4).mean(0))


# Process sets


@on_ranks(3)
def test_operations_and_optimizers_of_some_ranks() -> None:
    first = hvd.ProcessSet([0, 1])
    with horovod(process_sets=[first]) as rank:
        second = hvd.add_process_set([2, 1])
        assert (first.process_set_id, second.process_set_id, second.ranks) == (1, 2, [1, 2])
        assert second.size() == 2
        assert (hvd.global_process_set.size(), hvd.global_process_set.rank()) == (3, rank)
        for process_set, members in ((first, [0, 1]), (second, [1, 2])):
            assert process_set.included() == (rank in members)
            if rank not in members:
                with pytest.raises(ValueError, match=r"this rank is not in .*if process_set.included\(\)"):
                    hvd.allreduce(torch.ones(1), process_set=process_set)
                model, single = network(), network()
                optimizer = wrapped(model, process_set=process_set)
                for one, its_optimizer in ((model, optimizer), (single, momentum(single))):
                    trained(one, its_optimizer, [rank], 1)
                assert all(map(torch.equal, model.parameters(), single.parameters())), "a step of its own"
                continue
            assert process_set.rank() == members.index(rank)
            exact = torch.stack([data(r, 5).double() for r in members])
            close(hvd.allreduce(data(rank, 5), process_set=process_set), exact.mean(0))
            close(hvd.broadcast(data(rank, 5), members[1], process_set=process_set), data(members[1], 5), 0)
            assert hvd.allgather(torch.tensor([rank]), process_set=process_set).tolist() == members
            assert hvd.allgather_object(rank, process_set=process_set) == members
            model = network(seed=rank)
            optimizer = wrapped(model, process_set=process_set)
            optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * (rank - members[0])
            hvd.broadcast_parameters(model.state_dict(), members[0], process_set=process_set)
            hvd.broadcast_optimizer_state(optimizer, members[0], process_set=process_set)
            single = network(seed=members[0])
            trained(model, optimizer, [rank], 2)
            trained(single, momentum(single), members, 2)
            for mine, expected in zip(model.parameters(), single.parameters(), strict=True):
                close(mine, expected)
                assert torch.equal(mine, hvd.broadcast(mine, members[0], process_set=process_set))
            other = network()  # by another optimizer over the same connections, in turns
            again = wrapped(other, process_set=process_set)
            for _ in range(2):
                trained(model, optimizer, [rank], 1)
                trained(other, again, [rank], 1)
            for mine in (*model.parameters(), *other.parameters()):
                assert torch.equal(mine, hvd.broadcast(mine, members[0], process_set=process_set))
            optimizer.close()
            optimizer.close()
        groups = dist.distributed_c10d._world.pg_map
        before, order = len(groups), []

        def meets(process_set: hvd.ProcessSet) -> None:
            order.append(f"barrier of {process_set.ranks} in {len(groups) - before} groups more")
            operations.barrier(process_set)

        with mock.patch.object(world, "barrier", meets):
            assert hvd.remove_process_set(second)
            gc.collect()
            assert not hvd.remove_process_set(second)
            assert not hvd.remove_process_set(hvd.global_process_set)
        # before a member ends its connections the others must be out of their operations
        assert order == (["barrier of [1, 2] in 0 groups more"] if rank in [1, 2] else [])
        if rank in [1, 2]:  # the last optimizer keeps its connections
            assert len(groups) == before - 1
            trained(other, again, [rank], 1)
            again.close()
            assert len(groups) == before - 2
        third = hvd.add_process_set(second)
        if third.included():
            hvd.barrier(third)


@on_ranks(3)
def test_optimizers_of_a_process_set_average_in_one_backward() -> None:
    """By the backend's own collectives too, which two threads call."""
    with horovod() as rank:
        pair = hvd.add_process_set([0, 1])
        if pair.included():
            layers, optimizers = [nn.Linear(1, 1, bias=False) for _ in range(2)], []
            for layer in layers:
                native = ringstrategy.AllReduce(collective=ringstrategy.Native())
                optimizers.append(wrapped(layer, algorithm=native, process_set=pair))
            for _ in range(50):
                values = [layer(torch.ones(1)) for layer in layers]
                ((1 + rank) * (values[0] + 100 * values[1])).sum().backward()
                for optimizer in optimizers:
                    optimizer.step()
                assert [layer.weight.grad.item() for layer in layers] == [1.5, 150]
                for optimizer in optimizers:
                    optimizer.zero_grad()


# Uneven data


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=str)
@on_ranks(3)
def test_ranks_without_data_join_the_others(op: hvd.ReduceOp) -> None:
    with horovod() as rank:
        batches = [2, 5, 3]
        model, single = network(), network()
        algorithm = ringstrategy.AllReduce(ringstrategy.BlockInt(8), error_feedback=True, uneven="join")
        optimizer = wrapped(model, op=op, algorithm=algorithm)
        its_own = momentum(single)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (optimizer, its_own)]
        for step in range(batches[rank]):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            schedulers[0].step()
        assert hvd.join() == 1
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**5)
        assert optimizer.session.stats.steps == 5
        for step in range(5):
            its_own.zero_grad()
            members = [r for r, count in enumerate(batches) if step < count]
            for r in members:
                (loss_of(single, r, step) / (len(members) if op is hvd.Average else 1)).backward()
            its_own.step()
            schedulers[1].step()
        check_twin(model, dict(single.named_parameters()), 0.02)
        trained(model, optimizer, [rank], 1)  # and on, with all
        same_everywhere(model)
        assert hvd.join() in range(3)
        wrapped(single, algorithm=ringstrategy.AllReduce(uneven="join"))
        with pytest.raises(ValueError, match="2 optimizers have uneven='join'"):
            hvd.join()


# Batch norm, schedules


@on_ranks(3)
def test_batch_norm_has_the_statistics_of_all_ranks() -> None:
    with horovod() as rank:
        size = hvd.size()
        for shape, momentum_of, dtype in (((5,), 0.1, torch.float32), ((5, 3), None, torch.float64)):
            inputs = [3 + data(r, 4 + r, *shape).to(dtype) for r in range(size)]
            weights = [data(r, 4 + r, *shape, seed=3).to(dtype) for r in range(size)]
            ours = hvd.SyncBatchNorm(5, momentum=momentum_of).to(dtype)
            theirs = nn.BatchNorm1d(5, momentum=momentum_of).double()
            bound = 1e-5 if dtype is torch.float32 else 1e-12
            nn.init.normal_(ours.weight, generator=torch.Generator().manual_seed(0))
            theirs.load_state_dict(ours.state_dict())
            for _ in range(2):
                ours.zero_grad()
                theirs.zero_grad()
                mine, whole = inputs[rank].clone().requires_grad_(), torch.cat(inputs).double().requires_grad_()
                (ours(mine) * weights[rank]).sum().backward()
                (theirs(whole) * torch.cat(weights)).sum().backward()
                close(mine.grad, whole.grad.split([len(each) for each in inputs])[rank], bound)
                for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                    close(hvd.allreduce(one.grad, op=hvd.Sum), other.grad, 10 * bound)
            for name, value in theirs.state_dict().items():
                close(ours.state_dict()[name], value, bound)
            ours.eval()
            theirs.eval()
            close(ours(inputs[rank]), theirs(inputs[rank].double()), bound)


@on_ranks(2)
def test_a_rate_grows_to_that_of_all_ranks_also_beside_a_schedule_of_lightning() -> None:
    rates: list[float] = []

    class Rates(BoringModel):
        def training_step(self, rows: Tensor, index: int) -> Tensor:
            return self.layer(rows).sum()

        def validation_step(self, rows: Tensor, index: int) -> None:
            self.log("rank", float(self.global_rank))

        def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any) -> None:
            before = self.layer.bias[0].item()
            super().optimizer_step(epoch, index, optimizer, closure)
            rates.append(before - self.layer.bias[0].item())  # whose gradient is 1

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.8)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    callbacks = [hvd.callbacks.LearningRateWarmupCallback(2), hvd.callbacks.MetricAverageCallback()]
    trainer = trainer_with("ring", max_steps=5, limit_val_batches=1, val_check_interval=5, callbacks=callbacks)
    trainer.fit(Rates())
    # the schedule says 0.8, 0.4, 0.2, ..., of which a half, three quarters and then all are stepped
    assert rates == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.05], abs=1e-6)
    assert float(trainer.callback_metrics["rank"]) == 0.5


def test_a_rate_grows_to_that_of_all_ranks() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.8)
    schedule = hvd.LearningRateWarmup(optimizer, steps=3, size=4)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])


# Elastic training


def elastic_state(seed: int, path: Path) -> hvd.elastic.TorchState:
    sampler, model = hvd.elastic.ElasticSampler(range(11), seed=3), network(seed)
    return hvd.elastic.TorchState(model, wrapped(model), sampler=sampler, epoch=0, seen=[], path=path)


@on_ranks(2)
def test_a_restart_goes_on_from_the_newest_commit(tmp_path: Path) -> None:
    with horovod() as rank:
        size = hvd.size()
        state = elastic_state(rank, tmp_path / f"node{rank}")  # as on a disk of its own
        model, optimizer, sampler = state.model, state.optimizer, state.sampler
        shared = hvd.allgather_object(list(sampler))
        assert set().union(*shared) == set(range(11))
        assert {len(part) for part in shared} == {len(sampler)} == {-(-11 // size)}

        @hvd.elastic.run
        def train(state: Any, until: int) -> None:
            for epoch in range(state.epoch, until):
                optimizer.zero_grad()
                loss_of(model, rank, epoch).backward()
                optimizer.step()
                state.sampler.record_batch(0, 2)
                state.epoch = epoch + 1
                state.seen.append(epoch)
                state.commit()

        train(state, 2)
        same_everywhere(model)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        done = set().union(*(part[:2] for part in shared))
        for _ in range(2):  # it may be taken back again and again
            state.epoch = 7
            state.seen.append(7)
            with torch.no_grad():
                model[0].weight.add_(1)
            state.restore()
            assert (state.epoch, state.seen) == (2, [0, 1])
            assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
            assert set().union(*hvd.allgather_object(list(sampler))) == set(range(11)) - done

    # all processes start again, on other nodes: the file is that of rank 1 now
    assert not (tmp_path / "node1").exists()  # only the first process of a node writes
    with horovod() as rank:
        state, called = elastic_state(5, path := tmp_path / f"node{1 - rank}"), []
        state.register_reset_callbacks([lambda: called.append(state.epoch)])
        seen = hvd.elastic.run(lambda state: (state.epoch, len(state.sampler)))(state)
        assert seen == (2, -(-(11 - len(done)) // size))
        assert called == [2]
        assert all(torch.equal(value, kept[name]) for name, value in state.model.state_dict().items())
        assert state.optimizer.state[state.model[0].weight]["momentum_buffer"].any()
        if rank == 1:
            path.write_bytes(path.read_bytes()[:-100] + bytes(100))
            with pytest.raises(ValueError, match=r"node0 is damaged: .* Delete it"):
                state.resume()
        hvd.barrier()


def test_a_commit_is_read_from_no_folder_that_others_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic.tempfile, "gettempdir", lambda: str(tmp_path))
    assert elastic._private_file() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    path = elastic._private_file()
    assert path is not None
    assert path == elastic._private_file()
    path.parent.chmod(0o720)
    with pytest.raises(ValueError, match="is open to others, and what is read from it is executed"):
        elastic._private_file()
