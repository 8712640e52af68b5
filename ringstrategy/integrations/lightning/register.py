"""Make the names known to Lightning: `import ringstrategy`, then `Trainer(strategy="ring")`.

Importing this imports neither Lightning nor torch. If Lightning is not imported yet, the names are registered when it
is; the strategy itself is imported when a Trainer asks for one of them. This holds for both of Lightning's packages.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from ringstrategy.integrations.imported import when_imported

if TYPE_CHECKING:
    from ringstrategy.integrations.lightning.strategy import RingStrategyMixin

StartMethod = Literal["popen", "spawn", "fork"]
START_METHODS: dict[str, StartMethod] = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_CLASSES = {  # by the module that holds a package's registry
    "lightning.pytorch.strategies": "ringstrategy.integrations.lightning.for_lightning",
    "pytorch_lightning.strategies": "ringstrategy.integrations.lightning.for_pytorch_lightning",
}


def register() -> None:
    """Make every name known to the Trainers of both packages, now or once they are imported; again is harmless."""
    for name in _CLASSES:
        when_imported(name, _register_with)


def _register_with(module: ModuleType) -> None:
    if not hasattr(module, "StrategyRegistry"):
        raise ImportError(f"ringstrategy cannot be imported while {module.__name__} is: import it before or after")
    from ringstrategy.names import STRATEGIES

    for name, algorithm in STRATEGIES.items():
        for suffix, start_method in START_METHODS.items():
            module.StrategyRegistry.register(
                name + suffix,
                partial(_strategy, _CLASSES[module.__name__], name, start_method),
                description=f"{algorithm()}, processes started by {start_method}",
                override=True,
            )


def _strategy(module: str, name: str, start_method: StartMethod) -> RingStrategyMixin:
    from ringstrategy.names import STRATEGIES

    strategy: RingStrategyMixin = import_module(module).RingStrategy(STRATEGIES[name](), start_method=start_method)
    return strategy
