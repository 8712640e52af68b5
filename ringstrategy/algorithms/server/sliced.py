"""One optimizer's parameters, gradients and state in memory that all ranks share; each rank steps one slice of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ringstrategy.algorithms.server.gathered import Gathered
from ringstrategy.algorithms.server.segment import Layout, Segment
from ringstrategy.algorithms.server.shards import like, slices_of
from ringstrategy.buckets.dense import DenseBucket
from ringstrategy.server.fragment import Fragment
from ringstrategy.transport.base import Peers

_ALIGN = 32  # elements: parameters begin at multiples of 64 bytes, as torch's own do, for a product's same bits
_NUMBER = 8  # bytes of the place of a tensor without dimensions


class Kept(NamedTuple):
    """One of the tensors that an optimizer keeps of each parameter, and where those of all parameters begin."""

    name: str
    dtype: torch.dtype
    by_element: bool  # else without dimensions, such as a count of steps
    begin: int


class Sliced(Gathered):
    """Parameters lie in shared memory once, gradients once a rank. All ranks make one, at the same time.

    A step: `fill` the rank's gradients, meet the other ranks, `add` up the slice of all ranks, `step` it, meet again.

    Args:
        number: of the optimizer.
        optimizer: of this rank, which steps nothing.
        buckets: of its parameters, all of one dtype; they gather in shared memory from now on.
        peers: all on one host.
        what: to call it in messages.

    Attributes:
        views: the parameters' places in shared memory, by bucket and slot.
        is_shared: the parameters lie there.
        has_state: the slice has an optimizer, which goes on from its own state.
    """

    def __init__(
        self, number: int, optimizer: Optimizer, buckets: Sequence[DenseBucket], peers: Peers, what: str
    ) -> None:
        super().__init__(number, optimizer, buckets)
        self._rank, self._slots = peers.rank, [slot for bucket in buckets for slot in bucket.slots]
        self._lengths = [sum(_aligned(slot.parameter.numel()) for slot in bucket.slots) for bucket in buckets]
        self._own = self._slots[0].parameter.dtype
        numel, layout = sum(self._lengths), Layout()
        used = [layout.take(len(self._slots)) for _ in range(peers.size)]
        values = layout.take(numel * self._own.itemsize)
        rows = [layout.take(numel * self.dtype.itemsize) for _ in range(peers.size)]
        self._segment = Segment(peers, layout.nbytes, what)
        self._used = [self._segment.tensor(begin, len(self._slots), torch.uint8) for begin in used]
        self._offsets = list(self._move(rows[peers.rank]))
        self.views = [
            self._segment.tensor(values + offset * self._own.itemsize, slot.view.numel(), self._own).as_strided(
                slot.view.shape, slot.view.stride()
            )
            for slot, offset in zip(self._slots, self._offsets, strict=True)
        ]
        self.is_shared = self.has_state = False

        self._shards = slices_of(buckets, peers.size, _ALIGN)
        self._shard = self._shards[peers.rank]
        self._begin = sum(shard.numel for shard in self._shards[: peers.rank])
        self._values = self._slice(self._segment, values, self._own)
        self._rows = [self._slice(self._segment, row, self.dtype) for row in rows]
        self._sum = torch.zeros(self._shard.numel, dtype=self.dtype)
        self._fragment: Fragment | None = None

        self._firsts = [0]  # of each rank's pieces, among those of all
        for shard in self._shards:
            self._firsts.append(self._firsts[-1] + len(shard.pieces))
        layout = Layout()
        self._there_begin = layout.take(self._firsts[-1])
        self._kept = list(self._plan_state(layout))
        self._state = Segment(peers, layout.nbytes, what) if self._kept else None
        self._settled: set[int] = set()  # pieces whose state lies there

    def _move(self, row: int) -> Iterator[int]:
        """Buckets gather in this rank's row; yields where each parameter lies there."""
        offset = 0
        for bucket, length in zip(self.buckets, self._lengths, strict=True):
            begin = row + offset * self.dtype.itemsize
            bucket.move(self._segment.tensor(begin, length, self.dtype), _ALIGN)
            yield from (offset + int(slot.view.storage_offset()) for slot in bucket.slots)
            offset += length

    def _slice(self, segment: Segment, begin: int, dtype: torch.dtype) -> Tensor:
        """This rank's, of all that begins there."""
        return segment.tensor(begin + self._begin * dtype.itemsize, self._shard.numel, dtype)

    # Values

    @torch.no_grad()
    def write(self) -> None:
        """Rank 0's values count."""
        if self._rank == 0:
            for slot, view in zip(self._slots, self.views, strict=True):
                view.copy_(slot.parameter)

    def enter(self) -> None:
        """Once rank 0 has written them, the parameters are the shared ones."""
        for slot, view in zip(self._slots, self.views, strict=True):
            slot.parameter.data = view
        self.is_shared = True

    def check_views(self) -> None:
        """RuntimeError with the cure unless the parameters still lie in shared memory."""
        for slot, view in zip(self._slots, self.views, strict=True):
            there = slot.parameter
            if there.numel() and (there.data_ptr(), there.dtype, there.stride()) != (
                view.data_ptr(),
                view.dtype,
                view.stride(),
            ):
                raise RuntimeError(
                    f"parameter {slot.name} has got memory of its own since training began, as by module.to(...) or "
                    "an assignment to .data, so this rank would not see its steps: convert the module before training, "
                    "and change values in place, as parameter.copy_(values) does"
                )

    @torch.no_grad()
    def leave(self, *, takes_state: bool) -> None:
        """The parameters get memory of their own, and the rank's optimizer the whole state, if it `takes_state`."""
        for slot, view in zip(self._slots, self.views, strict=True):
            if self.is_shared and slot.parameter.data_ptr() == view.data_ptr():
                slot.parameter.data = view.clone()
        if self._state is not None:
            if takes_state:
                self._state.make_private()
                self.fetch_state()
            self._state.close()
        self._segment.close()

    # A step

    @torch.no_grad()
    def fill(self) -> None:
        """This rank's row has its gradients, zeros where there are none."""
        for place, bucket in enumerate(self.buckets):
            if place not in self.pushed:
                bucket.buffer.zero_()
        self._used[self._rank].copy_(torch.tensor([slot.parameter in self._sent for slot in self._slots]))

    def add(self) -> float:
        """Sum the slice of all ranks, in their order; returns the square of its norm."""
        self._sum.copy_(self._rows[0])
        for row in self._rows[1:]:
            self._sum.add_(row)
        return float(torch.linalg.vector_norm(self._sum, dtype=torch.float64)) ** 2

    def step(self, options: Sequence[Mapping[str, Any]], scale: float) -> None:
        """Step the slice by the sum, times `scale`. What no rank has used stays as it is."""
        assert self._fragment is not None
        if scale != 1.0:
            self._sum.mul_(scale)
        used = torch.stack(self._used).any(0).tolist()
        of_any = {slot.parameter for slot, one in zip(self._slots, used, strict=True) if one}
        pieces = [number for number, piece in enumerate(self._shard.pieces) if piece.parameter in of_any]
        self._fragment.step(self._sum.to(self._own), 1.0, options, pieces)
        self._settle(pieces)

    # The optimizer's state

    def load_state(self) -> None:
        """The slice goes on from the state that the rank's optimizer has."""
        self._fragment = self._shard.over(self._values, self.optimizer, in_place=True)
        self._settled, self.has_state = set(), True
        if self._state is not None:
            self._there()[self._firsts[self._rank] : self._firsts[self._rank + 1]] = 0
        self._settle(range(len(self._shard.pieces)))

    def _there(self) -> Tensor:
        """Which pieces have state."""
        assert self._state is not None
        return self._state.tensor(self._there_begin, self._firsts[-1], torch.uint8)

    def _plan_state(self, layout: Layout) -> Iterator[Kept]:
        for name, value in _kept_by(self.optimizer, self._own).items():
            by_element = value.dim() > 0
            nbytes = sum(self._lengths) * value.dtype.itemsize if by_element else self._firsts[-1] * _NUMBER
            yield Kept(name, value.dtype, by_element, layout.take(nbytes))

    @torch.no_grad()
    def _settle(self, pieces: Collection[int]) -> None:
        """The state of pieces that were stepped for the first time moves to shared memory."""
        assert self._fragment is not None
        for number in pieces:
            state = self._fragment.optimizer.state.get(self._fragment.parameters[number])
            if state and number not in self._settled:
                kept = {each.name: each for each in self._kept}
                for name, value in state.items():
                    if not isinstance(value, Tensor) or name not in kept:
                        raise RuntimeError(
                            f"{type(self.optimizer).__name__} keeps {name!r} since an option was changed, for which "
                            "there is no place: set the option, such as a momentum, when the optimizer is made"
                        )
                    state[name] = self._place(kept[name], number).copy_(value)
                self._there()[self._firsts[self._rank] + number] = 1
                self._settled.add(number)

    def _place(self, kept: Kept, number: int) -> Tensor:
        """Of one of this rank's pieces."""
        assert self._state is not None
        if kept.by_element:
            return self._shard.pieces[number].place.of(self._slice(self._state, kept.begin, kept.dtype))
        return self._number(kept, self._firsts[self._rank] + number)

    def _number(self, kept: Kept, piece: int) -> Tensor:
        assert self._state is not None
        return self._state.tensor(kept.begin + piece * _NUMBER, 1, kept.dtype).reshape(())

    def fetch_state(self) -> None:
        """The rank's optimizer has the state of all slices: views of shared memory, which is not to be written."""
        if self._state is None:
            return
        first: dict[Parameter, int] = {}
        for number, piece in enumerate(piece for shard in self._shards for piece in shard.pieces):
            first.setdefault(piece.parameter, number)
        there = self._there().tolist()
        for slot, offset in zip(self._slots, self._offsets, strict=True):
            one = first.get(slot.parameter)  # of its pieces, which have the same numbers
            if one is not None and there[one]:
                self.optimizer.state[slot.parameter] = {
                    kept.name: self._whole(kept, slot.view, offset) if kept.by_element else self._number(kept, one)
                    for kept in self._kept
                }

    def _whole(self, kept: Kept, like_view: Tensor, offset: int) -> Tensor:
        """Of one parameter."""
        assert self._state is not None
        flat = self._state.tensor(kept.begin + offset * kept.dtype.itemsize, like_view.numel(), kept.dtype)
        return flat.as_strided(like_view.shape, like_view.stride())


def _aligned(numel: int) -> int:
    return -(-numel // _ALIGN) * _ALIGN


def _kept_by(optimizer: Optimizer, dtype: torch.dtype) -> dict[str, Tensor]:
    """What it keeps of a parameter of two elements that it has stepped, in any of its groups, and what it has now."""
    found = {name: value for state in optimizer.state.values() for name, value in state.items()}
    probes = [[Parameter(torch.zeros(2, dtype=dtype))] for _ in optimizer.param_groups]
    twin = like(optimizer, probes)
    for group, [probe] in zip(optimizer.param_groups, probes, strict=True):
        for parameter in group["params"]:
            for name, value in optimizer.state.get(parameter, {}).items():  # of one that begins with state, as Adagrad
                small = torch.zeros(2, dtype=value.dtype) if isinstance(value, Tensor) and value.dim() else value
                twin.state[probe][name] = small.clone() if isinstance(small, Tensor) else small
        probe.grad = torch.zeros(2, dtype=dtype)
    twin.step()
    found |= {name: value for state in twin.state.values() for name, value in state.items()}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}
