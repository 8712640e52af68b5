"""Do something right after a module has been imported, now or later, without importing it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Call = Callable[[ModuleType], None]


def when_imported(name: str, call: Call) -> None:
    """Call `call(module)` now, if the module is imported, and after each later import of it, in place of an older call.

    Args:
        name: of the module.
        call: must be harmless when it comes again.
    """
    if name in sys.modules:
        call(import_module(name))  # waits until another thread has imported it
    # by name, since a package that is imported anew has another class
    for finder in sys.meta_path:
        if type(finder).__qualname__ == _Awaited.__qualname__:
            finder.calls[name] = call  # type: ignore[attr-defined]
            return
    sys.meta_path.insert(0, _Awaited({name: call}))


class _Awaited(MetaPathFinder):
    """Leaves finding to the others, and adds the call to what they found."""

    def __init__(self, calls: dict[str, Call]) -> None:
        self.calls = calls
        self._here = threading.local()  # others may ask all finders, too, and import at the same time

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        asking: set[str] = self._here.__dict__.setdefault("asking", set())
        if fullname not in self.calls or fullname in asking:
            return None
        asking.add(fullname)
        try:
            specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            asking.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Calls(spec.loader, self.calls[fullname])
        return spec


class _Calls(Loader):
    """Another loader, and then the call."""

    def __init__(self, loader: Loader, call: Call) -> None:
        self._loader, self._call = loader, call

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._call(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
