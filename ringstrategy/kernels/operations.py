"""Arithmetic on tensors: each operation is a function in torch, and a kernel in its place where a device has one.

This is the one table of who computes what where. All twins of an operation have one signature and give the same bytes;
the functions in torch say what they do, and serve every device that has no kernel. A new operation is a function in
torch, a line here, and a function for each device that does it better. Kernels are imported when they are first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from ringstrategy.kernels import feedback, reference, sparse
from ringstrategy.kernels.layout import BlockFormat, Signs

if TYPE_CHECKING:
    from ringstrategy.kernels.triton.buckets import Places as Places
    from ringstrategy.kernels.triton.buckets import Source as Source
    from ringstrategy.kernels.triton.launches import Launches as Launches

P = ParamSpec("P")
R = TypeVar("R")


class Operation(Generic[P, R]):
    """A function in torch, and its kernels.

    Args:
        in_torch: what it does, on any device.
        kernels: by kind of device, "cpu" or "cuda", where a function with the same signature is: "module:name", in
            `ringstrategy.kernels`.
    """

    def __init__(self, in_torch: Callable[P, R], **kernels: str) -> None:
        self.in_torch = in_torch
        self._kernels = kernels
        self._loaded: dict[str, Callable[P, R]] = {}

    def on(self, device: torch.device) -> Callable[P, R]:
        """The function for tensors on this device."""
        kind = kind_of(device)
        function = self._loaded.get(kind)
        if function is None:
            function = self._loaded[kind] = self._load(kind)
        return function

    def _load(self, kind: str) -> Callable[P, R]:
        if kind not in self._kernels:
            return self.in_torch
        module, name = self._kernels[kind].split(":")
        found: Any = import_module(f"ringstrategy.kernels.{module}")
        function: Callable[P, R] = getattr(found, name)
        return function


def kind_of(device: torch.device) -> str:
    """Whose kernels run on this device."""
    return "cuda" if device.type == "cuda" else "cpu"


def _nothing(*what: object) -> object:
    """Nothing to compile: for a format, a dtype."""
    del what
    return None


def _never(form: BlockFormat, values: Tensor, *, rotated: bool) -> bool:
    """Whether the pass that encodes or decodes such values can add a residual, and rotate if `rotated`."""
    del form, values, rotated
    return False


def _one_by_one(form: BlockFormat, signs: Signs | None) -> Launches | None:
    """For buckets that this device `fuses`, several parts at once; None: each part is as quick by itself."""
    del form, signs
    return None


def _each_alone(numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device) -> Places | None:
    """Where gradients lie in a float32 bucket, so that one launch moves all; None: each is copied."""
    del numels, dtypes, device
    return None


# codecs with a scale a block
encode = Operation(reference.encode, cpu="compiled:encode", cuda="triton.encode:encode")
decode = Operation(reference.decode, cpu="compiled:decode", cuda="triton.decode:decode")
rotate_ = Operation(reference.rotate_, cpu="compiled:rotate_", cuda="triton.rotate:rotate_")
fuses = Operation(_never, cpu="compiled:fuses", cuda="triton.formats:fuses")
launches = Operation(_one_by_one, cuda="triton.launches:launches")
# other codecs
encode_sparse = Operation(sparse.encode, cpu="compiled:encode_sparse")
decode_sparse = Operation(sparse.decode, cpu="compiled:decode_sparse")
lose = Operation(reference.lose, cpu="compiled:lose")
add_ = Operation(reference.add_, cuda="triton.add:add_")
# buckets and their residuals
lay_out = Operation(_each_alone, cuda="triton.buckets:Places")
sample = Operation(feedback.sample, cuda="triton.feedback:sample")
stepped_parts = Operation(feedback.stepped_parts, cuda="triton.feedback:stepped_parts")
go_ = Operation(feedback.go_, cuda="triton.feedback:go_")
orthonormalise_ = Operation(reference.orthonormalise_, cuda="triton.orthonormal:orthonormalise_")
# parameters
mix = Operation(reference.mix, cpu="compiled:mix")
nesterov_ = Operation(reference.nesterov_, cpu="compiled:nesterov_")
# what the first call for a format or a dtype would wait for; on CUDA, where Triton compiles at the first launch (see
# `Bucket.warm_up`), a ValueError if the kernels cannot do it
warm_up_blocks = Operation(_nothing, cpu="compiled:block_kernels", cuda="triton.formats:check_format")
warm_up_sparse = Operation(_nothing, cpu="compiled:sparse_kernels")
warm_up_lose = Operation(_nothing, cpu="compiled:lose_kernel")
warm_up_mix = Operation(_nothing, cpu="compiled:mix_kernel")
warm_up_nesterov = Operation(_nothing, cpu="compiled:nesterov_kernel")
