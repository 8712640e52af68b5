"""An operation with its arguments, before it is submitted, and the forms in which a user may submit it."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ringstrategy.integrations.encoded import memory_of
from ringstrategy.integrations.horovod.members import Members
from ringstrategy.integrations.horovod.named import Handle, Result
from ringstrategy.integrations.horovod.process_sets import ProcessSet

Arguments = ParamSpec("Arguments")
Other = TypeVar("Other")

# how many operations of some members had no name
_unnamed: WeakKeyDictionary[Members, itertools.count[int]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Call(Generic[Result]):
    """An operation on tensors, which may be submitted once; `Result` is what its user gets.

    Args:
        kind: of operation.
        tensors: of this rank.
        name: which operation of the other ranks it belongs to. None: those of one kind are counted.
        process_set: the ranks.
        same: what all ranks must say alike, in one line.
        own: what this rank says for itself; for JSON.
        run: called in the order of all ranks, with what every rank said for itself, by rank. Returns new tensors, or
            views of such.
        result: what the user gets of these.
        adjoint: from the gradients of `run`'s tensors, and from its argument, to those of `tensors`. None: no gradients
            flow back.
    """

    kind: str
    tensors: Sequence[Tensor]
    name: str | None
    process_set: ProcessSet
    same: str = ""
    own: Any = None
    run: Callable[[list[Any]], list[Tensor]] = lambda said: []
    result: Callable[[Sequence[Tensor]], Any] = list
    adjoint: Callable[[Sequence[Tensor], list[Any]], Sequence[Tensor | None]] | None = None

    def begin(self) -> Handle[Result]:
        """The results are new tensors."""
        return self.submit(lambda said: cast(Result, self.result(self.new(said))))

    def begin_(self) -> Handle[Result]:
        """The results go into `tensors`."""

        def into(said: list[Any]) -> Result:
            for tensor, output in zip(self.tensors, self.run(said), strict=True):
                memory_of(tensor).copy_(output)
            return cast(Result, self.result(self.tensors))

        return self.submit(into)

    def wait(self) -> Result:
        """The results are new tensors, through which gradients flow back."""
        if self.adjoint is None and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors):
            operator = self.same.partition(",")[0]
            raise ValueError(f"{operator} is not differentiable: pass tensor.detach(), or use Average or Sum")
        outputs: tuple[Tensor, ...] = _Flow.apply(self, *self.tensors)  # type: ignore[no-untyped-call]
        return cast(Result, self.result(outputs))

    def submit(self, run: Callable[[list[Any]], Other]) -> Handle[Other]:
        """Begin, with something else to run. On GPUs it begins after what is queued, and ends when it is done."""
        members = self.process_set.members
        for tensor in self.tensors:
            members.check_device(tensor.device)
        devices = {tensor.device for tensor in self.tensors if tensor.device.type == "cuda"}
        queued = [torch.cuda.current_stream(device).record_event() for device in devices]

        @torch.no_grad()
        def after(said: list[Any]) -> Other:
            for event in queued:
                event.synchronize()
            result = run(said)
            for device in devices:
                torch.cuda.current_stream(device).synchronize()
            return result

        counter = _unnamed.setdefault(members, itertools.count())
        name = f"{self.kind}.noname.{next(counter)}" if self.name is None else self.name
        return members.operations.submit(name, f"{self.kind}: {self.same}", self.own, after)

    def new(self, said: list[Any]) -> list[Tensor]:
        """Run. The results share no memory: what autograd takes for views of one tensor cannot be changed in place."""
        return [output if output._base is None else output.clone() for output in self.run(said)]


class _Flow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call[Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        def noted(said: list[Any]) -> list[Tensor]:
            ctx.said = said
            return call.new(said)

        outputs = call.submit(noted).wait()
        ctx.adjoint = call.adjoint
        ctx.mark_non_differentiable(*(output for output in outputs if not has_parts(output)))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *ctx.adjoint(gradients, ctx.said)


def has_parts(values: Tensor) -> bool:
    """Whether they are floating-point or complex numbers."""
    return values.is_floating_point() or values.is_complex()


# Forms: of `_allreduce`, which returns a call, they make `allreduce`, `allreduce_async_` and so on


def waits(call: Callable[Arguments, Call[Result]], *, in_place: bool = False) -> Callable[Arguments, Result]:
    """The function that returns the result; gradients flow back, unless it is the tensor itself."""
    if in_place:
        return _form(call, "_", "{}", "As `{}`, into the tensor itself.", lambda made: made.begin_().wait())
    return _form(call, "", "{}", call.__doc__ or "", Call.wait)


def begins(call: Callable[Arguments, Call[Result]], *, in_place: bool = False) -> Callable[Arguments, Handle[Result]]:
    """The function that returns at once."""
    if in_place:
        return _form(call, "_async_", "Handle[{}]", "Begin `{}_`.", Call.begin_)
    return _form(call, "_async", "Handle[{}]", "Begin `{}`.", Call.begin)


def grouped(
    call: Callable[Concatenate[Tensor, Arguments], Call[Tensor]],
) -> Callable[Concatenate[Sequence[Tensor], Arguments], Call[list[Tensor]]]:
    """The same for several tensors as one operation; `call` takes a sequence of them too, for its `tensor`."""

    @functools.wraps(call)
    def several(*args: Any, **kwargs: Any) -> Any:
        if "tensors" in kwargs:
            kwargs["tensor"] = kwargs.pop("tensors")
        return cast(Any, call)(*args, **kwargs)

    one = inspect.signature(call)
    tensor, *others = one.parameters.values()
    parameters = [tensor.replace(name="tensors", annotation="Sequence[Tensor]"), *others]
    several.__signature__ = one.replace(parameters=parameters, return_annotation="Call[list[Tensor]]")  # type: ignore[attr-defined]
    several.__doc__ = f"`{call.__name__.strip('_')}` of several tensors, as one operation."
    several.__name__ = f"_grouped{call.__name__}"
    return several


def _form(
    call: Callable[Arguments, Call[Result]],
    suffix: str,
    returns: str,
    doc: str,
    then: Callable[[Call[Result]], Other],
) -> Callable[Arguments, Other]:
    @functools.wraps(call)
    def function(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Other:
        return then(call(*args, **kwargs))

    name, signature = call.__name__.strip("_"), inspect.signature(call)
    annotation = returns.format(signature.return_annotation.removeprefix("Call[").removesuffix("]"))
    function.__name__ = function.__qualname__ = name + suffix
    function.__doc__ = doc.format(name)
    function.__signature__ = signature.replace(return_annotation=annotation)  # type: ignore[attr-defined]
    return function
