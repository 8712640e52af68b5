"""A test that is one function on each rank, and no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pool import Pool


def on_ranks(*sizes: int) -> Callable[[Callable[[], None]], Any]:
    """The function runs on so many ranks, once for each of these sizes: `@on_ranks(2, 3)`."""

    def as_test(story: Callable[[], None]) -> Any:
        @pytest.mark.parametrize("size", sizes)
        def test(ranks: Pool, size: int) -> None:
            ranks(size, story)

        test.__name__ = test.__qualname__ = story.__name__
        test.__module__ = story.__module__
        story.__qualname__ = f"{story.__name__}.story"  # a rank finds it there
        test.story = story  # type: ignore[attr-defined]
        return test

    return as_test
