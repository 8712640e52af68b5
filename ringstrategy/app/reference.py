"""Speeds of the codecs on one core of a known processor: `ringstrategy-plan` uses them by default.

What is measured varies with whatever else the machine does, and is not of the machines that are asked about.

python -m ringstrategy.app.reference  # measures them on one core of this machine, and prints the lines below
"""

from __future__ import annotations

import math

import torch

from ringstrategy.app.as_code import as_code
from ringstrategy.codecs import BlockFloat8, BlockInt, Cast, Codec, Gaussian, Identity, Rotated, TopK
from ringstrategy.cost.model import CodecCost, Work
from ringstrategy.cost.probe import codec_cost, pack_seconds

Figures = tuple[float, float]  # microseconds a call, and beside them GB of float32 values a second

PROCESSOR = "an Intel Xeon at 2.6 GHz with AVX-512"


def _work(figures: Figures) -> Work:
    microseconds, gigabytes_per_second = figures
    return Work(1e-6 * microseconds, 4e-9 / gigabytes_per_second)


def _cost(encode: Figures, relay: Figures, decode: Figures, add: Figures) -> CodecCost:
    return CodecCost(_work(encode), _work(relay), _work(decode), _work(add))


PACK_SECONDS = 4e-9 / 6.3
CODECS: dict[tuple[Codec, bool], CodecCost] = {
    (Identity(), False): _cost((6.1, 9.9), (5.7, 5.1), (5.5, 7.6), (3.1, 9.2)),
    (Cast("float16"), False): _cost((6.6, 12), (8.6, 4.2), (5.1, 8.2), (3.8, 6.1)),
    (Cast("bfloat16"), False): _cost((6.7, 7.8), (5.3, 3.4), (5.1, 7.5), (3.8, 6)),
    (BlockFloat8("e4m3"), False): _cost((30, 4.9), (18, 3.3), (12, 7.9), (10, 6.9)),
    (BlockInt(8), False): _cost((16, 6.7), (15, 6), (12, 8.1), (9.9, 11)),
    (BlockInt(8), True): _cost((19, 4), (20, 4.4), (13, 8), (9.9, 10)),
    (BlockInt(4), False): _cost((15, 7.2), (15, 6), (11, 6.2), (11, 10)),
    (Rotated(Gaussian(4)), False): _cost((23, 3.4), (23, 2.9), (19, 3.9), (10, 10)),
    (Rotated(Gaussian(2)), False): _cost((22, 3.1), (23, 2.8), (18, 4), (10, 11)),
    (Rotated(Gaussian(1)), False): _cost((23, 3), (23, 2.8), (18, 3.8), (10, 10)),
    (TopK(8), False): _cost((27, 0.3), (58, 0.29), (35, 2.6), (27, 2.9)),
}


def _figures(work: Work) -> str:
    rate = 4e-9 / work.per_value if work.per_value else math.inf
    return f"({float(f'{1e6 * work.fixed:.2g}'):g}, {rate:.2g})"


def main() -> None:
    """Print the figures of this machine."""
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    print(f"PACK_SECONDS = 4e-9 / {4e-9 / pack_seconds(cpu, undisturbed=True):.2g}")
    for codec, feedback in CODECS:
        cost = codec_cost(codec, feedback, cpu, lambda work: work(), undisturbed=True)
        works = cost.encode, cost.relay, cost.decode, cost.add
        print(f"    ({as_code(codec)}, {feedback}): _cost({', '.join(map(_figures, works))}),")


if __name__ == "__main__":
    main()
