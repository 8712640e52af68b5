"""All-reduce that tries codecs, collectives and bucket sizes in turn, and keeps the fastest."""

from ringstrategy.algorithms.auto.auto import Auto
from ringstrategy.algorithms.auto.candidates import eligible, in_words

__all__ = ["Auto", "eligible", "in_words"]
