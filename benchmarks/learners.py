"""A training by learners of Decoupled DiLoCo, one a rank, and steps that take a given time."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.contenders import MakeOptimizer
from benchmarks.oracle import recomputed
from benchmarks.tasks import Batches, Loss
from ringstrategy import BlockInt, Cast, Nesterov
from ringstrategy.algorithms.parameters.schedule import cut_fragments
from ringstrategy.server.background import Background, finder
from ringstrategy.server.folder import events
from ringstrategy.server.learner import Learner
from ringstrategy.server.merges import Merge, mean, radial_directional
from ringstrategy.server.plan import planned

LEARNERS: Mapping[str, tuple[int, Merge, Nesterov]] = {  # interval; the first two otherwise as `Decoupled`
    "decoupled every 16": (16, mean, Nesterov(0.4, 0.8)),
    "decoupled every 8": (8, mean, Nesterov(0.4, 0.8)),
    "decoupled every 16, as in papers": (16, radial_directional, Nesterov(0.7, 0.9)),
}
_FRAGMENTS, _OVERLAP, _BLEND = 2, 2, 0.5
_STARTS = 60.0  # seconds of a syncer, at most


def paced(model: nn.Module, loss: Loss, seconds: float) -> Loss:
    """The loss, which is returned so many seconds after the forward pass of the model, or a copy of it, began."""
    began = [0.0]

    def begin(*_: object) -> None:
        began[0] = time.monotonic()

    def later(outputs: Tensor, targets: Tensor) -> Tensor:
        value = loss(outputs, targets)
        time.sleep(max(0.0, began[0] + seconds - time.monotonic()))
        return value

    model.register_forward_pre_hook(begin)
    return later


def fragments_of(model: nn.Module) -> list[dict[str, nn.Parameter]]:
    """As learners exchange them."""
    return cut_fragments(dict(model.named_parameters()), _FRAGMENTS)


class Learned(NamedTuple):
    """What the ranks did, on all of them.

    Attributes:
        theta: after each merge of the last fragment: steps of a rank, the mean; seconds; fragments.
        at_interface: bytes of the host that sent most.
    """

    theta: list[tuple[float, float, list[Tensor]]]
    at_interface: float | None


def learned(
    case: str, model: nn.Module, batches: Batches, loss: Loss, optimizer: MakeOptimizer, seconds: float
) -> Learned:
    """Train for so many seconds; a merge needs all ranks but one. The syncer is a process on the first host."""
    interval, merge, outer = LEARNERS[case]
    cut = fragments_of(model)
    initial = [torch.cat([each.detach().flatten() for each in part.values()]) for part in cut]
    parts: dict[str, Any] = {"codec": BlockInt(8), "broadcast": Cast("bfloat16")}
    quorum = max(1, dist.get_world_size() - 1)
    plan = planned(cut, **parts, merge=merge, outer=outer, quorum=quorum, grace="auto")
    times = list[float]()
    with _syncer() as (folder, address, secret):
        name = f"learner{dist.get_rank()}"
        learner = Learner(cut, plan, **parts, interval=interval, overlap=_OVERLAP, blend=_BLEND, name=name)
        background = Background(learner, finder(address), secret)
        background.wait(_STARTS, insist=True)
        stepped, before = optimizer(model), harness.interface_bytes()
        dist.barrier()
        begin = time.time()
        while time.time() < begin + seconds:
            inputs, targets = batches[len(times) % len(batches)]
            loss(model(inputs), targets).backward()
            stepped.step()
            stepped.zero_grad(set_to_none=True)
            times.append(time.time() - begin)
            learner.after_step(len(inputs))
            background.wake()
            background.check()
            for number, _, _ in learner.due():
                learner.take(number)
        background.close()
        after = harness.interface_bytes()
        sent = None if before is None or after is None else harness.max_over_ranks(after - before)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, times)
        theta = [list(_theta(folder, initial, parts["codec"], merge, outer, begin, list(chain(*everyone))))]
        dist.broadcast_object_list(theta)
    return Learned(theta[0], sent)


def _theta(
    folder: Path | None,
    initial: list[Tensor],
    codec: BlockInt,
    merge: Merge,
    outer: Callable[..., torch.optim.Optimizer],
    begin: float,
    times: list[float],
) -> Iterator[tuple[float, float, list[Tensor]]]:
    """From the log, on the first rank."""
    if folder is None:
        return
    versions, newest = recomputed(folder, initial, codec, merge, outer), [0] * len(initial)
    for event in events(folder):
        newest[event["fragment"]] = event["version"]
        if event["fragment"] == len(initial) - 1:
            after = event["time"] - begin
            steps = sum(time <= after for time in times) / dist.get_world_size()
            yield steps, after, [versions[fragment][version] for fragment, version in enumerate(newest)]


@contextlib.contextmanager
def _syncer() -> Iterator[tuple[Path | None, str, bytes]]:
    """Its folder, on the first rank only, and its address and secret."""
    with contextlib.ExitStack() as ends:
        told: list[Any] = [None]
        folder = None
        if dist.get_rank() == 0:
            place = Path(ends.enter_context(tempfile.TemporaryDirectory()))
            folder, secret, address = place / "theta", place / "secret", place / "address"
            secret.write_text(secrets.token_hex(32))
            command = [sys.executable, "-m", "ringstrategy.app.syncer", "--bind", f"{os.environ['MASTER_ADDR']}:0"]
            command += ["--address-file", str(address), "--secret-file", str(secret), "--keep-wires"]
            process = subprocess.Popen([*command, "--checkpoint", str(folder)], stdout=subprocess.DEVNULL)
            ends.callback(process.wait)
            ends.callback(process.terminate)
            ends.callback(dist.barrier)  # nobody asks any more
            end = time.monotonic() + _STARTS
            while not address.exists():
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError("the syncer did not start")
                time.sleep(0.05)
            told = [(address.read_text().strip(), secret.read_bytes())]
        else:
            ends.callback(dist.barrier)
        dist.broadcast_object_list(told)
        yield folder, *told[0]
