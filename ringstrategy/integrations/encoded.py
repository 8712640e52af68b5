"""What the doors beside a `Session` share: peers that agree on a codec, and that end with the process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.util import Finalize

import torch
import torch.distributed as dist
from torch import Tensor

from ringstrategy.codecs import Codec
from ringstrategy.collectives import Collective
from ringstrategy.errors import last_words
from ringstrategy.kernels.threads import begin_threads, end_threads, free_cores
from ringstrategy.transport.agree import agree_beside
from ringstrategy.transport.base import Peers, Word
from ringstrategy.transport.connect import connect
from ringstrategy.transport.futures import Futures
from ringstrategy.transport.stats import Stats

_CLOSE_SECONDS = 1.0  # for exchanges under way at the end of the process: other ranks may never come to them


class Channel:
    """Exchanges beside what the caller computes: peers, futures of the results, and threads of codecs.

    Args:
        peers: connected; they are closed with it.
        device: of the values.
        codec_threads: None: as many as there are free cores.

    Attributes:
        peers: as above.
        futures: of exchanges.
    """

    def __init__(self, peers: Peers, device: torch.device, codec_threads: int | None = None) -> None:
        self.peers, self.futures = peers, Futures(device)
        free = free_cores(peers.hosts.count(peers.hosts[peers.rank]))
        begin_threads(free if codec_threads is None else codec_threads)
        self._stay = at_exit(self.close)

    def close(self, error: BaseException | None = None, seconds: float = _CLOSE_SECONDS) -> None:
        """End the threads. If an exchange does not end, or this process ends in an error, the other ranks are told.

        Args:
            error: that ends this process.
            seconds: for exchanges under way.
        """
        self._stay()
        with ExitStack() as ends:  # each of them, last first, whatever the others raise
            ends.callback(end_threads)
            ends.callback(self.peers.close)
            if not self.futures.close(seconds) or error is not None:
                unfinished = f"an exchange that did not end within {seconds:.0f} s"
                self.peers.abort(unfinished if error is None else last_words(error))


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


def at_exit(end: Callable[[BaseException | None], None]) -> Callable[[], object]:
    """Call `end` when this process ends, with the error that ends it, or None; returns what takes that back."""
    # not by atexit, which forked processes skip
    return Finalize(None, lambda: end(_error()), exitpriority=0).cancel


def _error() -> BaseException | None:
    error = getattr(sys, "last_value", None) or sys.exc_info()[1]  # the second one in a process of multiprocessing
    return error.__context__ if isinstance(error, SystemExit) else error


def memory_of(tensor: Tensor) -> Tensor:
    """A tensor in the same memory that any thread may write to, as the backends of torch do in C++.

    Autograd sees no change: the graph, `requires_grad` and the version of `tensor` stay. `tensor` may be a leaf that
    requires a gradient, or have been made in inference mode.
    """
    with torch.inference_mode(False), torch.no_grad():
        memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        memory.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        memory = memory.conj() if tensor.is_conj() else memory
        return torch._neg_view(memory) if tensor.is_neg() else memory
