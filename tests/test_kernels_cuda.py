"""Buckets by Triton kernels, on a GPU or in Triton's interpreter; test_kernels.py has what each computes."""

from __future__ import annotations

import threading
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from fakes import on_all_ranks
from kinds import DEVICE, KIND, by_turns
from kinds import bfloat16_rounds as bfloat16_rounds
from torch.multiprocessing.reductions import StorageWeakRef

from ringstrategy import BySize, Direct, Hierarchical, Ring
from ringstrategy.buckets.dense import DenseBucket
from ringstrategy.codecs import BlockFloat8, BlockInt, Gaussian, Rotated, Sign
from ringstrategy.codecs.rotated import signs
from ringstrategy.collectives.base import Summand, cut
from ringstrategy.kernels import operations
from ringstrategy.kernels.layout import Part
from ringstrategy.transport.base import Done

pytest.importorskip("triton", reason="triton is only for Linux")
if KIND != "cuda":  # lightning has imported triton by now, so it is too late to set it
    pytest.skip("needs a GPU or TRITON_INTERPRET=1: see test_kernels_compile.py", allow_module_level=True)

import ringstrategy.kernels.triton.launches as triton_launches
from ringstrategy.kernels.triton.buckets import Places
from ringstrategy.kernels.triton.decode import decode, decode_parts
from ringstrategy.kernels.triton.encode import encode, encode_parts
from ringstrategy.kernels.triton.formats import LARGEST_BLOCK
from ringstrategy.kernels.triton.launches import launches

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


@pytest.mark.parametrize("codec", STOCHASTIC, ids=str)
def test_stochastic_rounding(codec):
    values = heavy_tailed(3 * codec.block + 3)
    seed = 2**61 + 5
    wires = [by_kernel(codec, values, seed=each)[0] for each in (seed, seed, seed + 1, 5)]
    assert [torch.equal(wire, wires[0]) for wire in wires] == [True, True, False, False], "all 64 bits of it count"
    scales = wires[0][: 2 * -(-values.numel() // codec.block)].view(torch.bfloat16).float().cpu()
    errors = torch.stack([by_kernel(codec, values, seed=each)[1].cpu() for each in range(16)])
    errors /= scales.repeat_interleave(codec.block)[: values.numel()]
    assert 0.9 < errors.abs().max() < 1 + 1e-5, "nearest rounding would stay below 1/2"
    assert abs(errors.mean().item()) < 5 * 0.5 / errors.numel() ** 0.5
    one, other = errors[:, :-1].flatten(), errors[:, 1:].flatten()
    assert abs((one * other).mean().item()) < 5 * 0.25 / one.numel() ** 0.5, "neighbours' noise is their own"


# Tensors that lie where they are


PASSES = [
    (BlockFloat8("e4m3"), None, torch.bfloat16),
    (BlockInt(4, block=512), signs(11), torch.float32),
    (BlockInt(7, block=24), None, torch.float32),
    (Gaussian(4), signs(11), None),
    (Gaussian(1, block=4096), signs(11), torch.bfloat16),
    (Sign(2048), signs(11), torch.float32),
    (BlockInt(2, block=LARGEST_BLOCK), signs(11), None),
    (BlockInt(8), None, torch.float16),
    *((codec, None, None) for codec in STOCHASTIC),
]


class Scattered:
    """Dozens of tensors, odd sizes and mixed dtypes, at aligned and odd addresses, NaN around; some are missing."""

    def __init__(self):
        generator, self.tensors, self.stores = torch.Generator().manual_seed(5), [], []
        numels = [0, 1, 3, 5000, 180, 2048, 4096, 2049, 0, 17, 255, 256, 257, 6144, *range(1, 40, 3), 2500, 1]
        dtypes = [torch.float32, torch.float16, torch.bfloat16]
        for i, numel in enumerate(numels):
            self.stores.append(torch.full((numel + 24,), torch.nan, dtype=dtypes[i // 3 % 3], device=DEVICE))
            begin = 8 if i % 4 else 1  # on 16 bytes, or not
            tensor = self.stores[-1][begin : begin + numel]
            self.tensors.append(tensor.copy_(torch.randn(numel, generator=generator)))
        self.tensors[4] = self.tensors[4].as_strided((6, 2, 3, 5), (30, 1, 10, 2))  # channels last
        self.missing = {2, 7, len(numels) - 1}
        self.given = [None if i in self.missing else tensor for i, tensor in enumerate(self.tensors)]
        self.numels, self.dtypes = numels, [tensor.dtype for tensor in self.tensors]

    def flat(self, scale):
        """What a bucket has of them."""
        there = [tensor.as_strided((tensor.numel(),), (1,)).float() * scale for tensor in self.tensors]
        return torch.cat([part.zero_() if i in self.missing else part for i, part in enumerate(there)])


def test_pack_and_unpack_touch_nothing_else():
    scattered = Scattered()
    places = Places(scattered.numels, scattered.dtypes, DEVICE)
    flat = torch.full((places.numel,), torch.nan, device=DEVICE)
    places.pack(scattered.given, flat, scale=1 / 3)
    assert_same(flat, scattered.flat(1 / 3))
    places.unpack(flat * 2, scattered.given)
    for tensor, part in zip(scattered.given, (flat * 2).split(scattered.numels), strict=True):
        if tensor is not None:
            assert_same(tensor.as_strided(part.shape, (1,)), part.to(tensor.dtype))
    assert all(store.isnan().sum() == 24 for store in scattered.stores)


@pytest.mark.parametrize("case", by_turns(PASSES))
def test_parts_of_scattered_tensors_are_encoded_as_one_by_one_in_a_bucket(case):
    (codec, turn, residual), scattered = case, Scattered()
    how = {"form": codec, "signs": turn, "seed": 2**61 + 5}
    padding = 0 if turn is None else -sum(scattered.numels) % codec.block  # 0: the last block is a short one
    scattered.given[3][77] = -0.0
    places = Places([*scattered.numels, padding], [*scattered.dtypes, torch.float32], DEVICE)
    given = [*scattered.given, None]
    source = places.source(given, places.addresses(given), 1 / 3)
    flat = torch.cat([scattered.flat(1 / 3), torch.zeros(padding, device=DEVICE)])
    nothing = torch.full_like(flat, torch.nan)
    rest = None if residual is None else heavy_tailed(places.numel, 9).to(residual)

    def hop(begin, end, arrived):
        """One by one."""
        wire, part = message(codec, end - begin, fill=9), None if rest is None else rest[begin:end]
        encode(flat[begin:end], arrived, wire, residual=part, lost=lost[begin:end], offset=begin, **how)
        return wire

    def assert_parts_are(wires, edges, lost, arrived=()):
        for values, gathers in ((nothing, source), (flat, None)):
            if gathers is not None and not launches(codec, turn).gathers:
                continue
            parts = [Part(begin, end, message(codec, end - begin, fill=9)) for begin, end in edges]
            found = torch.full_like(flat, 77.0)
            encode_parts(values, parts, arrived, source=gathers, residual=rest, lost=found, **how)
            assert_same(torch.cat([part.wire for part in parts]), torch.cat(wires))
            assert_same(found.view(torch.int32), lost.view(torch.int32))  # also the sign of a zero
        return parts

    lost, edges = torch.full_like(flat, 77.0), [(0, 0), *cut(0, places.numel, 3, codec.block)]
    wires = [hop(begin, end, ()) for begin, end in edges]
    parts = assert_parts_are(wires, edges, lost)
    out, out_ = torch.full_like(flat, 77.0), torch.full_like(flat, 77.0)
    for (begin, end), wire in zip(edges, wires, strict=True):
        decode(wire, out[begin:end], codec, signs=turn)
    decode_parts(parts, out_, form=codec, signs=turn)
    assert_same(out_, out)
    begin, end = edges[-1]  # the part whose sum is this rank's
    arrived = [by_kernel(codec, heavy_tailed(end - begin, seed))[0] for seed in (2, 3)]
    for some in (arrived[:1], arrived):
        lost = torch.full_like(flat, 77.0)
        assert_parts_are([hop(begin, end, some)], [(begin, end)], lost, some)
    assert nothing.isnan().all()


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
        ticket = bucket.launch(peers, collective, Done(), 77 + step, "in a test", riders=riders)
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
    (BlockInt(7, block=64), torch.bfloat16, [torch.bfloat16], "held", 3, Direct()),
    (BlockInt(8), torch.float32, [torch.float32], "held", 3, BySize()),
    (BlockFloat8("e4m3"), None, [torch.float32, torch.bfloat16, torch.float16], "frozen", 3, Direct()),
    (Rotated(Gaussian(4)), torch.float32, [torch.float16, torch.float32], "unused here", 8, Direct()),
    (Rotated(BlockInt(4, block=512)), torch.bfloat16, [torch.bfloat16], "unused everywhere", 3, Ring()),
    (BlockInt(4, rounding="stochastic"), torch.float32, [torch.bfloat16], "none", 2, Hierarchical()),
    (BlockInt(5), None, [torch.bfloat16], "unused everywhere", 2, Direct()),
    (Sign(), torch.float32, [torch.float32, torch.bfloat16], "none", 2, Direct()),
    (BlockInt(8), None, [torch.float32], "strides", 2, Direct()),  # which nobody planned
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
    in_place = set() if gap == "strides" else {1} if isinstance(collective, Ring) else {1, size - 1}
    assert parts == in_place
    fake_gpus.reset_mock()
    monkeypatch.setitem(operations.lay_out._loaded, "cuda", operations.lay_out.in_torch)
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


@pytest.mark.parametrize("backlog", [1, 2])
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
        bucket.launch(peers, Direct(), Done(), 1, "in a test")
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
