"""The algorithm that chooses: an `AllReduce` at a time, timed, and another in its place where that is faster."""

from __future__ import annotations

import copy
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from ringstrategy.algorithms.auto.candidates import PASSES, Trials, eligible, in_words, next_best_in_words, to_try
from ringstrategy.algorithms.base import Algorithm
from ringstrategy.algorithms.gradients.allreduce import AllReduce
from ringstrategy.algorithms.policy import Local, described, split
from ringstrategy.codecs.base import Codec
from ringstrategy.codecs.block_int import BlockInt
from ringstrategy.codecs.identity import Identity
from ringstrategy.transport.agree import all_gather_floats, compare_plans
from ringstrategy.transport.base import Peers

_WARM_UP = 3  # first passes of a training, which nobody times
_MOST_POSTPONED = 100  # passes in a row whose gradients were still waiting for their step


class Auto(Algorithm):
    """An `AllReduce` that tries which of the allowed codecs and collectives is fastest here, and uses it.

    Every candidate gets four of the first backward passes; those within 10 % of the best get up to three times as many
    again. The fastest is kept: with the default codecs after 19 to 195 passes, all of them ordinary training steps.
    The times of the slowest rank decide, so all ranks choose the same. `Stats` counts what is sent to agree apart.

    What is chosen depends on times, so a run with lossy codecs repeats bit for bit only if the same is chosen; a
    checkpoint holds the choice, and a run of as many ranks goes on with it. What one candidate's error feedback holds
    when another takes over is not lost: a lossless one delivers it. Trials compare single backward passes: where a step
    has several, of different parts of the model (a GAN), choose a strategy by name.

    Args:
        allow: the codecs it may choose from; of those within 2 % of each other the first is kept. None: `Identity()`
            and `BlockInt(8)`.
        error_feedback: for the lossy ones among them, see `AllReduce`.
        find_unused_parameters: see `AllReduce`, as for the arguments not named here.
        local: see `AllReduce`.
        residual_dtype: see `AllReduce`.
        on_nonfinite: see `AllReduce`.
        uneven: see `AllReduce`.
    """

    def __init__(
        self,
        allow: Sequence[Codec] | None = None,
        error_feedback: bool = False,
        find_unused_parameters: bool = False,
        local: Local | None = None,
        residual_dtype: torch.dtype | str | None = None,
        on_nonfinite: str = "propagate",
        uneven: str = "error",
    ) -> None:
        if isinstance(allow, Codec) or (allow is not None and not (allow and all(isinstance(x, Codec) for x in allow))):
            raise TypeError(f"allow is a list of one codec or more, such as [ringstrategy.Identity()], got {allow!r}")
        self.allow = (Identity(), BlockInt(8)) if allow is None else tuple(dict.fromkeys(allow))
        self.error_feedback = error_feedback
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
        self._candidates: list[AllReduce] = []
        self._chosen = 0
        self._tuned = False  # the choice is made
        self._trials: Trials | None = None  # None: it is made or given up, or training has not begun
        self._cold = _WARM_UP  # passes to come that are not timed
        self._passes = 0  # with the inner algorithm as it is
        self._seconds: list[float] = []  # of those of them that were timed
        self._postponed = 0  # passes in a row whose gradients were still waiting for their step
        self._begin: float | None = None
        self._news: list[str] = []

    def __repr__(self) -> str:
        """The arguments."""
        return (
            f"Auto(allow={list(self.allow)}, error_feedback={self.error_feedback}, "
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
        """The choice, for the process that started the ranks. Can be pickled."""
        return self._hosts, self._chosen

    def take_outcome(self, outcome: Any) -> None:
        """In that process: take what `outcome` gave on rank 0."""
        self._hosts, self._chosen = outcome
        self._candidates = eligible(self.allow, self._hosts, **self._common) if self._hosts else []

    def news(self) -> list[str]:
        """See `Algorithm.news`: choices."""
        news, self._news = self._news + self._inner.news(), []
        return news

    # Choosing

    @override
    def setup(self, parameters: Mapping[str, Parameter], peers: Peers, *, sparse: frozenset[str] = frozenset()) -> None:
        with peers.stats.probe():
            compare_plans(peers, self.plan_text(peers.size, ()))  # before ranks try together
        self._peers, self._hosts = peers, tuple(peers.hosts)
        self._parameters, self._sparse = dict(parameters), sparse
        self._inner = AllReduce(**self._common)  # type: ignore[arg-type] # nothing is left of an earlier training
        self._tuned, self._cold, self._postponed = False, _WARM_UP, 0
        self._device = next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
        self._candidates = eligible(self.allow, self._hosts, **self._common)
        shared, _ = split(self._parameters, self._inner.local)
        dense = [p for n, p in shared.items() if p.requires_grad and n not in sparse]
        self._trials = Trials(to_try(self._candidates, dense))
        self._take(self._trials.turn, deliver=False)

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
        self._seconds, self._passes = [], 0

    def _between_passes(self) -> None:
        """Do what is due. Ranks agree on what is, by counts; but a rank may have dropped a step that others made."""
        count, holds = self._passes, self._inner.delivers
        # a parameter that gets no gradient keeps its residual, so look ever more rarely
        looks = holds and count > 0 and count & (count - 1) == 0
        # where residuals are held, a lossy candidate needs feedback of its own, or they would have no place
        changes = len(self._seconds) >= PASSES and (self.error_feedback or not holds)
        if not (looks or changes):
            return
        if self._any_rank(self._inner.undecided):  # gradients wait for their step: the next time, then
            self._postponed += changes
            if self._postponed == _MOST_POSTPONED:
                self._news.append(
                    f"ring_auto stays with {in_words(self.chosen)}, which it was just trying: after {_MOST_POSTPONED} "
                    "passes in a row some parameters still waited for their optimizer's step, so it could not change "
                    "over"
                )
                self._trials, self._seconds = None, []
            return
        self._postponed = 0
        if looks and not self._any_rank_holds_residuals():
            self._take(self._chosen, deliver=False)
        elif changes and self._trials is not None:
            self._next_turn(self._trials)

    def _any_rank_holds_residuals(self) -> bool:
        return self._any_rank(any(bool(residual.any()) for _, residual in self._inner.residuals()))

    def _any_rank(self, mine: bool) -> bool:
        assert self._peers is not None
        return any(row[0] for row in all_gather_floats(self._peers, [float(mine)]))

    def _next_turn(self, trials: Trials) -> None:
        trials.end_turn(self._seconds)
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
        self._tuned, self._trials, self._seconds = True, None, []
        self._news.append(
            f"ring_auto tried {len(seconds)} candidates and keeps "
            f"{in_words(self._candidates[winner])}: backward and exchange take {1000 * seconds[winner]:.1f} ms"
            + next_best_in_words(self._candidates, winner, seconds)
        )
        if winner != self._chosen:
            self._take(winner)

    # Averaging

    @override
    def check(self, *, scaled_loss: bool, clips_by_norm: bool) -> None:
        self._inner.check(scaled_loss=scaled_loss, clips_by_norm=clips_by_norm)

    @override
    def adopt(self, parameters: Mapping[str, Parameter], *, sparse: frozenset[str] = frozenset()) -> list[Parameter]:
        self._parameters = dict(parameters)
        self._sparse |= sparse
        return self._inner.adopt(parameters, sparse=sparse)

    @override
    def is_local(self, name: str) -> bool:
        return self._inner.is_local(name)

    @override
    def compare(self, text: str) -> None:
        self._inner.compare(text)

    @override
    def before_backward(
        self,
        loss: Tensor | None = None,
        *,
        sync: bool = True,
        scale: Tensor | None = None,
        same: str = "",
        divisor: float | None = None,
    ) -> None:
        if self._peers is not None and sync:
            if self._trials is not None or self._inner.delivers:
                with self._peers.stats.probe():
                    self._between_passes()
            self._begin = self._now()
        self._inner.before_backward(loss, sync=sync, scale=scale, same=same, divisor=divisor)

    @override
    def after_backward(self) -> None:
        if self._peers is None or self._begin is None:
            self._inner.after_backward()
            return
        self._inner.after_backward()
        self._passes += 1
        if self._cold:
            self._cold -= 1
        elif self._trials is not None:
            self._seconds.append(self._now() - self._begin)
        self._begin = None

    def _now(self) -> float:
        """The time. While candidates are compared, wait for the device first."""
        if self._trials is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    @override
    def before_step(self, parameters: Collection[Parameter]) -> None:
        self._inner.before_step(parameters)

    @override
    def after_step(self, parameters: Collection[Parameter] = (), stepped: Tensor | bool = True) -> None:
        self._inner.after_step(parameters, stepped)

    # What survives a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """See `Algorithm.state_dict`. Also holds the choice, and whether trials have confirmed it."""
        chosen = repr(self.chosen) if self._candidates else None
        return {**self._inner.state_dict(), "auto": chosen, "ranks": len(self._hosts), "tuned": self._tuned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Algorithm.load_state_dict`. The same world size keeps the final choice; another one chooses anew."""
        assert self._peers is not None
        place = next((i for i, made in enumerate(self._candidates) if repr(made) == state.get("auto")), None)
        if place is not None and state["ranks"] == self._peers.size and state["tuned"]:
            self._chosen, self._tuned, self._trials = place, True, None
            self._news.append(f"ring_auto goes on with {in_words(self.chosen)}, as the checkpoint says")
        # whatever it was saved by: residuals may follow, and have a place then
        self._take(self._chosen, deliver=True, carry=False)
        self._inner.load_state_dict(state)

    @override
    def residuals(self) -> Iterator[tuple[str, Tensor]]:
        return self._inner.residuals()

    @override
    def load_residuals(self, residuals: Mapping[str, Tensor]) -> list[str]:
        return self._inner.load_residuals(residuals)

    @override
    def close(self) -> None:
        self._inner.close()
        self._peers = None
        self._parameters, self._sparse = {}, frozenset()
        self._trials, self._begin = None, None
