"""What `compression=` may be: Horovod's two, and the codecs of this package."""

from __future__ import annotations

from ringstrategy.codecs.base import Codec
from ringstrategy.codecs.block_float8 import BlockFloat8
from ringstrategy.codecs.block_int import BlockInt
from ringstrategy.codecs.cast import Cast
from ringstrategy.codecs.gaussian import Gaussian
from ringstrategy.codecs.identity import Identity
from ringstrategy.codecs.rotated import Rotated
from ringstrategy.collectives.base import Collective
from ringstrategy.collectives.by_size import BySize
from ringstrategy.collectives.direct import Direct


class Compression:
    """Codecs by name. Any other `ringstrategy` codec may be passed as `compression=` too.

    Attributes:
        none: float32.
        fp16: 16 bits, sums in float32. Horovod sums in 16 bits.
        bf16: 16 bits with the range of float32.
        fp8: 8 bits, of a floating-point format.
        int8: 8 bits and a scale for each block.
        int4: 4 bits, after a rotation.
    """

    none: Codec = Identity()
    fp16: Codec = Cast("float16")
    bf16: Codec = Cast("bfloat16")
    fp8: Codec = BlockFloat8()
    int8: Codec = BlockInt(8)
    int4: Codec = Rotated(Gaussian(4))


def check_codec(compression: object) -> Codec:
    """TypeError with the cure unless it is a codec."""
    if not isinstance(compression, Codec):
        raise TypeError(
            "compression is hvd.Compression.none, .fp16, .bf16, .fp8, .int8 or .int4, or a codec such as "
            f"ringstrategy.TopK(), got {compression!r}. A compressor of Horovod (a class with compress and decompress) "
            "has no place here"
        )
    return compression


def collective_for(codec: Codec) -> Collective:
    """How it travels: along the ring where partial sums may be encoded again without much loss."""
    coarse = isinstance(codec, Rotated) or not codec.hop_by_hop
    return Direct() if coarse else BySize()
