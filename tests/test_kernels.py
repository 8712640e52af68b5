"""Block codecs by a device's kernels, beside the same calls in torch: the same bytes from the same values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kinds import (
    CPU,
    DEVICE,
    IN_TORCH,
    INTERPRETED,
    KIND,
    Fed,
    Guarded,
    awkward,
    by_turns,
    delivered,
    hop,
    kernels_of,
    random_message,
    residual_of,
    same,
)
from kinds import bfloat16_rounds as bfloat16_rounds
from pairs import all_pairs

from ringstrategy.codecs import BlockFloat8, BlockInt, Codec, Gaussian, Rotated, Sign
from ringstrategy.codecs.rotated import signs
from ringstrategy.kernels.operations import rotate_

# numpy, of NaN and overflow, which are tested
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

EXACT: list[Codec] = [  # a format takes seconds to compile and is then kept on disk: other files use these
    *(BlockInt(7, block=24), BlockFloat8("e4m3"), Rotated(BlockInt(4, block=1024)), Rotated(BlockInt(8))),
    *(BlockInt(bits) for bits in (2, 3, 4, 5, 7, 8)),
    *(BlockInt(4, block=24), BlockInt(8, block=1024), BlockFloat8("e5m2")),
    *(Rotated(BlockInt(8, block=768)), Rotated(BlockInt(3, block=512)), Rotated(BlockInt(2, block=4096))),
]
SUMMED: list[Codec] = [  # scales are sums, whose last bit depends on the order of addition
    *(Sign(), Rotated(Gaussian(4)), Sign(8), Gaussian(1), Gaussian(2), Gaussian(7), Gaussian(4, block=64)),
    *(Rotated(Sign(2048)), Rotated(Gaussian(1, 512)), Rotated(Gaussian(3))),
]
STOCHASTIC: list[Codec] = [BlockInt(4, 64, rounding="stochastic")] if KIND == "cpu" else []  # GPUs draw other numbers
CODECS = [*by_turns(EXACT, 4), *by_turns(SUMMED, 2), *by_turns(STOCHASTIC)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, *([torch.float64] if KIND == "cpu" else [])]
FED: list[Fed] = [(torch.float32, False), (torch.bfloat16, True), (None, True), (torch.bfloat16, False)]


def numels(codec: Codec) -> list[int]:
    """The last: more than one program, blocks of all kinds, and a short one at the end."""
    block = codec.block
    many = max(16 if block <= 256 else 2, 2060 // block) * block + min(block - 1, 255)
    return [many, 1, block - 1, 0, block, block + 1]


def cases(codec: Codec) -> Iterator[tuple[int, torch.dtype, Fed, int, int]]:
    """Values, their dtype, feedback, how many messages arrived, and where in the bucket: all pairs."""
    # the noise of one period ends within the second
    places = [0, 2**20 - 2 * codec.block if codec in STOCHASTIC else 5 * codec.block]
    for numel, dtype, fed, count, place in all_pairs(numels(codec), DTYPES, FED, [1, 0, 3], places):
        if KIND == "cuda" and dtype != torch.float32 and count:
            continue  # a GPU rounds each sum to 16 bits: see test_kernels_cuda.py
        yield numel, dtype, fed, count, place


@pytest.mark.parametrize("codec", CODECS)
def test_a_hop_is_what_torch_makes_of_it(codec: Codec) -> None:
    for case in cases(codec):
        numel, dtype, (residual, _), *_ = case
        wire, lost = hop(KIND, codec, *case)
        wire_, lost_ = hop(IN_TORCH, codec, *case)
        blocks = -(-numel // codec.block)
        scales, scales_ = (each[: 2 * blocks].view(torch.bfloat16) for each in (wire, wire_))
        dead = scales_.isnan()
        assert torch.equal(scales.isnan(), dead), case
        assert scales[dead].view(torch.int16).eq(0x7FC0).all(), case
        dead = dead.repeat_interleave(codec.block)[:numel]
        assert lost.isfinite().all() or dtype == torch.float16, case
        if codec not in SUMMED:
            assert torch.equal(wire, wire_), case
        else:
            steps = (scales.view(torch.int16).int() - scales_.view(torch.int16).int()).abs()
            assert steps.le(1).all(), case  # one unit of the last place
            # codes of the edge of two levels
            assert numel < 1000 or (wire != wire_)[2 * blocks :].float().mean() < 0.01, case
        if isinstance(codec, Rotated):  # turned there and back, what stays is rounded as the largest of its 256
            before = torch.full((numel,), 3.0) if residual is None else residual_of(numel, residual).float()
            assert (lost[dead].float() - before[dead]).abs().le(0.01 * before.abs().max() if numel else 0).all(), case
            lost, lost_ = lost[~dead], lost_[~dead]
        if codec not in SUMMED:
            bound = 0.0 if residual == dtype or residual is None else torch.finfo(residual).eps
            assert (lost.double() - lost_.double()).abs().le(bound * lost_.double().abs()).all(), case
        elif len(lost) >= 1000:
            near = (lost.double() - lost_.double()).abs() <= 1e-5 * lost_.abs().max() + 0.02 * lost_.double().abs()
            assert near.double().mean() > 0.95, case


@pytest.mark.parametrize("codec", CODECS)
def test_any_bytes_arrive_as_in_torch(codec: Codec) -> None:
    for numel, dtype, add in all_pairs(numels(codec), DTYPES, [False, True]):
        wire, there = random_message(codec, numel, numel), awkward(numel, codec.block, 2, dtype)
        found, expected = (delivered(kind, codec, wire, there, add=add) for kind in (KIND, IN_TORCH))
        if add and dtype != torch.float32 and isinstance(codec, Rotated):  # a sum is rounded once or twice
            assert torch.allclose(found, expected, rtol=4 * torch.finfo(dtype).eps, equal_nan=True)
        else:
            assert torch.equal(found.nan_to_num(0.5), expected.nan_to_num(0.5)), (numel, dtype, add)
            assert torch.equal(found.isnan(), expected.isnan())


def test_scales_are_rounded_to_the_nearest_halves_to_even() -> None:
    for quarter in range(8):  # of a unit of the last place of a bfloat16; these sums are exact
        given, wires = torch.tensor([1.0, -1.0] * 128) * (1 + quarter * 2.0**-9), []
        for kind, device in ((KIND, DEVICE), (IN_TORCH, CPU)):
            wires.append(torch.empty(Sign().nbytes(256, torch.float32), dtype=torch.uint8, device=device))
            with kernels_of(kind):
                Sign().encode(given.to(device), wires[-1])
        assert torch.equal(wires[0].cpu(), wires[1])


@pytest.mark.parametrize("inverse", [False, True])
def test_a_rotation_has_the_bits_of_torch(inverse: bool) -> None:
    for numel in (11 * 256 + 5, 256, 255) if INTERPRETED else (11 * 256 + 5, 257, 256, 255, 1, 0):
        for dtype in DTYPES:
            given = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(dtype)
            found, expected = Guarded(given, DEVICE), given.clone()
            for kind, each in ((KIND, found.tensor), (IN_TORCH, expected)):
                with kernels_of(kind):
                    rotate_.on(each.device)(each, signs(5), inverse=inverse)
            assert same(found.read(), expected), (numel, dtype)
            assert numel < 256 or not torch.equal(expected, given)
