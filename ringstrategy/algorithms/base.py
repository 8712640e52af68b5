"""The contract of an algorithm: hooks that a `Session` calls in each step. All but a few do nothing by default."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ringstrategy._version import __version__
from ringstrategy.codecs.base import WIRE_FORMAT
from ringstrategy.transport.base import Peers


class Algorithm(ABC):  # noqa: PLR0904
    """What is averaged between ranks, and when: the gradients of each step, or parameters now and then.

    Hyperparameters go to `__init__`, the runtime comes with `setup`. Before `setup` an algorithm can be pickled and
    copied. With one rank there is no `setup`, and nothing is averaged: only `state_dict`, `own_state`, `settle`,
    `news` and `close` are called.

    Order of calls in one step: `start`, `before_backward`, the backward, `after_backward` (these three perhaps several
    times), `before_step`, the optimizer's step, `after_step`.

    Attributes:
        decentralized: each rank steps its own gradients, so ranks have different parameters between two steps. Else all
            step the same mean gradients.
        replicates: all ranks hold something with the same bits: their parameters, or what `shared_values` gives.
        consensus: between two steps ranks have different parameters, but validation sees the same on all of them, and
            training returns it.
        tagged: all messages between the ranks carry tags, see `Collective.tagged`.
        within: averages the gradients of each step among the ranks of a host, whose parameters then stay equal; set up
            with these ranks alone. None: each rank steps its own gradients.
        uneven: what happens if ranks have different numbers of batches. "error": all ranks stop with an error that
            names ranks and numbers. "join": ranks that run out go on with their last batch, which counts nothing, until
            no rank has more; ranks wait for each other before each batch.
        regroups: after the loss of a rank the others have all that they need to go on.
    """

    decentralized: bool = False
    replicates: bool = True
    consensus: bool = False
    tagged: bool = True
    within: Algorithm | None = None
    uneven: str = "error"
    regroups: bool = True

    def plan_text(self, size: int, lines: Iterable[str]) -> str:
        """The text that ranks compare: version, arguments, and `lines` about whatever else must be equal."""
        return "\n".join([f"ringstrategy {__version__}, wire format {WIRE_FORMAT}, {size} ranks", repr(self), *lines])

    # The parameters

    @abstractmethod
    def setup(self, parameters: Mapping[str, Parameter], peers: Peers, *, sparse: frozenset[str] = frozenset()) -> None:
        """Plan for these parameters and attach to them.

        Args:
            parameters: by name.
            peers: the connections to the other ranks.
            sparse: names of the parameters whose gradients are sparse.

        Raises:
            PlanMismatchError: on every rank, if the ranks differ in anything that matters.
        """

    def check(self, *, scaled_loss: bool, clips_by_norm: bool) -> None:
        """Raise a ValueError with the cure if this cannot be right with a loss scaler, or with clipping by norm.

        Called after `setup`, when it is known which parameters are local.
        """

    def is_local(self, name: str) -> bool:
        """Whether each rank steps its own gradient of this parameter; known after `setup`."""
        return self.decentralized

    @abstractmethod
    def adopt(self, parameters: Mapping[str, Parameter], *, sparse: frozenset[str] = frozenset()) -> list[Parameter]:
        """Add the parameters that joined the model since `setup`, and drop those that left it.

        Args:
            parameters: all that the model has now.
            sparse: as for `setup`.

        Returns:
            The new parameters. They do not have the same values on all ranks yet.

        Raises:
            PlanMismatchError: on every rank, unless all ranks saw the same change at the same time.
        """

    def attend(
        self,
        buffers: Callable[[], Sequence[Tensor]],
        copied: Callable[[], Sequence[Tensor]] = tuple,
    ) -> None:
        """Where the module's buffers are found, until `close`; before `bind`.

        Args:
            buffers: those that have a mean.
            copied: the other buffers, of which rank 0's values count.
        """

    def bind(self, parameters: Collection[Parameter], optimizer: Optimizer | None = None) -> None:
        """Announce that an optimizer steps these; after `setup`, in the same order on all ranks, which may wait.

        An optimizer that is not announced is bound at its first step.

        Args:
            parameters: of the optimizer.
            optimizer: None: none of torch's.
        """

    def compare(self, text: str) -> None:
        """Compare between ranks what else must be the same where replicas are equal; all ranks call it after `setup`.

        Args:
            text: lines "name: what it is".

        Raises:
            PlanMismatchError: on every rank, unless the text is the same on all.
        """

    # A step

    def start(self) -> None:
        """A batch begins; all ranks call it. Before the first step, what ranks share is what they have now."""

    def before_backward(
        self,
        loss: Tensor | None = None,
        *,
        sync: bool = True,
        scale: Tensor | None = None,
        same: str = "",
        divisor: float | None = None,
    ) -> None:
        """A backward pass from `loss` begins.

        Args:
            loss: scaled, if there is a loss scaler.
            sync: False: its gradients only accumulate on this rank.
            scale: the loss scale, without dimensions and on the device; None without a loss scaler.
            same: lines "name: what it is" of what must be the same on all ranks for replicas to stay equal.
            divisor: of this rank's gradients. None: the number of ranks. Infinity: they count nothing.
        """

    def after_backward(self) -> None:
        """Gradients are final when this returns."""

    def before_step(self, parameters: Collection[Parameter]) -> None:
        """An optimizer is about to step these, with the gradients that they have. RuntimeError if that cannot be right.

        No collective, because ranks need not call it alike.
        """

    @abstractmethod
    def after_step(self, parameters: Collection[Parameter] = (), stepped: Tensor | bool = True) -> None:
        """Parameters are final when this returns. Gradients are still as the optimizer saw them: unscaled, clipped.

        Args:
            parameters: those of the optimizer.
            stepped: False if the loss scaler skipped the step; a boolean tensor if only the device knows.
        """

    def after_epoch(self, parameters: Collection[Parameter] = ()) -> None:
        """An epoch has ended, and the next is to begin; once for each optimizer, with its parameters."""

    def settle(self) -> None:
        """Wait for communication in flight. Its correction is applied later, on schedule."""

    def finish(self) -> None:
        """Training has ended, as planned, after as many batches on all ranks; all of them call it."""

    # What all ranks see, where they have parameters of their own

    def enter_consensus(
        self, others: Sequence[Tensor] = (), copied: Sequence[Tensor] = (), *, replaced: bool = False
    ) -> bool:
        """Put the exact mean of all ranks into the parameters and into `others`, until `leave_consensus`.

        All ranks call it. Parameters show `shared_values` instead, if the algorithm `replicates`. What no optimizer
        steps stays as it is, bit for bit, if it is the same on all of them. False if nothing was to be done, so that
        there is nothing to leave.

        Args:
            others: what is averaged too, such as batch-norm statistics.
            copied: what shows rank 0's values, such as other buffers.
            replaced: the parameters hold other values than those that are trained, such as their moving average.
        """
        return False

    def leave_consensus(self) -> None:
        """Give each rank its own values back; no collective. A tensor that was changed meanwhile keeps the change."""

    def as_own(self) -> AbstractContextManager[None]:
        """Within, the parameters and the others have this rank's own values, consensus or not; no collective."""
        return nullcontext()

    def consensus_distance(self, sample: int | None = None) -> float | None:
        """Mean over ranks of the squared distance of all parameters from their mean; every rank calls it.

        Args:
            sample: estimate it from no more than so many values, drawn anew each time; None: from all.

        Returns:
            The distance, or None where there is one rank, or replicas are equal.
        """
        return None

    def shared_values(self) -> dict[str, Tensor]:
        """What all ranks hold with the same bits beside parameters of their own, by parameter name."""
        return {}

    # State

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint that is the same on all ranks: tensors and primitives only. Works after `close` too.

        Tensors may be views of the memory in use.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave; after `setup`."""

    def residuals(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's residuals by parameter name: in parameter space, of the unscaled loss. After `close` too.

        Their sum over all ranks is what the gradients that were stepped so far lack. Tensors may be views of the memory
        in use: copy each before taking the next.
        """
        yield from ()

    def load_residuals(self, residuals: Mapping[str, Tensor]) -> list[str]:
        """Replace this rank's residuals; after `setup`. Returns the names of residuals for which there is no place."""
        return list(residuals)

    def own_state(self) -> dict[str, Any]:
        """State of this rank alone, besides its parameters: tensors and primitives only; after `settle`.

        Empty if ranks have nothing of their own. Else two keys are common to all: `of` names whose state it is, and
        `torn` is true if an exception came within an exchange, so that the state fits no other rank's. Tensors may be
        views of the memory in use.
        """
        return {}

    def load_own_state(self, state: Mapping[str, Any]) -> bool:
        """Restore what `own_state` gave; after `setup`. False if another algorithm gave it, so that it is of no use."""
        return True

    def forget(self) -> None:
        """The parameters were replaced: drop what is under way and what is kept of the old ones, but for counts.

        Between steps; all ranks call it.
        """

    # Logs, and the end

    def news(self) -> list[str]:
        """Lines for the log that are new since the last call; as many on all ranks."""
        return []

    def metrics(self) -> dict[str, float]:
        """What the last exchange told, by name, for logs; of this rank, no collective. Empty if nothing is new."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Detach from the parameters. Idempotent, never a collective."""


def check_counts_steps(algorithm: object, whose: str) -> None:
    """ValueError if its interval counts epochs; `whose` loop it is that does not tell when one ends."""
    if getattr(algorithm, "unit", "step") == "epoch":
        raise ValueError(
            f"unit='epoch' needs to know when an epoch ends, and {whose} is yours: count the interval in steps, "
            "interval=<steps of an epoch>, unit='step'"
        )


def check_uneven(uneven: str) -> None:
    """ValueError unless it is one of the two choices: see `Algorithm`."""
    if uneven not in ("error", "join"):
        raise ValueError(
            "uneven is 'error' (ranks with different numbers of batches are an error) or 'join' (ranks that run out "
            f"wait for the others, without data), got {uneven!r}"
        )
