"""Values to bytes and back; a codec knows nothing of ranks."""

from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.codecs.block_float8 import BlockFloat8
from ringstrategy.codecs.block_int import BlockInt
from ringstrategy.codecs.cast import Cast
from ringstrategy.codecs.gaussian import Gaussian
from ringstrategy.codecs.identity import Identity
from ringstrategy.codecs.rotated import Rotated
from ringstrategy.codecs.sign import Sign
from ringstrategy.codecs.top_k import TopK

__all__ = [
    "BlockFloat8",
    "BlockInt",
    "Cast",
    "Codec",
    "Gaussian",
    "Identity",
    "Rotated",
    "Sign",
    "TopK",
    "derive_seed",
]
