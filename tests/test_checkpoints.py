"""A checkpoint is whole or not there: wherever a save is stopped, whatever becomes of its files."""

from __future__ import annotations

import errno
import fcntl
import io
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from listening import listening
from on_ranks import on_ranks
from pool import Pool
from rank_files import rank_file, rank_state, whole
from test_feedback import lossy, residuals
from test_strategy import Net, fit, rows
from torch import Tensor

from ringstrategy import Gossip, PlanMismatchError, RingStrategy
from ringstrategy.integrations.lightning import files
from ringstrategy.integrations.lightning.for_lightning import WholeCheckpointIO
from ringstrategy.session.sealed import seal
from ringstrategy.topologies import Star

Strategy = Callable[[], RingStrategy]
Operation = Callable[[], Any]


def gossip() -> RingStrategy:
    return RingStrategy(Gossip(Star(), interval=3, overlap=2))


both_kinds = pytest.mark.parametrize("strategy", [lossy, pytest.param(gossip, marks=pytest.mark.slow)])


def flat(trainer: L.Trainer) -> Tensor:
    """What this rank has in the end: parameters, momentum, residuals."""
    optimizer = trainer.optimizers[0].state_dict()["state"]
    kept = [value for state in optimizer.values() for value in state.values() if isinstance(value, Tensor)]
    algorithm = trainer.strategy.algorithm
    kept += list(residuals(algorithm).values()) if hasattr(algorithm, "residuals") else []
    return torch.cat([value.detach().reshape(-1) for value in (*trainer.lightning_module.parameters(), *kept)])


# Each moment of a save


@contextmanager
def watched(watcher: Callable[[str, str, Operation], Any]) -> Iterator[None]:
    """Each step by which a file or folder is made, filled, flushed, renamed or removed goes through the watcher.

    A file is filled in two steps. What the watcher does itself is not watched.
    """
    busy = False

    def step(name: str, path: str, operation: Operation) -> Any:
        nonlocal busy
        if busy:
            return operation()
        busy = True
        try:
            return watcher(name, path, operation)
        finally:
            busy = False

    class InHalves(io.FileIO):
        def write(self, content: Any) -> int:
            half = len(content) // 2
            super().write(content[:half])
            return half + int(step("write", str(self.name), lambda: super(InHalves, self).write(content[half:])))

    def by_name(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            flushed = os.readlink(f"/proc/self/fd/{path}") if name == "fsync" else None
            named = flushed or os.fspath(args[0] if name == "replace" else path)
            return step(name, named, lambda: real(path, *args, **options))

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("mkdir", "fsync", "replace", "remove", "unlink", "rmdir"):
            patch.setattr(os, name, by_name(name, getattr(os, name)))
        patch.setattr(files, "open", lambda path, mode: step("open", path, lambda: InHalves(path, mode)), False)
        yield


class Photographs:
    """Before each step of any rank: a copy of the folder, as a kill of all ranks would leave it there."""

    def __init__(self, folder: str) -> None:
        self.folder, self.album = folder, f"{folder}.album"
        Path(self.album).mkdir(exist_ok=True)

    def __call__(self, name: str, path: str, operation: Operation) -> Any:
        time.sleep(0.02 * int(os.environ["RANK"]))  # rank 0 is the first, wherever it does not wait
        with open(f"{self.folder}.lock", "w") as lock:  # all ranks wait while one copies
            fcntl.flock(lock, fcntl.LOCK_EX)
            count = len(os.listdir(self.album))
            copy = f"{self.album}/{count:04d}"
            shutil.copytree(self.folder, copy) if os.path.isdir(self.folder) else os.mkdir(copy)
            with open(f"{self.folder}.log", "a") as log:
                log.write(f"{name} {path}\n")
            return operation()


def _photographed(folder: str, strategy: Strategy) -> Tensor:
    save = ModelCheckpoint(folder, "{epoch}", save_last=True)
    with watched(Photographs(folder)):
        trainer = fit(strategy(), Net(), max_epochs=3, callbacks=[save], enable_checkpointing=True)
        for _ in range(2):
            trainer.save_checkpoint(f"{folder}/last.ckpt")
    return flat(trainer)


def _goes_on(path: str, strategy: Strategy) -> tuple[Tensor, list[str]]:
    with listening() as heard:
        trainer = fit(strategy(), Net(), max_epochs=3, ckpt_path=path)
    return flat(trainer), [
        text for text in heard if "rank" in text and not text.startswith(("Rest", "RingStrategy: rank 0 sent"))
    ]


@both_kinds
def test_a_kill_at_any_step_of_a_save_leaves_the_old_checkpoint_or_the_new(
    ranks: Pool, tmp_path: Path, strategy: Strategy
) -> None:
    ends = ranks(2, _photographed, str(tmp_path / "run"), strategy)
    _check_order(tmp_path / "run")
    photographs = sorted((tmp_path / "run.album").iterdir())
    found: dict[int | None, list[Path]] = {}
    for photograph in photographs:
        for path in photograph.glob("*.ckpt"):
            whole(path, 2)
        checkpoint = whole(photograph / "last.ckpt", 2)
        found.setdefault(None if checkpoint is None else checkpoint["epoch"], []).append(photograph)
    assert list(found) == [None, 0, 1, 2, 3], "each in its turn, and no other"
    assert all(len(moments) > 10 for moments in found.values())
    for photograph in (found[0][-1], found[1][0]):  # new files lie there already; old ones still
        for rank, (end, heard) in enumerate(ranks(2, _goes_on, str(photograph / "last.ckpt"), strategy)):
            assert torch.equal(end, ends[rank]), (photograph, rank)
            assert not heard
    assert not torch.equal(*ends)


def _check_order(folder: Path) -> None:
    """Files of ranks are on the disk before the checkpoint that names them."""
    steps, main = Path(f"{folder}.log").read_text().splitlines(), f"{folder}/last.ckpt"
    opened = [step for step in steps if step.startswith("open ") and "/.rank-" in step]
    assert len(set(opened)) == len(opened), "what a checkpoint names is not written again, be it at the same step"
    renamed = [number for number, step in enumerate(steps) if step == f"replace {main}"]
    assert len(renamed) == 5
    for before, end in itertools.pairwise([-1, *renamed]):
        save = steps[before + 1 : end + 1]
        [inside] = {step.split()[1].rpartition("/")[0] for step in save if step.startswith(f"replace {main}.ring")}
        orders = []
        for target in (*(f"{inside}/rank_{rank:05d}.pt" for rank in range(2)), main):
            place, _, name = target.rpartition("/")
            temporary = f"{place}/.{name.replace('_', '-')}.saving"
            order = [save.index(f"{step} {temporary}") for step in ("open", "write", "fsync")]
            orders.append([*order, save.index(f"replace {target}")])
        *of_ranks, of_main = orders
        assert orders == [sorted(order) for order in orders]
        assert all(f"fsync {inside}" in save[order[-1] :] for order in of_ranks)
        assert of_main[0] > max(number for number, step in enumerate(save) if inside in step)
        after = save[save.index(f"mkdir {inside}") :]
        assert f"fsync {main}.ringstrategy" in after
        assert not [step for step in after if step.startswith(("unlink", "rmdir", "remove")) and "last.ckpt" in step]
        assert steps[end + 1] == f"fsync {folder}"


# A disk that refuses


class Refuses:
    """The step of this number finds the disk full. Folders do not count: the other rank may make them first."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, name: str, path: str, operation: Operation) -> Any:
        if name in ("open", "write", "fsync", "replace") and not path.endswith(".ringstrategy"):
            self.left -= 1
            if self.left == -1:
                raise OSError(errno.ENOSPC, "No space left on device", path)
        return operation()


@pytest.mark.parametrize(("strategy", "victim"), [(lossy, 0), (gossip, 1)])
@on_ranks(2)
def test_a_full_disk_leaves_the_checkpoint_before_and_all_ranks_say_so(
    strategy: Strategy, victim: int, tmp_path: Path
) -> None:
    """After a save, another one fails at its first step on one rank; then one at its second, until one succeeds."""
    folder = tmp_path / "run"
    path, of_ranks = folder / "saved.ckpt", folder / "saved.ckpt.ringstrategy"
    trainer = fit(strategy(), model := Net(), max_epochs=1)
    trainer.save_checkpoint(path)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, rows())
    found = []  # after each failure: of which step the checkpoint is, and how many sets of the ranks' files there are
    for number in itertools.count():
        refuses, said = Refuses(number), ""
        dist.barrier()
        try:
            with watched(refuses) if trainer.global_rank == victim else nullcontext():
                trainer.save_checkpoint(path)
        except RuntimeError as error:
            said = str(error)
        if not said:
            assert trainer.global_rank != victim or refuses.left >= 0
            break
        assert f"{path} could not be saved (rank {victim}: OSError: " in said
        assert "No space left" in said
        assert said.endswith("A checkpoint that lies there is whole")
        dist.barrier()
        found.append((whole(path, 2)["global_step"], len(os.listdir(of_ranks))))
        assert not list(folder.rglob(".*")), "half a file was left"
    # a file: open, write, flush, rename, flush; of rank 0 the checkpoint after that, which is the new one once renamed
    assert [step for step, _ in found] == ([*([6] * 9), 12] if victim == 0 else [6] * 5)
    kept = [2, 3, 4, 5, 6] if victim == 0 else []
    assert [sets for _, sets in found] == [*([1] * 5), *kept], "whose checkpoint may be there is kept"
    dist.barrier()
    assert whole(path, 2)["global_step"] == 12
    assert sorted(folder.iterdir()) == [path, of_ranks]
    assert len(os.listdir(of_ranks)) == 1, "what failed is cleared away"


# Damage


def _be_of_another_save(file: Path, _: Path) -> None:
    state = rank_state(file.parents[2] / "saved.ckpt", int(file.stem[-5:]))
    torch.save(seal({**state, "save": "step-6-another"}), file)


def _flip(file: Path, _: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


DAMAGE: dict[str, Callable[[Path, Path], Any]] = {  # to a rank's file, beside which there is that of the other rank
    "truncated": lambda file, _: os.truncate(file, file.stat().st_size - 200),
    "flipped": _flip,
    "swapped": lambda file, other: shutil.copyfile(other, file),
    "of another save": _be_of_another_save,
    "gone": lambda file, _: file.unlink(),
}


@both_kinds
@on_ranks(2)
def test_damage_stops_all_ranks_with_the_path_the_rank_and_the_cure(strategy: Strategy, tmp_path: Path) -> None:
    victims = dict(zip(DAMAGE, (0, 1, 0, 1, 0), strict=True))
    fit(strategy(), Net(), max_epochs=1).save_checkpoint(tmp_path / "good" / "saved.ckpt")
    dist.barrier()
    for name, victim in victims.items() if dist.get_rank() == 0 else ():
        path = shutil.copytree(tmp_path / "good", tmp_path / name) / "saved.ckpt"
        DAMAGE[name](rank_file(path, victim), rank_file(path, 1 - victim))
    dist.barrier()
    _, heard = _goes_on(str(tmp_path / "gone" / "saved.ckpt"), strategy)  # the cure
    assert bool(heard) == (dist.get_rank() == 0)
    assert all("rank 0" in text and "not beside" in text for text in heard[:1])
    for name, victim in list(victims.items())[:-1]:
        path = tmp_path / name / "saved.ckpt"
        with pytest.raises(ValueError, match="training cannot resume") as caught:
            fit(strategy(), Net(), ckpt_path=str(path))
        message = str(caught.value)
        assert f": rank {victim}: {rank_file(path, victim)} " in message
        assert "Resume from another checkpoint, or bring back the file from a copy, or delete it: then " in message
        assert ("of the sum of all residuals" in message) == (strategy is lossy)


# Where checkpoints are


@pytest.mark.parametrize("kind", ["address", "behind"])
@on_ranks(2)
def test_addresses_and_writers_behind_training_are_whole_too(kind: str, tmp_path: Path) -> None:
    saved = tmp_path / f"{kind}.ckpt"
    # one of fsspec's is not known as a path
    path, plugins = (f"local://{saved}", []) if kind == "address" else (str(saved), [AsyncCheckpointIO()])
    trainer = fit(lossy(), Net(), max_epochs=1, plugins=plugins)
    for _ in range(3):
        trainer.save_checkpoint(path)
        dist.barrier()
        assert whole(saved, 2) is not None
        assert len(os.listdir(f"{saved}.ringstrategy")) == 1
        dist.barrier()
    assert _goes_on(path, lossy)[1] == []
    dist.barrier()
    trainer.strategy.remove_checkpoint(path)
    dist.barrier()
    assert not list(tmp_path.iterdir())


# Ranks that do not say the same


@on_ranks(3)
def test_a_rank_that_finds_no_checkpoint_stops_all_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    fit("ring", Net(), max_epochs=1).save_checkpoint(path)
    dist.barrier()
    found = path if dist.get_rank() == 0 else None
    said = "rank 1 has 'resumes from: nothing' where rank 0 has 'resumes from: step 4 of epoch "
    with pytest.raises(PlanMismatchError, match=said):
        fit("ring", Net(), ckpt_path=found)


def test_half_written_files_are_not_counted_as_checkpoints(tmp_path: Path) -> None:
    path = _CheckpointConnector.hpc_save_path(str(tmp_path))
    counted = []

    def look(name: str, _: str, operation: Operation) -> Any:
        counted.append(_CheckpointConnector.hpc_save_path(str(tmp_path)) if name == "write" else path)
        return operation()

    with watched(look):
        WholeCheckpointIO().save_checkpoint({"step": 1}, path)
    assert counted == [path] * len(counted)
    assert len(counted) > 3
    assert _CheckpointConnector.hpc_save_path(str(tmp_path)) != path


def test_a_save_through_a_link_leaves_what_it_points_to(tmp_path: Path) -> None:
    checkpoint_io, link, target = WholeCheckpointIO(), tmp_path / "last.ckpt", tmp_path / "best.ckpt"
    checkpoint_io.save_checkpoint({"step": 1}, target)
    link.symlink_to(target.name)
    checkpoint_io.save_checkpoint({"step": 2}, link)
    assert [torch.load(path) for path in (target, link)] == [{"step": 1}, {"step": 2}]
    assert not link.is_symlink()


@on_ranks(3)
def test_the_files_of_all_ranks_lie_beside_the_checkpoint_of_rank_0(tmp_path: Path) -> None:
    trainer = fit(lossy(), Net(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / f"of-rank-{trainer.global_rank}.ckpt")
    trainer.strategy.barrier()
    first, *others = sorted(path for path in tmp_path.rglob("*.*") if path.is_file())
    assert first.name == "of-rank-0.ckpt"
    assert [path.name for path in others] == [f"rank_{rank:05d}.pt" for rank in range(3)]
    assert all(str(path).startswith(str(first)) for path in others)
