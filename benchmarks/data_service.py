"""Batches that workers of Ray Data prepare for the ranks, beside a DataLoader in each rank.

python -m benchmarks data_service --rounds 5 --out outputs/data_service.jsonl

Two ranks under Ray Train average an MLP over `ring_int8`. Each batch must be prepared first, which takes
`--prepare-ms`: a core computes (`computes`), or the preparation only waits, as for a file from far away (`waits`).

- DataLoader: each rank prepares its own batches, in its training thread.
- DataLoader, processes: in `--workers` / 2 processes of each rank.
- Ray Data, split: `--workers` tasks prepare batches, and each rank gets half of them (`streaming_split`).
- Ray Data, shared: each rank takes the next batch that is ready. Ranks get different numbers of batches, so the
  algorithm has `uneven="join"`.

A time is that of an epoch, its start included, divided by the batches of a rank. All processes share this machine's
cores: workers on other machines would not take any from the ranks, and no row says how fast that is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks import harness
from benchmarks.rows import Row
from benchmarks.tasks import perceptron
from ringstrategy import AllReduce, BlockInt
from ringstrategy.extras import require
from ringstrategy.session import Session

_RANKS = 2
_ROWS, _FEATURES = 32, 256  # of a batch
_KINDS = ("computes", "waits")
_LOCAL, _PROCESSES, _SPLIT, _SHARED = "DataLoader", "DataLoader, processes", "Ray Data, split", "Ray Data, shared"


def prepare(seed: int, kind: str, seconds: float) -> np.ndarray[Any, Any]:
    """A batch of float32, after `seconds` of a core or of waiting."""
    if kind == "waits":
        time.sleep(seconds)
    else:
        end = time.thread_time() + seconds  # other processes may have the core meanwhile
        while time.thread_time() < end:
            np.sort(np.arange(1000)[::-1])
    return np.random.default_rng(seed).standard_normal((_ROWS, _FEATURES), np.float32)


def _prepare_row(row: Mapping[str, Any], kind: str, seconds: float) -> dict[str, Any]:
    return {"batch": prepare(int(row["id"]), kind, seconds)}


class _Prepared(Dataset[Tensor]):
    """Of which an item is a whole batch."""

    def __init__(self, batches: int, kind: str, seconds: float) -> None:
        self._batches, self._kind, self._seconds = batches, kind, seconds

    def __len__(self) -> int:
        return self._batches

    def __getitem__(self, place: int) -> Tensor:
        return torch.from_numpy(prepare(place, self._kind, self._seconds))


class _Training:
    """One case on one rank."""

    def __init__(self, name: str, batches: Iterable[Tensor]) -> None:
        self.name, self._batches = name, batches
        torch.manual_seed(0)
        self.model: nn.Module = perceptron(_FEATURES, 512, 512, 1)
        algorithm = AllReduce(BlockInt(8), uneven="join" if name == _SHARED else "error")
        self._session = Session(self.model, algorithm)
        self._session.open(torch.device("cpu"))
        self._optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self._session.bind([self._optimizer])
        self.seen = 0  # batches of this rank, in all epochs

    def epoch(self) -> tuple[float, float]:
        """Seconds until the first batch, and of all."""
        begin = time.perf_counter()
        first = 0.0
        for place, batch in enumerate(self._session.join(self._batches)):
            first = first or time.perf_counter() - begin
            self._session.begin_batch(f"in batch {place}", [self._optimizer], first=place == 0, later_epoch=False)
            self.seen += not self._session.idle
            self._optimizer.zero_grad()
            self._session.backward(self.model(batch).square().mean())
            self._optimizer.step()
            self._session.end_batch(1)
        return first, time.perf_counter() - begin

    @property
    def sent(self) -> int:
        """Bytes so far."""
        return self._session.stats.bytes_sent or 0

    def close(self) -> None:
        """The end."""
        self._session.close()


class _OfRay:
    """The batches that Ray prepares for one rank."""

    def __init__(self, shard: Any) -> None:
        self._shard = shard

    def __iter__(self) -> Iterator[Tensor]:
        for rows in self._shard.iter_torch_batches(batch_size=1, prefetch_batches=2):
            yield rows["batch"][0]


def _train(config: Mapping[str, Any]) -> None:
    """What each rank does; rank 0 writes the slowest rank's seconds."""
    torch.set_num_threads(1)
    rank, options = dist.get_rank(), config["options"]
    data = _Prepared(_RANKS * options.batches, config["kind"], options.prepare_ms / 1e3)
    sampler: DistributedSampler[Tensor] = DistributedSampler(data, _RANKS, rank)
    trainings = [
        _Training(_LOCAL, DataLoader(data, batch_size=None, sampler=sampler)),
        _Training(
            _PROCESSES,
            DataLoader(
                data,
                batch_size=None,
                sampler=sampler,
                num_workers=options.workers // _RANKS,
                persistent_workers=True,  # else each epoch begins with imports
                multiprocessing_context="forkserver",
            ),
        ),
        *(_Training(name, _OfRay(shards[rank])) for name, shards in config["shards"].items()),
    ]
    result: dict[str, dict[str, Any]] = {each.name: {"first": [], "seconds": []} for each in trainings}
    for each, counts in harness.turns(trainings, options.rounds, options.warmup):
        dist.barrier()
        sent, seen = each.sent, each.seen
        first, seconds = map(harness.max_over_ranks, each.epoch())
        here = [int(part) for part in torch.cat(harness.of_all_ranks(torch.tensor([float(each.seen - seen)])))]
        assert sum(here) == _RANKS * options.batches, f"{each.name}: the ranks have seen {here} batches"
        if counts:
            result[each.name]["first"].append(first)
            result[each.name]["seconds"].append(seconds / options.batches)
            result[each.name]["sent"] = (each.sent - sent) / options.batches
            result[each.name]["seen"] = here
    for each in trainings:
        result[each.name]["identical"] = harness.identical_on_all_ranks(list(each.model.parameters()))
        each.close()
    if rank == 0:
        Path(config["result"]).write_text(json.dumps(result))


def _rows(result: Mapping[str, Mapping[str, Any]], size: str, facts: Mapping[str, Any]) -> Iterator[Row]:
    base = result[_LOCAL]["seconds"]
    for name, measured in result.items():
        yield Row(
            benchmark="data_service",
            case=name,
            baseline=_LOCAL,
            size=size,
            seconds=measured["seconds"],
            seconds_median=statistics.median(measured["seconds"]),
            ratio=statistics.median(b / own for b, own in zip(base, measured["seconds"], strict=True)),
            bytes_sent=measured["sent"],
            ranks_identical=measured["identical"],
            **facts,
        )


def main(given: Sequence[str]) -> None:
    """Measure both kinds of preparation."""
    require("python -m benchmarks data_service", "ray", extra="ray")
    parser = harness.arguments("data_service", __doc__, cases=False)
    parser.add_argument("--batches", type=int, default=100, help="of an epoch, for each of the two ranks")
    parser.add_argument("--prepare-ms", type=float, default=20.0, help="that one batch takes to prepare")
    parser.add_argument("--workers", type=int, default=4, help="that prepare batches: of Ray, or of all DataLoaders")
    parser.add_argument("--kinds", nargs="+", choices=_KINDS, default=list(_KINDS))
    options = parser.parse_args(given)
    if options.workers < _RANKS:
        parser.error(f"--workers must be at least {_RANKS}: each rank's DataLoader has one")
    _measure(options)


def _measure(options: argparse.Namespace) -> None:
    import ray
    import ray.data
    from ray.data import TaskPoolStrategy
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    facts = {"processes": _RANKS, "threads": 1, "cores": os.cpu_count(), **harness.made_with()}
    ray.init(num_cpus=_RANKS + options.workers, log_to_driver=False)  # as Ray counts them
    try:
        for kind in options.kinds:
            with tempfile.TemporaryDirectory() as folder:
                batches = ray.data.range(_RANKS * options.batches, override_num_blocks=options.batches).map(
                    partial(_prepare_row, kind=kind, seconds=options.prepare_ms / 1e3),
                    compute=TaskPoolStrategy(size=options.workers),
                )
                shards = {name: batches.streaming_split(_RANKS, equal=name == _SPLIT) for name in (_SPLIT, _SHARED)}
                written = Path(folder) / "result.json"
                TorchTrainer(
                    _train,
                    train_loop_config={"options": options, "kind": kind, "shards": shards, "result": str(written)},
                    torch_config=TorchConfig(backend="gloo"),
                    scaling_config=ScalingConfig(num_workers=_RANKS),
                    run_config=RunConfig(storage_path=folder),
                ).fit()
                result = json.loads(written.read_text())
            size = f"{kind} {options.prepare_ms:g} ms a batch, {options.workers} workers"
            harness.publish(
                f"data_service: {size}, {_RANKS} ranks on {os.cpu_count()} cores",
                list(_rows(result, size, facts)),
                options.out,
                [
                    f"{name}: the first batch came after {statistics.median(measured['first']):.2f} s, and in the "
                    f"last epoch the ranks had {' and '.join(map(str, measured['seen']))} batches"
                    for name, measured in result.items()
                ],
            )
    finally:
        ray.shutdown()
