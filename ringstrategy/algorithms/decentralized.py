"""What all decentralized averaging of parameters shares: whose turn it is to mix, and the mean that people look at."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from ringstrategy.algorithms.base import Algorithm
from ringstrategy.algorithms.local import Local, check_local, split
from ringstrategy.codecs.identity import Identity
from ringstrategy.collectives.agree import compare_plans
from ringstrategy.collectives.base import mean_
from ringstrategy.collectives.buckets import sums_dtype
from ringstrategy.collectives.peers import Peers, Waitable
from ringstrategy.collectives.ring import Ring
from ringstrategy.topologies.base import Topology

Item = TypeVar("Item")


class Flat:
    """Parameters of one dtype on one device, and memory for all their values in a row."""

    def __init__(self, named: Mapping[str, Parameter]) -> None:
        self.names = list(named)
        self.parameters: list[Tensor] = list(named.values())
        self.numel = sum(parameter.numel() for parameter in self.parameters)
        first = self.parameters[0]
        self.values = torch.empty(self.numel, dtype=first.dtype, device=first.device)
        self.correction = torch.zeros(self.numel, dtype=sums_dtype(self.values.dtype), device=self.values.device)

    @property
    def changes(self) -> dict[str, Tensor]:
        """The correction of each parameter."""
        return dict(zip(self.names, _cut(self.correction, self.parameters), strict=True))

    @torch.no_grad()
    def gather(self) -> None:
        """The parameters' values, now."""
        torch._foreach_copy_(_cut(self.values, self.parameters), self.parameters)

    @torch.no_grad()
    def correct(self) -> None:
        """Add the correction to the parameters."""
        for parameter, change in zip(self.parameters, self.changes.values(), strict=True):
            parameter.add_(change)


class Group:
    """The parameters that one optimizer steps, mixed together: `flats` by dtype and device."""

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self.parameters = dict(parameters)
        self.flats = [Flat(dict(those)) for those in _by_kind(parameters.items(), lambda named: named[1])]
        self.steps = 0  # of the optimizer
        self.mixings = 0
        self.under_way: Waitable | None = None
        self.arrived = False  # are there corrections that wait for the end of their interval?

    @property
    def numel(self) -> int:
        """Values in all."""
        return sum(flat.numel for flat in self.flats)


class Decentralized(Algorithm):
    """Every rank steps with its own gradients; every `interval` steps of an optimizer its parameters are mixed.

    Parameters of one optimizer are mixed together, after its own steps, also after one that a loss scaler skipped.
    Validation, test, checkpoints and what training returns see the exact mean over ranks, floating-point buffers such
    as batch-norm statistics included; then each rank's own values come back, and training goes on as if nobody had
    looked. Integer buffers are each rank's own, in a checkpoint rank 0's; optimizer state is never mixed. A checkpoint
    has a file of each rank's own parameters, optimizers and corrections beside it, from which the same number of ranks
    goes on bit for bit; another number starts from the mean.

    Args:
        topology: who mixes with whom.
        interval: optimizer steps from one mixing to the next. More: fewer bytes, ranks drift further apart.
        overlap: send while the next `interval` steps are computed, and apply what came as a correction at their end:
            the wire then costs no time while it is faster than they are. False: wait for it at once.
        consensus: False: each rank validates, and ends with, its own parameters. Checkpoints hold the mean even so.
        local: see `Synchronous`.
    """

    decentralized = True

    def __init__(self, topology: Topology, interval: int, overlap: bool, consensus: bool, local: Local | None) -> None:
        if not isinstance(topology, Topology):
            raise TypeError(f"topology is a Topology such as ringstrategy.topologies.RingGraph(), got {topology!r}")
        if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
            raise ValueError(f"interval is how many optimizer steps lie between mixings: at least 1, got {interval!r}")
        for name, flag in (("overlap", overlap), ("consensus", consensus)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name} is True or False, got {flag!r}")
        check_local(local)
        self.topology, self.interval, self.overlap = topology, interval, overlap
        self.consensus, self.local = consensus, local

        self._peers: Peers | None = None
        self._known: dict[str, Parameter] = {}
        self._groups: list[Group] = []
        self._kept: list[tuple[Tensor, Tensor]] | None = None  # tensors that hold the mean, and their own values
        self._awaited: dict[str, Tensor] = {}  # corrections of a checkpoint, by parameter
        self._counts: dict[str, tuple[int, int]] = {}  # by parameter, of a checkpoint: its group's steps and mixings

    # What a subclass does

    @abstractmethod
    def start(self, group: Group) -> Waitable:
        """Begin to mix what the group's parameters are now; its end leaves in each `flat.correction` what to add."""

    @abstractmethod
    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise a TypeError with the cure if parameters of `dtype` cannot be mixed."""

    # The contract

    def setup(self, parameters: Mapping[str, Parameter], peers: Peers, *, sparse: frozenset[str] = frozenset()) -> None:
        """See `Algorithm.setup`."""
        assert self._peers is None, "close() first"
        self.topology.check(peers.size)
        self._peers, self._counts, self._awaited = peers, {}, {}
        self.adopt(parameters, sparse=sparse)
        self._agree(self._known)

    def adopt(self, parameters: Mapping[str, Parameter], *, sparse: frozenset[str] = frozenset()) -> None:
        """See `Algorithm.adopt`."""
        shared, _ = split(parameters, self.local)
        for parameter in shared.values():
            self.check_dtype(parameter.dtype)
        self._known |= shared

    def before_backward(self, loss: Tensor | None = None, *, sync: bool = True, scale: Tensor | None = None) -> None:
        """Gradients are each rank's own."""

    def after_backward(self) -> None:
        """Gradients are each rank's own."""

    def after_step(self, parameters: Collection[Parameter] = (), skipped: Tensor | None = None) -> None:
        """See `Algorithm.after_step`."""
        group = self._group_of(parameters)
        if group is None:
            return
        group.steps += 1
        if group.steps % self.interval:
            return
        self._apply(group)
        assert self._peers is not None
        group.under_way = self.start(group)
        self._peers.stats.steps += 1
        self._peers.stats.values_averaged += group.numel
        if not self.overlap:
            self._apply(group)

    def _wait(self, group: Group) -> None:
        if group.under_way is not None:
            assert self._peers is not None
            self._peers.finish([group.under_way])
            group.under_way, group.arrived = None, True

    def _apply(self, group: Group) -> None:
        self._wait(group)
        if group.arrived:
            group.arrived = False
            group.mixings += 1
            for flat in group.flats:
                flat.correct()

    def _group_of(self, parameters: Collection[Parameter]) -> Group | None:
        """Of the optimizer that steps these; the first time, all ranks compare what it is made of."""
        wanted = {name: parameter for name, parameter in self._known.items() if parameter in parameters}
        if not wanted or self._peers is None:
            return None
        for group in self._groups:
            if group.parameters.keys() == wanted.keys():
                return group
        new = Group(wanted)
        self._agree(wanted)
        for old in [group for group in self._groups if group.parameters.keys() <= wanted.keys()]:  # it has grown
            self._apply(old)
            new.steps, new.mixings = old.steps, old.mixings
            self._groups.remove(old)
        new.steps, new.mixings = self._counts.get(next(iter(wanted)), (new.steps, new.mixings))
        self._resume(new)
        self._groups.append(new)
        return new

    def _agree(self, parameters: Mapping[str, Parameter]) -> None:
        assert self._peers is not None
        lines = (f"{name} {tuple(p.shape)} {p.dtype}" for name, p in parameters.items())
        compare_plans(self._peers, self.plan_text(self._peers.size, lines))

    # What people look at

    def settle(self) -> None:
        """See `Algorithm.settle`."""
        for group in self._groups:
            self._wait(group)

    @torch.no_grad()
    def enter_consensus(self, others: Sequence[Tensor] = ()) -> bool:
        """See `Algorithm.enter_consensus`."""
        if self._peers is None or self._kept is not None:
            return False
        self.settle()
        self._kept = []
        for tensors, mean in self._means(others):
            self._kept += [(tensor, tensor.clone()) for tensor in tensors]  # at once: what follows may fail
            for tensor, value in zip(tensors, mean, strict=True):
                tensor.copy_(value)
        return True

    @torch.no_grad()
    def leave_consensus(self) -> None:
        """See `Algorithm.leave_consensus`."""
        kept, self._kept = self._kept, None
        for tensor, own in kept or ():
            tensor.copy_(own)

    def own(self, tensor: Tensor) -> Tensor:
        """See `Algorithm.own`."""
        return next((value for shown, value in self._kept or () if shown is tensor), tensor)

    @torch.no_grad()
    def consensus_distance(self) -> float:
        """Mean over ranks of the squared distance of all mixed parameters from their mean; every rank calls it."""
        assert self._peers is not None
        distances = [
            (tensor.double() - value).square().sum()
            for tensors, mean in self._means()
            for tensor, value in zip(tensors, mean, strict=True)
        ]
        if not distances:
            return 0.0
        total = torch.stack([distance.to(distances[0].device) for distance in distances]).sum(0, keepdim=True)
        self._average_(total, "for the consensus distance")
        return float(total)

    def _means(self, others: Sequence[Tensor] = ()) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Tensors and their means over all ranks, by dtype. What is under way would not change them."""
        parameters = [parameter for group in self._groups for parameter in group.parameters.values()]
        for tensors in _by_kind([*parameters, *others], lambda tensor: tensor):
            flat = torch.cat([tensor.reshape(-1).to(sums_dtype(tensor.dtype)) for tensor in tensors])
            self._average_(flat, "for the mean of all ranks")
            yield tensors, _cut(flat, tensors)

    def _average_(self, flat: Tensor, where: str) -> None:
        peers = self._peers
        assert peers is not None
        flat /= peers.size
        peers.finish([peers.submit(lambda: mean_(flat, peers, Ring(), Identity()), where)])

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """How far each parameter's group has come."""
        counts = dict(self._counts)
        counts |= {name: (group.steps, group.mixings) for group in self._groups for name in group.parameters}
        return {
            "step": max((steps for steps, _ in counts.values()), default=0),
            "steps": {name: steps for name, (steps, _) in counts.items()},
            "mixings": {name: mixings for name, (_, mixings) in counts.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Algorithm.load_state_dict`."""
        self._counts = {name: (steps, state["mixings"][name]) for name, steps in state["steps"].items()}
        for group in self._groups:
            group.steps, group.mixings = self._counts.get(next(iter(group.parameters)), (group.steps, group.mixings))

    def own_state(self) -> dict[str, Tensor]:
        """See `Algorithm.own_state`: corrections by parameter."""
        arrived = [flat for group in self._groups if group.arrived for flat in group.flats]
        return {name: change for flat in arrived for name, change in flat.changes.items()}

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """See `Algorithm.load_own_state`."""
        self.settle()
        self._awaited = dict(state)
        for group in self._groups:
            group.arrived = False  # of steps that are taken back
            self._resume(group)

    def _resume(self, group: Group) -> None:
        if self._awaited and all(name in self._awaited for name in group.parameters):
            for flat in group.flats:
                for name, change in flat.changes.items():
                    change.copy_(self._awaited.pop(name))
            group.arrived = True

    def close(self) -> None:
        """Forget the parameters; what is under way is dropped. How far they came stays."""
        self.load_state_dict(self.state_dict())
        self._peers, self._known, self._groups, self._kept = None, {}, [], None


def _by_kind(items: Iterable[Item], tensor: Callable[[Item], Tensor]) -> Iterable[list[Item]]:
    """Those whose tensors have one dtype and device, together and in order."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Item]] = {}
    for item in items:
        kinds.setdefault((tensor(item).dtype, tensor(item).device), []).append(item)
    return kinds.values()


def _cut(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """`flat` as tensors of these shapes, one after the other."""
    runs = flat.split([tensor.numel() for tensor in like])
    return [run.view(tensor.shape) for run, tensor in zip(runs, like, strict=True)]
