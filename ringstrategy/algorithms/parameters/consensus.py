"""Let tensors show other values than their own for a while, and find out which tensors differ between ranks at all."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ringstrategy.buckets.sample import same, sample
from ringstrategy.transport.agree import exchange
from ringstrategy.transport.base import Peers

_DIGEST = 8  # bytes


@dataclass
class _Shown:
    tensor: Tensor
    own: Tensor
    seen: Tensor | None = None  # a sample of what it shows


class Shown:
    """The tensors that show something else, and their own values."""

    def __init__(self) -> None:
        self._shown: list[_Shown] = []

    @torch.no_grad()
    def show(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """From now on the first of each pair shows the values of the second."""
        new = [_Shown(tensor, tensor.clone()) for tensor, _ in pairs]
        self._shown += new  # at once: what follows may fail
        for shown, (tensor, value) in zip(new, pairs, strict=True):
            tensor.copy_(value)
            shown.seen = sample(tensor)

    @torch.no_grad()
    def end(self) -> None:
        """Each tensor gets its own values back; one that somebody else has changed meanwhile stays as it is."""
        every, self._shown = self._shown, []
        for shown in every:
            if shown.seen is None or same(sample(shown.tensor), shown.seen):
                shown.tensor.copy_(shown.own)

    @contextmanager
    @torch.no_grad()
    def hidden(self) -> Generator[None, None, None]:
        """Within, the tensors have their own values."""
        seen = [shown.tensor.clone() for shown in self._shown]
        for shown in self._shown:
            shown.tensor.copy_(shown.own)
        try:
            yield
        finally:
            for shown, value in zip(self._shown, seen, strict=True):
                shown.tensor.copy_(value)


class Digests:
    """Digests of tensors. Frozen parameters may be large: theirs are kept until torch or a sample tells of a change."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], tuple[int, Tensor, bytes]] = {}

    def of(self, tensor: Tensor) -> bytes:
        """8 bytes."""
        if tensor.requires_grad or not isinstance(tensor, Parameter) or tensor.is_inference():
            return _digest(tensor)
        key = (tensor.data_ptr(), tensor.shape, tensor.dtype)
        version, seen, digest = self._kept.get(key, (-1, None, b""))
        now = sample(tensor.detach())
        if seen is None or version != tensor._version or not same(seen, now):
            digest = _digest(tensor)
            self._kept[key] = tensor._version, now, digest
        return digest


def differing(tensors: Sequence[Tensor], peers: Peers, digests: Digests, where: str) -> list[Tensor]:
    """Those that are not the same bits on all ranks. Every rank calls it with as many, and waits for the others."""
    if not tensors:
        return []
    mine = torch.frombuffer(bytearray(b"".join(map(digests.of, tensors))), dtype=torch.uint8)
    everyone: list[Tensor] = []
    work = peers.control.submit(lambda: everyone.append(exchange(peers.control, mine)()), where)
    peers.control.finish([work])
    table = everyone[0].view(-1, len(tensors), _DIGEST)
    equal = (table == table[0]).all(-1).all(0).tolist()
    return [tensor for tensor, is_equal in zip(tensors, equal, strict=True) if not is_equal]


def _digest(tensor: Tensor) -> bytes:
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(values.numpy().data, digest_size=_DIGEST).digest()
