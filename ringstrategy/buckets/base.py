"""What a bucket does: gather gradients, send them, and scatter the means back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from torch import Tensor

from ringstrategy.buckets.residuals import Residuals
from ringstrategy.buckets.slot import Slot
from ringstrategy.collectives.base import Collective
from ringstrategy.transport.base import Peers, Waitable


class Bucket(ABC):
    """Some parameters whose gradients travel together.

    Args:
        index: place in the order of launches.
        slots: the parameters' places.
        residual: the flat buffer that the slots' residuals are views of, if there is one.
    """

    def __init__(self, index: int, slots: list[Slot], residual: Tensor | None = None) -> None:
        self.index, self.slots = index, slots
        self.residuals = Residuals(slots, residual)

    @property
    @abstractmethod
    def numel(self) -> int:
        """Elements that the last exchange averaged."""

    @abstractmethod
    def describe(self) -> str:
        """Everything that must be equal on all ranks, one line a fact."""

    @abstractmethod
    def pack(self, size: int) -> None:
        """Gather the gradients, scaled by 1/size. A missing one counts as zeros, a frozen one stays its own."""

    def take_gradients(self) -> None:
        """After `pack`: let gradients live in the buffer, where nobody else holds their memory."""

    @abstractmethod
    def launch(self, peers: Peers, collective: Collective, agreed: Waitable, seed: int, where: str) -> Waitable:
        """Start the exchange of what `pack` gathered, once the ranks have `agreed`."""

    @abstractmethod
    def unpack(self, used: Callable[[Slot], bool]) -> None:
        """Make the means the gradients, except where no rank `used` the parameter: there None stays None."""

    def state(self) -> dict[str, Tensor]:
        """What must survive a checkpoint beside residuals, by parameter name; the same on all ranks."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave, for those of this bucket's parameters that are in it."""
