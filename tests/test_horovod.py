"""Horovod's shape, on real processes with other data on each, against plain torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor

import ringstrategy
import ringstrategy.horovod as hvd
from ringstrategy.integrations.horovod import named

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
        flags = hvd.broadcast(torch.tensor([True, rank == 0]), 1)
        assert flags.tolist() == [True, False]

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
        hvd.barrier()


@pytest.mark.parametrize("size", [2, 3])
def test_rows_go_where_they_should(ranks: Pool, size: int) -> None:
    ranks(size, _moves)


def _flow_back() -> None:
    """Each rank's loss is the product with weights of its own; the twin sums them over all tensors, in float64."""
    with horovod() as rank:
        size = hvd.size()

        def check(
            operation: Callable[[Tensor], Tensor], twin: Callable[[list[Tensor]], list[Tensor]], rows: int
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
            close(mine.grad, torch.zeros_like(mine) if expected is None else expected)

        everyone: Callable[[Tensor], list[Tensor]] = lambda value: [value] * size  # noqa: E731
        check(lambda x: hvd.allreduce(x, op=hvd.Sum), lambda xs: everyone(torch.stack(xs).sum(0)), 3)
        check(
            lambda x: hvd.allreduce(x, prescale_factor=3.0, postscale_factor=0.5),
            lambda xs: everyone(1.5 * torch.stack(xs).mean(0)),
            3,
        )
        check(lambda x: hvd.allgather(x), lambda xs: everyone(torch.cat(xs)), 3)
        check(lambda x: hvd.broadcast(x, 1), lambda xs: everyone(xs[1]), 3)
        check(
            lambda x: hvd.alltoall(x), lambda xs: [torch.cat([x.chunk(size)[r] for x in xs]) for r in range(size)], size
        )
        check(lambda x: hvd.reducescatter(x), lambda xs: list(torch.stack(xs).mean(0).chunk(size)), 2 * size)
        uneven = data(rank, rank + 1, 2).requires_grad_()
        hvd.allgather(uneven).square().sum().backward()
        assert uneven.grad is not None
        close(uneven.grad, 2 * size * uneven)
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
    with mock.patch.object(named, "_LOOK", timedelta(seconds=0.2)), horovod() as rank:
        first = ("loss", "accuracy")[rank]
        with pytest.raises(ringstrategy.PlanMismatchError) as raised:
            hvd.allreduce(torch.ones(1), name=first)  # and then `second`
        hvd.tell(raised.value)
        return str(raised.value)


def test_ranks_that_wait_for_different_names_are_told_which(ranks: Pool) -> None:
    zero, one = ranks(2, _waits_in_vain, limit=30)
    assert "rank 0 waits for 'loss', which rank 1 has not submitted; rank 1 waits for 'accuracy'" in zero
    assert "rank 1 waits for 'accuracy', which rank 0 has not submitted; rank 0 waits for 'loss'" in one


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
