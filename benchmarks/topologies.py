"""Compare topologies: messages, spectral gap and steps to consensus for sizes 2, 4, 8, ..., and a drawing if asked.

python -m benchmarks topologies --most 1024 --png topologies.png
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from ringstrategy.app.outputs import make_writable
from ringstrategy.app.text import text_table
from ringstrategy.extras import require
from ringstrategy.topologies import (
    Complete,
    Exponential,
    Hierarchical,
    Hypercube,
    OnePeerExponential,
    RandomMatching,
    RingGraph,
    Star,
    Topology,
    Torus,
)

SHOWN: list[Topology] = [
    RingGraph(),
    Torus(),
    Hypercube(),
    Exponential(),
    OnePeerExponential(),
    RandomMatching(),
    Hierarchical(2),
    Star(),
    Complete(),
]
_WITHIN = 1e-3


def table(sizes: list[int]) -> str:
    """One row a topology, one column a size."""
    rows = []
    for topology in SHOWN:
        cells = []
        for size in sizes:
            steps = topology.steps_to_consensus(size, _WITHIN)
            gap = topology.spectral_gap(size)
            cells.append(f"{topology.degree(size)} / {gap:.2g} / {'never' if steps is None else steps}")
        rows.append([str(topology), *cells])
    return (
        f"messages a rank sends in a step / spectral gap / steps until differences are {_WITHIN:g} of the first\n"
        + text_table(["topology", *map(str, sizes)], rows)
    )


def draw(path: Path, size: int, steps: int) -> None:
    """The graphs on a circle, and how fast ranks that differ at random come together."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 11), layout="constrained")
    axes = figure.subplots(3, 4).flatten()
    start = torch.randn(size, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    curves = axes[len(SHOWN)]
    places = [(math.sin(2 * math.pi * rank / size), math.cos(2 * math.pi * rank / size)) for rank in range(size)]
    for axis, topology in zip(axes, SHOWN, strict=False):
        for step in reversed(range(min(topology.period(size), 8))):
            color = f"C{step}"
            for rank in range(size):
                for source in topology.weights(rank, size, step):
                    if source != rank:
                        axis.plot(*zip(places[source], places[rank], strict=True), color=color, linewidth=0.8)
        axis.scatter(*zip(*places, strict=True), color="black", s=12, zorder=3)
        axis.set_title(f"{topology}\n{topology.degree(size)} messages a step", fontsize=9)
        axis.set_axis_off()
        axis.set_aspect("equal")
        values, distances = start, []
        for step in range(steps + 1):
            distances.append(max(float((values - values.mean(0)).square().mean()), 1e-32))
            values = topology.matrix(size, step) @ values
        curves.semilogy(distances, label=type(topology).__name__)
    curves.set_title(f"consensus distance, {size} ranks", fontsize=9)
    curves.set_xlabel("step")
    curves.set_ylim(1e-12, 2)
    curves.legend(fontsize=7)
    for axis in axes[len(SHOWN) + 1 :]:
        axis.set_axis_off()
    figure.savefig(path, dpi=90, format="png")


def main(given: Sequence[str]) -> None:
    """Print and draw."""
    parser = argparse.ArgumentParser("python -m benchmarks topologies", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--most", type=int, default=64, help="largest size of the table (1024 takes a minute)")
    parser.add_argument("--png", type=Path, help="draw them into this file; default: only the table is printed")
    parser.add_argument("--size", type=int, default=16, help="ranks in the drawing")
    parser.add_argument("--steps", type=int, default=40, help="steps in the drawing")
    options = parser.parse_args(given)
    if options.png is not None:
        require(f"{parser.prog} --png", "matplotlib")
        make_writable(options.png.parent, parser, "--png")
    print(table([1 << power for power in range(1, options.most.bit_length())]))
    if options.png is not None:
        draw(options.png, options.size, options.steps)
        print(f"drawn: {options.png}")
