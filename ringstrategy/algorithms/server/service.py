"""What one server of a job does: it takes parts of gradients, steps what it has of the parameters, and hands it out."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringstrategy.algorithms.server.shards import Shard, shown
from ringstrategy.buckets.dense import DenseBucket
from ringstrategy.codecs.base import Codec
from ringstrategy.requests import Answer, RefusedError, Request
from ringstrategy.requests.messages import nothing
from ringstrategy.server.fragment import Fragment
from ringstrategy.server.merges import total_
from ringstrategy.server.rules import Rule, Sync
from ringstrategy.server.store import Push, Store, Taken

_PATIENCE = 20.0  # seconds, which a merge may take
_ANEW = "the servers have begun anew since this was asked"
LEFT = "has left: "  # before the name of a rank that was lost, or for which all others would wait


class Service:
    """Answers the requests of all ranks, each in a thread of its own.

    A step of a rank is: `push` of each bucket's part, then `step`, which counts what was pushed as one gradient, and
    `pull`, which is answered with the values that came of it once the rule lets the rank go on. Before `step` comes
    `norm`, where the mean of all ranks is to be clipped.

    Args:
        me: the name of the rank that serves; what it asks is not counted.
        ranks: the names of all.
        rule: when gradients are stepped.
        codec: by which values are pulled.
        in_turn: where all ranks serve: answer a `pull` when the one before was sent, that of the rank before `me`
            first. So each link carries one answer at a time each way; of many at once some would end late.

    Attributes:
        bytes_sent: of values, to other ranks.
        bytes_received: of gradients, from other ranks.
    """

    def __init__(self, me: str, ranks: Sequence[str], rule: Rule, codec: Codec, in_turn: bool = False) -> None:
        self.bytes_sent = self.bytes_received = 0
        place = ranks.index(me)
        self._turns = [*reversed(ranks[:place]), *reversed(ranks[place + 1 :])] if in_turn else []
        self._me, self._ranks, self._rule, self._codec = me, ranks, rule, codec
        self._changed = threading.Condition()  # and the lock of all that follows
        self._generation = 0
        self._there = set(ranks)
        self._why = ""  # it refuses everything
        self._store = Store([], rule, total_, progress=False, digests=False)
        self._shards: list[Shard] = []
        self._buckets: list[Sequence[DenseBucket]] = []
        self._filling: list[dict[str, Tensor]] = []  # by rank, the gradient that arrives
        self._counted: list[dict[str, int]] = []  # by rank, the last step
        self._free: list[list[Tensor]] = []
        self._squares: dict[int, tuple[int, float]] = {}  # of a version's merged gradient
        self._wires: dict[int, tuple[int, Tensor]] = {}  # of a version's values
        self._sent: list[set[str]] = []  # which ranks have what was merged last
        self._states: dict[int, io.BytesIO] = {}  # of the version of now

    def begin(
        self,
        generation: int,
        fragments: Sequence[Fragment],
        shards: Sequence[Shard],
        buckets: Sequence[Sequence[DenseBucket]],
    ) -> None:
        """Serve these from now on. Requests of a later generation have waited for it."""
        with self._changed:
            self._generation, self._shards, self._buckets = generation, list(shards), list(buckets)
            self._store = Store(fragments, self._rule, total_, progress=False, digests=False)
            for rank in self._ranks:
                self._store.join(rank)
            self._filling, self._counted = [{} for _ in fragments], [{} for _ in fragments]
            self._free = [[] for _ in fragments]
            self._squares, self._wires, self._states = {}, {}, {}
            self._sent = [set() for _ in fragments]
            self._changed.notify_all()

    def handle(self, request: Request) -> Answer:
        """See `requests.Server`."""
        if request.operation == "beat":  # not by a server whose lock is held for good
            if self._changed.acquire(timeout=_PATIENCE):
                self._changed.release()
                return Answer({})
            raise RuntimeError(f"this server has been busy for {_PATIENCE:.0f} s")
        if request.operation == "leave":
            self._part_with(request.peer)
            return Answer({})
        operations = {
            "push": self._push,
            "norm": self._norm,
            "step": self._step,
            "pull": self._pull,
            "state": self._state,
        }
        with self._changed:
            self._wait(lambda: self._generation >= request.meta["generation"])
            if self._generation > request.meta["generation"]:
                raise RefusedError(_ANEW)
        return operations[request.operation](request)

    def gone(self, rank: str) -> None:
        """A rank has closed its connections. If it has not said so, all others stop."""
        if rank in self._there:
            self.close(f"{LEFT}{rank}")
        self._part_with(rank)

    def _part_with(self, rank: str) -> None:
        with self._changed:
            self._there.discard(rank)
            self._store.leave(rank)
            self._changed.notify_all()

    def wait_until_alone(self, seconds: float) -> None:
        """Until all ranks have left, or so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._there, seconds)

    def close(self, why: str) -> None:
        """Refuse what waits and what comes."""
        with self._changed:
            self._why = self._why or why
            self._changed.notify_all()

    def _wait(self, until: Callable[[], bool]) -> None:
        """Under the lock."""
        self._changed.wait_for(lambda: self._why or until())
        if self._why:
            raise RefusedError(self._why)

    def _wait_for_all(self, until: Callable[[], bool]) -> None:
        """Under the lock. RefusedError if it takes a rank that has left."""

        def missing() -> str | None:
            return min(set(self._ranks) - self._there, default=None) if isinstance(self._rule, Sync) else None

        generation = self._generation
        self._wait(lambda: self._generation != generation or until() or missing() is not None)
        if self._generation != generation:
            raise RefusedError(_ANEW)
        if not until():
            raise RefusedError(f"{LEFT}{missing()}")

    # Gradients

    def _push(self, request: Request) -> Answer:
        """One bucket's part, which lands where the rank's gradient is filled."""
        fragment, bucket, rank = request.meta["fragment"], request.meta["bucket"], request.peer
        with self._changed:
            if rank not in self._filling[fragment]:
                self._filling[fragment][rank] = self._memory(fragment)
            whole = self._filling[fragment][rank]
        part = self._shards[fragment].parts[bucket]
        values = whole[part.offset : part.offset + part.end - part.begin]
        codec, dtype = self._buckets[fragment][bucket].codec, self._buckets[fragment][bucket].buffer.dtype
        own = values if values.dtype == dtype else torch.empty_like(values, dtype=dtype)
        raw = codec.raw(own)
        if raw is not None:
            request.body.read_into(raw)
        else:
            wire = torch.empty(codec.nbytes(len(own), dtype), dtype=torch.uint8)
            request.body.read_into(wire)
            codec.deliver(wire, own, seed=request.meta["seed"])
        if own is not values:
            values.copy_(own)
        with self._changed:
            self.bytes_received += 0 if rank == self._me else request.body.nbytes
        return Answer({})

    def _memory(self, fragment: int) -> Tensor:
        free = self._free[fragment]
        return free.pop() if free else torch.empty_like(self._store.fragments[fragment].values)

    def _count(self, request: Request, step: dict[str, Any]) -> None:
        """What the rank has pushed is one gradient; once. Under the lock."""
        fragment, rank = request.meta["fragment"], request.peer
        if self._counted[fragment].get(rank, -1) >= step["number"]:
            return
        self._counted[fragment][rank] = step["number"]
        whole = self._filling[fragment].pop(rank, None)
        if whole is None:
            whole = self._memory(fragment)
        for number, part in enumerate(self._shards[fragment].parts):
            if number not in step["buckets"]:
                whole[part.offset : part.offset + part.end - part.begin].zero_()
        if step["scale"] != 1.0:
            whole.mul_(step["scale"])
        base = request.meta["base"]
        push = Push(rank, step["number"], self._store.boot, base, 1.0, whole, step["options"], step["used"])
        self._check_options(fragment, push)
        taken = self._store.push(fragment, push, 0.0)
        if taken is not Taken.TAKEN:
            raise RuntimeError(f"step {step['number']} of rank {rank}, from version {base}, was {taken.value}")

    def _check_options(self, fragment: int, push: Push) -> None:
        """RefusedError unless ranks step alike, where they step together."""
        others = self._store.waiting(fragment)
        if not isinstance(self._rule, Sync) or not others or others[0].options is None:
            return
        for number, (mine, theirs) in enumerate(zip(push.options or (), others[0].options, strict=True)):
            for name in mine:
                if shown(mine[name]) != shown(theirs[name]):
                    self._why = (
                        f"rank {int(push.learner)} steps group {number} with {name}={shown(mine[name])}, and rank "
                        f"{int(others[0].learner)} with {name}={shown(theirs[name])}: give all ranks the same "
                        "optimizers, and log what a scheduler monitors with sync_dist=True"
                    )
                    self._changed.notify_all()
                    raise RefusedError(self._why)

    def _merge(self, fragment: int, scale: float = 1.0) -> None:
        pushes = self._store.waiting(fragment)
        self._store.merge(fragment, 0.0, scale=scale)
        self._free[fragment] += [push.values for push in pushes]
        self._states.pop(fragment, None)
        self._sent[fragment] = set()
        self._changed.notify_all()

    def _norm(self, request: Request) -> Answer:
        """Of the mean of all ranks, before it is stepped: the square of what this server has of it."""
        fragment, base = request.meta["fragment"], request.meta["base"]
        step = _step_of(request)
        with self._changed:
            self._count(request, step)
            if fragment in self._store.due(0.0):
                square = torch.linalg.vector_norm(self._store.gradient(fragment), dtype=torch.float64) ** 2
                self._squares[fragment] = base, float(square)
                self._changed.notify_all()
            self._wait_for_all(lambda: self._squares.get(fragment, (-1,))[0] == base)
            return Answer({"square": self._squares[fragment][1]})

    def _step(self, request: Request) -> Answer:
        """What the rank has pushed counts; if it is the last that was missing, there is a new version."""
        meta, fragment, step = request.meta, request.meta["fragment"], _step_of(request)
        with self._changed:
            self._count(request, step)
            clip = meta.get("clip")
            if fragment in self._store.due(0.0) and (clip is None or self._store.versions[fragment] == meta["base"]):
                self._merge(fragment, 1.0 if clip is None else clip)
        return Answer({})

    # Values

    def _pull(self, request: Request) -> Answer:
        meta, fragment, rank = request.meta, request.meta["fragment"], request.peer
        with self._changed:
            self._wait_for_all(lambda: meta["base"] < 0 or self._may_have(fragment, meta["base"], rank))
            version, wire = self._wire(fragment)
            note, sent = nothing, self._sent[fragment]
            if rank in self._turns:
                before = self._turns[: self._turns.index(rank)]
                # who has left has its answer, or wants none; what was merged is there for all others
                self._wait(lambda: self._sent[fragment] is not sent or sent >= self._there.intersection(before))
                note = partial(self._note, sent, rank)
            self.bytes_sent += 0 if rank == self._me else wire.numel()
        return Answer({"version": version}, [wire], note)

    def _note(self, sent: set[str], rank: str) -> None:
        with self._changed:
            sent.add(rank)
            self._changed.notify_all()

    def _may_have(self, fragment: int, base: int, rank: str) -> bool:
        return self._store.versions[fragment] > base and self._store.may_go_on(rank)

    def _wire(self, fragment: int) -> tuple[int, Tensor]:
        """The version, and its values as they travel; encoded once."""
        pulled = self._store.pull(fragment)
        assert pulled is not None
        version, values = pulled
        raw = self._codec.raw(values)
        if raw is not None:
            return version, raw
        if self._wires.get(fragment, (-1,))[0] != version:
            wire = torch.empty(self._codec.nbytes(len(values), values.dtype), dtype=torch.uint8)
            self._codec.hop((), values.clone(), wire, seed=version, own_seed=version)
            self._wires[fragment] = version, wire
        return self._wires[fragment]

    def _state(self, request: Request) -> Answer:
        """The optimizer's, made once for all ranks."""
        fragment = request.meta["fragment"]
        with self._changed:
            if fragment not in self._states:
                content = io.BytesIO()
                torch.save(self._shards[fragment].state_of(self._store.fragments[fragment]), content)
                self._states[fragment] = content
            state = self._states[fragment].getbuffer()
        return Answer({}, [state])


def _step_of(request: Request) -> dict[str, Any]:
    """What counts a step."""
    content = bytearray(request.body.nbytes)
    request.body.read_into(content)
    step: dict[str, Any] = json.loads(content)
    return step


def of_rank(rank: int) -> str:
    """Its name, which sorts as the rank does."""
    return f"{rank:06d}"
