"""Average the state of the optimizers that ranks step by themselves, such as the moments of AdamW."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ringstrategy.algorithms.parameters.exchange import Exchange
from ringstrategy.algorithms.parameters.group import by_dtype, cut_like, row_of
from ringstrategy.transport.agree import all_gather_texts
from ringstrategy.transport.base import Peers


@torch.no_grad()
def average_states(
    parameters: Mapping[str, Parameter], optimizers: Sequence[Optimizer], exchange: Exchange, peers: Peers
) -> None:
    """Replace state that has a parameter's shape by its mean over all ranks. All ranks call it, and wait.

    State that some rank lacks, because its parameter never had a gradient there, stays each rank's own.
    """
    held: dict[str, Tensor] = {}
    for optimizer in optimizers:
        for name, parameter in parameters.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point():
                    held[f"{name} {key}"] = value
    everywhere = [held[name] for name in _in_common(list(held), peers)]
    for kind in by_dtype(everywhere):
        row = row_of(kind)
        exchange.average_(row, peers, "for the mean of the optimizers' state")
        for value, mean in zip(kind, cut_like(row, kind), strict=True):
            value.copy_(mean)


def _in_common(names: Sequence[str], peers: Peers) -> list[str]:
    """Those that all ranks have, sorted."""
    texts: list[str] = []
    where = "for the names of the optimizers' state"
    work = peers.control.submit(lambda: texts.extend(all_gather_texts(peers.control, "\n".join(names))), where)
    peers.control.finish([work])
    return sorted(set.intersection(*(set(text.splitlines()) for text in texts)))
