"""Without extras: what needs none works, and what needs `app` says so in one line, before it computes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import simulation, topologies

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
APP = ("matplotlib", "pandas", "plotly", "rich", "sklearn", "tensorboard")  # and numpy, which lightning needs
TRITON = "triton"  # which only tests ask for
CURE = "in a clone of ringstrategy run python -m pip install '.[app]'"

RUNNER = """
import contextlib, importlib, io, json, site, sys
site.addsitedir("packages")
ended = []
for module, *arguments in json.loads(sys.argv[1]):
    sys.argv = [module, *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            importlib.import_module(module).main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
            if isinstance(code, str):  # as Python does it
                print(code, file=sys.stderr)
                code = 1
    ended.append([code, out.getvalue(), err.getvalue()])
print(json.dumps([ended, sorted(set(sys.modules))]))
"""

NETWORK = ["--parameters", "1M", "--hosts", "2", "--rate", "1gbit", "--step-ms", "10"]
WORKS = {
    "plan --help": ["ringstrategy.app.plan", "--help"],
    "report --help": ["ringstrategy.app.sweep_report", "--help"],
    "plan": ["ringstrategy.app.plan", *NETWORK],
}
NEEDS = {
    "report": ["ringstrategy.app.sweep_report", "."],
    "train": ["ringstrategy.app.train", "trainer.max_epochs=1"],
}


@pytest.mark.slow
def test_without_the_extra_what_draws_nothing_works_and_the_rest_says_so_in_one_line(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    for installed in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(installed).iterdir():
            if re.split(r"[-.]", entry.name)[0].replace("scikit_learn", "sklearn") not in (*APP, TRITON):
                (packages / entry.name).symlink_to(entry)
    done = subprocess.run(  # -S: without the packages that Python would find by itself
        [sys.executable, "-S", "-c", RUNNER, json.dumps([*WORKS.values(), *NEEDS.values()])],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ended, imported = json.loads(done.stdout)
    assert not {*APP, TRITON} & set(imported)
    assert "torch" in imported
    words = {"plan": "Recommended"}
    for name, (code, out, err) in zip([*WORKS, *NEEDS], ended, strict=True):
        if name in WORKS:
            assert code == 0, (name, out, err)
            assert words.get(name, "usage:") in out, name
        else:
            assert (code, out) == (1, ""), name
            assert re.fullmatch(rf"\S.* needs (\w+, )*matplotlib.*: {re.escape(CURE)}\n", err), (name, err)
    assert [path.name for path in tmp_path.iterdir()] == ["packages"]


def test_the_cure_is_an_extra_that_there_is() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    brought = {re.split(r"\W", need)[0] for need in project["optional-dependencies"]["app"]}
    assert {name.replace("sklearn", "scikit") for name in APP} == brought - {"numpy"}
    for path in (ROOT / "ringstrategy").rglob("*.py"):
        assert "ringstrategy[" not in path.read_text(), f"{path}: the package is on no index, so say {CURE}"


@pytest.mark.parametrize(
    ("main", "where"), [(simulation.main, ["--out", "file"]), (topologies.main, ["--png", "file/a"])]
)
def test_where_nothing_can_be_written_is_refused_at_once(
    main: Callable[[list[str]], None],
    where: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(where)
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"argument {where[0]}: " in printed.err
