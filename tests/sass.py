"""What the compiler makes of the Triton kernels: registers, spills, widths of loads and stores. Compiled without a GPU.

`cuobjdump` and `nvdisasm`, which come with triton, read what `ptxas` made. Messages and buckets are those of whole
blocks, at multiples of 16 bytes.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

from ringstrategy.codecs.blocked import Blocked
from ringstrategy.codecs.rotated import signs
from ringstrategy.kernels.feedback import FADES
from ringstrategy.kernels.sample import PLACES

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
        values: dtype of values.
        residual: its dtype, or None.
        lost: is what is lost written, in the dtype of the residual if there is one? Also: does "decode" add?
        rotated: in the same pass?
        parts: are there several, each with a message of its own?
        gathered: are values read where the tensors lie?
        numel: values of the message; those of parts are in a table.
        align: bytes of which the places of codes are multiples; of "add" and "orthonormalise", those of values.
        whole: no message ends with a short block.
    """

    kernel: str
    codec: Blocked | None = None
    values: torch.dtype = _F32
    residual: torch.dtype | None = None
    lost: bool = True
    rotated: bool = False
    parts: bool = False
    gathered: bool = False
    numel: int = 2**20 + 3
    align: int = 16
    whole: bool = True

    def arguments(self) -> tuple[Any, Sequence[Any]]:
        """The kernel and what it is launched with, dtypes in place of tensors."""
        from ringstrategy.kernels.triton import add, buckets, decode, encode, feedback, orthonormal, rotate
        from ringstrategy.kernels.triton.formats import of

        n, tensors = self.numel, (_I64, _I64, _I32)  # addresses, edges, kinds
        columns = orthonormal._WIDTH, min(self.align // 4, 4)
        others = {
            "add": (add._add_kernel, (_F32, _I64, n, 3, add._SPAN, self.align)),
            "pack": (buckets._pack_kernel, (*tensors, _I32, _F32, n, 0.25, buckets._SPAN)),
            "unpack": (buckets._unpack_kernel, (*tensors, _I32, _F32, n, buckets._SPAN)),
            "rotate": (rotate._rotate_kernel, (self.values, n, *_TURN, rotate._ROWS, False)),
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
            before = self.values if self.lost else None
            return decode._decode_kernel, (wire, before, self.values, n, *turn, fmt, self.align, self.whole)
        values, edges, kinds = tensors if self.gathered else (self.values, None, None)
        count, scale = (7, 0.125) if self.gathered else (0, None)
        lost = (self.residual or self.values) if self.lost else None
        return encode._encode_kernel, (
            *(values, self.residual, _PAYLOADS[self.kernel], wire, lost, n, 3, SEED, place, *turn),
            *(edges, kinds, count, scale, fmt, self.align, self.whole),
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
        sass = _tool("nvdisasm", file.name, "-c", "-ndf")  # no analysis of branches: the same lines in less time
    found = re.search(r"REG:(\d+) STACK:(\d+).*? LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, local = map(int, found.groups())
    # a path ends where every thread leaves; that of whole blocks has the most wide loads
    paths = re.split(r"\*/\s+EXIT ;", sass)
    loads = [_widths("LDG", path) for path in paths]
    place = max(range(len(paths)), key=lambda place: loads[place][128])
    return Code(registers, stack + local, loads[place], _widths("STG", paths[place]), sass)


def _widths(instruction: str, sass: str) -> Counter[int]:
    """How many of them there are, by their width in bits."""
    bits = {"128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}
    found = re.findall(rf"{instruction}\.E(?:\.\w+)*", sass)
    return Counter(next((bits[part] for part in each.split(".") if part in bits), 32) for each in found)


def _tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout
