"""What a bucket costs on a GPU, counted without one: docs/gpu.md has the table, and no step waits for the device."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.utils import instantiate

from benchmarks.harness import table_on
from benchmarks.launches import CASES, DEVICE, RANKS, Meter, counted, measure, stand_ins, whole_step
from ringstrategy import AllReduce, BlockInt, Direct, Native, PowerSGD, Ring
from ringstrategy.codecs import Cast, Codec, Gaussian, Identity, Rotated
from ringstrategy.names import STRATEGIES

pytest.importorskip("triton", reason="triton is only for Linux")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches nothing", allow_module_level=True)

ROOT = Path(__file__).parents[1]
NAMES = [path.stem for path in sorted((ROOT / "configs" / "codec").glob("*.yaml"))]
with initialize_config_module("ringstrategy.configs", version_base=None):
    BUILT = [instantiate(compose(f"codec/{name}").codec) for name in NAMES]
CODECS = [codec for codec in BUILT if isinstance(codec, Codec)]  # the others choose one by parameter


@pytest.mark.parametrize("name", CASES)
def test_the_table_is_what_is_counted(name: str) -> None:
    table = table_on((ROOT / "docs" / "gpu.md").read_text(), "launches")
    rows = {cells[0]: cells[1:-1] for cells in (line.strip("| ").split(" | ") for line in table.splitlines()[2:])}
    assert list(rows) == list(CASES)
    make, dtype = CASES[name]
    assert counted(measure(make(), dtype, rounds=0)) == rows[name], "python -m benchmarks launches --write docs/gpu.md"


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_no_step_waits_for_the_device(codec: Codec, feedback: bool) -> None:
    for collective in (Ring(), Direct()) if codec.hop_by_hop else (Direct(),):
        for dtype in (torch.float32, torch.bfloat16):
            assert measure(AllReduce(codec, collective, error_feedback=feedback), dtype, rounds=0).waits == ()


@pytest.mark.parametrize("algorithm", [PowerSGD(2), AllReduce(Cast("bf16"), Native()), AllReduce(Identity(), Native())])
def test_no_step_of_another_kind_waits_for_the_device(algorithm: PowerSGD | AllReduce) -> None:
    assert measure(algorithm, torch.float32, rounds=0).waits == ()


FED_BACK = {
    "ring_int8": AllReduce(BlockInt(8), error_feedback=True),
    "ring_sign": AllReduce(Rotated(Gaussian(1)), Direct(), error_feedback=True),
    "PowerSGD": PowerSGD(2, collective=Direct()),
}


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "ring_auto"])  # which is one of the others
def test_no_whole_step_waits_for_the_device(name: str) -> None:
    step = whole_step(STRATEGIES[name]())
    assert step.calls > 0
    assert step.bytes_moved > 0
    assert step.waits == []


@pytest.mark.parametrize("name", FED_BACK)
def test_no_whole_step_with_feedback_and_a_loss_scaler_waits_for_the_device(name: str) -> None:
    step = whole_step(FED_BACK[name], scaled=True)
    assert step.calls > 0
    assert step.waits == []


def test_each_way_to_wait_is_seen() -> None:
    meter, here, device = Meter(4), torch.ones(4), torch.ones(4, device=DEVICE)
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


def test_what_is_known_of_a_ring_is_what_is_counted() -> None:
    """By hand: 7 hops that add and 7 that pass on, each of a chunk in two pieces; wires are 1 + 2/256 bytes a value."""
    counts = measure(AllReduce(BlockInt(8), Ring()), torch.float32, rounds=0)
    pieces, wire = 2, 1 + 2 / 256
    hops = RANKS - 1
    assert counts.calls == 2 * hops * pieces
    encodes, decodes = RANKS * pieces, RANKS * pieces
    assert counts.kernels == 1 + encodes + decodes
    moved = 8 + (4 + wire) + hops / RANKS * wire + (4 + wire)
    assert re.match(r"\d+\.\d", counted(counts)[3])
    assert counts.bytes_moved / counts.gradients == pytest.approx(moved, rel=0.001)
