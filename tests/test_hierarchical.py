"""Several ranks a host: exact within, through every codec between; in one process, and over gloo."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fakes import FakePeers, Toy, on_all_ranks
from pool import Pool
from test_allreduce import MINUTE, Net, backward, batch, gradients, mean_in_float64, start
from test_collectives import BOUNDS, data
from torch import Tensor

from ringstrategy import (
    AllReduce,
    BlockInt,
    Cast,
    Codec,
    Collective,
    Direct,
    Gaussian,
    Hierarchical,
    Identity,
    Native,
    Peers,
    PlanMismatchError,
    Ring,
    Rotated,
    TopK,
    TwoShot,
)
from ringstrategy.codecs import derive_seed
from ringstrategy.collectives import mean_
from ringstrategy.collectives.base import Summand
from ringstrategy.transport import connect

LAYOUTS = ["aabb", "aabbccdd", "aaab", "aabbbc", "aaaa", "abcd", "abab", "abbcabb"]  # each rank's host
SEVERAL = [hosts for hosts in LAYOUTS if len(set(hosts)) > 1]
LOSSY = [Cast("float16"), Toy(), BlockInt(8), BlockInt(4, 64, rounding="stochastic"), Rotated(Gaussian(4))]
PAIRS: list[tuple[Collective, Codec]] = [
    *((Hierarchical(), codec) for codec in [Identity(), *LOSSY]),
    (Hierarchical(Direct(2), 3), Toy()),
    (Hierarchical(Direct(), 1), TopK(64)),
]
LOSSY_PAIRS = [pair for pair in PAIRS if not pair[1].lossless]


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors too are cut into several."""
    monkeypatch.setattr("ringstrategy.collectives.base.SMALLEST_SEGMENT", 1 << 12)
    monkeypatch.setattr("ringstrategy.collectives.base.SMALLEST_HALF", 1 << 12)


def true_sum(hosts: str, numel: int) -> Tensor:
    return torch.stack([data(rank, numel).double() for rank in range(len(hosts))]).sum(0)


def summed(hosts: str, numel: int, collective: Collective, codec: Codec, seed: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Each rank's sum, and what it lost."""

    def one(peers: FakePeers) -> tuple[Tensor, Tensor]:
        values, lost = data(peers.rank, numel), torch.full((numel,), 1e9)
        collective.sum_(Summand(values, codec, lost=lost, seed=seed), peers)
        return values, lost

    return on_all_ranks(len(hosts), one, hosts)


@pytest.mark.parametrize("hosts", LAYOUTS)
@pytest.mark.parametrize(("collective", "codec"), PAIRS, ids=str)
def test_all_ranks_hold_the_same_bits_of_the_sum(hosts: str, collective: Collective, codec: Codec) -> None:
    numel = 20_001
    results = [values for values, _ in summed(hosts, numel, collective, codec)]
    exact = true_sum(hosts, numel)
    assert all(torch.equal(result, results[0]) for result in results)
    error = ((results[0] - exact).abs().max() / exact.abs().max()).item()
    assert 0 < error < (BOUNDS[Identity()] if len(set(hosts)) == 1 else 2 * BOUNDS[codec])


@pytest.mark.parametrize("numel", [0, 1, 2, 3, 4, 5, 8, 9, 63, 64, 65, 255, 257, 600])
@pytest.mark.parametrize("hosts", LAYOUTS)
def test_awkward_lengths(hosts: str, numel: int) -> None:
    for collective, codec in PAIRS:
        results = [values for values, _ in summed(hosts, numel, collective, codec)]
        assert all(torch.equal(result, results[0]) for result in results)
        largest = sum(data(rank, numel).abs().max().item() for rank in range(len(hosts))) if numel else 1.0
        assert torch.allclose(results[0].double(), true_sum(hosts, numel), atol=BOUNDS[codec] * largest, rtol=0)


@pytest.mark.parametrize("hosts", SEVERAL)
@pytest.mark.parametrize(("collective", "codec"), LOSSY_PAIRS, ids=str)
def test_what_was_delivered_and_what_was_lost_make_the_true_sum(
    hosts: str, collective: Collective, codec: Codec
) -> None:
    numel = 9003
    results = summed(hosts, numel, collective, codec)
    exact = true_sum(hosts, numel)
    assert (results[0][0] - exact).abs().max() > 1e-4
    total = results[0][0].double() + sum(lost.double() for _, lost in results)
    assert (total - exact).abs().max() < 2e-5
    # one rank a host encodes each element, and all ranks of the smallest host encode equally many
    encoders = torch.stack([lost != 0 for _, lost in results])
    for host in set(hosts):
        assert encoders[[rank for rank, other in enumerate(hosts) if other == host]].sum(0).max() == 1
    width = min(hosts.count(host) for host in hosts)
    assert encoders.any(1).sum() == width * len(set(hosts))
    assert encoders.sum(1).max() <= -(-numel // width) + 8 * codec.block


def test_on_one_host_nothing_is_encoded() -> None:
    for codec in LOSSY:
        for values, lost in summed("aaaa", 9003, Hierarchical(), codec):
            assert torch.allclose(values.double(), true_sum("aaaa", 9003), atol=1e-6)
            assert lost.eq(0).all()


def test_an_owner_adds_its_own_values_first_then_the_others_in_rank_order() -> None:
    values = [data(rank, 1008).chunk(3) for rank in range(3)]
    expected = [
        values[own][own] + values[one][own] + values[two][own] for own, one, two in [(0, 1, 2), (1, 0, 2), (2, 0, 1)]
    ]
    for result, _ in summed("aaa", 1008, Hierarchical(), Identity()):
        assert torch.equal(result, torch.cat(expected))


@pytest.mark.parametrize(("collective", "codec"), LOSSY_PAIRS, ids=str)
def test_with_one_rank_a_host_it_is_what_is_between(collective: Hierarchical, codec: Codec) -> None:
    ours = summed("abcde", 9003, collective, codec)
    for one, other in zip(ours, summed("abcde", 9003, collective.between, codec), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("hosts", ["aab", "ababa", "abcd"])
def test_feedback_repairs_every_rounding(hosts: str) -> None:
    size, numel, steps = len(hosts), 403, 80

    def one(peers: FakePeers) -> list[Tensor]:
        sums = []
        for residual in (None, torch.zeros(numel)):
            total = torch.zeros(numel)
            for step in range(steps):
                values = data(peers.rank, numel) / size
                mean_(values, peers, Hierarchical(), Toy(), residual=residual, seed=derive_seed(1, step))
                total += values
            sums.append(total / steps)
        return sums

    without, with_feedback = on_all_ranks(size, one, hosts)[0]
    exact = true_sum(hosts, numel) / size
    assert (with_feedback - exact).norm() < 0.15 * (without - exact).norm()


@pytest.mark.parametrize("hosts", ["aabb", "abbcabb", "aaaa"])
@pytest.mark.parametrize(("collective", "codec"), PAIRS, ids=str)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_non_finite_value_of_one_rank_is_non_finite_on_all_and_their_residuals_stay(
    hosts: str, collective: Collective, codec: Codec, poison: float
) -> None:
    block = max(codec.block, 16)
    numel, at = 5 * block, 2 * block + 1
    inside = torch.arange(numel) // block == 2
    width = min(hosts.count(host) for host in hosts)
    for culprit in range(len(hosts)):

        def one(peers: FakePeers, culprit: int = culprit) -> tuple[Tensor, Tensor]:
            values, residual = data(peers.rank, numel) / 3, torch.full((numel,), 0.25)
            if peers.rank == culprit:
                values[at] = poison
            mean_(values, peers, collective, codec, residual=residual, seed=0)
            return values, residual

        results = on_all_ranks(len(hosts), one, hosts)
        assert all(not values[at].isfinite() for values, _ in results)
        assert all(values[~inside].isfinite().all() for values, _ in results)
        assert all(residual.isfinite().all() for _, residual in results)
        kept = [residual[at] == 0.25 for _, residual in results]
        encoding = len(set(hosts)) if len(set(hosts)) > 1 else 0
        assert sum(kept) >= len(hosts) - encoding
        if not codec.lossless:
            assert sum(residual.ne(0)[~inside].any().item() for _, residual in results) == encoding * min(width, 4)


def between_and_within(hosts: str, numel: int, collective: Collective, codec: Codec) -> list[tuple[int, int]]:
    """Bytes that each host sends to other hosts, and that its ranks send each other."""

    def one(peers: FakePeers) -> dict[int, int]:
        collective.sum_(Summand(data(peers.rank, numel), codec), peers)
        assert peers.stats.bytes_sent == sum(peers.sent_to.values())
        return dict(peers.sent_to)

    sent = on_all_ranks(len(hosts), one, hosts)
    return [
        (
            sum(n for r, to in enumerate(sent) for peer, n in to.items() if hosts[r] == host != hosts[peer]),
            sum(n for r, to in enumerate(sent) for peer, n in to.items() if hosts[r] == host == hosts[peer]),
        )
        for host in sorted(set(hosts))
    ]


@pytest.mark.parametrize("hosts", LAYOUTS)
@pytest.mark.parametrize(("collective", "codec"), PAIRS, ids=str)
def test_a_host_sends_its_share_of_the_encoded_bytes_however_many_ranks_it_has(
    hosts: str, collective: Collective, codec: Codec
) -> None:
    numel, count = 256 * 2 * 12 * 12 * 4, len(set(hosts))  # whole blocks, however it is cut
    link = 2 * codec.nbytes(numel, torch.float32) * (count - 1) // count
    for host, (outside, inside) in zip(
        sorted(set(hosts)), between_and_within(hosts, numel, collective, codec), strict=True
    ):
        assert outside == link
        # each rank but the owner sends each value once, and is sent each sum once
        assert inside == 2 * (hosts.count(host) - 1) * 4 * numel


@pytest.mark.parametrize("hosts", SEVERAL)
@pytest.mark.parametrize(("collective", "codec"), PAIRS, ids=str)
def test_no_block_is_cut(hosts: str, collective: Collective, codec: Codec) -> None:
    numel, hops = 37 * 256 + 5, 2 * (len(set(hosts)) - 1)
    sent = sum(outside for outside, _ in between_and_within(hosts, numel, collective, codec))
    assert sent == hops * codec.nbytes(numel, torch.float32)


@pytest.mark.parametrize("segments", [1, 2, 4])
def test_pieces_travel_within_hosts_while_others_travel_between_them(segments: int) -> None:
    hosts = "aabb"

    def one(peers: FakePeers) -> list[str]:
        Hierarchical(segments=segments).sum_(Summand(data(peers.rank, 1 << 16), BlockInt(8)), peers)
        posts = peers.network.posts[peers.rank]
        order = ["".join({hosts[peer] for peer in (*post.targets, *post.sources)}) for post in posts]
        back = [post for post, host in zip(posts, order, strict=True) if host == hosts[peers.rank]][segments:]
        assert all(post.landed == len(posts) for post in back)
        return order

    for rank, order in enumerate(on_all_ranks(4, one, hosts)):
        runs = [(host == hosts[rank], len(list(posts))) for host, posts in groupby(order)]
        within = [count for inside, count in runs if inside]
        assert within == [segments] + [1] * segments  # all parts leave; then piece by piece between, and back
        assert [inside for inside, _ in runs] == [True, *[False, True] * segments]


@pytest.mark.parametrize(("kilobytes", "pieces"), [(100, 1), (2000, 1), (3100, 2), (20_000, 2), (30_000, 3)])
def test_no_piece_is_needlessly_small(monkeypatch: pytest.MonkeyPatch, kilobytes: int, pieces: int) -> None:
    monkeypatch.undo()

    def one(peers: FakePeers) -> int:
        Hierarchical(segments=4).sum_(Summand(torch.zeros(kilobytes * 256), BlockInt(8)), peers)
        return sum(peers.rank % 2 == peer % 2 for post in peers.network.posts[peers.rank] for peer in post.targets)

    assert on_all_ranks(4, one, "abab") == [2 * pieces] * 4


def test_columns_and_pieces_draw_noise_of_their_own() -> None:
    numel, block = 1 << 15, 64
    flat = torch.full((numel,), 0.3)
    flat[::block] = 1.0

    def one(peers: FakePeers) -> list[Tensor]:
        results = []
        for seed in (1, 1, 2):
            values = flat.clone()
            Hierarchical().sum_(Summand(values, BlockInt(4, block, rounding="stochastic"), seed=seed), peers)
            results.append(values)
        return results

    first, again, other = on_all_ranks(4, one, "abab")[0]
    assert torch.equal(first, again)
    pieces = first.view(8, -1)  # two columns of four pieces
    assert len({tuple(piece.tolist()) for piece in pieces}) == 8
    assert not torch.equal(first, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_identity_carries_other_dtypes(dtype: torch.dtype) -> None:
    def mine(rank: int) -> Tensor:
        return data(rank, 1011, torch.float64).to(dtype) * (1j if dtype.is_complex else 1)

    def one(peers: FakePeers) -> tuple[Tensor, Tensor]:
        values, residual = mine(peers.rank), torch.ones(1011, dtype=dtype)
        mean_(values, peers, Hierarchical(), Identity(), residual=residual)
        return values, residual

    for values, residual in on_all_ranks(6, one, "aabbbc"):
        assert torch.allclose(values, torch.stack([mine(rank) for rank in range(6)]).sum(0) + 6)
        assert residual.eq(0).all()


@dataclass(frozen=True)
class Witness(Collective):
    """Notes what peers it is given, and asks of them what only all ranks can do."""

    seen: list[Any] = field(default_factory=list)

    def sum_(
        self,
        summand: Summand,
        peers: Peers,
        *,
        flags: Tensor | None = None,
        riders: Sequence[Summand] = (),
    ) -> None:
        note = torch.tensor([peers.rank], dtype=torch.uint8)
        arrived = torch.empty_like(note)
        other = 1 - peers.rank
        peers.control.post({other: note}, {other: arrived}).wait()
        peers.submit(lambda: self.seen.append((peers.rank, peers.size, peers.hosts, arrived.item())), "here").wait()
        with pytest.raises(NotImplementedError, match=r"between=Ring\(\)"):
            peers.all_reduce_(summand.values)
        peers.close()


def test_what_is_between_sees_one_rank_of_each_host() -> None:
    def one(peers: FakePeers) -> list[Any]:
        witness = Witness()
        Hierarchical(witness, 1).sum_(Summand(data(peers.rank, 10), Identity()), peers)
        return witness.seen

    first, second = [(0, 2, ("b", "a"), 1)], [(1, 2, ("b", "a"), 0)]
    assert on_all_ranks(5, one, "baabb") == [first, second, second, first, []]


@pytest.mark.parametrize(
    ("make", "error", "cure"),
    [
        (lambda: Hierarchical(Native()), ValueError, r"between=Ring\(\)"),
        (lambda: Hierarchical(TwoShot()), ValueError, r"between=Direct\(\)"),
        (lambda: Hierarchical("ring"), TypeError, r"ringstrategy\.Ring\(\)"),
        (lambda: Hierarchical(segments=0), ValueError, "whole number"),
        (lambda: AllReduce(TopK(), Hierarchical()), ValueError, r"Direct\(\) \(here the argument `between`"),
    ],
)
def test_what_cannot_be_is_refused_with_the_cure(make: Any, error: type[Exception], cure: str) -> None:
    with pytest.raises(error, match=cure):
        make()
    assert "collective=Hierarchical(between=Direct(segments=4), segments=4)" in repr(
        AllReduce(TopK(), Hierarchical(Direct()))
    )


# The fake, which holds the schedule to what NCCL needs and memory to what a transport needs


def _out_of_order(peers: FakePeers) -> None:
    other, tensor = 1 - peers.rank, torch.zeros(4, dtype=torch.uint8)
    for handle in [peers.post({other: tensor}, {}), peers.post({}, {other: tensor.clone()})]:
        handle.wait()


def _too_early(peers: FakePeers) -> None:
    leaving = torch.zeros(4, dtype=torch.uint8)
    handle = peers.post({1 - peers.rank: leaving}, {1 - peers.rank: torch.empty_like(leaving)})
    leaving.fill_(1)
    handle.wait()


def _never_waited_for(peers: FakePeers) -> None:
    peers.post({1: torch.zeros(4, dtype=torch.uint8)}, {}) if peers.rank == 0 else peers.post({}, {})


@pytest.mark.parametrize(
    ("function", "why"),
    [(_out_of_order, "over NCCL"), (_too_early, "memory changed"), (_never_waited_for, "nobody received")],
)
def test_the_fake_refuses_what_a_transport_could_not_do(function: Any, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        on_all_ranks(2, function)


# Real processes


@contextmanager
def on_host(hosts: str) -> Iterator[None]:
    """This process lives on host `hosts[rank]`."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=MINUTE)
    with patch.object(socket, "gethostname", lambda: f"host-{hosts[dist.get_rank()]}"):
        yield


def _identities(boots: list[str]) -> list[tuple[str, ...]]:
    found = []
    with on_host("aba"), patch("ringstrategy.transport.connect._boot_id", lambda: boots[dist.get_rank()]):
        peers = connect(torch.device("cpu"), MINUTE)
        found.append(peers.hosts)
        peers.close()
    peers = connect(torch.device("cpu"), MINUTE)
    found.append(peers.hosts)
    peers.close()
    return found


@pytest.mark.slow
def test_ranks_share_a_host_if_its_name_and_its_kernel_are_one(ranks: Pool) -> None:
    for boots, same in ((["x", "x", "x"], True), (["x", "x", "y"], False), (["", "", ""], True)):
        for told, untold in ranks(3, _identities, boots):
            assert (told[0] == told[2]) == same
            assert told[1] not in (told[0], told[2])
            assert len(set(untold)) == 1
            assert untold[0].startswith(socket.gethostname())


State = dict[str, Tensor]


def _train(hosts: str, algorithm: AllReduce, stops: tuple[int, ...] = ()) -> tuple[list[State], State, int]:
    """Four steps; after each of `stops` the run ends, and one from its state goes on. Gradients and residuals."""
    module, history, state, residuals, sent = Net(), [], None, {}, 0
    for begin, end in zip((0, *stops), (*stops, 4), strict=True):
        with on_host(hosts):
            peers, stats = start(algorithm, module)
        assert len(set(peers.hosts)) == len(set(hosts))
        if state is not None:
            algorithm.load_state_dict(state[0])
            assert algorithm.load_residuals(state[1]) == []
        for step in range(begin, end):
            module.zero_grad()
            backward(algorithm, module(batch(peers.rank, step)))
            history.append({name: grad for name, grad in gradients(module).items() if grad is not None})
            algorithm.after_step(set(module.parameters()))
        residuals = {name: value.clone() for name, value in algorithm.residuals()}
        state = algorithm.state_dict(), residuals
        algorithm.close()
        peers.close()
        assert stats.bytes_sent is not None
        sent += stats.bytes_sent
    return history, residuals, sent


def equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("hosts", ["aabb", "abaab"])
def test_training_with_feedback_keeps_replicas_identical_and_resumes(ranks: Pool, hosts: str) -> None:
    algorithm = AllReduce(BlockInt(4, 64, rounding="stochastic"), Hierarchical(), error_feedback=True, bucket_mb=0.01)
    size = len(hosts)
    results = ranks(size, _train, hosts, algorithm)
    assert all(all(map(equal, history, results[0][0])) for history, _, _ in results)
    assert all(sent > 0 for _, _, sent in results)
    names = list(results[0][0][0])
    for name, *exact in zip(names, *(mean_in_float64(size, step) for step in range(4)), strict=True):
        delivered = sum(step[name].double() for step in results[0][0])
        lost = sum(residuals[name].double() for _, residuals, _ in results)
        assert torch.allclose(delivered + lost, sum(exact), atol=1e-6)
    assert all(residuals["wide.weight"].ne(0).any() for _, residuals, _ in results[:2])
    resumed = ranks(size, _train, hosts, algorithm, (1, 3))
    for (history, residuals, _), (history_before, residuals_before, _) in zip(resumed, results, strict=True):
        assert all(map(equal, history, history_before))
        assert equal(residuals, residuals_before)


def _differs() -> str:
    with on_host("aab"), pytest.raises(PlanMismatchError) as caught:
        start(AllReduce(collective=Hierarchical(Direct() if dist.get_rank() == 1 else Ring())), Net())
    return str(caught.value)


def test_a_rank_with_another_collective_between_is_named(ranks: Pool) -> None:
    for message in ranks(3, _differs):
        assert "rank 1 has" in message
        assert "between=Direct" in message


class CastWithin(Toy):
    exact = Cast(torch.bfloat16)


def test_what_travels_within_a_host_must_lie_in_memory_as_it_travels() -> None:
    with pytest.raises(ValueError, match=r"exact must send values as they lie in memory .* not as Cast"):
        AllReduce(CastWithin(), Hierarchical())
    AllReduce(Toy(), Hierarchical())
