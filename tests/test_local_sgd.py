"""Local SGD and DiLoCo: beside a numpy twin, the same shared parameters on all ranks, and what users do with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import nn

from ringstrategy import LocalSGD, Nesterov
from ringstrategy.algorithms.parameters.fragments import cut_fragments
from ringstrategy.transport.connect import connect

pytestmark = pytest.mark.timeout(120)
Arrays = dict[str, np.ndarray]
SHAPES = {
    "embed.weight": (40, 3),
    "layers.0.weight": (7, 5),
    "layers.0.bias": (3,),
    "layers.1.weight": (6, 5),
    "head": (),
}
STEPS = 50


def start() -> Arrays:
    random = np.random.default_rng(7)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def change_of(rank: int, step: int, values: Arrays) -> Arrays:
    """What an optimizer does: noise, and a pull towards an optimum that each rank has for itself."""
    random = np.random.default_rng([rank, step])
    return {
        name: (0.1 * random.standard_normal(shape) - 0.05 * (values[name] - rank)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def arrays_of(parameters: Mapping[str, nn.Parameter]) -> Arrays:
    return {name: parameter.detach().numpy().copy() for name, parameter in parameters.items()}


def run(algorithm: LocalSGD, steps: int) -> tuple[Arrays, Arrays, list[Arrays]]:
    """This rank's parameters at the end, Theta as validation sees it then, and Theta after each step."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    peers = connect(torch.device("cpu"), timedelta(seconds=30))
    parameters = {name: nn.Parameter(torch.tensor(values)) for name, values in start().items()}
    thetas = []
    try:
        algorithm.setup(parameters, peers)
        algorithm.bind(set(parameters.values()))
        for step in range(steps):
            with torch.no_grad():
                for name, change in change_of(peers.rank, step, arrays_of(parameters)).items():
                    parameters[name] += torch.tensor(change)
            algorithm.after_step(set(parameters.values()))
            thetas.append(theta_of(algorithm))
        assert (peers.stats.bytes_sent or 0) > 0
        own = arrays_of(parameters)
        assert algorithm.enter_consensus()
        seen = arrays_of(parameters)
        algorithm.leave_consensus()
        assert all(np.array_equal(own[name], again) for name, again in arrays_of(parameters).items())
        return own, seen, thetas
    finally:
        algorithm.close()
        peers.close()
        dist.destroy_process_group()


def theta_of(algorithm: LocalSGD) -> Arrays:
    shared = algorithm.state_dict()["shared"]
    return {name: shared[name]["values"].numpy().copy() for name in SHAPES}


class Twin:
    """One parameter's values of all ranks, in float64, as the papers write it."""

    def __init__(self, size: int, values: np.ndarray, algorithm: LocalSGD, first: int) -> None:
        self.size, self.algorithm, self.first = size, algorithm, first
        self.own = [values.astype(np.float64) for _ in range(size)]
        self.theta = values.astype(np.float64)
        self.momentum = np.zeros_like(self.theta)
        self.anchors = [self.theta] * size
        self.momenta = [self.momentum] * size
        self.sent: list[np.ndarray] | None = None
        self.gradients: list[np.ndarray] = []
        self.others: list[np.ndarray] = [np.zeros_like(self.theta)] * size

    def outer(self, theta: np.ndarray, momentum: np.ndarray, gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        outer = self.algorithm.outer
        if outer is None:
            return theta - gradient, momentum
        assert isinstance(outer, Nesterov)
        momentum = outer.momentum * momentum + gradient
        return theta - outer.lr * (gradient + outer.momentum * momentum), momentum

    def after_step(self, turn: int) -> None:
        algorithm = self.algorithm
        if turn <= algorithm.warmup_steps:
            self.theta = sum(self.own) / self.size
            self.own, self.anchors = [self.theta] * self.size, [self.theta] * self.size
            return
        assert isinstance(algorithm.interval, int)
        since = (turn - algorithm.warmup_steps - self.first) % algorithm.interval
        late = algorithm.overlap * algorithm.interval if isinstance(algorithm.overlap, bool) else algorithm.overlap
        if self.sent is not None and since in (0, late):
            self.land(late)
        if since == 0:
            self.send()
            if late == 0:
                self.land(late)

    def send(self) -> None:
        self.sent = self.own
        origins = self.anchors if self.algorithm.eager else [self.theta] * self.size
        self.gradients = [origin - own for origin, own in zip(origins, self.own, strict=True)]
        if self.algorithm.eager:
            for rank, gradient in enumerate(self.gradients):
                step = self.outer(self.anchors[rank], self.momenta[rank], gradient / self.size + self.others[rank])
                self.anchors[rank], self.momenta[rank] = step
            self.own = list(self.anchors)

    def land(self, late: int) -> None:
        assert self.sent is not None
        mean = sum(self.gradients) / self.size
        self.others = [mean - gradient / self.size for gradient in self.gradients]
        self.theta, self.momentum = self.outer(self.theta, self.momentum, mean)
        blend = self.algorithm.blend
        if blend is not None:
            self.own = [blend * own + (1 - blend) * self.theta for own in self.own]
        elif not self.algorithm.eager:
            self.own = [self.theta + own - sent for own, sent in zip(self.own, self.sent, strict=True)]
        self.sent = None


def twin(algorithm: LocalSGD, size: int, steps: int, firsts: Mapping[str, int]) -> tuple[list[Arrays], list[Arrays]]:
    """All ranks' parameters at the end, and Theta after each step."""
    twins = {name: Twin(size, values, algorithm, firsts[name]) for name, values in start().items()}
    thetas = []
    for step in range(steps):
        for rank in range(size):
            now = {name: each.own[rank].astype(np.float32) for name, each in twins.items()}
            for name, change in change_of(rank, step, now).items():
                twins[name].own = [*twins[name].own]
                twins[name].own[rank] = twins[name].own[rank] + change
        for each in twins.values():
            each.after_step(step + 1)
        thetas.append({name: each.theta for name, each in twins.items()})
    return [{name: each.own[rank] for name, each in twins.items()} for rank in range(size)], thetas


def firsts_of(algorithm: LocalSGD) -> dict[str, int]:
    """The turn of each parameter's first exchange, counted from the end of the warm-up."""
    parameters = {name: nn.Parameter(torch.tensor(values)) for name, values in start().items()}
    parts = cut_fragments(parameters, algorithm.fragments)
    assert isinstance(algorithm.interval, int)
    return {name: (place + 1) * algorithm.interval // len(parts) for place, part in enumerate(parts) for name in part}


ALGORITHMS: dict[str, Callable[[], LocalSGD]] = {
    "plain": lambda: LocalSGD(interval=4),
    "momentum": lambda: LocalSGD(interval=4, outer=Nesterov()),
    "carried": lambda: LocalSGD(interval=6, outer=Nesterov(0.8, 0.6), overlap=2),
    "carried whole": lambda: LocalSGD(interval=3, outer=Nesterov(0.5, 0.5), overlap=True),
    "streaming": lambda: LocalSGD(interval=8, outer=Nesterov(), fragments=3, overlap=3, blend=0.5, warmup_steps=3),
    "eager": lambda: LocalSGD(interval=5, outer=Nesterov(0.7, 0.5), overlap=True, eager=True, warmup_steps=2),
    "blended at once": lambda: LocalSGD(interval=5, outer=Nesterov(1.0, 0.0), blend=0.25, fragments=2),
}


def compare(ranks: Pool, size: int, name: str) -> None:
    algorithm = ALGORITHMS[name]()
    found = ranks(size, run, algorithm, STEPS)
    expected, thetas = twin(algorithm, size, STEPS, firsts_of(algorithm))
    for rank, (own, seen, told) in enumerate(found):
        for key in SHAPES:
            np.testing.assert_allclose(own[key], expected[rank][key], rtol=1e-5, atol=1e-6, err_msg=f"{name} {key}")
            np.testing.assert_array_equal(seen[key], told[-1][key])
            for step, theta in enumerate(told):
                np.testing.assert_array_equal(theta[key], found[0][2][step][key])
                np.testing.assert_allclose(theta[key], thetas[step][key], rtol=1e-5, atol=1e-6, err_msg=f"{step}")
    assert max(np.abs(own["layers.0.weight"] - found[0][0]["layers.0.weight"]).max() for own, _, _ in found) > 0.01


@pytest.mark.parametrize("name", ALGORITHMS)
def test_three_ranks_agree_with_a_numpy_twin(ranks: Pool, name: str) -> None:
    compare(ranks, 3, name)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4, 5, 8])
def test_ranks_agree_with_a_numpy_twin(ranks: Pool, size: int) -> None:
    for name in ALGORITHMS:
        compare(ranks, size, name)
