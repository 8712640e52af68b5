"""The files beside a Lightning checkpoint: the folder `run.ckpt.ringstrategy` beside `run.ckpt`, one file a rank."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from ringstrategy.session.state import Log

LOG = Log(rank_zero_info, rank_zero_warn)


class RankFiles:
    """See `ringstrategy.session.state.Files`; written and read by the user's `CheckpointIO`.

    Args:
        io: writes, reads and removes files.
        path: of the checkpoint.
        weights_only: as the user wants files loaded.
        storage_options: Lightning's.
    """

    def __init__(
        self, io: CheckpointIO, path: _PATH, *, weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        self._io, self._path = io, os.fspath(path)
        self._weights_only, self._storage_options = weights_only, storage_options

    @property
    def folder(self) -> str:
        """See `Files.folder`."""
        return f"{self._path}.ringstrategy"

    def save(self, state: dict[str, Any], rank: int) -> None:
        """See `Files.save`."""
        self._io.save_checkpoint(state, _file(self._path, rank), storage_options=self._storage_options)

    def load(self, rank: int) -> dict[str, Any] | None:
        """See `Files.load`."""
        # ModelCheckpoint(save_last="link") makes `last.ckpt` a link; the files lie beside what it points to
        path = os.path.realpath(self._path) if os.path.islink(self._path) else self._path
        try:
            state: dict[str, Any] = self._io.load_checkpoint(_file(path, rank), weights_only=self._weights_only)
        except FileNotFoundError:
            return None
        return state

    def remove(self) -> None:
        """Remove the folder."""
        files = get_filesystem(self.folder)
        for _ in range(3):
            if not files.exists(self.folder):
                return
            with suppress(FileNotFoundError):  # on a disk that nodes share, another one may be doing the same
                self._io.remove_checkpoint(self.folder)
        if files.exists(self.folder):
            rank_zero_warn(f"{self._io} did not remove {self.folder}, where the residuals of a removed checkpoint lie")


def _file(path: str, rank: int) -> str:
    return f"{path}.ringstrategy/rank_{rank:05d}.pt"
