"""What the site changes in a page.

Links that leave docs/ become paths, words that fences have for tests go, and a class is called as users import it, and
not as the mixin that has its docstring.
"""

import re
from typing import Any

_OUTSIDE = re.compile(r"\[(?P<text>[^\]]+)\]\(\.\./(?P<path>[^)#\s]+)(#[^)]*)?\)")
_FENCE = re.compile(r"^```(?P<language>\w+) (no-run|torchrun)$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with each page's text before it is rendered."""
    return _FENCE.sub(r"```\g<language>", _OUTSIDE.sub(_as_path, markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Called by MkDocs with what a page was rendered to."""
    return re.sub(r"(?<=>)(\w+)Mixin(?=<)", r"\1", html)


def _as_path(link: re.Match[str]) -> str:
    path = f"`{link['path']}`"
    return path if link["path"].endswith(link["text"].strip("`")) else f"{link['text']} ({path})"
