"""Runs the tests of the kernels through Triton's interpreter, which must be chosen before anything imports triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FILES = [str(Path(__file__).with_name(f"test_kernels{which}.py")) for which in ("", "_cuda")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the GPU")
@pytest.mark.skipif(sys.platform != "linux", reason="triton is only for Linux")
@pytest.mark.skipif(torch.__version__ < "2.10", reason="Triton 3.5's interpreter fails with numpy 2.4")
@pytest.mark.parametrize(
    "which",
    ["not nightly", pytest.param("nightly", marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])],
    ids=["one of each kernel", "the rest"],
)
def test_the_kernels_without_a_gpu(which: str) -> None:
    command = [sys.executable, "-m", "pytest", "-x", *FILES, "-m", which]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "failed" not in done.stdout
