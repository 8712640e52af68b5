"""Make the names known to Lightning: `import ringstrategy`, then `Trainer(strategy="ring")`, or `Fabric` likewise.

Importing this imports neither Lightning nor torch. If Lightning is not imported yet, the names are registered when it
is; the strategy itself is imported when a Trainer or a Fabric asks for one of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ringstrategy.integrations.lightning.fabric import RingFabricStrategy
    from ringstrategy.integrations.lightning.strategy import RingStrategy

StartMethod = Literal["popen", "spawn", "fork"]
START_METHODS: dict[str, StartMethod] = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_OURS, _OTHER, _FABRIC = "lightning.pytorch.strategies", "pytorch_lightning.strategies", "lightning.fabric.strategies"
_REGISTRIES = {_OURS: "StrategyRegistry", _OTHER: "StrategyRegistry", _FABRIC: "STRATEGY_REGISTRY"}


def register() -> None:
    """Make every name known to Lightning's `Trainer` and `Fabric`, now or once it is imported; again is harmless."""
    for name in _REGISTRIES:
        if name in sys.modules:
            _register_with(import_module(name))  # waits until another thread has imported it
    # by name, since a package that is imported anew has another class
    if not any(type(finder).__qualname__ == _Awaited.__qualname__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Awaited())


class _Awaited(MetaPathFinder):
    """Has the names registered right after the module that holds a registry has been imported."""

    def __init__(self) -> None:
        self._asking: set[str] = set()  # others may ask all finders, too

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _REGISTRIES or fullname in self._asking:
            return None
        self._asking.add(fullname)
        try:
            specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            self._asking.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registers(spec.loader)
        return spec


class _Registers(Loader):
    """Another loader, and then the registration."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register_with(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _register_with(module: ModuleType) -> None:
    registry = getattr(module, _REGISTRIES[module.__name__], None)
    if registry is None:
        raise ImportError(f"ringstrategy cannot be imported while {module.__name__} is: import it before or after")
    from ringstrategy.names import STRATEGIES

    makes: dict[str, Callable[..., Any]] = {_OURS: _strategy, _OTHER: _wrong_lightning, _FABRIC: _fabric_strategy}
    for name, algorithm in STRATEGIES.items():
        for suffix, start_method in START_METHODS.items():
            registry.register(
                name + suffix,
                partial(makes[module.__name__], name, start_method),
                description=f"{algorithm()}, processes started by {start_method}",
                override=True,
            )


def _strategy(name: str, start_method: StartMethod) -> RingStrategy:
    from ringstrategy.integrations.lightning.strategy import RingStrategy
    from ringstrategy.names import STRATEGIES

    return RingStrategy(STRATEGIES[name](), start_method=start_method)


def _fabric_strategy(name: str, start_method: StartMethod) -> RingFabricStrategy:
    from ringstrategy.integrations.lightning.fabric import RingFabricStrategy
    from ringstrategy.names import STRATEGIES

    return RingFabricStrategy(STRATEGIES[name](), start_method=start_method)


def _wrong_lightning(*_: Any) -> Any:
    raise TypeError(
        "ringstrategy is for the package `lightning`; this Trainer is from `pytorch_lightning`, a second copy of it "
        "with other classes: use `from lightning.pytorch import Trainer` (and LightningModule, callbacks, ...)"
    )
