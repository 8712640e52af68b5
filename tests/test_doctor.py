"""`ringstrategy-doctor`: what it says of ranks and links is so, and what is wrong comes with its cure."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import re
import sys
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from jobs import program as program  # a fixture
from pool import Pool
from test_lab import LAB, needs_namespaces

from ringstrategy.app import doctor


def _asks(arguments: list[str], hosts: list[str], interface: str | None) -> tuple[int, str]:
    """Its exit code, and what it prints, on ranks of these hosts."""
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    host, printed = hosts[int(os.environ["RANK"])], io.StringIO()
    with (
        mock.patch.object(doctor, "this_host", return_value=host),
        mock.patch.object(doctor.socket, "gethostname", return_value=host),
        mock.patch.object(doctor, "address_of", return_value="127.0.1.1"),
        mock.patch.object(doctor, "_CHUNK", 1 << 16),
        contextlib.redirect_stdout(printed),
        pytest.raises(SystemExit) as end,
    ):
        doctor.main(arguments)
    return int(str(end.value.code)), printed.getvalue()


def test_each_pair_of_hosts_is_measured_both_ways(ranks: Pool) -> None:
    ends = ranks(3, _asks, ["--json"], ["a", "b", "a"], "lo")
    assert [code for code, _ in ends] == [0, 0, 0]
    assert ends[1][1] == ends[2][1] == ""
    said = json.loads(ends[0][1])
    assert [card["rank"] for card in said["ranks"]] == [0, 1, 2]
    assert {(link["from"], link["to"]) for link in said["links"]} == {(0, 1), (1, 0)}
    for link in said["links"]:
        assert 1e5 < link["bits_per_second"] < 1e13
        assert 0 < link["latency_seconds"] < 60
    assert said["problems"] == []
    given = ["--parameters", "3M", "--step-ms", "20"]
    [(_, text), _] = ranks(2, _asks, given, ["a", "b"], "lo")
    assert re.search(r"\nfrom +a +b\na +- +[\d.e+]+; [\d.e-]+\nb +[\d.e+]+; [\d.e-]+ +-\n", text)
    assert "3 M parameters, 2 ranks on 2 hosts" in text
    assert "measured just now" in text
    assert "strategy=" in text


def test_a_host_whose_name_leads_to_itself_is_named_with_the_cure(ranks: Pool) -> None:
    [(code, text), (other, _)] = ranks(2, _asks, [], ["a", "b"], None)
    assert code == other == 1
    assert "WRONG: On b its own name leads to 127.0.1.1" in text
    assert "Set GLOO_SOCKET_IFNAME there" in text
    [(code, text), _] = ranks(2, _asks, [], ["a", "a"], None)
    assert code == 0
    assert "All ranks reach each other." in text


def test_versions_that_differ_are_named() -> None:
    card: dict[str, Any] = {"rank": 0, "host": "a x", "name": "a", "address": "10.0.0.1", "interface": None}
    card |= {"interfaces": ["eth0"], "versions": {"torch": "2.9", "Python": "3.12"}}
    other = {**copy.deepcopy(card), "rank": 1, "host": "b x", "name": "b"}
    assert doctor.problems([card, other]) == []
    other["versions"]["torch"] = "2.11"
    [said] = doctor.problems([card, other])
    assert said == "torch differs: 2.9 on rank 0 (a); 2.11 on rank 1 (b). Install the same everywhere."


def test_who_does_not_come_is_named() -> None:
    store = dist.HashStore()
    store.set("card/1", "{}")
    with pytest.raises(RuntimeError, match="nothing was heard of rank 0, 2 of 3: start it"):
        doctor._all(store, "card", 3, timedelta(seconds=0.1))


def _waits_in_vain() -> str:
    rank = int(os.environ["RANK"])
    store = doctor._store(rank, 3, timedelta(seconds=60))
    store.set(f"card/{rank}", "{}")
    store.wait([f"card/{1 - rank}"], timedelta(seconds=60))
    with pytest.raises(RuntimeError) as error:
        doctor._all(store, "card", 3, timedelta(seconds=0.1))
    store.set(f"heard/{rank}", "")
    if rank == 0:  # who has the store leaves last
        store.wait(["heard/1"], timedelta(seconds=60))
    return str(error.value)


def test_two_of_three_hear_which_one_is_missing(ranks: Pool) -> None:
    """And not that they themselves have no connection."""
    for said in ranks(2, _waits_in_vain):
        assert said.startswith("nothing was heard of rank 2 of 3")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--rank 0", "pass --rank, --size and --master=host:port together"),
        ("--rank 0 --size 2 --master here", "pass --rank, --size and --master=host:port together"),
        ("--rank 2 --size 2 --master here:1", "--rank is 0 to 1, got 2"),
    ],
)
def test_a_wrong_place_is_refused(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        doctor.main(arguments.split())
    assert words in capsys.readouterr().err


@pytest.mark.slow
@needs_namespaces
def test_a_throttled_link_has_the_rate_that_it_has(program: Any) -> None:
    """It cannot carry more; that it carries less only says that the machine is busy."""
    how = ["--hosts", "2", "--rate", "20mbit", "--", sys.executable, "-m", "ringstrategy.app.doctor", "--json"]
    ran = program(*LAB, *how)
    assert ran.wait() == 0, ran.errors
    links = json.loads(ran.printed)["links"]
    assert len(links) == 2
    for link in links:
        assert 2e6 < link["bits_per_second"] <= 20.5e6
