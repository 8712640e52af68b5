"""What NCCL is asked to do, by which thread and on which stream: with stand-ins for NCCL and for CUDA, on the CPU."""

from __future__ import annotations

import gc
import queue
import threading
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fakes import LIMIT, FakePeers, Network, of_each_rank, on_all_ranks
from test_gossip import trained_until
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ringstrategy import AllReduce, BlockInt, Choco, Gossip, Identity, LocalSGD, Nesterov, Peers, PowerSGD
from ringstrategy.algorithms.parameters.periodic import Periodic
from ringstrategy.codecs import Gaussian, Rotated
from ringstrategy.collectives import Direct
from ringstrategy.errors import PeerLostError
from ringstrategy.topologies import OnePeerExponential
from ringstrategy.transport import held, nccl
from ringstrategy.transport.base import Handle, Waitable
from ringstrategy.transport.nccl import NcclPeers

# Stand-ins: a stream remembers what it waited for, a group of NCCL's are fake peers


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.timed, self.on = enable_timing, None

    def record(self, stream: Stream | None = None) -> None:
        self.on = current() if stream is None else stream

    done = True  # all events, as far as anybody asks

    def query(self) -> bool:
        return Event.done

    def elapsed_time(self, end: Event) -> float:
        assert self.timed
        assert self.on is end.on is not None
        return 2000.0


class Stream:
    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.device, self.priority = device, priority
        self.waited: list[Event] = []

    def record_event(self) -> Event:
        event = Event()
        event.on = self
        return event

    def wait_event(self, event: Event) -> None:
        assert event.on is not None, "an event that was not recorded holds up nothing"
        self.waited.append(event)

    def synchronize(self) -> None:
        return


_of_thread = threading.local()


def current(device: object = None) -> Any:
    if not hasattr(_of_thread, "streams"):
        _of_thread.streams, _of_thread.devices = [Stream()], []
    return _of_thread.streams[-1]


@contextmanager
def _on_stream(stream: Stream) -> Iterator[None]:
    current()
    assert _of_thread.devices, "the device is each thread's own, and was not set"
    _of_thread.streams.append(stream)
    yield
    _of_thread.streams.pop()


@contextmanager
def _on_device(device: object) -> Iterator[None]:
    current()
    _of_thread.devices.append(device)
    yield
    _of_thread.devices.pop()


class Calls:
    """Of NCCL: by which threads, and on which streams."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.streams: list[Stream] = []
        self.before: Callable[[], object] = lambda: None

    def note(self) -> None:
        self.threads.append(threading.current_thread().name)
        self.streams.append(current())
        self.before()

    def all_to_all(self, outputs: list[Tensor], inputs: list[Tensor], group: FakePeers, async_op: bool) -> Handle:
        self.note()
        assert all(tensor.dtype == torch.uint8 and tensor.dim() == 1 for tensor in outputs + inputs)
        assert inputs[group.rank].numel() == outputs[group.rank].numel() == 0
        return group.all_to_all(inputs, outputs)

    def batch_isend_irecv(self, operations: list[SimpleNamespace]) -> list[Handle]:
        self.note()
        group = operations[0].group
        sends, recvs = ({o.peer: o.tensor for o in operations if o.op is op} for op in (dist.isend, dist.irecv))
        return [group.post(sends, recvs)]


@pytest.fixture
def calls() -> Iterator[Calls]:
    calls = Calls()
    with (
        mock.patch.multiple(
            torch.cuda, Event=Event, Stream=Stream, current_stream=current, stream=_on_stream, device=_on_device
        ),
        mock.patch.multiple(
            dist,
            all_to_all=calls.all_to_all,
            batch_isend_irecv=calls.batch_isend_irecv,
            P2POp=namedtuple("P2POp", "op tensor peer group"),
            get_process_group_ranks=lambda group: list(range(group.size)),
            destroy_process_group=lambda group: None,
            is_initialized=lambda: True,
        ),
    ):
        yield calls


class Control(FakePeers):
    def look_around(self, where: str) -> None:
        return

    def look_closely(self, where: str) -> None:
        return

    def abort(self, cause: str | None) -> None:
        return


def on_all_gpus(size: int, function: Callable[[NcclPeers], Any], hosts: str | None = None) -> list[Any]:
    """Run `function` on every rank, over NCCL's stand-in."""
    beside = Network(size, hosts)

    def one(group: FakePeers) -> Any:
        peers = nccl_peers(group, Control(beside, group.rank))
        try:
            return function(peers)
        finally:
            peers.close()

    return on_all_ranks(size, one)


def nccl_peers(group: FakePeers, control: Control, timeout: timedelta = timedelta(minutes=1)) -> NcclPeers:
    return NcclPeers(group, control, torch.device("cpu"), timeout)  # type: ignore[arg-type]


def alone(size: int = 1, **how: Any) -> NcclPeers:
    """Rank 0, whose peers say nothing."""
    return nccl_peers(FakePeers(Network(size), 0), Control(Network(size), 0), **how)


THREAD = "ringstrategy-communication"


def test_the_thread_of_the_hooks_calls_nothing_of_nccl(calls: Calls) -> None:
    size = 3
    backward_has_ended, hooks_are_through = threading.Barrier(size), threading.Event()

    def one(peers: NcclPeers) -> list[Tensor]:
        parameters = {f"p{place}": nn.Parameter(torch.zeros(300)) for place in range(4)}
        algorithm = AllReduce(Identity(), bucket_mb=0.001)
        algorithm.setup(parameters, peers)
        backward_has_ended.wait(LIMIT)
        calls.before = lambda: hooks_are_through.wait(LIMIT) or pytest.fail("backward waits for NCCL")
        loss = torch.stack([(peers.rank + 1.0) * each.sum() for each in parameters.values()]).sum()
        algorithm.before_backward(loss)
        loss.backward()
        if backward_has_ended.wait(LIMIT) == 0:
            hooks_are_through.set()
        algorithm.after_backward()
        assert len(algorithm.launches) > 1
        algorithm.close()
        return [each.grad for each in parameters.values() if each.grad is not None]

    for grads in on_all_gpus(size, one):
        assert all(torch.allclose(grad, torch.full((300,), 2.0)) for grad in grads)
    assert set(calls.threads) == {THREAD}
    assert {stream.priority for stream in calls.streams} == {-1}


@of_each_rank(1, on_all_gpus)
def test_a_task_waits_for_the_stream_that_submits_it_and_the_one_that_waits_for_it(
    peers: NcclPeers, calls: Calls
) -> None:
    on, training = queue.SimpleQueue[Any](), current()
    before = len(training.waited)
    begin = threading.Event()
    ticket = peers.submit(lambda: (begin.wait(LIMIT), on.put(current())), "now")  # type: ignore[arg-type]
    assert on.empty()
    begin.set()
    peers.finish([ticket])
    side = on.get(timeout=LIMIT)
    assert side is not training
    assert [event.on for event in side.waited] == [training]
    assert [event.on for event in training.waited[before:]] == [side]


def test_closing_ends_the_thread_and_drains_the_stream_once(calls: Calls) -> None:
    done: list[int] = []
    peers = alone()
    threads = [thread for thread in threading.enumerate() if thread.name == THREAD]
    peers.submit(lambda: done.append(1), "at the end")
    peers.close()
    peers.close()
    assert done == [1]
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(RuntimeError, match="closed"):
        peers.submit(lambda: None, "later")


def test_a_task_keeps_its_tensors_until_the_device_has_done_it(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "done", False)
    peers = alone()

    def submit() -> tuple[Waitable, weakref.ref[Tensor]]:
        values = torch.zeros(3)
        return peers.submit(partial(values.add_, 1), "now"), weakref.ref(values)

    ticket, first = submit()
    ticket.wait()
    ticket, second = submit()
    ticket.wait()
    assert first() is not None
    assert second() is not None
    Event.done = True
    submit()[0].wait()
    assert first() is None
    assert second() is None
    peers.close()
    assert not peers._held._tasks


def test_what_the_device_never_does_is_kept_for_good(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "done", False)
    monkeypatch.setattr(nccl, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(held, "_never_done", never_done := [])
    peers = alone()
    values = torch.zeros(3)
    alive = weakref.ref(values)

    def fail(values: Tensor = values) -> None:
        values.add_(1)
        raise ValueError("after something was queued")

    with pytest.raises(ValueError, match="queued"):
        peers.submit(fail, "now").wait()
    with pytest.raises(RuntimeError, match=r"under way did not end within 0 s"):
        peers.close()
    del values, fail, peers
    gc.collect()
    assert alive() is not None
    never_done.clear()
    gc.collect()
    assert alive() is None


def test_a_thread_that_outlives_its_peers_sends_nothing_to_the_default_group(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "CLOSE_SECONDS", 0.1)
    peers = alone(2)
    go, message = threading.Event(), torch.zeros(3, dtype=torch.uint8)

    def late() -> None:
        go.wait(LIMIT)
        peers.post({1: message}, {})

    ticket = peers.submit(late, "late")
    with pytest.raises(RuntimeError, match="did not end"):
        peers.close()
    go.set()
    with pytest.raises(RuntimeError, match="these peers are closed"):
        ticket.wait()
    assert not calls.threads


def test_an_exchange_that_does_not_end_is_broken_off_when_a_rank_is_lost(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host would wait for the device without end, in a call that is not ours."""
    monkeypatch.setattr(nccl, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(Event, "done", False)
    broken_off, looks, order, default = threading.Event(), [], [], mock.Mock()

    def end() -> None:
        order.append("ours")
        Event.done = True

    def end_default() -> None:  # NCCL would wait in `destroy_process_group`
        order.append("the default group's")
        broken_off.set()

    def look_closely(control: Control, where: str) -> None:
        looks.append(where)
        if len(looks) == 3:
            raise PeerLostError(1, "there", where, "gone")

    monkeypatch.setattr(Control, "look_closely", look_closely)
    monkeypatch.setattr(FakePeers, "_get_backend", lambda *_: SimpleNamespace(abort=end), raising=False)
    default._get_backend.return_value.abort = end_default
    monkeypatch.setattr(nccl, "_get_default_group", lambda: default)
    monkeypatch.setattr(nccl, "backend_of", lambda device: "nccl")
    peers = alone()
    ticket = peers.submit(lambda: None, "bucket 2")
    ticket.wait()
    assert broken_off.wait(LIMIT)
    for call in (lambda: peers.submit(lambda: None, "later"), lambda: peers.finish([ticket])):
        with pytest.raises(PeerLostError, match="bucket 2"):
            call()
    peers.close()
    assert looks == ["bucket 2"] * 3
    assert order == ["ours", "the default group's"]


def test_a_loss_that_nobody_was_told_of_is_raised_at_the_end(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = alone()
    peers._lost = PeerLostError(1, "there", "bucket 2", "gone")
    with pytest.raises(PeerLostError, match="bucket 2"):
        peers.close()
    peers.close()


def test_a_rank_that_stays_silent_beyond_the_timeout_is_lost(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(Event, "done", False)
    said = queue.SimpleQueue[str]()

    def explain(control: Control, error: RuntimeError, where: str) -> RuntimeError:
        said.put(f"{where}: {error}")
        Event.done = True
        return PeerLostError(1, "there", where, str(error))

    monkeypatch.setattr(Control, "explain", explain, raising=False)
    monkeypatch.setattr(FakePeers, "_get_backend", lambda *_: mock.Mock(), raising=False)
    monkeypatch.setattr(nccl, "backend_of", lambda device: "gloo")
    peers = alone(timeout=timedelta(milliseconds=50))
    peers.submit(lambda: None, "bucket 2")
    assert "bucket 2: timed out" in said.get(timeout=LIMIT)
    with pytest.raises(PeerLostError, match="bucket 2"):
        peers.close()


# Warm-up

MIXED = [
    Gossip(unequal_data=True, overlap=False),
    Choco(codec=Rotated(Gaussian(4)), interval=2, overlap=1),
    LocalSGD(2, Nesterov(), Rotated(Gaussian(4)), Direct(), fragments=2, overlap=1),
]


@pytest.mark.parametrize("algorithm", MIXED, ids=str)
def test_a_warm_up_changes_no_bit_of_gossip_and_counts_apart(calls: Calls, algorithm: Periodic) -> None:
    def trained(peers: Peers) -> Any:
        first = trained_until(peers, algorithm, 5)
        return first, trained_until(peers, algorithm, 10, 5, first), peers.stats.bytes_sent, peers.stats

    plain, warm = on_all_ranks(3, trained), on_all_gpus(3, trained)
    for (*expected, sent, _), (*found, also_sent, stats) in zip(plain, warm, strict=True):
        for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
        assert stats.probe_bytes_sent > 0
        assert sent == also_sent > 0


@of_each_rank(6, on_all_gpus)
def test_whoever_is_met_later_is_connected_at_setup(peers: NcclPeers, calls: Calls) -> None:
    """Neighbours of gossip; of sparse gradients all pairs."""
    posts = peers._group.network.posts[peers.rank]  # type: ignore[union-attr]
    gossip, parameter = Gossip(OnePeerExponential(), overlap=False), nn.Parameter(torch.randn(70))
    gossip.setup({"weight": parameter}, peers)
    gossip.bind({parameter})
    connected, before = {target for post in posts for target in post.targets}, len(posts)
    for _ in range(7):
        gossip.after_step({parameter})
    met = {target for post in posts[before:] for target in post.targets}
    assert len(met) == 3
    assert met <= connected
    gossip.close()
    before, averaging = len(posts), AllReduce()
    averaging.setup({"weight": nn.Embedding(9, 4).weight}, peers, sparse=frozenset({"weight"}))
    assert {target for post in posts[before:] for target in post.targets} == set(range(6)) - {peers.rank}
    averaging.close()


@pytest.mark.parametrize("make", [lambda: AllReduce(BlockInt(8), error_feedback=True), lambda: PowerSGD(2)])
def test_a_later_parameter_is_warmed_up_before_its_first_backward(
    calls: Calls, make: Callable[[], AllReduce | PowerSGD]
) -> None:
    """And has the gradients that it would have had without, with the residual that a checkpoint has for it."""

    def one(peers: Peers) -> Any:
        algorithm, rank = make(), peers.rank
        at_first, later = nn.Parameter(torch.zeros(40, 30)), nn.Parameter(torch.zeros(50, 40))
        later.requires_grad_(False)
        algorithm.setup({"first": at_first, "later": later}, peers)
        algorithm.load_residuals({"later": torch.full((50, 40), 0.25 * (rank + 1))})
        later.requires_grad_()
        probed, grads = [peers.stats.probe_bytes_sent], []
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * rank + step)
            loss = torch.stack([(p * torch.randn(p.shape, generator=generator)).sum() for p in (later, at_first)]).sum()
            at_first.grad = later.grad = None
            algorithm.before_backward(loss)
            probed.append(peers.stats.probe_bytes_sent)
            loss.backward()
            algorithm.after_backward()
            grads += [at_first.grad.clone(), later.grad.clone()]  # type: ignore[union-attr]
            algorithm.after_step({at_first, later})
        residuals = {name: value.clone() for name, value in algorithm.residuals()}
        algorithm.close()
        return grads, residuals, probed

    for expected, found in zip(on_all_ranks(3, one), on_all_gpus(3, one), strict=True):
        assert all(map(torch.equal, expected[0], found[0]))
        torch.testing.assert_close(expected[1], found[1], rtol=0, atol=0)
        assert expected[2] == [0, 0, 0]
        setup, first, second = found[2]
        assert 0 < setup < first == second
