"""The kernels of this device beside torch: the same bytes from the same values, and nothing else is read or written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
    on_cores,
    random_message,
    residual_of,
    same,
)
from kinds import bfloat16_rounds as bfloat16_rounds
from pairs import all_pairs
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ringstrategy.codecs import BlockFloat8, BlockInt, Cast, Codec, Gaussian, Rotated, Sign, TopK
from ringstrategy.codecs.rotated import signs
from ringstrategy.kernels import feedback, operations
from ringstrategy.kernels.operations import Operation

# numpy, of NaN and overflow, which are tested
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

EXACT: list[Codec] = [  # a format takes seconds to compile and is then kept on disk: other files use these
    *(BlockInt(7, block=24), BlockFloat8("e4m3"), Rotated(BlockInt(4, block=1024)), Rotated(BlockInt(8))),
    *(BlockInt(bits) for bits in (2, 3, 4, 5, 7, 8)),
    *(BlockInt(4, block=24), BlockInt(8, block=1024), BlockFloat8("e5m2"), BlockInt(4, block=8192)),
    *(Rotated(BlockInt(8, block=768)), Rotated(BlockInt(3, block=512)), Rotated(BlockInt(2, block=4096))),
]
SUMMED: list[Codec] = [  # scales are sums, whose last bit depends on the order of addition
    *(Sign(), Rotated(Gaussian(4)), Sign(8), Gaussian(1), Gaussian(2), Gaussian(7), Gaussian(4, block=64)),
    *(Rotated(Sign(2048)), Rotated(Gaussian(1, 512)), Rotated(Gaussian(3))),
]
STOCHASTIC: list[Codec] = [BlockInt(4, 64, rounding="stochastic")] if KIND == "cpu" else []  # GPUs draw other numbers
SPARSE = [(1, 1), (3, 7), (8, 256), (32, 256), (256, 256), (3, 300), (70, 1000), (5, 1 << 15)]
SCALELESS: list[Codec] = [*(TopK(k, block) for k, block in SPARSE), Cast("fp16"), Cast("bf16")] if KIND == "cpu" else []
CODECS = [*by_turns(EXACT, 4), *by_turns(SUMMED, 2), *by_turns(STOCHASTIC), *by_turns(SCALELESS)]
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
            continue  # a GPU rounds each sum to 16 bits
        yield numel, dtype, fed, count, place


@pytest.mark.parametrize("codec", CODECS)
def test_a_hop_is_what_torch_makes_of_it(codec: Codec) -> None:
    for case in cases(codec):
        numel, dtype, (residual, _), *_ = case
        wire, lost = hop(KIND, codec, *case)
        wire_, lost_ = hop(IN_TORCH, codec, *case)
        if codec in SCALELESS:
            assert same(wire, wire_), case
            assert same(lost, lost_), case
            continue
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
        if isinstance(codec, TopK):
            wire[1 : 2 * -(-numel // codec.block) * codec.k : 4] &= 0x3F  # else almost all blocks have a NaN
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


# Operations without a codec


class Call(NamedTuple):
    """Arguments of an operation: tensors on the CPU, some of which it writes to.

    Attributes:
        given: by place.
        how: by name.
        shift: values by which tensors lie beside multiples of 64 bytes.
        rtol: by how much what comes out may differ; 0: not by a bit.
        atol: the same.
    """

    given: tuple[Any, ...]
    how: dict[str, Any] | None = None
    shift: int = 0
    rtol: float = 0.0
    atol: float = 0.0


def rotations() -> Iterator[Call]:
    for numel in (11 * 256 + 5, 256, 255) if INTERPRETED else (11 * 256 + 5, 257, 256, 255, 1, 0):
        for dtype, inverse in all_pairs(DTYPES, [False, True]):
            given = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(dtype)
            yield Call((given, signs(5)), {"inverse": inverse})


def sums() -> Iterator[Call]:
    for numel, count, shift in all_pairs([5000, 0, 1, 3, 2047, 2048, 2049], [7, 1, 2], [1, 0]):
        own, *parts = (awkward(numel, 64, seed) for seed in range(1 + count))
        yield Call((own, parts), shift=shift)


def losses() -> Iterator[Call]:
    for dtype in (torch.float16, torch.bfloat16):
        codes = torch.arange(1 << 16).to(torch.int16).view(dtype)
        exact = codes.float().nan_to_num(nan=1.0, posinf=2.0, neginf=-2.0)
        for given in (exact, exact * 1.0003, torch.full((1 << 16,), torch.inf)):
            yield Call((given, codes, torch.full_like(given, 3.0)))


def mixings() -> Iterator[Call]:
    for numel, count, dtype in all_pairs([0, 1, 1023, 1025, 300_007], [3, 0, 1], DTYPES):
        own, *theirs = (awkward(numel, numel or 1, 16 * seed, dtype) for seed in range(4))
        out = torch.full((numel,), torch.nan, dtype=torch.promote_types(dtype, torch.float32))
        yield Call((own, theirs[:count], [0.3, 1 / 7, 0.21][:count], out))


def steps_with_momentum() -> Iterator[Call]:
    for numel, dtype in all_pairs([0, 1, 1023, 300_007], [torch.float32, torch.float64]):
        yield Call((*([awkward(numel, numel or 1, 16 * seed, dtype)] for seed in range(3)), 0.3, 0.7))


def columns() -> Iterator[Call]:
    for rank, length in ((1, 7), (2, 1024), (4, 2060)):
        given = awkward(4 * rank * length, 64).nan_to_num(0, 0, 0).clamp(-9, 9).view(4, rank, length)
        given[0] *= 1e30
        given[1, -1] = -2 * given[1, 0]  # with one column: itself
        given[2, 0] = 0
        given[3, -1, 3] = torch.nan
        yield Call((given,), rtol=1e-5, atol=1e-6)


def gradients(factors: list[float] | None = None) -> list[Tensor]:
    """Of all dtypes, with fewer and more values than are sampled, empty, channels last, with gaps, zero, not finite."""
    shapes = [(3,), (0,), (512,), (40, 50), (700,), (2, 5, 7, 11), (30, 40), (600,), (64, 64), (5,)]
    dtypes = [torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64] * 2
    made = [torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])) for shape in shapes]
    made = [each.to(dtype) for each, dtype in zip(made, dtypes, strict=True)]
    made[5] = made[5].contiguous(memory_format=torch.channels_last)
    made[6] = torch.cat([made[6], made[6]], 1)[:, 3:43]
    made[7].zero_()
    made[8][:, 7] = torch.nan
    made[9][1] = -torch.inf
    return made if factors is None else [each * factor for each, factor in zip(made, factors, strict=True)]


def without(missing: tuple[int, ...], given: list[Tensor]) -> list[Tensor | None]:
    return [None if place in missing else each for place, each in enumerate(given)]


MISSING: list[tuple[int, ...]] = [(), (3,), (0, 9), tuple(range(10))]


def samples() -> Iterator[Call]:
    for missing in MISSING[:-1]:
        yield Call((without(missing, gradients()),))


def parts_stepped() -> Iterator[Call]:
    then = feedback.sample(gradients())
    now = gradients([1.0, 1.0, 0.0, 0.3, 0.3, 2.0, -1.0, 1.0, 1.0, 0.5])
    late = torch.tensor([0, 1, 1, 0, 1, 1.5, 1, 1, 1, 1], dtype=torch.float64)
    for missing, scale, stepped in all_pairs(MISSING, [1024.0, None], [True, torch.tensor(True), torch.tensor(False)]):
        factor = None if scale is None else torch.tensor(scale)
        yield Call((then, without(missing, now), late * (scale or 1), factor, stepped), rtol=1e-12)
    yield Call((then, now, None, None, True), rtol=1e-12)


def residuals_gone() -> Iterator[Call]:
    counts = [1, 0, 700, 4096, 2048 - 701, 5000, 3, 2049, 0, 17]
    edges = [sum(counts[:place]) for place in range(len(counts) + 1)]
    parts = torch.tensor([0.0, 1.0, 0.25, 1.0, 0.0, 0.75, 1.0, 0.5, 0.0, 2**-30], dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        generator = torch.Generator().manual_seed(2)
        before, now = (torch.randn(edges[-1] + 100, generator=generator).to(dtype) for _ in range(2))
        yield Call((now, before, edges, parts), atol=20 * torch.finfo(dtype).eps)


CALLS: dict[Operation[..., Any], Callable[[], Iterator[Call]]] = {
    operations.rotate_: rotations,
    operations.add_: sums,
    operations.lose: losses,
    operations.mix: mixings,
    operations.nesterov_: steps_with_momentum,
    operations.orthonormalise_: columns,
    operations.sample: samples,
    operations.stepped_parts: parts_stepped,
    operations.go_: residuals_gone,
}


def outcome(kind: str, operation: Operation[..., Any], call: Call) -> list[Tensor]:
    """All tensors after the call, and what it returns."""
    device, guards = DEVICE if kind == KIND else CPU, list[Guarded]()

    def put(tensor: Tensor) -> Tensor:
        guards.append(Guarded(tensor, device, call.shift))
        return guards[-1].tensor

    given = tree_map_only(Tensor, put, call.given)
    with kernels_of(kind):
        made = operation.on(device)(*given, **(call.how or {}))
    return [*(guard.read() for guard in guards), *([made.cpu()] if isinstance(made, Tensor) else [])]


@pytest.mark.parametrize("cores", [1, 3] if KIND == "cpu" else [1])
@pytest.mark.parametrize(
    "operation", [pytest.param(each, id=made.__name__) for each, made in CALLS.items() if KIND in each._kernels]
)
def test_an_operation_is_what_torch_makes_of_it(operation: Operation[..., Any], cores: int) -> None:
    for call in CALLS[operation]():
        with on_cores(cores):
            found, expected = (outcome(kind, operation, call) for kind in (KIND, IN_TORCH))
        for one, other in zip(found, expected, strict=True):
            if call.rtol or call.atol:
                torch.testing.assert_close(one, other, rtol=call.rtol, atol=call.atol, equal_nan=True)
            else:
                assert same(one, other), call
