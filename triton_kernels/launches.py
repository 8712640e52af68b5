"""What encodes and decodes several parts of a bucket at once, made for one format and one rotation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ringstrategy.kernels.layout import BlockFormat, Signs

from .decode import decode_parts
from .encode import encode_parts
from .formats import GATHERS, of


class Launches(NamedTuple):
    """For float32 buckets.

    Attributes:
        encode: `encode_parts` in this format.
        decode: `decode_parts` in this format.
        gathers: can `encode` have a source? Not with tiles that are wider than the runs of a block: on an H200 messages
            of `BlockInt(7, block=24)` with a residual were wrong, compiled by Triton 3.6.
    """

    encode: Callable[..., None]
    decode: Callable[..., None]
    gathers: bool


def launches(form: BlockFormat, signs: Signs | None) -> Launches:
    """In this format, rotated by these signs."""
    encode, decode = (partial(function, form=form, signs=signs) for function in (encode_parts, decode_parts))
    fmt = of(form.arithmetic)
    return Launches(encode, decode, GATHERS and fmt.width * fmt.tiles == fmt.block)
