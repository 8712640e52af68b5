"""What an exchange costs a GPU, counted without one: launches, bytes moved, and waits of the host for the device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear
from torch.utils._python_dispatch import TorchDispatchMode

from ringstrategy import AllReduce, BlockFloat8, BlockInt, Codec, Collective, Direct, Peers, Ring, SmallExact
from ringstrategy.buckets.dense import DenseBucket
from ringstrategy.codecs import Gaussian, Rotated, Sign, TopK
from ringstrategy.collectives.base import mean_
from ringstrategy.kernels.engine import engine
from ringstrategy.transport.base import Handle

pytest.importorskip("triton", reason="triton is only for Linux")

from ringstrategy.kernels.triton import decode, encode, rotate, tables
from ringstrategy.kernels.triton.formats import Format

META = torch.device("meta")


class _Done:
    def wait(self) -> None:
        return


class NoWire(Peers):
    """Rank 1 of `size`, whose messages go nowhere: what is left is kernels and copies."""

    def post(self, sends: Any, recvs: Any) -> Handle:
        return _Done()

    def all_reduce_(self, values: Tensor) -> None:
        raise NotImplementedError

    def submit(self, task: Any, where: str) -> _Done:
        raise NotImplementedError

    def close(self) -> None:
        return


class Launches(TorchDispatchMode):
    """Counts launches of our kernels, with the bytes they move, and torch's operators; raises where a host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.operators: Counter[str] = Counter()
        self.nbytes = 0

    def record(self, name: str, arguments: tuple[Any, ...], wires: int) -> None:
        self.kernels[name] += 1
        given = [each for each in arguments if isinstance(each, Tensor) and each.dtype != torch.int64]
        message = arguments[3] if name == "encode" else arguments[0]
        if isinstance(message, Tensor) and message.dtype == torch.int64:  # of several parts of what is given
            [codec] = [each for each in arguments if isinstance(each, Format)]
            numels = message.view(-1, 3)[:, 1].tolist()
            self.nbytes += sum(codec.form.nbytes(numel) for numel in numels)
            self.nbytes += sum(sum(numels) * each.element_size() for each in given)
            return
        self.nbytes += sum(each.nbytes for each in given)
        if wires > 1:  # by their addresses
            self.nbytes += wires * arguments[3].nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name.removeprefix("aten::")
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"):
            raise AssertionError(f"{name} waits for the device")
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in [*args, result] if isinstance(each, Tensor)]
        devices = {each.device for each in tensors if each.dim() or each is result}  # but a number
        assert len(devices) < 2, f"{name} copies between devices, and waits"
        if not func.is_view and name != "empty":
            self.operators[name] += 1
        return result


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """The codecs think that they are on a GPU; kernels are counted and not run."""
    counted, on_gpu = Launches(), engine(torch.device("cuda"))
    for module in ("blocked", "rotated", "top_k"):
        monkeypatch.setattr(f"ringstrategy.codecs.{module}.engine", lambda device: on_gpu)

    class Counted:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*arguments: Any, **options: Any) -> None:
                counted.record(self.name, arguments, arguments[6] if self.name == "encode" else 0)

            return launch

    monkeypatch.setattr(encode, "_encode_kernel", Counted("encode"))
    monkeypatch.setattr(decode, "_decode_kernel", Counted("decode"))
    monkeypatch.setattr(rotate, "_rotate_kernel", Counted("rotate"))
    return counted


CASES: list[tuple[Codec, Collective, bool, dict[str, int], float]] = [
    # codec, collective, feedback; launches at 8 ranks; bytes an element
    (BlockInt(8), Ring(), False, {"encode": 8, "decode": 8}, 11),
    (BlockInt(8), Ring(), True, {"encode": 8, "decode": 8}, 19),
    (BlockFloat8(), Ring(), True, {"encode": 8, "decode": 8}, 19),
    (BlockInt(8), Direct(), False, {"encode": 8, "decode": 8}, 11),
    (Rotated(Gaussian(4)), Direct(), False, {"encode": 8, "decode": 8}, 9.5),
    (Rotated(Gaussian(4)), Direct(), True, {"encode": 8, "decode": 8}, 17.5),
    (Rotated(Sign(1024)), Ring(), True, {"encode": 8, "decode": 8}, 16.4),
]


@pytest.mark.parametrize(("codec", "collective", "feedback", "kernels", "nbytes"), CASES, ids=str)
def test_each_piece_is_one_launch_to_encode_and_one_to_decode(
    launches: Launches, codec: Codec, collective: Collective, feedback: bool, kernels: dict[str, int], nbytes: float
) -> None:
    values = torch.zeros(8 * 8192 + 4096)
    residual = torch.zeros_like(values) if feedback else None
    peers = NoWire(1, 8)
    mean_(values, peers, collective, codec, residual=residual, seed=1)  # makes its scratch, and tables of addresses
    launches.kernels.clear()
    launches.nbytes = 0
    with launches:
        mean_(values, peers, collective, codec, residual=residual, seed=2)
    assert launches.kernels == kernels
    assert not launches.operators
    assert launches.nbytes / values.numel() == pytest.approx(nbytes, rel=0.03)


@pytest.mark.parametrize(("numel", "more"), [(8 * 8192 + 4096, 0), (8 * 16384 + 3 * 256, 1)], ids=["even", "one not"])
@pytest.mark.parametrize(
    ("codec", "feedback", "nbytes"),
    [(BlockInt(8), False, 11), (Rotated(Gaussian(4)), False, 9.5), (Rotated(Gaussian(4)), True, 17.5)],
    ids=str,
)
def test_where_posts_are_queued_the_parts_of_a_sum_share_launches(
    launches: Launches, codec: Codec, feedback: bool, nbytes: float, numel: int, more: int
) -> None:
    """One to encode for all owners, one for the own sum, one to decode; one more where codes begin at other bytes."""
    values, peers = torch.zeros(numel), NoWire(1, 8)
    peers.queues = True
    residual = torch.zeros_like(values) if feedback else None
    mean_(values, peers, Direct(), codec, residual=residual, seed=1)
    launches.kernels.clear()
    launches.nbytes = 0
    with launches:
        mean_(values, peers, Direct(), codec, residual=residual, seed=2)
    assert launches.kernels == {"encode": 2 + more, "decode": 1 + more}
    assert not launches.operators
    assert launches.nbytes / values.numel() == pytest.approx(nbytes, rel=0.03)


def test_what_the_kernels_do_not_rotate_in_one_pass_is_rotated_by_launches_of_its_own(launches: Launches) -> None:
    values = torch.zeros(8 * 768)
    with launches:
        mean_(values, NoWire(1, 2), Direct(), Rotated(BlockInt(8, block=768)), seed=1)
    assert launches.kernels["rotate"] > 0


@pytest.mark.parametrize("codec", [TopK(8), TopK(5, 300)], ids=str)
@pytest.mark.parametrize("numel", [1024, 1000])
def test_sparse_codecs_never_wait_for_the_device(launches: Launches, codec: Codec, numel: int) -> None:
    values = torch.empty(numel, device=META)  # has no values: whoever reads one fails
    wire = torch.empty(codec.nbytes(numel, torch.float32), dtype=torch.uint8, device=META)
    with launches:
        codec.hop([wire], values, wire.clone(), residual=values, lost=values, seed=2**62, own_seed=2**62, offset=0)
        codec.deliver(wire, values, seed=1, add=True)
    assert launches.operators


def test_a_block_too_large_for_the_kernels_is_refused_when_buckets_are_made(launches: Launches) -> None:
    members = [("weight", Linear(300, 300, device=META).weight)]
    for codec in (BlockInt(8, block=16384), Rotated(Gaussian(4, block=16384)), Sign(block=8200)):
        with pytest.raises(ValueError, match=r"8192 values.*choose such a block"):
            DenseBucket(0, members, torch.float32, codec, feedback=False)
    DenseBucket(0, members, torch.float32, BlockInt(8, block=8192), feedback=False)
    with pytest.raises(ValueError, match="choose such a block"):
        AllReduce(SmallExact(BlockInt(8, block=16384))).setup(dict(Linear(300, 300).named_parameters()), NoWire(1, 2))


def test_tables_of_addresses_are_kept_but_not_what_a_graph_owns(monkeypatch: pytest.MonkeyPatch) -> None:
    host = torch.device("cpu")
    kept = tables.table([1, 2**62, 3], host)
    assert kept.tolist() == [1, 2**62, 3]
    assert tables.table([1, 2**62, 3], host) is kept
    monkeypatch.setattr(tables, "_captures", lambda device: True)
    captured = tables.table([1, 2**62, 3], host)
    assert torch.equal(captured, kept)
    assert captured is not kept
    assert tables.table([1, 2**62, 3], host) is not captured
    with Launches():
        tables.table([5, 6], META)  # no copy from the host
