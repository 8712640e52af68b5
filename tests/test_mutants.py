"""The planted faults of tests/mutants: each still fits the code, and would be noticed."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path

import pytest
from mutants.__main__ import ROOT, Mutant, mutants, plant


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name)
def test_the_fault_can_be_planted(mutant: Mutant, tmp_path: Path) -> None:
    path = tmp_path / mutant.file
    path.parent.mkdir(parents=True)
    path.write_text((ROOT / mutant.file).read_text())
    plant(mutant, tmp_path)
    if path.suffix == ".py":
        compile(path.read_text(), mutant.file, "exec")
    files = [word.split("::")[0] for word in shlex.split(mutant.tests) if word.startswith("tests/")]
    assert files
    assert all((ROOT / file).is_file() for file in files)


def test_no_two_have_one_name() -> None:
    names = Counter(mutant.name for mutant in mutants())
    assert max(names.values()) == 1
