"""Two processes on one GPU, as ranks of two hosts: whole trainings, and exchanges on delayed streams.

python -m benchmarks shared_gpu training --backend nccl
python -m benchmarks shared_gpu training --backend nccl --rate 1gbit --width 2048   # as root: between them a slow link
python -m benchmarks shared_gpu streams --backend gloo
python -m benchmarks shared_gpu training --dry           # small, on the CPU over gloo, as the others

- training: Lightning trainers with our names. Ranks must end with the same bits, `ring` with those of `ddp`, and a loss
  scaler must skip the step in which one rank overflows.
- streams: the device sleeps at random before, within and behind exchanges. What arrives must have the bits of the same
  exchange on the CPU.

NCCL takes the two processes for hosts joined by sockets. NVIDIA does not support this: a failure of NCCL itself proves
nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import harness
from benchmarks.lab import LOOPBACK, Lab, exit_on_sigterm
from benchmarks.rows import Row
from benchmarks.trainer import quiet_trainer
from ringstrategy import AllReduce, BlockInt, Codec, Collective, Direct, Gaussian, Identity, Ring, RingStrategy, Rotated
from ringstrategy.collectives.base import mean_
from ringstrategy.names import STRATEGIES
from ringstrategy.transport import connect
from ringstrategy.transport.base import Peers

_RANKS = 2
_LIMIT = timedelta(seconds=60)  # a peer is silent: kernels may be compiled meanwhile
# By these NCCL takes its ranks on one GPU for ranks of several hosts, if each has an NCCL_HOSTID of its own too.
TWO_HOSTS = {
    "NCCL_NET": "Socket",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    **dict.fromkeys(("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"), "1"),
    **dict.fromkeys(("NCCL_NVLS_ENABLE", "NCCL_MNNVL_ENABLE"), "0"),
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
_BATCH = 64
_OVERFLOWS = 3  # the batch in which rank 1 does
_SCALE = 2.0**8  # of the loss, until then


# Whole trainings


@dataclass(frozen=True)
class _Run:
    """One training. `make` gives its strategy; some need NCCL."""

    make: Callable[[], Strategy]
    precision: str = "32-true"
    overflows: bool = False
    needs_nccl: bool = False


def _named(name: str) -> Callable[[], Strategy]:
    return lambda: RingStrategy(STRATEGIES[name](), timeout=_LIMIT)


def _fed_back(codec: Codec) -> Callable[[], Strategy]:
    return lambda: RingStrategy(AllReduce(codec, Direct(), error_feedback=True), timeout=_LIMIT)


def _powersgd_hook() -> Strategy:
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    return DDPStrategy(ddp_comm_state=state, ddp_comm_hook=powerSGD_hook, timeout=_LIMIT)


_TRAININGS = {
    "ddp": _Run(lambda: DDPStrategy(timeout=_LIMIT)),
    "ddp fp16": _Run(lambda: DDPStrategy(ddp_comm_hook=fp16_compress_hook, timeout=_LIMIT)),
    # over gloo its buckets would meet in another order on each rank
    "ddp powersgd rank 1": _Run(_powersgd_hook, needs_nccl=True),
    **{name: _Run(_named(name)) for name in ("ring", "ring_int8", "ring_int4", "ring_powersgd", "gossip_int8")},
    "ring_sign, feedback": _Run(_fed_back(Rotated(Gaussian(1)))),
    "ring_int8, bf16-mixed": _Run(_named("ring_int8"), precision="bf16-mixed"),
    "ring_int8, feedback, 16-mixed, one overflow": _Run(_fed_back(BlockInt(8)), precision="16-mixed", overflows=True),
}


class _Net(L.LightningModule):
    """Three layers of `width`, in several buckets; remembers when steps began."""

    def __init__(self, width: int, overflows: bool) -> None:
        super().__init__()
        self.overflows = overflows
        self.layers = nn.Sequential(
            *(nn.Linear(64, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU()),
            *(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, 10)),
        )
        self.begins: list[float] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Cross-entropy of (_BATCH, 64) inputs."""
        inputs, classes = batch
        return F.cross_entropy(self.layers(inputs), classes)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """See `loss`; infinite where this rank overflows."""
        self.begins.append(time.perf_counter())
        loss = self.loss(batch)
        overflows = self.overflows and batch_idx == _OVERFLOWS and self.global_rank == 1
        return loss * float("inf") if overflows else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def _data(batches: int) -> DataLoader[tuple[Tensor, ...]]:
    """For all ranks together."""
    inputs = torch.randn(_RANKS * batches * _BATCH, 64, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(1)), _BATCH)


def _train(device: torch.device, options: argparse.Namespace) -> list[str]:
    """What went wrong."""
    batches, width = (5, 32) if options.dry else (12, options.width)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    rows, wrong, truth, base = [], [], torch.empty(0), 0.0
    for name in harness.chosen(_TRAININGS, options.cases):
        run = _TRAININGS[name]
        if run.needs_nccl and options.backend != "nccl":
            continue
        torch.manual_seed(0)
        net, data = _Net(width, run.overflows), _data(batches)
        first = net.loss(next(iter(data))).item()
        how: dict[str, Any] = {"precision": run.precision}
        if run.precision == "16-mixed":
            scaler = torch.amp.GradScaler(device.type, init_scale=_SCALE)  # the trainer's own needs a GPU
            how = {"plugins": [MixedPrecision("16-mixed", device.type, scaler)]}
        strategy = run.make()
        how |= {"accelerator": "cpu" if device.type == "cpu" else "gpu", "strategy": strategy, "max_epochs": 1}
        trainer = quiet_trainer(devices=processes, num_nodes=_RANKS // processes, **how)
        trainer.fit(net, data)
        last = net.cpu().loss(next(iter(data))).item()
        after = torch.cat([parameter.detach().cpu().view(-1) for parameter in net.parameters()])
        truth = after if name == "ddp" else truth
        identical = harness.identical_on_all_ranks([after])
        wrong += [f"{name}: {why}" for why in _faults(name, run, trainer, (first, last), after, truth, identical)]
        seconds = [end - begin for begin, end in zip(net.begins[2:], net.begins[3:], strict=False)]
        base = statistics.median(seconds) if name == "ddp" else base
        stats = getattr(strategy, "stats", None)
        rows.append(
            _row(
                options,
                device,
                case=name,
                size=f"MLP of {len(after) / 1e6:.1f} M parameters",
                seconds=seconds,
                seconds_median=statistics.median(seconds),
                baseline="ddp",
                ratio=base / statistics.median(seconds) if base else None,
                bytes_sent=None if stats is None or stats.bytes_sent is None else stats.bytes_sent / batches,
                ranks_identical=identical,
                best_loss=last,
            )
        )
    _publish("training", rows, options)
    return wrong


def _faults(
    name: str, run: _Run, trainer: L.Trainer, losses: tuple[float, float], after: Tensor, truth: Tensor, identical: bool
) -> list[str]:
    """What is wrong with a training: its losses before and after, its parameters then, beside those of ddp."""
    replicas = not getattr(getattr(trainer.strategy, "algorithm", None), "decentralized", False)
    found = (
        (trainer.world_size != _RANKS, f"the world has {trainer.world_size} ranks"),
        (replicas and not identical, "ranks differ"),
        (not after.isfinite().all(), "parameters are not finite"),
        (not losses[1] < losses[0], f"the loss goes from {losses[0]:.3f} to {losses[1]:.3f}"),
        (name == "ring" and len(truth) and not torch.equal(after, truth), "not the bits of ddp"),
        (run.overflows and _scale(trainer) != _SCALE / 2, f"the scale is {_scale(trainer)} after one overflow"),
    )
    return [why for fails, why in found if fails]


def _scale(trainer: L.Trainer) -> float:
    """Of the loss; 1 without a scaler."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())


# Exchanges on delayed streams


def _exchanges() -> list[tuple[Codec, Collective]]:
    """Of which each processor gives the same bytes."""
    codecs = (Identity(), BlockInt(8), Rotated(BlockInt(4)))
    return [(codec, collective) for codec in codecs for collective in (Ring(), Direct())]


@dataclass(frozen=True)
class _Exchanges:
    """Of one codec over one collective, with feedback."""

    peers: Peers
    codec: Codec
    collective: Collective
    residual: Tensor

    def mean(self, values: Tensor, seed: int, sleep: Callable[[], object]) -> Tensor:
        """Of what all ranks have in pinned memory or on the CPU. Sleeps everywhere."""
        device = self.residual.device
        ours = torch.full_like(values, torch.nan, device=device)

        def exchange() -> None:
            sleep()
            mean_(ours, self.peers, self.collective, self.codec, residual=self.residual, seed=seed)
            sleep()

        sleep()
        ours.copy_(values, non_blocking=True)  # late, and what travels must be this
        self.peers.finish([self.peers.submit(exchange, "among delays")])
        sleep()
        result = ours.clone()
        ours.fill_(torch.nan)  # nothing may still read it
        return result.cpu()


def _delayed(device: torch.device, options: argparse.Namespace) -> list[str]:
    """What went wrong."""
    rounds, numel = (2, 5000) if options.dry else (8, (1 << 20) + 300)
    rank, delays, cpu = dist.get_rank(), random.Random(dist.get_rank()), torch.device("cpu")
    peers, twins = connect(device, _LIMIT), connect(cpu, _LIMIT)

    def sleep() -> None:
        """Up to 2 ms or so, of the current stream."""
        if device.type == "cuda":
            torch.cuda._sleep(delays.randrange(4_000_000))
        else:
            time.sleep(delays.random() * 1e-3)

    rows, wrong = [], []
    for codec, collective in _exchanges():
        ours = _Exchanges(peers, codec, collective, torch.zeros(numel, device=device))
        twin = _Exchanges(twins, codec, collective, torch.zeros(numel))
        gaps, same = [], []
        for number in range(rounds):
            values = torch.randn(numel, generator=torch.Generator().manual_seed(_RANKS * number + rank)) / _RANKS
            result = ours.mean(values.pin_memory() if device.type == "cuda" else values, number, sleep)
            gaps.append((result - twin.mean(values, number, lambda: None)).abs().max().item())
            same.append(harness.identical_on_all_ranks([result]))
        case = f"{codec}, {collective}"
        if any(gaps):
            wrong.append(f"{case}: {sum(map(bool, gaps))} of {rounds} results are not those of the CPU, by {max(gaps)}")
        if not all(same):
            wrong.append(f"{case}: ranks differ")
        rows.append(_row(options, device, case=case, error=max(gaps), ranks_identical=all(same), elements=numel))
    peers.close()
    twins.close()
    _publish("streams", rows, options)
    return wrong


# What they share


_WORK = {"training": _train, "streams": _delayed}


def _row(options: argparse.Namespace, device: torch.device, **found: Any) -> Row:
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return Row(
        benchmark=f"shared_gpu {options.work}",
        rate=f"{options.backend} on {options.rate}",
        hosts=_RANKS,
        device=name,
        torch=torch.__version__,
        commit=harness.commit(),
        **found,
    )


def _publish(title: str, rows: Sequence[Row], options: argparse.Namespace) -> None:
    if dist.get_rank() == 0:
        where = "the CPU" if options.dry else "one GPU"
        harness.publish(
            f"{title}: two processes on {where}, over {options.backend} on {options.rate}", rows, options.out
        )


def _be_a_rank(options: argparse.Namespace) -> None:
    device = torch.device("cpu" if options.dry else "cuda:0")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    over = "cpu:gloo,cuda:nccl" if options.backend == "nccl" else "gloo"
    dist.init_process_group(over, timeout=_LIMIT)  # trainers take what there is
    wrong = _WORK[options.work](device, options)
    harness.max_over_ranks(0.0)  # a barrier may be NCCL's
    dist.destroy_process_group()
    if wrong:
        sys.exit(f"rank {os.environ['RANK']}: {'; '.join(wrong)}")


def main(given: Sequence[str]) -> None:
    """Start two ranks of this command, or be one of them."""
    parser = harness.arguments("shared_gpu", __doc__, rounds=None)
    parser.add_argument("work", choices=_WORK)
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--rate", default=LOOPBACK, help="of the link between them; all but loopback needs root")
    parser.add_argument("--width", type=int, default=1024, help="of the trained MLP; 4.3 M parameters at 1024")
    parser.add_argument("--dry", action="store_true", help="small, and on the CPU")
    options = parser.parse_args(given)
    if options.dry and options.backend == "nccl":
        parser.error("NCCL needs a GPU: --dry goes with --backend gloo")
    if not (options.dry or torch.cuda.is_available()):
        sys.exit("this needs a GPU, and torch sees none here: --dry runs it small on the CPU")
    with harness.refusing(parser):
        harness.chosen(_TRAININGS, options.cases)
    if "RANK" in os.environ:
        _be_a_rank(options)
        return
    exit_on_sigterm()
    told = {harness.COMMIT: harness.commit(), **TWO_HOSTS}
    with harness.refusing(parser), Lab(_RANKS, options.rate) as lab:
        told["NCCL_SOCKET_IFNAME"] = lab.interface
        for rank in range(_RANKS):
            command = [sys.executable, "-m", "benchmarks", "shared_gpu", *given]
            lab.popen(rank, command, {**told, "NCCL_HOSTID": f"host{rank}"})
        codes = lab.wait()
    if any(codes):
        sys.exit("; ".join(f"rank {rank} ended with {code}" for rank, code in enumerate(codes) if code))
