"""Two processes on one GPU, as ranks of two hosts, exchange while the GPU sleeps at random.

python -m benchmarks shared_gpu --backend gloo
python -m benchmarks shared_gpu --dry  # small, on the CPU over gloo

The device sleeps before, within and behind exchanges. What arrives must have the bits of the same exchange on the CPU.
NCCL takes the two processes for hosts joined by sockets. NVIDIA does not support this: a failure of NCCL itself proves
nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import harness
from benchmarks.lab import LOOPBACK, Lab, exit_on_sigterm
from benchmarks.rows import Row
from ringstrategy import BlockInt, Codec, Collective, Direct, Identity, Ring, Rotated
from ringstrategy.collectives.base import mean_
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
        rows.append(
            Row(
                benchmark="shared_gpu",
                case=case,
                rate=options.backend,
                hosts=_RANKS,
                error=max(gaps),
                ranks_identical=all(same),
                elements=numel,
                **harness.made_with("cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)),
            )
        )
    peers.close()
    twins.close()
    if rank == 0:
        where = "the CPU" if options.dry else "one GPU"
        harness.publish(f"two processes on {where}, over {options.backend}", rows, options.out)
    return wrong


def _be_a_rank(options: argparse.Namespace) -> None:
    device = torch.device("cpu" if options.dry else "cuda:0")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    over = "cpu:gloo,cuda:nccl" if options.backend == "nccl" else "gloo"
    dist.init_process_group(over, timeout=_LIMIT)
    wrong = _delayed(device, options)
    harness.max_over_ranks(0.0)  # a barrier may be NCCL's
    dist.destroy_process_group()
    if wrong:
        sys.exit(f"rank {os.environ['RANK']}: {'; '.join(wrong)}")


def main(given: Sequence[str]) -> None:
    """Start two ranks of this command, or be one of them."""
    parser = harness.arguments("shared_gpu", __doc__, rounds=None, cases=False)
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--dry", action="store_true", help="small, and on the CPU")
    options = parser.parse_args(given)
    if options.dry and options.backend == "nccl":
        parser.error("NCCL needs a GPU: --dry goes with --backend gloo")
    if not (options.dry or torch.cuda.is_available()):
        sys.exit("this needs a GPU, and torch sees none here: --dry runs it small on the CPU")
    if "RANK" in os.environ:
        _be_a_rank(options)
        return
    exit_on_sigterm()
    with harness.refusing(parser), Lab(_RANKS, LOOPBACK) as lab:
        told = {harness.COMMIT: harness.commit(), **TWO_HOSTS, "NCCL_SOCKET_IFNAME": lab.interface}
        for rank in range(_RANKS):
            command = [sys.executable, "-m", "benchmarks", "shared_gpu", *given]
            lab.popen(rank, command, {**told, "NCCL_HOSTID": f"host{rank}"})
        codes = lab.wait()
    if any(codes):
        sys.exit("; ".join(f"rank {rank} ended with {code}" for rank, code in enumerate(codes) if code))
