"""Join the ranks of a process group, over the transport that fits the device."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import wait
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ringstrategy.errors import PeerLostError, is_of_a_connection, last_words
from ringstrategy.failure.board import Board
from ringstrategy.failure.detector import FailureDetector
from ringstrategy.failure.store import begun
from ringstrategy.transport.backend import backend_of, check_settings, claim_gpu
from ringstrategy.transport.base import Peers
from ringstrategy.transport.exposure import raise_file_limit
from ringstrategy.transport.gloo import GlooPeers
from ringstrategy.transport.groups import new_group
from ringstrategy.transport.nccl import NcclPeers, nccl_group
from ringstrategy.transport.staged import StagedPeers
from ringstrategy.transport.stats import Stats
from ringstrategy.transport.trace import begin_if_asked

_LOOK_SECONDS = 0.5  # between two looks for what another rank has to say
_SETTING_UP = "while setting up"


def connect(
    device: torch.device,
    timeout: timedelta,
    stats: Stats | None = None,
    *,
    beside_steps: bool = False,
    group: dist.ProcessGroup | None = None,
    tagged: bool = True,
) -> Peers:
    """Join all ranks of a process group.

    Every rank of the group calls it, at the same place in its order of collectives.

    Args:
        device: where the values live: CPU tensors travel over gloo; CUDA tensors over NCCL if the process
            group uses it for them (as torch decides where no backend was named), else over gloo.
        timeout: how long a peer may stay silent before it counts as lost.
        stats: counters to add to.
        beside_steps: exchanges may last through whole steps, as those of parameters do; NCCL then leaves more of the
            GPU to them.
        group: whose ranks. If it has gloo for CPU tensors, host messages travel on its connections, beside its
            collectives, and these stay open when the peers are closed. None: all ranks, in a new group for gradient
            traffic alone.
        tagged: all messages will be, see `Collective.tagged`. False: they would meet collectives that other threads
            call in `group`, so its ranks get a new group, too.
    """
    raise_file_limit()
    ranks = None if group is None else dist.get_process_group_ranks(group)
    has_gloo = backend_of("cpu", group) == "gloo"
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    stats = Stats() if stats is None else stats
    detector = FailureDetector(Board.create(rank, size, ranks))
    try:
        begin_if_asked()
        check_settings()
        claim_gpu(device, dist.get_rank(), this_host(), detector.board.store.first, group)
        # over gloo it fails as soon as a process has died that is to come
        everyone = None
        if has_gloo:  # a barrier might be NCCL's
            # an integer, which a group of ours leaves to gloo
            everyone = dist.all_reduce(torch.zeros(1, dtype=torch.int32, device="cpu"), group=group, async_op=True)

        def watch() -> None:
            if everyone is not None and everyone.is_completed():
                everyone.wait()

        hosts = tuple(detector.exchange_hosts(this_host(), timeout, watch))
        if everyone is not None:
            everyone.wait()
        lent = group if has_gloo and tagged else None
        host_group = lent or _heard(detector, lambda: new_group(ranks, timeout, "gloo"))
        owned = lent is None
        if device.type == "cpu":
            return GlooPeers(host_group, detector, stats, hosts, owned=owned)
        if backend_of(device.type, group) != "nccl":
            return StagedPeers(host_group, detector, stats, hosts, device, owned=owned)
        device_group = nccl_group(device, timeout, ranks, beside_steps=beside_steps)
        control = GlooPeers(host_group, detector, stats, hosts, timed=False, owned=owned)
        return NcclPeers(device_group, control, device, timeout)
    except BaseException as error:  # no peers yet who could tell the others
        try:
            if is_of_a_connection(error):
                raise detector.explain(error, None, _SETTING_UP) from error
            if not isinstance(error, PeerLostError):
                detector.fail(last_words(error))
            raise
        finally:
            detector.linger()


def _heard(detector: FailureDetector, make: Callable[[], dist.ProcessGroup]) -> dist.ProcessGroup:
    """`make()`, which waits for all ranks; PeerLostError as soon as one of them has said that it will not come."""
    made = begun(make)
    while not wait([made], _LOOK_SECONDS).done:
        lost = detector.check(_SETTING_UP)
        if lost is not None:
            raise lost
    return made.result()


def this_host() -> str:
    """Its name, and what tells machines of one name apart."""
    return f"{socket.gethostname()} {_boot_id()}"


def _boot_id() -> str:
    """Empty where the kernel has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
