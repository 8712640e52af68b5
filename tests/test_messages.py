"""Ranks that differ about a message: an error on all of them that names the sender; slow ranks are waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor

from ringstrategy import Direct, Identity, PlanMismatchError, Ring
from ringstrategy.collectives.base import Collective, mean_
from ringstrategy.transport.base import Handle
from ringstrategy.transport.connect import connect
from ringstrategy.transport.gloo import GlooPeers
from ringstrategy.transport.messages import Message, Messages, difference

pytestmark = pytest.mark.timeout(120)
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
            if change != "one more":
                other = leaving[:-4] if change == "shorter" else torch.cat([leaving, leaving[:4]])
                sends = {**sends, peer: other}
        return post(sends, recvs)

    peers.post = posts  # type: ignore[method-assign, assignment]


def _exchange(collective: Collective | None, change: str, pause: float = 0.0) -> tuple[str, float, bool]:
    """Two exchanges. Returns the error, how long the rank waited for it, and whether all means that came were right."""
    dist.init_process_group("gloo")
    peers = connect(torch.device("cpu"), timedelta(seconds=40))
    assert isinstance(peers, GlooPeers)
    assert peers.size == 3
    begin, right, error = time.monotonic(), True, ""
    try:
        if peers.rank == ODD:
            if change:
                _sends_otherwise(peers, change)
            time.sleep(pause)
        for step in range(2):
            values = torch.arange(NUMEL, dtype=torch.float32) * (peers.rank + 1 + step) / 3
            exact = torch.arange(NUMEL, dtype=torch.float32) * (2 + step)
            work = _mean(values, peers, collective) if collective else _pass_on(values, peers)
            peers.finish([peers.submit(work, f"at step {step}, in bucket 0 of 1")])
            right = right and (collective is None or torch.allclose(values, exact))
    except PlanMismatchError as mismatch:
        error = str(mismatch)
    waited, sent = time.monotonic() - begin, peers.stats.bytes_sent
    assert sent
    peers.close()
    return error, waited, right


def _mean(values: Tensor, peers: GlooPeers, collective: Collective) -> Callable[[], None]:
    return lambda: mean_(values, peers, collective, Identity())


def _pass_on(values: Tensor, peers: GlooPeers) -> Callable[[], None]:
    """As gossip does on a directed ring."""
    arriving = torch.empty(values.nbytes, dtype=torch.uint8)
    after, before = (peers.rank + 1) % 3, (peers.rank - 1) % 3
    return lambda: peers.post({after: values.view(torch.uint8)}, {before: arriving}).wait()


_GOSSIP = None
_QUICK = [(Ring(), "shorter")]
_SLOW = [(c, how) for c in (Ring(), Direct(), _GOSSIP) for how in ("shorter", "longer", "one more")]


@pytest.mark.parametrize(
    ("collective", "change"),
    [*_QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in _SLOW if case not in _QUICK)],
)
def test_a_message_that_nobody_expects_is_an_error_on_all_ranks(
    ranks: Pool, collective: Collective | None, change: str
) -> None:
    for error, waited, right in ranks(3, _exchange, collective, change):
        assert f"rank {ODD} sends " in error
        assert "the ranks differ" in error
        assert right
        assert waited < 15


@pytest.mark.slow
@pytest.mark.parametrize("collective", [Ring(), _GOSSIP])
def test_a_slow_rank_is_waited_for(ranks: Pool, collective: Collective | None) -> None:
    pause = 5.0  # longer than three looks
    outcomes = ranks(3, _exchange, collective, "", pause)
    assert [(error, right) for error, _, right in outcomes] == [("", True)] * 3
    assert all(waited > 3 for _, waited, _ in outcomes)


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
