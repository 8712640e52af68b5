"""Runs test_kernels.py through Triton's interpreter, which must be chosen before anything imports triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

QUICK = (
    "(bytes_are and (e4m3 or (bits and 7))) or halves_to_even or pack_reads_only or pack_and_unpack"
    " or (parts_are_the_references and 1024) or (one_pass and e4m3) or (scattered and e4m3)"
    " or (fuses_or_not and 1297 and float32) or noise_is_that"
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_kernels.py runs on the GPU")
@pytest.mark.skipif(sys.platform != "linux", reason="triton is only for Linux")
@pytest.mark.parametrize(
    "which",
    [QUICK, pytest.param(f"not ({QUICK})", marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])],
    ids=["one of each kernel", "the rest"],
)
def test_the_kernels_without_a_gpu(which):
    command = [sys.executable, "-m", "pytest", "-x", str(Path(__file__).with_name("test_kernels.py")), "-k", which]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "failed" not in done.stdout
