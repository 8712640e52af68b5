"""Local SGD, DiLoCo and Streaming DiLoCo, through any codec."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from ringstrategy.algorithms.gradients.allreduce import AllReduce
from ringstrategy.algorithms.parameters.agreement import Agreement, Beside, theta
from ringstrategy.algorithms.parameters.group import Group
from ringstrategy.algorithms.parameters.outer import Nesterov, Outer, described_outer
from ringstrategy.algorithms.parameters.periodic import Periodic
from ringstrategy.algorithms.parameters.schedule import Schedule, Unit
from ringstrategy.algorithms.policy import Local, Policy, check_codec, check_feedback
from ringstrategy.codecs.base import Codec
from ringstrategy.codecs.identity import Identity
from ringstrategy.collectives.base import Collective
from ringstrategy.collectives.by_size import BySize
from ringstrategy.transport.agree import compare_plans

_FOR_ADAMW = Nesterov(0.4, 0.8)  # the names' own; `python -m benchmarks fair_race` found others for Muon


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

    def __init__(  # noqa: PLR0913
        self,
        interval: int = 16,
        outer: Outer | None = None,
        codec: Codec | Policy | None = None,
        collective: Collective | None = None,
        error_feedback: bool = False,
        fragments: int = 1,
        overlap: bool | int = False,
        within_host: bool = False,
        warmup_steps: int = 0,
        unit: Unit = "step",
        consensus: bool = True,
        local: Local | None = None,
        uneven: str = "error",
    ) -> None:
        schedule = Schedule(interval, overlap, unit, warmup_steps)
        self.codec = Identity() if codec is None else codec
        self.collective = BySize() if collective is None else collective
        if not isinstance(self.collective, Collective):
            raise TypeError(f"collective is a Collective such as ringstrategy.Ring(), got {collective!r}")
        self.tagged = self.collective.tagged
        check_codec(self.codec, self.collective)
        check_feedback(error_feedback)
        self._outer_text = described_outer(outer)
        for name, number, least in (("fragments", fragments, 1), ("warmup_steps", warmup_steps, 0)):
            if type(number) is not int or number < least:
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
        self._agreement = Agreement(schedule, outer, self.codec, self.collective, error_feedback, fragments)
        super().__init__(schedule, self._agreement, consensus, local, uneven)
        self._said: list[str] = []

    @property
    def copies(self) -> int:
        """Of the trained parameters, in float32, beside the parameters themselves."""
        exact = isinstance(self.codec, Codec) and self.codec.lossless
        return 2 + (self.outer is not None) + (self.error_feedback and not exact) + bool(self.schedule.overlap)

    @override
    def argument(self, name: str) -> str:
        return self._outer_text if name == "outer" else super().argument(name)

    @override
    def bind(self, parameters: Collection[Parameter], optimizer: Optimizer | None = None) -> None:
        super().bind(parameters, optimizer)
        if "Muon" in type(optimizer).__name__ and self.outer == _FOR_ADAMW and not self._said:
            self._said.append(f"{self.outer} is for AdamW: with Muon inside, try LocalSGD(outer=Nesterov(0.7, 0.6))")

    @override
    def news(self) -> list[str]:
        said, self._said = self._said, []
        return said

    @override
    def attend(self, buffers: Callable[[], Sequence[Tensor]], copied: Callable[[], Sequence[Tensor]] = tuple) -> None:
        self._agreement.beside = Beside(buffers, copied)

    def _groups_of(self, parameters: Collection[Parameter]) -> list[Group]:
        """Of those that are trained, or once were, also in the checkpoint's run: others are not sent."""
        frozen = {parameter for parameter in parameters if not parameter.requires_grad}
        if frozen:
            frozen -= {parameter for group in self._groups for parameter in group.parameters.values()}
            frozen -= {self._known[name] for name in self._kept.shared if name in self._known}
        return super()._groups_of([parameter for parameter in parameters if parameter not in frozen])

    def metrics(self) -> dict[str, float]:
        """The norm of the last outer gradient (of the first fragment), and how far the ranks' directions agree.

        1: all ranks went the same way. 0: at right angles to each other, as by noise alone.
        """
        return self._agreement.beside.metrics()

    @torch.no_grad()
    def start(self) -> None:
        """See `Algorithm.start`: before the first step Theta is what the ranks have now."""
        if self._runtime is not None and not self.entered and not any(group.steps for group in self._groups):
            for group in self._groups:
                self._agreement.share_anew(group, self._runtime)

    @torch.no_grad()
    def finish(self) -> None:
        """See `Algorithm.finish`: Theta becomes the exact mean of all ranks, plus the sum of residuals."""
        runtime = self._runtime
        if runtime is None or not self.consensus:
            return
        if self.entered:
            raise RuntimeError("call finish before or after `with consensus(...)`: within, ranks hold what they share")
        compare_plans(runtime.peers, "the last agreement")
        for group in self._groups:
            self._apply(group)
        self._agreement.ends = True
        try:
            for group in self._groups:
                runtime.peers.finish([self._exchange(group, "at the last agreement")])
                self._agreement.apply(group, runtime)
        finally:
            self._agreement.ends = False

    def shared_values(self) -> dict[str, Tensor]:
        """Theta."""
        flats = (flat for group in self._groups for flat in group.flats)
        return {name: part for flat in flats for name, part in flat.by_name(theta(flat).values).items()}

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """See `Algorithm.state_dict`: also Theta and the outer optimizer's state."""
        return {**super().state_dict(), "outer": self._outer_class}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        before, now = state.get("outer", self._outer_class), self._outer_class
        if before != now and any(kept["outer"] for kept in self._kept.shared.values()):
            self._kept.shared = {name: {**kept, "outer": {}} for name, kept in self._kept.shared.items()}
            self._said.append(f"the outer optimizer begins anew, because it is {now}, and in the checkpoint {before}")

    def forget(self) -> None:
        """See `Algorithm.forget`: Theta and the outer optimizer's state too."""
        self.load_state_dict({**self.state_dict(), "shared": {}})

    @property
    def _outer_class(self) -> str:
        """Whose state it is that is kept for a parameter."""
        return self._outer_text.partition("(")[0]

    def close(self) -> None:
        """See `Algorithm.close`. Theta and the outer optimizer's state stay."""
        super().close()
        self._agreement.beside = Beside()
