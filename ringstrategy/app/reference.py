"""Speeds of the codecs on one core of a known processor: `ringstrategy-plan` uses them by default.

What is measured varies with whatever else the machine does, and is not of the machines that are asked about.

python -m ringstrategy.app.reference  # measures them on one core of this machine, and prints the lines below
"""

from __future__ import annotations

import math

import torch

from ringstrategy.codecs import BlockFloat8, BlockInt, Cast, Codec, Gaussian, Identity, Rotated, TopK
from ringstrategy.cost.model import CodecCost, Work
from ringstrategy.cost.probe import codec_cost, pack_seconds
from ringstrategy.names import as_code

Figures = tuple[float, float]  # microseconds a call, and beside them GB of float32 values a second

PROCESSOR = "an AMD EPYC at 2.6 GHz with AVX-512"


def _work(figures: Figures) -> Work:
    microseconds, gigabytes_per_second = figures
    return Work(1e-6 * microseconds, 4e-9 / gigabytes_per_second)


def _cost(encode: Figures, relay: Figures, decode: Figures, add: Figures) -> CodecCost:
    return CodecCost(_work(encode), _work(relay), _work(decode), _work(add))


PACK_SECONDS = 4e-9 / 12
CODECS: dict[tuple[Codec, bool], CodecCost] = {
    (Identity(), False): _cost((7, 16), (8.5, 12), (5.9, 18), (4.8, 21)),
    (Cast("float16"), False): _cost((6.3, 20), (9.2, 9.9), (5.7, 20), (6.2, 15)),
    (Cast("bfloat16"), False): _cost((6.8, 19), (9.3, 7.8), (5.9, 19), (6.3, 13)),
    (BlockFloat8("e4m3"), False): _cost((21, 7.6), (20, 4.3), (15, 8.5), (13, 7.2)),
    (BlockInt(8), False): _cost((19, 16), (19, 13), (15, 23), (12, 24)),
    (BlockInt(4), False): _cost((18, 16), (19, 12), (15, 23), (13, 24)),
    (Rotated(Gaussian(4)), False): _cost((31, 6.4), (30, 5.7), (24, 15), (13, 22)),
    (Rotated(Gaussian(2)), False): _cost((29, 5.9), (30, 5.3), (23, 14), (12, 22)),
    (Rotated(Gaussian(1)), False): _cost((30, 5.5), (30, 4.7), (24, 14), (13, 27)),
    (TopK(8), False): _cost((36, 5.7), (56, 7), (29, 22), (27, 23)),
}


def _figures(work: Work) -> str:
    rate = 4e-9 / work.per_value if work.per_value else math.inf
    return f"({float(f'{1e6 * work.fixed:.2g}'):g}, {rate:.2g})"


def main() -> None:
    """Print the figures of this machine."""
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    print(f"PACK_SECONDS = 4e-9 / {4e-9 / pack_seconds(cpu):.2g}")
    for codec, feedback in CODECS:
        cost = codec_cost(codec, feedback, cpu)
        works = cost.encode, cost.relay, cost.decode, cost.add
        print(f"    ({as_code(codec)}, {feedback}): _cost({', '.join(map(_figures, works))}),")


if __name__ == "__main__":
    main()
