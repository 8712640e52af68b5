"""How a rank's memory grows with the model, for each strategy: as the kernel counts it, pages of several ranks once.

python -m benchmarks memory --mb 400
python -m benchmarks memory --mb 400 --strategies ddp,ring_int8,central_storage --ranks 4
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.trainer import quiet_trainer

_WIDTH, _STEPS = 2048, 36  # a layer of 16.8 MB; `diloco` has agreed after 32 steps
_STRATEGIES = "ddp,ring,ring_int8,ring_int4,ring_powersgd,central_storage,local_sgd,diloco,diloco_int4"


class _Module(L.LightningModule):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-4)


class _Most(L.Callback):
    """The most that this process took when gradients were there, and when a step had ended; from the third step on."""

    def __init__(self) -> None:
        self.nbytes = 0

    def _look(self, trainer: L.Trainer, *_: Any) -> None:
        if torch.distributed.is_initialized():  # so that all ranks hold what they hold at once
            torch.distributed.barrier()
        if trainer.global_step >= 2:
            self.nbytes = max(self.nbytes, _proportional_bytes())

    on_before_optimizer_step = on_train_batch_end = _look  # type: ignore[assignment]


def _proportional_bytes() -> int:
    """Of this process; a page that n processes share counts 1/n."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not tell the proportional set size")


def _fit(strategy: str, ranks: int, layers: int, folder: Path) -> None:
    """As one of the processes that Lightning starts: each leaves a file."""
    import ringstrategy  # noqa: F401  # registers the names

    torch.set_num_threads(1)
    most = _Most()
    trainer = quiet_trainer(strategy=strategy, devices=ranks, max_steps=_STEPS, callbacks=[most])
    trainer.fit(_Module(layers), DataLoader(TensorDataset(torch.randn(8 * _STEPS * ranks, _WIDTH)), 8))
    (folder / f"{trainer.global_rank}.json").write_text(json.dumps(most.nbytes))


def _measured(strategy: str, ranks: int, layers: int) -> int:
    """Bytes of all ranks together."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "benchmarks.memory", "--fit", strategy, str(ranks), str(layers), name]
        # what is freed goes back to the kernel at once
        subprocess.run(command, check=True, env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"})
        each = [json.loads(path.read_text()) for path in Path(name).iterdir()]
    assert len(each) == ranks, f"{strategy}: {len(each)} of {ranks} ranks told"
    return sum(each)


def main(given: Sequence[str]) -> None:
    """Measure and print."""
    if list(given[:1]) == ["--fit"]:
        _fit(given[1], int(given[2]), int(given[3]), Path(given[4]))
        return
    parser = argparse.ArgumentParser("python -m benchmarks memory", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--mb", type=int, default=400, help="of parameters; default 400")
    parser.add_argument("--ranks", type=int, default=2, help="processes on this host; default 2")
    parser.add_argument("--strategies", default=_STRATEGIES, help=f"default: {_STRATEGIES}")
    asked = parser.parse_args(given)
    half = max(1, round(asked.mb * 1e6 / (8 * _WIDTH**2)))
    nbytes = 4 * _WIDTH**2 * half
    table = Table(
        title=f"Adam, {asked.ranks} ranks on a host, parameters of {nbytes / 1e6:.0f} and {nbytes / 5e5:.0f} MB"
    )
    for heading in ("strategy", "MB a rank", "copies of the parameters", "beside them, MB"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for strategy in ("one process", *asked.strategies.split(",")):
        name, ranks = ("auto", 1) if strategy == "one process" else (strategy, asked.ranks)
        small, large = (_measured(name, ranks, layers) / ranks for layers in (half, 2 * half))
        copies, fixed = (large - small) / nbytes, 2 * small - large
        table.add_row(strategy, f"{large / 1e6:.0f}", f"{copies:.2f}", f"{fixed / 1e6:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
