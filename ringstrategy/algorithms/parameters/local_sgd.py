"""Local SGD, DiLoCo and Streaming DiLoCo, through any codec."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ringstrategy.algorithms.gradients.allreduce import AllReduce
from ringstrategy.algorithms.local import Local
from ringstrategy.algorithms.parameters.beside import Beside
from ringstrategy.algorithms.parameters.fragments import cut_fragments
from ringstrategy.algorithms.parameters.group import Flat, Group
from ringstrategy.algorithms.parameters.outer import Nesterov, Outer, Shared, described_outer
from ringstrategy.algorithms.parameters.periodic import Periodic, warm_up_codec
from ringstrategy.algorithms.parameters.schedule import Schedule, Unit
from ringstrategy.algorithms.policy import Policy, check_codec, check_feedback, codec_of, feeds_back
from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.codecs.identity import Identity
from ringstrategy.collectives.base import Collective, Summand, sums_dtype
from ringstrategy.collectives.by_size import BySize
from ringstrategy.kernels.engine import engine
from ringstrategy.transport.agree import compare_plans
from ringstrategy.transport.base import Peers


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
        outer: makes the outer optimizer, such as `Nesterov()`, or `functools.partial(torch.optim.AdamW, lr=0.1)`. It
            must compute the same bits on all ranks. None: Theta is the mean of all ranks.
        codec: how progress travels; or a policy, see `AllReduce`.
        collective: by which it is averaged.
        error_feedback: see `AllReduce`.
        fragments: cut the model into so many parts of whole layers, each of which is exchanged at a time of its own
            (Streaming DiLoCo, Douillard et al. 2025). More: the same bytes in smaller portions.
        overlap: start an exchange, compute so many more steps (at most `interval`), then apply the result. True:
            compute the whole interval. False: ranks wait. A rank keeps the steps that it made during the exchange:
            theta += Theta - (theta as it was sent).
        within_host: average the gradients of each step exactly among the ranks of a host, so that only hosts train
            apart. For several GPUs a host; add `collective=Hierarchical()`, which sends once a host.
        warmup_steps: at first, agree exactly on the mean at each of so many steps (post-local SGD, Lin et al. 2018).
        unit: "step", or "epoch": the interval counts epochs.
        consensus: False: each rank validates, and ends with, its own parameters.
        local: see `Synchronous`.
        uneven: see `Algorithm`. With "join" a rank without data takes part in agreements, and does not step.
    """

    replicates = True

    def __init__(
        self,
        interval: int = 16,
        outer: Outer | None = None,
        codec: Codec | Policy | None = None,
        collective: Collective | None = None,
        error_feedback: bool | None = None,
        fragments: int = 1,
        overlap: bool | int = False,
        within_host: bool = False,
        warmup_steps: int = 0,
        unit: Unit = "step",
        consensus: bool = True,
        local: Local | None = None,
        uneven: str = "error",
    ) -> None:
        super().__init__(Schedule(interval, overlap, unit, warmup_steps), consensus, local, uneven)
        self.codec = Identity() if codec is None else codec
        self.collective = BySize() if collective is None else collective
        if not isinstance(self.collective, Collective):
            raise TypeError(f"collective is a Collective such as ringstrategy.Ring(), got {collective!r}")
        check_codec(self.codec, self.collective)
        check_feedback(error_feedback)
        self._outer_text = described_outer(outer)
        for name, number, least in (("fragments", fragments, 1), ("warmup_steps", warmup_steps, 0)):
            if not isinstance(number, int) or isinstance(number, bool) or number < least:
                raise ValueError(f"{name} is a whole number >= {least}, got {number!r}")
        if fragments > interval:
            raise ValueError(
                f"fragments={fragments} cannot each have an exchange in interval={interval}: take at most as many"
            )
        if not isinstance(within_host, bool):
            raise TypeError(f"within_host is True or False, got {within_host!r}")
        if within_host and uneven != "error":
            raise ValueError("within_host=True is for ranks with as many batches: pass uneven='error'")
        if warmup_steps and unit != "step":
            raise ValueError("warmup_steps count steps: pass unit='step'")
        self.outer, self.error_feedback, self.fragments = outer, error_feedback, fragments
        self.warmup_steps, self.within_host = warmup_steps, within_host
        self.within = AllReduce(local=local) if within_host else None
        self._said: list[str] = []
        self._ends = False  # this is the last agreement
        self._beside = Beside()

    def argument(self, name: str) -> str:
        """See `Periodic.argument`."""
        return self._outer_text if name == "outer" else super().argument(name)

    def news(self) -> list[str]:
        """See `Algorithm.news`."""
        said, self._said = self._said, []
        return said

    def _is_plain(self, group: Group) -> bool:
        """Is this agreement an exact mean: one of the warm-up, or the last?"""
        return self._ends or group.turns <= self.warmup_steps

    # What

    def attend(self, buffers: Callable[[], Sequence[Tensor]], copied: Callable[[], Sequence[Tensor]] = tuple) -> None:
        """See `ParameterAlgorithm.attend`."""
        self._beside = Beside(buffers, copied)

    def parts(self, parameters: Mapping[str, Parameter]) -> list[dict[str, Parameter]]:
        """See `Periodic.parts`."""
        return cut_fragments({name: value for name, value in parameters.items() if value.numel()}, self.fragments)

    def line(self, name: str, parameter: Parameter) -> str:
        """See `Periodic.line`."""
        return f"{super().line(name, parameter)} by {codec_of(self.codec, self.collective, name, parameter)}"

    def _groups_of(self, parameters: Collection[Parameter]) -> list[Group]:
        """Of those that are trained, or once were, also in the checkpoint's run: others are not sent."""
        frozen = {parameter for parameter in parameters if not parameter.requires_grad}
        if frozen:
            frozen -= {parameter for group in self._groups for parameter in group.parameters.values()}
            frozen -= {self._known[name] for name in self._kept.shared if name in self._known}
        return super()._groups_of([parameter for parameter in parameters if parameter not in frozen])

    def group(self, parameters: Mapping[str, Parameter]) -> Group:
        """See `Periodic.group`. Theta is that of a checkpoint, or what the ranks have. Nothing was lost or sent yet."""
        group = Group(parameters, sums_dtype, lambda *named: codec_of(self.codec, self.collective, *named))
        for flat in group.flats:
            warm_up_codec(flat.codec, {name: parameters[name] for name in flat.names})
            if isinstance(self.outer, Nesterov):
                engine(flat.device).warm_up_nesterov()
            flat.memory = {kind: torch.zeros_like(flat.correction) for kind in self._kinds(flat)}
            flat.shared = Shared(flat.names, flat.parameters, self.outer)
            if not self._kept.take_shared(flat):
                self._share(flat)
        return group

    def _share(self, flat: Flat) -> None:
        """Theta becomes what the ranks have."""
        values = self.exchange.common(flat.parameters, self.peers, "for the shared parameters")
        _theta(flat).values.copy_(values)

    def _kinds(self, flat: Flat) -> list[str]:
        """What is kept for a flat: what its codec lost; and what this rank sent, if it goes on meanwhile."""
        kinds = ["residual"] if feeds_back(flat.codec, self.error_feedback) else []
        if self.overlap:
            kinds.append("sent")
        return kinds

    def gather(self, group: Group) -> None:
        """The progress since the last agreement; beside it its squared norm, and buffers."""
        for flat in group.flats:
            shared = _theta(flat).values
            begun = shared.to(flat.parameters[0].dtype).to(shared.dtype)  # where a rank began, rounded
            flat.gather_sum(begun, -1.0, into=flat.correction)
            if "sent" in flat.memory:
                flat.gather(into=flat.memory["sent"])
        if group is self._groups[0]:
            self._beside.gather(group, self.exchange, self.peers)
        else:
            group.others.clear()

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
        waited = plain or self.schedule.waits(group.turns)
        self._beside.apply(group, self.exchange.ranks, self.peers.size, waited=waited)
        for flat in group.flats:
            shared = _theta(flat)
            shared.step(flat.correction, plain=plain)
            if waited:
                flat.write(shared.values)
            else:
                flat.add(torch.sub(shared.values, flat.memory["sent"], out=flat.correction))

    def metrics(self) -> dict[str, float]:
        """The norm of the last outer gradient (of the first fragment), and how far the ranks' directions agree.

        1: all ranks went the same way. 0: at right angles to each other, as by noise alone.
        """
        return self._beside.metrics()

    def left(self, group: Group) -> Iterable[tuple[Flat, Tensor]]:
        """See `Periodic.left`: the mean of all ranks, with the steps since the last agreement."""
        return self.means(group)

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
        flats = (flat for group in self._groups for flat in group.flats)
        return {name: part for flat in flats for name, part in flat.by_name(_theta(flat).values).items()}

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
            return [(flat, _theta(flat).values) for flat in group.flats]
        return self.means(group)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """See `Algorithm.state_dict`: also Theta and the outer optimizer's state."""
        return {**super().state_dict(), "outer": self._outer_class}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Algorithm.load_state_dict`."""
        super().load_state_dict(state)
        before, now = state.get("outer", self._outer_class), self._outer_class
        if before != now and any(kept["outer"] for kept in self._kept.shared.values()):
            self._kept.shared = {name: {**kept, "outer": {}} for name, kept in self._kept.shared.items()}
            self._said.append(f"the outer optimizer begins anew, because it is {now}, and in the checkpoint {before}")

    def forget(self) -> None:
        """See `ParameterAlgorithm.forget`: Theta and the outer optimizer's state too."""
        self.load_state_dict({**self.state_dict(), "shared": {}})

    @property
    def keeper(self) -> str:
        """What is kept depends on these."""
        how = f"codec={self.argument('codec')}, error_feedback={self.error_feedback}, overlap={bool(self.overlap)}"
        return f"{super().keeper} with {how}"

    @property
    def _outer_class(self) -> str:
        """Whose state it is that is kept for a parameter."""
        return self._outer_text.partition("(")[0]

    def close(self) -> None:
        """See `Algorithm.close`. Theta and the outer optimizer's state stay."""
        super().close()
        self._beside = Beside()


def _theta(flat: Flat) -> Shared:
    assert flat.shared is not None
    return flat.shared
