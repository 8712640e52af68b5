"""What each wire does to training: real trainers on real processes with different data, one JSON row a case.

python -m benchmarks accuracy stage=rates; python -m benchmarks accuracy; python -m benchmarks accuracy stage=paired
python -m benchmarks accuracy stage=gossip; python -m benchmarks accuracy stage=seldom
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
import multiprocessing
import os
import pickle
import platform
import re
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import hydra
import lightning as L
import torch
import torch.distributed as dist
from hydra.utils import instantiate
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import DictConfig, OmegaConf
from torch.multiprocessing.spawn import ProcessException, start_processes

from benchmarks import harness
from benchmarks.contenders import SELDOM
from benchmarks.lab import exit_on_sigterm
from benchmarks.trainer import quiet_trainer
from ringstrategy import Algorithm, AllReduce, BySize, Codec, Collective, LocalSGD, Ring, RingStrategy
from ringstrategy.algorithms.gradients.synchronous import Synchronous
from ringstrategy.algorithms.parameters.decentralized import Decentralized
from ringstrategy.examples.data.stdlib_text import StdlibText
from ringstrategy.names import STRATEGIES

RESULTS = Path(__file__).parent / "results" / "accuracy.jsonl"
PRELOADED = [
    "lightning.pytorch",
    "sklearn.datasets",
    "ringstrategy.algorithms.gradients.powersgd",
    "ringstrategy.examples.data.digits",
    "ringstrategy.examples.data.stdlib_text",
    "ringstrategy.examples.models.cnn",
    "ringstrategy.examples.models.gpt",
]
# stages whose ranks have parameters of their own, and whose names are trained there
OF_MEANS: dict[str, tuple[type, ...]] = {"gossip": (Decentralized,), "seldom": (LocalSGD, Decentralized)}
GRACE = 20.0  # seconds the other ranks get to end after one has failed


@dataclass(frozen=True)
class Case:
    """One training run. All that it does follows from these fields."""

    stage: str
    name: str
    task: str
    optimizer: str
    rate: float
    seed: int
    steps: int
    ranks: int
    algorithm: Algorithm | None  # None: Lightning's own `ddp`
    settings: Mapping[str, Any]  # model, data and trainer: plain, as composed
    limit: float

    @property
    def key(self) -> str:
        """Equal for equal cases, in any session."""
        said = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "limit"}
        said["algorithm"] = described(self.algorithm)
        # models and data lay beside the strategy once, and keep the names that they had then in published rows' keys
        text = json.dumps(said, sort_keys=True).replace("ringstrategy.examples.", "ringstrategy.")
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        """For the log."""
        skew = self.settings["data"].get("skew")
        data = f"{self.task}{f' skew {skew:g}' if skew else ''} on {self.ranks}"
        return f"{self.stage}: {data} {self.optimizer} {self.rate:g} seed {self.seed}, {self.name}"


Outcome = dict[str, Any]  # what one rank saw of a case: fields of its row, and `digest`, of all parameters' bits


def feeds_back(algorithm: Algorithm | None) -> bool:
    """Whether it keeps what its codec loses, `error_feedback=None` resolved."""
    codec, asked = getattr(algorithm, "codec", None), getattr(algorithm, "error_feedback", None)
    if isinstance(algorithm, AllReduce) and isinstance(codec, Codec) and codec.lossless:
        return False
    return bool(codec.error_feedback if asked is None and isinstance(codec, Codec) else asked)


def described(algorithm: Algorithm | None) -> str:
    """Its arguments that are not the defaults, so that a new one changes nothing; feedback as it will be."""
    if algorithm is None:
        return "ddp"

    def told(value: Any) -> Any:
        return type(value).__name__ if isinstance(value, Collective) else value  # segments change no bit

    arguments = {
        name: told(getattr(algorithm, name))
        for name, parameter in inspect.signature(type(algorithm).__init__).parameters.items()
        if name not in ("self", "error_feedback") and getattr(algorithm, name) != parameter.default
    }
    if isinstance(algorithm, Synchronous):
        arguments["feedback"] = feeds_back(algorithm)
    said = [f"{name}={value!r}" for name, value in arguments.items()]
    return f"{type(algorithm).__name__}({', '.join(said)})"


# The cases


def cases(cfg: DictConfig) -> list[Case]:
    """Those of the stage, the most telling first."""
    found = [
        Case(
            stage=cfg.stage,
            name=name,
            task=task,
            optimizer=optimizer,
            rate=rate,
            seed=seed,
            steps=cfg[cfg.stage][task].steps if cfg.steps is None else cfg.steps,
            ranks=ranks,
            algorithm=algorithm,
            settings=_settings(cfg, task, ranks, data, optimizer, rate),
            limit=cfg.limit,
        )
        for task in cfg.tasks
        for ranks, data in _worlds(cfg, task)
        for name, algorithm in _algorithms(cfg, task)
        for optimizer in _optimizers(cfg, task)
        for seed in (cfg[cfg.stage][task].seeds if cfg.seeds is None else cfg.seeds)
        for rate in (cfg.rates[task][optimizer] if cfg.stage == "rates" else [cfg[task].rate[optimizer]])
    ]
    # all of one seed before the next, so that a sweep that is stopped compares all names
    return sorted(found, key=lambda case: case.seed) if cfg.stage in OF_MEANS else found


def _worlds(cfg: DictConfig, task: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbers of ranks, and what is changed in the data for them."""
    stage = cfg[cfg.stage][task]
    for ranks in stage.ranks if cfg.ranks is None else cfg.ranks:
        batch = {"batch_size": stage.batch // ranks} if "batch" in stage else {}
        for skew in stage.get("skews", [None]):
            yield ranks, batch if skew is None else {**batch, "skew": skew}


def _optimizers(cfg: DictConfig, task: str) -> list[str]:
    return [name for name in cfg.optimizers if name in cfg[cfg.stage][task].get("optimizers", cfg.optimizers)]


def _settings(
    cfg: DictConfig, task: str, ranks: int, changes: Mapping[str, Any], optimizer: str, rate: float
) -> dict[str, Any]:
    plain = OmegaConf.to_container(cfg[task], resolve=True)
    assert isinstance(plain, dict)
    data = {**plain["data"], **changes}
    if not data.get("skew"):
        data.pop("skew", None)  # there are rows, and keys, from before it was an argument
    return {
        "model": {**plain["model"], "optimizer": {**cfg.optimizer[optimizer], "lr": rate}},
        "data": data,
        "gradient_clip_val": plain["gradient_clip_val"],
        "classes": plain["classes"],
        "validations": cfg[cfg.stage][task].get("validations", cfg.validations),
        "warmup": cfg.warmup,
        "floor": cfg.floor,
    }


def _algorithms(cfg: DictConfig, task: str) -> Iterator[tuple[str, Algorithm | None]]:
    if cfg.stage == "rates":
        yield "fp32", AllReduce(collective=Ring())
        return
    known = dict(_factorial(cfg) if cfg.stage == "factorial" else _registered(cfg))
    for name in cfg[cfg.stage][task].get("names", known):
        if name not in known:
            raise ValueError(f"{cfg.stage}.{task}.names: {name!r} is none of {', '.join(known)}")
        if cfg.wires is None or any(re.match(rf"{re.escape(wire)}\b", name) for wire in cfg.wires):
            yield name, known[name]


def _factorial(cfg: DictConfig) -> Iterator[tuple[str, Algorithm]]:
    """Each wire over each collective that can carry it, without feedback and with."""
    for name, node in cfg.codecs.items():
        thing = instantiate(node)
        for way, collective in cfg.collectives.items():
            if isinstance(thing, Codec) and way == "ring" and not thing.hop_by_hop:
                continue
            for feedback in [False] if getattr(thing, "lossless", False) else [False, True]:
                if isinstance(thing, Codec):
                    made = AllReduce(thing, instantiate(collective), error_feedback=feedback)
                else:
                    made = instantiate(node, collective=collective, error_feedback=feedback)
                yield f"{name}, {way}{', feedback' if feedback else ''}", made


def _registered(cfg: DictConfig) -> Iterator[tuple[str, Algorithm | None]]:
    """The registered names of the stage's family, and what is beside them."""
    if cfg.stage in OF_MEANS:
        yield "ddp", None
    for name, make in STRATEGIES.items():
        if isinstance(make(), OF_MEANS.get(cfg.stage, (Synchronous,))):
            yield name, _over_the_ring(make())
    if cfg.stage == "seldom":
        for name, make in SELDOM.items():
            yield name, make()
    else:
        for name, node in (cfg.gossip_beside if cfg.stage == "gossip" else cfg.beside).items():
            yield name, instantiate(node)


def _over_the_ring(algorithm: Algorithm) -> Algorithm:
    """With the collective that rounds most often, also for models as short as these."""
    if isinstance(algorithm, AllReduce) and algorithm.collective == BySize():
        algorithm.collective = Ring()
    return algorithm


# One case, on one rank


class Schedule(L.Callback):
    """The learning rate: linear from 0 over the first steps, then a cosine down to `floor` of its height."""

    def __init__(self, steps: int, warmup: float, floor: float) -> None:
        self.steps, self.rising, self.floor = steps, max(1, round(warmup * steps)), floor

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set it for the step that begins."""
        step = trainer.global_step
        done = max(0, step - self.rising) / max(1, self.steps - self.rising)
        cosine = self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group.setdefault("height", group["lr"])
                group["lr"] = group["height"] * min((step + 1) / self.rising, cosine)


class Observer(L.Callback):
    """Notes every validation and what training sent, and ends a run that has become NaN."""

    def __init__(self) -> None:
        self.curve: list[tuple[int, float]] = []  # (step, validation loss)
        self.accuracy: float | None = None
        self.bytes_sent = 0.0  # nan: not counted

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Here ranks that have parameters of their own are about to send them, for the mean that is validated."""
        self.bytes_sent += sent(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The metrics are means over all ranks, so all of them stop together."""
        self.bytes_sent -= sent(trainer)
        metrics = trainer.callback_metrics
        if self.curve and self.curve[-1][0] == trainer.global_step:
            self.curve.pop()
        self.curve.append((trainer.global_step, float(metrics["val_loss"])))
        self.accuracy = float(metrics["val_accuracy"]) if "val_accuracy" in metrics else None
        if not math.isfinite(self.curve[-1][1]):
            trainer.should_stop = True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Before the mean that training returns."""
        self.bytes_sent += sent(trainer)


def sent(trainer: L.Trainer) -> float:
    """Bytes that this rank has handed over so far, once nothing is under way; nan: not counted."""
    strategy = trainer.strategy
    if not isinstance(strategy, RingStrategy):
        return math.nan
    if strategy.session is not None:
        strategy.session.settle()
    return math.nan if strategy.stats.bytes_sent is None else strategy.stats.bytes_sent


def train(case: Case) -> Outcome:
    """Run the case as one of its ranks; the environment says which."""
    began, cpu_began = time.perf_counter(), time.process_time()
    settings = case.settings
    L.seed_everything(case.seed, workers=True, verbose=False)
    data = instantiate(settings["data"])
    model = instantiate(settings["model"])
    observer = Observer()
    timeout = timedelta(seconds=case.limit)
    strategy = DDPStrategy(timeout=timeout) if case.algorithm is None else RingStrategy(case.algorithm, timeout=timeout)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=case.ranks,
        max_steps=case.steps,
        max_epochs=-1,
        gradient_clip_val=settings["gradient_clip_val"],
        val_check_interval=max(1, case.steps // settings["validations"]),
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[Schedule(case.steps, settings["warmup"], settings["floor"]), observer],
    )
    trainer.fit(model, datamodule=data)
    assert trainer.world_size == dist.get_world_size() == case.ranks
    sent_per_step = observer.bytes_sent / max(1, trainer.global_step)
    parameters = [parameter.detach() for parameter in model.parameters()]
    if isinstance(case.algorithm, LocalSGD):  # the last validation saw the last agreement, not the last steps
        trainer.validate(model, datamodule=data, verbose=False)
    curve = [(step, loss if math.isfinite(loss) else None) for step, loss in observer.curve]
    return {
        "val_loss": curve[-1][1] if curve else None,
        "val_accuracy": observer.accuracy,
        "curve": curve,
        "bytes_sent_per_step": None if math.isnan(sent_per_step) else sent_per_step,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "seconds": round(time.perf_counter() - began, 2),
        "cpu_seconds": time.process_time() - cpu_began,  # of this rank, whatever else runs on the machine
        "digest": harness.digest(parameters).numpy().tobytes(),
    }


# The processes


def run(case: Case) -> list[Outcome] | str:
    """All ranks' outcomes, or what went wrong on the first rank that failed.

    Ranks are forked from a server that has imported everything, so the code stays what it was at the start.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    end = time.monotonic() + case.limit
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(rank) for rank in range(case.ranks)]
        given = (port, case, folder)
        ranks = start_processes(_be_a_rank, given, case.ranks, join=False, daemon=True, start_method="forkserver")
        try:
            while not ranks.join(max(0.0, end - time.monotonic()), grace_period=GRACE):
                if time.monotonic() >= end:
                    return f"ranks had not ended after {case.limit:g} s"
            return [pickle.loads(file.read_bytes()) for file in files]
        except ProcessException as error:
            failures = [pickle.loads(file.read_bytes()) for file in files if file.exists()]
            texts = [each for each in failures if isinstance(each, str)]
            return min(texts, key=lambda text: "PeerLostError" in text, default=str(error))  # a loss is never the cause
        finally:
            for process in ranks.processes:
                process.kill()


def _be_a_rank(rank: int, port: int, case: Case, folder: str) -> None:
    """Train, and leave the outcome, or the traceback, in a file of the rank's own."""
    threading.Thread(target=_end_with_driver, daemon=True).start()
    torch.set_num_threads(1)
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": 0, "LOCAL_RANK": rank, "RANK": rank}
    os.environ.update({name: str(value) for name, value in here.items()}, WORLD_SIZE=str(case.ranks))
    outcome: Outcome | str
    try:
        outcome = train(case)
    except Exception:
        outcome = f"rank {rank}: {traceback.format_exc()}"
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(outcome))
    if isinstance(outcome, str):
        sys.exit(1)
    dist.destroy_process_group()


def _end_with_driver() -> None:
    """Even one that was killed leaves no process behind."""
    driver = multiprocessing.parent_process()
    assert driver is not None
    driver.join()
    os._exit(1)


# Rows


def row(case: Case, outcomes: Sequence[Outcome] | str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """One line of the results file; a case that failed or diverged is one too."""
    algorithm = case.algorithm
    named = ("key", "stage", "name", "task", "optimizer", "rate", "seed", "steps", "ranks")
    said = {
        **{name: getattr(case, name) for name in named},
        "codec": repr(getattr(algorithm, "codec", None)),
        "collective": repr(getattr(algorithm, "collective", None)),
        "feedback": feeds_back(algorithm),
        "algorithm": described(algorithm),
    }
    if isinstance(outcomes, str):
        return {**said, "status": "failed", "error": outcomes, **facts, "settings": case.settings}
    first = outcomes[0]
    # a run that ends worse than the uniform guess has learnt nothing
    diverged = first["val_loss"] is None or first["val_loss"] >= math.log(case.settings["classes"])
    same = len({outcome["digest"] for outcome in outcomes}) == 1
    spent = round(sum(outcome["cpu_seconds"] for outcome in outcomes), 2)
    status = "diverged" if diverged else "finished"
    result = {"status": status, **first, "replicas_identical": same, "cpu_seconds": spent}
    del result["digest"]
    return {**said, **result, **facts, "settings": case.settings}


def bigram_loss(settings: Mapping[str, Any]) -> float:
    """Nats a byte on the validation text, each guessed from the byte before by the training text's counts of pairs."""
    data: StdlibText = instantiate(settings["data"])
    data.setup("fit")
    training, validation = data.training.text.long(), data.validation.text.long()
    pairs = torch.bincount(training[:-1] * 256 + training[1:], minlength=256 * 256).view(256, 256).double() + 0.1
    chances = pairs / pairs.sum(1, keepdim=True)
    return -chances[validation[:-1], validation[1:]].log().mean().item()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sweep(cfg: DictConfig) -> None:
    """Train what is not yet in the file."""
    path = RESULTS if cfg.out is None else Path(cfg.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {row["key"] for row in read_rows(path)}
    todo = [case for case in cases(cfg) if case.key not in done]
    print(f"{len(todo)} cases to train; what {path} holds is skipped", flush=True)
    facts = {
        "device": f"cpu, {os.cpu_count()} cores",
        "commit": harness.commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": L.__version__,
    }
    text = next((case.settings for case in todo if case.task == "text"), None)
    bigrams = {} if text is None else {"text": bigram_loss(text)}
    began = time.monotonic()
    exit_on_sigterm()
    for number, case in enumerate(todo, start=1):
        new = row(case, run(case), {"bigram_loss": bigrams.get(case.task), **facts})
        with path.open("a") as lines:
            lines.write(json.dumps(new) + "\n")
        result = "FAILED " + new["error"].strip().splitlines()[-1] if "error" in new else new["val_loss"]
        if new.get("replicas_identical") is False:
            result = f"{result} REPLICAS DIFFER"
        spent = time.monotonic() - began
        left = spent / number * (len(todo) - number) / 60
        print(f"{number}/{len(todo)} {case}: {new['status']} {result} ({spent:.0f} s, {left:.0f} min left)", flush=True)


def main(given: Sequence[str]) -> None:
    """The command: Hydra's overrides of accuracy.yaml."""
    sys.argv = ["accuracy", *given]
    hydra.main(version_base="1.3", config_path=".", config_name="accuracy")(sweep)()
