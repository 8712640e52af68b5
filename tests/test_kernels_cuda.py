"""What only the Triton kernels do, natively on a GPU, else in Triton's interpreter: see also test_kernels.py."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from fakes import on_all_ranks
from kinds import DEVICE, INTERPRETED, KIND, by_turns, hop, kernels_of
from kinds import bfloat16_rounds as bfloat16_rounds
from torch.multiprocessing.reductions import StorageWeakRef

from benchmarks.shared_gpu import TWO_HOSTS
from ringstrategy import AllReduce, BySize, Direct, Hierarchical, Ring, Stats
from ringstrategy.buckets.dense import DenseBucket
from ringstrategy.codecs import BlockFloat8, BlockInt, Gaussian, Rotated, Sign
from ringstrategy.codecs.rotated import signs
from ringstrategy.collectives.base import Summand, cut
from ringstrategy.kernels import feedback, operations
from ringstrategy.kernels.layout import Part
from ringstrategy.kernels.reference import orthonormalise_
from ringstrategy.transport import connect
from ringstrategy.transport.nccl import NcclPeers
from ringstrategy.transport.staged import StagedPeers

pytest.importorskip("triton", reason="triton is only for Linux")
if KIND != "cuda":  # lightning has imported triton by now, so it is too late to set it
    pytest.skip("needs a GPU or TRITON_INTERPRET=1: see test_kernels_interpreted.py", allow_module_level=True)

import ringstrategy.kernels.triton.launches as triton_launches
from ringstrategy.kernels.triton import feedback as on_gpus
from ringstrategy.kernels.triton import formats
from ringstrategy.kernels.triton.add import add_
from ringstrategy.kernels.triton.buckets import Places
from ringstrategy.kernels.triton.decode import decode, decode_parts
from ringstrategy.kernels.triton.encode import encode, encode_parts
from ringstrategy.kernels.triton.orthonormal import orthonormalise_ as orthonormalise_on_gpu

at_night = pytest.mark.nightly if INTERPRETED else lambda test: test
STOCHASTIC = [BlockInt(4, rounding="stochastic"), BlockInt(3, 64, "stochastic")]

# numpy, of NaN and overflow, which are tested
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


def heavy_tailed(numel, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator).exp()
    return values.to(dtype).to(DEVICE)


def message(codec, numel, dtype=torch.float32, fill=0):
    return torch.full((codec.nbytes(numel, dtype),), fill, dtype=torch.uint8, device=DEVICE)


def by_kernel(codec, values, **options):
    """The message, and what was lost."""
    wire, lost = message(codec, values.numel()), torch.full_like(values, 77.0)
    encode(values, (), wire, codec, lost=lost, **options)
    return wire, lost


def assert_same(ours, theirs):
    torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=0, atol=0, equal_nan=True)


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


@pytest.mark.parametrize("codec", STOCHASTIC, ids=str)
def test_stochastic_rounding(codec):
    values = heavy_tailed(3 * codec.block + 3)
    numel, seed = values.numel(), 2**61 + 5
    wire, _ = by_kernel(codec, values, seed=seed)
    assert_same(by_kernel(codec, values, seed=seed)[0], wire)
    assert not torch.equal(by_kernel(codec, values, seed=seed + 1)[0], wire)
    assert not torch.equal(by_kernel(codec, values, seed=5)[0], wire), "all 64 bits of the seed count"

    scales = wire[: 2 * -(-numel // codec.block)].view(torch.bfloat16).float().cpu()
    errors = torch.stack([by_kernel(codec, values, seed=seed)[1].cpu() for seed in range(16)])
    errors /= scales.repeat_interleave(codec.block)[:numel]
    assert errors.abs().max() < 1 + 1e-5
    assert errors.abs().max() > 0.9, "nearest rounding would stay below 1/2"
    assert errors.mean(0).abs().max() < 5 * 0.5 / 16**0.5
    assert abs(errors.mean().item()) < 5 * 0.5 / errors.numel() ** 0.5
    a, b = errors[:, :-1].flatten(), errors[:, 1:].flatten()
    assert abs((a * b).mean().item()) < 5 * 0.25 / a.numel() ** 0.5, "neighbours' noise is their own"


def test_a_block_too_large_is_refused_with_words():
    with pytest.raises(ValueError, match="choose such a block"):
        formats.of(BlockInt(8, block=8200).arithmetic)


def test_the_largest_block():
    codec = BlockInt(4, block=formats.LARGEST_BLOCK)
    case = codec.block + 24, torch.float32, (torch.float32, False), 1, 0
    for found, expected in zip(hop("cuda", codec, *case), hop("torch", codec, *case), strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_of_16_bits_are_rounded_at_each_step(dtype):
    """So a code may be the neighbour of the one that a CPU finds, where sums are float32."""
    codec, values = BlockInt(8), heavy_tailed(5 * 256 + 17, 1, dtype)
    wires = [by_kernel(codec, heavy_tailed(values.numel(), seed) * 10.0 ** (seed - 3))[0] for seed in range(2, 5)]
    wire, lost, before = message(codec, values.numel()), torch.full_like(values, 77.0), values.clone()
    encode(values, wires, wire, codec, lost=lost)
    assert_same(values, before)
    for payload in wires:
        decode(payload, values, codec, add=True)
    for found, expected in zip((wire, lost), by_kernel(codec, values), strict=True):
        assert_same(found, expected)


PASSES = [
    (BlockFloat8("e4m3"), None, torch.bfloat16),
    (BlockInt(4, block=512), signs(11), torch.float32),
    (BlockInt(7, block=24), None, torch.float32),
    (Gaussian(4), signs(11), None),
    (Gaussian(1, block=4096), signs(11), torch.bfloat16),
    (Sign(2048), signs(11), torch.float32),
    (BlockInt(2, block=formats.LARGEST_BLOCK), signs(11), None),
    (BlockInt(8), None, torch.float16),
]


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
    places.pack(given, flat, scale=1 / 3)

    columns = [
        torch.zeros(tensor.numel(), device=DEVICE) if i in missing else in_memory_order(tensor).float() * (1 / 3)
        for i, tensor in enumerate(tensors)
    ]
    expected = torch.cat(columns)
    assert_same(flat, expected)

    back = [None if i in missing else torch.full_like(tensor, 77.0) for i, tensor in enumerate(tensors)]
    places.unpack(flat, back)
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
    places.pack(tensors, flat)
    assert_same(flat, torch.cat(tensors))
    places.unpack(flat * 2, tensors)
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
        members = gradients_of_all_kinds({"kind": kind, "dtype": dtype})
        with kernels_of("cuda" if kernels else "torch"):
            bucket = DenseBucket(0, members, torch.float32, BlockInt(8), feedback=False)
        packs, unpacks = Mock(), Mock()
        if kernels:
            packs, unpacks = Mock(wraps=bucket._places.pack), Mock(wraps=bucket._places.unpack)
            monkeypatch.setattr(bucket._places, "pack", packs)
            monkeypatch.setattr(bucket._places, "unpack", unpacks)
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
    orthonormalise_on_gpu(columns)
    orthonormalise_on_gpu(again)
    orthonormalise_(expected)
    torch.testing.assert_close(columns.cpu(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert_same(again, columns[1:2])  # a matrix's bits do not depend on the others beside it
    assert not columns[2, 0].any()
    assert columns[3, -1].isnan().all()


@pytest.mark.parametrize("case", by_turns(PASSES))
def test_parts_of_scattered_tensors_are_encoded_as_one_by_one_in_a_bucket(case):
    (codec, turn, residual), tensors = case, tensors_of_all_kinds()
    how = {"form": codec, "signs": turn}
    numels, missing = [tensor.numel() for tensor in tensors], {2, 7, len(tensors) - 1}
    padding = -sum(numels) % codec.block
    dtypes = [*(tensor.dtype for tensor in tensors), torch.float32]
    places = Places([*numels, padding], dtypes, DEVICE)
    given = [*(None if i in missing else tensor for i, tensor in enumerate(tensors)), None]
    given[3][77] = -0.0
    flat, nothing = (torch.full((places.numel,), float("nan"), device=DEVICE) for _ in range(2))
    places.pack(given, flat, scale=1 / 3)
    rest = None if residual is None else heavy_tailed(places.numel, 9).to(residual)
    source = places.source(given, places.addresses(given), 1 / 3)

    edges = [(0, 0), *cut(0, places.numel, 3, codec.block)]
    expected, found, flat_found = (
        [Part(begin, end, message(codec, end - begin, fill=9)) for begin, end in edges] for _ in range(3)
    )
    lost, lost_, lost__ = (torch.full_like(flat, 77.0) for _ in range(3))
    for begin, end, wire in expected:
        part = None if rest is None else rest[begin:end]
        encode(flat[begin:end], (), wire, residual=part, lost=lost[begin:end], seed=5, offset=begin, **how)
    encode_parts(flat, flat_found, residual=rest, lost=lost__, seed=5, **how)
    encode_parts(nothing, found, source=source, residual=rest, lost=lost_, seed=5, **how)
    for parts, loss in ((found, lost_), (flat_found, lost__)):
        assert_same(torch.cat([part.wire for part in parts]), torch.cat([part.wire for part in expected]))
        assert_same(loss.view(torch.int32), lost.view(torch.int32))  # also the sign of a zero
    out, out_ = torch.full_like(flat, 77.0), torch.full_like(flat, 77.0)
    for begin, end, wire in expected:
        decode(wire, out[begin:end], **how)
    decode_parts(found, out_, **how)
    assert_same(out_, out)

    begin, end, wire = expected[-1]  # the part whose sum is this rank's
    arrived = [by_kernel(codec, heavy_tailed(end - begin, seed))[0] for seed in (2, 3)]
    part, again = None if rest is None else rest[begin:end], message(codec, end - begin)
    for wires in (arrived[:1], arrived):
        lost, lost_ = (torch.full_like(flat, 77.0) for _ in range(2))
        encode(flat[begin:end], wires, wire, residual=part, lost=lost[begin:end], seed=5, offset=begin, **how)
        own = [Part(begin, end, again)]
        encode_parts(nothing, own, wires, source=source, residual=rest, lost=lost_, seed=5, **how)
        assert_same(again, wire)
        assert_same(lost_, lost)
    assert nothing.isnan().all()


@pytest.mark.parametrize("codec", STOCHASTIC, ids=str)
def test_noise_is_that_of_the_place_in_the_bucket_for_parts_too(codec):
    """The last part ends with a short block."""
    values = heavy_tailed(9 * codec.block - 5)
    edges = cut(0, values.numel(), 3, codec.block)
    parts = [Part(begin, end, message(codec, end - begin)) for begin, end in edges]
    encode_parts(values, parts, form=codec, seed=2**61 + 5)
    decoded = torch.empty_like(values)
    decode_parts(parts, decoded, form=codec)
    for begin, end, wire in parts:
        again, one = message(codec, end - begin), torch.empty(end - begin, device=DEVICE)
        encode(values[begin:end], (), again, codec, seed=2**61 + 5, offset=begin)
        assert_same(wire, again)
        decode(again, one, codec)
        assert_same(decoded[begin:end], one)


def test_a_part_must_be_whole_blocks_with_a_message_of_its_size():
    values = torch.zeros(1000, device=DEVICE)
    for begin, end, numel in ((8, 256, 248), (0, 300, 300), (0, 512, 256)):
        part = Part(begin, end, message(BlockInt(8), numel))
        with pytest.raises(AssertionError):
            encode_parts(values, [part], form=BlockInt(8))
        with pytest.raises(AssertionError):
            decode_parts([part], values, form=BlockInt(8))


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
    turn, gathered = threading.Lock(), Mock()
    monkeypatch.setattr(operations, "kind_of", lambda device: "cuda")

    def alone(launch, *args, **kwargs):
        with turn:
            if kwargs.get("source") is not None:
                gathered(len(args[1]))
            return launch(*args, **kwargs)

    for operation in (operations.encode, operations.decode, operations.rotate_):
        monkeypatch.setitem(operation._loaded, "cuda", partial(alone, operation.on(DEVICE)))
    for place, name in (
        *((triton_launches, name) for name in ("encode_parts", "decode_parts")),
        *((Places, name) for name in ("pack", "unpack")),
    ):
        launch = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *args, launch=launch, **how: alone(launch, *args, **how))
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


@pytest.mark.parametrize("case", by_turns(EXCHANGES))
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


@at_night
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
    places.pack([empty, None], empty)
    places.unpack(empty, [empty, None])


def test_a_tensor_with_gaps_is_refused():
    places = Places([4], [torch.float32], DEVICE)
    with pytest.raises(AssertionError, match="copy the tensor first"):
        places.pack([torch.zeros(8, device=DEVICE)[::2]], torch.zeros(4, device=DEVICE))


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs 20 GB of GPU memory")
def test_more_values_than_32_bits_count():
    codec, numel = BlockInt(8), 2**31 + 300
    values = torch.zeros(numel, device=DEVICE)
    values[-300:] = heavy_tailed(300)
    wire = message(codec, numel)
    encode(values, (), wire, codec, lost=values)
    decode(wire, values, codec, add=True)
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


@at_night
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
