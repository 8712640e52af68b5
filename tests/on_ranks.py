"""A test that is one function on each rank, and no more."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from pool import Pool


def on_ranks(*sizes: int) -> Callable[[Callable[..., None]], Any]:
    """The function runs on so many ranks, once for each of these sizes: `@on_ranks(2, 3)`.

    What pytest gives it, as a fixture or a parameter, each rank gets.
    """

    def as_test(story: Callable[..., None]) -> Any:
        @functools.wraps(story)
        def test(ranks: Pool, size: int, **given: Any) -> None:
            ranks(size, story, *(given[name] for name in own.parameters))

        own = inspect.signature(story)
        kinds = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own.parameters.values()]
        ours = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("ranks", "size")]
        vars(test).update(__signature__=own.replace(parameters=[*ours, *kinds]), story=story)
        story.__qualname__ += ".story"  # a rank finds it there
        return pytest.mark.parametrize("size", sizes)(test)

    return as_test
