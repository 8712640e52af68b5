"""What each rank has of its own in a file beside the checkpoint, and what a run of any size makes of it.

`run.ckpt` holds, under `ringstrategy`, what all ranks share, and the sum of all ranks' residuals; the folder
`run.ckpt.ringstrategy` holds one file a rank: its residuals or, with gossip, its parameters, optimizers and whatever
the algorithm keeps. Tensors and primitives only, so that `weights_only=True` loads them all.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ringstrategy.algorithms.base import Algorithm
from ringstrategy.collectives.base import sums_dtype

_SHOWN = 5  # names in a message


class Ranks(Protocol):
    """The ranks of a run, as one of them sees them: see `RingStrategy`, and Lightning's `Strategy`."""

    algorithm: Algorithm

    @property
    def global_rank(self) -> int:
        """This one, from 0."""

    @property
    def world_size(self) -> int:
        """How many."""

    @property
    def root_device(self) -> torch.device:
        """Where collectives take their tensors from."""

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Writes, reads and removes files."""

    @property
    def alone(self) -> bool:
        """Did this rank's run end in an exception? Then nobody answers its collectives."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors."""

    def reduce(self, tensor: Tensor, *, reduce_op: str) -> Tensor:
        """The "sum" or "mean" over ranks, exact."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint to resume from.

    Attributes:
        path: of the checkpoint.
        shared: what it has under `ringstrategy`.
        weights_only: as the user wants it loaded.
        own: this rank's file, if the checkpoint is of ranks with parameters of their own, and all have found theirs.
    """

    path: _PATH
    shared: Mapping[str, Any]
    weights_only: bool | None
    own: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Means:
    """What a checkpoint got as the module's state, and what this rank has instead."""

    means: Mapping[str, Any]
    own: Mapping[str, Any]


def collect(ranks: Ranks, own: Mapping[str, Any] | None, path: _PATH, storage_options: Any) -> dict[str, Any]:
    """Write what this rank has of its own beside the checkpoint `path`; returns what belongs into the checkpoint.

    All ranks call it, unless the run of this rank ended in an exception: then it calls nobody, and the sum is None.

    Args:
        ranks: all of them, and the algorithm that they run.
        own: the checkpoint as this rank would load it; None if it is the same on all ranks.
        path: of the checkpoint.
        storage_options: Lightning's.
    """
    state = ranks.algorithm.state_dict()
    residuals = {name: value.to("cpu", copy=True).contiguous() for name, value in ranks.algorithm.residuals()}
    if residuals or own is not None:
        mine = {
            "rank": ranks.global_rank,
            "world_size": ranks.world_size,
            "step": state["step"],
            "residuals": residuals,
            "own": None if own is None else {"checkpoint": own, "algorithm": ranks.algorithm.own_state()},
        }
        ranks.checkpoint_io.save_checkpoint(mine, _file(path, ranks.global_rank), storage_options=storage_options)
    total = None if residuals and ranks.alone else _sum(ranks, residuals)
    shared = {"world_size": ranks.world_size, "algorithm": state, "residual_sum": total}
    return {**shared, "decentralized": ranks.algorithm.decentralized}


def of_this_rank(checkpoint: Mapping[str, Any], means: Means | None) -> dict[str, Any]:
    """The checkpoint with this rank's own values wherever it holds the means, under whatever keys they are by now."""
    own = {} if means is None else {id(value): means.own[name] for name, value in means.means.items()}
    # unlike Lightning's own function for it, this leaves what it does not know as it is
    replaced: dict[str, Any] = tree_map_only(Tensor, lambda tensor: own.get(id(tensor), tensor), dict(checkpoint))
    return replaced


def averaged(ranks: Ranks, state: Mapping[str, Any], means: Means) -> dict[str, Any]:
    """`state` with the means over all ranks of what a callback has put there, such as moving averages of weights.

    All ranks call it. Where they have not put the same things there, rank 0's stay.
    """
    known = {id(value) for value in means.means.values()}
    foreign = {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor) and value.is_floating_point() and id(value) not in known
    }
    names = "\n".join(f"{name} {tuple(value.shape)}" for name, value in foreign.items())
    digest = int.from_bytes(hashlib.sha256(names.encode()).digest()[:7], "little")
    if not bool((ranks.all_gather(torch.tensor([digest], device=ranks.root_device)) == digest).all()):
        return dict(state)

    def mean(value: Tensor) -> Tensor:
        # wide, so that the mean of what is the same everywhere is that again
        whole = value.detach().to(ranks.root_device, torch.float64, copy=True)
        return ranks.reduce(whole, reduce_op="mean").to(value.device, value.dtype)

    return {**state, **{name: mean(value) for name, value in foreign.items()}}


def _sum(ranks: Ranks, residuals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    total = {}
    for name, residual in residuals.items():
        summand = residual.to(ranks.root_device, sums_dtype(residual.dtype), copy=True)
        total[name] = ranks.reduce(summand, reduce_op="sum").cpu()
    return total


def found(ranks: Ranks, path: _PATH, shared: Mapping[str, Any], weights_only: bool | None) -> Saved:
    """The checkpoint, and this rank's file if ranks have parameters of their own. All ranks call it."""
    saved = Saved(path, shared, weights_only)
    before, now = shared["world_size"], ranks.world_size
    if not (shared["decentralized"] and ranks.algorithm.decentralized) or now == 1:
        return saved
    if before != now:
        rank_zero_info(
            f"The checkpoint is of world size {before}, this run of {now}: "
            "all ranks start from the mean of its ranks and from rank 0's optimizers."
        )
        return saved
    mine = _load(saved, ranks.global_rank, ranks.checkpoint_io)
    if mine is not None and mine["own"]["algorithm"]["torn"]:
        mine = None
    missing = _missing(ranks, mine)
    if missing:
        rank_zero_warn(
            f"what rank {_list(missing)} has of its own is not in {_folder(path)} (it must be kept beside its "
            "checkpoint), or an exception saved it within an exchange: all ranks start from the checkpoint's "
            "parameters and optimizers"
        )
        return saved
    assert mine is not None
    return replace(saved, own=mine["own"])


def restore(ranks: Ranks, saved: Saved) -> dict[str, Any] | None:
    """Give the algorithm its state back. All ranks call it, after `Algorithm.setup`.

    At the same world size each rank takes its own residuals, bit for bit. At another, each takes the same share of
    their sum, so that the sum is kept (to the rounding of one division; exact if the size is a power of two). With one
    rank there is no algorithm, and the gradients are exact: returns what the checkpoints of this run must carry on.
    """
    shared = saved.shared
    before, now = shared["world_size"], ranks.world_size
    if shared["decentralized"] != ranks.algorithm.decentralized:
        rank_zero_info(
            "The checkpoint is of another kind of averaging: this run takes its weights and its optimizers, no more."
        )
        return None
    if before == now > 1:
        residuals = _own(ranks, saved)
    else:
        total = shared["residual_sum"]
        if total is None:
            total = _sum_of_files(saved, ranks.checkpoint_io)
        if now == 1:
            if total and before > 1:
                rank_zero_info(
                    f"The checkpoint is of {before} ranks. One rank needs no error feedback: "
                    "the sum of their residuals is carried on into the checkpoints of this run."
                )
            return {**shared, "world_size": 1, "residual_sum": total}
        residuals = {name: value / now for name, value in total.items()}
        if total:
            rank_zero_info(
                f"The checkpoint is of world size {before}, this run of {now}: "
                f"each rank takes 1/{now} of the sum of the error-feedback residuals."
            )
    if saved.own is not None:
        kept = saved.own["algorithm"]
        if not ranks.algorithm.load_own_state(kept):
            rank_zero_info(
                f"The checkpoint is of {kept['of']}, this run of {ranks.algorithm}: each rank "
                "takes its own parameters and optimizers, but nothing that only the other kept."
            )
    ranks.algorithm.load_state_dict(shared["algorithm"])
    homeless = ranks.algorithm.load_residuals(residuals)
    if homeless:
        rank_zero_warn(
            f"the checkpoint has error-feedback residuals of {_names(homeless)} that this run has no place for "
            "(no feedback here, or a parameter was renamed or has another shape): what they held is dropped"
        )
    return None


def _missing(ranks: Ranks, mine: dict[str, Any] | None) -> list[int]:
    """Ranks that did not find their file; every rank calls it with its own."""
    has_mine = torch.tensor([mine is not None], dtype=torch.uint8, device=ranks.root_device)
    return [rank for rank, has in enumerate(ranks.all_gather(has_mine).view(-1).tolist()) if not has]


def _own(ranks: Ranks, saved: Saved) -> dict[str, Tensor]:
    """This rank's residuals, or its share of the sum if any rank misses its own."""
    total, size, path = saved.shared["residual_sum"], ranks.world_size, saved.path
    if total is not None and not total:
        return {}
    mine = _load(saved, ranks.global_rank, ranks.checkpoint_io)
    missing = _missing(ranks, mine)
    if missing and total is not None:
        rank_zero_warn(
            f"the residuals of rank {_list(missing)} are not in {_folder(path)} (it must be kept beside its "
            f"checkpoint): each rank takes 1/{size} of their sum instead of its own"
        )
        return {name: value / size for name, value in total.items()}
    if missing:
        _warn_lost(f"of rank {_list(missing)}, whose files are not in {_folder(path)},")
    residuals: dict[str, Tensor] = {} if mine is None else mine["residuals"]
    return residuals


def _sum_of_files(saved: Saved, io: CheckpointIO) -> dict[str, Tensor]:
    """The sum that the checkpoint does not have, because an exception wrote it."""
    total: dict[str, Tensor] = {}
    missing = []
    for rank in range(saved.shared["world_size"]):
        state = _load(saved, rank, io)
        if state is None:
            missing.append(rank)
            continue
        for name, value in state["residuals"].items():
            wide = value.to(sums_dtype(value.dtype))
            total[name] = total[name] + wide if name in total else wide
    if missing:
        _warn_lost(f"of rank {_list(missing)}, whose files are not in {_folder(saved.path)},")
    return total


def _warn_lost(whose: str) -> None:
    rank_zero_warn(f"the checkpoint was written at an exception: residuals {whose} are lost and begin at zero")


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


def _load(saved: Saved, rank: int, io: CheckpointIO) -> dict[str, Any] | None:
    """A rank's file, or None if there is none, or it is another checkpoint's."""
    try:
        state = io.load_checkpoint(_file(_resolved(saved.path), rank), weights_only=saved.weights_only)
    except FileNotFoundError:
        return None
    belongs = (state["world_size"], state["step"]) == (saved.shared["world_size"], saved.shared["algorithm"]["step"])
    return state if belongs else None


def _resolved(path: _PATH) -> str:
    # ModelCheckpoint(save_last="link") makes `last.ckpt` a link; the residuals lie where it points to
    return os.path.realpath(path) if os.path.islink(path) else os.fspath(path)


def _names(names: Iterable[str]) -> str:
    return _list(sorted(names))


def _list(items: list[Any]) -> str:
    shown = ", ".join(str(item) for item in items[:_SHOWN])
    return shown if len(items) <= _SHOWN else f"{shown} and {len(items) - _SHOWN} more"
