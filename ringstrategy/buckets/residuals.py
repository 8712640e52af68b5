"""The compression error of this rank, kept only as far as the optimizer stepped the gradient that it belongs to.

An exchange turns the residual `before` it into the one `after` it: what was delivered is gone from it, what was lost is
in it. That is right if the optimizer then steps what was delivered. If the user drops the gradient (no step, or
`zero_grad`), the error of a gradient that never counted must not come back in the next one, so the residual goes back.
If a part of it was stepped (clipping), it goes the same part of the way: `before + part * (after - before)`. In sum:
what was stepped + residual == what a lossless exchange would have had stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate, product

import torch
from torch import Tensor
from torch.nn import Parameter

from ringstrategy.buckets.slot import Slot
from ringstrategy.kernels import operations


class Residuals:
    """The residuals of one bucket's parameters, in the units of the gradients.

    `before_exchange` makes the parameters undecided: until an optimizer steps, a checkpoint has the residuals from
    before. `after_step` measures which part of each mean was stepped, <gradient now, mean> / <mean, mean>, at some
    places of each parameter. That part counts relative to the largest one of late, because a user who scales or clips
    every gradient alike also scales what comes back with the next one. `before_backward` does the same for means that
    nobody has stepped.

    An exchange adds `given` and writes what it loses to `lost`. These are two buffers that change places at each
    exchange, so what was before needs no copy. Only if some parameters are still undecided, or have no gradient, are
    both the same one, and the other holds a copy.

    A parameter without a gradient on this rank takes no part: its residual waits aside, so that a parameter that no
    rank uses keeps its residual bit for bit. Under a loss scaler gradients are in units of the loss scale, and
    residuals follow the scale.

    Args:
        slots: the places of the gradients, one behind the other in a flat buffer.
        whole: the residuals, in a buffer of the same layout; None if there are none.
    """

    def __init__(self, slots: list[Slot], whole: Tensor | None = None) -> None:
        self._held = [] if whole is None else slots
        self._now = self._given = whole
        self._before: Tensor | None = None
        self._edges = [0, *accumulate(slot.parameter.numel() for slot in self._held)]
        self._undecided: set[str] = set()
        self._waiting: dict[str, Tensor] = {}
        self._handed: Tensor | None = None  # samples of the gradients as users received them
        self._handed_names: frozenset[str] = frozenset()
        self._place = {slot.name: place for place, slot in enumerate(self._held)}
        self._stepped: Tensor | None = None  # for each residual the largest recent part, float64
        self._scale: Tensor | None = None

    @property
    def undecided(self) -> bool:
        """Whether there is an exchange whose gradients have not been stepped or dropped yet."""
        return bool(self._undecided)

    @property
    def given(self) -> Tensor | None:
        """Flat: what the exchange that has begun adds to the gradients."""
        return self._given

    @property
    def lost(self) -> Tensor | None:
        """Flat: to be written by the exchange that has begun; perhaps the same memory."""
        return self._now

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compile what decides how much of each mean was stepped; parameters stand for their gradients."""
        if self._now is None:
            return
        sample, stepped_parts = operations.sample.on(self._device), operations.stepped_parts.on(self._device)
        tensors: list[Tensor | None] = [slot.parameter.detach() for slot in self._held]
        then, late = sample(tensors), torch.zeros_like(self._late())
        parts = stepped_parts(then, tensors, None, None, True)
        answers: tuple[Tensor | bool, ...] = (True, torch.ones((), dtype=torch.bool, device=late.device))
        for scale, stepped in product((None, torch.ones((), device=late.device)), answers):
            stepped_parts(then, tensors, late, scale, stepped)
        operations.go_.on(self._device)(self._now, self._now, self._edges, torch.ones_like(parts))

    @torch.no_grad()
    def before_exchange(self, scale: Tensor | None) -> None:
        """The gradients are complete, in units of `scale` (a tensor without dimensions on their device)."""
        if not self._held:
            return
        if scale is None and self._scale is not None:
            scale = torch.ones_like(self._scale)
        if scale is not None:
            self._follow(scale)
        if self._before is None:
            assert self._now is not None
            self._before = torch.empty_like(self._now)
        aside = [slot for slot in self._held if slot.parameter.grad is None or not slot.trains]
        if self._undecided or aside:
            self._copy(aside)
        else:
            self._now, self._before = self._before, self._now
            self._given = self._before
        self._undecided.update(slot.name for slot in self._held)

    def _copy(self, aside: Sequence[Slot]) -> None:
        """What was before, of those that are decided: the others keep theirs from before their first exchange."""
        assert self._before is not None
        self._given = self._now
        assert self._now is not None
        if not self._undecided:
            self._before.copy_(self._now)
        else:
            for slot in self._held:
                if slot.name not in self._undecided:
                    self._earlier(slot).copy_(self._current(slot))
        for slot in aside:
            residual = self._current(slot)
            undecided = slot.name in self._undecided
            self._waiting[slot.name] = residual.clone() if undecided else self._earlier(slot)
            residual.zero_()

    @torch.no_grad()
    def after_exchange(self, used: Callable[[Slot], bool]) -> None:
        """An exchange has ended; `used`: whether any rank has a gradient for it."""
        for slot in self._held if self._waiting else ():
            aside = self._waiting.pop(slot.name, None)
            if aside is None:
                continue
            if used(slot):
                self._current(slot).add_(aside)  # to what this rank lost when it encoded the others' sums
            else:  # no rank used the parameter, so its mean (noise of the codec at most) is dropped
                self._current(slot).copy_(aside)

    @torch.no_grad()
    def after_backward(self) -> None:
        """The gradients are as users will find them."""
        there = [slot for slot in self._held if slot.name in self._undecided and slot.parameter.grad is not None]
        self._handed_names = frozenset(slot.name for slot in there)
        self._undecided &= self._handed_names  # to the others nothing was delivered
        self._handed = operations.sample.on(self._device)(self._gradients(there)) if there else None

    @torch.no_grad()
    def before_backward(self) -> None:
        """Another backward begins: decide about means that nobody has stepped."""
        there = self._without_the_gone([slot for slot in self._held if slot.name in self._undecided])
        if there:
            parts = self._parts(there, None, True)
            self._go(parts)
            if may_read(parts):
                known = parts.tolist()
                self._undecided -= {slot.name for slot in there if known[self._place[slot.name]] == 0}

    @torch.no_grad()
    def after_step(self, parameters: Collection[Parameter], stepped: Tensor | bool) -> bool:
        """An optimizer of these parameters has stepped, or not: a boolean, on their device if a tensor.

        Returns whether it was the step of any gradient that is still undecided here.
        """
        asked = [slot for slot in self._held if slot.name in self._undecided and slot.parameter in parameters]
        if stepped is False:
            for slot in asked:
                self._current(slot).copy_(self._earlier(slot))
        else:
            there = self._without_the_gone(asked)
            if there:
                self._go(self._parts(there, self._late(), stepped))
        self._undecided.difference_update(slot.name for slot in asked)
        return bool(asked)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Names and residuals, in units of the unscaled loss.

        Tensors may be views of the memory in use: copy each before taking the next.
        """
        for slot in self._held:
            if slot.gone:
                continue
            known = self._earlier(slot) if slot.name in self._undecided else self._current(slot)
            yield slot.name, known if self._scale is None else known / self._scale

    @torch.no_grad()
    def load(self, name: str, value: Tensor) -> bool:
        """Take what `state` gave; False if there is no residual of this name and shape."""
        for slot in self._held:
            if slot.name == name and slot.parameter.shape == value.shape and not slot.gone:
                residual = self._current(slot)
                residual.copy_(value)
                if self._scale is not None:
                    residual.mul_(self._scale)
                self._undecided.discard(name)
                return True
        return False

    def parts(self) -> dict[str, Tensor]:
        """By parameter the largest part that was stepped of late: of a checkpoint, the same on all ranks."""
        stepped = self._stepped
        return {} if stepped is None else {s.name: stepped[self._place[s.name]] for s in self._held if not s.gone}

    def load_parts(self, parts: Mapping[str, Tensor]) -> None:
        """Restore what `parts` gave, for the parameters that are in it."""
        known = {slot.name: parts[slot.name] for slot in self._held if slot.name in parts and not slot.gone}
        for name, part in known.items():
            self._late()[self._place[name]] = part

    def _follow(self, scale: Tensor) -> None:
        ratio = scale if self._scale is None else scale / self._scale
        for residuals in (self._now, self._before if self._undecided else None):
            if residuals is not None:
                residuals.mul_(ratio)
        self._scale = scale

    def _without_the_gone(self, asked: Sequence[Slot]) -> list[Slot]:
        """The slots that have a gradient; the residuals of the others go back."""
        there = []
        for slot in asked:
            if slot.parameter.grad is None or slot.name not in self._handed_names:
                self._current(slot).copy_(self._earlier(slot))
                self._undecided.discard(slot.name)
            else:
                there.append(slot)
        return there

    def _late(self) -> Tensor:
        assert self._now is not None
        if self._stepped is None:
            self._stepped = torch.zeros(len(self._held), dtype=torch.float64, device=self._now.device)
        return self._stepped

    def _gradients(self, there: Sequence[Slot]) -> list[Tensor | None]:
        """Of all slots, those that are `there`."""
        names = {slot.name for slot in there}
        return [slot.parameter.grad if slot.name in names else None for slot in self._held]

    def _parts(self, there: Sequence[Slot], late: Tensor | None, stepped: Tensor | bool) -> Tensor:
        """See `kernels.feedback.stepped_parts`. The optimizer saw unscaled gradients."""
        assert self._handed is not None
        scale = None if late is None else self._scale
        return operations.stepped_parts.on(self._device)(self._handed, self._gradients(there), late, scale, stepped)

    def _go(self, parts: Tensor) -> None:
        """Set residuals to before + part * (after - before)."""
        assert self._now is not None
        assert self._before is not None
        operations.go_.on(self._device)(self._now, self._before, self._edges, parts)

    def _current(self, slot: Slot) -> Tensor:
        """The slot's residual; while it is undecided, the one after the exchange."""
        assert self._now is not None
        return slot.like_view(self._now)

    def _earlier(self, slot: Slot) -> Tensor:
        """The one before the exchange."""
        assert self._before is not None
        return slot.like_view(self._before)

    @property
    def _device(self) -> torch.device:
        assert self._now is not None
        return self._now.device


def may_read(tensor: Tensor) -> bool:
    """Whether a value is there at once, without waiting for a device."""
    return tensor.device.type == "cpu"
