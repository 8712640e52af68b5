"""The Triton kernels compile offline for NVIDIA and AMD, without a GPU: no spills, wide loads, no contraction."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is only for Linux")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from ringstrategy.kernels.triton.formats import GATHERS, LARGEST_BLOCK, of
from sass import SEED, Variant, compiled, read

from ringstrategy.codecs import BlockFloat8, BlockInt, Gaussian, Sign
from ringstrategy.codecs.rotated import signs

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
OLD = VERSION < (3, 6)  # it divides with subnormal numbers taken as 0 (docs/wire-format.md)
F32, BF16 = torch.float32, torch.bfloat16
INT8, INT4, E4M3, SIGN, GAUSSIAN = BlockInt(8), BlockInt(4), BlockFloat8("e4m3"), Sign(), Gaussian(4)
LARGE = [Gaussian(4, block=1024), BlockInt(8, block=LARGEST_BLOCK)]
INT7, STOCHASTIC = BlockInt(7), BlockInt(8, rounding="stochastic")
MAIN = [INT8, INT4, E4M3, SIGN, GAUSSIAN]
ALL = [*MAIN, BlockInt(2), INT7, STOCHASTIC, BlockFloat8("e5m2"), Gaussian(1), *LARGE]
GATHERED = Variant("encode", lost=False, parts=True, gathered=True)
CASES = [
    *(("sm_90", Variant("encode", codec)) for codec in ALL),
    *(("sm_90", Variant(kernel, codec)) for kernel in ("relay", "reduce") for codec in (INT8, SIGN)),
    *(("sm_90", Variant("decode", codec)) for codec in ALL),
    *(("sm_90", Variant("decode", codec, align=2)) for codec in (INT4, INT7, E4M3)),
    *(("sm_90", Variant(kernel)) for kernel in ("pack", "unpack", "rotate", "orthonormalise")),
    *(("sm_90", Variant(kernel)) for kernel in ("sample", "compare", "part", "go")),
    *(
        ("sm_90", Variant(kernel, INT8, numel=1, align=align))
        for kernel in ("encode", "relay", "decode")
        for align in (16, 2)
    ),
    *(("sm_90", Variant("encode", codec, lost=False)) for codec in (INT8, E4M3, SIGN, GAUSSIAN)),
    *(("sm_90", Variant("relay", codec, lost=False)) for codec in (INT8, E4M3)),
    *(("sm_90", Variant("reduce", codec, lost=False)) for codec in (GAUSSIAN, SIGN)),
    *(("sm_90", Variant("relay", codec, residual=F32)) for codec in ALL),
    *(("sm_90", Variant("relay", codec, residual=BF16)) for codec in (INT8, E4M3)),
    *(
        ("sm_90", Variant(kernel, codec, residual=F32, rotated=True))
        for kernel in ("encode", "relay", "reduce")
        for codec in (INT8, SIGN, GAUSSIAN, *LARGE)
    ),
    *(("sm_90", Variant("relay", codec, lost=False, rotated=True)) for codec in (INT8, SIGN, GAUSSIAN)),
    *(
        ("sm_90", Variant("decode", codec, rotated=True, align=align))
        for codec in (INT8, SIGN, GAUSSIAN, LARGE[0])
        for align in (16, 2)
    ),
    *(("sm_90", Variant(kernel, INT8, values=BF16)) for kernel in ("encode", "relay", "decode")),
    *(("sm_90", Variant(kernel, INT8, align=2)) for kernel in ("encode", "relay", "decode")),
    *(("sm_90", Variant("decode", INT8, values=torch.float16, align=align)) for align in (16, 2)),
    ("sm_90", Variant("orthonormalise", align=4)),
    *(("sm_90", replace(GATHERED, codec=codec)) for codec in (INT8, INT4, E4M3, SIGN)),
    *(("sm_90", replace(GATHERED, kernel="reduce", codec=codec)) for codec in (INT8, E4M3)),
    *(
        ("sm_90", replace(GATHERED, kernel=kernel, codec=codec, residual=F32, lost=True, rotated=True))
        for kernel in ("encode", "reduce")
        for codec in (INT8, GAUSSIAN, Gaussian(1), *LARGE)
    ),
    *(("sm_90", Variant(kernel, INT8, residual=F32, parts=True)) for kernel in ("encode", "reduce")),
    *(("sm_90", Variant("decode", INT8, lost=False, parts=True, align=align)) for align in (16, 2)),
    *(("sm_90", Variant("decode", GAUSSIAN, lost=False, rotated=True, parts=True, align=align)) for align in (16, 2)),
    *(
        (gpu, replace(GATHERED, kernel=kernel, codec=INT8, residual=F32, lost=True))
        for gpu in ("sm_80", "sm_90", "sm_100", "gfx942")
        for kernel in ("encode", "reduce")
    ),
    *((gpu, Variant("add", align=align)) for gpu in ("sm_80", "sm_90", "sm_100", "gfx942") for align in (16, 4)),
    ("sm_80", Variant("encode", E4M3)),
    ("sm_80", Variant("relay", INT4)),
    ("sm_80", Variant("relay", E4M3, residual=F32)),
    ("sm_80", Variant("reduce", GAUSSIAN, residual=F32, rotated=True)),
    *(("sm_80", Variant("decode", GAUSSIAN, rotated=True, align=align)) for align in (16, 2)),
    ("sm_80", Variant("pack")),
    ("sm_100", Variant("encode", E4M3)),
    ("sm_100", Variant("relay", INT8, residual=F32)),
    ("sm_100", Variant("reduce", SIGN, residual=F32, rotated=True)),
    ("sm_100", Variant("decode", GAUSSIAN, rotated=True)),
    ("sm_100", Variant("orthonormalise")),
    ("gfx942", replace(GATHERED, codec=GAUSSIAN, residual=BF16, lost=True, rotated=True)),
    ("gfx942", Variant("decode", INT8, lost=False, parts=True, align=2)),
    ("gfx942", Variant("encode", INT8)),
    ("gfx942", Variant("relay", GAUSSIAN)),
    ("gfx942", Variant("reduce", INT4)),
    ("gfx942", Variant("relay", INT8, residual=F32)),
    ("gfx942", Variant("reduce", GAUSSIAN, residual=F32, rotated=True)),
    *(("gfx942", Variant("decode", E4M3, align=align)) for align in (16, 2)),
    *(("gfx942", Variant("decode", GAUSSIAN, rotated=True, align=align)) for align in (16, 2)),
    *(("gfx942", Variant(kernel)) for kernel in ("pack", "unpack", "compare", "part", "go", "orthonormalise")),
]
# Loads and stores of 128 bits where dtypes are known only when the kernel runs, so that each has a path. A thread has
# 16 values of "pack", "unpack" and "go", and 4 samples: their places are 8 bytes each, as are the samples.
PATHS = {
    "pack": (4 + 2 + 2, 4),  # of float32, float16, bfloat16
    "unpack": (4, 4 + 2 + 2),
    "sample": (2, 2),
    "compare": (2 + 2, 0),
    "part": (0, 0),  # one tensor a thread
    "go": (4 + 4, 4),
}


def named(case: object) -> str:
    return re.sub(r"rounding='nearest'|\w+=(None|False)|Variant", "", str(case)).replace(" ", "")


def streams(variant: Variant, loads: bool) -> Counter[int]:
    """What a thread must read or write of whole blocks, by the widest instruction there is for it, in bits.

    A thread has 4 neighbouring values of each tile of 512: 16 bytes of float32, 8 of bfloat16. Wider ones of bfloat16
    would need other tiles. Their codes are 4 bytes, or those of several tiles are. 16 bytes of codes would be of 16
    neighbours, whose float32 no longer lie next to those of the thread beside. Of each block there is one scale.
    A block that is not finite has a path of its own, which copies its residual.
    """
    if variant.kernel == "rotate":
        return Counter({128: 4})
    fmt = of(variant.codec.arithmetic)
    wide = max(1, fmt.rows * fmt.width // 512)  # runs of 4 values that a thread has of a tile
    found: Counter[int] = Counter()
    decodes = variant.kernel == "decode"
    fed_back = variant.residual is not None
    if loads:
        moved = [variant.values] * (variant.lost if decodes else not variant.gathered)
        moved += [variant.residual] * (fed_back * (1 + variant.lost))
    else:
        moved = [variant.residual or variant.values] * (1 if decodes else variant.lost * (1 + fed_back))
    for dtype in moved:
        found[32 * dtype.itemsize] += fmt.tiles * wide
    if variant.kernel != ("encode" if loads else "decode"):
        codes = 4 * wide * fmt.tiles * fmt.bits // 8  # bytes
        width = min(variant.align, 4 * wide)
        found[8 * width] += codes // width
        found[16] += 1
    if loads and variant.kernel == "reduce":
        found[64] += 1  # an address
    if loads and variant.parts:
        found[64] += 3  # where the part begins, its values, the address of its message
    if loads and variant.gathered:
        found += gathered(4 * wide, fmt.tiles)
    return found


def gathered(run: int, tiles: int) -> Counter[int]:
    """What is read of a tensor: a path for each dtype, and one more where the tensor begins or ends in the program."""
    found = Counter({64: 5, 32: 1})  # of the first and the last tensor an edge each; two edges, the address, the dtype
    for itemsize in (4, 2, 2):
        width = min(itemsize * run, 16)
        found[8 * width] += tiles * run * itemsize // width
        found[8 * itemsize] += tiles * run
    return found


def marked(case: tuple[str, Variant], met: dict[Any, Variant]) -> Any:
    """Of each kernel on each kind of GPU the first variant is compiled each time, all others at night."""
    gpu, variant = case
    kind = gpu, variant.kernel, variant.parts, variant.gathered
    first = met.setdefault(kind, variant) is variant and not variant.rotated and gpu in ("sm_90", "gfx942")
    return pytest.param(*case, marks=[] if first else [pytest.mark.nightly], id=named(case))


MET: dict[Any, Variant] = {}


@pytest.mark.parametrize(("gpu", "variant"), [marked(case, MET) for case in CASES])
def test_it_compiles_without_spills(gpu, variant):
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
        code = read(asm["cubin"])
        spilled = code.spilled
        if variant.kernel == "orthonormalise":
            assert set(code.loads) == set(code.stores) == {8 * variant.align}, "runs of 16 bytes, or single values"
        elif variant.kernel == "add":
            unrolled = code.loads[64]  # parts, of whose addresses each is read
            own, parts = Counter({128: 4}), Counter({64: unrolled, 8 * variant.align: unrolled * 64 // variant.align})
            assert unrolled
            assert (code.loads, code.stores) == (own + parts, own)
        elif variant.kernel in PATHS:
            assert (code.loads[128], code.stores[128]) == PATHS[variant.kernel]
        else:
            assert (code.loads, code.stores) == (streams(variant, True), streams(variant, False))
    assert spilled <= bearable(gpu, variant) or OLD  # that one spills in two of them


def bearable(gpu: str, variant: Variant) -> int:
    """Bytes of a thread that may wait in memory."""
    if variant.rotated and variant.residual:  # some addresses; of 1 bit a thread holds twice as many values
        return 24 if variant.codec == Gaussian(1) else 8
    return 16 if gpu == "sm_100" and VERSION < (3, 7) else 0  # Triton 3.6, in one of these cases


@pytest.mark.parametrize("kernel", ["rotate", "encode", "decode", "add"])
def test_no_seed_and_no_length_is_a_reason_to_compile_again(kernel, monkeypatch):
    # 1 would be a constant, multiples of 16 a hint
    jitted, _ = Variant(kernel, GAUSSIAN).arguments()
    keys = set()
    monkeypatch.setattr(jitted, "_do_compile", lambda key, *rest, **more: keys.add(key) or jitted)
    monkeypatch.setattr(type(jitted), "asm", {}, raising=False)
    turns = [tuple(range(8)), (1,) * 8, (0,) * 8, (16,) * 8, (-1,) * 8, (-(2**31),) * 8, (2**31 - 1,) * 8, signs(SEED)]
    for n, turn in zip([2**20 + 3, 1, 16, 3, 2**20, 5, 7, 2048], turns, strict=True):
        monkeypatch.setattr("sass._TURN", turn)
        compiled(Variant(kernel, GAUSSIAN, rotated=True, numel=n), "sm_90")
    assert len(keys) == 1
