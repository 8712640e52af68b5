"""One small training behind every door, told by one `Story`; what it showed on its rank is a `Seen`."""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import debug
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, TensorDataset

import ringstrategy as ring
import ringstrategy.horovod as hvd
from benchmarks.harness import TWO_HOSTS
from ringstrategy import AllReduce, BlockInt
from ringstrategy.algorithms.base import Algorithm
from ringstrategy.session import Session
from ringstrategy.transport.stats import Stats

MINUTE = timedelta(minutes=1)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # all ranks share one GPU, if there is any
BACKEND = os.environ.get("RINGSTRATEGY_TEST_BACKEND", "nccl")  # of tensors there
HALF, STEPS, ROWS = 3, 6, 8  # an epoch of Lightning's is half a run
RATE, MOMENTUM, DECAY = 0.5, 0.5, 2.0**-10
MORE = slice(-61 * 41, None)  # the place of `Net.more` in all parameters
BAD = 1  # the step that a story spoils
SCALE = 2.0**8
SYNCHRONOUS: dict[str, dict[str, Any]] = {
    "exact": {"codec": ring.Identity()},
    "int8": {"codec": BlockInt(8), "error_feedback": True},
    "int4": {"codec": ring.Rotated(ring.Gaussian(4)), "collective": ring.Direct(), "error_feedback": True},
    "skip": {"on_nonfinite": "skip"},
}
APART: dict[str, Callable[[], Algorithm]] = {
    "gossip": ring.Gossip,
    "local_sgd": lambda: ring.LocalSGD(2, outer=ring.Nesterov(0.4, 0.8)),
}


@dataclass(frozen=True)
class Story:
    """Of one training.

    Attributes:
        algorithm: a key of SYNCHRONOUS or APART; "differs": another codec on each rank.
        passes: backwards a step, each on its part of the batch.
        skips: `Net.more` is used in some steps by some ranks, and in some by none.
        thaws: `Net.first` is frozen in the first half.
        scaled: there is a loss scaler.
        spoils: the factor of rank 1's loss in step BAD.
        dies: rank 1, after the first forward of the second half.
        hurries: from step BAD on, an optimizer for each parameter steps it within backward.
        served: steps in the place of ranks' optimizers, a key of SERVERS; "": they step themselves.
        saves: after the first half, to this folder.
        resumes: from that folder, with the second half.
    """

    algorithm: str = "exact"
    passes: int = 1
    skips: bool = False
    thaws: bool = False
    scaled: bool = False
    spoils: float = 1.0
    dies: bool = False
    hurries: bool = False
    served: str = ""
    saves: str | None = None
    resumes: str | None = None


@dataclass
class Seen:
    """By one rank. Lists begin with what training began with, and have what was so after each step.

    Attributes:
        parameters: all of them, flat.
        residuals: by parameter name, of stories with a codec.
        sent: bytes by this rank so far.
        accumulated: bytes that this rank had sent in a step when its last backward began.
        moved: `Net.more` had a gradient.
        end: parameters that all ranks see.
        error: what ended it.
        lost: the rank that the error names.
    """

    parameters: list[Tensor] = field(default_factory=list)
    residuals: list[dict[str, Tensor]] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    accumulated: list[int] = field(default_factory=list)
    moved: list[bool] = field(default_factory=list)
    end: Any = None
    error: str = ""
    lost: int | None = None

    def note(self, story: Story, net: Any, counts: Any, residuals: Callable[[], dict[str, Tensor]]) -> None:
        """A step has ended, or training begins; `counts` has the statistics."""
        self.parameters.append(flat(net))
        self.sent.append(0 if counts is None else counts.stats.bytes_sent)
        self.moved.append(net.more.weight.grad is not None)
        if story.served and len(self.moved) > 1:  # no gradient is left
            step = len(self.moved) - 2 + (0 if story.resumes is None else HALF)
            self.moved[-1] = any(uses_more(story, rank, step) for rank in range(dist.get_world_size()))
        held = residuals() if story.algorithm in ("int8", "int4") else {}
        self.residuals.append({name.removeprefix("net."): value.to("cpu", copy=True) for name, value in held.items()})


# The training


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last, self.more = nn.Linear(60, 150), nn.Linear(150, 41), nn.Linear(60, 41)
        self.to(DEVICE)

    def forward(self, inputs: Tensor, uses: bool = True) -> Tensor:
        result: Tensor = self.last(self.first(inputs).tanh())
        return result + self.more(inputs) if uses else result


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), RATE, momentum=MOMENTUM, weight_decay=DECAY)


def uses_more(story: Story, rank: int, step: int) -> bool:
    """All ranks in the first step, rank 1 alone in the next, then none."""
    return not story.skips or step % HALF == 0 or (step % HALF == 1 and rank == 1)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Other rows on each rank; each half of a run has the same."""
    inputs = torch.randn(ROWS, 60, generator=torch.Generator().manual_seed(100 * (step % HALF) + rank)).to(DEVICE)
    return inputs, inputs[:, :41].sin()


def loss_of(story: Story, module: Callable[..., Tensor], rows: Any, rank: int, step: int) -> Tensor:
    loss = nn.functional.mse_loss(module(rows[0], uses_more(story, rank, step)), rows[1])
    if story.dies and (rank, step) == (1, HALF):
        os._exit(1)
    return loss * story.spoils if (rank, step) == (1, BAD) else loss


def flat(module: nn.Module) -> Tensor:
    whole = (getattr(parameter, "full_tensor", lambda p=parameter: p)() for parameter in module.parameters())
    return torch.cat([tensor.detach().reshape(-1) for tensor in whole]).cpu()


def begin_step(story: Story, module: Any, step: int) -> None:
    """What the user does between two steps."""
    if story.thaws:
        module.first.requires_grad_(step >= HALF)
    if story.hurries and step == BAD:
        for parameter in module.parameters():
            early = torch.optim.SGD([parameter], RATE)
            parameter.register_post_accumulate_grad_hook(lambda _, early=early: early.step())


def algorithm_of(story: Story) -> Algorithm:
    if story.served:
        return SERVERS[story.served](story)
    return APART[story.algorithm]() if story.algorithm in APART else AllReduce(**synchronous(story))


def parameter_server(story: Story) -> Algorithm:
    how = {key: value for key, value in synchronous(story).items() if key != "collective"}
    return ring.ParameterServer(2, bucket_mb=0.02, **how)


SERVERS: dict[str, Callable[[Story], Algorithm]] = {
    "served": parameter_server,
    "central": lambda story: ring.CentralStorage(bucket_mb=0.02),  # which has no codec
}


def synchronous(story: Story) -> dict[str, Any]:
    name = story.algorithm
    return SYNCHRONOUS[("int8", "exact")[dist.get_rank()] if name == "differs" else name]


# Doors whose user writes the loop


class Loop(ABC):
    """What a user makes behind a door, and calls in a loop."""

    module: Any  # as the loop calls it
    net: Any  # as the user has made it
    optimizer: Any
    counts: Any  # it has the statistics
    session: Session | None = None

    def __init__(self, story: Story) -> None:
        self.story = story
        self.scaler = torch.amp.GradScaler(DEVICE.type, init_scale=SCALE) if story.scaled else None
        self.module = self.net = Net(dist.get_rank())
        self.optimizer = sgd(self.net)

    @abstractmethod
    def open(self) -> None:
        """Set up, from what the story resumes if it does."""

    def begin(self, step: int) -> None:
        """A step begins."""

    def accumulating(self) -> AbstractContextManager[None]:
        return self.module.no_sync()

    def scale(self) -> Tensor | None:
        return None if self.scaler is None else self.scaler.scale(torch.ones((), device=DEVICE))

    def backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def save(self, folder: str) -> None:
        state = {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict(), "ours": self.state()}
        torch.save(state, f"{folder}/{dist.get_rank()}.pt")

    def load(self, folder: str) -> Any:
        """Restores what is torch's; returns what is ours. Ranks that have saved nothing take rank 0's."""
        mine = Path(folder) / f"{dist.get_rank()}.pt"
        saved = torch.load(mine if mine.exists() else mine.with_name("0.pt"), weights_only=True)
        self.net.load_state_dict(saved["net"])
        self.optimizer.load_state_dict(saved["optimizer"])
        return saved["ours"]

    def state(self) -> dict[str, Any]:
        """What the door keeps from step to step."""
        return {} if self.session is None else self.session.state_dict()

    def residuals(self) -> dict[str, Tensor]:
        return self.state().get("residuals", {})

    def consensus(self) -> AbstractContextManager[None]:
        """Within, all ranks see the same."""
        return nullcontext() if self.session is None else self.session.consensus()

    def lost(self, error: BaseException) -> int | None:
        return getattr(error, "rank", None)

    def close(self) -> None:
        """The training is over."""
        if isinstance(self.counts, dist.ProcessGroup):
            dist.destroy_process_group(self.counts)
        else:
            self.counts.close()


class OfSession(Loop):
    def open(self) -> None:
        self.counts = self.session = Session(self.net, algorithm_of(self.story), timeout=MINUTE)
        self.session.open(DEVICE, scaled_loss=self.scaler is not None)
        if self.story.resumes is None:
            self.session.synchronize()
        else:
            self.session.load_state_dict(self.load(self.story.resumes))
        self.session.bind([self.optimizer])

    def begin(self, step: int) -> None:
        self.counts.begin_batch(f"in step {step}", [self.optimizer], first=step == 0, later_epoch=False)

    def accumulating(self) -> AbstractContextManager[None]:
        return self.counts.no_sync()

    def backward(self, loss: Tensor) -> None:
        if self.scaler is None:
            self.counts.backward(loss)
            return
        self.counts.before_backward(loss, self.scale())
        super().backward(loss)
        self.counts.after_backward()

    def step(self) -> None:
        with self.counts.stepping(self.optimizer, self.scale):
            super().step()
        self.counts.end_batch(1)


class OfFabric(Loop):
    """A package's Fabric."""

    def __init__(self, package: str, of_ours: str, story: Story) -> None:
        super().__init__(story)
        self.package, self.of_ours = package, import_module(of_ours)
        self.counts = self.of_ours.RingFabricStrategy(algorithm_of(story), timeout=MINUTE)

    def open(self) -> None:
        precision = import_module(f"{self.package}.plugins").MixedPrecision("16-mixed", DEVICE.type, self.scaler)
        self.fabric = import_module(self.package).Fabric(
            **everyone(),
            strategy=self.counts,
            plugins=[precision] if self.story.scaled else [],
        )
        self.fabric.launch()
        self.module, self.optimizer = self.fabric.setup(self.net, self.optimizer)
        self.session = self.counts._models[0].session
        self.both = {"module": self.module, "optimizer": self.optimizer}
        if self.story.resumes is not None:
            self.fabric.load(f"{self.story.resumes}/fabric.ckpt", self.both)

    def accumulating(self) -> AbstractContextManager[None]:
        return self.fabric.no_backward_sync(self.module)

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss)

    def step(self) -> None:
        self.optimizer.step()

    def save(self, folder: str) -> None:
        self.fabric.save(f"{folder}/fabric.ckpt", self.both)

    def consensus(self) -> AbstractContextManager[None]:
        return self.of_ours.consensus(self.module)


class OfHorovod(Loop):
    """Horovod's optimizer, which counts backwards itself."""

    def open(self) -> None:
        hvd.init(timeout=MINUTE)
        self.optimizer = hvd.DistributedOptimizer(
            self.optimizer,
            self.net.named_parameters(),
            algorithm=algorithm_of(self.story),
            backward_passes_per_step=self.story.passes,
            scaler=self.scaler,
        )
        self.counts = self.session = self.optimizer.session
        if self.story.resumes is None:
            hvd.broadcast_parameters(self.net.state_dict(), root_rank=0)
        else:
            self.optimizer.session.load_state_dict(self.load(self.story.resumes))

    def accumulating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self) -> None:
        if self.scaler is not None:
            self.optimizer.synchronize()
        with nullcontext() if self.scaler is None else self.optimizer.skip_synchronize():
            super().step()

    def close(self) -> None:
        hvd.shutdown()


def group_of(story: Story) -> Any:
    """A group of ours; it also encodes what is short."""
    how = {key: value for key, value in synchronous(story).items() if key != "error_feedback"}
    return dist.new_group(backend="ring", pg_options=ring.GroupOptions(AllReduce(**how), exact_below=1 << 10))


class OfHook(Loop):
    """Torch's DDP over gloo, with a hook of ours."""

    def open(self) -> None:
        self.module = DistributedDataParallel(self.net, find_unused_parameters=self.story.skips)
        state = None if self.story.resumes is None else self.load(self.story.resumes)
        self.counts, hook = ring.ddp_hook(**synchronous(self.story), module=self.module, timeout=MINUTE)
        self.module.register_comm_hook(self.counts, hook)
        if state is not None:
            self.counts.load_state_dict(state)

    def state(self) -> dict[str, Any]:
        return self.counts.state_dict()

    def lost(self, error: BaseException) -> int | None:
        return getattr(self.counts.error, "rank", None)


class OfDdp(Loop):
    """Torch's DDP over gloo: nothing is ours."""

    counts = SimpleNamespace(stats=Stats(), close=lambda: None)
    group: Any = None

    def open(self) -> None:
        unused = self.story.skips
        self.module = DistributedDataParallel(self.net, process_group=self.group, find_unused_parameters=unused)


class OfGroup(OfDdp):
    """Torch's DDP over a process group of ours."""

    def open(self) -> None:
        self.counts = self.group = group_of(self.story)
        super().open()

    def lost(self, error: BaseException) -> int | None:
        """DDP keeps the text alone; the next call has the error."""
        try:
            dist.all_reduce(torch.zeros(1 << 12, device=DEVICE), group=self.counts)
        except ring.PeerLostError as named:
            return named.rank
        return None


class OfFsdp(Loop):
    """FSDP2, which expects the same parameters on all ranks; its sums travel by `ringstrategy.fsdp`."""

    group: Any = None  # None: torch's

    def open(self) -> None:
        # else torch takes the mesh for an earlier one of the same ranks, and asks that one's group
        getattr(debug, "_clear_sharding_prop_cache", bool)()  # since torch 2.10
        self.module = self.net = Net(0)
        mesh = DeviceMesh.from_group(dist.group.WORLD if self.group is None else self.group, DEVICE.type)
        for part in (self.net.first, self.net.last, self.net.more, self.net):
            fully_shard(part, mesh=mesh, reshard_after_forward=False)
        self.optimizer = sgd(self.net)
        if self.group is None:
            self.counts = ring.fsdp(self.net, **synchronous(self.story), exact_below=0, timeout=MINUTE)
        if self.story.resumes is not None:
            state = self.whole()
            dcp.load(state, checkpoint_id=self.story.resumes)
            of_torch = {"model_state_dict": state["net"], "optim_state_dict": state["optimizer"]}
            set_state_dict(self.net, self.optimizer, **of_torch)

    def whole(self) -> dict[str, Any]:
        of_net, of_optimizer = get_state_dict(self.net, self.optimizer)
        return {"net": of_net, "optimizer": of_optimizer, "ours": self.counts}

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        self.module.set_requires_gradient_sync(False)
        yield
        self.module.set_requires_gradient_sync(True)

    def save(self, folder: str) -> None:
        dcp.save(self.whole(), checkpoint_id=folder)

    def residuals(self) -> dict[str, Tensor]:
        """By module."""
        states = self.counts.state_dict() if self.group is None else {}
        return {name: state["residual"].to_local() for name, state in states.items()}


class OfFsdpGroup(OfFsdp):
    """FSDP2 in a process group of ours."""

    def open(self) -> None:
        self.counts = self.group = group_of(self.story)
        super().open()


def looped(make: Callable[[Story], Loop], story: Story, seen: Seen) -> nn.Module:
    """The user's loop; returns the user's module."""
    loop, rank = make(story), dist.get_rank()
    try:
        loop.open()
        seen.note(story, loop.net, loop.counts, loop.residuals)
        for step in range(0 if story.resumes is None else HALF, STEPS):
            begin_step(story, loop.net, step)
            loop.begin(step)
            parts = [rows.chunk(story.passes) for rows in batch(rank, step)]
            for index, rows in enumerate(zip(*parts, strict=True)):
                last = index + 1 == story.passes
                if last:
                    seen.accumulated.append(loop.counts.stats.bytes_sent - seen.sent[-1])
                with nullcontext() if last else loop.accumulating():
                    loop.backward(loss_of(story, loop.module, rows, rank, step) / story.passes)
            loop.step()
            seen.note(story, loop.net, loop.counts, loop.residuals)
            loop.optimizer.zero_grad()
            if story.saves is not None and step + 1 == HALF:
                loop.save(story.saves)
        with loop.consensus():
            seen.end = flat(loop.net)
    except BaseException as error:
        seen.lost = loop.lost(error)
        raise
    finally:
        loop.close()
    if story.served:  # what this rank's server sends does not keep step with the rank
        seen.sent[-1] = loop.counts.stats.bytes_sent
    return loop.net


# A door that has the loop itself


def fitted(package: str, of_ours: str, story: Story, seen: Seen) -> nn.Module:
    """By a package's Trainer."""
    pl, ours = import_module(package), import_module(of_ours)
    rank = dist.get_rank()

    class Fitted(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(rank)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

        def note(self) -> None:
            strategy = self.trainer.strategy
            seen.note(story, self.net, strategy, lambda: dict(strategy.algorithm.residuals()))

        def on_train_start(self) -> None:
            self.note()

        def on_train_batch_start(self, rows: Any, index: int) -> None:
            begin_step(story, self.net, self.global_step)

        def training_step(self, rows: tuple[Tensor, Tensor], index: int) -> Tensor:
            if (index + 1) % story.passes == 0:
                seen.accumulated.append(self.trainer.strategy.stats.bytes_sent - seen.sent[-1])
            return loss_of(story, self.net, rows, rank, self.trainer.global_step)

        def on_train_batch_end(self, output: Any, rows: Any, index: int) -> None:
            if (index + 1) % story.passes == 0:
                self.note()

    saver = [] if story.saves is None else [pl.callbacks.ModelCheckpoint(story.saves, "{epoch}", save_top_k=-1)]
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=SCALE)
    precision = import_module(f"{package}.plugins.precision").MixedPrecision("16-mixed", DEVICE.type, scaler)
    trainer = pl.Trainer(
        strategy=ours.RingStrategy(algorithm_of(story), timeout=MINUTE),
        **everyone(),
        max_epochs=STEPS // HALF,
        accumulate_grad_batches=story.passes,
        plugins=[precision] if story.scaled else [],
        callbacks=saver,
        enable_checkpointing=bool(saver),
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = TensorDataset(*map(torch.cat, zip(*(batch(rank, step) for step in range(HALF)), strict=True)))
    module = Fitted()
    try:
        path = None if story.resumes is None else f"{story.resumes}/epoch=0.ckpt"
        trainer.fit(module, DataLoader(rows, batch_size=ROWS // story.passes), ckpt_path=path)
    except ring.PeerLostError as error:
        seen.lost = error.rank
        raise
    seen.end = flat(module)
    if story.served:
        seen.sent[-1] = trainer.strategy.stats.bytes_sent  # type: ignore[attr-defined]
    return module


DOORS: dict[str, Callable[[Story, Seen], nn.Module]] = {
    "ddp": partial(looped, OfDdp),
    "session": partial(looped, OfSession),
    "trainer": partial(fitted, "lightning.pytorch", "ringstrategy"),
    "fabric": partial(looped, partial(OfFabric, "lightning.fabric", "ringstrategy")),
    "horovod": partial(looped, OfHorovod),
    "ddp_hook": partial(looped, OfHook),
    "group": partial(looped, OfGroup),
    "fsdp": partial(looped, OfFsdp),
    "fsdp_in_group": partial(looped, OfFsdpGroup),
    "pytorch_lightning": partial(fitted, "pytorch_lightning", "ringstrategy.pytorch_lightning"),
    "lightning_fabric": partial(looped, partial(OfFabric, "lightning_fabric", "ringstrategy.lightning_fabric")),
}
WHOLE = ["session", "trainer", "fabric", "horovod"]  # doors over a `Session`: they know steps, losses and parameters


def served(by: str, door: str, story: Story, seen: Seen) -> nn.Module:
    """As that door, but something else steps."""
    return DOORS[door](replace(story, served=by), seen)


OF = {by: {f"{by}_{door}": partial(served, by, door) for door in WHOLE} for by in SERVERS}
for each in OF.values():
    DOORS |= each


def join() -> None:
    """Become a rank of the world; on a GPU that of a host of its own, which NCCL takes it for too."""
    backend = "gloo"
    if DEVICE.type == "cuda":
        rank = os.environ["RANK"]
        os.environ.update(TWO_HOSTS, NCCL_SOCKET_IFNAME="lo", NCCL_HOSTID=f"host{rank}", NODE_RANK=rank, LOCAL_RANK="0")
        backend = "cpu:gloo,cuda:nccl" if BACKEND == "nccl" else "gloo"
        torch.cuda.set_device(0)
    dist.init_process_group(backend, timeout=MINUTE)


def everyone() -> dict[str, Any]:
    """Arguments of a Trainer or a Fabric."""
    size = dist.get_world_size()
    devices, nodes = (1, size) if DEVICE.type == "cuda" else (size, 1)
    return {"accelerator": DEVICE.type, "devices": devices, "num_nodes": nodes}


def told(door: str, story: Story) -> Seen:
    """What this rank sees of a story."""
    join()
    seen = Seen()
    try:
        DOORS[door](story, seen)
    except BaseException:  # CheckpointException of torch's is no Exception
        seen.error = traceback.format_exc()
    return seen


def told_again(door: str) -> list[tuple[Tensor, list[str], list[Any], int]]:
    """What two trainings end with, and the threads, hooks and sockets that each of them leaves in its process."""
    join()
    left: list[Any] = []
    for _ in range(2):
        seen = Seen()
        module = DOORS[door](Story("int8"), seen)
        hooks = [*_global_optimizer_pre_hooks, *_global_optimizer_post_hooks]
        hooks += [name for name, p in module.named_parameters() if p._post_accumulate_grad_hooks]
        del module
        gc.collect()
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("ringstrategy")]
        open_ = sockets()
        for _ in range(100):  # torch's store closes those of others when it comes to it
            if left and open_ > left[0][-1]:
                time.sleep(0.05)
                open_ = sockets()
        left.append((seen.end, threads, hooks, open_))
    return left


def sockets() -> int:
    return sum(path.is_socket() for path in Path("/proc/self/fd").iterdir())


def twin(story: Story, size: int) -> Seen:
    """The same in one process, with a plain mean of all ranks' gradients; what is not finite is not stepped."""
    net = Net(0)
    optimizer, seen = sgd(net), Seen()
    seen.note(story, net, None, dict)
    for step in range(STEPS):
        begin_step(story, net, step)
        total: dict[nn.Parameter, Tensor] = {}
        for rank in range(size):
            gradients_of(story, net, rank, step)
            for parameter in net.parameters():
                if parameter.grad is not None:
                    total[parameter] = total[parameter] + parameter.grad if parameter in total else parameter.grad
        for parameter in net.parameters():
            parameter.grad = total[parameter] / size if parameter in total else None
        if all(gradient.isfinite().all() for gradient in total.values()):
            optimizer.step()
        seen.note(story, net, None, dict)
    return replace(seen, end=flat(net))


def gradients_of(story: Story, net: Net, rank: int, step: int) -> Tensor:
    """Of one rank, in one step: flat, with zeros for what it does not use."""
    net.zero_grad()
    for rows in zip(*(rows.chunk(story.passes) for rows in batch(rank, step)), strict=True):
        (loss_of(story, net, rows, rank, step) / story.passes).backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in net.parameters()]).cpu()
