"""All that only a machine with a GPU can show, part by part, within twenty minutes.

python -m benchmarks gpu                       # as `make gpu`: one GPU is enough
python -m benchmarks gpu --cases doors,bucket  # some of the parts
python -m benchmarks gpu --dry                 # each part small, on the CPU: do they run at all?

Each part is a process with a time limit of its own. One that fails or takes too long does not stop the others, and
makes this command end with 1. The folder `--out` gets what each part printed, and `rows.jsonl` with all rows.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks import harness, lab

_SECONDS = 1200  # for all parts together
_LEAST = 20  # a part with less than this left does not begin
_TRAINED = ["--width", "1024", "--rounds", "3", "--cases", "fp16 hook,powersgd rank 1,=ring,=ring_int8,=ring_int4"]
_GRACE = 5  # for a part to end in good order
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Part:
    """A process of at most so many seconds."""

    name: str
    seconds: int
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


def _tests(files: Sequence[str], *how: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "--tb=short", *(f"tests/{file}.py" for file in files), *how]


def _measured(out: Path, name: str, seconds: int, *command: str) -> Part:
    rows = ["--out", str(out / "rows.jsonl")]
    return Part(name, seconds, [sys.executable, "-m", "benchmarks", *command, *rows])


def _parts(out: Path) -> list[Part]:
    """On a GPU; first what is measured. Most of the time is Triton's, which compiles each kernel once."""
    at_once = ("-n", str(min(8, os.cpu_count() or 1))) if find_spec("xdist") else ()  # each compiles for itself
    measured = partial(_measured, out)

    rate = "1gbit" if lab.missing() is None else lab.LOOPBACK

    def doors(backend: str) -> Part:
        return Part(f"doors over {backend}", 300, _tests(["test_conformance"]), {"RINGSTRATEGY_TEST_BACKEND": backend})

    found = [
        measured("kernels", 120, "kernels", "--sizes", "64", "0.4", "--rounds", "15"),
        measured("bucket", 150, "bucket"),
        measured("streams over nccl", 90, "shared_gpu", "--gpu", "nccl"),
        measured("streams over gloo", 90, "shared_gpu", "--gpu", "gloo"),
        Part("tests of the kernels", 400, _tests(["test_kernels", "test_kernels_cuda"], *at_once)),
        doors("nccl"),
        doors("gloo"),
        measured("training over gloo", 200, "training", "--gpu", "gloo", "--rate", rate, *_TRAINED),
    ]
    if shutil.which("compute-sanitizer"):
        checked = [
            "compute-sanitizer",
            "--error-exitcode",
            "1",
            *_tests(["test_kernels_cuda"], "-k", "pack_and_unpack or parts_of_scattered"),
        ]
        # it sees only whole allocations, so torch must not share them out
        found.append(Part("compute-sanitizer", 60, checked, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}))
    return found


def _dry_parts(out: Path) -> list[Part]:
    """On the CPU: in Triton's interpreter, with stand-ins, over gloo."""
    interpreted = {"TRITON_INTERPRET": "1"}
    return [
        Part("tests of the kernels", 120, _tests(["test_kernels_cuda"], "-k", "pack_and_unpack"), interpreted),
        _measured(out, "kernels", 120, "kernels", "--dry", "--cases", "int8,rotate,pack"),
        _measured(out, "streams over gloo", 120, "shared_gpu"),
    ]


def _run(part: Part, limit: float, log: Path) -> str | None:
    """What is wrong with it; it is ended when `limit` seconds are over. What it prints goes here and to `log`."""
    command = ["timeout", "--kill-after", str(_GRACE), str(limit), *part.command]  # ends its children too
    child = subprocess.Popen(
        command,
        cwd=_ROOT,
        env=os.environ | dict(part.environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert child.stdout is not None
    with log.open("w") as file:
        for line in child.stdout:
            print(line, end="", flush=True)
            file.write(line)
    code = child.wait()
    if code in (124, 128 + signal.SIGKILL, -signal.SIGKILL):  # of `timeout`; it kills itself too
        return f"not done within {limit:.0f} s"
    return f"ended with {code}" if code else None


def check(parts: Sequence[Part], seconds: float, out: Path) -> list[tuple[str, float, str | None]]:
    """Run them one after the other; of each its name, the seconds that it took, and what is wrong with it."""
    out.mkdir(parents=True, exist_ok=True)
    deadline, results = time.monotonic() + seconds, []
    for part in parts:
        begin = time.monotonic()
        limit = min(part.seconds, deadline - begin)
        print(f"\n=== {part.name}: at most {limit:.0f} s", flush=True)
        wrong = _run(part, limit, out / f"{part.name}.log") if limit >= min(_LEAST, part.seconds) else "no time left"
        results.append((part.name, time.monotonic() - begin, wrong))
    return results


def main(given: Sequence[str]) -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true", help="each part small, on the CPU")
    parser.add_argument("--cases", help="parts whose name contains one of these, comma-separated")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"), help="folder of logs and rows")
    options = parser.parse_args(given)
    if not (options.dry or torch.cuda.is_available()):
        sys.exit("make gpu needs a GPU that torch can use; python -m benchmarks gpu --dry runs each part on the CPU")
    os.environ[harness.COMMIT] = harness.commit()
    out = options.out.absolute()
    parts = {part.name: part for part in (_dry_parts if options.dry else _parts)(out)}
    with harness.refusing(parser):
        chosen = harness.chosen(parts, options.cases)
    results = check([parts[name] for name in chosen], _SECONDS, out)
    print(f"\nLogs and rows: {out}")
    for name, seconds, wrong in results:
        print(f"{'FAILED' if wrong else 'passed'}  {seconds:4.0f} s  {name}" + (f": {wrong}" if wrong else ""))
    sys.exit(any(wrong for *_, wrong in results))
