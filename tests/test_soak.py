"""Random configurations beside the exact mean, and growth: a short form of `python -m benchmarks soak`."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from pool import Pool
from test_session import process_group

from benchmarks import soak
from benchmarks.soak import Config, Harm
from ringstrategy.algorithms.parameters.exchange import Exchange
from ringstrategy.buckets.base import Bucket
from ringstrategy.buckets.residuals import Residuals


def _runs(seeds: list[int]) -> int:
    with process_group():
        return sum(soak.run(Config.draw(seed)) for seed in seeds)


def test_random_configurations_are_what_an_exact_mean_gives(ranks: Pool) -> None:
    with_feedback_and_unused_layers = 61, 63, 65
    seeds = [seed for seed in (*range(12), *with_feedback_and_unused_layers) if Config.draw(seed).size == 3]
    assert {Config.draw(seed).kind for seed in seeds} == set(soak.KINDS)
    assert min(ranks(3, _runs, seeds)) >= 4 * len(seeds)


@pytest.mark.nightly
def test_more_random_configurations() -> None:
    """Others each night: what it finds says its seed."""
    counts, wrong = soak.soak(random.randrange(10**6), 0.1)  # one start of processes
    assert not wrong, wrong
    assert sum(found["configurations"] for found in counts.values()) == soak._AT_ONCE
    assert all(found["comparisons"] > 0 for found in counts.values())


def _other_means(bucket: Bucket, *given: Any) -> None:
    UNPACK(bucket, *given)
    for slot in bucket.slots:
        if slot.parameter.grad is not None:
            slot.parameter.grad.mul_(1.001)


def _other_bits(bucket: Bucket, *given: Any) -> None:
    if dist.get_rank() == 1:
        _other_means(bucket, *given)
    else:
        UNPACK(bucket, *given)


def _forgets(residuals: Residuals, *given: Any) -> bool:
    decided = DECIDE(residuals, *given)
    if residuals.lost is not None:
        residuals.lost.mul_(0.5)
    return decided


def _pulls(exchange: Exchange, algorithm: Any, vector: Any, *given: Any) -> None:
    MIX(exchange, algorithm, vector, *given)
    vector.correction.add_(1e-3)


UNPACK, DECIDE, MIX = Bucket.unpack, Residuals.decide, Exchange.mix


def _broken(owner: type, attribute: str, harm: Any, kind: str) -> str:
    seeds = [seed for seed in range(0, 120, 3) if Config.draw(seed).kind == kind]
    with process_group(), mock.patch.object(owner, attribute, harm):
        for seed in seeds:
            try:
                soak.run(Config.draw(seed))
            except Harm as error:
                return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("owner", "attribute", "harm", "kind", "said"),
    [
        (Bucket, "unpack", _other_means, "lossless", "from the exact one"),
        (Bucket, "unpack", _other_bits, "lossy", "ranks differ in gradients"),
        (Residuals, "decide", _forgets, "lossy", "is in no residual"),
        (Exchange, "mix", _pulls, "gossip", "moved the mean"),
    ],
)
def test_a_broken_law_is_found(ranks: Pool, owner: type, attribute: str, harm: Any, kind: str, said: str) -> None:
    messages = ranks(2, _broken, owner, attribute, harm, kind)
    assert all(said in message for message in messages), messages


def _grows(name: str) -> tuple[float, int, int]:
    with process_group():
        return soak.grow(name, 250)


@pytest.mark.slow
@pytest.mark.parametrize("name", soak._GROWS)
def test_nothing_grows(ranks: Pool, name: str) -> None:
    for bytes_a_step, threads, descriptors in ranks(2, _grows, name):
        assert bytes_a_step < 8000  # this is mostly what allocators keep: 5,000 steps show more
        assert threads < 5  # one may start late, or be about to end; a leak would be of many
        assert descriptors < 5
