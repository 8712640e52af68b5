"""Learners and a syncer without sockets and without time, for tests: each request is answered at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringstrategy import Identity, Nesterov
from ringstrategy.requests import Answer
from ringstrategy.requests.messages import Buffer, written
from ringstrategy.requests.within import answered
from ringstrategy.server.folder import Folder
from ringstrategy.server.learner import Learner
from ringstrategy.server.merges import mean
from ringstrategy.server.plan import planned
from ringstrategy.server.syncer import Syncer

PARTS = {"Nesterov": Nesterov}
OPTIONS: dict[str, Any] = {
    "codec": Identity(),
    "broadcast": Identity(),
    "merge": mean,
    "outer": Nesterov(),
    "quorum": 2,
    "grace": 0.0,
}


class Here:
    """A syncer that may be away.

    Args:
        folder: its.
        how: arguments of `Syncer`.
    """

    def __init__(self, folder: Path, **how: Any) -> None:
        self.path, self.how, self.now = folder, how, 0.0
        self.syncer: Syncer | None = None
        self.lives = 0
        self.step: Callable[[str], None] = lambda name: None
        self.start()

    def start(self) -> None:
        self.lives += 1
        self._folder = Folder(self.path, lambda name: self.step(name))
        try:
            self.syncer = Syncer(self._folder, parts=PARTS, clock=lambda: self.now, **self.how)
        except BaseException:
            self._folder.close()
            raise

    def kill(self) -> None:
        """All that is not on the disk is lost."""
        self._folder.close()
        self.syncer = None

    def merge(self) -> float | None:
        assert self.syncer is not None
        return self.syncer.merge_due()

    def asker(self, peer: str) -> Callable[[str, Mapping[str, Any], Sequence[Buffer]], Answer]:
        """For `Learner.exchange`. The peer's name has a life in it, as a client's has."""

        def ask(operation: str, meta: Mapping[str, Any], buffers: Sequence[Buffer]) -> Answer:
            if self.syncer is None:
                raise ConnectionError("it is away")
            answer = answered(self.syncer.answer, peer, operation, json.loads(written(dict(meta))), buffers)
            return answer._replace(meta=json.loads(written(answer.meta)))

        return ask

    def report(self) -> dict[str, Any]:
        assert self.syncer is not None
        return self.syncer.report()


def learner_of(fragments: Sequence[Mapping[str, Tensor]], name: str | None = "a", **options: Any) -> Learner:
    """With what `OPTIONS` says, unless `options` say otherwise."""
    mine = {"interval": 4, "overlap": 1, "blend": 0.5} | {
        key: options.pop(key) for key in ("interval", "overlap", "blend") if key in options
    }
    parts = {**OPTIONS, **options}
    return Learner(
        fragments, planned(fragments, **parts), codec=parts["codec"], broadcast=parts["broadcast"], name=name, **mine
    )


def model_of(seed: int, *sizes: int) -> list[dict[str, Tensor]]:
    """Fragments of one parameter each."""
    generator = torch.Generator().manual_seed(seed)
    return [{f"p{number}": torch.randn(size, generator=generator)} for number, size in enumerate(sizes)]


def take_all(learner: Learner) -> int:
    """What is due; how much it was."""
    due = learner.due()
    for number, _, _ in due:
        learner.take(number)
    return len(due)
