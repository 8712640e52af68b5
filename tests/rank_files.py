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
