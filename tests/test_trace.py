"""Traces of exchanges: what a timeline file holds, what torch's profiler sees, and that no trace costs nothing."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from test_session import batches, opened, train
from torch import nn

import ringstrategy
from ringstrategy import AllReduce, BlockInt, Direct, Gossip, Ring
from ringstrategy.algorithms.base import Algorithm
from ringstrategy.session import Session
from ringstrategy.topologies import RingGraph
from ringstrategy.transport import trace
from ringstrategy.transport.timelines import CLOCK

STEPS = 2
SIZE = 3
Event = dict[str, Any]
Traced = tuple[Path, list[dict[str, Any]]]
WAYS: dict[str, Algorithm] = {
    "ring": AllReduce(BlockInt(8), Ring(), bucket_mb=0.1),
    "direct": AllReduce(BlockInt(8), Direct(), bucket_mb=0.1),
    "gossip": Gossip(RingGraph(), overlap=False),
}


@contextmanager
def training(algorithm: Algorithm) -> Iterator[tuple[Session, Callable[[], None]]]:
    """A session, and its training."""
    torch.manual_seed(0)
    with opened(nn.Sequential(nn.Linear(6, 4000), nn.ReLU(), nn.Linear(4000, 3)), algorithm) as (session, optimizer):
        yield session, lambda: train(session, optimizer, batches(STEPS))
        dist.barrier()  # the store is in rank 0's process


def _by_variable(path: str) -> int | None:
    os.environ["RINGSTRATEGY_TIMELINE"] = path
    try:
        with training(AllReduce()) as (session, trains):
            trains()
            assert trace._timeline is not None
            trace._timeline.close()  # as at the end of the process
            return session.stats.bytes_sent
    finally:
        del os.environ["RINGSTRATEGY_TIMELINE"]
        trace._timeline = None


def _all_ways(folder: str) -> dict[str, Any]:
    """A timeline of each way; how many bytes were sent in this time, or what the profiler saw."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    found: dict[str, Any] = {}
    for way, algorithm in WAYS.items():
        with training(algorithm) as (session, trains):
            before = session.stats.bytes_sent
            with ringstrategy.timeline(f"{folder}/{way}.json"):
                trains()
                session.algorithm.settle()
                found[way] = session.stats.bytes_sent - before
            trains()  # in no file
            found[f"buckets of {way}"] = len(getattr(algorithm, "_buckets", []))
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with (
        training(AllReduce(BlockInt(8), Ring())) as (_, trains),
        torch.profiler.profile(activities=cpu, experimental_config=everywhere) as profile,
    ):
        trains()
    found["profiled"] = {event.name for event in profile.events()}
    group = dist.new_group(backend="ring_int8")
    values = torch.randn(50_000, generator=torch.Generator().manual_seed(dist.get_rank()))
    dist.all_reduce(values, group=group)
    with ringstrategy.timeline(f"{folder}/group.json"):
        dist.all_reduce(values, group=group)
    found["by variable"] = _by_variable(f"{folder}/variable.json")
    dist.barrier()
    return found


def read(path: Path) -> list[Event]:
    events = json.loads(path.read_text())
    assert isinstance(events, list)
    return events


def of_rank(path: Path, rank: int) -> list[Event]:
    return read(path.with_name(f"{path.stem}.rank{rank}{path.suffix}"))


def spans(events: list[Event]) -> list[Event]:
    return [event for event in events if event["ph"] == "X"]


def bytes_of(events: list[Event], category: str, phase: str) -> dict[str, int]:
    """Of each message."""
    return {e["id"]: e["args"]["bytes"] for e in events if e.get("cat") == category and e["ph"] == phase}


def sent_in(events: list[Event]) -> int:
    return sum(bytes_of(events, "send", "b").values())


@pytest.fixture(scope="module")
def traced(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """Where the timelines of three ranks are, and what each rank says of them."""
    folder = tmp_path_factory.mktemp("timelines")
    return folder, ranks(SIZE, _all_ways, str(folder))


def assert_nested(events: list[Event]) -> None:
    """Of one thread, each two spans lie one in the other, or apart."""
    by_thread: dict[int, list[Event]] = {}
    for event in spans(events):
        by_thread.setdefault(event["tid"], []).append(event)
    assert len(by_thread) > 1
    for ours in by_thread.values():
        under_way: list[float] = []
        for event in sorted(ours, key=lambda one: (one["ts"], -one["dur"])):
            begin, end = event["ts"], event["ts"] + event["dur"]
            while under_way and under_way[-1] <= begin + 1e-3:
                under_way.pop()
            assert not under_way or end <= under_way[-1] + 1, event  # a microsecond: floats of this size are rounded
            under_way.append(end)


def _hops(way: str, rank: int) -> list[tuple[str, int, int]]:
    """What a rank does with each bucket, with which chunk at which hop; but for decodes, which are of every chunk."""
    if way == "ring":
        moved = [("send", rank), ("wait", rank - 1)]
        hops = [("encode", rank - hop, hop) for hop in range(SIZE)]
        return hops + [(what, first - hop, hop) for what, first in moved for hop in range(2 * SIZE - 2)]
    others = [other for other in range(SIZE) if other != rank]
    hops = [(what, other, 0) for what in ("encode", "send") for other in others]
    return [*hops, ("wait", rank, 0), ("encode", rank, 1), ("send", rank, 1)]


@pytest.mark.parametrize("way", ["ring", "direct"])
def test_a_timeline_has_every_hop_of_every_bucket(traced: Traced, way: str) -> None:
    folder, every_rank = traced
    for rank, said in enumerate(every_rank):
        events, buckets = of_rank(folder / f"{way}.json", rank), said[f"buckets of {way}"]
        assert_nested(events)
        assert sent_in(events) == said[way] > 0
        assert buckets > 1
        found = Counter(event["name"] for event in spans(events))
        for bucket in range(buckets):
            hops = [f"{what} chunk {chunk % SIZE} hop {hop}" for what, chunk, hop in _hops(way, rank)]
            for what in [*hops, "pack", "unpack"]:
                assert found[f"bucket {bucket}: {what}"] == STEPS, (what, found)
            decoded = [name[:-1] for name in found if name.startswith(f"bucket {bucket}: decode")]
            assert sorted(decoded) == [f"bucket {bucket}: decode chunk {chunk} hop " for chunk in range(SIZE)]
            for step in range(STEPS):
                assert found[f"at step {step}, in bucket {bucket} of {buckets}"] == 1
        assert found["wait for exchanges"] == STEPS


def test_messages_begin_and_end(traced: Traced) -> None:
    every_rank = [of_rank(traced[0] / "direct.json", rank) for rank in range(SIZE)]
    sent, arrived = {}, {}
    for rank, events in enumerate(every_rank):
        sent |= bytes_of(events, "send", "b")
        arrived |= bytes_of(events, "receive", "e")
        for category in ("send", "receive"):
            begun, ended = (
                {e["id"]: e["ts"] for e in events if e.get("cat") == category and e["ph"] == ph} for ph in "be"
            )
            assert begun.keys() == ended.keys()
            assert all(begun[message] <= ended[message] for message in begun)
        assert {event["pid"] for event in events} == {rank}
        named = {e["tid"] for e in events if e["name"] == "thread_name"}
        assert {e["tid"] for e in events if e["ph"] != "M"} <= named
    assert sent == arrived
    assert len(sent) > SIZE


def test_spans_name_what_they_are_of_in_every_door(traced: Traced) -> None:
    folder, every_rank = traced
    for rank, said in enumerate(every_rank):
        gossip = of_rank(folder / "gossip.json", rank)
        assert_nested(gossip)
        assert sent_in(gossip) == said["gossip"] > 0
        names = {event["name"] for event in spans(gossip)}
        assert {f"at mixing 1: {what}" for what in ("encode", "send", "wait", "decode and mix")} <= names
        group = {span["name"] for span in spans(of_rank(folder / "group.json", rank))}
        assert f"all-reduce 2: encode chunk {(rank + 1) % SIZE} hop 0" in group, group
        assert {
            "bucket 0: pack",
            "at step 0, in bucket 0 of 1",
            f"bucket 0: encode chunk {rank} hop 0",
            f"bucket 0: decode chunk {(rank + 1) % SIZE} hop 2",
            "wait for exchanges",
        } <= said["profiled"]
        # an environment variable asks for a timeline
        assert sent_in(of_rank(folder / "variable.json", rank)) == said["by variable"] > 0


def test_timelines_are_merged_on_one_clock(traced: Traced, tmp_path: Path) -> None:
    path, true = tmp_path / "ring.json", {}
    for rank in range(SIZE):
        events = of_rank(traced[0] / "ring.json", rank)
        path.with_name(f"ring.rank{rank}.json").write_text(json.dumps(events))
        true |= {(rank, i): event["ts"] for i, event in enumerate(events) if "ts" in event}
    assert ringstrategy.merge_timelines(path) == path
    merged = read(path)  # ranks of one host share its clock
    assert merged == [event for rank in range(SIZE) for event in of_rank(path, rank)]

    for rank in range(SIZE):  # as if each had been on a host of its own, whose clock is ahead
        events = of_rank(path, rank)
        for event in events:
            if event["name"] == CLOCK:
                event["args"]["host"] = f"host{rank}"
            elif "ts" in event:
                event["ts"] += rank * 1e9
        path.with_name(f"ring.rank{rank}.json").write_text(json.dumps(events))
    ringstrategy.merge_timelines(path)
    place = dict.fromkeys(range(SIZE), -1)
    for event in read(path):
        place[event["pid"]] += 1
        if "ts" in event:
            assert abs(event["ts"] - true[event["pid"], place[event["pid"]]]) < 3e8


def test_a_forked_process_leaves_the_file_to_its_parent(tmp_path: Path) -> None:
    with ringstrategy.timeline(tmp_path / "timeline.json"):
        with trace.span("encode"):
            pass
        child = os.fork()
        if child == 0:
            os._exit(trace.span("encode") is not trace.span("decode"))
        assert os.waitpid(child, 0)[1] == 0
    assert [event["name"] for event in spans(of_rank(tmp_path / "timeline.json", 0))] == ["encode"]


def test_no_trace_allocates_nothing() -> None:
    assert trace.span("encode", 1, 2) is trace.span("decode", 2, 3) is trace.task("at step 3")
