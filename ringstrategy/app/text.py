"""What commands print: tables, and code that is ready to paste."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass

import torch

from ringstrategy.codecs import Codec
from ringstrategy.collectives import Collective


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The header and a line for each row; the first column is flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in [header, *rows]
    )


def as_code(part: object) -> str:
    """`BlockInt(8)`, `Hierarchical(Direct())`: a codec's first argument, and others only where they are not usual."""
    assert is_dataclass(part)
    written: list[str] = []
    for place, field in enumerate(field for field in fields(part) if field.init):
        value = getattr(part, field.name)
        usual = field.default_factory() if field.default_factory is not MISSING else field.default
        if value == usual and not (place == 0 and isinstance(part, Codec)):
            continue
        shown = as_code(value) if isinstance(value, Codec | Collective) else repr(value)
        if isinstance(value, torch.dtype):
            shown = repr(str(value).removeprefix("torch."))
        written.append(shown if place == len(written) else f"{field.name}={shown}")
    return f"{type(part).__name__}({', '.join(written)})"
