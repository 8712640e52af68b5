"""Make the names known to Lightning: `import ringstrategy`, then `Trainer(strategy="ring")`.

Importing this imports neither Lightning nor torch. If Lightning is not imported yet, the names are registered when it
is; the strategy itself is imported when a Trainer asks for one of them.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from ringstrategy.integrations.imported import when_imported

if TYPE_CHECKING:
    from ringstrategy.integrations.lightning.strategy import RingStrategy

StartMethod = Literal["popen", "spawn", "fork"]
START_METHODS: dict[str, StartMethod] = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_OURS, _OTHER = "lightning.pytorch.strategies", "pytorch_lightning.strategies"


def register() -> None:
    """Make every name known to `lightning.pytorch.Trainer`, now or once it is imported; again is harmless."""
    for name in (_OURS, _OTHER):
        when_imported(name, _register_with)


def _register_with(module: ModuleType) -> None:
    if not hasattr(module, "StrategyRegistry"):
        raise ImportError(f"ringstrategy cannot be imported while {module.__name__} is: import it before or after")
    from ringstrategy.names import STRATEGIES

    for name, algorithm in STRATEGIES.items():
        for suffix, start_method in START_METHODS.items():
            module.StrategyRegistry.register(
                name + suffix,
                partial(_strategy, name, start_method) if module.__name__ == _OURS else _wrong_lightning,
                description=f"{algorithm()}, processes started by {start_method}",
                override=True,
            )


def _strategy(name: str, start_method: StartMethod) -> RingStrategy:
    from ringstrategy.integrations.lightning.strategy import RingStrategy
    from ringstrategy.names import STRATEGIES

    return RingStrategy(STRATEGIES[name](), start_method=start_method)


def _wrong_lightning(**_: Any) -> Any:
    raise TypeError(
        "ringstrategy is for the package `lightning`; this Trainer is from `pytorch_lightning`, a second copy of it "
        "with other classes: use `from lightning.pytorch import Trainer` (and LightningModule, callbacks, ...)"
    )
