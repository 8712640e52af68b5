"""Ranks train apart, and every few steps an optimizer's parameters take part in an exchange."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from ringstrategy.algorithms.base import Algorithm, check_uneven
from ringstrategy.algorithms.memory import firsts
from ringstrategy.algorithms.parameters.averager import Averager, Runtime
from ringstrategy.algorithms.parameters.consensus import Consensus, has_a_mean
from ringstrategy.algorithms.parameters.exchange import Exchange
from ringstrategy.algorithms.parameters.group import Group
from ringstrategy.algorithms.parameters.kept import Kept
from ringstrategy.algorithms.parameters.schedule import Schedule, Unit
from ringstrategy.algorithms.policy import Local, check_local, described, split
from ringstrategy.transport.agree import INDENT, compare_changes, compare_plans
from ringstrategy.transport.base import Peers, Waitable


class Periodic(Algorithm):  # noqa: PLR0904
    """Every rank steps with its own gradients; every few steps of an optimizer its parameters are exchanged.

    Parameters of one optimizer are exchanged after its own steps, also after one that a loss scaler skipped.

    Args:
        schedule: when.
        averager: what is exchanged, what becomes of it, and what validation and checkpoints see.
        consensus: False: each rank validates, and ends with, its own parameters.
        local: see `Synchronous`.
        uneven: see `Algorithm`. With "join" a rank without data exchanges, and does not step.
    """

    decentralized = True
    replicates = False

    def __init__(
        self, schedule: Schedule, averager: Averager, consensus: bool, local: Local | None, uneven: str
    ) -> None:
        if not isinstance(consensus, bool):
            raise TypeError(f"consensus is True or False, got {consensus!r}")
        check_local(local)
        check_uneven(uneven)
        self.schedule, self.averager = schedule, averager
        self.consensus, self.local, self.uneven = consensus, local, uneven

        self.exchange = Exchange()
        self._runtime: Runtime | None = None
        self._all: dict[str, Parameter] = {}
        self._known: dict[str, Parameter] = {}  # those that are averaged, one of those in the same memory
        self._first: dict[Parameter, Parameter] = {}  # of those in a parameter's memory
        self._groups: list[Group] = []
        self._bound: dict[frozenset[Parameter], list[Group]] = {}  # by what an optimizer steps
        self._kept = Kept()

    def __repr__(self) -> str:
        """The arguments."""
        names = [name for name in inspect.signature(type(self).__init__).parameters if name != "self"]
        return f"{type(self).__name__}({', '.join(f'{name}={self.argument(name)}' for name in names)})"

    def argument(self, name: str) -> str:
        """An argument's value in words, which ranks compare."""
        value = getattr(self, name)
        return described(value) if callable(value) else str(value)

    @property
    def interval(self) -> int:
        """See `Schedule`."""
        return self.schedule.interval

    @property
    def overlap(self) -> bool | int:
        """See `Schedule`."""
        return self.schedule.overlap

    @property
    def unit(self) -> Unit:
        """See `Schedule`."""
        return self.schedule.unit

    @property
    def runtime(self) -> Runtime:
        """Between `setup` and `close`."""
        assert self._runtime is not None
        return self._runtime

    @property
    def entered(self) -> bool:
        """Whether parameters show what all ranks see."""
        return self._runtime is not None and self._runtime.view.entered

    # The contract

    @override
    def setup(self, parameters: Mapping[str, Parameter], peers: Peers, *, sparse: frozenset[str] = frozenset()) -> None:
        assert self._runtime is None, "close() first"
        self._kept = Kept()
        self._runtime = Runtime(peers, self.exchange, Consensus(peers, self.exchange), self._kept)
        self._learn(parameters)
        self._agree(self._known)

    @override
    def adopt(self, parameters: Mapping[str, Parameter], *, sparse: frozenset[str] = frozenset()) -> list[Parameter]:
        there = set(parameters.values())
        gone = [name for name, parameter in self._all.items() if parameter not in there]
        new = self._learn(parameters)
        if (new or gone) and self._runtime is not None:
            compare_changes(self._runtime.peers, "", new, gone)
        return list(new.values())

    def _learn(self, parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
        known = set(self._all.values())
        self._bound = {}
        self._all = dict(parameters)
        shared, _ = split(parameters, self.local)
        self._first = firsts(shared)
        self._known = {name: parameter for name, parameter in shared.items() if self._first[parameter] is parameter}
        return {name: parameter for name, parameter in parameters.items() if parameter not in known}

    def forget(self) -> None:
        """See `Algorithm.forget`: as if training went on from a checkpoint of now."""
        self.load_state_dict(self.state_dict())

    @override
    def bind(self, parameters: Collection[Parameter], optimizer: Optimizer | None = None) -> None:
        self._groups_of(parameters)

    def after_step(self, parameters: Collection[Parameter] = (), stepped: Tensor | bool = True) -> None:
        """See `Algorithm.after_step`. RuntimeError while parameters show what all ranks see."""
        if self._runtime is not None:
            self._runtime.view.check_left()
        groups = self._groups_of(parameters)
        for group in groups:
            group.steps += 1
        if self.schedule.unit == "step":
            self._turn(groups)

    @override
    def after_epoch(self, parameters: Collection[Parameter] = ()) -> None:
        if self.schedule.unit == "epoch":
            self._turn(self._groups_of(parameters))

    def _turn(self, groups: Sequence[Group]) -> None:
        begins, late = [], self.schedule.late
        for group in groups:
            group.turns += 1
            group.trains = True
            since = self.schedule.since(group.turns, group.place)
            if since in (0, late):
                self._apply(group)
            if since == 0:
                begins.append(group)
        for group in begins:
            self._begin_exchange(group)
        for group in begins:
            if self.schedule.waits(group.turns):
                self._apply(group)

    def _begin_exchange(self, group: Group) -> None:
        peers = self.runtime.peers
        if peers.detector is not None:
            peers.detector.progress.begin_exchange()
        group.under_way = self._exchange(group, f"at mixing {group.mixings}")
        peers.stats.exchanges += 1
        peers.stats.values_averaged += group.numel

    @torch.no_grad()
    def _exchange(self, group: Group, where: str) -> Waitable:
        runtime = self.runtime
        self.averager.gather(group, runtime, first=group is self._groups[0])
        return runtime.peers.submit(partial(self.averager.meet, group, runtime, group.mixings), where)

    def _wait(self, group: Group) -> None:
        if group.under_way is not None:
            self.runtime.peers.finish([group.under_way])
            group.under_way, group.arrived = None, True

    @torch.no_grad()
    def _apply(self, group: Group) -> None:
        self._wait(group)
        if group.arrived:
            group.arrived = False
            group.mixings += 1
            self.averager.apply(group, self.runtime)

    def _groups_of(self, parameters: Collection[Parameter]) -> list[Group]:
        """The groups of an optimizer, by the parameters that it steps; none if none of them is averaged."""
        if self._runtime is None:
            return []
        asked = frozenset(parameters)
        if asked not in self._bound:
            stepped = {self._first.get(parameter) for parameter in asked}
            wanted = {n: p for n, p in self._known.items() if p in stepped and has_a_mean(p)}
            self._bound[asked] = self._bind(wanted) if wanted else []
        return self._bound[asked]

    @torch.no_grad()
    def _bind(self, wanted: Mapping[str, Parameter]) -> list[Group]:
        """The groups of these parameters. Ranks compare the members of new groups, which replace older ones."""
        parts = self.averager.parts(wanted)
        same = [group for group in self._groups if any(_equal(group.parameters, part) for part in parts)]
        if len(same) == len(parts):
            return same
        self._agree(wanted, parts)
        counts: dict[str, int] | None = None
        olds = [group for group in self._groups if _overlap(group.parameters, wanted)]
        for old in olds:
            self._refuse_to_share(old, wanted)
        # callbacks of a run that resumes may give an optimizer the parameters that it had, after it was bound
        resumes = wanted.keys() <= self._kept.counts.keys() and not any(group.trains for group in olds)
        for old in olds:
            if resumes and all(self._known.get(name) is each for name, each in old.parameters.items()):
                self._kept.put_back(old)  # what it took of a checkpoint is there again
                self._drop(old)
            else:
                counts = self._end(old)  # its optimizer has got or lost parameters
        groups = [self._make(part, (place, len(parts)), counts) for place, part in enumerate(parts)]
        self._groups += groups
        return groups

    def _make(
        self, parameters: Mapping[str, Parameter], place: tuple[int, int], counts: Mapping[str, int] | None
    ) -> Group:
        group = self.averager.group(parameters, self.runtime)
        group.place = place
        counts = counts or self._kept.counts.get(next(iter(parameters)))
        if counts is not None:
            group.counts = dict(counts)
        if not self._kept.resume(group):
            self.averager.begin(group, self.runtime)
        self._warm_up(group)
        return group

    def _warm_up(self, group: Group) -> None:
        """On GPUs: exchange zeros as values will travel. So no exchange compiles or connects."""
        if not self.runtime.peers.queues and all(flat.device.type == "cpu" for flat in group.flats):
            return
        self.settle()  # what is under way is no part of this
        self.averager.rehearse(group, self.runtime)

    def _refuse_to_share(self, group: Group, wanted: Mapping[str, Parameter]) -> None:
        """ValueError if another optimizer still steps parameters of this group that are not `wanted`."""
        if not set(self._known.values()) & set(group.parameters.values()) <= set(wanted.values()):
            shared = ", ".join(sorted(group.parameters.keys() & wanted.keys())[:3])
            raise ValueError(
                f"two optimizers step {shared}, or one has lost some of its parameters, which the model still has. But "
                f"with {type(self).__name__} the parameters of an optimizer are mixed together, so they must be its "
                "own, and stay: give them to one optimizer, freeze what is not to be trained instead of taking it out, "
                "or use a synchronous strategy such as 'ring'"
            )

    def _end(self, group: Group) -> dict[str, int]:
        """Apply what is pending, set the parameters to what all see, and drop the group; returns its counts."""
        self._apply(group)
        for flat, values in self.averager.left(group, self.runtime):
            flat.write(values)
        self._drop(group)
        return group.counts

    def _drop(self, group: Group) -> None:
        self._groups.remove(group)
        self._bound = {asked: bound for asked, bound in self._bound.items() if group not in bound}

    def _agree(self, parameters: Mapping[str, Parameter], parts: Sequence[Mapping[str, Parameter]] = ()) -> None:
        lines = [self.averager.line(name, parameter) for name, parameter in parameters.items()]
        if len(parts) > 1:
            lines += [f"{INDENT}{name}: fragment {number}" for number, part in enumerate(parts) for name in part]
        compare_plans(self.runtime.peers, self.plan_text(self.runtime.peers.size, lines))

    # What all ranks see

    @override
    def settle(self) -> None:
        for group in self._groups:
            self._wait(group)

    @torch.no_grad()
    @override
    def enter_consensus(
        self, others: Sequence[Tensor] = (), copied: Sequence[Tensor] = (), *, replaced: bool = False
    ) -> bool:
        runtime = self._runtime
        if runtime is None or runtime.view.entered:
            return False
        # bytes of the mean must not meet those of a mixing: a rank with fewer batches waits here until it is told
        trains = (f"{INDENT}{n}: {'trained' if p.requires_grad else 'frozen'}" for n, p in self._known.items())
        compare_plans(runtime.peers, "\n".join(["the mean of all ranks", *trains]))
        self.settle()
        seen = (pair for group in self._groups for pair in self.averager.seen(group, runtime, replaced=replaced))
        runtime.view.enter(seen, [*self._known.values(), *others], copied)
        return True

    @override
    def leave_consensus(self) -> None:
        if self._runtime is not None:
            self._runtime.view.leave()

    @override
    def as_own(self) -> AbstractContextManager[None]:
        return nullcontext() if self._runtime is None else self._runtime.view.hidden()

    @torch.no_grad()
    @override
    def consensus_distance(self, sample: int | None = None) -> float | None:
        runtime = self._runtime
        return None if runtime is None else runtime.view.distance(self._groups, self.averager.mass, sample)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The counts of each parameter's group, and what ranks hold with the same bits."""
        state = self._kept.shared_state(self._groups)
        return {"step": max((count["steps"] for count in state["counts"].values()), default=0), **state}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.settle()
        self._groups, self._bound = [], {}
        self._kept.load_shared(state)

    @override
    def own_state(self) -> dict[str, Any]:
        return {"of": self.averager.keeper, **self._kept.own_state(self._groups)}

    @override
    def load_own_state(self, state: Mapping[str, Any]) -> bool:
        mine = bool(state["of"] == self.averager.keeper)
        self._kept.load_own(state if mine else {})
        return mine

    def close(self) -> None:
        """Forget the parameters, and drop an exchange in flight. What `state_dict` gives stays."""
        self._kept.load_shared(self._kept.shared_state(self._groups))
        self._runtime, self._groups, self._bound = None, [], {}
        self._all, self._known, self._first = {}, {}, {}


def _equal(some: Mapping[str, Parameter], others: Mapping[str, Parameter]) -> bool:
    return some.keys() == others.keys() and set(some.values()) == set(others.values())


def _overlap(some: Mapping[str, Parameter], others: Mapping[str, Parameter]) -> bool:
    return bool(some.keys() & others.keys() or set(some.values()) & set(others.values()))
