"""Ranks that differ about a message: an error on all of them that names the sender; slow ranks are waited for."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from pool import Pool
from torch import Tensor

from ringstrategy import Identity, PlanMismatchError, Ring
from ringstrategy.collectives import mean_
from ringstrategy.transport.base import Handle, Word
from ringstrategy.transport.connect import connect
from ringstrategy.transport.gloo import GlooPeers
from ringstrategy.transport.messages import Message, Messages, difference

ODD = 1  # the rank that does something else
NUMEL = 1013


def _sends_otherwise(peers: GlooPeers, change: str) -> None:
    """The first message of values that this rank posts from now on is another one, or comes twice."""
    post = peers.post
    changed: list[Handle | None] = []  # gloo forgets a send whose handle is gone before the receiver asks for it

    def posts(sends: dict[int, Tensor], recvs: dict[int, Tensor]) -> Handle:
        if sends and not changed:
            peer, leaving = next(iter(sends.items()))
            changed.append(post({peer: leaving}, {}) if change == "one more" else None)
            if change == "longer":
                sends = {**sends, peer: torch.cat([leaving, leaving[:4]])}
        return post(sends, recvs)

    peers.post = posts  # type: ignore[method-assign, assignment]


def _exchange(change: str, pause: float = 0.0) -> tuple[str, bool]:
    """Two exchanges. Returns the error, and whether all means that came were right."""
    dist.init_process_group("gloo")
    peers = connect(torch.device("cpu"), timedelta(seconds=120))
    assert isinstance(peers, GlooPeers)
    assert peers.size == 3
    right, error = True, ""
    try:
        if peers.rank == ODD:
            if change:
                _sends_otherwise(peers, change)
            time.sleep(pause)
        for step in range(2):
            values = torch.arange(NUMEL, dtype=torch.float32) * (peers.rank + 1 + step) / 3
            task = partial(mean_, values, peers, Ring(), Identity())
            peers.finish([peers.submit(task, f"at step {step}, in bucket 0 of 1")])
            right = right and torch.allclose(values, torch.arange(NUMEL, dtype=torch.float32) * (2 + step))
    except PlanMismatchError as mismatch:
        error = str(mismatch)
    assert peers.stats.bytes_sent
    peers.close()
    return error, right


@pytest.mark.parametrize("change", ["longer", pytest.param("one more", marks=pytest.mark.slow)])
def test_a_message_that_nobody_expects_is_an_error_on_all_ranks(ranks: Pool, change: str) -> None:
    for error, right in ranks(3, _exchange, change):
        assert f"rank {ODD} sends " in error
        assert "the ranks differ" in error
        assert right


def test_only_one_message_described_twice_is_a_difference() -> None:
    """However far either rank has come. Lengths and places of messages with other numbers differ."""
    for sent in range(1, 5):
        for expected in range(5):
            sender, receiver = Messages(), Messages()
            for messages, count in ((sender, sent), (receiver, expected)):
                for number in range(count):
                    messages.where = f"at step {number}"
                    last = messages.begin(3, 5, False, 10 + number)
                    assert difference(last, 3, sender.written()) is None
                    assert difference(last, 5, receiver.written()) is None
            awaited = Message(3, 5, False, sent - 1, 9 + sent, f"at step {sent - 1}")
            assert difference(awaited, 3, receiver.written()) is None
            wrong = difference(awaited._replace(nbytes=8), 3, receiver.written())
            assert (wrong is None) == (expected < sent)
            assert wrong is None or wrong.startswith(f"rank 3 sends 8 bytes at step {sent - 1}")


def test_messages_are_numbered_by_kind_and_forgotten_when_they_end() -> None:
    messages = Messages()
    kinds = [(0, 1, False), (0, 1, True), (1, 0, False), (0, 1, False)]
    begun = [messages.begin(*kind, 4) for kind in kinds]
    assert [message.number for message in begun] == [0, 0, 0, 1]
    messages.end(begun[0])
    assert difference(begun[0]._replace(nbytes=8), 1, messages.written()) is None, "it has landed"
    assert difference(begun[3]._replace(nbytes=8), 1, messages.written()) is not None


def _tag(message: Message, said: str | None = None, name: str = "all 1") -> int:
    """Of the message, among ranks that said this, in the set of peers of this name."""
    tags: list[int] = []
    peers: Any = SimpleNamespace(
        _group="gloo", _global_ranks=[0, 1], _said=name, _name=name, submit=lambda task, where: task()
    )
    if said is not None:
        GlooPeers.only_with(peers, Word(said, str), tagged=True, where="here")

    def operation(tensor: Tensor, peer: int, *, group: Any, tag: int) -> Any:
        tags.append(tag)
        return "under way"

    GlooPeers._start(peers, operation, torch.empty(0), 1, message)
    return tags[0]


def test_messages_of_ranks_that_differ_in_anything_never_meet() -> None:
    message = Message(0, 1, False, number=3, nbytes=8, where="at step 3")
    changes: list[dict[str, Any]] = [{"number": 4}, {"nbytes": 12}, {"where": "at step 4"}, {"control": True}]
    tags = [_tag(message), *(_tag(message._replace(**by)) for by in changes)]
    tags += [_tag(message, "one plan"), _tag(message, "another"), _tag(message, "one plan", "all 2")]
    assert len(set(tags)) == len(tags)
    assert _tag(message, "one plan") == _tag(message, "one plan")


@on_ranks(2)
def test_two_sets_of_peers_on_one_group_do_not_meet() -> None:
    dist.init_process_group("gloo")
    first, second = (connect(torch.device("cpu"), timedelta(seconds=120), group=dist.group.WORLD) for _ in range(2))
    other = 1 - first.rank
    arrived = {peers: torch.empty(4, dtype=torch.uint8) for peers in (first, second)}
    handles = [
        peers.swap(other, torch.full((4,), 1 if peers is first else 2, dtype=torch.uint8), other, arrived[peers])
        for peers in ((first, second) if other else (second, first))
    ]
    for handle in handles:
        handle.wait()
    assert (arrived[first].tolist(), arrived[second].tolist()) == ([1] * 4, [2] * 4)
    for peers in (first, second):
        peers.close()
    dist.barrier()
