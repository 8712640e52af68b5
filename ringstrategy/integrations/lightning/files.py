"""The files of a checkpoint: `run.ckpt`, and for each rank one in the folder `run.ckpt.ringstrategy` beside it.

Each save makes a folder of its own in there, which `run.ckpt` names. So until `run.ckpt` is replaced, which is one
rename, the checkpoint is the old one with the old files of the ranks, and from then on the new one with the new.
"""

from __future__ import annotations

import errno
import io
import os
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from fsspec.core import url_to_fs
from fsspec.utils import get_protocol
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from ringstrategy.integrations.lightning.package import TRAINERS, imported
from ringstrategy.session.sealed import seal, unseal
from ringstrategy.session.state import Log

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
    from lightning.fabric.utilities.types import _PATH
else:
    TorchCheckpointIO = object

# some network file systems know no flush of folders
_NO_FLUSH = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EPERM}

LOG = Log(rank_zero_info, rank_zero_warn)


class WholeCheckpointIOMixin(TorchCheckpointIO):
    """Lightning's format, but a local file is replaced whole or not at all, and is on the disk when a save returns.

    Lightning's own writes into the system's temporary folder. If that is another disk, its last step is a copy, and a
    kill leaves half a file.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any = None) -> None:
        """See `CheckpointIO`. OSError if the file cannot be written; then the one before is as it was."""
        local = _local(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        content = io.BytesIO()
        torch.save(checkpoint, content)
        _write(local, content.getbuffer())


class RankFiles:
    """See `ringstrategy.session.state.Files`; written and read by the user's `CheckpointIO`.

    Args:
        checkpoint_io: writes, reads and removes files.
        path: of the checkpoint.
        weights_only: as the user wants files loaded.
        storage_options: Lightning's.
    """

    def __init__(
        self, checkpoint_io: CheckpointIO, path: _PATH, *, weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        self._io, self._path = checkpoint_io, os.fspath(path)
        self._weights_only, self._storage_options = weights_only, storage_options

    @property
    def path(self) -> str:
        """See `Files.path`."""
        return self._path

    def name(self, save: str, rank: int) -> str:
        """See `Files.name`."""
        local = _local(self._path)
        # ModelCheckpoint(save_last="link") makes `last.ckpt` a link; the files lie beside what it points to
        path = os.path.realpath(local) if local is not None and os.path.islink(local) else self._path
        return f"{path}.ringstrategy/{save}/rank_{rank:05d}.pt"

    def save(self, state: dict[str, Any], save: str, rank: int) -> None:
        """See `Files.save`."""
        # not `name`: a save replaces a link, and not what it points to
        path = f"{self._path}.ringstrategy/{save}/rank_{rank:05d}.pt"
        self._io.save_checkpoint(seal(state), path, storage_options=self._storage_options)
        finish_writing(self._io)

    def load(self, save: str, rank: int) -> dict[str, Any] | None:
        """See `Files.load`."""
        path = self.name(save, rank)
        try:
            file = self._io.load_checkpoint(path, weights_only=self._weights_only)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise ValueError(f"{path} cannot be read ({_cause(error)})") from error
        try:
            return unseal(file, weights_only=self._weights_only)
        except UnpicklingError as error:  # the bytes are right
            raise ValueError(f"{path} cannot be read ({_cause(error)})") from error
        except Exception as error:
            raise ValueError(f"{path} is damaged ({_cause(error)})") from error

    def keep_only(self, *saves: str) -> None:
        """See `Files.keep_only`."""
        folder = f"{self._path}.ringstrategy"
        try:
            entries = _filesystem(folder).ls(folder, detail=False)
        except OSError as error:  # all that matters is saved
            warnings.warn(f"{folder} cannot be read, so old files stay there: {error}", stacklevel=2)
            return
        for entry in entries:
            name = os.path.basename(os.fspath(entry).rstrip("/"))
            if name not in saves:
                self._remove(f"{folder}/{name}")

    def discard(self, save: str) -> None:
        """See `Files.discard`."""
        self._remove(f"{self._path}.ringstrategy/{save}")

    def remove(self) -> None:
        """Remove all files of ranks."""
        self._remove(f"{self._path}.ringstrategy")

    def _remove(self, path: str) -> None:
        files = _filesystem(path)
        for _ in range(3):
            if not files.exists(path):
                return
            with suppress(OSError):  # on a disk that nodes share, another one may be doing the same
                self._io.remove_checkpoint(path)
        if files.exists(path):
            # not for rank 0 alone: it may be the disk of another host
            warnings.warn(f"{self._io} did not remove {path}, which no checkpoint needs any more", stacklevel=2)


def finish_writing(checkpoint_io: CheckpointIO) -> None:
    """Wait until all is written that was given to it: `AsyncCheckpointIO` writes later. What it raised meanwhile."""
    wrapping = tuple(module._WrappingCheckpointIO for module in imported(TRAINERS, "plugins.io.wrapper"))
    writing_later = tuple(module.AsyncCheckpointIO for module in imported(TRAINERS, "plugins.io.async_plugin"))
    inner: Any = checkpoint_io
    while isinstance(inner, wrapping):
        if isinstance(inner, writing_later):
            inner.teardown()  # the next save opens it again
        inner = inner.checkpoint_io


def _filesystem(path: str) -> AbstractFileSystem:
    return url_to_fs(path)[0]


def _local(path: _PATH) -> str | None:
    """The absolute path on this host; None if it is elsewhere, such as in a bucket."""
    address = os.fspath(path)
    return os.path.abspath(_filesystem(address)._strip_protocol(address)) if get_protocol(address) == "file" else None


def _write(path: str, content: memoryview) -> None:
    """Replace the file by one of this content: at any moment all of the old one is there, or all of the new one."""
    folder, name = os.path.split(path)
    _make(folder)
    # "_": Lightning counts SLURM's checkpoints by all names with "hpc_ckpt_" in them
    temporary = os.path.join(folder, f".{name.replace('_', '-')}.saving")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.remove(temporary)
        raise
    _flush(folder)


def _make(folder: str) -> None:
    """Make the folder, and those above it; their names are on the disk when this returns."""
    for path in reversed(list(_missing(folder))):
        with suppress(FileExistsError):  # another rank
            os.mkdir(path)
        _flush(os.path.dirname(path))


def _missing(folder: str) -> Iterator[str]:
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        yield folder
        folder = os.path.dirname(folder)


def _flush(folder: str) -> None:
    """Bring the folder's names to the disk."""
    if os.name != "posix":
        return  # no other system opens folders
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]
