"""What all decentralized averaging of parameters shares: whose turn it is to mix, and the mean that people look at."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import Parameter

from ringstrategy.algorithms.base import Algorithm
from ringstrategy.algorithms.local import Local, check_local, split
from ringstrategy.algorithms.parameters.consensus import Digests, Shown, differing
from ringstrategy.algorithms.parameters.exchange import Exchange, Piece
from ringstrategy.algorithms.parameters.flats import Flat, Group, Vector, by_kind, cut_like, row_of
from ringstrategy.algorithms.policy import described
from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.collectives.base import sums_dtype
from ringstrategy.topologies.base import Topology
from ringstrategy.transport.agree import INDENT, compare_changes, compare_plans
from ringstrategy.transport.base import Peers

Unit = Literal["step", "epoch"]


class Decentralized(Algorithm):
    """Every rank steps with its own gradients; every `interval` steps of an optimizer its parameters are mixed.

    Parameters of one optimizer are mixed together, after its own steps, also after one that a loss scaler skipped.
    Validation, test, checkpoints and what training returns see the exact mean over ranks, floating-point buffers such
    as batch-norm statistics included; then each rank's own values come back, and training goes on as if nobody had
    looked. Integer buffers are each rank's own, in a checkpoint rank 0's; optimizer state is never mixed. A checkpoint
    has a file of each rank's own parameters, optimizers and whatever the algorithm keeps beside it, from which the same
    number of ranks goes on bit for bit; another number starts from the mean, as do ranks whose optimizer gets more
    parameters.

    Subclasses say what neighbours see of a rank's values (`write`, `read`), and what comes of it (`apply`).

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
    """

    decentralized = True
    gain = 1.0  # of what neighbours differ by

    def __init__(
        self,
        topology: Topology,
        codec: Codec,
        interval: int,
        overlap: bool | int,
        consensus: bool,
        local: Local | None,
        unit: Unit,
    ) -> None:
        if not isinstance(topology, Topology):
            raise TypeError(f"topology is a Topology such as ringstrategy.topologies.RingGraph(), got {topology!r}")
        if not isinstance(codec, Codec):
            raise TypeError(f"codec is a Codec such as ringstrategy.Identity(), got {codec!r}")
        if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
            raise ValueError(f"interval is how many optimizer steps lie between mixings: at least 1, got {interval!r}")
        if unit not in get_args(Unit):
            raise ValueError(f"unit is 'step' or 'epoch', got {unit!r}")
        if not isinstance(overlap, int):
            raise TypeError(f"overlap is True, False, or after how many steps to apply what came, got {overlap!r}")
        if not isinstance(overlap, bool) and not 1 <= overlap <= interval:
            raise ValueError(
                f"overlap is after how many steps to apply what came: 1 to interval={interval}, got {overlap}"
            )
        if not isinstance(consensus, bool):
            raise TypeError(f"consensus is True or False, got {consensus!r}")
        check_local(local)
        self.topology, self.codec, self.interval, self.unit = topology, codec, interval, unit
        self.overlap, self.consensus, self.local = overlap, consensus, local

        self.exchange = Exchange()
        self._peers: Peers | None = None
        self._all: dict[str, Parameter] = {}
        self._known: dict[str, Parameter] = {}  # those that are averaged
        self._groups: list[Group] = []
        self._shown: Shown | None = None  # where the mean is
        self._digests = Digests()
        self._awaited: Mapping[str, Any] = {}  # of a checkpoint: `own_state`
        self._counts: dict[str, dict[str, int]] = {}  # of a checkpoint: a parameter's group's

    def __repr__(self) -> str:
        """The arguments."""
        names = [name for name in inspect.signature(type(self).__init__).parameters if name not in ("self", "local")]
        said = [f"{name}={getattr(self, name)}" for name in names]
        return f"{type(self).__name__}({', '.join(said)}, local={described(self.local)})"

    @property
    def late(self) -> int:
        """After how many steps (or epochs) what a mixing brought is applied; 0: at once."""
        return self.overlap * self.interval if isinstance(self.overlap, bool) else self.overlap

    # What subclasses say

    def values_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of the values that are mixed, for parameters of `dtype`."""
        return sums_dtype(dtype)

    def begin(self, group: Group) -> None:
        """Before the first mixing of a group; all ranks call it."""

    def gather(self, flat: Flat) -> None:
        """Fill `flat.values` with what is to be mixed."""
        flat.gather()

    def write(self, piece: Piece, wire: Tensor) -> Tensor:
        """The bytes that say these values; `wire` is memory for them."""
        raw = self.codec.raw(piece.values)
        if raw is not None:
            return raw
        self.encode(piece, piece.values, wire)
        return wire

    def encode(self, piece: Piece, values: Tensor, wire: Tensor) -> None:
        """By the codec, with this rank's own noise."""
        own_seed = self.codec.own_seed(piece.seed, piece.peers.rank)
        self.codec.encode(values, wire, seed=own_seed, offset=piece.begin)

    def read(self, piece: Piece, whose: int | None, wire: Tensor) -> Tensor:
        """What all see of a rank's values after these bytes; `whose` None: this rank's. Called once a wire."""
        if whose is None and self.codec.lossless:
            return piece.values
        values = piece.scratch("own" if whose is None else "theirs", piece.values.dtype)
        self.codec.decode(wire, values)
        return values

    def apply(self, group: Group) -> None:
        """Bring the corrections into the parameters."""
        for flat in group.flats:
            flat.add(flat.correction)

    def mass(self, flat: Flat) -> Tensor:
        """A copy of what the mean over ranks is of: mixing keeps it."""
        return row_of_parameters(flat)

    # The contract

    def setup(self, parameters: Mapping[str, Parameter], peers: Peers, *, sparse: frozenset[str] = frozenset()) -> None:
        """See `Algorithm.setup`."""
        assert self._peers is None, "close() first"
        self.topology.check(peers.size)
        self._peers, self._counts, self._awaited = peers, {}, {}
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
        self._all = dict(parameters)
        self._known, _ = split(parameters, self.local)
        return {name: parameter for name, parameter in parameters.items() if parameter not in known}

    def bind(self, parameters: Collection[Parameter]) -> None:
        """See `Algorithm.bind`."""
        self._group_of(parameters)

    def before_backward(
        self, loss: Tensor | None = None, *, sync: bool = True, scale: Tensor | None = None, same: str = ""
    ) -> None:
        """Gradients are each rank's own."""

    def after_backward(self) -> None:
        """Gradients are each rank's own."""

    def after_step(self, parameters: Collection[Parameter] = (), stepped: Tensor | bool = True) -> None:
        """See `Algorithm.after_step`."""
        group = self._group_of(parameters)
        if group is not None:
            group.steps += 1
            if self.unit == "step":
                self._turn(group)

    def after_epoch(self, parameters: Collection[Parameter] = ()) -> None:
        """See `Algorithm.after_epoch`."""
        group = self._group_of(parameters) if self.unit == "epoch" else None
        if group is not None:
            self._turn(group)

    def _turn(self, group: Group) -> None:
        group.turns += 1
        place = group.turns % self.interval
        if place in (0, self.late):
            self._apply(group)
        if place:
            return
        peers = self._peers
        assert peers is not None
        if peers.lifeline is not None:
            peers.lifeline.begin_exchange()
        for flat in group.flats:
            self.gather(flat)
        group.under_way = peers.submit(partial(self._mix, peers, group, group.mixings), f"at mixing {group.mixings}")
        peers.stats.steps += 1
        peers.stats.values_averaged += group.numel
        if not self.late:
            self._apply(group)

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

    @torch.no_grad()
    def _group_of(self, parameters: Collection[Parameter]) -> Group | None:
        """Of the optimizer that steps these; the first time, all ranks compare what it is made of."""
        wanted = {n: p for n, p in self._known.items() if p in parameters and _has_a_mean(p)}
        if not wanted or self._peers is None:
            return None
        for group in self._groups:
            if group.parameters.keys() == wanted.keys() and set(group.parameters.values()) == set(wanted.values()):
                return group
        for parameter in wanted.values():
            self.codec.check(parameter.dtype)
        new = Group(wanted, self.values_dtype)
        self._agree(wanted)
        counts = self._counts.get(next(iter(wanted)), {})
        known = set(self._known.values())
        for old in [group for group in self._groups if _overlap(group.parameters, wanted)]:
            if not known & set(old.parameters.values()) <= set(wanted.values()):
                shared = ", ".join(sorted(old.parameters.keys() & wanted.keys())[:3])
                raise ValueError(
                    f"two optimizers step {shared}, but with gossip the parameters of an optimizer are mixed together, "
                    "so they must be its own: give them to one of the two, or use a synchronous strategy such as 'ring'"
                )
            counts = self._end(old)  # it has changed
            self._groups.remove(old)
        for name, count in counts.items():
            setattr(new, name, count)
        self._groups.append(new)
        if not self._resume(new):
            self.begin(new)
        return new

    def _end(self, group: Group) -> dict[str, int]:
        """Apply what is due, and start again from the mean."""
        self._apply(group)
        for flat, mean in self._means([group], self.mass):
            for parameter, value in zip(flat.parameters, cut_like(mean, flat.parameters), strict=True):
                parameter.copy_(value)
        return _counts(group)

    def _agree(self, parameters: Mapping[str, Parameter]) -> None:
        assert self._peers is not None
        lines = (f"{INDENT}{name}: {tuple(p.shape)} {p.dtype}" for name, p in parameters.items())
        compare_plans(self._peers, self.plan_text(self._peers.size, lines))

    # What people look at

    def settle(self) -> None:
        """See `Algorithm.settle`."""
        for group in self._groups:
            self._wait(group)

    @torch.no_grad()
    def enter_consensus(self, others: Sequence[Tensor] = (), *, replaced: bool = False) -> bool:
        """See `Algorithm.enter_consensus`."""
        if self._peers is None or self._shown is not None:
            return False
        # no bytes of the mean may meet those of a mixing: who has fewer batches waits here until it is told so
        trains = (f"{INDENT}{n}: {'trained' if p.requires_grad else 'frozen'}" for n, p in self._known.items())
        compare_plans(self._peers, "\n".join(["the mean of all ranks", *trains]))
        self.settle()
        self._shown = Shown()
        trained: set[Tensor] = set()
        for flat, mean in self._means(self._groups, row_of_parameters if replaced else self.mass):
            trained.update(parameter for parameter in flat.parameters if parameter.requires_grad)
            pairs = zip(flat.parameters, cut_like(mean, flat.parameters), strict=True)
            self._shown.show([pair for pair in pairs if pair[0] in trained])
        untrained = [parameter for parameter in self._known.values() if parameter not in trained]
        averaged = [tensor for tensor in [*untrained, *others] if _has_a_mean(tensor)]
        where = "for the mean of what no optimizer steps"
        for tensors in by_kind(differing(averaged, self._peers, self._digests, where), lambda tensor: tensor):
            mean = row_of(tensors)
            self.exchange.average_(mean, self._peers, where)
            self._shown.show(list(zip(tensors, cut_like(mean, tensors), strict=True)))
        return True

    def leave_consensus(self) -> None:
        """See `Algorithm.leave_consensus`."""
        shown, self._shown = self._shown, None
        if shown is not None:
            shown.end()

    def as_own(self) -> AbstractContextManager[None]:
        """See `Algorithm.as_own`."""
        return nullcontext() if self._shown is None else self._shown.hidden()

    @torch.no_grad()
    def consensus_distance(self, sample: int | None = None) -> float | None:
        """See `Algorithm.consensus_distance`."""
        peers = self._peers
        if peers is None:
            return None
        total = torch.zeros(1, dtype=torch.float64, device="cpu")
        numel = sum(group.numel for group in self._groups)
        for group in self._groups:
            for flat in group.flats:
                own, mass, part = row_of(flat.parameters), self.mass(flat), 1.0
                if sample is not None and numel > sample:
                    count = max(1, sample * len(own) // numel)
                    generator = torch.Generator("cpu").manual_seed(derive_seed(group.seed, group.steps))
                    chosen = torch.randint(len(own), (count,), generator=generator, device="cpu").to(own.device)
                    own, mass, part = own[chosen], mass[chosen], len(own) / count
                self.exchange.average_(mass, peers, "for the consensus distance")
                total += part * (own - mass).double().square().sum().cpu()
        self.exchange.average_(total, peers.control, "for the consensus distance")
        return float(total)

    def _means(self, groups: Sequence[Group], of: Callable[[Flat], Tensor]) -> Iterator[tuple[Flat, Tensor]]:
        """Flats and their means over all ranks. What is under way would not change them."""
        assert self._peers is not None
        for group in groups:
            for flat in group.flats:
                mean = of(flat)
                self.exchange.average_(mean, self._peers, "for the mean of all ranks")
                yield flat, mean

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """How far each parameter's group has come."""
        counts = self._counts | {name: _counts(group) for group in self._groups for name in group.parameters}
        return {"step": max((count["steps"] for count in counts.values()), default=0), "counts": counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Algorithm.load_state_dict`."""
        self.settle()
        self._groups, self._counts = [], dict(state["counts"])

    def own_state(self) -> dict[str, Any]:
        """See `Algorithm.own_state`: by parameter, what its group keeps and the correction that waits."""
        # what no optimizer has asked for so far must not be lost
        kept: dict[str, dict[str, Tensor]] = dict(self._awaited.get("kept", {}))
        others: dict[str, dict[str, Tensor]] = dict(self._awaited.get("others", {}))
        for group in self._groups:
            for flat in group.flats:
                due = {"correction": flat.correction} if group.arrived else {}
                for kind, whole in {**flat.memory, **due}.items():
                    for name, part in flat.by_name(whole).items():
                        kept.setdefault(name, {})[kind] = part
            both = {kind: torch.stack([one.values, one.correction]) for kind, one in group.others.items()}
            others |= dict.fromkeys(group.parameters, both)
        # after an exception: copies and weights that another thread is changing fit those of no other rank
        torn = any(group.under_way is not None and any(flat.memory for flat in group.flats) for group in self._groups)
        return {"of": self.keeper, "kept": kept, "others": others, "torn": torn}

    @property
    def keeper(self) -> str:
        """Whose state it is: what another one kept is of no use."""
        return f"{type(self).__name__} over {self.topology}"

    def load_own_state(self, state: Mapping[str, Any]) -> bool:
        """See `Algorithm.load_own_state`."""
        mine = bool(state["of"] == self.keeper)
        self._awaited = state if mine else {}
        return mine

    def _resume(self, group: Group) -> bool:
        """Take what a checkpoint kept of this group; False if there is nothing."""
        kept, others = self._awaited.get("kept", {}), self._awaited.get("others", {})
        self._awaited = {
            "kept": {name: parts for name, parts in kept.items() if name not in group.parameters},
            "others": {name: parts for name, parts in others.items() if name not in group.parameters},
        }
        names = [name for flat in group.flats for name in flat.names]
        if not names or len({tuple(kept.get(name, {})) for name in names}) != 1 or names[0] not in kept:
            return False  # or it was kept by more groups than one
        first = names[0]
        for kind, both in others.get(first, {}).items():
            group.others[kind] = Vector(both[0].to(group.flats[0].values.device, copy=True))
            group.others[kind].correction.copy_(both[1])
        for flat in group.flats:
            for kind in kept[first]:
                group.arrived |= kind == "correction"
                whole = flat.correction if kind == "correction" else torch.empty_like(flat.correction)
                for name, part in flat.by_name(whole).items():
                    part.copy_(kept[name][kind])
                if kind != "correction":
                    flat.memory[kind] = whole
        return True

    def close(self) -> None:
        """Forget the parameters; what is under way is dropped. How far they came stays."""
        self._counts = self.state_dict()["counts"]
        self._peers, self._groups, self._shown, self._digests = None, [], None, Digests()
        self._all, self._known = {}, {}


def row_of_parameters(flat: Flat) -> Tensor:
    """A copy of their values, in the dtype of sums."""
    return row_of(flat.parameters)


def _has_a_mean(tensor: Tensor) -> bool:
    """Whole numbers and booleans have none: they are each rank's own."""
    return tensor.is_floating_point() or tensor.is_complex()


def _counts(group: Group) -> dict[str, int]:
    return {"steps": group.steps, "turns": group.turns, "mixings": group.mixings}


def _overlap(some: Mapping[str, Parameter], others: Mapping[str, Parameter]) -> bool:
    return bool(some.keys() & others.keys() or set(some.values()) & set(others.values()))
