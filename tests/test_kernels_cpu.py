"""The kernels that Numba compiles, beside the reference: the same bytes from the same values."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from fakes import on_all_ranks
from torch import Tensor, nn

from ringstrategy import Gossip, LocalSGD, Nesterov
from ringstrategy.codecs import BlockFloat8, BlockInt, Cast, Codec, Gaussian, RandomK, Rotated, Sign, TopK
from ringstrategy.codecs.blocked import Blocked
from ringstrategy.codecs.rotated import signs
from ringstrategy.kernels import cast, compiled, cpu, cpu_cast, cpu_nesterov, jit, mix, nesterov, reference, sparse
from ringstrategy.kernels.layout import SparseFormat
from ringstrategy.kernels.threads import free_cores, use_threads

ROOT = Path(__file__).parents[1]
ENGINE = compiled.Compiled()
# A format takes seconds to compile and is then kept on disk: other files use those of this one.
WHOLE: list[Blocked] = [
    *(BlockInt(bits) for bits in range(2, 9)),
    *(BlockInt(bits, block, scale="minmax") for bits, block in ((2, 64), (5, 256), (8, 256))),
    BlockInt(4, 64, rounding="stochastic"),
    BlockInt(5, scale="minmax", rounding="stochastic"),
    BlockInt(4, block=24),
    BlockInt(8, block=1024),
    *(BlockFloat8(format) for format in ("e4m3", "e5m2")),
]
SUMS: list[Blocked] = [Sign(), Sign(block=8), *(Gaussian(bits) for bits in range(1, 8))]  # scales are a sum


def values(numel: int, seed: int = 0) -> Tensor:
    """Of very mixed magnitudes, with zeros of both signs, subnormal blocks and blocks on one side of zero."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator).mul(20).sub(10).exp()
    drawn[: numel // 9] = 0
    drawn[numel // 9 : numel // 8] *= -0.0
    drawn[numel // 5 : numel // 4] *= 1e-39
    drawn[numel // 3 : numel // 2].abs_()
    return drawn


def messages(codec: Blocked, numel: int, count: int) -> list[Tensor]:
    sent = [torch.empty(codec.nbytes(numel, torch.float32), dtype=torch.uint8) for _ in range(count)]
    for seed, wire in enumerate(sent, start=1):
        reference.encode(values(numel, seed), (), wire, codec, seed=seed)
    return sent


def both(codec: Blocked, given: Tensor, wires: list[Tensor], offset: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Wire and what was lost, of the reference and of the kernels."""
    made = []
    for engine in (reference, ENGINE):
        wire = torch.empty(codec.nbytes(given.numel(), torch.float32), dtype=torch.uint8)
        lost = torch.full_like(given, 7.0)
        engine.encode(given, wires, wire, codec, lost=lost, seed=3, offset=offset)  # type: ignore[attr-defined]
        made.append((wire, lost))
    return made


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32)


@pytest.mark.parametrize("codec", WHOLE, ids=str)
@pytest.mark.parametrize("numel", [1, 7, 256, 1003, 9000])
def test_whole_numbers_have_the_same_bytes(codec: Blocked, numel: int) -> None:
    given = values(numel)
    for count in range(4):
        kept = given.clone()
        (wire, lost), (wire_, lost_) = both(codec, given, messages(codec, numel, count), offset=5 * codec.block)
        assert torch.equal(wire, wire_)
        assert torch.equal(lost, lost_), "of what is 0 the sign may differ"
        assert torch.equal(bits(given), bits(kept)), "what is encoded stays as it is"


@pytest.mark.parametrize(
    "codec", [BlockInt(4, 64, rounding="stochastic"), BlockInt(5, rounding="stochastic", scale="minmax")], ids=str
)
def test_noise_is_the_same_where_its_period_ends(codec: BlockInt) -> None:
    (wire, lost), (wire_, lost_) = both(codec, values(1003), [], offset=2**20 - 2 * codec.block)
    assert torch.equal(wire, wire_)
    assert torch.equal(lost, lost_)


@pytest.mark.parametrize("codec", SUMS, ids=str)
@pytest.mark.parametrize("numel", [1, 7, 256, 1003, 9000])
def test_scales_that_are_sums_have_the_same_bytes_but_for_their_last_bit(codec: Blocked, numel: int) -> None:
    for count in range(3):
        (wire, lost), (wire_, lost_) = both(codec, values(numel), messages(codec, numel, count))
        scales = 2 * -(-numel // codec.block)
        heads, heads_ = (each[:scales].view(torch.int16).int() for each in (wire, wire_))
        assert (heads - heads_).abs().max() <= 1
        alike = (heads == heads_).repeat_interleave(codec.block)[:numel]
        assert (~alike).float().mean() < 0.02
        assert (wire[scales:] != wire_[scales:]).float().mean() < 0.002, "a value that lies on the edge of two levels"
        assert (
            torch.allclose(lost[alike], lost_[alike], rtol=1e-5, atol=0)
            or (lost != lost_)[alike].float().mean() < 0.002
        )


@pytest.mark.parametrize("codec", [*WHOLE, *SUMS], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_values_of_another_dtype(codec: Blocked, dtype: torch.dtype) -> None:
    given = (torch.randn(1003, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    given[300] = math.nan
    wires = messages(codec, 1003, 1)
    (wire, lost), (wire_, lost_) = both(codec, given, [*wires, *wires])
    decoded = [given.clone(), given.clone()]
    reference.decode(wires[0], decoded[0], codec, add=True)
    ENGINE.decode(wires[0], decoded[1], codec, add=True)
    assert torch.equal(*(each.nan_to_num(0.5) for each in decoded))
    assert lost[300] == lost_[300] == 7.0
    if codec in WHOLE:
        assert torch.equal(wire, wire_)
        assert torch.equal(lost, lost_)
    else:
        assert (wire != wire_).float().mean() < 0.01


@pytest.mark.parametrize("codec", [*WHOLE, *SUMS], ids=str)
def test_what_a_user_sets_changes_no_byte_of_the_reference(codec: Blocked) -> None:
    given, lost = values(1003, 1), torch.zeros(1003)
    [expected], wire = messages(codec, 1003, 1), torch.empty(codec.nbytes(1003, torch.float32), dtype=torch.uint8)
    out, turned = torch.zeros(1003), torch.zeros(1003)
    reference.decode(expected, out, codec)
    reference.rotate_(out, signs(1))
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            reference.encode(given, (), wire, codec, lost=lost, seed=1)
            reference.decode(wire, turned, codec)
            reference.rotate_(turned, signs(1))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(wire, expected)
    assert torch.equal(turned, out)


@pytest.mark.parametrize("codec", [*WHOLE, *SUMS], ids=str)
@pytest.mark.parametrize("poison", [math.nan, -math.inf, 3e38])
def test_blocks_that_are_not_finite(codec: Blocked, poison: float) -> None:
    given = torch.ones(5 * codec.block + 3)
    given[2 * codec.block + 1] = given[-1] = poison
    (wire, lost), (wire_, lost_) = both(codec, given, [])
    assert torch.equal(wire, wire_)
    assert torch.equal(lost, lost_)


@pytest.mark.parametrize("codec", [*WHOLE, *SUMS], ids=str)
@pytest.mark.parametrize("numel", [1, 7, 256, 1003])
def test_any_bytes_decode_alike(codec: Blocked, numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    wire = torch.randint(256, (codec.nbytes(numel, torch.float32),), dtype=torch.uint8, generator=generator)
    for add in (False, True):
        one, other = values(numel), values(numel)
        reference.decode(wire, one, codec, add=add)
        ENGINE.decode(wire, other, codec, add=add)
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(bits(one.nan_to_num(nan=0.5)), bits(other.nan_to_num(nan=0.5)))


@pytest.mark.parametrize("inverse", [False, True])
def test_the_rotation_is_the_references(inverse: bool) -> None:
    one, other = (torch.randn(2 * 256 + 9, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    reference.rotate_(one, signs(5), inverse=inverse)
    given = other.clone()
    ENGINE.rotate_(other, signs(5), inverse=inverse)
    assert torch.equal(one, other)
    assert not torch.equal(one[:512], given[:512])
    assert torch.equal(one[512:], given[512:])


# Sparse codecs and casts

SPARSE: list[SparseFormat] = [
    *(SparseFormat(k, block, strided=False) for k, block in ((1, 1), (3, 7), (8, 256), (32, 256), (256, 256))),
    *(SparseFormat(k, block, strided=False) for k, block in ((3, 300), (70, 1000), (5, 1 << 15))),
    *(SparseFormat(k, block, strided=True) for k, block in ((1, 1), (8, 256), (128, 256), (10, 1000), (512, 512))),
]
OVERFLOWS = 2.0**128 - 2.0**119  # the least that is infinite as bfloat16; the float32 below it differs by 2**104
NUMELS = [0, 1, 7, 256, 257, 1003, 40_000]


def hard(numel: int, block: int, seed: int = 0) -> Tensor:
    """Blocks of all kinds, one after another."""
    given = values(numel, seed)
    generator = torch.Generator().manual_seed(seed)
    for place, part in enumerate(given.split(block)):
        kind = place % 10
        if kind == 1:
            part.copy_(torch.randint(-2, 3, part.shape, generator=generator))  # ties
        elif kind == 2:
            part.fill_(-0.75)
        elif kind == 3:
            part.fill_(-0.0)
        elif kind == 4:
            part.mul_(torch.rand(part.shape, generator=generator) < 0.01)  # fewer than k that are not 0
        elif kind == 5:
            part.copy_(torch.randn(part.shape, generator=generator) * 1e-39)
        elif kind in (6, 7, 8, 9):
            part[len(part) // 2] = (math.nan, -math.inf, OVERFLOWS, 2.0**104 - OVERFLOWS)[kind - 6]
    return given


def parts(form: SparseFormat, numel: int) -> tuple[Tensor, Tensor]:
    """What is kept, all rubbish, and places."""
    blocks, generator = -(-numel // form.block), torch.Generator().manual_seed(numel)
    kept = torch.randint(-(1 << 15), 1 << 15, (blocks, form.k), generator=generator).to(torch.int16)
    if form.strided:
        places = torch.randint(form.block // form.k, (blocks, 1), generator=generator)
    else:
        dtype = torch.uint8 if form.block <= 256 else torch.int16
        places = torch.randint(-(1 << 15), 1 << 15, kept.shape, generator=generator).to(dtype)
    return kept.view(torch.bfloat16), places


def guarded(given: Tensor) -> tuple[Tensor, Tensor]:
    """A copy within memory of which nothing else may change, and that memory."""
    memory = torch.full((given.numel() + 2 * 64,), 77.0)
    return memory[64:-64].copy_(given), memory


def unharmed(memory: Tensor) -> bool:
    return bool((memory[:64] == 77).all() and (memory[-64:] == 77).all())


@pytest.mark.parametrize("form", SPARSE, ids=str)
@pytest.mark.parametrize("numel", NUMELS)
def test_sparse_messages_have_the_same_bytes(form: SparseFormat, numel: int) -> None:
    for seed, given in enumerate((values(numel), hard(numel, form.block), torch.zeros(numel), -torch.ones(numel))):
        results = []
        for engine in (sparse.encode, ENGINE.encode_sparse):
            (kept, places), (again, others), before = parts(form, numel), parts(form, numel), given.clone()
            lost, memory = guarded(values(numel, seed=9))
            engine(given, kept, places, form, lost=lost)
            assert torch.equal(bits(given), bits(before)), "what is encoded stays as it is"
            assert unharmed(memory)
            engine(given, again, others, form, lost=None)
            assert torch.equal(again.view(torch.int16), kept.view(torch.int16)), "feedback changed the bytes"
            results.append((kept.view(torch.int16), places, bits(lost)))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other), seed


@pytest.mark.parametrize("form", SPARSE, ids=str)
def test_what_is_lost_may_be_the_values_themselves(form: SparseFormat) -> None:
    given, results = hard(5003, form.block), []
    for engine in (sparse.encode, ENGINE.encode_sparse):
        (kept, places), own = parts(form, 5003), given.clone()
        engine(own, kept, places, form, lost=own)
        results.append((kept.view(torch.int16), places, bits(own)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("form", SPARSE, ids=str)
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("add", [False, True])
def test_any_sparse_bytes_decode_alike_and_stay_within_bounds(form: SparseFormat, numel: int, add: bool) -> None:
    kept, places = parts(form, numel)
    kept.view(torch.int16)[::2] &= 0x3FFF  # else almost all blocks have a NaN
    results = []
    for engine in (sparse.decode, ENGINE.decode_sparse):
        out, memory = guarded(values(numel))
        engine(kept, places, out, form, add=add)
        assert unharmed(memory)
        results.append(out)
    one, other = results
    assert torch.equal(one.isnan(), other.isnan())
    assert torch.equal(bits(one.nan_to_num(nan=0.5)), bits(other.nan_to_num(nan=0.5)))


def test_of_equal_magnitudes_the_first_are_chosen_and_places_ascend() -> None:
    given = torch.tensor([1.0, -2, 0, 2, -1, 1, -2, 0, 0, 0])
    for engine in (sparse.encode, ENGINE.encode_sparse):
        kept, places = parts(SparseFormat(4, 8, strided=False), 10)
        engine(given, kept, places, SparseFormat(4, 8, strided=False), lost=None)
        assert places.tolist() == [[0, 1, 3, 6], [0, 1, 2, 3]], "two of them beyond the end"
        assert kept.tolist() == [[1, -2, 2, -2], [0, 0, 0, 0]]


@pytest.mark.parametrize("poison", [math.nan, math.inf, OVERFLOWS])
@pytest.mark.parametrize("engine", [sparse.encode, ENGINE.encode_sparse])
def test_a_sparse_block_that_is_not_finite_has_the_documented_bytes(engine, poison: float) -> None:  # type: ignore[no-untyped-def]
    for form in (SparseFormat(4, 16, strided=False), SparseFormat(16, 16, strided=True)):
        given = torch.arange(32.0)
        given[5] = poison
        kept, places = parts(form, 32)
        lost = torch.full_like(given, 7.0)
        engine(given, kept, places, form, lost=lost)
        assert kept[0].view(torch.int16).eq(0x7FC0).all()
        assert kept[1].isfinite().all()
        assert lost[:16].eq(7).all()
        assert not lost[16:].eq(7).any()
        if not form.strided:
            assert places.tolist() == [[0, 1, 2, 3], [12, 13, 14, 15]]


THREADED = [
    *(TopK(8, 256), TopK(3, 300), RandomK(8, 256), Cast("fp16"), Cast("bf16"), BlockInt(8), Sign(), Gaussian(3)),
    *(BlockInt(5, scale="minmax"), BlockInt(4, 64, rounding="stochastic"), BlockFloat8(), Rotated(Gaussian(4))),
]


@pytest.mark.parametrize("codec", THREADED, ids=str)
def test_many_threads_give_the_same_bytes(codec: Codec) -> None:
    given, made = hard(300_007, 64), []
    for threads in (1, 3):
        use_threads(threads)
        try:
            wire = torch.empty(codec.nbytes(given.numel(), torch.float32), dtype=torch.uint8)
            lost, out = values(given.numel(), 1), values(given.numel(), 2)
            codec.hop([], given.clone(), wire, residual=lost, lost=lost, seed=3, own_seed=4)
            codec.decode(wire, out, add=True)
        finally:
            use_threads(1)
        made.append((wire, bits(lost), bits(out.nan_to_num(nan=0.5))))
    for one, other in zip(*made, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_a_cast_loses_is_the_references_for_every_code(dtype: torch.dtype) -> None:
    codes = torch.arange(1 << 16).to(torch.int16).view(dtype)
    exact = codes.float().nan_to_num(nan=1.0, posinf=2.0, neginf=-2.0)
    for given in (exact, exact * 1.0003, hard(1 << 16, 64), torch.full((1 << 16,), math.inf)):
        results = []
        for engine in (cast, ENGINE):
            lost, memory = guarded(torch.full((1 << 16,), 7.0))
            engine.lose(given, codes, lost)  # type: ignore[attr-defined]
            assert unharmed(memory)
            results.append(bits(lost))
        assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("numel", NUMELS)
def test_what_a_cast_loses_is_the_references(dtype: torch.dtype, numel: int) -> None:
    given, results = hard(numel, 64), []
    for engine in (cast, ENGINE):
        rounded, lost = given.to(dtype), values(numel, 1)
        engine.lose(given, rounded, lost)  # type: ignore[attr-defined]
        results.append(bits(lost))
        assert torch.equal(lost[~rounded.isfinite()], values(numel, 1)[~rounded.isfinite()])
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 1023, 1025, 300_007])
def test_a_mixing_has_the_references_bits_whatever_the_number_of_neighbours_and_threads(
    dtype: torch.dtype, numel: int
) -> None:
    own, *theirs = (values(numel, seed).clamp(-6e4, 6e4).to(dtype) for seed in range(4))
    sums, weights = torch.promote_types(dtype, torch.float32), [0.3, 1 / 7, 0.21]
    for count in range(4):
        expected = torch.full((numel,), math.nan, dtype=sums)
        mix.mix(own, theirs[:count], weights[:count], expected)
        exact = sum((w * (v.double() - own.double()) for v, w in zip(theirs, weights[:count], strict=False)), 0 * own)
        largest = max(each.double().abs().max() for each in (own, *theirs)) if numel else 0.0
        assert ((expected - exact).abs() <= 8 * torch.finfo(sums).eps * largest).all()
        assert count == 0 or numel < 2 or expected.any()
        for threads in (1, 3):
            memory = torch.full((numel + 2 * 64,), 77.0, dtype=sums)
            out = memory[64:-64].fill_(math.nan)
            use_threads(threads)
            try:
                ENGINE.mix(own, theirs[:count], weights[:count], out)
            finally:
                use_threads(1)
            assert torch.equal(out.view(torch.int32), expected.view(torch.int32))
            assert unharmed(memory)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixing_waits_for_no_compiler(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled._mix.cache_clear()
    algorithm, parameter = Gossip(), nn.Parameter(torch.ones(5, dtype=dtype))
    algorithm.setup({"weight": parameter}, on_all_ranks(1, lambda peers: peers)[0])
    algorithm.bind({parameter})

    def refuse(*_: object) -> None:
        raise AssertionError("a step waits for a compiler")

    monkeypatch.setattr(jit.Kernel, "_compile", refuse)
    out = torch.full((5,), math.nan)
    ENGINE.mix(parameter.detach(), [torch.zeros(5, dtype=dtype)], [0.5], out)
    assert out.tolist() == [-0.5] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 1023, 300_007])
def test_a_step_with_momentum_has_the_references_bits_whatever_the_number_of_threads(
    dtype: torch.dtype, numel: int
) -> None:
    given = [values(numel, seed).to(dtype) for seed in range(3)]  # parameters, gradients, momenta
    expected = [tensor.clone() for tensor in given]
    numbers, gradients, momenta = (tensor.double() for tensor in given)
    momenta = 0.7 * momenta + gradients
    nesterov.nesterov_([expected[0]], [expected[1]], [expected[2]], 0.3, 0.7)
    exact = numbers - 0.3 * (gradients + 0.7 * momenta)
    torch.testing.assert_close(expected[0].double(), exact, rtol=1e-6, atol=torch.finfo(dtype).eps * 1e4)
    for threads in (1, 3):
        memories = [torch.full((numel + 2 * 64,), 77.0, dtype=dtype) for _ in given]
        ours = [memory[64:-64].copy_(tensor) for memory, tensor in zip(memories, given, strict=True)]
        use_threads(threads)
        try:
            ENGINE.nesterov_([ours[0]], [ours[1]], [ours[2]], 0.3, 0.7)
        finally:
            use_threads(1)
        for mine, other in zip(ours, expected, strict=True):
            assert torch.equal(mine.view(torch.int32), other.view(torch.int32))
        assert all(unharmed(memory) for memory in memories)


@pytest.mark.filterwarnings("error")
def test_an_outer_step_waits_for_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_nesterov.nesterov, "_compiled", None)
    compiled._nesterov.cache_clear()
    algorithm, parameter = LocalSGD(1, Nesterov(1.0, 0.5)), nn.Parameter(torch.ones(5))
    algorithm.setup({"weight": parameter}, on_all_ranks(1, lambda peers: peers)[0])
    algorithm.bind({parameter})

    def refuse(*_: object) -> None:
        raise AssertionError("a step waits for a compiler")

    monkeypatch.setattr(jit.Kernel, "_compile", refuse)
    ENGINE.nesterov_([parameter.detach()], [torch.ones(5)], [torch.zeros(5)], 1.0, 0.5)
    assert parameter.tolist() == [-0.5] * 5


FRESH: list[Codec] = [
    *(BlockInt(8), BlockFloat8("e4m3"), Sign(), Rotated(Gaussian(3))),
    *(TopK(8, 256), RandomK(8, 256), Cast("fp16"), Cast("bf16")),
]


@pytest.mark.filterwarnings("error")  # else what cannot be compiled goes to the reference
@pytest.mark.parametrize("codec", FRESH, ids=str)
def test_after_warming_up_nothing_is_compiled(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in (cpu.rotate, cpu_cast.lose_float16, cpu_cast.lose_bfloat16):
        monkeypatch.setattr(kernel, "_compiled", None)
    for made in (compiled._kernels, compiled._sparse_kernels, compiled._lose, compiled._rotate):
        made.cache_clear()
    codec.warm_up(torch.device("cpu"))

    def refuse(*_: object) -> None:
        raise AssertionError("a step waits for a compiler")

    monkeypatch.setattr(jit.Kernel, "_compile", refuse)
    given, lost = torch.randn(2560), torch.zeros(2560)
    wire = torch.empty(codec.nbytes(2560, torch.float32), dtype=torch.uint8)
    codec.hop([], given.clone(), wire, residual=lost, lost=lost, seed=1, own_seed=2)
    assert lost.any()
    codec.hop([wire.clone()], given.clone(), wire, seed=1, own_seed=2)
    for add in (False, True):
        codec.deliver(wire, given, seed=1, add=add)


WITHOUT = """
import sys, warnings
sys.modules["numba"] = None
import torch
from ringstrategy.codecs import BlockInt, Cast, Identity, RandomK, TopK
from ringstrategy.kernels.engine import engine
assert "numba" not in str(sorted(name for name in sys.modules if sys.modules[name] is not None))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(2):
        wire = torch.empty(BlockInt(8).nbytes(1000, torch.float32), dtype=torch.uint8)
        BlockInt(8).encode(torch.randn(1000, generator=torch.Generator().manual_seed(0)), wire)
    for codec in (TopK(), RandomK(), Cast("bf16")):
        small = torch.empty(codec.nbytes(1000, torch.float32), dtype=torch.uint8)
        codec.encode(torch.randn(1000), small, lost=torch.empty(1000))
        codec.decode(small, torch.empty(1000))
    engine(small.device).mix(torch.ones(9), [torch.ones(9)], [1.0], torch.empty(9))
    engine(small.device).nesterov_([torch.ones(9)], [torch.ones(9)], [torch.ones(9)], 0.5, 0.5)
print(len(said), said[0].message, wire.sum().item())
"""


def test_without_numba_one_warning_and_the_same_bytes() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    wire = torch.empty(BlockInt(8).nbytes(1000, torch.float32), dtype=torch.uint8)
    BlockInt(8).encode(torch.randn(1000, generator=torch.Generator().manual_seed(0)), wire)
    assert done.stdout.startswith("1 Numba does not work here (")
    assert "pip install --upgrade numba" in done.stdout
    assert done.stdout.split()[-1] == str(wire.sum().item())


COMPILED = """
import sys, warnings
warnings.simplefilter("error")
import torch
from numba.core import caching
bits, trouble = int(sys.argv[1]), sys.argv[2]
def refuse(self, *given):
    raise PermissionError("as of a folder of somebody else, or a full disk")
if trouble == "unwritable":
    caching._CacheLocator.ensure_cache_path = refuse
if trouble == "full":
    caching.IndexDataCacheFile.save = refuse
from ringstrategy.codecs import BlockInt
from ringstrategy.kernels.compiled import _kernels
codec, values = BlockInt(bits, block=24), torch.randn(1000, generator=torch.Generator().manual_seed(0))
wire = torch.empty(codec.nbytes(1000, torch.float32), dtype=torch.uint8)
codec.encode(values, wire)
print(sum(_kernels(codec).encode._compiled.stats.cache_hits.values()), wire.sum().item())
"""


def start_compiling(cache: Path, bits: int = 3, trouble: str = "none") -> subprocess.Popen[str]:
    """A process that encodes 1000 values by kernels that are or are not in this cache."""
    told = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", COMPILED, str(bits), trouble]
    return subprocess.Popen(command, cwd=ROOT, env=told, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def printed(process: subprocess.Popen[str]) -> tuple[int, int]:
    """Whether the kernel was in the cache, and the sum of the bytes."""
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    found, total = map(int, out.split())
    return found, total


def expected_sum(bits: int = 3) -> int:
    codec, given = BlockInt(bits, block=24), torch.randn(1000, generator=torch.Generator().manual_seed(0))
    wire = torch.empty(codec.nbytes(1000, torch.float32), dtype=torch.uint8)
    reference.encode(given, (), wire, codec)
    return int(wire.sum())


@pytest.mark.slow
def test_ranks_compile_at_the_same_time_and_the_next_run_finds_it_on_disk(tmp_path: Path) -> None:
    together = [start_compiling(tmp_path, bits) for bits in (3, 3, 5)]
    assert [total for _, total in map(printed, together)] == [expected_sum(bits) for bits in (3, 3, 5)]
    for bits in (3, 5):
        assert printed(start_compiling(tmp_path, bits)) == (1, expected_sum(bits))
    indices = [file for file in tmp_path.rglob("*.nbi") if "encode" in file.name]
    assert len(indices) == 2, "of one index two processes would make one entry"
    for file in tmp_path.rglob("*.nb?"):
        file.write_bytes(file.read_bytes()[:40])
    assert printed(start_compiling(tmp_path)) == (0, expected_sum()), "damaged, it is compiled anew"


@pytest.mark.slow
def test_a_kernel_on_disk_is_named_by_all_that_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core.registry import cpu_target

    from ringstrategy.kernels import jit

    def name(known: object) -> str:
        def kernel() -> None: ...

        jit.Kernel(kernel, known)
        return kernel.__qualname__

    names = {name("a format"), name("a format"), name("another")}
    assert len(names) == 2
    monkeypatch.setattr(jit, "_sources", lambda: "other sources")
    names.add(name("a format"))
    codegen = type(cpu_target.target_context.codegen())
    monkeypatch.setattr(codegen, "magic_tuple", lambda self: ("another processor",))
    names.add(name("a format"))
    assert len(names) == 4


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["unwritable", "full"])
def test_where_nothing_can_be_written_kernels_are_compiled_in_memory(tmp_path: Path, trouble: str) -> None:
    assert printed(start_compiling(tmp_path, trouble=trouble)) == (0, expected_sum())
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
@pytest.mark.parametrize("busy", [1, 5])
def test_cores_that_computing_leaves_free(ranks: int, busy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(12)), raising=False)
    monkeypatch.setattr("torch.get_num_threads", lambda: busy)
    assert free_cores(ranks) == max(1, 12 // ranks - busy)


HOPS: list[Codec] = [
    *(BlockInt(8), BlockInt(4, block=24), BlockInt(5, scale="minmax"), BlockInt(4, 64, rounding="stochastic")),
    *(BlockFloat8(), Sign(), Gaussian(2), Rotated(Gaussian(4)), Rotated(Gaussian(1, 512)), Rotated(Sign())),
]


@pytest.mark.parametrize("codec", HOPS, ids=str)
@pytest.mark.parametrize("numel", [9, 1024, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("fed", [torch.float32, torch.bfloat16, None], ids=["residual", "narrow residual", "unfed"])
def test_a_hop_in_one_pass_is_what_its_parts_are(
    codec: Codec, numel: int, dtype: torch.dtype, fed: torch.dtype | None
) -> None:
    given = values(numel).to(dtype)
    for count in (0, 1, 3):
        arrived = [torch.empty(codec.nbytes(numel, dtype), dtype=torch.uint8) for _ in range(count)]
        for seed, message in enumerate(arrived, start=1):
            Codec.hop(codec, [], values(numel, seed), message, seed=5, own_seed=seed)
        made = []
        for hop in (codec.hop, partial(Codec.hop, codec)):
            wire = torch.empty(codec.nbytes(numel, dtype), dtype=torch.uint8)
            rest = None if fed is None else values(numel, 9).to(dtype if fed == torch.float32 else fed)
            lost = rest if rest is not None and rest.dtype == dtype else torch.zeros(numel, dtype=dtype)
            hop(arrived, given.clone(), wire, residual=rest, lost=lost, seed=5, own_seed=6, offset=2 * codec.block)
            made.append((wire, lost.double()))
        (wire, lost), (wire_, lost_) = made
        assert (wire != wire_).double().mean() < 0.004, "of scales that are sums the last bit"
        assert torch.allclose(decoded(codec, wire), decoded(codec, wire_), rtol=0.01, atol=decoded(codec, wire).std())
        near = (lost - lost_).abs() <= 1e-5 * lost_.abs().max() + 0.02 * lost_.abs()
        assert near.double().mean() > 0.98, "but for what lies on the edge of two levels"
        sum_, there = torch.empty_like(given), values(numel, 8).to(dtype)
        codec.deliver(wire, sum_, seed=5)
        added = there.clone()
        codec.deliver(wire, added, seed=5, add=True)
        rounding = 0.0 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        assert ((added - (there + sum_)).abs() <= rounding * (there.abs() + sum_.abs())).all()


def decoded(codec: Codec, wire: Tensor) -> Tensor:
    numel = next(n for n in (9, 1024, 5000) if codec.nbytes(n, torch.float32) == wire.numel())
    out = torch.empty(numel)
    codec.deliver(wire, out, seed=5)
    parts = torch.empty(numel)
    Codec.deliver(codec, wire, parts, seed=5)
    assert torch.allclose(out, parts, rtol=1e-4, atol=1e-5 * parts.abs().max().item())
    return out


@pytest.mark.parametrize("codec", HOPS, ids=str)
def test_a_hop_leaves_what_a_broken_block_lost(codec: Codec) -> None:
    given, lost = torch.ones(4 * codec.block), torch.full((4 * codec.block,), 7.0)
    given[codec.block + 1] = math.inf
    wire = torch.empty(codec.nbytes(given.numel(), torch.float32), dtype=torch.uint8)
    codec.hop([], given, wire, residual=lost, lost=lost, seed=1, own_seed=2)
    broken = lost[codec.block : 2 * codec.block]
    assert torch.allclose(broken, torch.full_like(broken, 7.0), rtol=1e-5)
    out = torch.empty_like(given)
    codec.deliver(wire, out, seed=1)
    assert out[codec.block : 2 * codec.block].isnan().all()
    assert out[: codec.block].isfinite().all()


@pytest.mark.parametrize("codec", [*HOPS, TopK(8, 256), RandomK(8, 256), Cast("fp16")], ids=str)
def test_a_message_that_does_not_fit_is_refused_before_it_is_read(codec: Codec) -> None:
    given, whole = torch.zeros(1000), codec.nbytes(1000, torch.float32)
    wire = torch.empty(whole, dtype=torch.uint8)
    bad = [
        torch.empty(whole - 1, dtype=torch.uint8),
        torch.empty(whole, dtype=torch.int8),
        torch.empty(2 * whole, dtype=torch.uint8)[::2],
    ]
    for each in bad:
        for call in (
            lambda: codec.hop([each], given.clone(), wire, seed=0, own_seed=0),  # noqa: B023
            lambda: codec.hop([], given.clone(), each, seed=0, own_seed=0),  # noqa: B023
            lambda: codec.decode(each, given.clone(), add=True),  # noqa: B023
            lambda: codec.deliver(each, given.clone(), seed=0),  # noqa: B023
        ):
            with pytest.raises((AssertionError, ValueError, RuntimeError)):
                call()
