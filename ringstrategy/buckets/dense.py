"""One flat buffer of gradients.

Where the buffer's dtype is the gradient's, gradients become views of it and the mean needs no copy back; 16-bit
gradients are widened into a float32 buffer, since no sum is taken in 16 bits; without a codec they travel in 16.

On a GPU over NCCL the buffer may only receive the mean: the launch that encodes then reads the gradients where autograd
put them. They keep that memory until it has. So no more than a few buckets do it at once: where exchanges queue up, the
gradients of the others are copied, and their memory is free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from ringstrategy.buckets.base import Bucket
from ringstrategy.buckets.slot import Slot, references
from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.collectives.base import Collective, Summand, mean_
from ringstrategy.kernels import operations
from ringstrategy.transport.agree import BUCKET, INDENT
from ringstrategy.transport.base import Peers, Waitable

if TYPE_CHECKING:
    from ringstrategy.kernels.operations import Places

_IN_PLACE = 2  # exchanges under way, from which on gradients are copied


class DenseBucket(Bucket):
    """One flat buffer of whole blocks of the codec: behind the gradients, up to block - 1 zeros.

    Args:
        index: place in the order of launches.
        parameters: of one device and dtype of sums, with their names.
        dtype: of the buffer.
        codec: for all of them.
        feedback: keep a residual of the buffer's size.
        residual_dtype: of the residual; None: the buffer's.
    """

    def __init__(
        self,
        index: int,
        parameters: list[tuple[str, Parameter]],
        dtype: torch.dtype,
        codec: Codec,
        feedback: bool,
        residual_dtype: torch.dtype | None = None,
    ) -> None:
        numel = sum(parameter.numel() for _, parameter in parameters)
        device = parameters[0][1].device
        # a short block would not be rotated
        self.buffer = torch.zeros(-(-numel // codec.block) * codec.block, dtype=dtype, device=device)
        self._numel, self._padding = numel, self.buffer[numel:]
        residual = torch.zeros_like(self.buffer, dtype=residual_dtype) if feedback else None
        self.codec = codec
        codec.warm_up(device)
        slots, offset = [], 0
        for name, parameter in parameters:
            slots.append(Slot(name, parameter, _view_like(self.buffer, offset, parameter)))
            offset += parameter.numel()
        super().__init__(index, slots, residual)
        # what a kernel counts on: the gradient then lies in memory as its view does
        self._planned = [(slot.parameter.dtype, slot.view.stride()) for slot in slots]
        self._own_references = 0
        self._places: Places | None = None
        self._sources: list[Tensor | None] = []  # gradients as planned, from `gather` on until nobody reads them
        self._others: list[tuple[Slot, Tensor]] = []  # gradients of other dtypes or strides
        self._scale = 1.0
        if dtype == torch.float32 and codec.needs_kernels:
            numels = [*(slot.parameter.numel() for slot in slots), self._padding.numel()]  # no tensor goes to the last
            dtypes = [*(slot.parameter.dtype for slot in slots), torch.float32]
            self._places = operations.lay_out.on(device)(numels, dtypes, device)

    @property
    def numel(self) -> int:
        """Elements of the gradients."""
        return self._numel

    def describe(self) -> str:
        """The bucket's line, then one for each parameter."""
        lines = [f"{BUCKET}{self.index}: {self.numel} x {self.buffer.dtype} through {self.codec}"]
        lines += [
            f"{INDENT}{slot.name}: {tuple(slot.parameter.shape)} {slot.parameter.dtype} strides {slot.view.stride()}"
            for slot in self.slots
        ]
        return "\n".join(lines)

    @torch.no_grad()
    def gather(self, divisor: float) -> None:
        """See `Bucket.gather`. Copies nothing where the gradient already lives in the buffer.

        Gradients that kernels move are only found here: `launch` knows whether they must be in the buffer.
        """
        self.leave_held_memory()
        if self.residuals.given is not None and self._padding.numel():
            self.residuals.given[self.numel :].zero_()  # in no checkpoint, so it must not bear on what is sent
        self._scale = 1 / divisor
        if self._places is not None:
            self._find()
            return
        self._padding.zero_()
        for slot in self.slots:
            self._copy(slot, self._source(slot), self._scale)

    def leave_held_memory(self) -> None:
        """Take new memory if somebody holds a gradient that lived in the buffer. Call it before the buffer changes."""
        self._own_references = self._own_references or references(self.buffer)  # nothing was given away so far
        living = sum(slot.holds_gradient() and not slot.is_left() for slot in self.slots)
        if references(self.buffer) <= self._own_references + living:
            return
        self.move(torch.zeros_like(self.buffer))

    def move(self, buffer: Tensor, align: int = 1) -> None:
        """Gather in other memory from now on: zeros, each gradient at a multiple of `align` elements."""
        assert align == 1 or self._places is None, "kernels count on gradients without gaps"
        self.buffer, offset = buffer, 0
        for slot in self.slots:
            slot.view = _view_like(buffer, offset, slot.parameter)
            offset += -(-slot.parameter.numel() // align) * align
        self._padding = buffer[offset:]
        self._own_references = references(buffer)

    @override
    def take_gradients(self) -> None:
        sources = self._sources or [None] * len(self.slots)
        for place, slot in enumerate(self.slots):
            if slot.trains:  # a frozen one's gradient does not travel
                slot.take_gradient(known=sources[place] is not None and sources[place] is slot.parameter.grad)
        self._sources = []

    def _find(self) -> None:
        self._sources, self._others = [], []
        for slot, planned in zip(self.slots, self._planned, strict=True):
            source = self._source(slot)
            fits = source is not None and (source.dtype, source.stride()) == planned
            self._sources.append(source if fits else None)
            if source is not None and not fits:
                self._others.append((slot, source))

    def fill(self) -> None:
        """Copy the gradients that kernels move to the buffer, in one launch if they are as planned."""
        if not self._sources:
            return
        assert self._places is not None
        sources, self._sources = self._sources, []
        others, self._others = self._others, []
        self._places.pack([*sources, None], self.buffer, scale=self._scale)
        for slot, source in others:
            self._copy(slot, source, self._scale)

    def _may_read_in_place(self, peers: Peers, collective: Collective) -> bool:
        """Whether the launch that encodes can read gradients where they lie."""
        if self._places is None or not peers.queues or peers.size == 1 or not collective.carries_extras(peers):
            return False
        launches = self.codec.launches(self.buffer, 0)
        return launches is not None and launches.gathers

    def _source(self, slot: Slot) -> Tensor | None:
        """The gradient that travels; None: zeros."""
        grad = slot.parameter.grad if self._scale else None  # infinity times zero would be NaN
        if not slot.trains:
            slot.release()
            return None
        if grad is not None and grad.is_sparse:
            raise TypeError(
                f"parameter {slot.name} got a sparse gradient, but no module that owns it has `sparse=True`: "
                "set that attribute so that the gradient can travel sparse, or use a dense layer"
            )
        return grad

    def _copy(self, slot: Slot, source: Tensor | None, scale: float) -> None:
        view = slot.view
        if source is None:
            view.zero_()
        elif slot.holds_gradient():
            view.mul_(scale)
        elif source.dtype == view.dtype:
            torch.mul(source.detach(), scale, out=view)
        else:
            view.copy_(source)
            view.mul_(scale)

    @override
    def carries_flags(self, peers: Peers, collective: Collective) -> bool:
        return self.buffer.device.type == "cpu" and collective.carries_extras(peers)

    def rider(self, following: Bucket, peers: Peers, collective: Collective, seed: int) -> Summand | None:
        """See `Bucket.rider`. Not with a large bucket that is sent in place: it would have to be copied."""
        if not isinstance(following, DenseBucket) or following.buffer.device != self.buffer.device:
            return None
        in_place = following.codec.raw(following.buffer) is not None and not following.is_small
        if not self.is_small or in_place or not collective.carries_extras(peers):
            return None
        self.fill()
        return Summand(self.buffer, self.codec, self.residuals.given, self.residuals.lost, seed)

    def warm_up(self, peers: Peers, collective: Collective) -> None:
        """See `Bucket.warm_up`: zeros travel as gradients will, through kernels for the same sizes."""
        lost = self.residuals.lost
        residual = None if lost is None else torch.zeros_like(lost)
        seed = derive_seed(0, 0, self.index)  # Triton compiles again for one of more bits
        ways: list[tuple[bool, tuple[Summand, ...]]] = [(False, ())]
        if self._may_read_in_place(peers, collective):
            ways.append((True, ()))
        if self.is_small and collective.carries_extras(peers):  # it may ride: here, with itself
            ways.append((False, (Summand(torch.zeros_like(self.buffer), self.codec, residual, seed=seed),)))
        for in_place, riders in ways:
            self._sources = [None] * len(self.slots) if self._places is not None else []
            exchange = self._exchange(peers, collective, None, riders, in_place=in_place)
            peers.submit(partial(exchange, residual, None, seed), "while setting up").wait()
        self._sources = []
        self.warm_up_copies()
        self.residuals.warm_up()

    def warm_up_copies(self) -> None:
        """The part of `warm_up` that is `gather` and `scatter`."""
        if self._places is not None:
            nothing = [None] * len(self._places.numels)
            self._places.pack(nothing, self.buffer)
            self._places.unpack(self.buffer, nothing)

    @override
    def launch(
        self,
        peers: Peers,
        collective: Collective,
        agreed: Waitable,
        seed: int,
        where: str,
        flags: Tensor | None = None,
        riders: Sequence[Summand] = (),
    ) -> Waitable:
        given, lost = self.residuals.given, self.residuals.lost
        # the same bits either way, so ranks may differ
        in_place = self._may_read_in_place(peers, collective) and not self._others and peers.backlog() < _IN_PLACE
        exchange = self._exchange(peers, collective, flags, riders, in_place=in_place)

        def work() -> None:
            agreed.wait()
            exchange(given, lost, seed)

        return peers.submit(work, where)

    def _exchange(
        self,
        peers: Peers,
        collective: Collective,
        flags: Tensor | None = None,
        riders: Sequence[Summand] = (),
        *,
        in_place: bool,
    ) -> Callable[[Tensor | None, Tensor | None, int], None]:
        """What the communication thread does with a residual, a place for what is lost, and a seed.

        It averages the gradients that `gather` found: read where they lie, if `in_place`, and else from the buffer.
        """
        if not in_place:
            self.fill()
        places, scale = self._places, self._scale
        sources = self._sources  # the task keeps them until the device has read them
        if in_place:
            assert places is not None
            addresses = places.addresses([*sources, None])

        def exchange(residual: Tensor | None, lost: Tensor | None, seed: int) -> None:
            source = None
            if in_place:
                assert places is not None
                source = places.source(sources, addresses, scale)
            summand = Summand(self.buffer, self.codec, residual, lost, seed, source)
            mean_(summand, peers, collective, flags=flags, riders=riders)

        return exchange

    @torch.no_grad()
    @override
    def scatter(self, used: Callable[[Slot], bool]) -> None:
        if self._sources:
            self.take_gradients()
        taken: list[Tensor | None] = []
        written: set[int] = set()
        for slot, planned in zip(self.slots, self._planned, strict=True):
            taken.append(None)
            parameter, view = slot.parameter, slot.view
            if not slot.trains or (parameter.grad is None and not used(slot)):
                continue
            if parameter.grad is None:
                parameter.grad = view.detach() if parameter.dtype == view.dtype else torch.empty_like(parameter)
            if slot.take_gradient() or not view.numel():
                continue
            if parameter.grad.data_ptr() in written:  # autograd may give equal gradients one memory; means may differ
                parameter.grad = view.detach() if parameter.dtype == view.dtype else view.to(parameter.dtype)
                continue
            written.add(parameter.grad.data_ptr())
            if self._places is not None and (parameter.grad.dtype, parameter.grad.stride()) == planned:
                taken[-1] = parameter.grad
            else:
                parameter.grad.copy_(view)
        if self._places is not None and any(grad is not None for grad in taken):
            self._places.unpack(self.buffer, [*taken, None])


def _view_like(buffer: Tensor, offset: int, parameter: Parameter) -> Tensor:
    # the parameter's own strides if it is dense, e.g. channels_last
    strides = torch.empty_like(parameter, device="meta").stride()
    return buffer.as_strided(parameter.shape, strides, offset)
