"""What is shipped, what importing it does, and the floors of the house: each room imports only from those below."""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import networkx
import pytest
import yaml
from pool import Pool
from scripts import ROOT

import ringstrategy
from benchmarks import walk
from ringstrategy.failure import watchdog

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAPPED = {  # folder of the repository -> package that its files become
    "ringstrategy": "ringstrategy",
    "configs": "ringstrategy.configs",
    "triton_kernels": "ringstrategy.kernels.triton",
}


def module_of(path: Path) -> str:
    """The name under which a file of the repository is imported."""
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([MAPPED[folder], *rest]).removesuffix(".__init__")


def test_versions_and_commands_are_there() -> None:
    project = PROJECT["project"]
    assert project["version"] == ringstrategy.__version__
    assert re.search(rf"^## \[?{re.escape(ringstrategy.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == ringstrategy.__version__
    for command, place in project["scripts"].items():
        module, _, function = place.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), command


def test_every_file_is_in_a_listed_package() -> None:
    listed = set()
    for folder, package in MAPPED.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".yaml"}:
                assert (path.parent / "__init__.py").is_file(), f"{path.parent}: Hydra's pkg:// wants an __init__.py"
                listed.add(".".join([package, *path.parent.relative_to(ROOT / folder).parts]))
    setuptools = PROJECT["tool"]["setuptools"]
    assert sorted(setuptools["packages"]) == sorted(listed), "[tool.setuptools] packages in pyproject.toml"
    assert setuptools["package-dir"] == {package: folder for folder, package in MAPPED.items()}
    assert setuptools["package-data"] == {"ringstrategy": ["py.typed"], "*": ["*.yaml"]}


def test_public_names_are_all_there() -> None:
    assert all(getattr(ringstrategy, name) is not None for name in ringstrategy.__all__)
    with pytest.raises(AttributeError, match="module 'ringstrategy' has no attribute 'AllReduced'"):
        _ = ringstrategy.AllReduced


# The floors

FLOORS = [  # from the ground; a room is a package or a module of the top level
    {"_version", "errors", "extras", "optimizers"},
    {"failure", "kernels"},
    {"codecs", "requests", "topologies", "transport"},
    {"collectives", "membership", "server"},
    {"buckets"},
    {"cost"},
    {"algorithms"},
    {"names", "session", "simulator"},
    {"examples", "integrations", "horovod", "lightning_fabric", "pytorch_lightning"},
    {"app"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
WITHOUT_FRAMEWORKS = [*(room for rooms in FLOORS[:-2] for room in sorted(rooms)), "horovod"]


def imports(module: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules of ours that a file imports, for types or within functions too."""
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            for whole in (f"{base}.{alias.name}" for alias in node.names):
                if whole in known or base in known:
                    yield whole if whole in known else base


def room(module: str) -> str:
    return module.split(".")[1]


def test_nothing_is_imported_upward_or_in_a_circle() -> None:
    files = [path for folder in ("ringstrategy", "triton_kernels") for path in (ROOT / folder).rglob("*.py")]
    known = {module_of(path): path for path in files}
    modules = known.keys() - {"ringstrategy"}  # it offers all that is public, and imports it when it is first used
    assert {room(module) for module in modules} == set(FLOOR_OF)
    found = [(module, other) for module in modules for other in imports(module, known[module], known)]
    assert len(found) > 300
    for module, other in found:
        upward = other == "ringstrategy" or FLOOR_OF[room(other)] > FLOOR_OF[room(module)]
        assert not upward, f"{module} imports {other}"
    for edges in (found, [(room(one), room(other)) for one, other in found if room(one) != room(other)]):
        circles = list(networkx.simple_cycles(networkx.DiGraph(edges)))
        assert not circles, circles


# What an import does: each in a process that has imported torch and perhaps Lightning, and nothing of ours

IMPORT_EACH = """
import os, sys, torch
for name in sys.argv[1:]:
    if os.fork() == 0:
        __import__(f"ringstrategy.{name}")
        found = [each for each in ("lightning", "pytorch_lightning", "hydra", "triton") if each in sys.modules]
        print(name, *found, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""
IMPORT = """
import contextlib
import json, logging, os, random, signal, sys, threading, warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch, torch

def state():
    named = logging.root.manager.loggerDict.items()
    loggers = {"": logging.root} | {k: v for k, v in named if isinstance(v, logging.Logger)}
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "native threads": os.listdir(f"/proc/{os.getpid()}/task") if os.path.isdir("/proc") else None,
        "logging": {k: (v.level, repr(v.handlers)) for k, v in loggers.items() if v.handlers or v.level},
        "warning filters": repr(warnings.filters),
        "environment": dict(os.environ),
        "signals": {number: repr(signal.getsignal(number)) for number in signal.valid_signals()},
        "excepthook": repr((sys.excepthook, threading.excepthook)),
        "random state": repr((random.getstate(), torch.get_rng_state().tolist())),
        "torch": repr((torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled())),
    }

before, loaded = state(), set(sys.modules)
import ringstrategy
after = state()
print(json.dumps([[key for key in before if before[key] != after[key]], sorted(set(sys.modules) - loaded)]))
"""


def test_what_needs_no_framework_imports_none() -> None:
    command = [sys.executable, "-c", IMPORT_EACH, *WITHOUT_FRAMEWORKS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.splitlines() == WITHOUT_FRAMEWORKS


@pytest.mark.slow
def test_import_only_registers_and_says_nothing() -> None:
    command = [sys.executable, "-W", "error", "-c", IMPORT]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    changed, loaded = json.loads(done.stdout)
    assert changed == []
    heavy = {"triton", "hydra", "omegaconf", "sklearn", "matplotlib", "numpy", "tensorboard", "rich"}
    assert not heavy & {name.split(".")[0] for name in loaded}
    assert "ringstrategy.names" in loaded


# Without the extra `app`: what draws nothing works, and the rest says in one line what it needs

APP = ("matplotlib", "pandas", "plotly", "rich", "sklearn", "tensorboard")  # and numpy, which lightning needs
COMMANDS = {
    "ringstrategy.app.plan": ["--parameters", "1M", "--hosts", "2", "--rate", "1gbit", "--step-ms", "10"],
    "ringstrategy.app.sweep_report": ["."],
    "ringstrategy.app.train": ["trainer.max_epochs=1"],
}
RUN = """
import importlib, json, site, sys
site.addsitedir("packages")
found = {}
for module, arguments in json.loads(sys.argv[1]).items():
    sys.argv = [module, *arguments]
    try:
        importlib.import_module(module).main()
    except SystemExit as end:
        found[module] = end.code
print(json.dumps([found, sorted(sys.modules)]))
"""


@pytest.mark.slow
def test_without_the_extra_what_draws_nothing_works_and_the_rest_says_so_in_one_line(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    for installed in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(installed).iterdir():
            if re.split(r"[-.]", entry.name)[0].replace("scikit_learn", "sklearn") not in (*APP, "triton"):
                (packages / entry.name).symlink_to(entry)
    done = subprocess.run(  # -S: without the packages that Python would find by itself
        [sys.executable, "-S", "-c", RUN, json.dumps(COMMANDS)],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed, _, last = done.stdout.rstrip().rpartition("\n")
    ended, imported = json.loads(last)
    assert not {*APP, "triton"} & set(imported)
    assert "Recommended" in printed
    cure = r"\S.* needs (\w+, )*matplotlib.*: in a clone of ringstrategy run python -m pip install '\.\[app\]'"
    assert ended.keys() == {"ringstrategy.app.sweep_report", "ringstrategy.app.train"}
    for module, words in ended.items():
        assert re.fullmatch(cure, words), module


def _walked(what: str) -> tuple[list[str], int]:
    """Beside a watchdog that looks all the time, as it does in a step that takes seconds."""
    watchdog._SECONDS = 0.001
    return walk.walk_on_a_rank(what)


def test_no_way_gets_longer() -> None:
    """If a file must be added to one of these, join two others. In new processes, where no other test left a hook."""
    with contextlib.closing(Pool()) as ranks:
        for what, most in zip(walk.WALKS, (34, 33, 37, 24), strict=True):
            files, _ = ranks(2, _walked, what)[0]
            assert 10 < len(files) <= most, " ".join([what, *files])
