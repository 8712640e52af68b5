"""Traces of exchanges: what a timeline file holds, what torch's profiler sees, and that no trace costs nothing."""

from __future__ import annotations

import json
import os
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import nn

import ringstrategy
from ringstrategy import AllReduce, BlockInt, Direct, Gossip, Ring
from ringstrategy.algorithms import Algorithm
from ringstrategy.session import Session
from ringstrategy.topologies import RingGraph
from ringstrategy.transport import trace
from ringstrategy.transport.timelines import CLOCK

CPU = torch.device("cpu")
STEPS = 2
Event = dict[str, Any]


@contextmanager
def opened(algorithm: Algorithm) -> Iterator[tuple[Session, torch.optim.Optimizer]]:
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    torch.manual_seed(0)
    session = Session(nn.Sequential(nn.Linear(6, 401), nn.ReLU(), nn.Linear(401, 300)), algorithm)
    session.open(CPU)
    optimizer = torch.optim.SGD(session.module.parameters(), 0.01)
    session.bind([optimizer])
    try:
        yield session, optimizer
    finally:
        session.close()
        dist.destroy_process_group()


def train(session: Session, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        session.begin_batch(f"in batch {step}", [optimizer], first=step == 0, later_epoch=False)
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))
        optimizer.zero_grad()
        session.backward(session.module(inputs).square().mean())
        optimizer.step()
        session.end_batch(1)


def _traced(algorithm: Algorithm, path: str) -> tuple[int, int, int, int]:
    """Bytes sent in this time, and how many bytes each bucket has."""
    with opened(algorithm) as (session, optimizer):
        before = session.stats.bytes_sent
        assert before is not None
        with ringstrategy.timeline(path):
            train(session, optimizer)
            session.settle()
            after = session.stats.bytes_sent
        train(session, optimizer)  # in no file
        buckets = len(getattr(algorithm, "_buckets", []))
        return after - before, session.stats.probe_bytes_sent, buckets, dist.get_rank()


def read(path: Path) -> list[Event]:
    events = json.loads(path.read_text())
    assert isinstance(events, list)
    return events


def of_rank(path: Path, rank: int) -> list[Event]:
    return read(path.with_name(f"{path.stem}.rank{rank}{path.suffix}"))


def spans(events: list[Event]) -> list[Event]:
    return [event for event in events if event["ph"] == "X"]


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


@pytest.mark.parametrize(("collective", "size"), [(Ring(), 3), (Direct(), 3), (Ring(), 2)], ids=str)
def test_a_timeline_has_every_hop_of_every_bucket(ranks: Pool, tmp_path: Path, collective: Any, size: int) -> None:
    path = tmp_path / "timeline.json"
    algorithm = AllReduce(BlockInt(8), collective, bucket_mb=0.1)
    for sent, _, buckets, rank in ranks(size, _traced, algorithm, str(path)):
        events = of_rank(path, rank)
        assert_nested(events)
        assert sum(e["args"]["bytes"] for e in events if e.get("cat") == "send" and e["ph"] == "b") == sent > 0
        assert buckets > 1
        found = Counter(event["name"] for event in spans(events))
        for bucket in range(buckets):
            if isinstance(collective, Ring):
                expected = [f"encode chunk {(rank - hop) % size} hop {hop}" for hop in range(size)]
                expected += [f"send chunk {(rank - hop) % size} hop {hop}" for hop in range(2 * size - 2)]
                expected += [f"wait chunk {(rank - 1 - hop) % size} hop {hop}" for hop in range(2 * size - 2)]
                expected += [f"decode chunk {(rank + 1) % size} hop {size - 1}"]
                expected += [
                    f"decode chunk {(rank - 1 - hop) % size} hop {hop}" for hop in range(size - 1, 2 * size - 2)
                ]
            else:
                others = [other for other in range(size) if other != rank]
                expected = [f"{what} chunk {other} hop 0" for what in ("encode", "send") for other in others]
                expected += [f"wait chunk {rank} hop 0", f"encode chunk {rank} hop 1", f"send chunk {rank} hop 1"]
                expected += ["wait hop 1", *(f"decode chunk {chunk} hop 1" for chunk in range(size))]
            for what in [*expected, "pack", "unpack"]:
                assert found[f"bucket {bucket}: {what}"] == STEPS, (what, found)
            for step in range(STEPS):
                assert found[f"at step {step}, in bucket {bucket} of {buckets}"] == 1
        assert found["wait for exchanges"] == STEPS


def test_messages_begin_and_end(ranks: Pool, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    ranks(2, _traced, AllReduce(BlockInt(8)), str(path))
    both = [of_rank(path, rank) for rank in range(2)]
    for mine, theirs, rank in ((*both, 0), (*both[::-1], 1)):
        sent = {e["id"]: e["args"]["bytes"] for e in mine if e.get("cat") == "send" and e["ph"] == "b"}
        arrived = {e["id"]: e["args"]["bytes"] for e in theirs if e.get("cat") == "receive" and e["ph"] == "e"}
        assert sent == arrived
        for category in ("send", "receive"):
            begun, ended = (
                {e["id"]: e["ts"] for e in mine if e.get("cat") == category and e["ph"] == ph} for ph in "be"
            )
            assert begun.keys() == ended.keys()
            assert all(begun[message] <= ended[message] for message in begun)
        assert {event["pid"] for event in mine} == {rank}
        named = {e["tid"] for e in mine if e["name"] == "thread_name"}
        assert {e["tid"] for e in mine if e["ph"] != "M"} <= named


def test_gossip_is_traced(ranks: Pool, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    for sent, _, _, rank in ranks(3, _traced, Gossip(RingGraph(), overlap=False), str(path)):
        events = of_rank(path, rank)
        assert_nested(events)
        assert sum(e["args"]["bytes"] for e in events if e.get("cat") == "send" and e["ph"] == "b") == sent > 0
        names = {event["name"] for event in spans(events)}
        assert {f"at mixing 1: {what}" for what in ("encode", "send", "wait", "decode and mix")} <= names


def _sums_in_a_group(path: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    try:
        group = dist.new_group(backend="ring_int8")
        values = torch.randn(50_000, generator=torch.Generator().manual_seed(dist.get_rank()))
        dist.all_reduce(values, group=group)
        with ringstrategy.timeline(path):
            dist.all_reduce(values, group=group)
    finally:
        dist.destroy_process_group()


def test_spans_of_a_process_group_name_its_calls(ranks: Pool, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    ranks(2, _sums_in_a_group, str(path))
    for rank in (0, 1):
        names = {span["name"] for span in spans(of_rank(path, rank))}
        assert {f"all-reduce 2: encode chunk {1 - rank} hop 0", "all-reduce 2: decode chunk 1 hop 1"} <= names, names


def test_timelines_are_merged_on_one_clock(ranks: Pool, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    ranks(3, _traced, AllReduce(BlockInt(8), Ring()), str(path))
    true = {}
    for rank in range(3):  # as if each had been on a host of its own, whose clock is ahead
        events = of_rank(path, rank)
        true |= {(rank, i): event["ts"] for i, event in enumerate(events) if "ts" in event}
        for event in events:
            if event["name"] == CLOCK:
                event["args"]["host"] = f"host{rank}"
            elif "ts" in event:
                event["ts"] += rank * 5e6
        path.with_name(f"timeline.rank{rank}.json").write_text(json.dumps(events))
    assert ringstrategy.merge_timelines(path) == path
    merged = read(path)
    assert len(merged) == sum(len(of_rank(path, rank)) for rank in range(3))
    place = dict.fromkeys(range(3), -1)
    for event in merged:
        place[event["pid"]] += 1
        if "ts" in event:
            assert abs(event["ts"] - true[event["pid"], place[event["pid"]]]) < 1e6


def test_ranks_of_one_host_share_its_clock(ranks: Pool, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    ranks(2, _traced, AllReduce(), str(path))
    ringstrategy.merge_timelines(path)
    assert read(path) == of_rank(path, 0) + of_rank(path, 1)
    with pytest.raises(FileNotFoundError, match=r"record it with ringstrategy\.timeline"):
        ringstrategy.merge_timelines(tmp_path / "other.json")


def _profiled() -> set[str]:
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with opened(AllReduce(BlockInt(8), Ring())) as (session, optimizer):
        with torch.profiler.profile(activities=cpu, experimental_config=everywhere) as profile:
            train(session, optimizer)
        return {event.name for event in profile.events()}


def test_the_profiler_sees_the_spans(ranks: Pool) -> None:
    for rank, names in enumerate(ranks(2, _profiled)):
        assert {
            "bucket 0: pack",
            "at step 0, in bucket 0 of 1",
            f"bucket 0: encode chunk {rank} hop 0",
            f"bucket 0: wait chunk {1 - rank} hop 0",
            f"bucket 0: decode chunk {1 - rank} hop 1",
            "wait for exchanges",
        } <= names


def _by_variable(path: str) -> int:
    os.environ["RINGSTRATEGY_TIMELINE"] = path
    try:
        with opened(AllReduce()) as (session, optimizer):
            train(session, optimizer)
            assert trace._timeline is not None
            with pytest.raises(RuntimeError, match="is being recorded already"), ringstrategy.timeline(path):
                pass
            trace._timeline.close()  # as at the end of the process
            return session.stats.bytes_sent
    finally:
        del os.environ["RINGSTRATEGY_TIMELINE"]
        trace._timeline = None


def test_an_environment_variable_asks_for_a_timeline(ranks: Pool, tmp_path: Path) -> None:
    for rank, sent in enumerate(ranks(2, _by_variable, str(tmp_path / "timeline.json"))):
        events = of_rank(tmp_path / "timeline.json", rank)
        assert sum(e["args"]["bytes"] for e in events if e.get("cat") == "send" and e["ph"] == "b") == sent


def test_a_folder_that_is_missing_is_noticed_at_once() -> None:
    with (
        pytest.raises(FileNotFoundError, match="no folder /nowhere for the timeline"),
        ringstrategy.timeline("/nowhere/timeline.json"),
    ):
        pytest.fail("it was recorded")


def test_many_events_are_written_meanwhile(tmp_path: Path) -> None:
    with ringstrategy.timeline(tmp_path / "timeline.json"):
        for chunk in range(2 * trace._MANY):
            with trace.span("encode", chunk, 0):
                pass
            assert trace._timeline is not None
            assert len(trace._timeline._events) < trace._MANY
    assert len(spans(of_rank(tmp_path / "timeline.json", 0))) == 2 * trace._MANY


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
    def exchange() -> None:
        for _ in range(1000):
            with trace.span("encode", 1, 2), trace.task("at step 3, in bucket 1 of 4"):
                pass

    exchange()
    tracemalloc.start()
    try:
        begin, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        exchange()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - begin < 2 * sys.getsizeof(range(1000)) + 512  # of the loop and the frame, for 1000 spans
    assert trace.span("encode", 1, 2) is trace.span("decode", 2, 3) is trace.task("at step 3")
