"""What a syncer's folder says of its merges: every version of Theta made anew, and merges that a restart has undone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ringstrategy.codecs import Codec, derive_seed
from ringstrategy.server.folder import events
from ringstrategy.server.merges import Merge


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


def went_back(path: Path, used: set[tuple[int, str, int]]) -> int:
    """How many merges a start of the syncer has undone.

    Not one that the syncer was writing when it was killed, unless a learner uses it: (fragment, boot, version).
    """
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
