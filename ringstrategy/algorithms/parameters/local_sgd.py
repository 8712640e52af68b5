"""Train apart and meet seldom: local SGD, DiLoCo and Streaming DiLoCo, through any codec."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ringstrategy.algorithms.gradients.allreduce import AllReduce
from ringstrategy.algorithms.local import Local
from ringstrategy.algorithms.parameters.fragments import cut_fragments
from ringstrategy.algorithms.parameters.group import Flat, Group, Vector, cut_like, cut_words, words_of
from ringstrategy.algorithms.parameters.inner_states import average_states
from ringstrategy.algorithms.parameters.outer import Nesterov, Outer, Shared, described_outer
from ringstrategy.algorithms.parameters.periodic import Periodic, row_of_parameters, warm_up_codec
from ringstrategy.algorithms.parameters.schedule import Schedule, Unit
from ringstrategy.algorithms.parameters.trial import LONGEST, STEPS, Trial
from ringstrategy.algorithms.policy import Policy, check_codec, check_feedback, codec_of
from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.codecs.identity import Identity
from ringstrategy.collectives.base import Collective, Summand, sums_dtype
from ringstrategy.collectives.by_size import BySize
from ringstrategy.kernels import operations
from ringstrategy.transport.agree import compare_plans
from ringstrategy.transport.base import Peers

_BESIDE = "beside"  # the vector of what is averaged exactly: squared norms, buffers


class LocalSGD(Periodic):
    """Every rank trains alone for `interval` steps; then all agree on new shared parameters, and go on from there.

    With Theta the shared parameters and theta a rank's own, an agreement averages the progress theta - Theta of all
    ranks. Its negative is the outer gradient, by which the outer optimizer steps Theta (DiLoCo, Douillard et al. 2023);
    without one, Theta becomes the mean of all ranks (local SGD, Stich 2018). Theta has the same bits on all ranks,
    whatever the codec. With error feedback, what a codec loses is added to the progress of the next agreement.

    Validation, test and checkpoints see Theta as last agreed. When training ends, all ranks take their exact mean. A
    checkpoint also has a file of each rank, from which the same number of ranks goes on bit for bit. Another number
    starts from Theta, with the outer optimizer's state. At the agreements of the first fragment, and in validation and
    checkpoints, `running_mean` and `running_var` of norms are the mean of all ranks, and all other buffers rank 0's.
    Parameters that have been frozen from the start are not sent.

    Args:
        interval: optimizer steps from one agreement to the next. More: fewer bytes, ranks drift further apart.
            "auto": the shortest (at most 500) with which waiting takes at most 3 % of computing; with `overlap=True`
            the shortest whose exchange hides behind computing. It makes two agreements, 8 and 16 steps after the
            warm-up, and times the second.
        outer: makes the outer optimizer, such as `Nesterov()`, or `functools.partial(torch.optim.AdamW, lr=0.1)`. It
            must compute the same bits on all ranks. None: Theta is the mean of all ranks.
        codec: how progress travels; or a policy, see `AllReduce`.
        collective: by which it is averaged.
        error_feedback: see `AllReduce`.
        fragments: cut the model into so many parts of whole layers, each of which is exchanged at a time of its own
            (Streaming DiLoCo, Douillard et al. 2025). More: the same bytes in smaller portions.
        overlap: start an exchange, compute so many more steps (at most `interval`), then apply the result. True:
            compute the whole interval. False: ranks wait.
        blend: what becomes of a rank's own parameters when Theta comes. None: a rank keeps the steps that it made
            during the exchange, theta += Theta - (theta as it was sent). A number from 0 to 1: theta = blend theta +
            (1 - blend) Theta, as in Streaming DiLoCo.
        eager: with `overlap=True`, use a rank's own part of the outer gradient at once, and that of the others when it
            comes (Kale et al. 2025). Costs memory for one more Theta and outer optimizer.
        within_host: average the gradients of each step exactly among the ranks of a host, so that only hosts train
            apart. For several GPUs a host; add `collective=Hierarchical()`, which sends once a host.
        warmup_steps: at first, agree exactly on the mean at each of so many steps (post-local SGD, Lin et al. 2018).
        average_optimizer: also average the inner optimizers' state at each agreement, exactly; all ranks wait for it.
        unit: "step", or "epoch": the interval counts epochs.
        consensus: False: each rank validates, and ends with, its own parameters.
        local: see `Synchronous`.
        uneven: see `Algorithm`. With "join" a rank without data takes part in agreements, and does not step.
    """

    replicates = True

    def __init__(
        self,
        interval: int | Literal["auto"] = 16,
        outer: Outer | None = None,
        codec: Codec | Policy | None = None,
        collective: Collective | None = None,
        error_feedback: bool = False,
        fragments: int = 1,
        overlap: bool | int = False,
        blend: float | None = None,
        eager: bool = False,
        within_host: bool = False,
        warmup_steps: int = 0,
        average_optimizer: bool = False,
        unit: Unit = "step",
        consensus: bool = True,
        local: Local | None = None,
        uneven: str = "error",
    ) -> None:
        super().__init__(consensus, local, uneven)
        self.codec = Identity() if codec is None else codec
        self.collective = BySize() if collective is None else collective
        if not isinstance(self.collective, Collective):
            raise TypeError(f"collective is a Collective such as ringstrategy.Ring(), got {collective!r}")
        check_codec(self.codec, self.collective)
        check_feedback(error_feedback)
        self._outer_text = described_outer(outer)
        if interval == "auto" and unit != "step":
            raise ValueError("interval='auto' counts steps: pass unit='step'")
        Schedule(LONGEST if interval == "auto" else interval, overlap, unit)  # refuses what these cannot be
        for name, number, least in (("fragments", fragments, 1), ("warmup_steps", warmup_steps, 0)):
            if not isinstance(number, int) or isinstance(number, bool) or number < least:
                raise ValueError(f"{name} is a whole number >= {least}, got {number!r}")
        if isinstance(interval, int) and fragments > interval:
            raise ValueError(
                f"fragments={fragments} cannot each have an exchange in interval={interval}: take at most as many"
            )
        if blend is not None and (isinstance(blend, bool) or not isinstance(blend, int | float) or not 0 <= blend <= 1):
            raise ValueError(f"blend is None or a number from 0 to 1, got {blend!r}")
        for name, flag in (("eager", eager), ("average_optimizer", average_optimizer), ("within_host", within_host)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name} is True or False, got {flag!r}")
        if eager and (overlap is not True or blend is not None):
            raise ValueError("eager=True is for overlap=True with blend=None: a rank goes on from its own outer step")
        if within_host and uneven != "error":
            raise ValueError("within_host=True is for ranks with as many batches: pass uneven='error'")
        if warmup_steps and unit != "step":
            raise ValueError("warmup_steps count steps: pass unit='step'")
        self.interval, self.outer, self.error_feedback, self.fragments = interval, outer, error_feedback, fragments
        self.overlap, self.blend, self.eager, self.unit = overlap, blend, eager, unit
        self.warmup_steps, self.average_optimizer = warmup_steps, average_optimizer
        self.within_host = within_host
        self.within = AllReduce(local=local) if within_host else None
        self._chosen: int | None = None  # interval="auto"
        self._trial = Trial()
        self._said: list[str] = []
        self._ends = False  # this is the last agreement
        self._metrics: dict[str, Tensor] = {}  # a device need not be waited for

        self._sent: set[Tensor] = set()  # all groups' parameters
        self._shared: dict[Flat, Shared] = {}
        self._anchors: dict[Flat, Shared] = {}  # from which this rank goes on, if eager
        self._saved: dict[str, Mapping[str, Any]] = {}  # of a checkpoint, for groups that are not bound yet
        self._saved_anchors: dict[str, Mapping[str, Any]] = {}
        self._buffers: Callable[[], Sequence[Tensor]] = tuple
        self._optimizers: Callable[[], Sequence[Optimizer]] = tuple
        self._copied: Callable[[], Sequence[Tensor]] = tuple

    def argument(self, name: str) -> str:
        """See `Periodic.argument`."""
        return self._outer_text if name == "outer" else super().argument(name)

    # When

    @property
    def schedule(self) -> Schedule:
        """See `Periodic.schedule`."""
        interval = self._chosen if self.interval == "auto" else self.interval
        if interval is None:
            return Schedule(STEPS, False, self.unit, self.warmup_steps)
        return Schedule(interval, self.overlap, self.unit, self.warmup_steps)

    def after_step(self, parameters: Collection[Parameter] = (), stepped: Tensor | bool = True) -> None:
        """See `Algorithm.after_step`."""
        super().after_step(parameters, stepped)
        if self._tries:
            assert self._peers is not None
            turns = [group.turns - self.warmup_steps for group in self._groups]
            found = self._trial.interval(turns, self.fragments, self.overlap, self._peers)
            if found is not None:
                self._chosen, said = found
                self._said.append(said)

    def _wait(self, group: Group) -> None:
        assert self._peers is not None
        with self._trial.waiting(self._peers) if self._tries else nullcontext():
            super()._wait(group)

    @property
    def _tries(self) -> bool:
        return self.interval == "auto" and self._chosen is None

    def news(self) -> list[str]:
        """See `Algorithm.news`."""
        said, self._said = self._said, []
        return said

    def _is_plain(self, group: Group) -> bool:
        """Is this agreement an exact mean: one of the warm-up, or the last?"""
        return self._ends or group.turns <= self.warmup_steps

    # What

    def setup(self, parameters: Mapping[str, Parameter], peers: Peers, *, sparse: frozenset[str] = frozenset()) -> None:
        """See `Algorithm.setup`."""
        self._shared, self._anchors, self._saved, self._saved_anchors = {}, {}, {}, {}
        self._metrics, self._trial, self._chosen = {}, Trial(), None
        super().setup(parameters, peers, sparse=sparse)

    def attend(
        self,
        buffers: Callable[[], Sequence[Tensor]],
        optimizers: Callable[[], Sequence[Optimizer]],
        copied: Callable[[], Sequence[Tensor]] = tuple,
    ) -> None:
        """See `ParameterAlgorithm.attend`."""
        self._buffers, self._optimizers, self._copied = buffers, optimizers, copied

    def parts(self, parameters: Mapping[str, Parameter]) -> list[dict[str, Parameter]]:
        """See `Periodic.parts`."""
        return cut_fragments({name: value for name, value in parameters.items() if value.numel()}, self.fragments)

    def line(self, name: str, parameter: Parameter) -> str:
        """See `Periodic.line`."""
        return f"{super().line(name, parameter)} by {codec_of(self.codec, self.collective, name, parameter)}"

    def _groups_of(self, parameters: Collection[Parameter]) -> list[Group]:
        """Of those that are trained, or once were, also in the checkpoint's run: others are not sent."""
        saved = {self._known[name] for name in self._saved if name in self._known}
        return super()._groups_of(
            [each for each in parameters if each.requires_grad or each in self._sent or each in saved]
        )

    def group(self, parameters: Mapping[str, Parameter]) -> Group:
        """See `Periodic.group`. Theta is that of a checkpoint, or what the ranks have. Nothing was lost or sent yet."""
        group = Group(parameters, sums_dtype, lambda *named: codec_of(self.codec, self.collective, *named))
        self._sent.update(parameters.values())
        for flat in group.flats:
            warm_up_codec(flat.codec, {name: parameters[name] for name in flat.names})
            if isinstance(self.outer, Nesterov):
                operations.warm_up_nesterov.on(flat.device)()
            flat.memory = {kind: torch.zeros_like(flat.correction) for kind in self._kinds(flat)}
            self._shared[flat] = Shared(flat, self.outer)
            if self.eager:
                self._anchors[flat] = Shared(flat, self.outer)
            if not _taken(self._saved, self._shared[flat]):
                self._share(flat)
            elif self.eager and not _taken(self._saved_anchors, self._anchors[flat]):
                self._anchors[flat].load_state_dict(self._shared[flat].state_dict())
        for name in parameters:  # of a flat that lacked others
            self._saved.pop(name, None)
            self._saved_anchors.pop(name, None)
        return group

    def _share(self, flat: Flat) -> None:
        """Theta becomes what the ranks have."""
        assert self._peers is not None
        values = self.exchange.common(flat.parameters, self._peers, "for the shared parameters")
        for shared in (self._shared, self._anchors) if self.eager else (self._shared,):
            shared[flat].values.copy_(values)

    def _kinds(self, flat: Flat) -> list[str]:
        """What is kept for a flat: what its codec lost; what this rank sent, and the others did, if that is needed."""
        kinds = ["residual"] if self.error_feedback and not flat.codec.lossless else []
        if self.eager:
            kinds.append("own")
        elif self.overlap and self.blend is None:
            kinds.append("sent")
        return kinds

    def gather(self, group: Group) -> None:
        """The progress since the last agreement; beside it its squared norm, and buffers."""
        alone = self.eager and not self._is_plain(group)
        for flat in group.flats:
            # if eager, what a rank made before its anchor is in Theta already, or will be
            origin = self._anchors[flat] if self.eager else self._shared[flat]
            begun = origin.values.to(flat.parameters[0].dtype).to(origin.values.dtype)  # where a rank began, rounded
            flat.gather_sum(begun, -1.0, into=flat.correction)
            if alone:
                self._step_alone(flat)
            elif "sent" in flat.memory:
                flat.gather(into=flat.memory["sent"])
        if group is self._groups[0]:
            self._gather_beside(group)
        else:
            group.others.pop(_BESIDE, None)

    def _step_alone(self, flat: Flat) -> None:
        """Go on from an outer step by this rank's own progress now, and the others' of the last agreement."""
        assert self._peers is not None
        own, anchor, share = flat.memory["own"], self._anchors[flat], 1.0 / self._peers.size
        anchor.step(own.add_(flat.correction, alpha=share))  # it held the others' part
        flat.write(anchor.values)
        torch.mul(flat.correction, share, out=own)

    def _gather_beside(self, group: Group) -> None:
        assert self._peers is not None
        squares = _squares(group, self.exchange.ranks)
        averaged = [buffer.detach().reshape(-1).double() for buffer in self._averaged_buffers()]
        copied = [words_of(buffers) for buffers in (self._copied_buffers(),) if buffers]
        values = torch.cat([squares, *averaged, *copied])
        beside = group.others.get(_BESIDE)
        if beside is None or beside.numel != values.numel():
            beside = group.others[_BESIDE] = Vector(values.numel(), values.dtype, values.device)
        beside.values.copy_(values)
        words = [self.exchange.from_rank_0(row, self._peers) for row in copied]
        torch.cat([squares, *averaged, *words], out=beside.correction)

    def meet(self, group: Group, peers: Peers, number: int) -> None:
        """Average the progress, and exactly what is beside it."""
        plain = self._is_plain(group)
        summands = [
            Summand(
                flat.correction,
                Identity() if plain else flat.codec,
                flat.memory.get("residual"),
                seed=derive_seed(group.seed, number, place),
            )
            for place, flat in enumerate(group.flats)
        ]
        summands += [Summand(vector.correction, Identity()) for vector in group.others.values()]
        self.exchange.means_(summands, peers, self.collective)

    def apply(self, group: Group) -> None:
        """Step Theta, and take it over."""
        plain = self._is_plain(group)
        waited = plain or self.schedule.waits(group.turns, group.place)
        square = _squares(group, self.exchange.ranks)[0] if _BESIDE in group.others else None
        for flat in group.flats:
            shared = self._shared[flat]
            if self.eager and not plain:
                own = flat.memory["own"]
                torch.sub(flat.correction, own, out=own)
            shared.step(flat.correction, plain=plain)
            if plain and self.eager:
                self._anchors[flat].values.copy_(shared.values)
                flat.memory["own"].zero_()  # the others' part is in Theta
            if plain or (waited and self.blend is None and not self.eager):
                flat.write(shared.values)
            elif self.blend is not None:
                flat.blend(shared.values, self.blend)
            elif not self.eager:
                flat.add(torch.sub(shared.values, flat.memory["sent"], out=flat.correction))
        if square is not None:
            self._apply_beside(group, square, waited=waited)
        if self.average_optimizer:
            assert self._peers is not None
            averaged = set(group.parameters.values())
            stepped = {name: each for name, each in self._all.items() if self._first.get(each) in averaged}
            average_states(stepped, self._optimizers(), self.exchange, self._peers)

    def _apply_beside(self, group: Group, square: Tensor, *, waited: bool) -> None:
        assert self._peers is not None
        beside, ranks, size = group.others[_BESIDE], self.exchange.ranks, self._peers.size
        alike = (square / beside.correction[:ranks].mean()).nan_to_num(1.0)  # 1 / size: at right angles; 1: the same
        self._metrics = {
            "outer_gradient_norm": square.sqrt(),
            "direction_agreement": (size * alike - 1) / max(1, size - 1),
        }
        buffers, copied = self._averaged_buffers(), self._copied_buffers()
        words = ranks + sum(buffer.numel() for buffer in buffers)
        if words + -(-sum(buffer.nbytes for buffer in copied) // 4) != beside.numel:
            return  # others than were sent
        both = beside.values, beside.correction
        for buffer, sent, mean in zip(buffers, *(cut_like(row[ranks:words], buffers) for row in both), strict=True):
            buffer.copy_(mean if waited else torch.where(mean == sent, buffer, buffer + (mean - sent)))
        for buffer, sent, first in zip(copied, *(cut_words(row[words:], copied) for row in both), strict=True):
            buffer.copy_(torch.where(first == sent, buffer, first))

    def _averaged_buffers(self) -> list[Tensor]:
        """Those that have a mean in real numbers."""
        return [buffer for buffer in self._buffers() if buffer.is_floating_point() and buffer.numel()]

    def _copied_buffers(self) -> list[Tensor]:
        """Those of which rank 0's values count."""
        return [buffer for buffer in self._copied() if buffer.numel()]

    def metrics(self) -> dict[str, float]:
        """The norm of the last outer gradient (of the first fragment), and how far the ranks' directions agree.

        1: all ranks went the same way. 0: at right angles to each other, as by noise alone.
        """
        metrics, self._metrics = self._metrics, {}
        return {name: float(value) for name, value in metrics.items()}

    def left(self, group: Group) -> Iterable[tuple[Flat, Tensor]]:
        """See `Periodic.left`: the mean of all ranks, with the steps since the last agreement."""
        assert self._view is not None
        return self._view.means(group, self._with_all_parts if self.eager else row_of_parameters)

    def _with_all_parts(self, flat: Flat) -> Tensor:
        """A rank's parameters, where they would be if it had the others' part of the last outer gradient too."""
        return row_of_parameters(flat).sub_(self._anchors[flat].values).add_(self._shared[flat].values)

    def _put_back(self, group: Group) -> None:
        self._saved |= _states(self._shared, [group])
        self._saved_anchors |= _states(self._anchors, [group])
        super()._put_back(group)

    def _drop(self, group: Group) -> None:
        super()._drop(group)
        self._sent.difference_update(group.parameters.values())
        for flat in group.flats:
            del self._shared[flat]
            self._anchors.pop(flat, None)

    @torch.no_grad()
    def start(self) -> None:
        """See `ParameterAlgorithm.start`: before the first step Theta is what the ranks have now."""
        trained = any(group.steps for group in self._groups)
        if not trained and self._view is not None and not self._view.entered:
            for group in self._groups:
                self._share_anew(group)

    def _share_anew(self, group: Group) -> None:
        """Before the first step weights may have been loaded. All ranks call it."""
        if group.steps == 0:  # not turns: with unit="epoch" the first may still be to come
            for flat in group.flats:
                self._share(flat)

    @torch.no_grad()
    def finish(self) -> None:
        """See `ParameterAlgorithm.finish`: Theta becomes the exact mean of all ranks, plus the sum of residuals."""
        peers = self._peers
        if peers is None or not self.consensus:
            return
        if self._view is not None and self._view.entered:
            raise RuntimeError("call finish before or after `with consensus(...)`: within, ranks hold what they share")
        compare_plans(peers, "the last agreement")
        for group in self._groups:
            self._apply(group)
        self._ends = True
        try:
            for group in self._groups:
                self.gather(group)
                peers.finish([peers.submit(partial(self.meet, group, peers, group.mixings), "at the last agreement")])
                self.apply(group)
        finally:
            self._ends = False

    def shared_values(self) -> dict[str, Tensor]:
        """Theta."""
        return {name: state["values"] for name, state in _states(self._shared, self._groups).items()}

    def rehearse(self, group: Group, peers: Peers) -> None:
        """See `Periodic.rehearse`."""

        def work() -> None:
            self.exchange.means_(
                [
                    Summand(
                        torch.zeros_like(flat.correction),
                        flat.codec,
                        torch.zeros_like(flat.correction) if "residual" in flat.memory else None,
                        seed=group.seed,
                    )
                    for flat in group.flats
                ],
                peers,
                self.collective,
            )

        with peers.stats.probe():
            peers.submit(work, "while setting up").wait()

    def seen(self, group: Group, *, replaced: bool = False) -> Iterable[tuple[Flat, Tensor]]:
        """Theta; or the mean of all ranks, where the parameters hold other values."""
        if not replaced:
            self._share_anew(group)
            return [(flat, self._shared[flat].values) for flat in group.flats]
        assert self._view is not None
        return self._view.means(group, row_of_parameters)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """See `Algorithm.state_dict`: also Theta, the outer optimizer's state, and the interval that was chosen."""
        shared = self._saved | _states(self._shared, self._groups)
        return {**super().state_dict(), "shared": shared, "interval": self._chosen, "outer": self._outer_class}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Algorithm.load_state_dict`."""
        super().load_state_dict(state)
        self._shared, self._anchors, self._sent, self._trial = {}, {}, set(), Trial()
        self._saved, self._chosen = dict(state.get("shared", {})), state.get("interval")
        if self._chosen is not None and self._chosen < max(self.fragments, self.overlap):
            self._chosen = None
            self._said.append("the interval is measured anew: that of the checkpoint is too short now")
        before, now = state.get("outer", self._outer_class), self._outer_class
        if before != now and any(kept["outer"] for kept in self._saved.values()):
            self._saved = _without_outer(self._saved)
            self._said.append(f"the outer optimizer begins anew, because it is {now}, and in the checkpoint {before}")

    def forget(self) -> None:
        """See `ParameterAlgorithm.forget`: Theta and the outer optimizer's state too."""
        self.load_state_dict({**self.state_dict(), "shared": {}})
        self._saved_anchors = {}

    @property
    def keeper(self) -> str:
        """What is kept depends on these."""
        how = "eager" if self.eager else f"overlap={bool(self.overlap)}, blend={self.blend}"
        return f"{super().keeper} with codec={self.argument('codec')}, error_feedback={self.error_feedback}, {how}"

    def own_state(self) -> dict[str, Any]:
        """See `ParameterAlgorithm.own_state`: if eager, also the shared parameters as this rank goes on from them."""
        anchors = self._saved_anchors | _states(self._anchors, self._groups)
        return {**super().own_state(), "anchors": anchors, "outer": self._outer_class}

    def load_own_state(self, state: Mapping[str, Any]) -> bool:
        """See `ParameterAlgorithm.load_own_state`."""
        mine = super().load_own_state(state)
        self._saved_anchors = dict(state["anchors"]) if mine else {}
        if state.get("outer", self._outer_class) != self._outer_class:
            self._saved_anchors = _without_outer(self._saved_anchors)
        return mine

    @property
    def _outer_class(self) -> str:
        """Whose state it is that is kept for a parameter."""
        return self._outer_text.partition("(")[0]

    def close(self) -> None:
        """See `Algorithm.close`. Theta and the outer optimizer's state stay."""
        self._saved = self.state_dict()["shared"]
        super().close()
        self._shared, self._anchors, self._sent = {}, {}, set()
        self._buffers = self._optimizers = self._copied = tuple


def _taken(saved: dict[str, Mapping[str, Any]], shared: Shared) -> bool:
    """Has it been restored? What it took is not there for a later group."""
    found = shared.load_state_dict(saved)
    for name in shared.names if found else ():
        del saved[name]
    return found


def _without_outer(saved: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The shared parameters, without what an outer optimizer keeps for them."""
    return {name: {**state, "outer": {}} for name, state in saved.items()}


def _squares(group: Group, ranks: int) -> Tensor:
    """The squared norm of what is exchanged, for each rank that lies in it; float64, on the group's device."""
    norms = [torch.linalg.vector_norm(flat.correction.view(ranks, -1), dim=1) for flat in group.flats]
    return torch.stack([norm.double().square().to(norms[0].device) for norm in norms]).sum(0)


def _states(by_flat: Mapping[Flat, Shared], groups: Sequence[Group]) -> dict[str, Mapping[str, Any]]:
    """By parameter name."""
    states: dict[str, Mapping[str, Any]] = {}
    for group in groups:
        for flat in group.flats if by_flat else ():
            states |= by_flat[flat].state_dict()
    return states
