"""The compression error of this rank, kept only as far as the optimizer stepped the gradient that it belongs to.

An exchange turns the residual `before` it into the one `after` it: what was delivered is gone from it, what was lost is
in it. That is right if the optimizer then steps what was delivered. If the user drops the gradient (no step, or
`zero_grad`), the error of a gradient that never counted must not come back in the next one, so the residual goes back.
If a part of it was stepped (clipping), it goes the same part of the way: `before + part * (after - before)`. In sum:
what was stepped + residual == what a lossless exchange would have had stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn import Parameter

from ringstrategy.buckets.slot import Slot
from ringstrategy.kernels import operations


class Residuals:
    """The residuals of one bucket's parameters, each a `Slot.residual`, in the units of the gradients.

    Only the bucket moves them. `begin` starts an exchange and `end` ends it; `handed_out` follows once the gradients
    are the means. From `begin` on the parameters are undecided: a checkpoint then has the residuals from before.
    `decide` comes after an optimizer's step and measures which part of each mean was stepped: <gradient now, mean> /
    <mean, mean>, at some places of each parameter. That part counts relative to the largest one of late, because a user
    who scales or clips every gradient alike also scales what comes back with the next one. `look` does the same before
    another backward, for means that nobody has stepped.

    An exchange adds `given` and writes what it loses to `lost`. These are two buffers that change places at each
    `begin`, so what was before needs no copy. Only if some parameters are still undecided, or have no gradient, are
    both the same one, and the other holds a copy.

    A parameter without a gradient on this rank takes no part: its residual waits aside, so that a parameter that no
    rank uses keeps its residual bit for bit. Under a loss scaler gradients are in units of the loss scale, and
    residuals follow the scale.

    Args:
        slots: those without a residual are passed over.
        whole: the flat buffer that the residuals are views of, one behind the other; None if there are none.
    """

    def __init__(self, slots: list[Slot], whole: Tensor | None = None) -> None:
        held = [(slot, slot.residual) for slot in slots if slot.residual is not None]
        self._held = [slot for slot, _ in held]
        self._now = self._given = whole
        self._before: Tensor | None = None
        self._views = {slot.name: residual for slot, residual in held}
        self._views_before: dict[str, Tensor] = {}
        self._edges = [0]
        for _, residual in held:
            self._edges.append(self._edges[-1] + residual.numel())
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
    def begin(self, scale: Tensor | None) -> None:
        """The gradients are complete, in units of `scale` (a tensor without dimensions on their device)."""
        if not self._held:
            return
        if scale is not None:
            self._follow(scale)
        if self._before is None:
            assert self._now is not None
            self._before = torch.empty_like(self._now)
            for name, view in self._views.items():
                self._views_before[name] = self._before.as_strided(view.shape, view.stride(), view.storage_offset())
        aside = [slot for slot in self._held if slot.parameter.grad is None or not slot.trains]
        if self._undecided or aside:
            self._copy(aside)
        else:
            self._now, self._before = self._before, self._now
            self._views, self._views_before = self._views_before, self._views
            for slot in self._held:
                slot.residual = self._views[slot.name]
            self._given = self._before
        self._undecided.update(self._views)

    def _copy(self, aside: Sequence[Slot]) -> None:
        """What was before, of those that are decided: the others keep theirs from before their first exchange."""
        assert self._before is not None
        self._given = self._now
        assert self._now is not None
        if not self._undecided:
            self._before.copy_(self._now)
        else:
            for name, residual in self._views.items():
                if name not in self._undecided:
                    self._views_before[name].copy_(residual)
        for slot in aside:
            residual = self._views[slot.name]
            undecided = slot.name in self._undecided
            self._waiting[slot.name] = residual.clone() if undecided else self._views_before[slot.name]
            residual.zero_()

    @torch.no_grad()
    def end(self, used: Callable[[Slot], bool]) -> None:
        """An exchange has ended; `used`: whether any rank has a gradient for it."""
        for slot in self._held if self._waiting else ():
            aside = self._waiting.pop(slot.name, None)
            if aside is None:
                continue
            if used(slot):
                self._views[slot.name].add_(aside)  # to what this rank lost when it encoded the others' sums
            else:  # no rank used the parameter, so its mean (noise of the codec at most) is dropped
                self._views[slot.name].copy_(aside)

    @torch.no_grad()
    def handed_out(self) -> None:
        """The gradients are as users will find them."""
        there = [slot for slot in self._held if slot.name in self._undecided and slot.parameter.grad is not None]
        self._handed_names = frozenset(slot.name for slot in there)
        self._undecided &= self._handed_names  # to the others nothing was delivered
        self._handed = operations.sample.on(self._device)(self._gradients(there)) if there else None

    @torch.no_grad()
    def look(self) -> None:
        """Another backward begins: decide about means that nobody has stepped."""
        there = self._without_the_gone([slot for slot in self._held if slot.name in self._undecided])
        if there:
            parts = self._parts(there, None, True)
            self._go(parts)
            if may_read(parts):
                known = parts.tolist()
                self._undecided -= {slot.name for slot in there if known[self._place[slot.name]] == 0}

    @torch.no_grad()
    def decide(self, parameters: Collection[Parameter], stepped: Tensor | bool) -> bool:
        """An optimizer of these parameters has stepped, or not: a boolean, on their device if a tensor.

        Returns whether it was the step of any gradient that is still undecided here.
        """
        asked = [slot for slot in self._held if slot.name in self._undecided and slot.parameter in parameters]
        if stepped is False:
            for slot in asked:
                self._views[slot.name].copy_(self._views_before[slot.name])
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
            known = (self._views_before if slot.name in self._undecided else self._views)[slot.name]
            yield slot.name, known if self._scale is None else known / self._scale

    @torch.no_grad()
    def load(self, name: str, value: Tensor) -> bool:
        """Take what `state` gave; False if there is no residual of this name and shape."""
        for slot in self._held:
            if slot.name == name and slot.parameter.shape == value.shape and not slot.gone:
                residual = self._views[name]
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
                self._views[slot.name].copy_(self._views_before[slot.name])
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

    @property
    def _device(self) -> torch.device:
        assert self._now is not None
        return self._now.device


def may_read(tensor: Tensor) -> bool:
    """Whether a value is there at once, without waiting for a device."""
    return tensor.device.type == "cpu"
