"""Measure what codecs and packing take on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ringstrategy.codecs.base import Codec
from ringstrategy.cost.model import CodecCost, Work

_FEW, _MANY = 1 << 12, 1 << 20  # values, for a codec's fixed cost and its cost a value
_REPEATS = 5  # and one before them that is not counted


def codec_cost(codec: Codec, feedback: bool, device: torch.device) -> CodecCost:
    """What a codec's calls would take here if nothing else ran.

    Args:
        codec: measured on float32 values.
        feedback: add a residual before, and write what is lost.
        device: where the values are.
    """
    generator = torch.Generator(device).manual_seed(0)
    pattern = torch.randn(_MANY, generator=generator, device=device)
    # in training, gradients come from memory, not from a cache: so each repeat works on other values
    whole = pattern.repeat(_REPEATS + 1)
    outs, residuals = torch.zeros_like(whole), torch.zeros_like(whole) if feedback else None

    def calls(numel: int) -> list[Callable[[int], object]]:
        wires = [torch.empty(codec.nbytes(numel, whole.dtype), dtype=torch.uint8, device=device) for _ in range(2)]
        codec.encode(pattern[:numel], wires[0])

        def part(of: Tensor, repeat: int) -> Tensor:
            return of[repeat * _MANY : repeat * _MANY + numel]

        def hop(arrived: list[Tensor], repeat: int) -> None:
            rest = None if residuals is None else part(residuals, repeat)
            codec.hop(arrived, part(whole, repeat), wires[1], residual=rest, lost=rest, seed=0, own_seed=0)

        return [
            partial(hop, []),
            partial(hop, wires[:1]),
            lambda repeat: codec.deliver(wires[0], part(outs, repeat), seed=0),
            lambda repeat: codec.decode(wires[0], part(outs, repeat), add=True),
        ]

    few_seconds, many_seconds = ([_seconds(call, device) for call in calls(numel)] for numel in (_FEW, _MANY))
    works = []
    for few, many in zip(few_seconds, many_seconds, strict=True):
        per_value = max(many - few, 0.0) / (_MANY - _FEW)
        works.append(Work(max(few - per_value * _FEW, 0.0), per_value))
    return CodecCost(*works)


def _seconds(call: Callable[[int], object], device: torch.device) -> float:
    """The least; on a CPU of this thread's own time, which goes on only while it runs."""
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    call(_REPEATS)
    seconds = []
    for repeat in range(_REPEATS):
        _synchronise(device)
        begin = clock()
        call(repeat)
        _synchronise(device)
        seconds.append(clock() - begin)
    return min(seconds)


def pack_seconds(device: torch.device) -> float:
    """Seconds a value, to copy it scaled into other memory."""
    values = torch.ones(_MANY * (_REPEATS + 1), device=device)
    bucket = torch.ones_like(values)

    def pack(repeat: int) -> None:
        part = slice(repeat * _MANY, (repeat + 1) * _MANY)
        torch.mul(values[part], 0.5, out=bucket[part])

    return _seconds(pack, device) / _MANY


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
