"""What the site changes in a page: links that leave docs/ become paths, and words that fences have for tests go."""

import re
from typing import Any

_OUTSIDE = re.compile(r"\[(?P<text>[^\]]+)\]\(\.\./(?P<path>[^)#\s]+)(#[^)]*)?\)")
_FENCE = re.compile(r"^```(?P<language>\w+) (no-run|torchrun)$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with each page's text before it is rendered."""
    return _FENCE.sub(r"```\g<language>", _OUTSIDE.sub(_as_path, markdown))


def _as_path(link: re.Match[str]) -> str:
    path = f"`{link['path']}`"
    return path if link["path"].endswith(link["text"].strip("`")) else f"{link['text']} ({path})"
