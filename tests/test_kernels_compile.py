"""The Triton kernels compile offline for NVIDIA and AMD, without a GPU: no spills, wide loads, no contraction."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is only for Linux")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from ringstrategy.kernels.triton.formats import LARGEST_BLOCK, of

from benchmarks import sass
from benchmarks.harness import table_on
from benchmarks.sass import GPUS, ROWS, SEED, Variant, compiled, read
from ringstrategy.codecs import BlockFloat8, BlockInt, Gaussian, Sign
from ringstrategy.codecs.rotated import signs

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
OLD = VERSION < (3, 6)  # it divides with subnormal numbers taken as 0 (docs/wire-format.md)
F32, BF16 = torch.float32, torch.bfloat16
INT8, INT4, E4M3, SIGN, GAUSSIAN = BlockInt(8), BlockInt(4), BlockFloat8("e4m3"), Sign(), Gaussian(4)
LARGE = [Gaussian(4, block=1024), BlockInt(8, block=LARGEST_BLOCK)]
OTHERS = [
    *(BlockInt(2), BlockInt(7, scale="minmax"), BlockInt(8, rounding="stochastic"), BlockFloat8("e5m2"), Gaussian(1)),
    *LARGE,
]
ALL = [INT8, INT4, E4M3, SIGN, GAUSSIAN, *OTHERS]
CASES = [
    *(("sm_90", Variant("encode", codec)) for codec in ALL),
    *(("sm_90", Variant(kernel, codec)) for kernel in ("relay", "reduce") for codec in (INT8, SIGN)),
    *(("sm_90", Variant("decode", codec)) for codec in ALL),
    *(("sm_90", Variant(kernel)) for kernel in ("pack", "unpack", "rotate", "orthonormalise")),
    *(("sm_90", Variant(kernel, INT8, numel=1)) for kernel in ("encode", "relay", "decode")),
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
    *(("sm_90", Variant("decode", codec, rotated=True)) for codec in (INT8, SIGN, GAUSSIAN, LARGE[0])),
    *(("sm_90", Variant(kernel, INT8, values=BF16)) for kernel in ("encode", "relay", "decode")),
    *(("sm_90", Variant(kernel, INT8, align=2)) for kernel in ("encode", "relay", "decode")),
    ("sm_90", Variant("decode", INT8, values=torch.float16)),
    ("sm_90", Variant("orthonormalise", align=4)),
    ("sm_80", Variant("encode", E4M3)),
    ("sm_80", Variant("relay", INT4)),
    ("sm_80", Variant("relay", E4M3, residual=F32)),
    ("sm_80", Variant("reduce", GAUSSIAN, residual=F32, rotated=True)),
    ("sm_80", Variant("relay", SIGN, residual=BF16, rotated=True)),
    ("sm_80", Variant("decode", GAUSSIAN, rotated=True)),
    ("sm_80", Variant("pack")),
    ("sm_100", Variant("encode", E4M3)),
    ("sm_100", Variant("relay", INT8, residual=F32)),
    ("sm_100", Variant("reduce", SIGN, residual=F32, rotated=True)),
    ("sm_100", Variant("decode", GAUSSIAN, rotated=True)),
    ("sm_100", Variant("orthonormalise")),
    ("gfx942", Variant("encode", INT8)),
    ("gfx942", Variant("relay", GAUSSIAN)),
    ("gfx942", Variant("reduce", INT4)),
    ("gfx942", Variant("relay", INT8, residual=F32)),
    ("gfx942", Variant("reduce", GAUSSIAN, residual=F32, rotated=True)),
    ("gfx942", Variant("relay", SIGN, residual=F32, rotated=True)),
    ("gfx942", Variant("decode", E4M3)),
    ("gfx942", Variant("decode", GAUSSIAN, rotated=True)),
    ("gfx942", Variant("pack")),
    ("gfx942", Variant("unpack")),
    ("gfx942", Variant("orthonormalise")),
]
# Bytes of a thread. ptxas stops at 96 registers there, so that five programs fit, and seven numbers wait in memory.
SPILLS = {("reduce `Rotated(Gaussian(4))`, feedback", "sm_100"): 32}


def named(case: object) -> str:
    return re.sub(r"rounding='nearest', scale='absmax'|\w+=None|Variant", "", str(case)).replace(" ", "")


def streams(variant: Variant, loads: bool) -> Counter[int]:
    """What a thread must read or write of whole blocks, by the widest instruction there is for it, in bits.

    A thread has 4 neighbouring values of each tile of 512: 16 bytes of float32, 8 of bfloat16. Wider ones of bfloat16
    would need other tiles. Their codes are 4 bytes, or those of several tiles are. 16 bytes of codes would be of 16
    neighbours, whose float32 no longer lie next to those of the thread beside. Of each block there is one scale.
    """
    if variant.kernel in ("pack", "unpack"):  # dtypes are known when they run, so each has a path
        flat, tensors = 4, 4 + 2 + 2  # of 16 values
        return Counter({128: tensors if loads == (variant.kernel == "pack") else flat})
    if variant.kernel == "rotate":
        return Counter({128: 4})
    fmt = of(variant.codec.arithmetic)
    wide = max(1, fmt.rows * fmt.width // 512)
    found: Counter[int] = Counter()
    adds = variant.lost  # of what is decoded
    reads_codes = variant.kernel != "encode"
    for moves, dtype in (
        (loads if variant.kernel != "decode" else loads and adds, variant.values),
        (loads and variant.residual is not None, variant.residual),
        (not loads and (variant.kernel == "decode" or variant.lost), variant.values),
    ):
        if moves:
            found[32 * dtype.itemsize] += fmt.tiles * wide
    if reads_codes if loads else variant.kernel != "decode":
        codes = 4 * wide * fmt.tiles * fmt.bits // 8  # bytes
        width = min(variant.align, 4 * wide)
        found[8 * width] += codes // width
        found[16] += 1
        if fmt.form.has_minima:
            found[32] += 1
    if loads and variant.kernel == "reduce":
        found[64] += 1  # an address
    return found


@pytest.mark.parametrize(("gpu", "variant"), CASES, ids=named)
def test_it_compiles_without_spills(gpu, variant, capsys):
    asm = compiled(variant, gpu)
    if gpu == "gfx942":
        fields = re.findall(r"\.([sv]gpr_\w+|private_segment_fixed_size):\s*(\d+)", asm["amdgcn"])
        used = {name: int(count) for name, count in fields}
        # scalar registers spill into lanes of vector registers, not into memory
        spilled = used["vgpr_spill_count"] + used["private_segment_fixed_size"]
    else:
        ptx = asm["ptx"].replace("div.rn.ftz", "") if OLD else asm["ptx"]
        assert "ftz" not in ptx, "subnormal numbers are numbers"
        assert "fma" not in asm["ptx"], "each operation rounds"
        assert "div.full" not in asm["ptx"], "1/s is the correctly rounded quotient"
        code = read(asm["cubin"])
        spilled = code.spilled
        if variant.kernel == "orthonormalise":
            assert set(code.loads) == set(code.stores) == {8 * variant.align}, "runs of 16 bytes, or single values"
        elif variant.kernel in ("pack", "unpack"):
            assert (code.loads[128], code.stores[128]) == (streams(variant, True)[128], streams(variant, False)[128])
        else:
            assert (code.loads, code.stores) == (streams(variant, True), streams(variant, False))
    few = 16 if gpu == "sm_100" and VERSION < (3, 7) else 0  # bytes, of Triton 3.6 in one of these cases
    assert spilled <= few or OLD  # that one spills in two of them


SLOW = [pytest.param(gpu, marks=pytest.mark.slow) for gpu in GPUS if gpu != "sm_90"]


@pytest.mark.parametrize("gpu", ["sm_90", *SLOW])
def test_the_table_is_what_is_compiled(gpu):
    table = table_on((Path(__file__).parents[1] / "docs" / "gpu.md").read_text(), "sass")
    told = [cells(row) for row in table.splitlines() if f" {gpu} " in row]
    made = [cells(sass.line(name, gpu)) for name in ROWS]
    if sass.version() in table.splitlines():
        assert told == made, "python -m benchmarks sass --write docs/gpu.md"
        assert all(int(spilled) == SPILLS.get((name, gpu), 0) for name, _, _, spilled, *_ in made)
    assert [(name, *widest) for name, _, _, _, *widest in told] == [(name, *widest) for name, _, _, _, *widest in made]
    assert all("128" in widest for _, _, _, _, *widest in made), "of float32"


def cells(row):
    return row.strip("| ").split(" | ")


@pytest.mark.parametrize("kernel", ["rotate", "encode", "decode"])
def test_no_seed_and_no_length_is_a_reason_to_compile_again(kernel, monkeypatch):
    # 1 would be a constant, multiples of 16 a hint
    jitted, _ = Variant(kernel, GAUSSIAN).arguments()
    keys = set()
    monkeypatch.setattr(jitted, "_do_compile", lambda key, *rest, **more: keys.add(key) or jitted)
    monkeypatch.setattr(type(jitted), "asm", {}, raising=False)
    turns = [tuple(range(8)), (1,) * 8, (0,) * 8, (16,) * 8, (-1,) * 8, (-(2**31),) * 8, (2**31 - 1,) * 8, signs(SEED)]
    for n, turn in zip([2**20 + 3, 1, 16, 3, 2**20, 5, 7, 2048], turns, strict=True):
        monkeypatch.setattr(sass, "_TURN", turn)
        compiled(Variant(kernel, GAUSSIAN, rotated=True, numel=n), "sm_90")
    assert len(keys) == 1


def test_a_page_without_a_place_for_the_table_is_refused(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- python -m benchmarks launches -->\nold\n<!-- end -->\n")
    with pytest.raises(ValueError, match=r"no line '<!-- python -m benchmarks sass -->'"):
        table_on(page.read_text(), "sass")
    assert table_on(page.read_text(), "launches") == "old\n"
