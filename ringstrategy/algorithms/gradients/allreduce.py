"""Average all gradients over all ranks at every step, bucket by bucket, while backward goes on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import Parameter
from typing_extensions import override

from ringstrategy.algorithms.gradients.synchronous import Synchronous
from ringstrategy.algorithms.policy import Local, Policy, check_codec, check_feedback, codec_of, described
from ringstrategy.buckets.base import Bucket
from ringstrategy.buckets.plan import plan_buckets
from ringstrategy.codecs.base import Codec
from ringstrategy.codecs.identity import Identity
from ringstrategy.collectives.base import Collective
from ringstrategy.kernels.threads import use_threads
from ringstrategy.transport.base import Peers

_RESIDUAL_DTYPES = {None: None, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16, torch.bfloat16: torch.bfloat16}


class AllReduce(Synchronous):
    """Synchronous data parallelism: each bucket's mean, encoded by a codec, by a collective. See `Synchronous`.

    Args:
        codec: what travels instead of float32, or of the 16 bits that gradients have; or a policy, a function `(name,
            parameter) -> Codec` such as `SmallExact`, asked once when buckets are planned. Parameters share a bucket
            only if they share a codec.
        collective: how it travels.
        error_feedback: add what a lossy codec lost to the next step's gradients. It costs a residual of the size of the
            gradients, two under a loss scaler.
        bucket_mb: see `Synchronous`, as for the arguments not named here.
        find_unused_parameters: see `Synchronous`.
        local: see `Synchronous`.
        residual_dtype: of the residual. None: the dtype of sums (float32 for 16-bit gradients). `torch.bfloat16` or its
            name: half the memory, rounded to nearest even with 8 significant bits, so that each step loses up to 1/512
            of each residual; on a CPU also some more memory, of a piece's size, while a bucket is exchanged.
        codec_threads: how many cores encode and decode a long piece at once on a CPU, with the same bytes. None: the
            cores that this process may use, shared with the other ranks of its host, less torch's threads; at least 1.
            Ranks may differ. It holds for the whole process: the last one that was set up counts.
        on_nonfinite: see `Synchronous`.
        uneven: see `Synchronous`.
    """

    def __init__(  # noqa: PLR0913
        self,
        codec: Codec | Policy | None = None,
        collective: Collective | None = None,
        error_feedback: bool = False,
        bucket_mb: float = 25.0,
        find_unused_parameters: bool = False,
        local: Local | None = None,
        residual_dtype: torch.dtype | str | None = None,
        codec_threads: int | None = None,
        on_nonfinite: str = "propagate",
        uneven: str = "error",
    ) -> None:
        super().__init__(collective, bucket_mb, find_unused_parameters, local, on_nonfinite, uneven)
        self.codec = Identity() if codec is None else codec
        check_feedback(error_feedback)
        if residual_dtype not in _RESIDUAL_DTYPES:
            raise ValueError(f"residual_dtype is None, torch.bfloat16 or 'bfloat16', got {residual_dtype!r}")
        if codec_threads is not None and (type(codec_threads) is not int or codec_threads < 1):
            raise ValueError(
                "codec_threads is how many cores encode and decode: a whole number >= 1, or None for those that are "
                f"free, got {codec_threads!r}"
            )
        check_codec(self.codec, self.collective)
        self.error_feedback = error_feedback
        self.delivers = False  # lossless codecs get residuals too, and deliver what is loaded into them
        self.residual_dtype = _RESIDUAL_DTYPES[residual_dtype]
        self.codec_threads = codec_threads

    def __repr__(self) -> str:
        """The arguments in which ranks must not differ."""
        return (
            f"AllReduce(codec={described(self.codec)}, collective={self.collective}, "
            f"error_feedback={self.error_feedback}, bucket_mb={self.bucket_mb}, "
            f"find_unused_parameters={self.find_unused_parameters}, "
            f"local={described(self.local)}, residual_dtype={self.residual_dtype}, "
            f"on_nonfinite={self.on_nonfinite!r}, uneven={self.uneven!r})"
        )

    @override
    def setup(self, parameters: Mapping[str, Parameter], peers: Peers, *, sparse: frozenset[str] = frozenset()) -> None:
        if self.codec_threads is not None:  # else `Session` has decided
            use_threads(self.codec_threads)
        super().setup(parameters, peers, sparse=sparse)

    @override
    def plan(self, parameters: Mapping[str, Parameter], sparse: frozenset[str], first_index: int) -> list[Bucket]:
        return plan_buckets(
            parameters, sparse, self.codec_of, self.feeds_back, self._capacity, first_index, self.residual_dtype
        )

    def codec_of(self, name: str, parameter: Parameter) -> Codec:
        """The codec of the parameter's bucket; TypeError if a policy gives none."""
        return codec_of(self.codec, self.collective, name, parameter)

    def feeds_back(self, codec: Codec) -> bool:
        """Whether buckets of this codec keep residuals."""
        return self.delivers if codec.lossless else self.error_feedback
