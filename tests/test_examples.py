"""The examples run as they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
LAUNCHERS = ("ray_", "spark_", "slurm_", "horovod_")  # of these see test_launchers.py and test_horovod.py
COMMANDS = [
    command
    for path in sorted(EXAMPLES.glob("*.py"))
    for command in re.findall(r"^ *python (examples/.*?)(?: +#.*)?$", path.read_text(), re.M)
]


def test_each_example_says_how_to_run_it() -> None:
    assert {command.split()[0] for command in COMMANDS} == {f"examples/{path.name}" for path in EXAMPLES.glob("*.py")}


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("command", [each for each in COMMANDS if not any(name in each for name in LAUNCHERS)])
def test_an_example_trains_two_processes(command: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"MEMBER: 2/2|rank 1 of 2 processes", done.stdout + done.stderr)
    if "compiled" in command:
        part = re.search(r"the first of \d+ buckets left .* (\d+)% of the way to the last", done.stdout)
        assert part is not None
        assert (int(part[1]) > 75) == ("whole" in command), done.stdout
