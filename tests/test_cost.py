"""The cost model sends what collectives send, keeps the closed forms, and is fed by what all ranks measure together."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes import FakePeers, on_all_ranks
from pool import Pool
from torch import Tensor
from torch.nn import Parameter

from ringstrategy import (
    AllReduce,
    BlockInt,
    BySize,
    Codec,
    Collective,
    Direct,
    Gaussian,
    Hierarchical,
    Identity,
    Native,
    Ring,
    Rotated,
    TopK,
)
from ringstrategy.collectives import mean_
from ringstrategy.cost import CodecCost, Cost, Link, Machines, Profile, Work, exchange_cost, predict, probe
from ringstrategy.cost.probe import measure
from ringstrategy.transport import Stats, connect

NOTHING = Work(0.0, 0.0)
FREE = CodecCost(NOTHING, NOTHING, NOTHING, NOTHING)
SLOW = Link(1e-3, 1e-7)
CODECS: list[Codec] = [Identity(), BlockInt(8), Rotated(Gaussian(4)), TopK()]


def machines(
    hosts: str, cost: CodecCost = FREE, across: Link = SLOW, crowding: float = 0.0, transport: float = 0.0
) -> Machines:
    costs = {(codec, feedback): cost for codec in CODECS for feedback in (False, True)}
    return Machines(tuple(hosts), across, Link(0.0, 0.0), 0.0, costs, crowding, transport)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("collective", [Ring(), Ring(1), Direct(), BySize()], ids=str)
def test_the_model_sends_the_bytes_that_the_collective_sends(
    collective: Collective, codec: Codec, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not codec.hop_by_hop and isinstance(collective, Ring):
        return
    monkeypatch.setattr("ringstrategy.collectives.base.SMALLEST_SEGMENT", 1 << 17)  # four in a chunk
    numel = 4_000 * 256

    def sent(peers: FakePeers) -> int:
        mean_(torch.randn(numel), peers, collective, codec)
        assert peers.stats.bytes_sent is not None
        return peers.stats.bytes_sent

    predicted = exchange_cost(machines("abcdefg"[:size]), collective, codec, numel)
    assert predicted.bytes_sent == on_all_ranks(size, sent)[0] > 0


@pytest.mark.parametrize("size", [2, 3, 4, 8, 16, 64])
@pytest.mark.parametrize("latency", [20e-6, 200e-6, 20e-3])
@pytest.mark.parametrize("gigabits", [0.1, 1, 25])
def test_what_is_short_is_sooner_direct_than_over_the_ring(gigabits: float, latency: float, size: int) -> None:
    link, work = Link(latency, 8e-9 / gigabits), Work(3e-6, 1e-10)
    ranks = machines("a", CodecCost(work, work, work, work), link)
    apart = replace(ranks, hosts=tuple(map(str, range(size))), post=20e-6)
    shared = replace(apart, hosts=tuple(str(rank // 2) for rank in range(size)))
    for codec in CODECS[:2]:
        edge = BySize().below // codec.nbytes(256, torch.float32) * 256  # with one block more they are long
        for numel in (size * 256, edge // 4, edge - 256):
            direct, ring, ours = (exchange_cost(apart, way, codec, numel) for way in (Direct(), Ring(), BySize()))
            assert ours == direct
            assert direct.seconds < ring.seconds or (size == 2 and direct.seconds < 1.02 * ring.seconds)
            if size > 2:
                assert exchange_cost(shared, BySize(), codec, numel) == exchange_cost(shared, Ring(), codec, numel)
        assert exchange_cost(apart, BySize(), codec, edge + 256) == exchange_cost(apart, Ring(), codec, edge + 256)


@pytest.mark.parametrize("codec", CODECS[:3], ids=str)
def test_the_model_sends_what_a_hierarchy_sends_and_adds(codec: Codec) -> None:
    numel = 1 << 20

    def sent(peers: FakePeers) -> int | None:
        peers.hosts = tuple("aabb")
        mean_(torch.randn(numel), peers, Hierarchical(), codec)
        return peers.stats.bytes_sent

    free = exchange_cost(machines("aabb"), Hierarchical(), codec, numel)
    assert free.bytes_sent == on_all_ranks(4, sent)[0]
    adding = exchange_cost(replace(machines("aabb"), pack=Work(0.0, 1e-6)), Hierarchical(), codec, numel)
    assert adding.busy == pytest.approx(free.busy + 1e-6 * numel / 2), "half of the values, once"


def test_rings_over_links_alone_take_what_the_formula_says() -> None:
    for size in (2, 4, 9):
        hosts = "abcdefghi"[:size]
        numel = size * 1000
        hops = 2 * (size - 1)
        for collective in (Ring(1), Native()):
            seconds = exchange_cost(machines(hosts), collective, Identity(), numel).seconds
            assert seconds == pytest.approx(hops * SLOW.alpha + hops / size * 4 * numel * SLOW.beta)
        # everyone to everyone: both phases pay the latency once, and the same bytes queue up on one link
        direct = exchange_cost(machines(hosts), Direct(1), Identity(), numel).seconds
        assert direct == pytest.approx(2 * SLOW.alpha + hops / size * 4 * numel * SLOW.beta)


def test_where_messages_are_only_queued_the_model_runs_what_runs_there() -> None:
    numel = 1 << 20
    queued = replace(machines("abcd"), queues=True)
    for collective in (Direct(), BySize()):
        cost = exchange_cost(queued, collective, Identity(), numel)
        assert cost.seconds == pytest.approx(2 * SLOW.alpha + 6 / 4 * 4 * numel * SLOW.beta)
    shared = replace(machines("aabb"), queues=True)
    assert exchange_cost(shared, BySize(), Identity(), numel) == exchange_cost(shared, Ring(), Identity(), numel)


def test_a_codec_takes_the_time_of_its_calls() -> None:
    def only(**given: Work) -> Machines:
        return machines("abcd", replace(FREE, **given), Link(0.0, 0.0))

    numel, one = 4 << 16, Work(1e-3, 1e-9)
    each = one.seconds(numel // 4)
    for field, calls in {"encode": 1, "relay": 3, "decode": 4}.items():
        cost = exchange_cost(only(**{field: one}), Ring(1), BlockInt(8), numel)
        assert cost.seconds == cost.busy == pytest.approx(calls * each), field
    # what others sent of this rank's own chunk: one by relaying, the others by adding
    assert exchange_cost(only(add=one), Direct(1), BlockInt(8), numel).busy == pytest.approx(2 * each)
    crowded = replace(only(encode=one), crowding=1.0)
    beside, alone = (exchange_cost(crowded, Ring(1), BlockInt(8), numel, beside_computing=on) for on in (True, False))
    assert beside.seconds == pytest.approx(2 * each)
    assert alone.seconds == alone.busy == beside.busy == pytest.approx(each)
    for given in ({"post": 1e-3}, {"transport": 1e-9}):
        alone, beside = (
            exchange_cost(
                replace(crowded, codecs=machines("abcd").codecs, **given),
                Ring(1),
                BlockInt(8),
                numel,
                beside_computing=on,
            )
            for on in (False, True)
        )
        assert beside.seconds == pytest.approx(2 * alone.seconds)
        assert beside.busy == pytest.approx(alone.busy) == alone.seconds > 0
    assert exchange_cost(only(add=one), Ring(1), Identity(), numel).busy == pytest.approx(3 * each), "only additions"


def test_segments_hide_a_codec_behind_the_wire() -> None:
    codec_as_slow_as_wire = replace(FREE, relay=Work(0.0, 1e-7), encode=Work(0.0, 1e-7))
    given = machines("abcd", codec_as_slow_as_wire, Link(0.0, 1e-7))
    one, four = (exchange_cost(given, Ring(segments), BlockInt(8), 1 << 24).seconds for segments in (1, 4))
    assert 0.5 < four / one < 0.75
    assert four > exchange_cost(given, Ring(4), BlockInt(8), 1 << 24).busy


def test_ranks_of_one_host_share_its_link() -> None:
    numel = 1 << 20
    flat = exchange_cost(machines("aabb"), Ring(1), Identity(), numel, feedback=True).seconds
    assert flat == pytest.approx(6 * SLOW.alpha + 1.5 * 4 * numel * SLOW.beta, rel=0.01), "one rank sends out of a host"
    direct = exchange_cost(machines("aabb"), Direct(1), Identity(), numel).seconds
    assert direct == pytest.approx(2 * 2 * 2 * numel * SLOW.beta, rel=0.01), "all do: two ranks' quarters to two others"
    over_hosts = exchange_cost(machines("aabb"), Hierarchical(), Identity(), numel).seconds
    assert over_hosts == pytest.approx(4 * numel * SLOW.beta, rel=0.02), "as two hosts with one rank each"


def test_bytes_that_leave_a_host_are_those_of_all_its_ranks() -> None:
    nbytes = 4 << 20
    for hosts, collective, share in (
        ("abcd", Native(), 2 * 3 / 4),
        ("abcd", Ring(), 2 * 3 / 4),
        ("abcd", Direct(), 2 * 3 / 4),
        ("aabb", Native(), 2 * 3 / 4),  # the ring leaves a host once
        ("aabb", Ring(), 2 * 3 / 4),
        ("aabb", Hierarchical(), 2 * 1 / 2),
        ("aabb", Direct(), 2 * (2 * 2 / 4)),  # two ranks, each two quarters in both phases
        ("aaaa", Ring(), 0),
        ("aaaa", Native(), 0),
    ):
        cost = exchange_cost(machines(hosts), collective, Identity(), nbytes // 4)
        assert cost.bytes_across == pytest.approx(share * nbytes, rel=0.01), (hosts, collective)


def parameters(numel: int = 1 << 20, count: int = 8) -> dict[str, Parameter]:
    return {str(i): Parameter(torch.empty(numel, device="meta")) for i in range(count)}


def test_a_step_hides_what_fits_behind_the_backward() -> None:
    given = machines("abcd", across=Link(0.0, 1e-9))
    wire = 1.5 * 32 * 2**20 * 1e-9
    for backward in (0.01, 1.0):
        step = predict(AllReduce(bucket_mb=1), parameters(), given, Profile(0.3, backward))
        last = wire / 8  # of the last bucket, which nothing can hide
        assert step.communication == pytest.approx(wire)
        assert step.seconds == pytest.approx(0.3 + max(backward + last, wire + backward / 8))
        assert step.bytes_sent == 1.5 * 32 * 2**20
    one_bucket = predict(AllReduce(bucket_mb=64), parameters(1 << 10), given, Profile(0.0, 1.0))
    assert one_bucket.seconds > 1.0, "nothing of a single bucket is hidden"


def test_late_gradients_are_exposed() -> None:
    given = machines("abcd", across=Link(0.0, 1e-9))
    late = ((0.0, 0.0), (0.1, 0.99), (1.0, 1.0))
    even, at_the_end = (predict(AllReduce(), parameters(), given, Profile(0.0, 1.0, ready)) for ready in (None, late))
    exposed = at_the_end.seconds - 1.0
    assert exposed > 0.8 * at_the_end.communication > 3 * (even.seconds - 1.0) > 0


def test_where_cores_are_shared_codecs_slow_the_backward_down() -> None:
    cost = replace(FREE, encode=Work(0.0, 1e-8), relay=Work(0.0, 1e-8), decode=Work(0.0, 1e-8))
    wire = Link(0.0, 1e-12)
    alone, shared = (
        predict(AllReduce(BlockInt(8)), parameters(), machines("abcd", cost, wire, crowding), Profile(0.0, 2.0))
        for crowding in (0.0, 1.0)
    )
    busy = 2 * 8 * 2**20 * 1e-8  # of all chunks one encode or relay and one decode
    assert alone.seconds == pytest.approx(2.0 + busy / 8, rel=0.01)
    assert shared.seconds == pytest.approx(2.0 + busy, rel=0.05)


def test_carrying_takes_the_core_only_where_it_does_not_wait() -> None:
    numel, nbytes = 1 << 20, 1.5 * 4 * 2**20

    def cost(beta: float, transport: float, collective: Collective) -> Cost:
        given = machines("abcd", across=Link(0.0, beta), transport=transport)
        return exchange_cost(given, collective, Identity(), numel)

    for collective in (Ring(1), Direct(1), Native()):
        slow_link, slow_core = cost(1e-7, 1e-8, collective), cost(1e-9, 1e-8, collective)
        assert slow_link.seconds == pytest.approx(1e-7 * nbytes)
        assert slow_core.seconds == pytest.approx(2 * 1e-8 * nbytes), "each byte is sent by one and received by another"
        assert slow_link.busy == slow_core.busy == pytest.approx(2 * 1e-8 * nbytes)


def test_a_message_that_was_waited_for_wakes_its_thread_late_beside_computing() -> None:
    given = replace(machines("abcd", across=Link(1e-3, 0.0)), wake=2e-3)
    alone, beside = (
        exchange_cost(given, Ring(1), Identity(), 1 << 20, beside_computing=on).seconds for on in (False, True)
    )
    assert alone == pytest.approx(6 * 1e-3)
    assert beside == pytest.approx(6 * 3e-3)


def test_packing_lengthens_the_backward() -> None:
    given = replace(machines("abcd", across=Link(0.0, 1e-15)), pack=Work(0.0, 1e-8))
    step = predict(AllReduce(), parameters(), given, Profile(0.1, 0.2))
    assert step.seconds == pytest.approx(0.3 + 8 * 2**20 * 1e-8)


def test_nothing_to_average_takes_no_time() -> None:
    assert predict(AllReduce(), {}, machines("ab"), Profile(0.1, 0.2)).seconds == pytest.approx(0.3)


def _measure(longest: float) -> tuple[Machines, Stats]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    peers = connect(torch.device("cpu"), timedelta(seconds=60))
    peers.hosts = ("a", "a", "b")
    random = torch.get_rng_state()
    with peers.stats.probe():
        measured = measure(peers, [(Identity(), False), (BlockInt(8), True)], torch.device("cpu"), longest)
    assert torch.equal(torch.get_rng_state(), random), "seeds are the user's"
    peers.close()
    return measured, peers.stats


@pytest.mark.parametrize("longest", [40_000, math.inf])
def test_ranks_measure_together_and_agree(ranks: Pool, longest: float) -> None:
    measured = ranks(3, _measure, longest)
    first, stats = measured[0]
    assert all(other == first for other, _ in measured)
    assert 0 < stats.probe_seconds < 10, "about a second; this machine may be busy"
    assert first.longest == longest
    if longest == 40_000:
        assert 40_000 < stats.probe_bytes_sent < 2 * 5 * 40_000, "of two kinds of links, each a few times"
    else:
        assert stats.probe_bytes_sent > 1 << 18
    assert stats == Stats(
        probe_bytes_sent=stats.probe_bytes_sent,
        probe_bytes_received=stats.probe_bytes_received,
        probe_seconds=stats.probe_seconds,
    ), "nothing of it is training's"
    assert first.hosts == ("a", "a", "b")
    assert 1e-6 < first.across.alpha < 1
    assert 1e-12 < first.across.beta < 1e-6
    assert 0 < first.inside.alpha < 1
    assert 0 < first.post <= first.across.alpha + first.inside.alpha
    assert 0 <= first.crowding <= 1
    assert 0 <= first.transport < 1e-6
    assert 0 <= first.wake < 1
    assert 1e-11 < first.pack.per_value < 1e-7
    encode = first.codecs[BlockInt(8), True].encode
    assert 1e-11 < encode.per_value < 1e-7
    assert 1e-11 < first.codecs[BlockInt(8), True].add.per_value < 1e-7


class Interrupted(Identity):
    """Loses its core in each call."""

    def encode(self, values: Tensor, wire: Tensor, **_: Any) -> None:
        super().encode(values, wire)
        time.sleep(0.02)


def test_what_a_codec_would_take_undisturbed_leaves_out_when_it_lost_its_core() -> None:
    disturbed, undisturbed = (
        probe.codec_cost(Interrupted(), False, torch.device("cpu"), lambda work: work(), undisturbed=alone)
        for alone in (False, True)
    )
    assert disturbed.encode.seconds(1 << 20) > 0.02 > 5 * undisturbed.encode.seconds(1 << 20) > 0


def test_a_post_that_lost_its_core_counts_as_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    posts = [2e-3, 1e-5, 2e-3]

    def lap(peers: FakePeers, members: list[int], nbytes: int, device: torch.device) -> probe._Lap:
        if nbytes > 8:
            return probe._Lap(1e-5, 1.0, 0.0)
        posts.append(posts.pop(0))
        return probe._Lap(posts[-1], 2.5e-3 - posts[-1], 0.0)

    monkeypatch.setattr(probe, "_lap", lap)
    for found in on_all_ranks(2, lambda peers: probe._link(peers, [0, 1], math.inf, torch.device("cpu"))):
        assert 2 * found.post == pytest.approx(1e-5)
        assert 2 * found.post + found.alpha == pytest.approx(2.5e-3)


class Wire:
    """Instead of laps: what each would take on links of so many bytes a second, and the sizes that were asked for."""

    def __init__(self, rate: float, burst: int = 0, held_up: int = -1) -> None:
        self.rate, self.left, self.held_up = rate, float(burst), held_up
        self.sizes: list[int] = []

    def lap(self, peers: FakePeers, members: list[int], nbytes: int, device: torch.device) -> probe._Lap:
        if nbytes != 8:
            self.sizes.append(nbytes)
        passed = min(self.left, nbytes)
        self.left -= passed
        held_up = 0.3 if len(self.sizes) == self.held_up else 0.0
        return probe._Lap(1e-5, 1e-4 + (nbytes - passed) / self.rate + held_up, 0.0)


@pytest.mark.parametrize(
    ("wire", "longest", "largest", "known"),
    [
        (Wire(1.2e7), math.inf, 1 << 18, True),
        (Wire(1.2e8), math.inf, 1 << 22, True),
        (Wire(1e12), math.inf, 1 << 24, True),  # so fast that no message says more
        (Wire(1e12), 1 << 25, 1 << 24, True),
        (Wire(1e12), 3_000_000, 3_000_000, False),
        (Wire(1.2e7), 40_000, 40_000, False),
        (Wire(1.2e7), 3_000_000, 1 << 18, True),
        (Wire(1.2e7), 0, 1, False),  # nothing is trained yet
        (Wire(1.2e7, burst=600_000), math.inf, 1 << 20, True),
        (Wire(1.2e8, held_up=1), math.inf, 1 << 22, True),
    ],
)
def test_messages_grow_until_they_take_long_enough_or_are_as_long_as_an_exchange(
    monkeypatch: pytest.MonkeyPatch, wire: Wire, longest: float, largest: int, known: bool
) -> None:
    monkeypatch.setattr(probe, "_lap", wire.lap)
    [found] = on_all_ranks(1, lambda peers: probe._link(peers, [0], longest, torch.device("cpu")))
    assert max(wire.sizes) == largest
    assert sum(wire.sizes) < 6 * largest + 5 * (1 << 16)
    assert found.longest == (math.inf if known else longest)
    if largest > 1:
        assert found.beta == pytest.approx(1 / wire.rate, rel=0.01)
    assert found.alpha == pytest.approx(1e-4, rel=0.01)


def test_who_has_no_laps_computes_until_the_others_have_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    def lap(peers: FakePeers, members: list[int], *_: object) -> probe._Lap:
        time.sleep(0.02 * (peers.rank in members))
        return probe._Lap(0.0, 0.02, 0.0)

    def seconds(peers: FakePeers) -> float:
        begin = time.perf_counter()
        probe._lap_beside_computing(peers, [0], torch.device("cpu"))
        return time.perf_counter() - begin

    monkeypatch.setattr(probe, "_lap", lap)
    assert min(on_all_ranks(2, seconds)) > 0.9 * 0.02 * probe._LAPS
