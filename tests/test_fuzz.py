"""Hostile messages do no harm: a short form of `python -m benchmarks fuzz --payloads 1000000`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

import ringstrategy
from benchmarks import fuzz
from benchmarks.rows import read
from ringstrategy import BlockInt, Codec, TopK


def test_hostile_messages_do_no_harm() -> None:
    exported = [getattr(ringstrategy, name) for name in ringstrategy.__all__]
    codecs = {each for each in exported if isinstance(each, type) and issubclass(each, Codec) and each is not Codec}
    assert {type(codec) for codec in fuzz.CODECS} == codecs
    one_of_a_kind = {type(codec): codec for codec in reversed(fuzz.CODECS)}  # with its usual arguments
    for codec in one_of_a_kind.values():
        counts = sum((fuzz.check(codec, seed) for seed in range(6)), Counter[str]())
        assert counts["payloads"] == 6 * 16
        assert 0 < counts["refused"] < counts["payloads"] / 2, codec


@pytest.mark.nightly
def test_20000_hostile_messages_do_no_harm(tmp_path: Path) -> None:
    fuzz.main(["--payloads", "20000", "--out", str(tmp_path / "rows.jsonl")])
    rows = read(tmp_path / "rows.jsonl")
    assert sum(row.payloads or 0 for row in rows) == 20000
    assert {row.case for row in rows} == {str(codec) for codec in fuzz.CODECS}


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
