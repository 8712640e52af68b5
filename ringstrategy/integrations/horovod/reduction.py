"""How the values of all ranks become one: Horovod's operators, factors and compression."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ringstrategy.algorithms.memory import check_width
from ringstrategy.codecs.base import Codec
from ringstrategy.integrations.horovod.call import has_parts
from ringstrategy.integrations.horovod.compression import Compression, check_codec
from ringstrategy.integrations.horovod.members import Members


class ReduceOp(enum.Enum):
    """`hvd.Average` and the others."""

    AVERAGE = "Average"
    SUM = "Sum"
    ADASUM = "Adasum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"


Average, Sum, Adasum = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT
_OF_TORCH = {
    ReduceOp.AVERAGE: dist.ReduceOp.SUM,
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}
ADASUM = "Adasum is not there: use hvd.Average or hvd.Sum, with a learning rate that fits"


@dataclass(frozen=True)
class Reduction:
    """What is done with the values of all ranks.

    Args:
        op: the operator; integers are averaged with the quotient rounded down, as by Horovod.
        codec: how floating-point sums travel.
        before: each rank's values are multiplied by it.
        after: the result is multiplied by it.
    """

    op: ReduceOp
    codec: Codec
    before: float
    after: float

    def __str__(self) -> str:
        """What ranks compare."""
        parts = [self.op.value]
        parts += [] if self.codec.lossless else [str(self.codec)]
        parts += [] if self.before == 1 else [f"prescale_factor={self.before}"]
        parts += [] if self.after == 1 else [f"postscale_factor={self.after}"]
        return ", ".join(parts)

    def check(self, values: Tensor) -> None:
        """ValueError for a codec that cannot carry them, or if nobody can add them."""
        if values.layout != torch.strided:
            raise ValueError(f"this takes dense tensors, got {values.layout}: use hvd.sparse_allreduce_async")
        check_width("the tensor", values)
        if not self.codec.lossless and not values.is_floating_point():
            raise ValueError(f"compression= is for floating-point tensors, got {values.dtype}: leave it out")
        if self.op is Average and values.dtype == torch.bool:
            raise ValueError("there is no average of bools: use op=hvd.Max for any, hvd.Min for all, or numbers")

    def reduce_(self, values: Tensor, members: Members) -> None:
        """Replace a rank's own flat values by the result."""
        early = self._begin_(values, members)
        if early is None:
            members.reduce_(values, _OF_TORCH[self.op])
            self._end_(values, members, divides=True)
        else:
            members.sum_(values, self.codec, lambda wide: self._end_(wide, members, divides=not early))

    def scatter_(self, chunks: Tensor, members: Members) -> Tensor:
        """This rank's part of the result; `chunks`, of shape (size, length), is used as scratch."""
        early = self._begin_(chunks, members)
        if early is not None:
            return members.scatter_(chunks, self.codec, lambda wide: self._end_(wide, members, divides=not early))
        members.reduce_(chunks, _OF_TORCH[self.op])
        own = chunks[members.rank]
        self._end_(own, members, divides=True)
        return own

    def _begin_(self, values: Tensor, members: Members) -> bool | None:
        """None if torch's backend is to join them; else whether the average has been divided already.

        Before the sum where the range of a codec may end, and after it where that is exact.
        """
        if self.before != 1:
            values.copy_(values * self.before)
        if not values.is_floating_point() or self.op not in (Average, Sum):
            return None
        early = self.op is Average and not self.codec.lossless
        if early:
            values.div_(members.size)
        return early

    def _end_(self, values: Tensor, members: Members, *, divides: bool) -> None:
        if self.op is Average and divides:
            values.div_(members.size) if has_parts(values) else values.floor_divide_(members.size)
        if self.after != 1:
            values.copy_(values * self.after)


def reduction(
    op: ReduceOp | None = None,
    average: bool | None = None,
    compression: object = Compression.none,
    before: float = 1.0,
    after: float = 1.0,
) -> Reduction:
    """Checked. ValueError or TypeError with the cure."""
    codec = check_codec(compression)
    if op is not None and average is not None:
        raise ValueError("pass op= or average=, not both; average= is Horovod's older name for op=hvd.Average")
    if op is None:
        op = Sum if average is False else Average
    if not isinstance(op, ReduceOp):
        raise TypeError(f"op is hvd.Average, Sum, Min, Max or Product, got {op!r}")
    if op is Adasum:
        raise ValueError(ADASUM)
    if not codec.lossless and op not in (Average, Sum):
        raise ValueError(f"{op.value} is exact: leave out compression=, which is for Average and Sum")
    return Reduction(op, codec, float(before), float(after))
