"""What a bucket costs on a GPU, counted without one: docs/gpu.md has the table, and no step waits for the device."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from torch.nn import Parameter

from benchmarks.contenders import named
from benchmarks.harness import table_on
from benchmarks.launches import CASES, DEVICE, RANKS, Meter, StandInPeers, counted, measure, stand_ins, whole_step
from ringstrategy import AllReduce, BlockInt, Choco, Direct, Gossip, LocalSGD, Native, PowerSGD, Ring, SmallExact
from ringstrategy.algorithms.base import Algorithm
from ringstrategy.buckets.residuals import Residuals
from ringstrategy.buckets.slot import Slot
from ringstrategy.codecs import Cast, Codec, Gaussian, Identity, Rotated, Sign
from ringstrategy.names import STRATEGIES
from ringstrategy.topologies import Complete

pytest.importorskip("triton", reason="triton is only for Linux")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches nothing", allow_module_level=True)

from ringstrategy.kernels.triton import tables

ROOT = Path(__file__).parents[1]
NAMES = [path.stem for path in sorted((ROOT / "configs" / "codec").glob("*.yaml"))]
with initialize_config_module("ringstrategy.configs", version_base=None):
    BUILT = [instantiate(compose(f"codec/{name}").codec) for name in NAMES]
CODECS = [codec for codec in BUILT if isinstance(codec, Codec)]  # the others choose one by parameter


@pytest.mark.parametrize("name", CASES)
def test_the_table_is_what_is_counted(name: str) -> None:
    table = table_on((ROOT / "docs" / "gpu.md").read_text(), "launches")
    rows = {cells[0]: cells[1:] for cells in (line.strip("| ").split(" | ") for line in table.splitlines()[2:])}
    assert list(rows) == list(CASES)
    make, dtype = CASES[name]
    assert counted(measure(make(), dtype)) == rows[name], "python -m benchmarks launches --write docs/gpu.md"


@pytest.mark.parametrize("feedback", [False, True])
def test_no_step_waits_for_the_device(feedback: bool) -> None:
    for place, codec in enumerate(CODECS):
        collective = (Direct(), Ring())[place % 2 if codec.hop_by_hop else 0]
        dtype = (torch.float32, torch.bfloat16)[(place + feedback) // 2 % 2]
        waits = measure(AllReduce(codec, collective, error_feedback=feedback), dtype).waits
        assert waits == (), (codec, collective, dtype)
    for algorithm in (PowerSGD(2), AllReduce(Cast("bf16"), Native()), AllReduce(Identity(), Native())):
        assert measure(algorithm, torch.float32).waits == (), algorithm


@pytest.mark.parametrize("scaled", [False, True])
def test_deciding_what_residuals_keep_never_waits_for_the_device(scaled: bool) -> None:
    meter, whole = Meter(), torch.empty(12, device=DEVICE)
    slots = [
        Slot(name, Parameter(whole.new_empty(2, 3)), whole.new_empty(2, 3), whole[6 * place : 6 * place + 6].view(2, 3))
        for place, name in enumerate("ab")
    ]
    parameters = [slot.parameter for slot in slots]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    with stand_ins(meter), meter.within():
        held = Residuals(slots, whole)
        for used in (True, False):
            held.begin(whole.new_empty(()) if scaled else None)
            held.end(lambda slot: True)
            held.handed_out()
            held.look()
            held.decide({parameters[0]}, whole.new_empty((), dtype=torch.bool))
            held.decide({parameters[1]}, used)
            parameters[1].grad = None
    assert meter.kernels == 2 * 1 + 2 * 3 + 3 * 3
    assert meter.waits == []


FED_BACK = {
    "ring_int8": AllReduce(BlockInt(8), error_feedback=True),
    "ring_sign": AllReduce(Rotated(Gaussian(1)), Direct(), error_feedback=True),
    "PowerSGD": PowerSGD(2, collective=Direct()),
}


def test_no_whole_step_waits_for_the_device() -> None:
    """With a loss scaler too."""
    for name in STRATEGIES:
        is_local = isinstance(STRATEGIES[name](), LocalSGD)
        algorithm = named(name, interval=1, fragments=1) if is_local else STRATEGIES[name]()
        if name != "ring_auto":  # which is one of the others
            check_whole_step(name, algorithm, scaled=False)
    for name, algorithm in FED_BACK.items():
        check_whole_step(name, algorithm, scaled=True)


def check_whole_step(name: str, algorithm: Algorithm, *, scaled: bool) -> None:
    step = whole_step(algorithm, scaled=scaled)
    assert step.calls > 0, name
    assert step.waits == [], name


def test_each_way_to_wait_is_seen() -> None:
    meter, here, device = Meter(), torch.ones(4), torch.ones(4, device=DEVICE)
    ways = [
        lambda: device[0].item(),
        lambda: device.tolist(),
        lambda: bool(device.sum()),
        lambda: device.cpu(),
        lambda: here.to(DEVICE),
        lambda: device.copy_(here),
        lambda: here.copy_(device),
        lambda: device.nonzero(),
        lambda: torch.equal(device, device),
        lambda: torch.tensor([1.0], device=DEVICE),
        lambda: torch.cuda.synchronize(),
        lambda: torch.cuda.Stream().synchronize(),
        lambda: torch.cuda.Event().synchronize(),
    ]
    with stand_ins(meter), meter.within():
        for count, way in enumerate(ways, start=1):
            way()
            assert len(meter.waits) == count
        here.to(DEVICE, non_blocking=True)
        device.copy_(here, non_blocking=True)
        here.add_(1).tolist()
    assert len(meter.waits) == len(ways)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_known_of_two_calls_is_what_is_counted(dtype: torch.dtype) -> None:
    """By hand: gradients to wires, 7 wires of a part to its sum, all wires to means, and 16 bits are copied back."""
    counts = measure(AllReduce(BlockInt(8), Direct()), dtype)
    assert counts.kernels == (3 if dtype.itemsize == 4 else 4)
    assert counts.calls == 2


def test_what_is_known_of_a_ring_is_what_is_counted() -> None:
    """By hand: 7 hops that add and 7 that pass on, each of a chunk in two pieces; gradients are read where they lie."""
    counts, pieces = measure(AllReduce(BlockInt(8), Ring()), torch.float32), 2
    assert counts.calls == 2 * (RANKS - 1) * pieces
    assert counts.kernels == 2 * RANKS * pieces, "a chunk is encoded and decoded once on its way"


ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    **{name: make for name, make in STRATEGIES.items() if not name.startswith(("ring_auto", "ring_topk"))},
    "bfloat16 residuals": lambda: AllReduce(BlockInt(4), Ring(), residual_dtype="bf16", error_feedback=True),
    "small buckets that ride": lambda: AllReduce(SmallExact(BlockInt(8), small=BlockInt(4)), Direct(), bucket_mb=0.4),
    "powersgd of int8": lambda: PowerSGD(2, BlockInt(8), bucket_mb=0.2),
    "choco over a complete graph": lambda: Choco(
        codec=Rotated(Gaussian(4)), topology=Complete(), interval=2, overlap=False
    ),
    "choco of short blocks": lambda: Choco(codec=BlockInt(8, block=24)),
    "gossip in 16 bits": lambda: Gossip(codec=Cast("bf16"), unequal_data=True),
}
WITHOUT_KERNELS = {"ring_fp16", "ring_bf16"}


def train(algorithm: Algorithm, parameters: dict[str, Parameter]) -> None:
    """A step of an optimizer."""
    stepped = set(parameters.values())
    for parameter in parameters.values():
        parameter.grad = None
    loss = torch.stack([parameter.float().sum() for parameter in parameters.values()]).sum()
    algorithm.before_backward(loss)
    loss.backward()
    algorithm.after_backward()
    algorithm.before_step(stepped)
    algorithm.after_step(stepped)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, (torch.float32, torch.bfloat16)[place % 2]) for place, name in enumerate(ALGORITHMS)]
    + [pytest.param(name, torch.bfloat16, marks=pytest.mark.nightly) for name in list(ALGORITHMS)[::2]],
)
def test_no_step_launches_a_kernel_that_is_not_compiled_at_setup(name: str, dtype: torch.dtype) -> None:
    shapes = {"embedding": (77, 40), "weight": (300, 201), "bias": (201,), "long": (1_000_003,), "matrix": (64, 96)}
    parameters = {n: Parameter(torch.empty(shape, dtype=dtype, device=DEVICE)) for n, shape in shapes.items()}
    later = {"later": Parameter(torch.empty(123, 31, dtype=dtype, device=DEVICE))}
    frozen = Parameter(torch.empty(99, dtype=dtype, device=DEVICE), requires_grad=False)
    meter, algorithm = Meter(), ALGORITHMS[name]()
    with stand_ins(meter), meter.within():
        peers = StandInPeers(meter)
        algorithm.setup({**parameters, "frozen": frozen}, peers)
        for new in ({}, later):
            parameters |= new
            if new:
                algorithm.adopt({**parameters, "frozen": frozen})
            algorithm.bind(set(parameters.values()))
            compiled = set(meter.compiled)
            for step in range(5):  # gradients are read where they lie, or packed first
                peers.backlog = lambda step=step: step  # type: ignore[method-assign, misc]
                train(algorithm, parameters)
            assert meter.compiled == compiled
        peers.close()
    assert bool(meter.compiled) == (name not in WITHOUT_KERNELS)


def test_a_block_too_large_for_the_kernels_is_refused_when_buckets_are_made() -> None:
    def made(codec: Codec) -> None:
        weight = Parameter(torch.empty(300, 300, device=DEVICE))
        AllReduce(codec).plan({"weight": weight}, frozenset(), 0)

    with stand_ins(Meter()):
        for codec in (BlockInt(8, block=16384), Rotated(Gaussian(4, block=16384)), Sign(block=8200)):
            with pytest.raises(ValueError, match=r"8192 values.*choose such a block"):
                made(codec)
        made(BlockInt(8, block=8192))


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
    meter = Meter()
    with stand_ins(meter), meter.within():
        tables.table([5, 6], DEVICE)
    assert meter.waits == [], "no copy from the host"


@pytest.mark.parametrize("name", ["gossip", "gossip_int8", "push_sum"])
def test_a_mixing_costs_as_many_launches_for_many_parameters_as_for_few(name: str) -> None:
    counts = []
    for parts in (2, 40):
        meter, algorithm = Meter(), STRATEGIES[name]()
        parameters = {f"p{place}": Parameter(torch.empty(4000 // parts, 64, device=DEVICE)) for place in range(parts)}
        with stand_ins(meter):
            peers = StandInPeers(meter)
            algorithm.setup(parameters, peers)
            algorithm.bind(set(parameters.values()))
            for _ in range(3):  # the corrections of the first are applied with the second
                meter.clear()
                with meter.within():
                    algorithm.after_step(set(parameters.values()))
                    algorithm.settle()
            peers.close()
        counts.append((meter.operations, meter.kernels))
    assert counts[0] == counts[1]
    assert 3 < counts[0][0] < 25
