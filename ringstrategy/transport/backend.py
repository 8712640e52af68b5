"""Which backend moves a device's tensors, and where a backend would fail without a cure, or hang."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def backend_of(device_type: str, group: dist.ProcessGroup | None = None) -> str:
    """Of a process group (None: the default one), for tensors on such devices; "" if there is none.

    Also where its backend was left to torch, which then takes NCCL for GPUs, and calls it "undefined".
    """
    if group is not None:  # it may be one of ours, over one of torch's
        has_any = device_type in (device.type for device in group._device_types)
        return group._get_backend(torch.device(device_type)).name() if has_any else ""
    return dict(pair.split(":") for pair in dist.get_backend_config().split(",")).get(device_type, "")


def check_settings() -> None:
    """ValueError with the cure if torch's own settings would make ranks wait for each other without an end."""
    if os.environ.get("TORCH_GLOO_LAZY_INIT", "").lower() in ("1", "t", "true", "y", "yes"):  # as torch reads it
        raise ValueError(
            "with TORCH_GLOO_LAZY_INIT=1 gloo waits without a limit for a connection to a rank that was lost: unset it "
            "on all ranks"
        )
    # only where torchcomms is installed; older torch does not know it
    enabled: Callable[[], bool] = getattr(dist.distributed_c10d, "_use_torchcomms_enabled", bool)
    if enabled():
        raise ValueError(
            "over torchcomms sends and receives of a group may wait for each other, and exchanges need both at once: "
            "unset TORCH_DISTRIBUTED_USE_TORCHCOMMS, or torch.distributed.config.use_torchcomms, on all ranks"
        )


def claim_gpu(
    device: torch.device,
    rank: int,
    host: str,
    first: Callable[[str, str], str],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Before NCCL is asked: a ValueError if another rank has claimed this GPU, for two ranks cannot share one.

    Of the ranks that claim one GPU, the first gets it. Nothing to do on CPUs and over gloo.

    Args:
        device: of this rank.
        rank: this one, among all.
        host: a text that is another one on another machine.
        first: `first(key, value)` writes to the rendezvous store, unless there is a value; returns that in the store.
        group: whose ranks; None: those of the default one.
    """
    shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if device.type != "cuda" or shared or backend_of("cuda", group) != "nccl":
        return
    # As NCCL tells GPUs apart: by their places, which do not depend on what a process sees of them; two instances (MIG)
    # of one GPU have one place.
    seen: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack the places
    gpu = f"{seen.pci_domain_id:04x}:{seen.pci_bus_id:02x}:{seen.pci_device_id:02x}"
    owner = int(first(f"gpu/{os.environ.get('NCCL_HOSTID', host)}/{gpu}", str(rank)))
    if owner != rank:
        raise ValueError(
            f"rank {rank} and rank {owner} use the same GPU ({device}, {gpu}), and over NCCL each rank needs its own: "
            "start as many processes as there are GPUs, Trainer(devices=...) or torchrun --nproc-per-node, and in your "
            "own loop call torch.cuda.set_device with LOCAL_RANK first. Instances of one GPU (MIG) count as this GPU. "
            "To share it all the same, use gloo: RingStrategy(process_group_backend='gloo')"
        )
