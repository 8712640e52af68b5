"""What is shipped, and what importing it does: one top-level name, every part inside, no side effect."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ringstrategy

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
# folder of the repository -> package that its files become
MAPPED = {
    "ringstrategy": "ringstrategy",
    "configs": "ringstrategy.configs",
    "triton_kernels": "ringstrategy.kernels.triton",
}


def source_files(folder):
    return [path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in {".py", ".yaml"}]


def installed_name(path):
    """Where a file of the repository lies in the wheel."""
    folder, *rest = path.relative_to(ROOT).parts
    return "/".join([*MAPPED[folder].split("."), *rest])


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_versions_and_commands_are_there():
    assert PROJECT["version"] == ringstrategy.__version__
    assert re.search(rf"^## \[?{re.escape(ringstrategy.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert set(PROJECT["scripts"]) == {"ringstrategy-train", "ringstrategy-report", "ringstrategy-plan"}
    for command, place in PROJECT["scripts"].items():
        module, _, function = place.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), command
    assert (ROOT / "LICENSE").is_file()


def test_only_tests_ask_for_triton():
    asking = {extra for extra, needs in PROJECT["optional-dependencies"].items() if any("triton" in n for n in needs)}
    assert asking == {"test"}, "a gigabyte; where there is a GPU, torch brings it"
    assert not any("triton" in need for need in PROJECT["dependencies"])


def test_every_file_is_in_a_listed_package():
    listed = set()
    for folder in MAPPED:
        for path in source_files(folder):
            assert (path.parent / "__init__.py").is_file(), f"{path.parent}: Hydra's pkg:// wants an __init__.py"
            listed.add(".".join(Path(installed_name(path)).parts[:-1]))
    assert sorted(SETUPTOOLS["packages"]) == sorted(listed), "[tool.setuptools] packages in pyproject.toml"
    folders = {package: folder for folder, package in MAPPED.items()}
    assert SETUPTOOLS["package-dir"] == folders
    assert SETUPTOOLS["package-data"] == {"ringstrategy": ["py.typed"], "*": ["*.yaml"]}
    assert (ROOT / "ringstrategy" / "py.typed").is_file()


def test_nobody_imports_the_repository_folders():
    # the names belong to others: the Triton project and vLLM ship a triton_kernels
    statement = re.compile(r"^\s*(import|from)\s+(triton_kernels|configs)\b", re.M)
    files = [
        path for folder in (*MAPPED, "tests", "benchmarks") for path in source_files(folder) if path.suffix == ".py"
    ]
    assert len(files) > 10
    assert [str(path) for path in files if statement.search(path.read_text())] == []


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_installs_what_its_target_needs(tmp_path):
    def installed(target):
        command = ["make", "--dry-run", target, f"VENV={tmp_path}"]
        environment = {key: value for key, value in os.environ.items() if key != "MAKEFLAGS"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        return re.findall(r'pip install .* -e "\.\[(\w+)\]"', done.stdout)

    targets = ("train", "bench", "test", "lint", "types")
    assert [installed(target) for target in targets] == [["app"], ["app"], ["dev"], ["dev"], ["dev"]]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    for stamp, left in ((".trains", [[], ["dev"]]), (".installed", [[], []])):
        (tmp_path / stamp).write_text(f"{ROOT}\n")
        assert [installed("train"), installed("test")] == left
    (tmp_path / ".trains").write_text("/another/checkout\n")
    assert installed("train") == ["app"]


IMPORT = """
import builtins, json, logging, os, random, signal, sys, threading, warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch, torch

def state():
    named = logging.root.manager.loggerDict.items()
    loggers = {"": logging.root} | {k: v for k, v in named if isinstance(v, logging.Logger)}
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "handlers": {k: [repr(handler) for handler in v.handlers] for k, v in loggers.items() if v.handlers},
        "levels": {k: v.level for k, v in loggers.items() if v.level},
        "warning filters": repr(warnings.filters),
        "environment": dict(os.environ),
        "signals": {number: repr(signal.getsignal(number)) for number in signal.valid_signals()},
        "excepthook": repr((sys.excepthook, threading.excepthook)),
        "random state": repr((random.getstate(), torch.get_rng_state().tolist())),
        "torch": repr((torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled())),
        "native threads": os.listdir(f"/proc/{os.getpid()}/task") if os.path.isdir("/proc") else None,
    }

ours = set()
plain_import = builtins.__import__
def spy(name, globals=None, locals=None, fromlist=(), level=0):
    if globals and str(globals.get("__name__")).split(".")[0] == "ringstrategy" and level == 0:
        ours.add(name.split(".")[0])
    return plain_import(name, globals, locals, fromlist, level)

before, loaded = state(), set(sys.modules)
builtins.__import__ = spy
import ringstrategy
builtins.__import__ = plain_import
after = state()
json.dump({"changed": [key for key in before if before[key] != after[key]], "ours": sorted(ours),
           "loaded": sorted({name.split(".")[0] for name in set(sys.modules) - loaded})}, sys.stdout)
"""


@pytest.mark.slow
def test_import_only_registers_and_says_nothing(tmp_path):
    command = [sys.executable, "-W", "error", "-c", IMPORT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    seen = json.loads(done.stdout)
    assert seen["changed"] == []
    assert "torch" in seen["ours"]  # the spy sees us
    for heavy in ("triton", "hydra", "omegaconf", "sklearn", "matplotlib", "numpy", "tensorboard", "rich"):
        assert heavy not in seen["ours"], f"import ringstrategy imports {heavy}"
        assert heavy not in seen["loaded"], f"import ringstrategy loads {heavy}"
    assert "ringstrategy" in seen["loaded"]
