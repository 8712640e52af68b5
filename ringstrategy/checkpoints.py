"""What each rank has of its own in a file beside the checkpoint, and what a run of any size makes of it.

`run.ckpt` holds, under `ringstrategy`, what all ranks share, and the sum of all ranks' residuals; the folder
`run.ckpt.ringstrategy` holds one file a rank: its residuals or, with gossip, its parameters, optimizers and whatever
the algorithm keeps. Tensors and primitives only, so that `weights_only=True` loads them all.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from ringstrategy.collectives.buckets import sums_dtype

if TYPE_CHECKING:
    from ringstrategy.strategy import RingStrategy

_SHOWN = 5  # names in a message


def collect(strategy: RingStrategy, path: _PATH, storage_options: Any) -> dict[str, Any]:
    """Write what this rank has of its own beside the checkpoint `path`; returns what belongs into the checkpoint.

    All ranks call it, unless the run of this rank ended in an exception: then it calls nobody, and the sum is None.
    """
    state = strategy.algorithm.state_dict()
    residuals = {
        name: None if value is None else value.to("cpu", copy=True) for name, value in strategy.algorithm.residuals()
    }
    known = {name: value.contiguous() for name, value in residuals.items() if value is not None}
    unknown = [name for name, value in residuals.items() if value is None]
    own = strategy.own_state()
    if residuals or own:
        mine = {
            "rank": strategy.global_rank,
            "world_size": strategy.world_size,
            "step": state["step"],
            "residuals": known,
            "unknown": unknown,
            "own": own,
        }
        strategy.checkpoint_io.save_checkpoint(mine, _file(path, strategy.global_rank), storage_options=storage_options)
    total = _sum(strategy, known) if _all_know(strategy, known, unknown) else None
    shared = {"world_size": strategy.world_size, "algorithm": state, "residual_sum": total}
    return {**shared, "decentralized": strategy.algorithm.decentralized}


def _all_know(strategy: RingStrategy, known: Mapping[str, Tensor], unknown: list[str]) -> bool:
    """Do all ranks hold the residuals of the same parameters, so that they can be added one by one?"""
    if not known and not unknown:
        return True
    if strategy.alone:
        return False
    digest = int.from_bytes(hashlib.sha256("\n".join(known).encode()).digest()[:7], "little")
    mine = torch.tensor([-1 if unknown else digest], device=strategy.root_device)
    return bool((strategy.all_gather(mine) == digest).all())


def _sum(strategy: RingStrategy, residuals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    total = {}
    for name, residual in residuals.items():
        summand = residual.to(strategy.root_device, sums_dtype(residual.dtype), copy=True)
        total[name] = strategy.reduce(summand, reduce_op="sum").cpu()
    return total


def restore(strategy: RingStrategy, path: _PATH, saved: Mapping[str, Any]) -> dict[str, Any] | None:
    """Give the algorithm its state back. All ranks call it, after `Algorithm.setup`.

    At the same world size each rank takes its own residuals, bit for bit. At another, each takes the same share of
    their sum, so that the sum is kept (to the rounding of one division; exact if the size is a power of two). With one
    rank there is no algorithm, and the gradients are exact: returns what the checkpoints of this run must carry on.
    """
    before, now = saved["world_size"], strategy.world_size
    if saved["decentralized"] != strategy.algorithm.decentralized:
        rank_zero_info(
            "The checkpoint is of another kind of averaging: this run takes its weights and its optimizers, no more."
        )
        return None
    if before == now > 1:
        residuals = _own(strategy, path, saved)
    else:
        total = saved["residual_sum"]
        if total is None:
            total = _sum_of_files(path, saved, strategy.checkpoint_io)
        if now == 1:
            if total and before > 1:
                rank_zero_info(
                    f"The checkpoint is of {before} ranks. One rank needs no error feedback: "
                    "the sum of their residuals is carried on into the checkpoints of this run."
                )
            return {**saved, "world_size": 1, "residual_sum": total}
        residuals = {name: value / now for name, value in total.items()}
        if total:
            rank_zero_info(
                f"The checkpoint is of world size {before}, this run of {now}: "
                f"each rank takes 1/{now} of the sum of the error-feedback residuals."
            )
    if saved["decentralized"]:
        _load_own(strategy, path, saved)
    strategy.algorithm.load_state_dict(saved["algorithm"])
    homeless = strategy.algorithm.load_residuals(residuals)
    if homeless:
        rank_zero_warn(
            f"the checkpoint has error-feedback residuals of {_names(homeless)} that this run has no place for "
            "(no feedback here, or a parameter was renamed or has another shape): what they held is dropped"
        )
    return None


def _load_own(strategy: RingStrategy, path: _PATH, saved: Mapping[str, Any]) -> None:
    """Each rank's own parameters and optimizers, if all have theirs; else all start from the mean."""
    before, now = saved["world_size"], strategy.world_size
    mine = _load(path, saved, strategy.global_rank, strategy.checkpoint_io) if before == now else None
    if mine is not None and mine["own"]["algorithm"]["torn"]:
        mine = None
    missing = _missing(strategy, mine)
    if not missing:
        assert mine is not None
        if not strategy.load_own_state(mine["own"]):
            rank_zero_info(
                f"The checkpoint is of {mine['own']['algorithm']['of']}, this run of {strategy.algorithm}: each rank "
                "takes its own parameters and optimizers, but nothing that only the other kept."
            )
    elif before != now:
        rank_zero_info(
            f"The checkpoint is of world size {before}, this run of {now}: "
            "all ranks start from the mean of its ranks and from rank 0's optimizers."
        )
    else:
        rank_zero_warn(
            f"what rank {_list(missing)} has of its own is not in {_folder(path)} (it must be kept beside its "
            "checkpoint), or an exception saved it within an exchange: all ranks start from the checkpoint's "
            "parameters and optimizers"
        )


def _missing(strategy: RingStrategy, mine: dict[str, Any] | None) -> list[int]:
    """Ranks that did not find their file; every rank calls it with its own."""
    found = strategy.all_gather(torch.tensor([mine is not None], dtype=torch.uint8, device=strategy.root_device))
    return [rank for rank, has in enumerate(found.view(-1).tolist()) if not has]


def _own(strategy: RingStrategy, path: _PATH, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """This rank's residuals, or its share of the sum if any rank misses its own."""
    total, size = saved["residual_sum"], strategy.world_size
    if total is not None and not total:
        return {}
    mine = _load(path, saved, strategy.global_rank, strategy.checkpoint_io)
    missing = _missing(strategy, mine)
    if missing and total is not None:
        rank_zero_warn(
            f"the residuals of rank {_list(missing)} are not in {_folder(path)} (it must be kept beside its "
            f"checkpoint): each rank takes 1/{size} of their sum instead of its own"
        )
        return {name: value / size for name, value in total.items()}
    if missing:
        _warn_lost(f"of rank {_list(missing)}, whose files are not in {_folder(path)},")
    if mine is None:
        return {}
    if mine["unknown"]:
        _warn_lost(f"of {_names(mine['unknown'])} on rank {strategy.global_rank}", everywhere=True)
    residuals: dict[str, Tensor] = mine["residuals"]
    return residuals


def _sum_of_files(path: _PATH, saved: Mapping[str, Any], io: CheckpointIO) -> dict[str, Tensor]:
    """The sum that the checkpoint does not have, because an exception wrote it."""
    total: dict[str, Tensor] = {}
    missing, unknown = [], set()
    for rank in range(saved["world_size"]):
        state = _load(path, saved, rank, io)
        if state is None:
            missing.append(rank)
            continue
        unknown.update(state["unknown"])
        for name, value in state["residuals"].items():
            wide = value.to(sums_dtype(value.dtype))
            total[name] = total[name] + wide if name in total else wide
    if missing:
        _warn_lost(f"of rank {_list(missing)}, whose files are not in {_folder(path)},")
    if unknown:
        _warn_lost(f"of {_names(unknown)} on some rank")
    return total


def _warn_lost(whose: str, *, everywhere: bool = False) -> None:
    text = f"the checkpoint was written at an exception or within a step: residuals {whose} are lost and begin at zero"
    if everywhere:
        warnings.warn(text, stacklevel=2)
    else:
        rank_zero_warn(text)


def remove_residuals(io: CheckpointIO, path: _PATH) -> None:
    """Remove what lies beside the checkpoint `path`."""
    folder = _folder(path)
    files = get_filesystem(folder)
    for _ in range(3):
        if not files.exists(folder):
            return
        with suppress(FileNotFoundError):  # on a disk that nodes share, another one may be doing the same
            io.remove_checkpoint(folder)
    if files.exists(folder):
        rank_zero_warn(f"{io} did not remove {folder}, where the residuals of a removed checkpoint lie")


def _folder(path: _PATH) -> str:
    return f"{os.fspath(path)}.ringstrategy"


def _file(path: _PATH, rank: int) -> str:
    return f"{_folder(path)}/rank_{rank:05d}.pt"


def _load(path: _PATH, saved: Mapping[str, Any], rank: int, io: CheckpointIO) -> dict[str, Any] | None:
    """A rank's file, or None if there is none, or it is another checkpoint's."""
    try:
        state = io.load_checkpoint(_file(_resolved(path), rank), weights_only=True)
    except FileNotFoundError:
        return None
    belongs = (state["world_size"], state["step"]) == (saved["world_size"], saved["algorithm"]["step"])
    return state if belongs else None


def _resolved(path: _PATH) -> str:
    # ModelCheckpoint(save_last="link") makes `last.ckpt` a link; the residuals lie where it points to
    return os.path.realpath(path) if os.path.islink(path) else os.fspath(path)


def _names(names: Iterable[str]) -> str:
    return _list(sorted(names))


def _list(items: list[Any]) -> str:
    shown = ", ".join(str(item) for item in items[:_SHOWN])
    return shown if len(items) <= _SHOWN else f"{shown} and {len(items) - _SHOWN} more"
