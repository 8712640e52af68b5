"""All-reduce that measures the machines it is on, and chooses codec, collective, segments and bucket size by itself."""

from __future__ import annotations

import copy
import hashlib
import math
import statistics
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ringstrategy.algorithms.base import GradientAlgorithm
from ringstrategy.algorithms.gradients.allreduce import AllReduce
from ringstrategy.algorithms.local import Local, split
from ringstrategy.algorithms.policy import described
from ringstrategy.codecs.base import Codec
from ringstrategy.codecs.block_int import BlockInt
from ringstrategy.codecs.identity import Identity
from ringstrategy.collectives.base import Collective, sums_dtype
from ringstrategy.collectives.direct import Direct
from ringstrategy.collectives.hierarchical import Hierarchical
from ringstrategy.collectives.ring import Ring
from ringstrategy.cost.model import Machines
from ringstrategy.cost.probe import measure, of_all
from ringstrategy.cost.step import Profile, largest_wire, predict
from ringstrategy.transport.agree import compare_plans
from ringstrategy.transport.base import Peers

_BUCKETS_MB = (25.0, 5.0, 100.0)
_WARM_UP = 3  # passes before the true gradients are timed, and
_TIMED = 5  # passes that are
_MOST_POSTPONED = 100
_ROUNDS = 4  # of trials at most, each candidate once a round, so that what comes and goes hits all alike
_STILL_IN = 1.1  # times as long as the best so far, and a candidate is in the next round too
_ALIKE = 1.02  # of candidates that come so near the best the most usual is kept
_TRIAL_WARM_UP = 1
_TRIAL = 3
_MOST_TRIED = 4
_NEAR = 1.25  # candidates predicted to take up to so many times as long as the best are tried
_NEAR_OTHER_CODEC = 1.5  # the best of each codec likewise, since codecs differ most in what no model knows


@dataclass
class _Trial:
    """Candidates whose passes are timed in turn."""

    seconds: dict[int, list[float]]  # of each candidate
    still_in: list[int]  # those of this round
    turns: list[int]  # of this round still to come, the one under way first
    rounds: int = 1


class _Kept(NamedTuple):
    """A measurement, and by what it was made."""

    device: str  # its type
    transport: type[Peers]
    machines: Machines

    def holds(self, peers: Peers, codecs: Sequence[tuple[Codec, bool]], device: torch.device) -> bool:
        """Was it made on the same hosts, by the same means, of the same codecs?"""
        same = (self.device, self.transport, self.machines.hosts) == (device.type, type(peers), peers.hosts)
        return same and self.machines.codecs.keys() == set(codecs)

    @property
    def digest(self) -> float:
        """Of the figures; not 0."""
        return 1.0 + int.from_bytes(hashlib.sha256(repr(self.machines).encode()).digest()[:6], "little")


class Auto(GradientAlgorithm):
    """`AllReduce` with what is fastest here, of what it is allowed.

    At `setup` it measures latency, bandwidth and codecs among the ranks, predicts for each candidate how long the
    exchange of these parameters takes (see `ringstrategy.cost`), and takes the best. After some passes it
    knows when gradients are ready, predicts again, tries the few best candidates in turn, those that stay near the best
    up to four times, and keeps the fastest: from 12 to about 100 passes, more with more codecs, all of them ordinary
    training steps. All ranks decide by the same figures.

    What was measured is kept for the next training: it is measured again with another number of ranks, on other hosts
    or another kind of device, over another transport, with other codecs, or if the largest bucket is larger than the
    messages were, unless these took long enough to know the bandwidth. A copy of this object takes it along; a new one
    measures. `Stats` counts what is sent for this apart.

    What is chosen depends on times, so a run with lossy codecs repeats bit for bit only if the same is chosen; a
    checkpoint holds the choice, and a run of as many ranks goes on with it. What one candidate's error feedback holds
    when another takes over is not lost: a lossless one delivers it.

    Args:
        allow: the codecs it may choose from; of those within 2 % of each other the first is kept. None: `Identity()`
            and `BlockInt(8)`.
        error_feedback: for the lossy ones among them.
        tune: False: keep what was chosen at `setup`. Trials compare single backward passes, so that is the better way
            where a step has several, of different parts of the model (a GAN).
        find_unused_parameters: see `AllReduce`, as for the arguments not named here.
        local: see `AllReduce`.
        residual_dtype: see `AllReduce`.
    """

    def __init__(
        self,
        allow: Sequence[Codec] | None = None,
        error_feedback: bool = True,
        tune: bool = True,
        find_unused_parameters: bool = False,
        local: Local | None = None,
        residual_dtype: torch.dtype | str | None = None,
    ) -> None:
        if isinstance(allow, Codec) or (allow is not None and not (allow and all(isinstance(x, Codec) for x in allow))):
            raise TypeError(f"allow is a list of one codec or more, such as [ringstrategy.Identity()], got {allow!r}")
        allow = (Identity(), BlockInt(8)) if allow is None else tuple(dict.fromkeys(allow))
        for name, value in {"error_feedback": error_feedback, "tune": tune}.items():
            if not isinstance(value, bool):
                raise TypeError(f"{name} is True or False, got {value!r}")
        self.allow = allow
        self.error_feedback = error_feedback
        self.tune = tune
        self._common = {
            "error_feedback": error_feedback,
            "find_unused_parameters": find_unused_parameters,
            "local": local,
            "residual_dtype": residual_dtype,
        }
        # refuses what these arguments cannot be; and holds what is left when training ends or has not begun
        self._inner = AllReduce(**self._common)  # type: ignore[arg-type]
        self._peers: Peers | None = None
        self._hosts: tuple[str, ...] = ()
        self._device = torch.device("cpu")
        self._parameters: dict[str, Parameter] = {}
        self._sparse: frozenset[str] = frozenset()
        self._kept: _Kept | None = None
        self._candidates: list[AllReduce] = []
        self._chosen = 0
        self._tuned = False
        self._trial: _Trial | None = None
        self._passes = 0  # with the inner algorithm as it is
        self._postponed = 0  # passes in a row after which nobody knew whether their step counts
        self._gave_up = False  # trying, for that
        self._seconds: list[float] = []
        self._waited: list[float] = []
        self._begin: float | None = None
        self._news: list[str] = []

    def __repr__(self) -> str:
        """The arguments."""
        return (
            f"Auto(allow={list(self.allow)}, error_feedback={self.error_feedback}, tune={self.tune}, "
            f"find_unused_parameters={self._inner.find_unused_parameters}, local={described(self._inner.local)}, "
            f"residual_dtype={self._inner.residual_dtype})"
        )

    @property
    def chosen(self) -> AllReduce:
        """What it averages with now; give it to `RingStrategy` to pin it. ValueError before there is a choice."""
        if not self._candidates:
            raise ValueError("ring_auto has not chosen yet: it does when training on two ranks or more begins")
        return self._candidates[self._chosen]

    def outcome(self) -> Any:
        """What was chosen and measured, for the process that started the ranks. It can be pickled."""
        return self._hosts, self._chosen, self._kept

    def take_outcome(self, outcome: Any) -> None:
        """In that process: take what `outcome` gave on rank 0."""
        self._hosts, self._chosen, self._kept = outcome
        self._candidates = eligible(self.allow, self._hosts, **self._common) if self._hosts else []

    def news(self) -> list[str]:
        """See `Algorithm.news`: what was measured and chosen."""
        news, self._news = self._news + self._inner.news(), []
        return news

    # Choosing

    def setup(self, parameters: Mapping[str, Parameter], peers: Peers, *, sparse: frozenset[str] = frozenset()) -> None:
        """See `Algorithm.setup`."""
        with peers.stats.probe():
            compare_plans(peers, self.plan_text(peers.size, ()))  # before ranks measure together
            self._peers, self._hosts = peers, tuple(peers.hosts)
            self._parameters, self._sparse = dict(parameters), sparse
            self._inner = AllReduce(**self._common)  # type: ignore[arg-type] # nothing is left of an earlier training
            self._postponed, self._gave_up = 0, False
            self._device = next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
            self._candidates = eligible(self.allow, self._hosts, **self._common)
            self._tuned = not self.tune
            source = self._measure(peers)
            predictions = self._predict(Profile(rest=0.0, backward=0.0))
        best = min(predictions, key=lambda place: predictions[place])
        self._news.append(
            f"ring_auto {source}: {_described(self._machines)}. "
            f"It chose {in_words(self._candidates[best])}: an exchange takes {1000 * predictions[best]:.1f} ms"
            + self._next_best(best, predictions)
        )
        self._take(best, deliver=False)

    @property
    def _machines(self) -> Machines:
        assert self._kept is not None
        return self._kept.machines

    def _measure(self, peers: Peers) -> str:
        """Unless all ranks still have figures that hold; returns which, in words."""
        codecs = [(codec, self._inner.feeds_back(codec)) for codec in self.allow]
        dense, refused = self._dense(), self._refused()
        largest = {made.codec: made for made in self._candidates if made.bucket_mb == max(_BUCKETS_MB)}
        wire = max(largest_wire(made, dense) for codec, made in largest.items() if codec not in refused)
        kept = self._kept if self._kept is not None and self._kept.holds(peers, codecs, self._device) else None
        mine = [float(wire), 0.0 if kept is None else kept.digest]
        everyone = of_all(peers, mine)
        # one decision and one size for all: a rank that went on alone would leave the others waiting for its messages
        longest = max(row[0] for row in everyone)
        if kept is not None and longest <= kept.machines.longest and all(row[1] == kept.digest for row in everyone):
            return "goes by what it measured before"
        begin = time.perf_counter()
        self._kept = _Kept(self._device.type, type(peers), measure(peers, codecs, self._device, longest))
        return f"measured for {time.perf_counter() - begin:.2f} s"

    def _predict(self, profile: Profile) -> dict[int, float]:
        """Seconds with each candidate, as rank 0 predicts them; of those that come to the same only the first."""
        assert self._peers is not None
        dense, refused = self._dense(), self._refused()
        seconds, seen = [], set()
        for candidate in self._candidates:
            if candidate.codec in refused:
                seconds.append(math.inf)
                continue
            prediction = predict(candidate, dense, self._machines, profile)
            same = (candidate.codec, type(candidate.collective), prediction)
            seconds.append(math.inf if same in seen else prediction.seconds)
            seen.add(same)
        first = of_all(self._peers, seconds)[0]
        return {place: seconds for place, seconds in enumerate(first) if seconds < math.inf}

    def _dense(self) -> dict[str, Parameter]:
        """The parameters whose gradients travel in buckets."""
        shared, _ = split(self._parameters, self._inner.local)
        return {n: p for n, p in shared.items() if p.requires_grad and n not in self._sparse}

    def _refused(self) -> Collection[Codec]:
        """Those that cannot carry all of these; a TypeError if none can."""
        dtypes = {sums_dtype(parameter.dtype) for parameter in self._dense().values()}
        refused = {}
        for codec in self.allow:
            try:
                for dtype in dtypes:
                    codec.check(dtype)
            except TypeError as error:
                refused[codec] = error
        if len(refused) == len(self.allow):
            raise refused[self.allow[0]]
        return refused.keys()

    def _next_best(self, best: int, seconds: Mapping[int, float]) -> str:
        """Of those that differ from what is taken in more than sizes."""

        def kind(place: int) -> tuple[object, type]:
            return self._candidates[place].codec, type(self._candidates[place].collective)

        others = [place for place in seconds if kind(place) != kind(best)]
        if not others:
            return ""
        other = min(others, key=lambda place: seconds[place])
        said = "next best" if seconds[other] > seconds[best] else "as good, but less usual:"
        return f"; {said} {in_words(self._candidates[other])}, {1000 * seconds[other]:.1f} ms"

    def _take(self, place: int, deliver: bool | None = None, carry: bool = True) -> None:
        """Go on with another candidate.

        Args:
            place: of the candidate.
            deliver: a lossless one gets residuals too, and delivers them. None: if any rank has some.
            carry: take over the step, and residuals.
        """
        assert self._peers is not None
        old, new = self._inner, copy.deepcopy(self._candidates[place])
        old.close()
        self._peers.forget_scratch()
        residuals = dict(old.residuals()) if carry else {}
        wanted = self._any_rank(bool(residuals)) if deliver is None else deliver
        assert isinstance(new.codec, Codec)
        new.delivers = wanted and new.codec.lossless
        try:
            new.setup(self._parameters, self._peers, sparse=self._sparse)
        except BaseException:  # ranks that differ, or a lost one: the parameters must keep no hooks
            new.close()
            raise
        if carry:
            new.load_state_dict(old.state_dict())
        for name in new.load_residuals(residuals):
            assert not residuals[name].any(), "an error that feedback held would be lost"
        self._inner, self._chosen = new, place
        self._passes, self._seconds, self._waited = 0, [], []

    def _turn(self) -> None:
        """Between two passes: is something due?"""
        if self._inner.undecided:  # gradients wait for their step: the next time, then
            self._postponed += 1
            if self._postponed == _MOST_POSTPONED and not self._tuned:
                self._news.append(
                    f"ring_auto stays with {in_words(self.chosen)}, "
                    + ("untried" if self._trial is None else "which it was just trying")
                    + f": after {_MOST_POSTPONED} passes in a row some parameters still waited for their optimizer's "
                    "step, so it could not change over"
                )
                self._tuned = self._gave_up = True
                self._trial = None
            return
        self._postponed = 0
        if self._inner.delivers:
            # a parameter that gets no gradient keeps its residual, so look ever more rarely
            looks = self._passes and self._passes & (self._passes - 1) == 0
            if looks and not self._any_rank_holds_residuals():
                self._take(self._chosen, deliver=False)
                return
            if not self.error_feedback:  # a lossy candidate would have no place for what is held
                return
        if self._tuned:
            return
        if self._trial is not None:
            if self._passes >= _TRIAL_WARM_UP + _TRIAL:
                self._next_trial(self._trial)
        elif self._passes >= _WARM_UP + _TIMED:
            self._begin_trials()

    def _any_rank_holds_residuals(self) -> bool:
        return self._any_rank(any(bool(residual.any()) for _, residual in self._inner.residuals()))

    def _any_rank(self, mine: bool) -> bool:
        assert self._peers is not None
        return any(row[0] for row in of_all(self._peers, [float(mine)]))

    def _begin_trials(self) -> None:
        """Predict again with what the true gradients have shown, and try the best."""
        predictions = self._predict(self._profile())
        order = sorted(predictions, key=lambda place: predictions[place])
        best = predictions[order[0]]
        tried = [place for place in order if predictions[place] <= _NEAR * best][:_MOST_TRIED]
        for codec in self.allow:
            first = next((place for place in order if self._candidates[place].codec == codec), tried[0])
            if first not in tried and predictions[first] <= _NEAR_OTHER_CODEC * best:
                tried.append(first)
        self._trial = _Trial({place: [] for place in tried}, tried, list(tried))
        self._take(tried[0])

    def _profile(self) -> Profile:
        """Of the passes so far: the slowest rank's backward, and when rank 0's gradients were complete in the last."""
        assert self._peers is not None
        timed = list(zip(self._seconds, self._waited, strict=True))[_WARM_UP:]
        mine = [statistics.median(seconds - waited for seconds, waited in timed)]
        mine += [x for numel, seconds in self._inner.launches for x in (float(numel), seconds)]
        everyone = of_all(self._peers, mine)
        # all of it rank 0's, so that all ranks predict alike
        own, numels, times = everyone[0][0], everyone[0][1::2], everyone[0][2::2]
        packing = self._machines.pack.seconds(round(sum(numels)))
        backward = max(0.0, max(row[0] for row in everyone) - packing)
        if own <= 0 or sum(numels) == 0:
            return Profile(rest=0.0, backward=backward)
        points, filled = [(0.0, 0.0)], 0.0
        for numel, seconds in zip(numels, times, strict=True):
            filled += numel
            points.append((filled / sum(numels), max(points[-1][1], min(1.0, seconds / own))))
        return Profile(rest=0.0, backward=backward, ready=tuple(points))

    def _next_trial(self, trial: _Trial) -> None:
        assert self._peers is not None
        trial.seconds[trial.turns.pop(0)] += self._seconds[_TRIAL_WARM_UP:]
        if trial.turns:
            self._take(trial.turns[0])
            return
        mine = [statistics.median(timed) for timed in trial.seconds.values()]
        slowest = [max(column) for column in zip(*of_all(self._peers, mine), strict=True)]
        seconds = dict(zip(trial.seconds, slowest, strict=True))
        least = min(seconds[place] for place in trial.still_in)
        near = [place for place in trial.still_in if seconds[place] <= _STILL_IN * least]
        if len(near) > 1 and trial.rounds < _ROUNDS:
            trial.rounds += 1
            trial.still_in = near[::-1]  # to and fro
            trial.turns = list(trial.still_in)
            self._take(trial.turns[0])
            return
        best = min(place for place in near if seconds[place] <= _ALIKE * least)
        self._trial, self._tuned = None, True
        self._news.append(
            f"ring_auto tried {len(seconds)} of {len(self._candidates)} candidates and keeps "
            f"{in_words(self._candidates[best])}: backward and exchange take {1000 * seconds[best]:.1f} ms"
            + self._next_best(best, seconds)
        )
        if best != self._chosen:
            self._take(best)

    # Averaging

    def check(self, *, scaled_loss: bool, clips_by_norm: bool) -> None:
        """See `GradientAlgorithm.check`."""
        self._inner.check(scaled_loss=scaled_loss, clips_by_norm=clips_by_norm)

    def adopt(self, parameters: Mapping[str, Parameter], *, sparse: frozenset[str] = frozenset()) -> list[Parameter]:
        """See `Algorithm.adopt`."""
        self._parameters = dict(parameters)
        self._sparse |= sparse
        return self._inner.adopt(parameters, sparse=sparse)

    def is_local(self, name: str) -> bool:
        """See `GradientAlgorithm.is_local`."""
        return self._inner.is_local(name)

    def compare(self, text: str) -> None:
        """See `GradientAlgorithm.compare`."""
        self._inner.compare(text)

    def before_backward(
        self, loss: Tensor | None = None, *, sync: bool = True, scale: Tensor | None = None, same: str = ""
    ) -> None:
        """See `GradientAlgorithm.before_backward`."""
        if self._peers is not None and sync:
            if not self._tuned or self._inner.delivers:
                with self._peers.stats.probe():
                    self._turn()
            self._begin = self._now()
        self._inner.before_backward(loss, sync=sync, scale=scale, same=same)

    def after_backward(self) -> None:
        """See `GradientAlgorithm.after_backward`."""
        if self._peers is None or self._begin is None:
            self._inner.after_backward()
            return
        waited = self._peers.stats.exposed_seconds
        self._inner.after_backward()
        self._passes += 1
        if not self._tuned:
            self._seconds.append(self._now() - self._begin)
            self._waited.append(self._peers.stats.exposed_seconds - waited)
        self._begin = None

    def _now(self) -> float:
        """The time; while candidates are compared, when the device has done what it was given."""
        if not self._tuned and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def before_step(self, parameters: Collection[Parameter]) -> None:
        """See `GradientAlgorithm.before_step`."""
        self._inner.before_step(parameters)

    def after_step(self, parameters: Collection[Parameter] = (), stepped: Tensor | bool = True) -> None:
        """See `Algorithm.after_step`."""
        self._inner.after_step(parameters, stepped)

    # What survives a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """See `Algorithm.state_dict`: what was chosen too, and whether by trial."""
        tuned = self._tuned and not self._gave_up
        chosen = {"auto": repr(self.chosen) if self._candidates else None, "ranks": len(self._hosts), "tuned": tuned}
        return {**self._inner.state_dict(), **chosen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Algorithm.load_state_dict`. As many ranks go on with what was chosen in the end; others choose anew."""
        assert self._peers is not None
        place = next((i for i, made in enumerate(self._candidates) if repr(made) == state.get("auto")), None)
        if place is not None and state["ranks"] == self._peers.size and state["tuned"]:
            self._chosen, self._tuned, self._gave_up = place, True, False
            self._news.append(f"ring_auto goes on with {in_words(self.chosen)}, as the checkpoint says")
        self._trial = None
        # whatever it was saved by: residuals may follow, and have a place then
        self._take(self._chosen, deliver=True, carry=False)
        self._inner.load_state_dict(state)

    def residuals(self) -> Iterator[tuple[str, Tensor]]:
        """See `GradientAlgorithm.residuals`."""
        return self._inner.residuals()

    def load_residuals(self, residuals: Mapping[str, Tensor]) -> list[str]:
        """See `GradientAlgorithm.load_residuals`."""
        return self._inner.load_residuals(residuals)

    def close(self) -> None:
        """See `Algorithm.close`."""
        self._inner.close()
        self._peers = None
        self._parameters, self._sparse = {}, frozenset()
        self._trial, self._begin = None, None


def eligible(allow: Iterable[Codec], hosts: Sequence[str], **common: Any) -> list[AllReduce]:
    """Every combination of codec, collective, segments and bucket size that makes sense, the usual ones first.

    `Native` is not among them: nobody could count its bytes.

    Args:
        allow: the codecs.
        hosts: for each rank which host it is on.
        common: further arguments of each `AllReduce`.
    """
    collectives: list[Collective] = [Ring(), Direct(), Ring(segments=1)]
    if 1 < len(set(hosts)) < len(hosts):
        collectives.insert(0, Hierarchical())
    made = []
    for codec in allow:
        for collective in collectives:
            try:
                collective.check(codec)
            except ValueError:  # this codec cannot travel this way
                continue
            made += [AllReduce(codec, collective, bucket_mb=bucket_mb, **common) for bucket_mb in _BUCKETS_MB]
    return made


def in_words(algorithm: AllReduce) -> str:
    """In a few words, for a log or a table."""
    assert isinstance(algorithm.codec, Codec)
    fed = " with error feedback" if algorithm.error_feedback and not algorithm.codec.lossless else ""
    return f"{_brief(algorithm.codec)}{fed} over {_brief(algorithm.collective)}, buckets of {algorithm.bucket_mb:g} MB"


def _brief(part: object) -> str:
    """As its `repr`, without what is as usual."""
    assert is_dataclass(part)
    given = [(field, getattr(part, field.name)) for field in fields(part) if field.init]
    shown = [
        f"{field.name}={_brief(value) if is_dataclass(value) else repr(value)}"
        for field, value in given
        if field.default is MISSING or value != field.default
    ]
    return f"{type(part).__name__}({', '.join(shown)})"


def _described(machines: Machines) -> str:
    """The figures that matter, in words."""
    hosts = len(set(machines.hosts))
    link = machines.across if hosts > 1 else machines.inside
    where = f"{hosts} hosts" if hosts > 1 else "one host"
    rate = f"{1e-6 / link.beta if link.beta else float('inf'):.1f} MB/s"
    if machines.longest < math.inf:
        rate += f" in messages of {1e-3 * machines.longest:.1f} kB"
    codecs = [
        f"{_brief(codec)} {4e-9 / cost.encode.per_value:.1f} GB/s"
        for (codec, _), cost in machines.codecs.items()
        if not codec.lossless and cost.encode.per_value > 0
    ]
    return ", ".join(
        [
            f"{len(machines.hosts)} ranks on {where}",
            f"latency {1e6 * link.alpha:.0f} us",
            rate,
            *codecs,
        ]
    )
