"""What encodes and decodes several parts of a bucket at once, made for one format and one rotation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ringstrategy.kernels.layout import BlockFormat, Signs

from .decode import decode_parts
from .encode import encode_parts
from .formats import GATHERS


class Launches(NamedTuple):
    """For float32 buckets.

    Attributes:
        encode: `encode_parts` in this format.
        decode: `decode_parts` in this format.
        gathers: can `encode` have a source?
    """

    encode: Callable[..., None]
    decode: Callable[..., None]
    gathers: bool


def launches(form: BlockFormat, signs: Signs | None) -> Launches:
    """In this format, rotated by these signs."""
    encode, decode = (partial(function, form=form, signs=signs) for function in (encode_parts, decode_parts))
    return Launches(encode, decode, GATHERS)
