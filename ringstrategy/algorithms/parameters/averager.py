"""What groups of parameters exchange, and what becomes of it: the part in which periodic algorithms differ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Parameter

from ringstrategy.algorithms.parameters.consensus import Consensus
from ringstrategy.algorithms.parameters.exchange import Exchange
from ringstrategy.algorithms.parameters.group import Flat, Group
from ringstrategy.algorithms.parameters.kept import Kept
from ringstrategy.codecs.base import Codec, check_carried
from ringstrategy.transport.agree import INDENT
from ringstrategy.transport.base import Peers


@dataclass(frozen=True)
class Runtime:
    """What an algorithm has between `setup` and `close`.

    Attributes:
        peers: all ranks.
        exchange: what it does with them.
        view: what all ranks see.
        kept: state from a checkpoint.
    """

    peers: Peers
    exchange: Exchange
    view: Consensus
    kept: Kept


class Averager(ABC):
    """Hyperparameters, and functions of groups: see `Periodic`, which calls them."""

    @property
    @abstractmethod
    def keeper(self) -> str:
        """Names what can use a group's state: state of another one is of no use."""

    def line(self, name: str, parameter: Parameter) -> str:
        """What ranks compare of a parameter."""
        return f"{INDENT}{name}: {tuple(parameter.shape)} {parameter.dtype}"

    def parts(self, parameters: Mapping[str, Parameter]) -> list[dict[str, Parameter]]:
        """The parameters of one optimizer as groups that are exchanged at different times; the same on all ranks."""
        return [dict(parameters)]

    @abstractmethod
    def group(self, parameters: Mapping[str, Parameter], runtime: Runtime) -> Group:
        """A new group of these, in the same order on all ranks. The kernels for them are ready when this returns."""

    def begin(self, group: Group, runtime: Runtime) -> None:
        """Before the first exchange of a group that no checkpoint knows; all ranks call it."""

    @abstractmethod
    def gather(self, group: Group, runtime: Runtime, *, first: bool) -> None:
        """Copy what is to be exchanged; `first`: of all groups."""

    @abstractmethod
    def meet(self, group: Group, runtime: Runtime, number: int) -> None:
        """Exchange it, in the communication thread; `number`: of this group's exchange, from 0."""

    @abstractmethod
    def apply(self, group: Group, runtime: Runtime) -> None:
        """Change the parameters by what came of the exchange."""

    @abstractmethod
    def rehearse(self, group: Group, runtime: Runtime) -> None:
        """Exchange zeros with all ranks to which this group will ever send, and keep everything as it is."""

    @abstractmethod
    def seen(self, group: Group, runtime: Runtime, *, replaced: bool = False) -> Iterable[tuple[Flat, Tensor]]:
        """For each flat the values that all ranks see at validation, the same on all of them; all ranks call it.

        Args:
            group: with nothing under way.
            runtime: see there.
            replaced: see `Algorithm.enter_consensus`.
        """

    def left(self, group: Group, runtime: Runtime) -> Iterable[tuple[Flat, Tensor]]:
        """For each flat the values that stay when its optimizer steps other parameters; all ranks call it."""
        return self.seen(group, runtime)

    def mass(self, flat: Flat) -> Tensor:
        """A copy of the values whose mean over ranks is what ranks are some distance from."""
        return flat.row()


def warm_up_codec(codec: Codec, parameters: Mapping[str, Parameter]) -> None:
    """Raise if it cannot carry them, and compile what it needs for them."""
    for name, parameter in parameters.items():
        check_carried(codec, name, parameter.dtype)
        codec.warm_up(parameter.device)
