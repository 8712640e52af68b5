"""Measure the machines that a run is on: latency and bandwidth between hosts and within, codecs, shared cores."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ringstrategy.codecs.base import Codec
from ringstrategy.collectives.agree import exchange
from ringstrategy.collectives.peers import Peers
from ringstrategy.cost.model import CodecCost, Link, Machines, Work

_LAPS = 15
_SMALLEST, _LARGEST = 1 << 16, 1 << 26  # bytes of a message
_LONG_ENOUGH = 0.05  # seconds of a message from which a bandwidth is read
_FEW, _MANY = 1 << 12, 1 << 18  # values, for a codec's fixed cost and its cost a value
_REPEATS = 5
_CROWDING_SECONDS = 0.03


def measure(peers: Peers, codecs: Iterable[tuple[Codec, bool]], device: torch.device) -> Machines:
    """Measure under load, all ranks at the same time; takes less than a second, and all ranks return the same.

    Every rank calls it, with the same arguments and with nothing under way.

    Args:
        peers: who exchanges.
        codecs: which to measure, without or with feedback.
        device: where gradients live.
    """
    codecs = list(codecs)
    leaders = [rank for rank, host in enumerate(peers.hosts) if peers.hosts.index(host) == rank]
    neighbours = [rank for rank, host in enumerate(peers.hosts) if host == peers.hosts[peers.rank]]
    alpha_across, beta_across, post_across = _link(peers, leaders, device)
    alpha_inside, beta_inside, post_inside = _link(peers, neighbours, device)
    costs = {key: codec_cost(*key, device, lambda work: peers.submit(work, "while measuring").wait()) for key in codecs}
    mine = [alpha_across, beta_across, alpha_inside, beta_inside, max(post_across, post_inside)]
    for cost in costs.values():
        mine += [x for work in (cost.encode, cost.relay, cost.decode, cost.turn) for x in (work.fixed, work.per_value)]
    slowest = [max(column) for column in zip(*of_all(peers, mine), strict=True)]
    crowded = of_all(peers, [_crowding(peers, codecs[-1][0], device)])
    figures = iter(slowest[5:])

    def work() -> Work:
        return Work(next(figures), next(figures))

    return Machines(
        hosts=peers.hosts,
        across=Link(*slowest[0:2]),
        inside=Link(*slowest[2:4]),
        post=slowest[4],
        codecs={key: CodecCost(work(), work(), work(), work()) for key in codecs},
        crowding=statistics.median(row[0] for row in crowded),
    )


def of_all(peers: Peers, values: Sequence[float]) -> list[list[float]]:
    """Every rank's values, on every rank; all have equally many."""
    gathered: list[Tensor] = []

    def work() -> None:
        mine = torch.tensor(values, dtype=torch.float64, device="cpu").view(torch.uint8)
        gathered.append(exchange(peers.control, mine)())

    peers.control.submit(work, "while ranks compare measurements").wait()
    return gathered[0].view(torch.float64).tolist()


def _link(peers: Peers, members: Sequence[int], device: torch.device) -> tuple[float, float, float]:
    """Seconds a message, seconds a byte, seconds to start a message: in a ring of these ranks.

    All ranks call it, for they agree on how long to go on; zeros on a rank that is no member, or the only one.
    """
    place = members.index(peers.rank) if peers.rank in members and len(members) > 1 else None

    def lap(nbytes: int) -> tuple[float, float]:
        if place is None:
            return 0.0, 0.0
        after, before = members[(place + 1) % len(members)], members[place - 1]
        leaving = peers.scratch("probe.leaving", nbytes, device)[:nbytes]
        filling = peers.scratch("probe.filling", nbytes, device)[:nbytes]
        times: list[float] = []

        def work() -> None:
            _synchronise(device)
            times.append(time.perf_counter())
            handle = peers.post({after: leaving}, {before: filling})
            times.append(time.perf_counter())
            handle.wait()
            _synchronise(device)
            times.append(time.perf_counter())

        peers.submit(work, "while measuring the network").wait()
        return times[1] - times[0], times[2] - times[0]

    laps = [lap(8) for _ in range(_LAPS)]
    post, alpha = (statistics.median(column) for column in zip(*laps, strict=True))
    nbytes = _SMALLEST
    while True:
        lap(nbytes)  # a link that was idle may let a burst pass
        seconds = lap(nbytes)[1]
        longest = max(row[0] for row in of_all(peers, [seconds]))
        if longest == 0.0:
            return 0.0, 0.0, 0.0
        if longest >= _LONG_ENOUGH or nbytes >= _LARGEST:
            return alpha, max(seconds - alpha, 0.0) / nbytes, post
        nbytes *= 4


def codec_cost(
    codec: Codec, feedback: bool, device: torch.device, run: Callable[[Callable[[], None]], None]
) -> CodecCost:
    """What a codec's calls take here.

    Args:
        codec: measured on float32 values.
        feedback: add a residual before, and write what is lost.
        device: where the values are.
        run: does a piece of work where codecs are called in training, and returns when it is done.
    """
    generator = torch.Generator(device).manual_seed(0)
    many = torch.randn(_MANY, generator=generator, device=device)

    def calls(numel: int) -> list[Callable[[], object]]:
        values = many[:numel].clone()
        residual = torch.zeros_like(values) if feedback else None
        wires = [torch.empty(codec.nbytes(numel, values.dtype), dtype=torch.uint8, device=device) for _ in range(2)]
        out = torch.empty_like(values)
        in_place = codec.raw(values) is not None
        codec.encode(values, wires[0])

        def encode() -> None:
            if residual is not None:
                values.add_(residual)
            codec.encode(values, wires[1], lost=residual)

        def relay() -> None:
            if residual is not None:
                values.add_(residual)
            codec.relay(wires[0], values, wires[1], lost=residual)

        return [
            encode,
            relay,
            lambda: codec.decode(wires[0], out, add=in_place),
            lambda: codec.prepare_(out, 0),
        ]

    times: list[list[float]] = []

    def work() -> None:
        for numel in (_FEW, _MANY):
            times.append([_median_seconds(call, device) for call in calls(numel)])

    run(work)
    works = []
    for few, many_seconds in zip(*times, strict=True):
        per_value = max(many_seconds - few, 0.0) / (_MANY - _FEW)
        works.append(Work(max(few - per_value * _FEW, 0.0), per_value))
    return CodecCost(*works)


def _median_seconds(call: Callable[[], object], device: torch.device) -> float:
    call()
    seconds = []
    for _ in range(_REPEATS):
        _synchronise(device)
        begin = time.perf_counter()
        call()
        _synchronise(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _crowding(peers: Peers, codec: Codec, device: torch.device) -> float:
    """How much longer matrix products of the training thread take while the other thread encodes: 0 to 1."""
    if device.type != "cpu":
        return 0.0
    matrix = torch.randn(256, 256)
    values = torch.randn(_MANY)
    wire = torch.empty(codec.nbytes(_MANY, values.dtype), dtype=torch.uint8)

    def products() -> int:
        count, end = 0, time.perf_counter() + _CROWDING_SECONDS
        while time.perf_counter() < end:
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


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
