"""The folder of a syncer: its plan, a file for each fragment, and a log of merges. Whole wherever it is killed."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringstrategy.requests.messages import view_of

_DIGEST = 32  # bytes


class Folder:
    """Of one syncer at a time.

    A file is written beside its place, flushed and renamed, so it is the old one or the new one. An event is in the log
    before the merge that it tells of is in a file. What the log has beyond the files was never seen by a learner: a
    line `{"boot": ..., "versions": ...}` at each start says how far the files were.

    Args:
        path: is made if it is not there.
        step: called with the name of each step of a save, before it; tests end it there.
    """

    def __init__(self, path: Path, step: Callable[[str], None] = lambda name: None) -> None:
        self.path, self._step = path, step
        path.mkdir(parents=True, exist_ok=True)
        self._lock = (path / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ValueError(f"another syncer writes to {path}: end it, or take another folder") from None
        self._log = (path / "events.jsonl").open("a+b")
        self._log.truncate(_whole_lines(self._log))

    def close(self) -> None:
        """Let another syncer have it. Idempotent."""
        self._log.close()
        self._lock.close()

    def plan(self) -> dict[str, Any] | None:
        """None: nothing has begun here. ValueError if it is damaged."""
        path = self.path / "plan"
        if not path.exists():
            return None
        plan: dict[str, Any] = json.loads(bytes(_checked(path)))
        return plan

    def save_plan(self, plan: Mapping[str, Any]) -> None:
        """Last, after all fragments: with it something has begun."""
        self._write("plan", json.dumps(plan).encode())

    def state(self, fragment: int) -> dict[str, Any]:
        """What was saved last. ValueError if it is damaged."""
        loaded: dict[str, Any] = torch.load(io.BytesIO(_checked(self.path / f"fragment{fragment}")), weights_only=True)
        return loaded

    def save(self, fragment: int, state: Mapping[str, Any]) -> None:
        """It is on the disk when this returns."""
        written = io.BytesIO()
        torch.save(dict(state), written)
        self._write(f"fragment{fragment}", written.getbuffer())

    def log(self, event: Mapping[str, Any]) -> None:
        """It is on the disk when this returns."""
        self._step("log")
        self._log.write(json.dumps(event).encode() + b"\n")
        self._log.flush()
        os.fsync(self._log.fileno())

    def keep_wire(self, digest: str, wire: Tensor) -> None:
        """Under the digest of the values in it, as events name them."""
        (self.path / "wires").mkdir(exist_ok=True)
        (self.path / "wires" / digest).write_bytes(view_of(wire))

    def _write(self, name: str, content: bytes | memoryview) -> None:
        new = self.path / f"{name}.new"
        self._step("write")
        with new.open("wb") as file:
            file.write(hashlib.sha256(content).digest())
            self._step("write on")
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self._step("rename")
        new.replace(self.path / name)
        self._step("flush")
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def events(path: Path) -> list[dict[str, Any]]:
    """The merges that count, in order, from the `events.jsonl` of a folder."""
    found: list[dict[str, Any]] = []
    for line in (path / "events.jsonl").read_bytes().splitlines(keepends=True):
        event = json.loads(line) if line.endswith(b"\n") else {}
        if "versions" in event:  # a start
            found = [each for each in found if each["version"] <= event["versions"][each["fragment"]]]
        elif event:
            found.append(event)
    return found


def _whole_lines(log: io.BufferedRandom) -> int:
    """Bytes until the end of the last whole line."""
    log.seek(0)
    return log.read().rfind(b"\n") + 1


def _checked(path: Path) -> memoryview:
    content = memoryview(path.read_bytes()) if path.exists() else memoryview(b"")
    if hashlib.sha256(content[_DIGEST:]).digest() != content[:_DIGEST]:
        raise ValueError(
            f"{path} is {'damaged' if len(content) else 'missing'}: put back a copy of the whole folder, or begin anew "
            "with an empty one; the first learner then brings the parameters"
        )
    return content[_DIGEST:]
