"""The jobs below a folder as tables: one row a job, and one row for each group that differs only in the seed."""

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml  # type: ignore[import-untyped]

from ringstrategy.app.overrides import PARTS, planned
from ringstrategy.app.report import number, read_summary
from ringstrategy.transport.stats import byte_count

COLUMNS = (
    "job",
    "status",
    "strategy",
    "overrides",
    "processes",
    "metric",
    "final_metric",
    "steps",
    "seconds_per_step",
    "bytes_sent_per_step",
    "seconds",
    "exposed_ms_per_step",
    "hidden_ms_per_step",
)
_FLOATS = [name for name in COLUMNS if name.startswith(("final", "seconds", "bytes", "exposed", "hidden"))]
_OF_STRATEGY = re.compile(rf"[+~]*(strategy|{'|'.join(PARTS)})\b")


def job_folders(folder: Path, since: float = 0.0) -> list[Path]:
    """`folder` and those below it where a job began or ended at `since` or later; job 2 comes before job 10."""
    files = (path for name in ("summary.json", "config.yaml") for path in folder.rglob(name))
    folders = {path.parent for path in files if path.stat().st_mtime >= since and path.parent.name != ".hydra"}
    return sorted(folders, key=_numbers_by_value)


def _numbers_by_value(job: Path) -> list[str | int]:
    # text and digits take turns, so that like is compared with like
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d+)", str(job)))]


def read_jobs(folder: Path, since: float = 0.0) -> pd.DataFrame:
    """The jobs below `folder` in `COLUMNS`, and the `folder` of each; missing values are NaN or None.

    A job has the status "finished" or "failed"; "unfinished" if it began and has not ended, as when it was killed; or
    "not started" if a sweep below `folder` has it planned. ValueError: a summary was not written by
    `ringstrategy-train`.
    """
    jobs = [row for job in job_folders(folder, since) if (row := _read(job, folder))]
    for plan in folder.rglob("multirun.yaml"):
        if plan.stat().st_mtime >= since:
            there = [row["overrides"] for row in jobs if Path(row["folder"]).is_relative_to(plan.parent)]
            for number, (strategy, overrides) in enumerate(planned(plan.parent)):
                if overrides not in there:
                    missing = {"status": "not started", "strategy": strategy, "overrides": overrides}
                    jobs.append(_row(missing, plan.parent / str(number), folder))
    return as_frame(jobs)


def as_frame(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Rows of `COLUMNS` and `folder`, with types."""
    jobs = pd.DataFrame(list(rows), columns=[*COLUMNS, "folder"])
    return jobs.astype(dict.fromkeys(_FLOATS, "float64") | dict.fromkeys(["processes", "steps"], "Int64"))


def _read(job: Path, folder: Path) -> dict[str, Any]:
    """A job's row; empty if the `config.yaml` there is of another program."""
    config, ended = job / "config.yaml", job / "summary.json"
    if ended.exists():
        summary = read_summary(job)
        if not isinstance(summary, dict) or not {"status", "strategy", "overrides"} <= summary.keys():
            raise ValueError(f"{ended} was not written by ringstrategy-train: move it out of {folder}")
    else:
        try:
            run = yaml.safe_load(config.read_text())["run"]
            summary = {"status": "unfinished", "strategy": run["strategy"], "overrides": run["overrides"]}
        except (KeyError, TypeError, yaml.YAMLError):
            return {}
    return _row(summary, job, folder)


def _row(summary: dict[str, Any], job: Path, folder: Path) -> dict[str, Any]:
    name = str(job.relative_to(folder)) if job != folder else job.resolve().name
    return {column: summary.get(column) for column in COLUMNS} | {"job": name, "folder": str(job)}


def shared_folder(jobs: pd.DataFrame) -> str:
    """Where all jobs lie, below the folder that was read; "" if nowhere deeper."""
    return os.path.commonpath([os.path.dirname(job) for job in jobs["job"]]) if len(jobs) else ""


def common_overrides(jobs: pd.DataFrame) -> list[str]:
    """The overrides that all jobs have."""
    return [text for text in next(iter(jobs["overrides"]), []) if all(text in each for each in jobs["overrides"])]


def own_overrides(jobs: pd.DataFrame) -> pd.Series:
    """For each job the overrides that distinguish it from the others, without its strategy's name."""
    common = set(common_overrides(jobs))
    return jobs["overrides"].map(
        lambda each: " ".join(text for text in each if text not in common and not text.startswith("strategy="))
    )


def times_ddp(jobs: pd.DataFrame) -> pd.Series:
    """For each job the seconds a step of ddp with the same seed and settings, divided by its own; NaN without one."""
    settings = jobs.assign(settings=_without(jobs, of_strategy=True))
    return _ddp_seconds(settings, settings) / jobs["seconds_per_step"]


def over_seeds(jobs: pd.DataFrame) -> pd.DataFrame:
    """One row for each group of finished jobs that differ in nothing but the seed, in the order of their first jobs.

    Mean and sample deviation of a quantity are NaN if one job did not measure it, or diverged. `times_ddp` divides the
    mean seconds of ddp's group by those of this one.
    """
    settings, group = _without(jobs, seed=True, of_strategy=True), _without(jobs, seed=True)
    jobs = jobs.assign(own=own_overrides(jobs), settings=settings, group=group)
    done = jobs[jobs["status"] == "finished"]
    keys = ["strategy", "metric", "processes", "group"]
    groups = done.groupby(keys, sort=False, dropna=False)
    quantities = ["final_metric", "seconds_per_step", "bytes_sent_per_step"]
    means = groups[quantities].agg(lambda values: values.mean(skipna=False))
    with np.errstate(invalid="ignore"):  # inf - inf of jobs that diverged
        deviations = groups[quantities].agg(lambda values: values.std(skipna=False)).add_suffix("_deviation")
    table = groups[["own", "settings"]].first().join([means, deviations]).assign(runs=groups.size()).reset_index()
    table["own"] = [" ".join(text for text in own.split() if not text.startswith("seed=")) for own in table["own"]]
    return table.assign(times_ddp=_ddp_seconds(table, jobs) / table["seconds_per_step"])


def _without(jobs: pd.DataFrame, *, seed: bool = False, of_strategy: bool = False) -> pd.Series:
    """Overrides in one order, to compare: without the seed, without the strategy and its parts."""
    return jobs["overrides"].map(
        lambda overrides: " ".join(
            sorted(
                text
                for text in overrides
                if not (seed and text.startswith("seed=")) and not (of_strategy and _OF_STRATEGY.match(text))
            )
        )
    )


def _ddp_seconds(table: pd.DataFrame, jobs: pd.DataFrame) -> pd.Series:
    """Mean seconds a step of the finished ddp jobs with each row's processes and settings."""
    keys = ["processes", "settings"]
    ddp = jobs[(jobs["strategy"] == "ddp") & (jobs["status"] == "finished")]
    return table.join(ddp.groupby(keys)["seconds_per_step"].mean().rename("ddp"), on=keys)["ddp"]


def table_of_jobs(jobs: pd.DataFrame) -> pd.DataFrame:
    """All jobs in words."""
    final = _final(jobs).where(jobs["status"] == "finished", jobs["status"].str.upper())
    return pd.DataFrame(
        {
            "job": jobs["job"].str.removeprefix(f"{shared_folder(jobs)}/"),
            "strategy": jobs["strategy"],
            "overrides": own_overrides(jobs),
            _metric(jobs): final,
            "x ddp": _shown(times_ddp(jobs), "{:.3g}".format, missing=""),
            "ms a step": _shown(1000 * jobs["seconds_per_step"]),
            "sent a step": _shown(jobs["bytes_sent_per_step"], byte_count),
            "steps": _shown(jobs["steps"], str),
            "total s": _shown(jobs["seconds"], "{:.1f}".format),
            "exposed ms": _shown(jobs["exposed_ms_per_step"]),
            "hidden ms": _shown(jobs["hidden_ms_per_step"]),
        }
    )


def table_of_means(jobs: pd.DataFrame) -> pd.DataFrame | None:
    """The means over seeds in words; None if no two jobs differ in the seed alone."""
    groups = over_seeds(jobs)
    if not (groups["runs"] > 1).any():
        return None
    milliseconds = _shown(1000 * groups["seconds_per_step"]) + _deviation(groups, "seconds_per_step", 1000)
    return pd.DataFrame(
        {
            "strategy": groups["strategy"],
            "overrides": groups["own"],
            "runs": groups["runs"].map(str),
            _metric(jobs): _final(groups) + _deviation(groups, "final_metric"),
            "x ddp": _shown(groups["times_ddp"], "{:.3g}".format, missing=""),
            "ms a step": milliseconds,
            "sent a step": _shown(groups["bytes_sent_per_step"], byte_count),
        }
    )


def _shown(values: pd.Series, shown: Callable[[Any], str] = number, missing: str = "-") -> pd.Series:
    return values.map(shown, na_action="ignore").astype(object).fillna(missing)


def _deviation(groups: pd.DataFrame, quantity: str, scale: float = 1) -> pd.Series:
    spread = (scale * groups[f"{quantity}_deviation"]).map(" ± {:.2g}".format)
    return spread.where((groups["runs"] > 1) & groups[quantity].notna(), "")


def _metric(jobs: pd.DataFrame) -> str:
    """The heading of the final metric: its name, if all finished jobs have the same."""
    metrics = jobs.loc[jobs["status"] == "finished", "metric"].unique()
    return str(metrics[0]) if len(metrics) == 1 else "final"


def _final(table: pd.DataFrame) -> pd.Series:
    values = table["final_metric"].map("{:.4g}".format)
    return values if table["metric"].nunique() == 1 else table["metric"].fillna("") + " " + values
