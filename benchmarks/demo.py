"""The same Lightning training on two hosts joined by a slow link, with `ddp` and then with `ring_int8`.

    sudo python -m benchmarks demo

The hosts are network namespaces of this machine (lab.py), so it takes root on Linux; no data are downloaded. Rank 0's
jobs of `ringstrategy-train` stay in `--out`, with the page of `ringstrategy-report`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lab import Lab, LabError, bits_per_second, exit_on_sigterm
from ringstrategy.app import sweep_report

_PARAMETERS = 680_650  # of the CNN below


def train(strategy: str, options: argparse.Namespace) -> None:
    """One job over a fresh pair of hosts."""
    job = ["-m", "ringstrategy.app.train", f"strategy={strategy}", "model=cnn", "model.channels=192", "data=digits"]
    job += ["trainer.num_nodes=2", "trainer.devices=1", f"trainer.max_steps={options.steps}"]
    with Lab(2, options.rate) as lab:
        for rank in range(2):
            folder = (options.out / "of rank 1" / strategy, options.out / "jobs" / strategy)[rank == 0]
            command = [sys.executable, *job, f"hydra.run.dir='{folder}'"]
            lab.popen(rank, command, {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"})
        if any(lab.wait()):
            sys.exit(f"the training with {strategy} failed")


def main(given: Sequence[str]) -> None:
    """Run the strategies one after the other, and compare them."""
    parser = argparse.ArgumentParser("python -m benchmarks demo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", default="100mbit", help="of the link between the hosts; default 100mbit")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--strategies", default="ddp,ring_int8", help="to compare")
    parser.add_argument("--out", type=Path, default=Path("outputs/demo"), help="folder of the jobs, made anew")
    options = parser.parse_args(given)
    options.out = options.out.absolute()
    shutil.rmtree(options.out / "jobs", ignore_errors=True)
    exit_on_sigterm()
    try:
        for strategy in options.strategies.split(","):
            train(strategy, options)
    except LabError as error:
        sys.exit(f"{error}\nWithout root: `make train` compares both over loopback, where no link is slow.")
    sweep_report.main([str(options.out / "jobs")])
    bits = bits_per_second(options.rate)
    if bits is not None:
        milliseconds = 1e3 * 32 * _PARAMETERS / bits
        print(f"The link needs {milliseconds:.0f} ms a step for fp32 gradients, {milliseconds / 4:.0f} ms for 8 bits.")
