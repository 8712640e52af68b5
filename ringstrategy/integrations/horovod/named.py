"""Operations with names: ranks may submit them in any order, and all ranks run them in one.

A rank announces each operation in the rendezvous store, under its name and how often that name was used before. Who
announces it last gives it the next place in the order, together with what all ranks said of it: what must be the same
on all, and what is a rank's own, such as how many rows it gathers. A thread on each rank runs the order.

A rank that waits writes so. Once every rank waits for an operation that another rank has not announced, none of them
can go on: an error on each of them, and of all that they submit later, tells who waits for what.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, TypeVar, cast

import torch.distributed as dist

from ringstrategy.errors import PlanMismatchError
from ringstrategy.failure.store import poll_seconds
from ringstrategy.transport.worker import Worker

_LOOK_SECONDS = 1.0
_SHORTEST_PAUSE = 0.0002
_LOOKS_FOR_DEADLOCK = 3
_WARNING_SECONDS = 60.0
_DIFFERENT = "different"
_NOTHING = "nothing"  # is no key, and nothing that is said
_TOGETHER = 64  # places whose keys are deleted at once
_CLOSE_SECONDS = 5.0


Result = TypeVar("Result")


@dataclass
class Handle(Generic[Result]):
    """An operation under way: `done`, and `wait` for its result.

    Attributes:
        name: of the operation.
    """

    name: str
    _key: str
    _operations: NamedOperations
    _event: threading.Event = field(default_factory=threading.Event)
    _result: Result | None = None
    _error: BaseException | None = None

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._event.is_set()

    def wait(self) -> Result:
        """Its result. Raises its error, or one that names the ranks that do not take part."""
        if not self.done():
            self._operations.wait(self._event, self._key, self.name)
        if self._error is not None:
            raise self._error
        return cast(Result, self._result)

    __call__ = wait

    def end(self, result: Result | None, error: BaseException | None) -> None:
        """It has ended."""
        self._result, self._error = result, error
        self._event.set()


class NamedOperations:
    """Of some ranks, as one of them sees them.

    Args:
        store: of these ranks alone.
        rank: this one, among them.
        ranks: as all ranks count them.
        look: called with a place, once a second while a rank waits; it raises if another rank is lost.
        timeout: how long an operation may wait for a rank that does not come.

    Attributes:
        running: the name of the operation that runs, or ran last.
    """

    def __init__(
        self, store: dist.Store, rank: int, ranks: Sequence[int], look: Callable[[str], None], timeout: timedelta
    ) -> None:
        self.running = ""
        self._rank, self._ranks, self._look, self._timeout = rank, ranks, look, timeout
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]  # torch may wait on the default one
        self._used: dict[str, int] = {}  # how often, by name
        self._changed = threading.Condition()
        self._pending: dict[str, tuple[Callable[[list[Any]], Any], Handle[Any]]] = {}  # what to run, by key
        self._closing = False
        self._failure: BaseException | None = None
        self._announcer = Worker("ringstrategy-horovod-names")
        self._runner = threading.Thread(target=self._run_all, name="ringstrategy-horovod", daemon=True)
        self._runner.start()

    def submit(self, name: str, same: str, own: Any, run: Callable[[list[Any]], Result]) -> Handle[Result]:
        """Begin an operation. ValueError if one of this name is under way.

        Args:
            name: which operation of the other ranks it belongs to.
            same: what all ranks must say alike, in one line.
            own: what each rank says for itself; for JSON.
            run: called in the order of all ranks, with what every rank said for itself, by rank. Returns the result.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if self._closing:
                raise ValueError(f"{name!r} came after hvd.shutdown()")
            if any(handle.name == name for _, handle in self._pending.values()):
                raise ValueError(
                    f"an operation named {name!r} is under way: hvd.synchronize its handle first, or give "
                    "each operation a name of its own"
                )
            count = self._used[name] = self._used.get(name, 0) + 1
            key = f"{name}/{count}"
            handle: Handle[Result] = Handle(name, key, self)
            self._pending[key] = run, handle
            self._changed.notify_all()
        self._announcer.submit(lambda: self._announce(key, [self._rank, same, own]), lambda: None)
        return handle

    def _announce(self, key: str, words: list[Any]) -> None:
        try:
            size, store = len(self._ranks), self._store
            store.append(f"said/{key}", json.dumps(words) + "\n")  # type: ignore[attr-defined]
            if store.add(f"count/{key}", 1) < size:
                return
            said = store.get(f"said/{key}").decode()
            place = store.add("places", 1)
            store.set(f"order/{place}", json.dumps([key, said]))
            for kind in ("said", "count"):
                store.delete_key(f"{kind}/{key}")
        except BaseException as error:
            self._fail(error)
            raise

    # The order

    def _run_all(self) -> None:
        place = 1
        try:
            while (said := self._next(place)) is not None:
                key, texts = said
                self._run(key, [json.loads(line) for line in texts.splitlines()])
                if place % _TOGETHER == 0:
                    self._forget(place)
                place += 1
        except BaseException as error:
            self._fail(error)

    def _next(self, place: int) -> tuple[str, str] | None:
        """The operation at this place, once there is one; None at the end."""
        key, pause = f"order/{place}", _SHORTEST_PAUSE
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing)
                if self._closing:
                    return None
            # torch logs each wait of its own that ends in vain
            if self._store.check([key]):
                name, said = json.loads(self._store.get(key))
                return name, said
            time.sleep(pause)
            pause = min(2 * pause, poll_seconds(len(self._ranks)))

    def _run(self, key: str, said: list[tuple[int, str, Any]]) -> None:
        with self._changed:
            if self._failure is not None:  # which has ended all that was under way
                raise self._failure
            run, handle = self._pending[key]
        self.running = handle.name
        same = {rank: text for rank, text, _ in said}
        own = {rank: each for rank, _, each in said}
        result: Any = None
        error: BaseException | None = None
        try:
            if len(set(same.values())) > 1:
                texts = "; ".join(f"rank {self._ranks[rank]} has {same[rank]}" for rank in sorted(same))
                raise PlanMismatchError(f"the ranks differ in {handle.name!r}: {texts}")
            result = run([own[rank] for rank in range(len(self._ranks))])
        except BaseException as failure:
            error = failure
        with self._changed:
            del self._pending[key]
        handle.end(result, error)

    def _forget(self, place: int) -> None:
        """Of these ranks the last to come here deletes the keys that all have read."""
        if self._store.add(f"read/{place}", 1) == len(self._ranks):
            for done in range(place - _TOGETHER + 1, place + 1):
                self._store.delete_key(f"order/{done}")
            self._store.delete_key(f"read/{place}")

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error  # the first says why
            pending, self._pending = self._pending, {}
            self._changed.notify_all()
        for _, handle in pending.values():
            handle.end(None, error)

    # Waiting

    def wait(self, event: threading.Event, key: str, name: str) -> None:
        """Until the operation has ended; look around meanwhile."""
        begin, vain, warned = time.monotonic(), 0, False
        if event.wait(_LOOK_SECONDS):
            return
        try:
            while not event.is_set():
                self._store.set(f"waits/{self._rank}", key)
                absent, late = self._absent(key), time.monotonic() - begin
                vain = vain + 1 if absent and self._all_in_vain() else 0
                if absent:
                    found = vain == _LOOKS_FOR_DEADLOCK or late > self._timeout.total_seconds()
                    self._fail_if_different(name, absent, found)
                self._look(f"in {name!r}")
                if absent and late > _WARNING_SECONDS and not warned:
                    warned = True
                    warnings.warn(
                        f"{name!r} has waited for {_WARNING_SECONDS:.0f} s for rank {self._listed(absent)}",
                        stacklevel=3,
                    )
                event.wait(_LOOK_SECONDS)
        finally:
            with contextlib.suppress(RuntimeError):  # the store is gone: there is a better error
                self._store.delete_key(f"waits/{self._rank}")

    def _fail_if_different(self, name: str, absent: Sequence[int], found: bool) -> None:
        """PlanMismatchError, now and later, if this rank has `found` that it waits in vain, or another has said so.

        The ranks are not at one place any more: a later operation could get what was meant for an earlier one.
        """
        waiting = self._waiting()  # before the next line: who has told the others waits no more
        told = self._read(_DIFFERENT)
        if told is not None:
            waiting = {int(rank): other for rank, other in json.loads(told).items()}
        elif found:
            self._store.set(_DIFFERENT, json.dumps(waiting))
        if found or told is not None:
            error = PlanMismatchError(self._difference(name, absent, waiting))
            self._fail(error)
            raise error

    def _absent(self, key: str) -> list[int]:
        """Those of these ranks that have not announced it; none if all have."""
        said = self._read(f"said/{key}")
        if said is None:
            return []
        there = {json.loads(line)[0] for line in said.splitlines()}
        return [rank for rank in range(len(self._ranks)) if rank not in there]

    def _waiting(self) -> dict[int, str]:
        """What each rank that waits waits for: keys."""
        notes = {rank: self._read(f"waits/{rank}") for rank in range(len(self._ranks))}
        return {rank: note for rank, note in notes.items() if note is not None}

    def _read(self, key: str) -> str | None:
        """None if it is not there; `get` would wait for it."""
        found = str(self._store.compare_set(key, _NOTHING, _NOTHING).decode())
        return None if found == _NOTHING else found

    def _all_in_vain(self) -> bool:
        """An old note does no harm: what it names has been announced by all."""
        waiting = self._waiting()
        return len(waiting) == len(self._ranks) and all(map(self._absent, waiting.values()))

    def _difference(self, name: str, absent: Sequence[int], waiting: dict[int, str]) -> str:
        elsewhere = {
            rank: key.rpartition("/")[0] for rank, key in waiting.items() if rank in absent and self._absent(key)
        }
        what = "".join(f"; rank {self._ranks[rank]} waits for {other!r}" for rank, other in elsewhere.items())
        return (
            f"rank {self._ranks[self._rank]} waits for {name!r}, which rank {self._listed(absent)} has not "
            f"submitted{what}. Operations belong together by their names, and those without a name by their order: "
            "submit the same ones on all ranks, and give each a name"
        )

    def _listed(self, ranks: Sequence[int]) -> str:
        return ", ".join(str(self._ranks[rank]) for rank in ranks)

    def close(self) -> None:
        """End the threads. What is under way gets an error. No collective."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._announcer.close(_CLOSE_SECONDS)
        self._runner.join(_CLOSE_SECONDS)
        self._fail(ValueError("hvd.shutdown() came before the operation had ended"))
