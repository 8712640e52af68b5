"""The Triton kernels against the torch codecs: natively on a GPU, else through Triton's interpreter."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import ringstrategy.kernels.triton
import torch
import torch.distributed as dist
from fakes import on_all_ranks
from torch.multiprocessing.reductions import StorageWeakRef

from benchmarks.shared_gpu import TWO_HOSTS
from ringstrategy import AllReduce, BySize, Direct, Hierarchical, Ring, Stats
from ringstrategy.buckets.dense import DenseBucket
from ringstrategy.codecs import BlockFloat8, BlockInt, Gaussian, Rotated, Sign
from ringstrategy.codecs.rotated import signs
from ringstrategy.kernels import feedback, reference
from ringstrategy.kernels.reference import flips
from ringstrategy.transport import connect
from ringstrategy.transport.nccl import NcclPeers
from ringstrategy.transport.staged import StagedPeers

pytest.importorskip("triton", reason="triton is only for Linux")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    # lightning has imported triton by now, so it is too late to set it
    pytest.skip("needs a GPU or TRITON_INTERPRET=1: see test_kernels_interpreted.py", allow_module_level=True)

from ringstrategy.kernels.triton import feedback as on_gpus
from ringstrategy.kernels.triton import formats
from ringstrategy.kernels.triton.add import add_
from ringstrategy.kernels.triton.buckets import Places, Source, pack, unpack
from ringstrategy.kernels.triton.decode import decode, decode_parts
from ringstrategy.kernels.triton.encode import encode, encode_parts
from ringstrategy.kernels.triton.rotate import rotate_

from ringstrategy.collectives.base import Summand, cut
from ringstrategy.kernels.engine import engine
from ringstrategy.kernels.layout import Part
from ringstrategy.kernels.orthonormal import orthonormalise_

EXACT = [
    BlockInt(8),
    BlockInt(7, block=24),
    BlockInt(6, block=64),
    BlockInt(5, block=8),
    BlockInt(4),
    BlockInt(3, block=1024),
    BlockInt(2),
    BlockFloat8("e4m3"),
    BlockFloat8("e5m2"),
]
SUMMED = [Sign(), Sign(block=40), Gaussian(1), Gaussian(2), Gaussian(4, block=64), Gaussian(7)]
ALL = EXACT + SUMMED
SOME = [BlockInt(4), BlockInt(7, block=24), BlockInt(8), BlockFloat8("e4m3"), Sign(), Gaussian(3)]
STOCHASTIC = [BlockInt(4, rounding="stochastic"), BlockInt(3, 64, "stochastic")]
HALVES = [torch.float16, torch.bfloat16]
# in the interpreter one dtype a codec, by turns
DTYPED = [
    (codec, dtype)
    for i, codec in enumerate(SOME)
    for k, dtype in enumerate([torch.float32, *HALVES])
    if DEVICE.type == "cuda" or k == i % 3
]

# numpy, of NaN and overflow, which are tested
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


@pytest.fixture(autouse=True)
def bfloat16_rounds(monkeypatch):
    """Triton's interpreter cuts float32 to bfloat16, where devices round to nearest even."""
    if DEVICE.type == "cuda":
        return
    from triton.runtime import interpreter

    def convert(data, source, target, mode):
        if target.primitive_bitwidth == 16:
            return torch.from_numpy(np.array(data, np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return np.array(data, np.uint16).astype(np.uint32) << 16

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def sizes(block):
    # the last: more than one program, and a short block at the end
    return (0, 1, block - 1, block, block + 1, 3 * block + 5, max(2, 2060 // block) * block + 3)


def heavy_tailed(numel, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator).exp()
    return values.to(dtype).to(DEVICE)


def awkward(block, dtype=torch.float32):
    """A block of each kind that needs thought, plain ones between, and a short one."""
    tiny = torch.finfo(dtype).smallest_normal
    huge = torch.finfo(dtype).max / 2
    rows = heavy_tailed(14 * block, dtype=torch.float32).view(14, block) + 0.1
    rows[1] = 0
    rows[2] = -0.0
    rows[3] = 3.25
    rows[4] = -7e-3
    rows[5] *= tiny / 8
    rows[6] *= 0
    rows[6, block // 2] = tiny / 4
    rows[7, 3] = float("nan")
    rows[8, block - 1] = float("inf")
    rows[9, 0] = -float("inf")
    rows[10] = rows[10].sign() * huge
    rows[11, ::2] = 0
    rows[12] = rows[12].abs() * (huge / 64 if dtype == torch.float16 else 1e30)
    values = torch.cat([rows.view(-1), torch.tensor([2.5, float("nan"), 1.0], device=DEVICE)])
    return values.to(dtype)


def message(codec, numel, dtype=torch.float32, fill=0):
    return torch.full((codec.nbytes(numel, dtype),), fill, dtype=torch.uint8, device=DEVICE)


def random_message(codec, numel, seed):
    generator = torch.Generator().manual_seed(seed)
    nbytes = codec.nbytes(numel, torch.float32)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator).to(DEVICE)


def by_codec(codec, values, seed=0):
    """Bytes, loss and decoded values of the torch codec on the CPU."""
    values = values.cpu()
    wire = torch.zeros(codec.nbytes(values.numel(), values.dtype), dtype=torch.uint8)
    lost, decoded = torch.full_like(values, 77.0), torch.empty_like(values)
    codec.encode(values, wire, lost=lost, seed=seed)
    codec.decode(wire, decoded)
    return wire, lost, decoded


def by_kernel(codec, values, **options):
    wire = message(codec, values.numel(), values.dtype)
    lost, decoded = torch.full_like(values, 77.0), torch.empty_like(values)
    fmt = formats.of(codec.arithmetic)
    encode(values, (), wire, fmt, lost=lost, **options)
    decode(wire, decoded, fmt)
    return wire.cpu(), lost.cpu(), decoded.cpu()


def parts(codec, wire, numel):
    """Scales as float32, and the codes' bytes."""
    blocks = -(-numel // codec.block)
    return wire[: 2 * blocks].view(torch.bfloat16).float(), wire[2 * blocks :]


def broken(values, block):
    """For each value: does its block hold something that is not finite?"""
    padded = torch.zeros(-(-values.numel() // block) * block)
    padded[: values.numel()] = values.cpu().float()
    bad = ~padded.view(-1, block).isfinite().all(1)
    return bad.repeat_interleave(block)[: values.numel()]


def assert_same(ours, theirs):
    torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("codec", EXACT, ids=str)
def test_bytes_are_the_torch_codecs(codec):
    for values in [heavy_tailed(numel, seed=numel) for numel in sizes(codec.block)] + [awkward(codec.block)]:
        wire, lost, decoded = by_kernel(codec, values)
        wire_, lost_, decoded_ = by_codec(codec, values)
        scales, codes = parts(codec, wire, values.numel())
        scales_, codes_ = parts(codec, wire_, values.numel())
        assert_same(scales, scales_)
        assert_same(codes, codes_)
        assert_same(lost, lost_)
        assert_same(decoded, decoded_)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_parts_are_added_in_their_order(count, shift):
    for numel in (0, 1, 3, 2047, 2048, 2049, 5000):
        # from other places than multiples of 16 bytes too; sums of these depend on their order
        parts = [heavy_tailed(numel + shift, seed=seed)[shift:] * 10.0 ** (3 * seed % 8) for seed in range(count)]
        parts = [torch.cat([heavy_tailed(shift), part])[shift:] for part in parts]
        ours = torch.cat([heavy_tailed(shift), heavy_tailed(numel, seed=20)])[shift:]
        if numel > 2:
            ours[0], ours[1], parts[0][2] = torch.inf, torch.finfo(torch.float32).smallest_normal / 8, torch.nan
            parts[-1][1] = torch.finfo(torch.float32).smallest_normal / 4
        theirs = ours.clone()
        for part in parts:
            theirs.add_(part)
        add_(ours, parts)
        assert_same(ours, theirs)


@pytest.mark.parametrize("codec", SUMMED, ids=str)
def test_summed_scales_agree_to_rounding(codec):
    for values in [heavy_tailed(numel, seed=numel) for numel in sizes(codec.block)] + [awkward(codec.block)]:
        wire, _, decoded = by_kernel(codec, values)
        wire_, _, decoded_ = by_codec(codec, values)
        scales, scales_ = parts(codec, wire, values.numel())[0], parts(codec, wire_, values.numel())[0]
        torch.testing.assert_close(scales, scales_, rtol=2.0**-7, atol=0, equal_nan=True)  # one unit of the last place
        if values.numel() == 0:
            continue
        step = scales_.repeat_interleave(codec.block)[: values.numel()] * 2
        neighbour = (decoded - decoded_).abs() > step / 2
        assert not (codec.arithmetic.bits == 1 and neighbour.any()), "a sign needs no sum"
        assert neighbour.float().mean() < 0.01
        off = (decoded - decoded_).abs() - neighbour * step * (1 + 2.0**-7)
        assert (off.nan_to_num() <= decoded_.abs().nan_to_num() * 2.0**-7).all()
        assert torch.equal(decoded.isnan(), decoded_.isnan())


def test_scales_are_rounded_to_the_nearest_halves_to_even():
    for quarter in range(8):  # of a unit of the last place of a bfloat16; these sums are exact
        values = torch.tensor([1.0, -1.0] * 128, device=DEVICE) * (1 + quarter * 2.0**-9)
        assert_same(by_kernel(Sign(), values)[0], by_codec(Sign(), values)[0])


@pytest.mark.parametrize(("codec", "dtype"), DTYPED, ids=str)
def test_sent_and_lost_are_the_values(codec, dtype):
    values = awkward(codec.block, dtype)
    _, lost, decoded = by_kernel(codec, values)
    dead = broken(values, codec.block) | decoded.isnan()  # a sum or a range may overflow where no value does
    assert 0 < dead.float().mean() < 0.6
    assert decoded[dead].isnan().all()
    assert (lost[dead] == 77).all()
    values = values.cpu()
    gap = decoded.double() + lost.double() - values.double()
    larger = torch.maximum(values.double().abs(), decoded.double().abs())
    bound = torch.finfo(dtype).eps * (larger + torch.finfo(dtype).smallest_normal)
    assert (gap[~dead].abs() <= bound[~dead]).all()
    assert (lost[~dead] != 0).any()


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_any_bytes_decode_as_by_the_codec(codec):
    numel = 5 * codec.block + 13
    wire = random_message(codec, numel, seed=1)
    out, expected = torch.empty(numel, device=DEVICE), torch.empty(numel)
    decode(wire, out, formats.of(codec.arithmetic))
    codec.decode(wire.cpu(), expected)
    assert_same(out, expected)


@pytest.mark.parametrize(("codec", "dtype"), DTYPED, ids=str)
def test_decode_writes_and_adds(codec, dtype):
    values = heavy_tailed(2 * codec.block + 3, dtype=dtype)
    wire, _, _ = by_kernel(codec, values)
    decoded = torch.empty(values.numel())
    codec.decode(wire, decoded)
    fmt, wire = formats.of(codec.arithmetic), wire.to(DEVICE)
    out = values.clone()
    decode(wire, out, fmt, add=True)
    assert_same(out, (values.cpu().float() + decoded).to(dtype))
    decode(wire, out, fmt)
    assert_same(out, decoded.to(dtype))


@pytest.mark.parametrize(("codec", "dtype"), DTYPED, ids=str)
def test_a_reduce_adds_in_order(codec, dtype):
    fmt = formats.of(codec.arithmetic)
    numel = 2 * codec.block + 3
    values = heavy_tailed(numel, 1, dtype)
    wires = [by_kernel(codec, heavy_tailed(numel, seed) * 10.0 ** (seed - 3))[0].to(DEVICE) for seed in range(2, 5)]
    wires.append(random_message(codec, numel, seed=3))
    wire, lost, before = message(codec, numel), torch.full_like(values, 77.0), values.clone()
    encode(values, wires, wire, fmt, lost=lost)
    assert_same(values, before)
    for payload in wires:
        decode(payload, values, fmt, add=True)
    wire_, lost_, _ = by_kernel(codec, values)
    assert_same(wire, wire_)
    assert_same(lost, lost_)


@pytest.mark.parametrize("codec", STOCHASTIC, ids=str)
def test_stochastic_rounding(codec):
    values = heavy_tailed(3 * codec.block + 3)
    fmt, numel = formats.of(codec.arithmetic), values.numel()
    wire, lost, _ = by_kernel(codec, values, seed=2**61 + 5)
    assert_same(by_kernel(codec, values, seed=2**61 + 5)[0], wire)
    assert not torch.equal(by_kernel(codec, values, seed=2**61 + 6)[0], wire)
    assert not torch.equal(by_kernel(codec, values, seed=5)[0], wire), "all 64 bits of the seed count"
    # cut into segments, each with its place in the bucket
    segments, cut = [], 2 * codec.block
    for begin, end in ((0, cut), (cut, numel)):
        segment = message(codec, end - begin)
        encode(values[begin:end].clone(), (), segment, fmt, seed=2**61 + 5, offset=begin)
        decoded = torch.empty(end - begin, device=DEVICE)
        decode(segment, decoded, fmt)
        segments.append(decoded)
    assert_same(values.cpu() - torch.cat(segments).cpu(), lost)

    scales = parts(codec, wire, numel)[0].repeat_interleave(codec.block)[:numel]
    errors = torch.empty(16, numel)
    for seed, row in enumerate(errors):
        lost = torch.empty_like(values)
        encode(values, (), wire.to(DEVICE), fmt, lost=lost, seed=seed)
        row.copy_(lost.cpu() / scales)
    assert errors.abs().max() < 1 + 1e-5
    assert errors.abs().max() > 0.9, "nearest rounding would stay below 1/2"
    assert errors.mean(0).abs().max() < 5 * 0.5 / 16**0.5
    assert abs(errors.mean().item()) < 5 * 0.5 / errors.numel() ** 0.5
    # neighbours' noise is their own
    a, b = errors[:, :-1].flatten(), errors[:, 1:].flatten()
    assert abs((a * b).mean().item()) < 5 * 0.25 / a.numel() ** 0.5


def test_a_block_too_large_is_refused_with_words():
    with pytest.raises(ValueError, match="choose such a block"):
        formats.of(BlockInt(8, block=8200).arithmetic)


def test_the_largest_block():
    codec = BlockInt(4, block=formats.LARGEST_BLOCK)
    values = heavy_tailed(codec.block + 24)
    assert_same(by_kernel(codec, values)[0], by_codec(codec, values)[0])


def dense_hadamard():
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(8):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return matrix / 16


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("numel", [0, 1, 255, 256, 257, 11 * 256 + 5])
def test_a_rotation_is_a_dense_hadamard_matrix(numel, dtype):
    before, as_torch = heavy_tailed(numel, dtype=dtype), heavy_tailed(numel, dtype=dtype).cpu()
    values, whole = before.clone(), numel // 256 * 256
    rotate_(values, signs(7))
    reference.rotate_(as_torch, signs(7))
    assert_same(values, as_torch)
    expected = before.cpu().double()
    expected[:whole] = ((expected[:whole].view(-1, 256) * flips(signs(7)) * 16) @ dense_hadamard()).view(-1)
    length = expected[:whole].view(-1, 256).norm(dim=1).repeat_interleave(256)
    eps = torch.finfo(dtype).eps
    assert ((values.cpu().double() - expected)[:whole].abs() <= eps * length).all()
    assert_same(values[whole:], before[whole:])
    rotate_(values, signs(7), inverse=True)
    reference.rotate_(as_torch, signs(7), inverse=True)
    assert_same(values, as_torch)
    assert ((values - before).cpu().double()[:whole].abs() <= 4 * eps * length).all()


ROTATABLE = [
    *(BlockInt(8), BlockInt(4, block=512), BlockInt(3, block=1024), BlockInt(2, block=formats.LARGEST_BLOCK)),
    *(Sign(), Sign(2048), Gaussian(4), Gaussian(3, block=512), Gaussian(1, block=4096)),
]
EACH = 1 if DEVICE.type == "cuda" else 2  # of cases of which the interpreter needs 5 seconds for one
PASSES = [(codec, None) for codec in SOME] + [(codec, signs(11)) for codec in ROTATABLE]


def one_by_one(codec, values, wires, residual, turn):
    """What `encode` does in one launch: by the torch reference where bytes are equal, else by several kernels."""
    x, lost = values.clone(), torch.full_like(values, 77.0)
    if residual is not None:
        x += residual.to(x.dtype)
    if isinstance(codec, BlockInt | BlockFloat8):
        x, lost, wire = x.cpu(), lost.cpu(), message(codec, len(x)).cpu()
        if turn is not None:
            reference.rotate_(x, turn)
        reference.encode(x, [arrived.cpu() for arrived in wires], wire, codec, lost=lost)
        left = lost.clone()
        if turn is not None:
            reference.rotate_(lost, turn, inverse=True)
    else:
        wire = message(codec, len(x))
        if turn is not None:
            rotate_(x, turn)
        encode(x, wires, wire, formats.of(codec.arithmetic), lost=lost)
        left = lost.clone()
        if turn is not None:
            rotate_(lost, turn, inverse=True)
    kept = left if residual is None else residual.to(left.device, left.dtype)
    return wire, torch.where(left == 77, kept, lost)


RESIDUALS = [(None, 1), (torch.float32, 0), (torch.float32, 3), (torch.bfloat16, 1), (torch.float16, 3)]
# in the interpreter one residual a codec, by turns: each meets codecs with and without a rotation
FED_BACK = [
    (*each, *residual)
    for i, each in enumerate(PASSES)
    for k, residual in enumerate(RESIDUALS)
    if DEVICE.type == "cuda" or k == i % len(RESIDUALS)
]


@pytest.mark.parametrize(
    ("codec", "turn", "residual", "count"),
    FED_BACK,
    ids=lambda each: str(each) if not isinstance(each, tuple) else "",
)
def test_residual_rotation_sum_and_what_is_lost_in_one_pass(codec, turn, residual, count):
    fmt = formats.of(codec.arithmetic)
    sizes = [codec.block, 2 * codec.block + min(codec.block - 1, 255)]
    cases = [heavy_tailed(numel, seed=numel) for numel in sizes]
    if codec.block <= 256:
        cases += [awkward(codec.block), heavy_tailed(codec.block - 1)]
    for values in cases:
        numel, before = len(values), values.clone()
        wires = [by_kernel(codec, heavy_tailed(numel, seed))[0].to(DEVICE) for seed in range(2, 2 + count)]
        rest = None if residual is None else heavy_tailed(numel, 9).to(residual)
        wire, lost = message(codec, numel, fill=9), torch.full_like(values, 77.0)
        encode(values, wires, wire, fmt, residual=rest, signs=turn, lost=lost)
        wire_, lost_ = one_by_one(codec, values, wires, rest, turn)
        assert_same(values, before)
        assert_same(wire, wire_)
        assert_same(lost, lost_)
        assert (lost != 77).all() if residual is not None else (lost != 77).any() or not values.isfinite().all()

        again = message(codec, numel)
        encode(values, wires, again, fmt, residual=rest, signs=turn)
        assert_same(again, wire_)
        if residual == torch.float32:  # what is lost may take its place
            encode(values, wires, again, fmt, residual=rest, signs=turn, lost=rest)
            assert_same(again, wire_)
            assert_same(rest, lost_)
        elif residual == torch.bfloat16:  # and is rounded once
            for narrow in (torch.full_like(rest, 77.0), rest):
                encode(values, wires, again, fmt, residual=rest, signs=turn, lost=narrow)
                assert_same(narrow, lost_.bfloat16())

        for add in (False, True):
            out, expected = values.clone(), torch.empty_like(values).cpu()
            decode(wire, out, fmt, signs=turn, add=add)
            reference.decode(wire.cpu(), expected, codec)
            if turn is not None:
                reference.rotate_(expected, turn, inverse=True)
            assert_same(out, expected + values.cpu() if add else expected)


@pytest.mark.parametrize(
    ("inner", "numel", "dtype", "fuses"),
    [
        (BlockInt(8), 5 * 256 + 17, torch.float32, True),
        (BlockInt(8, block=1024), 2 * 1024 + 255, torch.float32, True),
        (BlockInt(8, block=1024), 2 * 1024 + 600, torch.float32, False),  # of the short block 512 values are rotated
        (BlockInt(8, block=768), 3 * 768 + 17, torch.float32, False),
        (BlockInt(8), 5 * 256 + 17, torch.bfloat16, False),
    ],
    ids=str,
)
def test_a_hop_gives_the_bytes_of_the_cpu_whether_it_fuses_or_not(monkeypatch, inner, numel, dtype, fuses):
    codec, results, triton_engine = Rotated(inner), [], engine(torch.device("cuda"))
    for kernels in (True, False):
        device = DEVICE if kernels else torch.device("cpu")
        if kernels:
            monkeypatch.setattr("ringstrategy.codecs.blocked.engine", lambda device: triton_engine)
            monkeypatch.setattr("ringstrategy.codecs.rotated.engine", lambda device: triton_engine)
            assert inner.fuses(torch.empty(numel, dtype=dtype, device=DEVICE), rotated=True) == fuses
        else:
            monkeypatch.undo()
        values, rest = (heavy_tailed(numel, seed, dtype).to(device) for seed in (1, 2))
        arrived = [by_codec(inner, heavy_tailed(numel, seed))[0].to(device) for seed in (3, 4)]
        wire = torch.empty(codec.nbytes(numel, dtype), dtype=torch.uint8, device=device)
        codec.hop(arrived, values, wire, residual=rest, lost=rest, seed=6, own_seed=7)
        out = torch.ones(numel, dtype=dtype, device=device)
        codec.deliver(wire, out, seed=6, add=True)
        results.append((wire, rest, out))
    for one, other in zip(*results, strict=True):
        if dtype == torch.float32:
            assert_same(one, other)
        else:  # sums of 16 bits are rounded once or at each step; a code may then be its neighbour
            bound = 2 if one.dtype == torch.uint8 else 4 * torch.finfo(dtype).eps * heavy_tailed(numel, 1).abs().max()
            assert (one.cpu().float() - other.float()).abs().max() <= bound


def tensors_of_all_kinds():
    """Dozens of tensors, odd sizes and mixed dtypes, at aligned and odd addresses, some of them missing."""
    generator = torch.Generator().manual_seed(5)
    numels = [0, 1, 3, 5000, 7, 2048, 4096, 2049, 0, 17, 255, 256, 257, 6144, *range(1, 40, 3), 2500, 1]
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    tensors = []
    for i, numel in enumerate(numels):
        store = torch.randn(numel + 8, generator=generator).to(dtypes[(i // 3) % 3]).to(DEVICE)
        begin = 8 if i % 4 else 1  # on 16 bytes, or not
        tensors.append(store[begin : begin + numel] if begin + numel <= numel + 8 else store[:numel])
    tensors[4] = tensors[3].new_zeros(6, 2, 3, 5).to(memory_format=torch.channels_last)
    tensors[4].copy_(torch.randn(6, 2, 3, 5, generator=generator))
    return tensors


def in_memory_order(tensor):
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def test_pack_and_unpack():
    tensors = tensors_of_all_kinds()
    places = Places([tensor.numel() for tensor in tensors], [tensor.dtype for tensor in tensors], DEVICE)
    missing = {2, 7, len(tensors) - 1}
    given = [None if i in missing else tensor for i, tensor in enumerate(tensors)]
    flat = torch.full((places.numel,), 77.0, device=DEVICE)
    pack(places, given, flat, scale=1 / 3)

    columns = [
        torch.zeros(tensor.numel(), device=DEVICE) if i in missing else in_memory_order(tensor).float() * (1 / 3)
        for i, tensor in enumerate(tensors)
    ]
    expected = torch.cat(columns)
    assert_same(flat, expected)

    back = [None if i in missing else torch.full_like(tensor, 77.0) for i, tensor in enumerate(tensors)]
    unpack(places, flat, back)
    assert_same(flat, expected)
    for tensor, part in zip(back, expected.split(places.numels), strict=True):
        if tensor is not None:
            assert_same(in_memory_order(tensor), part.to(tensor.dtype))


def test_pack_reads_only_its_tensors():
    # NaN before and after each tensor, and in the bucket itself
    store = torch.full((3, 4000), float("nan"), device=DEVICE)
    tensors = [store[0, 4:2052], store[1, 3:1002], store[2, 8:3900]]
    for i, tensor in enumerate(tensors):
        tensor.fill_(i + 1.0)
    places = Places([2048, 999, 3892], [torch.float32] * 3, DEVICE)
    flat = torch.full((places.numel,), float("nan"), device=DEVICE)
    pack(places, tensors, flat)
    assert_same(flat, torch.cat(tensors))
    unpack(places, flat * 2, tensors)
    assert torch.nansum(store).item() == 2 * (2048 * 1 + 999 * 2 + 3892 * 3)
    assert store.isnan().sum().item() == store.numel() - places.numel


def gradients_of_all_kinds(case):
    """Parameters with gradients of one case: missing, frozen, a view of the bucket, strides that nobody planned."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(33, 65), (7,), (), (300, 300), (0,), (5, 4, 3, 3), (129,)]
    parameters = []
    for shape in shapes:
        value = torch.randn(shape, generator=generator).to(DEVICE, case["dtype"])
        parameter = torch.nn.Parameter(value.t() if case["kind"] == "transposed" and value.ndim == 2 else value)
        parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=generator))
        parameters.append(parameter)
    if case["kind"] == "missing":
        parameters[1].grad = parameters[-1].grad = None
    elif case["kind"] == "frozen":
        parameters[0].requires_grad_(False)
    elif case["kind"] == "strides":
        parameters[0].grad = parameters[0].grad.t().contiguous().t()
        parameters[5].grad = parameters[5].grad.to(memory_format=torch.channels_last)
    return [(f"p{i}", parameter) for i, parameter in enumerate(parameters)]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, torch.bfloat16) for kind in ("plain", "missing", "strides")]
    + [(kind, torch.float32) for kind in ("frozen", "strides", "transposed", "views")],
    ids=str,
)
def test_a_bucket_gathers_and_scatters_by_one_launch_what_it_copies_one_by_one(monkeypatch, kind, dtype):
    results = []
    for kernels in (True, False):
        packs, unpacks = Mock(wraps=pack), Mock(wraps=unpack)
        monkeypatch.setattr(ringstrategy.kernels.triton.buckets, "pack", packs)
        monkeypatch.setattr(ringstrategy.kernels.triton.buckets, "unpack", unpacks)
        members = gradients_of_all_kinds({"kind": kind, "dtype": dtype})
        bucket = DenseBucket(0, members, torch.float32, BlockInt(8), feedback=False)
        bucket._places = bucket._lay_out(engine(torch.device("cuda")), DEVICE) if kernels else None
        bucket.buffer.fill_(77.0)
        if kind == "views" and dtype == torch.float32:
            for slot in bucket.slots[::2]:
                slot.view.copy_(slot.parameter.grad)
                slot.parameter.grad = slot.view
        bucket.pack(3)
        bucket.fill()
        assert packs.call_count == kernels
        packs.reset_mock()  # it holds the gradients, and who is held does not move into the bucket
        bucket.take_gradients()
        views = [slot.holds_gradient() for slot in bucket.slots]
        packed = bucket.buffer.clone()
        bucket.unpack(lambda slot: slot.name != "p1")
        assert unpacks.call_count == (kernels and dtype != torch.float32)
        gradients = [slot.parameter.grad for slot in bucket.slots]
        results.append((packed, views, gradients))
    assert_same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    for one, other in zip(results[0][2], results[1][2], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_same(one, other)
    assert not results[0][0][sum(p.numel() for _, p in members) :].any()


@pytest.mark.parametrize(("rank", "length"), [(1, 7), (2, 1024), (4, 2060)])
def test_columns_become_orthonormal_as_in_torch(rank, length):
    columns = heavy_tailed(4 * rank * length).view(4, rank, length)
    columns[0] *= 1e30
    columns[1, -1] = -2 * columns[1, 0]  # with one column: itself
    columns[2, 0] = 0
    columns[3, -1, 3] = float("nan")
    expected = columns.cpu()
    columns, again = columns.clone(), columns[1:2].clone()
    engine(torch.device("cuda")).orthonormalise_(columns)
    engine(torch.device("cuda")).orthonormalise_(again)
    orthonormalise_(expected)
    torch.testing.assert_close(columns.cpu(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert_same(again, columns[1:2])  # a matrix's bits do not depend on the others beside it
    assert not columns[2, 0].any()
    assert columns[3, -1].isnan().all()


@pytest.mark.parametrize(
    ("codec", "turn", "residual"),
    [(*each, (None, torch.float32, torch.bfloat16)[i % 3]) for i, each in enumerate(PASSES)][::EACH],
    ids=lambda each: str(each) if not isinstance(each, tuple) else "",
)
def test_parts_of_scattered_tensors_are_encoded_as_one_by_one_in_a_bucket(codec, turn, residual):
    fmt, tensors = formats.of(codec.arithmetic), tensors_of_all_kinds()
    numels, missing = [tensor.numel() for tensor in tensors], {2, 7, len(tensors) - 1}
    padding = -sum(numels) % codec.block
    dtypes = [*(tensor.dtype for tensor in tensors), torch.float32]
    places = Places([*numels, padding], dtypes, DEVICE)
    given = [*(None if i in missing else tensor for i, tensor in enumerate(tensors)), None]
    given[3][77] = -0.0
    flat, nothing = (torch.full((places.numel,), float("nan"), device=DEVICE) for _ in range(2))
    pack(places, given, flat, scale=1 / 3)
    rest = None if residual is None else heavy_tailed(places.numel, 9).to(residual)
    source = Source.at(places, given, places.addresses(given), 1 / 3)

    edges = [(0, 0), *cut(0, places.numel, 3, codec.block)]
    expected, found, flat_found = (
        [Part(begin, end, message(codec, end - begin, fill=9)) for begin, end in edges] for _ in range(3)
    )
    lost, lost_, lost__ = (torch.full_like(flat, 77.0) for _ in range(3))
    for begin, end, wire in expected:
        part = None if rest is None else rest[begin:end]
        encode(flat[begin:end], (), wire, fmt, residual=part, signs=turn, lost=lost[begin:end], seed=5, offset=begin)
    encode_parts(flat, flat_found, (), fmt, residual=rest, signs=turn, lost=lost__, seed=5)
    encode_parts(nothing, found, (), fmt, source=source, residual=rest, signs=turn, lost=lost_, seed=5)
    for parts, loss in ((found, lost_), (flat_found, lost__)):
        assert_same(torch.cat([part.wire for part in parts]), torch.cat([part.wire for part in expected]))
        assert_same(loss.view(torch.int32), lost.view(torch.int32))  # also the sign of a zero
    out, out_ = torch.full_like(flat, 77.0), torch.full_like(flat, 77.0)
    for begin, end, wire in expected:
        decode(wire, out[begin:end], fmt, signs=turn)
    decode_parts(found, out_, fmt, signs=turn)
    assert_same(out_, out)

    begin, end, wire = expected[-1]  # the part whose sum is this rank's
    arrived = [by_kernel(codec, heavy_tailed(end - begin, seed))[0].to(DEVICE) for seed in (2, 3)]
    part, again = None if rest is None else rest[begin:end], message(codec, end - begin)
    for wires in (arrived[:1], arrived):
        lost, lost_ = (torch.full_like(flat, 77.0) for _ in range(2))
        how = {"signs": turn, "seed": 5}
        encode(flat[begin:end], wires, wire, fmt, residual=part, lost=lost[begin:end], offset=begin, **how)
        own = [Part(begin, end, again)]
        encode_parts(nothing, own, wires, fmt, source=source, residual=rest, lost=lost_, **how)
        assert_same(again, wire)
        assert_same(lost_, lost)
    assert nothing.isnan().all()


@pytest.mark.parametrize("codec", STOCHASTIC, ids=str)
def test_noise_is_that_of_the_place_in_the_bucket_for_parts_too(codec):
    """The last part ends with a short block."""
    values = heavy_tailed(9 * codec.block - 5)
    edges = cut(0, values.numel(), 3, codec.block)
    parts, fmt = [Part(begin, end, message(codec, end - begin)) for begin, end in edges], formats.of(codec.arithmetic)
    encode_parts(values, parts, (), fmt, seed=2**61 + 5)
    decoded = torch.empty_like(values)
    decode_parts(parts, decoded, fmt)
    for begin, end, wire in parts:
        again, one = message(codec, end - begin), torch.empty(end - begin, device=DEVICE)
        encode(values[begin:end], (), again, fmt, seed=2**61 + 5, offset=begin)
        assert_same(wire, again)
        decode(again, one, fmt)
        assert_same(decoded[begin:end], one)


def test_a_part_must_be_whole_blocks_with_a_message_of_its_size():
    values, fmt = torch.zeros(1000, device=DEVICE), formats.of(BlockInt(8).arithmetic)
    for begin, end, numel in ((8, 256, 248), (0, 300, 300), (0, 512, 256)):
        part = Part(begin, end, message(BlockInt(8), numel))
        with pytest.raises(AssertionError):
            encode_parts(values, [part], (), fmt)
        with pytest.raises(AssertionError):
            decode_parts([part], values, fmt)


class _Agreed:
    def wait(self):
        return


def exchange(rank, size, peers, collective, codec, residual_dtype, dtypes, gap, rider=False):
    """Two steps of a bucket: gradients, and what it keeps as residuals and as views."""
    generator = torch.Generator().manual_seed(rank)
    shapes = [(33, 65), (7,), (), (2048,), (0,), (5, 4, 3, 3), (130,)]
    members = []
    for i, shape in enumerate(shapes):
        members.append((f"p{i}", torch.nn.Parameter(torch.zeros(shape, dtype=dtypes[i % len(dtypes)], device=DEVICE))))
    bucket = DenseBucket(0, members, torch.float32, codec, residual_dtype is not None, residual_dtype)
    bucket._places = bucket._lay_out(engine(torch.device("cuda")), DEVICE)
    results, keepers = [], []
    for step in range(2):
        for i, (_, parameter) in enumerate(members):
            fresh = torch.randn(parameter.shape, generator=generator).to(parameter.dtype).to(DEVICE)
            if step == 1 and i % 2 == 0 and parameter.grad is not None:
                parameter.grad.add_(fresh)  # it may live in the bucket
            else:
                parameter.grad = fresh
        if gap == "unused here" and rank == 0:
            members[0][1].grad = members[6][1].grad = None
        elif gap == "unused everywhere":
            members[3][1].grad = None
        elif gap == "frozen":
            members[3][1].requires_grad_(step == 0)
        elif gap == "strides":
            members[0][1].grad = members[0][1].grad.t().contiguous().t()
        elif gap == "held" and step == 0:
            keepers = [members[0][1].grad, members[1][1].grad.view(-1)]
        bucket.pack(size)
        riders = ()
        if rider:
            values = torch.arange(300.0, device=DEVICE) * (rank + 1)
            riders = (Summand(values, codec, seed=9),)
        ticket = bucket.launch(peers, collective, _Agreed(), 77 + step, "in a test", riders=riders)
        bucket.take_gradients()
        ticket.wait()
        bucket.unpack(lambda slot: not (gap == "unused everywhere" and slot.name == "p3"))
        results += [None if p.grad is None else p.grad.clone() for _, p in members]
        kept = bucket.residuals.lost
        results += [None if kept is None else kept.clone(), *(r.values for r in riders)]
    return results, [slot.holds_gradient() for slot in bucket.slots], keepers


@pytest.fixture
def fake_gpus(monkeypatch):
    """Ranks in threads, which take turns, as the interpreter runs one kernel at a time. Counts what is gathered."""
    on_gpu, turn, gathered = engine(torch.device("cuda")), threading.Lock(), Mock()
    for module in ("codecs.blocked", "codecs.rotated"):
        monkeypatch.setattr(f"ringstrategy.{module}.engine", lambda device: on_gpu)

    def alone(launch, *args, **kwargs):
        with turn:
            if kwargs.get("source") is not None:
                gathered(len(args[1]))
            return launch(*args, **kwargs)

    for module, name in (
        ("encode", "encode"), ("encode", "encode_parts"), ("decode", "decode"), ("decode", "decode_parts"),
        ("buckets", "pack"), ("buckets", "unpack"), ("rotate", "rotate_"),
    ):  # fmt: skip
        kernels = getattr(ringstrategy.kernels.triton, module)
        monkeypatch.setattr(kernels, name, partial(alone, getattr(kernels, name)))
    return gathered


EXCHANGES = [
    # codec, residual, dtypes, gap, ranks, collective
    (BlockInt(8), None, [torch.float32], "none", 2, Direct()),
    (BlockInt(8), torch.float32, [torch.float32], "unused here", 3, Direct()),
    (BlockInt(7, block=24), torch.bfloat16, [torch.bfloat16], "held", 3, Direct()),
    (BlockInt(8), torch.float32, [torch.float32], "held", 3, BySize()),
    (BlockFloat8("e4m3"), None, [torch.float32, torch.bfloat16, torch.float16], "frozen", 3, Direct()),
    (Rotated(Gaussian(4)), torch.float32, [torch.float16, torch.float32], "unused here", 8, Direct()),
    (Rotated(BlockInt(4, block=512)), torch.bfloat16, [torch.bfloat16], "unused everywhere", 3, Ring()),
    (BlockInt(4, rounding="stochastic"), torch.float32, [torch.bfloat16], "none", 2, Hierarchical()),
    (BlockInt(5), None, [torch.bfloat16], "unused everywhere", 2, Direct()),
    (Sign(), torch.float32, [torch.float32, torch.bfloat16], "none", 2, Direct()),
]


@pytest.mark.parametrize("case", EXCHANGES[::EACH], ids=lambda case: " ".join(map(str, case)))
def test_an_exchange_that_reads_gradients_where_they_lie_has_the_bits_of_one_that_copies(monkeypatch, fake_gpus, case):
    codec, residual, dtypes, gap, size, collective = case

    def one(peers):
        peers.queues = True
        return exchange(peers.rank, size, peers, collective, codec, residual, dtypes, gap, rider=gap == "none")

    if isinstance(collective, Hierarchical):  # with a host each it is what goes between hosts
        gathering = on_all_ranks(size, one)
    else:
        gathering = on_all_ranks(size, one, ["a"] * size)
    parts = {call.args[0] for call in fake_gpus.call_args_list}
    assert parts == ({1, size - 1} if not isinstance(collective, Ring) else {1})
    fake_gpus.reset_mock()
    monkeypatch.setattr(DenseBucket, "_may_read_in_place", lambda *_: False)
    monkeypatch.setattr(type(codec), "launches", lambda *_: None)
    copying = on_all_ranks(size, one)
    assert not fake_gpus.called
    for (found, views, keepers), (found_, views_, keepers_) in zip(gathering, copying, strict=True):
        assert views == views_
        for one_tensor, other in zip([*found, *keepers], [*found_, *keepers_], strict=True):
            assert (one_tensor is None) == (other is None)
            if one_tensor is not None:
                assert one_tensor.dtype == other.dtype
                assert_same(one_tensor, other)
    for i, first in enumerate(gathering[0][0]):  # and the ranks are one another's twins but for residuals
        for other in gathering[1:]:
            if first is not None and i % (len(gathering[0][0]) // 2) < 7 and gap != "unused here" and gap != "frozen":
                assert_same(first, other[0][i])


def test_what_nobody_planned_is_copied(fake_gpus):
    def one(peers, **options):
        peers.queues = options.get("queues", True)
        collective = options.get("collective", Direct())
        return exchange(peers.rank, 2, peers, collective, BlockInt(8), None, [torch.float32], options["gap"])[0]

    strides = on_all_ranks(2, lambda peers: one(peers, gap="strides"))
    posts = on_all_ranks(2, lambda peers: one(peers, gap="none", queues=False))
    hosts = on_all_ranks(2, lambda peers: one(peers, gap="none", collective=Hierarchical()), ["a", "a"])
    assert not fake_gpus.called
    whole = on_all_ranks(2, lambda peers: one(peers, gap="none"))
    assert fake_gpus.called
    for found in (strides, posts):
        for one_tensor, other in zip(found[0], whole[0], strict=True):
            assert one_tensor is other is None or torch.equal(one_tensor, other)
    assert hosts[0][0].isfinite().all()


@pytest.mark.parametrize("backlog", [0, 1, 2, 3])
def test_gradients_keep_their_memory_only_until_it_is_read_and_not_if_exchanges_queue_up(fake_gpus, backlog):
    def one(peers):
        queued = []
        peers.queues, peers.backlog = True, lambda: backlog
        peers.submit = lambda work, where: queued.append(work)
        parameter = torch.nn.Parameter(torch.zeros(3000, device=DEVICE))
        bucket = DenseBucket(0, [("p", parameter)], torch.float32, BlockInt(8), feedback=False)
        bucket._places = bucket._lay_out(engine(torch.device("cuda")), DEVICE)
        parameter.grad = torch.full_like(parameter, peers.rank + 1.0)
        memory = StorageWeakRef(parameter.grad.untyped_storage())
        bucket.pack(2)
        bucket.launch(peers, Direct(), _Agreed(), 1, "in a test")
        bucket.take_gradients()
        assert bucket.slots[0].holds_gradient()
        kept = not memory.expired()
        queued.pop()()
        dropped = memory.expired()
        bucket.unpack(lambda slot: True)
        assert bucket.slots[0].holds_gradient()
        return kept, dropped, parameter.grad.clone()

    for kept, dropped, mean in on_all_ranks(2, one):
        assert kept == (backlog < 2)
        assert dropped
        assert (mean - 1.5).abs().max() < 0.02
    assert fake_gpus.called == (backlog < 2)


def test_an_empty_bucket_launches_nothing():
    places = Places([0, 0], [torch.float32] * 2, DEVICE)
    empty = torch.empty(0, device=DEVICE)
    pack(places, [empty, None], empty)
    unpack(places, empty, [empty, None])


def test_a_tensor_with_gaps_is_refused():
    places = Places([4], [torch.float32], DEVICE)
    with pytest.raises(AssertionError, match="copy the tensor first"):
        pack(places, [torch.zeros(8, device=DEVICE)[::2]], torch.zeros(4, device=DEVICE))


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs 20 GB of GPU memory")
def test_more_values_than_32_bits_count():
    codec, numel = BlockInt(8), 2**31 + 300
    values = torch.zeros(numel, device=DEVICE)
    values[-300:] = heavy_tailed(300)
    wire = message(codec, numel)
    encode(values, (), wire, formats.of(codec.arithmetic), lost=values)
    decode(wire, values, formats.of(codec.arithmetic), add=True)
    assert not values[:-512].any()
    assert torch.allclose(values[-300:].cpu(), heavy_tailed(300).cpu(), rtol=0, atol=1e-6)


# NVIDIA does not support NCCL's ranks to share a GPU, so a failure of NCCL itself proves nothing.


@contextmanager
def _no_waits(applies):
    """An operation for which the host waits for the GPU is an error."""
    if applies:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if applies:
            torch.cuda.set_sync_debug_mode("default")


def _share(device, algorithm, backend):
    """Ten steps on data of this rank's own: averaged by `algorithm`, alone, and, as the twin, on the data of all."""
    device, minutes = torch.device(device), timedelta(minutes=2)  # all kernels are compiled meanwhile
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "nccl":
        os.environ.update(TWO_HOSTS, NCCL_SOCKET_IFNAME="lo", NCCL_HOSTID=f"host{os.environ['RANK']}")
    dist.init_process_group("gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl", timeout=minutes)
    rank, size, stats = dist.get_rank(), dist.get_world_size(), Stats()
    peers = connect(device, minutes, stats)
    assert isinstance(peers, StagedPeers if backend == "gloo" else NcclPeers) == (device.type == "cuda")

    def descend(sources, averaging=None):
        torch.manual_seed(0)
        # two buckets, the first of them in chunks of several segments
        module = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.Tanh(), torch.nn.Linear(4096, 128)).to(device)
        before = torch.cat([parameter.detach().cpu().view(-1) for parameter in module.parameters()])
        optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)
        if averaging is not None:
            averaging.setup(dict(module.named_parameters()), peers)
            launches = device.type == "cuda" and algorithm.codec.needs_kernels
            assert [bucket._places is not None for bucket in averaging._buckets] == [launches] * 2
        for step in range(10):
            generators = [torch.Generator().manual_seed(100 * step + source) for source in sources]
            x = torch.cat([torch.randn(16, 64, generator=g) + s for s, g in zip(sources, generators, strict=True)])
            x = x.to(device)
            optimizer.zero_grad()
            loss = (module(x) - x.repeat(1, 2).sin()).square().mean()
            with _no_waits(averaging is not None and backend == "nccl" and step > 0):
                if averaging is not None:
                    averaging.before_backward(loss)
                loss.backward()
                if averaging is not None:
                    averaging.after_backward()
            optimizer.step()
        if averaging is not None:
            averaging.close()
        return torch.cat([parameter.detach().cpu().view(-1) for parameter in module.parameters()]), before

    shared, before = descend([rank], algorithm)
    peers.close()
    everyone = [torch.empty_like(shared) for _ in range(size)]
    dist.all_gather(everyone, shared)
    assert all(torch.equal(other, shared) for other in everyone)
    alone, twin = descend([rank])[0], descend(range(size))[0]
    assert (alone - shared).abs().max() > (twin - shared).abs().max()
    return size, stats.bytes_sent, ((twin - shared).abs().max() / (twin - before).abs().max()).item()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "algorithm",
    [
        AllReduce(BlockInt(8)),
        AllReduce(Rotated(Gaussian(4)), Direct(), error_feedback=True),
        AllReduce(collective=Hierarchical()),
    ],
    ids=lambda algorithm: f"{algorithm.codec} {type(algorithm.collective).__name__}",
)
@pytest.mark.parametrize("backend", ["gloo", *(["nccl"] if DEVICE.type == "cuda" else [])])
def test_processes_that_share_one_gpu_stay_identical(ranks, algorithm, size, backend):
    for world, sent, error in ranks(size, _share, "cuda:0" if DEVICE.type == "cuda" else "cpu", algorithm, backend):
        assert world == size
        assert sent > 0
        assert 0 < error < (0.9 if isinstance(algorithm.codec, Rotated) else 0.15)  # 4 bits and 8


def some_gradients(seed):
    """Of all dtypes, with fewer and more values than are sampled, empty, channels last, with gaps, zero, not finite."""
    shapes = [(3,), (0,), (512,), (40, 50), (700,), (2, 5, 7, 11), (30, 40), (600,), (64, 64), (5,)]
    dtypes = [torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64] * 2
    gradients = [
        heavy_tailed(torch.Size(shape).numel(), seed + place, dtype).view(shape)
        for place, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    gradients[5] = gradients[5].contiguous(memory_format=torch.channels_last)
    gradients[6] = torch.cat([gradients[6], gradients[6]], 1)[:, 3:43]
    gradients[7].zero_()
    gradients[8][:, 7] = torch.nan
    gradients[9][1] = -torch.inf
    return gradients


def test_samples_are_the_references():
    gradients = some_gradients(3)
    assert_same(on_gpus.sample(gradients), feedback.sample([each.cpu() for each in gradients]))
    gradients[2] = gradients[8] = None
    sampled = on_gpus.sample(gradients)
    assert_same(sampled, feedback.sample([None if each is None else each.cpu() for each in gradients]))
    assert sampled.shape == (10, 512)
    assert sampled[3].count_nonzero() > 500


@pytest.mark.parametrize(
    ("looks", "scale", "stepped"),
    [
        (False, 1024.0, True),
        (False, None, torch.tensor(True)),
        (False, 1024.0, torch.tensor(False)),
        (True, None, True),
    ],
)
def test_parts_are_the_references(stepped, scale, looks):
    then = on_gpus.sample(some_gradients(3))
    factors = [1.0, 1.0, 0.0, 0.3, 0.3, 2.0, -1.0, 1.0, 1.0, 0.5]
    now = [each * factor for each, factor in zip(some_gradients(3), factors, strict=True)]
    late = torch.tensor([0, 1, 1, 0, 1, 1.5, 1, 1, 1, 1], dtype=torch.float64, device=DEVICE) * (scale or 1)
    for missing in ((), (3,), (0, 9), range(10)):
        asked = [None if place in missing else each for place, each in enumerate(now)]
        results = []
        for module, device in ((on_gpus, DEVICE), (feedback, torch.device("cpu"))):
            given = None if looks else late.to(device, copy=True)
            known = stepped.to(device) if isinstance(stepped, torch.Tensor) else stepped
            factor = None if scale is None or looks else torch.tensor(scale, device=device)
            parts = module.stepped_parts(
                then.to(device), [None if each is None else each.to(device) for each in asked], given, factor, known
            )
            results.append([parts.cpu(), torch.zeros(()) if given is None else given.cpu()])
        (parts, kept), (parts_, kept_) = results
        assert torch.allclose(parts, parts_, rtol=1e-12, atol=0)
        assert torch.allclose(kept, kept_, rtol=1e-12, atol=0)
        assert (parts[list(missing)] == 1).all()
        if stepped is True and not missing:
            assert parts[[0, 2, 6]].tolist() == [1.0, 0.0, 0.0]
            assert parts[[1, 7]].unique().numel() == 1, "what was zero follows the others"
            assert looks or parts[5] == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_residuals_go_so_far(dtype):
    numels = [1, 0, 700, 4096, 2048 - 701, 5000, 3, 2049, 0, 17]
    edges = [sum(numels[:place]) for place in range(len(numels) + 1)]
    parts = torch.tensor([0.0, 1.0, 0.25, 1.0, 0.0, 0.75, 1.0, 0.5, 0.0, 2**-30], dtype=torch.float64)
    padding = 100
    before, now = (heavy_tailed(edges[-1] + padding, seed, dtype) for seed in (1, 2))
    went, expected = now.clone(), now.cpu().clone()
    on_gpus.go_(went, before, edges, parts.to(DEVICE))
    feedback.go_(expected, before.cpu(), edges, parts)
    for place, part in enumerate(parts.tolist()):
        mine = slice(edges[place], edges[place + 1])
        if part in (0.0, 1.0):
            assert_same(went[mine], (now if part else before)[mine])
        rounding = torch.finfo(dtype).eps * 2 * (before.abs().max() + now.abs().max()).item()
        assert numels[place] == 0 or (went[mine].cpu() - expected[mine]).abs().max() <= rounding
    assert_same(went[edges[-1] :], now[edges[-1] :])
    assert not torch.equal(went, now)
