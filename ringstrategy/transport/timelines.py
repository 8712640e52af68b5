"""Merge the timelines of all ranks into one, with times by one clock."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from ringstrategy.transport.trace import CLOCK

Event = dict[str, Any]


def merge_timelines(path: str | os.PathLike[str]) -> Path:
    """Merge the files that `timeline(path)` has left on each rank, such as `timeline.rank0.json`, into `path`.

    They must be in its folder: copy them there from other hosts. Times are moved to the clock of the first rank's host.
    How far another host's clock is ahead follows from the fastest messages between hosts, if all links are as fast. A
    host whose messages do not come back, not even through other hosts, keeps its clock.

    Args:
        path: as given to `timeline`.

    Returns:
        `path`.

    Raises:
        FileNotFoundError: no rank has left a file there.
    """
    path = Path(path)
    files = sorted(path.parent.glob(f"{path.stem}.rank*{path.suffix}"))
    if not files:
        raise FileNotFoundError(
            f"there is no {path.stem}.rank0{path.suffix} in {path.parent.resolve()}: record it with "
            f"ringstrategy.timeline({str(path)!r}) on each rank, and copy the files of all ranks to one folder"
        )
    events = [event for file in files for event in _read(file)]
    hosts = {event["pid"]: event["args"]["host"] for event in events if event["name"] == CLOCK}
    ahead = _ahead(events, hosts)
    for event in events:
        if "ts" in event:
            event["ts"] -= ahead[hosts[event["pid"]]]
    lines = ",\n".join(json.dumps(event) for event in events)
    path.write_text(f"[\n{lines}\n]\n")
    return path


def _read(file: Path) -> list[Event]:
    """A killed rank leaves a file without an end, perhaps within a line."""
    text = file.read_text().rstrip()
    while not text.endswith("]"):
        try:
            return list(json.loads(f"{text.rstrip(',')}\n]"))
        except json.JSONDecodeError:
            text = text.rpartition("\n")[0].rstrip()
            if not text:
                return []
    return list(json.loads(text))


def _ahead(events: list[Event], hosts: dict[int, str]) -> dict[str, float]:
    """By host how many microseconds its clock is ahead of that of the first rank's host.

    The fastest message from a to b seems to take d + ahead(b) - ahead(a), with the same d for all: least squares.
    """
    names = list(dict.fromkeys(host for _, host in sorted(hosts.items())))
    sent, arrived = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for event in events:
        if event.get("cat") == "send" and event["ph"] == "b":
            sent[event["id"]].append(event["ts"])
        elif event.get("cat") == "receive" and event["ph"] == "e":
            arrived[event["id"]].append(event["ts"])
    fastest: dict[tuple[int, int], float] = {}
    for message, times in sent.items():
        ends = [int(rank) for rank in message.split(" ")[0].split(">")]
        if not set(ends) <= set(hosts):  # the file of one is missing
            continue
        sender, receiver = (names.index(hosts[rank]) for rank in ends)
        for begin, end in zip(times, arrived[message], strict=False):
            if sender != receiver:
                known = fastest.get((sender, receiver), float("inf"))
                fastest[sender, receiver] = min(known, end - begin)
    if not fastest:
        return dict.fromkeys(names, 0.0)
    unknown = torch.zeros(len(fastest), len(names), dtype=torch.float64)  # first d, then of each host but the first
    for row, (sender, receiver) in enumerate(fastest):
        unknown[row, 0] = 1
        for host, sign in ((receiver, 1), (sender, -1)):
            if host > 0:
                unknown[row, host] += sign
    seeming = torch.tensor(list(fastest.values()), dtype=torch.float64)
    solved = torch.linalg.lstsq(unknown, seeming, driver="gelsd").solution.tolist()
    return dict(zip(names, [0.0, *solved[1:]], strict=True))
