"""State that each rank saves beside a checkpoint, and how a run of any world size restores it. No framework.

A checkpoint holds what all ranks share, and the sum of all ranks' residuals. Beside it lies one file a rank: its
residuals or, if it has parameters of its own, these, its optimizers and whatever the algorithm keeps. Both hold tensors
and primitives only, so that `weights_only=True` loads them.

All ranks write their files before the checkpoint that names them is written, and agree on it. So it is whole, or not
there. All ranks also agree on what they read: none goes on alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ringstrategy.algorithms.base import Algorithm
from ringstrategy.collectives.base import sums_dtype

_SHOWN = 5  # names in a message
_LONGEST = 1000  # bytes that ranks tell each other
_LOST = "the residuals in it begin at zero"


class Ranks(Protocol):
    """The ranks of a run, as one of them sees them."""

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
    def alone(self) -> bool:
        """Did this rank's run end in an exception? Then nobody answers its collectives."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors."""

    def reduce(self, tensor: Tensor, *, reduce_op: str) -> Tensor:
        """The "sum" or "mean" over ranks, exact."""


class Files(Protocol):
    """The files beside one checkpoint: of each save a set, one a rank."""

    @property
    def path(self) -> str:
        """The checkpoint's, for messages."""

    def name(self, save: str, rank: int) -> str:
        """Where a rank's file lies, for messages."""

    def save(self, state: dict[str, Any], save: str, rank: int) -> None:
        """Write a rank's file of the set `save`. It is on the disk when this returns."""

    def load(self, save: str, rank: int) -> dict[str, Any] | None:
        """A rank's file of that set; None if there is none.

        ValueError, which names the file, if it is damaged or cannot be read.
        """

    def keep_only(self, *saves: str) -> None:
        """Remove the other sets: a checkpoint that names these has replaced theirs."""

    def discard(self, save: str) -> None:
        """Remove this set, which no checkpoint names."""


@dataclass(frozen=True)
class Log:
    """Where messages of rank 0 go."""

    info: Callable[[str], None]
    warn: Callable[[str], None]


@dataclass(frozen=True)
class Saved:
    """A checkpoint to resume from.

    Attributes:
        files: those beside it.
        shared: what it has of this package.
        own: this rank's file, if the checkpoint is of ranks with parameters of their own, and all have found theirs.
    """

    files: Files
    shared: Mapping[str, Any]
    own: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Means:
    """The module's state in a checkpoint (what all ranks see), and the state of this rank."""

    means: Mapping[str, Any]
    own: Mapping[str, Any]


def collect(ranks: Ranks, own: Mapping[str, Any] | None, files: Files, token: str) -> dict[str, Any]:
    """Write what only this rank has beside the checkpoint; returns what belongs into the checkpoint.

    All ranks call it, unless the run of this rank ended in an exception: then it calls nobody, and the sum is None.
    Every rank's file is on its disk when this returns. RuntimeError on all ranks if one of them could not write.

    Args:
        ranks: all of them, and the algorithm that they run.
        own: the checkpoint as this rank would load it; None if it is the same on all ranks.
        files: those beside the checkpoint.
        token: the same on all ranks, and used for no other save to this path.
    """
    algorithm = ranks.algorithm
    state = algorithm.state_dict()
    residuals = {name: value.to("cpu", copy=True).contiguous() for name, value in algorithm.residuals()}
    save = None
    if residuals or own is not None:
        # after an exception ranks may be a step apart, and cannot ask each other
        save = f"exception-{token}" if ranks.alone else f"step-{state['step']}-{token}"
        mine = {
            "save": save,
            "rank": ranks.global_rank,
            "world_size": ranks.world_size,
            "step": state["step"],
            "residuals": residuals,
            "own": None if own is None else {"checkpoint": own, "algorithm": algorithm.own_state()},
        }
        written_by_all(
            ranks, files, partial(files.save, mine, save, ranks.global_rank), undo=partial(files.discard, save)
        )
    total = None if residuals and ranks.alone else _sum(ranks, residuals)
    shared = {"world_size": ranks.world_size, "algorithm": state, "residual_sum": total}
    return {**shared, "decentralized": algorithm.decentralized, "files": save}


def written_by_all(ranks: Ranks, files: Files, write: Callable[[], None], undo: Callable[[], None]) -> None:
    """Call `write`, on all ranks. RuntimeError on all of them if one could not, after `undo`.

    If `alone`, only what `write` raises.
    """
    if ranks.alone:
        write()
        return
    failure = None
    try:
        write()
    except Exception as error:
        failure = error
    problems = _told(ranks, "" if failure is None else f"{type(failure).__name__}: {failure}")
    if problems:  # all ranks have heard of it. If a rank is lost instead, others may have heard that all is well
        undo()
        raise RuntimeError(
            f"{files.path} could not be saved ({_by_rank(problems)}). A checkpoint that lies there is whole"
        ) from failure


def check_is_of(rank: int, size: int, state: Mapping[str, Any]) -> None:
    """ValueError unless this rank, in a world of this size, gave the state."""
    if (state["rank"], state["world_size"]) != (rank, size):
        raise ValueError(
            f"this state is of rank {state['rank']} of {state['world_size']}, and this is rank {rank} of {size}: give "
            "each rank what it saved itself, and start as many, or begin without a state"
        )


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same state with a copy of each tensor."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def of_this_rank(checkpoint: Mapping[str, Any], means: Means | None) -> dict[str, Any]:
    """The checkpoint with this rank's own values wherever it holds the means, under whatever keys they are by now."""
    own = {} if means is None else {id(value): means.own[name] for name, value in means.means.items()}
    # unlike Lightning's own function for it, this leaves what it does not know as it is
    replaced: dict[str, Any] = tree_map_only(Tensor, lambda tensor: own.get(id(tensor), tensor), dict(checkpoint))
    return replaced


def averaged(ranks: Ranks, state: Mapping[str, Any], means: Means) -> dict[str, Any]:
    """`state` with tensors that callbacks have put there averaged over all ranks, such as moving averages of weights.

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


def found(ranks: Ranks, files: Files, shared: Mapping[str, Any], log: Log) -> Saved:
    """The checkpoint, and this rank's file if ranks have parameters of their own. All ranks call it."""
    saved = Saved(files, shared)
    before, now = shared["world_size"], ranks.world_size
    if not (shared["decentralized"] and ranks.algorithm.decentralized) or now == 1:
        return saved
    if before != now:
        log.info(
            f"The checkpoint is of world size {before}, this run of {now}: "
            "all ranks start from its parameters, which its ranks shared, and from rank 0's optimizers."
        )
        return saved
    mine = _mine(ranks, saved, "all ranks start from the checkpoint's parameters and optimizers")
    if mine is not None and mine["own"]["algorithm"]["torn"]:
        mine = None
    missing = _missing(ranks, mine)
    if missing:
        log.warn(
            f"what rank {_list(missing)} has of its own is not beside {files.path} ({_place(saved, missing)} must be "
            "kept with its checkpoint), or an exception saved it within an exchange: all ranks start from the "
            "checkpoint's parameters and optimizers"
        )
        return saved
    assert mine is not None
    return replace(saved, own=mine["own"])


def restore(ranks: Ranks, saved: Saved, log: Log) -> dict[str, Any] | None:
    """Give the algorithm its state back. All ranks call it, after `Algorithm.setup`.

    At the same world size each rank takes its own residuals, bit for bit. At another, each takes the same share of
    their sum, so that the sum is kept (to the rounding of one division; exact if the size is a power of two). With one
    rank there is no algorithm, and the gradients are exact: returns what the checkpoints of this run must carry on,
    which is nothing where ranks have parameters of their own.
    """
    algorithm, shared = ranks.algorithm, saved.shared
    before, now = shared["world_size"], ranks.world_size
    if shared["decentralized"] != algorithm.decentralized:
        log.info(
            "The checkpoint is of another kind of averaging: this run takes its weights and its optimizers, no more."
        )
        return None
    if now == 1 and algorithm.decentralized:
        return None  # what ranks share is from now on what this one has
    if before == now > 1:
        residuals = _own(ranks, saved, log)
    else:
        total = shared["residual_sum"]
        if total is None:
            total = _sum_of_files(ranks, saved, log)
        if now == 1:
            if total and before > 1:
                log.info(
                    f"The checkpoint is of {before} ranks. One rank needs no error feedback: "
                    "the sum of their residuals is carried on into the checkpoints of this run."
                )
            return {**shared, "world_size": 1, "residual_sum": total, "files": None}
        residuals = {name: value / now for name, value in total.items()}
        if total:
            log.info(
                f"The checkpoint is of world size {before}, this run of {now}: "
                f"each rank takes 1/{now} of the sum of the error-feedback residuals."
            )
    if saved.own is not None and algorithm.decentralized:
        kept = saved.own["algorithm"]
        if not algorithm.load_own_state(kept):
            log.info(
                f"The checkpoint is of {kept['of']}, this run of {algorithm}: each rank "
                "takes its own parameters and optimizers, but nothing that only the other kept."
            )
    algorithm.load_state_dict(shared["algorithm"])
    homeless = algorithm.load_residuals(residuals)
    homeless_by_rank = _told(ranks, _list(sorted(homeless)))
    if homeless_by_rank:
        log.warn(
            f"the checkpoint has error-feedback residuals of {_by_rank(homeless_by_rank)} that this run has no place "
            "for (no feedback here, or a parameter was renamed or has another shape): what they held is dropped"
        )
    return None


def _told(ranks: Ranks, text: str) -> dict[int, str]:
    """What ranks have to say, without those whose text is empty. All ranks call it, unless there is only one."""
    if ranks.world_size == 1:
        return {0: text} if text else {}
    said = torch.zeros(_LONGEST, dtype=torch.uint8)
    letters = text.encode()[:_LONGEST]
    said[: len(letters)] = torch.tensor(list(letters), dtype=torch.uint8)
    rows = ranks.all_gather(said.to(ranks.root_device)).view(-1, _LONGEST).cpu()
    texts = [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in rows]
    return {rank: text for rank, text in enumerate(texts) if text}


def _by_rank(texts: Mapping[int, str]) -> str:
    """Each text behind the ranks that say it."""
    whose: dict[str, list[int]] = {}
    for rank, text in texts.items():
        whose.setdefault(text, []).append(rank)
    return "; ".join(f"rank {_list(members)}: {text}" for text, members in whose.items())


def _missing(ranks: Ranks, mine: dict[str, Any] | None) -> list[int]:
    """Ranks that did not find their file; every rank calls it with its own."""
    has_mine = torch.tensor([mine is not None], dtype=torch.uint8, device=ranks.root_device)
    return [rank for rank, has in enumerate(ranks.all_gather(has_mine).view(-1).tolist()) if not has]


def _own(ranks: Ranks, saved: Saved, log: Log) -> dict[str, Tensor]:
    """This rank's residuals, or its share of the sum if any rank misses its own."""
    total, size = saved.shared["residual_sum"], ranks.world_size
    if total is not None and not total:
        return {}
    instead = f"each rank takes 1/{size} of the sum of all residuals" if total is not None else _LOST
    mine = _mine(ranks, saved, instead)
    missing = _missing(ranks, mine)
    if missing and total is not None:
        log.warn(
            f"the residuals of rank {_list(missing)} are not beside {saved.files.path} ({_place(saved, missing)} must "
            f"be kept with its checkpoint): each rank takes 1/{size} of their sum instead of its own"
        )
        return {name: value / size for name, value in total.items()}
    if missing:
        _warn_lost(log, saved, missing)
    residuals: dict[str, Tensor] = {} if mine is None else mine["residuals"]
    return residuals


def _sum_of_files(ranks: Ranks, saved: Saved, log: Log) -> dict[str, Tensor]:
    """The sum that the checkpoint does not have, because an exception wrote it."""
    total: dict[str, Tensor] = {}
    missing = []

    def add_all() -> None:
        for rank in range(saved.shared["world_size"]):
            state = _load(saved, rank)
            if state is None:
                missing.append(rank)
                continue
            for name, value in state["residuals"].items():
                wide = value.to(sums_dtype(value.dtype))
                total[name] = total[name] + wide if name in total else wide

    _read_by_all(ranks, saved, add_all, _LOST)
    if missing:
        _warn_lost(log, saved, missing)
    return total


def _warn_lost(log: Log, saved: Saved, missing: list[int]) -> None:
    log.warn(
        f"the checkpoint was written at an exception: residuals of rank {_list(missing)}, whose files are not beside "
        f"{saved.files.path} ({_place(saved, missing)}), are lost and begin at zero"
    )


def _mine(ranks: Ranks, saved: Saved, instead: str) -> dict[str, Any] | None:
    """This rank's file, or None. All ranks call it, and all raise if a file is damaged; `instead`: if it were gone."""
    loaded: list[dict[str, Any] | None] = []
    _read_by_all(ranks, saved, lambda: loaded.append(_load(saved, ranks.global_rank)), instead)
    return loaded[0]


def _read_by_all(ranks: Ranks, saved: Saved, read: Callable[[], None], instead: str) -> None:
    failure = None
    try:
        read()
    except ValueError as error:
        failure = error
    problems = _told(ranks, "" if failure is None else f"{failure}")
    if problems:
        raise ValueError(
            f"training cannot resume from {saved.files.path}: {_by_rank(problems)}. Resume from another checkpoint, or "
            f"bring back the file from a copy, or delete it: then {instead}"
        ) from failure


def _load(saved: Saved, rank: int) -> dict[str, Any] | None:
    """A rank's file, or None if there is none of this checkpoint's step. ValueError if it is not what was saved."""
    shared, save = saved.shared, saved.shared["files"]
    state = saved.files.load(save, rank)
    if state is None:
        return None
    here, of = f"rank {rank} of {shared['world_size']}", f"rank {state['rank']} of {state['world_size']}"
    if (of, state["save"]) != (here, save):
        name = saved.files.name(save, rank)
        raise ValueError(f"{name} is the file of {of} of the save {state['save']}, and not of {here} of this one")
    # after an exception ranks may be a step apart
    return state if state["step"] == shared["algorithm"]["step"] else None


def _place(saved: Saved, missing: list[int]) -> str:
    return saved.files.name(saved.shared["files"], missing[0])


def _list(items: list[Any]) -> str:
    shown = ", ".join(str(item) for item in items[:_SHOWN])
    return shown if len(items) <= _SHOWN else f"{shown} and {len(items) - _SHOWN} more"
