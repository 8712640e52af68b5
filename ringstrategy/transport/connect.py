"""Join the ranks of the default process group, over the transport that fits the device."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ringstrategy.transport.base import Peers
from ringstrategy.transport.gloo import GlooPeers
from ringstrategy.transport.lifeline import Lifeline
from ringstrategy.transport.nccl import NcclPeers
from ringstrategy.transport.staged import StagedPeers
from ringstrategy.transport.stats import Stats


def connect(device: torch.device, timeout: timedelta, stats: Stats | None = None) -> Peers:
    """Join all ranks of the default process group, in a group of its own for gradient traffic.

    Every rank calls it, at the same place in its order of collectives.

    Args:
        device: where the values live: CPU tensors travel over gloo; CUDA tensors over NCCL if that is the default
            process group's backend, else over gloo.
        timeout: how long a peer may stay silent before it counts as lost.
        stats: counters to add to.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    stats = Stats() if stats is None else stats
    lifeline = Lifeline.cast(rank, size)
    # over gloo it fails as soon as a process has died that is to come
    everyone = dist.barrier(async_op=True) if "gloo" in dist.get_backend() else None

    def watch() -> None:
        if everyone is not None and everyone.is_completed():
            everyone.wait()

    hosts = tuple(lifeline.greet(f"{socket.gethostname()} {_boot_id()}", timeout, watch))
    if everyone is not None:
        try:
            everyone.wait()
        except RuntimeError as error:
            raise lifeline.explain(error, None, "while setting up") from error
    host_group = dist.new_group(timeout=timeout, backend="gloo")
    if device.type == "cpu":
        return GlooPeers(host_group, lifeline, stats, hosts)
    if "nccl" not in dist.get_backend():
        return StagedPeers(host_group, lifeline, stats, hosts, device)
    device_group = dist.new_group(timeout=timeout, backend="nccl")
    # all ranks must take part in a group's first call; a ring's first messages may leave some out
    dist.all_reduce(torch.zeros(1, device=device), group=device_group)
    return NcclPeers(device_group, GlooPeers(host_group, lifeline, stats, hosts, timed=False), device)


def _boot_id() -> str:
    """Tells machines of one host name apart; empty where the kernel has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
