"""The extras, such as `app` and `ray`: what is needed beside the strategies, and what is said where it is missing."""

from __future__ import annotations

import sys
from importlib.util import find_spec

CURE = "in a clone of ringstrategy run python -m pip install '.[{}]'"


def require(program: str, *modules: str, extra: str = "app") -> None:
    """End the program with one line that has the cure, if a module cannot be imported. Import what needs them later."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        sys.exit(f"{program} needs {', '.join(missing)}: {CURE.format(extra)}")
