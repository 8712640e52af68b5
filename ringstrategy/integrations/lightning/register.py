"""Make the names known to Lightning: `import ringstrategy`, then `Trainer(strategy="ring")`, or `Fabric` likewise.

Importing this imports neither Lightning nor torch. If Lightning is not imported yet, the names are registered when it
is; the strategy itself is imported when a Trainer or a Fabric asks for one of them. This holds for both of Lightning's
packages.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

from ringstrategy.integrations.imported import when_imported

StartMethod = Literal["popen", "spawn", "fork"]
START_METHODS: dict[str, StartMethod] = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_HERE = "ringstrategy.integrations.lightning"
_REGISTRIES = {  # by its module: its name there, and the class that the names make
    "lightning.pytorch.strategies": ("StrategyRegistry", f"{_HERE}.for_lightning", "RingStrategy"),
    "pytorch_lightning.strategies": ("StrategyRegistry", "ringstrategy.pytorch_lightning", "RingStrategy"),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", f"{_HERE}.for_fabric", "RingFabricStrategy"),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", "ringstrategy.lightning_fabric", "RingFabricStrategy"),
}


def register() -> None:
    """Make every name known to each package's `Trainer` or `Fabric`, now or once it is imported; again is harmless."""
    for name in _REGISTRIES:
        when_imported(name, _register_with)


def _register_with(module: ModuleType) -> None:
    registry, home, kind = _REGISTRIES[module.__name__]
    if not hasattr(module, registry):
        raise ImportError(f"ringstrategy cannot be imported while {module.__name__} is: import it before or after")
    from ringstrategy.names import STRATEGIES

    for name, algorithm in STRATEGIES.items():
        for suffix, start_method in START_METHODS.items():
            getattr(module, registry).register(
                name + suffix,
                partial(_strategy, home, kind, name, start_method),
                description=f"{algorithm()}, processes started by {start_method}",
                override=True,
            )


def _strategy(home: str, kind: str, name: str, start_method: StartMethod) -> Any:
    return getattr(import_module(home), kind)(name, start_method=start_method)
