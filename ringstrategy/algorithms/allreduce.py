"""Average all gradients over all ranks at every step, bucket by bucket, while backward goes on."""

from __future__ import annotations

from collections.abc import Mapping

from torch.nn import Parameter

from ringstrategy.algorithms.synchronous import Local, Synchronous
from ringstrategy.codecs.base import Codec
from ringstrategy.codecs.identity import Identity
from ringstrategy.collectives.base import Collective
from ringstrategy.collectives.buckets import Bucket, plan


class AllReduce(Synchronous):
    """Synchronous data parallelism: each bucket's mean, encoded by a codec, by a collective. See `Synchronous`.

    Args:
        codec: what travels instead of float32.
        collective: how it travels.
        error_feedback: add what a codec lost to the next step's gradients. None: as the codec prefers; lossless codecs
            have nothing to feed back.
        bucket_mb: see `Synchronous`, as for the arguments not named here.
        find_unused_parameters: see `Synchronous`.
        local: see `Synchronous`.
    """

    def __init__(
        self,
        codec: Codec | None = None,
        collective: Collective | None = None,
        error_feedback: bool | None = None,
        bucket_mb: float = 25.0,
        find_unused_parameters: bool = False,
        local: Local | None = None,
    ) -> None:
        super().__init__(collective, bucket_mb, find_unused_parameters, local)
        self.codec = Identity() if codec is None else codec
        if not isinstance(self.codec, Codec):
            raise TypeError(f"codec is a Codec such as ringstrategy.Identity(), got {codec!r}")
        if error_feedback is not None and not isinstance(error_feedback, bool):
            raise TypeError(f"error_feedback is True, False or None (the codec's own default), got {error_feedback!r}")
        self.collective.check(self.codec)
        self.error_feedback = error_feedback

    def __repr__(self) -> str:
        """The arguments."""
        return (
            f"AllReduce(codec={self.codec}, collective={self.collective}, error_feedback={self.error_feedback}, "
            f"bucket_mb={self.bucket_mb}, find_unused_parameters={self.find_unused_parameters}, "
            f"local={getattr(self.local, '__qualname__', self.local)})"
        )

    def plan(self, parameters: Mapping[str, Parameter], sparse: frozenset[str], first_index: int) -> list[Bucket]:
        """See `Synchronous.plan`."""
        return plan(
            parameters, sparse, lambda name, parameter: self.codec, self._feeds_back, self._capacity, first_index
        )

    def check(self, *, scaled_loss: bool, clips_by_norm: bool) -> None:
        """See `Algorithm.check`."""
        super().check(scaled_loss=scaled_loss, clips_by_norm=clips_by_norm)
        if scaled_loss and self._feeds_back(self.codec):
            raise ValueError(
                "error feedback does not follow a loss scaler's changes yet: pass error_feedback=False, "
                "or use bf16-mixed"
            )

    def _feeds_back(self, codec: Codec) -> bool:
        if codec.lossless:
            return False
        return codec.error_feedback if self.error_feedback is None else self.error_feedback
