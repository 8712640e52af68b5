"""Learners of Decoupled DiLoCo that are killed a fifth of the time, beside the same ones undisturbed, and DDP restarted.

python -m benchmarks chaos --seeds 0,1,2
python -m benchmarks chaos --short       # a minute

All are real processes, forked from one that has imported everything: Trainers with the callback `Decoupled`, and
`ringstrategy-syncer`. A step lasts `--pace` seconds at least until its backward pass, so that two cores are enough for
eight learners. A seed says when SIGKILL ends a learner, and when it comes back with its own checkpoint and other data.
The syncer is killed twice. DDP has the same machines at the same times: if one is lost, all ranks are killed; if all are
there, they restart from the last checkpoint.

Living seconds are those of a machine that is there, less the imports. No run can make more than living seconds / pace
steps. The loss is that of Theta on held-out text, beside the loss of the undisturbed run when all its learners together
had made as many steps. Every merge is recomputed from the event log and the pushes that the syncer kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from benchmarks import campaign, harness, tasks
from benchmarks.ranks import reserve_port
from benchmarks.rows import Row, append
from ringstrategy import BlockInt, Cast, Decoupled, Nesterov
from ringstrategy.algorithms.parameters.schedule import cut_fragments
from ringstrategy.app import syncer
from ringstrategy.codecs import Codec, derive_seed
from ringstrategy.examples.data.stdlib_text import StdlibText, Windows
from ringstrategy.examples.models.gpt import GPT
from ringstrategy.server.folder import events
from ringstrategy.server.merges import Merge, radial_directional

_CONTEXT, _WIDTH, _LAYERS, _BATCH = 64, 64, 2, 8
_FRAGMENTS, _INTERVAL, _GRACE = 2, 16, 0.5
_SAVED = 8  # steps from checkpoint to checkpoint
_AWAY = 0.2
_SYNCER, _SYNCER_AWAY = -1, 3.0  # its rank among machines; seconds
_HANGS = 5.0  # seconds of a life without a step
_LONGEST = 100_000  # steps


def recomputed(
    path: Path, initial: Sequence[Tensor], codec: Codec, merge: Merge, outer: Callable[..., Optimizer]
) -> list[list[Tensor]]:
    """Every version of every fragment, from what was pushed and the log alone; asserts that the syncer has its bits."""
    parameters = [Parameter(each.clone()) for each in initial]
    optimizers = [outer([each]) for each in parameters]
    versions = [[each] for each in initial]
    for event in events(path):
        fragment, pushes = event["fragment"], event["pushes"]
        decoded = []
        for push in pushes:
            wire = torch.frombuffer(bytearray((path / "wires" / push["digest"]).read_bytes()), dtype=torch.uint8)
            values = torch.empty_like(initial[fragment])
            codec.deliver(wire, values, seed=derive_seed(push["sequence"], fragment))
            assert hashlib.sha256(values.numpy().tobytes()).hexdigest() == push["digest"]
            assert push["base"] == event["version"] - 1 == len(versions[fragment]) - 1
            decoded.append(values)
        parameters[fragment].grad = -merge(decoded, [push["weight"] for push in pushes])
        optimizers[fragment].step()
        versions[fragment].append(parameters[fragment].detach().clone())
        assert hashlib.sha256(versions[fragment][-1].numpy().tobytes()).hexdigest() == event["after"]
    return versions


# A learner


class _Paced(GPT):
    """A step begins its backward pass `pace` seconds after its begin."""

    def __init__(self, seed: int, pace: float = 0.0) -> None:
        torch.manual_seed(seed)
        super().__init__(_CONTEXT, _WIDTH, _LAYERS)
        self.pace = pace

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._begin = time.monotonic()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        time.sleep(max(0.0, self._begin + self.pace - time.monotonic()))
        return loss


class _Notes(Callback):
    """A line a step, with the versions of Theta in use, and checkpoints."""

    def __init__(self, notes: Path, checkpoints: Path, learner: Decoupled | None) -> None:
        self._notes, self._checkpoints, self._decoupled = notes.open("ab", buffering=0), checkpoints, learner
        self._parent = os.getppid()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        learner = None if self._decoupled is None else self._decoupled.learner
        uses = [] if learner is None else [(each["boot"], each["version"]) for each in learner.state_dict()["fragments"]]
        self._notes.write(json.dumps([time.time(), trainer.global_step, uses]).encode() + b"\n")
        if trainer.global_step % _SAVED == 0:
            new = self._checkpoints / "new"
            trainer.save_checkpoint(new)
            if trainer.is_global_zero:  # those of DDP are kept
                new.replace(self._checkpoints / f"{trainer.global_step if learner is None else 0}.ckpt")
        if os.getppid() != self._parent:
            os._exit(1)


def _learn(
    rank: int, life: int, seed: int, options: argparse.Namespace, folder: Path, port: int, ddp: bool, last: int = -1
) -> None:
    """A life of a learner, or of a rank of DDP; ends by SIGKILL, or after the step `last`."""
    own = folder / ("ddp" if ddp else f"{rank}")
    own.mkdir(exist_ok=True)
    saved = max(own.glob("*.ckpt"), key=lambda file: int(file.stem), default=None)
    decoupled = None
    strategy: Any = SingleDeviceStrategy(torch.device("cpu"))
    if ddp:
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": options.learners, "GROUP_RANK": 0}
        environment |= {"LOCAL_WORLD_SIZE": options.learners, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in environment.items()}, TORCHELASTIC_RUN_ID="chaos")
        strategy = DDPStrategy(process_group_backend="gloo", cluster_environment=TorchElasticEnvironment())
    elif port:
        how = {"syncer": f"127.0.0.1:{port}", "secret_file": folder / "secret", "name": f"learner{rank}"}
        decoupled = Decoupled(_FRAGMENTS, options.quorum, _GRACE, _INTERVAL, **how)
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=options.learners if ddp else 1,
        max_steps=last,
        max_epochs=-1,
        callbacks=[*([decoupled] if decoupled else []), _Notes(folder / f"notes{rank}", own, decoupled)],
        use_distributed_sampler=False,
        logger=False,
        **dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )
    draws = torch.Generator().manual_seed(1_000_000 * seed + 1000 * rank + life)
    starts = torch.randint(len(_text()) - _CONTEXT, (_BATCH * _LONGEST,), generator=draws)
    data = DataLoader(Windows(_text(), starts, _CONTEXT), _BATCH)
    trainer.fit(_Paced(seed, options.pace if port else 0.0), data, ckpt_path=saved, weights_only=False)


_TEXTS: list[Tensor] = []


def _text() -> Tensor:
    """Read once, before processes are forked."""
    if not _TEXTS:
        text = StdlibText(context=_CONTEXT, max_bytes=3_000_000)
        text.setup("fit")
        _TEXTS.append(text.training.text)
    return _TEXTS[0]


# A run


def drawn(seed: int, options: argparse.Namespace) -> list[tuple[float, int, bool]]:
    """When each machine goes and comes."""
    draws, changes = random.Random(seed), list[tuple[float, int, bool]]()
    for rank in range(options.learners):
        now = -draws.uniform(0, options.period)
        while now < options.seconds:
            went = now + draws.uniform(0.5, 1.5) * options.period * (1 - _AWAY)
            now = went + draws.uniform(0.5, 1.5) * options.period * _AWAY
            changes += [(went, rank, False), (now, rank, True)] if went > 0 else []
    for third in (1, 2):
        went = options.seconds * (third + draws.uniform(-0.2, 0.2)) / 3
        changes += [(went, _SYNCER, False), (went + _SYNCER_AWAY, _SYNCER, True)]
    return sorted(change for change in changes if change[0] < options.seconds)


class _Run:
    """Processes on machines that come and go."""

    def __init__(self, case: str, seed: int, options: argparse.Namespace, folder: Path) -> None:
        self.ddp, self.seed, self.options, self.folder = case == "ddp, restarts", seed, options, folder
        self.there: dict[int, float] = {}  # machines, and since when
        self.processes: dict[int, ForkProcess] = {}
        self.lives: list[tuple[int, float, float]] = []  # of processes: rank, from, to
        self.began: dict[int, float] = {}
        self.counts, self.living, self.kills = Counter[int](), 0.0, 0
        self._holder = reserve_port()
        self.port = self._holder.getsockname()[1]
        self._holder.close()
        (folder / "secret").write_text("only of benchmarks, no secret")
        changes = [] if case == "undisturbed" else drawn(seed, options)
        try:
            if not self.ddp:
                self._start(_SYNCER)
                self._until(time.time() + 1.0)
            begin = time.time()
            for rank in range(options.learners):
                self._come(rank)
            for after, rank, comes in changes:
                self._until(begin + after)
                if rank == _SYNCER:
                    if not self.ddp:
                        self._start(rank) if comes else self._kill(rank)
                else:
                    self._come(rank) if comes else self._go(rank)
                    self.kills += not comes
            self._until(begin + options.seconds)
        finally:
            for rank in list(self.processes):
                self._kill(rank)
        self.living += sum(begin + options.seconds - since for since in self.there.values())

    def _come(self, rank: int) -> None:
        self.there[rank] = time.time()
        if not self.ddp:
            self._start(rank)
        elif len(self.there) == self.options.learners:
            for each in self.there:
                self._start(each)

    def _go(self, rank: int) -> None:
        self.living += time.time() - self.there.pop(rank)
        for each in list(self.processes) if self.ddp else [rank]:
            self._kill(each)

    def _start(self, rank: int) -> None:
        if self.ddp and not self.processes:
            with reserve_port() as holder:
                self.port = holder.getsockname()[1]
        process = cast(ForkProcess, multiprocessing.get_context("fork").Process(target=self._be, args=[rank]))
        self.began[rank], self.processes[rank] = time.time(), process
        process.start()
        self.counts[rank] += 1

    def _kill(self, rank: int) -> None:
        process = self.processes.pop(rank)
        process.kill()
        process.join()
        self.lives.append((rank, self.began[rank], time.time()))

    def _be(self, rank: int) -> None:
        printed = os.open(self.folder / f"printed{rank}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.dup2(printed, 1), os.dup2(printed, 2)
        if rank == _SYNCER:
            bind, kept = f"127.0.0.1:{self.port}", str(self.folder / "theta")
            files = ["--secret-file", str(self.folder / "secret"), "--checkpoint", kept, "--keep-wires"]
            syncer.main(["--bind", bind, *files, "--idle", "60"])
        else:
            _learn(rank, self.counts[rank], self.seed, self.options, self.folder, self.port, self.ddp)

    def _until(self, moment: float) -> None:
        """Wait, and see that nothing ends by itself."""
        while True:
            for rank, process in self.processes.items():
                if process.exitcode is not None:
                    raise RuntimeError(f"{rank} ended: {(self.folder / f'printed{rank}').read_text()[-2000:]}")
            left = moment - time.time()
            if left <= 0:
                return
            time.sleep(min(left, 0.1))


# What it gave


def went_back(path: Path, used: set[tuple[int, str, int]]) -> int:
    """Merges that a start of the syncer has undone; but one of which it was killed while writing, unless it was used."""
    lost, logged = 0, list[dict[str, Any]]()
    for line in (path / "events.jsonl").read_bytes().splitlines():
        event = json.loads(line)
        if "versions" not in event:
            logged.append(event)
            continue
        undone = [each for each in logged if each["version"] > event["versions"][each["fragment"]]]
        seen = [each for each in undone if (each["fragment"], each["boot"], each["version"]) in used]
        lost += len([each for each in undone if each is not logged[-1] or each in seen])
        logged = [each for each in logged if each not in undone]
    return lost


@torch.no_grad()
def _loss(model: _Paced, held_out: tuple[Tensor, Tensor], values: Sequence[Tensor] = ()) -> float:
    """Of these fragments in the model, or of the model."""
    for fragment, part in zip(_cut(model), values, strict=False):
        for parameter, run in zip(fragment, part.split([each.numel() for each in fragment]), strict=True):
            parameter.copy_(run.view(parameter.shape))
    return float(tasks.cross_entropy(model(held_out[0]), held_out[1]))


def _cut(model: _Paced) -> list[list[Parameter]]:
    return [list(each.values()) for each in cut_fragments(dict(model.named_parameters()), _FRAGMENTS)]


class _Outcome:
    """Numbers of a run, from its files."""

    def __init__(self, run: _Run, held_out: tuple[Tensor, Tensor]) -> None:
        self.run, self._held_out = run, held_out
        notes = {
            rank: [json.loads(line) for line in (run.folder / f"notes{rank}").read_bytes().splitlines()]
            for rank in range(run.options.learners)
        }
        self.times = sorted(time for each in notes.values() for time, *_ in each)
        kept = sum(len({step for _, step, _ in each}) for each in notes.values())
        gaps, first = [], []
        for rank, begin, end in run.lives:
            if rank == _SYNCER:
                continue
            steps = [time for time, *_ in notes[rank] if begin <= time <= end]
            gaps += [after - before for before, after in zip([begin, *steps], [*steps, end], strict=True)]
            first += [steps[0] - begin] if steps else []
        possible = run.living / run.options.pace
        self.told: dict[str, float] = {
            "steps": len(self.times),
            "not made twice": kept,
            "living seconds": round(run.living, 1),
            "of the possible": len(self.times) / possible,
            "away": 1 - run.living / run.options.seconds / run.options.learners,
            "kills": run.kills,
            "to the first step": sorted(first)[len(first) // 2],
            "hangs": sum(gap >= _HANGS for gap in gaps),
            "longest gap": max(gaps),
        }
        if not run.ddp:
            self._of_syncer({(f, *use) for each in notes.values() for *_, uses in each for f, use in enumerate(uses)})
        self.told["loss"] = self.loss_after(len(self.times))

    def _of_syncer(self, used: set[tuple[int, str, int]]) -> None:
        path = self.run.folder / "theta"
        initial = [torch.cat([each.detach().flatten() for each in part]) for part in _cut(_Paced(self.run.seed))]
        self._versions = recomputed(path, initial, BlockInt(8), radial_directional, Nesterov())
        self._events, missed = events(path), Counter[str]()
        for event in self._events:
            missed.update(event["not counted"])
        self.told |= {
            "merges": len(self._events),
            "pushes": sum(len(event["pushes"]) for event in self._events),
            "late": missed["late"],
            "repeated": missed["repeated"],
            "unknown": missed["unknown"],
            "went back": went_back(path, used),
            "syncer's lives": self.run.counts[_SYNCER],
        }

    def loss_after(self, steps: int) -> float:
        """Of Theta, or of the newest checkpoint of DDP, when all together had made so many steps."""
        moment, model = self.times[min(steps, len(self.times)) - 1], _Paced(self.run.seed)
        if not self.run.ddp:
            newest = [each[0] for each in self._versions]
            for event in self._events:
                if event["time"] <= moment:
                    newest[event["fragment"]] = self._versions[event["fragment"]][event["version"]]
            return _loss(model, self._held_out, newest)
        saved = max((self.run.folder / "ddp").glob("*.ckpt"), key=lambda file: int(file.stem), default=None)
        if saved is not None:
            model.load_state_dict(torch.load(saved, weights_only=False)["state_dict"])
        return _loss(model, self._held_out)


def _warm_up(options: argparse.Namespace) -> None:
    """What processes would import and compile after each fork; leaves no thread behind."""
    for codec in (BlockInt(8), Cast("bfloat16")):
        codec.warm_up(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        for last in (_SAVED, _SAVED + 1):  # the second one resumes
            _learn(0, 0, 0, options, Path(folder), 0, False, last)
    assert threading.active_count() == 1


def _row(case: str, seed: int, options: argparse.Namespace, told: dict[str, float]) -> Row:
    size = f"byte GPT of {sum(each.numel() for each in _Paced(0).parameters())} parameters, {options.pace:g} s a step"
    return Row(
        benchmark="chaos",
        case=case,
        baseline="undisturbed",
        size=f"{size}, {options.seconds:g} s, quorum {options.quorum}",
        hosts=options.learners,
        rate="loopback",
        threads=1,
        cores=os.cpu_count(),
        cpu=campaign.processor(),
        seed=seed,
        ratio=told["beside undisturbed"],
        hung=int(told["hangs"]),
        chaos={name: round(value, 4) for name, value in told.items()},
        **harness.made_with(),
    )


def _show(rows: Sequence[Row]) -> None:
    """A line a number, a column a run."""
    table = Table("", *(f"{row.case}, seed {row.seed}" for row in rows), title=f"{rows[0].hosts} learners, {rows[0].size}")
    for name in dict.fromkeys(name for row in rows for name in row.chaos):
        table.add_row(name, *(f"{row.chaos[name]:.4g}" if name in row.chaos else "-" for row in rows))
    Console(width=180).print(table)


def main(given: Sequence[str]) -> None:
    """Run all three for each seed, and print a row a run."""
    parser = harness.arguments("chaos", __doc__, rounds=None, cases=False)
    add = parser.add_argument
    add("--learners", type=int, default=8)
    add("--quorum", type=int, help="default: half of the learners")
    add("--seconds", type=float, default=120.0, help="of each run")
    add("--pace", type=float, default=0.25, help="seconds a step until its backward pass, at least")
    add("--period", type=float, default=20.0, help="seconds from a return of a learner to its next one, on average")
    add("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[0])
    add("--short", action="store_true", help="3 learners, 15 seconds a run")
    options = parser.parse_args(given)
    if options.short:
        options.learners, options.seconds, options.pace, options.period = 3, 15.0, 0.1, 8.0
    options.quorum = options.quorum or max(1, options.learners // 2)
    torch.set_num_threads(1)
    _warm_up(options)
    held_out, rows = tasks.held_out_text(256), list[Row]()
    for seed in options.seeds:
        undisturbed: _Outcome | None = None
        for case in ("undisturbed", "chaos", "ddp, restarts"):
            load = os.getloadavg()[0]
            with tempfile.TemporaryDirectory() as folder:
                outcome = _Outcome(_Run(case, seed, options, Path(folder)), held_out)
                undisturbed = undisturbed or outcome
                told = outcome.told
                told["undisturbed then"] = undisturbed.loss_after(int(told["steps"]))
                told["beside undisturbed"] = told["of the possible"] / undisturbed.told["of the possible"]
                told |= {"load before": load, "load after": os.getloadavg()[0]}
                rows.append(_row(case, seed, options, told))
                _show([rows[-1]])
    append(rows, options.out)
    _show(rows)
    sys.exit(any(row.hung or row.chaos.get("went back") for row in rows))
