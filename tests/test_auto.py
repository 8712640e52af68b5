"""`Auto` chooses by figures that all ranks share, switches without losing anything, and keeps what was fastest."""

from __future__ import annotations

import copy
import math
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fakes import FakePeers, on_all_ranks
from torch import Tensor, nn

from ringstrategy import (
    AllReduce,
    Auto,
    BlockInt,
    BySize,
    Direct,
    Hierarchical,
    Identity,
    PlanMismatchError,
    Stats,
    TopK,
)
from ringstrategy.algorithms.auto import auto, eligible, in_words, measured, predicted, trials
from ringstrategy.algorithms.auto.passes import Passes
from ringstrategy.algorithms.auto.trials import Trials, to_try
from ringstrategy.cost import CodecCost, Link, Machines, Work
from ringstrategy.transport.base import Peers

NETWORKS = {"slow": Link(1e-4, 1e-7), "fast": Link(1e-6, 1e-12)}


class Probe:
    """Instead of measuring: a codec of 1 GB/s, and this network.

    Attributes:
        asked: for messages of how many bytes each rank was to measure.
    """

    def __init__(self, network: str = "slow", known: bool = True) -> None:
        self.network, self.known = network, known
        self.asked: list[float] = []

    def __call__(self, peers: Peers, codecs: list[tuple[Any, bool]], device: torch.device, longest: float) -> Machines:
        self.asked.append(longest)
        work, nothing = Work(1e-6, 4e-9), Work(0.0, 0.0)
        lossy, lossless = CodecCost(work, work, work, work), CodecCost(nothing, nothing, nothing, Work(0.0, 1e-12))
        costs = {key: lossless if key[0].lossless else lossy for key in codecs}
        known = math.inf if self.known else longest
        return Machines(
            peers.hosts, NETWORKS[self.network], Link(1e-6, 1e-11), 1e-6, costs, crowding=0.0, longest=known
        )


@pytest.fixture(autouse=True)
def probe(monkeypatch: pytest.MonkeyPatch) -> Probe:
    found = Probe()
    monkeypatch.setattr(measured, "measure", lambda *arguments: found(*arguments))
    return found


def gradients_of(step: int, rank: int) -> Tensor:
    return torch.randn(3, 1000, generator=torch.Generator().manual_seed(1000 * step + rank))


def module(numel: int = 1000) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.zeros(numel)) for _ in range(3)])


def set_up(peers: FakePeers, algorithm: Auto | AllReduce, numel: int = 1000) -> nn.ParameterList:
    parameters = module(numel)
    algorithm.setup(dict(parameters.named_parameters()), peers)
    return parameters


def one_pass(algorithm: Auto | AllReduce, parameters: nn.ParameterList, gradients: Tensor) -> Tensor:
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


def passes(algorithm: Auto | AllReduce, parameters: nn.ParameterList, rank: int, steps: range) -> list[Tensor]:
    return [one_pass(algorithm, parameters, gradients_of(step, rank)) for step in steps]


def take(algorithm: Auto, codec: Any) -> None:
    algorithm._take(next(place for place, made in enumerate(algorithm._candidates) if made.codec == codec))


def holds(algorithm: Auto) -> bool:
    """Residuals?"""
    return any(bool(residual.any()) for _, residual in algorithm.residuals())


# Measuring and choosing


@pytest.mark.parametrize(("network", "codec"), [("slow", BlockInt(8)), ("fast", Identity())])
def test_the_network_decides_at_setup(probe: Probe, network: str, codec: Any) -> None:
    probe.network = network

    def chosen(peers: FakePeers) -> tuple[str, list[str]]:
        algorithm = Auto(tune=False)
        set_up(peers, algorithm)
        assert algorithm.chosen.codec == codec
        assert algorithm.chosen.error_feedback is True
        news = algorithm.news()
        assert algorithm.news() == [], "once"
        algorithm.close()
        return repr(algorithm._candidates[algorithm._chosen]), news

    every_rank = on_all_ranks(4, chosen)
    assert len({repr_ for repr_, _ in every_rank}) == 1
    [line] = every_rank[0][1]
    # a model as short as this goes direct either way
    parts = [
        "4 ranks",
        "latency",
        "MB/s",
        "It chose",
        f"{type(codec).__name__}(",
        "over BySize()",
        "as good",
        "Direct()",
    ]
    assert [part for part in parts if part not in line] == []


def test_the_process_that_started_the_ranks_knows_what_was_chosen() -> None:
    there = Auto(tune=False)
    with pytest.raises(ValueError, match="has not chosen yet"):
        _ = there.chosen

    def chosen(peers: FakePeers) -> tuple[str, Any]:
        peers.hosts = ("a", "a", "b", "b")
        algorithm = Auto(tune=False)
        set_up(peers, algorithm)
        return repr(algorithm.chosen), algorithm.outcome()

    [(repr_, outcome), *others] = on_all_ranks(4, chosen)
    assert {other for other, _ in others} == {repr_}
    there.take_outcome(outcome)
    assert repr(there.chosen) == repr_
    assert there.chosen.collective == Hierarchical(), "which depends on the hosts"
    there.take_outcome(Auto().outcome())
    with pytest.raises(ValueError, match="has not chosen yet"):
        _ = there.chosen
    assert {type(made.collective) for made in eligible([Identity()], ("a", "a"))} == {BySize, Direct}
    assert {type(made.collective) for made in eligible([TopK()], ("a", "b"))} == {Direct}
    shown = in_words(AllReduce(BlockInt(4), Direct(), error_feedback=True, bucket_mb=5))
    assert shown == "BlockInt(bits=4) with error feedback over Direct(), buckets of 5 MB"


def trains(size: int, algorithms: list[Auto], numel: int = 1000, hosts: str = "") -> list[str]:
    """Each rank has its own algorithm; the first line in the log of each, and that they are fit to go on."""

    def train(peers: FakePeers) -> str:
        peers.hosts = tuple(hosts) or peers.hosts
        algorithm = algorithms[peers.rank]
        one_pass(algorithm, set_up(peers, algorithm, numel), torch.randn(3, numel))
        algorithm.close()
        return algorithm.news()[0]

    return on_all_ranks(size, train)


def after(algorithms: list[Auto], size: int) -> list[Auto]:
    """As many in new processes, each a copy of the one that has heard from rank 0."""
    there = Auto(tune=False)
    there.take_outcome(pickle.loads(pickle.dumps(algorithms[0].outcome())))
    return [copy.deepcopy(there) for _ in range(size)]


def test_what_was_measured_is_kept_for_the_next_training(probe: Probe) -> None:
    algorithms = [Auto(tune=False) for _ in range(2)]
    assert all("measured for" in line for line in trains(2, algorithms))
    assert probe.asked == [4 * 3000] * 2, "the largest wire, which is that of fp32"
    for numel in (1000, 10, 10**5):  # whatever its size, for the bandwidth is known
        assert all("goes by what it measured before" in line for line in trains(2, algorithms, numel))
    assert all("before" in line for line in trains(2, after(algorithms, 2)))
    assert len(probe.asked) == 2


def _other_codecs(algorithms: list[Auto]) -> list[str]:
    for algorithm in algorithms:
        algorithm.allow = (Identity(), BlockInt(4))
    return trains(2, algorithms, hosts="ab")


def _one_knows_otherwise(algorithms: list[Auto]) -> list[str]:
    kept = algorithms[1]._kept
    assert kept is not None
    algorithms[1]._kept = kept._replace(machines=replace(kept.machines, wake=1e-9))
    return trains(2, algorithms, hosts="ab")


def _changed(algorithms: list[Auto], **by: Any) -> list[str]:
    for algorithm in algorithms:
        assert algorithm._kept is not None
        algorithm._kept = algorithm._kept._replace(**by)
    return trains(2, algorithms, hosts="ab")


@pytest.mark.parametrize(
    ("again", "change"),
    {
        "a smaller model": (False, lambda known: trains(2, known, numel=10, hosts="ab")),
        "a larger one": (True, lambda known: trains(2, known, numel=10**4, hosts="ab")),
        "other hosts": (True, lambda known: trains(2, known, hosts="aa")),
        "more ranks": (True, lambda known: trains(3, after(known, 3), hosts="abc")),
        "another device": (True, lambda known: _changed(known, device="cuda")),
        "another transport": (True, lambda known: _changed(known, transport=Peers)),
        "other codecs": (True, _other_codecs),
        "one knows nothing": (True, lambda known: trains(2, [known[0], Auto(tune=False)], hosts="ab")),
        "one knows otherwise": (True, _one_knows_otherwise),
    }.values(),
)
def test_it_is_measured_again_where_what_was_measured_does_not_hold(
    probe: Probe, again: bool, change: Callable[[list[Auto]], list[str]]
) -> None:
    probe.known = False
    algorithms = [Auto(tune=False) for _ in range(2)]
    trains(2, algorithms, hosts="ab")
    assert all("before" in line for line in trains(2, algorithms, hosts="ab"))
    probe.asked.clear()
    lines = change(algorithms)
    assert ["before" in line for line in lines] == [not again] * len(lines), "all ranks or none"
    assert len(probe.asked) == (len(lines) if again else 0)


def test_what_measuring_and_choosing_send_is_counted_apart() -> None:
    def train(peers: FakePeers, made: type, **arguments: Any) -> Stats:
        algorithm = made(**arguments)
        passes(algorithm, set_up(peers, algorithm), peers.rank, range(60))
        algorithm.close()
        assert sum(peers.sent_to.values()) == (peers.stats.bytes_sent or 0) + peers.stats.probe_bytes_sent
        return peers.stats

    # all its candidates send alike
    [ours, *_] = on_all_ranks(3, partial(train, made=Auto, allow=[Identity()]))
    [plain, *_] = on_all_ranks(3, partial(train, made=AllReduce))
    assert ours.bytes_sent == plain.bytes_sent
    assert ours.bytes_received == plain.bytes_received
    assert (ours.exchanges, ours.values_averaged) == (plain.exchanges, plain.values_averaged) == (60, 60 * 3000)
    assert ours.probe_bytes_sent == ours.probe_bytes_received > 100
    assert ours.probe_seconds > 0
    assert (plain.probe_bytes_sent, plain.probe_bytes_received, plain.probe_seconds) == (0, 0, 0)


def test_ranks_that_would_predict_otherwise_do_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    predict = predicted.predict
    ranks = threading.local()

    def disturbed(candidate: AllReduce, *how: Any) -> Any:
        prediction = predict(candidate, *how)
        likes = (BlockInt(8), Identity(), Identity())[ranks.rank]
        return replace(prediction, seconds=prediction.seconds * (1e-3 if candidate.codec == likes else 1))

    monkeypatch.setattr(predicted, "predict", disturbed)

    def chosen(peers: FakePeers) -> Any:
        ranks.rank = peers.rank
        algorithm = Auto(tune=False)
        set_up(peers, algorithm)
        return algorithm.chosen.codec

    assert on_all_ranks(3, chosen) == [BlockInt(8)] * 3


def test_a_codec_that_cannot_carry_the_parameters_is_no_candidate() -> None:
    def chosen(peers: FakePeers) -> Any:
        parameters = {"z": nn.Parameter(torch.zeros(1000, dtype=torch.complex64))}
        with pytest.raises(TypeError, match="complex"):
            Auto(allow=[BlockInt(8)]).setup(parameters, peers)
        algorithm = Auto(tune=False)
        algorithm.setup(parameters, peers)
        return algorithm.chosen.codec

    assert on_all_ranks(2, chosen) == [Identity()] * 2


def test_models_that_differ_measure_by_messages_of_one_size_and_keep_no_hooks(probe: Probe) -> None:
    def alone_again(peers: FakePeers) -> Tensor | None:
        parameter = nn.Parameter(torch.zeros(1000 + peers.rank))
        with pytest.raises(PlanMismatchError) as caught:
            Auto().setup({"w": parameter}, peers)
        parameter.sum().backward()  # a hook would say that the strategy does not know of it
        assert caught.tb is not None, "which holds all that was made"
        return parameter.grad

    for rank, gradient in enumerate(on_all_ranks(2, alone_again)):
        assert torch.equal(gradient, torch.ones(1000 + rank))
    assert probe.asked == [4 * 1001] * 2


def test_wrong_arguments_are_refused() -> None:
    for wrong in ([], ["int8"], [BySize()], BlockInt(8)):
        with pytest.raises(TypeError, match="allow is a list of one codec or more"):
            Auto(allow=wrong)  # type: ignore[arg-type]
    assert Auto(allow=[BlockInt(8), Identity(), BlockInt(8)]).allow == (BlockInt(8), Identity())
    with pytest.raises(TypeError, match="error_feedback is True or False"):
        Auto(error_feedback=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="residual_dtype"):
        Auto(residual_dtype="float64")


# Trying


class Clock:
    """Instead of the time: the slowest rank finds `fastest` faster, another rank finds it slower."""

    def __init__(self, algorithm: Auto, fastest: type, rank: int) -> None:
        self.algorithm, self.fastest, self.rank = algorithm, fastest, rank
        self.time = 0.0

    def __call__(self) -> float:
        inner = self.algorithm.chosen
        pass_ = (1.0, 1.0, 2.0)[self.rank] if isinstance(inner.codec, self.fastest) else (3.0, 0.5, 3.0)[self.rank]
        self.time += pass_ * (1 + isinstance(inner.collective, Direct))
        return self.time


@pytest.mark.parametrize("fastest", [Identity, BlockInt])
def test_the_fastest_in_trials_is_kept_and_nothing_is_lost_on_the_way(
    monkeypatch: pytest.MonkeyPatch, fastest: type
) -> None:
    # both are near in the model; what the clock says decides
    monkeypatch.setattr(trials, "_NEAR", 100.0)
    monkeypatch.setattr(trials, "_NEAR_OTHER_CODEC", 100.0)
    monkeypatch.setattr(trials, "_MOST_TRIED", 100)

    def train(peers: FakePeers) -> tuple[list[Tensor], Tensor, list[str], list[str]]:
        algorithm = Auto()
        monkeypatch.setattr(algorithm, "_now", Clock(algorithm, fastest, peers.rank))
        parameters = set_up(peers, algorithm)
        means, used = [], []
        for step in range(90):
            means.append(one_pass(algorithm, parameters, gradients_of(step, peers.rank)))
            used.append(repr(algorithm.chosen))
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
    assert len(set(used)) >= 4, "lossy and lossless, over rings and directly"
    assert fastest.__name__ in used[-1]
    assert "BySize" in used[-1]
    assert len(news) == 2
    assert "keeps" in news[1]
    assert used[-1] == used[-20], "and then no more trials"

    true = torch.stack([gradients_of(step, rank) for step in range(90) for rank in range(3)]).double().sum(0) / 3
    delivered = torch.stack(means).double().sum(0)
    left = torch.stack([rank[1] for rank in every_rank]).double().sum(0)
    assert (delivered + left - true).abs().max() < 1e-4
    assert left.any() == (fastest is not Identity)


def test_a_lossless_choice_keeps_no_residual_once_it_has_delivered() -> None:
    def train(peers: FakePeers) -> list[int]:
        algorithm = Auto(tune=False)
        parameters, held = set_up(peers, algorithm), []
        for step in range(4):
            if step == 2:
                take(algorithm, Identity())
            one_pass(algorithm, parameters, gradients_of(step, peers.rank))
            held.append(sum(1 for _ in algorithm.residuals()))
            assert algorithm.state_dict()["step"] == step + 1, "seeds go on where they were"
        algorithm.close()
        return held

    assert on_all_ranks(2, train) == [[3, 3, 3, 0]] * 2


def test_another_training_begins_with_nothing_of_the_last() -> None:
    def train(peers: FakePeers) -> None:
        algorithm = Auto()
        passes(algorithm, set_up(peers, algorithm), peers.rank, range(1))
        take(algorithm, Identity())
        assert algorithm._inner.delivers
        algorithm.close()
        assert holds(algorithm), "for a checkpoint"
        set_up(peers, algorithm, 70)
        assert not holds(algorithm)
        assert algorithm.state_dict()["step"] == 0
        algorithm.close()

    on_all_ranks(2, train)


def test_what_is_loaded_takes_the_place_of_everything() -> None:
    def load(peers: FakePeers) -> None:
        algorithm = Auto()
        parameters = set_up(peers, algorithm)
        fresh = algorithm.state_dict()
        passes(algorithm, parameters, peers.rank, range(1))
        take(algorithm, BlockInt(8))
        assert holds(algorithm)
        in_a_trial = {**fresh, "step": 7, "auto": repr(algorithm._candidates[-1]), "tuned": False}
        algorithm.load_state_dict(in_a_trial)
        assert not holds(algorithm)
        assert algorithm.state_dict()["step"] == 7
        assert repr(algorithm.chosen) != in_a_trial["auto"], "it was only being tried"
        assert not algorithm._tuned
        algorithm.news()
        algorithm.load_state_dict({**in_a_trial, "tuned": True})
        assert repr(algorithm.chosen) == in_a_trial["auto"]
        assert algorithm._tuned
        [line] = algorithm.news()
        assert "goes on with" in line

    on_all_ranks(2, load)


def test_a_resumed_run_goes_on_with_what_was_chosen_bit_for_bit() -> None:
    def train(peers: FakePeers) -> None:
        first = Auto()
        first._now = Clock(first, BlockInt, peers.rank)  # type: ignore[method-assign]
        parameters = set_up(peers, first)
        passes(first, parameters, peers.rank, range(60))
        assert first._tuned
        state = copy.deepcopy(first.state_dict()), {name: kept.clone() for name, kept in first.residuals()}
        expected = passes(first, parameters, peers.rank, range(60, 70))
        first.close()
        again = Auto()
        parameters = set_up(peers, again)
        again.load_state_dict(state[0])
        assert again.load_residuals(state[1]) == []
        assert holds(again)
        assert repr(again.chosen) == state[0]["auto"]
        found = passes(again, parameters, peers.rank, range(60, 70))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        again.close()

    on_all_ranks(3, train)


def test_another_number_of_ranks_chooses_anew() -> None:
    def state_of(peers: FakePeers) -> dict[str, Any]:
        algorithm = Auto(allow=[Identity()])
        set_up(peers, algorithm)
        algorithm._tuned = True
        algorithm.close()
        return algorithm.state_dict()

    def goes_on_as(peers: FakePeers) -> tuple[Any, bool]:
        algorithm = Auto()
        set_up(peers, algorithm)
        algorithm.load_state_dict(state)
        return algorithm.chosen.codec, algorithm._tuned

    state = on_all_ranks(3, state_of)[0]
    assert on_all_ranks(3, goes_on_as) == [(Identity(), True)] * 3, "chosen by the network told of: BlockInt"
    assert on_all_ranks(2, goes_on_as) == [(BlockInt(8), False)] * 2


def test_without_feedback_nothing_is_tried_until_all_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_NEAR", 100.0)

    def train(peers: FakePeers) -> Tensor:
        algorithm = Auto(error_feedback=False)
        parameters = set_up(peers, algorithm)
        take(algorithm, Identity())
        algorithm._inner.delivers = True
        algorithm._take(algorithm._chosen, deliver=True)
        assert algorithm.load_residuals({"0": torch.ones(1000)}) == []
        parameters[0].requires_grad_(False)  # nothing delivers its residual
        passes(algorithm, parameters, peers.rank, range(20))
        assert algorithm._trials is None
        parameters[0].requires_grad_(True)
        before = gradients_of(20, 0) / 2 + gradients_of(20, 1) / 2
        delivered = one_pass(algorithm, parameters, gradients_of(20, peers.rank))[0] - before[0]
        passes(algorithm, parameters, peers.rank, range(21, 60))
        assert algorithm._trials is not None or algorithm._tuned
        return delivered

    assert all(torch.allclose(delivered, torch.full((1000,), 2.0)) for delivered in on_all_ranks(2, train))


@pytest.mark.parametrize(
    ("since", "due", "said"),
    # due after 8 passes; then after 4, and 1 before them if the first to be tried is lossless and delivers
    [(0, (8,), "untried"), (10, (12, 13), "which it was just trying")],
)
def test_a_loss_scaler_that_never_decides_ends_the_search_with_a_line(
    monkeypatch: pytest.MonkeyPatch, since: int, due: tuple[int, ...], said: str
) -> None:
    monkeypatch.setattr(auto, "_MOST_POSTPONED", 5)
    undecided = threading.local()
    monkeypatch.setattr(AllReduce, "undecided", property(lambda _: undecided.now))

    def train(peers: FakePeers) -> list[str]:
        undecided.now = False
        algorithm = Auto()
        parameters, gave_up = set_up(peers, algorithm), []
        for step in range(max(due) + 9):
            undecided.now = step >= since
            gave_up.append(algorithm._tuned)
            one_pass(algorithm, parameters, gradients_of(step, peers.rank))
        assert gave_up.index(True) - 5 in due
        assert all(gave_up[gave_up.index(True) :])
        assert not algorithm.state_dict()["tuned"], "another run may be able to"
        undecided.now = False
        passes(algorithm, parameters, peers.rank, range(9))
        assert algorithm._trials is None
        return algorithm.news()

    for news in on_all_ranks(2, train):
        assert len(news) == 2
        assert said in news[1]


def test_ranks_that_saw_other_times_predict_from_the_same() -> None:
    def profile(peers: FakePeers) -> Any:
        warm_up, later = [0.0] * 3, 1 + peers.rank
        passes = Passes(6, [*warm_up, 5.0 * later, 4.0 * later, 9.0], [*warm_up, 1.0, 1.0 * later, 2.0])
        launches = [(1000, 0.5 * later), (2000, 2.0), (1000, 3.0 * later)]
        return passes.profile(launches, Work(0.0, 0.25e-3), peers)

    first, second = on_all_ranks(2, profile)
    assert first == second
    assert first.backward == 6.0, "of the slowest rank: the median of 9, 6 and 7, less what packing took"
    assert first.ready == ((0.0, 0.0), (0.25, 0.125), (0.75, 0.5), (1.0, 0.75))


def turns(tried: list[int], seconds: Callable[[int, int], float]) -> tuple[list[int], int | None]:
    """Whose turn it was, and who won, if a pass of a candidate in a round takes so many seconds."""
    search, order, winner = Trials(tried), [], None
    while winner is None:
        place, passes = search.turn, [1e9]  # the first is a warm-up, and does not count
        while not search.turn_over(passes):
            passes.append(seconds(place, search.rounds))
        search.end_turn(passes)
        order.append(place)
        winner = search.judge(search.medians()) if search.round_over else None
    return order, winner


def test_trials_are_of_those_predicted_near_the_best_and_of_the_best_of_each_codec() -> None:
    codec_of = {0: "a", 1: "b", 2: "a", 3: "a", 4: "c", 5: "a", 6: "a"}
    predictions = {0: 1.0, 1: 1.4, 2: 1.2, 3: 1.3, 4: 1.6, 5: 0.99, 6: 1.21}
    tried = to_try(predictions, codec_of, "abc")  # type: ignore[arg-type]
    assert tried == [5, 0, 2, 6, 1], "3 is too slow, and 4 even for the best of its codec"
    predictions[3] = 1.19
    assert to_try(predictions, codec_of, "a") == [5, 0, 3, 2], "at most four"  # type: ignore[arg-type]


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
