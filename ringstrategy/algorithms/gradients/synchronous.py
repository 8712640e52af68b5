"""What all synchronous averaging of gradients shares: when buckets are full, launched, waited for and unpacked."""

from __future__ import annotations

import threading
import time
import warnings
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from ringstrategy.algorithms.base import Algorithm, check_uneven
from ringstrategy.algorithms.gradients import nonfinite
from ringstrategy.algorithms.policy import Local, check_local, split
from ringstrategy.buckets.base import Bucket
from ringstrategy.buckets.plan import capacity_of
from ringstrategy.buckets.residuals import may_read
from ringstrategy.buckets.slot import Slot
from ringstrategy.codecs.base import derive_seed
from ringstrategy.collectives.base import Collective, Summand
from ringstrategy.collectives.by_size import BySize
from ringstrategy.transport.agree import INDENT, agree_beside, all_gather, compare_changes, compare_plans
from ringstrategy.transport.base import Peers, Waitable, Word
from ringstrategy.transport.trace import span

_PATIENCE = 20
_UNKNOWN = (
    "a backward that the strategy does not know of made it. Call self.manual_backward(loss) instead of "
    "loss.backward() (with Fabric: fabric.backward(loss, model=model), with the model of this optimizer), or "
    "zero_grad() before this step if that gradient was not meant for it"
)
_ACCUMULATED = (
    "it only accumulated, under block_backward_sync() or no_backward_sync(). Do the last backward before a step "
    "outside of that"
)


class Synchronous(Algorithm):
    """After each backward all ranks hold the same mean gradients, bit for bit. Subclasses define the buckets.

    Parameters unused by this rank count as zeros if another rank has a gradient; unused by all, they keep `grad=None`.
    A second backward without `zero_grad` in between averages the sum of the old mean and the new gradients: exact for
    a lossless codec, rounded twice for a lossy one. Gradients live in the buckets' memory unless somebody else holds
    theirs; one that was kept (`kept = p.grad`) stays as it is.

    A backward that is not announced by `before_backward` only adds to this rank's gradients, as under torch DDP. What
    no exchange has averaged must not be stepped: `before_step` raises.

    Args:
        collective: how buckets travel. None: `BySize()`, by which short ones go `Direct` and long ones over the `Ring`.
        bucket_mb: megabytes (2**20 bytes) of a bucket's buffer. Larger: fewer, longer messages, less overlap.
        find_unused_parameters: walk the graph before each backward, so that buckets with unused parameters need not
            wait for its end. The result is the same without; not for reentrant activation checkpointing.
        local: `local(name, parameter)` is true for parameters that are never averaged. So is a parameter with a true
            attribute `ring_local`. When a fit, validation or test begins they too start from rank 0's, and a
            checkpoint holds rank 0's.
        on_nonfinite: what happens if a mean gradient holds a NaN or an infinity, on all ranks alike, since they hold
            the same means. "propagate": nothing, as under torch DDP. "skip": all gradients of that backward become
            None, so that an optimizer's step changes nothing; `Stats.steps_skipped` counts, and the log tells.
            "raise": an error that names the parameters. The last two look at all gradients at the end of backward,
            which on a GPU waits for it. A loss scaler skips by itself, and refuses them. With one process nothing
            is averaged or looked at.
        uneven: see `Algorithm`. With "join" the mean is over the ranks that have data, in each batch.

    Attributes:
        launches: of the last backward, for each bucket its elements and how many seconds after `before_backward` it was
            complete.
    """

    def __init__(
        self,
        collective: Collective | None,
        bucket_mb: float,
        find_unused_parameters: bool,
        local: Local | None,
        on_nonfinite: str,
        uneven: str,
    ) -> None:
        self.collective = BySize() if collective is None else collective
        if not isinstance(self.collective, Collective):
            raise TypeError(f"collective is a Collective such as ringstrategy.Ring(), got {collective!r}")
        self.tagged = self.collective.tagged
        self._capacity = capacity_of(bucket_mb)
        check_local(local)
        nonfinite.check_choice(on_nonfinite)
        check_uneven(uneven)
        self.bucket_mb = bucket_mb
        self.find_unused_parameters = find_unused_parameters
        self.local = local
        self.on_nonfinite = on_nonfinite
        self.uneven = uneven

        self._peers: Peers | None = None
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[Parameter, Bucket] = {}
        self._frozen: dict[str, Parameter] = {}
        self._sparse: frozenset[str] = frozenset()
        self._hooks: list[tuple[Node, RemovableHandle]] = []
        self._local_names: list[str] = []
        self._local_parameters: list[Parameter] = []
        self._known: set[Parameter] = set()
        self._plan_text = ""
        self._pass: _Pass | None = None
        self._accumulating = False
        self._unaveraged: dict[Parameter, str] = {}  # with gradients of this rank alone, and what to do about them
        self._unstepped = 0  # exchanges with feedback in a row that no optimizer's step followed
        self._news: list[str] = []
        self._step = 0
        self.launches: list[tuple[int, float]] = []
        # by parameter name, of those without a bucket: what a checkpoint holds for frozen ones; after `close` all
        self._residuals: dict[str, Tensor] = {}
        self._bucket_state: dict[str, Tensor] = {}
        self._stepped: dict[str, Tensor] = {}

    @abstractmethod
    def plan(self, parameters: Mapping[str, Parameter], sparse: frozenset[str], first_index: int) -> list[Bucket]:
        """Buckets for these parameters, indices from `first_index`: the same on all ranks."""

    @override
    def setup(self, parameters: Mapping[str, Parameter], peers: Peers, *, sparse: frozenset[str] = frozenset()) -> None:
        assert self._peers is None, "close() first"
        self._peers, self._step = peers, 0
        self._residuals, self._bucket_state, self._stepped = {}, {}, {}
        self._unstepped, self._news = 0, []
        self._learn(parameters, sparse)
        self._append_unfrozen()
        compare_plans(peers, self._plan_text)
        self._warm_up(self._buckets)

    def _warm_up(self, buckets: Collection[Bucket], agreed: Waitable | None = None) -> None:
        """Before the first exchange of new buckets, and once the ranks have `agreed` on them."""
        assert self._peers is not None
        on_gpus = any(slot.parameter.device.type == "cuda" for bucket in buckets for slot in bucket.slots)
        if not buckets or not (on_gpus or self._peers.queues):
            return  # nothing is compiled for a bucket's size, and all are connected
        if agreed is not None:
            agreed.wait()
        with self._peers.stats.probe():
            for bucket in buckets:
                bucket.warm_up(self._peers, self.collective)

    @override
    def check(self, *, scaled_loss: bool, clips_by_norm: bool) -> None:
        if scaled_loss:
            nonfinite.refuse_loss_scaler(self.on_nonfinite)
        if self._local_names and (scaled_loss or clips_by_norm):
            what = "a loss scaler" if scaled_loss else "clipping by norm"
            raise ValueError(
                f"{what} looks at all gradients of a rank, so with local parameters such as {self._local_names[0]} "
                "each rank would treat the shared ones differently: use bf16-mixed or 32-bit precision, and clip by "
                "value or only the shared parameters (in configure_gradient_clipping)"
            )

    def adopt(self, parameters: Mapping[str, Parameter], *, sparse: frozenset[str] = frozenset()) -> list[Parameter]:
        """See `Algorithm.adopt`. They join now, or at the first backward that finds them not frozen."""
        new = self._learn(parameters, sparse)
        gone = self._forget(set(parameters.values()))
        if (new or gone) and self._peers is not None:
            joining = self._append_unfrozen()
            compare_changes(self._peers, self._plan_text, new, gone)
            self._warm_up(joining)
        return list(new.values())

    def _forget(self, there: set[Parameter]) -> list[str]:
        """Names of parameters that have left the model: from now on as if they were frozen, until they are back."""
        gone = []
        self._frozen = {name: parameter for name, parameter in self._frozen.items() if parameter in there}
        for slot in (slot for bucket in self._buckets for slot in bucket.slots):
            if slot.parameter not in there and not slot.gone:
                gone.append(slot.name)
            slot.gone = slot.parameter not in there
        return gone

    @override
    def is_local(self, name: str) -> bool:
        return name in self._local_names

    @override
    def compare(self, text: str) -> None:
        assert self._peers is not None
        compare_plans(self._peers, f"{self._plan_text}\n{text}")

    def _learn(self, parameters: Mapping[str, Parameter], sparse: frozenset[str]) -> dict[str, Parameter]:
        """The new parameters."""
        self._sparse = self._sparse | sparse
        new = {name: parameter for name, parameter in parameters.items() if parameter not in self._known}
        shared, local_names = split(new, self.local)
        self._known.update(new.values())
        self._frozen |= shared
        self._local_names += local_names
        self._local_parameters += [new[name] for name in local_names]
        return new

    def _append_unfrozen(self) -> list[Bucket]:
        """Buckets for the parameters that are not frozen any more."""
        joining = {name: parameter for name, parameter in self._frozen.items() if parameter.requires_grad}
        if not joining and self._plan_text:
            return []
        assert self._peers is not None
        for name in joining:
            del self._frozen[name]
        new = self.plan(joining, self._sparse, len(self._buckets))
        self._buckets += new
        for bucket in new:
            for slot in bucket.slots:
                self._bucket_of[slot.parameter] = bucket
                # On the node, as torch DDP does: this fires after the user's own post-accumulate hooks, which may
                # change the gradient. The node lives as long as somebody holds it.
                node = get_gradient_edge(slot.parameter).node
                self._hooks.append((node, node.register_hook(partial(self._on_gradient, slot.parameter))))
                if slot.name in self._residuals:
                    bucket.residuals.load(slot.name, self._residuals.pop(slot.name))
            bucket.load_state(self._bucket_state)
            bucket.residuals.load_parts(self._stepped)
        self._plan_text = self.plan_text(self._peers.size, (bucket.describe() for bucket in self._buckets))
        return new

    @override
    def before_backward(
        self,
        loss: Tensor | None = None,
        *,
        sync: bool = True,
        scale: Tensor | None = None,
        same: str = "",
        divisor: float | None = None,
    ) -> None:
        if self._peers is None:
            return
        if self._pass is not None:
            raise RuntimeError(
                "an earlier backward failed half-way, and what it had begun to exchange cannot be taken back: "
                "let its exception end the run"
            )
        if self.undecided:
            for bucket in self._buckets:
                bucket.residuals.before_backward()
        self._accumulating = not sync
        if not sync:
            return
        if scale is not None:
            nonfinite.refuse_loss_scaler(self.on_nonfinite)
        if self._peers.detector is not None:
            self._peers.detector.progress.begin_exchange()
        joining = self._append_unfrozen()
        plan_text = f"{self._plan_text}\n{same}" if same else self._plan_text
        divisor = self._peers.size if divisor is None else divisor
        self._pass = _Pass(self._buckets, plan_text, self._peers, self.collective, self._step, scale, divisor)
        self._warm_up(joining, self._pass.agreed)
        if self.find_unused_parameters and loss is not None:
            used = reachable(loss)
            for parameter in self._bucket_of:
                if parameter not in used:
                    self._pass.ready(parameter, self._bucket_of[parameter])

    def _on_gradient(self, parameter: Parameter, *_: Any) -> None:
        if self._pass is not None:
            self._pass.ready(parameter, self._bucket_of[parameter])
        else:
            self._unaveraged[parameter] = _ACCUMULATED if self._accumulating else _UNKNOWN

    @override
    def after_backward(self) -> None:
        self._accumulating = False
        current = self._pass
        if current is not None:
            self._finish(current)
        if self.undecided:
            for bucket in self._buckets:
                bucket.residuals.after_backward()
        if current is not None:
            self._look_for_nonfinite(current.active)  # only now: residuals go back, as of any gradient that is dropped
        if current is not None and self.undecided:
            self._unstepped += 1
            if self._unstepped == _PATIENCE:
                self._news.append(
                    f"no optimizer has stepped any of the last {_PATIENCE} mean gradients, as far as torch's "
                    "optimizers tell, so error feedback keeps nothing: step by a torch.optim.Optimizer, or turn "
                    "feedback off (error_feedback=False)"
                )

    def _finish(self, current: _Pass) -> None:
        assert self._peers is not None
        current.finish()
        for slot in (slot for bucket in current.active if self._unaveraged for slot in bucket.slots):
            if slot.trains:
                self._unaveraged.pop(slot.parameter, None)
        self.launches = [(bucket.numel, at) for bucket, at in zip(current.active, current.launched_at, strict=True)]
        self._pass = None
        self._step += 1
        self._peers.stats.exchanges += 1
        self._peers.stats.values_averaged += sum(bucket.numel for bucket in current.active)

    def _look_for_nonfinite(self, buckets: Collection[Bucket]) -> None:
        """Skip or raise, if so asked: on all ranks alike, for their means have the same bits."""
        if self.on_nonfinite == "propagate":
            return
        assert self._peers is not None
        means = {slot.name: slot.parameter.grad for bucket in buckets for slot in bucket.slots if slot.trains}
        there = {name: grad for name, grad in means.items() if grad is not None}
        if nonfinite.are_finite(there.values()):
            return
        names = [name for name, grad in there.items() if not nonfinite.are_finite([grad])]
        where = f"{names[0]}{f' and {len(names) - 1} more parameters' if len(names) > 1 else ''}"
        if self.on_nonfinite == "raise":
            raise RuntimeError(
                f"the mean gradient of {where} is not finite at step {self._step - 1}, because some rank's was not: "
                "find its cause with Trainer(detect_anomaly=True), try a lower learning rate, or go on without such "
                "steps (on_nonfinite='skip')"
            )
        trained = [slot.parameter for bucket in self._buckets for slot in bucket.slots if slot.trains]
        nonfinite.drop([*trained, *(p for p in self._local_parameters if p.requires_grad)])
        stats = self._peers.stats
        stats.steps_skipped += 1
        if stats.steps_skipped & (stats.steps_skipped - 1) == 0:  # the first, and then ever more rarely
            self._news.append(
                f"step {self._step - 1} is skipped on all ranks: the mean gradient of {where} is not finite "
                f"(steps skipped so far: {stats.steps_skipped})"
            )

    @override
    def before_step(self, parameters: Collection[Parameter]) -> None:
        for parameter, cure in list(self._unaveraged.items()) if self._unaveraged else ():
            if parameter.grad is None or not parameter.grad.any():
                del self._unaveraged[parameter]
            elif parameter in parameters:
                name = next(slot.name for slot in self._bucket_of[parameter].slots if slot.parameter is parameter)
                raise RuntimeError(f"the gradient of {name} is this rank's alone, so replicas would differ: {cure}")

    def after_step(self, parameters: Collection[Parameter] = (), stepped: Tensor | bool = True) -> None:
        """The gradients were averaged already; residuals keep what belongs to gradients that were stepped."""
        decided = [bucket.residuals.after_step(parameters, stepped) for bucket in self._buckets]
        if any(decided) and stepped is not False:
            self._unstepped = 0

    @property
    def undecided(self) -> bool:
        """Whether the gradients of an exchange with feedback are neither stepped nor dropped yet."""
        return any(bucket.residuals.undecided for bucket in self._buckets)

    @override
    def news(self) -> list[str]:
        news, self._news = self._news, []
        return news

    def state_dict(self) -> dict[str, Any]:
        """The step, from which codecs draw their seeds, and what buckets and residuals keep beside themselves."""
        buckets, stepped = dict(self._bucket_state), dict(self._stepped)
        for bucket in self._buckets:
            buckets |= bucket.state()
            stepped |= bucket.residuals.parts()
        return {"step": self._step, "buckets": buckets, "stepped": stepped}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step = int(state["step"])
        self._bucket_state = {name: value for name, value in state["buckets"].items() if name in self._frozen}
        self._stepped = dict(state.get("stepped", {}))
        for bucket in self._buckets:
            bucket.load_state(state["buckets"])
            bucket.residuals.load_parts(self._stepped)

    @override
    def residuals(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in self._buckets:
            yield from bucket.residuals.state()
        yield from self._residuals.items()

    def load_residuals(self, residuals: Mapping[str, Tensor]) -> list[str]:
        """See `Algorithm.load_residuals`. Residuals of frozen parameters wait for their first bucket."""
        self._residuals = {
            name: value
            for name, value in residuals.items()
            if name in self._frozen and self._frozen[name].shape == value.shape
        }
        bucket_of = {slot.name: bucket for bucket in self._buckets for slot in bucket.slots}
        return [
            name
            for name, value in residuals.items()
            if name not in self._residuals and not (name in bucket_of and bucket_of[name].residuals.load(name, value))
        ]

    def close(self) -> None:
        """Remove the hooks and forget the plan. State for a checkpoint stays, in host memory."""
        if self._peers is not None:
            state = self.state_dict()
            left: dict[str, Tensor] = {}
            for name, value in self.residuals():
                if self._pass is not None and not may_read(value):  # the device may be stuck, and a copy would be too
                    warnings.warn("residuals of a backward that failed on a GPU are lost", stacklevel=2)
                    state, left = {"buckets": {}, "stepped": {}}, {}
                    break
                left[name] = value.cpu()
            self._residuals = left
            self._bucket_state = {name: value.cpu() for name, value in state["buckets"].items()}
            self._stepped = {name: value.cpu() for name, value in state["stepped"].items()}
        for _, hook in self._hooks:
            hook.remove()
        self._peers = self._pass = None
        self._buckets, self._bucket_of, self._hooks = [], {}, []
        self._frozen, self._known, self._sparse, self._plan_text = {}, set(), frozenset(), ""
        self._local_names, self._local_parameters = [], []
        self._accumulating, self._unaveraged = False, {}


class _Pass:
    """One backward pass: the buckets that are full or launched, and the parameters that other ranks used."""

    def __init__(
        self,
        buckets: list[Bucket],
        plan_text: str,
        peers: Peers,
        collective: Collective,
        step: int,
        scale: Tensor | None,
        divisor: float,
    ) -> None:
        self._divisor = divisor
        self._riding: dict[int, Summand] = {}  # by index of their buckets, to go with the next launch
        self._peers, self._collective, self._step, self._scale = peers, collective, step, scale
        self._lock = threading.Lock()  # hooks of several devices fire in several threads
        waiting = {b: {s.parameter for s in b.slots if s.trains} for b in buckets}
        self._waiting = waiting
        self._trained: set[Parameter] = set().union(*waiting.values())
        self._packed: list[Bucket] = []
        self.active = [bucket for bucket in buckets if waiting[bucket]]
        self._launched = 0
        self._begin = time.perf_counter()
        self.launched_at: list[float] = []  # seconds after this pass began
        self._tickets: list[Waitable] = []
        self._used = torch.empty(0, dtype=torch.uint8, device="cpu")  # of all slots: by this rank, in the end by any
        self._collect: Callable[[], Tensor] | None = None
        # Frozen parameters may differ from pass to pass (a GAN's toggling), but not from rank to rank.
        trained = {s.name: s.trains for b in buckets for s in b.slots if not s.gone}
        said = f"{plan_text}\n{step} " + "".join("01"[is_trained] for is_trained in trained.values())

        def details() -> str:
            lines = (f"{INDENT}{name}: {'trained' if on else 'frozen'} at step {step}" for name, on in trained.items())
            return "\n".join([plan_text, f"step {step}", *lines])

        where = f"at step {step}, before its first bucket"
        tagged = collective.tagged and bool(self.active)
        self.agreed = agree_beside(peers, Word(said, details), tagged=tagged, where=where)

    def ready(self, parameter: Parameter, bucket: Bucket) -> None:
        """The gradient of `parameter` is complete, or will not come."""
        with self._lock:
            if parameter not in self._trained:
                return  # frozen since its graph was made, and so it gets no gradient
            for packed in self._packed:  # not sooner: autograd itself held the last one's gradient
                packed.take_gradients()
            self._packed = []
            if bucket.index < self._next_index():
                raise RuntimeError(
                    "a gradient grew after it was averaged: one parameter is used in several reentrant checkpoints, or "
                    "find_unused_parameters=True met one; use torch.utils.checkpoint(..., use_reentrant=False)"
                )
            self._waiting[bucket].discard(parameter)
            while self._launched < len(self.active) and not self._waiting[self.active[self._launched]]:
                self._launch()

    def _next_index(self) -> int:
        return self.active[self._launched].index if self._launched < len(self.active) else 1 << 62

    def _launch(self) -> None:
        # index order, not readiness: all ranks must pair up
        bucket = self.active[self._launched]
        self._launched += 1
        self.launched_at.append(time.perf_counter() - self._begin)
        last = self._launched == len(self.active)
        flags = None
        if last:  # everyone tells everyone what it used: with the last bucket, or in messages that it hides
            used = [s.parameter.grad is not None and s.trains for b in self.active for s in b.slots]
            self._used = torch.tensor(used, dtype=torch.uint8, device="cpu")
            if bucket.carries_flags(self._peers, self._collective):
                flags = self._used
            else:
                self._control(self._post_used)
        with span("pack", bucket=bucket.index):
            bucket.pack(self._divisor, self._scale)
        self._packed.append(bucket)
        seed = derive_seed(0, self._step, bucket.index)
        if not last:
            rider = bucket.rider(self.active[self._launched], self._peers, self._collective, seed)
            if rider is not None:
                self._riding[bucket.index] = rider
                return
        riders, self._riding = self._riding, {}
        of = f"bucket {bucket.index}" if not riders else f"buckets {', '.join(map(str, [*riders, bucket.index]))}"
        where = f"at step {self._step}, in {of} of {len(self._waiting)}"
        self._tickets.append(
            bucket.launch(self._peers, self._collective, self.agreed, seed, where, flags, list(riders.values()))
        )
        if last and flags is None:
            self._tickets.append(self._control(self._collect_used))

    def _control(self, work: Callable[[], None]) -> Waitable:
        return self._peers.control.submit(work, f"at step {self._step}, after its last bucket")

    def _post_used(self) -> None:
        self._collect = all_gather(self._peers.control, self._used)

    def _collect_used(self) -> None:
        assert self._collect is not None
        self._used = self._collect().amax(0)

    def finish(self) -> None:
        """Launch the remaining buckets, wait, and make the means the gradients."""
        with self._lock:
            while self._launched < len(self.active):
                self._launch()
        self._peers.finish([self.agreed, *self._tickets])
        place = {s.parameter: i for i, s in enumerate(s for b in self.active for s in b.slots)}

        def used(slot: Slot) -> bool:
            return bool(self._used[place[slot.parameter]])

        for bucket in self.active:
            with span("unpack", bucket=bucket.index):
                bucket.unpack(used)


def reachable(loss: Tensor) -> set[Tensor]:
    """The leaves that `loss` depends on."""
    leaves: set[Tensor] = set()
    seen: set[Any] = set()
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.add(variable)
        stack.extend(parent for parent, _ in node.next_functions)
    return leaves
