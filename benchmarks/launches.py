"""What one bucket costs a GPU and its host: launches, calls of NCCL, waits. Counted without a GPU.

python -m benchmarks launches                       # print the table
python -m benchmarks launches --write docs/gpu.md   # replace the table on this page

A bucket goes its whole way: pack, exchange over `NcclPeers` as one of 8 ranks, unpack, the optimizer's step. Its
tensors are on torch's meta device, so they have shapes and no memory. Triton's launcher, torch.distributed and the
streams and events of torch.cuda are replaced by stand-ins that count. So the counts are those of the code as it is.

- launches: Triton kernels, and torch operations that touch the device's memory. Some of torch's (sort, top-k) launch
  several kernels, and count as one.
- NCCL: calls, each of which may hold several sends and receives.
- waits: places where the host waits until the device has done all that is queued.
"""

from __future__ import annotations

import itertools
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import harness
from ringstrategy.algorithms import Algorithm, AllReduce
from ringstrategy.algorithms.gradients.synchronous import Synchronous
from ringstrategy.algorithms.parameters.exchange import Exchange
from ringstrategy.algorithms.parameters.rows import row_of
from ringstrategy.buckets.base import Bucket
from ringstrategy.codecs import BlockInt, Gaussian, Rotated
from ringstrategy.codecs.base import derive_seed
from ringstrategy.collectives import Direct, Ring
from ringstrategy.kernels import operations
from ringstrategy.names import STRATEGIES
from ringstrategy.transport import nccl
from ringstrategy.transport.base import Handle, Peers, Waitable
from ringstrategy.transport.stats import Stats
from ringstrategy.transport.worker import Task

RANKS = 8
SHAPES = [(1280, 1024)] * 5  # 25 MB of float32
DEVICE = torch.device("meta")
_STEPS = itertools.count()  # of all cases: what is kept for a seed must not serve another case
_OURS = tuple(str(Path(__file__).parents[1] / folder) for folder in ("ringstrategy", "triton_kernels"))

CASES: dict[str, tuple[Callable[[], Any], torch.dtype]] = {
    **{
        f"`{name}`": (make, torch.float32)
        for name, make in STRATEGIES.items()
        if name.startswith("ring") and name != "ring_auto"  # which is one of the others
    },
    "`ring_int8`, bfloat16 gradients": (STRATEGIES["ring_int8"], torch.bfloat16),
    "`BlockInt(8)`, `Ring`, feedback": (lambda: AllReduce(BlockInt(8), Ring(), error_feedback=True), torch.float32),
    "`BlockInt(8)`, `Direct`": (lambda: AllReduce(BlockInt(8), Direct()), torch.float32),
    "`BlockInt(8)`, `Direct`, feedback": (
        lambda: AllReduce(BlockInt(8), Direct(), error_feedback=True),
        torch.float32,
    ),
    "`Rotated(Gaussian(4))`, `Ring`": (lambda: AllReduce(Rotated(Gaussian(4)), Ring()), torch.float32),
}


class Counts(NamedTuple):
    """Of one bucket."""

    kernels: int  # of ours
    operations: int  # of torch
    calls: int  # of NCCL
    waits: tuple[str, ...]  # where the host waits for the device


_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "detach"}  # no memory
_ASKING: dict[str, Callable[..., Any]] = {  # what they return depends on values, of which there are none
    "_local_scalar_dense": lambda _: False,  # also 0
    "equal": lambda *_: False,
    "nonzero": lambda tensor: tensor.new_empty((0, tensor.dim()), dtype=torch.int64),
    "masked_select": lambda tensor, _: tensor.new_empty(0),
}


@cache
def _binder(kernel: Any) -> Callable[..., tuple[Any, Any, Any]]:
    """What Triton's launcher asks which of a kernel's binaries fits the arguments."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 90, 32))
    binder: Callable[..., tuple[Any, Any, Any]] = create_function_from_signature(
        kernel.signature, kernel.params, backend
    )
    return binder


def _specialization(kernel: Any, *args: Any, **kwargs: Any) -> str:
    """Types, alignments, constants and options: the key by which Triton finds a compiled kernel again."""
    _, specialization, options = _binder(kernel)(*args, **kwargs)
    return f"{specialization} {options}"


def _on_device(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.device == DEVICE]


def our_function() -> str:
    """The innermost function of ours that is running in this thread."""
    ours = [f"`{Path(f.filename).stem}.{f.name}`" for f in traceback.extract_stack() if f.filename.startswith(_OURS)]
    return ours[-1] if ours else "elsewhere"


class Meter:
    """Counts while it is `counting`.

    Attributes:
        compiled: for each kernel that was launched, what Triton would have compiled; never cleared.
    """

    def __init__(self) -> None:
        self.counting = True
        self.compiled: set[tuple[str, str]] = set()
        self._threads: set[int] = set()
        self.clear()

    def clear(self) -> None:
        """Begin at 0."""
        self.kernels = self.operations = self.calls = 0
        self.waits: list[str] = []

    @contextmanager
    def within(self) -> Iterator[None]:
        """Count what torch does in this thread."""
        thread = threading.get_ident()
        if not self.counting or thread in self._threads:
            yield
            return
        self._threads.add(thread)
        try:
            with _Operations(self):
                yield
        finally:
            self._threads.remove(thread)

    def wait(self, *what: object) -> None:
        """The host waits for the device here, or for `what`."""
        del what
        if self.counting:
            self.waits.append(our_function())

    def call(self) -> None:
        """Of NCCL."""
        self.calls += self.counting

    def kernel(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """In place of Triton's launcher."""
        del grid
        if self.counting and not warmup:
            self.kernels += 1
            self.compiled.add((kernel.__name__, _specialization(kernel, *args, **kwargs)))

    def operation(self) -> None:
        """Of torch."""
        self.operations += self.counting


class _Operations(TorchDispatchMode):
    """Hands a meter what torch does on the device."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        inputs = _on_device([args, kwargs])
        if name in _ASKING and inputs:
            self._meter.wait()
            return _ASKING[name](*args)
        if name == "copy_" or (name == "_to_copy" and "device" in kwargs):
            source, target = (args[0], kwargs["device"]) if name == "_to_copy" else (args[1], args[0].device)
            if source.device != target:
                if not (kwargs.get("non_blocking") or args[2:] == (True,)):
                    self._meter.wait()
                self._meter.operation()
                if target != DEVICE:  # the meta device has no values to give
                    return args[0] if name == "copy_" else torch.zeros(source.shape, dtype=source.dtype, device=target)
        result = func(*args, **kwargs)
        if not (func.is_view or name in _FREE) and (inputs or _on_device(result)):
            self._meter.operation()
        return result


class _Device:
    """A stream or an event, on which nothing takes time."""

    device = DEVICE
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def query(self) -> bool:
        """Done."""
        return True

    def elapsed_time(self, other: _Device) -> float:
        """Milliseconds."""
        del other
        return 0.0

    def record_event(self) -> _Device:
        """An event."""
        return _Device()


class _Distributed:
    """In place of torch.distributed: each call but those that ask or describe counts, and sends nothing."""

    DistError = dist.DistError

    def __init__(self, meter: Meter, ranks: int) -> None:
        self._meter, self._ranks = meter, ranks

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            del args, kwargs
            self._meter.call()
            return _Device() if name != "batch_isend_irecv" else [_Device()]

        return called

    irecv = isend = None

    @staticmethod
    def P2POp(*args: Any) -> None:
        """A part of a call."""

    def get_process_group_ranks(self, group: object) -> list[int]:
        """All."""
        del group
        return list(range(self._ranks))

    @staticmethod
    def is_initialized() -> bool:
        """Nothing to end."""
        return False


def no_wire(meter: Meter, ranks: int) -> mock._patch[_Distributed]:
    """NCCL's calls send nothing, and count."""
    return mock.patch.object(nccl, "dist", _Distributed(meter, ranks))


class _Echo(Peers):
    """For messages in host memory: all other ranks say what rank 1 says."""

    def __init__(self, ranks: int, hosts: tuple[str, ...]) -> None:
        super().__init__(1, ranks, Stats(), hosts)

    def post(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> Handle:
        """See `Peers.post`."""
        for said, heard in zip(sends.values(), recvs.values(), strict=True):
            heard.copy_(said)
        return _Agreed()

    def all_reduce_(self, values: Tensor) -> None:
        """See `Peers.all_reduce_`."""
        values.mul_(self.size)

    def submit(self, task: Task, where: str) -> Waitable:
        """At once."""
        del where
        task()
        return _Agreed()

    def look_around(self, where: str) -> None:
        """Nobody gets lost."""

    def abort(self, cause: str | None) -> None:
        """See `Peers.abort`."""

    def close(self) -> None:
        """See `Peers.close`."""


class LonelyPeers(nccl.NcclPeers):
    """Rank 1 of `ranks` on hosts of their own, with values on `device`, where there is `no_wire`."""

    def __init__(self, device: torch.device, ranks: int) -> None:
        control: Any = _Echo(ranks, tuple(map(str, range(ranks))))
        super().__init__(mock.sentinel.group, control, device)


class StandInPeers(LonelyPeers):
    """What torch does in another thread counts too."""

    def __init__(self, meter: Meter, ranks: int = RANKS) -> None:
        super().__init__(DEVICE, ranks)
        self._meter = meter

    def submit(self, task: Task, where: str) -> Waitable:
        """See `Peers.submit`."""

        def counted() -> None:
            with self._meter.within():
                task()

        return super().submit(counted, where)


@contextmanager
def stand_ins(meter: Meter, ranks: int = RANKS) -> Iterator[None]:
    """For what only a machine with a GPU has."""
    from ringstrategy.kernels.triton import tables
    from triton.runtime.jit import JITFunction

    make = torch.tensor

    def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        if device is not None and torch.device(device) == DEVICE:
            meter.wait()  # torch copies, and waits for that
            meter.operation()
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
        no_wire(meter, ranks),
        mock.patch.multiple(
            torch.cuda, Stream=_Device, Event=_Device, current_stream=_Device, stream=nullcontext, device=nullcontext
        ),
        mock.patch.object(torch.cuda, "synchronize", meter.wait),
        mock.patch.object(_Device, "synchronize", meter.wait, create=True),
        mock.patch.object(torch, "tensor", tensor),
        mock.patch.object(Tensor, "data_ptr", address),
    ):
        yield


class _Agreed:
    def wait(self) -> None:
        """At once."""


def one_bucket(algorithm: Synchronous, dtype: torch.dtype, device: torch.device) -> Bucket:
    """Of parameters of `SHAPES`."""
    tensors = [torch.empty(shape, dtype=dtype, device=device) for shape in SHAPES]
    parameters = {f"p{place}": Parameter(tensor) for place, tensor in enumerate(tensors)}
    [bucket] = algorithm.plan(parameters, frozenset(), 1)  # with the index 0 it would be closed when it has 1 MB
    return bucket


def fill(bucket: Bucket, gradient_of: Callable[[Tensor], Tensor]) -> None:
    """Give each parameter a gradient."""
    for slot in bucket.slots:
        slot.parameter.grad = gradient_of(slot.parameter)


def exchange(bucket: Bucket, peers: Peers, algorithm: Synchronous) -> None:
    """All that happens to a bucket from its last gradient to the optimizer's step."""
    parameters = [slot.parameter for slot in bucket.slots]
    bucket.pack(peers.size)
    ticket = bucket.launch(peers, algorithm.collective, _Agreed(), derive_seed(0, next(_STEPS)), "nowhere")
    bucket.take_gradients()
    peers.finish([ticket])
    bucket.unpack(lambda slot: True)
    if bucket.undecided:
        bucket.after_backward()
    bucket.after_step(set(parameters), True)


def measure(algorithm: Synchronous, dtype: torch.dtype, ranks: int = RANKS) -> Counts:
    """Of a bucket of `SHAPES`, in the second step."""
    meter = Meter()
    with stand_ins(meter, ranks):
        bucket, peers = one_bucket(algorithm, dtype, DEVICE), StandInPeers(meter, ranks)
        for _ in range(2):
            meter.clear()
            with meter.within():
                fill(bucket, torch.empty_like)
                exchange(bucket, peers, algorithm)
        peers.close()
        meter.counting = False
    return Counts(meter.kernels, meter.operations, meter.calls, tuple(dict.fromkeys(meter.waits)))


def whole_step(algorithm: Algorithm, *, scaled: bool = False) -> Meter:
    """What a whole step costs, the third one: hooks, backward, exchanges, the optimizer, residuals.

    `scaled`: there is a loss scaler, which knows only on the device whether it skips the step.
    """
    meter = Meter()
    scale, stepped = torch.full((), 256.0, device=DEVICE), torch.ones((), dtype=torch.bool, device=DEVICE)
    with stand_ins(meter):
        module = nn.Sequential(nn.Linear(1280, 1024, device=DEVICE), nn.GELU(), nn.Linear(1024, 1024, device=DEVICE))
        parameters = dict(module.named_parameters())
        peers, optimizer = StandInPeers(meter), torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
        algorithm.setup(parameters, peers)
        algorithm.bind(list(parameters.values()))
        for _ in range(3):  # what is made once is made in the first, and gossip's first exchange arrives in the second
            meter.clear()
            with meter.within():
                loss = module(torch.empty(8, 1280, device=DEVICE)).square().mean()
                algorithm.before_backward(loss, scale=scale if scaled else None)
                loss.backward()
                algorithm.after_backward()
                algorithm.before_step(set(parameters.values()))
                optimizer.step()
                algorithm.after_step(set(parameters.values()), stepped if scaled else True)
                algorithm.settle()  # until the other thread has queued all that is counted
                optimizer.zero_grad()
        meter.counting = False
        peers.close()
    return meter


def counted(counts: Counts) -> list[str]:
    """The cells of a row."""
    return [str(counts.kernels), str(counts.operations), str(counts.calls), ", ".join(counts.waits) or "none"]


def lines(all_counts: Mapping[str, Counts]) -> Iterator[str]:
    """The table, as Markdown."""
    yield "| case | our kernels | torch operations | NCCL calls | waits |"
    yield "|---|---|---|---|---|"
    for name, counts in all_counts.items():
        yield f"| {' | '.join([name, *counted(counts)])} |"


def main(given: Sequence[str]) -> None:
    """Print the table, or write it."""
    parser = harness.arguments("launches", __doc__, rounds=None, cases=False)
    parser.add_argument("--write", type=Path, help="replace the table in this page")
    options = parser.parse_args(given)
    table = "".join(
        f"{line}\n" for line in lines({name: measure(make(), dtype) for name, (make, dtype) in CASES.items()})
    )
    with harness.refusing(parser):
        harness.show_or_write(table, "launches", options.write)
