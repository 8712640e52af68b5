"""The packets of a training step: how many there are, which ACKs are late, what waits for one, what has no gradient.

python -m benchmarks packets --hosts 4 --rate 1gbit --width 64 --cases "=ring,=ring_int8,=gossip,=ddp fp16 hook"
python -m benchmarks packets --hosts 2 --rate 100mbit --model gpt --width 64 --steps 40 --pcap outputs/packets

Each host captures its packets while models train (capture.py). Every run has silence before and after it, so the
barriers between runs do not count. A figure of a host is about what the host sends:

- late ACKs: the host acknowledged data more than 30 ms after they arrived. Linux delays an ACK by at least 40 ms.
- stalls: all that was under way was acknowledged late, and more data left within 0.1 ms of that ACK. Data that Nagle's
  algorithm or a full window held back look like this. Nagle's algorithm can also wait for an ACK that is not late. Such
  a wait does not show in packets, but sockets with TCP_NODELAY have none: so the benchmark counts these sockets.
- headers alone: packets of 48 or 96 bytes on the case's own connections. With them gloo announces a message.
- other messages: packets with payload on other connections than the case's own, such as those to the rendezvous store.
  The store's answers do not count, and what rank 0 asks the store on its own host passes no interface.

The capture uses the cores too, so seconds are for information only.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ipaddress
import os
import socket
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks import harness, tasks
from benchmarks.capture import Capture, End, Packet, plain, read
from benchmarks.contenders import DDP, Ours, Training, contenders
from benchmarks.harness import Case
from benchmarks.lab import LOOPBACK
from benchmarks.rows import ALONE

_LATE_NS = 30_000_000  # Linux delays an ACK by 40 ms at least
_AT_ONCE_NS = 100_000
_HEADERS = (48, 96)  # bytes of one or two of gloo's
_SILENCE = 0.2  # seconds before and after each run; half of that after it counts: an ACK may come 40 ms after the data


class Connection(NamedTuple):
    """A TCP connection of this process."""

    own: End
    peer: End


class Seen(NamedTuple):
    """What was captured on one host."""

    data_packets: int = 0  # with payload, on the connections that are the case's own, as all but the last
    headers_alone: int = 0  # those of them that are nothing but headers of gloo
    payload_bytes: int = 0  # in them: with gloo's headers and what TCP sent twice, without TCP's headers
    pure_acks: int = 0  # without payload
    late_acks: int = 0  # sent more than 30 ms after the data had come
    longest_ack_ns: int = 0  # from data to their ACK
    stalls: int = 0  # data that left right after a late ACK of all that was under way
    other_messages: int = 0  # packets with payload on all other connections


def together(several: Iterable[Seen]) -> Seen:
    """Of several connections or runs."""
    kept = [Seen(), *several]
    sums = Seen(*map(sum, zip(*kept, strict=True)))
    return sums._replace(longest_ack_ns=max(each.longest_ack_ns for each in kept))


def seen(packets: Sequence[Packet], own: Collection[Connection], host: str) -> Seen:
    """What the packets captured on a host show.

    Args:
        packets: in order of time.
        own: connections of the host that carry gradients.
        host: its address.
    """
    lines: dict[Connection, list[Packet]] = defaultdict(list)
    for packet in packets:
        ends = packet.source, packet.target
        lines[Connection(*ends if packet.source.address == host else ends[::-1])].append(packet)
    own_lines = [_seen_on(lines[connection], connection) for connection in own]
    others = [line for connection, line in lines.items() if connection not in own]
    messages = sum(packet.payload > 0 and packet.source.address == host for line in others for packet in line)
    return together([*own_lines, Seen(other_messages=messages)])


def _seen_on(line: Sequence[Packet], connection: Connection) -> Seen:
    sent = [packet for packet in line if packet.source == connection.own]
    with_data = [packet for packet in sent if packet.payload]
    delays = [answer.delay_ns for answer in answers(line, connection.peer)]
    return Seen(
        data_packets=len(with_data),
        headers_alone=sum(packet.payload in _HEADERS for packet in with_data),
        payload_bytes=sum(packet.payload for packet in with_data),
        pure_acks=len(sent) - len(with_data),
        late_acks=sum(delay > _LATE_NS for delay in delays),
        longest_ack_ns=max(delays, default=0),
        stalls=sum(1 for _ in stalls(line, connection.own)),
    )


class Answer(NamedTuple):
    """A packet that acknowledges data."""

    packet: Packet
    delay_ns: int  # since the first of these data passed
    everything: bool  # nothing is under way any more


def answers(line: Iterable[Packet], sender: End) -> Iterator[Answer]:
    """Of one connection: every packet that acknowledges what `sender` sent."""
    under_way: deque[Packet] = deque()
    for packet in line:
        if packet.source == sender:
            if packet.payload:
                under_way.append(packet)
            continue
        first = None
        while under_way and _reaches(packet.acknowledged, under_way[0].after):
            passed = under_way.popleft()
            first = first or passed
        if first is not None:
            yield Answer(packet, packet.time_ns - first.time_ns, not under_way)


def stalls(line: Sequence[Packet], sender: End) -> Iterator[Packet]:
    """Of one connection: data of `sender` that left right after a late ACK, without data, of all that was under way."""
    released = {
        answer.packet
        for answer in answers(line, sender)
        if answer.everything and answer.delay_ns > _LATE_NS and not answer.packet.payload
    }
    for before, packet in pairwise(line):
        at_once = packet.time_ns - before.time_ns <= _AT_ONCE_NS
        if before in released and packet.source == sender and packet.payload and at_once:
            yield packet


def _reaches(acknowledged: int, number: int) -> bool:
    """Sequence numbers begin again after 2^32."""
    return (acknowledged - number) % 2**32 < 2**31


def sockets() -> dict[Connection, bool]:
    """The TCP connections that this process has now; whether TCP_NODELAY is set."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since, no socket, or not connected
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    ends = [
                        End(plain(ipaddress.ip_address(address)), port)
                        for address, port, *_ in (one.getsockname(), one.getpeername())
                    ]
                    found[Connection(*ends)] = bool(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
    return found


class _Traced:
    """A training whose packets are looked at; `own`: the connections that it uses already."""

    def __init__(self, name: str, training: Training, own: Collection[Connection], steps: int) -> None:
        training.take(steps)
        self.training = training
        self.case: Case = training.case(name)
        self.windows: list[tuple[int, int]] = []  # of counted runs, on the clock of the packets
        self.nodelay: dict[Connection, bool] = {}  # of its own connections
        self._own = set(own)

    def run(self, counts: bool) -> None:
        """With silence before and after it."""
        before, sent = set(sockets()), self.case.bytes_sent()
        dist.barrier()
        time.sleep(_SILENCE)
        begin = time.time_ns()
        self.case.run()
        end = time.time_ns()
        time.sleep(_SILENCE)
        now = sockets()
        self._own |= set(now) - before
        seconds = harness.max_over_ranks((end - begin) / 1e9)
        if counts:
            self.windows.append((begin, end + int(_SILENCE * 1e9) // 2))
            self.nodelay = {each: now[each] for each in self._own if each in now and not _to_store(each)}
            self.case.seconds.append(seconds / self.case.steps)
            if sent is not None:
                nbytes = (self.case.bytes_sent() or 0) - sent
                self.case.sent = round(harness.max_over_ranks(nbytes) / self.case.steps)

    def seen(self, packets: Sequence[Packet], host: str) -> list[Seen]:
        """In all counted runs, on each host."""
        # answers of the store are left out: a rank that has ended its run earlier may look for this one
        asked = [packet for packet in packets if packet.source.port != _store_port()]
        runs = [[packet for packet in asked if begin <= packet.time_ns <= end] for begin, end in self.windows]
        total = together(seen(run, self.nodelay, host) for run in runs)
        return [Seen(*theirs.tolist()) for theirs in harness.of_all_ranks(torch.tensor(total))]

    def sockets(self) -> tuple[int, int]:
        """Its own connections of all ranks, and those of them that have TCP_NODELAY."""
        mine = torch.tensor([len(self.nodelay), sum(self.nodelay.values())])
        everyone, with_it = torch.stack(harness.of_all_ranks(mine)).sum(0).tolist()
        return everyone, with_it


def _to_store(connection: Connection) -> bool:
    return _store_port() in (connection.own.port, connection.peer.port)


def _store_port() -> int:
    return int(os.environ["MASTER_PORT"])


def _traced(options: argparse.Namespace, notes: list[str]) -> Iterator[_Traced]:
    """DDP, computing alone, and what the user chose; what they chose by themselves is added to `notes`."""
    task = tasks.asked(options)
    initial, batches = task.model(0), task.batches(options.steps, 0)
    known = contenders(initial, batches, loss=task.loss)
    known[ALONE] = lambda: Training(copy.deepcopy(initial), batches, task.loss)
    default = set(sockets())
    for name in dict.fromkeys([DDP, ALONE, *harness.chosen(known, options.cases)]):
        before = set(sockets())
        training = known[name]()
        for line in training.choose():
            notes.append(f"{name}: {line}")
        opened = set(sockets()) - before
        shared = set() if isinstance(training, Ours) or name == ALONE else default  # torch's own use its default group
        yield _Traced(name, training, opened | shared, options.steps)


def worker(options: argparse.Namespace) -> None:
    """What runs on each host."""
    rank = dist.get_rank()
    with tempfile.TemporaryDirectory() as folder:
        file = (options.pcap or Path(folder)) / f"host{rank}-of-{options.hosts}.pcap"
        file.parent.mkdir(parents=True, exist_ok=True)
        notes = [_NOTE]
        traced = list(_traced(options, notes))
        described = tasks.asked(options).described(traced[0].training.model, digits=2)
        with Capture(os.environ["GLOO_SOCKET_IFNAME"], file):
            for one, counts in harness.turns(traced, options.rounds, options.warmup):
                one.run(counts)
        packets = read(file)
    host = next(iter(traced[0].nodelay)).own.address
    fields: dict[str, dict[str, Any]] = {}
    for one in traced:
        one.case.identical = harness.identical_on_all_ranks(one.case.result())
        fields[one.case.name] = _fields(one, packets, host)
    for one in traced:
        one.training.close()
    if rank == 0:
        cases = [one.case for one in traced]
        harness.report("packets", described, cases, options, notes, lambda case: fields[case.name])


def _fields(one: _Traced, packets: Sequence[Packet], host: str) -> dict[str, Any]:
    hosts = one.seen(packets, host)
    steps = one.case.steps * len(one.windows)
    everyone, with_nodelay = one.sockets()
    return {
        "data_packets": [each.data_packets / steps for each in hosts],
        "headers_alone": [each.headers_alone / steps for each in hosts],
        "payload_bytes": [each.payload_bytes / steps for each in hosts],
        "pure_acks": [each.pure_acks / steps for each in hosts],
        "late_acks": [each.late_acks for each in hosts],
        "longest_ack_seconds": max(each.longest_ack_ns for each in hosts) / 1e9 or None,
        "stalls": sum(each.stalls for each in hosts),
        "other_messages": [each.other_messages / steps for each in hosts],
        "sockets": everyone or None,
        "sockets_with_nodelay": with_nodelay if everyone else None,
    }


_NOTE = (
    "Packets, headers, ACKs and messages: a step's, of the host that sends most. Late ACKs (more than 30 ms after the "
    "data) and stalls (data that left as soon as a late ACK had come): of all hosts and all counted steps."
)


def _check(options: argparse.Namespace) -> None:
    tasks.asked(options)
    processes = max(options.processes, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if options.rate == LOOPBACK or processes > 1 or min(options.hosts) < 2:
        raise ValueError("packets are captured between hosts: not with --rate loopback, --hosts 1 or --processes 2")
    if "RANK" in os.environ and "GLOO_SOCKET_IFNAME" not in os.environ:
        raise ValueError("GLOO_SOCKET_IFNAME must name the interface whose packets are captured")


def main(given: Sequence[str]) -> None:
    """The command."""
    # two rounds of warm-up: torch DDP lays its buckets out anew after the first step
    parser = harness.over_hosts("packets", __doc__, rounds=3, warmup=2)
    tasks.add_options(parser, steps=20)
    parser.add_argument("--pcap", type=Path, metavar="FOLDER", help="keep each host's packets there")
    harness.run(parser, given, worker, check=_check)
