"""How long a learner of Decoupled DiLoCo keeps the training thread from its next step.

What the thread that talks to the syncer does is not counted: on a busy machine it takes its cores from training.

python -m benchmarks callback --parameters 100000000 --threads 2
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from ringstrategy.algorithms.parameters.outer import Nesterov
from ringstrategy.codecs import BlockInt, Cast
from ringstrategy.requests.within import answered
from ringstrategy.server.folder import Folder
from ringstrategy.server.learner import Learner
from ringstrategy.server.merges import mean
from ringstrategy.server.plan import planned
from ringstrategy.server.syncer import Syncer

_FRAGMENTS, _TENSORS, _INTERVAL = 4, 10, 64  # tensors of each fragment


def main(given: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks callback", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--threads", type=int, default=2, help="of torch; default 2")
    parser.add_argument("--intervals", type=int, default=3, help="the first is not counted; default 3")
    asked = parser.parse_args(given)
    if asked.intervals < 2:
        parser.error("--intervals is at least 2: the first is not counted")
    torch.set_num_threads(asked.threads)
    size = asked.parameters // (_FRAGMENTS * _TENSORS)
    fragments = [{str(i): torch.randn(size) for i in range(_TENSORS)} for _ in range(_FRAGMENTS)]
    codec, broadcast = BlockInt(8), Cast("bfloat16")
    plan = planned(
        fragments, codec=codec, broadcast=broadcast, merge=mean, outer=Nesterov(0.4, 0.8), quorum=1, grace="auto"
    )
    how = {"interval": _INTERVAL, "overlap": 2, "blend": 0.5}
    learner = Learner(fragments, plan, codec=codec, broadcast=broadcast, name="a", **how)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as name:
        syncer = Syncer(Folder(Path(name)), parts={"Nesterov": Nesterov})
        ask = partial(answered, syncer.answer, "a/1")
        seconds = []
        learner.exchange(ask)
        for _ in range(_INTERVAL * asked.intervals):
            began = time.perf_counter()
            learner.after_step(1.0)
            for fragment, _, _ in learner.due():
                learner.take(fragment)
            seconds.append(time.perf_counter() - began)
            learner.exchange(ask)
            syncer.merge_due()
            learner.exchange(ask)
    counted = seconds[_INTERVAL:]
    print(
        f"{asked.parameters / 1e6:g} M parameters, {_FRAGMENTS} fragments every {_INTERVAL} steps, {codec!r} there, "
        f"{broadcast!r} back, {asked.threads} threads: {1e3 * sum(counted) / len(counted):.2f} ms a step in the mean "
        f"over {len(counted)} steps, {1e3 * max(counted):.0f} ms at most"
    )
