"""PowerSGD (Vogels et al., 2019) as a torch DDP hook that gloo can run: the stock arithmetic on one FIFO thread.

torch's own hook deadlocks on gloo with more than one bucket in flight: its callbacks wait for collectives on gloo's
own worker threads.
"""

# no postponed annotations: torch DDP reads those of a hook
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

_WORTHWHILE = 2  # torch's `min_compression_rate`: factors have at most half of a matrix's elements


def factors(shapes: Sequence[torch.Size], rank: int) -> tuple[int, int]:
    """Elements of all factors, and of all gradients that travel whole."""
    inside = whole = 0
    for shape in shapes:
        if _is_worthwhile(shape, rank):
            inside += rank * (shape[0] + shape[1:].numel())
        else:
            whole += shape.numel()
    return inside, whole


def _is_worthwhile(shape: torch.Size, rank: int) -> bool:
    return len(shape) > 1 and _WORTHWHILE * rank * (shape[0] + shape[1:].numel()) <= shape.numel()


class PowerSGDOnOneThread:
    """A comm hook with error feedback and warm start; vectors and small matrices are averaged whole, as in torch's.

    Compression starts at once: torch's default, a thousand uncompressed steps, would gain nothing. The group must be
    the hook's own, since its thread's collectives must not mix with others. Factors have `rank` columns.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int = 1) -> None:
        self.group = group
        self.rank = rank
        self._shapes: dict[int, list[torch.Size]] = {}  # by bucket
        self._errors: dict[int, Tensor] = {}  # by bucket, in the bucket's layout
        self._queries: dict[int, list[Tensor]] = {}  # by bucket: (rank, columns) a matrix, where the last step left it
        self._thread = ThreadPoolExecutor(max_workers=1)

    def hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """What DDP calls: queue the bucket; the future completes with its mean."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._thread.submit(self._complete, bucket, future)
        return future

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _complete(self, bucket: dist.GradBucket, future: torch.futures.Future[Tensor]) -> None:
        try:
            self._mean_(bucket.index(), bucket.buffer(), bucket.gradients())
            future.set_result(bucket.buffer())
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]

    @torch.no_grad()
    def _mean_(self, index: int, flat: Tensor, gradients: list[Tensor]) -> None:
        size = self.group.size()
        shapes = [gradient.shape for gradient in gradients]
        matrices = [g.flatten(1) for g in gradients if _is_worthwhile(g.shape, self.rank)]
        wholes = [g for g in gradients if not _is_worthwhile(g.shape, self.rank)]
        if self._shapes.get(index) != shapes:  # torch lays the buckets out anew after the first step
            self._shapes[index] = shapes
            self._errors[index] = torch.zeros_like(flat)
            generator = torch.Generator().manual_seed(index)  # the same on all ranks
            self._queries[index] = [
                torch.randn(self.rank, matrix.shape[1], generator=generator).to(flat.device) for matrix in matrices
            ]
        error, queries = self._errors[index], self._queries[index]

        flat.add_(error)
        if wholes:
            joined = torch.cat([whole.flatten() for whole in wholes])
            dist.all_reduce(joined, group=self.group)
            for whole, mean in zip(wholes, joined.div_(size).split([whole.numel() for whole in wholes]), strict=True):
                whole.copy_(mean.view_as(whole))
        if not matrices:
            return
        left = torch.cat([(_orthonormal(q) @ matrix.T).flatten() for matrix, q in zip(matrices, queries, strict=True)])
        dist.all_reduce(left, group=self.group)
        lefts = [_orthonormal(each) for each in self._factors(left, [matrix.shape[0] for matrix in matrices])]
        right = torch.cat([(columns @ matrix).flatten() for matrix, columns in zip(matrices, lefts, strict=True)])
        dist.all_reduce(right, group=self.group)
        rights = self._factors(right.div_(size), [matrix.shape[1] for matrix in matrices])
        error.copy_(flat)
        for matrix, query, columns, rows in zip(matrices, queries, lefts, rights, strict=True):
            torch.mm(columns.T, rows, out=matrix)
            query.copy_(rows)
        error.sub_(flat)
        begin = flat.data_ptr()
        for whole in wholes:  # these carry no error: they were averaged exactly
            place = (whole.data_ptr() - begin) // flat.element_size()
            error[place : place + whole.numel()].zero_()

    def _factors(self, joined: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        parts = joined.split([self.rank * length for length in lengths])
        return [part.view(self.rank, length) for part, length in zip(parts, lengths, strict=True)]


def _orthonormal(rows: Tensor) -> Tensor:
    """The rows of a (rank, length) factor made orthonormal: for rank 1 this is only its length."""
    if len(rows) == 1:
        scaled: Tensor = rows / torch.linalg.vector_norm(rows).clamp_min(1e-8)
        return scaled
    columns: Tensor = torch.linalg.qr(rows.T).Q
    return columns.T
