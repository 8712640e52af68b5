"""Arguments of algorithms that cannot be right are refused where they are given; names mean what their YAML says."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakePeers, Network, Toy
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from lightning.pytorch.strategies import StrategyRegistry
from test_strategy import Net, fit
from torch import Tensor, nn

import ringstrategy
from ringstrategy import (
    AllReduce,
    Auto,
    BlockInt,
    BySize,
    Choco,
    CommunicationMonitor,
    Gossip,
    Identity,
    LocalSGD,
    MuonAdamW,
    Native,
    Nesterov,
    PowerSGD,
    PushSum,
    ReplicaCheck,
    Ring,
    RingStrategy,
    SmallExact,
    TopK,
    topologies,
)
from ringstrategy.algorithms.base import Algorithm
from ringstrategy.algorithms.server.shards import check_optimizer
from ringstrategy.app.refusals import check_arguments
from ringstrategy.names import STRATEGIES
from ringstrategy.topologies import Exponential, FromGraph, FromMatrix, OnePeerExponential, RingGraph

WHOLE = torch.zeros(6, 4)


def set_up(algorithm: Algorithm, *values: Tensor) -> None:
    """On one of two ranks."""
    named = {str(place): nn.Parameter(each) for place, each in enumerate(values)}
    algorithm.setup(named, FakePeers(Network(2), 0))


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: AllReduce("int8"), "TypeError: .*Identity"),
    (lambda: AllReduce(Identity), "TypeError: .*Identity"),
    (lambda: AllReduce(Toy(), Native()), "ValueError: .*Ring"),
    (lambda: AllReduce(collective="ring"), "TypeError: .*Ring"),
    (lambda: AllReduce(error_feedback="yes"), "TypeError: .*True or False"),
    *[(lambda bad=bad: AllReduce(bucket_mb=bad), "ValueError: .*> 0") for bad in (0, "25", True)],
    (lambda: AllReduce(local="wide"), "TypeError: .*function"),
    (lambda: AllReduce(residual_dtype="fp16"), "ValueError: .*bfloat16"),
    *[(lambda bad=bad: AllReduce(codec_threads=bad), "ValueError: .*how many cores") for bad in (0, 1.5, True)],
    (lambda: AllReduce(uneven="wait"), "ValueError: .*'error'.*'join'.*got 'wait'"),
    (lambda: AllReduce(on_nonfinite="ignore"), "ValueError: .*'propagate'.*'skip'.*'raise', got 'ignore'"),
    (lambda: SmallExact("int8"), r"TypeError: .*Identity\(\)"),
    (lambda: SmallExact(Toy(), small=None), r"TypeError: .*Identity\(\)"),
    (lambda: SmallExact(Toy(), below=-1), "ValueError: .*>= 0"),
    (lambda: SmallExact(Toy(), names="embedding"), r"TypeError: .*\['embedding'\]"),
    *[(lambda bad=bad: PowerSGD(bad), "ValueError: .*>= 1") for bad in (0, True, 1.5)],
    (lambda: PowerSGD(codec="int8"), "TypeError: .*Identity"),
    (lambda: PowerSGD(codec=Toy(), collective=Native()), "ValueError: .*Ring"),
    (lambda: PowerSGD(error_feedback=None), "TypeError: .*True or False"),
    *[
        (lambda bad=bad: Auto(allow=bad), "TypeError: allow is a list of one codec or more")
        for bad in ([], ["int8"], [BySize()], BlockInt(8))
    ],
    (lambda: Auto(error_feedback=1), "TypeError: error_feedback is True or False"),
    (lambda: Auto(residual_dtype="float64"), "ValueError: residual_dtype"),
    (lambda: Gossip("ring"), r"TypeError: .*RingGraph\(\)"),
    (lambda: Gossip(codec="int8"), r"TypeError: .*Identity\(\)"),
    (lambda: Gossip(codec=BlockInt(8)), "ValueError: .*Choco"),
    (lambda: Gossip(FromMatrix([[0.5, 1.0], [0.5, 0.0]])), "ValueError: .*rows.*PushSum"),
    *[(lambda bad=bad: Gossip(interval=bad), "ValueError: .*at least 1") for bad in (0, True)],
    (lambda: Gossip(unit="steps"), "ValueError: .*'step' or 'epoch'"),
    (lambda: Gossip(overlap="yes"), "TypeError: overlap is True, False, or after how many steps"),
    *[(lambda bad=bad: Gossip(interval=3, overlap=bad), f"ValueError: .*1 to interval=3, got {bad}") for bad in (4, 0)],
    (lambda: Gossip(interval=3, overlap=2, unequal_data=True), "ValueError: .*overlap=True or False"),
    (lambda: Gossip(unequal_data=1), "TypeError: .*True or False"),
    (lambda: Gossip(OnePeerExponential(), unequal_data=True), "ValueError: .*same symmetric matrix"),
    (lambda: Gossip(unequal_data=True, outer=Nesterov()), "ValueError: .*leave one of them out"),
    (lambda: Gossip(outer=partial(torch.optim.SGD, lr=0.7)), r"TypeError: .*Nesterov\(lr, momentum\) or None"),
    (lambda: set_up(Gossip(outer=Nesterov(1.5, 0.9))), "ValueError: .*differences .*take a smaller lr"),
    *[
        (lambda bad=bad: Choco(bad), r"ValueError: .*RingGraph\(\), Torus\(\)")
        for bad in (OnePeerExponential(), Exponential())
    ],
    *[(lambda bad=bad: Choco(gain=bad), "ValueError: .*0 < gain <= 1") for bad in (0, float("nan"))],
    (lambda: PushSum(RingGraph), r"TypeError: .*RingGraph\(\)"),
    (lambda: set_up(Gossip(FromGraph([(0, 1), (1, 2)])), torch.zeros(6)), "ValueError: .*3 ranks, but there are 2"),
    (lambda: set_up(LocalSGD(), WHOLE, WHOLE[2:4]), "ValueError: .*have a part .*: give each memory of its own"),
    (lambda: LocalSGD(4, fragments=5), "ValueError: .*take at most as many"),
    (lambda: LocalSGD(fragments=0), "ValueError: .*whole number >= 1"),
    (lambda: LocalSGD(warmup_steps=-1), "ValueError: .*whole number >= 0"),
    (lambda: LocalSGD(warmup_steps=3, unit="epoch"), "ValueError: .*unit='step'"),
    (lambda: LocalSGD(codec=TopK(), collective=Ring()), "ValueError: .*Direct"),
    (lambda: LocalSGD(within_host=True, uneven="join"), "ValueError: .*uneven='error'"),
    *[
        (lambda bad=bad: LocalSGD(outer=bad), "TypeError: outer makes an optimizer")
        for bad in (0.7, Nesterov, lambda parameters: None)
    ],
    *[(lambda bad=bad: Nesterov(lr=bad), "ValueError: lr is a number") for bad in (0, True)],
    *[(lambda bad=bad: Nesterov(momentum=bad), "ValueError: momentum is a number") for bad in (1.0, -0.1)],
    (lambda: CommunicationMonitor(-1), "ValueError: .*0 for never"),
    (lambda: CommunicationMonitor(0.5), "TypeError: .*whole number"),
    *[(lambda bad=bad: ReplicaCheck(bad), "ValueError: every_n_steps") for bad in (0, True, 1.5)],
    (lambda: MuonAdamW(torch.nn.Linear(2, 2).parameters()), r"ValueError: .*module.named_parameters\(\)"),
    (lambda: MuonAdamW([], adamw="head"), r"TypeError: .*pass \['head'\]"),
    (lambda: MuonAdamW([("head.weight", torch.nn.Parameter(torch.ones(2, 2)))]), "ValueError: no matrix .*use AdamW"),
    (
        lambda: check_optimizer(MuonAdamW(torch.nn.Linear(2, 2).named_parameters()), 1),
        "ValueError: .*wraps Muon: .*ring",
    ),
]


def test_what_cannot_be_right_is_refused_with_the_cure() -> None:
    for place, (make, words) in enumerate(REFUSED):
        with pytest.raises((TypeError, ValueError)) as caught:
            pytest.fail(f"row {place}: {make()} was taken")
        assert re.match(words, f"{caught.type.__name__}: {caught.value}"), f"row {place}: {caught.value}"


def test_what_looks_odd_and_is_right() -> None:
    assert Auto(allow=[BlockInt(8), Identity(), BlockInt(8)]).allow == (BlockInt(8), Identity())
    assert "SGD(" in repr(LocalSGD(outer=torch.optim.SGD)), "whose lr has a default"


# Registered names

YAMLS = {path.stem for path in (Path(__file__).parents[1] / "configs" / "strategy").glob("*.yaml")} - {"ddp"}


def test_every_name_has_a_yaml_that_builds_what_it_means() -> None:
    assert set(STRATEGIES) == YAMLS
    with initialize_config_module("ringstrategy.configs", version_base="1.3"):
        for name in STRATEGIES:
            config = compose("train", [f"strategy={name}"])
            check_arguments(config)
            from_yaml, from_table = instantiate(config.strategy), StrategyRegistry.get(name)
            assert isinstance(from_yaml, RingStrategy)
            assert repr(from_yaml) == repr(from_table)
            assert from_yaml._timeout == from_table._timeout
            assert from_yaml._start_method == from_table._start_method == "popen"


def test_a_name_is_the_code_that_the_page_shows() -> None:
    page = (Path(__file__).parents[1] / "docs" / "strategies.md").read_text()
    public = {name: getattr(module, name) for module in (ringstrategy, topologies) for name in module.__all__}
    for name, make in STRATEGIES.items():
        code = ringstrategy.describe(name)
        assert f"| `{name}` | `{code.removeprefix('RingStrategy(')[:-1]}` | " in page
        assert repr(eval(code, public)) == repr(RingStrategy(name)) == repr(RingStrategy(make()))
    assert "segments" not in ringstrategy.describe("ring_int4"), "what is the default is left out"


def test_one_process_trains_as_without_a_strategy() -> None:
    options: dict[str, Any] = {"max_epochs": 1, "use_distributed_sampler": False}
    plain = fit("auto", Net(), **options).lightning_module
    for name in STRATEGIES:
        trainer = fit(name, Net(), **options)
        assert isinstance(trainer.strategy, RingStrategy)
        assert trainer.strategy.stats.bytes_sent == 0
        assert all(map(torch.equal, trainer.lightning_module.parameters(), plain.parameters())), name


class Marks:
    """A function that is an object: its `repr` holds an address."""

    def __call__(self, *_: Any) -> bool:
        return False


def test_functions_and_sets_that_print_differently_are_the_same() -> None:
    """Each process has a hash seed of its own, and addresses of its own."""
    names = ("a*", "b*", "c*", "d*", "e*")
    functions = [AllReduce(local=partial(print, set(names))), AllReduce(partial(print, set(names)))]
    functions += [make(local=Marks()) for make in (AllReduce, PowerSGD, Gossip, Auto)]
    for algorithm in functions:
        assert not re.search(r"0x|\*", repr(algorithm)), algorithm
    shown = repr(AllReduce(SmallExact(BlockInt(8), names=set(names))))
    places = [shown.index(name) for name in names]
    assert places == sorted(places)
