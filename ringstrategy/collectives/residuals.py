"""What encoding lost on this rank, as state that a skipped, unused or failed exchange leaves as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from ringstrategy.collectives.buckets import Slot


class Residuals:
    """The residuals of one bucket's parameters, each a `Slot.residual`, in the units of the gradients.

    An exchange is `begin`, `start` (in the thread that communicates), what the bucket does, `end`. Nothing is written
    before `start`, so a checkpoint after an error lacks only what was just being exchanged. A parameter without a
    gradient on this rank takes no part: its residual waits aside (a copy, until `end`), so that one unused everywhere
    comes back bit for bit.

    Under a loss scaler, gradients and with them residuals are in units of the loss scale, which changes. Whether a step
    is skipped is known only after the exchange, so a second copy is kept, from the first exchange until `decide`.

    Args:
        slots: those without a residual are passed over.
        whole: the flat buffer that all the residuals are views of, if there is one: fewer and longer operations.
    """

    def __init__(self, slots: list[Slot], whole: Tensor | None = None) -> None:
        self._held = [(slot, slot.residual) for slot in slots if slot.residual is not None]
        self._whole = whole
        self._started = False
        self._reading = threading.RLock()  # a signal's handler may save while this thread is in `start`
        self._waiting: dict[str, Tensor] = {}
        self._scale: Tensor | None = None
        self._backup: Tensor | None = None
        self._backup_of: dict[str, Tensor] = {}
        self._undecided: set[str] = set()

    @torch.no_grad()
    def begin(self, scale: Tensor | None) -> None:
        """The gradients are complete, in units of `scale` (a tensor without dimensions on their device)."""
        if scale is not None and self._held:
            self._follow(scale)
            self._back_up()
        for slot, residual in self._held:
            if slot.parameter.grad is None or not slot.parameter.requires_grad:
                self._waiting[slot.name] = residual.clone()
                residual.zero_()

    def start(self) -> None:
        """The exchange will now write to the residuals; waits while `state` is being read."""
        with self._reading:
            self._started = True

    @torch.no_grad()
    def end(self, used: Callable[[Slot], bool]) -> None:
        """An exchange has ended; `used`: has any rank a gradient for it?"""
        for slot, residual in self._held:
            if slot.name in self._waiting:
                before = self._waiting.pop(slot.name)
                if used(slot):
                    residual.add_(before)  # to what this rank lost when it encoded the others' sums
                else:
                    residual.copy_(before)  # nobody takes what was delivered: nothing, or noise of the codec
        self._started = False

    @torch.no_grad()
    def decide(self, parameters: Collection[Parameter], skipped: Tensor) -> None:
        """These parameters were stepped, or, where `skipped` (a boolean on their device) is true, not: then go back."""
        stepped = [(s, r) for s, r in self._held if s.name in self._undecided and s.parameter in parameters]
        if self._backup is not None and self._whole is not None and len(stepped) == len(self._held):
            torch.where(skipped, self._backup, self._whole, out=self._whole)
        else:
            for slot, residual in stepped:
                residual.copy_(torch.where(skipped, self._backup_of[slot.name], residual))
        self._undecided.difference_update(slot.name for slot, _ in stepped)

    @property
    def undecided(self) -> bool:
        """Is there an exchange that `decide` has not judged yet?"""
        return bool(self._undecided)

    def state(self) -> Iterator[tuple[str, Tensor | None]]:
        """Names and residuals, in units of the unscaled loss; None: its exchange did not end, so it is unknown.

        Tensors may be views of the memory in use: copy each before taking the next.
        """
        with self._reading:
            for slot, residual in self._held:
                if slot.name in self._undecided:
                    yield slot.name, self._unscaled(self._backup_of[slot.name])
                elif slot.name in self._waiting:
                    yield slot.name, self._unscaled(self._waiting[slot.name])
                else:
                    yield slot.name, None if self._started else self._unscaled(residual)

    @torch.no_grad()
    def load(self, name: str, value: Tensor) -> bool:
        """Take what `state` gave; False if there is no residual of this name and shape."""
        for slot, residual in self._held:
            if slot.name == name and residual.shape == value.shape:
                residual.copy_(value)
                if self._scale is not None:
                    residual.mul_(self._scale)
                self._undecided.discard(name)
                return True
        return False

    def _unscaled(self, residual: Tensor) -> Tensor:
        return residual if self._scale is None else residual / self._scale

    def _follow(self, scale: Tensor) -> None:
        ratio = scale if self._scale is None else scale / self._scale
        residuals = [residual for _, residual in self._held] if self._whole is None else [self._whole]
        backups = list(self._backup_of.values()) if self._backup is None else [self._backup]
        for tensor in residuals + (backups if self._undecided else []):
            tensor.mul_(ratio)
        self._scale = scale

    def _back_up(self) -> None:
        if not self._backup_of:
            if self._whole is not None:
                self._backup = torch.empty_like(self._whole)
            for slot, residual in self._held:
                self._backup_of[slot.name] = (
                    torch.empty_like(residual)
                    if self._backup is None
                    else self._backup.as_strided(residual.shape, residual.stride(), residual.storage_offset())
                )
        if self._backup is not None and self._whole is not None and not self._undecided:
            self._backup.copy_(self._whole)
        else:
            for slot, residual in self._held:
                if slot.name not in self._undecided:  # the others keep theirs from before their first exchange
                    self._backup_of[slot.name].copy_(residual)
        self._undecided.update(slot.name for slot, _ in self._held)
