"""Accelerate's own test program over a process group of ours, unchanged."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAM = """
import runpy, sys
import torch.distributed as dist
import ringstrategy
dist.init_process_group("ring_int8")
runpy.run_path(sys.argv[1], run_name="__main__")
print(f"{ringstrategy.__name__}: trained in {dist.get_backend() if dist.is_initialized() else 'ring_int8'}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", ["test_script", "test_sync"])
def test_accelerates_own_programs(script: str, tmp_path: Path) -> None:
    found = find_spec("accelerate")
    assert found is not None
    assert found.origin is not None
    theirs = Path(found.origin).parent / "test_utils" / "scripts" / f"{script}.py"
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "program.py", str(theirs)]
    environment = {"PATH": "", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ringstrategy: trained in ring_int8") == 2
    assert "MULTI_CPU" in done.stdout or script != "test_script"
