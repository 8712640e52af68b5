"""The ranks of a process set, joined: their collectives, exact ones by torch's backend and sums by our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ringstrategy.codecs.base import Codec
from ringstrategy.collectives.base import Summand, sums_dtype
from ringstrategy.integrations.horovod.compression import collective_for
from ringstrategy.integrations.horovod.named import NamedOperations
from ringstrategy.transport.backend import backend_of
from ringstrategy.transport.base import Peers, TransportError
from ringstrategy.transport.connect import connect
from ringstrategy.transport.stats import Stats

_GENERATION = "ringstrategy/horovod"
_NOBODYS_TAG = (1 << 20) + 1
CPU = torch.device("cpu")


def _as_bytes(values: Tensor) -> Tensor:
    """A view: gloo does not move all dtypes."""
    return values.view(-1).view(torch.uint8)


class Members:
    """A process set while it is in use, on one of its ranks.

    All ranks of the default process group make the group; only its members make this.

    Args:
        group: its ranks, with gloo for CPU tensors.
        timeout: how long a rank may stay silent.
        stats: counters to add to.

    Attributes:
        ranks: as all ranks count them.
        rank: this one, among them.
        size: how many.
        operations: with names.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta, stats: Stats) -> None:
        self.group, self.ranks = group, dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._timeout, self._stats = timeout, stats
        self._steps = 0
        self._peers: dict[str, Peers] = {"cpu": connect(CPU, timeout, stats, group=group)}
        base = dist.distributed_c10d._get_default_store()
        which = f"{_GENERATION}/{','.join(map(str, self.ranks))}"
        generation = base.add(f"{which}/{self.rank}", 1)  # the same on all of them
        store = dist.PrefixStore(f"{which}/{generation}", base)
        self._store = store
        self.operations = NamedOperations(store, self.rank, self.ranks, self._look, timeout)

    def check_device(self, device: torch.device) -> None:
        """ValueError with the cure if no backend moves tensors of this device."""
        if not backend_of(device.type, self.group):
            raise ValueError(
                f"a tensor on {device} cannot travel: the process group has no backend for {device.type} tensors. "
                "Move it to the CPU, or let hvd.init() make the process group (with GPUs it takes gloo and NCCL): do "
                "not call torch.distributed.init_process_group before, or name both there, 'cpu:gloo,cuda:nccl'"
            )

    def ticket(self, queue: str) -> int:
        """How many members have asked for one in this queue, this one included."""
        return int(self._store.add(f"ticket/{queue}", 1))

    def _look(self, where: str) -> None:
        """PeerLostError if a member is lost: others say so, or its connection is closed."""
        peers = self._peers["cpu"]
        lost = None if peers.detector is None else peers.detector.check(where)
        if lost is not None:
            raise lost
        nothing = torch.empty(1, dtype=torch.uint8)
        for peer, rank in enumerate(self.ranks):
            if peer != self.rank:
                try:
                    dist.irecv(nothing, rank, group=self.group, tag=_NOBODYS_TAG)  # nothing comes; gloo keeps 70 bytes
                except RuntimeError as error:
                    raise peers.explain(TransportError(peer, error), where) from error

    # Within an operation, on its thread, in the order of all ranks

    def sum_(self, values: Tensor, codec: Codec, finish_: Callable[[Tensor], None]) -> None:
        """Replace flat floating-point values by their sum over the members, which travels as `codec` says.

        `finish_` changes the sum, before it is rounded to the values' dtype.
        """
        wide = values.to(sums_dtype(values.dtype))
        self._exchange(wide, codec, collective_for(codec).sum_)
        finish_(wide)
        if wide is not values:
            values.copy_(wide)

    def scatter_(self, chunks: Tensor, codec: Codec, finish_: Callable[[Tensor], None]) -> Tensor:
        """The sum of this rank's chunk; `chunks`, of shape (size, length), floating-point, is used as scratch.

        For `finish_` see `sum_`.
        """
        wide = chunks.to(sums_dtype(chunks.dtype))
        self._exchange(wide.view(-1), codec, collective_for(codec).scatter_)
        finish_(wide[self.rank])
        return wide[self.rank].to(chunks.dtype)

    def reduce_(self, values: Tensor, how: dist.ReduceOp.RedOpType) -> None:
        """Replace values by what torch's backend makes of those of all members."""
        wide = values
        if values.is_floating_point():
            wide = values.to(sums_dtype(values.dtype))
        elif values.dtype in (torch.int16, torch.bool):  # which gloo does not add
            wide = values.int()
        dist.all_reduce(wide, how, group=self.group)
        if wide is not values:
            values.copy_(wide)

    def gather(self, values: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Each member's values; they differ only in the length of the first dimension, by rank in `lengths`."""
        longest = max(lengths)
        padded = values.new_zeros((longest, *values.shape[1:]))
        padded[: len(values)] = values
        everyone = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather([_as_bytes(whole) for whole in everyone], _as_bytes(padded), group=self.group)
        return [whole[:length] for whole, length in zip(everyone, lengths, strict=True)]

    def broadcast_(self, values: Tensor, root: int) -> None:
        """Replace contiguous values by those of a member, as all ranks count it."""
        dist.broadcast(_as_bytes(values), root, group=self.group)

    def all_to_all(self, values: Tensor, leaving: Sequence[int], arriving: Sequence[int]) -> Tensor:
        """Contiguous rows to each member and from each, so many of each."""
        arrived = values.new_empty((sum(arriving), *values.shape[1:]))
        row = values[:1].nbytes if len(values) else arrived[:1].nbytes
        there, back = [rows * row for rows in leaving], [rows * row for rows in arriving]
        dist.all_to_all_single(_as_bytes(arrived), _as_bytes(values), back, there, group=self.group)
        return arrived

    def _exchange(self, values: Tensor, codec: Codec, reduce: Callable[[Summand, Peers], None]) -> None:
        device = values.device
        if device.type not in self._peers:
            self._peers[device.type] = connect(device, self._timeout, self._stats, group=self.group)
        peers = self._peers[device.type]
        self._steps += 1
        summand = Summand(values, codec, seed=self._steps)
        peers.submit(lambda: reduce(summand, peers), f"in operation {self.operations.running!r}").wait()

    def tell(self, cause: str) -> None:
        """This rank ends in an error: tell the others why. No collective."""
        for peers in self._peers.values():
            peers.abort(cause)

    def close(self) -> None:
        """End threads and connections. No collective."""
        self.operations.close()
        for peers in self._peers.values():
            peers.close()
