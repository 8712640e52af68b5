"""Plant the faults of the YAML files beside this one, one at a time, and run the tests that must catch them.

    make mutants ARGS="-k residual"

A fault is a file, a text that it holds exactly once, and what stands there instead. Each is planted in a copy of the
checkout, never in the checkout. It is caught if a test fails or pytest crashes; it survives if all pass. Survivors are
an error.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
HARD_END = 900  # seconds for the tests of one fault
_MOVED = {
    "ringstrategy/kernels/triton": "triton_kernels",
    "ringstrategy/configs": "configs",
}  # as pyproject.toml has it


class Mutant(NamedTuple):
    """A small fault.

    Attributes:
        name: what is wrong, in words; begins with the name of its YAML file.
        file: from the root of the repository.
        before: text of the file, which occurs once.
        after: what stands there instead.
        tests: arguments of pytest: files, and perhaps `-k`.
    """

    name: str
    file: str
    before: str
    after: str
    tests: str


def mutants() -> list[Mutant]:
    """All of them, in the order of their files."""
    found = []
    for path in sorted(Path(__file__).parent.glob("*.yaml")):
        for each in yaml.safe_load(path.read_text()):
            found.append(Mutant(f"{path.stem}: {each.pop('name')}", **each))
    return found


def plant(mutant: Mutant, root: Path) -> None:
    """Write the fault to the copy of the checkout at `root`."""
    path = root / mutant.file
    text = path.read_text()
    if (times := text.count(mutant.before)) != 1:
        raise ValueError(f"{mutant.name}: {mutant.file} has the text `before` {times} times, not once")
    path.write_text(text.replace(mutant.before, mutant.after))


@contextlib.contextmanager
def _copy() -> Iterator[Path]:
    """A copy of what git tracks or would, with compiled kernels; Python finds it before an installed package."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    compiled = [path.relative_to(ROOT) for path in ROOT.glob("ringstrategy/kernels/__pycache__/*.nb?")]
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        copy = Path(temporary)
        for name in [*listed.stdout.decode().split("\0")[:-1], *compiled]:
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        for package, folder in _MOVED.items():
            (copy / package).symlink_to(copy / folder)
        yield copy


def _run(tests: str, root: Path) -> tuple[int | None, str]:
    """Pytest's exit status and output; None if it had to be ended."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not nightly",
        *shlex.split(tests),
    ]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=HARD_END)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def verdict(mutant: Mutant, root: Path) -> tuple[str, str]:
    """What became of it, "caught" or another word, and the test that caught it or the end of what pytest printed."""
    original = (root / mutant.file).read_bytes()
    times = os.stat(root / mutant.file)
    try:
        plant(mutant, root)
        status, output = _run(mutant.tests, root)
    finally:
        (root / mutant.file).write_bytes(original)
        os.utime(root / mutant.file, ns=(times.st_atime_ns, times.st_mtime_ns))
    if status is not None and status < 0:  # it wrote where it must not, say: nobody would take that for a pass
        return "caught", f"pytest died of signal {-status}"
    if status == 1 and (failed := re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)):
        return "caught", failed[1]
    return {0: "SURVIVED", None: "HUNG"}.get(status, "BROKEN"), output[-2000:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant those whose name has the words; 1 if one is not caught."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("-k", default="", metavar="WORDS", help="only faults with this text in their name or file")
    parser.add_argument("-j", type=int, default=2, metavar="N", help="so many at the same time")
    given = parser.parse_args(arguments)
    chosen = [mutant for mutant in mutants() if given.k in mutant.name or given.k in mutant.file]
    if not chosen:
        parser.error(f"no fault has {given.k!r} in its name or file")
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
    bad = 0
    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(given.j) as threads:
        for _ in range(given.j):
            copies.put(stack.enter_context(_copy()))

        def judged(mutant: Mutant) -> tuple[str, str, float]:
            root, begin = copies.get(), time.monotonic()
            try:
                return *verdict(mutant, root), time.monotonic() - begin
            finally:
                copies.put(root)

        for mutant, (what, detail, seconds) in zip(chosen, threads.map(judged, chosen), strict=True):
            print(
                f"{what:<9} {seconds:4.0f} s  {mutant.name}  ({detail if what == 'caught' else mutant.tests})",
                flush=True,
            )
            if what != "caught":
                print(f"{mutant.file}\n{detail}", flush=True)
                bad += 1
    print(f"{len(chosen)} faults planted, {bad} not caught" if bad else f"all {len(chosen)} planted faults are caught")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
