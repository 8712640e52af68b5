"""`DistributedOptimizer`: an optimizer whose steps use the gradients of all ranks, as Horovod shapes it.

A hook on the first gradient of a backward pass opens the exchange, and buckets travel while backward goes on.
`synchronize` ends it, and so does `step`. `Session` does the work.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ringstrategy.algorithms.base import Algorithm, check_counts_steps
from ringstrategy.algorithms.gradients.allreduce import AllReduce
from ringstrategy.codecs.base import Codec
from ringstrategy.integrations.horovod.compression import Compression, check_codec, collective_for
from ringstrategy.integrations.horovod.process_sets import ProcessSet, global_process_set
from ringstrategy.integrations.horovod.reduction import ADASUM, Adasum, Average, ReduceOp, Sum
from ringstrategy.integrations.horovod.world import world
from ringstrategy.names import named
from ringstrategy.session.optimizers import is_within_backward, loss_scale, stepped_by
from ringstrategy.session.session import Session

Local = Callable[[str, Parameter], bool]

_CLIPPING = (
    "call optimizer.synchronize() after backward(), then clip, unscale or change gradients, and then step within "
    "`with optimizer.skip_synchronize():`"
)


def DistributedOptimizer(  # Horovod's name  # noqa: PLR0913
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    compression: object = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: object = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: Algorithm | str | None = None,
    local: Local | Collection[str] | None = None,
    sparse: Collection[str] = (),
    scaler: torch.amp.GradScaler | None = None,
) -> Any:
    """Make an optimizer step with the gradients of all ranks; all ranks of the process set call it, in the same order.

    It returns the same object, whose class has become one of the same name derived from its own. It has Horovod's
    methods `synchronize`, `skip_synchronize`, `set_backward_passes_per_step` and `register_local_var` too, `close`, and
    `session`: the `Session` that does the work (`optimizer.session.stats`, `.state_dict()` for residuals,
    `.consensus()` where ranks have different parameters, as with "gossip" and "diloco"). Parameters are not made
    equal: call `broadcast_parameters`.

    Args:
        optimizer: one of torch's.
        named_parameters: usually `model.named_parameters()`; with all parameters of the optimizer, others are ignored.
        compression: a codec: short for `algorithm=AllReduce(codec)`, with error feedback where the codec needs it.
        backward_passes_per_step: of these many backward passes gradients add up before they travel.
        op: `Average` or `Sum`.
        gradient_predivide_factor: changes nothing, because sums are taken in float32: it is Horovod's guard against
            sums that are too large for 16 bits.
        num_groups: changes nothing, because buckets group all gradients.
        groups: likewise.
        sparse_as_dense: gradients of embeddings with `sparse=True` travel as dense ones.
        process_set: the ranks. On others the optimizer steps their own gradients.
        algorithm: what is averaged, and when: any `ringstrategy` algorithm, or the name of a strategy, such as
            `PowerSGD()` or "diloco".
        local: names of parameters, or a function `(name, parameter) -> bool`: these are never averaged.
        sparse: names of the parameters whose gradients are sparse, and travel so. Those of `SparseAdam` are known.
        scaler: the loss scaler. Residuals follow its scale; not needed for codecs without error feedback.
    """
    if isinstance(optimizer, Distributed):
        raise ValueError("this optimizer is an hvd.DistributedOptimizer already, and would average twice: wrap it once")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS decides from each rank's own loss how often to evaluate, so ranks would wait for each other for "
            "ever: use another optimizer"
        )
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor is for op=hvd.Average: leave it out")
    del num_groups, groups
    named = _named(optimizer, named_parameters)
    for other in world().optimizers:
        if not stepped_by(other).isdisjoint(named.values()):
            raise ValueError(
                "another hvd.DistributedOptimizer averages the gradients of these parameters already: call its close() "
                "before, or step all of them by one optimizer"
            )
    chosen = _algorithm(algorithm, compression, op, scaler)
    if chosen.uneven == "join" and process_set is not global_process_set:
        raise ValueError("hvd.join() is for all ranks: leave out process_set, or uneven='join'")
    _mark_local(named, local)
    if isinstance(optimizer, torch.optim.SparseAdam):  # which steps no others
        sparse = named
    unknown = set(sparse) - set(named)
    if unknown:
        raise ValueError(f"sparse has the names {sorted(unknown)}, which no parameter of the optimizer has")
    exchange = _Exchange(
        optimizer,
        _Named(named, frozenset() if sparse_as_dense else frozenset(sparse)),
        chosen,
        process_set,
        op=op,
        passes=backward_passes_per_step,
        sparse_as_dense=sparse_as_dense,
        scaler=scaler,
    )
    cls = type(optimizer)
    optimizer.__class__ = type(cls.__name__, (Distributed, cls), {"__module__": cls.__module__})
    optimizer._exchange = exchange  # type: ignore[attr-defined]
    world().optimizers.append(optimizer)
    return optimizer


def _named(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Parameter]] | None) -> dict[str, Parameter]:
    """The optimizer's parameters by name. ValueError with the cure if names are missing, twice there, or no names."""
    if named_parameters is None:
        return {
            f"allreduce.noname.{i}.{j}": parameter
            for i, group in enumerate(optimizer.param_groups)
            for j, parameter in enumerate(group["params"])
        }
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError(
            "named_parameters is a sequence of (name, parameter): pass model.named_parameters(), not model.parameters()"
        )
    twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if twice:
        raise ValueError(
            f"named_parameters has the names {twice} twice: with several models give each a prefix, "
            "model.named_parameters(prefix='generator')"
        )
    wanted = stepped_by(optimizer)
    named = {name: parameter for name, parameter in pairs if parameter in wanted}
    missing = wanted - set(named.values())
    if missing:
        places = [
            f"{tuple(parameter.shape)} (parameter {j} of group {i})"
            for i, group in enumerate(optimizer.param_groups)
            for j, parameter in enumerate(group["params"])
            if parameter in missing
        ]
        raise ValueError(
            f"named_parameters lacks {len(missing)} of the optimizer's parameters, of shape {', '.join(places[:5])}: "
            "they would never be averaged. Pass the named_parameters() of all models that the optimizer steps, or none"
        )
    return named


def _algorithm(
    algorithm: Algorithm | str | None, compression: object, op: ReduceOp, scaler: torch.amp.GradScaler | None
) -> Algorithm:
    if op is Adasum:
        raise ValueError(ADASUM)
    if op not in (Average, Sum):
        raise ValueError(f"an optimizer steps the Average or the Sum of gradients, got op={op!r}")
    codec: Codec = check_codec(compression)
    if algorithm is None:
        return AllReduce(codec, collective_for(codec))
    if codec != Compression.none:
        raise ValueError("pass compression= or algorithm=, not both: a codec goes into the algorithm, AllReduce(codec)")
    if isinstance(algorithm, str):
        algorithm = named(algorithm)
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"algorithm is an Algorithm such as ringstrategy.Gossip(), or its name, got {algorithm!r}")
    if algorithm.uneven == "join" and algorithm.decentralized:
        raise ValueError(f"{algorithm} averages parameters, and uneven='join' is for gradients here: leave it out")
    check_counts_steps(algorithm, "the loop")
    if op is Sum and algorithm.decentralized:
        raise ValueError(f"{algorithm} averages parameters, and sums no gradients: leave out op=hvd.Sum")
    if scaler is not None and algorithm.decentralized:
        raise ValueError(
            f"{algorithm} averages parameters after each rank's own steps, and a loss scaler would skip a step on one "
            "rank alone: train in bfloat16 without a scaler, or with Lightning's Trainer or Fabric"
        )
    return algorithm


def _mark_local(named: dict[str, Parameter], local: Local | Collection[str] | None) -> None:
    if local is None:
        return
    if isinstance(local, str) or not (callable(local) or set(local) <= set(named)):
        raise ValueError(
            f"local is a function (name, parameter) -> bool or a list of names of the optimizer's parameters, got "
            f"{local!r}"
        )
    for name, parameter in named.items():
        if local(name, parameter) if callable(local) else name in local:
            parameter.ring_local = True  # type: ignore[attr-defined]


class _Named(Module):
    """The parameters of an optimizer under the names that ranks compare."""

    def __init__(self, named: dict[str, Parameter], sparse: frozenset[str]) -> None:
        super().__init__()
        self.named, self.sparse_names = named, sparse
        rows = Module()
        rows.sparse = True  # type: ignore[assignment]  # as an embedding says it
        for i, name in enumerate(sorted(sparse)):
            rows.register_parameter(str(i), named[name])
        self.rows = rows

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Those of the optimizer, whatever the arguments."""
        del prefix, recurse, remove_duplicate
        yield from self.named.items()


class _Exchange:
    """What an optimizer's gradients are waiting for, between two steps.

    It opens a session: all ranks connect, and compare what they have.

    Args:
        optimizer: whose.
        module: its parameters.
        algorithm: what is averaged, and when.
        process_set: the ranks; on others it steps their own gradients.
        op: see `DistributedOptimizer`, as of `sparse_as_dense` and `scaler`.
        passes: backward passes between two exchanges; may be changed between two steps.
        sparse_as_dense: see above.
        scaler: see above.

    Attributes:
        session: does the work.
        synchronizes: a step ends the exchange.
        synchronized: gradients are those of all ranks, and not stepped yet.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        module: _Named,
        algorithm: Algorithm,
        process_set: ProcessSet,
        *,
        op: ReduceOp,
        passes: int,
        sparse_as_dense: bool,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.optimizer, self.module = optimizer, module
        self.passes, self.synchronizes, self.synchronized = passes, True, False
        self._sparse_as_dense, self._scaler = sparse_as_dense, scaler
        self._alone = not process_set.included() or process_set.size() == 1
        self._steps = 0
        self._is_open = False
        self._seen: Counter[Parameter] = Counter()  # gradients since the last exchange
        self._left: dict[Parameter, tuple[int, int]] = {}  # address and version of gradients when backward ended
        self._notes_end = False
        self._nodes: dict[Parameter, Node] = {}  # which live as long as somebody holds them
        self._hooks: list[RemovableHandle] = []
        devices = [parameter.device for parameter in module.named.values()]
        for device in devices if not self._alone else ():
            process_set.members.check_device(device)
        self._device = devices[0] if devices else torch.device("cpu")
        with ExitStack() as ends:  # of connections and hooks, if it fails too
            group = None
            if not self._alone and process_set is not global_process_set:
                group = process_set.lend_group()
                ends.callback(process_set.take_group_back, group)
            self.session = Session(
                module,
                algorithm,
                timeout=world().timeout,
                notice_steps=False,
                group=group,
                divisor=1.0 if op is Sum else None,
            )
            ends.callback(self.session.close)
            ends.callback(self._remove_hooks)
            self._watch()
            if not self._alone:
                self._hooks.append(register_optimizer_step_pre_hook(self._before_any_step))
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))  # before the algorithm's own
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))
            self._connect()
            self._ends = ends.pop_all()

    def close(self) -> None:
        """Remove the hooks, and end the connections. Idempotent, and no collective."""
        self._seen.clear()
        self._is_open = False
        self._ends.close()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._nodes = [], {}

    def _connect(self) -> None:
        if not self._alone:
            self.session.open(self._device, scaled_loss=self._scaler is not None)
        self.session.bind([self.optimizer])

    def _watch(self) -> None:
        """Hooks on the parameters that have none and are not frozen."""
        for name, parameter in self.module.named.items():
            if parameter.requires_grad and parameter not in self._nodes:
                node = get_gradient_edge(parameter).node
                if not self._alone:
                    self._hooks.append(node.register_prehook(partial(self._on_gradient, name, parameter)))
                if self._sparse_as_dense:  # before the algorithm's own hook, which comes later
                    self._hooks.append(node.register_hook(partial(self._make_dense, parameter)))
                self._nodes[parameter] = node

    # A backward pass

    def _on_gradient(self, name: str, parameter: Parameter, gradients: tuple[Tensor, ...]) -> None:
        gradient = gradients[0]
        if not self._notes_end:
            self._notes_end = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        self._seen[parameter] += 1
        self._left.pop(parameter, None)
        self.synchronized = False
        if self._seen[parameter] > self.passes:
            raise RuntimeError(
                f"the gradient of {name} was computed more than backward_passes_per_step={self.passes} times before "
                "step(): pass DistributedOptimizer(backward_passes_per_step=...) the number of backward() calls "
                "between two steps"
            )
        if self._seen[parameter] == self.passes:
            self._open()
        if gradient.is_sparse and not self._sparse_as_dense and name not in self.module.sparse_names:
            raise ValueError(
                f"the gradient of {name} is sparse: pass sparse_as_dense=True, or sparse=[{name!r}] to send its rows"
            )

    def _make_dense(self, parameter: Parameter, *_: Any) -> None:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()

    def _open(self) -> None:
        if self._is_open:
            return
        self._is_open = True
        self._watch()
        if self.session.uneven.is_open:
            self.session.uneven.next_batch(True, True)
        self._begin_batch()
        self.session.before_backward(scale=loss_scale(self._scaler, self._device))

    def _begin_batch(self, *, first: bool = False) -> None:
        # ranks that have joined step no scheduler: then rates cannot be compared
        optimizers = [] if self.session.uneven.is_open else [self.optimizer]
        self.session.begin_batch(f"in step {self._steps}", optimizers, first=first, later_epoch=False)

    def idle(self) -> None:
        """Take part in the exchanges of the others, without data, until no rank has any."""
        while self.session.uneven.next_batch(False, False):
            self._begin_batch()
            self.session.before_backward(scale=loss_scale(self._scaler, self._device))
            self.session.after_backward()
            self.session.after_step(self.optimizer)  # residuals: the others step what they delivered
            self.session.end_batch(None)
            self._steps += 1
        for parameter in self.module.named.values():
            parameter.grad = None

    def _end_of_backward(self) -> None:
        """Who changes a gradient from here to the end of the exchange changes what travels."""
        self._notes_end = False
        exchanged = self._is_open and not self.session.algorithm.decentralized
        for parameter in self._seen if exchanged else ():
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse:
                del gradient  # who else holds it is counted
                parameter.grad = parameter.grad.data  # type: ignore[union-attr]  # counts its changes apart from the buffer's
                self._left[parameter] = parameter.grad.data_ptr(), parameter.grad._version

    def synchronize(self) -> None:
        """Gradients are those of all ranks when this returns."""
        if self._alone or self.synchronized:
            self._end()
            return
        left, self._left = self._left, {}
        for name, parameter in self.module.named.items():
            gradient = parameter.grad
            if parameter in left and (gradient is None or (gradient.data_ptr(), gradient._version) != left[parameter]):
                raise RuntimeError(
                    f"the gradient of {name} was changed between backward() and the end of its exchange, so ranks "
                    f"would step different ones: {_CLIPPING}"
                )
            del gradient
        self._open()
        self.session.after_backward()
        self._end()

    def _end(self) -> None:
        self._is_open, self.synchronized = False, True
        self._seen.clear()
        self._left, self._notes_end = {}, False

    def drop(self) -> None:
        """Gradients are set to zero. RuntimeError if they are on their way."""
        if self._seen or self._is_open:
            raise RuntimeError(
                "optimizer.zero_grad() came after backward() and before step() or synchronize(), while gradients are "
                "exchanged: call it before backward() or after step()"
            )
        self.synchronized = False

    # A step

    def _before_any_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if optimizer is not self.optimizer and is_within_backward():  # this one ends the exchange before it steps
            self.session.check_within_backward(optimizer)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._finish()
            return None

        def evaluated() -> Any:
            loss = closure()
            self._finish()
            return loss

        if len(args) > 1:
            return (args[0], evaluated, *args[2:]), kwargs
        return args, {**kwargs, "closure": evaluated}

    def _finish(self) -> None:
        """Gradients are about to be stepped."""
        if self.synchronizes and self.synchronized and not self._alone:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize() sends "
                "nothing more: put the step into `with optimizer.skip_synchronize():` to say so",
                stacklevel=4,
            )
        if self.synchronizes:
            self.synchronize()
        elif not self.synchronized:
            raise RuntimeError(
                "optimizer.step() within skip_synchronize() would step this rank's own gradients: call "
                "optimizer.synchronize() before"
            )
        self.session.check_step(self.optimizer)

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.synchronized = False
        self._steps += 1
        self.session.after_step(optimizer)
        self.session.end_batch(None)

    # Parameters

    def add(self, group: dict[str, Any]) -> None:
        """A group has joined the optimizer, on all ranks: they get rank 0's values."""
        i = len(self.optimizer.param_groups) - 1
        self.module.named |= {f"added.{i}.{j}": parameter for j, parameter in enumerate(group["params"])}
        self._watch()
        self._begin_batch(first=True)
        self.session.end_batch(None)

    def make_local(self, parameter: Parameter) -> None:
        """Never average it."""
        if parameter not in set(self.module.named.values()):
            raise ValueError("register_local_var takes a parameter of this optimizer")
        if self._steps or self._seen:
            raise ValueError("register_local_var comes before the first backward(): ranks plan what they average once")
        parameter.ring_local = True  # type: ignore[attr-defined]
        self.session.close()
        self._connect()  # all ranks plan anew


class Distributed(Optimizer):
    """What an optimizer can do besides, once it is a `DistributedOptimizer`."""

    _exchange: _Exchange

    @property
    def session(self) -> Session:
        """Does the work: statistics, state for checkpoints, what all ranks share if they have different parameters."""
        return self._exchange.session

    def synchronize(self) -> None:
        """Wait until gradients are those of all ranks: to clip or unscale them before `step`."""
        self._exchange.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Generator[None, None, None]:
        """Around a `step` after `synchronize`."""
        self._exchange.synchronizes = False
        try:
            yield
        finally:
            self._exchange.synchronizes = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """See `DistributedOptimizer`; between two steps."""
        self._exchange.passes = passes

    def register_local_var(self, parameter: Parameter) -> None:
        """This parameter is never averaged. All ranks call it, before the first backward."""
        self._exchange.make_local(parameter)

    def close(self) -> None:
        """It averages no more, and its parameters may get another `DistributedOptimizer`. No collective."""
        self._exchange.close()
        if self in world().optimizers:
            world().optimizers.remove(self)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own. RuntimeError while gradients are exchanged."""
        self._exchange.drop()
        super().zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's own; all ranks call it, and the new parameters get rank 0's values."""
        super().add_param_group(param_group)
        self._exchange.add(self.param_groups[-1])
