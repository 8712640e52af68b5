"""The output of a run: `summary.json`, its steps as CSV, a PNG of them, and a table on the screen."""

import dataclasses
import json
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

from ringstrategy.app.curves import Curves, warm_mean, write_curves
from ringstrategy.app.curves_png import draw
from ringstrategy.integrations.lightning.for_lightning import RingStrategy
from ringstrategy.transport import Stats
from ringstrategy.transport.stats import byte_count

FINAL_METRICS = ("val_accuracy", "val_loss")  # the first that the module logged; else the last training loss
HELD_LOSSES = 100  # losses left on the device before they are fetched: fetching each would stall a GPU

Summary = dict[str, Any]


class RunReport(L.Callback):
    """Times every step; when fit ends, rank 0 writes summary, `steps.csv`, `validation.csv` and PNG into `output_dir`.

    A step is what ends with an optimizer step; gradient accumulation makes it several batches. Loading data and
    validation are not in its time. Seconds and bytes are those of rank 0. The summary's times a step are means that
    leave out the first steps, which warm up.
    """

    def __init__(self, output_dir: Path, strategy: str, overrides: Sequence[str]) -> None:
        self.output_dir = output_dir
        self.strategy = strategy
        self.overrides = list(overrides)
        self.curves = Curves()
        self._held_losses: list[Tensor | None] = []  # None: the step has no loss

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the counters as they are now for zero."""
        self._last_step = trainer.global_step
        self._last_stats = _stats_now(trainer)
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
        if loss is not None and not trainer.sanity_checking:  # that sees only a few batches
            self.curves.validation_losses.append((trainer.global_step, float(loss)))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the files: the last checkpoint is on disk and the processes are still there."""
        if trainer.is_global_zero:
            self._fetch_losses()
            write_curves(self.output_dir, self.curves)
            plot = None
            if self.curves.step_seconds:
                plot = self.output_dir / "curves.png"
                draw(self.curves, plot)
            write_summary(self.output_dir, self._summary(trainer, plot))

    def _note_step(self, now: Stats | None) -> None:
        curves, before = self.curves, self._last_stats
        made = None if now is None or before is None else now.since(before)
        curves.steps.append(self._last_step)
        curves.step_seconds.append(self._step_seconds)
        curves.bytes_sent.append(None if made is None else made.bytes_sent)
        curves.exposed_seconds.append(None if made is None else made.exposed_seconds)
        curves.communication_seconds.append(None if made is None else made.communication_seconds)
        self._held_losses.append(self._step_loss)
        if len(self._held_losses) == HELD_LOSSES:
            self._fetch_losses()
        self._step_seconds = 0.0
        self._step_loss = None
        self._last_stats = now

    def _fetch_losses(self) -> None:
        there = [loss for loss in self._held_losses if loss is not None]
        fetched = iter(torch.stack(there).tolist() if there else [])
        self.curves.losses.extend(None if loss is None else next(fetched) for loss in self._held_losses)
        self._held_losses.clear()

    def _summary(self, trainer: L.Trainer, plot: Path | None) -> Summary:
        curves = self.curves
        steps = len(curves.steps)
        metric, value = next(
            (
                (name, float(trainer.callback_metrics[name]))
                for name in FINAL_METRICS
                if name in trainer.callback_metrics
            ),
            ("train_loss", curves.losses[-1] if steps else None),
        )
        total_sent = curves.total_bytes_sent
        step = warm_mean(curves.step_seconds)
        exposed = warm_mean(curves.exposed_seconds)
        communication = warm_mean(curves.communication_seconds)
        hidden: float | None = None
        if step is not None and exposed is not None and communication is not None:
            # an exchange may go on while data are loaded: nothing of the step's is hidden by that
            hidden = max(0.0, min(communication, step) - exposed)
        checkpoint = getattr(trainer.checkpoint_callback, "best_model_path", "")
        stats = _stats_now(trainer)
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
            "seconds": sum(curves.step_seconds),
            "seconds_per_step": step,
            "bytes_sent": total_sent,
            "bytes_sent_per_step": None if total_sent is None else total_sent / steps,
            "exposed_ms_per_step": None if exposed is None else 1000 * exposed,
            "hidden_ms_per_step": None if hidden is None else 1000 * hidden,
            "probe_seconds": None if stats is None else stats.probe_seconds,
            "probe_bytes_sent": None if stats is None else stats.probe_bytes_sent,
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
    seconds = summary["seconds_per_step"]
    table.add_row("time a step", "-" if seconds is None else f"{1000 * seconds:.4g} ms")
    table.add_row(
        "bytes sent by a process",
        f"{byte_count(summary['bytes_sent'])}, {byte_count(summary['bytes_sent_per_step'])} a step",
    )
    table.add_row("exposed communication", f"{number(summary['exposed_ms_per_step'])} ms a step")
    table.add_row("hidden communication", f"{number(summary['hidden_ms_per_step'])} ms a step")
    if summary["probe_seconds"]:
        table.add_row(
            "measuring, choosing", f"{summary['probe_seconds']:.2f} s, {byte_count(summary['probe_bytes_sent'])}"
        )
    console = Console()
    console.print(table)
    for name in ("checkpoint", "csv", "tensorboard", "curves"):
        console.print(f"{name}: {summary[name] or '-'}", soft_wrap=True, highlight=False)  # paths in one piece, to copy


def number(value: float | None) -> str:
    """Four digits, or - if not measured."""
    return "-" if value is None else f"{value:.4g}"


def _stats_now(trainer: L.Trainer) -> Stats | None:
    """A copy of the strategy's counters; None under a strategy that does not count, such as torch's DDP."""
    return dataclasses.replace(trainer.strategy.stats) if isinstance(trainer.strategy, RingStrategy) else None
