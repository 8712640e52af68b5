"""What a run and a sweep leave to read: steps as CSV, one table, one page that a browser draws without a network."""

import json
import math
import os
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import lightning as L
import pytest
import torch

from ringstrategy.app.curves import MOST_POINTS, Curves, read_curves, thin, warm_mean, write_curves
from ringstrategy.app.sweep_compare import groups, times_ddp
from ringstrategy.app.sweep_report import main

EVIL = "data.title=</script><img src=http://x.example/a.png onerror=alert()>[bold]&amp;<b>%{x}"
STEPS = {"0": 1200, "1": 7, "2": 7, "10": 1}


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


class Manual(Line):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.weight.sum())
        self.optimizers().step()


def fit(folder, module, *callbacks, **options):
    from ringstrategy.app.report import RunReport

    folder.mkdir(exist_ok=True)
    options = {"max_steps": 4, "strategy": "ring", "num_sanity_val_steps": 0} | options
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[*callbacks, RunReport(folder, str(options["strategy"]), [])],
        **options,
    )
    rows = torch.utils.data.DataLoader(torch.zeros(10, 1))
    trainer.fit(module, rows, rows)
    return trainer


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


def a_job(folder, strategy, curves, *overrides):
    """What a run leaves, without the run."""
    from ringstrategy.app.report import write_summary

    folder.mkdir(parents=True)
    overrides = [f"strategy={strategy}", "trainer.max_epochs=3", *overrides]
    if curves is None:
        write_summary(folder, {"status": "failed", "exit_code": 1, "strategy": strategy, "overrides": overrides})
        return
    write_curves(folder, curves)
    exposed, communication = warm_mean(curves.exposed_seconds), warm_mean(curves.communication_seconds)
    sent = curves.total_bytes_sent
    summary = {
        "status": "finished",
        "strategy": strategy,
        "overrides": overrides,
        "processes": 2,
        "metric": "val_loss",
        "final_metric": curves.validation_losses[-1][1],
        "steps": len(curves.steps),
        "seconds": sum(curves.step_seconds),
        "seconds_per_step": warm_mean(curves.step_seconds),
        "bytes_sent_per_step": sent and sent[-1] / len(sent),
        "exposed_ms_per_step": exposed and 1000 * exposed,
        "hidden_ms_per_step": exposed and 1000 * (communication - exposed),
    }
    write_summary(folder, summary)


@pytest.fixture
def sweep(tmp_path):
    folder = tmp_path / "a sweep"
    a_job(folder / "0", "ring", a_curve(STEPS["0"]), EVIL)
    a_job(folder / "1", "ddp", a_curve(STEPS["1"], counted=False), "seed=1")
    a_job(folder / "2", "gossip", a_curve(STEPS["2"]), "seed=2")
    a_job(folder / "9", "ring", None, "seed=9")
    a_job(folder / "10", "gossip", a_curve(STEPS["10"], sent=0), "seed=10")
    return folder


class Page(HTMLParser):
    """The parts of a page, as a browser would split it."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.rows, self.texts, self.scripts = [], [], [], {}, []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in {"src", "href", "srcset", "data", "action"}]
        if tag == "tr":
            self.rows.append([])
        elif tag == "td":
            self.rows[-1].append("")
        elif tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        tag = self.tags[-1] if self.tags else ""
        if tag == "script":
            self.scripts[-1] += data
        elif tag == "td":
            self.rows[-1][-1] += data.strip()
        else:
            self.texts[tag] = self.texts.get(tag, "") + data

    @property
    def plots(self):
        return json.loads(self.scripts[0])


def page_of(folder, *options):
    main([str(folder), *options])
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def lines(plot):
    return {trace["meta"]: trace for trace in plot["data"] if trace["mode"] == "lines"}


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
    from ringstrategy.app import report

    now = iter(range(1000))
    monkeypatch.setattr(report, "time", SimpleNamespace(perf_counter=lambda: next(now)))  # a batch takes a second
    sends = Sends()
    trainer = fit(tmp_path, Line(), sends, accumulate_grad_batches=2, num_sanity_val_steps=2)
    assert type(trainer.callbacks[-2]) is report.RunReport
    assert not sends.fetched, "no loss was fetched while steps ran"
    curves = read_curves(tmp_path)
    assert curves.steps == [1, 2, 3, 4]
    assert curves.losses == [9.5, 7.5, 5.5, 3.5]  # a step's two batches
    assert curves.validation_losses == [(4, 2.0)]  # not what the sanity check saw
    assert curves.step_seconds == [2.0] * 4
    assert curves.bytes_sent == [700] * 4
    assert curves.exposed_seconds == pytest.approx([0.001] * 4)
    assert curves.communication_seconds == pytest.approx([60.0] * 4)
    summary = report.read_summary(tmp_path)
    assert summary["bytes_sent"] == 4 * summary["bytes_sent_per_step"] == 2800
    assert (summary["seconds"], summary["seconds_per_step"]) == (8.0, 2.0)
    assert (summary["metric"], summary["final_metric"]) == ("val_loss", 2.0)
    assert summary["exposed_ms_per_step"] == pytest.approx(1)
    assert summary["hidden_ms_per_step"] == pytest.approx(1999), "the rest went on while data were loaded"
    assert (summary["probe_seconds"], summary["probe_bytes_sent"]) == (0, 0)
    report.print_summary(summary)
    printed = capsys.readouterr().out
    for words in ("2.8 kB, 700 B a step", "1 ms a step", "1999 ms a step", "2000 ms", str(tmp_path / "curves.png")):
        assert words in printed, words
    assert "measuring" not in printed
    report.print_summary({**summary, "probe_seconds": 0.814, "probe_bytes_sent": 280_000})
    assert re.search(r"measuring, choosing\W+0\.81 s, 280 kB", capsys.readouterr().out)


def test_what_nobody_measures_is_an_empty_cell(tmp_path):
    from ringstrategy.app.report import read_summary

    fit(tmp_path, Manual(), strategy="auto", max_steps=2)
    _, *rows = (tmp_path / "steps.csv").read_text().splitlines()
    assert [re.sub(r"\d\.\d+(e-\d+)?", "seconds", row) for row in rows] == [
        "1,,seconds,seconds,,,",
        "2,,seconds,seconds,,,",
    ]
    assert read_summary(tmp_path)["final_metric"] is not None  # the validation's


def test_steps_are_read_as_they_were_written(tmp_path):
    curves = a_curve(7)
    curves.losses[2], curves.bytes_sent[1], curves.losses[3] = None, None, math.inf
    write_curves(tmp_path, curves)
    assert repr(read_curves(tmp_path)) == repr(curves)  # NaN is not equal to itself
    text = (tmp_path / "steps.csv").read_text()
    assert text.splitlines()[1] == "1,10.0,5.0,5.0,1000,0.002,0.005"
    (tmp_path / "steps.csv").write_text(text.replace("loss", "losses", 1))
    with pytest.raises(ValueError, match=r"steps.csv should have the columns step, loss, .* has step, losses"):
        read_curves(tmp_path)


def test_thinning_keeps_the_mean_and_the_first_tenth_warms_up():
    for count in (0, 1, MOST_POINTS, MOST_POINTS + 1, 7 * MOST_POINTS + 3):
        values = [float(value % 17) for value in range(count)]
        points = thin(values)
        assert min(count, MOST_POINTS // 2) <= len(points) <= MOST_POINTS, count
        size = -(-count // MOST_POINTS)
        weights = [len(values[start : start + size]) for start in range(0, count, size or 1)]
        assert math.fsum(map(math.prod, zip(points, weights, strict=True))) == pytest.approx(sum(values)), count
    assert warm_mean([100.0] * 3 + [1.0] * 27) == 1
    assert warm_mean([100.0] * 4 + [1.0] * 27) > 1
    assert warm_mean([100.0, 1.0]) == 1
    assert warm_mean([100.0]) == 100
    assert warm_mean([]) is None
    assert warm_mean([None, 1.0]) is None


# --- the table


def test_jobs_are_found_wherever_they_are_and_counted_as_people_count(sweep):
    from ringstrategy.app.sweep_table import job_folders, read_row

    assert [job.name for job in job_folders(sweep)] == ["0", "1", "2", "9", "10"]
    assert [read_row(job, sweep.parent)["job"] for job in job_folders(sweep.parent)][-1] == "a sweep/10"
    assert job_folders(sweep / "2") == [sweep / "2"]
    assert read_row(sweep / "2", sweep / "2")["job"] == "2"
    os.utime(sweep / "0" / "summary.json", (1, 1))
    assert [job.name for job in job_folders(sweep, since=2)] == ["1", "2", "9", "10"]


def a_row(job, strategy, *overrides, seconds=0.01, **other):
    """As a job's summary is read."""
    from ringstrategy.app.sweep_table import COLUMNS

    row = dict.fromkeys(COLUMNS) | {"job": job, "strategy": strategy, "overrides": [f"strategy={strategy}", *overrides]}
    row |= {"status": "finished", "processes": 2, "metric": "val_accuracy", "final_metric": 0.9, "steps": 1200}
    row |= {"seconds": 12.5, "seconds_per_step": seconds, "bytes_sent_per_step": 123456}
    return row | {"exposed_ms_per_step": 1.25, "hidden_ms_per_step": 3.75} | other


def test_the_printed_table_fits_and_squeezes_nothing(sweep, capsys, monkeypatch):
    from ringstrategy.app.sweep_print import print_tables
    from ringstrategy.app.sweep_table import job_folders, read_row

    rows = [read_row(job, sweep) for job in job_folders(sweep)]
    for columns in (80, 160, None):  # of a terminal; None: in a pipe
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns is not None:
            monkeypatch.setenv("COLUMNS", str(columns))
        print_tables(rows, sweep)
        text = capsys.readouterr().out
        table = text[: text.index("means over seeds")]
        assert columns is None or max(len(line) for line in text.splitlines() if "/" not in line) <= columns
        (failed,) = (line.split() for line in table.splitlines() if "FAILED" in line)
        assert failed[:4] == ["9", "ring", "seed=9", "FAILED"], columns
        (job,) = (line.split() for line in table.splitlines() if line.startswith("2 "))
        assert job[:7] == ["2", "gossip", "seed=2", "2.5", "10.5", "1", "kB"], columns  # x ddp is blank
        assert ("Left out here: steps, total s;" in " ".join(table.split())) == (columns == 80)
        assert job[7:] == (["2", "3"] if columns == 80 else ["7", "5.1", "2", "3"]), columns
        assert ("[bold]&amp;<b>" in table) == (columns != 80)  # no markup; folded where it is narrow
        assert "max_epochs" not in text  # the same for all
        (mean,) = (line.split() for line in text[len(table) :].splitlines() if line.startswith("gossip "))
        assert mean[:3] == ["gossip", "2", "2.5"], columns


# --- comparisons


def test_a_job_is_compared_with_the_ddp_job_of_its_settings():
    ddp = a_row("0", "ddp", "seed=0", "model=cnn", seconds=0.02)
    ring = a_row("1", "ring_int8", "seed=0", "model=cnn", seconds=0.005)
    assert times_ddp(ring, [ddp, ring]) == 4
    assert times_ddp(ddp, [ddp, ring]) == 1
    own = [
        "codec=block_int",
        "+algorithm.local=null",
        "collective@strategy.algorithm.collective=ring",
        "topology.rows=2",
    ]
    assert times_ddp(a_row("2", "ring", "model=cnn", "seed=0", *own, seconds=0.01), [ddp]) == 2
    for other in (
        a_row("3", "ring", "seed=1", "model=cnn"),
        a_row("3", "ring", "seed=0", "model=mlp"),
        a_row("3", "ring", "seed=0", "model=cnn", "trainer.max_steps=9"),
        a_row("3", "ring", "seed=0", "model=cnn", processes=4),
        a_row("3", "ring", "seed=0", "model=cnn", seconds=None),
        a_row("3", "ring", "seed=0", "model=cnn", status="failed", seconds=None),
    ):
        assert times_ddp(other, [ddp, ring, other]) is None
    assert times_ddp(ring, [ring, ddp | {"status": "failed", "seconds_per_step": None}]) is None
    assert times_ddp(ring, [ddp, ring, ddp | {"job": "4", "seconds_per_step": 0.04}]) == pytest.approx(6)


def test_means_are_over_jobs_that_differ_in_the_seed_alone():
    seconds, metrics = [0.01, 0.02, 0.06], [0.5, 0.7, 0.9]
    rows = [a_row("0", "ddp", "seed=7", seconds=0.06), a_row("1", "ring", "seed=3", status="failed", seconds=None)]
    rows += [
        a_row(str(2 + seed), "ring", f"seed={seed}", seconds=seconds[seed], final_metric=metrics[seed])
        for seed in range(3)
    ]
    rows += [a_row("5", "ring", "seed=0", "model=cnn"), a_row("6", "ring", "seed=0", processes=4)]
    rows += [a_row("7", "ring", "data.seed=0"), a_row("8", "ring", "seed=9", metric="val_loss")]
    ddp, ring, *others = groups(rows)
    assert (ddp.strategy, ddp.runs, ddp.final_metric.deviation, ddp.times_ddp) == ("ddp", 1, None, 1)
    assert (ring.strategy, ring.runs, ring.overrides) == ("ring", 3, ["strategy=ring"])
    assert ring.final_metric == pytest.approx((0.7, 0.2))
    assert ring.seconds_per_step == pytest.approx((0.03, math.sqrt(0.0007)))
    assert ring.times_ddp == pytest.approx(2)  # of the means, though no ddp job has one of their seeds
    assert [group.runs for group in others] == [1, 1, 1, 1]
    assert [group.times_ddp for group in others] == [None, None, None, pytest.approx(6)]
    (diverged,) = groups([a_row("0", "ring", final_metric=math.nan), a_row("1", "ring", "seed=1")])
    assert all(map(math.isnan, diverged.final_metric))
    (gone,) = groups([a_row("0", "ring", "seed=0"), a_row("1", "ring", "seed=1", bytes_sent_per_step=None)])
    assert gone.bytes_sent_per_step is None


def test_one_job_a_setting_has_no_table_of_means():
    from ringstrategy.app.sweep_table import grids

    assert [grid.title for grid in grids([a_row("0", "ddp", "seed=0"), a_row("1", "ring", "seed=0")])] == ["jobs"]
    _, means = grids([a_row("0", "ring", "seed=0", final_metric=0.5), a_row("1", "ring", "seed=1", final_metric=0.9)])
    assert [cell.text for cell in means.rows[0]] == ["ring", "", "2", "0.7 ± 0.28", "", "10 ± 0", "123.5 kB"]
    _, diverged = grids([a_row("0", "ring", final_metric=math.inf), a_row("1", "ring", "seed=1", seconds=0.0371)])
    assert [cell.text for cell in diverged.rows[0]][3:6] == ["inf ± nan", "", "23.55 ± 19"]
    mixed = [a_row("0", "ring"), a_row("1", "ring", metric="val_loss")]
    assert [row[3].text for row in grids(mixed)[0].rows] == ["val_accuracy 0.9", "val_loss 0.9"]


def test_labels_begin_with_strategy_and_seed_and_differ():
    from ringstrategy.app.sweep_plots import jobs_of

    long = "trainer.accumulate_grad_batches="
    rows = [
        a_row("a/b/0", "ring", f"{long}4", "seed=0"),
        a_row("a/b/1", "ring", f"{long}4", "seed=1"),
        a_row("a/b/2", "ring", f"{long}8", "seed=1"),
        a_row("a/b/3", "gossip", f"{long}4", "seed=0"),
    ]
    jobs = jobs_of(rows, [None] * 4)
    assert [job.words for job in jobs] == [
        ["ring", "seed=0 trainer.accumulat…"],
        ["ring", "seed=1 trainer.accumulat…", "(job 1)"],
        ["ring", "seed=1 trainer.accumulat…", "(job 2)"],
        ["gossip", "seed=0 trainer.accumulat…"],
    ]
    assert jobs[2].label == f"ring seed=1 {long}8 (job 2)"
    assert jobs[3].label == f"gossip seed=0 {long}4"


# --- the page


def test_the_page_has_the_table_and_needs_nothing_else(sweep):
    page = page_of(sweep)
    assert page.links == []
    assert page.tags.count("script") == 3
    assert {"img", "b", "link", "iframe"}.isdisjoint(page.tags)  # what the evil override asks for
    jobs, means = page.rows[1:6], page.rows[7:]
    assert [row[0] for row in jobs] == ["0", "1", "2", "9", "10"]
    assert jobs[0][1:4] == ["ring", EVIL, "2.5"]
    assert jobs[0][4:] == ["", "10.5", "1 kB", "1200", "17.6", "2", "3"]
    assert jobs[1][4:] == ["1", "10.5", "-", "7", "5.1", "-", "-"]
    assert jobs[3][1:] == ["ring", "seed=9", "FAILED", "", *"------"]
    assert means[1:] == [
        ["ddp", "", "1", "2.5", "1", "10.5", "-"],
        ["gossip", "", "2", "2.5 ± 0", "0.00419", "2505 ± 3528", "500 B"],
    ]
    assert "5 jobs, 1 failed" in page.texts["p"]
    assert page.texts["code"].strip() == "trainer.max_epochs=3"


def test_the_lines_are_the_runs(sweep):
    by_step, by_time, by_bytes, _ = page_of(sweep).plots
    assert [sorted(lines(plot)) for plot in (by_step, by_time, by_bytes)] == [[0, 1, 2, 4], [0, 1, 2, 4], [0, 2]]
    short = lines(by_step)[2]
    assert short["x"] == [1, 2, 3, 4, 5, 6, 7]
    assert short["y"] == [10, 5, 3.33333, 2.5, None, 1.66667, 1.42857]  # a gap where it was NaN
    assert lines(by_time)[2]["x"] == pytest.approx([5, 5.01, 5.021, 5.031, 5.042, 5.052, 5.063])
    assert lines(by_bytes)[2]["x"] == [1000, 2000, 3000, 4000, 5000, 6000, 7000]
    thinned = lines(by_step)[0]
    assert MOST_POINTS / 2 < len(thinned["x"]) == len(thinned["y"]) <= MOST_POINTS
    assert thinned["x"][:2] == [2, 5]
    assert thinned["name"] == f"ring {EVIL}".replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    marks = [
        [t["x"] for t in plot["data"] if t["mode"] == "markers" and t["meta"] == 2] for plot in (by_step, by_bytes)
    ]
    assert marks == [[[0, 3, 7]], [[0, 3000, 7000]]]


def test_a_bar_is_as_long_as_a_step(sweep):
    bars = page_of(sweep).plots[3]["data"]
    length = dict.fromkeys(range(5), 0.0)
    for trace in bars:
        for place, x in zip(trace["meta"], trace["x"], strict=True):
            length[place] += x
    for place, name in enumerate(("0", "1", "2", "9", "10")):
        seconds = json.loads((sweep / name / "summary.json").read_text()).get("seconds_per_step", 0)
        assert length[place] == pytest.approx(1000 * seconds, rel=1e-4), name
    assert [trace["meta"] for trace in bars] == [[0, 2, 4], [0, 2, 4], [0, 2, 4], [1]]
    assert [trace["x"][0] for trace in bars[1:3]] == [3, 2]


def test_one_run_and_another_file(sweep, tmp_path, capsys):
    out = tmp_path / "elsewhere.html"
    main([str(sweep / "2"), "--out", str(out)])
    assert not (sweep / "2" / "report.html").exists()
    assert f"page: {out}" in capsys.readouterr().out
    page = Page(out.read_text(encoding="utf-8"))
    assert [row[:2] for row in page.rows[1:]] == [["2", "gossip"]]
    assert page.texts["code"].strip() == "strategy=gossip trainer.max_epochs=3 seed=2"


def test_what_cannot_be_reported_is_said(sweep, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "summary.json").write_text('{"accuracy": 1}')
    for arguments, words in (
        ([tmp_path / "empty"], f"there is no summary.json in {tmp_path / 'empty'} or in a folder below it"),
        ([tmp_path / "missing"], "there is no summary.json in"),
        ([tmp_path / "foreign"], "foreign/summary.json was not written by ringstrategy-train"),
        ([sweep, "--out", tmp_path / "missing" / "a.html"], "No such file or directory"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        assert ended.value.code == 2
        assert words in capsys.readouterr().err
