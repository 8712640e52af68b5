"""A rank's state as a file that knows whether it is what was written: its bytes, and their checksum."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from typing import Any

import torch

_DIGEST, _BYTES = "sha256", "state"


def seal(state: Mapping[str, Any]) -> dict[str, Any]:
    """What to write for `state`: a dict of its bytes (a uint8 tensor) and of their SHA-256."""
    written = io.BytesIO()
    torch.save(dict(state), written)
    content = written.getbuffer()
    return {_DIGEST: hashlib.sha256(content).hexdigest(), _BYTES: torch.frombuffer(content, dtype=torch.uint8)}


def unseal(file: Mapping[str, Any], *, weights_only: bool | None) -> dict[str, Any]:
    """The state in what `seal` returned. ValueError if a byte differs.

    Args:
        file: as read.
        weights_only: as for `torch.load`.
    """
    content = file[_BYTES].numpy()
    digest = hashlib.sha256(content).hexdigest()
    if digest != file[_DIGEST]:
        raise ValueError(
            f"the SHA-256 of its content is {digest[:12]}..., but {str(file[_DIGEST])[:12]}... was written"
        )
    state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=weights_only)
    return state
