"""Make the averages known to torch.distributed: `import ringstrategy`, then `dist.new_group(backend="ring_int8")`.

Importing this does not import torch: the names are registered once torch.distributed is imported.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ringstrategy.integrations.imported import when_imported

if TYPE_CHECKING:
    from ringstrategy.integrations.process_group import RingProcessGroup

# Of the table of names, what averages at once, and without residuals. Spelled out, since the table needs torch.
BACKENDS = ("ring", "ring_fp16", "ring_bf16", "ring_fp8", "ring_int8", "ring_int4", "ring_int2", "ring_sign")
_DEVICES = ["cpu", "cuda"]


def register() -> None:
    """Make every name known to torch.distributed, now or once it is imported; again is harmless."""
    when_imported("torch.distributed", _register_with)


def _register_with(module: ModuleType) -> None:
    if not hasattr(module, "Backend"):  # a torch that was built without it
        return
    for name in BACKENDS:
        module.Backend.register_backend(name, partial(_group, name), extended_api=True, devices=_DEVICES)


def _group(name: str, how: Any, options: object) -> RingProcessGroup:
    from ringstrategy.integrations.process_group import RingProcessGroup, options_of

    return RingProcessGroup(name, how.store, how.group_rank, how.group_size, how.timeout, options_of(name, options))
