"""Average gradients as matrices of low rank, with error feedback and a warm start (PowerSGD, Vogels et al. 2019)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ringstrategy.algorithms.gradients.synchronous import Synchronous
from ringstrategy.algorithms.local import Local
from ringstrategy.algorithms.policy import described
from ringstrategy.buckets.base import Bucket
from ringstrategy.buckets.dense import DenseBucket
from ringstrategy.buckets.plan import plan_buckets
from ringstrategy.buckets.slot import Slot
from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.codecs.identity import Identity
from ringstrategy.collectives.base import Collective, mean_
from ringstrategy.transport.base import Peers, Waitable

_WORTHWHILE = 2  # a matrix is compressed if its factors have at most 1/2 of its elements
_DEPENDENT = 1e-3  # a column with less than this left beside the columns before it is noise: it is dropped for a step
_BLOCK = 1 << 18  # elements of a product that is added to others while it is in the cache


class PowerSGD(Synchronous):
    """Synchronous data parallelism: instead of a gradient M (n x m) travel its factors, rank x (n + m) elements.

    With q from the last step: p = sum of M q over all ranks, made orthonormal; q' = sum of M^T p; the mean is p q'^T,
    and what it lacks is added to the next step's gradients. A gradient of more than two dimensions is a matrix whose
    rows are the outermost dimension of its memory (a convolution's output channels). Where factors would have more
    than half of the elements (biases, norms, small matrices), gradients travel whole in buckets of their own.

    All ranks hold the same bits, on different CPU models too: what follows the collectives is elementwise or added in
    one stated order. A NaN or an infinity on any rank makes that matrix NaN on all of them, and leaves its
    residuals and its q as they were.

    The log says at `setup` how much travels as factors, if not all does. That nothing does is a warning, which says the
    largest rank at which something would; no error, since the mean is right, and matrices may unfreeze later.

    Args:
        rank: columns of p and of q. Larger: closer, more bytes, more time in matrix products, and fewer matrices whose
            factors pay.
        codec: what travels instead of the factors' float32. Nothing that it loses is lost for good: feedback is
            taken from the mean that is delivered. Gradients that travel whole are never rounded.
        collective: how factors and whole gradients travel.
        error_feedback: keep what the mean lacks, a residual of the model's size. Without, it hardly learns.
        bucket_mb: megabytes of gradients whose factors travel together. See `Synchronous`, as for what follows.
        find_unused_parameters: see `Synchronous`.
        local: see `Synchronous`.
    """

    def __init__(
        self,
        rank: int = 1,
        codec: Codec | None = None,
        collective: Collective | None = None,
        error_feedback: bool = True,
        bucket_mb: float = 25.0,
        find_unused_parameters: bool = False,
        local: Local | None = None,
    ) -> None:
        super().__init__(collective, bucket_mb, find_unused_parameters, local)
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise ValueError(f"rank is how many columns a factor has: a whole number >= 1, got {rank!r}")
        self.rank = rank
        self.codec = Identity() if codec is None else codec
        if not isinstance(self.codec, Codec):
            raise TypeError(f"codec is a Codec such as ringstrategy.Identity(), got {codec!r}")
        if not isinstance(error_feedback, bool):
            raise TypeError(f"error_feedback is True or False, got {error_feedback!r}")
        self.collective.check(self.codec)
        self.error_feedback = error_feedback

    def __repr__(self) -> str:
        """The arguments."""
        return (
            f"PowerSGD(rank={self.rank}, codec={self.codec}, collective={self.collective}, "
            f"error_feedback={self.error_feedback}, bucket_mb={self.bucket_mb}, "
            f"find_unused_parameters={self.find_unused_parameters}, "
            f"local={described(self.local)})"
        )

    def setup(self, parameters: Mapping[str, Parameter], peers: Peers, *, sparse: frozenset[str] = frozenset()) -> None:
        """See `Algorithm.setup`."""
        super().setup(parameters, peers, sparse=sparse)
        factored = [slot.parameter for b in self._buckets if isinstance(b, LowRankBucket) for slot in b.slots]
        whole = [slot.parameter for b in self._buckets if isinstance(b, DenseBucket) for slot in b.slots]
        if whole and factored:
            self._news.append(_how_much(self.rank, factored, whole))
        elif whole and peers.rank == 0:
            warnings.warn(_nothing(self.rank, whole), stacklevel=2)

    def plan(self, parameters: Mapping[str, Parameter], sparse: frozenset[str], first_index: int) -> list[Bucket]:
        """See `Synchronous.plan`."""
        matrices = {n: p for n, p in parameters.items() if n not in sparse and _is_worthwhile(p, self.rank)}
        others = {name: parameter for name, parameter in parameters.items() if name not in matrices}
        feeds_back = self.error_feedback
        compressed = plan_buckets(
            matrices, frozenset(), lambda *_: self.codec, lambda _: feeds_back, self._capacity, first_index
        )
        whole = plan_buckets(others, sparse, lambda *_: Identity(), lambda _: False, self._capacity, first_index)
        # by the last to fill, as `plan_buckets` itself does
        place_of = {name: place for place, name in enumerate(reversed(list(parameters)))}
        buckets = sorted([*compressed, *whole], key=lambda bucket: max(place_of[s.name] for s in bucket.slots))
        for index, bucket in enumerate(buckets, start=first_index):
            bucket.index = index
            if isinstance(bucket, DenseBucket) and bucket.slots[0].name in matrices:
                buckets[index - first_index] = LowRankBucket(bucket, self.rank, self.codec)
        return buckets


class LowRankBucket(Bucket):
    """Matrices whose factors are exchanged together, in two collectives: first all p, then all q.

    In the scale of the buffer (1/size at the source) with M = gradient + residual: delivered = p q^T for
    q = sum of M^T p, and the new residual is M - delivered / size, so that sum of M == delivered + sum of residuals.

    Args:
        dense: the same parameters' buffer, residual and slots; gathers and scatters.
        rank: columns of p and q.
        codec: for p and q.
    """

    def __init__(self, dense: DenseBucket, rank: int, codec: Codec) -> None:
        super().__init__(dense.index, dense.slots, dense.residual)
        self._dense, self._rank, self._codec = dense, rank, codec
        shapes = [_matrix_shape(slot.parameter) for slot in self.slots]
        buffer = dense.buffer
        self._shapes = shapes
        self._lefts = _Factors([rows for rows, _ in shapes], rank, buffer)
        self._rights = _Factors([columns for _, columns in shapes], rank, buffer)
        self._queries = _Factors([columns for _, columns in shapes], rank, buffer)
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
    def gather(self, size: int) -> None:
        """See `Bucket.gather`. Adds the residual in the same pass over the memory."""
        grads = [slot.parameter.grad for slot in self.slots]
        if self._dense.residual is None or any(grad is not None and grad.is_sparse for grad in grads):
            self._dense.gather(size)  # which says what to do about a sparse one
            return
        self._dense.leave_held_memory()
        for slot, grad in zip(self.slots, grads, strict=True):
            assert slot.residual is not None
            if grad is None or not slot.trains:
                slot.release()
                slot.view.zero_()  # its residual waits aside
            else:
                torch.add(slot.residual, grad.detach(), alpha=1 / size, out=slot.view)

    def take_gradients(self) -> None:
        """See `Bucket.take_gradients`."""
        self._dense.take_gradients()

    def launch(self, peers: Peers, collective: Collective, agreed: Waitable, seed: int, where: str) -> Waitable:
        """See `Bucket.launch`."""

        def work() -> None:
            agreed.wait()
            self._mean_(peers, collective, seed)

        return peers.submit(work, where)

    @torch.no_grad()
    def _mean_(self, peers: Peers, collective: Collective, seed: int) -> None:
        matrices = self._matrices
        for matrix, query, left in zip(matrices, self._queries.each, self._lefts.each, strict=True):
            torch.mm(query, matrix.T, out=left)
        mean_(self._lefts.flat, peers, collective, self._codec, seed=derive_seed(seed, 0))
        for columns in self._lefts.groups:
            orthonormalise_(columns)
        for matrix, left, right in zip(matrices, self._lefts.each, self._rights.each, strict=True):
            torch.mm(left, matrix, out=right)
        mean_(self._rights.flat, peers, collective, self._codec, seed=derive_seed(seed, 1))

        for rights, queries in zip(self._rights.groups, self._queries.groups, strict=True):
            # A NaN or an infinity has spread to p and q; the sum of largest bounds every element of p q^T.
            sound = rights.abs().amax(-1).sum(-1).isfinite()
            rights.masked_fill_(~sound[:, None, None], torch.nan)
            fresh = rights.clone()
            orthonormalise_(fresh)
            alive = fresh.abs().amax(-1, keepdim=True) > 0  # neither NaN nor nothing, for that would stay so
            queries.copy_(torch.where(alive, fresh, queries))
        for slot, matrix, left, right in zip(self.slots, matrices, self._lefts.each, self._rights.each, strict=True):
            if slot.residual is not None:
                _subtract(matrix, left, right, 1 / peers.size, out=_as_matrix(slot.residual, tuple(matrix.shape)))
            multiply(left, right, out=matrix)

    def scatter(self, used: Callable[[Slot], bool]) -> None:
        """See `Bucket.scatter`."""
        self._dense.scatter(used)


class _Factors:
    """One factor of each matrix, shape (rank, length), those of equal length side by side in one flat buffer."""

    def __init__(self, lengths: Sequence[int], rank: int, like: Tensor) -> None:
        self.flat = like.new_zeros(rank * sum(lengths))
        places = sorted(range(len(lengths)), key=lambda place: lengths[place])
        each: dict[int, Tensor] = {}
        self.groups: list[Tensor] = []  # (how many, rank, length)
        offset = 0
        for length in sorted(set(lengths)):
            members = [place for place in places if lengths[place] == length]
            group = self.flat[offset : offset + len(members) * rank * length].view(len(members), rank, length)
            offset += group.numel()
            self.groups.append(group)
            each.update(zip(members, group, strict=True))
        self.each = [each[place] for place in range(len(lengths))]  # in the order of `lengths`


def orthonormalise_(columns: Tensor) -> None:
    """Gram-Schmidt, modified, over columns of shape (matrices, rank, length): the same bits on every CPU.

    A column that is zero or depends on those before it becomes zero; a NaN or an infinity makes its column NaN.
    """
    largest = columns.abs().amax(-1, keepdim=True)
    columns.div_(largest + (largest == 0))  # squares neither overflow nor vanish
    norm = _dot(columns, columns).sqrt_()
    columns.div_(norm + (norm == 0))
    for place in range(1, columns.shape[1]):
        before, rest = columns[:, place - 1 : place], columns[:, place:]
        rest.sub_(_dot(rest, before) * before)
        column = columns[:, place : place + 1]
        norm = _dot(column, column).sqrt_()
        dependent = norm < _DEPENDENT
        column.div_(norm + dependent).mul_(~dependent)


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """Sums of products over the last dimension, which is kept: halves are added elementwise until one is left."""
    # no torch dot or sum: their order of addition may differ on another CPU
    products = one * other
    while (length := products.shape[-1]) > 1:
        half = (length + 1) // 2
        products[..., : length - half].add_(products[..., half:])
        products = products[..., :half]
    return products


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


def _subtract(matrix: Tensor, left: Tensor, right: Tensor, share: float, *, out: Tensor) -> None:
    """out = matrix - share * left^T right; `out` stays as it is if `right` is NaN."""
    sound = right[0, 0].isfinite()
    on_cpu = out.device.type == "cpu"
    if on_cpu and not sound:  # on a CPU, asking waits for nothing
        return
    rest = out if on_cpu else torch.empty_like(out)
    torch.addr(matrix, left[0], right[0], alpha=-share, out=rest)
    for column, row in zip(left[1:], right[1:], strict=True):
        rest.addr_(column, row, alpha=-share)
    if not on_cpu:
        torch.where(sound, rest, out, out=out)


def _is_worthwhile(parameter: Parameter, rank: int) -> bool:
    return rank <= _largest_rank(parameter)


def _largest_rank(parameter: Parameter) -> int:
    """At which the parameter would be compressed; 0: at none."""
    rows, columns = _matrix_shape(parameter)
    return rows * columns // (_WORTHWHILE * (rows + columns)) if parameter.dtype.is_floating_point else 0


def _how_much(rank: int, factored: Sequence[Parameter], whole: Sequence[Parameter]) -> str:
    """In words."""
    elements, kept = (sum(parameter.numel() for parameter in some) for some in (factored, whole))
    travel = sum(rank * sum(_matrix_shape(parameter)) for parameter in factored)
    return (
        f"PowerSGD: {len(factored)} of {len(factored) + len(whole)} parameters travel as factors of rank {rank}, "
        f"{elements:,} elements as {travel:,}. The other {kept:,} elements travel whole, for factors would "
        "have more than half of each such parameter's elements"
    )


def _nothing(rank: int, whole: Sequence[Parameter]) -> str:
    """What to do about it, in words."""
    largest = max(_largest_rank(parameter) for parameter in whole)
    cure = (
        f"The largest rank that compresses one is {largest}" if largest else "No rank compresses one: try 'ring_int8'"
    )
    return (
        f"PowerSGD(rank={rank}) compresses none of the parameters that are trained now ({len(whole)}): factors would "
        f"have more than half of each one's elements. All travel whole, as with the strategy 'ring'. {cure}"
    )


def _matrix_shape(parameter: Parameter) -> tuple[int, int]:
    """Rows and columns of the parameter's memory: rows are its outermost dimension that is longer than 1."""
    strides = torch.empty_like(parameter, device="meta").stride()
    longer = [(stride, length) for stride, length in zip(strides, parameter.shape, strict=True) if length > 1]
    rows = max(longer)[1] if longer else 1
    return rows, parameter.numel() // rows


def _as_matrix(view: Tensor, shape: tuple[int, ...]) -> Tensor:
    return view.as_strided(shape, (shape[1], 1), view.storage_offset())
