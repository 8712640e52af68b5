"""Which tensors differ between ranks? Told by digests, so that equal ones keep their bits and are not sent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ringstrategy.kernels.sample import same, sample
from ringstrategy.transport.agree import all_gather
from ringstrategy.transport.base import Peers

_DIGEST = 8  # bytes


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
    """The tensors whose bits differ between ranks. All ranks call it with equally many tensors, and wait."""
    if not tensors:
        return []
    mine = torch.frombuffer(bytearray(b"".join(map(digests.of, tensors))), dtype=torch.uint8)
    everyone: list[Tensor] = []
    work = peers.control.submit(lambda: everyone.append(all_gather(peers.control, mine)()), where)
    peers.control.finish([work])
    table = everyone[0].view(-1, len(tensors), _DIGEST)
    equal = (table == table[0]).all(-1).all(0).tolist()
    return [tensor for tensor, is_equal in zip(tensors, equal, strict=True) if not is_equal]


def _digest(tensor: Tensor) -> bytes:
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(values.numpy().data, digest_size=_DIGEST).digest()
