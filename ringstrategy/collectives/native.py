"""The all-reduce of the backend itself, for codecs whose wire bytes it can add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.collectives.base import Collective, Summand
from ringstrategy.transport.base import Peers
from ringstrategy.transport.trace import span


@dataclass(frozen=True)
class Native(Collective):
    """gloo's or NCCL's all-reduce; with `Cast` it sums in the 16-bit dtype. Its bytes cannot be counted: None."""

    @override
    def sum_(
        self,
        summand: Summand,
        peers: Peers,
        *,
        flags: Tensor | None = None,
        riders: Sequence[Summand] = (),
    ) -> None:
        values, codec = summand.values, summand.codec
        assert flags is None
        assert not riders
        if peers.size == 1 or values.numel() == 0:
            return
        dtype = codec.summable(values.dtype)
        assert dtype is not None, "checked at construction"
        if codec.raw(values) is not None:
            if summand.residual is not None:
                values.add_(summand.residual)
            with span("all-reduce"):
                peers.all_reduce_(values)
            return
        nbytes = codec.nbytes(values.numel(), values.dtype)
        wire = peers.scratch("native.wire", nbytes, values.device)[:nbytes]
        with span("encode"):
            codec.hop(
                [],
                values,
                wire,
                residual=summand.residual,
                lost=summand.lost,
                seed=summand.seed,
                own_seed=derive_seed(summand.seed, peers.rank),
            )
        with span("all-reduce"):
            peers.all_reduce_(wire.view(dtype))
        with span("decode"):
            codec.deliver(wire, values, seed=summand.seed)

    def check(self, codec: Codec) -> None:
        """The backend adds numbers, not blocks of codes."""
        if codec.summable(torch.float32) is None:
            raise ValueError(
                f"a backend's all-reduce cannot add what {codec} encodes; pass collective=Ring() or Direct()"
            )
