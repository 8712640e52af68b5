"""Batch norm whose mean and variance are those of all ranks' batches; torch's own works on GPUs only."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ringstrategy.integrations.horovod.operations import allreduce
from ringstrategy.integrations.horovod.process_sets import ProcessSet, global_process_set
from ringstrategy.integrations.horovod.reduction import Sum


class SyncBatchNorm(_BatchNorm):
    """As `torch.nn.BatchNorm1d` to `3d`, with the statistics of all ranks in training. Batches may differ in size.

    Each forward in training takes two small all-reduces, and so does its backward; all ranks call it in one order.

    Args:
        num_features: channels, the second dimension.
        eps: see torch.
        momentum: see torch.
        affine: see torch.
        track_running_stats: see torch.
        process_set: the ranks.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm takes at least two dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalized; of the shape and dtype of `input`."""
        self._check_input_dim(input)
        if not (self.training or self.running_mean is None) or self.process_set.size() == 1:
            return super().forward(input)
        others = [dim for dim in range(input.dim()) if dim != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        own = wide.new_tensor([input.numel() // input.shape[1]])
        totals = allreduce(torch.cat([wide.sum(others), own]), op=Sum, process_set=self.process_set)
        count = totals[-1].detach()
        mean = totals[:-1] / count
        centred = wide - mean.view(shape)
        var = allreduce(centred.square().sum(others), op=Sum, process_set=self.process_set) / count
        if self.training and self.track_running_stats:
            self._follow(mean.detach(), var.detach() * count / (count - 1).clamp(min=1))
        result = centred * torch.rsqrt(var + self.eps).view(shape)
        if self.affine:
            result = result * self.weight.to(wide.dtype).view(shape) + self.bias.to(wide.dtype).view(shape)
        return result.to(input.dtype)

    @torch.no_grad()
    def _follow(self, mean: Tensor, var: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        part = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), part)
        self.running_var.lerp_(var.to(self.running_var.dtype), part)
