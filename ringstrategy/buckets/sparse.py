"""A sparse gradient: its rows and their indices travel, and stay sparse."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from ringstrategy.buckets.base import Bucket
from ringstrategy.buckets.slot import Slot
from ringstrategy.collectives.base import Collective, Summand, sums_dtype
from ringstrategy.transport.agree import BUCKET, INDENT, all_gather
from ringstrategy.transport.base import Peers, Waitable


class SparseBucket(Bucket):
    """One sparse gradient: rows and their indices go to everyone, and everyone adds them in rank order; no codec."""

    def __init__(self, index: int, name: str, parameter: Parameter) -> None:
        super().__init__(index, [Slot(name, parameter, torch.empty(0, dtype=parameter.dtype, device=parameter.device))])
        self._indices = torch.empty(0, device="cpu")
        self._values = torch.empty(0, device="cpu")
        self._mean: Tensor | None = None

    @property
    def numel(self) -> int:
        """Elements of the rows of all ranks, after equal indices were added up."""
        return 0 if self._mean is None else self._mean.values().numel()

    def describe(self) -> str:
        """One line."""
        slot = self.slots[0]
        parameter = f"{INDENT}{slot.name}: {tuple(slot.parameter.shape)} {slot.parameter.dtype} sparse"
        return f"{BUCKET}{self.index}: sparse\n{parameter}"

    @torch.no_grad()
    @override
    def gather(self, divisor: float) -> None:
        name, parameter = self.slots[0].name, self.slots[0].parameter
        grad = parameter.grad if math.isfinite(divisor) else None
        if grad is not None and not grad.is_sparse:
            raise TypeError(f"parameter {name} got a dense gradient, but its module has `sparse=True`: set it to False")
        if grad is None:
            self._indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
            dtype = sums_dtype(parameter.dtype)
            self._values = torch.empty(0, *parameter.shape[1:], dtype=dtype, device=parameter.device)
        else:
            rows = grad.detach().coalesce()
            if rows.sparse_dim() != 1:
                raise TypeError(f"the gradient of {name} is sparse in {rows.sparse_dim()} dimensions; only rows can be")
            self._indices = rows.indices().contiguous()
            self._values = rows.values().to(sums_dtype(parameter.dtype)) / divisor

    def warm_up(self, peers: Peers, collective: Collective) -> None:
        """See `Bucket.warm_up`: each rank sends one row of zeros, if there is one."""
        parameter, rows = self.slots[0].parameter, min(1, self._height)
        self._indices = torch.zeros(1, rows, dtype=torch.int64, device=parameter.device)
        dtype = sums_dtype(parameter.dtype)
        self._values = torch.zeros(rows, *parameter.shape[1:], dtype=dtype, device=parameter.device)
        peers.submit(lambda: self._exchange(peers, [rows] * peers.size), "while setting up").wait()
        self._mean = None

    def launch(
        self,
        peers: Peers,
        collective: Collective,
        agreed: Waitable,
        seed: int,
        where: str,
        flags: Tensor | None = None,
        riders: Sequence[Summand] = (),
    ) -> Waitable:
        """How many rows each rank has, then the rows."""
        assert flags is None
        assert not riders
        counts: list[Tensor] = []

        def count() -> None:
            agreed.wait()
            own = torch.tensor([self._indices.shape[1]], device="cpu").view(torch.uint8)
            counts.append(all_gather(peers.control, own)().view(torch.int64).view(-1))

        counted = peers.control.submit(count, where)

        def work() -> None:
            counted.wait()
            received = [int(rows) for rows in counts[0]]
            for rank, rows in enumerate(received):
                if not 0 <= rows <= self._height:  # equal indices were added up
                    raise self._broken(rank, f"{rows} rows")
            self._exchange(peers, received)

        return peers.submit(work, where)

    def _exchange(self, peers: Peers, counts: list[int]) -> None:
        shape = self._values.shape[1:]
        indices = [self._indices.new_empty(1, rows) for rows in counts]
        values = [self._values.new_empty(rows, *shape) for rows in counts]
        indices[peers.rank], values[peers.rank] = self._indices, self._values
        handles = []
        for target, source in peers.pairs():
            for tensors in (indices, values):
                sent, arriving = (tensors[rank].view(-1).view(torch.uint8) for rank in (peers.rank, source))
                handles.append(peers.swap(target, sent, source, arriving))
        for handle in handles:
            handle.wait()
        arrived = torch.cat(indices, 1)
        if ((arrived < 0) | (arrived >= self._height)).any():  # an optimizer would write outside of the parameter
            for rank, rows in enumerate(indices):
                for row in rows[(rows < 0) | (rows >= self._height)].tolist():
                    raise self._broken(rank, f"row {row}")
        whole = torch.sparse_coo_tensor(
            arrived, torch.cat(values), self.slots[0].parameter.shape, check_invariants=False
        )
        self._mean = whole.coalesce().to(self.slots[0].parameter.dtype)

    @property
    def _height(self) -> int:
        return self.slots[0].parameter.shape[0]

    def _broken(self, rank: int, what: str) -> ValueError:
        return ValueError(
            f"rank {rank} sent {what} of the gradient of {self.slots[0].name}, which has {self._height} rows: its "
            "message is damaged, or the parameter has another shape there; check the network, and build the same model "
            "on all ranks"
        )

    @override
    def scatter(self, used: Callable[[Slot], bool]) -> None:
        slot = self.slots[0]
        if slot.trains and (slot.parameter.grad is not None or used(slot)):
            slot.parameter.grad = self._mean
