"""A process group of torch.distributed whose sums and means of floats travel encoded, over our own collectives.

    import ringstrategy
    group = dist.new_group(backend="ring_int8")
    model = DistributedDataParallel(model, process_group=group)

It is for code that takes a process group: torch DDP, FSDP2, HSDP, DeviceMesh, Accelerate, Lightning's `DDPStrategy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceCoalescedOptions, ReduceScatterOptions
from torch.futures import Future
from typing_extensions import override

from ringstrategy.algorithms.gradients.allreduce import AllReduce
from ringstrategy.algorithms.memory import check_memory, check_width
from ringstrategy.algorithms.parameters.group import in_flats
from ringstrategy.codecs import Codec, TopK, derive_seed
from ringstrategy.codecs.cast import wire_of
from ringstrategy.collectives import Collective, Ring
from ringstrategy.collectives.base import Summand, mean_, sums_dtype
from ringstrategy.integrations.encoded import Channel, memory_of, peers_for
from ringstrategy.names import STRATEGIES
from ringstrategy.transport.base import Peers, Waitable
from ringstrategy.transport.futures import Promise
from ringstrategy.transport.stats import Stats
from ringstrategy.transport.worker import CLOSE_SECONDS

_GLOO, _NCCL = dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroup.BackendType.NCCL
_SUMS, _SCATTERED, _GATHERED = AllreduceCoalescedOptions(), ReduceScatterOptions(), AllgatherOptions()
_FEEDBACK = (
    "A process group does not know whose gradients it sums, so it cannot keep residuals. For error feedback use "
    "ringstrategy.ddp_hook (torch DDP), ringstrategy.fsdp (FSDP2), or Trainer(strategy=...)"
)


def _torchs(name: str) -> Any:
    """An operation that torch's own backend does, called as `Backend.name`.

    Each operation that torch looks for in a Python class must be one of that class: `ProcessGroup`'s own would call the
    backend while they hold Python's lock, and gloo's threads need it to free tensors, under a lock that the call needs.
    """

    def operation(self: RingProcessGroup, *args: Any, **options: Any) -> dist.Work:
        work: dist.Work = getattr(self._torchs(args), name)(*args, **options)
        return work

    operation.__name__ = name
    return operation


@dataclass(frozen=True)
class GroupOptions:
    """`dist.new_group(backend="ring", pg_options=GroupOptions(...))`, where an algorithm alone does not say enough.

    Args:
        algorithm: whose codec, collective and `codec_threads` count. Without residuals: see `RingProcessGroup`.
        exact_below: floats of fewer bytes than this are summed exactly, by gloo or NCCL: losses, metrics, counters,
            small buckets. Larger: more that is exact, and more bytes.
    """

    algorithm: AllReduce
    exact_below: int = 1 << 16

    _timeout = None  # DeviceMesh asks all options for one: the default

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, AllReduce):
            raise TypeError(
                f"a process group averages by ringstrategy.AllReduce(...), got {self.algorithm!r}. For other "
                "algorithms use Trainer(strategy=...), Fabric(strategy=...) or ringstrategy.horovod"
            )
        if not isinstance(self.algorithm.codec, Codec):
            raise ValueError(
                "a process group does not see parameters, so it cannot ask a policy: pass one codec, such as "
                "AllReduce(BlockInt(8))"
            )
        if self.algorithm.error_feedback:
            raise ValueError(f"error_feedback=True has no place here. {_FEEDBACK}")
        if isinstance(self.algorithm.codec, TopK):
            raise ValueError(f"{self.algorithm.codec} sends a few values and needs to remember the others. {_FEEDBACK}")
        if self.algorithm.local is not None or self.algorithm.uneven != "error":
            raise ValueError("a process group does not see parameters or batches: leave local and uneven as they are")
        if self.algorithm.on_nonfinite != "propagate":
            raise ValueError("a process group does not see steps: leave on_nonfinite='propagate'")
        if type(self.exact_below) is not int or self.exact_below < 0:
            raise ValueError(f"exact_below is a number of bytes >= 0, got {self.exact_below!r}")


def options_of(name: str, given: object) -> GroupOptions:
    """What `pg_options` means for the backend of this name: nothing, an `AllReduce`, or `GroupOptions`."""
    if given is None:
        algorithm = STRATEGIES[name]()
        assert isinstance(algorithm, AllReduce)
        return GroupOptions(algorithm)
    if isinstance(given, GroupOptions):
        return given
    if isinstance(given, AllReduce):
        return GroupOptions(given)
    raise TypeError(
        f"pg_options of backend {name!r} is a ringstrategy.AllReduce(...), or GroupOptions to say from which size on "
        f"it is used; got {given!r}"
    )


class RingProcessGroup(dist.ProcessGroup):
    """Sums and means of float tensors by an algorithm's codec and collective; all else by gloo, on GPUs by NCCL.

    Of `all_reduce` and `reduce_scatter_tensor` these travel encoded: floats, op SUM or AVG, of at least
    `GroupOptions.exact_below` bytes. All ranks get the same bits from an `all_reduce`. `reduce_scatter_tensor` is the
    first half of one: each rank sends (N-1)/N of the encoded values, and what it keeps is summed in full precision.
    `all_gather_into_tensor` of CPU tensors is the second half, bit for bit. 16-bit floats are summed in float32.

    Codecs keep no residuals here, so what each call loses stays lost. Ranks call collectives in the same order, as
    with every backend of torch. Exchanges travel over the connections of the group's own gloo, and begin at the
    first call that needs them; a group then has two threads more than one of gloo.

    Attributes:
        options: its own.
        stats: what was encoded, or gathered over the ring, in bytes. Not what gloo and NCCL send. `steps` and
            `exposed_seconds` are None, because a group knows neither.
    """

    def __init__(
        self, name: str, store: dist.Store, rank: int, size: int, timeout: timedelta, options: GroupOptions
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stubs know only what a store makes
        self.options, self.stats = options, Stats(steps=None, exposed_seconds=None)
        self._name, self._timeout = name, timeout
        self._exact: dict[str, Any] = {}  # by type of device: torch's own
        self._lanes: dict[str, _Lane] = {}  # likewise: ours
        self._calls = 0  # that were ours, as many on all ranks
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, size, timeout)
        self._set_default_backend(_GLOO)
        self._add(torch.device("cpu"), _GLOO, gloo)
        if torch.cuda.is_available() and dist.is_nccl_available():
            nccl_options = dist.ProcessGroupNCCL.Options()
            nccl_options._timeout = timeout
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl/", store), rank, size, nccl_options)
            self._add(torch.device("cuda"), _NCCL, nccl)

    def _add(self, device: torch.device, kind: dist.ProcessGroup.BackendType, backend: Any) -> None:
        self._register_backend(device, kind, backend)
        self._exact[device.type] = backend

    def getBackendName(self) -> str:  # torch's own name
        """The name that it was made by."""
        return self._name

    # What is ours

    @override
    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]  # as torch calls it
        return self._sum("allreduce", tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = _SUMS) -> dist.Work:
        """See `torch.distributed.all_reduce_coalesced`: one sum of all of them."""
        return self._sum("allreduce_coalesced", tensors, opts)

    def _sum(self, name: str, tensors: list[Tensor], opts: Any) -> dist.Work:
        mean = self._is_ours(tensors, opts.reduceOp)
        if mean is None:
            exact: dist.Work = getattr(self._torchs(tensors), name)(tensors, opts)
            return exact
        return self._run("all-reduce", tensors, lambda lane, sums, seed: lane.sum_(sums, mean, seed))

    @override
    def _reduce_scatter_base(self, output: Tensor, values: Tensor, opts: Any) -> dist.Work:
        mean = self._is_ours([values], opts.reduceOp)
        if mean is None:
            exact: dist.Work = self._torchs([values])._reduce_scatter_base(output, values, opts)
            return exact
        self.options.algorithm.collective.check_scatters()
        self._check_output("reduce_scatter_tensor", output, values, output)
        return self._run("reduce-scatter", [output], lambda lane, out, seed: lane.scatter_(out[0], values, mean, seed))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = _SCATTERED) -> dist.Work:
        """Its name since torch 2.13."""
        return self._reduce_scatter_base(output, input, opts)

    @override
    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = _GATHERED) -> dist.Work:
        ours = input.device.type == "cpu" and input.nbytes >= self.options.exact_below and output.is_contiguous()
        if not ours or self.size() == 1 or input.dtype != output.dtype:
            exact: dist.Work = self._torchs([input])._allgather_base(output, input, opts)
            return exact
        self._check_output("all_gather_into_tensor", output, output, input)
        return self._run("all-gather", [output], lambda lane, out, _: lane.gather_(out[0], input))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = _GATHERED) -> dist.Work:
        """Its name since torch 2.13."""
        return self._allgather_base(output, input, opts)

    def _check_output(self, operation: str, output: Tensor, whole: Tensor, part: Tensor) -> None:
        """Before anything is sent: it would be too late on the thread that exchanges."""
        check_memory(f"the output of {operation}", output)
        if whole.numel() != part.numel() * self.size() or whole.dtype != part.dtype:
            raise ValueError(
                f"{operation} in a group of {self.size()}: the longer tensor needs {self.size()} times the values of "
                f"the other, and its dtype; got {whole.numel()} of {whole.dtype} and {part.numel()} of {part.dtype}"
            )

    # What is torch's

    allgather, broadcast, reduce_scatter = _torchs("allgather"), _torchs("broadcast"), _torchs("reduce_scatter")
    gather, scatter, reduce, alltoall = _torchs("gather"), _torchs("scatter"), _torchs("reduce"), _torchs("alltoall")
    alltoall_base, all_to_all_single = _torchs("alltoall_base"), _torchs("alltoall_base")
    send, recv, barrier = _torchs("send"), _torchs("recv"), _torchs("barrier")
    recv_anysource = recvAnysource = _torchs("recv_anysource")  # in Python, and in C++

    def reduce_scatter_tensor_coalesced(
        self, outputTensors: list[Tensor], inputTensors: list[Tensor], opts: Any = _SCATTERED
    ) -> dist.Work:
        """One after the other."""
        pairs = zip(outputTensors, inputTensors, strict=True)
        return _Works([self._reduce_scatter_base(output, values, opts) for output, values in pairs])

    def allgather_into_tensor_coalesced(
        self, output_lists: list[Tensor], input_list: list[Tensor], opts: Any = _GATHERED
    ) -> dist.Work:
        """One after the other."""
        pairs = zip(output_lists, input_list, strict=True)
        return _Works([self._allgather_base(output, values, opts) for output, values in pairs])

    def shutdown(self) -> None:
        """End the threads; torch calls it when the group is destroyed."""
        with ExitStack() as ends:
            for backend in self._exact.values():
                ends.callback(backend.shutdown)
            while self._lanes:
                ends.callback(self._lanes.popitem()[1].channel.close, seconds=CLOSE_SECONDS)

    # How

    def _is_ours(self, tensors: Sequence[Tensor], op: Any) -> bool | None:
        """Whether it is a mean (True) or a sum (False) that travels encoded; None: it is torch's."""
        mean = op == dist.ReduceOp.AVG  # `in` finds neither
        floats = all(tensor.is_floating_point() and tensor.layout == torch.strided for tensor in tensors)
        for tensor in tensors if floats else ():
            check_memory("the tensor of this collective", tensor)
            check_width("the tensor of this collective", tensor)
        if not floats or not (mean or op == dist.ReduceOp.SUM) or self.size() == 1:
            return None
        return mean if sum(tensor.nbytes for tensor in tensors) >= self.options.exact_below else None

    def _torchs(self, args: Any) -> Any:
        """Torch's backend for the first tensor in these, gloo if there is none."""
        while isinstance(args, list | tuple) and args:
            args = args[0]
        kind = args.device.type if isinstance(args, Tensor) else "cpu"
        if kind not in self._exact:
            raise ValueError(
                f"process group {self._name!r} of this process has {' and '.join(self._exact)} tensors only, got one "
                f"on {kind!r}: move it to the CPU, or install a torch with NCCL"
            )
        return self._exact[kind]

    def _run(self, what: str, out: list[Tensor], task: Callable[[_Lane, list[Tensor], int], None]) -> dist.Work:
        self._torchs(out)
        device = out[0].device
        if device.type not in self._lanes:
            algorithm = self.options.algorithm
            assert isinstance(algorithm.codec, Codec)
            how = algorithm.codec, algorithm.collective, self.options.exact_below
            lane = _Lane(algorithm, peers_for(*how, device, self._timeout, self.stats, self), device)
            self._lanes[device.type] = lane
        lane, seed = self._lanes[device.type], derive_seed(0, self._calls)
        self._calls += 1
        self.stats.exchanges += 1
        where = f"in {what} {self._calls} of process group {self.group_name} ({self._name})"
        written = [memory_of(tensor) for tensor in out]
        exchange = lane.peers.submit(lambda: task(lane, written, seed), where)
        promise = Promise(out, device)
        lane.channel.futures.keep(promise, [exchange])
        return _Work(exchange, promise.future, out)


class _Lane:
    """The peers of a group for one type of device, and the sums that they take."""

    def __init__(self, algorithm: AllReduce, peers: Peers, device: torch.device) -> None:
        assert isinstance(algorithm.codec, Codec)
        self._codec: Codec = algorithm.codec
        self._collective: Collective = algorithm.collective
        self.peers, self.channel = peers, Channel(peers, device, algorithm.codec_threads)

    def sum_(self, tensors: Sequence[Tensor], mean: bool, seed: int) -> None:
        """Replace the tensors, of one dtype, by their sums or means."""
        first = tensors[0]

        def sum_(values: Tensor) -> None:
            if mean:
                values.mul_(1 / self.peers.size)
            mean_(Summand(values, wire_of(self._codec, first.dtype), seed=seed), self.peers, self._collective)

        if len(tensors) == 1 and first.is_contiguous() and sums_dtype(first.dtype) == first.dtype:
            sum_(first.view(-1))
            return
        wide = [tensor.to(sums_dtype(tensor.dtype)) for tensor in tensors]
        for tensor, values in zip(tensors, in_flats(wide, sum_), strict=True):
            tensor.copy_(values)

    def scatter_(self, output: Tensor, values: Tensor, mean: bool, seed: int) -> None:
        """This rank's chunk of the sums or means becomes `output`; `values` stay as they are."""
        wide = values.reshape(-1).to(sums_dtype(values.dtype), copy=True)
        if mean:
            wide.mul_(1 / self.peers.size)
        self._collective.scatter_(Summand(wide, wire_of(self._codec, values.dtype), seed=seed), self.peers)
        output.copy_(wide.chunk(self.peers.size)[self.peers.rank].view(output.shape))

    def gather_(self, output: Tensor, values: Tensor) -> None:
        """All ranks' values, bit for bit."""
        flat = output.view(-1)
        flat.chunk(self.peers.size)[self.peers.rank].copy_(values.reshape(-1))
        Ring().gather_(flat, self.peers)


class _Work(dist.Work):
    """An exchange under way, which changes the tensors `out`."""

    def __init__(self, exchange: Waitable, future: Future[Any], out: list[Tensor]) -> None:
        super().__init__()
        self._exchange, self._future, self._out = exchange, future, out
        self._waited = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until it is done (on a GPU: the current stream waits). PeerLostError if a rank is lost."""
        del timeout  # the group's own counts
        self._exchange.wait()
        self._waited = True  # another thread may not yet have told the future
        return True

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return self._waited or self._future.done()

    def get_future(self) -> Future[Any]:
        """Its tensors, once it is done."""
        return self._future

    def result(self) -> list[Tensor]:
        """Its tensors. RuntimeError before it has ended; it raises the error of the exchange."""
        if not self.is_completed():
            raise RuntimeError("this collective has not ended: call wait() before result()")
        self._exchange.wait()
        return self._out


class _Works(dist.Work):
    """Several of them."""

    def __init__(self, works: list[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for each."""
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)
