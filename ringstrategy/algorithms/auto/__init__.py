"""All-reduce that measures the machines it is on, and chooses codec, collective, segments and bucket size by itself."""

from ringstrategy.algorithms.auto.auto import Auto
from ringstrategy.algorithms.auto.candidates import eligible, in_words

__all__ = ["Auto", "eligible", "in_words"]
