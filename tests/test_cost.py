"""The cost model sends what collectives send, keeps the closed forms, and is fed by what all ranks measure together."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fakes import FakePeers, on_all_ranks
from pairs import all_pairs
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
from ringstrategy.cost import CodecCost, Link, Machines, Prediction, Profile, Work, exchange_cost, predict, probe

CPU = torch.device("cpu")
NOTHING = Work(0.0, 0.0)
FREE = CodecCost(NOTHING, NOTHING, NOTHING, NOTHING)
SLOW = Link(1e-3, 1e-7)
RING, EXACT, INT8 = Ring(1), Identity(), BlockInt(8)
CODECS: list[Codec] = [EXACT, INT8, Rotated(Gaussian(4)), TopK()]
MANY = 1 << 20


def machines(
    hosts: str, cost: CodecCost = FREE, across: Link = SLOW, crowding: float = 0.0, transport: float = 0.0
) -> Machines:
    costs = {(codec, feedback): cost for codec in CODECS for feedback in (False, True)}
    return Machines(tuple(hosts), across, Link(0.0, 0.0), 0.0, costs, crowding, transport)


def test_the_model_sends_the_bytes_that_the_collective_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringstrategy.collectives.base.SMALLEST_SEGMENT", 1 << 15)  # four in a chunk
    numel = 1000 * 256

    def sent(peers: FakePeers, collective: Collective, codec: Codec) -> int | None:
        mean_(torch.randn(numel), peers, collective, codec)
        return peers.stats.bytes_sent

    flat = all_pairs([Ring(), Ring(1), Direct(), BySize()], CODECS, ["ab", "abc", "abcd", "abcdefg"])
    for collective, codec, hosts in [*flat, *((Hierarchical(), codec, "aabb") for codec in CODECS[:3])]:
        if codec.hop_by_hop or isinstance(collective, Direct):
            real = on_all_ranks(len(hosts), partial(sent, collective=collective, codec=codec), hosts)
            predicted = exchange_cost(machines(hosts), collective, codec, numel)
            assert predicted.bytes_sent == real[0] > 0, (collective, codec, hosts)


def test_what_is_short_is_sooner_direct_than_over_the_ring() -> None:
    work = Work(3e-6, 1e-10)
    for size, latency, gigabits in all_pairs([2, 3, 4, 8, 16, 64], [20e-6, 200e-6, 20e-3], [0.1, 1, 25]):
        ranks = machines("a", CodecCost(work, work, work, work), Link(latency, 8e-9 / gigabits))
        apart = replace(ranks, hosts=tuple(map(str, range(size))), post=20e-6)
        shared = replace(apart, hosts=tuple(str(rank // 2) for rank in range(size)))
        for codec in CODECS[:2]:
            edge = BySize().below // codec.nbytes(256, torch.float32) * 256  # with one block more they are long
            for numel in (size * 256, edge - 256):
                direct, ring, ours = (exchange_cost(apart, way, codec, numel) for way in (Direct(), Ring(), BySize()))
                assert ours == direct
                assert direct.seconds < ring.seconds or (size == 2 and direct.seconds < 1.02 * ring.seconds)
                if size > 2:
                    assert exchange_cost(shared, BySize(), codec, numel) == exchange_cost(shared, Ring(), codec, numel)
            assert exchange_cost(apart, BySize(), codec, edge + 256) == exchange_cost(apart, Ring(), codec, edge + 256)


def test_links_alone_take_what_the_formula_says() -> None:
    for size in (2, 4, 9):
        hosts, numel, hops = machines("abcdefghi"[:size]), size * 1000, 2 * (size - 1)
        wire = hops / size * 4 * numel * SLOW.beta
        for collective in (Ring(1), Native()):
            assert exchange_cost(hosts, collective, Identity(), numel).seconds == pytest.approx(
                hops * SLOW.alpha + wire
            )
        # everyone to everyone: both phases pay the latency once, and the same bytes queue up on one link
        direct = 2 * SLOW.alpha + wire
        assert exchange_cost(hosts, Direct(1), Identity(), numel).seconds == pytest.approx(direct)
        for collective in (Direct(), BySize()):  # in two calls
            queued = exchange_cost(replace(hosts, queues=True), collective, Identity(), numel)
            assert queued.seconds == pytest.approx(direct)
    shared = replace(machines("aabb"), queues=True)
    assert exchange_cost(shared, BySize(), Identity(), MANY) == exchange_cost(shared, Ring(), Identity(), MANY)


def test_a_codec_takes_the_time_of_its_calls_and_what_computes_beside_it() -> None:
    numel, one = 4 << 16, Work(1e-3, 1e-9)
    each = one.seconds(numel // 4)

    def only(**given: Work) -> Machines:
        return machines("abcd", replace(FREE, **given), Link(0.0, 0.0))

    def cost(given: Machines, collective: Collective = RING, codec: Codec = INT8, beside: bool = False) -> Any:
        return exchange_cost(given, collective, codec, numel, beside_computing=beside)

    for field, calls in {"encode": 1, "relay": 3, "decode": 4}.items():
        found = cost(only(**{field: one}))
        assert found.seconds == found.busy == pytest.approx(calls * each), field
    # what others sent of this rank's own chunk: one by relaying, the others by adding
    assert cost(only(add=one), Direct(1)).busy == pytest.approx(2 * each)
    assert cost(only(add=one), codec=Identity()).busy == pytest.approx(3 * each), "only additions"
    crowded = replace(only(encode=one), crowding=1.0)
    free = replace(crowded, codecs=only().codecs)
    for given in (crowded, replace(free, post=1e-3), replace(free, transport=1e-9)):
        alone, beside = cost(given), cost(given, beside=True)
        assert beside.seconds == pytest.approx(2 * alone.seconds)
        assert beside.busy == pytest.approx(alone.busy) == alone.seconds > 0
    late = replace(machines("abcd", across=Link(1e-3, 0.0)), wake=2e-3)  # each wait wakes its thread
    assert [cost(late, beside=on).seconds for on in (False, True)] == pytest.approx([6e-3, 18e-3])


def test_segments_hide_a_codec_behind_the_wire() -> None:
    codec_as_slow_as_wire = replace(FREE, relay=Work(0.0, 1e-7), encode=Work(0.0, 1e-7))
    given = machines("abcd", codec_as_slow_as_wire, Link(0.0, 1e-7))
    one, four = (exchange_cost(given, Ring(segments), BlockInt(8), 1 << 24) for segments in (1, 4))
    assert 0.5 < four.seconds / one.seconds < 0.75
    assert four.seconds > four.busy


@pytest.mark.parametrize(
    ("hosts", "collective", "share"),
    [
        ("abcd", Native(), 2 * 3 / 4),
        ("abcd", Ring(1), 2 * 3 / 4),
        ("abcd", Direct(1), 2 * 3 / 4),
        ("aabb", Native(), 2 * 3 / 4),  # the ring leaves a host once
        ("aabb", Ring(1), 2 * 3 / 4),
        ("aabb", Hierarchical(), 2 * 1 / 2),  # as two hosts with one rank each
        ("aabb", Direct(1), 2 * (2 * 2 / 4)),  # two ranks, each two quarters in both phases
        ("aaaa", Ring(1), 0),
        ("aaaa", Native(), 0),
    ],
    ids=str,
)
def test_ranks_of_one_host_share_its_link(hosts: str, collective: Collective, share: float) -> None:
    cost = exchange_cost(machines(hosts, across=Link(0.0, 1e-7)), collective, Identity(), MANY)
    assert cost.bytes_across == pytest.approx(share * 4 * MANY, rel=0.01)
    assert cost.seconds == pytest.approx(share * 4 * MANY * 1e-7, rel=0.02)


def test_carrying_takes_the_core_only_where_it_does_not_wait() -> None:
    nbytes = 1.5 * 4 * MANY
    for collective in (Ring(1), Direct(1), Native()):
        slow_link, slow_core = (
            exchange_cost(machines("abcd", across=Link(0.0, beta), transport=1e-8), collective, Identity(), MANY)
            for beta in (1e-7, 1e-9)
        )
        assert slow_link.seconds == pytest.approx(1e-7 * nbytes)
        assert slow_core.seconds == pytest.approx(2 * 1e-8 * nbytes), "each byte is sent by one and received by another"
        assert slow_link.busy == slow_core.busy == pytest.approx(2 * 1e-8 * nbytes)


# A step of eight buckets of a million values


def step(given: Machines, profile: Profile, codec: Codec = EXACT, **arguments: Any) -> Prediction:
    parameters = {str(i): Parameter(torch.empty(MANY, device="meta")) for i in range(8)}
    return predict(AllReduce(codec, **{"bucket_mb": 1, **arguments}), parameters, given, profile)


def test_a_step_hides_what_fits_behind_the_backward() -> None:
    given = machines("abcd", across=Link(0.0, 1e-9))
    wire = 1.5 * 32 * MANY * 1e-9
    for backward in (0.01, 1.0):
        found = step(given, Profile(0.3, backward))
        last = wire / 8  # of the last bucket, which nothing can hide
        assert found.communication == pytest.approx(wire)
        assert found.seconds == pytest.approx(0.3 + max(backward + last, wire + backward / 8))
        assert found.bytes_sent == 1.5 * 32 * MANY
    assert step(given, Profile(0.0, 1.0), bucket_mb=64).seconds > 1.0 + 0.8 * wire, "next to nothing is hidden"
    late = ((0.0, 0.0), (0.1, 0.99), (1.0, 1.0))
    even, at_the_end = (step(given, Profile(0.0, 1.0, ready), bucket_mb=25) for ready in (None, late))
    assert at_the_end.seconds - 1.0 > 0.8 * at_the_end.communication > 3 * (even.seconds - 1.0) > 0
    packed = step(replace(given, pack=Work(0.0, 1e-8), across=Link(0.0, 1e-15)), Profile(0.1, 0.2))
    assert packed.seconds == pytest.approx(0.3 + 8 * MANY * 1e-8), "packing lengthens the backward"
    assert predict(AllReduce(), {}, given, Profile(0.1, 0.2)).seconds == pytest.approx(0.3)


def test_where_cores_are_shared_codecs_slow_the_backward_down() -> None:
    cost = replace(FREE, encode=Work(0.0, 1e-8), relay=Work(0.0, 1e-8), decode=Work(0.0, 1e-8))
    alone, shared = (
        step(machines("abcd", cost, Link(0.0, 1e-12), crowding), Profile(0.0, 2.0), BlockInt(8)).seconds
        for crowding in (0.0, 1.0)
    )
    busy = 2 * 8 * MANY * 1e-8  # of all chunks one encode or relay and one decode
    assert alone == pytest.approx(2.0 + busy / 8, rel=0.01)
    assert shared == pytest.approx(2.0 + busy, rel=0.05)


# What is measured


class Interrupted(Identity):
    """Loses its core in each call."""

    def encode(self, values: Tensor, wire: Tensor, **_: Any) -> None:
        super().encode(values, wire)
        time.sleep(0.02)


def test_what_a_codec_takes_leaves_out_when_it_lost_its_core() -> None:
    assert 0.02 > probe.codec_cost(Interrupted(), False, CPU).encode.seconds(MANY) > 0
    assert probe.pack_seconds(CPU) > 0
