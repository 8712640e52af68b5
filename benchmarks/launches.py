"""What one bucket costs a GPU and its host: launches, calls of NCCL, bytes in memory. Counted without a GPU.

python -m benchmarks launches                       # print the table
python -m benchmarks launches --write docs/gpu.md   # replace the table on this page

A bucket goes its whole way: pack, exchange over `NcclPeers` as one of 8 ranks, unpack, the optimizer's step. Its
tensors are on torch's meta device, so they have shapes and no memory. Triton's launcher, torch.distributed and the
streams and events of torch.cuda are replaced by stand-ins that count. So the counts are those of the code as it is.

- launches: Triton kernels, and torch operations that touch the device's memory. Some of torch's (sort, top-k) launch
  several kernels, and count as one.
- bytes a gradient: what these read and write in the device's memory, for each gradient in the bucket. An operation that
  reads its input twice counts as reading it once.
- NCCL: calls, each of which may hold several sends and receives.
- waits: places where the host waits until the device has done all that is queued.
- host: processor time in Python and in torch on this machine, for the same steps of a bucket of a thousandth of the
  size, cut into as many pieces, on the CPU: torch's operations on the meta device are written in Python, and take up to
  300 us each. What CUDA and Triton need for each launch, and NCCL for each call, comes on top of it.
"""

from __future__ import annotations

import itertools
import threading
import time
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
from ringstrategy.algorithms.base import GradientAlgorithm, ParameterAlgorithm
from ringstrategy.algorithms.gradients.synchronous import Synchronous
from ringstrategy.algorithms.parameters.exchange import Exchange
from ringstrategy.algorithms.parameters.group import row_of
from ringstrategy.buckets import factors, residuals
from ringstrategy.buckets.base import Bucket
from ringstrategy.codecs import BlockInt, Gaussian, Rotated
from ringstrategy.codecs.base import derive_seed
from ringstrategy.collectives import Direct, Hierarchical, Ring, base
from ringstrategy.kernels import operations
from ringstrategy.names import STRATEGIES
from ringstrategy.transport import nccl
from ringstrategy.transport.base import Handle, Peers, Waitable
from ringstrategy.transport.stats import Stats
from ringstrategy.transport.worker import Task

RANKS = 8
ROUNDS = 100  # of which the host's time is the shortest
SHAPES = [(1280, 1024)] * 5  # 25 MB of float32
DEVICE = torch.device("meta")
_SHRUNK = 1024  # how many times fewer gradients a bucket has whose host time is taken
_TIMED = [(40, 32)] * 5
_HERE = torch.device("cpu")
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
    "`Hierarchical` on one host": (lambda: AllReduce(collective=Hierarchical()), torch.float32),
}


class Counts(NamedTuple):
    """Of one bucket."""

    kernels: int  # of ours
    operations: int  # of torch
    calls: int  # of NCCL
    bytes_moved: int
    waits: tuple[str, ...]  # where the host waits for the device
    gradients: int
    host_seconds: float | None  # None: it waits for the device


# Bytes that a kernel moves besides those of the tensors that it is given, each of which it reads or writes once. Tables
# of integers are small, but not what their addresses point to.
_MORE: dict[str, Callable[[Mapping[str, Any], int], int]] = {
    "_encode_kernel": lambda given, itemsize: _of_parts(given, itemsize) + _of_payloads(given),
    "_decode_kernel": lambda given, itemsize: _of_parts(given, itemsize),
    "_add_kernel": lambda given, _: (given["count"] + 1) * given["out"].nbytes,  # reads and writes it
    "_rotate_kernel": lambda given, _: given["values"].nbytes,  # reads and writes them
    "_orthonormalise_kernel": lambda given, _: int(given["columns"].nbytes * _passes(given["RANK"])),
    "_pack_kernel": lambda given, itemsize: given["n"] * itemsize,
    "_unpack_kernel": lambda given, itemsize: given["n"] * itemsize,
    "_sample_kernel": lambda given, _: given["offsets"].numel() * (8 + _SECTOR),
    "_compare_kernel": lambda given, _: given["offsets"].numel() * (8 + _SECTOR),
    "_part_kernel": lambda given, _: 0,
    # nothing, for the optimizer here steps the means as they are
    "_go_kernel": lambda given, _: -given["now"].nbytes - given["before"].nbytes,
}
_SECTOR = 32  # bytes that memory gives at a time
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "detach"}  # no memory
_OVERWRITING = {"copy_", "fill_", "zero_"}  # they do not read what they change
_CHOOSING = {"index", "take", "gather"}  # they read of their first input as much as they return
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


def _passes(rank: int) -> float:
    """Over a column, on average: 6, with each column before it 5, and but for the first 3; less the one that counts."""
    return 6 + (5 * rank * (rank - 1) / 2 + 3 * (rank - 1)) / rank - 1


def _numels(given: Mapping[str, Any]) -> list[int]:
    """Values of each part that a kernel works on."""
    wire = given["wire"]
    return list(wire.numbers[1::3]) if _is_table(wire) else [given["n"]]


def _of_parts(given: Mapping[str, Any], itemsize: int) -> int:
    """Messages and gradients that are in tables, less what parts leave of the tensors that a kernel is given."""
    if not _is_table(given["wire"]):
        return 0
    numels, whole = _numels(given), [t for t in _on_device(list(given.values())) if not _is_table(t)]
    messages: int = sum(given["FORMAT"].form.nbytes(numel) for numel in numels)
    gathered = sum(numels) * itemsize if _is_table(given["values"]) else 0
    return messages + gathered - sum((tensor.numel() - sum(numels)) * tensor.itemsize for tensor in whole)


def _of_payloads(given: Mapping[str, Any]) -> int:
    [numel] = _numels(given) if _is_table(given["payloads"]) else [0]
    return int(given["count"] * given["FORMAT"].form.nbytes(numel))


def _is_table(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32)


def _on_device(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.device == DEVICE]


def _nbytes(tensor: Tensor) -> int:
    """Of memory: what is expanded counts once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def our_function() -> str:
    """The innermost function of ours that is running in this thread."""
    ours = [f"`{Path(f.filename).stem}.{f.name}`" for f in traceback.extract_stack() if f.filename.startswith(_OURS)]
    return ours[-1] if ours else "elsewhere"


class Meter:
    """Counts while it is `counting`. `itemsize`: bytes of a gradient.

    Attributes:
        compiled: for each kernel that was launched, what Triton would have compiled; never cleared.
    """

    def __init__(self, itemsize: int) -> None:
        self.counting = True
        self.compiled: set[tuple[str, str]] = set()
        self._itemsize = itemsize
        self._threads: set[int] = set()
        self.clear()

    def clear(self) -> None:
        """Begin at 0."""
        self.kernels = self.operations = self.calls = self.bytes_moved = 0
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
            given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
            moved = [tensor.nbytes for tensor in _on_device(list(given.values())) if not _is_table(tensor)]
            self.kernels += 1
            self.compiled.add((kernel.__name__, _specialization(kernel, *args, **kwargs)))
            self.bytes_moved += sum(moved) + _MORE[kernel.__name__](given, self._itemsize)

    def operation(self, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Of torch."""
        self.operations += 1
        self.bytes_moved += sum(map(_nbytes, (*read, *written)))


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
                self._meter.operation(inputs[:1], [])
                if target != DEVICE:  # the meta device has no values to give
                    return args[0] if name == "copy_" else torch.zeros(source.shape, dtype=source.dtype, device=target)
        result = func(*args, **kwargs)
        if not (func.is_view or name in _FREE) and (inputs or _on_device(result)):
            changed = _changed(func, args, kwargs)
            if name in _OVERWRITING:
                inputs = [tensor for tensor in inputs if not any(tensor is one for one in changed)]
            elif "out" in kwargs:
                inputs = _on_device([args, {key: value for key, value in kwargs.items() if key != "out"}])
            elif name in _CHOOSING:
                inputs[0] = result
            self._meter.operation(inputs, changed or _on_device(result))
        return result


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes to."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return _on_device([given[name] for name in written if name in given])


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
    """Rank 1 of `ranks`, where there is `no_wire`.

    Args:
        device: of the values.
        ranks: how many.
        shares: all ranks are on one host; else each is on a host of its own.
    """

    def __init__(self, device: torch.device, ranks: int, *, shares: bool) -> None:
        hosts = ("one",) * ranks if shares else tuple(map(str, range(ranks)))
        control: Any = _Echo(ranks, hosts)
        super().__init__(mock.sentinel.group, control, device)


class StandInPeers(LonelyPeers):
    """What torch does in another thread counts too."""

    def __init__(
        self, meter: Meter, device: torch.device = DEVICE, *, ranks: int = RANKS, shares: bool = False
    ) -> None:
        super().__init__(device, ranks, shares=shares)
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
    from ringstrategy.kernels.triton import parts, tables
    from triton.runtime.jit import JITFunction

    make = torch.tensor

    def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        if device is not None and torch.device(device) == DEVICE:
            meter.wait()  # torch copies, and waits for that
            meter.operations += meter.counting
        return make(data, device=device, **kwargs)

    def table(numbers: Sequence[int], device: torch.device) -> Tensor:
        made: Tensor = tables.table(numbers, device)
        made.numbers = tuple(numbers)  # type: ignore[attr-defined]  # which the meta device forgets
        return made

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
        mock.patch.object(parts, "table", table),
        mock.patch.object(Tensor, "data_ptr", address),
    ):
        yield


class _Agreed:
    def wait(self) -> None:
        """At once."""


def shares(algorithm: Synchronous) -> bool:
    """Does it use that ranks share a host?"""
    return isinstance(algorithm.collective, Hierarchical)


def one_bucket(
    algorithm: Synchronous, dtype: torch.dtype, device: torch.device, shapes: Sequence[tuple[int, int]] = SHAPES
) -> Bucket:
    """Of parameters of these shapes."""
    tensors = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
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


def measure(algorithm: Synchronous, dtype: torch.dtype, rounds: int = ROUNDS, ranks: int = RANKS) -> Counts:
    """Of a bucket of `SHAPES`, in the second step; the host's time over `rounds` of a smaller one, unless it waits."""
    meter = Meter(dtype.itemsize)
    with stand_ins(meter, ranks):
        bucket = one_bucket(algorithm, dtype, DEVICE)
        peers = StandInPeers(meter, ranks=ranks, shares=shares(algorithm))
        for _ in range(2):
            meter.clear()
            with meter.within():
                fill(bucket, torch.empty_like)
                exchange(bucket, peers, algorithm)
        peers.close()
        meter.counting = False
        seconds = [] if meter.waits else _host_seconds(meter, algorithm, dtype, rounds, ranks)
    return Counts(
        kernels=meter.kernels,
        operations=meter.operations,
        calls=meter.calls,
        bytes_moved=meter.bytes_moved,
        waits=tuple(dict.fromkeys(meter.waits)),
        gradients=sum(slot.parameter.numel() for slot in bucket.slots),
        host_seconds=min(seconds, default=None),
    )


def _host_seconds(meter: Meter, algorithm: Synchronous, dtype: torch.dtype, rounds: int, ranks: int) -> list[float]:
    """Of the processor, by all threads together: what else runs on this machine does not count."""
    with (
        mock.patch.object(Tensor, "data_ptr", torch._C.TensorBase.data_ptr),
        mock.patch.object(residuals, "may_read", return_value=False),  # this CPU stands for a GPU
        mock.patch.object(factors, "may_read", return_value=False),
        mock.patch.object(base, "SMALLEST_HALF", base.SMALLEST_HALF // _SHRUNK),
        mock.patch.object(base, "SMALLEST_SEGMENT", base.SMALLEST_SEGMENT // _SHRUNK),
    ):
        bucket = one_bucket(algorithm, dtype, _HERE, _TIMED)
        peers = StandInPeers(meter, _HERE, ranks=ranks, shares=shares(algorithm))
        seconds = []
        for _ in range(rounds):
            fill(bucket, torch.empty_like)
            begin = time.process_time()
            exchange(bucket, peers, algorithm)
            seconds.append(time.process_time() - begin)
        peers.close()
    return seconds


def whole_step(algorithm: Algorithm, *, scaled: bool = False) -> Meter:
    """What a whole step costs, the third one: hooks, backward, exchanges, the optimizer, residuals.

    `scaled`: there is a loss scaler, which knows only on the device whether it skips the step.
    """
    meter = Meter(4)
    scale, stepped = torch.full((), 256.0, device=DEVICE), torch.ones((), dtype=torch.bool, device=DEVICE)
    with stand_ins(meter):
        module = nn.Sequential(nn.Linear(1280, 1024, device=DEVICE), nn.GELU(), nn.Linear(1024, 1024, device=DEVICE))
        parameters = dict(module.named_parameters())
        peers, optimizer = StandInPeers(meter), torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
        algorithm.setup(parameters, peers)
        if isinstance(algorithm, ParameterAlgorithm):
            algorithm.bind(list(parameters.values()))
        for _ in range(3):  # what is made once is made in the first, and gossip's first exchange arrives in the second
            meter.clear()
            with meter.within():
                loss = module(torch.empty(8, 1280, device=DEVICE)).square().mean()
                if isinstance(algorithm, GradientAlgorithm):
                    algorithm.before_backward(loss, scale=scale if scaled else None)
                loss.backward()
                if isinstance(algorithm, GradientAlgorithm):
                    algorithm.after_backward()
                    algorithm.before_step(set(parameters.values()))
                optimizer.step()
                algorithm.after_step(set(parameters.values()), stepped if scaled else True)
                if isinstance(algorithm, ParameterAlgorithm):
                    algorithm.settle()  # until the other thread has queued all that is counted
                optimizer.zero_grad()
        meter.counting = False
        peers.close()
    return meter


def counted(counts: Counts) -> list[str]:
    """The cells of a row that are equal wherever they are counted."""
    return [
        str(counts.kernels),
        str(counts.operations),
        str(counts.calls),
        f"{counts.bytes_moved / counts.gradients:.1f}",
        ", ".join(counts.waits) or "none",
    ]


def lines(all_counts: Mapping[str, Counts]) -> Iterator[str]:
    """The table, as Markdown."""
    yield "| case | our kernels | torch operations | NCCL calls | bytes a gradient | waits | host |"
    yield "|---|---|---|---|---|---|---|"
    for name, counts in all_counts.items():
        host = "-" if counts.host_seconds is None else f"{counts.host_seconds * 1e3:.1f} ms"
        yield f"| {' | '.join([name, *counted(counts), host])} |"


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
