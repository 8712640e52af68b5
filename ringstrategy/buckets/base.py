"""The contract of a bucket: gather gradients, exchange them, scatter the means back, keep compression errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from ringstrategy.buckets.residuals import Residuals
from ringstrategy.buckets.slot import Slot
from ringstrategy.collectives.base import Collective, Summand
from ringstrategy.transport.base import Peers, Waitable


class Bucket(ABC):
    """Parameters whose gradients are exchanged together.

    One exchange is `pack`, `launch`, `unpack`. `residuals` want to know of every backward pass, and of every step of an
    optimizer.

    Args:
        index: place in the order of launches.
        slots: the parameters' places.
        residual: the residuals, in a flat buffer of the slots' layout, if there are any.

    Attributes:
        is_small: it is not worth messages of its own: see `rider`.
    """

    is_small = False

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

    def pack(self, divisor: float, scale: Tensor | None = None) -> None:
        """Gather the complete gradients, divided by `divisor`; residuals wait for the exchange.

        A missing gradient counts as zeros. A frozen parameter keeps its old gradient.

        Args:
            divisor: how many ranks have gradients; infinity: this rank has none, whatever is there.
            scale: the loss scale that the gradients have, without dimensions and on their device; None: unscaled.
        """
        self.residuals.before_exchange(scale)
        self.gather(divisor)

    def unpack(self, used: Callable[[Slot], bool]) -> None:
        """Make the means the gradients, except where no rank `used` the parameter: there None stays None."""
        self.residuals.after_exchange(used)
        self.scatter(used)

    @abstractmethod
    def gather(self, divisor: float) -> None:
        """Copy the gradients to the buffer, divided by `divisor`: see `pack`."""

    def take_gradients(self) -> None:
        """After `gather`: make gradients views of the buffer, unless something else holds their memory."""

    def carries_flags(self, peers: Peers, collective: Collective) -> bool:
        """Whether flags on the host can ride with the exchange."""
        del peers, collective
        return False

    def rider(self, following: Bucket, peers: Peers, collective: Collective, seed: int) -> Summand | None:
        """The gathered gradients, if the bucket is small and can use the messages of the next one."""
        del following, peers, collective, seed
        return None

    def warm_up(self, peers: Peers, collective: Collective) -> None:
        """Before any gradient: do once what the first exchange would wait for, such as connecting and compiling."""

    @abstractmethod
    def launch(
        self,
        peers: Peers,
        collective: Collective,
        agreed: Waitable,
        seed: int,
        where: str,
        flags: Tensor | None = None,
        riders: Sequence[Summand] = (),
    ) -> Waitable:
        """Start the exchange of the gathered gradients, once the ranks have `agreed`.

        `flags`, only of a bucket that `carries_flags`, and `riders`, the summands of buckets that ride with this one:
        see `Collective.sum_`.
        """

    @abstractmethod
    def scatter(self, used: Callable[[Slot], bool]) -> None:
        """Copy the means to the gradients: see `unpack`."""

    def state(self) -> dict[str, Tensor]:
        """State for a checkpoint besides residuals, by parameter name; the same on all ranks."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` gave, for the parameters of this bucket that are in it."""
