"""The syncer of Decoupled DiLoCo: learners push progress and pull parameters when they can, and nobody waits."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from ringstrategy.codecs import Codec, derive_seed
from ringstrategy.requests import Answer, RefusedError, Request
from ringstrategy.server.folder import Folder
from ringstrategy.server.fragment import Fragment
from ringstrategy.server.plan import PARTS, Parts, built, difference, digest_of, sizes
from ringstrategy.server.rules import NEVER, Quorum
from ringstrategy.server.store import Push, Store, Taken, digest

_MOST_PLAN = 1 << 26  # bytes
_EVERYBODY = 1 << 30
_A_MOMENT = 1.0  # seconds


@dataclass
class Told:
    """What the page says of a learner."""

    since: float
    pushes: Counter[str] = field(default_factory=Counter)
    counted: float = 0.0  # weight that was merged
    dropped: float = 0.0  # weight that was late
    staleness: int = 0  # of its last push, in versions
    bytes_in: int = 0
    bytes_out: int = 0


class Syncer:
    """Answers learners, merges, and saves each merge before anybody can see it. `Folder` says what is on the disk.

    The first learner that comes brings the plan and the parameters. Another one must have the same plan.

    Args:
        folder: goes on from what it has.
        quorum: instead of the learners' own.
        grace: instead of the learners' own.
        auto_least: seconds that a grace of "auto" is at least.
        keep_wires: keep each push, for an oracle.
        parts: beside `PARTS`, by name, what learners may ask for.
        clock: seconds.
    """

    def __init__(
        self,
        folder: Folder,
        *,
        quorum: int | None = None,
        grace: float | Literal["auto"] | None = None,
        auto_least: float = 0.0,
        keep_wires: bool = False,
        parts: Parts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._clock = folder, clock
        self._quorum, self._grace, self._auto_least = quorum, grace, auto_least
        self._keep_wires, self._parts = keep_wires, {**PARTS, **(parts or {})}
        self._changed = threading.Condition()
        self._closing = False
        self._failure: BaseException | None = None
        self._peers: dict[str, str] = {}  # learners by the names of their clients, one for each of their lives
        self._told: dict[str, Told] = {}
        self._since = Counter[str]()  # the last merge: pushes that did not count
        self._began = self._alone = clock()  # alone: since when no learner is there
        self._plan: dict[str, Any] | None = None
        plan = folder.plan()
        if plan is not None:
            self._begin(plan, [torch.zeros(numel) for numel in sizes(plan)])
            for fragment in range(len(self._wires)):
                self._store.load_state_dict(fragment, folder.state(fragment))
                self._publish(fragment)
            self._log_start()

    # What learners ask for

    def answer(self, request: Request) -> Answer:
        """The handler of a server. RefusedError names what is wrong with the learner."""
        operations = {
            "join": self._join,
            "push": self._push,
            "pull": self._pull,
            "look": self._look,
            "beat": self._beat,
        }
        if request.operation not in operations:
            raise RefusedError(f"a syncer does not know {request.operation!r}")
        return operations[request.operation](request)

    def gone(self, peer: str) -> None:
        """A learner's last connection has ended: nobody waits for it."""
        with self._changed:
            name = self._peers.pop(peer, None)
            if name is not None:
                self._store.leave(name)
                self._alone = self._clock()
                self._changed.notify_all()

    def _join(self, request: Request) -> Answer:
        """Body: the plan, and from the first learner all fragments, float32."""
        length = request.meta["plan"]
        if not 0 < length <= min(_MOST_PLAN, request.body.nbytes):
            raise RefusedError(f"a plan has at most {_MOST_PLAN} bytes, got {length}")
        text, values = bytearray(length), list[Tensor]()
        request.body.read_into(text)
        plan = json.loads(text)
        if request.body.nbytes > length:
            if request.body.nbytes != length + 4 * sum(sizes(plan)):
                raise RefusedError(f"{request.body.nbytes} bytes are not the parameters of this plan")
            values = [torch.empty(numel) for numel in sizes(plan)]
            for part in values:
                request.body.read_into(part)
        with self._here():
            if self._plan is None:
                if not values:
                    return Answer({"begun": False})
                self._begin_with(plan, values)
            assert self._plan is not None
            wrong = difference(self._plan, plan)
            if wrong is not None:
                raise RefusedError(f"{request.meta['learner']} trains something else: {wrong}")
            name = request.meta["learner"]
            if not re.fullmatch(r"[!-~]{1,200}", name):
                raise RefusedError(f"a learner's name is up to 200 letters and digits, got {name!r}")
            if any(peer != request.peer and other == name for peer, other in self._peers.items()):
                return Answer({"begun": True, "namesake": True})
            self._peers[request.peer] = name
            self._told.setdefault(name, Told(self._clock()))
            self._store.join(name)
            self._changed.notify_all()
            return self._said(request, entered=[last.get(name, -1) for last in self._last])

    def _fragment_of(self, meta: Mapping[str, Any]) -> int:
        fragment = meta["fragment"]
        if not (isinstance(fragment, int) and 0 <= fragment < len(self._sizes)):
            raise RefusedError(f"fragment is a number from 0 to {len(self._sizes) - 1}, got {fragment!r}")
        return fragment

    def _push(self, request: Request) -> Answer:
        """Body: the wire of progress. The answer's `taken` is a `Taken`."""
        meta = request.meta
        with self._here(meta["plan"]):
            fragment, codec = self._fragment_of(meta), self._codec
            values = torch.empty(self._sizes[fragment])
        nbytes = codec.nbytes(values.numel(), values.dtype)
        if request.body.nbytes != nbytes:
            raise RefusedError(f"fragment {fragment} travels in {nbytes} bytes, got {request.body.nbytes}")
        wire = torch.empty(nbytes, dtype=torch.uint8)
        request.body.read_into(wire)
        codec.deliver(wire, values, seed=derive_seed(meta["sequence"], fragment))
        if not values.isfinite().all():
            raise RefusedError(f"the progress of fragment {fragment} is not finite: resume from an earlier checkpoint")
        with self._here(meta["plan"]):
            name, now = self._peers.get(request.peer), self._clock()
            if name is None:
                return self._said(request)
            push = Push(name, meta["sequence"], meta["boot"], meta["base"], meta["weight"], values)
            taken = self._store.push(fragment, push, now)
            self._count(name, taken, push.weight, self._store.versions[fragment] - push.base)
            self._told[name].bytes_in += nbytes
            if taken == Taken.TAKEN:
                if self._keep_wires:
                    self._folder.keep_wire(digest(values), wire)
                self._changed.notify_all()
            return self._said(request, taken=taken.value)

    def _pull(self, request: Request) -> Answer:
        """Body of the answer: the wire of a fragment, unless the learner has it. Anybody may pull."""
        meta = request.meta
        with self._here(meta["plan"]):
            fragment, name = self._fragment_of(meta), self._peers.get(request.peer)
            if name is not None and meta.get("late"):  # progress that it knew to be late, and so did not push
                self._count(name, Taken.LATE, meta["late"], self._store.versions[fragment] - meta["base"])
            if name is not None:
                self._told[name].dropped += meta.get("unsent", 0.0)  # between two turns
            pulled = self._store.pull(fragment, meta["have"])
            if pulled is None:
                return self._said(request)
            wire = self._wires[fragment]
            if name is not None:
                self._told[name].bytes_out += wire.nbytes
            entered = self._last[fragment].get(name, -1) if name else -1
            return self._said(request, wire, version=pulled[0], entered=entered)

    def _look(self, request: Request) -> Answer:
        with self._here():
            return Answer({"begun": False}) if self._plan is None else self._said(request)

    def _beat(self, request: Request) -> Answer:
        """As `look`, but a merge may take longer than learners wait for a sign of life."""
        if not self._changed.acquire(timeout=_A_MOMENT):
            return Answer({"merging": True})
        try:
            return self._look(request)
        finally:
            self._changed.release()

    def _said(self, request: Request, *buffers: Tensor, **more: Any) -> Answer:
        """With what every answer says."""
        told = {
            "begun": True,
            "joined": request.peer in self._peers,
            "boot": self._store.boot,
            "plan": self._digest,
            "versions": list(self._store.versions),
            "learners": len(self._peers),
        }
        return Answer({**told, **more}, buffers)

    def _count(self, name: str, taken: Taken, weight: float, staleness: int) -> None:
        told = self._told[name]
        told.pushes[taken.value] += 1
        told.staleness = staleness
        if taken == Taken.LATE:
            told.dropped += weight
        if taken != Taken.TAKEN:
            self._since[taken.value] += 1

    @contextmanager
    def _here(self, plan: str | None = None) -> Generator[None, None, None]:
        """Under the lock, and for learners of this plan."""
        with self._changed:
            self._check()
            if plan is not None and (self._plan is None or plan != self._digest):
                raise RefusedError("this syncer has another plan: join it first")
            yield

    def _check(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"this syncer has failed: {self._failure}")

    # Merges

    def run(self, idle: float | None = None) -> None:
        """Merge until `close`, or until no learner has been there for `idle` seconds; raises what it fails by."""
        with self._changed:
            while not self._closing:
                soon = self.merge_due()
                left = None if idle is None or self._peers else self._alone + idle - self._clock()
                if left is not None and left <= 0:
                    return
                self._changed.wait(min((each for each in (soon, left) if each is not None), default=None))
                self._check()

    def close(self) -> None:
        """Let `run` return."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def merge_due(self) -> float | None:
        """Merge what is due. Returns after how many seconds more may be due; None: not before a learner does something.

        `run` does it by itself; simulations call it at times of their own.
        """
        with self._here():
            if self._plan is None:
                return None
            now = self._clock()
            for fragment in self._store.due(now):
                event = self._store.merge(fragment, now)
                for push in event["pushes"]:
                    self._told[push["learner"]].counted += push["weight"]
                not_counted, self._since = dict(self._since), Counter()
                with self._saving():
                    self._folder.log({**event, "time": time.time(), "not counted": not_counted})
                    self._folder.save(fragment, self._store.state_dict(fragment))
                self._publish(fragment)
            soon = self._store.soon()
            return None if soon == NEVER else soon - now

    def _publish(self, fragment: int) -> None:
        pulled, state = self._store.pull(fragment), self._store.state_dict(fragment)
        assert pulled is not None
        version, values = pulled
        wire = torch.empty(self._broadcast.nbytes(len(values), values.dtype), dtype=torch.uint8)
        seed = derive_seed(version, fragment)
        self._broadcast.hop((), values.clone(), wire, seed=seed, own_seed=seed)
        self._wires[fragment], self._last[fragment] = wire, state["last"]

    @contextmanager
    def _saving(self) -> Generator[None, None, None]:
        """What is not on the disk is answered to nobody: after an error nothing is."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            self._changed.notify_all()
            raise

    # How it begins

    def _begin_with(self, plan: dict[str, Any], values: list[Tensor]) -> None:
        """The first learner's."""
        if not all(part.isfinite().all() for part in values):
            raise RefusedError("the first learner brings parameters that are not finite")
        try:
            self._begin(plan, values)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise RefusedError(f"this syncer cannot do what the first learner plans: {error}") from error
        with self._saving():
            for fragment in range(len(values)):
                self._folder.save(fragment, self._store.state_dict(fragment))
                self._publish(fragment)
            self._folder.save_plan(plan)
            self._log_start()

    def _begin(self, plan: dict[str, Any], values: list[Tensor]) -> None:
        parts = {what: built(plan[what], self._parts) for what in ("codec", "broadcast", "merge", "outer")}
        self._codec: Codec = parts["codec"]
        self._broadcast: Codec = parts["broadcast"]
        for codec in (self._codec, self._broadcast):
            codec.warm_up(torch.device("cpu"))
        probe = Parameter(torch.zeros(1))
        probe.grad = torch.zeros(1)
        parts["outer"]([probe]).step()  # not every optimizer can, without a closure
        quorum = plan["quorum"] if self._quorum is None else self._quorum
        grace = plan["grace"] if self._grace is None else self._grace
        rule = Quorum(_EVERYBODY if quorum is None else quorum, grace, self._auto_least)
        fragments = [Fragment(each, parts["outer"]) for each in values]
        self._store = Store(fragments, rule, parts["merge"], progress=True)
        self._sizes, self._digest = sizes(plan), digest_of(plan)
        self._wires = [torch.empty(0, dtype=torch.uint8) for _ in values]
        self._last: list[Mapping[str, int]] = [{} for _ in values]  # that entered, by learner
        self._plan = plan

    def _log_start(self) -> None:
        self._folder.log({"boot": self._store.boot, "versions": self._store.versions, "time": time.time()})

    # What the page says

    def report(self) -> dict[str, Any]:
        """Numbers and names, of now."""
        with self._changed:
            begun, living = self._plan is not None, set(self._peers.values())
            counted = sum(told.counted for told in self._told.values())
            whole = counted + sum(told.dropped for told in self._told.values())
            return {
                "failure": None if self._failure is None else str(self._failure),
                "seconds": self._clock() - self._began,
                "boot": self._store.boot if begun else None,
                "values": sum(self._sizes) if begun else 0,
                "versions": list(self._store.versions) if begun else [],
                "goodput": counted / whole if whole else None,
                "learners": {
                    name: {
                        "there": name in living,
                        "seconds": self._clock() - told.since,
                        **{each.value: told.pushes[each.value] for each in Taken},
                        "staleness": told.staleness,
                        "goodput": told.counted / (told.counted + told.dropped) if told.counted else None,
                        "bytes in": told.bytes_in,
                        "bytes out": told.bytes_out,
                    }
                    for name, told in sorted(self._told.items())
                },
            }
