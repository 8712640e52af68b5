"""The Triton kernels compile offline for NVIDIA and AMD, without a GPU: no spills, wide loads, no contraction."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is only for Linux")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from ringstrategy.kernels.triton.buckets import _pack_kernel, _unpack_kernel
from ringstrategy.kernels.triton.decode import _decode_kernel
from ringstrategy.kernels.triton.encode import _encode_kernel
from ringstrategy.kernels.triton.formats import LAUNCH, of
from ringstrategy.kernels.triton.rotate import ROWS, _rotate_kernel
from triton.backends.compiler import GPUTarget

from ringstrategy.codecs import BlockFloat8, BlockInt, Gaussian, Sign

OLD = triton.__version__ < "3.6"  # it divides with subnormal numbers taken as 0 (docs/wire-format.md)
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
CODECS = {
    "int8": BlockInt(8),
    "int4": BlockInt(4),
    "int2": BlockInt(2),
    "int7 minmax": BlockInt(7, scale="minmax"),
    "int8 stochastic": BlockInt(8, rounding="stochastic"),
    "e4m3": BlockFloat8("e4m3"),
    "e5m2": BlockFloat8("e5m2"),
    "sign": Sign(),
    "gaussian4": Gaussian(4),
}
F32, I64, I32, U8 = torch.float32, torch.int64, torch.int32, torch.uint8
N, SEED = 2**20 + 3, 2**60 + 7

ENCODE = {"encode": None, "relay": U8, "reduce": I64}  # dtype of the payloads
CASES = [
    *(("sm_90", "encode", name) for name in CODECS),
    *(("sm_90", kernel, name) for kernel in ("relay", "reduce") for name in ("int8", "sign")),
    *(("sm_90", "decode", name) for name in ("int4", "int7 minmax", "e4m3")),
    *(("sm_90", kernel, "rotated") for kernel in ("pack", "unpack", "rotate")),
    ("sm_90", "pack", "plain"),
    *(("sm_90", kernel, "int8 of one value") for kernel in ("encode", "relay", "decode")),
    *(("sm_90", "encode", f"{name} losing nothing") for name in ("int8", "e4m3", "sign", "gaussian4")),
    *(("sm_90", "relay", f"{name} losing nothing") for name in ("int8", "e4m3")),
    *(("sm_90", "reduce", f"{name} losing nothing") for name in ("gaussian4", "sign")),
    ("sm_90", "encode", "int8 of bfloat16"),
    ("sm_90", "decode", "int8 of float16"),
    ("sm_80", "encode", "e4m3"),
    ("sm_80", "relay", "int4"),
    ("sm_80", "pack", "rotated"),
    ("gfx942", "encode", "int8"),
    ("gfx942", "relay", "gaussian4"),
    ("gfx942", "reduce", "int4"),
    ("gfx942", "decode", "e4m3"),
    ("gfx942", "pack", "rotated"),
    ("gfx942", "unpack", "plain"),
]


def compiled(target, kernel, case, monkeypatch):
    """What a launch on that device would run, by way of the launcher's own binder."""
    driver = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: TARGETS[target]
    )
    options = LAUNCH | {"num_warps": 2 if target == "gfx942" else 4}
    signs = F32 if case == "rotated" else None
    codec = CODECS.get(re.sub(" (of|losing) .*", "", case))
    fmt = codec and of(codec.arithmetic)
    lost = None if case.endswith("losing nothing") else F32
    n = 1 if case.endswith("of one value") else N
    kind = getattr(torch, case.split()[-1]) if "float16" in case else F32
    jitted, arguments = {
        "decode": (_decode_kernel, (U8, kind, kind, n, fmt, 2)),
        "pack": (_pack_kernel, (I64, I64, I32, I32, F32, F32, signs, N, 0.25, ROWS)),
        "unpack": (_unpack_kernel, (I64, I64, I32, I32, F32, signs, N, ROWS)),
        "rotate": (_rotate_kernel, (F32, F32, N, ROWS, False)),
    }.get(kernel) or (_encode_kernel, (kind, ENCODE[kernel], U8, lost and kind, n, 3, SEED, 2**33, fmt, 16))
    jitted.device_caches.clear()
    monkeypatch.setattr(triton.runtime.driver, "_active", driver, raising=False)
    try:
        return jitted.warmup(*arguments, grid=(1,), **options)
    finally:
        jitted.device_caches.clear()


def tool(name, cubin, *options):
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *options, cubin], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("target", "kernel", "case"), CASES)
def test_it_compiles_without_spills(target, kernel, case, monkeypatch, tmp_path, capsys):
    asm = compiled(target, kernel, case, monkeypatch).asm
    if target == "gfx942":
        used = {name: int(count) for name, count in re.findall(r"\.([sv]gpr_\w+):\s*(\d+)", asm["amdgcn"])}
        spilled = used["vgpr_spill_count"] + used["sgpr_spill_count"]
        registers = f"{used['vgpr_count']} vector, {used['sgpr_count']} scalar"
    else:
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(asm["cubin"])
        usage = tool("cuobjdump", cubin, "--dump-resource-usage")
        registers, stack, local = re.search(r"REG:(\d+) STACK:(\d+).*? LOCAL:(\d+)", usage).groups()
        spilled = int(stack) + int(local)
        ptx = asm["ptx"].replace("div.rn.ftz", "") if OLD else asm["ptx"]
        assert "ftz" not in ptx, "subnormal numbers are numbers"
        assert "fma" not in asm["ptx"], "each operation rounds"
        assert "div.full" not in asm["ptx"], "1/s is the correctly rounded quotient"
        sass = tool("nvdisasm", cubin, "-c")
        wide = "float16" not in case
        assert "LDG.E.128" in sass or kernel == "decode" or not wide, "float32 is read 16 bytes a thread"
        writes = wide and not case.endswith("losing nothing")
        assert "STG.E.128" in sass or not writes, "float32 is written 16 bytes a thread"
    with capsys.disabled():
        print(f"\n{target} {kernel} {case}: {registers} registers")
    assert spilled == 0
