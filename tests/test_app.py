"""`ringstrategy-train` as people use it: composed, run with 2 processes, swept, interrupted.

Short forms of overrides mean the long ones; what is wrong is refused with the right form.
"""

import contextlib
import csv
import io
import itertools
import json
import os
import re
import signal
import sys
import time
from importlib.resources import files
from pathlib import Path
from unittest import mock

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.errors import CompactHydraException
from hydra.utils import instantiate
from jobs import program as program
from omegaconf import OmegaConf

from ringstrategy.app import train
from ringstrategy.app.overrides import PLACES, lengthened, shortened, swept
from ringstrategy.app.refusals import check_arguments, check_keys, in_words, instantiate_strategy
from ringstrategy.app.report import write_summary

CONFIGS = Path(str(files("ringstrategy.configs")))
PROGRAM = Path(sys.executable).with_name("ringstrategy-train")
GOSSIP = "gossip, gossip_exponential, gossip_int8, push_sum"
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


# --- what a run is made of


def test_every_model_data_trainer_and_experiment_is_one(tmp_path):
    for model, data in itertools.zip_longest(names("model"), names("data"), fillvalue="digits"):
        if "own" in (model, data):
            model, data = model.replace("own", "mlp"), data.replace("own", "digits")
        cfg = composed(f"model={model}", f"data={data}")
        made = instantiate(cfg.model, _convert_="all")
        assert isinstance(made.configure_optimizers(), torch.optim.Optimizer), model
        assert isinstance(instantiate(cfg.data, _convert_="all"), L.LightningDataModule), data
    for name in names("experiment"):
        assert composed(f"experiment={name}").model._target_ != composed().model._target_, name
    for name in set(names("trainer")) - {"gpu"}:
        cfg = composed(f"trainer={name}", f"output_dir={tmp_path}")
        parts = [instantiate(part) for part in (cfg.trainer, *cfg.logger.values(), *cfg.callbacks.values())]
        assert isinstance(parts[0], L.Trainer), name


# --- the ranks of a job, in processes of the pool


def _trained(folder, overrides):
    """As a rank that Lightning starts; its seed and what rank 0 wrote."""
    folder = Path(folder)
    if os.environ["RANK"] == "0":
        folder.mkdir()
        cfg = composed(f"output_dir={folder}", "run.strategy=mine", "run.overrides=[some]", *overrides)
        OmegaConf.save(cfg, folder / "draft", resolve=True)
        (folder / "draft").rename(folder / "config.yaml")
    while not (folder / "config.yaml").exists():
        time.sleep(0.01)
    train.train(folder)
    return os.environ["PL_GLOBAL_SEED"]


def test_ranks_train_what_was_asked_for(ranks, tmp_path, monkeypatch):
    (tmp_path / "somebody.py").write_text(OWN_MODULE)
    monkeypatch.chdir(tmp_path)
    own = ["model=own", "model._target_=somebody.Net", "+model.width=16", "seed=7", "trainer.enable_progress_bar=false"]
    assert ranks(2, _trained, str(tmp_path / "first"), [*own, "trainer.max_steps=4"]) == ["7", "7"]
    summary = json.loads((tmp_path / "first" / "summary.json").read_text())
    assert (summary["status"], summary["strategy"], summary["overrides"]) == ("finished", "mine", ["some"])
    assert (summary["processes"], summary["steps"], summary["metric"]) == (2, 4, "train_loss")
    parameters = 64 * 16 + 16 + 16 * 10 + 10
    # the ring over 2 ranks sends every gradient once a step; a message of its own says which were used
    assert 4 * parameters <= summary["bytes_sent_per_step"] < 4 * parameters + 100
    assert summary["exposed_ms_per_step"] > 0
    checkpoint = tmp_path / "first" / "checkpoints" / "epoch_0_step_4.ckpt"
    assert summary["checkpoint"] == str(checkpoint)
    assert Path(summary["curves"]).read_bytes().startswith(b"\x89PNG")
    with open(summary["csv"]) as file:
        assert len([row for row in csv.DictReader(file) if row["communication/bytes_sent"]]) == 4

    ranks(2, _trained, str(tmp_path / "second"), [*own, "trainer.max_steps=6", f"resume={checkpoint}"])
    with open(tmp_path / "second" / "steps.csv") as file:
        steps = list(csv.DictReader(file))
    assert [step["step"] for step in steps] == ["5", "6"], "it goes on from the checkpoint"
    for step in steps:
        assert 0 < float(step["exposed_seconds"]) < float(step["seconds"])
        assert int(step["bytes_sent"]) >= 4 * parameters


# --- the program, without the processes of its jobs


def _called(arguments, exit_codes):
    """`ringstrategy-train` whose jobs end with these exit codes: its own, what it prints, and the jobs' folders."""
    codes, jobs, printed, code = iter(exit_codes), [], io.StringIO(), 0

    def job(command, log):
        if log:
            log.write_text("a traceback that nobody wants to look for")
        jobs.append(Path(command[-1]))
        assert command[-2] == "--job"
        assert not (jobs[-1] / "summary.json").exists(), "an earlier job's: this one may be killed"
        if (ended := next(codes)) == 0:
            named = OmegaConf.load(jobs[-1] / "config.yaml").run
            summary = {"status": "finished", "strategy": named.strategy, "overrides": list(named.overrides)}
            numbers = {"processes": 2, "metric": "val_loss", "final_metric": 0.5, "seconds_per_step": 0.25}
            write_summary(jobs[-1], summary | numbers)
        return ended

    sys.argv = ["ringstrategy-train", *arguments]
    os.environ["COLUMNS"] = "200"
    try:
        said = contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed)
        with mock.patch.object(train, "_run_in_own_process_group", job), said[0], said[1]:
            train.main()
    except SystemExit as ended:
        code = ended.code
    finally:
        OmegaConf.clear_resolver("options_by_group")
    return code, printed.getvalue(), jobs


def test_a_job_is_what_was_asked_for_and_ends_as_its_process_does(ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = ["strategy=push_sum", "topology=torus", "algorithm.interval=2", "trainer.max_steps=4"]
    [(code, _, [folder])] = ranks(1, _called, overrides, [0])
    assert code == 0
    assert re.fullmatch(r"outputs/[-\d]{10}/\d\d-\d\d-\d\d-\d{6}", str(folder.relative_to(tmp_path))), "of its own"
    cfg = OmegaConf.load(folder / "config.yaml")
    assert cfg.strategy.algorithm.topology._target_ == "ringstrategy.topologies.Torus"
    assert (cfg.strategy.algorithm.interval, cfg.trainer.max_steps) == (2, 4)
    assert (cfg.run.strategy, list(cfg.run.overrides)) == ("push_sum", overrides)
    for _ in range(2):
        [(code, _, [folder])] = ranks(1, _called, [f"hydra.run.dir={tmp_path / 'mine'}"], [7])
    assert (code, folder) == (7, tmp_path / "mine")
    failed = json.loads((folder / "summary.json").read_text())
    assert failed == {"status": "failed", "exit_code": 7, "strategy": "ring", "overrides": []}


def test_a_sweep_has_a_row_for_each_job_and_fails_if_one_does(ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [(code, printed, jobs)] = ranks(
        1, _called, ["-m", "strategy=ddp,ring", "seed=0,1", "hydra.job.chdir=true"], [0, 3, 0, 0]
    )
    assert (code, [job.name for job in jobs]) == (1, ["0", "1", "2", "3"])
    rows = json.loads((jobs[0].parent / "sweep.json").read_text())
    expected = [("ddp", 0.25), ("ddp", None), ("ring", 0.25), ("ring", 0.25)]
    assert [(row["strategy"], row["seconds_per_step"]) for row in rows] == expected
    with open(jobs[0].parent / "sweep.csv") as file:
        assert [row["overrides"] for row in csv.DictReader(file)] == [" ".join(row["overrides"]) for row in rows]
    lines = [line.split() for line in printed.splitlines() if re.match(r" *\d ", line)]
    assert [line[:4] for line in lines[:2]] == [["0", "ddp", "seed=0", "0.5"], ["1", "ddp", "seed=1", "FAILED"]]
    assert re.search(r"^job 3 of 4, about \d+ s left: strategy=ring seed=0$", printed, re.MULTILINE)
    assert printed.count("a traceback that nobody wants to look for") == 1


@pytest.mark.parametrize("sweeps", [[], ["-m", "seed=1,2"]])
def test_a_refusal_is_short_and_trains_nothing(ranks, tmp_path, monkeypatch, sweeps):
    monkeypatch.chdir(tmp_path)
    [(said, _, jobs)] = ranks(1, _called, [*sweeps, "+topology=complete"], [])
    assert "Write topology=complete without the +" in said
    assert said.startswith("ringstrategy-train: ")
    assert "HYDRA_FULL_ERROR" not in said
    assert not jobs + list(tmp_path.rglob("config.yaml.*")) + list(tmp_path.rglob("summary.json"))


def test_what_a_job_of_a_sweep_prints_is_in_its_log(tmp_path):
    said = "import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)"
    assert train._run_in_own_process_group([sys.executable, "-c", said], tmp_path / "train.log") == 3
    assert sorted((tmp_path / "train.log").read_text().split()) == ["one", "two"]


# --- overrides


def words_about(*overrides):
    """The error that `ringstrategy-train` ends with, or None if it would train."""
    try:
        cfg = composed(*map(lengthened, overrides))
    except CompactHydraException as error:
        return in_words(error)
    cfg.run.overrides = [shortened(lengthened(override)) for override in overrides]
    cfg.run.strategy = next((each[9:] for each in overrides if each.startswith("strategy=")), "ring")
    try:
        check_keys(cfg, cfg.run.overrides)
        check_arguments(cfg)
        instantiate_strategy(cfg)
    except ValueError as error:
        return str(error)
    return None


def test_a_short_form_is_a_long_one_and_other_arguments_stay():
    for short, long in {
        "topology=torus": "topology@strategy.algorithm.topology=torus",
        "algorithm=powersgd": "algorithm@strategy.algorithm=powersgd",
        "codec.bits=4": "strategy.algorithm.codec.bits=4",
        "++codec.bits=4": "++strategy.algorithm.codec.bits=4",
        "~topology.rows": "~strategy.algorithm.topology.rows",
        "algorithm.bucket_mb=5": "strategy.algorithm.bucket_mb=5",
        "optimizer=muon": "optimizer@model.optimizer=muon",
        "optimizer.lr=3": "model.optimizer.lr=3",
    }.items():
        assert lengthened(short) == long
        assert shortened(long) == short
        assert (lengthened(long), shortened(short)) == (long, short)
    for other in (
        *("-m", "strategy=ring", "+topology=torus", "codecs=3", "trainer.codec=3", "strategy.algorithms.codec=3"),
        "codec@strategy.algorithm.codec.codec=gaussian",
    ):
        assert lengthened(other) == shortened(other) == other


def test_in_a_sweep_one_value_is_a_list_of_one():
    for override, listed in {
        "strategy.algorithm.interval=4": "strategy.algorithm.interval=choice(4)",
        "topology@strategy.algorithm.topology=torus": "topology@strategy.algorithm.topology=choice(torus)",
        "+strategy.algorithm.names=['a,b', c]": "+strategy.algorithm.names=choice(['a,b', c])",
    }.items():
        assert swept(override) == swept(listed) == listed
    same = ["-m", "strategy=ring", "strategy=ring,gossip", "seed=1", "~strategy.timeout"]
    for override in [*same, *(f"strategy.algorithm.interval={value}" for value in ("[4", "4,8", "range(1,4)"))]:
        assert swept(override) == override


@pytest.mark.parametrize("part", PLACES)
def test_every_option_of_a_part_is_chosen_by_its_short_form(part):
    strategy = {"topology": "strategy=gossip", "outer": "strategy=diloco"}.get(part, "strategy=ring_topk")
    chosen = set()
    for name in names(part):
        cfg = composed(strategy, lengthened(f"{part}={name}"))
        alone = OmegaConf.load(f"{CONFIGS}/{part}/{name}.yaml")
        assert OmegaConf.select(cfg, PLACES[part])._target_ == alone._target_
        chosen.add(str(OmegaConf.select(cfg, PLACES[part])))
    assert len(chosen) == len(names(part))


def test_what_fits_is_not_refused():
    own = {"model": ["model._target_=torch.nn.Identity"], "data": ["data._target_=torch.nn.Identity"]}
    for group, missing in own.items():
        for name in names(group):
            assert words_about(f"{group}={name}", *(missing if name == "own" else [])) is None, name
    assert words_about("strategy=ring", "codec=block_int", "codec.bits=4", "collective=direct") is None
    assert words_about("strategy=ring_topk", "codec.k=4", "+trainer.fast_dev_run=true") is None
    assert words_about("strategy=gossip", "topology@strategy.algorithm.topology=torus", "topology.rows=2") is None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        # nothing would read these
        (["+topology=complete"], rf"Write topology=complete without the \+. These strategies have one: {GOSSIP}$"),
        (["+max_epoch=3"], r"no key 'max_epoch', .*no effect. Did you mean trainer.max_epochs=3\?$"),
        (["+trainer.strategy=ddp"], "trainer.strategy would be ignored: use strategy without `trainer.`"),
        # a part that the strategy has not, a name that does not exist, a text where a number belongs
        (["strategy=ring", "topology=torus"], f"has no topology. .* one: {GOSSIP}. .* strategy=gossip topology=torus$"),
        (["strategy=rong"], r"(?s)Available options in 'strategy':.*Did you mean strategy=ring\?$"),
        (["trainer.max_steps=abc"], "^trainer.max_steps=abc: a number is needed"),
        (["strategy=ring_int8", "codec.bit=4"], r"codec has no 'bit'. Did you mean bits\? .*: \+codec.bit=4$"),
        # an argument that no class takes
        (["+trainer.max_epoch=3"], r"lightning.Trainer has no argument 'max_epoch'. Did you mean max_epochs\?$"),
        (["strategy=ring_auto", "algorithm.allow=[{_target_:ringstrategy.BlockInt,bit:4}]"], "Did you mean bits"),
        (["+strategy.codec=3"], r"belongs to the algorithm: RingStrategy\(AllReduce\(codec=...\)\)"),
        (
            ["codec=block_int", "codec._target_=ringstrategy.BlockIn"],
            r"^codec._target_=ringstrategy.BlockIn cannot be imp",
        ),
        # parts that do not fit each other
        (["codec=top_k"], r"^TopK\(.*\) cannot be added hop by hop; .*\. On the command line: collective=direct$"),
        (["seed=["], "hydra.cc"),  # what Hydra says well
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_refused_with_the_right_form(overrides, words):
    said = words_about(*overrides)
    assert re.search(words, said), said
    assert "append" not in said  # Hydra's advice, which made runs that ignored the override


# --- the real program


@pytest.mark.slow
def test_the_program_trains_and_the_report_shows_it(program, tmp_path):
    assert program(PROGRAM, "trainer.max_steps=4", "trainer.enable_progress_bar=false").wait() == 0
    (folder,) = (tmp_path / "outputs").glob("*/*")
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {"outputs", "printed", "errors"}  # rank 1 made no folder of its own
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["processes"], summary["steps"]) == (2, 4)
    assert summary["bytes_sent"] > 0
    report = program(PROGRAM.with_name("ringstrategy-report"), folder, COLUMNS="160")
    assert report.wait() == 0
    assert f"{summary['final_metric']:.4g}" in report.printed
    assert (folder / "report.html").stat().st_size > 1_000_000  # plotly is in it


@pytest.mark.slow
def test_ctrl_c_ends_every_process(program, tmp_path):
    options = ["hydra.run.dir=out", "trainer.max_epochs=100000", "trainer.enable_progress_bar=false"]
    running, metrics = program(PROGRAM, *options), tmp_path / "out" / "csv" / "metrics.csv"
    running.until(lambda: metrics.exists() or running.process.poll() is not None, "it trains")
    assert len(running.pids()) >= 3
    running.process.send_signal(signal.SIGINT)
    assert running.wait() == 130  # when no process is left
