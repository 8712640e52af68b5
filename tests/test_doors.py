"""One training through every door, with every codec, on 2 and 3 ranks, beside torch DDP over gloo.

What a door promises besides is in the tests of that door.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pool import Pool
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

import ringstrategy
import ringstrategy.horovod as hvd
from ringstrategy import AllReduce, BlockInt, Cast, Direct, Gaussian, GroupOptions, Identity, Rotated
from ringstrategy.codecs import Codec
from ringstrategy.collectives import Collective
from ringstrategy.session import Session

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
MINUTE = timedelta(minutes=1)
CODECS: dict[str, tuple[Codec, Collective | None]] = {
    "none": (Identity(), None),
    "fp16": (Cast("float16"), None),
    "int8": (BlockInt(8), None),
    "int4": (Rotated(Gaussian(4)), Direct()),
    "sign": (Rotated(Gaussian(1)), Direct()),
}
SMALLER = {"fp16": (1.99, 2.0), "int8": (3.7, 4.0), "int4": (7.0, 8.0), "sign": (22.0, 32.0)}  # times fewer bytes
HALF, STEPS, ROWS = 3, 6, 8  # an epoch of Lightning's is half a run


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(60, 150), nn.Tanh(), nn.Linear(150, 41))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), 0.5, momentum=0.5)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Other rows on each rank; each half of a run has the same."""
    inputs = torch.randn(ROWS, 60, generator=torch.Generator().manual_seed(100 * (step % HALF) + rank))
    return inputs, inputs[:, :41].sin()


def loss(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(module(inputs), targets)


def flat(module: nn.Module) -> Tensor:
    whole = (getattr(parameter, "full_tensor", lambda p=parameter: p)() for parameter in module.parameters())
    return torch.cat([tensor.detach().reshape(-1) for tensor in whole])


def algorithm(codec: str) -> AllReduce:
    return AllReduce(*CODECS[codec], error_feedback=True)


@dataclass
class How:
    """Of one training."""

    codec: str
    passes: int = 1  # backwards a step, each on its part of the batch
    resumes: Path | None = None  # from what was saved there after half of the steps
    saves: Path | None = None


# Doors whose user writes the loop


class Loop(ABC):
    """What a user has made behind a door, and how the user's loop calls it."""

    module: nn.Module
    optimizer: Any

    def __init__(self, how: How) -> None:
        self.saved = None if how.resumes is None else torch.load(self.file(how.resumes), weights_only=True)

    def file(self, folder: Path) -> Path:
        return folder / f"rank{dist.get_rank()}.pt"

    def restore(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if self.saved is not None:
            module.load_state_dict(self.saved["module"])
            optimizer.load_state_dict(self.saved["optimizer"])

    def begin(self, step: int) -> None:
        """A step begins."""

    def accumulating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        state = {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict(), "ours": self.state()}
        torch.save(state, self.file(folder))

    def state(self) -> dict[str, Any]:
        """What the door keeps from step to step."""
        return {}

    @abstractmethod
    def bytes_sent(self) -> int | None:
        """By this rank."""

    def close(self) -> None:
        """The training is over."""


class Ddp(Loop):
    """Torch's, in a group of ours, or of gloo's (None)."""

    def __init__(self, how: How, group: Any = None) -> None:
        super().__init__(how)
        self.group = group
        self.module = DistributedDataParallel(net(dist.get_rank()), process_group=group)
        self.optimizer = sgd(self.module)

    def accumulating(self) -> AbstractContextManager[None]:
        found: AbstractContextManager[None] = self.module.no_sync()
        return found

    def bytes_sent(self) -> int | None:
        return None if self.group is None else self.group.stats.bytes_sent


def ours(codec: str) -> dist.ProcessGroup:
    """It also encodes what is short; it keeps no residuals."""
    options = GroupOptions(AllReduce(*CODECS[codec]), exact_below=1 << 10)
    group = dist.new_group(backend="ring", pg_options=options)
    assert isinstance(group, dist.ProcessGroup)
    return group


class Hooked(Ddp):
    """Torch's DDP over gloo, with a hook of ours."""

    def __init__(self, how: How) -> None:
        super().__init__(how)
        self.restore(self.module, self.optimizer)
        self.ours, hook = ringstrategy.ddp_hook(
            *CODECS[how.codec], error_feedback=True, module=self.module, timeout=MINUTE
        )
        self.module.register_comm_hook(self.ours, hook)
        if self.saved is not None:
            self.ours.load_state_dict(self.saved["ours"])

    def state(self) -> dict[str, Any]:
        return self.ours.state_dict()

    def bytes_sent(self) -> int | None:
        return self.ours.stats.bytes_sent

    def close(self) -> None:
        self.ours.close()


class Plain(Loop):
    """A `Session` in a plain loop."""

    def __init__(self, how: How) -> None:
        super().__init__(how)
        self.module = net(dist.get_rank())
        self.session = Session(self.module, algorithm(how.codec), timeout=MINUTE)
        self.session.open(torch.device("cpu"))
        self.optimizer = sgd(self.module)
        self.restore(self.module, self.optimizer)
        if self.saved is None:
            self.session.synchronize()
        else:
            self.session.load_state_dict(self.saved["ours"])
        self.session.bind([self.optimizer])

    def begin(self, step: int) -> None:
        self.session.begin_batch(f"in step {step}", [self.optimizer], first=step == 0, later_epoch=False)

    def accumulating(self) -> AbstractContextManager[None]:
        return self.session.no_sync()

    def backward(self, loss: Tensor) -> None:
        self.session.backward(loss)

    def step(self) -> None:
        super().step()
        self.session.end_batch(1)

    def state(self) -> dict[str, Any]:
        return self.session.state_dict()

    def bytes_sent(self) -> int | None:
        return self.session.stats.bytes_sent

    def close(self) -> None:
        self.session.close()


class Horovod(Loop):
    """Horovod's optimizer, which counts backwards itself."""

    def __init__(self, how: How) -> None:
        super().__init__(how)
        hvd.init(timeout=MINUTE)
        self.module = net(hvd.rank())
        self.optimizer = hvd.DistributedOptimizer(
            sgd(self.module),
            self.module.named_parameters(),
            algorithm=algorithm(how.codec),
            backward_passes_per_step=how.passes,
        )
        self.restore(self.module, self.optimizer)
        if self.saved is None:
            hvd.broadcast_parameters(self.module.state_dict(), root_rank=0)
        else:
            self.optimizer.session.load_state_dict(self.saved["ours"])

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.session.state_dict()
        return found

    def bytes_sent(self) -> int | None:
        sent: int | None = self.optimizer.session.stats.bytes_sent
        return sent

    def close(self) -> None:
        hvd.shutdown()


class OfFabric(Loop):
    """A package's Fabric."""

    def __init__(self, package: str, of_ours: str, how: How) -> None:
        self.strategy = import_module(of_ours).RingFabricStrategy(algorithm(how.codec), timeout=MINUTE)
        devices = dist.get_world_size()
        self.fabric = import_module(package).Fabric(accelerator="cpu", devices=devices, strategy=self.strategy)
        self.fabric.launch()
        module = net(self.fabric.global_rank)
        self.module, self.optimizer = self.fabric.setup(module, sgd(module))
        if how.resumes is not None:
            self.fabric.load(how.resumes / "fabric.ckpt", self.both())

    def both(self) -> dict[str, Any]:
        return {"module": self.module, "optimizer": self.optimizer}

    def accumulating(self) -> AbstractContextManager[None]:
        found: AbstractContextManager[None] = self.fabric.no_backward_sync(self.module)
        return found

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss)

    def save(self, folder: Path) -> None:
        self.fabric.save(folder / "fabric.ckpt", self.both())

    def bytes_sent(self) -> int | None:
        sent: int | None = self.strategy.stats.bytes_sent
        return sent

    def close(self) -> None:
        self.strategy.close()


class Fsdp(Loop):
    """FSDP2, which expects the same parameters on all ranks; its sums in a group of ours, or through `fsdp` (None)."""

    def __init__(self, how: How, group: Any = None) -> None:
        self.group, self.ours = group, None
        mesh = DeviceMesh.from_group(dist.group.WORLD if group is None else group, "cpu")
        module = net(0)
        for part in (module[0], module[2], module):
            fully_shard(part, mesh=mesh)
        if group is None:
            codec, collective = CODECS[how.codec]
            self.ours = ringstrategy.fsdp(module, codec, collective=collective, exact_below=0, timeout=MINUTE)
        self.module, self.optimizer = module, sgd(module)
        if how.resumes is not None:
            state = self.whole()
            dcp.load(state, checkpoint_id=how.resumes)
            set_state_dict(
                module, self.optimizer, model_state_dict=state["module"], optim_state_dict=state["optimizer"]
            )

    def whole(self) -> dict[str, Any]:
        of_module, of_optimizer = get_state_dict(self.module, self.optimizer)
        return {"module": of_module, "optimizer": of_optimizer, "ours": self.ours}

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        self.module.set_requires_gradient_sync(False)
        yield
        self.module.set_requires_gradient_sync(True)

    def save(self, folder: Path) -> None:
        dcp.save(self.whole(), checkpoint_id=folder)

    def bytes_sent(self) -> int | None:
        return self.ours.stats.bytes_sent if self.group is None else self.group.stats.bytes_sent

    def close(self) -> None:
        if self.ours is not None:
            self.ours.close()


def looped(make: Callable[[How], Loop], how: How) -> tuple[Tensor, int | None]:
    """The parameters at the end, and the bytes that this rank has sent."""
    loop = make(how)
    for step in range(0 if how.resumes is None else HALF, STEPS):
        loop.begin(step)
        parts = [rows.chunk(how.passes) for rows in batch(dist.get_rank(), step)]
        for index, (inputs, targets) in enumerate(zip(*parts, strict=True)):
            with nullcontext() if index + 1 == how.passes else loop.accumulating():
                loop.backward(loss(loop.module, inputs, targets) / how.passes)
        loop.step()
        if how.saves is not None and step + 1 == HALF:
            loop.save(how.saves)
    sent = loop.bytes_sent()
    loop.close()
    return flat(loop.module), sent


# A door that has the loop itself


def fitted(package: str, of_ours: str, how: How) -> tuple[Tensor, int | None]:
    """By a package's Trainer."""
    pl = import_module(package)

    class Net(pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net(dist.get_rank())

        def training_step(self, rows: tuple[Tensor, Tensor], index: int) -> Tensor:
            return loss(self.net, *rows)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    saver = [] if how.saves is None else [pl.callbacks.ModelCheckpoint(how.saves, "{epoch}", save_top_k=-1)]
    strategy = import_module(of_ours).RingStrategy(algorithm(how.codec), timeout=MINUTE)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_epochs=STEPS // HALF,
        accumulate_grad_batches=how.passes,
        callbacks=saver,
        enable_checkpointing=bool(saver),
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = TensorDataset(*map(torch.cat, zip(*(batch(dist.get_rank(), step) for step in range(HALF)), strict=True)))
    trainer.fit(
        Net(),
        DataLoader(rows, batch_size=ROWS // how.passes),
        ckpt_path=None if how.resumes is None else how.resumes / "epoch=0.ckpt",
    )
    return flat(trainer.lightning_module), trainer.strategy.stats.bytes_sent


# The table


@dataclass
class Door:
    """A row.

    Args:
        train: how, on each rank.
        feeds_back: it has residuals, and saves them.
        gathers: the bytes that it counts are also those of parameters, which travel exactly.
    """

    train: Callable[[How], tuple[Tensor, int | None]]
    feeds_back: bool = True
    gathers: bool = False


def in_group(make: Callable[[How, Any], Loop], how: How) -> tuple[Tensor, int | None]:
    return looped(lambda how: make(how, ours(how.codec)), how)


DOORS = {
    "Session": Door(partial(looped, Plain)),
    "Trainer": Door(partial(fitted, "lightning.pytorch", "ringstrategy")),
    "Trainer of pytorch_lightning": Door(partial(fitted, "pytorch_lightning", "ringstrategy.pytorch_lightning")),
    "Fabric": Door(partial(looped, partial(OfFabric, "lightning.fabric", "ringstrategy"))),
    "Fabric of lightning_fabric": Door(
        partial(looped, partial(OfFabric, "lightning_fabric", "ringstrategy.lightning_fabric"))
    ),
    "Horovod": Door(partial(looped, Horovod)),
    "DDP with a hook": Door(partial(looped, Hooked)),
    "DDP in a group": Door(partial(in_group, Ddp), feeds_back=False),
    "FSDP2": Door(partial(looped, Fsdp)),
    "FSDP2 in a group": Door(partial(in_group, Fsdp), feeds_back=False, gathers=True),
}


def codecs_of(door: str) -> list[str]:
    return [codec for codec in CODECS if codec != "sign" or DOORS[door].feeds_back]


@dataclass
class Cells:
    """Of one door, on one rank."""

    ddp: Tensor  # parameters at the end, as below
    accumulated: Tensor
    accumulated_sent: int | None
    ends: dict[str, Tensor]  # by codec
    resumed: dict[str, Tensor]
    sent: dict[str, int | None]


def _cells(door: str, folder: Path) -> Cells:
    dist.init_process_group("gloo", timeout=MINUTE)
    train, keeps = DOORS[door].train, DOORS[door].feeds_back
    ddp, _ = looped(Ddp, How("none"))
    accumulated, accumulated_sent = train(How("none", passes=2))
    cells = Cells(ddp, accumulated, accumulated_sent, {}, {}, {})
    for codec in codecs_of(door):
        saved = folder / codec if keeps else None
        if saved is not None:
            saved.mkdir(exist_ok=True)
        cells.ends[codec], cells.sent[codec] = train(How(codec, saves=saved))
        if saved is not None:
            cells.resumed[codec], _ = train(How(codec, resumes=saved))
    return cells


@pytest.fixture(scope="module")
def cells(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], list[Cells]]:
    """Of each rank; each door is tried once for all tests."""

    @cache
    def tried(door: str, size: int) -> list[Cells]:
        return ranks(size, _cells, door, tmp_path_factory.mktemp("saved"))

    return tried


SIZES = [2, 3]
each_door = pytest.mark.parametrize("door", DOORS)
each_size = pytest.mark.parametrize("size", SIZES)
each_cell = pytest.mark.parametrize(("door", "codec"), [(door, codec) for door in DOORS for codec in codecs_of(door)])


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


@each_size
@each_door
def test_without_a_codec_it_is_ddp(cells: Any, door: str, size: int) -> None:
    tried = cells(door, size)
    assert len(tried) == size
    for cell in tried:
        assert torch.equal(cell.ends["none"], tried[0].ends["none"])
        if size == 2:
            assert torch.equal(cell.ends["none"], cell.ddp)
        else:
            assert difference(cell.ends["none"], cell.ddp) < 1e-6


@each_size
@each_cell
def test_a_codec_is_at_work_and_the_model_learns(cells: Any, door: str, codec: str, size: int) -> None:
    tried = cells(door, size)
    start, end = net(0), net(0)
    vector_to_parameters(tried[0].ends[codec], end.parameters())
    for rank, cell in enumerate(tried):
        assert torch.equal(cell.ends[codec], tried[0].ends[codec])
        for step in range(HALF):
            assert loss(end, *batch(rank, step)) < 0.8 * loss(start, *batch(rank, step))
    if codec != "none":
        assert difference(tried[0].ends[codec], tried[0].ends["none"]) > 1e-6


@each_size
@each_door
def test_two_backwards_a_step_are_one_of_both(cells: Any, door: str, size: int) -> None:
    for cell in cells(door, size):
        assert 0 < difference(cell.accumulated, cell.ends["none"]) < 1e-6
        if not DOORS[door].gathers:
            assert cell.accumulated_sent == cell.sent["none"]


@each_size
@pytest.mark.parametrize(
    ("door", "codec"), [(door, codec) for door in DOORS if DOORS[door].feeds_back for codec in codecs_of(door)]
)
def test_a_run_that_is_resumed_goes_on_bit_for_bit(cells: Any, door: str, codec: str, size: int) -> None:
    for cell in cells(door, size):
        assert torch.equal(cell.resumed[codec], cell.ends[codec])


@each_size
@each_cell
def test_fewer_bytes_are_sent(cells: Any, door: str, codec: str, size: int) -> None:
    for cell in cells(door, size):
        sent, exact = cell.sent[codec], cell.sent["none"]
        assert sent is not None
        assert exact is not None
        assert sent > 0
        if codec != "none":
            low, high = (1.0, 2.0) if DOORS[door].gathers else SMALLER[codec]  # parameters are gathered exactly
            assert low < exact / sent <= high
