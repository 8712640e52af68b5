"""Which backend moves a device's tensors; two ranks on one GPU are refused before NCCL is asked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pool import Pool

from ringstrategy.errors import PeerLostError
from ringstrategy.transport import connect
from ringstrategy.transport.backend import claim_gpu

GPU = torch.device("cuda", 0)
BOTH = "cpu:gloo,cuda:nccl"  # also what torch takes where no backend is named


def gpu_at(bus: int, uuid: str = "GPU-1") -> SimpleNamespace:
    return SimpleNamespace(uuid=uuid, pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)


def claims(*ranks: tuple[torch.device, str], config: str = BOTH, seen: Sequence[SimpleNamespace] = ()) -> None:
    """By ranks on devices of hosts. `seen`: by each rank; by default every process sees GPU i at bus i."""
    store = dist.HashStore()
    with patch.object(dist, "get_backend_config", return_value=config):
        for rank, (device, host) in enumerate(ranks):
            gpu = seen[rank] if seen else gpu_at(device.index or 0)
            for _ in range(2):  # a rank may claim its GPU again
                with patch.object(torch.cuda, "get_device_properties", return_value=gpu):
                    claim_gpu(device, rank, host, lambda key, value: store.compare_set(key, "", value).decode())


ON_GLOO = "cpu:gloo,cuda:gloo"
OTHER, CPU = torch.device("cuda", 1), torch.device("cpu")
INSTANCES = [gpu_at(0x59, "MIG-1"), gpu_at(0x59, "MIG-2")]  # of one GPU


def test_each_rank_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known by its place: CUDA_VISIBLE_DEVICES may call each rank's cuda:0, or the same one by two numbers."""
    claims((GPU, "a"), (OTHER, "a"), (GPU, "b"))
    claims((GPU, "a"), (GPU, "a"), config=ON_GLOO)
    claims((CPU, "a"), (CPU, "a"))
    claims((GPU, "a"), (GPU, "a"), seen=[gpu_at(0x1B), gpu_at(0x5E)])
    claims((GPU, "a"), (GPU, "a"), config=ON_GLOO, seen=INSTANCES)
    same = r"rank {} and rank 0 use the same GPU \({}, 0000:{}:00\).*set_device.*Instances of one GPU.*'gloo'"
    for of_ranks, seen, said in (
        ([(GPU, "a"), (OTHER, "a"), (GPU, "a")], [], same.format(2, "cuda:0", "00")),
        ([(GPU, "a"), (OTHER, "a")], [gpu_at(0x1B), gpu_at(0x1B)], same.format(1, "cuda:1", "1b")),
        ([(GPU, "a"), (GPU, "a")], INSTANCES, same.format(1, "cuda:0", "59")),
    ):
        with pytest.raises(ValueError, match=said):
            claims(*of_ranks, seen=seen)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    claims((GPU, "a"), (GPU, "a"))


def _on_one_gpu() -> tuple[type[Exception], str]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    one = gpu_at(7)
    with (
        patch.object(torch.cuda, "get_device_properties", return_value=one),
        patch.object(dist, "get_backend_config", return_value=BOTH),
        pytest.raises((ValueError, PeerLostError)) as caught,
    ):
        connect(GPU, timedelta(seconds=30))
    return caught.type, str(caught.value)


def test_two_ranks_on_one_gpu_are_told_so(ranks: Pool) -> None:
    told = dict(ranks(2, _on_one_gpu))
    assert set(told) == {ValueError, PeerLostError}
    assert all("use the same GPU (cuda:0, 0000:07:00)" in message for message in told.values())


def _with_setting(name: str) -> tuple[type[Exception], str]:
    """On rank 1 alone."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    comms = name == "TORCH_DISTRIBUTED_USE_TORCHCOMMS" and dist.get_rank() == 1
    if dist.get_rank() == 1:
        os.environ[name] = "1"
    with (
        patch.object(dist.distributed_c10d, "_use_torchcomms_enabled", lambda: comms, create=True),
        pytest.raises((ValueError, PeerLostError)) as caught,
    ):
        connect(torch.device("cpu"), timedelta(seconds=30))
    return caught.type, str(caught.value)


@pytest.mark.parametrize("name", ["TORCH_GLOO_LAZY_INIT", "TORCH_DISTRIBUTED_USE_TORCHCOMMS"])
def test_settings_under_which_ranks_would_hang_are_refused(ranks: Pool, name: str) -> None:
    told = ranks(2, _with_setting, name)
    assert [kind for kind, _ in told] == [PeerLostError, ValueError]
    assert all(name in message for _, message in told)
    assert "unset " in told[1][1]
