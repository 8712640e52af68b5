"""Floor 1: values to bytes and back; a codec knows nothing of ranks."""

from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.codecs.cast import Cast
from ringstrategy.codecs.identity import Identity

__all__ = ["Cast", "Codec", "Identity", "derive_seed"]
