"""Decentralized averaging: now and then each rank mixes its parameters with those of its neighbours."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ringstrategy.algorithms.base import ParameterAlgorithm, check_uneven
from ringstrategy.algorithms.local import Local, check_local, split
from ringstrategy.algorithms.parameters.consensus import Consensus, has_a_mean
from ringstrategy.algorithms.parameters.exchange import Exchange, Piece
from ringstrategy.algorithms.parameters.group import Flat, Group, cut_like, row_of
from ringstrategy.algorithms.parameters.kept import Kept
from ringstrategy.algorithms.parameters.schedule import Schedule, Unit
from ringstrategy.algorithms.policy import described
from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.collectives.base import sums_dtype
from ringstrategy.kernels.engine import engine
from ringstrategy.topologies.base import Topology
from ringstrategy.transport.agree import INDENT, compare_changes, compare_plans
from ringstrategy.transport.base import Peers


class Decentralized(ParameterAlgorithm):
    """Every rank steps with its own gradients; every `interval` steps of an optimizer its parameters are mixed.

    Parameters of one optimizer are mixed together, after its own steps, also after one that a loss scaler skipped.
    Validation, test, checkpoints and what training returns see the exact mean over ranks, floating-point buffers such
    as batch-norm statistics included; then each rank's own values come back, and training goes on as if nobody had
    looked. Integer buffers are each rank's own, in a checkpoint rank 0's; optimizer state is never mixed. A checkpoint
    has a file of each rank's own parameters, optimizers and whatever the algorithm keeps beside it, from which the same
    number of ranks goes on bit for bit; another number starts from the mean, as do ranks whose optimizer gets more
    parameters.

    Subclasses define how values become bytes and back (`write`, `read`), and how corrections are used (`apply`).

    Args:
        topology: who mixes with whom.
        codec: how values travel.
        interval: optimizer steps from one mixing to the next. More: fewer bytes, ranks drift further apart.
        overlap: True: send while the next `interval` steps are computed, and apply what came as a correction at their
            end: the wire then costs no time while it is faster than they are. Its price: corrections come late, so the
            largest stable learning rate is lower and more steps may be needed, the more so with long intervals. False:
            wait for it at once. A number from 1 to `interval`: apply it after so many steps (DaSGD, Zhou et al. 2020),
            best so few that their compute is just longer than the exchange. 1 is one step, not True.
        consensus: False: each rank validates, and ends with, its own parameters. Checkpoints hold the mean even so.
        local: see `Synchronous`.
        unit: "step", or "epoch": the interval counts epochs.
        uneven: see `Algorithm`. With "join" a rank without data mixes, and does not step.
    """

    gain = 1.0  # of the difference to neighbours

    def __init__(
        self,
        topology: Topology,
        codec: Codec,
        interval: int,
        overlap: bool | int,
        consensus: bool,
        local: Local | None,
        unit: Unit,
        uneven: str,
    ) -> None:
        if not isinstance(topology, Topology):
            raise TypeError(f"topology is a Topology such as ringstrategy.topologies.RingGraph(), got {topology!r}")
        if not isinstance(codec, Codec):
            raise TypeError(f"codec is a Codec such as ringstrategy.Identity(), got {codec!r}")
        Schedule(interval, overlap, unit)  # refuses what these cannot be
        if not isinstance(consensus, bool):
            raise TypeError(f"consensus is True or False, got {consensus!r}")
        check_local(local)
        check_uneven(uneven)
        self.topology, self.codec, self.interval, self.unit = topology, codec, interval, unit
        self.overlap, self.consensus, self.local, self.uneven = overlap, consensus, local, uneven

        self.exchange = Exchange()
        self._peers: Peers | None = None
        self._all: dict[str, Parameter] = {}
        self._known: dict[str, Parameter] = {}  # those that are averaged
        self._groups: list[Group] = []
        self._bound: dict[frozenset[Parameter], Group | None] = {}  # by what an optimizer steps
        self._view: Consensus | None = None  # while there are peers
        self._kept = Kept()
        self._counts: dict[str, dict[str, int]] = {}  # of a checkpoint: a parameter's group's

    def __repr__(self) -> str:
        """The arguments."""
        names = [name for name in inspect.signature(type(self).__init__).parameters if name not in ("self", "local")]
        said = [f"{name}={getattr(self, name)}" for name in names]
        return f"{type(self).__name__}({', '.join(said)}, local={described(self.local)})"

    @property
    def schedule(self) -> Schedule:
        """When parameters are mixed."""
        return Schedule(self.interval, self.overlap, self.unit)

    @property
    def late(self) -> int:
        """See `Schedule`."""
        return self.schedule.late

    # What subclasses say

    def values_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of mixed values, for parameters of `dtype`."""
        return sums_dtype(dtype)

    def seen_dtype(self, values: torch.dtype) -> torch.dtype:
        """The dtype of what is read where `values` were written: that of the wire."""
        dtype = self.codec.summable(values)
        assert dtype is not None, "a codec whose bytes are no values needs another `read`"
        return dtype

    def begin(self, group: Group) -> None:
        """Before the first mixing of a group; all ranks call it."""

    def gather(self, flat: Flat) -> None:
        """Fill `flat.values` with the values to mix."""
        flat.gather()

    def write(self, piece: Piece, wire: Tensor) -> Tensor:
        """Encode the values of the piece; `wire` is memory for the bytes."""
        raw = self.codec.raw(piece.values)
        if raw is not None:
            return raw
        own_seed = self.codec.own_seed(piece.seed, piece.peers.rank)  # this rank's own noise
        self.codec.encode(piece.values, wire, seed=own_seed, offset=piece.begin)
        return wire

    def read(self, piece: Piece, whose: int | None, wire: Tensor) -> Tensor:
        """The values that all ranks see in these bytes; `whose`: their rank, None: this one. Once a wire."""
        return wire.view(self.seen_dtype(piece.values.dtype))

    def apply(self, group: Group) -> None:
        """Add the corrections to the parameters."""
        for flat in group.flats:
            flat.add(flat.correction)

    def mass(self, flat: Flat) -> Tensor:
        """A copy of the values whose mean over ranks mixing preserves."""
        return row_of_parameters(flat)

    # The contract

    def setup(self, parameters: Mapping[str, Parameter], peers: Peers, *, sparse: frozenset[str] = frozenset()) -> None:
        """See `Algorithm.setup`."""
        assert self._peers is None, "close() first"
        self.topology.check(peers.size)
        self._peers, self._counts, self._kept = peers, {}, Kept()
        self._view = Consensus(peers, self.exchange)
        self._learn(parameters)
        self._agree(self._known)

    def adopt(self, parameters: Mapping[str, Parameter], *, sparse: frozenset[str] = frozenset()) -> list[Parameter]:
        """See `Algorithm.adopt`."""
        there = set(parameters.values())
        gone = [name for name, parameter in self._all.items() if parameter not in there]
        new = self._learn(parameters)
        if (new or gone) and self._peers is not None:
            compare_changes(self._peers, "", new, gone)
        return list(new.values())

    def _learn(self, parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
        known = set(self._all.values())
        self._bound = {}
        self._all = dict(parameters)
        self._known, _ = split(parameters, self.local)
        return {name: parameter for name, parameter in parameters.items() if parameter not in known}

    def bind(self, parameters: Collection[Parameter]) -> None:
        """See `ParameterAlgorithm.bind`."""
        self._group_of(parameters)

    def after_step(self, parameters: Collection[Parameter] = (), stepped: Tensor | bool = True) -> None:
        """See `Algorithm.after_step`."""
        group = self._group_of(parameters)
        if group is not None:
            group.steps += 1
            if self.unit == "step":
                self._turn(group)

    def after_epoch(self, parameters: Collection[Parameter] = ()) -> None:
        """See `ParameterAlgorithm.after_epoch`."""
        group = self._group_of(parameters) if self.unit == "epoch" else None
        if group is not None:
            self._turn(group)

    def _turn(self, group: Group) -> None:
        group.turns += 1
        schedule = self.schedule
        if schedule.applies(group.turns):
            self._apply(group)
        if schedule.mixes(group.turns):
            self._begin_exchange(group)
            if not schedule.late:
                self._apply(group)

    def _begin_exchange(self, group: Group) -> None:
        peers = self._peers
        assert peers is not None
        if peers.lifeline is not None:
            peers.lifeline.begin_exchange()
        for flat in group.flats:
            self.gather(flat)
        group.under_way = peers.submit(partial(self._mix, peers, group, group.mixings), f"at mixing {group.mixings}")
        peers.stats.steps += 1
        peers.stats.values_averaged += group.numel

    def _mix(self, peers: Peers, group: Group, mixing: int) -> None:
        for number, vector in enumerate(group.vectors):
            self.exchange.mix(self, vector, peers, mixing, derive_seed(group.seed, mixing, number))

    def _wait(self, group: Group) -> None:
        if group.under_way is not None:
            assert self._peers is not None
            self._peers.finish([group.under_way])
            group.under_way, group.arrived = None, True

    @torch.no_grad()
    def _apply(self, group: Group) -> None:
        self._wait(group)
        if group.arrived:
            group.arrived = False
            group.mixings += 1
            self.apply(group)

    def _group_of(self, parameters: Collection[Parameter]) -> Group | None:
        """The group of an optimizer, by the parameters that it steps; None if none of them is averaged."""
        if self._peers is None:
            return None
        asked = frozenset(parameters)
        if asked not in self._bound:
            wanted = {n: p for n, p in self._known.items() if p in asked and has_a_mean(p)}
            group = self._bind(wanted) if wanted else None
            self._bound[asked] = group
        return self._bound[asked]

    @torch.no_grad()
    def _bind(self, wanted: Mapping[str, Parameter]) -> Group:
        """The group of these parameters. Ranks compare the members of a new group, which replaces older ones."""
        for group in self._groups:
            if group.parameters.keys() == wanted.keys() and set(group.parameters.values()) == set(wanted.values()):
                return group
        for parameter in wanted.values():
            self.codec.check(parameter.dtype)
            self.codec.warm_up(parameter.device)
        self._agree(wanted)
        counts = self._counts.get(next(iter(wanted)), {})
        for old in [group for group in self._groups if _overlap(group.parameters, wanted)]:
            self._refuse_to_share(old, wanted)
            counts = self._end(old)  # its optimizer has got or lost parameters
        new = Group(wanted, self.values_dtype)
        for flat in new.flats:
            engine(flat.values.device).warm_up_mix(self.seen_dtype(flat.values.dtype))
        for name, count in counts.items():
            setattr(new, name, count)
        self._groups.append(new)
        if not self._kept.resume(new):
            self.begin(new)
        self._warm_up(new)
        return new

    def _warm_up(self, group: Group) -> None:
        """On GPUs: exchange zeros as values will travel, and a byte with all later neighbours.

        So no mixing compiles or connects. What the group keeps stays as it is, for zeros are added to it.
        """
        peers = self._peers
        assert peers is not None
        if not peers.queues and all(flat.values.device.type == "cpu" for flat in group.flats):
            return
        self.settle()  # what is under way is no part of this
        corrections = [vector.correction for vector in group.vectors]
        for vector in group.vectors:
            vector.correction = torch.empty_like(vector.correction)
        for flat in group.flats:
            flat.values.zero_()

        def work() -> None:
            self._mix(peers, group, 0)
            device = group.flats[0].values.device
            for step in range(1, self.topology.period(peers.size)):
                self.exchange.connect(self.topology, peers, step, device)

        with peers.stats.probe():
            peers.submit(work, "while setting up").wait()
        for vector, correction in zip(group.vectors, corrections, strict=True):
            vector.correction = correction

    def _refuse_to_share(self, group: Group, wanted: Mapping[str, Parameter]) -> None:
        """ValueError if another optimizer still steps parameters of this group that are not `wanted`."""
        if not set(self._known.values()) & set(group.parameters.values()) <= set(wanted.values()):
            shared = ", ".join(sorted(group.parameters.keys() & wanted.keys())[:3])
            raise ValueError(
                f"two optimizers step {shared}, but with gossip the parameters of an optimizer are mixed together, "
                "so they must be its own: give them to one of the two, or use a synchronous strategy such as 'ring'"
            )

    def _end(self, group: Group) -> dict[str, int]:
        """Apply the pending correction, set the parameters to their mean, and drop the group; returns its counts."""
        assert self._view is not None
        self._apply(group)
        for flat, mean in self._view.means([group], self.mass):
            for parameter, value in zip(flat.parameters, cut_like(mean, flat.parameters), strict=True):
                parameter.copy_(value)
        self._groups.remove(group)
        self._bound = {asked: bound for asked, bound in self._bound.items() if bound is not group}
        return _counts(group)

    def _agree(self, parameters: Mapping[str, Parameter]) -> None:
        assert self._peers is not None
        lines = (f"{INDENT}{name}: {tuple(p.shape)} {p.dtype}" for name, p in parameters.items())
        compare_plans(self._peers, self.plan_text(self._peers.size, lines))

    # The mean of all ranks

    def settle(self) -> None:
        """See `ParameterAlgorithm.settle`."""
        for group in self._groups:
            self._wait(group)

    @torch.no_grad()
    def enter_consensus(self, others: Sequence[Tensor] = (), *, replaced: bool = False) -> bool:
        """See `ParameterAlgorithm.enter_consensus`."""
        if self._peers is None or self._view is None or self._view.entered:
            return False
        # bytes of the mean must not meet those of a mixing: a rank with fewer batches waits here until it is told
        trains = (f"{INDENT}{n}: {'trained' if p.requires_grad else 'frozen'}" for n, p in self._known.items())
        compare_plans(self._peers, "\n".join(["the mean of all ranks", *trains]))
        self.settle()
        self._view.enter(self._groups, [*self._known.values(), *others], row_of_parameters if replaced else self.mass)
        return True

    def leave_consensus(self) -> None:
        """See `ParameterAlgorithm.leave_consensus`."""
        if self._view is not None:
            self._view.leave()

    def as_own(self) -> AbstractContextManager[None]:
        """See `ParameterAlgorithm.as_own`."""
        return nullcontext() if self._view is None else self._view.hidden()

    @torch.no_grad()
    def consensus_distance(self, sample: int | None = None) -> float | None:
        """See `ParameterAlgorithm.consensus_distance`."""
        return None if self._view is None else self._view.distance(self._groups, self.mass, sample)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The counts of each parameter's group."""
        counts = self._counts | {name: _counts(group) for group in self._groups for name in group.parameters}
        return {"step": max((count["steps"] for count in counts.values()), default=0), "counts": counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Algorithm.load_state_dict`."""
        self.settle()
        self._groups, self._bound, self._counts = [], {}, dict(state["counts"])

    def own_state(self) -> dict[str, Any]:
        """See `ParameterAlgorithm.own_state`."""
        return {"of": self.keeper, **self._kept.state_of(self._groups)}

    @property
    def keeper(self) -> str:
        """Names the algorithm and topology: state of another one is of no use."""
        return f"{type(self).__name__} over {self.topology}"

    def load_own_state(self, state: Mapping[str, Any]) -> bool:
        """See `ParameterAlgorithm.load_own_state`."""
        mine = bool(state["of"] == self.keeper)
        self._kept = Kept(state if mine else None)
        return mine

    def close(self) -> None:
        """Forget the parameters, and drop an exchange in flight. The counts stay."""
        self._counts = self.state_dict()["counts"]
        self._peers, self._view, self._groups, self._bound = None, None, [], {}
        self._all, self._known = {}, {}


def row_of_parameters(flat: Flat) -> Tensor:
    """A copy of their values, in the dtype of sums."""
    return row_of(flat.parameters)


def _counts(group: Group) -> dict[str, int]:
    return {"steps": group.steps, "turns": group.turns, "mixings": group.mixings}


def _overlap(some: Mapping[str, Parameter], others: Mapping[str, Parameter]) -> bool:
    return bool(some.keys() & others.keys() or set(some.values()) & set(others.values()))
