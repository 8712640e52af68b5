"""Make the names known to Lightning: `import ringstrategy`, then `Trainer(strategy="ring")`.

Importing this imports neither Lightning nor torch. If Lightning is not imported yet, the names are registered when it
is; the strategy itself is imported when a Trainer asks for one of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ringstrategy.integrations.lightning.strategy import RingStrategy

StartMethod = Literal["popen", "spawn", "fork"]
START_METHODS: dict[str, StartMethod] = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_OURS, _OTHER = "lightning.pytorch.strategies", "pytorch_lightning.strategies"


def register() -> None:
    """Make every name known to `lightning.pytorch.Trainer`, now or once it is imported; again is harmless."""
    for name in (_OURS, _OTHER):
        if name in sys.modules:
            _register_with(sys.modules[name])
    if not any(isinstance(finder, _Awaited) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Awaited())


class _Awaited(MetaPathFinder):
    """Registers the names with a registry right after the module that holds it has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in (_OURS, _OTHER):
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                execute = spec.loader.exec_module

                def exec_module(module: ModuleType, execute: Any = execute) -> None:
                    execute(module)
                    _register_with(module)

                spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this loader alone
                return spec
        return None


def _register_with(module: ModuleType) -> None:
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
