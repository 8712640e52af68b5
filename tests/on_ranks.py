"""A test that is one function on each rank, and no more."""

from __future__ import annotations

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
        @pytest.mark.parametrize("size", sizes)
        def test(ranks: Pool, size: int, **given: Any) -> None:
            ranks(size, story, *(given[name] for name in own.parameters))

        own, ours = inspect.signature(story), inspect.signature(test)
        named = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own.parameters.values()]
        of_test = own.replace(parameters=[*list(ours.parameters.values())[:2], *named])
        vars(test).update(__signature__=of_test, story=story)
        test.__name__ = test.__qualname__ = story.__name__
        test.__module__ = story.__module__
        story.__qualname__ = f"{story.__name__}.story"  # a rank finds it there
        return test

    return as_test
