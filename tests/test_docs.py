"""The documentation's examples run, and the commands it names exist.

Python blocks of a page run one after the other in one process (```python no-run: shown, not run). design.md is left
out: its blocks are outlines.
"""

import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import ringstrategy
from ringstrategy import topologies
from ringstrategy.app.overrides import lengthened

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PAGES = [path for path in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md"))] if path.name != "design.md"]
FENCE = re.compile(r"^```(?P<language>[^\n]*)\n(?P<text>.*?)^```", re.M | re.S)
ELSEWHERE = {"cd", "export", "git", "ln", "pip", "python", "sbatch", "srun", "torchrun"}  # other people's


def blocks(page, language):
    return [match["text"] for match in FENCE.finditer(page.read_text()) if match["language"].strip() == language]


def commands(page):
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            words = list(itertools.dropwhile(lambda word: re.match(r"\w+=", word), words))
            if words:
                yield words


def by_name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=by_name)
def test_python_blocks_run(page, tmp_path):
    script = tmp_path / "example.py"
    script.write_text("\n".join(blocks(page, "python")))
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in {"LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}  # left by a fit in a test
    }
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_named_commands_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = set(project["scripts"]) | set(project["optional-dependencies"]["dev"])
    for program, *arguments in commands(page):
        if program == "make":
            assert {word for word in arguments if "=" not in word} <= targets, arguments
        elif program in {"bash", "python"} and "/" in arguments[0]:
            assert (ROOT / arguments[0]).is_file(), arguments[0]
        else:
            assert program.removeprefix(".venv/bin/") in ELSEWHERE | ours, program
    for target in re.findall(r"`make ([a-z-]+)", page.read_text()):
        assert target in targets, target


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_named_files_exist(page):
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_the_reference_has_every_public_name():
    # a class whose docstring is a mixin's is called by its heading
    entries = re.findall(r"^::: (.+)$(?:\n    options: {heading: (\w+))?", (ROOT / "docs" / "api.md").read_text(), re.M)
    shown = {f"ringstrategy.{heading}" if heading else name for name, heading in entries}
    public = {f"ringstrategy.{name}" for name in ringstrategy.__all__ if name != "__version__"}
    assert shown == public | {f"ringstrategy.topologies.{name}" for name in topologies.__all__} | {
        "ringstrategy.session.Session"
    }


def test_hydra_overrides_compose():
    hydra = pytest.importorskip("hydra")
    overrides = [words[1:] for page in PAGES for words in commands(page) if words[0] == "ringstrategy-train"]
    assert overrides
    with hydra.initialize_config_module("ringstrategy.configs", version_base=None):
        for words in overrides:
            choices = [
                [f"{key}={value}" for value in values.split(",")]
                for key, values in (lengthened(word).split("=", 1) for word in words if not word.startswith("-"))
            ]
            for job in itertools.product(*choices):
                assert "_target_" in hydra.compose("train", list(job)).model
