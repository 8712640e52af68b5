"""What a run leaves behind: `summary.json`, a PNG of its curves, and a table on the screen."""

import dataclasses
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ringstrategy.collectives import Stats
from ringstrategy.curves import Curves, draw
from ringstrategy.strategy import RingStrategy

FINAL_METRICS = ("val_accuracy", "val_loss")  # the first that the module logged; else the last training loss
HELD_LOSSES = 100  # losses left on the device before they are fetched: fetching each would stall a GPU

Summary = dict[str, Any]


class RunReport(L.Callback):
    """Times every step and writes `summary.json` and `curves.png` into `output_dir` when fit ends, on rank 0.

    A step is what ends with an optimizer step; gradient accumulation makes it several batches. Loading data and
    validation are not in its time. Seconds and bytes are those of rank 0.
    """

    def __init__(self, output_dir: Path, strategy: str, overrides: Sequence[str]) -> None:
        self.output_dir = output_dir
        self.strategy = strategy
        self.overrides = list(overrides)
        self.curves = Curves()
        self._held_losses: list[Tensor] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the counters as they are now for zero."""
        self._last_step = trainer.global_step
        self._first_stats = self._last_stats = _stats_now(trainer)
        self._step_seconds = 0.0
        self._step_loss: Tensor | None = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock."""
        self._batch_started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop the clock; note the step if this batch ended one."""
        self._step_seconds += time.perf_counter() - self._batch_started
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):  # already divided by the number of accumulated batches
            self._step_loss = loss.detach() if self._step_loss is None else self._step_loss + loss.detach()
        if trainer.global_step > self._last_step:
            self._last_step = trainer.global_step
            self._note_step(_stats_now(trainer))
        if trainer.global_step == trainer.max_steps:
            # in the midst of an epoch Lightning would end without validating; when asked to stop it validates first
            trainer.should_stop = True

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the validation loss, if the module logs one."""
        loss = trainer.callback_metrics.get("val_loss")
        if loss is not None:
            self.curves.validation_losses.append((trainer.global_step, float(loss)))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the files: the last checkpoint is on disk and the processes are still there."""
        if trainer.is_global_zero:
            self._fetch_losses()
            plot = None
            if self.curves.step_seconds:
                plot = self.output_dir / "curves.png"
                draw(self.curves, plot)
            write_summary(self.output_dir, self._summary(trainer, plot))

    def _note_step(self, now: Stats | None) -> None:
        curves, before = self.curves, self._last_stats
        curves.step_seconds.append(self._step_seconds)
        self._step_seconds = 0.0
        if self._step_loss is not None:
            self._held_losses.append(self._step_loss)
            self._step_loss = None
            if len(self._held_losses) == HELD_LOSSES:
                self._fetch_losses()
        if now is not None and before is not None:
            curves.exposed_seconds.append(now.exposed_seconds - before.exposed_seconds)
            curves.communication_seconds.append(now.communication_seconds - before.communication_seconds)
        self._last_stats = now

    def _fetch_losses(self) -> None:
        if self._held_losses:
            self.curves.losses.extend(torch.stack(self._held_losses).tolist())
            self._held_losses.clear()

    def _summary(self, trainer: L.Trainer, plot: Path | None) -> Summary:
        seconds = self.curves.step_seconds
        steps = len(seconds)
        metric, value = next(
            (
                (name, float(trainer.callback_metrics[name]))
                for name in FINAL_METRICS
                if name in trainer.callback_metrics
            ),
            ("train_loss", self.curves.losses[-1] if self.curves.losses else None),
        )
        sent: int | None = None
        first, last = self._first_stats, self._last_stats
        if first is not None and last is not None and first.bytes_sent is not None and last.bytes_sent is not None:
            sent = last.bytes_sent - first.bytes_sent
        exposed = self.curves.exposed_seconds
        checkpoint = getattr(trainer.checkpoint_callback, "best_model_path", "")
        folders = {type(logger): logger.log_dir for logger in trainer.loggers}
        csv_folder = folders.get(CSVLogger)
        return {
            "status": "finished",
            "strategy": self.strategy,
            "overrides": self.overrides,
            "processes": trainer.world_size,
            "metric": metric,
            "final_metric": value,
            "steps": steps,
            "seconds_per_step": statistics.median(seconds) if steps else None,  # the first steps warm up
            "bytes_sent": sent,
            "bytes_sent_per_step": sent / steps if sent is not None and steps else None,
            "exposed_ms_per_step": 1000 * statistics.fmean(exposed) if exposed else None,
            "checkpoint": checkpoint or None,
            "csv": None if csv_folder is None else str(Path(csv_folder) / "metrics.csv"),
            "tensorboard": folders.get(TensorBoardLogger),
            "curves": None if plot is None else str(plot),
        }


def write_summary(output_dir: Path, summary: Summary) -> None:
    """Write `summary.json`."""
    (output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def read_summary(output_dir: Path) -> Summary:
    """Read `summary.json`."""
    summary: Summary = json.loads((output_dir / "summary.json").read_text())
    return summary


def print_summary(summary: Summary) -> None:
    """Print a finished run's result, its costs, and where its files are."""
    table = Table(title=f"{summary['strategy']}, {summary['processes']} processes", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row(summary["metric"], number(summary["final_metric"]))
    table.add_row("steps", str(summary["steps"]))
    table.add_row("time a step", milliseconds(summary["seconds_per_step"]))
    table.add_row(
        "bytes sent by a process",
        f"{byte_count(summary['bytes_sent'])}, {byte_count(summary['bytes_sent_per_step'])} a step",
    )
    table.add_row("exposed communication", f"{number(summary['exposed_ms_per_step'])} ms a step")
    console = Console()
    console.print(table)
    for name in ("checkpoint", "csv", "tensorboard", "curves"):
        console.print(f"{name}: {summary[name] or '-'}", soft_wrap=True, highlight=False)  # paths in one piece, to copy


def number(value: float | None) -> str:
    """Four digits, or - for what was not measured."""
    return "-" if value is None else f"{value:.4g}"


def milliseconds(seconds: float | None) -> str:
    """As milliseconds with a unit, or - for what was not measured."""
    return "-" if seconds is None else f"{1000 * seconds:.4g} ms"


def byte_count(count: float | None) -> str:
    """In kB, MB, GB (powers of 1000, as network rates are), or - for what cannot be counted."""
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def _stats_now(trainer: L.Trainer) -> Stats | None:
    """A copy of the strategy's counters; None under a strategy that does not count, such as torch's DDP."""
    return dataclasses.replace(trainer.strategy.stats) if isinstance(trainer.strategy, RingStrategy) else None
