"""The plan: every parameter once, in reverse order, within the size, the same from the same arguments."""

from __future__ import annotations

import pytest
import torch
from fakes import FakePeers, on_all_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ringstrategy.buckets.base import Bucket
from ringstrategy.buckets.dense import DenseBucket
from ringstrategy.buckets.plan import plan_buckets, small
from ringstrategy.buckets.sparse import SparseBucket
from ringstrategy.codecs import BlockInt, Cast, Codec, Gaussian, Identity, Rotated
from ringstrategy.collectives import Direct
from ringstrategy.transport.base import Done

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def planned(
    parameters: dict[str, nn.Parameter], capacity: int, *, sparse: frozenset[str] = frozenset(), first_index: int = 0
) -> list[Bucket]:
    def codec_of(name: str, parameter: nn.Parameter) -> Codec:
        return Identity() if parameter.dim() < 2 else Cast("bf16")

    return plan_buckets(parameters, sparse, codec_of, lambda codec: False, capacity, first_index)


shapes = st.lists(st.tuples(st.lists(st.integers(0, 40), max_size=3), st.sampled_from(DTYPES)), min_size=1, max_size=25)


@given(shapes=shapes, capacity=st.integers(1, 5000))
@settings(max_examples=150, deadline=None)
def test_every_parameter_has_one_place(shapes: list[tuple[list[int], torch.dtype]], capacity: int) -> None:
    parameters = {f"p{i}": nn.Parameter(torch.empty(shape, dtype=dtype)) for i, (shape, dtype) in enumerate(shapes)}
    buckets = planned(parameters, capacity)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    assert sorted(slot.name for bucket in buckets for slot in bucket.slots) == sorted(parameters)
    last_places = []
    for bucket in buckets:
        assert isinstance(bucket, DenseBucket)
        filled = torch.zeros_like(bucket.buffer)
        bucket.buffer.zero_()
        for slot in bucket.slots:
            assert slot.view.shape == slot.parameter.shape
            assert bucket.buffer.dtype == (slot.parameter.dtype if slot.parameter.dtype.itemsize > 2 else torch.float32)
            slot.view.add_(1)
        filled += bucket.buffer
        assert torch.equal(filled, torch.ones_like(filled))  # no gap, no overlap
        full = [slot for slot in bucket.slots if slot.parameter.numel()]
        largest = max((slot.view.nbytes for slot in full), default=0)
        assert bucket.buffer.nbytes <= capacity or bucket.buffer.nbytes - largest <= small(capacity)
        places = [list(parameters).index(slot.name) for slot in bucket.slots]
        assert places == sorted(places, reverse=True)
        last_places.append(places[-1])
    assert last_places == sorted(last_places, reverse=True)  # in the order in which backward fills them
    again = planned(parameters, capacity)
    assert [bucket.describe() for bucket in again] == [bucket.describe() for bucket in buckets]


def test_views_keep_the_strides_of_dense_parameters() -> None:
    channels_last = nn.Parameter(torch.empty(4, 3, 5, 5).to(memory_format=torch.channels_last))
    expanded = nn.Parameter(torch.empty(1, 6).expand(5, 6))
    [bucket] = planned({"a": channels_last, "b": expanded}, 1 << 20)
    b, a = bucket.slots
    assert a.view.stride() == channels_last.stride()
    assert b.view.is_contiguous()


@pytest.mark.parametrize("codec", [Rotated(Gaussian(2)), BlockInt(8)], ids=str)
def test_a_bucket_ends_with_a_whole_block(codec: Codec) -> None:
    """A short block would not be rotated, and few levels without a rotation are wrong the same way at each step."""
    parameters = {"a": nn.Parameter(torch.zeros(300)), "b": nn.Parameter(torch.zeros(7, 11))}
    [bucket] = plan_buckets(parameters, frozenset(), lambda name, parameter: codec, lambda codec: True, 1 << 20, 0)
    assert bucket.residuals.lost is not None
    bucket.residuals.lost.fill_(5.0)
    assert isinstance(bucket, DenseBucket)
    assert bucket.numel == 377
    assert bucket.buffer.numel() == 512
    bucket.buffer.fill_(3.0)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    bucket.pack(4)
    assert bucket.buffer[377:].eq(0).all()
    assert bucket.buffer[:377].eq(0.25).all()
    assert bucket.residuals.given is not None
    assert bucket.residuals.given[377:].eq(0).all(), "in no checkpoint, so it must not bear on what is sent"
    assert bucket.residuals.given[:377].eq(5).all()


def test_an_empty_parameter_hides_nobody_who_keeps_a_gradient() -> None:
    parameters = {"full": nn.Parameter(torch.ones(4)), "empty": nn.Parameter(torch.ones(0))}
    (bucket,) = planned(parameters, 1000)
    assert isinstance(bucket, DenseBucket)
    for round_ in range(2):
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, 1.0 + round_)
        bucket.pack(1)
        bucket.unpack(lambda slot: True)
        if round_ == 0:
            kept = parameters["full"].grad
    assert kept.tolist() == [1] * 4


def test_gradients_that_somebody_keeps_are_left_to_them() -> None:
    parameters = {name: nn.Parameter(torch.ones(numel)) for name, numel in (("a", 4), ("b", 5), ("nobody's", 3))}
    (bucket,) = planned(parameters, 1000)
    a, b, unused = parameters.values()
    a.grad, b.grad = torch.full((4,), 2.0), torch.full((5,), 3.0)
    kept = a.grad
    bucket.pack(2)
    bucket.unpack(lambda slot: slot.name != "nobody's")
    assert unused.grad is None
    assert a.grad is kept, "it gets the mean where it is"
    assert kept.tolist() == [1] * 4
    slots = {slot.name: slot for slot in bucket.slots}
    assert not slots["a"].holds_gradient()
    assert slots["b"].holds_gradient()
    kept = b.grad
    a.grad, b.grad = torch.full((4,), 4.0), torch.full((5,), 6.0)
    bucket.pack(2)
    bucket.unpack(lambda slot: slot.name != "nobody's")
    assert kept.tolist() == [1.5] * 5, "the bucket takes new memory"
    assert (a.grad.tolist(), b.grad.tolist()) == ([2.0] * 4, [3.0] * 5)


@pytest.mark.parametrize(
    ("rows", "refused"),
    [
        ([0], ""),
        ([0, 9], ""),
        ([1, 10], "row 10"),
        ([-1, 2], "row -1"),
        ([10**12], "row 1000000000000"),
        ([*range(10), 9], "11 rows"),
    ],
)
def test_rows_that_a_parameter_has_not_are_refused_with_the_rank(rows: list[int], refused: str) -> None:
    """An optimizer would write outside of the parameter."""

    def one(peers: FakePeers) -> None:
        parameter = nn.Parameter(torch.zeros(10, 2))
        bucket = SparseBucket(0, "rows", parameter)
        parameter.grad = torch.sparse_coo_tensor([[3]], torch.ones(1, 2), (10, 2), check_invariants=True)
        bucket.gather(2)
        if peers.rank == 1:
            bucket._indices, bucket._values = torch.tensor([rows]), torch.ones(len(rows), 2)
        if refused:
            with pytest.raises(ValueError, match=f"rank 1 sent {refused} of the gradient of rows, which has 10 rows"):
                bucket.launch(peers, Direct(), Done(), 0, "")
        else:
            bucket.launch(peers, Direct(), Done(), 0, "").wait()
            bucket.scatter(lambda slot: True)
            assert parameter.grad.to_dense()[:, 0].nonzero().view(-1).tolist() == sorted([3, *rows])

    on_all_ranks(2, one)
