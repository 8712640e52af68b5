"""Every codec's contract; the codecs are those of configs/codec, so a new YAML meets all of it."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from kinds import IN_TORCH, kernels_of
from torch import Tensor

import ringstrategy
from ringstrategy import AllReduce, Direct, Native, Ring, SmallExact
from ringstrategy.codecs import BlockFloat8, BlockInt, Cast, Codec, Gaussian, Rotated, Sign, TopK
from ringstrategy.codecs.block_int import _hashes, noise
from ringstrategy.codecs.rotated import signs
from ringstrategy.kernels import compiled, reference
from ringstrategy.kernels.reference import flips

YAMLS = sorted((Path(__file__).parents[1] / "configs" / "codec").glob("*.yaml"))
with initialize_config_module("ringstrategy.configs", version_base="1.3"):
    BUILT = [instantiate(compose(f"codec/{path.stem}").codec) for path in YAMLS]
FROM_YAML: list[Codec] = [codec for codec in BUILT if isinstance(codec, Codec)]  # the others choose one by parameter
assert len(FROM_YAML) >= 9
STOCHASTIC = BlockInt(4, 64, rounding="stochastic")
CODECS: list[Codec] = [  # of formats that tests/test_kernels.py has too: they are compiled once
    *FROM_YAML,
    *(BlockInt(bits) for bits in (2, 3, 4, 5, 7)),
    *(STOCHASTIC, BlockInt(4, 24), BlockInt(8, 1024), Sign(8)),
    BlockFloat8("e5m2"),
    *(Gaussian(bits) for bits in (1, 2, 7)),
    Rotated(BlockInt(8, 1024)),
    TopK(3, 300),
]
CODECS.reverse()  # that file begins at the other end: if both run at once, neither compiles what the other does
LOSSY = [codec for codec in CODECS if not codec.lossless]


def data(numel: int, seed: int = 0) -> Tensor:
    """Heavy tails, scales that change from place to place, as gradients have."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator) ** 2
    return values * torch.linspace(1e-4, 1e-2, numel) if numel > 1 else values


def encoded(codec: Codec, values: Tensor, lost: Tensor | None = None, seed: int = 5, offset: int = 0) -> Tensor:
    # a wire full of rubbish: what is not written would show
    wire = torch.randint(0, 256, (codec.nbytes(values.numel(), values.dtype),), dtype=torch.uint8)
    codec.encode(values, wire, lost=lost, seed=seed, offset=offset)
    return wire


def decoded(codec: Codec, wire: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full((numel,), 7.0, dtype=dtype)
    codec.decode(wire, out)
    return out


def round_trip(codec: Codec, values: Tensor, **kwargs: int) -> Tensor:
    return decoded(codec, encoded(codec, values, **kwargs), values.numel(), values.dtype)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_what_arrives_and_what_was_lost_are_what_was_there(codec: Codec) -> None:
    for numel in (0, 1, 7, 8, 9, 255, 256, 257, 1000, 20_001):
        values = data(numel)
        before = values.clone()
        lost = torch.full_like(values, 3e33)
        wire = encoded(codec, values, lost)
        assert torch.equal(values, before), "encode changed its input"
        arrived = decoded(codec, wire, numel)
        assert torch.equal(arrived, round_trip(codec, values)), "feedback changed the bytes"
        largest = torch.maximum(arrived.abs(), values.abs())
        assert (arrived + lost - values).abs().le(largest * 2.0**-22).all()
        if codec.lossless:
            assert torch.equal(arrived, values)
        elif numel >= 1000:
            error = ((arrived - values).norm() / values.norm()).item()
            assert 0 < error < (3 if isinstance(codec, Gaussian) else 1)  # these are not normal: unbiased, and far off


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_same_arguments_give_the_same_bytes_however_values_are_cut(codec: Codec) -> None:
    values = data(20 * codec.block + 5)
    assert torch.equal(encoded(codec, values), encoded(codec, values))
    twin = pickle.loads(pickle.dumps(copy.deepcopy(codec)))
    known = {name: getattr(ringstrategy, name) for name in ringstrategy.__all__}
    assert codec == twin == eval(repr(codec), known | {"torch": torch, type(codec).__name__: type(codec)})
    assert torch.equal(encoded(twin, values), encoded(codec, values))
    cuts = [0, codec.block, 4 * codec.block, 17 * codec.block, values.numel()]
    parts = [round_trip(codec, values[a:b], offset=a) for a, b in pairwise(cuts)]
    assert torch.equal(torch.cat(parts), round_trip(codec, values))


@pytest.mark.parametrize("codec", LOSSY, ids=str)
def test_extreme_blocks(codec: Codec) -> None:
    numel = 2 * max(codec.block, 8)
    assert round_trip(codec, torch.zeros(numel)).eq(0).all()
    ordinary = data(numel)
    for factor in (1e-42, 1e-38, 1e-20, 1e20, 1e33):
        values = ordinary * factor
        lost = torch.full_like(values, 1.0)
        arrived = decoded(codec, encoded(codec, values, lost), numel)
        if isinstance(codec, Cast) and factor > 1:
            continue  # float16 overflows, as it says
        if isinstance(codec, Gaussian | Rotated) and factor == 1e33:
            continue  # counts as non-finite
        assert arrived.isfinite().all()
        largest = values.abs().max()
        # never far outside of what was there, down to one subnormal step of the scale
        assert arrived.abs().max() <= 4 * largest + 2.0**-120 * (largest == 0) + 127 * 2.0**-126
        assert (arrived + lost - values).abs().max() <= largest * 2.0**-20 + 2.0**-149
    for top in (3.37e38, 3.39e38, torch.finfo(torch.float32).max):
        for values in (torch.full((numel,), top), -ordinary / ordinary.abs().max() * top):
            lost = torch.full_like(values, 0.25)
            arrived = decoded(codec, encoded(codec, values, lost), numel)
            assert lost.isfinite().all(), "a block that overflows when decoded keeps its residual"
            assert (arrived.isfinite() | lost.eq(0.25)).all()
    constant = torch.full((numel,), 0.7)
    if not isinstance(codec, TopK):
        assert (round_trip(codec, constant) - constant).abs().max() < 0.35


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_message_that_does_not_fit_is_refused_before_it_is_read(codec: Codec) -> None:
    given, whole = torch.zeros(1000), codec.nbytes(1000, torch.float32)
    wire = torch.empty(whole, dtype=torch.uint8)
    for bad in (
        wire.new_empty(whole - 1),
        wire.new_empty(whole + 1),
        wire.to(torch.int8),
        wire.repeat(2)[::2],
        wire[None],
    ):
        for call in (
            partial(codec.hop, [bad], given.clone(), wire, seed=0, own_seed=0),
            partial(codec.hop, [], given.clone(), bad, seed=0, own_seed=0),
            partial(codec.decode, bad, given.clone(), add=True),
            partial(codec.deliver, bad, given.clone(), seed=0),
        ):
            with pytest.raises(ValueError, match=r"flat, contiguous uint8 tensor of \d+ bytes for 1000 values.*nbytes"):
                call()


# What each promises beyond that.


def test_bytes_are_few() -> None:
    for bits in range(1, 9):
        codec: Codec = BlockInt(bits) if bits > 1 else Sign()
        assert codec.nbytes(256 * 40, torch.float32) == 40 * (2 + 32 * bits)
        assert codec.nbytes(256 + 9, torch.float32) == 2 * 2 + 32 * bits + 2 * bits
        if bits > 1:
            values = torch.arange(256) % (2**bits - 1) - (2 ** (bits - 1) - 1.0)
            assert torch.equal(round_trip(codec, values), values), "every code survives"
    assert TopK(8, 256).nbytes(512, torch.float32) == 2 * 8 * 3
    assert TopK(8, 257).nbytes(514, torch.float32) == 2 * 8 * 4
    assert Cast("bf16").nbytes(7, torch.float64) == 14


def test_packing_is_as_documented() -> None:
    values = torch.zeros(256)
    values[[0, 64, 128, 192]] = torch.tensor([1.0, -1.0, 1.0, 0.0])
    wire = encoded(BlockInt(2), values)
    assert wire[2] == 3 | 1 << 2 | 3 << 4 | 2 << 6
    assert wire[3:].eq(2 | 2 << 2 | 2 << 4 | 2 << 6).all()


def test_stochastic_rounding_is_unbiased_and_pure() -> None:
    codec, values = STOCHASTIC, data(2000)
    results = torch.stack([round_trip(codec, values, seed=seed) for seed in range(3000)])
    assert not torch.equal(results[0], results[1])
    spread = results.std(0)
    step = torch.repeat_interleave(results.view(3000, -1, 250).diff(dim=0).abs().amax((0, 2)), 250)
    # an element near a level moves rarely: of such events a few more or less are chance
    assert (results.mean(0) - values).abs().le(5 * spread / math.sqrt(3000) + step * 12 / 3000).all()
    assert spread.gt(0).float().mean() > 0.9
    assert torch.equal(results[7], round_trip(codec, values, seed=7))
    assert not torch.equal(results[7], round_trip(codec, values, seed=7, offset=256))


def test_noise_is_uniform_and_independent_from_place_to_place() -> None:
    seeds = 4000
    drawn = torch.stack([noise(seed, 2**19 - 100, 300) for seed in range(seeds)])  # two keys
    assert -0.5 <= drawn.min() < -0.499
    assert 0.5 >= drawn.max() > 0.499
    normalized = drawn * math.sqrt(12)
    correlation = normalized.T @ normalized / seeds
    assert (correlation - torch.eye(300)).abs().max() < 6 / math.sqrt(seeds)
    assert drawn.mean(0).abs().max() < 5 / math.sqrt(12 * seeds)
    assert not torch.equal(noise(1, 5, 300), noise(1, 2**19 + 5, 300)), "each period has keys of its own"


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_every_float8_code_decodes_as_torch_says(format: str) -> None:
    codec = BlockFloat8(format)  # type: ignore[arg-type]
    codes = torch.arange(256, dtype=torch.uint8)
    wire = torch.cat([torch.tensor([0.5], dtype=torch.bfloat16).view(torch.uint8), codes])
    expected = codes.view(torch.float8_e4m3fn if format == "e4m3" else torch.float8_e5m2)
    arrived, exact = decoded(codec, wire, 256), expected.float() / 2
    if format == "e4m3":
        exact[[0x7F, 0xFF]] = torch.tensor([240.0, -240.0])  # no code is NaN: the scale says so
    assert torch.equal(arrived.nan_to_num(-1), exact.nan_to_num(-1))


def test_relative_errors_of_normal_values() -> None:
    values = torch.randn(256 * 200, generator=torch.Generator().manual_seed(1))
    for bits, promised in {1: 0.60, 2: 0.345, 3: 0.194, 4: 0.108, 5: 0.060, 6: 0.034, 7: 0.021}.items():
        arrived = round_trip(Gaussian(bits), values)
        error = ((arrived - values).norm() / values.norm()).item()
        assert error < promised * (1.3 if bits == 1 else 1.08), (bits, error)
        # EDEN's scale: the projection on the truth is right
        assert abs((arrived @ values / (values @ values)).item() - 1) < 2e-3


def test_rotation_is_the_orthonormal_hadamard_matrix() -> None:
    values = data(256 * 3 + 10).double()
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(8):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    rotated = values.float()
    Rotated().prepare_(rotated, 77)
    expected = (values[:768].view(3, 256) * flips(signs(77)).double()) @ matrix
    assert (rotated[:768].double() - expected.view(-1)).abs().max() < 1e-6 * values.abs().max()
    assert torch.equal(rotated[768:], values.float()[768:])
    Rotated().restore_(rotated, 77)
    assert (rotated.double() - values).abs().max() < 1e-6 * values.abs().max()
    assert 90 < (flips(signs(77)) > 0).sum() < 166
    assert len(set(signs(77))) == 8, "each word is drawn"
    assert signs(77) != signs(78)


@pytest.mark.parametrize(
    "inner", [Gaussian(1), Gaussian(4), Gaussian(7), BlockInt(2), BlockInt(8), Sign(), Gaussian(1, 512)], ids=str
)
def test_what_was_decoded_rotates_back_with_the_same_bits_in_any_order(inner: Codec) -> None:
    codec = Rotated(inner)
    values = data(256 * 64)
    codec.prepare_(values, 3)
    arrived = round_trip(codec, values).view(-1, 256)
    matrix = torch.ones(1, 1)
    for _ in range(8):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    matrix = matrix * flips(signs(3))
    exact = arrived.double() @ matrix.double()
    by_products = arrived @ matrix
    backwards = arrived.flip(1) @ matrix.flip(0)  # the same sums in another order
    in_torch, by_numba = arrived.clone(), arrived.clone()
    reference.rotate_(in_torch.view(-1), signs(3), inverse=True)
    compiled.rotate_(by_numba.view(-1), signs(3), inverse=True)
    for turned in (by_products, backwards, in_torch, by_numba):
        assert torch.equal(turned.double(), exact)


def test_the_rotation_stays_exact_whatever_a_user_lets_matrix_products_do() -> None:
    script = """
import torch
from ringstrategy.codecs.rotated import Rotated, signs
from ringstrategy.kernels import reference
values = torch.randn(256 * 64, generator=torch.Generator().manual_seed(1))
plain, backends = values.clone(), torch.backends
Rotated().prepare_(plain, 1)
for place, precision in ((backends, "tf32"), (backends.cuda.matmul, "tf32"), (backends.mkldnn.matmul, "bf16")):
    before, guarded, in_torch = place.fp32_precision, values.clone(), values.clone()
    place.fp32_precision = precision
    assert place.fp32_precision == precision != before
    Rotated().prepare_(guarded, 1)
    reference.rotate_(in_torch, signs(1))
    place.fp32_precision = before
    assert all((plain - other).abs().max() <= 1e-6 * values.abs().max() for other in (guarded, in_torch))
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_top_k_sends_the_largest() -> None:
    values = data(512)
    arrived = round_trip(TopK(8, 256), values)
    for block in range(2):
        part = values[256 * block : 256 * (block + 1)]
        chosen = part.abs().topk(8).indices.sort().values
        assert torch.equal(arrived[256 * block : 256 * (block + 1)].nonzero().view(-1), chosen)
        assert torch.equal(arrived[256 * block :][chosen], part[chosen].bfloat16().float())


REFUSED: dict[str, list[Callable[[], object]]] = {  # what the error says
    "from 2 to 8": [lambda: BlockInt(1), lambda: BlockInt(9)],
    "whole number": [lambda: BlockInt(4.0)],  # type: ignore[arg-type]
    "multiple of 8": [lambda: BlockInt(8, 0), lambda: BlockInt(8, 100), lambda: BlockInt(8, True), lambda: Sign(12)],
    "'nearest' or 'stochastic'": [lambda: BlockInt(8, rounding="up")],  # type: ignore[arg-type]
    "'e4m3' or 'e5m2'": [lambda: BlockFloat8("e3m4")],  # type: ignore[arg-type]
    "from 1 to 7": [lambda: Gaussian(0), lambda: Gaussian(8)],
    "from 8 to 32768": [lambda: Gaussian(4, 1 << 16)],
    "multiple of 256": [lambda: Rotated(Gaussian(4, 64))],
    "same bits on every machine": [lambda: Rotated(BlockFloat8()), lambda: Rotated(Rotated())],
    r"Gaussian\(bits=4\)": [lambda: Rotated(4)],  # type: ignore[arg-type]
    r"Identity\(\)": [lambda: BlockInt(8).check(torch.int32), lambda: TopK().check(torch.complex64)],
    "1 to 256": [lambda: TopK(0), lambda: TopK(257)],
    "1 to 32768": [lambda: TopK(1, 0)],
    r"collective=Direct\(\)": [
        *(lambda: AllReduce(TopK()), lambda: AllReduce(TopK(), Ring())),
        *(lambda: AllReduce(SmallExact(TopK()), Ring()), lambda: AllReduce(SmallExact(Sign(), TopK()))),
    ],
    r"Ring\(\) or Direct\(\)": [lambda: AllReduce(BlockInt(8), Native()), lambda: AllReduce(Rotated(), Native())],
}


def test_bad_arguments_are_refused_at_construction() -> None:
    for words, builds in REFUSED.items():
        for build in builds:
            with pytest.raises((ValueError, TypeError), match=words):
                build()
    assert AllReduce(TopK(), Direct()).codec == TopK()


@contextmanager
def _elsewhere(where: torch.dtype | str) -> Iterator[None]:
    """In inference mode, or where a user has another default dtype and another default device."""
    for cached in (_hashes, flips):
        cached.cache_clear()
    if isinstance(where, str):
        with torch.inference_mode():
            yield
        return
    torch.set_default_dtype(where)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("kind", ["cpu", IN_TORCH])
def test_what_a_user_has_as_defaults_is_none_of_ours(codec: Codec, kind: str) -> None:
    values = data(max(codec.block, 256) * 3 + 1) * 1e-7

    def all_of_it() -> tuple[Tensor, Tensor]:
        nbytes = codec.nbytes(values.numel(), torch.float32)
        turned, wire = values.clone(), torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        codec.prepare_(turned, 1)
        codec.encode(turned, wire, seed=3)
        codec.decode(wire, turned)
        codec.restore_(turned, 1)
        return wire, turned

    with kernels_of(kind):
        expected = all_of_it()
        for where in (torch.float16, torch.float64, "inference"):
            with _elsewhere(where):
                found = all_of_it()
            assert all(map(torch.equal, found, expected)), where
            assert all(map(torch.equal, all_of_it(), expected)), f"what was cached there serves here: {where}"
