"""The algorithm that chooses: an `AllReduce` at a time, timed, and another in its place where that is faster."""

from __future__ import annotations

import copy
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ringstrategy.algorithms.auto.candidates import eligible, in_words, largest_exchange, next_best_in_words, refused
from ringstrategy.algorithms.auto.measured import Measured, machines_in_words, measure_unless_kept
from ringstrategy.algorithms.auto.passes import Passes
from ringstrategy.algorithms.auto.predicted import seconds_of_each
from ringstrategy.algorithms.auto.trials import Trials, to_try
from ringstrategy.algorithms.base import GradientAlgorithm
from ringstrategy.algorithms.gradients.allreduce import AllReduce
from ringstrategy.algorithms.local import Local, split
from ringstrategy.algorithms.policy import described
from ringstrategy.codecs.base import Codec
from ringstrategy.codecs.block_int import BlockInt
from ringstrategy.codecs.identity import Identity
from ringstrategy.cost.model import Machines
from ringstrategy.cost.step import Profile
from ringstrategy.transport.agree import all_gather_floats, compare_plans
from ringstrategy.transport.base import Peers

_MOST_POSTPONED = 100  # passes in a row whose gradients were still waiting for their step


class Auto(GradientAlgorithm):
    """An `AllReduce` that measures which of the allowed codecs and collectives is fastest here, and uses it.

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
        on_nonfinite: see `AllReduce`.
        uneven: see `AllReduce`.
    """

    def __init__(
        self,
        allow: Sequence[Codec] | None = None,
        error_feedback: bool = True,
        tune: bool = True,
        find_unused_parameters: bool = False,
        local: Local | None = None,
        residual_dtype: torch.dtype | str | None = None,
        on_nonfinite: str = "propagate",
        uneven: str = "error",
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
        self.uneven = uneven
        self._common = {
            "error_feedback": error_feedback,
            "find_unused_parameters": find_unused_parameters,
            "local": local,
            "residual_dtype": residual_dtype,
            "on_nonfinite": on_nonfinite,
            "uneven": uneven,
        }
        # refuses what these arguments cannot be; and holds what is left when training ends or has not begun
        self._inner = AllReduce(**self._common)  # type: ignore[arg-type]
        self._peers: Peers | None = None
        self._hosts: tuple[str, ...] = ()
        self._device = torch.device("cpu")
        self._parameters: dict[str, Parameter] = {}
        self._sparse: frozenset[str] = frozenset()
        self._kept: Measured | None = None
        self._candidates: list[AllReduce] = []
        self._chosen = 0
        self._tuned = False
        self._trials: Trials | None = None
        self._passes = Passes()  # with the inner algorithm as it is
        self._postponed = 0  # passes in a row whose gradients were still waiting for their step
        self._gave_up = False  # trying, for that
        self._begin: float | None = None
        self._news: list[str] = []

    def __repr__(self) -> str:
        """The arguments."""
        return (
            f"Auto(allow={list(self.allow)}, error_feedback={self.error_feedback}, tune={self.tune}, "
            f"find_unused_parameters={self._inner.find_unused_parameters}, local={described(self._inner.local)}, "
            f"residual_dtype={self._inner.residual_dtype}, on_nonfinite={self._inner.on_nonfinite!r}, "
            f"uneven={self.uneven!r})"
        )

    @property
    def chosen(self) -> AllReduce:
        """The `AllReduce` in use now. Give it to `RingStrategy` to pin it. ValueError before there is a choice."""
        if not self._candidates:
            raise ValueError("ring_auto has not chosen yet: it does when training on two ranks or more begins")
        return self._candidates[self._chosen]

    def outcome(self) -> Any:
        """The choice and the measurements, for the process that started the ranks. Can be pickled."""
        return self._hosts, self._chosen, self._kept

    def take_outcome(self, outcome: Any) -> None:
        """In that process: take what `outcome` gave on rank 0."""
        self._hosts, self._chosen, self._kept = outcome
        self._candidates = eligible(self.allow, self._hosts, **self._common) if self._hosts else []

    def news(self) -> list[str]:
        """See `Algorithm.news`: measurements and choices."""
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
            codecs = [(codec, self._inner.feeds_back(codec)) for codec in self.allow]
            dense = self._dense()
            largest = largest_exchange(self._candidates, refused(self.allow, dense), dense)
            self._kept, source = measure_unless_kept(self._kept, peers, codecs, self._device, largest)
            predictions = self._predict(Profile(rest=0.0, backward=0.0))
        best = min(predictions, key=lambda place: predictions[place])
        self._news.append(
            f"ring_auto {source}: {machines_in_words(self._machines)}. "
            f"It chose {in_words(self._candidates[best])}: an exchange takes {1000 * predictions[best]:.1f} ms"
            + next_best_in_words(self._candidates, best, predictions)
        )
        self._take(best, deliver=False)

    @property
    def _machines(self) -> Machines:
        assert self._kept is not None
        return self._kept.machines

    def _dense(self) -> dict[str, Parameter]:
        """The parameters whose gradients travel in buckets."""
        shared, _ = split(self._parameters, self._inner.local)
        return {n: p for n, p in shared.items() if p.requires_grad and n not in self._sparse}

    def _predict(self, profile: Profile) -> dict[int, float]:
        """Seconds with each candidate, by place."""
        assert self._peers is not None
        dense = self._dense()
        without = refused(self.allow, dense)
        return seconds_of_each(self._candidates, without, dense, self._machines, profile, self._peers)

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
        self._passes = Passes()

    def _between_passes(self) -> None:
        """Do what is due. Ranks agree on what is, by counts; but a rank may have dropped a step that others made."""
        count, holds = self._passes.count, self._inner.delivers
        # a parameter that gets no gradient keeps its residual, so look ever more rarely
        looks = holds and count > 0 and count & (count - 1) == 0
        # where residuals are held, a lossy candidate needs feedback of its own, or they would have no place
        changes = not self._tuned and (self.error_feedback or not holds) and self._turn_is_over
        if not (looks or changes):
            return
        if self._any_rank(self._inner.undecided):  # gradients wait for their step: the next time, then
            self._postponed += changes
            if self._postponed == _MOST_POSTPONED and not self._tuned:
                self._news.append(
                    f"ring_auto stays with {in_words(self.chosen)}, "
                    + ("untried" if self._trials is None else "which it was just trying")
                    + f": after {_MOST_POSTPONED} passes in a row some parameters still waited for their optimizer's "
                    "step, so it could not change over"
                )
                self._tuned = self._gave_up = True
                self._trials = None
            return
        self._postponed = 0
        if looks and not self._any_rank_holds_residuals():
            self._take(self._chosen, deliver=False)
        elif changes and self._trials is not None:
            self._next_turn(self._trials)
        elif changes:
            self._begin_trials()

    @property
    def _turn_is_over(self) -> bool:
        """Were there enough passes with this candidate?"""
        return self._passes.enough if self._trials is None else self._trials.turn_over(self._passes.seconds)

    def _any_rank_holds_residuals(self) -> bool:
        return self._any_rank(any(bool(residual.any()) for _, residual in self._inner.residuals()))

    def _any_rank(self, mine: bool) -> bool:
        assert self._peers is not None
        return any(row[0] for row in all_gather_floats(self._peers, [float(mine)]))

    def _begin_trials(self) -> None:
        """Predict again, now that it is known when gradients are ready, and try the best candidates."""
        assert self._peers is not None
        profile = self._passes.profile(self._inner.launches, self._machines.pack, self._peers)
        codec_of = {place: made.codec for place, made in enumerate(self._candidates)}
        self._trials = Trials(to_try(self._predict(profile), codec_of, self.allow))
        self._take(self._trials.turn)

    def _next_turn(self, trials: Trials) -> None:
        trials.end_turn(self._passes.seconds)
        if trials.round_over:
            seconds = self._on_slowest_rank(trials.medians())
            winner = trials.judge(seconds)
            if winner is not None:
                self._keep(winner, seconds)
                return
        self._take(trials.turn)

    def _on_slowest_rank(self, mine: Mapping[int, float]) -> dict[int, float]:
        assert self._peers is not None
        columns = zip(*all_gather_floats(self._peers, list(mine.values())), strict=True)
        return {place: max(column) for place, column in zip(mine, columns, strict=True)}

    def _keep(self, winner: int, seconds: Mapping[int, float]) -> None:
        self._trials, self._tuned = None, True
        self._news.append(
            f"ring_auto tried {len(seconds)} of {len(self._candidates)} candidates and keeps "
            f"{in_words(self._candidates[winner])}: backward and exchange take {1000 * seconds[winner]:.1f} ms"
            + next_best_in_words(self._candidates, winner, seconds)
        )
        if winner != self._chosen:
            self._take(winner)

    # Averaging

    def check(self, *, scaled_loss: bool, clips_by_norm: bool) -> None:
        """See `Algorithm.check`."""
        self._inner.check(scaled_loss=scaled_loss, clips_by_norm=clips_by_norm)

    def adopt(self, parameters: Mapping[str, Parameter], *, sparse: frozenset[str] = frozenset()) -> list[Parameter]:
        """See `Algorithm.adopt`."""
        self._parameters = dict(parameters)
        self._sparse |= sparse
        return self._inner.adopt(parameters, sparse=sparse)

    def is_local(self, name: str) -> bool:
        """See `Algorithm.is_local`."""
        return self._inner.is_local(name)

    def compare(self, text: str) -> None:
        """See `Algorithm.compare`."""
        self._inner.compare(text)

    def before_backward(
        self,
        loss: Tensor | None = None,
        *,
        sync: bool = True,
        scale: Tensor | None = None,
        same: str = "",
        divisor: float | None = None,
    ) -> None:
        """See `Algorithm.before_backward`."""
        if self._peers is not None and sync:
            if not self._tuned or self._inner.delivers:
                with self._peers.stats.probe():
                    self._between_passes()
            self._begin = self._now()
        self._inner.before_backward(loss, sync=sync, scale=scale, same=same, divisor=divisor)

    def after_backward(self) -> None:
        """See `Algorithm.after_backward`."""
        if self._peers is None or self._begin is None:
            self._inner.after_backward()
            return
        waited = self._peers.stats.exposed_seconds or 0.0
        self._inner.after_backward()
        self._passes.count += 1
        if not self._tuned:
            self._passes.seconds.append(self._now() - self._begin)
            self._passes.waited.append((self._peers.stats.exposed_seconds or 0.0) - waited)
        self._begin = None

    def _now(self) -> float:
        """The time. While candidates are compared, wait for the device first."""
        if not self._tuned and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def before_step(self, parameters: Collection[Parameter]) -> None:
        """See `Algorithm.before_step`."""
        self._inner.before_step(parameters)

    def after_step(self, parameters: Collection[Parameter] = (), stepped: Tensor | bool = True) -> None:
        """See `Algorithm.after_step`."""
        self._inner.after_step(parameters, stepped)

    # What survives a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """See `Algorithm.state_dict`. Also holds the choice, and whether trials have confirmed it."""
        tuned = self._tuned and not self._gave_up
        chosen = {"auto": repr(self.chosen) if self._candidates else None, "ranks": len(self._hosts), "tuned": tuned}
        return {**self._inner.state_dict(), **chosen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Algorithm.load_state_dict`. The same world size keeps the final choice; another one chooses anew."""
        assert self._peers is not None
        place = next((i for i, made in enumerate(self._candidates) if repr(made) == state.get("auto")), None)
        if place is not None and state["ranks"] == self._peers.size and state["tuned"]:
            self._chosen, self._tuned, self._gave_up = place, True, False
            self._news.append(f"ring_auto goes on with {in_words(self.chosen)}, as the checkpoint says")
        self._trials = None
        # whatever it was saved by: residuals may follow, and have a place then
        self._take(self._chosen, deliver=True, carry=False)
        self._inner.load_state_dict(state)

    def residuals(self) -> Iterator[tuple[str, Tensor]]:
        """See `Algorithm.residuals`."""
        return self._inner.residuals()

    def load_residuals(self, residuals: Mapping[str, Tensor]) -> list[str]:
        """See `Algorithm.load_residuals`."""
        return self._inner.load_residuals(residuals)

    def close(self) -> None:
        """See `Algorithm.close`."""
        self._inner.close()
        self._peers = None
        self._parameters, self._sparse = {}, frozenset()
        self._trials, self._begin = None, None
