"""How a model is averaged while it trains: our algorithms, torch DDP, its hooks and post-local SGD, driven alike."""

from __future__ import annotations

import copy
import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks import harness
from benchmarks.harness import Case
from benchmarks.powersgd_peer import PowerSGDOnOneThread, factors
from benchmarks.tasks import Batches, Loss
from benchmarks.torchft_peer import TorchftDiLoCo
from ringstrategy import (
    Algorithm,
    AllReduce,
    BlockInt,
    Cast,
    Choco,
    Codec,
    Direct,
    Gaussian,
    Gossip,
    LocalSGD,
    MuonAdamW,
    Nesterov,
    ParameterServer,
    Ring,
    Rotated,
    SmallExact,
)
from ringstrategy.algorithms.gradients.powersgd import PowerSGD
from ringstrategy.algorithms.parameters.decentralized import Decentralized
from ringstrategy.names import STRATEGIES
from ringstrategy.session import Session
from ringstrategy.topologies import OnePeerExponential, RandomMatching

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

Phases = tuple[float, float, float]  # seconds: forward, backward with exchange, optimizer

DDP, FP16_HOOK = "ddp", "ddp fp16 hook"
POWERSGD_HOOKS = {rank: f"ddp powersgd rank {rank}" for rank in (1, 4)}
# Steps from one averaging of parameters to the next, in post-local SGD and gossip: torch's example, and a longer one.
PERIODS = (4, 16)
OUTER_DDP = "ddp outer step every 16"
POST_LOCAL = {period: f"post-local sgd every {period}" for period in PERIODS}
# What torchft's DiLoCo is given. "streaming" exchanges beside computing.
_STREAMING = {"fragments": 4, "alpha": 0.5}
TORCHFT: dict[str, dict[str, Any]] = {
    **{f"torchft diloco every {every}": {"interval": every} for every in (16, 64)},
    "torchft diloco every 64 momentum 0.6": {"interval": 64, "outer": Nesterov(0.6, 0.6)},
    "torchft streaming every 16": {"interval": 16, "delay": 2, **_STREAMING},
    "torchft streaming every 64": {"interval": 64, "delay": 8, "outer": Nesterov(0.6, 0.6), **_STREAMING},
}
_MIXINGS: dict[str, Callable[..., Algorithm]] = {
    "gossip_exponential": partial(Gossip, OnePeerExponential()),
    "gossip_int8": partial(Choco, codec=BlockInt(8)),
}
AT_INTERVALS: dict[str, Callable[[], Algorithm]] = {
    f"{name} every {said}": partial(make, interval=period, overlap=overlap)
    for name, make in _MIXINGS.items()
    for said, period, overlap in (
        (f"{PERIODS[0]}", PERIODS[0], True),
        (f"{PERIODS[0]} (1 late)", PERIODS[0], 1),  # what came is applied one step after the mixing began
        (f"{PERIODS[1]}", PERIODS[1], True),
    )
}


def _seldom(name: str, **changes: Any) -> LocalSGD:
    algorithm = named(name, **changes)
    assert isinstance(algorithm, LocalSGD)
    return algorithm


def named(name: str, **changes: Any) -> Algorithm:
    """The registered algorithm of this name, with these arguments instead of its own."""
    return changed(STRATEGIES[name](), **changes)


def changed(algorithm: Algorithm, **changes: Any) -> Algorithm:
    """Another one, with these arguments instead of its own."""
    arguments = {each: getattr(algorithm, each) for each in inspect.signature(type(algorithm)).parameters}
    return type(algorithm)(**arguments | changes)


_TWO_BITS = SmallExact(Rotated(Gaussian(2)))
SELDOM: dict[str, Callable[[], Algorithm]] = {
    **{
        f"{name} every {interval}": partial(_seldom, name, interval=interval)
        for name, interval in (("local_sgd", 4), ("diloco", 16), ("diloco", 64))
    },
    "diloco_int4 overlap 4": partial(_seldom, "diloco_int4", overlap=4),
    "diloco_int4 every 64": partial(_seldom, "diloco_int4", interval=64, overlap=8),
    "diloco_int4 plain mean every 64": partial(_seldom, "diloco_int4", outer=None, interval=64, overlap=8),
    "diloco_sign overlap 3": partial(_seldom, "diloco_sign", overlap=3),
    "diloco_sign every 64": partial(_seldom, "diloco_sign", interval=64, overlap=3, outer=Nesterov(0.6, 0.6)),
    "diloco_int2": partial(_seldom, "diloco_int4", codec=_TWO_BITS),
    "diloco_int2 every 64": partial(_seldom, "diloco_int4", codec=_TWO_BITS, interval=64, overlap=8),
    "pairs every 16": partial(Gossip, RandomMatching(), interval=16, overlap=1),
    "pairs with momentum every 16": partial(Gossip, RandomMatching(), interval=16, overlap=1, outer=Nesterov(0.7, 0.5)),
    "diloco_int4 every 64 after 128": partial(_seldom, "diloco_int4", interval=64, overlap=8, warmup_steps=128),
}
_OF_ONE_HOST = "central_storage"
FED = "ring_int8 with feedback"  # what ring_auto may choose, where ring_int8 itself feeds nothing back
SERVERS: dict[str, Callable[[], Algorithm]] = {
    "one parameter_server": lambda: ParameterServer(1),
    "parameter_server int8": lambda: ParameterServer(codec=BlockInt(8), error_feedback=True, pull=Cast("bfloat16")),
}
BESIDE: dict[str, Callable[[], Algorithm]] = {  # worth knowing, though not names
    FED: lambda: AllReduce(BlockInt(8), error_feedback=True),
    "ring of BlockInt(4)": lambda: AllReduce(BlockInt(4), Ring()),
    "direct of BlockInt(4)": lambda: AllReduce(BlockInt(4), Direct()),
    "ring_powersgd rank 4": lambda: PowerSGD(4, collective=Direct()),
    **AT_INTERVALS,
    **SELDOM,
    **SERVERS,
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Plain."""
    return torch.optim.SGD(model.parameters(), lr=0.01)


def adamw(model: nn.Module, lr: float = 5e-4) -> torch.optim.Optimizer:
    """Torch's."""
    return torch.optim.AdamW(model.parameters(), lr=lr)


def muon(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    """Torch's for matrices, AdamW for the rest."""
    return MuonAdamW(model.named_parameters(), lr)


def decentralized() -> list[str]:
    """The registered names that average parameters, not gradients."""
    return [name for name, make in STRATEGIES.items() if isinstance(make(), Decentralized)]


def contenders(
    initial: nn.Module, batches: Batches, outer: Nesterov | None = None, **how: Any
) -> dict[str, Callable[[], Training]]:
    """All that can be measured, by name; each trains a copy. Ranks make them in one order.

    Args:
        initial: the model.
        batches: of this rank.
        outer: instead of the outer optimizer of those that have one.
        how: see `Training`.
    """

    def of(make: Callable[..., Training], *given: Any) -> Callable[[], Training]:
        return lambda: make(copy.deepcopy(initial), batches, *given, **how)

    def stepped(algorithm: Algorithm) -> Algorithm:
        mine = getattr(algorithm, "outer", None)
        return algorithm if None in {mine, outer} else changed(algorithm, outer=outer)

    other = {} if outer is None else {"outer": outer}
    return {
        DDP: of(TorchDDP),
        FP16_HOOK: of(TorchDDP, True),
        **{name: of(PowerSGDHook, rank) for rank, name in POWERSGD_HOOKS.items()},
        **{name: of(PostLocalSGD, period) for period, name in POST_LOCAL.items()},
        OUTER_DDP: of(OuterStepDDP, outer or outer_of(OUTER_DDP)),
        **{name: of(TorchftTraining, {**given, **other}) for name, given in TORCHFT.items()},
        **{name: of(ours, stepped(make())) for name, make in {**STRATEGIES, **BESIDE}.items() if name != _OF_ONE_HOST},
    }


def outer_of(case: str) -> Nesterov | None:
    """The outer optimizer that `contenders(outer=...)` replaces in this case; None: it has none."""
    made, outer = {**STRATEGIES, **BESIDE}, None
    if case in {OUTER_DDP, *TORCHFT}:
        outer = TORCHFT.get(case, {}).get("outer", _seldom("diloco").outer)
    elif case in made:
        outer = getattr(made[case](), "outer", None)
    return outer


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Side by side, in fp64."""
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


class Training:
    """A model, its optimizer, and how it is averaged: here not at all. One instance a case, all with the same data."""

    interval = 1  # steps from one exchange to the next: a run makes a multiple of it

    def __init__(
        self, model: nn.Module, batches: Batches, loss: Loss = F.mse_loss, optimizer: MakeOptimizer = sgd
    ) -> None:
        self.model = model
        self.batches = batches
        self.loss = loss
        self.optimizer = optimizer(model)
        self.shapes = [parameter.shape for parameter in model.parameters()]
        self.full = sum(shape.numel() for shape in self.shapes)
        self.phases: list[Phases] = []  # one a step

    def take(self, steps: int) -> None:
        """A run has so many steps from now on, or as many more as whole intervals take."""
        whole = math.ceil(steps / self.interval) * self.interval
        self.batches = list(islice(cycle(self.batches), whole))

    def must_send(self, hosts: int) -> float | None:
        """Bytes that have to leave each of the hosts in a step; None: nobody knows beforehand."""
        return 0.0

    def limit(self, compute: Phases, wire: float) -> float:
        """Seconds a step that nothing can beat, from those of its parts alone."""
        forward, backward, step = compute
        return forward + max(backward, wire) + step

    def bytes_sent(self) -> int | None:
        """So far, as the transport counts; None if nobody counts."""
        return None

    def waited(self) -> float | None:
        """Seconds that the training thread has waited for exchanges so far; None if nobody counts."""
        return None

    def before_forward(self) -> None:
        """Called as each step begins."""

    def before_backward(self, loss: Tensor) -> None:
        """Called with the loss of each step."""

    def after_backward(self) -> None:
        """Gradients are final when this returns."""

    def after_step(self) -> None:
        """Parameters are final when this returns."""

    def after_run(self) -> None:
        """Called after the last step of a run, within its time."""

    def choose(self) -> list[str]:
        """Take steps, and take them back, until no step is a trial any more; say in lines what was chosen.

        All ranks call it.
        """
        return []

    def close(self) -> None:
        """End what averages."""

    @contextmanager
    def as_seen(self) -> Iterator[nn.Module]:
        """The model as people would see it now: of ranks that have their own, the mean. All ranks enter it."""
        yield self.model

    def result(self) -> list[Tensor]:
        """A copy of the weights as people would see them now. All ranks call it."""
        with self.as_seen() as model:
            return [parameter.detach().clone() for parameter in model.parameters()]

    def run(self) -> None:
        """One step a batch."""
        for inputs, targets in self.batches:
            self.before_forward()
            begin = time.perf_counter()
            loss = self.loss(self.model(inputs), targets)
            forwarded = time.perf_counter()
            self.before_backward(loss)
            loss.backward()
            self.after_backward()
            averaged = time.perf_counter()
            self.optimizer.step()
            self.after_step()
            self.optimizer.zero_grad(set_to_none=True)
            self.phases.append((forwarded - begin, averaged - forwarded, time.perf_counter() - averaged))
        self.after_run()

    def case(self, name: str) -> Case:
        """To be measured under this name."""
        return Case(
            name, self.run, self.result, bytes_sent=self.bytes_sent, waited=self.waited, steps=len(self.batches)
        )

    def phases_of_runs(self, steps: int) -> list[Phases]:
        """Forward, backward and optimizer's seconds a step of each run of so many steps, on the rank that took longest.

        They add up to what that run took. All ranks call it.
        """
        runs = []
        for first in range(0, len(self.phases), steps):
            own = torch.tensor(self.phases[first : first + steps], dtype=torch.float64).mean(0)
            forward, backward, step = max(harness.of_all_ranks(own), key=torch.sum).tolist()
            runs.append((forward, backward, step))
        return runs


class TorchDDP(Training):
    """Torch DDP, plain or with torch's fp16 hook."""

    def __init__(self, model: nn.Module, batches: Batches, fp16: bool = False, **how: Any) -> None:
        wrapped = DistributedDataParallel(model)
        super().__init__(wrapped, batches, **how)
        self._fp16 = fp16
        if fp16:
            wrapped.register_comm_hook(None, fp16_compress_hook)

    def must_send(self, hosts: int) -> float | None:
        return reduced((2 if self._fp16 else 4) * self.full, hosts)


class OuterStepDDP(TorchDDP):
    """DDP with an outer step every 16 steps, for which nothing travels: DiLoCo of one worker."""

    interval = 16

    def __init__(self, model: nn.Module, batches: Batches, outer: Nesterov, **how: Any) -> None:
        super().__init__(model, batches, **how)
        self._own = list(model.parameters())
        self._slow = [nn.Parameter(own.detach().clone()) for own in self._own]
        self._outer = torch.optim.SGD(self._slow, lr=outer.lr, momentum=outer.momentum, nesterov=outer.momentum > 0)
        self._steps = 0

    @torch.no_grad()
    def after_step(self) -> None:
        self._steps += 1
        if self._steps % self.interval:
            return
        for slow, own in zip(self._slow, self._own, strict=True):
            slow.grad = slow - own
        self._outer.step()
        for slow, own in zip(self._slow, self._own, strict=True):
            own.copy_(slow)


class PowerSGDHook(Training):
    """Torch DDP with PowerSGD: over NCCL torch's own hook."""

    def __init__(self, model: nn.Module, batches: Batches, rank: int, **how: Any) -> None:
        wrapped = DistributedDataParallel(model)
        super().__init__(wrapped, batches, **how)
        self._rank = rank
        self._peer: PowerSGDOnOneThread | None = None
        if "nccl" in dist.get_backend_config():
            state = PowerSGDState(None, rank, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook)
        else:
            self._peer = PowerSGDOnOneThread(dist.new_group(timeout=harness.TIMEOUT), rank)
            wrapped.register_comm_hook(None, self._peer.hook)

    def must_send(self, hosts: int) -> float | None:
        return reduced(4 * sum(factors(self.shapes, self._rank)), hosts)

    def close(self) -> None:
        if self._peer is not None:
            self._peer.close()


class Waiting(Training):
    """Ranks train alone, and wait for an exact average at the end of each interval. A run is whole intervals."""

    def must_send(self, hosts: int) -> float | None:
        return reduced(4 * self.full, hosts) / self.interval

    def limit(self, compute: Phases, wire: float) -> float:
        """Nothing is computed beside it."""
        return sum(compute) + wire


def _limit_beside(compute: Phases, wire: float, late: int, parts: int, interval: int) -> float:
    """Of a step whose exchanges, so many an interval, each travel while so many steps are computed."""
    hiding = min(1.0, parts * late / interval)  # of the steps
    return sum(compute) + max(0.0, wire - sum(compute) * hiding)


class PostLocalSGD(Waiting):
    """Torch's periodic averaging of parameters from the first step on.

    No DDP around the model, which would cost time and average nothing.
    """

    def __init__(self, model: nn.Module, batches: Batches, period: int, **how: Any) -> None:
        super().__init__(model, batches, **how)
        self.interval = period
        self._averager = PeriodicModelAverager(period, warmup_steps=0)
        self._averager.step = 1  # of its own accord it averages after the first step of a period, not after the last

    def after_step(self) -> None:
        self._averager.average_parameters(self.model.parameters())


class TorchftTraining(Waiting):
    """torchft's DiLoCo, with the outer optimizer of our `diloco` unless another is given."""

    def __init__(self, model: nn.Module, batches: Batches, given: Mapping[str, Any], **how: Any) -> None:
        super().__init__(model, batches, **how)
        self.interval, self._given = given["interval"], given
        self._diloco = TorchftDiLoCo(model, self.optimizer, **{"outer": _seldom("diloco").outer, **given})

    def limit(self, compute: Phases, wire: float) -> float:
        late, parts = self._given.get("delay", 0), self._given.get("fragments", 1)
        return _limit_beside(compute, wire, late, parts, self.interval)

    @contextmanager
    def as_seen(self) -> Iterator[nn.Module]:
        with self._diloco.consensus():
            yield self.model

    def close(self) -> None:
        self._diloco.close()


class Ours(Training):
    """Our algorithm, driven as the Lightning strategy drives it."""

    def __init__(self, model: nn.Module, batches: Batches, algorithm: Algorithm, **how: Any) -> None:
        super().__init__(model, batches, **how)
        self.algorithm = algorithm
        # a case may mix at another place than after the step, and each notices only its own steps
        self._session = Session(model, algorithm, timeout=harness.TIMEOUT, notice_steps=False)
        self._session.open(next(model.parameters()).device)
        self._session.bind([self.optimizer])

    def must_send(self, hosts: int) -> float | None:
        codec = getattr(self.algorithm, "codec", None)
        if isinstance(self.algorithm, PowerSGD) and isinstance(codec, Codec):
            inside, whole = factors(self.shapes, self.algorithm.rank)
            return reduced(codec.nbytes(inside, torch.float32) + 4 * whole, hosts)
        if isinstance(self.algorithm, AllReduce) and isinstance(codec, Codec):
            return reduced(codec.nbytes(self.full, torch.float32), hosts)
        if isinstance(self.algorithm, ParameterServer) and isinstance(codec, Codec):  # the busiest link, in two phases
            servers = hosts if self.algorithm.servers == "all" else self.algorithm.servers
            both = [each.nbytes(self.full, torch.float32) for each in (codec, self.algorithm.pull)]
            return sum(both) * (hosts - 1) / servers
        return None

    def bytes_sent(self) -> int | None:
        return self._session.stats.bytes_sent

    def waited(self) -> float | None:
        return self._session.stats.exposed_seconds

    def before_forward(self) -> None:
        self._session.begin_batch("in a benchmark", [self.optimizer], first=False, later_epoch=False)
        self._session.send_buffers()

    def before_backward(self, loss: Tensor) -> None:
        self._session.before_backward(loss)

    def after_backward(self) -> None:
        self._session.after_backward()

    def after_step(self) -> None:
        self._session.after_step(self.optimizer)
        self._session.end_batch(None)

    def choose(self) -> list[str]:
        before = [parameter.detach().clone() for parameter in self.model.parameters()]
        while not self.algorithm.state_dict().get("tuned", True):
            self.run()
        self.optimizer.state.clear()
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), before, strict=True):
                parameter.copy_(value)
            for _, residual in self.algorithm.residuals():
                residual.zero_()
        return self.algorithm.news()

    @contextmanager
    def as_seen(self) -> Iterator[nn.Module]:
        with self._session.consensus():
            yield self.model

    def close(self) -> None:
        self._session.algorithm.settle()
        self._session.close()


class Apart(Ours):
    """Ranks with parameters of their own, in runs of whole intervals. What a run sends arrives within it.

    Local SGD's last exchange of a run begins so early that it is used within it. A decentralized algorithm is timed
    from the start of one mixing to the end of another, as many as intervals: the mixing due after a run's last step
    begins the next run instead, and a run's last one is waited for within it. So a run begins and ends with nothing
    under way: it hides no wait in another case's time, counts exactly its own bytes, and gives each exchange one whole
    interval to hide behind, as in a long training.
    """

    algorithm: Decentralized | LocalSGD

    def __init__(self, model: nn.Module, batches: Batches, algorithm: Decentralized | LocalSGD, **how: Any) -> None:
        super().__init__(model, batches, algorithm, **how)
        self.interval = algorithm.interval
        self._mixes = isinstance(algorithm, Decentralized)
        for _ in range(self.interval - 1 if self._mixes else algorithm.schedule.late):  # count up
            super().after_step()

    def must_send(self, hosts: int) -> float | None:
        """Of several ranks a host it depends on which of them are neighbours."""
        if not isinstance(self.algorithm, Decentralized) or dist.get_world_size() != hosts:
            return None
        return mixed(self.algorithm, self.full) / self.interval

    def limit(self, compute: Phases, wire: float) -> float:
        parts = self.algorithm.fragments if isinstance(self.algorithm, LocalSGD) else 1
        return _limit_beside(compute, wire, self.algorithm.schedule.late, parts, self.interval)

    def before_forward(self) -> None:
        if self._mixes:
            super().after_step()
        super().before_forward()

    def after_step(self) -> None:
        if not self._mixes:
            super().after_step()

    def after_run(self) -> None:
        self._session.algorithm.settle()


def ours(model: nn.Module, batches: Batches, algorithm: Algorithm, **how: Any) -> Ours:
    """Any algorithm of this package; `how` as of `Training`."""
    if isinstance(algorithm, Decentralized | LocalSGD):
        return Apart(model, batches, algorithm, **how)
    return Ours(model, batches, algorithm, **how)


def reduced(nbytes: float, hosts: int) -> float:
    """What has to leave each host for the sum of `nbytes` over all of them."""
    return nbytes * 2 * (hosts - 1) / hosts


def mixed(algorithm: Decentralized, numel: int) -> int:
    """What a rank has to send for one mixing of `numel` elements."""
    return algorithm.topology.degree(dist.get_world_size()) * algorithm.codec.nbytes(numel, torch.float32)
