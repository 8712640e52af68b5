"""`ringstrategy-train` as people use it: composed, run with 2 processes, swept, interrupted, misused."""

import csv
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.resources import files
from inspect import signature
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException, MissingConfigException
from hydra.utils import get_class, instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf
from test_data_models import gradient_descent

import ringstrategy
from ringstrategy.app.data.regression import Regression
from ringstrategy.app.overrides import lengthened

CONFIGS = Path(str(files("ringstrategy.configs")))
PROGRAM = Path(sys.executable).with_name("ringstrategy-train")
REPORT = PROGRAM.with_name("ringstrategy-report")
OWN_MODULE = """
import lightning as L, torch

class Net(L.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, width), torch.nn.Linear(width, 10))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


def names(group):
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def composed(*overrides):
    with initialize_config_module("ringstrategy.configs", version_base="1.3"):
        return compose("train", ["output_dir=unused", *overrides])


def environment():
    """Without what a launcher or an earlier test has left behind."""
    left = {"LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED"}
    return {key: value for key, value in os.environ.items() if key not in left} | {"COLUMNS": "160"}


def app(folder, *overrides):
    return subprocess.run([PROGRAM, *overrides], cwd=folder, env=environment(), capture_output=True, text=True)


def each_value(override):
    key, values = override.split("=", 1)
    return [f"{key}={value}" for value in values.split(",")]


def table_lines(printed):
    return [line for line in printed.splitlines() if re.match(r"\d+ ", line)]


def check_files(summary):
    assert summary["status"] == "finished"
    for name in ("checkpoint", "csv", "curves"):
        assert Path(summary[name]).stat().st_size > 0
    assert list(Path(summary["tensorboard"]).glob("events.out.tfevents.*"))
    assert Path(summary["curves"]).read_bytes().startswith(b"\x89PNG")


def processes_naming(folder):
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            commands.append(path.read_text())
        except OSError:  # it has just ended
            continue
    return [command for command in commands if f"--job\0{folder}" in command]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", names("strategy"))
def test_every_strategy_is_one(name):
    strategy = instantiate(composed(f"strategy={name}").strategy, _convert_="all")
    assert isinstance(strategy, L.pytorch.strategies.DDPStrategy)
    assert isinstance(strategy, ringstrategy.RingStrategy) == (name != "ddp")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("group", "override"),
    [
        ("algorithm", "algorithm@strategy.algorithm"),
        ("codec", "codec@strategy.algorithm.codec"),
        ("collective", "collective@strategy.algorithm.collective"),
        ("topology", "topology@strategy.algorithm.topology"),
    ],
)
def test_every_part_can_be_exchanged(group, override):
    # sparse codecs cannot go round a ring; only gossip has a topology; it and auto are given no collective
    others = {"codec": ["collective@strategy.algorithm.collective=direct"], "topology": ["strategy=gossip"]}

    def has_no_collective(name):
        return (
            group == "algorithm"
            and "collective"
            not in signature(get_class(composed(f"{override}={name}").strategy.algorithm._target_)).parameters
        )

    parts = [name for name in names(group) if not has_no_collective(name)]

    def built(*overrides):
        return repr(instantiate(composed(*others.get(group, []), *overrides).strategy, _convert_="all").algorithm)

    default = built()
    told = {built(f"{override}={name}") for name in parts}
    assert default in told
    assert len(told) == len(parts)


@pytest.mark.timeout(60)
def test_a_knob_deep_inside_is_an_override():
    cfg = composed("strategy=ring_fp16", "strategy.algorithm.bucket_mb=5", "strategy.timeout.seconds=60")
    assert instantiate(cfg.strategy, _convert_="all").algorithm.bucket_mb == 5
    assert cfg.strategy.algorithm.codec.dtype == "float16"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("group", ["model", "data", "experiment"])
def test_every_model_data_and_experiment_is_one(group):
    for name in names(group):
        if name == "own":
            continue
        cfg = composed(f"{group}={name}")
        model = instantiate(cfg.model, _convert_="all")
        assert isinstance(model, L.LightningModule)
        assert isinstance(model.configure_optimizers(), torch.optim.Optimizer)
        assert isinstance(instantiate(cfg.data, _convert_="all"), L.LightningDataModule)


@pytest.mark.timeout(60)
def test_every_trainer_logger_and_callback_is_one(tmp_path):
    for name in names("trainer"):
        cfg = composed(f"trainer={name}", f"output_dir={tmp_path}")
        for part in (*cfg.logger.values(), *cfg.callbacks.values()):
            instantiate(part)
        if name == "gpu" and not torch.cuda.is_available():
            with pytest.raises(Exception, match="No supported gpu backend found") as caught:
                instantiate(cfg.trainer)
            assert isinstance(caught.value.__cause__, MisconfigurationException)
        else:
            assert isinstance(instantiate(cfg.trainer), L.Trainer)


@pytest.mark.timeout(60)
def test_a_wrong_name_is_refused_with_the_right_ones():
    with pytest.raises(MissingConfigException, match=r"(?s)Available options.*ring_fp16"):
        composed("strategy=rong")
    with pytest.raises(ConfigCompositionException, match=r"Could not override 'strategy.algorithm.bucket'"):
        composed("strategy.algorithm.bucket=5")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_of_somebody_elses_module(tmp_path):
    (tmp_path / "somebody.py").write_text(OWN_MODULE)
    done = app(tmp_path, "model=own", "model._target_=somebody.Net", "+model.width=16", "trainer.max_steps=4")
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (path.parent for path in tmp_path.rglob("config.yaml") if path.parent.name != ".hydra")
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"somebody.py", "outputs"}
    assert len(list((tmp_path / "outputs").glob("*/*"))) == 1  # rank 1 made no folder of its own

    summary = json.loads((folder / "summary.json").read_text())
    check_files(summary)
    parameters = 64 * 16 + 16 + 16 * 10 + 10
    assert summary["processes"] == 2
    assert summary["steps"] == 4
    # the ring over 2 ranks sends every gradient once a step; a message of its own says which were used
    assert 4 * parameters <= summary["bytes_sent_per_step"] < 4 * parameters + 100
    assert summary["exposed_ms_per_step"] > 0
    assert summary["metric"] == "train_loss"
    with open(summary["csv"]) as file:
        assert len([row for row in csv.DictReader(file) if row["communication/bytes_sent"]]) == 4
    for text in ("ring, 2 processes", "kB a step", "ms a step", summary["checkpoint"], summary["curves"]):
        assert text in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_sweep(tmp_path):
    done = app(tmp_path, "-m", "strategy=ring,ring_fp16", "trainer.max_steps=3", "trainer.enable_progress_bar=false")
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "multirun").glob("*/*")
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1", "multirun.yaml", "sweep.csv", "sweep.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["multirun"]
    summaries = [json.loads((folder / job / "summary.json").read_text()) for job in "01"]
    for job, summary in zip("01", summaries, strict=True):
        check_files(summary)
        with open(folder / job / "steps.csv") as file:
            steps = list(csv.DictReader(file))
        assert [step["step"] for step in steps] == ["1", "2", "3"]
        assert sum(int(step["bytes_sent"]) for step in steps) == summary["bytes_sent"]
        assert float(steps[-1]["total_seconds"]) == summary["seconds"]
        for step in steps:
            assert 0 < float(step["exposed_seconds"]) < float(step["seconds"])
            assert float(step["loss"]) > 0
            assert float(step["communication_seconds"]) > 0
        with open(folder / job / "validation.csv") as file:
            assert [row["step"] for row in csv.DictReader(file)] == ["3"]
        assert summary["processes"] == 2
        assert summary["metric"] == "val_accuracy"  # validated at the end, although 3 steps are no whole epoch
    assert summaries[0]["bytes_sent"] == pytest.approx(2 * summaries[1]["bytes_sent"], rel=1e-3)
    assert summaries[1]["bytes_sent"] > 0

    table = json.loads((folder / "sweep.json").read_text())
    assert [row["strategy"] for row in table] == ["ring", "ring_fp16"]
    for row, summary in zip(table, summaries, strict=True):
        for column in ("final_metric", "seconds_per_step", "bytes_sent_per_step", "exposed_ms_per_step"):
            assert row[column] == summary[column]
            assert row[column] > 0
    with open(folder / "sweep.csv") as file:
        assert [row["strategy"] for row in csv.DictReader(file)] == ["ring", "ring_fp16"]
    printed = done.stdout[done.stdout.index("jobs in") :]
    table = table_lines(printed)
    assert [line.split()[:2] for line in table] == [["0", "ring"], ["1", "ring_fp16"]]
    assert f"ringstrategy-report {folder.relative_to(tmp_path)}" in printed

    command = [REPORT, folder.relative_to(tmp_path)]
    reported = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert reported.returncode == 0, reported.stderr
    assert table_lines(reported.stdout) == table
    (plots,) = re.findall(
        r'<script type="application/json" id="plots">(.*)</script>', (folder / "report.html").read_text()
    )
    by_bytes = {trace["name"]: trace for trace in json.loads(plots)[2]["data"] if trace["mode"] == "lines"}
    assert list(by_bytes) == ["ring", "ring_fp16"]
    assert by_bytes["ring"]["x"][-1] == pytest.approx(summaries[0]["bytes_sent"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_with_parts_in_their_short_form(tmp_path):
    overrides = ["strategy=push_sum", "topology=torus", "algorithm.interval=2", "trainer.max_steps=4"]
    done = app(tmp_path, *overrides, "trainer.enable_progress_bar=False")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(next(tmp_path.rglob("summary.json")).read_text())
    algorithm = OmegaConf.load(next(tmp_path.rglob("config.yaml"))).strategy.algorithm
    assert algorithm.topology._target_ == "ringstrategy.topologies.Torus"
    assert algorithm.interval == 2
    assert summary["strategy"] == "push_sum"
    assert summary["processes"] == 2
    assert summary["bytes_sent"] > 0
    assert summary["overrides"] == [*overrides, "trainer.enable_progress_bar=False"]


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_the_help_fits_a_terminal_and_its_examples_compose(tmp_path):
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "my_net.yaml").write_text("_target_: my_module.Net")
    done = app(tmp_path, "--config-dir", "mine", "--help")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    options, name = {}, ""  # by group; a line without one goes on with the last
    for group, rest in re.findall(r"^  (\w*) +(\w+(?:, \w+)*,?)$", done.stdout, re.MULTILINE):
        name = group or name
        options.setdefault(name, []).extend(re.findall(r"\w+", rest))
    for group in ("algorithm", "codec", "collective", "data", "experiment", "strategy", "topology", "trainer"):
        assert options[group] == names(group), group
    assert options["model"] == sorted([*names("model"), "my_net"])

    examples = re.findall(r"^  ringstrategy-train (.*)", done.stdout, re.MULTILINE)
    common = re.findall(r"^  ([\w.]+=\S+)", done.stdout, re.MULTILINE)
    assert len(examples) > 5
    assert len(common) > 10
    with_part = {"algorithm.interval": "strategy=gossip", "codec.bits": "strategy=ring_int8"}
    commands = [example.split() for example in examples]
    commands += [[with_part.get(each.split("=")[0], "strategy=ring"), each] for each in common if "hydra." not in each]
    for command in commands:
        overrides = [lengthened(each) for each in command if each != "-m"]
        for job in itertools.product(*map(each_value, overrides)):
            assert composed(*job).strategy._target_


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_failed_job_is_shown_and_the_others_go_on(tmp_path):
    small = ["model=gpt", "data=stdlib_text", "data.max_bytes=100_000", "data.validation_bytes=4096"]
    few = ["trainer.devices=1", "trainer.max_steps=1", "trainer.enable_progress_bar=false"]
    done = app(tmp_path, "-m", "model.heads=3,4", *small, *few)
    assert done.returncode == 1
    assert "width must be a multiple of heads, got width=128 and heads=3" in done.stderr
    table = json.loads(next(tmp_path.rglob("sweep.json")).read_text())
    assert [row["status"] for row in table] == ["failed", "finished"]
    assert table[1]["metric"] == "val_loss"
    assert "FAILED" in done.stdout[done.stdout.index("jobs in") :]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_ends_every_process(tmp_path):
    out = tmp_path / "out"
    command = [PROGRAM, f"hydra.run.dir={out}", "trainer.max_epochs=100000", "trainer.enable_progress_bar=false"]
    with open(tmp_path / "log", "w") as log:
        running = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=log, stderr=log)
        try:
            while not (out / "csv" / "metrics.csv").exists():
                assert running.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.2)
            assert len(processes_naming(out)) >= 2
            running.send_signal(signal.SIGINT)
            assert running.wait(30) == 130
        finally:
            running.terminate()
            running.wait()
    deadline = time.monotonic() + 5
    while processes_naming(out) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_naming(out) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_regression_on_four_ranks_is_gradient_descent(tmp_path):
    done = app(tmp_path, "experiment=regression", "trainer.enable_progress_bar=false")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(next(tmp_path.rglob("summary.json")).read_text())
    assert summary["processes"] == 4
    assert summary["steps"] == 400
    assert summary["bytes_sent"] > 0
    data = Regression()
    expected = gradient_descent(data.rows.double().numpy(), data.targets.double().numpy(), epochs=400, lr=0.01)
    weights = torch.load(summary["checkpoint"], weights_only=True)["state_dict"]["weights"]
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-5)
