"""The Triton kernels without a GPU: run by the interpreter; compiled for NVIDIA and AMD: no spills, wide loads.

`cuobjdump` and `nvdisasm`, which come with triton, read what `ptxas` made. Messages and buckets are those of whole
blocks, at multiples of 16 bytes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is only for Linux")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from ringstrategy.kernels.triton import add, buckets, decode, encode, feedback, orthonormal, rotate
from ringstrategy.kernels.triton.formats import GATHERS, LARGEST_BLOCK, LAUNCH, of
from ringstrategy.kernels.triton.launches import launches
from triton.backends.compiler import GPUTarget

from ringstrategy.codecs import BlockFloat8, BlockInt, Gaussian, Sign
from ringstrategy.codecs.blocked import Blocked
from ringstrategy.codecs.rotated import signs
from ringstrategy.kernels.feedback import FADES
from ringstrategy.kernels.sample import PLACES

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
OLD = VERSION < (3, 6)  # it divides with subnormal numbers taken as 0 (docs/wire-format.md)
SEED = 2**60 + 7
RANK = 4  # of PowerSGD's columns
_TURN = signs(SEED)
_F64, _F32, _I64, _I32, _U8 = torch.float64, torch.float32, torch.int64, torch.int32, torch.uint8
_PAYLOADS = {"encode": None, "relay": _U8, "reduce": _I64}  # their dtype


@dataclass(frozen=True)
class Variant:
    """A kernel, compiled for what it is launched with.

    Args:
        kernel: "encode"; "relay" and "reduce", which add one message and several; "decode", "add", "pack", "unpack",
            "rotate", "orthonormalise"; of what an optimizer stepped: "sample", "compare", "part", "go".
        codec: of messages.
        residual: its dtype, or None.
        lost: is what is lost written, in the dtype of the residual if there is one? Also: does "decode" add?
        rotated: in the same pass?
        parts: are there several, each with a message of its own?
        gathered: are values read where the tensors lie?
        align: bytes of which the places of codes are multiples; of "add" and "orthonormalise", those of values.
    """

    kernel: str
    codec: Blocked | None = None
    residual: torch.dtype | None = None
    lost: bool = True
    rotated: bool = False
    parts: bool = False
    gathered: bool = False
    align: int = 16

    def arguments(self) -> tuple[Any, Sequence[Any]]:
        """The kernel and what it is launched with, dtypes in place of tensors."""
        n, tensors = 2**20 + 3, (_I64, _I64, _I32)  # addresses, edges, kinds
        columns = orthonormal._WIDTH, min(self.align // 4, 4)
        others = {
            "add": (add._add_kernel, (_F32, _I64, n, 3, add._SPAN, self.align)),
            "pack": (buckets._pack_kernel, (*tensors, _I32, _F32, n, 0.25, buckets._SPAN)),
            "unpack": (buckets._unpack_kernel, (*tensors, _I32, _F32, n, buckets._SPAN)),
            "rotate": (rotate._rotate_kernel, (_F32, n, *_TURN, rotate._ROWS, False)),
            "orthonormalise": (orthonormal._orthonormalise_kernel, (_F32, n, 1e-3, RANK, *columns)),
            "sample": (feedback._sample_kernel, (_I64, _I64, _F64, PLACES)),
            "compare": (feedback._compare_kernel, (_I64, _I64, _F64, _F64, PLACES)),
            "part": (feedback._part_kernel, (_I64, _F64, _F64, _F32, _U8, _F64, 100, FADES, 128)),
            "go": (feedback._go_kernel, (_F32, _F32, _I64, _I32, _F64, feedback._SPAN)),
        }
        if self.kernel in others:
            return others[self.kernel]
        assert self.codec is not None
        fmt = of(self.codec.arithmetic)
        turn = _TURN if self.rotated else rotate.NO_SIGNS
        wire, n, place = (_I64, 0, 0) if self.parts else (_U8, n, 2**33)
        if self.kernel == "decode":
            before = _F32 if self.lost else None
            return decode._decode_kernel, (wire, before, _F32, n, *turn, fmt, self.align, True)
        values, edges, kinds = tensors if self.gathered else (_F32, None, None)
        count, scale = (7, 0.125) if self.gathered else (0, None)
        lost = (self.residual or _F32) if self.lost else None
        return encode._encode_kernel, (
            *(values, self.residual, _PAYLOADS[self.kernel], wire, lost, n, 3, SEED, place, *turn),
            *(edges, kinds, count, scale, fmt, self.align, True),
        )


def compiled(variant: Variant, gpu: str) -> Mapping[str, Any]:
    """What a launch there would run, by way of the launcher's own binder: "ptx" and "cubin", or "amdgcn"."""
    nvidia = gpu.startswith("sm_")
    target = GPUTarget("cuda", int(gpu[3:]), 32) if nvidia else GPUTarget("hip", gpu, 64)
    driver = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
    )
    kernel, arguments = variant.arguments()
    kernel.device_caches.clear()
    try:
        with mock.patch.object(triton.runtime.driver, "_active", driver, create=True):
            made = kernel.warmup(*arguments, grid=(1,), **LAUNCH | {"num_warps": 4 if nvidia else 2})
    finally:
        kernel.device_caches.clear()
    asm: Mapping[str, Any] = made.asm
    return asm


def spilled_and_wide(cubin: Path) -> tuple[int, int]:
    """Bytes of a thread's stack and local memory; loads and stores of 16 bytes."""

    def tool(name: str, *how: str) -> str:
        path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
        return subprocess.run([path, cubin, *how], capture_output=True, text=True, check=True).stdout

    found = re.search(r"STACK:(\d+).*? LOCAL:(\d+)", tool("cuobjdump", "--dump-resource-usage"))
    assert found is not None
    code = tool("nvdisasm", "-c", "-ndf")  # no analysis of branches: the same lines in less time
    return sum(map(int, found.groups())), len(re.findall(r"(LDG|STG)\.E(\.\w+)*\.128", code))


INT8, INT4, E4M3, SIGN, GAUSSIAN = BlockInt(8), BlockInt(4), BlockFloat8("e4m3"), Sign(), Gaussian(4)
LARGE = [Gaussian(4, block=1024), BlockInt(8, block=LARGEST_BLOCK)]
MORE = [INT4, SIGN, BlockInt(2), BlockInt(7), BlockInt(8, rounding="stochastic"), BlockFloat8("e5m2"), Gaussian(1)]
FED = Variant("encode", INT8, residual=_F32)
GATHERED = replace(FED, parts=True, gathered=True)
OF_BLOCKS = [
    *(Variant("encode", E4M3), Variant("decode", INT8), replace(FED, kernel="relay"), GATHERED),
    *(replace(GATHERED, kernel="reduce"), Variant("decode", INT8, lost=False, parts=True)),
    *(Variant("reduce", GAUSSIAN, residual=_F32, rotated=True), Variant("decode", GAUSSIAN, rotated=True, align=2)),
]
OTHERS = ["add", "pack", "unpack", "rotate", "orthonormalise", "sample", "compare", "part", "go"]
ANYWHERE = [*OF_BLOCKS, *map(Variant, OTHERS)]
CASES = [
    *((gpu, variant) for gpu in ("sm_90", "gfx942", "sm_80", "sm_100") for variant in ANYWHERE),
    *(("sm_90", Variant(kernel, codec)) for kernel in ("encode", "decode") for codec in MORE + LARGE),
    *(("sm_90", replace(FED, kernel="relay", codec=codec)) for codec in MORE + LARGE),
    *(
        ("sm_90", replace(before, kernel=kernel, codec=codec, rotated=True))
        for before in (FED, GATHERED)
        for kernel in ("encode", "reduce")
        for codec in (INT8, Gaussian(1), *LARGE)
    ),
    ("sm_90", replace(GATHERED, codec=SIGN, residual=None, lost=False)),
    ("sm_90", Variant("relay", E4M3, residual=torch.bfloat16)),
    ("sm_90", Variant("orthonormalise", align=4)),
]


def marked(gpu: str, variant: Variant) -> Any:
    """Each time those that are not rotated, for one GPU of each maker; all others at night."""
    quick = variant in ANYWHERE and not variant.rotated and gpu in ("sm_90", "gfx942")
    name = re.sub(r"rounding='nearest'|\w+=(None|False)|Variant", "", f"{gpu} {variant}").replace(" ", "")
    return pytest.param(gpu, variant, marks=[] if quick else [pytest.mark.nightly], id=name)


def bearable(gpu: str, variant: Variant) -> int:
    """Bytes of a thread that may wait in memory."""
    if variant.rotated and variant.residual:  # some addresses; of 1 bit a thread holds twice as many values
        return 24 if variant.codec == Gaussian(1) else 8
    return 16 if gpu == "sm_100" and VERSION < (3, 7) else 0  # Triton 3.6, in one of these cases


@pytest.mark.parametrize(("gpu", "variant"), [marked(*case) for case in CASES])
def test_it_compiles_without_spills(gpu: str, variant: Variant, tmp_path: Path) -> None:
    if variant.gathered and not GATHERS:
        pytest.skip("this compiler fails, so gradients are packed first")
    asm = compiled(variant, gpu)
    if gpu == "gfx942":
        fields = re.findall(r"\.([sv]gpr_\w+|private_segment_fixed_size):\s*(\d+)", asm["amdgcn"])
        used = {name: int(count) for name, count in fields}
        # scalar registers spill into lanes of vector registers, not into memory
        spilled = used["vgpr_spill_count"] + used["private_segment_fixed_size"]
    else:
        ptx = re.sub(r"(div|sqrt)\.rn\.ftz", "", asm["ptx"]) if OLD else asm["ptx"]
        assert "ftz" not in ptx, "subnormal numbers are numbers"
        assert "fma" not in asm["ptx"], "each operation rounds"
        assert "div.full" not in asm["ptx"], "1/s is the correctly rounded quotient"
        (tmp_path / "cubin").write_bytes(asm["cubin"])
        spilled, wide = spilled_and_wide(tmp_path / "cubin")
        assert wide or variant.kernel == "part" or variant == Variant("orthonormalise", align=4)
    assert spilled <= bearable(gpu, variant) or OLD  # that one spills in two of them


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the GPU")
@pytest.mark.skipif(torch.__version__ < "2.10", reason="Triton 3.5's interpreter fails with numpy 2.4")
@pytest.mark.timeout(3600)  # a minute, where nothing else runs
@pytest.mark.parametrize(
    "which",
    ["not nightly", pytest.param("nightly", marks=pytest.mark.nightly)],
    ids=["one of each kernel", "the rest"],
)
def test_they_compute_in_the_interpreter(which: str) -> None:
    """Which must be chosen before anything imports triton."""
    files = [str(Path(__file__).with_name(f"test_kernels{which}.py")) for which in ("", "_cuda")]
    command = [sys.executable, "-m", "pytest", "-x", *files, "-m", which]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_gradients_are_read_where_they_lie_only_by_blocks_that_fill_their_tiles() -> None:
    """Compiled by Triton 3.6, one of the others encoded wrongly on an H200."""
    assert launches(BlockInt(8), None).gathers == GATHERS
    assert not launches(BlockInt(7, block=24), None).gathers
