"""`Auto` tries its candidates on all ranks alike, changes over without losing anything, and keeps the fastest."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from fakes import FakePeers, of_each_rank, on_all_ranks
from torch import Tensor, nn

import ringstrategy as ring
from ringstrategy.algorithms.auto import auto, eligible
from ringstrategy.algorithms.auto.candidates import PASSES, Trials, to_try


def gradients_of(step: int, rank: int) -> Tensor:
    return torch.randn(3, 1000, generator=torch.Generator().manual_seed(1000 * step + rank))


def set_up(peers: FakePeers, algorithm: ring.Auto | ring.AllReduce) -> nn.ParameterList:
    parameters = nn.ParameterList([nn.Parameter(torch.zeros(1000)) for _ in range(3)])
    algorithm.setup(dict(parameters.named_parameters()), peers)
    return parameters


def one_pass(algorithm: ring.Auto | ring.AllReduce, parameters: nn.ParameterList, gradients: Tensor) -> Tensor:
    """The mean gradients."""
    for parameter in parameters:
        parameter.grad = None
    loss = sum(((parameter * gradient).sum() for parameter, gradient in zip(parameters, gradients, strict=True)))
    assert isinstance(loss, Tensor)
    algorithm.before_backward(loss)
    loss.backward()
    algorithm.after_backward()
    algorithm.after_step(set(parameters))
    return torch.stack([parameter.grad.clone() for parameter in parameters if parameter.grad is not None])


def passes(
    algorithm: ring.Auto | ring.AllReduce, parameters: nn.ParameterList, rank: int, steps: range
) -> list[Tensor]:
    return [one_pass(algorithm, parameters, gradients_of(step, rank)) for step in steps]


def take(algorithm: ring.Auto, codec: Any) -> None:
    algorithm._take(next(place for place, made in enumerate(algorithm._candidates) if made.codec == codec))


# What it may choose


def test_the_process_that_started_the_ranks_knows_what_was_chosen() -> None:
    def chosen(peers: FakePeers) -> tuple[str, Any]:
        peers.hosts = ("a", "a", "b", "b")
        algorithm = ring.Auto()
        set_up(peers, algorithm)
        take(algorithm, ring.BlockInt(8))
        return repr(algorithm.chosen), algorithm.outcome()

    there = ring.Auto()
    [(repr_, outcome), *others] = on_all_ranks(4, chosen)
    assert {other for other, _ in others} == {repr_}
    there.take_outcome(pickle.loads(pickle.dumps(outcome)))
    assert repr(there.chosen) == repr_
    assert there.chosen.collective == ring.Hierarchical(), "which depends on the hosts"
    there.take_outcome(ring.Auto().outcome())
    with pytest.raises(ValueError, match="has not chosen yet"):
        _ = there.chosen


def test_what_is_tried_can_carry_the_parameters_and_differs() -> None:
    assert {type(made.collective) for made in eligible([ring.Identity()], ("a", "a"))} == {ring.BySize, ring.Direct}
    assert {type(made.collective) for made in eligible([ring.TopK()], ("a", "b"))} == {ring.Direct}
    made = eligible([ring.Identity(), ring.BlockInt(8)], ("a", "b"))
    short, long, complex_ = (
        [nn.Parameter(torch.empty(numel, dtype=dtype, device="meta"))]
        for numel, dtype in ((5 << 18, torch.float32), ((5 << 18) + 1, torch.float32), (9 << 18, torch.complex64))
    )
    assert to_try(made, long) == list(range(8))
    assert [made[place].bucket_mb for place in to_try(made, short)] == [25.0] * 4, "all in one bucket either way"
    assert {made[place].codec for place in to_try(made, complex_)} == {ring.Identity()}
    with pytest.raises(TypeError, match="complex"):
        to_try(eligible([ring.BlockInt(8)], ("a", "b")), complex_)


def test_what_choosing_sends_is_counted_apart() -> None:
    def train(peers: FakePeers, made: type, **arguments: Any) -> ring.Stats:
        algorithm = made(**arguments)
        passes(algorithm, set_up(peers, algorithm), peers.rank, range(60))
        algorithm.close()
        assert sum(peers.sent_to.values()) == (peers.stats.bytes_sent or 0) + peers.stats.probe_bytes_sent
        return peers.stats

    # all its candidates send alike
    [ours, *_] = on_all_ranks(3, partial(train, made=ring.Auto, allow=[ring.Identity()]))
    [plain, *_] = on_all_ranks(3, partial(train, made=ring.AllReduce))
    assert ours.bytes_sent == plain.bytes_sent
    assert ours.bytes_received == plain.bytes_received
    assert (ours.exchanges, ours.values_averaged) == (plain.exchanges, plain.values_averaged) == (60, 60 * 3000)
    assert ours.probe_bytes_sent == ours.probe_bytes_received > 100
    assert ours.probe_seconds > 0
    assert (plain.probe_bytes_sent, plain.probe_bytes_received, plain.probe_seconds) == (0, 0, 0)


# Trying


class Clock:
    """Instead of the time: the slowest rank finds `fastest` faster, another rank finds it slower."""

    def __init__(self, algorithm: ring.Auto, fastest: type, rank: int) -> None:
        self.algorithm, self.fastest, self.rank = algorithm, fastest, rank
        self.time = 0.0

    def __call__(self) -> float:
        inner = self.algorithm.chosen
        pass_ = (1.0, 1.0, 2.0)[self.rank] if isinstance(inner.codec, self.fastest) else (3.0, 0.5, 3.0)[self.rank]
        self.time += pass_ * (1 + isinstance(inner.collective, ring.Direct))
        return self.time


@pytest.mark.parametrize(
    ("fastest", "passes"),
    # 3, and 4 of each of 4 candidates; where both codecs are as fast, 3 rounds more of 2, of which the lossless takes
    # one more to deliver what the other left; then the first is kept
    [(ring.Identity, 19), (ring.BlockInt, 19), (ring.Codec, 45)],
)
def test_the_fastest_in_trials_is_kept_and_nothing_is_lost_on_the_way(
    monkeypatch: pytest.MonkeyPatch, fastest: type, passes: int
) -> None:
    def train(peers: FakePeers) -> tuple[list[Tensor], Tensor, list[str], list[str]]:
        algorithm = ring.Auto(error_feedback=True)
        monkeypatch.setattr(algorithm, "_now", Clock(algorithm, fastest, peers.rank))
        parameters = set_up(peers, algorithm)
        means, used = [], []
        for step in range(90):
            means.append(one_pass(algorithm, parameters, gradients_of(step, peers.rank)))
            used.append(repr(algorithm.chosen))
            assert algorithm.state_dict()["tuned"] == (step >= passes)
        assert not algorithm._seconds, "nothing is timed any more, and no rank asks the others whether to change"
        left = torch.zeros(3, 1000)
        for name, residual in algorithm.residuals():
            left[int(name)] = residual
        news = algorithm.news()
        algorithm.close()
        return means, left, used, news

    every_rank = on_all_ranks(3, train)
    means, _, used, news = every_rank[0]
    for other in every_rank[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(means, other[0], strict=True))
        assert other[2] == used
    assert len(set(used)) == 4, "lossy and lossless, over rings and directly"
    assert (ring.BlockInt if fastest is ring.BlockInt else ring.Identity).__name__ in used[-1]
    assert "BySize" in used[-1]
    [line] = news
    assert line.startswith("ring_auto tried 4 candidates and keeps")
    assert len(set(used[passes:])) == 1, "and then no more trials"

    true = torch.stack([gradients_of(step, rank) for step in range(90) for rank in range(3)]).double().sum(0) / 3
    delivered = torch.stack(means).double().sum(0)
    left = torch.stack([rank[1] for rank in every_rank]).double().sum(0)
    assert (delivered + left - true).abs().max() < 1e-4
    assert left.any() == (fastest is ring.BlockInt)


def test_a_resumed_run_goes_on_with_what_was_chosen_bit_for_bit() -> None:
    """On another number of ranks it chooses anew."""

    def made(peers: FakePeers) -> tuple[ring.Auto, nn.ParameterList]:
        algorithm = ring.Auto([ring.Identity(), ring.BlockInt(8)], error_feedback=True)
        algorithm._now = Clock(algorithm, ring.BlockInt, peers.rank)  # type: ignore[method-assign]
        return algorithm, set_up(peers, algorithm)

    def train(peers: FakePeers) -> dict[str, Any]:
        first, parameters = made(peers)
        passes(first, parameters, peers.rank, range(60))
        state = copy.deepcopy(first.state_dict())
        residuals = {name: kept.clone() for name, kept in first.residuals()}
        expected = passes(first, parameters, peers.rank, range(60, 70))
        first.close()
        again, parameters = made(peers)
        again.load_state_dict(state)
        assert again.load_residuals(residuals) == []
        assert any(residual.any() for _, residual in again.residuals())
        assert (again._tuned, repr(again.chosen)) == (True, state["auto"])
        found = passes(again, parameters, peers.rank, range(60, 70))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        again.close()
        return state

    def anew(peers: FakePeers) -> bool:
        algorithm, _ = made(peers)
        algorithm.load_state_dict(state)
        return algorithm._tuned

    state = on_all_ranks(3, train)[0]
    assert on_all_ranks(2, anew) == [False, False]


@of_each_rank(2)
def test_without_feedback_nothing_is_tried_until_all_is_delivered(peers: FakePeers) -> None:
    algorithm = ring.Auto()
    parameters = set_up(peers, algorithm)
    algorithm._inner.delivers = True
    algorithm._take(algorithm._chosen, deliver=True)
    assert algorithm.load_residuals({"0": torch.ones(1000)}) == []
    parameters[0].requires_grad_(False)  # nothing delivers its residual
    passes(algorithm, parameters, peers.rank, range(20))
    assert algorithm._chosen == 0, "still the first"
    parameters[0].requires_grad_(True)
    before = gradients_of(20, 0) / 2 + gradients_of(20, 1) / 2
    delivered = one_pass(algorithm, parameters, gradients_of(20, peers.rank))[0] - before[0]
    passes(algorithm, parameters, peers.rank, range(21, 37))
    assert algorithm._chosen == 2, "the next turn, 4 passes after the look at the 32nd"
    assert torch.allclose(delivered, torch.full((1000,), 2.0))


@mock.patch.object(auto, "_MOST_POSTPONED", 5)
@mock.patch.object(ring.AllReduce, "undecided", True)
@of_each_rank(2)
def test_a_loss_scaler_that_never_decides_ends_the_search_with_a_line(peers: FakePeers) -> None:
    algorithm = ring.Auto()
    parameters = set_up(peers, algorithm)
    passes(algorithm, parameters, peers.rank, range(11))
    assert algorithm._trials is not None, "due after 7, and postponed 4 times"
    passes(algorithm, parameters, peers.rank, range(11, 30))
    assert algorithm._trials is None
    assert algorithm._chosen == 0
    assert not algorithm.state_dict()["tuned"], "another run may be able to"
    assert "it was just trying: after 5 passes in a row" in algorithm.news()[0]


def turns(tried: list[int], seconds: Callable[[int, int], float]) -> tuple[list[int], int | None]:
    """Whose turn it was, and who won, if a pass of a candidate in a round takes so many seconds."""
    search, order, winner = Trials(tried), [], None
    while winner is None:
        place = search.turn
        search.end_turn(
            [1e9] + [seconds(place, search.rounds)] * (PASSES - 1)
        )  # the first is a warm-up, and does not count
        order.append(place)
        winner = search.judge(search.medians()) if search.round_over else None
    return order, winner


@pytest.mark.parametrize(
    ("tried", "seconds", "order", "winner"),
    [
        ([7, 3, 5], lambda place, _: {7: 1.2, 3: 1.0, 5: 1.3}[place], [7, 3, 5], 3),  # clear after one round
        ([7], lambda *_: 1.0, [7], 7),
        # those near the best go to and fro; less than 2 % slower, and more usual
        ([7, 3, 5], lambda place, _: {7: 1.0, 3: 1.2, 5: 1.019}[place], [7, 3, 5, 5, 7, 7, 5, 5, 7], 5),
        # by the median of all passes, so one slow round does not decide
        ([2, 1], lambda p, round_: 1.05 if p == 1 else 1.5 if round_ == 3 else 1.0, [2, 1, 1, 2, 2, 1, 1, 2], 2),
        # who fell out does not win when the others become slower
        ([0, 1, 2], lambda p, round_: 1.2 if p == 0 else 1.0 if round_ < 2 else 9.0, [0, 1, 2, 2, 1, 1, 2, 2, 1], 1),
    ],
)
def test_trials_go_on_until_one_is_clearly_best_or_four_rounds_are_over(
    tried: list[int], seconds: Callable[[int, int], float], order: list[int], winner: int
) -> None:
    assert turns(tried, seconds) == (order, winner)
