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


def _cost(encode: Figures, relay: Figures, decode: Figures, turn: Figures = (0, math.inf)) -> CodecCost:
    return CodecCost(_work(encode), _work(relay), _work(decode), _work(turn))


PACK_SECONDS = 4e-9 / 6.4
CODECS: dict[tuple[Codec, bool], CodecCost] = {
    (Identity(), False): _cost((5.8, 10), (6.9, 5.2), (5.3, 8.8)),
    (Cast("float16"), False): _cost((5.9, 13), (6.6, 3.8), (5.8, 8.6)),
    (Cast("bfloat16"), False): _cost((6.4, 9), (5.4, 3.5), (5.1, 7.9)),
    (BlockFloat8("e4m3"), False): _cost((64, 2.5), (91, 1.6), (37, 3.7)),
    (BlockInt(8), False): _cost((59, 3.2), (79, 2.3), (28, 5.1)),
    (BlockInt(8), True): _cost((74, 1.6), (91, 1.3), (28, 5)),
    (BlockInt(4), False): _cost((68, 3), (110, 2), (43, 3.8)),
    (Rotated(Gaussian(4)), False): _cost((110, 1.5), (150, 1.1), (44, 3.5), (31, 3.2)),
    (Rotated(Gaussian(2)), False): _cost((110, 1.5), (150, 1), (46, 3.5), (28, 3.3)),
    (Rotated(Gaussian(1)), False): _cost((110, 1.4), (160, 1), (50, 2.2), (26, 3.1)),
    (TopK(8), False): _cost((39, 0.34), (60, 0.31), (28, 2.8)),
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
        works = [cost.encode, cost.relay, cost.decode]
        if type(codec).prepare_ is not Codec.prepare_:
            works.append(cost.turn)
        print(f"    ({as_code(codec)}, {feedback}): _cost({', '.join(map(_figures, works))}),")


if __name__ == "__main__":
    main()
