"""Fragments of a model, their versions, and what learners have pushed to them. No sockets, and the time is given."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ringstrategy.requests.messages import view_of
from ringstrategy.server.merges import Merge
from ringstrategy.server.rules import Rule


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
        values: flat float32: a gradient, or the progress from the base. The store keeps it.
        lr: the learning rate; None: the optimizer's own.
    """

    learner: str
    sequence: int
    boot: str
    base: int
    weight: float
    values: Tensor
    lr: float | None = None


class Store:
    """Merges pushes into fragments by a rule, and steps each by an optimizer. Not for several threads at once.

    A push enters a fragment at most once. Versions never go back while checkpoints are written at each merge.

    Args:
        fragments: flat float32 tensors, which are copied.
        rule: when to merge.
        merge: several pushes into one.
        optimizer: makes the optimizer of one fragment.
        progress: pushes are progress, of which the negative is a gradient; else they are gradients.

    Attributes:
        boot: a random word, another one in each life of the server.
        versions: of each fragment.
    """

    def __init__(
        self,
        fragments: Sequence[Tensor],
        rule: Rule,
        merge: Merge,
        optimizer: Callable[[Iterable[Parameter]], Optimizer],
        *,
        progress: bool,
    ) -> None:
        self.rule, self.boot, self.versions = rule, uuid.uuid4().hex, [0] * len(fragments)
        self._merge, self._sign = merge, -1.0 if progress else 1.0
        self._parameters = [Parameter(fragment.detach().clone()) for fragment in fragments]
        self._optimizers = [optimizer([parameter]) for parameter in self._parameters]
        self._published = [parameter.detach().clone() for parameter in self._parameters]
        self._digests = [_digest(parameter) for parameter in self._parameters]
        self._lives: list[dict[str, int]] = [{} for _ in fragments]  # the last version of each earlier boot
        self._inbox: list[dict[str, tuple[Push, float]]] = [{} for _ in fragments]
        self._last: list[dict[str, int]] = [{} for _ in fragments]  # sequence of each learner's last push that counted
        self._steps: dict[str, int] = {}  # pushes of each living learner to fragment 0

    # Learners

    @property
    def learners(self) -> list[str]:
        """Those that are there."""
        return sorted(self._steps)

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
        here = self._parameters[fragment]
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
        inbox[push.learner] = push, now
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
        arrived = [{learner: at for learner, (_, at) in inbox.items()} for inbox in self._inbox]
        return [fragment for fragment, at in enumerate(arrived) if at and self.rule.due(at, self._steps, now)]

    @torch.no_grad()
    def merge(self, fragment: int, now: float) -> dict[str, Any]:
        """Step the fragment by what has arrived. Returns what happened, for the event log: `json` can write it."""
        inbox, self._inbox[fragment] = self._inbox[fragment], {}
        pushes = [inbox[learner][0] for learner in sorted(inbox)]  # not in the order of arrival: the same bits
        version, parameter, optimizer = self.versions[fragment], self._parameters[fragment], self._optimizers[fragment]
        staleness = max(version - push.base for push in pushes)
        parameter.grad = self._merge([push.values for push in pushes], [push.weight for push in pushes]) * self._sign
        rate, lr = self.rule.rate(staleness), max((push.lr for push in pushes if push.lr is not None), default=None)
        _step(optimizer, lr, rate)
        parameter.grad = None
        self._published[fragment] = parameter.detach().clone()  # answers under way keep theirs
        before, self._digests[fragment] = self._digests[fragment], _digest(parameter)
        self.versions[fragment] = version + 1
        self._last[fragment] |= {push.learner: push.sequence for push in pushes}
        return {
            "fragment": fragment,
            "version": version + 1,
            "boot": self.boot,
            "time": now,
            "rate": rate,
            "lr": lr,
            "before": before,
            "after": self._digests[fragment],
            "pushes": [
                {
                    "learner": push.learner,
                    "sequence": push.sequence,
                    "base": push.base,
                    "weight": push.weight,
                    "digest": _digest(push.values),
                }
                for push in pushes
            ],
        }

    # State

    def state_dict(self, fragment: int) -> dict[str, Any]:
        """Of one fragment, after a merge: tensors and primitives, some of them views of the memory in use."""
        return {
            "version": self.versions[fragment],
            "values": self._published[fragment],
            "optimizer": self._optimizers[fragment].state_dict(),
            "last": dict(self._last[fragment]),
            "lives": {**self._lives[fragment], self.boot: self.versions[fragment]},
        }

    @torch.no_grad()
    def load_state_dict(self, fragment: int, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave in an earlier life. Pushes that were not merged are to be pushed again."""
        self.versions[fragment] = int(state["version"])
        self._parameters[fragment].copy_(state["values"])
        self._published[fragment] = self._parameters[fragment].detach().clone()
        self._optimizers[fragment].load_state_dict(state["optimizer"])
        self._digests[fragment] = _digest(self._parameters[fragment])
        self._last[fragment], self._lives[fragment] = dict(state["last"]), dict(state["lives"])
        self._inbox[fragment] = {}


def _step(optimizer: Optimizer, lr: float | None, rate: float) -> None:
    """By this learning rate, or its own, times `rate`."""
    groups = optimizer.param_groups
    kept = [group["lr"] if lr is None else lr for group in groups]
    for group, own in zip(groups, kept, strict=True):
        group["lr"] = own * rate
    optimizer.step()
    for group, own in zip(groups, kept, strict=True):
        group["lr"] = own  # not divided by the rate, which would round


def _digest(values: Tensor) -> str:
    """SHA-256 of its bytes."""
    return hashlib.sha256(view_of(values)).hexdigest()
