"""Horovod's elastic training on torchrun's restarts: what is committed survives a restart of all processes.

`torchrun --max-restarts=3 script.py` starts all processes again when one has died, perhaps on fewer hosts. Horovod
keeps the processes that live. So here a commit goes to memory and to a file of each node, and after a restart the
newest commit of any rank goes to all.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.data import Sampler

from ringstrategy.integrations.horovod.values import allgather_object, broadcast_object
from ringstrategy.integrations.horovod.world import init, is_initialized, local_rank, world
from ringstrategy.session.sealed import seal, unseal

Result = TypeVar("Result")


class ElasticSampler(Sampler[int]):
    """Shares out the samples of an epoch that no rank has processed yet.

    Call `set_epoch` at the end of each epoch, and `record_batch` after each batch.

    Args:
        dataset: with a length.
        shuffle: the samples of an epoch, in the same way on all ranks.
        seed: the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """A new epoch begins, in which nothing is processed."""
        self.epoch, self.processed_indices = epoch, set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """This rank has processed its batch of this number, since the last `reset`."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Sequence[int]) -> None:
        """This rank has processed these samples."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of a batch of this rank."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Of this rank."""
        return {"epoch": self.epoch, "processed_indices": sorted(self.processed_indices)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What `state_dict` gave, then `reset`."""
        self.epoch, self.processed_indices = state["epoch"], set(state["processed_indices"])
        self.reset()

    def reset(self) -> None:
        """Share out what is left to the ranks of now. Each gets as many; the first samples come twice if they must."""
        size, rank = world().size, world().rank
        left = [index for index in range(len(self.dataset)) if index not in self.processed_indices]
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(left)
        left += [left[i % len(left)] for i in range(-len(left) % size)]
        self.indices = left[rank::size]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class State:
    """What a run needs to go on: each keyword becomes an attribute.

    Objects with `state_dict` and `load_state_dict` (models, optimizers, schedulers, samplers) are saved by those, all
    others as they are: use plain values.

    Args:
        path: of the file of this node. None: a private one in the temporary folder, for the restarts of one torchrun;
            it is removed when `run` ends well. Without torchrun a commit is in memory only.
        kwargs: the parts.
    """

    def __init__(self, *, path: str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        self._parts = list(kwargs)
        self._path = Path(path) if path is not None else _private_file()
        self._private = path is None
        self._commits = 0
        self._saved: dict[str, Any] = {}
        self._callbacks: list[Callable[[], None]] = []
        for name, value in kwargs.items():
            setattr(self, name, value)
        self.save()

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Called after a restart, when the state is that of the last commit; for example to adapt learning rates."""
        self._callbacks += callbacks

    def save(self) -> None:
        """Keep a copy in memory."""
        self._saved = {name: _state_of(getattr(self, name)) for name in self._parts}

    def restore(self) -> None:
        """Take back what was saved last."""
        for name in self._parts:
            part, saved = getattr(self, name), copy.deepcopy(self._saved[name])
            if _has_state(part):
                part.load_state_dict(saved)
            else:
                setattr(self, name, saved)

    def commit(self) -> None:
        """Save in memory and to the file of this node. All ranks call it, at the same place; what a sampler has
        processed is then known of all ranks."""
        self._commits += 1
        self.save()
        for name in self._parts:
            if isinstance(getattr(self, name), ElasticSampler):
                everyones = allgather_object(self._saved[name]["processed_indices"])
                self._saved[name]["processed_indices"] = sorted(set().union(*everyones))
        if self._path is not None and local_rank() == 0:
            beside = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            torch.save(seal({"commits": self._commits, "parts": self._saved}), beside)
            os.replace(beside, self._path)

    def check_host_updates(self) -> None:
        """Nothing: torchrun restarts all processes when hosts come or go."""

    def sync(self) -> None:
        """Give all ranks the state of rank 0."""
        self.save()
        self._take(0)

    def _take(self, root: int) -> None:
        self._commits, self._saved = broadcast_object((self._commits, self._saved), root)
        self.restore()

    def resume(self) -> None:
        """Begin with the newest commit of any rank, or with the state of rank 0; all ranks call it."""
        self.save()
        if self._path is not None and self._path.exists():
            try:
                found = unseal(torch.load(self._path, weights_only=True), weights_only=False)
            except Exception as error:
                raise ValueError(f"{self._path} is damaged: {error}. Delete it, and another commit is used") from error
            self._commits, self._saved = found["commits"], found["parts"]
        commits = allgather_object(self._commits)
        newest = max(range(len(commits)), key=commits.__getitem__)
        self._take(newest)
        for callback in self._callbacks if commits[newest] else ():
            callback()

    def end(self) -> None:
        """Training has ended: the private file goes."""
        if self._path is not None and self._private:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()


ObjectState = State


class TorchState(State):
    """`State` with Horovod's names for its first two parts."""

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        named = {"model": model, "optimizer": optimizer}
        super().__init__(**{name: part for name, part in named.items() if part is not None}, **kwargs)


def run(function: Callable[..., Result]) -> Callable[..., Result]:
    """A decorator for `train(state, ...)`: it begins with the newest commit.

    An error, such as that of a rank that is lost, ends the process, and torchrun starts all of them again.
    """

    @functools.wraps(function)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Result:
        if not is_initialized():
            init()
        state.resume()
        result = function(state, *args, **kwargs)
        state.end()
        return result

    return wrapper


def _has_state(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _state_of(part: Any) -> Any:
    return copy.deepcopy(part.state_dict() if _has_state(part) else part)


def _private_file() -> Path | None:
    """The same for all attempts of one agent of torchrun, and for nobody else."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    folder = Path(tempfile.gettempdir()) / f"ringstrategy-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077:
        raise ValueError(f"{folder} is open to others, and what is read from it is executed: remove it, or pass path=")
    agent = os.getppid()
    with contextlib.suppress(OSError):
        began = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]
        return folder / f"elastic-{agent}-{began}"
    return folder / f"elastic-{agent}"
