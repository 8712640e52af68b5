"""How ranks agree on shared parameters, by the mean of their progress and an outer optimizer; and on buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from ringstrategy.algorithms.parameters.averager import Averager, Runtime, warm_up_codec
from ringstrategy.algorithms.parameters.exchange import Exchange
from ringstrategy.algorithms.parameters.group import Flat, Group, Shared, Vector, cut_like, cut_words, words_of
from ringstrategy.algorithms.parameters.outer import Nesterov, Outer
from ringstrategy.algorithms.parameters.schedule import Schedule, cut_fragments
from ringstrategy.algorithms.policy import Policy, codec_of, described
from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.codecs.identity import Identity
from ringstrategy.collectives.base import Collective, Summand, sums_dtype
from ringstrategy.kernels import operations
from ringstrategy.transport.base import Peers

_BESIDE = "beside"  # the name of its vector


class Agreement(Averager):
    """Theta, the shared parameters of a group, and how it moves: see `LocalSGD`, as for the arguments.

    Attributes:
        beside: what is averaged exactly beside the parameters of the first group.
        ends: this is the last agreement.
    """

    def __init__(
        self,
        schedule: Schedule,
        outer: Outer | None,
        codec: Codec | Policy,
        collective: Collective,
        error_feedback: bool,
        fragments: int,
    ) -> None:
        self.schedule, self.outer, self.codec, self.collective = schedule, outer, codec, collective
        self.error_feedback, self.fragments = error_feedback, fragments
        self.beside, self.ends = Beside(), False

    @property
    def keeper(self) -> str:
        """What is kept depends on these."""
        overlaps = bool(self.schedule.overlap)
        return f"LocalSGD by {described(self.codec)}, error_feedback={self.error_feedback}, overlap={overlaps}"

    def _is_plain(self, group: Group) -> bool:
        """Whether this agreement is an exact mean: one of the warm-up, or the last."""
        return self.ends or group.turns <= self.schedule.start

    @override
    def parts(self, parameters: Mapping[str, Parameter]) -> list[dict[str, Parameter]]:
        return cut_fragments({name: value for name, value in parameters.items() if value.numel()}, self.fragments)

    @override
    def line(self, name: str, parameter: Parameter) -> str:
        return f"{super().line(name, parameter)} by {codec_of(self.codec, self.collective, name, parameter)}"

    def group(self, parameters: Mapping[str, Parameter], runtime: Runtime) -> Group:
        """See `Averager.group`. Theta is a checkpoint's, or what the ranks have. Nothing was lost or sent yet."""
        group = Group(parameters, sums_dtype, lambda *named: codec_of(self.codec, self.collective, *named))
        for flat in group.flats:
            warm_up_codec(flat.codec, {name: parameters[name] for name in flat.names})
            if isinstance(self.outer, Nesterov):
                operations.warm_up_nesterov.on(flat.device)()
            kinds = ["residual"] if self.error_feedback and not flat.codec.lossless else []  # what its codec lost
            kinds += ["sent"] if self.schedule.overlap else []  # what this rank had, which goes on meanwhile
            flat.memory = {kind: torch.zeros_like(flat.correction) for kind in kinds}
            flat.shared = Shared(flat.names, flat.parameters, self.outer)
            if not runtime.kept.take_shared(flat):
                _share(flat, runtime)
        return group

    def gather(self, group: Group, runtime: Runtime, *, first: bool) -> None:
        """The progress since the last agreement; of the first group, its squared norm and buffers beside it."""
        for flat in group.flats:
            shared = theta(flat).values
            begun = shared.to(flat.parameters[0].dtype).to(shared.dtype)  # where a rank began, rounded
            flat.gather_sum(begun, -1.0, into=flat.correction)
            if "sent" in flat.memory:
                flat.gather(into=flat.memory["sent"])
        if first:
            self.beside.gather(group, runtime.exchange, runtime.peers)
        else:
            group.others.clear()

    def meet(self, group: Group, runtime: Runtime, number: int) -> None:
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
        runtime.exchange.means_(summands, runtime.peers, self.collective)

    def apply(self, group: Group, runtime: Runtime) -> None:
        """Step Theta, and take it over."""
        plain = self._is_plain(group)
        waited = plain or self.schedule.waits(group.turns)
        self.beside.apply(group, runtime.exchange.ranks, runtime.peers.size, waited=waited)
        for flat in group.flats:
            shared = theta(flat)
            shared.step(flat.correction, plain=plain)
            if waited:
                flat.write(shared.values)
            else:
                flat.add(torch.sub(shared.values, flat.memory["sent"], out=flat.correction))

    def seen(self, group: Group, runtime: Runtime, *, replaced: bool = False) -> Iterable[tuple[Flat, Tensor]]:
        """Theta; or the mean of all ranks, where the parameters hold other values."""
        if replaced:
            return runtime.view.means(group, Flat.row)
        self.share_anew(group, runtime)
        return [(flat, theta(flat).values) for flat in group.flats]

    def left(self, group: Group, runtime: Runtime) -> Iterable[tuple[Flat, Tensor]]:
        """See `Averager.left`: the mean of all ranks, with the steps since the last agreement."""
        return runtime.view.means(group, Flat.row)

    def share_anew(self, group: Group, runtime: Runtime) -> None:
        """Theta becomes what the ranks have, if weights may have been loaded since. All ranks call it."""
        if group.steps == 0:  # not turns: with unit="epoch" the first may still be to come
            for flat in group.flats:
                _share(flat, runtime)

    @override
    def rehearse(self, group: Group, runtime: Runtime) -> None:
        summands = [
            Summand(
                torch.zeros_like(flat.correction),
                flat.codec,
                torch.zeros_like(flat.correction) if "residual" in flat.memory else None,
                seed=group.seed,
            )
            for flat in group.flats
        ]
        with runtime.peers.stats.probe():
            work = partial(runtime.exchange.means_, summands, runtime.peers, self.collective)
            runtime.peers.submit(work, "while setting up").wait()


def theta(flat: Flat) -> Shared:
    """The shared parameters of a flat."""
    assert flat.shared is not None
    return flat.shared


def _share(flat: Flat, runtime: Runtime) -> None:
    """Theta becomes what the ranks have."""
    values = runtime.exchange.common(flat.parameters, runtime.peers, "for the shared parameters")
    theta(flat).values.copy_(values)


class Beside:
    """What an agreement averages exactly beside the parameters of its first group: squared norms, and buffers.

    Buffers that have a mean get it, all others rank 0's values; norms tell how far directions agree.

    Args:
        averaged: where buffers that have a mean are found.
        copied: where the others are found.
    """

    def __init__(
        self, averaged: Callable[[], Sequence[Tensor]] = tuple, copied: Callable[[], Sequence[Tensor]] = tuple
    ) -> None:
        self._averaged, self._copied = averaged, copied
        self._metrics: dict[str, Tensor] = {}  # a device need not be waited for

    def metrics(self) -> dict[str, float]:
        """See `LocalSGD.metrics`; empty if nothing is new."""
        metrics, self._metrics = self._metrics, {}
        return {name: float(value) for name, value in metrics.items()}

    def gather(self, group: Group, exchange: Exchange, peers: Peers) -> None:
        """Copy norms and buffers into a vector of the group."""
        squares = _squares(group, exchange.ranks)
        averaged = [buffer.detach().reshape(-1).double() for buffer in self._with_a_mean()]
        copied = [words_of(buffers) for buffers in (self._rank_0s(),) if buffers]
        values = torch.cat([squares, *averaged, *copied])
        vector = group.others.get(_BESIDE)
        if vector is None or vector.numel != values.numel():
            vector = group.others[_BESIDE] = Vector(values.numel(), values.dtype, values.device)
        vector.values.copy_(values)
        words = [exchange.from_rank_0(row, peers) for row in copied]
        torch.cat([squares, *averaged, *words], out=vector.correction)

    def apply(self, group: Group, ranks: int, size: int, *, waited: bool) -> None:
        """Write what came into the buffers. Call it before `Shared.step`, which overwrites the corrections.

        Args:
            group: nothing happens unless its last exchange had norms and buffers.
            ranks: whose values lie in its vectors.
            size: number of ranks.
            waited: buffers cannot have changed meanwhile.
        """
        vector = group.others.get(_BESIDE)
        if vector is None:
            return
        square = _squares(group, ranks)[0]
        alike = (square / vector.correction[:ranks].mean()).nan_to_num(1.0)  # 1 / size: at right angles; 1: the same
        self._metrics = {
            "outer_gradient_norm": square.sqrt(),
            "direction_agreement": (size * alike - 1) / max(1, size - 1),
        }
        buffers, copied = self._with_a_mean(), self._rank_0s()
        words = ranks + sum(buffer.numel() for buffer in buffers)
        if words + -(-sum(buffer.nbytes for buffer in copied) // 4) != vector.numel:
            return  # others than were sent
        both = vector.values, vector.correction
        for buffer, sent, mean in zip(buffers, *(cut_like(row[ranks:words], buffers) for row in both), strict=True):
            buffer.copy_(mean if waited else torch.where(mean == sent, buffer, buffer + (mean - sent)))
        for buffer, sent, first in zip(copied, *(cut_words(row[words:], copied) for row in both), strict=True):
            buffer.copy_(torch.where(first == sent, buffer, first))

    def _with_a_mean(self) -> list[Tensor]:
        return [buffer for buffer in self._averaged() if buffer.is_floating_point() and buffer.numel()]

    def _rank_0s(self) -> list[Tensor]:
        return [buffer for buffer in self._copied() if buffer.numel()]


def _squares(group: Group, ranks: int) -> Tensor:
    """The squared norm of what is exchanged, for each rank that lies in it; float64, on the group's device."""
    norms = [torch.linalg.vector_norm(flat.correction.view(ranks, -1), dim=1) for flat in group.flats]
    return torch.stack([norm.double().square().to(norms[0].device) for norm in norms]).sum(0)
