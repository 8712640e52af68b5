"""Gradients as matrices whose factors travel (PowerSGD, Vogels et al. 2019)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from ringstrategy.buckets.base import Bucket
from ringstrategy.buckets.dense import DenseBucket
from ringstrategy.buckets.residuals import may_read
from ringstrategy.buckets.slot import Slot
from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.collectives.base import Collective, Summand, mean_
from ringstrategy.kernels import operations
from ringstrategy.transport.base import Peers, Waitable

_BLOCK = 1 << 18  # elements of a product that is added to others while it is in the cache


class LowRankBucket(Bucket):
    """Matrices whose factors are exchanged together, in two collectives: first all p, then all q.

    In the scale of the buffer (scaled at the source) with M = gradient + residual: delivered = p q^T for
    q = sum of M^T p, and the new residual is M - delivered / size, so that sum of M == delivered + sum of residuals.

    Args:
        dense: the same parameters' buffer, residual and slots; gathers and scatters.
        rank: columns of p and q.
        codec: for p and q.
    """

    def __init__(self, dense: DenseBucket, rank: int, codec: Codec) -> None:
        super().__init__(dense.index, dense.slots, dense.residuals.lost)
        self._dense, self._rank, self._codec = dense, rank, codec
        codec.warm_up(dense.buffer.device)
        shapes = [matrix_shape(slot.parameter) for slot in self.slots]
        buffer = dense.buffer
        self._shapes = shapes
        self._lefts = Factors([rows for rows, _ in shapes], rank, buffer)
        self._rights = Factors([columns for _, columns in shapes], rank, buffer)
        self._queries = Factors([columns for _, columns in shapes], rank, buffer)
        for place, query in enumerate(self._queries.each):
            generator = torch.Generator().manual_seed(derive_seed(0, dense.index, place))
            # uniform: it needs no function whose last bit differs between CPU models
            query.copy_(torch.rand(query.shape, generator=generator, device="cpu") - 0.5)

    @property
    def _matrices(self) -> list[Tensor]:
        return [_as_matrix(slot.view, shape) for slot, shape in zip(self.slots, self._shapes, strict=True)]

    @property
    def numel(self) -> int:
        """Elements of the matrices."""
        return self._dense.numel

    def state(self) -> dict[str, Tensor]:
        """Each parameter's q, shape (rank, columns)."""
        return {slot.name: query for slot, query in zip(self.slots, self._queries.each, strict=True)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See `Bucket.load_state`. A ValueError if it was written with another rank."""
        for name, query in self.state().items():
            if name not in state:
                continue
            if state[name].shape != query.shape:
                raise ValueError(
                    f"the checkpoint's factor of {name} has shape {tuple(state[name].shape)}, which is (rank, columns),"
                    f" and this run's {tuple(query.shape)}: resume with the rank that it was written with"
                )
            query.copy_(state[name])

    def describe(self) -> str:
        """As the dense bucket, then the shapes of the factors."""
        shapes = ", ".join(
            f"{left.shape[1]} + {right.shape[1]}"
            for left, right in zip(self._lefts.each, self._rights.each, strict=True)
        )
        return f"{self._dense.describe()}\n  as factors of rank {self._rank}: {shapes}"

    @torch.no_grad()
    def gather(self, divisor: float) -> None:
        """See `Bucket.gather`. Adds the residual in the same pass over the memory."""
        grads, given = [slot.parameter.grad for slot in self.slots], self.residuals.given
        if given is None or any(grad is not None and grad.is_sparse for grad in grads):
            self._dense.gather(divisor)  # which says what to do about a sparse one
            self._dense.fill()
            return
        self._dense.leave_held_memory()
        for slot, grad in zip(self.slots, grads, strict=True):
            if grad is None or not slot.trains:
                slot.release()
                slot.view.zero_()  # its residual waits aside
            elif math.isinf(divisor):
                slot.view.copy_(slot.like_view(given))
            else:
                torch.add(slot.like_view(given), grad.detach(), alpha=1 / divisor, out=slot.view)

    @override
    def take_gradients(self) -> None:
        self._dense.take_gradients()

    def warm_up(self, peers: Peers, collective: Collective) -> None:
        """See `Bucket.warm_up`. From zeros no q is learnt."""
        seed = derive_seed(0, 0, self.index)
        lost = self.residuals.lost  # holds a residual already, if a checkpoint had one
        kept = None if lost is None else lost.clone()
        peers.submit(lambda: self._mean_(peers, collective, seed), "while setting up").wait()
        if lost is not None and kept is not None:
            lost.copy_(kept)
        self._dense.warm_up_copies()
        self.residuals.warm_up()

    @override
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
        assert flags is None
        assert not riders

        def work() -> None:
            agreed.wait()
            self._mean_(peers, collective, seed)

        return peers.submit(work, where)

    @torch.no_grad()
    def _mean_(self, peers: Peers, collective: Collective, seed: int) -> None:
        matrices, given, lost = self._matrices, self.residuals.given, self.residuals.lost
        orthonormalise_ = operations.orthonormalise_.on(self._lefts.flat.device)
        for matrix, query, left in zip(matrices, self._queries.each, self._lefts.each, strict=True):
            torch.mm(query, matrix.T, out=left)
        mean_(Summand(self._lefts.flat, self._codec, seed=derive_seed(seed, 0)), peers, collective)
        for columns in self._lefts.groups:
            orthonormalise_(columns)
        for matrix, left, right in zip(matrices, self._lefts.each, self._rights.each, strict=True):
            torch.mm(left, matrix, out=right)
        mean_(Summand(self._rights.flat, self._codec, seed=derive_seed(seed, 1)), peers, collective)

        for rights, queries in zip(self._rights.groups, self._queries.groups, strict=True):
            # A NaN or an infinity has spread to p and q; the sum of largest bounds every element of p q^T.
            sound = rights.abs().amax(-1).sum(-1).isfinite()
            rights.masked_fill_(~sound[:, None, None], torch.nan)
            fresh = rights.clone()
            orthonormalise_(fresh)
            alive = fresh.abs().amax(-1, keepdim=True) > 0  # neither NaN nor nothing, for that would stay so
            queries.copy_(torch.where(alive, fresh, queries))
        for slot, matrix, left, right in zip(self.slots, matrices, self._lefts.each, self._rights.each, strict=True):
            if given is not None and lost is not None:
                shape = tuple(matrix.shape)
                before, after = (_as_matrix(slot.like_view(whole), shape) for whole in (given, lost))
                subtract(matrix, left, right, 1 / peers.size, before, out=after)
            multiply(left, right, out=matrix)

    @override
    def scatter(self, used: Callable[[Slot], bool]) -> None:
        self._dense.scatter(used)


def matrix_shape(parameter: Parameter) -> tuple[int, int]:
    """Rows and columns of the parameter's memory: rows are its outermost dimension that is longer than 1."""
    strides = torch.empty_like(parameter, device="meta").stride()
    longer = [(stride, length) for stride, length in zip(strides, parameter.shape, strict=True) if length > 1]
    rows = max(longer)[1] if longer else 1
    return rows, parameter.numel() // rows


def _as_matrix(view: Tensor, shape: tuple[int, ...]) -> Tensor:
    return view.as_strided(shape, (shape[1], 1), view.storage_offset())


class Factors:
    """One factor of each matrix, shape (rank, length), those of equal length side by side in one flat buffer.

    Attributes:
        flat: the buffer.
        groups: those of one length each, shape (how many, rank, length).
        each: those of each matrix, in the order of `lengths`.
    """

    def __init__(self, lengths: Sequence[int], rank: int, like: Tensor) -> None:
        self.flat = like.new_zeros(rank * sum(lengths))
        places = sorted(range(len(lengths)), key=lambda place: lengths[place])
        each: dict[int, Tensor] = {}
        self.groups: list[Tensor] = []
        offset = 0
        for length in sorted(set(lengths)):
            members = [place for place in places if lengths[place] == length]
            group = self.flat[offset : offset + len(members) * rank * length].view(len(members), rank, length)
            offset += group.numel()
            self.groups.append(group)
            each.update(zip(members, group, strict=True))
        self.each = [each[place] for place in range(len(lengths))]


def multiply(left: Tensor, right: Tensor, *, out: Tensor) -> None:
    """out = left^T right for factors (rank, n) and (rank, m), rank by rank: the same bits on every CPU."""
    # no fused multiply-add, which not every CPU has: each product is rounded, then added
    rows = out.shape[0] if out.device.type != "cpu" else max(1, _BLOCK // out.shape[1])
    if len(left) == 1:
        rows = out.shape[0]
    for begin in range(0, out.shape[0], rows):
        block = out[begin : begin + rows]
        torch.mul(left[0, begin : begin + rows, None], right[0], out=block)
        for column, row in zip(left[1:, begin : begin + rows, None], right[1:], strict=True):
            block.add_(column * row)


def subtract(matrix: Tensor, left: Tensor, right: Tensor, share: float, before: Tensor, *, out: Tensor) -> None:
    """out = matrix - share * left^T right, or `before` (perhaps `out` itself) if `right` is NaN."""
    sound = right[0, 0].isfinite()
    on_cpu = may_read(sound)
    if on_cpu and not sound:
        out.copy_(before)
        return
    rest = out if on_cpu else torch.empty_like(out)
    torch.addr(matrix, left[0], right[0], alpha=-share, out=rest)
    for column, row in zip(left[1:], right[1:], strict=True):
        rest.addr_(column, row, alpha=-share)
    if not on_cpu:
        torch.where(sound, rest, before, out=out)
