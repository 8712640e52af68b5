"""torchft's DiLoCo over gloo, each rank a replica group of its own. It needs `pip install torchft`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import harness
from ringstrategy import Nesterov
from ringstrategy.algorithms.parameters.schedule import cut_fragments
from ringstrategy.failure.reach import address_towards

# How often torchft's server looks whether all are there: its default, 100, would cost each agreement that.
_TICK_MS = 10


class TorchftDiLoCo:
    """Agreements by hooks of the inner optimizer. All ranks make it.

    With `fragments` it is torchft's Streaming DiLoCo: the same parts of the model as our `LocalSGD` has, each exchanged
    during `delay` steps. What came is blended with a rank's own steps as torchft's `fragment_update_alpha` says.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        interval: int,
        outer: Nesterov,
        fragments: int = 1,
        delay: int = 0,
        alpha: float = 0.0,
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
        self._parts = [_module_of(part) for part in cut_fragments(dict(model.named_parameters()), fragments)]
        self._diloco = importlib.import_module("torchft.local_sgd").DiLoCo(
            self._manager,
            self._parts,
            optimizer,
            [
                torch.optim.SGD(part.parameters(), lr=outer.lr, momentum=outer.momentum, nesterov=True)
                for part in self._parts
            ],
            sync_every=interval,
            use_bucketization=True,
            fragment_sync_delay=delay,
            fragment_update_alpha=alpha,
        )
        self._diloco.__enter__()

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Within, the model holds the shared parameters instead of this rank's own."""
        own: list[tuple[nn.Parameter, Tensor]] = []
        for part, fragment in zip(self._parts, self._diloco._fragments, strict=True):
            for name, parameter in part.named_parameters():
                own.append((parameter, parameter.data))
                parameter.data = fragment.original_parameters[name]
        try:
            yield
        finally:
            for parameter, data in own:
                parameter.data = data

    def close(self) -> None:
        """All ranks call it."""
        self._diloco.__exit__(None, None, None)
        dist.barrier()
        self._manager.shutdown()
        if self._lighthouse is not None:
            self._lighthouse.shutdown()


def _module_of(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    module = nn.Module()
    for name, parameter in parameters.items():
        module.register_parameter(name.replace(".", "/"), parameter)
    return module
