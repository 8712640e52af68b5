"""What a step costs on a GPU, counted without one: launches, calls of NCCL, and that nothing waits for the device.

Tensors are on torch's meta device, so they have shapes and no memory. Triton's launcher, torch.distributed and the
streams and events of torch.cuda are replaced by stand-ins that count. So the counts are those of the code as it is.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.bucket import LonelyPeers, no_wire, our_function
from benchmarks.codecs import CODECS
from benchmarks.contenders import named
from ringstrategy import AllReduce, BlockInt, Choco, Direct, Gossip, LocalSGD, Native, PowerSGD, Ring, SmallExact
from ringstrategy.algorithms.base import Algorithm
from ringstrategy.algorithms.parameters.exchange import Exchange
from ringstrategy.algorithms.parameters.group import row_of
from ringstrategy.codecs import Cast, Codec, Gaussian, Identity, Rotated, Sign
from ringstrategy.kernels import operations
from ringstrategy.names import STRATEGIES
from ringstrategy.topologies import Complete
from ringstrategy.transport.base import Waitable
from ringstrategy.transport.worker import Task

pytest.importorskip("triton", minversion="3.6", reason="before 3.6 gradients are packed, by launches of their own")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches nothing", allow_module_level=True)

from ringstrategy.kernels.triton import tables
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

RANKS = 8
DEVICE = torch.device("meta")
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "detach"}  # no memory
ASKING: dict[str, Callable[..., Any]] = {  # what they return depends on values, of which there are none
    "_local_scalar_dense": lambda _: False,  # also 0
    "equal": lambda *_: False,
    "nonzero": lambda tensor: tensor.new_empty((0, tensor.dim()), dtype=torch.int64),
}


@cache
def _binder(kernel: Any) -> Any:
    """What Triton's launcher asks which of a kernel's binaries fits the arguments."""
    return create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))


def _on_device(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.device == DEVICE]


class Meter:
    """Counts, of our kernels, of torch's operations, of NCCL's calls and of waits.

    Attributes:
        compiled: what Triton would have compiled for the kernels that were launched: types, alignments, constants.
    """

    def __init__(self) -> None:
        self.compiled: set[tuple[str, str]] = set()
        self._threads: set[int] = set()
        self.clear()

    def clear(self) -> None:
        self.kernels = self.operations = self.calls = 0
        self.waits: list[str] = []

    @contextmanager
    def within(self) -> Iterator[None]:
        """Count what torch does in this thread."""
        thread = threading.get_ident()
        if thread in self._threads:
            yield
            return
        self._threads.add(thread)
        with Operations(self):
            yield
        self._threads.remove(thread)

    def wait(self, *_: object) -> None:
        self.waits.append(our_function())

    def call(self) -> None:
        self.calls += 1

    def kernel(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """In place of Triton's launcher."""
        if not warmup:
            self.kernels += 1
            _, specialization, options = _binder(kernel)(*args, **kwargs)
            self.compiled.add((kernel.__name__, f"{specialization} {options}"))


class Operations(TorchDispatchMode):
    """Hands a meter what torch does on the device."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        inputs = _on_device([args, kwargs])
        if name in ASKING and inputs:
            self._meter.wait()
            return ASKING[name](*args)
        if name == "copy_" or (name == "_to_copy" and "device" in kwargs):
            source, target = (args[0], kwargs["device"]) if name == "_to_copy" else (args[1], args[0].device)
            if source.device != target:
                if not (kwargs.get("non_blocking") or args[2:] == (True,)):
                    self._meter.wait()
                self._meter.operations += 1
                if target != DEVICE:  # the meta device has no values to give
                    return args[0] if name == "copy_" else torch.zeros(source.shape, dtype=source.dtype, device=target)
        result = func(*args, **kwargs)
        if not (func.is_view or name in FREE) and (inputs or _on_device(result)):
            self._meter.operations += 1
        return result


class Queue:
    """A stream or an event, on which nothing takes time."""

    device, cuda_stream = DEVICE, 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answers = {"query": True, "elapsed_time": 0.0, "record_event": self}
        return lambda *args, **kwargs: answers.get(name)


@contextmanager
def stand_ins(meter: Meter) -> Iterator[None]:
    """For what only a machine with a GPU has."""
    make = torch.tensor

    def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        if device is not None and torch.device(device) == DEVICE:
            meter.wait()  # torch copies, and waits for that
        return make(data, device=device, **kwargs)

    # Memory that was dropped is not given out again: else it would be by chance whether a gradient lies where one lay a
    # step ago, and needs no new table of addresses. So it never does.
    seen: dict[int, StorageWeakRef] = {}
    tables._table.cache_clear()  # which holds tables of an earlier measurement

    def address(tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        place = int(storage._cdata)
        if place not in seen:
            seen[place] = StorageWeakRef(storage)
        return place // 16 * 16 + int(tensor.storage_offset()) * tensor.element_size()

    with (
        mock.patch.object(Exchange, "common", lambda _, tensors, *__: row_of(tensors)),  # it compares once, at setup
        mock.patch.object(operations, "kind_of", return_value="cuda"),  # the meta device too
        mock.patch.object(JITFunction, "run", lambda kernel, *args, **how: meter.kernel(kernel, *args, **how)),
        no_wire(RANKS, meter.call),
        mock.patch.multiple(
            torch.cuda, Stream=Queue, Event=Queue, current_stream=Queue, stream=nullcontext, device=nullcontext
        ),
        mock.patch.object(torch.cuda, "synchronize", meter.wait),
        mock.patch.object(Queue, "synchronize", meter.wait, create=True),
        mock.patch.object(torch, "tensor", tensor),
        mock.patch.object(Tensor, "data_ptr", address),
    ):
        yield


class MeteredPeers(LonelyPeers):
    """What torch does in another thread counts too."""

    def __init__(self, meter: Meter) -> None:
        super().__init__(DEVICE, RANKS)
        self._meter = meter

    def submit(self, task: Task, where: str) -> Waitable:
        def counted() -> None:
            with self._meter.within():
                task()

        return super().submit(counted, where)


class Training:
    """An algorithm as one of 8 ranks, with tensors of these shapes; in `stand_ins`."""

    def __init__(self, algorithm: Algorithm, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        self.algorithm, self.dtype, self.meter = algorithm, dtype, Meter()
        self.peers: MeteredPeers
        self.parameters = {f"p{place}": self.made(shape) for place, shape in enumerate(shapes)}

    def made(self, shape: tuple[int, ...]) -> Parameter:
        return Parameter(torch.empty(shape, dtype=self.dtype, device=DEVICE))

    @contextmanager
    def running(self) -> Iterator[Meter]:
        frozen = {"frozen": Parameter(torch.empty(99, dtype=self.dtype, device=DEVICE), requires_grad=False)}
        with stand_ins(self.meter), self.meter.within():
            self.peers = MeteredPeers(self.meter)
            self.algorithm.setup({**self.parameters, **frozen}, self.peers)
            self.bind()
            yield self.meter
            self.peers.close()

    def bind(self) -> None:
        if self.algorithm.decentralized:
            self.algorithm.bind(set(self.parameters.values()))

    def step(self, scale: Tensor | None = None, but: str = "") -> None:
        """Hooks, backward, exchanges, residuals; one parameter is not stepped, if gradients are averaged."""
        averages_gradients = not self.algorithm.decentralized
        stepped = {each for name, each in self.parameters.items() if name != but or not averages_gradients}
        decided: Any = True if scale is None else torch.ones((), dtype=torch.bool, device=DEVICE)
        for parameter in self.parameters.values():
            parameter.grad = None
        if not self.algorithm.decentralized:
            loss = torch.stack([parameter.float().sum() for parameter in self.parameters.values()]).sum()
            self.algorithm.before_backward(loss, scale=scale)
            loss.backward()
            self.algorithm.after_backward()
            self.algorithm.before_step(stepped)
        self.algorithm.after_step(stepped, decided)
        if self.algorithm.decentralized:
            self.algorithm.settle()  # until the other thread has queued all that is counted


NOT_HERE = (
    "ring_auto",
    "central_storage",
    "parameter_server",
    "parameter_server_async",
)  # no kernels


def waiting() -> dict[str, Algorithm]:
    """All names, and each codec, by turns over `Direct` and over `Ring`."""
    found = {name: make() for name, make in STRATEGIES.items() if name not in NOT_HERE}
    for name, algorithm in found.items():
        if isinstance(algorithm, LocalSGD):
            found[name] = named(name, interval=1, fragments=1)
    for place, codec in enumerate([*CODECS, Rotated(Gaussian(4)), Rotated(BlockInt(8))]):
        collective = (Direct(), Ring())[place % 2 if codec.hop_by_hop else 0]
        found[f"{codec}, {collective}"] = AllReduce(codec, collective, error_feedback=place % 4 < 2)
    return found | {"native": AllReduce(Cast("bf16"), Native()), "exact": AllReduce(Identity(), Native())}


@pytest.mark.parametrize("scaled", [False, True])
def test_no_step_waits_for_the_device(scaled: bool) -> None:
    """With a loss scaler, which knows only on the device whether it skips the step; some parameters are not stepped."""
    scale = torch.full((), 256.0, device=DEVICE) if scaled else None
    for place, (name, algorithm) in enumerate(waiting().items()):
        dtype = torch.bfloat16 if place % 3 == 0 else torch.float32
        training = Training(algorithm, (1280, 1024), (1024,), (64, 96), dtype=dtype)
        with training.running() as meter:
            for step in range(3):  # what is made once is made in the first, and gossip's arrives in the second
                meter.clear()
                training.step(scale, but="p1" if step == 1 else "")
        assert meter.calls > 0, name
        assert meter.waits == [], name


# How many launches and calls


def test_what_is_known_is_what_is_counted() -> None:
    """By hand, of one bucket."""
    for algorithm, dtype, kernels, calls in (
        # gradients to wires, 7 wires of a part to its sum, all wires to means; 16 bits are copied back
        (AllReduce(BlockInt(8), Direct()), torch.float32, 3, 2),
        (AllReduce(BlockInt(8), Direct()), torch.bfloat16, 4, 2),
        (AllReduce(BlockInt(8), Direct(), error_feedback=True), torch.float32, 7, 2),
        # 7 hops that add and 7 that pass on, each of two pieces, which are encoded and decoded once on their way
        (AllReduce(BlockInt(8), Ring()), torch.float32, 2 * RANKS * 2, 2 * (RANKS - 1) * 2),
    ):
        training = Training(algorithm, (1280, 5 * 1024), dtype=dtype)
        with training.running() as meter:
            training.step()
            meter.clear()
            training.step()
        assert (meter.kernels, meter.calls) == (kernels, calls), algorithm


@pytest.mark.parametrize("name", ["gossip", "gossip_int8", "push_sum"])
def test_a_mixing_costs_as_many_launches_for_many_parameters_as_for_few(name: str) -> None:
    counts = []
    for parts in (2, 40):
        training = Training(STRATEGIES[name](), *[(4000 // parts, 64)] * parts)
        with training.running() as meter:
            for _ in range(3):  # the corrections of the first are applied with the second
                meter.clear()
                training.step()
        counts.append((meter.operations, meter.kernels))
    assert counts[0] == counts[1]
    assert 3 < counts[0][0] < 25


# What is compiled, and kept


COMPILED: dict[str, Callable[[], Algorithm]] = {
    **{name: make for name, make in STRATEGIES.items() if name not in (*NOT_HERE, "ring_topk")},
    "bfloat16 residuals": lambda: AllReduce(BlockInt(4), Ring(), residual_dtype="bf16", error_feedback=True),
    "small buckets that ride": lambda: AllReduce(SmallExact(BlockInt(8), small=BlockInt(4)), Direct(), bucket_mb=0.4),
    "powersgd of int8": lambda: PowerSGD(2, BlockInt(8), bucket_mb=0.2),
    "choco over a complete graph": lambda: Choco(
        codec=Rotated(Gaussian(4)), topology=Complete(), interval=2, overlap=False
    ),
    "choco of short blocks": lambda: Choco(codec=BlockInt(8, block=24)),
    "gossip in 16 bits": lambda: Gossip(codec=Cast("bf16"), unequal_data=True),
}
WITHOUT_KERNELS = {"ring_fp16", "ring_bf16"}


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, (torch.float32, torch.bfloat16)[place % 2]) for place, name in enumerate(COMPILED)]
)
def test_no_step_launches_a_kernel_that_is_not_compiled_at_setup(name: str, dtype: torch.dtype) -> None:
    training = Training(COMPILED[name](), (77, 40), (300, 201), (201,), (1_000_003,), (64, 96), dtype=dtype)
    with training.running() as meter:
        for new in ({}, {"later": training.made((123, 31))}):
            training.parameters |= new
            if new:
                training.algorithm.adopt(training.parameters)
                training.bind()
            compiled = set(meter.compiled)
            for step in range(5):  # gradients are read where they lie, or packed first
                training.peers.backlog = lambda step=step: step  # type: ignore[method-assign, misc]
                training.step()
            assert meter.compiled == compiled
    assert bool(meter.compiled) == (name not in WITHOUT_KERNELS)


def test_a_block_too_large_for_the_kernels_is_refused_when_buckets_are_made() -> None:
    def made(codec: Codec) -> None:
        AllReduce(codec).plan({"weight": Parameter(torch.empty(300, 300, device=DEVICE))}, frozenset(), 0)

    with stand_ins(Meter()):
        for codec in (BlockInt(8, block=16384), Rotated(Gaussian(4, block=16384)), Sign(block=8200)):
            with pytest.raises(ValueError, match=r"8192 values.*choose such a block"):
                made(codec)
        made(BlockInt(8, block=8192))


def test_tables_of_addresses_are_kept_but_not_what_a_graph_owns(monkeypatch: pytest.MonkeyPatch) -> None:
    host = torch.device("cpu")
    kept = tables.table([1, 2**62, 3], host)
    assert kept.tolist() == [1, 2**62, 3]
    assert tables.table([1, 2**62, 3], host) is kept
    monkeypatch.setattr(tables, "_captures", lambda device: True)
    captured = tables.table([1, 2**62, 3], host)
    assert torch.equal(captured, kept)
    assert captured is not kept
    assert tables.table([1, 2**62, 3], host) is not captured
