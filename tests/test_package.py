"""What is shipped, and what importing it does: one top-level name, every part inside, no side effect."""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
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


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    # a copy, since setuptools keeps files that are gone by now in the source tree's build/
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in MAPPED:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_wheel_has_one_top_level_name(wheel):
    metadata = f"ringstrategy-{ringstrategy.__version__}.dist-info"
    assert {name.split("/")[0] for name in wheel.namelist()} == {"ringstrategy", metadata}


@pytest.mark.parametrize("folder", MAPPED)
def test_the_wheel_has_every_source_file(wheel, folder):
    expected = {installed_name(path) for path in source_files(folder)}
    assert expected
    assert expected <= set(wheel.namelist())


def test_the_wheel_is_typed_licensed_and_has_its_command(wheel):
    metadata = f"ringstrategy-{ringstrategy.__version__}.dist-info"
    names = wheel.namelist()
    assert "ringstrategy/py.typed" in names
    assert f"{metadata}/licenses/LICENSE" in names
    assert "ringstrategy-train = ringstrategy.app.train:main" in wheel.read(f"{metadata}/entry_points.txt").decode()


def test_versions_agree(wheel):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = email.message_from_bytes(wheel.read(f"ringstrategy-{ringstrategy.__version__}.dist-info/METADATA"))
    assert project["version"] == metadata["Version"] == ringstrategy.__version__
    assert re.search(rf"^## \[?{re.escape(ringstrategy.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_only_tests_ask_for_triton():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asking = {extra for extra, needs in project["optional-dependencies"].items() if any("triton" in n for n in needs)}
    assert asking == {"test"}, "a gigabyte; where there is a GPU, torch brings it"
    assert not any("triton" in need for need in project["dependencies"])


@pytest.mark.parametrize("folder", MAPPED)
def test_every_folder_with_files_is_a_listed_package(folder):
    for directory in {path.parent for path in source_files(folder)}:
        assert (directory / "__init__.py").is_file(), f"{directory} needs an __init__.py: Hydra's pkg:// wants one"
        package = ".".join(Path(installed_name(directory / "__init__.py")).parts[:-1])
        assert package in SETUPTOOLS["packages"], f"list {package} under [tool.setuptools] packages in pyproject.toml"


def test_every_listed_package_exists():
    for package in SETUPTOOLS["packages"]:
        folder = {name: folder for folder, name in MAPPED.items()}
        top = max((name for name in folder if f"{package}.".startswith(f"{name}.")), key=len)
        assert (ROOT / folder[top] / package[len(top) + 1 :].replace(".", "/") / "__init__.py").is_file(), package


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


def test_import_only_registers(tmp_path):
    done = subprocess.run([sys.executable, "-c", IMPORT], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["changed"] == []
    assert "torch" in seen["ours"]  # the spy sees us
    for heavy in ("triton", "hydra", "omegaconf", "sklearn", "matplotlib", "numpy", "tensorboard", "rich"):
        assert heavy not in seen["ours"], f"import ringstrategy imports {heavy}"
        assert heavy not in seen["loaded"], f"import ringstrategy loads {heavy}"
    assert "ringstrategy" in seen["loaded"]


@pytest.mark.slow
def test_import_says_nothing(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            "import warnings\nwith warnings.catch_warnings():\n"
            "    warnings.simplefilter('ignore')\n    import lightning.pytorch\nimport ringstrategy",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
