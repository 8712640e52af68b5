"""Short forms of `python -m benchmarks` soak, fuzz and faults, and whether each would see what is wrong."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from pool import Pool
from scripts import lines_of
from test_session import process_group

import ringstrategy
from benchmarks import faults, fuzz, soak
from benchmarks.faulted import Plan
from benchmarks.ranks import noted
from benchmarks.soak import Config, Harm
from ringstrategy import BlockInt, Codec, TopK
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
@pytest.mark.parametrize(
    "arguments", ["soak --minutes 0.1 --growth 1000", "fuzz --payloads 20000", "faults --faults 6 --first 1000"]
)
def test_others_each_night(arguments: str, tmp_path: Path) -> None:
    """What is found says its seed."""
    name, *options = arguments.split()
    if name == "soak":
        options += ["--seed", str(random.randrange(10**6))]
    for row in lines_of(name, tmp_path / "rows.jsonl", *options):
        assert not [row[kind] for kind in ("wrong", "hung", "torn", "orphans", "unnamed") if row[kind]], row
        assert (row["bytes_grown"] or 0) < 2000, "what allocators keep, in a long run: at most a kilobyte a step"
        assert max(row["threads_grown"] or 0, row["descriptors_grown"] or 0) < 5, "a leak would be of many"


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


UNPACK, DECIDE, MIX = Bucket.unpack, Residuals.after_step, Exchange.mix


@pytest.mark.parametrize(
    ("owner", "attribute", "harm", "kind", "said"),
    [
        (Bucket, "unpack", _other_means, "lossless", "from the exact one"),
        (Bucket, "unpack", _other_bits, "lossy", "ranks differ in gradients"),
        (Residuals, "after_step", _forgets, "lossy", "is in no residual"),
        (Exchange, "mix", _pulls, "gossip", "moved the mean"),
    ],
)
@on_ranks(2)
def test_a_broken_law_is_found(owner: type, attribute: str, harm: Any, kind: str, said: str) -> None:
    configs = [config for config in map(Config.draw, range(0, 120, 3)) if config.kind == kind]
    with process_group(), mock.patch.object(owner, attribute, harm), pytest.raises(Harm, match=said):
        sum(map(soak.run, configs))


# Hostile messages


def test_hostile_messages_do_no_harm() -> None:
    exported = [getattr(ringstrategy, name) for name in ringstrategy.__all__]
    codecs = {each for each in exported if isinstance(each, type) and issubclass(each, Codec) and each is not Codec}
    assert {type(codec) for codec in fuzz.CODECS} == codecs
    one_of_a_kind = {type(codec): codec for codec in reversed(fuzz.CODECS)}  # with its usual arguments
    for codec in one_of_a_kind.values():
        counts = sum((fuzz.check(codec, seed) for seed in range(6)), Counter[str]())
        assert counts["payloads"] == 6 * 16
        assert 0 < counts["refused"] < counts["payloads"] / 2, codec


def _writes_behind(self: TopK, wire: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> None:
    torch.as_strided(out, (out.numel() + 1,), (1,), out.storage_offset()).fill_(1.0)


def _writes_the_message(self: TopK, wire: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> None:
    wire.zero_()


def _takes_any_length(self: TopK, wire: torch.Tensor, values: torch.Tensor) -> None: ...


@pytest.mark.parametrize(
    ("attribute", "harms", "said"),
    [
        ("decode", _writes_behind, "wrote outside"),
        ("decode", _writes_the_message, "changed the message"),
        ("check_wire", _takes_any_length, "did not refuse"),
    ],
)
def test_harm_is_found(monkeypatch: pytest.MonkeyPatch, attribute: str, harms: object, said: str) -> None:
    monkeypatch.setattr(BlockInt, attribute, harms)
    with pytest.raises(fuzz.Harm, match=said):
        sum((fuzz.check(BlockInt(8), seed) for seed in range(20)), Counter())


# Faults


def test_a_thousand_faults_are_of_all_kinds(tmp_path: Path) -> None:
    plans = [faults.draw(number, tmp_path) for number in range(1000)]
    assert plans[417] == faults.draw(417, tmp_path)
    for policy in ("raise", "shrink"):
        of_policy = [plan for plan in plans if plan.policy == policy]
        assert {plan.strategy for plan in of_policy} == set(faults.DRAWN)
        assert {plan.size for plan in of_policy} == {2, 3, 4}
    drawn = {(plan.fault, plan.place) for plan in plans}
    assert drawn <= {(fault, place) for fault, (_, places) in faults.FAULTS.items() for place in places}
    assert {plan.launcher for plan in plans} == {"environment", "lightning", "spawn", "fork", "torchrun"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "launcher"), [("kill", "torchrun"), ("kill", "lightning"), ("terminate", "spawn"), ("raise", "fork")]
)
def test_a_fault_under_each_launcher_is_clean(tmp_path: Path, fault: str, launcher: Any) -> None:
    """All survivors end, name who was lost, leave no process, and a new start ends as an undisturbed run."""
    plan = Plan(str(tmp_path / "1"), "ring_int8, feedback", size=2, fault=fault, place="backward", step=4, victims=(1,))
    assert not faults.Judge(tmp_path)(replace(plan, launcher=launcher))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", faults.TOLERANCES)
def test_wrong_means_and_lost_samples_are_seen(tmp_path: Path, strategy: str) -> None:
    strike = {"fault": "kill", "place": "send", "step": 4, "delay": 1, "victims": (0,)}
    plan = Plan(str(tmp_path), strategy, "shrink", **strike)  # type: ignore[arg-type]
    assert not [*faults.Start(plan).found, *faults.missed(plan)]
    assert not faults.of_survivors(plan)
    file = plan.notes(1)
    notes = noted(file)
    [batch] = [note for note in notes if note["what"] == "batch" and note["step"] == 6]

    def drawn(samples: list[int]) -> None:
        lines = [{**note, "samples": samples} if note is batch else note for note in notes]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    drawn(batch["samples"][1:] + batch["samples"][:1])
    assert not faults.wrong_means(plan, [1, 2]), "the order changes no mean"
    drawn(batch["samples"][:3] + batch["samples"][:1])
    assert faults.wrong_means(plan, [1, 2])
    assert faults.lost_samples(plan)
