"""Do all ranks say the same? Small messages that everyone sends to everyone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import zip_longest

import torch
from torch import Tensor

from ringstrategy.collectives.peers import Peers
from ringstrategy.errors import PlanMismatchError


def exchange(peers: Peers, payload: Tensor) -> Callable[[], Tensor]:
    """Start sending `payload` (flat uint8, on the host, the same length on all ranks) to all.

    Returns a function that waits and returns all payloads, shape (size, length), row i from rank i.
    """
    table = torch.empty(peers.size, payload.numel(), dtype=torch.uint8, device="cpu")
    table[peers.rank] = payload
    handles = [peers.swap(target, payload, source, table[source]) for target, source in peers.pairs()]

    def collect() -> Tensor:
        for handle in handles:
            handle.wait()
        return table

    return collect


def agree(peers: Peers, text: str) -> None:
    """Raise PlanMismatchError on every rank, naming who differs and in which line, unless all ranks have one `text`."""
    said = text.encode()
    digest = hashlib.sha256(said).digest() + len(said).to_bytes(8, "little")
    table = exchange(peers, torch.frombuffer(bytearray(digest), dtype=torch.uint8))()
    differing = [rank for rank in range(peers.size) if not torch.equal(table[rank], table[0])]
    if not differing:
        return
    lengths = [int.from_bytes(bytes(row[-8:].tolist()), "little") for row in table]
    padded = torch.frombuffer(bytearray(said.ljust(max(lengths), b"\0")), dtype=torch.uint8)
    texts = [
        bytes(row[:length].tolist()).decode() for row, length in zip(exchange(peers, padded)(), lengths, strict=True)
    ]
    raise PlanMismatchError(
        "the ranks were not built alike, so their gradients cannot be averaged: "
        + "; ".join(_first_difference(rank, texts[rank], texts[0]) for rank in differing)
        + ". Give every rank the same model, the same strategy arguments and the same version of ringstrategy"
    )


def compare_plans(peers: Peers, text: str) -> None:
    """`agree`, beside the training thread and waited for."""
    peers.control.submit(lambda: agree(peers.control, text), "while the ranks compare plans").wait()


def _first_difference(rank: int, text: str, reference: str) -> str:
    for mine, theirs in zip_longest(text.splitlines(), reference.splitlines(), fillvalue="(nothing)"):
        if mine != theirs:
            return f"rank {rank} has '{mine}' where rank 0 has '{theirs}'"
    raise AssertionError("equal texts have equal digests")
