"""Average gradients as matrices of low rank, with error feedback and a warm start (PowerSGD, Vogels et al. 2019)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from torch.nn import Parameter
from typing_extensions import override

from ringstrategy.algorithms.gradients.synchronous import Synchronous
from ringstrategy.algorithms.policy import Local, check_feedback, described
from ringstrategy.buckets.base import Bucket
from ringstrategy.buckets.dense import DenseBucket
from ringstrategy.buckets.low_rank import LowRankBucket, matrix_shape
from ringstrategy.buckets.plan import plan_buckets
from ringstrategy.codecs.base import Codec
from ringstrategy.codecs.identity import Identity
from ringstrategy.collectives.base import Collective
from ringstrategy.transport.base import Peers

_WORTHWHILE = 2  # a matrix is compressed if its factors have at most 1/2 of its elements


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
        on_nonfinite: see `Synchronous`.
        uneven: see `Synchronous`.
    """

    def __init__(  # noqa: PLR0913
        self,
        rank: int = 1,
        codec: Codec | None = None,
        collective: Collective | None = None,
        error_feedback: bool = True,
        bucket_mb: float = 25.0,
        find_unused_parameters: bool = False,
        local: Local | None = None,
        on_nonfinite: str = "propagate",
        uneven: str = "error",
    ) -> None:
        super().__init__(collective, bucket_mb, find_unused_parameters, local, on_nonfinite, uneven)
        if type(rank) is not int or rank < 1:
            raise ValueError(f"rank is how many columns a factor has: a whole number >= 1, got {rank!r}")
        self.rank = rank
        self.codec = Identity() if codec is None else codec
        if not isinstance(self.codec, Codec):
            raise TypeError(f"codec is a Codec such as ringstrategy.Identity(), got {codec!r}")
        check_feedback(error_feedback)
        self.collective.check(self.codec)
        self.error_feedback = error_feedback

    def __repr__(self) -> str:
        """The arguments."""
        return (
            f"PowerSGD(rank={self.rank}, codec={self.codec}, collective={self.collective}, "
            f"error_feedback={self.error_feedback}, bucket_mb={self.bucket_mb}, "
            f"find_unused_parameters={self.find_unused_parameters}, "
            f"local={described(self.local)}, on_nonfinite={self.on_nonfinite!r}, uneven={self.uneven!r})"
        )

    @override
    def setup(self, parameters: Mapping[str, Parameter], peers: Peers, *, sparse: frozenset[str] = frozenset()) -> None:
        super().setup(parameters, peers, sparse=sparse)
        factored = [slot.parameter for b in self._buckets if isinstance(b, LowRankBucket) for slot in b.slots]
        whole = [slot.parameter for b in self._buckets if isinstance(b, DenseBucket) for slot in b.slots]
        if whole and factored:
            self._news.append(_how_much(self.rank, factored, whole))
        elif whole and peers.rank == 0:
            warnings.warn(_nothing(self.rank, whole), stacklevel=2)

    @override
    def plan(self, parameters: Mapping[str, Parameter], sparse: frozenset[str], first_index: int) -> list[Bucket]:
        matrices = {n: p for n, p in parameters.items() if n not in sparse and self.rank <= _largest_rank(p)}
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


def _largest_rank(parameter: Parameter) -> int:
    """At which the parameter would be compressed; 0: at none."""
    rows, columns = matrix_shape(parameter)
    return rows * columns // (_WORTHWHILE * (rows + columns)) if parameter.dtype.is_floating_point else 0


def _how_much(rank: int, factored: Sequence[Parameter], whole: Sequence[Parameter]) -> str:
    """In words."""
    elements, kept = (sum(parameter.numel() for parameter in some) for some in (factored, whole))
    travel = sum(rank * sum(matrix_shape(parameter)) for parameter in factored)
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
