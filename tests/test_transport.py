"""Bytes between ranks: whose messages never meet, what runs in the communication thread, and who may connect."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from pool import Pool
from torch import Tensor

from ringstrategy import Identity, PlanMismatchError, Ring
from ringstrategy.collectives import Summand, mean_
from ringstrategy.errors import PeerLostError
from ringstrategy.transport.backend import claim_gpu
from ringstrategy.transport.base import Handle, Word
from ringstrategy.transport.connect import connect
from ringstrategy.transport.gloo import GlooPeers
from ringstrategy.transport.groups import new_group
from ringstrategy.transport.messages import Message, Messages, difference
from ringstrategy.transport.worker import Worker

# Groups


@on_ranks(3)
def test_groups_of_the_same_ranks_one_after_another_never_meet() -> None:
    """Ranks have other numbers of groups, which is in the name that torch 2.13 gives."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    others = [dist.new_group([rank], use_local_synchronization=True) for _ in range(rank)]
    names = []
    for _ in range(3 if rank else 0):  # ranks 1 and 2
        group = new_group([2, 1], timedelta(seconds=120))
        assert (dist.get_process_group_ranks(group), dist.get_rank(group)) == ([1, 2], rank - 1)
        total = torch.tensor([2.0**rank])
        dist.all_reduce(total, group=group)
        assert total.item() == 6
        names.append(group.group_name)
        dist.destroy_process_group(group)
    assert len(set(names)) == len(names)
    dist.barrier()  # rank 0 holds the store
    del others


# Messages

ODD, NUMEL = 1, 1013  # the rank that does something else, and values


@on_ranks(3)
def test_a_message_that_nobody_expects_is_an_error_on_all_ranks() -> None:
    """A rank sends more bytes in the second exchange."""
    dist.init_process_group("gloo")
    peers = connect(torch.device("cpu"), timedelta(seconds=120))
    values = torch.arange(NUMEL, dtype=torch.float32)

    def exchange(step: int) -> Tensor:
        mine = values * (peers.rank + 1) / 3
        task = partial(mean_, Summand(mine, Identity()), peers, Ring())
        peers.finish([peers.submit(task, f"at step {step}, in bucket 0 of 1")])
        return mine

    def longer(sends: dict[int, Tensor], recvs: dict[int, Tensor]) -> Handle:
        return post({peer: torch.cat([leaving, leaving[:4]]) for peer, leaving in sends.items()}, recvs)

    assert torch.allclose(exchange(0), 2 * values)
    post = peers.post
    if peers.rank == ODD:
        peers.post = longer  # type: ignore[method-assign, assignment]
    with pytest.raises(PlanMismatchError, match=f"the ranks differ.*rank {ODD} sends "):
        exchange(1)
    assert peers.stats.bytes_sent
    peers.close()


def test_only_one_message_described_twice_is_a_difference() -> None:
    """However far either rank has come. Lengths and places of messages with other numbers differ."""
    for sent in range(1, 5):
        for expected in range(5):
            sender, receiver = Messages(), Messages()
            for messages, count in ((sender, sent), (receiver, expected)):
                for number in range(count):
                    messages.where = f"at step {number}"
                    last = messages.begin(3, 5, False, 10 + number)
                    assert difference(last, 3, sender.written()) is None
                    assert difference(last, 5, receiver.written()) is None
            awaited = Message(3, 5, False, sent - 1, 9 + sent, f"at step {sent - 1}")
            assert difference(awaited, 3, receiver.written()) is None
            wrong = difference(awaited._replace(nbytes=8), 3, receiver.written())
            assert (wrong is None) == (expected < sent)
            assert wrong is None or wrong.startswith(f"rank 3 sends 8 bytes at step {sent - 1}")


def test_messages_are_numbered_by_kind_and_forgotten_when_they_end() -> None:
    messages = Messages()
    kinds = [(0, 1, False), (0, 1, True), (1, 0, False), (0, 1, False)]
    begun = [messages.begin(*kind, 4) for kind in kinds]
    assert [message.number for message in begun] == [0, 0, 0, 1]
    messages.end(begun[0])
    assert difference(begun[0]._replace(nbytes=8), 1, messages.written()) is None, "it has landed"
    assert difference(begun[3]._replace(nbytes=8), 1, messages.written()) is not None


def _tag(message: Message, said: str | None = None, name: str = "all 1") -> int:
    """Of the message, among ranks that said this, in the set of peers of this name."""
    tags: list[int] = []
    peers: Any = SimpleNamespace(
        _group="gloo", _global_ranks=[0, 1], _said=name, _name=name, submit=lambda task, where: task()
    )
    if said is not None:
        GlooPeers.only_with(peers, Word(said, str), tagged=True, where="here")

    def operation(tensor: Tensor, peer: int, *, group: Any, tag: int) -> Any:
        tags.append(tag)
        return "under way"

    GlooPeers._start(peers, operation, torch.empty(0), 1, message)
    return tags[0]


def test_messages_of_ranks_that_differ_in_anything_never_meet() -> None:
    message = Message(0, 1, False, number=3, nbytes=8, where="at step 3")
    changes: list[dict[str, Any]] = [{"number": 4}, {"nbytes": 12}, {"where": "at step 4"}, {"control": True}]
    tags = [_tag(message), *(_tag(message._replace(**by)) for by in changes)]
    tags += [_tag(message, "one plan"), _tag(message, "another"), _tag(message, "one plan", "all 2")]
    assert len(set(tags)) == len(tags)
    assert _tag(message, "one plan") == _tag(message, "one plan")


def _looks_closely(dies: bool) -> None:
    dist.init_process_group("gloo")
    peers = connect(torch.device("cpu"), timedelta(seconds=120))
    assert isinstance(peers, GlooPeers)
    peers.look_closely("in bucket 2")
    dist.barrier()
    if dist.get_rank() == 1:
        if dies:
            os._exit(1)
        peers.close()
    if not dies:
        dist.barrier()
    for _ in range(600 if dies else 3):  # until the other's system has closed for it
        peers.look_closely("in bucket 2")
        time.sleep(0.05)


def test_a_rank_that_closed_without_a_word_is_named_beside_an_exchange(ranks: Pool) -> None:
    survivor = ranks.outcomes(2, _looks_closely, True)[0][1]
    assert survivor is not None
    assert "PeerLostError: lost rank 1" in survivor
    assert "in bucket 2" in survivor
    ranks(2, _looks_closely, False)  # rank 1 has trained to its end


@on_ranks(2)
def test_two_sets_of_peers_on_one_group_do_not_meet() -> None:
    dist.init_process_group("gloo")
    first, second = (connect(torch.device("cpu"), timedelta(seconds=120), group=dist.group.WORLD) for _ in range(2))
    other = 1 - first.rank
    arrived = {peers: torch.empty(4, dtype=torch.uint8) for peers in (first, second)}
    handles = [
        peers.swap(other, torch.full((4,), 1 if peers is first else 2, dtype=torch.uint8), other, arrived[peers])
        for peers in ((first, second) if other else (second, first))
    ]
    for handle in handles:
        handle.wait()
    assert (arrived[first].tolist(), arrived[second].tolist()) == ([1] * 4, [2] * 4)
    for peers in (first, second):
        peers.close()
    dist.barrier()


# The communication thread: tasks run in order until one fails, and nothing is kept of those that are done


def _nothing() -> None:
    return


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_task_kept_is_gone_when_it_was_waited_for(fails: bool) -> None:
    worker = Worker("test")
    for _ in range(1 if fails else 200):
        tensor = torch.zeros(3)
        memory = weakref.ref(tensor)

        def task(kept: torch.Tensor = tensor) -> None:
            if fails:
                raise ValueError(str(len(kept)))

        ticket = worker.submit(task, _nothing)
        del tensor, task
        if fails:
            with pytest.raises(ValueError, match="3"):
                ticket.wait()
        else:
            ticket.wait()
            assert memory() is None
    assert worker.close(60)


def test_nothing_runs_after_a_task_that_failed() -> None:
    worker, ran = Worker("test"), []
    error = ValueError("first")

    def fails() -> None:
        ran.append("fails")
        raise error

    before = worker.submit(lambda: ran.append("before"), _nothing)
    tickets = [worker.submit(task, _nothing) for task in (fails, lambda: ran.append("after"), fails)]
    before.wait()
    for ticket in tickets:
        with pytest.raises(ValueError, match="first") as caught:
            ticket.wait()
        assert caught.value is error
    assert worker.close(60)
    assert ran == ["before", "fails"]


def test_who_waits_looks_around_and_may_give_up_and_a_task_that_does_not_end_is_noticed() -> None:
    worker, end = Worker("test"), threading.Event()

    def look_around() -> None:
        raise TimeoutError("seen")

    ticket = worker.submit(end.wait, look_around)  # type: ignore[arg-type]
    with pytest.raises(TimeoutError, match="seen"):
        ticket.wait()
    assert not worker.close(0.01)
    end.set()
    assert worker.close(60)


def test_autograd_sees_no_task() -> None:
    worker, modes = Worker("test"), list[bool]()
    worker.submit(lambda: modes.append(torch.is_grad_enabled()), _nothing).wait()
    assert modes == [False]
    assert worker.close(60)


# Who connects: two ranks on one GPU are refused before NCCL is asked

GPU = torch.device("cuda", 0)
BOTH = "cpu:gloo,cuda:nccl"  # also what torch takes where no backend is named


def gpu_at(bus: int, uuid: str = "GPU-1") -> SimpleNamespace:
    return SimpleNamespace(uuid=uuid, pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)


def claims(*ranks: tuple[torch.device, str], config: str = BOTH, seen: Sequence[SimpleNamespace] = ()) -> None:
    """By ranks on devices of hosts. `seen`: by each rank; by default every process sees GPU i at bus i."""
    store = dist.HashStore()
    with patch.object(dist, "get_backend_config", return_value=config):
        for rank, (device, host) in enumerate(ranks):
            gpu = seen[rank] if seen else gpu_at(device.index or 0)
            for _ in range(2):  # a rank may claim its GPU again
                with patch.object(torch.cuda, "get_device_properties", return_value=gpu):
                    claim_gpu(device, rank, host, lambda key, value: store.compare_set(key, "", value).decode())


ON_GLOO = "cpu:gloo,cuda:gloo"
OTHER, CPU = torch.device("cuda", 1), torch.device("cpu")
INSTANCES = [gpu_at(0x59, "MIG-1"), gpu_at(0x59, "MIG-2")]  # of one GPU


def test_each_rank_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known by its place: CUDA_VISIBLE_DEVICES may call each rank's cuda:0, or the same one by two numbers."""
    claims((GPU, "a"), (OTHER, "a"), (GPU, "b"))
    claims((GPU, "a"), (GPU, "a"), config=ON_GLOO)
    claims((CPU, "a"), (CPU, "a"))
    claims((GPU, "a"), (GPU, "a"), seen=[gpu_at(0x1B), gpu_at(0x5E)])
    claims((GPU, "a"), (GPU, "a"), config=ON_GLOO, seen=INSTANCES)
    same = r"rank {} and rank 0 use the same GPU \({}, 0000:{}:00\).*set_device.*Instances of one GPU.*'gloo'"
    for of_ranks, seen, said in (
        ([(GPU, "a"), (OTHER, "a"), (GPU, "a")], [], same.format(2, "cuda:0", "00")),
        ([(GPU, "a"), (OTHER, "a")], [gpu_at(0x1B), gpu_at(0x1B)], same.format(1, "cuda:1", "1b")),
        ([(GPU, "a"), (GPU, "a")], INSTANCES, same.format(1, "cuda:0", "59")),
    ):
        with pytest.raises(ValueError, match=said):
            claims(*of_ranks, seen=seen)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    claims((GPU, "a"), (GPU, "a"))


def _connects(what: str) -> tuple[type[Exception], str]:
    """Two ranks use one GPU, or there is a setting on rank 1 alone."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    comms = what == "TORCH_DISTRIBUTED_USE_TORCHCOMMS" and dist.get_rank() == 1
    if what != "one gpu" and dist.get_rank() == 1:
        os.environ[what] = "1"
    with (
        patch.object(torch.cuda, "get_device_properties", return_value=gpu_at(7)),
        patch.object(dist, "get_backend_config", return_value=BOTH),
        patch.object(dist.distributed_c10d, "_use_torchcomms_enabled", lambda: comms, create=True),
        pytest.raises((ValueError, PeerLostError)) as caught,
    ):
        connect(GPU if what == "one gpu" else CPU, timedelta(seconds=30))
    return caught.type, str(caught.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("one gpu", "use the same GPU (cuda:0, 0000:07:00)"),
        ("TORCH_GLOO_LAZY_INIT", "TORCH_GLOO_LAZY_INIT"),
        ("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "TORCH_DISTRIBUTED_USE_TORCHCOMMS"),
    ],
)
def test_what_would_hang_is_refused_and_all_ranks_know_why(ranks: Pool, what: str, said: str) -> None:
    told = dict(ranks(2, _connects, what))
    assert set(told) == {ValueError, PeerLostError}
    assert all(said in message for message in told.values())
