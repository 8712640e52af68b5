"""Gradients of FSDP2 through a codec, with error feedback: each module has residuals of its own.

fully_shard(model)
residuals = ringstrategy.fsdp(model, BlockInt(4))  # or between replicas (HSDP), if it is given their mesh
...
torch.distributed.checkpoint.save({"model": ..., "residuals": residuals}, checkpoint_id=folder)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Module
from typing_extensions import override

from ringstrategy.codecs import BlockInt, Codec, Identity, derive_seed
from ringstrategy.codecs.cast import wire_of
from ringstrategy.collectives import BySize, Collective
from ringstrategy.collectives.base import Summand, mean_, sums_dtype
from ringstrategy.integrations.encoded import at_exit, peers_for
from ringstrategy.transport.base import Peers
from ringstrategy.transport.stats import Stats


def fsdp(
    module: Module,
    codec: Codec | None = None,
    *,
    collective: Collective | None = None,
    error_feedback: bool = True,
    residual_dtype: torch.dtype = torch.float32,
    exact_below: int = 1 << 16,
    mesh: DeviceMesh | None = None,
    timeout: timedelta = default_pg_timeout,
) -> FsdpResiduals:
    """From now on the gradients of a module that was given to `fully_shard` are reduced through a codec.

    Parameters are gathered by torch, exactly. Ranks sum the same gradients at the same time, as FSDP2 makes them.

    With a mesh of replicas (HSDP) they are reduce-scattered by torch, exactly, and the mean over replicas travels
    through the codec: shard within each host, and encode between hosts. FSDP2 knows nothing of the other replicas: all
    begin with the parameters of replica 0, but not with its buffers, and `set_requires_all_reduce` has no effect
    (accumulate by `set_requires_gradient_sync`). Of a module that knows them (`fully_shard` was given the whole mesh)
    the mean over replicas is torch's, or of its backend, without feedback (see `RingProcessGroup`).

    Args:
        module: all of its parts that `fully_shard` was called on.
        codec: what travels; None: `BlockInt(8)`.
        collective: how; None: `BySize()`. Without `mesh` it needs a reduce-scatter: Ring(), Direct() or BySize().
        error_feedback: add what the codec lost to the next step's gradients. It costs, on each rank, memory of the size
            of all *unsharded* gradients: what a rank encodes are the parts that it sends to the others. Between
            replicas: of its shards.
        residual_dtype: of that memory; `torch.bfloat16` halves it, and loses up to 1/512 of each residual a step.
        exact_below: modules of fewer bytes of gradients (between replicas: of its shards) travel exactly.
        mesh: of two dimensions, (replicas, shards), of which `fully_shard` was given the second: `mesh["shard"]`.
        timeout: how long a rank may stay silent before it counts as lost (`PeerLostError`).

    Returns:
        The residuals, to be saved with a checkpoint.

    Raises:
        ValueError: nothing in the module is sharded, or the codec cannot travel this way.
    """
    codec, collective = BlockInt(8) if codec is None else codec, BySize() if collective is None else collective
    if not isinstance(codec, Codec):
        raise TypeError(f"codec is a ringstrategy codec such as BlockInt(8), got {codec!r}")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and sum(isinstance(p, Shard) for p in parameter.placements) > 1:
            raise ValueError(
                f"{name} is sharded along two dimensions of its mesh, as with tensor parallelism: ringstrategy.fsdp "
                "takes FSDP2 and HSDP. Use a process group, dist.new_group(backend=...), for its mesh instead"
            )
    collective.check(codec)
    if mesh is None:
        collective.check_scatters()
    else:
        _check_replicas(module, mesh)
    sharded: dict[str, FSDPModule] = {}
    states = set()
    for name, part in module.named_modules():
        if isinstance(part, FSDPModule) and part._get_fsdp_state() not in states:  # parts can be sharded as one
            states.add(part._get_fsdp_state())
            sharded[name] = part
    if not sharded:
        raise ValueError("nothing in this module is sharded: call torch.distributed.fsdp.fully_shard on it first")
    if mesh is not None:
        with torch.no_grad():
            for parameter in module.parameters():
                assert isinstance(parameter, DTensor)
                dist.broadcast(parameter.to_local(), group=mesh.get_group(0), group_src=0)
    return FsdpResiduals(sharded, codec, collective, error_feedback, residual_dtype, exact_below, mesh, timeout)


def _check_replicas(module: Module, mesh: DeviceMesh) -> None:
    """Raise unless the module is sharded in the second dimension of the mesh, and has its values."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2:
        raise ValueError(f"mesh has two dimensions, replicas and shards: init_device_mesh(..., (2, 4)); got {mesh!r}")
    place = mesh.get_coordinate()
    shards = [] if place is None else mesh.mesh[place[0]].tolist()
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor) or parameter.device_mesh.mesh.tolist() != shards:
            raise ValueError(
                f"{name} is not sharded in the second dimension of the mesh: give that alone to fully_shard, such as "
                'mesh["shard"], and both to ringstrategy.fsdp'
            )
        if parameter.is_meta:
            raise ValueError(f"{name} has no values yet, and replicas begin with the same: initialise the model first")


class FsdpResiduals:
    """What the codec lost of each module's gradients on this rank; made by `fsdp`.

    It can be saved and loaded by `torch.distributed.checkpoint`, with as many ranks as before.

    Attributes:
        codec: what travels.
        stats: bytes that its exchanges handed to the transport, and waits.
    """

    def __init__(
        self,
        sharded: dict[str, FSDPModule],
        codec: Codec,
        collective: Collective,
        error_feedback: bool,
        residual_dtype: torch.dtype,
        exact_below: int,
        mesh: DeviceMesh | None,
        timeout: timedelta,
    ) -> None:
        self.stats = Stats(steps=None)
        self.codec, self._collective, self._exact_below = codec, collective, exact_below
        self._timeout = timeout
        self._peers: dict[tuple[dist.ProcessGroup, torch.device], Peers] = {}
        self._ends = ExitStack()
        self._reductions: list[_Reduction] = []
        dtype = residual_dtype if error_feedback and not codec.lossless else None
        for index, (name, part) in enumerate(sharded.items()):
            given = self, index, name, part, dtype, mesh
            if mesh is None:
                self._reductions.append(scatter := _ReduceScatter(*given))
                part.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]  # whose class is private
            else:
                self._reductions.append(mean := _MeanOfReplicas(*given))
                part.set_all_reduce_hook(mean)

    def exchange(
        self,
        reduce: Callable[[Collective, Summand, Peers], None],
        summand: Summand,
        group: dist.ProcessGroup,
        where: str,
    ) -> int:
        """Reduce the summand in the ranks of `group`, and wait; returns this rank's place there."""
        device = summand.values.device
        if (group, device) not in self._peers:
            agreed = self.codec, self._collective, self._exact_below, device, self._timeout, self.stats
            made = self._peers[group, device] = peers_for(*agreed, group)
            self._ends.callback(made.close)
            self._ends.callback(at_exit(lambda error: made.close()))
        peers = self._peers[group, device]
        self.stats.exchanges += 1
        peers.finish([peers.submit(lambda: reduce(self._collective, summand, peers), where)])
        return peers.rank

    def codec_of(self, gradients: Tensor) -> Codec:
        """How they travel."""
        return wire_of(Identity() if gradients.nbytes < self._exact_below else self.codec, gradients.dtype)

    def state_dict(self) -> dict[str, Any]:
        """By module its residual, as a DTensor of which each rank has one row; and how many steps were made."""
        return {
            each.name or "root": {"residual": each.as_tensor(), "calls": each.calls}
            for each in self._reductions
            if each.feeds_back
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what `state_dict` gave, on as many ranks, with the same module."""
        for each in self._reductions:
            if each.feeds_back:
                saved = state[each.name or "root"]
                each.load(saved["residual"], saved["calls"])

    def close(self) -> None:
        """End the threads. Idempotent, never a collective; torch's own groups stay."""
        self._peers.clear()
        self._ends.close()


class _Reduction(ABC):
    """How the gradients of one module are reduced, and what the codec lost of them."""

    def __init__(
        self,
        owner: FsdpResiduals,
        index: int,
        name: str,
        module: FSDPModule,
        residual_dtype: torch.dtype | None,
        mesh: DeviceMesh | None,
    ) -> None:
        self.name, self.calls = name, 0
        self._owner, self._index, self._module, self._dtype = owner, index, module, residual_dtype
        self._mesh = mesh
        self._residual: Tensor | None = None

    @staticmethod
    @abstractmethod
    def reduce(collective: Collective, summand: Summand, peers: Peers) -> None:
        """Reduce the summand's values in place."""

    @property
    def feeds_back(self) -> bool:
        """Whether it has residuals."""
        return self._dtype is not None and bool(self._own_parameters())

    def _exchange(self, gradients: Tensor, scale: float, group: dist.ProcessGroup) -> tuple[Tensor, int]:
        """Reduce the gradients times `scale`, which may be changed; also returns this rank's place in the group."""
        values = gradients.to(sums_dtype(gradients.dtype))
        if scale != 1:
            values.mul_(scale)
        codec = self._owner.codec_of(gradients)
        residual = self._residual_for(values) if codec == self._owner.codec else None  # else it travels exactly
        seed = derive_seed(self._index, self.calls)
        self.calls += 1
        where = f"in reduction {self.calls} of module {self.name or 'root'!r}"
        summand = Summand(values, codec, residual, residual, seed)
        return values, self._owner.exchange(self.reduce, summand, group, where)

    def _residual_for(self, values: Tensor) -> Tensor | None:
        if not self.feeds_back:
            return None
        residual = self._made(values.device)
        if residual.numel() != values.numel():
            raise ValueError(
                f"module {self.name or 'root'!r} has gradients of {values.numel()} values in this step, and of "
                f"{residual.numel()} if all its parameters have one: nobody could tell whose residuals are whose. Use "
                "all parameters in each forward, freeze those that are never used before you call ringstrategy.fsdp "
                "(or call it again), or pass error_feedback=False"
            )
        return residual

    def _made(self, device: torch.device) -> Tensor:
        if self._residual is None:
            self._residual = torch.zeros(self._numel(), dtype=self._dtype, device=device)
        return self._residual

    def _numel(self) -> int:
        """Of the gradients of all parameters, as FSDP2 pads them; of replicas, of a rank's shards."""
        total = 0
        for parameter in self._own_parameters():
            parts = parameter.device_mesh.size(-1)
            rows, *rest = parameter.shape if parameter.dim() else (1,)
            sharded_by_rows = any(isinstance(p, Shard) and p.dim == 0 for p in parameter.placements)
            rows = -(-rows // parts) * parts if sharded_by_rows else rows
            total += rows * torch.Size(rest).numel() // (1 if self._mesh is None else parts)
        return total

    def _own_parameters(self) -> list[DTensor]:
        """Those that FSDP2 sums in this module's reduce-scatter."""
        group = self._module._get_fsdp_state()._fsdp_param_group
        parameters: list[Any] = [] if group is None else [fsdp_param.sharded_param for fsdp_param in group.fsdp_params]
        return [parameter for parameter in parameters if parameter.requires_grad]

    def as_tensor(self) -> DTensor:
        """One row a rank."""
        parameter = self._own_parameters()[0]
        mesh, residual = self._mesh or parameter.device_mesh, self._made(parameter.to_local().device)
        return DTensor.from_local(
            residual.view(*[1] * mesh.ndim, -1), mesh, [Shard(dim) for dim in range(mesh.ndim)], run_check=False
        )

    def load(self, saved: DTensor, calls: int) -> None:
        """Go on with this."""
        local = saved.to_local().reshape(-1)
        residual = self._made(local.device)
        if local.numel() != residual.numel():
            raise ValueError(
                f"the saved residual of module {self.name or 'root'!r} has {local.numel()} values for this rank, and "
                f"{residual.numel()} are needed: load residuals with as many ranks as saved them, or begin without them"
            )
        residual.copy_(local)
        self.calls = calls


class _ReduceScatter(_Reduction):
    """What FSDP2 calls for one of its modules: a `torch.distributed.fsdp` ReduceScatter."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the gradients, or for the sum of this rank's part."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """See `torch.distributed.reduce_scatter_tensor`; the input may be changed."""
        assert not async_op, "FSDP2 waits by streams"
        mean = op == dist.ReduceOp.AVG
        if not mean and op != dist.ReduceOp.SUM:
            raise ValueError(
                f"ringstrategy.fsdp sums or averages, got {op}: with set_gradient_divide_factor also call "
                "set_force_sum_reduction_for_comms(True)"
            )
        values, rank = self._exchange(input_tensor, 1 / group.size() if mean else 1.0, group)
        output_tensor.copy_(values.chunk(group.size())[rank])

    @staticmethod
    @override
    def reduce(collective: Collective, summand: Summand, peers: Peers) -> None:
        collective.scatter_(summand, peers)


class _MeanOfReplicas(_Reduction):
    """What FSDP2 calls when this rank has its shard of the gradients, reduced within its replica."""

    def __call__(self, reduce_output: Tensor) -> None:
        """It becomes the mean over replicas, with the same bits in all of them."""
        assert self._mesh is not None
        if reduce_output.is_cuda:  # FSDP2 frees it for its other streams: only of its own HSDP does it keep it
            reduce_output.record_stream(torch.cuda.current_stream())
        group = self._module._get_fsdp_state()._fsdp_param_group
        # a factor that the user gave divides the sum over all ranks, as with FSDP2's own HSDP
        divides = group is None or group.gradient_divide_factor is None
        values, _ = self._exchange(reduce_output, 1 / self._mesh.size(0) if divides else 1.0, self._mesh.get_group(0))
        if values is not reduce_output:
            reduce_output.copy_(values)

    @staticmethod
    @override
    def reduce(collective: Collective, summand: Summand, peers: Peers) -> None:
        mean_(summand, peers, collective)
