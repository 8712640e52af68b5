"""Fragments of a model, their versions, and what learners have pushed to them. No sockets, and the time is given."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringstrategy.requests.messages import view_of
from ringstrategy.server.fragment import Fragment
from ringstrategy.server.merges import Merge
from ringstrategy.server.rules import NEVER, Rule


class Taken(Enum):
    """What has become of a push."""

    TAKEN = "taken"  # it counts in the next merge
    LATE = "late"  # a newer version is there; the learner keeps its steps
    REPEATED = "repeated"  # it was pushed before, perhaps to an earlier life of the server
    UNKNOWN = "unknown"  # it was computed from a version that this server does not have: fetch anew


class Push(NamedTuple):
    """What a learner gives.

    Attributes:
        learner: its name.
        sequence: rises from push to push, over all lives of the learner.
        boot: of the server that gave it the version it has computed from.
        base: that version.
        weight: of this push in a mean, > 0.
        values: as long as the fragment, and of its dtype: a gradient, or the progress from the base. The store keeps it
            until it is merged.
        options: of each group of the fragment's optimizer, such as the learning rate; None: they stay.
        used: see `Fragment.step`.
    """

    learner: str
    sequence: int
    boot: str
    base: int
    weight: float
    values: Tensor
    options: Sequence[Mapping[str, Any]] | None = None
    used: Collection[int] | None = None


class Store:
    """Merges pushes into fragments by a rule, and steps them. Not for several threads at once.

    A push enters a fragment at most once. Versions never go back while checkpoints are written at each merge.

    Args:
        fragments: what is kept.
        rule: when to merge.
        merge: several pushes into one.
        progress: pushes are progress, of which the negative is a gradient; else they are gradients.
        digests: of values are in the event log; they cost a pass of SHA-256 over each push.

    Attributes:
        boot: a random word, another one in each life of the server.
        versions: of each fragment.
    """

    def __init__(
        self,
        fragments: Sequence[Fragment],
        rule: Rule,
        merge: Merge,
        *,
        progress: bool,
        digests: bool = True,
    ) -> None:
        self.rule, self.boot, self.versions = rule, uuid.uuid4().hex, [0] * len(fragments)
        self.fragments = fragments
        self._merge, self._progress, self._tells = merge, progress, digests
        self._published = [fragment.values.clone() for fragment in fragments]
        self._digests = [self._digest(fragment.values) for fragment in fragments]
        self._merged: dict[int, Tensor] = {}  # gradients that are not stepped yet
        self._lives: list[dict[str, int]] = [{} for _ in fragments]  # the last version of each earlier boot
        self._inbox: list[dict[str, Push]] = [{} for _ in fragments]
        self._arrived: list[dict[str, float]] = [{} for _ in fragments]  # when, what is in the inbox
        self._merged_at: list[float | None] = [None] * len(fragments)
        self._last: list[dict[str, int]] = [{} for _ in fragments]  # sequence of each learner's last push that counted
        self._steps: dict[str, int] = {}  # pushes of each living learner to fragment 0

    # Learners

    def join(self, learner: str) -> None:
        """It is there. A new one counts as as far as the slowest."""
        self._steps.setdefault(learner, min(self._steps.values(), default=0))

    def leave(self, learner: str) -> None:
        """It is gone; what it has pushed counts, and what is still on its way. Nobody waits for it."""
        self._steps.pop(learner, None)

    def may_go_on(self, learner: str) -> bool:
        """Whether it may begin another step."""
        return self.rule.lets(learner, self._steps)

    # What they push and pull

    def push(self, fragment: int, push: Push, now: float) -> Taken:
        """Take it for the next merge, or say why not. ValueError if it can be no push to this fragment."""
        here = self.fragments[fragment].values
        if push.values.shape != here.shape or push.values.dtype != here.dtype:
            raise ValueError(
                f"fragment {fragment} is {tuple(here.shape)} {here.dtype}, and {push.learner} pushed "
                f"{tuple(push.values.shape)} {push.values.dtype}: build the same model on all learners"
            )
        if not push.weight > 0 or push.weight == float("inf"):
            raise ValueError(f"{push.learner} pushed with weight {push.weight}, which is no number > 0")
        version, inbox = self.versions[fragment], self._inbox[fragment]
        if push.sequence <= self._last[fragment].get(push.learner, -1):
            return Taken.REPEATED
        if push.base > (version if push.boot == self.boot else self._lives[fragment].get(push.boot, -1)):
            return Taken.UNKNOWN
        if not self.rule.counts(push.base, version):
            return Taken.LATE
        if push.learner in inbox:
            return Taken.REPEATED  # its steps from one base count once
        inbox[push.learner], self._arrived[fragment][push.learner] = push, now
        self._merged.pop(fragment, None)
        if push.learner in self._steps and fragment == 0:  # else it has left since
            self._steps[push.learner] += 1
        return Taken.TAKEN

    def pull(self, fragment: int, have: int = -1) -> tuple[int, Tensor] | None:
        """The version and its values, which nobody changes; None if the learner has no older one."""
        version = self.versions[fragment]
        return None if have == version else (version, self._published[fragment])

    # Merges

    def due(self, now: float) -> list[int]:
        """Fragments to merge."""
        return [fragment for fragment, when in enumerate(self._when()) if when <= now]

    def soon(self) -> float:
        """When the next one is due, if nothing else comes; `NEVER`: none."""
        return min(self._when(), default=NEVER)

    def _when(self) -> Iterator[float]:
        for at, merged in zip(self._arrived, self._merged_at, strict=True):
            yield self.rule.when(at, self._steps, min(at.values()) if merged is None else merged) if at else NEVER

    def gradient(self, fragment: int) -> Tensor:
        """What the next `merge` steps by, unless something else arrives before."""
        if fragment not in self._merged:
            pushes = self.waiting(fragment)
            merged = self._merge([push.values for push in pushes], [push.weight for push in pushes])
            self._merged[fragment] = merged.neg_() if self._progress else merged
        return self._merged[fragment]

    def merge(self, fragment: int, now: float, *, scale: float = 1.0) -> dict[str, Any]:
        """Step the fragment by what has arrived. Returns what happened, for the event log: `json` can write it.

        Args:
            fragment: which.
            now: the time.
            scale: of the merged gradient, such as what clips it.
        """
        pushes, version, here = self.waiting(fragment), self.versions[fragment], self.fragments[fragment]
        gradient = self.gradient(fragment)
        if scale != 1.0:
            gradient.mul_(scale)
        rate = self.rule.rate(max(version - push.base for push in pushes))
        options = next((push.options for push in pushes if push.options is not None), None)
        used = None
        if not any(push.used is None for push in pushes):
            used = set().union(*(push.used or () for push in pushes))
        here.step(gradient, rate, options, used)
        del self._merged[fragment]
        self._inbox[fragment], self._arrived[fragment], self._merged_at[fragment] = {}, {}, now
        self._published[fragment] = here.values.clone()  # answers under way keep theirs
        before, self._digests[fragment] = self._digests[fragment], self._digest(here.values)
        self.versions[fragment] = version + 1
        self._last[fragment] |= {push.learner: push.sequence for push in pushes}
        return {
            "fragment": fragment,
            "version": version + 1,
            "boot": self.boot,
            "time": now,
            "rate": rate,
            "scale": scale,
            "options": None if options is None else [dict(group) for group in options],
            "before": before,
            "after": self._digests[fragment],
            "pushes": [
                {
                    "learner": push.learner,
                    "sequence": push.sequence,
                    "base": push.base,
                    "weight": push.weight,
                    "digest": self._digest(push.values),
                }
                for push in pushes
            ],
        }

    def waiting(self, fragment: int) -> list[Push]:
        """What has arrived and is not merged yet; not in the order of arrival, so that merges have the same bits."""
        inbox = self._inbox[fragment]
        return [inbox[learner] for learner in sorted(inbox)]

    def _digest(self, values: Tensor) -> str | None:
        return digest(values) if self._tells else None

    # State

    def state_dict(self, fragment: int) -> dict[str, Any]:
        """Of one fragment, after a merge: tensors and primitives, some of them views of the memory in use."""
        return {
            "version": self.versions[fragment],
            "values": self._published[fragment],
            "optimizer": self.fragments[fragment].optimizer.state_dict(),
            "last": dict(self._last[fragment]),
            "lives": {**self._lives[fragment], self.boot: self.versions[fragment]},
        }

    @torch.no_grad()
    def load_state_dict(self, fragment: int, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave in an earlier life. Pushes that were not merged are to be pushed again."""
        self.versions[fragment] = int(state["version"])
        here = self.fragments[fragment]
        here.values.copy_(state["values"])
        here.optimizer.load_state_dict(state["optimizer"])
        self._published[fragment] = here.values.clone()
        self._digests[fragment] = self._digest(here.values)
        self._last[fragment], self._lives[fragment] = dict(state["last"]), dict(state["lives"])
        self._inbox[fragment], self._arrived[fragment] = {}, {}


def digest(values: Tensor) -> str:
    """SHA-256 of its bytes."""
    return hashlib.sha256(view_of(values)).hexdigest()
