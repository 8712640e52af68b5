"""Every published row can be read by today's schema, and what is written comes back."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.rows import Row, append, campaign, read

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
MADE = {"device": "cpu", "torch": "2.13", "commit": "abc"}
FILES = [path for path in sorted(RESULTS.rglob("*.jsonl")) if path.name != "accuracy.jsonl"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(RESULTS)))
def test_published_rows_can_be_read(path: Path) -> None:
    rows = read(path)
    assert rows
    for row, line in zip(rows, path.read_text().splitlines(), strict=True):
        known = asdict(row)
        assert all(known[name] == value for name, value in json.loads(line).items())


def test_all_of_them_are_of_the_campaign() -> None:
    assert len(list(campaign(RESULTS))) == sum(len(read(path)) for path in FILES)


def test_what_is_written_comes_back_and_an_unknown_field_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    rows = [Row(**MADE, benchmark="training", case="ring", seconds=[1.0, 2.0], hosts=4, ratio=0.5)]
    append(rows, path)
    append([Row(**MADE, benchmark="codecs", codec="Sign()")], path)
    assert read(path)[0] == rows[0]
    assert [row.benchmark for row in read(path)] == ["training", "codecs"]
    assert "predicted_seconds" not in path.read_text()
    path.write_text('{"benchmark": "training", "device": "cpu", "torch": "2", "commit": "abc", "secs": 1}\n')
    with pytest.raises(TypeError, match="secs"):
        read(path)
