"""What the compiler makes of the Triton kernels: registers, spills, widths of loads and stores. Compiled without a GPU.

python -m benchmarks sass                       # print the table
python -m benchmarks sass --write docs/gpu.md   # replace the table on this page

`cuobjdump` and `nvdisasm`, which come with triton, read what `ptxas` made. Messages and buckets are those of whole
blocks, at multiples of 16 bytes.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks import harness
from ringstrategy.codecs import BlockInt, Gaussian
from ringstrategy.codecs.blocked import Blocked
from ringstrategy.codecs.rotated import signs

GPUS = ("sm_80", "sm_90", "sm_100")
SEED = 2**60 + 7
RANK = 4  # of PowerSGD's columns
_TURN = signs(SEED)
_F32, _I64, _I32, _U8 = torch.float32, torch.int64, torch.int32, torch.uint8
_PAYLOADS = {"encode": None, "relay": _U8, "reduce": _I64}  # their dtype


@dataclass(frozen=True)
class Variant:
    """A kernel, compiled for what it is launched with.

    Args:
        kernel: "encode"; "relay" and "reduce", which add one message and several; "decode", "pack", "unpack", "rotate",
            "orthonormalise".
        codec: of messages.
        values: dtype of values.
        residual: its dtype, or None.
        lost: is what is lost written? Also: does "decode" add?
        rotated: in the same pass?
        numel: values of the message.
        align: bytes of which the places of codes are multiples.
    """

    kernel: str
    codec: Blocked | None = None
    values: torch.dtype = _F32
    residual: torch.dtype | None = None
    lost: bool = True
    rotated: bool = False
    numel: int = 2**20 + 3
    align: int = 16

    def arguments(self) -> tuple[Any, Sequence[Any]]:
        """The kernel and what it is launched with, dtypes in place of tensors."""
        from ringstrategy.kernels.triton import buckets, decode, encode, orthonormal, rotate
        from ringstrategy.kernels.triton.formats import of

        fmt = self.codec and of(self.codec.arithmetic)
        turn = _TURN if self.rotated else rotate.NO_SIGNS
        lost = self.values if self.lost else None
        n = self.numel
        if self.kernel == "decode":
            return decode._decode_kernel, (_U8, lost, self.values, n, *turn, fmt, self.align)
        if self.kernel == "pack":
            return buckets._pack_kernel, (_I64, _I64, _I32, _I32, _F32, n, 0.25, buckets._SPAN)
        if self.kernel == "unpack":
            return buckets._unpack_kernel, (_I64, _I64, _I32, _I32, _F32, n, buckets._SPAN)
        if self.kernel == "rotate":
            return rotate._rotate_kernel, (self.values, n, *_TURN, rotate._ROWS, False)
        if self.kernel == "orthonormalise":
            return orthonormal._orthonormalise_kernel, (
                _F32,
                n,
                1e-3,
                RANK,
                orthonormal._WIDTH,
                min(self.align // 4, 4),
            )
        return encode._encode_kernel, (
            *(self.values, self.residual, _PAYLOADS[self.kernel], _U8, lost, n, 3, SEED, 2**33, *turn),
            *(None, None, 0, None, fmt, self.align),
        )


def compiled(variant: Variant, gpu: str) -> Mapping[str, Any]:
    """What a launch there would run, by way of the launcher's own binder: "ptx" and "cubin", or "amdgcn"."""
    import triton
    from ringstrategy.kernels.triton.formats import LAUNCH
    from triton.backends.compiler import GPUTarget

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


class Code(NamedTuple):
    """Machine code of a kernel for one of NVIDIA's GPUs."""

    registers: int
    spilled: int  # bytes of a thread's stack and local memory
    loads: Counter[int]  # from the device's memory, by width in bits, of the path that whole blocks take
    stores: Counter[int]
    sass: str


def read(cubin: bytes) -> Code:
    """What it holds."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", file.name, "--dump-resource-usage")
        sass = _tool("nvdisasm", file.name, "-c")
    found = re.search(r"REG:(\d+) STACK:(\d+).*? LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, local = map(int, found.groups())
    # a path ends where every thread leaves; that of whole blocks has the most wide loads
    paths = [_widths("LDG", path) for path in re.split(r"\*/\s+EXIT ;", sass)]
    place = max(range(len(paths)), key=lambda place: paths[place][128])
    stores = _widths("STG", re.split(r"\*/\s+EXIT ;", sass)[place])
    return Code(registers, stack + local, paths[place], stores, sass)


def _widths(instruction: str, sass: str) -> Counter[int]:
    """How many of them there are, by their width in bits."""
    bits = {"128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}
    found = re.findall(rf"\b{instruction}\.E(?:\.\w+)*", sass)
    return Counter(next((bits[part] for part in each.split(".") if part in bits), 32) for each in found)


def _tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


ROWS = {
    "encode `BlockInt(8)`": Variant("encode", BlockInt(8), lost=False),
    "encode `Rotated(Gaussian(4))`": Variant("encode", Gaussian(4), lost=False, rotated=True),
    "encode `Rotated(Gaussian(1))`": Variant("encode", Gaussian(1), lost=False, rotated=True),
    "reduce `BlockInt(8)`, feedback": Variant("reduce", BlockInt(8), residual=_F32),
    "reduce `Rotated(Gaussian(4))`, feedback": Variant("reduce", Gaussian(4), residual=_F32, rotated=True),
    "reduce `Rotated(Gaussian(1))`, feedback": Variant("reduce", Gaussian(1), residual=_F32, rotated=True),
    "decode `BlockInt(8)`": Variant("decode", BlockInt(8), lost=False),
    "decode `Rotated(Gaussian(4))`": Variant("decode", Gaussian(4), lost=False, rotated=True),
    "decode `Rotated(Gaussian(1))`": Variant("decode", Gaussian(1), lost=False, rotated=True),
    **{kernel: Variant(kernel) for kernel in ("pack", "unpack", "rotate", "orthonormalise")},
}


def line(name: str, gpu: str) -> str:
    """A row of the table, as Markdown."""
    code = read(compiled(ROWS[name], gpu)["cubin"])
    cells = [name, gpu, code.registers, code.spilled, max(code.loads), max(code.stores)]
    return f"| {' | '.join(map(str, cells))} |"


def version() -> str:
    """Of Triton, on which registers depend."""
    import triton

    return f"Triton {triton.__version__}."


def lines() -> Iterator[str]:
    """The table, and what compiled it."""
    yield "| kernel | GPU | registers | bytes spilled | widest load | widest store |"
    yield "|---|---|---|---|---|---|"
    for name in ROWS:
        for gpu in GPUS:
            yield line(name, gpu)
    yield ""
    yield version()


def main(given: Sequence[str]) -> None:
    """Print the table, or write it."""
    parser = harness.arguments("sass", __doc__, rounds=None, cases=False)
    parser.add_argument("--write", type=Path, help="replace the table in this page")
    options = parser.parse_args(given)
    with harness.refusing(parser):
        harness.show_or_write("".join(f"{row}\n" for row in lines()), "sass", options.write)
