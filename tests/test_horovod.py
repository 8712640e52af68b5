"""Horovod's shape, on real processes with other data on each, against plain torch."""

from __future__ import annotations

import gc
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ringstrategy
import ringstrategy.horovod as hvd
from ringstrategy.integrations.horovod import named, operations

TIMEOUT = timedelta(seconds=30)
pytestmark = pytest.mark.timeout(120)


@contextmanager
def horovod(**how: Any) -> Iterator[int]:
    hvd.init(timeout=TIMEOUT, **how)
    try:
        yield hvd.rank()
    finally:
        hvd.shutdown()


def data(rank: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + rank))


def everyones(size: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.stack([data(rank, *shape, seed=seed).double() for rank in range(size)])


def close(found: Tensor, expected: Tensor, bound: float = 1e-5) -> None:
    assert found.shape == expected.shape
    assert found.numel() == 0 or (found.double() - expected.double()).abs().max() <= bound


# Operations

EXACT: dict[Any, Callable[[Tensor], Tensor]] = {
    hvd.Average: lambda rows: rows.mean(0),
    hvd.Sum: lambda rows: rows.sum(0),
    hvd.Min: lambda rows: rows.amin(0),
    hvd.Max: lambda rows: rows.amax(0),
    hvd.Product: lambda rows: rows.prod(0),
}


def _reduces() -> None:
    with horovod() as rank:
        size = hvd.size()
        for shape in ((), (0,), (1,), (size - 1, 2), (3, 257)):
            rows, mine = everyones(size, *shape), data(rank, *shape)
            for op, exact in EXACT.items():
                expected = exact(rows)
                close(hvd.allreduce(mine, op=op), expected)
                close(mine, data(rank, *shape), 0)
                place = mine.clone()
                assert hvd.allreduce_(place, op=op) is place
                close(place, expected)
        assert torch.equal(hvd.allreduce(torch.tensor([rank, -rank - 1])), torch.tensor([[0, -2], [1, -2]][size - 2]))
        assert hvd.allreduce(torch.tensor([2**40 + rank]), op=hvd.Sum).item() == size * 2**40 + size * (size - 1) // 2
        close(hvd.allreduce(data(rank, 9), average=False), everyones(size, 9).sum(0))
        close(hvd.allreduce(data(rank, 9), prescale_factor=2.0, postscale_factor=0.25), everyones(size, 9).mean(0) / 2)
        half = data(rank, 1000).half()
        found = hvd.allreduce(half, op=hvd.Sum)
        assert found.dtype == torch.float16
        close(found, sum(data(r, 1000).half().float() for r in range(size)).half(), 1e-2)  # type: ignore[union-attr]
        large = torch.full((9,), 40_000.0 + 32 * rank, dtype=torch.float16)  # whose sum has no place in 16 bits
        for average in (hvd.allreduce(large), hvd.allreduce(large, op=hvd.Sum, postscale_factor=1 / size)):
            assert average.tolist() == torch.full((9,), 40_000.0 + 16 * (size - 1)).half().tolist()
        part = hvd.reducescatter(large.repeat(size))
        assert part.tolist() == torch.full((9,), 40_000.0 + 16 * (size - 1)).half().tolist()
        strided = data(rank, 6, 4).T
        close(hvd.allreduce_(strided), everyones(size, 6, 4).mean(0).T)

        tensors = [data(rank, 5), torch.tensor([rank]), data(rank, 2, 2, seed=1)]
        results = hvd.grouped_allreduce(tensors, op=hvd.Sum, name="group")
        close(results[0], everyones(size, 5).sum(0))
        assert results[1].item() == size * (size - 1) // 2
        close(results[2], everyones(size, 2, 2, seed=1).sum(0))
        assert hvd.grouped_allreduce_(tensors[:1])[0] is tensors[0]


@pytest.mark.parametrize("size", [2, 3])
def test_all_reduces_are_what_torch_computes(ranks: Pool, size: int) -> None:
    ranks(size, _reduces)


def _compresses() -> dict[str, tuple[Tensor, int]]:
    found = {}
    with horovod() as rank:
        stats = hvd.stats()
        for name, codec in CODECS.items():
            before = stats.bytes_sent or 0
            found[name] = hvd.allreduce(data(rank, 9000), compression=codec), (stats.bytes_sent or 0) - before
    return found


CODECS = {name: getattr(hvd.Compression, name) for name in ("none", "fp16", "bf16", "fp8", "int8", "int4")}
CODECS["top"] = ringstrategy.TopK(4)
BOUNDS = {"none": 1e-5, "fp16": 5e-3, "bf16": 5e-2, "fp8": 0.3, "int8": 0.06, "int4": 1.0, "top": 4.0}


def test_averages_travel_through_codecs_and_all_ranks_get_the_same_bits(ranks: Pool) -> None:
    outcomes = ranks(3, _compresses)
    mean = everyones(3, 9000).mean(0)
    for name, bound in BOUNDS.items():
        values, sent = outcomes[0][name]
        assert all(torch.equal(values, other[name][0]) for other in outcomes)
        close(values, mean, bound)
        assert name == "none" or (values - mean).abs().max() > 1e-5
        assert sent > 0
        assert name in ("none", "top") or sent < 0.6 * outcomes[0]["none"][1]
    assert outcomes[0]["int8"][1] < 0.3 * outcomes[0]["none"][1]


def _moves() -> None:
    with horovod() as rank:
        size = hvd.size()
        rows = [data(r, r, 2) for r in range(size)]  # none of rank 0
        close(hvd.allgather(rows[rank]), torch.cat(rows), 0)
        assert hvd.allgather(torch.tensor([rank])).tolist() == list(range(size))
        for root in range(size):
            mine = data(rank, 2, 3)
            close(hvd.broadcast(mine, root), data(root, 2, 3), 0)
            close(mine, data(rank, 2, 3), 0)
            assert hvd.broadcast_(mine, root, name=f"from {root}") is mine
            close(mine, data(root, 2, 3), 0)
        for dtype in (torch.bool, torch.int16, torch.uint8, torch.bfloat16, torch.complex64):
            mine = torch.tensor([1, rank]).to(dtype)
            assert torch.equal(hvd.broadcast(mine, 1), torch.tensor([1, 1]).to(dtype))
            assert torch.equal(hvd.allgather(mine[1:]), torch.arange(size).to(dtype))
            assert torch.equal(hvd.alltoall(mine[1:].repeat(size)), torch.arange(size).to(dtype))
        assert hvd.allreduce(torch.tensor([7 + rank], dtype=torch.int16), op=hvd.Max).item() == 6 + size

        even = torch.arange(2 * size) + 100 * rank
        assert hvd.alltoall(even).tolist() == [100 * r + 2 * rank + i for r in range(size) for i in (0, 1)]
        splits = torch.tensor([(rank + to) % 3 for to in range(size)])  # to each another number, to some none
        arrived, received = hvd.alltoall(torch.full((int(splits.sum()), 2), float(rank)), splits)
        assert received.tolist() == [(r + rank) % 3 for r in range(size)]
        assert arrived.tolist() == [[float(r)] * 2 for r in range(size) for _ in range((r + rank) % 3)]

        for rows_in, op in ((1, hvd.Sum), (size + 1, hvd.Average), (2 * size, hvd.Max)):
            shares = [rows_in // size + (r < rows_in % size) for r in range(size)]
            whole = EXACT[op](everyones(size, rows_in, 3))
            close(hvd.reducescatter(data(rank, rows_in, 3), op=op), whole.split(shares)[rank])
        counts = hvd.reducescatter(torch.arange(size) + rank, op=hvd.Sum)
        assert counts.tolist() == [size * rank + size * (size - 1) // 2]
        both = hvd.grouped_reducescatter([data(rank, size + 1, 3), torch.arange(size) + rank], op=hvd.Sum)
        shares = [1 + (r == 0) for r in range(size)]
        close(both[0], everyones(size, size + 1, 3).sum(0).split(shares)[rank])
        assert both[1].tolist() == counts.tolist()
        both = hvd.grouped_allgather([rows[rank], torch.tensor([rank])])
        close(both[0], torch.cat(rows), 0)
        assert both[1].tolist() == list(range(size))
        hvd.barrier()


def _sums_rows() -> None:
    with horovod() as rank:
        size = hvd.size()
        mine = [torch.zeros(7, 2).index_add(0, torch.tensor([r, r + 2]), data(r, 2, 2)) for r in range(size)]
        for op in (hvd.Sum, hvd.Average):
            handle = hvd.sparse_allreduce_async(mine[rank].to_sparse(1), "rows", op)
            total = hvd.synchronize(handle)
            assert hvd.poll(handle)
            assert handle() is total
            assert total.is_sparse
            assert total.shape == (7, 2)
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


def test_sparse_sums_may_have_other_rows_on_each_rank(ranks: Pool) -> None:
    ranks(3, _sums_rows)


def _records(path: str) -> None:
    with horovod() as rank:
        hvd.start_timeline(path)
        hvd.allreduce(data(rank, 1000), name="mean of loss, in all")
        hvd.stop_timeline()
        hvd.stop_timeline()
        hvd.start_timeline(path.replace("timeline.json", "second.json"))
        hvd.allreduce(data(rank, 1000), name="accuracy")


def test_a_timeline_names_the_operations(ranks: Pool, tmp_path: Path) -> None:
    ranks(2, _records, str(tmp_path / "timeline.json"))
    for file, there, not_there in (("timeline", "mean of loss, in all", "accuracy"), ("second", "accuracy", "loss")):
        for rank in (0, 1):
            names = {event["name"] for event in json.loads((tmp_path / f"{file}.rank{rank}.json").read_text())}
            assert any(name.startswith(f"operation {there!r}: encode") for name in names), names
            assert not any(not_there in name for name in names)


POSITIONS = {  # of Horovod 0.28.1's arguments
    hvd.allgather: "tensor name process_set",
    hvd.allgather_async: "tensor name process_set",
    hvd.allreduce: "tensor average name compression op prescale_factor postscale_factor process_set",
    hvd.allreduce_: "tensor average name op prescale_factor postscale_factor process_set",
    hvd.allreduce_async: "tensor average name op prescale_factor postscale_factor process_set",
    hvd.alltoall: "tensor splits name process_set",
    hvd.broadcast: "tensor root_rank name process_set",
    hvd.broadcast_: "tensor root_rank name process_set",
    hvd.grouped_allgather: "tensors name process_set",
    hvd.grouped_allreduce: "tensors average name compression op prescale_factor postscale_factor process_set",
    hvd.grouped_allreduce_: "tensors average name op prescale_factor postscale_factor process_set",
    hvd.grouped_reducescatter: "tensors name compression op process_set prescale_factor postscale_factor",
    hvd.reducescatter: "tensor name compression op process_set prescale_factor postscale_factor",
    hvd.reducescatter_async: "tensor name op process_set prescale_factor postscale_factor",
    hvd.sparse_allreduce_async: "tensor name op process_set",
    hvd.start_timeline: "file_path mark_cycles",
}


@pytest.mark.parametrize("function", POSITIONS, ids=lambda function: function.__name__)
def test_arguments_have_horovods_places(function: Callable[..., Any]) -> None:
    theirs = POSITIONS[function].split()
    assert list(inspect.signature(function).parameters)[: len(theirs)] == theirs


@pytest.mark.parametrize("size", [2, 3])
def test_rows_go_where_they_should(ranks: Pool, size: int) -> None:
    ranks(size, _moves)


def _flow_back() -> None:
    """Each rank's loss is the product with weights of its own; the twin sums them over all tensors, in float64.

    Horovod's gradients have the factor `times`.
    """
    with horovod() as rank:
        size = hvd.size()

        def check(
            operation: Callable[[Tensor], Tensor],
            twin: Callable[[list[Tensor]], list[Tensor]],
            rows: int,
            times: float = 1.0,
        ) -> None:
            mine = data(rank, rows, 2).requires_grad_()
            result = operation(mine)
            (result * data(rank, *result.shape, seed=7)).sum().backward()
            tensors = [data(r, rows, 2).double().requires_grad_() for r in range(size)]
            results = twin(tensors)
            close(result, results[rank])
            total = sum((y * data(r, *y.shape, seed=7)).sum() for r, y in enumerate(results))
            assert isinstance(total, Tensor)
            total.backward()
            expected = tensors[rank].grad
            assert mine.grad is not None
            close(mine.grad, torch.zeros_like(mine) if expected is None else times * expected)

        everyone: Callable[[Tensor], list[Tensor]] = lambda value: [value] * size  # noqa: E731
        check(lambda x: hvd.allreduce(x, op=hvd.Sum), lambda xs: everyone(torch.stack(xs).sum(0)), 3)
        check(
            lambda x: hvd.allreduce(x, prescale_factor=3.0, postscale_factor=0.5),
            lambda xs: everyone(1.5 * torch.stack(xs).mean(0)),
            3,
        )
        check(lambda x: hvd.allgather(x), lambda xs: everyone(torch.cat(xs)), 3, 1 / size)
        check(lambda x: hvd.broadcast(x, 1), lambda xs: everyone(xs[1]), 3, 1 / size)
        check(
            lambda x: hvd.alltoall(x), lambda xs: [torch.cat([x.chunk(size)[r] for x in xs]) for r in range(size)], size
        )
        check(lambda x: hvd.reducescatter(x), lambda xs: list(torch.stack(xs).mean(0).chunk(size)), 2 * size, size)
        check(
            lambda x: torch.cat(hvd.grouped_allreduce([x, 2 * x[:1]], op=hvd.Sum)),
            lambda xs: everyone(torch.cat([torch.stack(xs).sum(0), 2 * torch.stack(xs).sum(0)[:1]])),
            3,
        )
        check(
            lambda x: torch.cat(hvd.grouped_allgather([x[:2], x])),
            lambda xs: everyone(torch.cat([x[:2] for x in xs] + xs)),
            3,
            1 / size,
        )
        check(
            lambda x: torch.cat(hvd.grouped_reducescatter([x, 3 * x])),
            lambda xs: [torch.cat([part, 3 * part]) for part in torch.stack(xs).mean(0).chunk(size)],
            2 * size,
            size,
        )
        features, mask = hvd.grouped_allgather([data(rank, 2).requires_grad_(), torch.tensor([True])])
        features.sum().backward()
        assert mask.all()
        for op in (hvd.Sum, hvd.Average):
            scaled = data(rank, 2 * size, 2).requires_grad_()
            hvd.reducescatter(scaled, op=op, prescale_factor=3.0, postscale_factor=0.5).sum().backward()
            assert scaled.grad is not None
            close(scaled.grad, torch.full_like(scaled, 1.5 * (size if op is hvd.Sum else 1)))
        uneven = data(rank, rank + 1, 2).requires_grad_()
        hvd.allgather(uneven).square().sum().backward()
        assert uneven.grad is not None
        close(uneven.grad, 2 * uneven)
        with pytest.raises(ValueError, match="Max is not differentiable"):
            hvd.allreduce(uneven, op=hvd.Max)


def test_gradients_flow_back_as_in_one_process(ranks: Pool) -> None:
    ranks(3, _flow_back)


# Names


def _in_another_order() -> list[float]:
    with horovod() as rank:
        names = [f"layer{i}.weight" for i in range(40)]
        mine = names if rank == 0 else names[::-1] if rank == 1 else names[1::2] + names[::2]
        sums = []
        for round_ in range(2):  # names may come again
            handles = {
                name: hvd.allreduce_async(torch.tensor([float((names.index(name) + round_) * 10**rank)]), name=name)
                for name in mine
            }
            sums += [hvd.synchronize(handles[name]).item() for name in names]
        assert all(map(hvd.poll, handles.values()))
        # some wait for one before they submit the other
        if rank == 0:
            first, second = (hvd.allreduce_async(torch.ones(1), name=name) for name in ("first", "second"))
            hvd.synchronize(first)
            hvd.synchronize(second)
        else:
            hvd.allreduce(torch.ones(1), name="second")
            hvd.allreduce(torch.ones(1), name="first")
        for i in range(2 * named._TOGETHER):  # what was done is deleted from the store
            hvd.allreduce(torch.ones(1), name=f"noname {i}")
        return sums


def test_operations_belong_together_by_name(ranks: Pool) -> None:
    for sums in ranks(3, _in_another_order):
        for round_ in range(2):
            found = sums[40 * round_ : 40 * round_ + 40]
            assert found == pytest.approx([(i + round_) * 111 / 3 for i in range(40)], abs=1e-4)


def _differs() -> list[str]:
    errors = []
    with horovod() as rank:
        for call in (
            lambda: hvd.allreduce(torch.ones(3 + rank), name="shape"),
            lambda: hvd.allreduce(torch.ones(3), op=(hvd.Sum, hvd.Average)[rank], name="op"),
            lambda: hvd.allgather(torch.ones(2, 3 + rank), name="columns"),
            lambda: hvd.broadcast(torch.ones(2), rank, name="root"),
            lambda: hvd.allreduce(torch.ones(3), compression=(CODECS["int8"], CODECS["none"])[rank], name="codec"),
            lambda: (hvd.allreduce if rank else hvd.allgather)(torch.ones(3), name="kind"),
        ):
            with pytest.raises(ringstrategy.PlanMismatchError) as raised:
                call()
            errors.append(str(raised.value))
        close(hvd.allreduce(torch.ones(1) * rank), torch.tensor([0.5]))  # it goes on
    return errors


def test_ranks_that_differ_are_told_how(ranks: Pool) -> None:
    zero, one = ranks(2, _differs)
    assert zero == one
    for said, words in zip(
        zero,
        [
            "float32 (3) on cpu; rank 1 has allreduce: Average, float32 (4)",
            "Sum, float32",
            "(rows, 3)",
            "from rank 0",
            "BlockInt(",
            "rank 0 has allgather",
        ],
        strict=True,
    ):
        assert words in said


def _waits_in_vain() -> str:
    with mock.patch.object(named, "_LOOK_SECONDS", 0.2), horovod() as rank:
        first = ("loss", "accuracy")[rank]
        with pytest.raises(ringstrategy.PlanMismatchError) as raised:
            hvd.allreduce(torch.ones(1), name=first)  # and then `second`
        hvd.tell(raised.value)
        return str(raised.value)


def test_ranks_that_wait_for_different_names_are_told_which(ranks: Pool) -> None:
    zero, one = ranks(2, _waits_in_vain, limit=30)
    assert "rank 0 waits for 'loss', which rank 1 has not submitted; rank 1 waits for 'accuracy'" in zero
    assert "rank 1 waits for 'accuracy', which rank 0 has not submitted; rank 0 waits for 'loss'" in one


def _fails_from_a_difference_on() -> None:
    with mock.patch.object(named, "_LOOK_SECONDS", 0.2), horovod() as rank:
        with pytest.raises(ringstrategy.PlanMismatchError):
            hvd.allreduce(torch.ones(1), name=("loss", "accuracy")[rank])
        time.sleep(rank)
        for name in ("loss", "later"):  # the first would get what was meant for an earlier call
            with pytest.raises(ringstrategy.PlanMismatchError, match=r"rank \d waits for"):
                hvd.allreduce(torch.ones(1), name=name)


def test_after_a_difference_of_names_nothing_is_exchanged(ranks: Pool) -> None:
    ranks(2, _fails_from_a_difference_on, limit=30)


def _one_dies() -> str:
    hvd.init(timeout=TIMEOUT)
    hvd.barrier()
    if hvd.rank() == 1:
        time.sleep(0.5)  # the others wait by then
        os.kill(os.getpid(), signal.SIGKILL)
    with mock.patch.object(named, "_LOOK_SECONDS", 0.2), pytest.raises(hvd.HorovodInternalError) as raised:
        hvd.allreduce(torch.ones(1), name="loss")
    hvd.tell(raised.value)
    hvd.shutdown()
    return str(raised.value)


def test_who_waits_for_a_dead_rank_is_told(ranks: Pool) -> None:
    outcomes = ranks.outcomes(3, _one_dies, limit=30)
    for rank in (0, 2):
        said, error = outcomes[rank]
        assert error is None, error
        assert re.match(r"lost rank 1 .* in 'loss'", said), said


def _misused() -> None:
    for call in (
        hvd.rank,
        hvd.local_size,
        hvd.barrier,
        lambda: hvd.allreduce(torch.ones(1)),
        hvd.global_process_set.size,
    ):
        with pytest.raises(ValueError, match=r"call hvd.init\(\) first"):
            call()
    with horovod() as rank:
        assert hvd.is_initialized()
        hvd.init()  # does nothing
        ones = torch.ones(3)
        for message, call in {
            "Adasum is not there": lambda: hvd.allreduce(ones, op=hvd.Adasum),
            "not both": lambda: hvd.allreduce(ones, average=True, op=hvd.Sum),
            "Max is exact: leave out": lambda: hvd.allreduce(ones, op=hvd.Max, compression=hvd.Compression.int8),
            "for floating-point tensors, got torch.int64": lambda: hvd.allreduce(
                torch.arange(3), compression=hvd.Compression.fp16
            ),
            "cannot travel: the process group has no backend for meta": lambda: hvd.allreduce(ones.to("meta")),
            r"root_rank is one of the ranks \[0, 1\], got 2": lambda: hvd.broadcast(ones, 2),
            r"pass tensor\[None\]": lambda: hvd.allgather(torch.tensor(1.0)),
            "there is no average of bools": lambda: hvd.allreduce(ones.bool()),
            "does not come out even: pass splits=": lambda: hvd.alltoall(ones),
            "how many of 3 rows each of 2 ranks gets": lambda: hvd.alltoall(ones, [1, 1]),
        }.items():
            with pytest.raises(ValueError, match=message):
                call()
        with pytest.raises(TypeError, match=r"hvd.Compression.none, .fp16.* A compressor of Horovod"):
            hvd.allreduce(ones, compression="fp16")
        if rank == 0:
            held = hvd.allreduce_async(ones, name="held")
            with pytest.raises(ValueError, match="an operation named 'held' is under way"):
                hvd.allreduce_async(ones, name="held")
            hvd.barrier()
        else:
            hvd.barrier()
            held = hvd.allreduce_async(ones, name="held")
        hvd.synchronize(held)
        outside = hvd.add_process_set([0])
        joins = ringstrategy.AllReduce(uneven="join")
        model = network()
        with pytest.raises(ValueError, match=r"hvd.join\(\) is for all ranks"):
            hvd.DistributedOptimizer(momentum(model), algorithm=joins, process_set=outside)


def test_misuse_gets_the_cure(ranks: Pool) -> None:
    ranks(2, _misused)


# Who the ranks are


def _on_two_nodes(nodes: list[int]) -> list[Any]:
    os.environ["GROUP_RANK"] = str(nodes[int(os.environ["RANK"])])
    try:
        with horovod():
            hvd.init()
            return [
                *(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()),
                *(hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()),
            ]
    finally:
        del os.environ["GROUP_RANK"]


def test_ranks_of_nodes(ranks: Pool) -> None:
    assert ranks(3, _on_two_nodes, [0, 0, 1]) == [
        [0, 3, 0, 2, 0, 2, False],
        [1, 3, 1, 2, 0, 1, False],
        [2, 3, 0, 1, 1, 2, False],
    ]
    assert ranks(2, _on_two_nodes, [0, 1])[1] == [1, 2, 0, 1, 1, 2, True]


def _again_and_again() -> None:
    for round_ in range(5):
        with horovod() as rank:
            assert hvd.allreduce(torch.tensor([rank + round_]), op=hvd.Sum).item() == 3 + 3 * round_
            handle = hvd.broadcast_async(torch.tensor([rank]), 0)  # from rank 0, which may end first
            assert hvd.synchronize(handle).item() == 0


def test_it_begins_and_ends_again_and_again(ranks: Pool) -> None:
    ranks(3, _again_and_again)


def _ends_after_its_group() -> None:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    with pytest.raises(ValueError, match="\"dynamic\", got 'static'"):
        hvd.init(process_sets="static")
    hvd.init(process_sets="dynamic")  # as Horovod's scripts write it, who add sets later
    some = hvd.add_process_set([0, 1])
    model = network()
    hvd.DistributedOptimizer(momentum(model), model.named_parameters(), process_set=some)
    hvd.remove_process_set(some)
    hvd.barrier()
    dist.destroy_process_group()
    hvd.shutdown()
    assert not hvd.is_initialized()


def test_the_process_group_may_end_before_it(ranks: Pool) -> None:
    ranks(3, _ends_after_its_group)


def _alone() -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    for _ in range(2):  # it can begin anew
        with horovod() as rank:
            assert (rank, hvd.size(), hvd.local_size(), hvd.cross_size()) == (0, 1, 1, 1)
            values = data(0, 5)
            close(hvd.allreduce(values), values, 0)
            close(hvd.allgather(values), values, 0)
            close(hvd.broadcast(values, 0), values, 0)
            close(hvd.reducescatter(values), values, 0)
            close(hvd.alltoall(values), values, 0)
        assert not hvd.is_initialized()
        assert not dist.is_initialized()
    assert not any(built() for built in (hvd.mpi_built, hvd.mpi_enabled, hvd.mpi_threads_supported, hvd.ddl_built))
    assert hvd.gloo_built()


def test_one_process_needs_no_launcher(ranks: Pool) -> None:
    ranks(1, _alone)


# Optimizers


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3))


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    return data(rank, 8, 6, seed=10 + step), data(rank, 8, 3, seed=50 + step)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs, targets = batch(rank, step)
    loss: Tensor = nn.functional.mse_loss(model(inputs), targets)
    return loss


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def twin(
    size: int, steps: int, *, passes: int = 1, factor: float = 1.0, clip: float | None = None
) -> dict[str, Tensor]:
    """One process that computes the gradients of all ranks."""
    model = network()
    optimizer = momentum(model)
    for step in range(steps):
        optimizer.zero_grad()
        for each in range(passes):
            for rank in range(size):
                (loss_of(model, rank, step * passes + each) * factor / size).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def same_everywhere(model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        assert torch.equal(value, hvd.broadcast(value, 0)), name


def check_twin(model: nn.Module, expected: dict[str, Tensor], bound: float = 1e-5) -> None:
    same_everywhere(model)
    for name, value in model.named_parameters():
        close(value.detach(), expected[name], bound)


def _trains() -> None:
    with horovod() as rank:
        size = hvd.size()

        def begin(optimizer_of: Any = momentum, **how: Any) -> tuple[nn.Sequential, Any]:
            model = network(seed=rank)
            optimizer = optimizer_of(model)
            wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **how)
            assert wrapped is optimizer
            assert type(wrapped).__name__ == "SGD"
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            return model, wrapped

        # as a script has it
        model, optimizer = begin()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            scheduler.step()
        check_twin(model, twin(size, 4))
        assert optimizer.session.stats.bytes_sent > 0
        assert optimizer.session.stats.steps == 4

        model, optimizer = begin(op=hvd.Sum)
        for step in range(3):
            optimizer.zero_grad()
            (0.1 * loss_of(model, rank, step)).backward()
            optimizer.step()
        check_twin(model, twin(size, 3, factor=0.1 * size))

        # passes add up on each rank, and then travel once
        model, optimizer = begin(backward_passes_per_step=2)
        for step in range(3):
            optimizer.zero_grad()
            for each in range(2):
                loss_of(model, rank, 2 * step + each).backward()
            optimizer.step()
        check_twin(model, twin(size, 3, passes=2))
        assert optimizer.session.stats.steps == 3

        # clipping
        model, optimizer = begin()
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            with optimizer.skip_synchronize():
                optimizer.step()
        check_twin(model, twin(size, 3, clip=0.3))

        # a step with a closure, and one after synchronize()
        model, optimizer = begin()

        def closure(step: int = 0) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            loss.backward()
            return loss

        close(optimizer.step(closure), loss_of(network(), rank, 0).detach())
        closure(1)
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="skip_synchronize"):
            optimizer.step()
        check_twin(model, twin(size, 2))


@pytest.mark.parametrize("size", [2, 3])
def test_a_script_trains_as_one_process_with_all_data(ranks: Pool, size: int) -> None:
    ranks(size, _trains)


def _worked_example() -> None:
    """The numbers of Horovod's example, to 1e-5."""
    with horovod() as rank:
        model = nn.Linear(2, 3)
        for parameter in model.parameters():
            nn.init.constant_(parameter, 1.0 - rank)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0), model.named_parameters())
        inputs = torch.from_numpy(np.random.RandomState(rank).random_sample((4, 2)).astype(np.float32))
        local = torch.autograd.grad(model(inputs).sum(), model.weight)[0]
        close(local, torch.tensor([(2.0128188, 2.7977395), (0.75015247, 1.4605565)][rank]).expand(3, 2))
        mean = torch.tensor((1.3814857, 2.129148)).expand(3, 2)
        close(hvd.average_gradients([local, None])[0], mean)  # type: ignore[arg-type]
        model(inputs).sum().backward()
        optimizer.synchronize()
        close(model.weight.grad, mean)  # type: ignore[arg-type]
        close(model.bias.grad, torch.full((3,), 4.0))  # type: ignore[arg-type]
        with optimizer.skip_synchronize():
            optimizer.step()
        after = [torch.tensor(rows).expand(3, 2) for rows in ((-0.3814857, -1.129148), (-1.3814857, -2.129148))]
        close(model.weight, after[rank])
        close(model.bias, torch.full((3,), -3.0 - rank))
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        close(model.weight, after[0])
        close(model.bias, torch.full((3,), -3.0))


def test_the_worked_example_has_its_numbers(ranks: Pool) -> None:
    ranks(2, _worked_example)


def _overlaps() -> None:
    with horovod() as rank:
        model = network()
        algorithm = ringstrategy.AllReduce(bucket_mb=1e-4)
        optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters(), algorithm=algorithm)
        sent = []
        first = model[0].weight
        assert isinstance(first, nn.Parameter)

        def last_gradient(gradient: Tensor) -> None:
            deadline = time.monotonic() + 20  # the others send theirs meanwhile
            while not optimizer.session.stats.bytes_received and time.monotonic() < deadline:
                time.sleep(0.01)
            sent.append(optimizer.session.stats.bytes_received)

        first.register_hook(last_gradient)
        loss_of(model, rank, 0).backward()
        optimizer.step()
        assert sent[0] > 0


def test_buckets_travel_while_backward_goes_on(ranks: Pool) -> None:
    ranks(2, _overlaps)


def _feeds_back() -> None:
    """With a rate of 1: what was stepped and the residuals are the exact sum of the mean gradients."""
    with horovod() as rank:
        size = hvd.size()
        model = nn.Linear(200, 9, bias=False)
        nn.init.zeros_(model.weight)
        algorithm = ringstrategy.AllReduce(ringstrategy.BlockInt(4), error_feedback=True)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 1.0), model.named_parameters(), algorithm=algorithm
        )
        exact = torch.zeros(9, 200, dtype=torch.float64)
        for step in range(5):
            optimizer.zero_grad()
            (model.weight * data(rank, 9, 200, seed=step)).sum().backward()
            optimizer.step()
            exact += everyones(size, 9, 200, seed=step).mean(0)
        same_everywhere(model)
        residuals = optimizer.session.state_dict()["residuals"]
        assert residuals["weight"].any()
        total = hvd.allreduce(residuals["weight"], op=hvd.Sum)
        close(total - model.weight.detach(), exact)
        assert (model.weight + exact).abs().max() > 1e-3

        # a run that goes on from it
        again = nn.Linear(200, 9, bias=False)
        resumed = hvd.DistributedOptimizer(
            torch.optim.SGD(again.parameters(), 1.0),
            again.named_parameters(),
            algorithm=ringstrategy.AllReduce(ringstrategy.BlockInt(4), error_feedback=True),
        )
        again.load_state_dict(model.state_dict())
        resumed.session.load_state_dict(optimizer.session.state_dict())
        for one, its_optimizer in ((model, optimizer), (again, resumed)):
            its_optimizer.zero_grad()
            (one.weight * data(rank, 9, 200, seed=9)).sum().backward()
            its_optimizer.step()
        assert torch.equal(model.weight, again.weight)


def test_residuals_keep_what_a_codec_lost(ranks: Pool) -> None:
    ranks(3, _feeds_back)


def _other_algorithms() -> None:
    with horovod() as rank:
        for algorithm in ("gossip", "ring_powersgd", "ring_int8"):
            model = network()
            optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters(), algorithm=algorithm)
            for step in range(5):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                if algorithm == "gossip":  # each rank's gradients are its own
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            with optimizer.session.consensus():
                same_everywhere(model)
            weights = hvd.allgather(model[0].weight.detach()[None])  # type: ignore[operator]
            assert torch.equal(weights[0], weights[1]) == (algorithm != "gossip")
            assert optimizer.session.stats.bytes_sent > 0
        model = network()
        optimizer = hvd.DistributedOptimizer(
            momentum(model), model.named_parameters(), compression=hvd.Compression.fp16
        )
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        check_twin(model, twin(hvd.size(), 3), 1e-3)


def test_an_optimizer_takes_any_algorithm(ranks: Pool) -> None:
    ranks(3, _other_algorithms)


def _meets_seldom(algorithm: ringstrategy.LocalSGD) -> None:
    """Weights may be broadcast before or after."""
    with horovod() as rank:
        found = []
        for broadcasts_before in (True, False):
            model = network(seed=rank)
            if broadcasts_before:
                hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), algorithm=algorithm)
            if not broadcasts_before:
                hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            losses = []
            for step in range(13):
                optimizer.zero_grad()
                loss = loss_of(model, rank, step % 3)
                loss.backward()
                losses.append(loss.item())
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            assert sum(losses[-3:]) < 0.97 * sum(losses[:3])
            with optimizer.session.consensus():
                same_everywhere(model)
                found.append(nn.utils.parameters_to_vector(model.parameters()).detach())
            own = nn.utils.parameters_to_vector(model.parameters()).detach()
            assert not torch.equal(own, found[-1])
            assert optimizer.session.stats.steps == 3
            assert optimizer.session.stats.bytes_sent > 0
            end = hvd.allreduce(own)
            if algorithm.eager:  # own parameters lack the others' part of the agreement that is under way
                (group,) = algorithm._groups
                algorithm._apply(group)
                anchors = algorithm.own_state()["anchors"]
                begun = torch.cat([anchors[name]["values"].flatten() for name, _ in model.named_parameters()])
                with optimizer.session.consensus():
                    shared = nn.utils.parameters_to_vector(model.parameters()).detach()
                assert not torch.equal(shared, found[-1])
                end = shared + hvd.allreduce(own - begun)
            optimizer.session.finish()
            same_everywhere(model)
            close(nn.utils.parameters_to_vector(model.parameters()).detach(), end)
            optimizer.close()
        close(*found)


@pytest.mark.parametrize("eager", [False, True])
def test_an_optimizer_may_meet_the_others_seldom(ranks: Pool, eager: bool) -> None:
    outer = ringstrategy.Nesterov(0.7, 0.5)
    ranks(2, _meets_seldom, ringstrategy.LocalSGD(4, outer, overlap=True if eager else 1, eager=eager))


def _scales() -> None:
    with horovod() as rank:
        model = network()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = hvd.DistributedOptimizer(
            momentum(model),
            model.named_parameters(),
            scaler=scaler,
            algorithm=ringstrategy.AllReduce(ringstrategy.BlockInt(8), error_feedback=True),
        )
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, step) * (float("inf") if step == 1 and rank == 1 else 1)).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**9  # one step was skipped, on all ranks
        same_everywhere(model)
        single = network()
        own = momentum(single)
        for step in (0, 2, 3):
            own.zero_grad()
            for r in range(hvd.size()):
                (loss_of(single, r, step) / hvd.size()).backward()
            own.step()
        check_twin(model, dict(single.named_parameters()), 0.02)
        residual = optimizer.session.state_dict()["residuals"]["2.weight"]
        assert 0 < residual.abs().max() < 0.1  # in the units of unscaled gradients


def test_a_loss_scaler_steps_and_skips_alike_on_all_ranks(ranks: Pool) -> None:
    ranks(2, _scales)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(50, 4, sparse=True, mode="sum")
        self.head = nn.Linear(4, 2)
        self.gate = nn.Parameter(torch.ones(2))  # nobody uses it

    def forward(self, index: Tensor) -> Tensor:
        result: Tensor = self.head(self.rows(index))
        return result


def _kinds_of_parameters() -> None:
    with horovod() as rank:
        size = hvd.size()
        index = [torch.tensor([[r, 7, 3 * r + 1]]) for r in range(size)]
        for how in ({"sparse_as_dense": True}, {"sparse": ["rows.weight"]}):
            torch.manual_seed(1)
            model, single = Bag(), Bag()
            single.load_state_dict(model.state_dict())
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), 0.5, weight_decay=0.0), model.named_parameters(), **how
            )
            own = torch.optim.SGD(single.parameters(), 0.5)
            for _ in range(2):
                for one, its_optimizer, members in ((model, optimizer, [rank]), (single, own, [*range(size)])):
                    its_optimizer.zero_grad()
                    for r in members:
                        (one(index[r]).square().sum() / len(members)).backward()
                    its_optimizer.step()
            check_twin(model, dict(single.named_parameters()))
            assert model.gate.grad is None  # unused by all
        torch.manual_seed(2)
        rows, its_rows = nn.Embedding(50, 4, sparse=True), nn.Embedding(50, 4, sparse=True)
        its_rows.load_state_dict(rows.state_dict())
        adam = hvd.DistributedOptimizer(torch.optim.SparseAdam(rows.parameters(), 0.1))  # which says that rows travel
        own = torch.optim.SparseAdam(its_rows.parameters(), 0.1)
        rows(index[rank]).square().sum().backward()
        for r in range(size):
            (its_rows(index[r]).square().sum() / size).backward()
        adam.step()
        own.step()
        close(rows.weight, its_rows.weight)
        model = Bag()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.5), model.named_parameters())
        with pytest.raises(
            ValueError, match=r"rows.weight is sparse: pass sparse_as_dense=True, or sparse=\['rows.weight'"
        ):
            model(index[rank]).sum().backward()

        # local, unused on some ranks, frozen for a while, added later
        for mark in ("argument", "method"):
            model, head = network(), nn.Linear(3, 1)
            nn.init.constant_(head.weight, 0.5)
            names = [*model.named_parameters(), *head.named_parameters(prefix="head")]
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([parameter for _, parameter in names], 0.1),
                names,
                local=["head.weight"] if mark == "argument" else None,
            )
            if mark == "method":
                optimizer.register_local_var(head.weight)
            model[0].weight.requires_grad_(False)
            for step in range(3):
                optimizer.zero_grad()
                hidden = model(batch(rank, step)[0])
                (head(hidden) if step else hidden).sum().backward()
                if step == 1:
                    assert head.bias.grad is not None
                    optimizer.synchronize()
                    assert torch.equal(head.bias.grad, hvd.broadcast(head.bias.grad, 0))
                    with optimizer.skip_synchronize():
                        optimizer.step()
                    model[0].weight.requires_grad_(True)
                else:
                    optimizer.step()
            same_everywhere(model)
            weights = hvd.allgather(head.weight.detach())
            assert not torch.equal(weights[0], weights[1])
            later = nn.Linear(2, 2)
            optimizer.add_param_group({"params": later.parameters()})
            same_everywhere(later)
            before = later.weight.detach().clone()
            optimizer.zero_grad()
            (later(data(rank, 4, 2)).sum() + model(batch(rank, 9)[0]).sum()).backward()
            optimizer.step()
            close(later.weight, before - 0.1 * everyones(size, 4, 2).sum(1).mean(0).expand(2, 2).float())
            same_everywhere(later)


def test_sparse_local_frozen_and_new_parameters(ranks: Pool) -> None:
    ranks(2, _kinds_of_parameters)


def _refuses() -> None:
    with horovod() as rank:
        model = network()
        pairs = [*model.named_parameters()]
        for kind, message, call in (
            (ValueError, r"not model.parameters\(\)", lambda: (momentum(model), model.parameters())),
            (ValueError, r"\['0.weight'\] twice", lambda: (momentum(model), pairs + pairs[:1])),
            (
                ValueError,
                r"lacks 1 of .*\(3,\) \(parameter 5 of group 0",
                lambda: (momentum(model), pairs[:-1]),
            ),
            (ValueError, "LBFGS", lambda: (torch.optim.LBFGS(model.parameters()), pairs)),
        ):
            with pytest.raises(kind, match=message):
                hvd.DistributedOptimizer(*call())
        for how, message in (
            ({"op": hvd.Adasum}, "Adasum is not there"),
            ({"op": hvd.Max}, "the Average or the Sum"),
            ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor is for op=hvd.Average"),
            ({"compression": CODECS["int8"], "algorithm": "ring"}, "not both"),
            ({"algorithm": "rings"}, "one of ring, ring_fp16"),
            ({"algorithm": "gossip", "op": hvd.Sum}, "sums no gradients"),
            ({"algorithm": ringstrategy.LocalSGD(1, unit="epoch")}, "count the interval in steps"),
            ({"algorithm": "diloco", "scaler": torch.amp.GradScaler("cpu")}, "train in bfloat16 without a scaler"),
            ({"local": ["0.wait"]}, "a list of names of the optimizer's parameters"),
            ({"sparse": ["0.wait"]}, r"names \['0.wait'\], which no parameter"),
        ):
            with pytest.raises(ValueError, match=message):
                hvd.DistributedOptimizer(momentum(model), pairs, **how)  # type: ignore[arg-type]

        optimizer = hvd.DistributedOptimizer(momentum(model), pairs)
        with pytest.raises(ValueError, match="wrap it once"):
            hvd.DistributedOptimizer(optimizer, pairs)
        with pytest.raises(ValueError, match=r"these parameters already: call its close\(\)"):
            hvd.DistributedOptimizer(momentum(model), pairs)
        optimizer.close()
        optimizer = hvd.DistributedOptimizer(momentum(model), pairs)
        loss_of(model, rank, 0).backward()
        with pytest.raises(RuntimeError, match=r"zero_grad\(\) came after backward\(\) and before step"):
            optimizer.zero_grad()
        with (
            pytest.raises(RuntimeError, match=r"call optimizer.synchronize\(\) before"),
            optimizer.skip_synchronize(),
        ):
            optimizer.step()
        with pytest.raises(RuntimeError, match="more than backward_passes_per_step=1 times"):
            loss_of(model, rank, 0).backward()

        for change in (
            lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
            lambda model: model[2].weight.grad.mul_(2),
            lambda model: setattr(model[2].weight, "grad", torch.zeros(30, 40)),
        ):
            model = network()
            optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters())
            loss_of(model, rank, 0).backward()
            change(model)  # type: ignore[no-untyped-call]
            with pytest.raises(
                RuntimeError, match=r"changed between backward\(\) and .* call optimizer.synchronize\(\)"
            ):
                optimizer.step()
        hvd.tell(RuntimeError("the end of a test"))  # exchanges that were begun do not end


def test_what_would_go_wrong_gets_the_cure(ranks: Pool) -> None:
    ranks(2, _refuses)


def _gives() -> None:
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
        check_twin(model, dict(model.named_parameters()), 0)
        assert hvd.broadcast_object({"epoch": rank, "name": "x" * 1000 * rank}, 1) == {"epoch": 1, "name": "x" * 1000}
        assert hvd.broadcast_object(None) is None
        assert hvd.allgather_object(["a" * rank, rank]) == [["a" * r, r] for r in range(hvd.size())]
        assert hvd.average_metrics({"loss": rank, "right": torch.tensor(0.5)}) == {
            "loss": (hvd.size() - 1) / 2,
            "right": 0.5,
        }
        with pytest.raises(ValueError, match=r"not model.parameters\(\)"):
            hvd.broadcast_parameters(model.parameters(), 0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"one of the ranks \[0, 1\], got 7"):
            hvd.broadcast_object(1, 7)
        with pytest.raises(ringstrategy.PlanMismatchError, match="broadcast_parameters"):
            hvd.broadcast_parameters({f"name{rank}": torch.ones(2)}, 0)


def test_state_and_objects_of_one_rank_go_to_all(ranks: Pool) -> None:
    ranks(2, _gives)


# Process sets


def _in_sets() -> None:
    optimizers: list[Any] = []
    first = hvd.ProcessSet([0, 1])
    with pytest.raises(ValueError, match=r"is not in use: call hvd.add_process_set"):
        first.rank()
    with horovod(process_sets=[first]) as rank:
        second = hvd.add_process_set([2, 1])
        assert (first.process_set_id, second.process_set_id, second.ranks) == (1, 2, [1, 2])
        assert second.size() == 2
        assert (hvd.global_process_set.size(), hvd.global_process_set.rank()) == (3, rank)
        for ranks in ([1, 2], [0, 7], [0, 1, 2]):
            with pytest.raises(ValueError, match=r"is in use already|ranks that there are not"):
                hvd.add_process_set(ranks)
        for process_set, members in ((first, [0, 1]), (second, [1, 2])):
            assert process_set.included() == (rank in members)
            if rank not in members:
                with pytest.raises(ValueError, match=r"this rank is not in .*if process_set.included\(\)"):
                    hvd.allreduce(torch.ones(1), process_set=process_set)
                model, single = network(), network()
                optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters(), process_set=process_set)
                for one, its_optimizer in ((model, optimizer), (single, momentum(single))):
                    loss_of(one, rank, 0).backward()
                    its_optimizer.step()
                assert all(map(torch.equal, model.parameters(), single.parameters())), "a step of its own"
                continue
            assert process_set.rank() == members.index(rank)
            exact = torch.stack([data(r, 5).double() for r in members])
            close(hvd.allreduce(data(rank, 5), process_set=process_set), exact.mean(0))
            close(hvd.broadcast(data(rank, 5), members[1], process_set=process_set), data(members[1], 5), 0)
            assert hvd.allgather(torch.tensor([rank]), process_set=process_set).tolist() == members
            assert hvd.allgather_object(rank, process_set=process_set) == members
            model = network(seed=rank)
            optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters(), process_set=process_set)
            hvd.broadcast_parameters(model.state_dict(), members[0], process_set=process_set)
            hvd.broadcast_optimizer_state(optimizer, members[0], process_set=process_set)
            single = network(seed=members[0])
            own = momentum(single)
            for step in range(2):
                for one, its_optimizer, whose in ((model, optimizer, [rank]), (single, own, members)):
                    its_optimizer.zero_grad()
                    for r in whose:
                        (loss_of(one, r, step) / len(whose)).backward()
                    its_optimizer.step()
            for mine, expected in zip(model.parameters(), single.parameters(), strict=True):
                close(mine, expected)
                assert torch.equal(mine, hvd.broadcast(mine, members[0], process_set=process_set))
            with pytest.raises(ValueError, match=r"hvd.ProcessSet\(.*, optimizers=2\)"):
                hvd.DistributedOptimizer(momentum(single), single.named_parameters(), process_set=process_set)
            optimizer.close()  # its connections are the next one's
            optimizer.close()
            optimizers.append(
                hvd.DistributedOptimizer(momentum(model), model.named_parameters(), process_set=process_set)
            )
        before = len(dist.distributed_c10d._world.pg_map)
        if second.included():  # rank 2 is within it for longer than it waits without looking around
            run = lambda said: time.sleep(2.5 * (rank == 2))  # noqa: E731
            operations.submit("slow", None, "", None, [], second.members, run).wait()
        assert hvd.remove_process_set(second)
        gc.collect()
        assert not hvd.remove_process_set(second)
        assert not hvd.remove_process_set(hvd.global_process_set)
        if rank in [1, 2]:  # the last optimizer keeps its connections
            assert len(dist.distributed_c10d._world.pg_map) == before - 1
            optimizers[-1].zero_grad()
            loss_of(model, rank, 5).backward()
            optimizers[-1].step()
            optimizers[-1].close()
            assert len(dist.distributed_c10d._world.pg_map) == before - 2
        third = hvd.add_process_set(second)
        if third.included():
            hvd.barrier(third)


def test_operations_and_optimizers_of_some_ranks(ranks: Pool) -> None:
    ranks(3, _in_sets)


# Uneven data


def _joins() -> None:
    with horovod() as rank:
        size, batches = hvd.size(), [2, 5, 3]
        model = network()
        algorithm = ringstrategy.AllReduce(ringstrategy.BlockInt(8), error_feedback=True, uneven="join")
        optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters(), algorithm=algorithm)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(batches[rank]):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            scheduler.step()
        assert hvd.join() == 1
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**5)
        assert optimizer.session.stats.steps == 5
        single = network()
        own = momentum(single)
        its_scheduler = torch.optim.lr_scheduler.ExponentialLR(own, 0.9)
        for step in range(5):
            own.zero_grad()
            members = [r for r in range(size) if step < batches[r]]
            for r in members:
                (loss_of(single, r, step) / len(members)).backward()
            own.step()
            its_scheduler.step()
        check_twin(model, dict(single.named_parameters()), 0.02)
        optimizer.zero_grad()  # and on, with all
        loss_of(model, rank, 7).backward()
        optimizer.step()
        same_everywhere(model)
        assert hvd.join() in range(size)
        other = network()
        hvd.DistributedOptimizer(
            momentum(other), other.named_parameters(), algorithm=ringstrategy.AllReduce(uneven="join")
        )
        with pytest.raises(ValueError, match="2 optimizers have uneven='join'"):
            hvd.join()
        last = network()
        with pytest.raises(ValueError, match="uneven='join' is for gradients"):
            hvd.DistributedOptimizer(
                momentum(last), last.named_parameters(), algorithm=ringstrategy.Gossip(uneven="join")
            )


def test_ranks_without_data_wait_for_the_others(ranks: Pool) -> None:
    ranks(3, _joins)


# Batch norm, schedules


def _normalizes() -> None:
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
                mine = inputs[rank].clone().requires_grad_()
                (ours(mine) * weights[rank]).sum().backward()
                whole = torch.cat(inputs).double().requires_grad_()
                result = theirs(whole)
                (result * torch.cat(weights)).sum().backward()
                rows = [len(each) for each in inputs]
                assert mine.grad is not None
                assert whole.grad is not None
                close(mine.grad, whole.grad.split(rows)[rank], bound)
                for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                    assert one.grad is not None
                    assert other.grad is not None
                    close(hvd.allreduce(one.grad, op=hvd.Sum), other.grad, 10 * bound)
            for name, value in theirs.state_dict().items():
                close(ours.state_dict()[name], value, bound)
            ours.eval()
            theirs.eval()
            close(ours(inputs[rank]), theirs(inputs[rank].double()), bound)


def test_batch_norm_has_the_statistics_of_all_ranks(ranks: Pool) -> None:
    ranks(3, _normalizes)


def test_a_rate_grows_to_that_of_all_ranks() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.8)
    schedule = hvd.LearningRateWarmup(optimizer, steps=3, size=4)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
    with pytest.raises(ValueError, match="steps and size are whole numbers >= 1"):
        hvd.LearningRateWarmup(optimizer, steps=0, size=4)


class Rates(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.rates: list[float] = []

    def training_step(self, rows: list[Tensor], index: int) -> Tensor:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        loss: Tensor = self.layer(rows[0]).sum()
        return loss

    def validation_step(self, rows: list[Tensor], index: int) -> None:
        self.log("rank", float(self.global_rank))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.8)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def _in_lightning() -> tuple[list[float], float]:
    dist.init_process_group("gloo")
    model = Rates()
    loader = DataLoader(TensorDataset(torch.ones(10, 1)), 1)
    trainer = L.Trainer(
        strategy="ring",
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        limit_val_batches=1,
        callbacks=[hvd.callbacks.LearningRateWarmupCallback(2), hvd.callbacks.MetricAverageCallback()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader, loader)
    return model.rates, float(trainer.callback_metrics["rank"])


def test_lightning_callbacks_warm_up_and_average(ranks: Pool) -> None:
    for rates, rank in ranks(2, _in_lightning):
        assert rates == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.05])  # the schedule goes on beside the warm-up
        assert rank == 0.5
    with pytest.raises(ValueError, match="a whole number of optimizer steps >= 1"):
        hvd.callbacks.LearningRateWarmupCallback(0)


# Elastic training


def _commits(folder: Path) -> None:
    with horovod() as rank:
        size = hvd.size()
        sampler = hvd.elastic.ElasticSampler(range(11), seed=3)  # type: ignore[arg-type]
        shared = hvd.allgather_object(list(sampler))
        assert set().union(*shared) == set(range(11))
        assert {len(part) for part in shared} == {len(sampler)} == {-(-11 // size)}
        model = network(seed=rank)
        optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters())
        path = folder / f"node{rank}"  # as on a disk of its own
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, path=path)

        @hvd.elastic.run
        def train(state: Any, until: int) -> None:
            for epoch in range(state.epoch, until):
                optimizer.zero_grad()
                loss_of(model, rank, epoch).backward()
                optimizer.step()
                state.sampler.record_batch(0, 2)
                state.epoch = epoch + 1
                state.commit()

        train(state, 2)
        same_everywhere(model)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        done = set().union(*(part[:2] for part in shared))
        state.epoch = 7
        with torch.no_grad():
            model[0].weight.add_(1)
        state.restore()
        assert state.epoch == 2
        assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
        assert set().union(*hvd.allgather_object(list(sampler))) == set(range(11)) - done

    # all processes start again; the node of rank 1 is another one, and has no file
    with horovod() as rank:
        if rank == 1:
            assert not path.exists()  # only the first process of a node writes
        sampler = hvd.elastic.ElasticSampler(range(11), seed=3)  # type: ignore[arg-type]
        model = network(seed=5)
        optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters())
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, path=path)
        called = []
        state.register_reset_callbacks([lambda: called.append(state.epoch)])
        seen = hvd.elastic.run(lambda state: (state.epoch, len(sampler)))(state)
        assert seen == (2, -(-(11 - len(done)) // size))
        assert called == [2]
        assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
        assert optimizer.state[model[0].weight]["momentum_buffer"].any()
        hvd.barrier()
        if rank == 0:
            path.write_bytes(path.read_bytes()[:-100] + bytes(100))
        if rank == 0:
            with pytest.raises(ValueError, match=r"node0 is damaged: .* Delete it"):
                state.resume()


def test_a_restart_goes_on_from_the_newest_commit(ranks: Pool, tmp_path: Path) -> None:
    ranks(2, _commits, tmp_path)


ELASTIC = """
import os, signal, torch
import ringstrategy.horovod as hvd
hvd.init()
model = torch.nn.Linear(3, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)

@hvd.elastic.run
def train(state):
    print(f"rank {hvd.rank()} begins at {state.epoch}", flush=True)
    for state.epoch in range(state.epoch, 6):
        if state.epoch == 3 and hvd.rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.full((2, 3), 1.0 + hvd.rank())).sum().backward()
        optimizer.step()
        state.commit()
    print(f"rank {hvd.rank()} ends with {model.bias.item():.4f}, {state._path} is there", flush=True)

torch.manual_seed(0)
torch.nn.init.zeros_(model.bias)
train(state)
"""


@pytest.mark.slow
def test_torchrun_restarts_from_the_last_commit(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ELASTIC)
    done = torchrun(2, script, "--max-restarts=1")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert done.stdout.count(f"rank {rank} begins at 0") == 1
        assert done.stdout.count(f"rank {rank} begins at 2") == 1  # the epoch of the last commit
        # steps 0, 1, 2, and again 2 to 5, of -0.2 each
        ends = re.search(rf"rank {rank} ends with -1.4000, (.*) is there", done.stdout)
        assert ends is not None
        assert not Path(ends[1]).exists()


def torchrun(size: int, script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}", "--rdzv-backend=c10d"]
    launcher += ["--rdzv-endpoint=localhost:0", *arguments, str(script)]
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    return subprocess.run(
        launcher, capture_output=True, text=True, check=False, timeout=100, env=environment, cwd=script.parent
    )


LAUNCHED = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"}


@pytest.mark.slow
def test_a_script_with_another_import_learns() -> None:
    script = Path(__file__).parents[1] / "examples" / "horovod_digits.py"
    done = torchrun(2, script)
    assert done.returncode == 0, done.stdout + done.stderr
    right = re.findall(r"^Epoch \d on 2 ranks: loss \S+, accuracy (\S+) %$", done.stdout, re.M)
    assert len(right) == 5
    assert float(right[-1]) > 80
