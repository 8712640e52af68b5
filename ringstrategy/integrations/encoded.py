"""What process groups and FSDP2's reduce-scatters share: peers that agree on a codec, and that end with the process."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from ringstrategy.codecs import Codec
from ringstrategy.collectives import Collective
from ringstrategy.integrations.at_exit import at_exit
from ringstrategy.transport.agree import agree_beside
from ringstrategy.transport.base import Peers, Word
from ringstrategy.transport.connect import connect
from ringstrategy.transport.stats import Stats


class _Closeable(Protocol):
    def close(self) -> None: ...


_open: weakref.WeakSet[_Closeable] = weakref.WeakSet()


def close_at_exit(one: _Closeable) -> None:
    """If it still exists then: threads must not be within torch while the process ends."""
    if not _open:
        at_exit(_close_all)
    _open.add(one)


def _close_all(error: BaseException | None) -> None:
    for one in list(_open):
        one.close()


def peers_for(
    codec: Codec,
    collective: Collective,
    exact_below: int,
    device: torch.device,
    timeout: timedelta,
    stats: Stats,
    group: dist.ProcessGroup,
) -> Peers:
    """The ranks of a group, connected, with a codec that is ready. PlanMismatchError on all if they differ in these."""
    peers = connect(device, timeout, stats, group=group, tagged=collective.tagged)
    said = f"codec: {codec}\ncollective: {collective}\nexact_below: {exact_below}"
    word = Word(said, lambda: said)
    try:
        agree_beside(peers, word, tagged=collective.tagged, where="while setting up").wait()
        codec.warm_up(device)
    except BaseException:
        peers.close()
        raise
    return peers
