"""The kernels that Numba compiles, beside the reference: the same bytes from the same values."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import on_all_ranks
from torch import Tensor, nn

from ringstrategy import Gossip, LocalSGD, Nesterov
from ringstrategy.codecs import BlockFloat8, BlockInt, Cast, Codec, Gaussian, Rotated, Sign, TopK
from ringstrategy.codecs.blocked import Blocked
from ringstrategy.codecs.rotated import signs
from ringstrategy.kernels import (
    cast,
    compiled,
    cpu,
    cpu_cast,
    cpu_nesterov,
    jit,
    mix,
    nesterov,
    reference,
    sparse,
    threads,
)
from ringstrategy.kernels.layout import SparseFormat
from ringstrategy.kernels.threads import free_cores, in_parts, use_threads

ROOT = Path(__file__).parents[1]
ENGINE = compiled.Compiled()
# A format takes seconds to compile and is then kept on disk: other files use those of this one.
WHOLE: list[Blocked] = [
    *(BlockInt(bits) for bits in (2, 3, 4, 5, 7, 8)),
    BlockInt(4, 64, rounding="stochastic"),
    BlockInt(4, block=24),
    BlockInt(8, block=1024),
    *(BlockFloat8(format) for format in ("e4m3", "e5m2")),
]
SUMS: list[Blocked] = [Sign(), Sign(block=8), *(Gaussian(bits) for bits in (1, 2, 4, 7))]  # scales are a sum
by_codec = pytest.mark.parametrize("codec", [*WHOLE, *SUMS], ids=str)
NUMELS = [0, 1, 7, 256, 257, 1003, 9000]


def values(numel: int, seed: int = 0) -> Tensor:
    """Of very mixed magnitudes, with zeros of both signs, subnormal blocks and blocks on one side of zero."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator).mul(20).sub(10).exp()
    drawn[: numel // 9] = 0
    drawn[numel // 9 : numel // 8] *= -0.0
    drawn[numel // 5 : numel // 4] *= 1e-39
    drawn[numel // 3 : numel // 2].abs_()
    return drawn


def empty(codec: Codec, numel: int) -> Tensor:
    return torch.empty(codec.nbytes(numel, torch.float32), dtype=torch.uint8)


def messages(codec: Blocked, numel: int, count: int) -> list[Tensor]:
    sent = [empty(codec, numel) for _ in range(count)]
    for seed, wire in enumerate(sent, start=1):
        reference.encode(values(numel, seed), (), wire, codec, seed=seed)
    return sent


def both(codec: Blocked, given: Tensor, wires: list[Tensor], offset: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Wire and what was lost, of the reference and of the kernels."""
    made = []
    for engine in (reference, ENGINE):
        wire, lost = empty(codec, given.numel()), torch.full_like(given, 7.0)
        engine.encode(given, wires, wire, codec, lost=lost, seed=3, offset=offset)  # type: ignore[attr-defined]
        made.append((wire, lost))
    return made


def bits(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num(nan=0.5).view(torch.int32)


def guarded(given: Tensor) -> tuple[Tensor, Tensor]:
    """A copy within memory of which nothing else may change, and that memory."""
    memory = torch.full((given.numel() + 2 * 64,), 77.0, dtype=given.dtype)
    return memory[64:-64].copy_(given), memory


def unharmed(memory: Tensor) -> bool:
    return bool((memory[:64] == 77).all() and (memory[-64:] == 77).all())


@pytest.fixture
def several_threads() -> Iterator[None]:
    use_threads(3)
    yield
    use_threads(1)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Forgets what is compiled; from its call on nothing may be."""
    for kernel in (cpu.rotate, cpu_cast.lose_float16, cpu_cast.lose_bfloat16, cpu_nesterov.nesterov):
        monkeypatch.setattr(kernel, "_compiled", None)
    made = (compiled._kernels, compiled._sparse_kernels, compiled._lose, compiled._rotate, compiled._mix)
    for cached in (*made, compiled._nesterov):
        cached.cache_clear()  # type: ignore[attr-defined]

    def refuse(*_: object) -> None:
        raise AssertionError("a step waits for a compiler")

    return lambda: monkeypatch.setattr(jit.Kernel, "_compile", refuse)


# Block codecs


@pytest.mark.parametrize("codec", WHOLE, ids=str)
def test_whole_numbers_have_the_same_bytes(codec: Blocked) -> None:
    """Also where a period of the noise ends."""
    for numel in NUMELS:
        given = values(numel)
        for count, offset in ((0, 2**20 - 2 * codec.block), (1, 0), (3, 5 * codec.block)):
            kept = given.clone()
            (wire, lost), (wire_, lost_) = both(codec, given, messages(codec, numel, count), offset)
            assert torch.equal(wire, wire_), (numel, count)
            assert torch.equal(lost, lost_), "of what is 0 the sign may differ"
            assert torch.equal(bits(given), bits(kept)), "what is encoded stays as it is"


@pytest.mark.parametrize("codec", SUMS, ids=str)
def test_scales_that_are_sums_have_the_same_bytes_but_for_their_last_bit(codec: Blocked) -> None:
    for numel in NUMELS[1:]:
        for count in range(3):
            (wire, lost), (wire_, lost_) = both(codec, values(numel), messages(codec, numel, count))
            scales = 2 * -(-numel // codec.block)
            heads, heads_ = (each[:scales].view(torch.int16).int() for each in (wire, wire_))
            assert (heads - heads_).abs().max() <= 1, numel
            alike = (heads == heads_).repeat_interleave(codec.block)[:numel]
            assert (~alike).float().mean() < 0.02
            assert (wire[scales:] != wire_[scales:]).float().mean() < 0.002, "a value on the edge of two levels"
            near = torch.isclose(lost[alike], lost_[alike], rtol=1e-5, atol=0)
            assert near.all() or (lost != lost_)[alike].float().mean() < 0.002


@by_codec
def test_values_of_another_dtype(codec: Blocked) -> None:
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        given = (torch.randn(1003, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
        given[300] = math.nan
        wires = messages(codec, 1003, 1)
        (wire, lost), (wire_, lost_) = both(codec, given, [*wires, *wires])
        decoded = [given.clone(), given.clone()]
        reference.decode(wires[0], decoded[0], codec, add=True)
        ENGINE.decode(wires[0], decoded[1], codec, add=True)
        assert torch.equal(*(each.nan_to_num(0.5) for each in decoded)), dtype
        assert lost[300] == lost_[300] == 7.0
        if codec in WHOLE:
            assert torch.equal(wire, wire_), dtype
            assert torch.equal(lost, lost_), dtype
        else:
            assert (wire != wire_).float().mean() < 0.01


@by_codec
def test_blocks_that_are_not_finite_have_the_documented_bytes(codec: Blocked) -> None:
    for poison in (math.nan, -math.inf, 3e38):
        given = torch.ones(40 * codec.block + 3)  # many, so that vector instructions write them
        given[2 * codec.block + 1] = given[-1] = poison
        (wire, lost), (wire_, lost_) = both(codec, given, [])
        assert torch.equal(wire, wire_), poison
        assert torch.equal(lost, lost_)
        if poison != 3e38:
            scales = wire[: 41 * 2].view(torch.int16)
            assert scales.eq(0x7FC0).nonzero().view(-1).tolist() == [2, 40]
            assert lost[2 * codec.block : 3 * codec.block].eq(7).all()


@by_codec
def test_any_bytes_decode_alike(codec: Blocked) -> None:
    for numel in NUMELS:
        generator = torch.Generator().manual_seed(numel)
        wire = torch.randint(256, (codec.nbytes(numel, torch.float32),), dtype=torch.uint8, generator=generator)
        for add in (False, True):
            (one, memory), (other, memory_) = guarded(values(numel)), guarded(values(numel))
            reference.decode(wire, one, codec, add=add)
            ENGINE.decode(wire, other, codec, add=add)
            assert torch.equal(one.isnan(), other.isnan()), numel
            assert torch.equal(bits(one), bits(other)), numel
            assert unharmed(memory)
            assert unharmed(memory_)


@by_codec
def test_what_a_user_sets_changes_no_byte_of_the_reference(codec: Blocked) -> None:
    given, lost = values(1003, 1), torch.zeros(1003)
    [expected], wire = messages(codec, 1003, 1), empty(codec, 1003)
    out, turned = torch.zeros(1003), torch.zeros(1003)
    reference.decode(expected, out, codec)
    reference.rotate_(out, signs(1))
    for default in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(default)
        try:
            with torch.device("meta"):
                reference.encode(given, (), wire, codec, lost=lost, seed=1)
                reference.decode(wire, turned, codec)
                reference.rotate_(turned, signs(1))
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(wire, expected), default
        assert torch.equal(turned, out)


@pytest.mark.parametrize("inverse", [False, True])
def test_the_rotation_is_the_references(inverse: bool) -> None:
    one, other = (torch.randn(2 * 256 + 9, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    reference.rotate_(one, signs(5), inverse=inverse)
    given = other.clone()
    ENGINE.rotate_(other, signs(5), inverse=inverse)
    assert torch.equal(one, other)
    assert not torch.equal(one[:512], given[:512])
    assert torch.equal(one[512:], given[512:])


# Hops and deliveries


HOPS: list[Codec] = [
    *(BlockInt(8), BlockInt(4, block=24), BlockInt(4, 64, rounding="stochastic")),
    *(BlockFloat8(), Sign(), Gaussian(2), Rotated(Gaussian(4)), Rotated(Gaussian(1, 512)), Rotated(Sign())),
]


HOWS = [  # dtypes of the values and of the residual, and whether what is lost has a place of its own
    *((torch.float32, torch.float32, False), (torch.float32, torch.bfloat16, True), (torch.float32, None, False)),
    *((torch.float64, torch.bfloat16, False), (torch.bfloat16, torch.float32, True), (torch.float64, None, False)),
]


@pytest.mark.parametrize(
    ("codec", "dtype", "fed", "apart"),
    [(codec, *HOWS[(i + 2 * k) % 6]) for i, codec in enumerate(HOPS) for k in range(3)],
    ids=str,
)
def test_a_hop_in_one_pass_is_what_its_parts_are(
    codec: Codec, dtype: torch.dtype, fed: torch.dtype | None, apart: bool
) -> None:
    for numel, count in ((9, 1), (1024, 0), (5000, 3)):
        given = values(numel).to(dtype)
        given[numel // 2 + 1] = math.inf  # in one block at least
        arrived = [empty(codec, numel) for _ in range(count)]
        for seed, message in enumerate(arrived, start=1):
            Codec.hop(codec, [], values(numel, seed), message, seed=5, own_seed=seed)
        made = []
        for hop in (codec.hop, partial(Codec.hop, codec)):
            wire = empty(codec, numel)
            rest = None if fed is None else values(numel, 9).to(dtype if fed == torch.float32 else fed)
            like = given if rest is None else rest  # what is lost may be narrower than the values
            lost = rest if rest is not None and not apart else torch.full_like(like, 3.0)
            hop(arrived, given.clone(), wire, residual=rest, lost=lost, seed=5, own_seed=6, offset=2 * codec.block)
            made.append((wire, lost.double()))
        (wire, lost), (wire_, lost_) = made
        assert (wire != wire_).double().mean() < 0.004, "of scales that are sums the last bit"
        sum_, parts = torch.empty(numel), torch.empty(numel)
        codec.deliver(wire, sum_, seed=5)
        Codec.deliver(codec, wire, parts, seed=5)
        assert torch.allclose(sum_, parts, rtol=1e-4, atol=1e-5 * parts.nan_to_num().abs().max().item(), equal_nan=True)
        assert sum_.isnan().any()
        near = (lost - lost_).abs() <= 1e-5 * lost_.abs().max() + 0.02 * lost_.abs()
        assert near.double().mean() > 0.98, "but for what lies on the edge of two levels"
        broken = sum_.isnan()
        kept = values(numel, 9).to(dtype if fed == torch.float32 else fed) if fed else torch.full((numel,), 3.0)
        # turned there and back, it is rounded as the largest of its block
        assert torch.allclose(
            lost[broken].float(), kept[broken].float(), rtol=0.01, atol=0.01 * kept.abs().max().item()
        )
        there = values(numel, 8).to(dtype)
        added, once = there.clone(), torch.empty_like(there)
        codec.deliver(wire, added, seed=5, add=True)
        codec.deliver(wire, once, seed=5)
        rounding = 0.0 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        error = (added - (there + once)).abs().nan_to_num()
        assert (error <= rounding * (there.abs() + once.abs()).nan_to_num()).all()
        Codec.deliver(codec, wire, added.copy_(there), seed=5, add=True)
        error = (added - (there + once)).abs().nan_to_num()
        assert error.max() <= (2 * torch.finfo(dtype).eps + 1e-5) * (there.abs() + once.abs()).nan_to_num().max()


@pytest.mark.parametrize("codec", [*HOPS, TopK(8, 256), Cast("fp16")], ids=str)
def test_a_message_that_does_not_fit_is_refused_before_it_is_read(codec: Codec) -> None:
    given, whole = torch.zeros(1000), codec.nbytes(1000, torch.float32)
    wire = torch.empty(whole, dtype=torch.uint8)
    for bad in (
        torch.empty(whole - 1, dtype=torch.uint8),
        torch.empty(whole + 1, dtype=torch.uint8),
        torch.empty(whole, dtype=torch.int8),
        torch.empty(2 * whole, dtype=torch.uint8)[::2],
    ):
        for call in (
            partial(codec.hop, [bad], given.clone(), wire, seed=0, own_seed=0),
            partial(codec.hop, [], given.clone(), bad, seed=0, own_seed=0),
            partial(codec.reduce, [bad], given.clone(), wire),
            partial(codec.decode, bad, given.clone(), add=True),
            partial(codec.deliver, bad, given.clone(), seed=0),
        ):
            with pytest.raises(ValueError, match="nbytes"):
                call()


# Sparse codecs and casts

SPARSE: list[SparseFormat] = [
    *(SparseFormat(k, block) for k, block in ((1, 1), (3, 7), (8, 256), (32, 256), (256, 256))),
    *(SparseFormat(k, block) for k, block in ((3, 300), (70, 1000), (5, 1 << 15))),
]
OVERFLOWS = 2.0**128 - 2.0**119  # the least that is infinite as bfloat16; the float32 below it differs by 2**104


def hard(numel: int, block: int, seed: int = 0) -> Tensor:
    """Blocks of all kinds, one after another."""
    given = values(numel, seed)
    generator = torch.Generator().manual_seed(seed)
    for place, part in enumerate(given.split(block)):
        kind = place % 10
        if kind == 1:
            part.copy_(torch.randint(-2, 3, part.shape, generator=generator))  # ties
        elif kind in (2, 3):
            part.fill_((-0.75, -0.0)[kind - 2])
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
    dtype = torch.uint8 if form.block <= 256 else torch.int16
    places = torch.randint(-(1 << 15), 1 << 15, kept.shape, generator=generator).to(dtype)
    return kept.view(torch.bfloat16), places


@pytest.mark.parametrize("form", SPARSE, ids=str)
def test_sparse_messages_have_the_same_bytes_and_any_bytes_decode_alike(form: SparseFormat) -> None:
    for numel in (*NUMELS, 40_000):
        for given in (values(numel), hard(numel, form.block), torch.zeros(numel), -torch.ones(numel)):
            results = []
            for engine in (sparse.encode, ENGINE.encode_sparse):
                (kept, places), (again, others), before = parts(form, numel), parts(form, numel), given.clone()
                lost, memory = guarded(values(numel, seed=9))
                engine(given, kept, places, form, lost=lost)
                assert torch.equal(given.view(torch.int32), before.view(torch.int32)), "what is encoded stays as it is"
                assert unharmed(memory)
                engine(given, again, others, form, lost=None)
                assert torch.equal(again.view(torch.int16), kept.view(torch.int16)), "feedback changed the bytes"
                engine(before, again, others, form, lost=before)  # what is lost may be the values themselves
                results.append((kept.view(torch.int16), places, lost.view(torch.int32), before.view(torch.int32)))
            for one, other in zip(*results, strict=True):
                assert torch.equal(one, other), numel
        for add in (False, True):
            kept, places = parts(form, numel)
            kept.view(torch.int16)[::2] &= 0x3FFF  # else almost all blocks have a NaN
            decoded = []
            for decode in (sparse.decode, ENGINE.decode_sparse):
                out, memory = guarded(values(numel))
                decode(kept, places, out, form, add=add)
                assert unharmed(memory), "places beyond a block"
                decoded.append(out)
            assert torch.equal(*(out.isnan() for out in decoded))
            assert torch.equal(*map(bits, decoded)), numel


@pytest.mark.parametrize("engine", [sparse.encode, ENGINE.encode_sparse], ids=["reference", "compiled"])
def test_sparse_ties_and_blocks_that_are_not_finite_have_the_documented_bytes(engine: Any) -> None:
    kept, places = parts(SparseFormat(4, 8), 10)
    given = torch.tensor([1.0, -2, 0, 2, -1, 1, -2, 0, 0, 0])
    engine(given, kept, places, SparseFormat(4, 8), lost=None)
    assert places.tolist() == [[0, 1, 3, 6], [0, 1, 2, 3]], "the first of equal ones; two of them beyond the end"
    assert kept.tolist() == [[1, -2, 2, -2], [0, 0, 0, 0]]
    for poison in (math.nan, math.inf, OVERFLOWS):
        form, given = SparseFormat(4, 16), torch.arange(32.0)
        given[5] = poison
        kept, places = parts(form, 32)
        lost = torch.full_like(given, 7.0)
        engine(given, kept, places, form, lost=lost)
        assert kept[0].view(torch.int16).eq(0x7FC0).all()
        assert kept[1].isfinite().all()
        assert lost[:16].eq(7).all()
        assert not lost[16:].eq(7).any()
        assert places.tolist() == [[0, 1, 2, 3], [12, 13, 14, 15]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_a_cast_loses_is_the_references(dtype: torch.dtype) -> None:
    codes = torch.arange(1 << 16).to(torch.int16).view(dtype)
    exact = codes.float().nan_to_num(nan=1.0, posinf=2.0, neginf=-2.0)
    cases = [(given, codes) for given in (exact, exact * 1.0003, torch.full((1 << 16,), math.inf))]
    cases += [(given, given.to(dtype)) for given in (hard(numel, 64) for numel in (*NUMELS, 1 << 16))]
    for given, rounded in cases:
        results = []
        for engine in (cast, ENGINE):
            lost, memory = guarded(values(given.numel(), 1))
            engine.lose(given, rounded, lost)  # type: ignore[attr-defined]
            assert unharmed(memory)
            kept = ~rounded.isfinite()
            assert torch.equal(lost[kept], values(given.numel(), 1)[kept])
            results.append(lost.view(torch.int32))
        assert torch.equal(*results)


# Mixings and steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_mixing_has_the_references_bits_whatever_the_number_of_neighbours_and_threads(dtype: torch.dtype) -> None:
    sums, weights = torch.promote_types(dtype, torch.float32), [0.3, 1 / 7, 0.21]
    for numel, count in ((0, 1), (1, 3), (1023, 2), (1025, 0), (300_007, 3)):
        own, *theirs = (values(numel, seed).clamp(-6e4, 6e4).to(dtype) for seed in range(4))
        expected = torch.full((numel,), math.nan, dtype=sums)
        mix.mix(own, theirs[:count], weights[:count], expected)
        exact = sum((w * (v.double() - own.double()) for v, w in zip(theirs, weights[:count], strict=False)), 0 * own)
        largest = max(each.double().abs().max() for each in (own, *theirs)) if numel else 0.0
        assert ((expected - exact).abs() <= 8 * torch.finfo(sums).eps * largest).all()
        assert count == 0 or numel < 2 or expected.any()
        for cores in (1, 3):
            out, memory = guarded(torch.full((numel,), math.nan, dtype=sums))
            use_threads(cores)
            try:
                ENGINE.mix(own, theirs[:count], weights[:count], out)
            finally:
                use_threads(1)
            assert torch.equal(out.view(torch.int32), expected.view(torch.int32)), (numel, cores)
            assert unharmed(memory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_with_momentum_has_the_references_bits_whatever_the_number_of_threads(dtype: torch.dtype) -> None:
    for numel, cores in ((0, 1), (1, 1), (1023, 3), (300_007, 1), (300_007, 3)):
        given = [values(numel, seed).to(dtype) for seed in range(3)]  # parameters, gradients, momenta
        expected = [tensor.clone() for tensor in given]
        numbers, gradients, momenta = (tensor.double() for tensor in given)
        nesterov.nesterov_([expected[0]], [expected[1]], [expected[2]], 0.3, 0.7)
        exact = numbers - 0.3 * (gradients + 0.7 * (0.7 * momenta + gradients))
        torch.testing.assert_close(expected[0].double(), exact, rtol=1e-6, atol=torch.finfo(dtype).eps * 1e4)
        ours, memories = zip(*map(guarded, given), strict=True)
        use_threads(cores)
        try:
            ENGINE.nesterov_(*([tensor] for tensor in ours), 0.3, 0.7)
        finally:
            use_threads(1)
        for mine, other, memory in zip(ours, expected, memories, strict=True):
            assert torch.equal(mine.view(torch.int32), other.view(torch.int32)), (numel, cores)
            assert unharmed(memory)


# Threads


THREADED = [
    *(TopK(8, 256), TopK(3, 300), Cast("fp16"), Cast("bf16"), BlockInt(8), Sign(), Gaussian(4)),
    *(BlockInt(4, 64, rounding="stochastic"), BlockFloat8(), Rotated(Gaussian(4))),
]


@pytest.mark.parametrize("codec", THREADED, ids=str)
def test_many_threads_give_the_same_bytes(codec: Codec) -> None:
    given, made = hard(300_007, 64), []
    for cores in (1, 3):
        use_threads(cores)
        try:
            wire = empty(codec, given.numel()).fill_(0xA5)
            lost, out = values(given.numel(), 1), values(given.numel(), 2)
            codec.hop([], given.clone(), wire, residual=lost, lost=lost, seed=3, own_seed=4)
            codec.decode(wire, out, add=True)
        finally:
            use_threads(1)
        made.append((wire, lost.view(torch.int32), bits(out)))
    for one, other in zip(*made, strict=True):
        assert torch.equal(one, other)


def test_an_error_in_any_thread_comes_out(several_threads: None) -> None:
    begun = []

    def fail(first: int, last: int) -> None:
        begun.append(first)
        if first:
            raise ValueError("in a thread")

    with pytest.raises(ValueError, match="in a thread"):
        in_parts(1, 300_000, fail)
    assert len(begun) == 3


def test_threads_stay_until_the_last_exchange_ends() -> None:
    threads.begin_threads(3)
    threads.begin_threads(3)
    threads.end_threads()
    assert threads._threads == 3
    threads.end_threads()
    assert threads._threads == 1


def test_cores_that_computing_leaves_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(12)), raising=False)
    for busy, expected in ((1, [11, 5, 3, 1]), (5, [7, 1, 1, 1])):
        monkeypatch.setattr("torch.get_num_threads", lambda busy=busy: busy)
        assert [free_cores(ranks) for ranks in (1, 2, 3, 64)] == expected


# When kernels are compiled


FRESH: list[Codec] = [
    *(BlockInt(8), BlockFloat8("e4m3"), Sign(), Rotated(Gaussian(4))),
    *(TopK(8, 256), Cast("fp16"), Cast("bf16")),
]


@pytest.mark.filterwarnings("error")  # else what cannot be compiled goes to the reference
@pytest.mark.parametrize("codec", FRESH, ids=str)
def test_after_warming_up_nothing_is_compiled(codec: Codec, no_compiler: Any) -> None:
    codec.warm_up(torch.device("cpu"))
    no_compiler()
    given, lost, wire = torch.randn(2560), torch.zeros(2560), empty(codec, 2560)
    codec.hop([], given.clone(), wire, residual=lost, lost=lost, seed=1, own_seed=2)
    assert lost.any()
    codec.hop([wire.clone()], given.clone(), wire, seed=1, own_seed=2)
    for add in (False, True):
        codec.deliver(wire, given, seed=1, add=add)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
def test_a_mixing_and_an_outer_step_wait_for_no_compiler(dtype: torch.dtype | None, no_compiler: Any) -> None:
    algorithm = LocalSGD(1, Nesterov(1.0, 0.5)) if dtype is None else Gossip()
    parameter = nn.Parameter(torch.ones(5, dtype=dtype))
    algorithm.setup({"weight": parameter}, on_all_ranks(1, lambda peers: peers)[0])
    algorithm.bind({parameter})
    no_compiler()
    out = parameter.detach()
    if dtype is None:
        ENGINE.nesterov_([out], [torch.ones(5)], [torch.zeros(5)], 1.0, 0.5)
    else:
        out = torch.full((5,), math.nan)
        ENGINE.mix(parameter.detach(), [torch.zeros(5, dtype=dtype)], [0.5], out)
    assert out.tolist() == [-0.5] * 5


WITHOUT = """
import sys, warnings
sys.modules["numba"] = None
import torch
from ringstrategy.codecs import BlockInt, Cast, Identity, TopK
from ringstrategy.kernels.engine import engine
assert "numba" not in str(sorted(name for name in sys.modules if sys.modules[name] is not None))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(2):
        wire = torch.empty(BlockInt(8).nbytes(1000, torch.float32), dtype=torch.uint8)
        BlockInt(8).encode(torch.randn(1000, generator=torch.Generator().manual_seed(0)), wire)
    for codec in (TopK(), Cast("bf16")):
        small = torch.empty(codec.nbytes(1000, torch.float32), dtype=torch.uint8)
        codec.encode(torch.randn(1000), small, lost=torch.empty(1000))
        codec.decode(small, torch.empty(1000))
    engine(small.device).mix(torch.ones(9), [torch.ones(9)], [1.0], torch.empty(9))
    engine(small.device).nesterov_([torch.ones(9)], [torch.ones(9)], [torch.ones(9)], 0.5, 0.5)
print(len(said), said[0].message, wire.sum().item())
"""


def test_without_numba_one_warning_and_the_same_bytes() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    wire = empty(BlockInt(8), 1000)
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
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    found, total = map(int, out.split())
    return found, total


def expected_sum(bits: int = 3) -> int:
    codec, given = BlockInt(bits, block=24), torch.randn(1000, generator=torch.Generator().manual_seed(0))
    wire = empty(codec, 1000)
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


def test_a_kernel_on_disk_is_named_by_all_that_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core.registry import cpu_target

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
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and file.suffix != ".lock"]
