"""What each codec did to the loss in this repository's own small tests: the figures that commands show beside speed."""

from __future__ import annotations

from ringstrategy.codecs import BlockFloat8, BlockInt, Cast, Codec, Gaussian, Identity, Rotated, TopK

HARMLESS = 0.3  # per cent of the loss: a smaller difference cannot be told from chance
TOLERABLE = 1.0  # per cent of the loss: what is more needs a look at one's own

# By codec, and whether errors are fed back: per cent by which the final loss of a byte GPT on text ended above that of
# fp32 with the same seed, under (AdamW, SGD with momentum). From docs/performance.md's table, which has the spreads;
# with feedback from benchmarks/results/accuracy.md, one seed.
TEXT: dict[tuple[Codec, bool], tuple[float, float]] = {
    (Identity(), False): (0.0, 0.0),
    (Cast("float16"), False): (0.0, 0.1),
    (Cast("bfloat16"), False): (0.0, -0.1),
    (BlockFloat8(), False): (0.2, 0.3),
    (BlockInt(8), False): (-0.1, 0.2),
    (BlockInt(8), True): (-0.2, 0.5),
    (BlockInt(4), False): (0.5, 0.9),
    (Rotated(Gaussian(4)), False): (0.2, 0.1),
    (Rotated(Gaussian(2)), False): (0.5, 0.9),
    (Rotated(Gaussian(1)), False): (3.4, 3.7),
    (TopK(), False): (17.2, 7.0),
}


def worst(codec: Codec, feedback: bool) -> float:
    """Per cent of the loss, of the two optimizers' the larger."""
    return max(map(abs, TEXT[codec, feedback]))


def in_words(codec: Codec, feedback: bool) -> str:
    """A few characters for a table."""
    low, high = sorted(TEXT[codec, feedback])
    if codec.lossless:
        return "exact"
    if worst(codec, feedback) <= HARMLESS:
        return f"<={HARMLESS:g} %"
    return f"<={high:.2g} %" if low <= 0 else f"{low:.2g}-{high:.2g} %"
