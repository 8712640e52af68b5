"""torchft's DiLoCo over gloo, each rank a replica group of its own. It needs `pip install torchft`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import harness
from ringstrategy.transport.reach import address_towards

# How often torchft's server looks whether all are there: its default, 100, would cost each agreement that.
_TICK_MS = 10


class TorchftDiLoCo:
    """Agreements by hooks of the inner optimizer, with the outer optimizer of our `diloco`. All ranks make it."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, interval: int, outer: Mapping[str, Any]
    ) -> None:
        os.environ.setdefault("RUST_LOG", "warn")
        try:
            torchft = importlib.import_module("torchft")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("torchft's DiLoCo is measured with torchft: pip install torchft") from error
        size, here = dist.get_world_size(), address_towards(os.environ["MASTER_ADDR"])
        self._lighthouse: Any = None
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            coordination = importlib.import_module("torchft.coordination")
            self._lighthouse = coordination.LighthouseServer(
                bind="0.0.0.0:0", min_replicas=size, quorum_tick_ms=_TICK_MS
            )
            found = [f"http://{here}:{urlsplit(self._lighthouse.address()).port}"]
        dist.broadcast_object_list(found)
        self._store = dist.TCPStore(here, 0, is_master=True, wait_for_workers=False)
        self._manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=harness.TIMEOUT),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=size,
            use_async_quorum=False,
            timeout=harness.TIMEOUT,
            quorum_timeout=harness.TIMEOUT,
            rank=0,
            world_size=1,
            store_addr=here,
            store_port=self._store.port,
            lighthouse_addr=found[0],
            replica_id=f"rank{dist.get_rank()}",
            hostname=here,
            init_sync=False,
            max_retries=0,  # an exchange that failed is an error here, not an interval that is thrown away
        )
        self._diloco = importlib.import_module("torchft.local_sgd").DiLoCo(
            self._manager,
            [model],
            optimizer,
            torch.optim.SGD(model.parameters(), nesterov=True, **outer),
            sync_every=interval,
            use_bucketization=True,
        )
        self._diloco.__enter__()

    def close(self) -> None:
        """All ranks call it."""
        self._diloco.__exit__(None, None, None)
        dist.barrier()
        self._manager.shutdown()
        if self._lighthouse is not None:
            self._lighthouse.shutdown()
