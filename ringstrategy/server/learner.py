"""A learner of Decoupled DiLoCo: it trains, gives its progress to a syncer when it can, and takes what came of all."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringstrategy.codecs import Codec, derive_seed
from ringstrategy.requests import Answer
from ringstrategy.requests.messages import Buffer
from ringstrategy.server.plan import digest_of
from ringstrategy.server.store import Taken

_LOOKS = 8  # for newer versions, in an interval
Ask = Callable[[str, Mapping[str, Any], Sequence[Buffer]], Answer]


@dataclass
class Outgoing:
    """Progress on its way.

    Attributes:
        progress: what the parameters had beyond the base, flat float32.
        boot: of the syncer's life that gave the base.
        base: the version that it begins at.
        sequence: rises over all lives of the learner.
        weight: what was learned from since: samples or tokens.
        step: when it was made.
    """

    progress: Tensor
    boot: str
    base: int
    sequence: int
    weight: float
    step: int


class Arrived(NamedTuple):
    """A version of a fragment. `entered`: sequence of this learner's last push that is in it."""

    values: Tensor
    boot: str
    version: int
    entered: int


class _Fragment:
    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = list(parameters.values())
        self.boot, self.version = "", -1
        self.base: Tensor | None = None  # progress is what parameters have beyond it
        self.weight = 0.0  # of what was learned since
        self.late = 0.0  # weight of progress that was not pushed, because it is late
        self.outgoing: Outgoing | None = None
        self.wire: Tensor | None = None  # of `outgoing`, and what encoding lost
        self.lost: Tensor | None = None
        self.sent = False
        self.wants = False
        self.arrived: Arrived | None = None

    def flat(self) -> Tensor:
        """A copy of the parameters now, float32, where they are."""
        return torch.cat([parameter.detach().reshape(-1).float() for parameter in self.parameters])

    def progress(self, base: Tensor, memory: Tensor | None) -> Tensor:
        """What the parameters have beyond it, in one pass over memory: this, or new."""
        progress = torch.empty_like(base) if memory is None else memory
        lengths = [parameter.numel() for parameter in self.parameters]
        for parameter, begin, out in zip(self.parameters, base.split(lengths), progress.split(lengths), strict=True):
            torch.sub(parameter.detach().reshape(-1), begin, out=out)
        return progress

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)


@torch.no_grad()
def blend_(parameters: Sequence[Tensor], theta: Tensor, share: float) -> None:
    """parameters = share theta + (1 - share) parameters; the same bits wherever it is done.

    Args:
        parameters: one after the other.
        theta: flat float32.
        share: 1: theta alone, whatever the parameters are.
    """
    for parameter, part in zip(parameters, theta.split([each.numel() for each in parameters]), strict=True):
        values = part.view(parameter.shape).to(parameter.device)
        if share < 1:
            wide = torch.promote_types(parameter.dtype, values.dtype)
            values = parameter.to(wide).lerp_(values.to(wide), share)  # in place, if it is wide enough
        parameter.copy_(values)


def values_of(came: Buffer, broadcast: Codec, numel: int, version: int, fragment: int) -> Tensor:
    """What a syncer has sent of a fragment. ValueError if it is of another length."""
    values = torch.empty(numel)
    broadcast.deliver(torch.frombuffer(came, dtype=torch.uint8), values, seed=derive_seed(version, fragment))
    return values


def turns(step: int, interval: int, count: int) -> dict[int, int]:
    """By steps since its turn to be pushed: each fragment."""
    return {(step - (number + 1) * interval // count) % interval: number for number in range(count)}


def meets(step: int, interval: int, overlap: int, count: int) -> bool:
    """Whether all processes of a learner look for what has come: where a fragment is pushed, and `overlap` later."""
    return not {0, overlap % interval}.isdisjoint(turns(step, interval, count))


class Learner:
    """Its training thread calls `after_step` and `take`, another one `exchange`. Neither waits for the other.

    A fragment's progress is what its parameters have beyond Theta as it came last, the base. There is one push from one
    base, and the syncer merges it once or drops it, so steps enter Theta once. If it is dropped, the learner keeps
    1 - blend of it in its parameters, and its next push has that. What encoding lost of a push is added to the next one
    only if the push has entered.

    Args:
        fragments: parameters by name, of one device each; their dtypes are those of the plan.
        plan: see `planned`.
        codec: of pushes.
        broadcast: of what comes.
        interval: steps from push to push of a fragment; fragments take turns. At least as many as fragments.
        overlap: steps from a push to the use of what came, if it has come by then.
        blend: the share of Theta in the parameters then, 0 < blend <= 1.
        name: the learner's, over all its lives. None: a random one, or that of the checkpoint it starts from.

    Attributes:
        name: by which the syncer knows it.
        step: how many it has made.
        joined: whether the syncer knew it when it answered last.
        counts: what became of its pushes, by `Taken`, and `taken over`: how often it took a version.
    """

    def __init__(
        self,
        fragments: Sequence[Mapping[str, Tensor]],
        plan: Mapping[str, Any],
        *,
        codec: Codec,
        broadcast: Codec,
        interval: int,
        overlap: int,
        blend: float,
        name: str | None = None,
    ) -> None:
        self.plan, self.digest, self.codec, self.broadcast = plan, digest_of(plan), codec, broadcast
        self.interval, self.overlap, self.blend = interval, overlap, blend
        self._given_name, self.name = name, f"learner-{uuid.uuid4().hex[:8]}" if name is None else name
        self.step = 0
        self.counts = {each.value: 0 for each in Taken} | {"taken over": 0}
        self._sequence = time.time_ns() // 1_000_000  # rises over lives that have no checkpoint
        self._fragments = [_Fragment(each) for each in fragments]
        self._latest: list[int] = [-1] * len(fragments)  # versions, as the syncer said last
        self._initial: list[Tensor] | None = [each.flat().cpu() for each in self._fragments]  # if nobody has any
        self._lacks_initial = False
        self._prepared: dict[int, Tensor] = {}  # memory, by the fragment that is next
        self._unused: list[object] = []  # memory
        self.joined, self._heard = False, 0  # heard: at which step, of versions
        self._lock = threading.Lock()  # over what both threads change

    # The training thread's

    def after_step(self, weight: float) -> None:
        """An optimizer has stepped. Makes progress ready to be pushed, if it is time.

        Args:
            weight: samples or tokens of this step, > 0.
        """
        self.step += 1
        with self._lock:
            for fragment in self._fragments:
                fragment.weight += weight
            if self._lacks_initial:
                self._initial, self._lacks_initial = [each.flat().cpu() for each in self._fragments], False
            number = turns(self.step, self.interval, len(self._fragments)).get(0)
            if number is not None:
                self._give(number)

    def due(self) -> list[tuple[int, Tensor, float]]:
        """What has come and is to be used now: fragments, values, and their share."""
        with self._lock:
            return [
                (number, fragment.arrived.values, self._share(fragment))
                for number, fragment in enumerate(self._fragments)
                if fragment.arrived is not None
                and (fragment.outgoing is None or self.step >= fragment.outgoing.step + self.overlap)
            ]

    def take(self, number: int) -> None:
        """Blend what has come into a fragment's parameters: progress begins there."""
        with self._lock:
            fragment = self._fragments[number]
            arrived, outgoing = fragment.arrived, fragment.outgoing
            assert arrived is not None
            share = self._share(fragment)
            blend_(fragment.parameters, arrived.values, share)
            if fragment.lost is not None and outgoing is not None and arrived.entered == outgoing.sequence:
                # the rest of what was lost is in the parameters
                arrived.values.sub_(fragment.lost.to(arrived.values.device), alpha=share)
            self._unused += [fragment.base, fragment.lost, outgoing]
            fragment.base, fragment.boot, fragment.version = arrived.values, arrived.boot, arrived.version
            fragment.outgoing = fragment.wire = fragment.lost = fragment.arrived = None
            fragment.sent = fragment.wants = False
            fragment.weight = 0.0
            self.counts["taken over"] += 1

    def _share(self, fragment: _Fragment) -> float:
        return 1.0 if fragment.base is None else self.blend

    def _give(self, number: int) -> None:
        fragment = self._fragments[number]
        if fragment.base is None or fragment.outgoing is not None or fragment.wants or fragment.arrived is not None:
            return  # one push from one base
        if self._latest[number] > fragment.version:
            fragment.wants, fragment.late = True, fragment.weight
            self.counts[Taken.LATE.value] += 1
        elif fragment.weight > 0:
            self._sequence += 1
            given = fragment.boot, fragment.version, self._sequence, fragment.weight, self.step
            prepared, self._prepared = self._prepared.get(number), {}
            fragment.outgoing = Outgoing(fragment.progress(fragment.base, prepared), *given)

    # The other thread's

    @torch.no_grad()
    def exchange(self, ask: Ask) -> None:
        """Do what there is to do with the syncer, once, without waiting for other learners.

        ConnectionError if it is away: come again. RefusedError, ValueError if this learner does not belong to it.

        Args:
            ask: a `Client.ask` that waits for the answer.
        """
        self._prepare()
        try:
            if not self.joined:
                self._join(ask)
            waiting = [(number, each) for number, each in enumerate(self._fragments) if each.arrived is None]
            for number, fragment in waiting:
                if self.joined and fragment.outgoing is not None and not fragment.sent:
                    self._push(ask, number)
            if any(fragment.sent and not fragment.wants for _, fragment in waiting) or self._has_heard_long_ago():
                self._hear(ask("look", {}, ()).meta)
            for number, fragment in waiting:
                if self.joined and (fragment.wants or self._may_take(number)):
                    self._pull(ask, number)
        except ConnectionError:
            self.joined, self._initial = False, None
            raise

    def _prepare(self) -> None:
        """Get and free memory here: it takes several times as long as to compute what it holds."""
        self._unused = []
        _, number = max(turns(self.step, self.interval, len(self._fragments)).items())
        base = self._fragments[number].base
        if base is not None and base.device.type == "cpu" and number not in self._prepared:
            self._prepared = {number: torch.empty_like(base).zero_()}

    def _has_heard_long_ago(self) -> bool:
        return self.joined and self.step >= self._heard + self.interval // _LOOKS

    def _may_take(self, number: int) -> bool:
        """A newer version than the base, unless progress from it is about to be pushed.

        It is taken between two turns too: from an old base the next push would be late.
        """
        fragment = self._fragments[number]
        if fragment.outgoing is None:
            return fragment.base is not None and self._latest[number] > fragment.version
        return fragment.sent and self._latest[number] != fragment.version

    def _hear(self, said: Mapping[str, Any]) -> None:
        self._heard = self.step
        if not said["begun"]:
            self.joined = False
        elif said["plan"] != self.digest:
            raise ValueError(f"the syncer has another plan than {self.name}: give them the same address, or model")
        else:
            self.joined, self._latest = said["joined"], said["versions"]

    def _join(self, ask: Ask) -> None:
        text = json.dumps(self.plan).encode()
        meta = {"plan": len(text), "learner": self.name}
        said = ask("join", meta, [text]).meta
        if not said["begun"]:
            if self._initial is None:
                self._lacks_initial = True  # only the training thread reads parameters
                return
            said = ask("join", meta, [text, *self._initial]).meta
        if said.get("namesake"):
            self._be_another()
            return
        self._hear(said)
        with self._lock:
            self._initial, self._sequence = None, max(self._sequence, *said["entered"])
            for fragment in self._fragments:
                fragment.sent = False  # it may have been in the inbox of an earlier life
                fragment.wants |= fragment.base is None

    def _be_another(self) -> None:
        """Another one began from the same checkpoint: progress in it is the other's."""
        with self._lock:
            self.name = f"{self.name.partition('~')[0]}~{uuid.uuid4().hex[:4]}"
            for fragment in self._fragments:
                fragment.base = fragment.outgoing = fragment.wire = fragment.lost = None

    def _push(self, ask: Ask, number: int) -> None:
        fragment = self._fragments[number]
        outgoing = fragment.outgoing
        assert outgoing is not None
        if fragment.wire is None:
            progress = outgoing.progress.to("cpu", copy=True)  # a checkpoint may have the original
            if not progress.isfinite().all():
                raise ValueError(f"the parameters of {self.name} are not finite: resume from an earlier checkpoint")
            wire = torch.empty(self.codec.nbytes(len(progress), progress.dtype), dtype=torch.uint8)
            lost = None if self.codec.lossless else torch.zeros_like(progress)
            seed = derive_seed(outgoing.sequence, number)
            self.codec.hop((), progress, wire, lost=lost, seed=seed, own_seed=seed)
            fragment.wire, fragment.lost = wire, lost
        meta = {name: value for name, value in vars(outgoing).items() if name not in ("progress", "step")}
        said = ask("push", {**meta, "plan": self.digest, "fragment": number}, [fragment.wire]).meta
        self._hear(said)
        if "taken" in said:
            with self._lock:
                self.counts[said["taken"]] += 1
            fragment.sent = True
            fragment.wants = said["taken"] in (Taken.LATE.value, Taken.UNKNOWN.value)

    def _pull(self, ask: Ask, number: int) -> None:
        fragment = self._fragments[number]
        have = -1 if fragment.wants else fragment.version
        meta = {"plan": self.digest, "fragment": number, "have": have, "base": fragment.version, "late": fragment.late}
        if fragment.outgoing is None and fragment.base is not None and not fragment.late:
            meta["unsent"] = fragment.weight
        answer = ask("pull", meta, ())
        said, [came] = answer.meta, answer.buffers
        self._hear(said)
        if "version" not in said:
            return
        fragment.late = 0.0
        values = values_of(came, self.broadcast, fragment.numel, said["version"], number)
        there = values.to(fragment.parameters[0].device)
        fragment.arrived = Arrived(there, said["boot"], said["version"], said["entered"])

    # State

    def state_dict(self) -> dict[str, Any]:
        """Tensors and primitives, for this learner's own checkpoint, beside its parameters. By the training thread."""
        names = "boot", "version", "base", "weight"
        with self._lock:
            fragments = []
            for each in self._fragments:
                outgoing = None if each.outgoing is None else dict(vars(each.outgoing))
                fragments.append({**{name: getattr(each, name) for name in names}, "outgoing": outgoing})
            return {
                "name": self.name,
                "step": self.step,
                "sequence": self._sequence,
                "counts": dict(self.counts),
                "fragments": fragments,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, with its parameters, before the first `exchange`. ValueError if it does not fit.

        A push that the checkpoint does not know of is not repeated: its base has passed.
        """
        saved = state["fragments"]
        lengths = [None if each["base"] is None else len(each["base"]) for each in saved]
        if len(saved) != len(self._fragments) or any(
            length not in (None, each.numel) for length, each in zip(lengths, self._fragments, strict=True)
        ):
            raise ValueError(
                "this checkpoint is of a learner with other fragments: build the same model, with the same `fragments`"
            )
        self.step, self.counts = state["step"], dict(state["counts"])
        self._sequence = max(self._sequence, state["sequence"])
        for fragment, old in zip(self._fragments, saved, strict=True):
            device = fragment.parameters[0].device
            for name in ("boot", "version", "weight"):
                setattr(fragment, name, old[name])
            fragment.base = None if old["base"] is None else old["base"].to(device)
            if old["outgoing"] is not None:
                progress = old["outgoing"]["progress"].to(device)
                fragment.outgoing = Outgoing(**{**old["outgoing"], "progress": progress})
        if self._given_name is None:
            self.name = state["name"]
        elif self._given_name != state["name"]:
            self._be_another()
            self.name = self._given_name
