"""The compression error of this rank, kept only as far as the optimizer stepped the gradient that it belongs to.

An exchange turns the residual `before` it into the one `after` it: what was delivered is gone from it, what was lost is
in it. That is right if the optimizer then steps what was delivered. If the user drops the gradient (no step, or
`zero_grad`), the error of a gradient that never counted must not come back in the next one, so the residual goes back.
If a part of it was stepped (clipping), it goes the same part of the way: `before + part * (after - before)`. In sum:
what was stepped + residual == what a lossless exchange would have had stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import Parameter

from ringstrategy.buckets.slot import Slot
from ringstrategy.kernels.sample import samples

_FADES = 0.9  # per step, decay of the largest recent part


class _Handed:
    """Samples of the gradients as users received them."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._values, self._counts = samples(_gradients(slots))
        names = [slot.name for slot in slots]
        self.offsets = dict(zip(names, accumulate([0, *self._counts]), strict=False))

    def parts(self, slots: Sequence[Slot]) -> Tensor:
        """For each slot, the part of the recorded gradient that its gradient still holds: float64, at least 0."""
        now, counts = samples(_gradients(slots))
        then = self._values
        if len(slots) < len(self.offsets):
            of = zip(slots, counts, strict=True)
            then = torch.cat([then.narrow(0, self.offsets[slot.name], count) for slot, count in of])
        then = then.masked_fill(~then.isfinite(), 0)  # of its block nothing was taken from the residual
        now.masked_fill_(~now.isfinite(), 0)
        lengths = torch.tensor(counts, device="cpu").to(now.device, non_blocking=True)
        both, norm = (
            torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True) for values in (now * then, then * then)
        )
        total = norm.sum()
        # a gradient that was zero at all sampled places follows the others
        of_all = torch.where(total == 0, torch.ones_like(total), both.sum() / total)
        return torch.where(norm == 0, of_all, both / norm).clamp_(min=0)


class Residuals:
    """The residuals of one bucket's parameters, each a `Slot.residual`, in the units of the gradients.

    Only the bucket moves them. `begin` starts an exchange and `end` ends it; `handed_out` follows once the gradients
    are the means. From `begin` on the parameters are undecided: a checkpoint then has the residuals from before.
    `decide` comes after an optimizer's step and measures which part of each mean was stepped: <gradient now, mean> /
    <mean, mean>, at some places of each parameter. That part counts relative to the largest one of late, because a user
    who scales or clips every gradient alike also scales what comes back with the next one. `look` does the same before
    another backward, for means that nobody has stepped.

    A parameter without a gradient on this rank takes no part: its residual waits aside, so that a parameter that no
    rank uses keeps its residual bit for bit. Under a loss scaler gradients are in units of the loss scale, and
    residuals follow the scale.

    Args:
        slots: those without a residual are passed over.
        whole: the flat buffer that all the residuals are views of, if there is one: fewer and longer operations.
    """

    def __init__(self, slots: list[Slot], whole: Tensor | None = None) -> None:
        self._held = [(slot, slot.residual) for slot in slots if slot.residual is not None]
        self._whole = whole
        self._whole_before: Tensor | None = None
        self._before: dict[str, Tensor] = {}
        self._undecided: set[str] = set()
        self._waiting: dict[str, Tensor] = {}
        self._handed: _Handed | None = None
        self._place = {slot.name: place for place, (slot, _) in enumerate(self._held)}
        self._stepped: Tensor | None = None  # for each residual the largest recent part, float64
        self._scale: Tensor | None = None

    @property
    def undecided(self) -> bool:
        """Is there an exchange whose gradients have not been stepped or dropped yet?"""
        return bool(self._undecided)

    @torch.no_grad()
    def begin(self, scale: Tensor | None) -> None:
        """The gradients are complete, in units of `scale` (a tensor without dimensions on their device)."""
        if not self._held:
            return
        if scale is not None:
            self._follow(scale)
        undecided = set(self._undecided)
        self._back_up()
        for slot, residual in self._held:
            if slot.parameter.grad is None or not slot.trains:
                self._waiting[slot.name] = residual.clone() if slot.name in undecided else self._before[slot.name]
                residual.zero_()

    @torch.no_grad()
    def end(self, used: Callable[[Slot], bool]) -> None:
        """An exchange has ended; `used`: has any rank a gradient for it?"""
        for slot, residual in self._held:
            aside = self._waiting.pop(slot.name, None)
            if aside is None:
                continue
            if used(slot):
                residual.add_(aside)  # to what this rank lost when it encoded the others' sums
            else:
                residual.copy_(aside)  # no rank used the parameter, so its mean (noise of the codec at most) is dropped

    @torch.no_grad()
    def handed_out(self) -> None:
        """The gradients are as users will find them."""
        there = [slot for slot, _ in self._held if slot.name in self._undecided and slot.parameter.grad is not None]
        self._undecided &= {slot.name for slot in there}  # to the others nothing was delivered
        self._handed = _Handed(there) if there else None

    @torch.no_grad()
    def look(self) -> None:
        """Another backward begins: what has become of means that nobody has stepped?"""
        waiting = [(slot, residual) for slot, residual in self._held if slot.name in self._undecided]
        there = self._without_the_gone(waiting)
        if there:
            assert self._handed is not None
            parts = self._handed.parts([slot for slot, _ in there]).clamp(max=1)
            gone = self._go(there, parts)
            self._undecided.difference_update(gone)

    @torch.no_grad()
    def decide(self, parameters: Collection[Parameter], stepped: Tensor | bool) -> bool:
        """An optimizer of these parameters has stepped, or not: a boolean, on their device if a tensor.

        Returns whether it was the step of any gradient that is still undecided here.
        """
        asked = [(s, r) for s, r in self._held if s.name in self._undecided and s.parameter in parameters]
        if stepped is False:
            for slot, residual in asked:
                residual.copy_(self._before[slot.name])
        else:
            there = self._without_the_gone(asked)
            if there:
                assert self._handed is not None
                parts = self._handed.parts([slot for slot, _ in there])
                if self._scale is not None:
                    parts *= self._scale  # the optimizer saw them unscaled
                self._go(there, self._of_late([slot.name for slot, _ in there], parts, stepped))
        self._undecided.difference_update(slot.name for slot, _ in asked)
        return bool(asked)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Names and residuals, in units of the unscaled loss.

        Tensors may be views of the memory in use: copy each before taking the next.
        """
        for slot, residual in self._held:
            if slot.gone:
                continue
            known = self._before[slot.name] if slot.name in self._undecided else residual
            yield slot.name, known if self._scale is None else known / self._scale

    @torch.no_grad()
    def load(self, name: str, value: Tensor) -> bool:
        """Take what `state` gave; False if there is no residual of this name and shape."""
        for slot, residual in self._held:
            if slot.name == name and residual.shape == value.shape and not slot.gone:
                residual.copy_(value)
                if self._scale is not None:
                    residual.mul_(self._scale)
                self._undecided.discard(name)
                return True
        return False

    def parts(self) -> dict[str, Tensor]:
        """By parameter the largest part that was stepped of late: of a checkpoint, the same on all ranks."""
        stepped = self._stepped
        return {} if stepped is None else {s.name: stepped[self._place[s.name]] for s, _ in self._held if not s.gone}

    def load_parts(self, parts: Mapping[str, Tensor]) -> None:
        """Restore what `parts` gave, for the parameters that are in it."""
        known = {slot.name: parts[slot.name] for slot, _ in self._held if slot.name in parts and not slot.gone}
        for name, part in known.items():
            self._late()[self._place[name]] = part

    def _follow(self, scale: Tensor) -> None:
        ratio = scale if self._scale is None else scale / self._scale
        residuals = [residual for _, residual in self._held] if self._whole is None else [self._whole]
        befores = list(self._before.values()) if self._whole_before is None else [self._whole_before]
        for tensor in residuals + (befores if self._undecided else []):
            tensor.mul_(ratio)
        self._scale = scale

    def _back_up(self) -> None:
        if not self._before:
            if self._whole is not None:
                self._whole_before = torch.empty_like(self._whole)
            for slot, residual in self._held:
                self._before[slot.name] = (
                    torch.empty_like(residual)
                    if self._whole_before is None
                    else self._whole_before.as_strided(residual.shape, residual.stride(), residual.storage_offset())
                )
        if self._whole_before is not None and self._whole is not None and not self._undecided:
            self._whole_before.copy_(self._whole)
        else:
            for slot, residual in self._held:
                if slot.name not in self._undecided:  # the others keep theirs from before their first exchange
                    self._before[slot.name].copy_(residual)
        self._undecided.update(slot.name for slot, _ in self._held)

    def _without_the_gone(self, asked: Sequence[tuple[Slot, Tensor]]) -> list[tuple[Slot, Tensor]]:
        """The slots that have a gradient; the residuals of the others go back."""
        there = []
        for slot, residual in asked:
            if slot.parameter.grad is None or self._handed is None or slot.name not in self._handed.offsets:
                residual.copy_(self._before[slot.name])
                self._undecided.discard(slot.name)
            else:
                there.append((slot, residual))
        return there

    def _late(self) -> Tensor:
        if self._stepped is None:
            self._stepped = torch.zeros(len(self._held), dtype=torch.float64, device=self._held[0][1].device)
        return self._stepped

    def _of_late(self, names: list[str], parts: Tensor, stepped: Tensor | bool) -> Tensor:
        """The parts, relative to the largest of late."""
        late = self._late()
        places: Tensor | slice = slice(None)
        if len(names) < len(self._held):
            chosen = torch.tensor([self._place[name] for name in names], device="cpu")
            places = chosen.to(late.device, non_blocking=True)
        before = late[places].clone()
        if isinstance(stepped, Tensor):
            parts = torch.where(stepped, parts, torch.zeros_like(parts))
        late[places] = torch.where(parts > 0, torch.maximum(parts, _FADES * before), before)
        return (parts / torch.maximum(parts, before)).nan_to_num(0, 0, 0)

    def _go(self, there: Sequence[tuple[Slot, Tensor]], parts: Tensor) -> list[str]:
        """Set residuals to before + part * (after - before); returns the names whose part is known to be 0."""
        known: list[float | None] = parts.tolist() if may_read(parts) else [None] * len(there)
        parts = parts.to(there[0][1].dtype)
        for place, ((slot, residual), value) in enumerate(zip(there, known, strict=True)):
            if value == 0:
                residual.copy_(self._before[slot.name])
            elif value != 1:
                torch.lerp(self._before[slot.name], residual, parts[place], out=residual)  # exact at 0 and 1
        return [slot.name for (slot, _), value in zip(there, known, strict=True) if value == 0]


def may_read(tensor: Tensor) -> bool:
    """Is a value there at once, without waiting for a device?"""
    return tensor.device.type == "cpu"


def _gradients(slots: Sequence[Slot]) -> list[Tensor]:
    return [slot.parameter.grad for slot in slots if slot.parameter.grad is not None]
