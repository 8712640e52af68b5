"""The documentation's examples run, the commands and files that it names exist, its pictures are up to date.

Python blocks of a page run one after the other in one process a rank (```python no-run: shown, not run). design.md is
left out: its blocks are outlines. After a change to rows, topologies or pictures' code: `python docs/pictures.py`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from scripts import ROOT

import ringstrategy
from ringstrategy import topologies
from ringstrategy.app.overrides import lengthened

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGES = [path for path in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md"))] if path.name != "design.md"]
FENCE = re.compile(r"^```(?P<language>[^\n]*)\n(?P<text>.*?)^```", re.M | re.S)
ELSEWHERE = {"cd", "export", "git", "ln", "pip", "python", "sbatch", "srun", "torchrun"}  # other people's
EXAMPLES = ROOT / "examples"
COMMANDS = [
    command
    for path in sorted(EXAMPLES.glob("*.py"))
    for command in re.findall(r"^ *python (examples/.*?)(?: +#.*)?$", path.read_text(), re.M)
]
LAUNCHERS = (
    "ray_",
    "spark_",
    "slurm_",
    "horovod_",
)  # of clusters: see test_launchers.py
SPAWN = ("ddp_hook", "timeline")  # these start `train` by torch's spawn


def blocks(page, language):
    return [match["text"] for match in FENCE.finditer(page.read_text()) if match["language"].strip() == language]


def commands(page):
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            words = list(itertools.dropwhile(lambda word: re.match(r"\w+=", word), words))
            if words:
                yield words


# What is shown to be run


def _as_script(command):
    """As a launcher's rank of `python command`; the world's size, and what was printed."""
    script, *arguments = command.split()
    printed, before, sys.argv = io.StringIO(), sys.argv, [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    try:
        with contextlib.redirect_stdout(printed):
            if Path(script).stem in SPAWN:
                runpy.run_path(script, run_name="example")["train"](int(os.environ["RANK"]))
            else:
                runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv = before
    return dist.get_world_size() if dist.is_initialized() else None, printed.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
def test_python_blocks_run(ranks, page, tmp_path, monkeypatch):
    (tmp_path / "example.py").write_text("\n".join(blocks(page, "python")))
    monkeypatch.chdir(tmp_path)
    ranks(2, _as_script, "example.py")


@pytest.mark.slow
@pytest.mark.parametrize("command", [each for each in COMMANDS if not any(name in each for name in LAUNCHERS)])
def test_an_example_trains_two_processes(ranks, command, tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    found = ranks(2, _as_script, command)
    for rank, (world, printed) in enumerate(found):
        assert world == 2 or f"rank {rank} of 2 processes" in printed
    assert "compiled" not in command or re.search(r"the first of \d+ buckets left .* \d+% of the way", found[0][1])


# What is named


def test_named_commands_and_files_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = set(project["scripts"]) | set(project["optional-dependencies"]["dev"])
    for page in PAGES:
        for program, *arguments in commands(page):
            if program == "make":
                assert {word for word in arguments if "=" not in word} <= targets, (page, arguments)
            elif program in {"bash", "python"} and "/" in arguments[0]:
                assert (ROOT / arguments[0]).is_file(), (page, arguments[0])
            else:
                assert program.removeprefix(".venv/bin/") in ELSEWHERE | ours, (page, program)
        for target in re.findall(r"`make ([a-z-]+)", page.read_text()):
            assert target in targets, (page, target)
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), (page, link)


def test_the_reference_has_every_public_name():
    # a class whose docstring is a mixin's is called by its heading
    entries = re.findall(r"^::: (.+)$(?:\n    options: {heading: (\w+))?", (ROOT / "docs" / "api.md").read_text(), re.M)
    shown = {f"ringstrategy.{heading}" if heading else name for name, heading in entries}
    public = {f"ringstrategy.{name}" for name in ringstrategy.__all__ if name != "__version__"}
    public |= {f"ringstrategy.topologies.{name}" for name in topologies.__all__}
    assert shown == public | {"ringstrategy.session.Session"}


def test_hydra_overrides_compose():
    hydra = pytest.importorskip("hydra")
    overrides = {tuple(words[1:]) for page in PAGES for words in commands(page) if words[0] == "ringstrategy-train"}
    of_help = re.findall(r"^ +ringstrategy-train (.*)$", (ROOT / "configs" / "train.yaml").read_text(), re.M)
    assert len(of_help) > 5
    overrides |= {tuple(words.split()) for words in of_help}
    with hydra.initialize_config_module("ringstrategy.configs", version_base=None):
        for words in sorted(overrides):
            choices = [
                [f"{key}={value}" for value in values.split(",")]
                for key, values in (lengthened(word).split("=", 1) for word in words if not word.startswith("-"))
            ]
            for turn in range(max(map(len, choices), default=1)):  # each value of each override
                job = [values[turn % len(values)] for values in choices]
                assert "_target_" in hydra.compose("train", job).model, words


# Pictures


@pytest.fixture(scope="module")
def pictures():
    spec = importlib.util.spec_from_file_location("docs_pictures", ROOT / "docs" / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_pictures_are_what_the_code_draws(pictures):
    assert {path.stem for path in pictures.FOLDER.glob("*")} == set(pictures.PICTURES)
    for name, draw in pictures.PICTURES.items():
        assert (pictures.FOLDER / f"{name}.svg").read_text() == draw().svg(), f"{name}: run python docs/pictures.py"


def test_pages_have_the_figures_of_the_rows(pictures):
    cases = {
        **{f"`{name}`": name for name in ("ring_int8", "ring_auto", "ring_int4", "ring_int2", "ring_sign")},
        "`AllReduce(BlockInt(4), Direct())`": "direct of BlockInt(4)",
        "`ring_powersgd` (rank 1)": "ring_powersgd",
        "`gossip_int8` at each step": "gossip_int8",
        "DDP's fp16 hook": "ddp fp16 hook",
        "PowerSGD as a DDP hook, rank 1": "ddp powersgd rank 1",
        "torch's post-local SGD, average every 4 steps": "post-local sgd every 4",
        "torch's post-local SGD, average every 16 steps": "post-local sgd every 16",
    }
    page = (ROOT / "docs" / "performance.md").read_text().split("\n## ")[1]
    table = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", page, re.M)[1:]
    assert [name for name, *_ in table] == list(cases)
    for name, *figures in table:
        found = [pictures.interval(pictures.measured(rate, cases[name]).ratios) for rate in pictures.RATES]
        assert [figure.replace(" to ", "\N{EN DASH}") for figure in figures] == found, name
    readme = (ROOT / "README.md").read_text()
    for rate in pictures.RATES:
        assert f"{pictures.interval(pictures.measured(rate, 'ring_int8').ratios)} times" in readme
