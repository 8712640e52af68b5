"""The file of a rank beside a checkpoint: where it lies, and what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ringstrategy.session.sealed import unseal


def rank_file(path: str | Path, rank: int) -> Path:
    """Of the set that the checkpoint names."""
    named = torch.load(path, weights_only=False)["ringstrategy"]["files"]
    return Path(f"{path}.ringstrategy") / named / f"rank_{rank:05d}.pt"


def rank_state(path: str | Path, rank: int) -> dict[str, Any]:
    return unseal(torch.load(rank_file(path, rank), weights_only=True), weights_only=True)


def whole(path: str | Path, size: int) -> dict[str, Any] | None:
    """The checkpoint, after a look at the files of all ranks that it names. None if it is not there."""
    if not Path(path).exists():
        return None
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    shared = checkpoint["ringstrategy"]
    for rank in range(size):
        state = rank_state(path, rank)
        assert state["step"] == shared["algorithm"]["step"]
        assert (state["rank"], state["world_size"], state["save"]) == (rank, size, shared["files"])
    return checkpoint
