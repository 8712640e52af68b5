"""Make the names known to Lightning: `import ringstrategy`, then `Trainer(strategy="ring")`, or `Fabric` likewise.

Importing this imports neither Lightning nor torch. If Lightning is not imported yet, the names are registered when it
is; the strategy itself is imported when a Trainer or a Fabric asks for one of them. This holds for both of Lightning's
packages.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Literal

StartMethod = Literal["popen", "spawn", "fork"]
START_METHODS: dict[str, StartMethod] = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_REGISTRIES = {  # by its module: its name there, and the class that the names make
    "lightning.pytorch.strategies": ("StrategyRegistry", "for_lightning", "RingStrategy"),
    "pytorch_lightning.strategies": ("StrategyRegistry", "for_pytorch_lightning", "RingStrategy"),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "for_fabric", "RingFabricStrategy"),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", "for_lightning_fabric", "RingFabricStrategy"),
}


def register() -> None:
    """Make every name known to each package's `Trainer` or `Fabric`, now or once it is imported; again is harmless."""
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
    from ringstrategy.names import STRATEGIES

    make = getattr(import_module(f"ringstrategy.integrations.lightning.{home}"), kind)
    return make(STRATEGIES[name](), start_method=start_method)
