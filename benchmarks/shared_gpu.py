"""Two processes on one GPU, as ranks of two hosts, exchange while the GPU sleeps at random.

python -m benchmarks shared_gpu --gpu nccl
python -m benchmarks shared_gpu             # small, on the CPU over gloo

The device sleeps before, within and behind exchanges. What arrives must have the bits of the same exchange on the CPU.
NCCL takes the two processes for hosts joined by sockets. NVIDIA does not support this: a failure of NCCL itself proves
nothing.
"""

from __future__ import annotations

import argparse
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
from benchmarks.lab import LOOPBACK
from benchmarks.rows import Row
from ringstrategy import BlockInt, Codec, Collective, Direct, Identity, Ring, Rotated
from ringstrategy.collectives.base import Summand, mean_
from ringstrategy.transport import connect
from ringstrategy.transport.base import Peers

_RANKS = 2
_LIMIT = timedelta(seconds=60)  # a peer is silent: kernels may be compiled meanwhile


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
            mean_(Summand(ours, self.codec, self.residual, seed=seed), self.peers, self.collective)
            sleep()

        sleep()
        ours.copy_(values, non_blocking=True)  # late, and what travels must be this
        self.peers.finish([self.peers.submit(exchange, "among delays")])
        sleep()
        result = ours.clone()
        ours.fill_(torch.nan)  # nothing may still read it
        return result.cpu()


def _delayed(options: argparse.Namespace) -> None:
    """What runs in each process."""
    rounds, numel = (2, 5000) if options.gpu is None else (8, (1 << 20) + 300)
    rank, delays, cpu = dist.get_rank(), random.Random(dist.get_rank()), torch.device("cpu")
    device = harness.device_of(options)
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
                rate=options.gpu or "gloo",
                hosts=_RANKS,
                error=max(gaps),
                ranks_identical=all(same),
                elements=numel,
                **harness.made_with(harness.name_of(device)),
            )
        )
    peers.close()
    twins.close()
    if rank == 0:
        harness.publish(f"exchanges among delays, {harness.network(options)}", rows, options.out)
    harness.max_over_ranks(0.0)  # all are done
    if wrong:
        sys.exit(f"rank {rank}: {'; '.join(wrong)}")


def main(given: Sequence[str]) -> None:
    """Start two ranks of this command, or be one of them."""
    parser = harness.arguments("shared_gpu", __doc__, rounds=None, cases=False)
    harness.add_gpu(parser)
    parser.set_defaults(hosts=[_RANKS], processes=1, rate=LOOPBACK)
    harness.run(parser, given, _delayed)
