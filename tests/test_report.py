"""What a run and a sweep leave to read: steps as CSV, one table, one page that a browser draws without a network."""

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import termios
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import lightning as L
import pytest
import torch

from ringstrategy.app.curves import MOST_POINTS, Curves, read_curves, thin, warm_mean, write_curves
from ringstrategy.app.report import RunReport, print_summary, read_summary, write_summary
from ringstrategy.app.sweep_compare import groups, times_ddp
from ringstrategy.app.sweep_plots import COLORS, DASHES, jobs_of
from ringstrategy.app.sweep_print import print_tables
from ringstrategy.app.sweep_report import main
from ringstrategy.app.sweep_table import COLUMNS, grids, job_folders, read_row

EVIL = "data.title=</script><img src=http://x.example/a.png onerror=alert()>[bold]&amp;<b>%{x}"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
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


def fit(folder, module, *callbacks, ckpt_path=None, **options):
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
    trainer.fit(module, rows, rows, ckpt_path=ckpt_path)
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


@pytest.mark.timeout(60)
def test_a_run_writes_every_step(tmp_path, capsys):
    held = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            report = next(callback for callback in trainer.callbacks if isinstance(callback, RunReport))
            held.append(list(report.curves.losses))

    fit(tmp_path, Line(), Watch(), accumulate_grad_batches=2, num_sanity_val_steps=2)
    assert not any(held)  # no loss was fetched while steps ran
    curves = read_curves(tmp_path)
    assert curves.steps == [1, 2, 3, 4]
    assert curves.losses == [9.5, 7.5, 5.5, 3.5]  # a step's two batches
    assert curves.validation_losses == [(4, 2.0)]  # not what the sanity check saw
    assert all(seconds > 0 for seconds in curves.step_seconds)
    assert curves.bytes_sent == [0] * 4  # one process
    assert None not in curves.exposed_seconds + curves.communication_seconds
    summary = read_summary(tmp_path)
    assert summary["seconds"] == pytest.approx(sum(curves.step_seconds))
    assert summary["seconds_per_step"] == pytest.approx(sum(curves.step_seconds[1:]) / 3)
    assert (summary["exposed_ms_per_step"], summary["hidden_ms_per_step"]) == (0, 0)
    assert (summary["probe_seconds"], summary["probe_bytes_sent"]) == (0, 0)
    print_summary(summary)
    assert "measuring" not in capsys.readouterr().out
    print_summary({**summary, "probe_seconds": 0.814, "probe_bytes_sent": 280_000})
    assert re.search(r"measuring, choosing\W+0\.81 s, 280 kB", capsys.readouterr().out)


@pytest.mark.timeout(60)
def test_a_resumed_run_counts_on(tmp_path):
    trainer = fit(tmp_path / "first", Line(), enable_checkpointing=True)
    fit(tmp_path / "second", Line(), max_steps=6, ckpt_path=trainer.checkpoint_callback.best_model_path)
    assert read_curves(tmp_path / "second").steps == [5, 6]


@pytest.mark.timeout(60)
def test_what_nobody_measures_is_an_empty_cell(tmp_path):
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
    assert (tmp_path / "steps.csv").read_text().splitlines()[1] == "1,10.0,5.0,5.0,1000,0.002,0.005"


def test_other_columns_are_refused(tmp_path):
    write_curves(tmp_path, a_curve(3))
    text = (tmp_path / "steps.csv").read_text()
    (tmp_path / "steps.csv").write_text(text.replace("loss", "losses", 1))
    with pytest.raises(ValueError, match=r"steps.csv should have the columns step, loss, .* has step, losses"):
        read_curves(tmp_path)


@pytest.mark.parametrize("count", [0, 1, MOST_POINTS, MOST_POINTS + 1, 7 * MOST_POINTS + 3])
def test_thinning_keeps_the_mean(count):
    values = [float(value % 17) for value in range(count)]
    points = thin(values)
    assert len(points) <= MOST_POINTS
    assert len(points) >= min(count, MOST_POINTS // 2)
    size = -(-count // MOST_POINTS)
    weights = [len(values[start : start + size]) for start in range(0, count, size or 1)]
    assert math.fsum(map(math.prod, zip(points, weights, strict=True))) == pytest.approx(sum(values))


def test_the_first_tenth_warms_up():
    assert warm_mean([100.0] * 3 + [1.0] * 27) == 1
    assert warm_mean([100.0] * 4 + [1.0] * 27) > 1
    assert warm_mean([100.0, 1.0]) == 1
    assert warm_mean([100.0]) == 100
    assert warm_mean([]) is None
    assert warm_mean([None, 1.0]) is None


# --- the table


def test_jobs_are_found_wherever_they_are_and_counted_as_people_count(sweep):
    assert [job.name for job in job_folders(sweep)] == ["0", "1", "2", "9", "10"]
    assert [read_row(job, sweep.parent)["job"] for job in job_folders(sweep.parent)][-1] == "a sweep/10"
    assert job_folders(sweep / "2") == [sweep / "2"]
    assert read_row(sweep / "2", sweep / "2")["job"] == "2"
    os.utime(sweep / "0" / "summary.json", (1, 1))
    assert [job.name for job in job_folders(sweep, since=2)] == ["1", "2", "9", "10"]


def a_row(job, strategy, *overrides, seconds=0.01, **other):
    """As a job's summary is read."""
    row = dict.fromkeys(COLUMNS) | {"job": job, "strategy": strategy, "overrides": [f"strategy={strategy}", *overrides]}
    row |= {"status": "finished", "processes": 2, "metric": "val_accuracy", "final_metric": 0.9, "steps": 1200}
    row |= {"seconds": 12.5, "seconds_per_step": seconds, "bytes_sent_per_step": 123456}
    return row | {"exposed_ms_per_step": 1.25, "hidden_ms_per_step": 3.75} | other


def long_names():
    """Rows as long as they usually get: from several sweeps, with long names and overrides."""
    common = ["trainer.max_epochs=3", "trainer.enable_progress_bar=False"]
    return [
        a_row(f"2026-11-{day}/00-09-53/{job}", strategy, *common, f"seed={seed}", "codec.block=1024", seconds=0.0123)
        for day in (22, 23)
        for job, (strategy, seed) in enumerate(
            (name, seed) for name in ("ddp", "gossip_exponential") for seed in (0, 1)
        )
    ]


def width(text):
    """Of the widest line that names no folder."""
    return max(len(line) for line in text.splitlines() if "/" not in line or line.startswith("2026"))


def printed(rows, capsys, monkeypatch, folder, columns):
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", str(columns))
    print_tables(rows, folder)
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, 160, None])
def test_the_printed_table_fits_and_squeezes_nothing(sweep, monkeypatch, capsys, columns):
    rows = [read_row(job, sweep) for job in job_folders(sweep)]
    text = printed(rows, capsys, monkeypatch, sweep, columns)
    table = text[: text.index("means over seeds")]
    if columns is not None:
        assert width(text) <= columns
    (failed,) = (line.split() for line in table.splitlines() if "FAILED" in line)
    assert failed[:4] == ["9", "ring", "seed=9", "FAILED"]
    (job,) = (line.split() for line in table.splitlines() if line.startswith("2 "))
    assert job[:7] == ["2", "gossip", "seed=2", "2.5", "10.5", "1", "kB"]  # x ddp is blank
    assert ("Left out here: steps, total s;" in " ".join(table.split())) == (columns == 80)
    assert job[7:] == (["2", "3"] if columns == 80 else ["7", "5.1", "2", "3"])
    assert ("[bold]&amp;<b>" in table) == (columns != 80)  # no markup; folded where it is narrow
    assert "max_epochs" not in text  # the same for all
    (mean,) = (line.split() for line in text[len(table) :].splitlines() if line.startswith("gossip "))
    assert mean[:3] == ["gossip", "2", "2.5"]


@pytest.mark.parametrize("columns", [60, 80, 100, None])
def test_strategies_and_metrics_stay_in_one_piece(tmp_path, monkeypatch, capsys, columns):
    rows = long_names()
    text = printed(rows, capsys, monkeypatch, tmp_path, columns)
    jobs, means = text.split("means over seeds in ")
    assert sum(line.startswith("2026-11-2") for line in jobs.splitlines()) == len(rows)
    assert len(re.findall(r"\bgossip_exponential +seed=[01] +0\.9 +1 +12\.3 +123\.5 kB", jobs)) == 4
    assert len(re.findall(r"\bddp +seed=[01] +0\.9 +1 +12\.3 +123\.5 kB", jobs)) == 4
    assert len(re.findall(r"^ddp +4 +0\.9 ± 0 +1 +12\.3 ± 0", means, re.MULTILINE)) == 1
    if columns is None:
        assert len(re.findall(r"^2026-11-2[23]/00-09-53/[0-3] .* 3\.75$", jobs, re.MULTILINE)) == len(rows)
    elif columns > 60:
        assert len(re.findall(r"^2026-11-2[23]/ .*\n00-09-53/[0-3] *$", jobs, re.MULTILINE)) == len(rows) * (
            columns == 80
        )
        assert width(text) <= columns


def test_words_are_folded_between_overrides_before_names_of_jobs_are(tmp_path, monkeypatch, capsys):
    rows = [
        a_row(f"0{hour}-07-09/{job}", strategy, f"topology={topology}", f"seed={hour}")
        for job, strategy in enumerate(("gossip", "gossip_exponential"))
        for hour, topology in enumerate(("complete", "torus"))
    ]
    text = printed(rows, capsys, monkeypatch, tmp_path, 80)
    assert len(re.findall(r"^0[01]-07-09/[01] gossip[ _a-z]+ topology=(?:complete|torus) ", text, re.MULTILINE)) == 4
    assert len(re.findall(r"^ +seed=[01] *$", text, re.MULTILINE)) == 4


def test_a_prefix_that_all_jobs_share_is_said_once(tmp_path, monkeypatch, capsys):
    rows = long_names()[:4]
    text = printed(rows, capsys, monkeypatch, tmp_path, 80)
    assert text.count("2026-11-22") == 2  # in the titles
    assert f"jobs in {tmp_path}/2026-11-22/00-09-53\n" in text
    assert [line.split()[0] for line in text.splitlines() if "seed=" in line] == ["0", "1", "2", "3"]
    assert printed([a_row("run", "ring")], capsys, monkeypatch, tmp_path, 80).startswith(f"\njobs in {tmp_path}\n")
    assert "trainer" not in text
    assert "jobs in" in printed([], capsys, monkeypatch, tmp_path, 20)  # a launcher may have run them elsewhere


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_command_fits_a_terminal_and_fills_a_pipe(sweep):
    """As people call it: on a terminal of 80 columns, and with its output in a pipe."""
    environment = {key: value for key, value in os.environ.items() if key not in {"COLUMNS", "LINES", "FORCE_COLOR"}}
    command = [Path(sys.executable).with_name("ringstrategy-report"), sweep]
    piped = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(command, env=environment | {"TERM": "xterm"}, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # how a terminal ends
        while chunk := os.read(ours, 4096):
            seen += chunk
    os.close(ours)
    assert process.wait() == 0
    screen = re.sub(r"\x1b\[[0-9;]*m", "", seen.decode()).replace("\r", "")
    for text in (piped, screen):
        assert re.search(r"^2 +gossip +seed=2 +2\.5 +10\.5 +1 kB", text, re.MULTILINE)
    assert width(screen) <= 80
    assert "Left out here: steps, total s;" in " ".join(screen.split())
    assert EVIL.replace("data.title", "") in piped  # in one line
    assert "Left out here" not in piped


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


def test_one_job_a_setting_has_no_table_of_means(sweep):
    assert [grid.title for grid in grids([a_row("0", "ddp", "seed=0"), a_row("1", "ring", "seed=0")])] == ["jobs"]
    _, means = grids([a_row("0", "ring", "seed=0", final_metric=0.5), a_row("1", "ring", "seed=1", final_metric=0.9)])
    assert [cell.text for cell in means.rows[0]] == ["ring", "", "2", "0.7 ± 0.28", "", "10 ± 0", "123.5 kB"]
    _, diverged = grids([a_row("0", "ring", final_metric=math.inf), a_row("1", "ring", "seed=1", seconds=0.0371)])
    assert [cell.text for cell in diverged.rows[0]][3:6] == ["inf ± nan", "", "23.55 ± 19"]
    mixed = [a_row("0", "ring"), a_row("1", "ring", metric="val_loss")]
    assert [row[3].text for row in grids(mixed)[0].rows] == ["val_accuracy 0.9", "val_loss 0.9"]
    assert [grid[0].columns[3].heading for grid in (grids(mixed), grids(mixed[:1]))] == [
        "final\nmetric",
        "final\nval_\naccuracy",
    ]


def test_labels_begin_with_strategy_and_seed_and_differ():
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
    assert [job.color for job in jobs] == [COLORS[0]] * 3 + [COLORS[1]]
    assert [job.dash for job in jobs] == [*DASHES[:3], DASHES[0]]


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
        seconds = read_summary(sweep / name).get("seconds_per_step", 0)
        assert length[place] == pytest.approx(1000 * seconds, rel=1e-4), name
    assert [trace["meta"] for trace in bars] == [[0, 2, 4], [0, 2, 4], [0, 2, 4], [1]]
    assert [trace["x"][0] for trace in bars[1:3]] == [3, 2]


def test_what_is_left_out_is_said(sweep):
    (sweep / "2" / "steps.csv").unlink()
    notes = page_of(sweep).texts["figcaption"]
    missing, failed = "gossip seed=2 (has no steps.csv)", "ring seed=9 (failed)"
    assert notes.count(f"Left out: {missing}; {failed}.") == 2
    assert (
        f"Left out: ddp seed=1 (its bytes are not counted); {missing}; {failed}; gossip seed=10 (sent nothing)."
        in notes
    )
    assert f"nobody counts their communication: ddp seed=1. Left out: {failed}." in notes


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


def test_missing_packages_are_named(sweep, monkeypatch):
    monkeypatch.setattr("ringstrategy.extras.find_spec", lambda name: None if name == "plotly" else object())
    with pytest.raises(SystemExit, match=r"needs plotly: in a clone .* pip install '\.\[app\]'"):
        main([str(sweep)])


# --- in a browser


def shown_by_browser(page, tmp_path):
    """The JSON that the page has written into its body in the end."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync", "--dump-dom"]
    options += ["--disable-background-networking", "--disable-component-update", "--virtual-time-budget=20000"]
    command = [CHROMIUM, *options, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    body = re.search(r"<body>(.*)</body>", done.stdout, re.S)
    assert body, f"exit code {done.returncode}\n{done.stderr}"
    return json.loads(unescape(body[1]))


@pytest.mark.timeout(240)
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or chrome is installed")
def test_a_browser_draws_it_sorts_it_and_hides_jobs(sweep, tmp_path):
    main([str(sweep)])
    text = (sweep / "report.html").read_text(encoding="utf-8")
    listen = """<head><script>
    const errors = [];
    addEventListener("error", event => errors.push(event.message));
    addEventListener("unhandledrejection", event => errors.push(String(event.reason)));
    </script>"""
    look = """<script>
    window.addEventListener("load", () => {
      const plots = [...document.querySelectorAll(".js-plotly-plot")];
      const seen = [], now = () => ({
        lines: plots.map(p => p.querySelectorAll(".trace:has(.js-line)").length),
        marks: plots.map(p => p.querySelectorAll("path.point").length),
        bars: document.querySelectorAll("#plot3 .bars .point path").length,
        titles: [...document.querySelectorAll(".xtitle, .ytitle")].map(title => title.textContent),
        names: [...document.querySelectorAll("#plot3 .ytick")].map(tick => tick.textContent.trim()),
        jobs: [...document.querySelector("tbody").rows].map(row => row.cells[0].textContent),
      });
      const click = where => { document.querySelector(where).click(); seen.push(now()); };
      seen.push(now());
      click("[data-job='0']");
      click("#all");
      click("th:nth-child(4) button");
      click("th:nth-child(4) button");
      click("th:nth-child(1) button");
      const asked = performance.getEntriesByType("resource").map(entry => entry.name);
      document.body.innerHTML = "";
      document.body.append(JSON.stringify({seen, asked, errors}));
    });
    </script></body>"""
    watched = tmp_path / "watched.html"
    watched.write_text(text.replace("<head>", listen, 1).replace("</body>", look), encoding="utf-8")
    found = shown_by_browser(watched, tmp_path)
    assert found["errors"] == []
    assert found["asked"] == []  # nothing from the network
    drawn, without, again, up, down, named = found["seen"]
    assert drawn["lines"] == [4, 4, 2, 0]
    assert drawn["marks"][:3] == [12, 12, 6]
    assert drawn["bars"] == 3 * 3 + 1
    assert drawn["titles"].count("loss") == 3
    assert {"step", "seconds of training steps, rank 0", "bytes sent by rank 0", "ms a step, rank 0"} < set(
        drawn["titles"]
    )
    assert drawn["names"][-1].startswith("ringdata.title=</script>")  # in two lines
    assert without["lines"] == [3, 3, 1, 0]
    assert without["bars"] == 2 * 3 + 1
    assert len(without["names"]) == 3
    assert again == drawn
    assert up["jobs"][-1] == down["jobs"][-1] == "9"  # without a metric: last either way
    assert named["jobs"] == ["0", "1", "2", "9", "10"]


@pytest.mark.timeout(240)
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or chrome is installed")
def test_on_a_phone_nothing_is_cut_off(tmp_path):
    for day in (22, 23):
        for seed in (0, 1):
            job = tmp_path / f"2026-11-{day}" / "00-09-53" / str(seed)
            a_job(job, "gossip_exponential", a_curve(7), "trainer.accumulate_grad_batches=4", f"seed={day + seed}")
    main([str(tmp_path)])
    look = """<script>
    window.addEventListener("load", () => {
      const boxes = [...document.querySelectorAll(".main-svg, .xtitle, .ytitle, .ytick, figcaption, .jobs *")];
      const edges = boxes.map(box => box.getBoundingClientRect());
      parent.postMessage(JSON.stringify({
        wide: [innerWidth, document.documentElement.scrollWidth],
        left: Math.min(...edges.map(edge => edge.left)), right: Math.max(...edges.map(edge => edge.right)),
        bars: document.querySelector("#plot3 .bglayer, #plot3 .plot").getBoundingClientRect().width,
        names: [...document.querySelectorAll("#plot3 .ytick")].map(tick => tick.textContent.trim()),
      }), "*");
    });
    </script></body>"""
    report = (tmp_path / "report.html").read_text(encoding="utf-8")
    (tmp_path / "watched.html").write_text(report.replace("</body>", look), encoding="utf-8")
    phone = tmp_path / "phone.html"  # a frame, as windows of this browser are 500 pixels wide at least
    phone.write_text(
        """<html><body><iframe src="watched.html" style="width: 390px; height: 800px; border: 0"></iframe><script>
        addEventListener("message", event => { document.body.innerHTML = ""; document.body.append(event.data); });
        </script></body></html>"""
    )
    found = shown_by_browser(phone, tmp_path)
    assert found["wide"][0] == 390
    assert found["wide"][1] <= 390
    assert found["left"] >= 0
    assert found["right"] <= 390
    assert found["bars"] > 100
    twins = [f"gossip_exponentialseed=23(job 2026-11-{day}/00-09-53/{job})" for day, job in ((23, 0), (22, 1))]
    assert found["names"] == ["gossip_exponentialseed=24", *twins, "gossip_exponentialseed=22"]
