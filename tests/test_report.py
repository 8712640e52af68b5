"""What a run and a sweep leave to read: steps as CSV, one table, one page that a browser draws without a network."""

import html
import math
import os
import re
import time
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from omegaconf import OmegaConf
from test_strategy import trainer_with

from ringstrategy.app import jobs, report
from ringstrategy.app.curves import MOST_POINTS, Curves, read_steps, read_validation, thin, warm_mean, write_curves
from ringstrategy.app.job_plots import loss_curves, step_times
from ringstrategy.app.overrides import planned
from ringstrategy.app.sweep import progress
from ringstrategy.app.sweep_report import main

EVIL = "data.title=</script><img/src=http://x.example/a.png>[bold]&amp;<b>%{x}"


class Line(L.LightningModule):
    """Loss is 10, 9, 8, ... whatever it learns."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.left = 10.0

    def training_step(self, batch, batch_idx):
        self.left -= 1
        return self.weight.sum() * 0 + self.left + 1

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.left)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def a_curve(steps, *, counted=True, sent=1000):
    curves = Curves()
    for step in range(1, steps + 1):
        curves.steps.append(step)
        curves.losses.append(math.nan if step == 5 else 10 / step)
        curves.step_seconds.append(5.0 if step == 1 else 0.010 + 0.001 * (step % 2))
        curves.bytes_sent.append(sent if counted else None)
        curves.exposed_seconds.append(0.002 if counted else None)
        curves.communication_seconds.append(0.005 if counted else None)
    curves.validation_losses = [(0, 11.0), (steps // 2, 3.5), (steps, 2.5)]
    return curves


def a_summary(strategy, *overrides, seconds=0.01, **other):
    """As a job writes it."""
    summary = {"strategy": strategy, "overrides": [f"strategy={strategy}", "trainer.max_epochs=3", *overrides]}
    summary |= {"status": "finished", "processes": 2, "metric": "val_loss", "final_metric": 2.5, "steps": 1200}
    summary |= {"seconds": 12.5, "seconds_per_step": seconds, "bytes_sent_per_step": 1000}
    return summary | {"exposed_ms_per_step": 2.0, "hidden_ms_per_step": 3.0} | other


def rows_of(*summaries):
    return jobs.as_frame(
        dict.fromkeys(jobs.COLUMNS) | {"job": str(place)} | each for place, each in enumerate(summaries)
    )


UNCOUNTED = dict.fromkeys(("bytes_sent_per_step", "exposed_ms_per_step", "hidden_ms_per_step"))


@pytest.fixture
def sweep(tmp_path):
    """The folder of five jobs, without the runs."""
    folder = tmp_path / "a sweep"
    failed = {"status": "failed", "strategy": "ring", "overrides": ["strategy=ring", "trainer.max_epochs=3", "seed=9"]}
    runs = {
        "0": (a_summary("ring", EVIL), a_curve(1200)),
        "1": (a_summary("ddp", "seed=1", **UNCOUNTED), a_curve(7, counted=False)),
        "2": (a_summary("gossip", "seed=2"), a_curve(7)),
        "9": (failed, a_curve(3)),  # an earlier run's steps
        "10": (a_summary("gossip", "seed=10", final_metric=4.5), a_curve(1, sent=0)),
    }
    for name, (summary, curves) in runs.items():
        (folder / name).mkdir(parents=True)
        report.write_summary(folder / name, summary)
        write_curves(folder / name, curves)
    return folder


# --- what a run writes


class Sends(L.Callback):
    """What a strategy counts of each batch: 700 bytes, a minute of communication, of which a millisecond is waited for.

    Notes which losses have been fetched by then.
    """

    def __init__(self):
        self.fetched = []

    def on_before_optimizer_step(self, trainer, *_):
        stats = trainer.strategy.stats
        stats.count(700, 900)
        stats.exposed_seconds += 0.001
        stats.communication_seconds += 60.0
        self.fetched += trainer.callbacks[-2].curves.losses


def test_a_run_writes_every_step(tmp_path, capsys, monkeypatch):
    now = iter(range(1000))
    monkeypatch.setattr(report, "time", SimpleNamespace(perf_counter=lambda: next(now)))  # a batch takes a second
    sends, batches = Sends(), torch.utils.data.DataLoader(torch.zeros(10, 1))
    callbacks = [sends, report.RunReport(tmp_path, "ring", [])]
    options = {"max_steps": 4, "accumulate_grad_batches": 2, "enable_checkpointing": True}
    trainer = trainer_with("ring", callbacks=callbacks, default_root_dir=tmp_path, max_epochs=None, **options)
    trainer.fit(Line(), batches, batches)
    assert type(trainer.callbacks[-2]) is report.RunReport
    assert not sends.fetched, "no loss was fetched while steps ran"
    steps = read_steps(tmp_path)
    assert steps["step"].tolist() == [1, 2, 3, 4]
    assert steps["loss"].tolist() == [9.5, 7.5, 5.5, 3.5]  # a step's two batches
    assert read_validation(tmp_path).values.tolist() == [[4, 2.0]]  # not what the sanity check saw
    for column, value in (
        ("seconds", 2),
        ("bytes_sent", 700),
        ("exposed_seconds", 0.001),
        ("communication_seconds", 60),
    ):
        assert steps[column].tolist() == pytest.approx([value] * 4), column
    summary = report.read_summary(tmp_path)
    assert summary["bytes_sent"] == 4 * summary["bytes_sent_per_step"] == 2800
    assert (summary["seconds"], summary["seconds_per_step"]) == (8.0, 2.0)
    assert (summary["metric"], summary["final_metric"]) == ("val_loss", 2.0)
    assert summary["exposed_ms_per_step"] == pytest.approx(1)
    assert summary["hidden_ms_per_step"] == pytest.approx(1999), "the rest went on while data were loaded"
    report.print_summary(summary)
    printed = capsys.readouterr().out
    for words in ("2.8 kB, 700 B a step", "1 ms a step", "1999 ms a step", "2000 ms", str(tmp_path / "curves.png")):
        assert words in printed, words


def test_thinning_keeps_the_mean_and_the_first_tenth_warms_up():
    for count in (0, 1, MOST_POINTS, MOST_POINTS + 1, 7 * MOST_POINTS + 3):
        values = [float(value % 17) for value in range(count)]
        points = thin(values)
        assert min(count, MOST_POINTS // 2) <= len(points) <= MOST_POINTS, count
        size = -(-count // MOST_POINTS)
        weights = [len(values[start : start + size]) for start in range(0, count, size or 1)]
        assert math.fsum(map(math.prod, zip(points, weights, strict=True))) == pytest.approx(sum(values)), count
    for measured, mean in {(100.0, *[1.0] * 9): 1, (100.0, 1.0): 1, (100.0,): 100, (): None, (None, 1.0): None}.items():
        assert warm_mean(list(measured)) == mean
    assert warm_mean([100.0] * 4 + [1.0] * 27) > 1


# --- the tables


def test_jobs_are_found_wherever_they_are_and_counted_as_people_count(sweep):
    assert [job.name for job in jobs.job_folders(sweep)] == ["0", "1", "2", "9", "10"]
    assert jobs.read_jobs(sweep.parent)["job"].iloc[-1] == "a sweep/10"
    assert jobs.read_jobs(sweep / "2")["job"].tolist() == ["2"]
    os.utime(sweep / "0" / "summary.json", (1, 1))
    assert [job.name for job in jobs.job_folders(sweep, since=2)] == ["1", "2", "9", "10"]


def test_a_killed_sweep_shows_the_jobs_that_did_not_end_and_those_that_never_began(tmp_path, capsys):
    sweeps = {
        "_target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
        "params": {"seed": "0,1", "hydra.job.chdir": "false"},
    }
    hydra = {
        "sweeper": sweeps,
        "overrides": {"task": ["strategy=ddp,gossip", "data.seed=${seed}", "codec@strategy.algorithm.codec=sign"]},
    }
    multirun = OmegaConf.create({"hydra": hydra | {"runtime": {"choices": {"strategy": "ring"}}}})
    OmegaConf.save(multirun, tmp_path / "multirun.yaml")
    assert progress(tmp_path, 0) == "job 1 of 4"
    for number, (strategy, overrides) in enumerate(planned(tmp_path)[:3]):
        job = tmp_path / str(number)
        (job / ".hydra").mkdir(parents=True)
        OmegaConf.save({"optimizer": "a configuration of Hydra's own"}, job / ".hydra" / "config.yaml")
        if number < 1:
            report.write_summary(job, {"status": "finished", "strategy": strategy, "overrides": overrides})
        if number > 0:
            OmegaConf.save({"run": {"strategy": strategy, "overrides": overrides}}, job / "config.yaml")
    for other in ("run: train.py", "just: text", "a: 1\n---\nb: 2", "a: ${"):  # files of other programs
        (tmp_path / "other").mkdir(exist_ok=True)
        for name in ("config.yaml", "multirun.yaml"):
            (tmp_path / "other" / name).write_text(other)
        assert len(jobs.read_jobs(tmp_path)) == 4
    rows = jobs.read_jobs(tmp_path)
    assert list(zip(rows["job"], rows["status"], rows["strategy"], strict=True)) == [
        ("0", "finished", "ddp"),
        ("1", "unfinished", "gossip"),
        ("2", "unfinished", "ddp"),
        ("3", "not started", "gossip"),
    ]
    assert rows["overrides"].iloc[3] == [
        "seed=1",
        "strategy=gossip",
        r"data.seed=$\{seed\}",
        "codec=sign",
    ]  # as Hydra hands it on
    main([str(tmp_path)])
    assert "4 jobs: 1 finished, 2 unfinished, 1 not started" in (tmp_path / "report.html").read_text(encoding="utf-8")
    os.utime(tmp_path / "multirun.yaml", (time.time() - 200, time.time() - 200))
    report.write_summary(tmp_path / "1", {"status": "failed", "strategy": "gossip", "overrides": []})
    assert progress(tmp_path, 3) == "job 4 of 4, about 3 minutes left"
    (tmp_path / "multirun.yaml").unlink()  # Optuna's sweeper writes none
    assert (progress(tmp_path, 3), len(jobs.read_jobs(tmp_path))) == ("job 4", 3)


def test_a_job_is_compared_with_the_ddp_job_of_its_settings():
    ddp = a_summary("ddp", "seed=0", "model=cnn", seconds=0.02)
    of_strategy = ["codec=int", "+algorithm.local=null", "collective@strategy.algorithm.x=ring", "topology.rows=2"]
    ring = a_summary("ring", "model=cnn", "seed=0", *of_strategy, seconds=0.01)
    assert jobs.times_ddp(rows_of(ddp, ring)).tolist() == [1, 2]
    assert jobs.times_ddp(rows_of(ddp, ring, ddp | {"seconds_per_step": 0.04}))[1] == pytest.approx(3)
    for other in (
        a_summary("ring", "seed=1", "model=cnn"),
        a_summary("ring", "seed=0", "model=mlp"),
        a_summary("ring", "seed=0", "model=cnn", "trainer.max_steps=9"),
        a_summary("ring", "seed=0", "model=cnn", processes=4),
        a_summary("ring", "seed=0", "model=cnn", seconds=None, status="failed"),
    ):
        assert math.isnan(jobs.times_ddp(rows_of(ddp, other))[1])


def test_means_are_over_jobs_that_differ_in_the_seed_alone():
    failed = a_summary("ring", "seed=3", status="failed", seconds=None)
    seeds = [
        a_summary("ring", f"seed={seed}", seconds=seconds, final_metric=metric)
        for seed, seconds, metric in ((0, 0.01, 0.5), (1, 0.02, 0.7), (2, 0.06, 0.9))
    ]
    alone = [
        a_summary("ring", "seed=0", "model=cnn"),
        a_summary("ring", "seed=0", processes=4),
        a_summary("ring", "data.seed=0"),
        a_summary("ring", "seed=9", metric="val_accuracy"),
    ]
    means = jobs.over_seeds(rows_of(a_summary("ddp", "seed=7", seconds=0.06), failed, *seeds, *alone))
    assert means["runs"].tolist() == [1, 3, 1, 1, 1, 1]
    ring = means.iloc[1]
    assert (ring["final_metric"], ring["final_metric_deviation"]) == pytest.approx((0.7, 0.2))
    assert (ring["seconds_per_step"], ring["seconds_per_step_deviation"]) == pytest.approx((0.03, math.sqrt(0.0007)))
    # of the means, though no ddp job has one of their seeds
    assert means["times_ddp"].tolist() == pytest.approx([1, 2, math.nan, math.nan, math.nan, 6], nan_ok=True)
    one_of_two = rows_of(a_summary("ring", final_metric=math.nan, **UNCOUNTED), a_summary("ring", "seed=1"))
    assert jobs.over_seeds(one_of_two)[["final_metric", "bytes_sent_per_step"]].isna().all(axis=None)


# --- the page


def test_the_page_needs_nothing_else_and_the_screen_has_a_row_for_each_job(sweep, capsys):
    main([str(sweep)])
    text = (sweep / "report.html").read_text(encoding="utf-8")
    assert EVIL not in text, "its image would be asked for"
    assert html.escape(EVIL) in text
    assert not re.search(r"""<(?:script|link)[^>]* (?:src|href)=""", text)
    assert "5 jobs: 4 finished, 1 failed. In all of them: <code>trainer.max_epochs=3</code>" in text
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["9", "ring", "seed=9", "FAILED", "-", "-"] in printed
    assert printed[-1][0] == "page:"


def test_the_lines_are_the_runs_and_a_bar_is_as_long_as_a_step(sweep):
    figure = loss_curves(jobs.read_jobs(sweep))
    lines = {(trace.hovertext[0], trace.xaxis): (trace.x.tolist(), trace.y.tolist()) for trace in figure.data}
    steps, sent, validation = "x4", "x6", "x"
    assert [job for job, axis in lines if axis == steps] == ["0", "1", "2", "10"]
    assert [job for job, axis in lines if axis == sent] == ["0", "2"]
    x, y = lines["2", steps]
    assert x == [1, 2, 3, 4, 5, 6, 7]
    assert y == pytest.approx([10, 5, 10 / 3, 2.5, math.nan, 10 / 6, 10 / 7], nan_ok=True)  # a gap where it was NaN
    assert lines["2", sent][0] == [1000, 2000, 3000, 4000, 5000, 6000, 7000]
    assert lines["2", validation] == ([0, 3, 7], [11, 3.5, 2.5])
    assert MOST_POINTS / 2 < len(lines["0", steps][0]) <= MOST_POINTS
    names = {trace.hovertext[0]: trace.name for trace in figure.data}
    assert "&lt;/script&gt;" in names["0"]  # plotly takes some tags for markup
    assert "<img" not in names["0"]
    assert not loss_curves(jobs.read_jobs(sweep / "9")).data
    bars = [
        dict(zip([name.split()[0] for name in trace.y], trace.x, strict=True))
        for trace in step_times(jobs.read_jobs(sweep)).data
    ]
    assert bars == [{job: length for job in ("0", "2", "10")} for length in (5, 3, 2)] + [{"1": 10}]
