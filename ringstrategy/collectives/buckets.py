"""Gather gradients into flat buffers by a plan that never changes, and scatter the means back.

A dense bucket is one flat buffer. Where the buffer's dtype is the gradient's, gradients become views of it and the
mean needs no copy back; 16-bit gradients are widened into a float32 buffer, since no sum is taken in 16 bits. A sparse
gradient is a bucket of its own and stays sparse.

Gradients move into the buffer only while nobody else holds their memory. Who keeps a gradient (`kept = p.grad`, a view
of it) sees what torch DDP would show: the buffer then leaves that memory to the holder and takes new, and a gradient
whose own memory is held gets the mean by a copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from ringstrategy.codecs.base import Codec
from ringstrategy.collectives.agree import BUCKET, INDENT, exchange
from ringstrategy.collectives.aliases import gradient_is_held, gradient_is_kept, references
from ringstrategy.collectives.base import Collective, mean_
from ringstrategy.collectives.peers import Peers, Waitable
from ringstrategy.collectives.residuals import Residuals

if TYPE_CHECKING:
    from ringstrategy.kernels.buckets import Places

FIRST_BUCKET_BYTES = 1 << 20  # once the first bucket has these it is closed: the wire should not idle for long
_WIDENED = (torch.float16, torch.bfloat16)


@dataclass
class Slot:
    """A parameter's place in a bucket; `view` has the parameter's shape and strides."""

    name: str
    parameter: Parameter
    view: Tensor
    residual: Tensor | None = None
    gone: bool = False  # from the model

    @property
    def trains(self) -> bool:
        """Does its gradient travel?"""
        return self.parameter.requires_grad and not self.gone

    def release(self) -> None:
        """Give a gradient that lives in the buffer memory of its own, before the buffer is used for something else."""
        if self.holds_gradient():
            self.parameter.grad = self.view.clone()

    def is_left(self) -> bool:
        """Its gradient does not travel, and somebody keeps it: the bucket must leave that memory to them."""
        return not self.trains and gradient_is_kept(self.parameter)

    def take_gradient(self) -> bool:
        """Let the gradient live in the buffer; False if another dtype or somebody who holds its memory forbids it."""
        if self.holds_gradient():
            return True
        grad = self.parameter.grad
        movable = grad is not None and not grad.is_sparse and grad.dtype == self.view.dtype
        del grad
        if not movable or gradient_is_held(self.parameter):
            return False
        self.parameter.grad = self.view.detach()  # another tensor, so that `references` counts who keeps it
        return True

    def holds_gradient(self) -> bool:
        """Does the parameter's gradient live in the buffer?"""
        grad = self.parameter.grad
        return (
            grad is not None
            and not grad.is_sparse
            and grad.numel() > 0  # the addresses of empty tensors are alike
            and grad.dtype == self.view.dtype
            and grad.data_ptr() == self.view.data_ptr()
            and grad.stride() == self.view.stride()
        )


class Bucket(ABC):
    """Some parameters whose gradients travel together.

    Args:
        index: place in the order of launches.
        slots: the parameters' places.
        residual: the flat buffer that the slots' residuals are views of, if there is one.
    """

    def __init__(self, index: int, slots: list[Slot], residual: Tensor | None = None) -> None:
        self.index, self.slots = index, slots
        self.residuals = Residuals(slots, residual)

    @property
    @abstractmethod
    def numel(self) -> int:
        """Elements that the last exchange averaged."""

    @abstractmethod
    def describe(self) -> str:
        """Everything that must be equal on all ranks, one line a fact."""

    @abstractmethod
    def pack(self, size: int) -> None:
        """Gather the gradients, scaled by 1/size. A missing one counts as zeros, a frozen one stays its own."""

    def take_gradients(self) -> None:
        """After `pack`: let gradients live in the buffer, where nobody else holds their memory."""

    @abstractmethod
    def launch(self, peers: Peers, collective: Collective, agreed: Waitable, seed: int, where: str) -> Waitable:
        """Start the exchange of what `pack` gathered, once the ranks have `agreed`."""

    @abstractmethod
    def unpack(self, used: Callable[[Slot], bool]) -> None:
        """Make the means the gradients, except where no rank `used` the parameter: there None stays None."""

    def state(self) -> dict[str, Tensor]:
        """What must survive a checkpoint beside residuals, by parameter name; the same on all ranks."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave, for those of this bucket's parameters that are in it."""


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
        self._padding = self.buffer[numel:]
        self.residual = torch.zeros_like(self.buffer, dtype=residual_dtype) if feedback else None
        self.codec = codec
        slots, offset = [], 0
        for name, parameter in parameters:
            slots.append(
                Slot(
                    name,
                    parameter,
                    _view_like(self.buffer, offset, parameter),
                    None if self.residual is None else _view_like(self.residual, offset, parameter),
                )
            )
            offset += parameter.numel()
        super().__init__(index, slots, self.residual)
        # what a kernel counts on: the gradient then lies in memory as its view does
        self._planned = [(slot.parameter.dtype, slot.view.stride()) for slot in slots]
        self._own_references = 0
        self._places: Places | None = None
        if device.type == "cuda" and dtype == torch.float32 and codec.needs_kernels:
            self._places = self._lay_out(device)

    def _lay_out(self, device: torch.device) -> Places:
        from ringstrategy.kernels.buckets import Places

        numels = [*(slot.parameter.numel() for slot in self.slots), self._padding.numel()]  # no tensor goes to the last
        return Places(numels, [*(dtype for dtype, _ in self._planned), torch.float32], device)

    @property
    def numel(self) -> int:
        """Elements of the gradients."""
        return self.buffer.numel() - self._padding.numel()

    def describe(self) -> str:
        """The bucket's line, then one for each parameter."""
        lines = [f"{BUCKET}{self.index}: {self.numel} x {self.buffer.dtype} through {self.codec}"]
        lines += [
            f"{INDENT}{slot.name}: {tuple(slot.parameter.shape)} {slot.parameter.dtype} strides {slot.view.stride()}"
            for slot in self.slots
        ]
        return "\n".join(lines)

    @torch.no_grad()
    def pack(self, size: int) -> None:
        """See `Bucket.pack`. Copies nothing where the gradient already lives in the buffer."""
        self.leave_held_memory()
        if self.residual is not None:
            self.residual[self.numel :].zero_()  # of the padding: in no checkpoint, so it must not bear on what is sent
        if self._places is not None:
            self._gather(1 / size)
            return
        self._padding.zero_()
        for slot in self.slots:
            self._copy(slot, self._source(slot), 1 / size)

    def leave_held_memory(self) -> None:
        """Take new memory if somebody holds a gradient that lived in the buffer. Call it before the buffer changes."""
        self._own_references = self._own_references or references(self.buffer)  # nothing was given away so far
        living = sum(slot.holds_gradient() and not slot.is_left() for slot in self.slots)
        if references(self.buffer) <= self._own_references + living:
            return
        numel = self.numel
        self.buffer = torch.zeros_like(self.buffer)
        self._padding = self.buffer[numel:]
        offset = 0
        for slot in self.slots:
            slot.view = _view_like(self.buffer, offset, slot.parameter)
            offset += slot.parameter.numel()
        self._own_references = references(self.buffer)

    def take_gradients(self) -> None:
        """See `Bucket.take_gradients`."""
        for slot in self.slots:
            if slot.trains:  # a frozen one's gradient does not travel
                slot.take_gradient()

    def _gather(self, scale: float) -> None:
        """All gradients that are as planned in one launch."""
        from ringstrategy.kernels.buckets import pack

        assert self._places is not None
        taken: list[Tensor | None] = []
        others = []
        for slot, planned in zip(self.slots, self._planned, strict=True):
            source = self._source(slot)
            fits = source is not None and (source.dtype, source.stride()) == planned
            taken.append(source if fits else None)
            if source is not None and not fits:
                others.append((slot, source))
        pack(self._places, [*taken, None], self.buffer, scale=scale)
        for slot, source in others:
            self._copy(slot, source, scale)

    def _source(self, slot: Slot) -> Tensor | None:
        """The gradient that travels; None: zeros."""
        grad = slot.parameter.grad
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

    def launch(self, peers: Peers, collective: Collective, agreed: Waitable, seed: int, where: str) -> Waitable:
        """See `Bucket.launch`."""

        def work() -> None:
            agreed.wait()
            mean_(self.buffer, peers, collective, self.codec, residual=self.residual, seed=seed)

        return peers.submit(work, where)

    @torch.no_grad()
    def unpack(self, used: Callable[[Slot], bool]) -> None:
        """See `Bucket.unpack`."""
        taken: list[Tensor | None] = []
        for slot, planned in zip(self.slots, self._planned, strict=True):
            taken.append(None)
            parameter, view = slot.parameter, slot.view
            if not slot.trains or (parameter.grad is None and not used(slot)):
                continue
            if parameter.grad is None:
                parameter.grad = view.detach() if parameter.dtype == view.dtype else torch.empty_like(parameter)
            if slot.take_gradient() or not view.numel():
                continue
            if self._places is not None and (parameter.grad.dtype, parameter.grad.stride()) == planned:
                taken[-1] = parameter.grad
            else:
                parameter.grad.copy_(view)
        if self._places is not None and any(grad is not None for grad in taken):
            from ringstrategy.kernels.buckets import unpack

            unpack(self._places, self.buffer, [*taken, None])


class SparseBucket(Bucket):
    """One sparse gradient: rows and their indices go to everyone, and everyone adds them in rank order; no codec."""

    def __init__(self, index: int, name: str, parameter: Parameter) -> None:
        super().__init__(index, [Slot(name, parameter, torch.empty(0, dtype=parameter.dtype, device=parameter.device))])
        self._indices = torch.empty(0, device="cpu")
        self._values = torch.empty(0, device="cpu")
        self._mean: Tensor | None = None

    @property
    def numel(self) -> int:
        """Elements of the rows of all ranks, after equal indices were added up."""
        return 0 if self._mean is None else self._mean.values().numel()

    def describe(self) -> str:
        """One line."""
        slot = self.slots[0]
        parameter = f"{INDENT}{slot.name}: {tuple(slot.parameter.shape)} {slot.parameter.dtype} sparse"
        return f"{BUCKET}{self.index}: sparse\n{parameter}"

    @torch.no_grad()
    def pack(self, size: int) -> None:
        """See `Bucket.pack`."""
        name, parameter = self.slots[0].name, self.slots[0].parameter
        grad = parameter.grad
        if grad is not None and not grad.is_sparse:
            raise TypeError(f"parameter {name} got a dense gradient, but its module has `sparse=True`: set it to False")
        if grad is None:
            self._indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
            dtype = sums_dtype(parameter.dtype)
            self._values = torch.empty(0, *parameter.shape[1:], dtype=dtype, device=parameter.device)
        else:
            rows = grad.detach().coalesce()
            if rows.sparse_dim() != 1:
                raise TypeError(f"the gradient of {name} is sparse in {rows.sparse_dim()} dimensions; only rows can be")
            self._indices = rows.indices().contiguous()
            self._values = rows.values().to(sums_dtype(parameter.dtype)) / size

    def launch(self, peers: Peers, collective: Collective, agreed: Waitable, seed: int, where: str) -> Waitable:
        """How many rows each rank has, then the rows."""
        counts: list[Tensor] = []

        def count() -> None:
            agreed.wait()
            own = torch.tensor([self._indices.shape[1]], device="cpu").view(torch.uint8)
            counts.append(exchange(peers.control, own)().view(torch.int64).view(-1))

        counted = peers.control.submit(count, where)

        def work() -> None:
            counted.wait()
            self._exchange(peers, [int(rows) for rows in counts[0]])

        return peers.submit(work, where)

    def _exchange(self, peers: Peers, counts: list[int]) -> None:
        shape = self._values.shape[1:]
        indices = [self._indices.new_empty(1, rows) for rows in counts]
        values = [self._values.new_empty(rows, *shape) for rows in counts]
        indices[peers.rank], values[peers.rank] = self._indices, self._values
        handles = []
        for target, source in peers.pairs():
            for tensors in (indices, values):
                sent, arriving = (tensors[rank].view(-1).view(torch.uint8) for rank in (peers.rank, source))
                handles.append(peers.swap(target, sent, source, arriving))
        for handle in handles:
            handle.wait()
        whole = torch.sparse_coo_tensor(
            torch.cat(indices, 1), torch.cat(values), self.slots[0].parameter.shape, check_invariants=False
        )
        self._mean = whole.coalesce().to(self.slots[0].parameter.dtype)

    def unpack(self, used: Callable[[Slot], bool]) -> None:
        """See `Bucket.unpack`."""
        slot = self.slots[0]
        if slot.trains and (slot.parameter.grad is not None or used(slot)):
            slot.parameter.grad = self._mean


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of `dtype` are summed: float32 for 16-bit ones, else their own."""
    return torch.float32 if dtype in _WIDENED else dtype


def plan(
    parameters: Mapping[str, Parameter],
    sparse: frozenset[str],
    codec_of: Callable[[str, Parameter], Codec],
    feedback_of: Callable[[Codec], bool],
    capacity: int,
    first_index: int,
    residual_dtype: torch.dtype | None = None,
) -> list[Bucket]:
    """Cut the parameters into buckets, in reverse order of registration: about the order in which backward fills them.

    Args:
        parameters: with their names, in order of registration.
        sparse: names of those whose gradients are sparse.
        codec_of: the codec for a parameter; parameters share a bucket only if device, dtype of sums and codec agree.
        feedback_of: does a bucket of this codec keep a residual?
        capacity: bytes of a buffer; a parameter larger than this has a bucket of its own.
        first_index: index of the first bucket, > 0 for those that are appended to a plan.
        residual_dtype: of the residuals; None: the buffers'.
    """
    groups: dict[tuple[torch.device, torch.dtype, Codec], list[tuple[str, Parameter]]] = {}
    closed: list[tuple[int, list[tuple[str, Parameter]], Codec | None]] = []
    place_of = {name: place for place, name in enumerate(reversed(list(parameters)))}

    def close(key: tuple[torch.device, torch.dtype, Codec]) -> None:
        members = groups.pop(key)
        closed.append((place_of[members[-1][0]], members, key[2]))

    for name, parameter in reversed(list(parameters.items())):
        if name in sparse:
            closed.append((place_of[name], [(name, parameter)], None))
            continue
        codec = codec_of(name, parameter)
        dtype = sums_dtype(parameter.dtype)
        codec.check(dtype)
        key = (parameter.device, dtype, codec)
        held = sum(member.numel() for _, member in groups.get(key, [])) * dtype.itemsize
        nbytes = parameter.numel() * dtype.itemsize
        if held and held + nbytes > capacity:
            close(key)
        groups.setdefault(key, []).append((name, parameter))
        if first_index == 0 and not closed and held + nbytes >= FIRST_BUCKET_BYTES:
            close(key)  # the wire idles until there is a first bucket
    for key in list(groups):
        close(key)

    buckets: list[Bucket] = []
    # by the last to fill: a bucket is launched when it and all before it are full
    for index, (_, members, member_codec) in enumerate(sorted(closed, key=lambda item: item[0]), start=first_index):
        if member_codec is None:
            buckets.append(SparseBucket(index, *members[0]))
        else:
            dtype = sums_dtype(members[0][1].dtype)
            buckets.append(DenseBucket(index, members, dtype, member_codec, feedback_of(member_codec), residual_dtype))
    return buckets


def _view_like(buffer: Tensor, offset: int, parameter: Parameter) -> Tensor:
    # the parameter's own strides if it is dense, e.g. channels_last
    strides = torch.empty_like(parameter, device="meta").stride()
    return buffer.as_strided(parameter.shape, strides, offset)
