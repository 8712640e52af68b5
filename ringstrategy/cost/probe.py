"""Measure the machines that a run is on: latency and bandwidth between hosts and within, codecs, shared cores."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ringstrategy.codecs.base import Codec
from ringstrategy.cost.model import CodecCost, Link, Machines, Work
from ringstrategy.transport.agree import all_gather_floats
from ringstrategy.transport.base import Peers

_LAPS = 15
_SMALLEST, _LARGEST = 1 << 16, 1 << 24  # bytes of a message; segments of buckets are about so long at most
_LONG_ENOUGH = 0.01  # seconds of a message from which a bandwidth is read, if there are such messages
_LONG_LAPS = 3  # with such messages
_FEW, _MANY = 1 << 12, 1 << 20  # values, for a codec's fixed cost and its cost a value
_REPEATS = 5  # and one before them that is not counted
_CROWDING_SECONDS = 0.03


def measure(peers: Peers, codecs: Iterable[tuple[Codec, bool]], device: torch.device, longest: float) -> Machines:
    """Measure under load, all ranks at the same time; all ranks return the same.

    Every rank calls it, with the same arguments and with nothing under way. Messages grow until one takes long enough
    to read a bandwidth from.

    Args:
        peers: who exchanges.
        codecs: which to measure, without or with feedback.
        device: where gradients live.
        longest: bytes of a message, at most: what will be exchanged at once. Smaller: fewer bytes sent, and the
            figures hold for exchanges of so many bytes.
    """
    codecs = list(codecs)
    leaders = [rank for rank, host in enumerate(peers.hosts) if peers.hosts.index(host) == rank]
    neighbours = [rank for rank, host in enumerate(peers.hosts) if host == peers.hosts[peers.rank]]
    packing = pack_seconds(device)
    across, inside = (_link(peers, members, longest, device, packing / 8) for members in (leaders, neighbours))
    costs = {key: codec_cost(*key, device, lambda work: peers.submit(work, "while measuring").wait()) for key in codecs}
    mine = [across.alpha, across.beta, inside.alpha, inside.beta, max(across.post, inside.post)]
    mine += [max(across.transport, inside.transport), packing]
    for cost in costs.values():
        mine += [x for work in (cost.encode, cost.relay, cost.decode, cost.add) for x in (work.fixed, work.per_value)]
    slowest = [max(column) for column in zip(*all_gather_floats(peers, mine), strict=True)]
    ring, alpha = (leaders, slowest[0]) if len(leaders) > 1 else (neighbours, slowest[2])
    crowded = all_gather_floats(
        peers, [_crowding(peers, codecs[-1][0], device), _lap_beside_computing(peers, ring, device)]
    )
    crowding = statistics.median(row[0] for row in crowded)
    wake = statistics.median(crowded[rank][1] for rank in ring) - alpha - 2 * slowest[4]
    peers.forget_scratch()
    figures = iter(slowest[7:])

    def work() -> Work:
        return Work(next(figures), next(figures))

    return Machines(
        hosts=peers.hosts,
        across=Link(*slowest[0:2]),
        inside=Link(*slowest[2:4]),
        post=slowest[4],
        codecs={key: CodecCost(work(), work(), work(), work()) for key in codecs},
        crowding=crowding,
        transport=slowest[5] * crowding,
        wake=max(0.0, wake),
        pack=Work(0.0, slowest[6]),
        longest=min(across.longest, inside.longest),
        queues=peers.queues,
    )


class _Measured(NamedTuple):
    """Seconds: of a message, of a byte, to start a message; and of a core, to send or to receive a byte."""

    alpha: float = 0.0
    beta: float = 0.0
    post: float = 0.0
    transport: float = 0.0
    longest: float = math.inf  # bytes of an exchange for which it holds


class _Lap(NamedTuple):
    """Seconds: to start a message each way, and from then until both have arrived."""

    post: float
    wait: float
    processor: float  # seconds of this process's threads, all of which only carry

    @property
    def seconds(self) -> float:
        """Both. Posting a long message hands the system its first part, which leaves before the rest is posted."""
        return self.post + self.wait


def _link(peers: Peers, members: Sequence[int], longest: float, device: torch.device, memory: float) -> _Measured:
    """In a ring of these ranks, by messages of at most `longest` bytes.

    All ranks call it, for they agree on how long to go on; zeros on a rank that is no member, or the only one.

    Args:
        peers: who exchanges.
        members: their ranks.
        longest: see `measure`.
        device: where the messages are.
        memory: seconds that reading or writing a byte takes. No link is faster; but where other work holds messages up,
            a long one may have taken no longer than a short one.
    """
    short = [_lap(peers, members, 8, device) for _ in range(_LAPS)]
    post = min(lap.post for lap in short)  # in others, whom the message woke had the core before the post returned
    alpha = statistics.median(lap.seconds for lap in short) - post
    # where cores are short of time, others may have taken longer than a long one
    least = min(lap.seconds for lap in short)
    if not any(row[0] for row in all_gather_floats(peers, [least])):  # no rank has a neighbour
        return _Measured()
    most = int(max(1, min(_LARGEST, longest)))
    nbytes = min(_SMALLEST, most)

    def laps(count: int) -> tuple[list[_Lap], float]:
        """And how much longer than a short one they took, on the slowest rank."""
        taken = [_lap(peers, members, nbytes, device) for _ in range(count)]
        longer = statistics.median(lap.seconds for lap in taken) - least
        return taken, max(row[0] for row in all_gather_floats(peers, [longer]))

    while True:
        _, seconds = laps(1)
        if seconds >= _LONG_ENOUGH or nbytes == most:
            # again, for that one may have been held up, or a link that was idle may have let a burst pass
            long, seconds = laps(_LONG_LAPS)
            if seconds >= _LONG_ENOUGH / 2 or nbytes == most:
                break
        nbytes = min(4 * nbytes, most)
    beta = (statistics.median(lap.seconds for lap in long) - least) / nbytes
    transport = statistics.median(lap.processor for lap in long) / 2
    known = seconds >= _LONG_ENOUGH / 2 or nbytes == _LARGEST
    return _Measured(alpha, max(beta, memory), post / 2, transport / nbytes, math.inf if known else longest)


def _lap(peers: Peers, members: Sequence[int], nbytes: int, device: torch.device) -> _Lap:
    """To the next of the members and from the one before, all of them at once; zeros without a neighbour."""
    if peers.rank not in members or len(members) == 1:
        return _Lap(0.0, 0.0, 0.0)
    place = members.index(peers.rank)
    after, before = members[(place + 1) % len(members)], members[place - 1]
    times: list[float] = []

    def work() -> None:
        leaving, filling = (peers.scratch(f"probe.{way}", nbytes, device)[:nbytes] for way in ("leaving", "filling"))
        _synchronise(device)
        times.extend([time.process_time(), time.perf_counter()])
        handle = peers.post({after: leaving}, {before: filling})
        times.append(time.perf_counter())
        handle.wait()
        _synchronise(device)
        times.extend([time.perf_counter(), time.process_time()])

    peers.submit(work, "while measuring the network").wait()
    processor, begin, posted, end, processor_end = times
    return _Lap(posted - begin, end - posted, processor_end - processor)


def codec_cost(
    codec: Codec,
    feedback: bool,
    device: torch.device,
    run: Callable[[Callable[[], None]], None],
    *,
    undisturbed: bool = False,
) -> CodecCost:
    """What a codec's calls take here.

    Args:
        codec: measured on float32 values.
        feedback: add a residual before, and write what is lost.
        device: where the values are.
        run: does a piece of work where codecs are called in training, and returns when it is done.
        undisturbed: what the calls would take if nothing else ran; else what they take beside whatever runs now.
    """
    generator = torch.Generator(device).manual_seed(0)
    pattern = torch.randn(_MANY, generator=generator, device=device)
    # in training, gradients come from memory, not from a cache: so each repeat works on other values
    whole = pattern.repeat(_REPEATS + 1)
    outs, residuals = torch.zeros_like(whole), torch.zeros_like(whole) if feedback else None

    def calls(numel: int) -> list[Callable[[int], object]]:
        wires = [torch.empty(codec.nbytes(numel, whole.dtype), dtype=torch.uint8, device=device) for _ in range(2)]
        codec.encode(pattern[:numel], wires[0])

        def part(of: Tensor, repeat: int) -> Tensor:
            return of[repeat * _MANY : repeat * _MANY + numel]

        def hop(arrived: list[Tensor], repeat: int) -> None:
            rest = None if residuals is None else part(residuals, repeat)
            codec.hop(arrived, part(whole, repeat), wires[1], residual=rest, lost=rest, seed=0, own_seed=0)

        return [
            partial(hop, []),
            partial(hop, wires[:1]),
            lambda repeat: codec.deliver(wires[0], part(outs, repeat), seed=0),
            lambda repeat: codec.decode(wires[0], part(outs, repeat), add=True),
        ]

    times: list[list[float]] = []

    def work() -> None:
        for numel in (_FEW, _MANY):
            times.append([_seconds(call, device, undisturbed) for call in calls(numel)])

    run(work)
    works = []
    for few, many_seconds in zip(*times, strict=True):
        per_value = max(many_seconds - few, 0.0) / (_MANY - _FEW)
        works.append(Work(max(few - per_value * _FEW, 0.0), per_value))
    return CodecCost(*works)


def _seconds(call: Callable[[int], object], device: torch.device, undisturbed: bool) -> float:
    """The median; undisturbed, the least, and on a CPU of this thread's own time, which goes on only while it runs."""
    clock = time.thread_time if undisturbed and device.type == "cpu" else time.perf_counter
    call(_REPEATS)
    seconds = []
    for repeat in range(_REPEATS):
        _synchronise(device)
        begin = clock()
        call(repeat)
        _synchronise(device)
        seconds.append(clock() - begin)
    return min(seconds) if undisturbed else statistics.median(seconds)


def _crowding(peers: Peers, codec: Codec, device: torch.device) -> float:
    """How much longer matrix products of the training thread take while the other thread encodes: 0 to 1."""
    if device.type != "cpu":
        return 0.0
    matrix, values = torch.ones(256, 256, device="cpu"), torch.ones(_MANY, device="cpu")
    wire = torch.empty(codec.nbytes(_MANY, values.dtype), dtype=torch.uint8)

    def products() -> int:
        count, end = 0, time.perf_counter() + _CROWDING_SECONDS
        while count == 0 or time.perf_counter() < end:  # once even if the system gave the core to others all the time
            torch.mm(matrix, matrix)
            count += 1
        return count

    def encode() -> None:
        end = time.perf_counter() + 1.2 * _CROWDING_SECONDS
        while time.perf_counter() < end:
            codec.encode(values, wire)

    products()
    alone = products()
    ticket = peers.submit(encode, "while measuring")
    beside = products()
    ticket.wait()
    return min(1.0, max(0.0, alone / beside - 1))


def _lap_beside_computing(peers: Peers, members: Sequence[int], device: torch.device) -> float:
    """How long a short message takes in a ring of the members while the training threads of all ranks compute."""
    if device.type != "cpu":
        return 0.0
    matrix = torch.ones(256, 256, device="cpu")
    done = threading.Event()
    took: list[float] = []

    def compute() -> None:
        while not done.is_set():
            torch.mm(matrix, matrix)

    computing = threading.Thread(target=compute, daemon=True)
    computing.start()
    try:
        for _ in range(_LAPS):
            took.append(_lap(peers, members, 8, device).seconds)
        all_gather_floats(peers, [0.0])  # ranks outside the ring ran no laps, and compute as long as the others
    finally:
        done.set()
        computing.join()
    return statistics.median(took)


def pack_seconds(device: torch.device, *, undisturbed: bool = False) -> float:
    """Seconds a value, to copy it scaled into other memory; `undisturbed` as of `codec_cost`."""
    values = torch.ones(_MANY * (_REPEATS + 1), device=device)
    bucket = torch.ones_like(values)

    def pack(repeat: int) -> None:
        part = slice(repeat * _MANY, (repeat + 1) * _MANY)
        torch.mul(values[part], 0.5, out=bucket[part])

    return _seconds(pack, device, undisturbed) / _MANY


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
