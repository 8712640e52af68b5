"""The contract of an algorithm: what is averaged, and when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ringstrategy._version import __version__
from ringstrategy.codecs.base import WIRE_FORMAT
from ringstrategy.transport.base import Peers


class Algorithm(ABC):
    """Hyperparameters in `__init__`, runtime in `setup`; picklable and copyable before `setup`.

    Attributes:
        decentralized: do ranks have parameters of their own? Then people look at their mean, between `enter_consensus`
            and `leave_consensus`.
        consensus: is it to be entered for validation, and for what training returns?

    Order of calls in one step: `before_backward`, backward, `after_backward` (the first three perhaps several times),
    `before_step`, the optimizer's step, `after_step`. With one rank only `close` is ever called.
    """

    decentralized: bool = False
    consensus: bool = False

    def plan_text(self, size: int, lines: Iterable[str]) -> str:
        """What ranks compare: the package, the arguments, and `lines` of whatever else must be the same."""
        return "\n".join([f"ringstrategy {__version__}, wire format {WIRE_FORMAT}, {size} ranks", repr(self), *lines])

    @abstractmethod
    def setup(self, parameters: Mapping[str, Parameter], peers: Peers, *, sparse: frozenset[str] = frozenset()) -> None:
        """Plan for these parameters and attach to them. `sparse` names those with sparse gradients.

        Raises PlanMismatchError on every rank if the ranks differ in anything that matters.
        """

    def outcome(self) -> Any:
        """What the process that started the ranks is to know afterwards. It can be pickled."""
        return None

    def take_outcome(self, outcome: Any) -> None:
        """In that process: what rank 0 knew."""

    def check(self, *, scaled_loss: bool, clips_by_norm: bool) -> None:
        """Raise a ValueError with the cure if this cannot be right with a loss scaler, or with clipping by norm.

        Called after `setup`, when it is known which parameters are local.
        """

    def bind(self, parameters: Collection[Parameter]) -> None:
        """There is an optimizer of these; after `setup`, in the same order on all ranks, who may wait for each other.

        An optimizer that is not announced is met at its first step.
        """

    @abstractmethod
    def adopt(self, parameters: Mapping[str, Parameter], *, sparse: frozenset[str] = frozenset()) -> list[Parameter]:
        """Take in parameters that the model has got since `setup`, and leave out those that it has lost.

        `parameters` are all that it has now. Returns the new ones, which do not have the same values on all ranks yet.
        If there was any change, all ranks compare it: PlanMismatchError on every rank unless all have seen the same
        one at the same time.
        """

    def is_local(self, name: str) -> bool:
        """Is this parameter never averaged? After `setup`, which knows it."""
        return False

    def compare(self, text: str) -> None:
        """Lines "name: what it is" of what else must be the same where replicas are equal; all ranks call it.

        After `setup`. PlanMismatchError on every rank unless it is; nothing if ranks have parameters of their own.
        """

    @abstractmethod
    def before_backward(
        self, loss: Tensor | None = None, *, sync: bool = True, scale: Tensor | None = None, same: str = ""
    ) -> None:
        """A backward pass from `loss` begins.

        Args:
            loss: scaled, if there is a loss scaler.
            sync: False: its gradients only accumulate on this rank.
            scale: the loss scale, without dimensions and on the device; None without a loss scaler.
            same: lines "name: what it is" of what must be the same on all ranks for replicas to stay equal.
        """

    @abstractmethod
    def after_backward(self) -> None:
        """Gradients are final when this returns."""

    def before_step(self, parameters: Collection[Parameter]) -> None:
        """An optimizer is about to step these, with the gradients that they have. RuntimeError if that cannot be right.

        No collective, for it is not called on each rank alike.
        """

    @abstractmethod
    def after_step(self, parameters: Collection[Parameter] = (), stepped: Tensor | bool = True) -> None:
        """Parameters are final when this returns. Gradients are still as the optimizer saw them: unscaled, clipped.

        Args:
            parameters: those of the optimizer.
            stepped: False if the loss scaler skipped the step; a boolean on the device if only that one knows.
        """

    def after_epoch(self, parameters: Collection[Parameter] = ()) -> None:
        """An epoch has ended, and the next is to begin; once for each optimizer, with its parameters."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What must survive a checkpoint and is the same on all ranks: tensors and primitives only. After `close` too.

        Tensors may be views of the memory in use.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave; after `setup`."""

    def residuals(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's residuals by parameter name: in parameter space, of the unscaled loss. After `close` too.

        Their sum over all ranks is what the gradients that were stepped so far lack. Tensors may be views of the memory
        in use: copy each before taking the next.
        """
        return iter(())

    def load_residuals(self, residuals: Mapping[str, Tensor]) -> list[str]:
        """Take these as this rank's; after `setup`. Returns the names of those for which there is no place."""
        return list(residuals)

    def settle(self) -> None:
        """Wait for what is under way. What it brought is applied when it is due, and in `own_state` until then."""

    def own_state(self) -> dict[str, Any]:
        """What this rank alone has beside its parameters: tensors and primitives only; after `settle`.

        Tensors may be views of the memory in use.
        """
        return {}

    def load_own_state(self, state: Mapping[str, Any]) -> bool:
        """Take back what `own_state` gave; after `setup`. False: another algorithm gave it, and it is of no use."""
        return True

    def enter_consensus(self, others: Sequence[Tensor] = (), *, replaced: bool = False) -> bool:
        """Put the exact mean of all ranks into the parameters and into `others`, until `leave_consensus`.

        All ranks call it. What no optimizer steps stays as it is, bit for bit, if it is the same on all of them. False
        if nothing was to be done, so that there is nothing to leave.

        Args:
            others: what is averaged too, such as buffers.
            replaced: the parameters hold other values than those that are trained, such as their moving average.
        """
        return False

    def leave_consensus(self) -> None:
        """Give each rank its own values back; no collective. What was changed meanwhile stays as it is."""

    def as_own(self) -> AbstractContextManager[None]:
        """Within, the parameters and the others have this rank's own values, consensus or not; no collective."""
        return nullcontext()

    def consensus_distance(self, sample: int | None = None) -> float | None:
        """Mean over ranks of the squared distance of all parameters from their mean; every rank calls it.

        Args:
            sample: look at no more than so many values, drawn anew each time, and scale up; None: at all.

        None where all ranks hold the same.
        """
        return None

    def news(self) -> list[str]:
        """What belongs into the log, each line once; as many on all ranks."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Detach from the parameters. Idempotent, never a collective."""
