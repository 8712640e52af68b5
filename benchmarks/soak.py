"""Random small models train for a long time, each step beside an exact one; and what grows over thousands of steps.

python -m benchmarks soak --minutes 30 --out outputs/soak.jsonl

Each configuration is drawn from a seed: 2 to 4 ranks, a model, an optimizer, an algorithm with codec, collective,
bucket size and error feedback. The ranks train it for a few steps through `Session`. Before each exchange the gradients
of all ranks are gathered over the default group, and averaged in float64. The laws (docs/design.md):

- Gradients and parameters have the same bits on all ranks. A gradient that no rank has stays absent.
- A mean is the exact one but for rounding (lossless), or within the bound of its codec (`benchmarks.drawn.BOUNDS`).
- What is delivered, and what the residuals keep, are what went in.
- A mixing (gossip) keeps the mean of all ranks. All ranks look at the same mean, and it is the exact one.

An error names the seed, and `--seed SEED --only` repeats this configuration.

Before that, one fixed model trains for 5,500 steps with each of `ring_int8` (with error feedback) and `gossip_int8`.
Resident memory, threads and open descriptors after 5,500 steps are compared with those after 500.
"""

from __future__ import annotations

import argparse
import copy
import gc
import hashlib
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import drawn, harness
from benchmarks.ranks import results_of
from benchmarks.rows import Row
from ringstrategy import AllReduce, BlockInt, PushSum, SmallExact
from ringstrategy.algorithms.base import Algorithm
from ringstrategy.names import STRATEGIES
from ringstrategy.session import Session

_AT_ONCE = 30  # configurations between two starts of processes
_LONGEST_SECONDS = 1200.0  # that a start of processes may take
_TIMEOUT = timedelta(seconds=60)
_LEAST = 1e-30  # a scale below this counts as this
_ROWS = 23  # of an embedding
_EXACT = 16  # roundings in a sum of all ranks' rows
_GROWTH_STEPS, _GROWTH_RANKS = 5000, 2
_GROWS: dict[str, Callable[[], Algorithm]] = {
    "ring_int8, feedback": lambda: AllReduce(BlockInt(8), error_feedback=True),
    "gossip_int8": STRATEGIES["gossip_int8"],
}
_DRAWS = {"lossless": drawn.lossless, "lossy": drawn.lossy, "gossip": drawn.gossip}
KINDS = tuple(_DRAWS)


class Harm(AssertionError):
    """A law that does not hold."""


def _law(holds: object, words: str) -> None:
    if not holds:
        raise Harm(words)


# What is drawn


@dataclass(frozen=True)
class Config:
    """One configuration; `Config.draw(seed)` is the same on every rank."""

    seed: int
    kind: str
    size: int  # ranks
    widths: tuple[int, ...]
    sides: int  # layers that are used by some ranks in some steps
    freezes: bool  # the first layer is frozen
    sparse: bool  # there is an embedding with a sparse gradient
    dtype: torch.dtype
    optimizer: str
    accumulate: int
    clip: str
    zeroes_in_place: bool
    steps: int

    @staticmethod
    def draw(seed: int) -> Config:
        """By the seed alone."""
        rng = random.Random(seed)
        kind = rng.choice(KINDS)
        sparse = rng.random() < 0.25
        return Config(
            seed=seed,
            kind=kind,
            size=_size(seed),
            widths=tuple(rng.choice((1, 3, 8, rng.randint(1, 70))) for _ in range(rng.randint(2, 5))),
            sides=rng.choice((0, 0, 1, 2)),
            freezes=rng.random() < 0.2,
            sparse=sparse,
            dtype=rng.choice((torch.float32,) * 3 + (torch.float64, torch.bfloat16)),
            optimizer="sgd" if sparse else rng.choice(list(drawn.OPTIMIZERS)),
            accumulate=rng.choice((1, 1, 1, 2, 3)),
            clip="" if sparse or kind == "gossip" else rng.choice(("", "", "norm", "value")),
            zeroes_in_place=rng.random() < 0.2,
            steps=rng.randint(4, 10),
        )

    def algorithm(self) -> Algorithm:
        """A new one."""
        return _DRAWS[self.kind](random.Random(self.seed + 1))

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Of the trained parameters."""
        return drawn.OPTIMIZERS[self.optimizer]([p for p in module.parameters() if p.requires_grad])


def _size(seed: int) -> int:
    return 2 + seed % 3


class _Net(nn.Module):
    """Layers one after another, and some beside them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        first, *rest = config.widths
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(config.widths, rest, strict=False))
        self.sides = nn.ModuleList(nn.Linear(first, rest[-1]) for _ in range(config.sides))
        self.rows = nn.Embedding(_ROWS, rest[-1], sparse=True) if config.sparse else None
        self.last = nn.Linear(rest[-1], 2)
        self.layers[0].requires_grad_(not config.freezes)
        self.to(config.dtype)

    def forward(self, x: Tensor, which: Tensor, used: Sequence[bool]) -> Tensor:
        """`used`: which of the sides are."""
        y = x
        for layer in self.layers:
            y = layer(y).tanh()
        for side, is_used in zip(self.sides, used, strict=True):
            y = y + side(x) if is_used else y
        output: Tensor = self.last(y if self.rows is None else y + self.rows(which))
        return output


def _loss(config: Config, module: _Net, rank: int, step: int, micro: int) -> Tensor:
    """Other data on each rank and at each time."""
    place = (config.seed * 16 + rank) * 1000 + step
    generator = torch.Generator().manual_seed(place * 8 + micro)
    rng = random.Random(place)
    used = [rng.random() < 0.6 for _ in module.sides]
    x = torch.randn(5, config.widths[0], generator=generator).to(config.dtype) * 2.0 ** (rank % 3)
    which = torch.randint(_ROWS, (5,), generator=generator)
    loss: Tensor = (module(x, which, used).float().sin() - rank).square().mean() / config.accumulate
    return loss


# The oracle


def _everyone(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _same_everywhere(tensors: Sequence[Tensor | None], what: str) -> None:
    hashed = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            hashed.update(tensor.detach().to_dense().double().numpy().tobytes())
        hashed.update(b"next")
    _law(len(set(_everyone(hashed.digest()))) == 1, f"ranks differ in {what}")


def _largest(value: Tensor | None) -> float:
    return 0.0 if value is None or not value.numel() else float(value.abs().max())


def _sum(values: Iterable[Tensor | None], like: Tensor) -> Tensor:
    total = torch.zeros(like.shape, dtype=torch.float64)
    for value in values:
        if value is not None:
            total += value.double()
    return total


Tensors = dict[str, Tensor | None]


def _residuals(session: Session) -> Tensors:
    kept = session.state_dict().get("residuals") or {}
    return {name: value.detach().double().clone() for name, value in kept.items()}


def _bound(algorithm: Algorithm) -> float:
    if not isinstance(algorithm, AllReduce):
        return drawn.OTHERS
    codec = algorithm.codec.codec if isinstance(algorithm.codec, SmallExact) else algorithm.codec
    return drawn.BOUNDS[codec]  # type: ignore[index]


def _least(algorithm: Algorithm) -> float:
    """Below it float16 has fewer and fewer digits."""
    return 2.0**-14 if "float16" in repr(algorithm).replace("bfloat16", "") else _LEAST


class _Means:
    """Compares an exchange of gradients with the exact mean of what went in."""

    def __init__(self, config: Config, algorithm: Algorithm, session: Session, module: _Net) -> None:
        self._config, self._algorithm, self._session = config, algorithm, session
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        narrow = getattr(algorithm, "residual_dtype", None) is not None
        self._precision = max(2.0**-8 if narrow else 2.0**-18, 4 * torch.finfo(config.dtype).eps)
        self._before: list[Tensors] = []
        self._given: list[Tensors] = []
        self._means: Tensors = {}

    def begin(self, gradients: Tensors) -> None:
        """Before the exchange: what this rank gives."""
        self._given, self._before = _everyone(gradients), _everyone(_residuals(self._session))

    def end(self) -> None:
        """After the exchange."""
        self._means = {name: None if p.grad is None else p.grad.to_dense() for name, p in self._parameters.items()}
        _same_everywhere(list(self._means.values()), "gradients")
        scale = max(sum(map(_most, [*self._given, *self._before])), _least(self._algorithm))
        for name, parameter in self._parameters.items():
            given, mean = [of_rank[name] for of_rank in self._given], self._means[name]
            if all(value is None for value in given):
                _law(mean is None, f"no rank has a gradient of {name}, and it got one")
                continue
            assert mean is not None
            left = [of_rank.get(name) for of_rank in self._before]
            exact = self._exact(name, parameter)
            error = _largest(mean.double() - exact)
            eps = torch.finfo(self._config.dtype).eps
            if self._config.kind == "lossless" or name.startswith("rows"):
                allowed = _EXACT * eps * max(sum(map(_largest, given)), _LEAST)
            else:  # a rank without a gradient keeps its residual
                waiting = sum(_largest(kept) for value, kept in zip(given, left, strict=True) if value is None)
                allowed = (_bound(self._algorithm) + 4 * eps) * scale + waiting
            _law(error <= allowed, f"the mean of {name} is {error} from the exact one, and may be {allowed}")

    def after_step(self) -> None:
        """After an optimizer has stepped just these means."""
        after = _everyone(_residuals(self._session))
        if not any(after) or self._config.clip:
            return
        scale = max(sum(map(_most, [*self._given, *self._before])), _LEAST)
        for name, parameter in self._parameters.items():
            before = [of_rank.get(name) for of_rank in self._before]
            kept = [of_rank.get(name) for of_rank in after]
            mean = self._means[name]
            if mean is None:
                same = all(a is None or b is None or torch.equal(a, b) for a, b in zip(before, kept, strict=True))
                _law(same, f"no rank has a gradient of {name}, and its residual has changed")
            elif not name.startswith("rows"):
                error = _largest(_sum([mean, *kept], parameter) - self._exact(name, parameter))
                _law(error <= self._precision * scale, f"{error / scale} of the largest of {name} is in no residual")

    def _exact(self, name: str, parameter: Tensor) -> Tensor:
        gradients = _sum((of_rank[name] for of_rank in self._given), parameter) / len(self._given)
        return gradients + _sum((of_rank.get(name) for of_rank in self._before), parameter)


def _most(of_rank: Tensors) -> float:
    return max(map(_largest, of_rank.values()), default=0.0)


def _flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in module.parameters()])


def _mean_of_all(mine: Tensor) -> tuple[Tensor, float]:
    """The mean of all ranks, and the largest magnitude."""
    everyone = torch.stack(harness.of_all_ranks(mine))
    return everyone.mean(0), _largest(everyone)


@contextmanager
def _opened(module: nn.Module, algorithm: Algorithm, clips_by_norm: bool = False) -> Iterator[Session]:
    session = Session(module, algorithm, timeout=_TIMEOUT)
    session.open(torch.device("cpu"), clips_by_norm=clips_by_norm)
    session.synchronize()
    try:
        yield session
    except BaseException as error:
        session.tell(error)
        raise
    finally:
        session.close()


def run(config: Config) -> int:
    """Train it on this rank; how many steps were compared. `Harm` if a law does not hold."""
    rank = dist.get_rank()
    torch.manual_seed(config.seed * 10 + rank)
    module, algorithm = _Net(config), config.algorithm()
    with _opened(module, algorithm, config.clip == "norm") as session:
        optimizer = config.make_optimizer(module)
        session.bind([optimizer])
        means = _Means(config, algorithm, session, module)
        for step in range(config.steps):
            _accumulate(config, session, module, optimizer, step, means)
            if config.kind == "gossip":
                _check_mixing(config, session, module, optimizer, exact=not isinstance(algorithm, PushSum))
                continue
            means.end()
            if config.clip == "norm":
                nn.utils.clip_grad_norm_(module.parameters(), 0.05)
            elif config.clip == "value":
                nn.utils.clip_grad_value_(module.parameters(), 0.05)
            optimizer.step()
            session.end_batch(1)
            means.after_step()
            _same_everywhere(list(module.parameters()), "parameters")
        if config.kind == "gossip":
            _check_consensus(config, session, module)
    _law(all(p.isfinite().all() for p in module.parameters()), "parameters are not finite")
    return config.steps


def _accumulate(
    config: Config, session: Session, module: _Net, optimizer: torch.optim.Optimizer, step: int, means: _Means
) -> None:
    """The backwards of a step, and their exchange."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    optimizer.zero_grad(set_to_none=not config.zeroes_in_place)
    # zeros that were left in place are a gradient, with which a residual travels
    gradients: Tensors = {name: None if p.grad is None else torch.zeros_like(p) for name, p in trained.items()}
    for micro in range(config.accumulate):
        begins, ends = step + micro == 0, micro + 1 == config.accumulate
        session.begin_batch(f"in step {step}", [optimizer], first=begins, later_epoch=False)
        loss = _loss(config, module, dist.get_rank(), step, micro)
        found = torch.autograd.grad(loss, list(trained.values()), retain_graph=True, allow_unused=True)
        for name, gradient in zip(trained, found, strict=True):
            if gradient is not None:
                dense, so_far = gradient.to_dense(), gradients[name]
                gradients[name] = dense if so_far is None else so_far + dense
        if ends and config.kind != "gossip":
            means.begin(gradients)
        with nullcontext() if ends else session.no_sync():
            session.backward(loss)
        if not ends:
            session.end_batch(0)


def _check_mixing(
    config: Config, session: Session, module: _Net, optimizer: torch.optim.Optimizer, *, exact: bool
) -> None:
    """Step and mix. `exact`: this keeps the mean of what all ranks have stepped."""
    twin = copy.deepcopy(module)
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        theirs.grad = None if ours.grad is None else ours.grad.clone()
    alone = config.make_optimizer(twin)
    alone.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    alone.step()
    optimizer.step()
    session.end_batch(1)
    if exact:
        (stepped, largest), (mixed, _) = _mean_of_all(_flat(twin)), _mean_of_all(_flat(module))
        error = _largest(mixed - stepped)
        allowed = _EXACT * torch.finfo(config.dtype).eps * max(largest, _LEAST)
        _law(error <= allowed, f"a mixing moved the mean by {error}, and may by {allowed}")


def _check_consensus(config: Config, session: Session, module: _Net) -> None:
    own = _flat(module)
    mean, largest = _mean_of_all(own)
    with session.consensus():
        shown = _flat(module)
        _same_everywhere([shown], "what they look at")
    error = _largest(shown - mean)
    allowed = _EXACT * torch.finfo(config.dtype).eps * max(largest, _LEAST)
    _law(error <= allowed, f"what is looked at is {error} from the mean, and may be {allowed}")
    _law(torch.equal(_flat(module), own), "looking at the mean has changed the parameters")


# Growth


def _held() -> tuple[int, int, int]:
    """Resident bytes, threads and open descriptors of this process."""
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def grow(steps: int, name: str) -> tuple[float, int, int]:
    """By how much this rank grows from step `steps` / 10 on in so many steps: bytes a step, threads, descriptors."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    generator = torch.Generator().manual_seed(dist.get_rank())
    begun = (0, 0, 0)
    with _opened(module, _GROWS[name]()) as session:
        optimizer = torch.optim.SGD(module.parameters(), 1e-3, momentum=0.9)
        session.bind([optimizer])
        for step in range(steps + steps // 10):
            if step == steps // 10:
                begun = _held()
            session.begin_batch(f"in step {step}", [optimizer], first=step == 0, later_epoch=False)
            optimizer.zero_grad()
            session.backward(module(torch.randn(8, 64, generator=generator)).square().mean())
            optimizer.step()
            session.end_batch(1)
        ended = _held()
    return (ended[0] - begun[0]) / steps, ended[1] - begun[1], ended[2] - begun[2]


# Processes


@contextmanager
def _group() -> Iterator[None]:
    warnings.filterwarnings("ignore", message="PowerSGD.*compresses none")  # of models as small as these
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    yield
    dist.barrier()
    dist.destroy_process_group()


def _on_ranks(size: int, work: Callable[[Any], Any], given: Sequence[Any]) -> tuple[list[list[Any]], list[str]]:
    return results_of(size, work, given, _group, _LONGEST_SECONDS)


def _run_seed(seed: int) -> int:
    return run(Config.draw(seed))


def soak(seed: int, seconds: float) -> tuple[dict[str, Counter[str]], list[str]]:
    """Counts by kind of configuration, from this seed on; and what was wrong, with the commands that repeat it."""
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    wrong: list[str] = []
    end, begun = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        # one number of ranks at a time
        first = seed + 3 * _AT_ONCE * (begun // 3) + begun % 3
        seeds = [first + 3 * place for place in range(_AT_ONCE)]
        begun += 1
        while seeds:
            results, words = _on_ranks(_size(first), _run_seed, seeds)
            for done, steps in zip(seeds, results, strict=False):
                counts[Config.draw(done).kind].update(configurations=1, comparisons=min(steps))
            seeds, failed = seeds[len(results) + bool(words) :], seeds[len(results) :][: bool(words)]
            for culprit in failed:
                counts[Config.draw(culprit).kind].update(configurations=1, wrong=1)
                wrong.append(told_of(culprit, words))
                print(wrong[-1], file=sys.stderr, flush=True)
    return counts, wrong


def told_of(seed: int, words: Sequence[str]) -> str:
    """What is wrong with a configuration, and how to repeat it."""
    config = Config.draw(seed)
    return (
        f"{'; '.join(words)}\n  {config} with {config.algorithm()}\n"
        f"  repeat it with python -m benchmarks soak --seed {seed} --only"
    )


def _facts(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "benchmark": "soak",
        "seed": options.seed,
        **harness.made_with(),
    }


def main(given: Sequence[str]) -> None:
    """Train until the time is over, and print a row for each kind of configuration."""
    parser = harness.arguments("soak", __doc__, rounds=None, cases=False)
    parser.add_argument("--minutes", type=float, default=30.0, help="of random configurations")
    parser.add_argument("--seed", type=int, default=0, help="of the first configuration; each has another one")
    parser.add_argument("--only", action="store_true", help="only the configuration of this seed, and no growth")
    grows = "steps in which nothing may grow, after a tenth as many; 0: leave this out"
    parser.add_argument("--growth", type=int, default=_GROWTH_STEPS, metavar="STEPS", help=grows)
    options = parser.parse_args(given)
    if options.only:
        _, words = _on_ranks(_size(options.seed), _run_seed, [options.seed])
        sys.exit(told_of(options.seed, words) if words else 0)
    rows = []
    for name in _GROWS if options.growth else ():
        results, words = _on_ranks(_GROWTH_RANKS, partial(grow, options.growth), [name])
        if words:
            sys.exit("; ".join(words))
        bytes_a_step, threads, descriptors = (max(each) for each in zip(*results[0], strict=True))
        rows.append(
            Row(
                case=name,
                processes=_GROWTH_RANKS,
                steps=options.growth,
                bytes_grown=bytes_a_step,
                threads_grown=threads,
                descriptors_grown=descriptors,
                **_facts(options),
            )
        )
    counts, wrong = soak(options.seed, 60 * options.minutes)
    for kind, found in counts.items():
        rows.append(
            Row(
                case=kind,
                configurations=found["configurations"],
                comparisons=found["comparisons"],
                wrong=found["wrong"],
                **_facts(options),
            )
        )
    harness.publish(f"random configurations for {options.minutes:g} minutes", rows, options.out)
    sys.exit(bool(wrong))
