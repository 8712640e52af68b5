"""What an agreement averages exactly beside the parameters of its first group: squared norms, and buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ringstrategy.algorithms.parameters.exchange import Exchange
from ringstrategy.algorithms.parameters.group import Group, Vector
from ringstrategy.algorithms.parameters.rows import cut_like, cut_words, words_of
from ringstrategy.transport.base import Peers

_NAME = "beside"  # of the vector


class Beside:
    """Buffers that have a mean get it, all others rank 0's values; norms tell how far directions agree.

    Args:
        averaged: where buffers that have a mean are found.
        copied: where the others are found.
    """

    def __init__(
        self, averaged: Callable[[], Sequence[Tensor]] = tuple, copied: Callable[[], Sequence[Tensor]] = tuple
    ) -> None:
        self._averaged, self._copied = averaged, copied
        self._metrics: dict[str, Tensor] = {}  # a device need not be waited for

    def metrics(self) -> dict[str, float]:
        """See `LocalSGD.metrics`; empty if nothing is new."""
        metrics, self._metrics = self._metrics, {}
        return {name: float(value) for name, value in metrics.items()}

    def gather(self, group: Group, exchange: Exchange, peers: Peers) -> None:
        """Copy norms and buffers into a vector of the group."""
        squares = _squares(group, exchange.ranks)
        averaged = [buffer.detach().reshape(-1).double() for buffer in self._with_a_mean()]
        copied = [words_of(buffers) for buffers in (self._rank_0s(),) if buffers]
        values = torch.cat([squares, *averaged, *copied])
        vector = group.others.get(_NAME)
        if vector is None or vector.numel != values.numel():
            vector = group.others[_NAME] = Vector(values.numel(), values.dtype, values.device)
        vector.values.copy_(values)
        words = [exchange.from_rank_0(row, peers) for row in copied]
        torch.cat([squares, *averaged, *words], out=vector.correction)

    def apply(self, group: Group, ranks: int, size: int, *, waited: bool) -> None:
        """Write what came into the buffers. Call it before `Shared.step`, which overwrites the corrections.

        Args:
            group: nothing happens unless its last exchange had norms and buffers.
            ranks: whose values lie in its vectors.
            size: number of ranks.
            waited: buffers cannot have changed meanwhile.
        """
        vector = group.others.get(_NAME)
        if vector is None:
            return
        square = _squares(group, ranks)[0]
        alike = (square / vector.correction[:ranks].mean()).nan_to_num(1.0)  # 1 / size: at right angles; 1: the same
        self._metrics = {
            "outer_gradient_norm": square.sqrt(),
            "direction_agreement": (size * alike - 1) / max(1, size - 1),
        }
        buffers, copied = self._with_a_mean(), self._rank_0s()
        words = ranks + sum(buffer.numel() for buffer in buffers)
        if words + -(-sum(buffer.nbytes for buffer in copied) // 4) != vector.numel:
            return  # others than were sent
        both = vector.values, vector.correction
        for buffer, sent, mean in zip(buffers, *(cut_like(row[ranks:words], buffers) for row in both), strict=True):
            buffer.copy_(mean if waited else torch.where(mean == sent, buffer, buffer + (mean - sent)))
        for buffer, sent, first in zip(copied, *(cut_words(row[words:], copied) for row in both), strict=True):
            buffer.copy_(torch.where(first == sent, buffer, first))

    def _with_a_mean(self) -> list[Tensor]:
        return [buffer for buffer in self._averaged() if buffer.is_floating_point() and buffer.numel()]

    def _rank_0s(self) -> list[Tensor]:
        return [buffer for buffer in self._copied() if buffer.numel()]


def _squares(group: Group, ranks: int) -> Tensor:
    """The squared norm of what is exchanged, for each rank that lies in it; float64, on the group's device."""
    norms = [torch.linalg.vector_norm(flat.correction.view(ranks, -1), dim=1) for flat in group.flats]
    return torch.stack([norm.double().square().to(norms[0].device) for norm in norms]).sum(0)
