"""PowerSGD (Vogels et al., 2019) as a torch DDP hook that gloo can run: the stock arithmetic on one FIFO thread.

torch's own hook deadlocks on gloo with more than one bucket in flight: its callbacks wait for collectives on gloo's
own worker threads.
"""

# no postponed annotations: torch DDP reads those of a hook
import queue
import threading

import torch
import torch.distributed as dist
from torch import Tensor


class PowerSGDOnOneThread:
    """A comm hook of rank 1 with error feedback and warm start; matrices are compressed, vectors are averaged exactly.

    The stock hook starts with a thousand uncompressed steps; here compression starts at once, which is the faster.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._shapes: dict[int, list[torch.Size]] = {}  # by bucket
        self._errors: dict[int, Tensor] = {}  # by bucket, in the bucket's layout
        self._queries: dict[int, list[Tensor]] = {}  # by bucket: one vector a matrix, where the last step left it
        self._buckets: queue.SimpleQueue[tuple[dist.GradBucket, torch.futures.Future[Tensor]] | None]
        self._buckets = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """What DDP calls: queue the bucket; the future completes with its mean."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._buckets.put((bucket, future))
        return future

    def close(self) -> None:
        """End the thread."""
        self._buckets.put(None)
        self._thread.join()

    @torch.no_grad()
    def _serve(self) -> None:
        while (item := self._buckets.get()) is not None:
            bucket, future = item
            try:
                self._mean_(bucket.index(), bucket.buffer(), bucket.gradients())
                future.set_result(bucket.buffer())
            except Exception as error:
                future.set_exception(error)

    def _mean_(self, index: int, flat: Tensor, gradients: list[Tensor]) -> None:
        size = self.group.size()
        matrices = [gradient.flatten(1) for gradient in gradients if gradient.dim() > 1]
        vectors = [gradient for gradient in gradients if gradient.dim() <= 1]
        shapes = [gradient.shape for gradient in gradients]
        if self._shapes.get(index) != shapes:  # torch lays the buckets out anew after the first step
            self._shapes[index] = shapes
            self._errors[index] = torch.zeros_like(flat)
            generator = torch.Generator().manual_seed(index)  # the same on all ranks
            self._queries[index] = [torch.randn(matrix.shape[1], generator=generator) for matrix in matrices]
        error, queries = self._errors[index], self._queries[index]

        flat.add_(error)
        if vectors:
            joined = torch.cat([vector.flatten() for vector in vectors])
            offset = 0
            dist.all_reduce(joined, group=self.group)
            for vector in vectors:
                vector.copy_(joined[offset : offset + vector.numel()].view_as(vector)).div_(size)
                offset += vector.numel()
        if not matrices:
            return
        left = torch.cat([matrix @ query for matrix, query in zip(matrices, queries, strict=True)])
        dist.all_reduce(left, group=self.group)
        lefts = list(left.split([matrix.shape[0] for matrix in matrices]))
        for column in lefts:
            column.div_(torch.linalg.vector_norm(column).clamp_min(1e-8))  # orthogonalisation at rank 1
        right = torch.cat([matrix.T @ column for matrix, column in zip(matrices, lefts, strict=True)])
        dist.all_reduce(right, group=self.group)
        right.div_(size)
        rights = right.split([matrix.shape[1] for matrix in matrices])
        error.copy_(flat)
        for matrix, query, column, row in zip(matrices, queries, lefts, rights, strict=True):
            torch.outer(column, row, out=matrix)
            query.copy_(row)
        error.sub_(flat)
        begin = flat.data_ptr()
        for vector in vectors:  # these carry no error: they were averaged exactly
            place = (vector.data_ptr() - begin) // flat.element_size()
            error[place : place + vector.numel()].zero_()
