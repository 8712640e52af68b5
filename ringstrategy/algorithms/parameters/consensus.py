"""Temporarily replace each rank's own values by what all ranks share: their exact mean, or shared parameters."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ringstrategy.algorithms.parameters.exchange import Digests, Exchange, differing
from ringstrategy.algorithms.parameters.group import Flat, Group, by_dtype, cut_like, cut_words, row_of, words_of
from ringstrategy.codecs.base import derive_seed
from ringstrategy.kernels.sample import same, sample
from ringstrategy.transport.base import Peers


@dataclass
class _Shown:
    tensor: Tensor
    own: Tensor
    seen: Tensor | None = None  # a sample of what it shows


class Consensus:
    """What all ranks share of the averaged groups, and the mean of everything else that differs between ranks.

    Args:
        peers: all ranks.
        exchange: how means are taken.
    """

    def __init__(self, peers: Peers, exchange: Exchange) -> None:
        self._peers, self._exchange = peers, exchange
        self._digests = Digests()
        self._shown: list[_Shown] | None = None  # the tensors that show something else

    @property
    def entered(self) -> bool:
        """Whether the tensors show the mean now."""
        return self._shown is not None

    def check_left(self) -> None:
        """After a step of an optimizer: RuntimeError while the tensors show the mean."""
        if self.entered:
            raise RuntimeError(
                "an optimizer has stepped while the model shows what all ranks share, instead of this rank's own "
                "parameters: leave `with consensus(...)` before you train on"
            )

    def enter(
        self, seen: Iterable[tuple[Flat, Tensor]], tensors: Iterable[Tensor], copied: Sequence[Tensor] = ()
    ) -> None:
        """Show what all see, until `leave`; all ranks call it, with no exchange in flight.

        Args:
            seen: what the trained parameters of each flat show.
            tensors: whatever else may differ between ranks shows its mean. Those that are equal on all ranks keep their
                bits, and whole numbers and booleans, which have no mean, keep each rank's own values.
            copied: show rank 0's values.
        """
        self._shown = []
        trained: set[Tensor] = set()
        for flat, values in seen:
            trained.update(parameter for parameter in flat.parameters if parameter.requires_grad)
            pairs = zip(flat.parameters, cut_like(values, flat.parameters), strict=True)
            self._show([pair for pair in pairs if pair[0] in trained])
        rest = [tensor for tensor in tensors if tensor not in trained and has_a_mean(tensor)]
        where = "for the mean of what no optimizer steps"
        for kind in by_dtype(differing(rest, self._peers, self._digests, where)):
            mean = row_of(kind)
            self._exchange.average_(mean, self._peers, where)
            self._show(list(zip(kind, cut_like(mean, kind), strict=True)))
        where = "for the buffers of rank 0"
        for kind in by_dtype(differing(copied, self._peers, self._digests, where)):
            words = self._exchange.from_rank_0(words_of(kind), self._peers)
            self._exchange.average_(words, self._peers, where)
            self._show(list(zip(kind, cut_words(words, kind), strict=True)))

    @torch.no_grad()
    def _show(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy the second tensor of each pair into the first, and remember the first."""
        assert self._shown is not None
        new = [_Shown(tensor, tensor.clone()) for tensor, _ in pairs]
        self._shown += new  # at once: what follows may fail
        for shown, (tensor, value) in zip(new, pairs, strict=True):
            tensor.copy_(value)
            shown.seen = sample(tensor)

    @torch.no_grad()
    def leave(self) -> None:
        """Each tensor gets its own values back; one that somebody else has changed meanwhile stays. No collective."""
        every, self._shown = self._shown or [], None
        for shown in every:
            if shown.seen is None or same(sample(shown.tensor), shown.seen):
                shown.tensor.copy_(shown.own)

    @contextmanager
    @torch.no_grad()
    def hidden(self) -> Generator[None, None, None]:
        """Within, the tensors have their own values."""
        every = self._shown or []
        seen = [shown.tensor.clone() for shown in every]
        for shown in every:
            shown.tensor.copy_(shown.own)
        try:
            yield
        finally:
            for shown, value in zip(every, seen, strict=True):
                shown.tensor.copy_(value)

    def means(self, group: Group, of: Callable[[Flat], Tensor]) -> Iterator[tuple[Flat, Tensor]]:
        """Each flat and its mean over all ranks."""
        for flat in group.flats:
            mean = of(flat)
            self._exchange.average_(mean, self._peers, "for the mean of all ranks")
            yield flat, mean

    def distance(self, groups: Sequence[Group], of: Callable[[Flat], Tensor], sample: int | None) -> float:
        """Mean over ranks of the squared distance of parameters from their mean; of so many of them, if not of all."""
        where = "for the consensus distance"
        total = torch.zeros(1, dtype=torch.float64, device="cpu")
        numel = sum(group.numel for group in groups)
        for group in groups:
            for flat in group.flats:
                own, mass, part = flat.row(), of(flat), 1.0
                if sample is not None and numel > sample:
                    count = max(1, sample * len(own) // numel)
                    generator = torch.Generator("cpu").manual_seed(derive_seed(group.seed, group.steps))
                    chosen = torch.randint(len(own), (count,), generator=generator, device="cpu").to(own.device)
                    own, mass, part = own[chosen], mass[chosen], len(own) / count
                self._exchange.average_(mass, self._peers, where)
                total += part * (own - mass).double().square().sum().cpu()
        self._exchange.average_(total, self._peers.control, where)
        return float(total)


def has_a_mean(tensor: Tensor) -> bool:
    """Whole numbers and booleans have none: they are each rank's own."""
    return tensor.is_floating_point() or tensor.is_complex()
