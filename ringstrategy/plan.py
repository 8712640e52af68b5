"""`ringstrategy-plan`: how long a training step would take on machines that one does not have."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch.nn import Parameter

from ringstrategy.algorithms.allreduce import AllReduce
from ringstrategy.algorithms.auto import Auto, eligible, in_words
from ringstrategy.codecs import Codec
from ringstrategy.collectives import Hierarchical, Native
from ringstrategy.cost.model import CodecCost, Link, Machines, Work
from ringstrategy.cost.probe import codec_cost, pack_seconds
from ringstrategy.cost.step import Prediction, Profile, predict
from ringstrategy.registry import STRATEGIES

PAYLOAD = 0.95  # of a link's nominal rate: the rest is headers of Ethernet, IP and TCP
POST_SECONDS = 3e-5  # to start a message, in Python and gloo
WAKE_SECONDS = 3e-3  # until a thread that a message has woken gets a core on which another computes: a time slice
TRANSPORT_SECONDS = 8e-10  # of a core, to send or to receive a byte: in the kernel, and in gloo's thread
_TENSORS = 48  # that a model of unknown shape is taken to be made of, all of one size
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}
BASELINE = "ddp"


def candidates(several_ranks_a_host: bool) -> dict[str, AllReduce]:
    """What is compared: torch DDP, the registered names that reduce gradients in buckets, with one collective more."""
    named: dict[str, AllReduce] = {BASELINE: AllReduce(collective=Native())}
    for name, make in STRATEGIES.items():
        algorithm = make()
        if isinstance(algorithm, AllReduce):
            named[name] = algorithm
            if several_ranks_a_host and isinstance(algorithm.codec, Codec):
                between = Hierarchical(between=algorithm.collective)
                named[f"{name}, hierarchical"] = AllReduce(algorithm.codec, between, bucket_mb=algorithm.bucket_mb)
    return named


def machines(
    hosts: int,
    devices_per_host: int,
    bits_per_second: float,
    *,
    inside_bits_per_second: float,
    latency: float,
    cores: float,
    codecs: Mapping[tuple[Codec, bool], CodecCost],
    pack_seconds: float,
) -> Machines:
    """Machines as a data sheet describes them.

    Args:
        hosts: how many.
        devices_per_host: ranks on each.
        bits_per_second: nominal rate of each host's link.
        inside_bits_per_second: between two devices of a host.
        latency: seconds from one host to another, software included.
        cores: that each rank has for itself; with one or less, codecs, sending and computing take it in turns, and with
            less than one codecs and sending are slower.
        codecs: what they cost a whole core.
        pack_seconds: to copy one value of a gradient into a bucket, likewise.
    """
    scarce = max(1.0, 1.0 / cores)
    crowding = min(1.0, max(0.0, 2.0 - cores))
    return Machines(
        hosts=tuple(str(host) for host in range(hosts) for _ in range(devices_per_host)),
        across=Link(latency, 8 / (PAYLOAD * bits_per_second)),
        inside=Link(min(latency, 2e-5), 8 / inside_bits_per_second),
        post=POST_SECONDS * scarce,
        codecs={key: cost.slower(scarce) for key, cost in codecs.items()},
        crowding=crowding,
        transport=TRANSPORT_SECONDS * scarce * crowding,
        wake=WAKE_SECONDS * crowding,
        pack=Work(0.0, pack_seconds).slower(scarce),
    )


def measured_codecs(algorithms: Iterable[AllReduce], device: torch.device) -> dict[tuple[Codec, bool], CodecCost]:
    """What the codecs of these cost here and now, on one thread."""
    costs = {}
    for algorithm in algorithms:
        assert isinstance(algorithm.codec, Codec)
        key = (algorithm.codec, algorithm.feeds_back(algorithm.codec))
        if key not in costs:
            costs[key] = codec_cost(*key, device, lambda work: work())
    return costs


def _given_codecs(algorithms: Iterable[AllReduce], gb_per_second: float) -> dict[tuple[Codec, bool], CodecCost]:
    pass_over = Work(0.0, 4e-9 / gb_per_second)
    nothing = Work(0.0, 0.0)
    costs = {}
    for algorithm in algorithms:
        assert isinstance(algorithm.codec, Codec)
        turn = nothing if type(algorithm.codec).prepare_ is Codec.prepare_ else pass_over
        costs[algorithm.codec, algorithm.feeds_back(algorithm.codec)] = CodecCost(pass_over, pass_over, pass_over, turn)
    return costs


@dataclass(frozen=True)
class Arguments:
    """What is asked; rates in bits a second."""

    parameters: float
    hosts: int
    devices_per_host: int
    rate: float
    inside_rate: float
    step_ms: float
    backward_part: float
    latency_us: float
    cores: float
    codec_gb_per_s: float | None


def _count(text: str) -> float:
    """`350M` -> 3.5e8."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgb]?)", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: write it like 350M, 1.5B or 25000000")
    return float(match[1]) * _UNITS[match[2]]


def _rate(text: str) -> float:
    """`10gbit` -> 1e10 bits a second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: write it like 100mbit, 1gbit or 25gbit")
    return float(match[1]) * _UNITS[match[2]]


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number > 0")
    return value


def _share(text: str) -> float:
    value = _positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a part of the step, between 0 and 1")
    return value


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
    return int(text)


def parse(arguments: list[str] | None) -> Arguments:
    """From the command line."""
    parser = argparse.ArgumentParser(
        prog="ringstrategy-plan",
        description="Predict the time of a training step on machines that you do not have, for torch DDP and for each "
        "name that reduces gradients. Times of codecs are measured on this machine unless you give them.",
    )
    parser.add_argument("--parameters", type=_count, required=True, help="of the model: 350M, 1.5B")
    parser.add_argument("--hosts", type=_whole, required=True)
    parser.add_argument("--devices-per-host", type=_whole, default=1)
    parser.add_argument("--rate", type=_rate, required=True, help="of each host's link: 100mbit, 1gbit, 25gbit")
    parser.add_argument("--step-ms", type=_positive, required=True, help="a step without any exchange, milliseconds")
    parser.add_argument("--backward-part", type=_share, default=0.6, help="of that step; exchanges hide behind it")
    parser.add_argument("--inside-rate", type=_rate, default=1e11, help="between devices of one host; default 100gbit")
    parser.add_argument("--latency-us", type=_positive, default=100.0, help="from host to host, software included")
    parser.add_argument(
        "--cores",
        type=_positive,
        default=2.0,
        help="that each device's process has for itself: with less than 2, codecs slow the computing down; default 2",
    )
    parser.add_argument(
        "--codec-gb-per-s",
        type=_positive,
        help="fp32 gradients that any codec encodes or decodes in a second there (a GPU: some 1000); default: measured "
        "here, on a GPU if there is one, else on one core",
    )
    return Arguments(**vars(parser.parse_args(arguments)))


def plan(arguments: Arguments) -> dict[str, Prediction]:
    """A prediction for each candidate, torch DDP first."""
    named = candidates(arguments.devices_per_host > 1)
    auto = Auto()
    hosts = [str(host) for host in range(arguments.hosts) for _ in range(arguments.devices_per_host)]
    may_choose = eligible(auto.allow, hosts, error_feedback=auto.error_feedback)
    compared = [*named.values(), *may_choose]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.codec_gb_per_s is None:
        costs, packing = measured_codecs(compared, device), pack_seconds(device)
    else:
        costs, packing = _given_codecs(compared, arguments.codec_gb_per_s), 4e-9 / arguments.codec_gb_per_s
    there = machines(
        arguments.hosts,
        arguments.devices_per_host,
        arguments.rate,
        inside_bits_per_second=arguments.inside_rate,
        latency=1e-6 * arguments.latency_us,
        cores=arguments.cores,
        codecs=costs,
        pack_seconds=packing,
    )
    step = 1e-3 * arguments.step_ms
    profile = Profile(rest=step * (1 - arguments.backward_part), backward=step * arguments.backward_part)
    each = max(1, round(arguments.parameters / _TENSORS))
    parameters = {str(i): Parameter(torch.empty(each, device="meta")) for i in range(_TENSORS)}
    predictions = {name: predict(algorithm, parameters, there, profile) for name, algorithm in named.items()}
    choices = {in_words(made): predict(made, parameters, there, profile) for made in may_choose}
    chosen = min(choices, key=lambda words: choices[words].seconds)
    return {**predictions, f"ring_auto: {chosen}": choices[chosen]}


def main(arguments: list[str] | None = None) -> None:
    """The console script."""
    if find_spec("rich") is None:
        sys.exit("ringstrategy-plan needs rich: pip install 'ringstrategy[app]'")
    from rich.console import Console
    from rich.table import Table

    parsed = parse(arguments)
    torch.set_num_threads(1)  # codecs get one core
    predictions = plan(parsed)
    ranks = parsed.hosts * parsed.devices_per_host
    table = Table(
        title=f"predicted: {parsed.parameters / 1e6:g} M parameters, {ranks} ranks on {parsed.hosts} hosts, "
        f"{parsed.rate / 1e9:g} Gbit/s each, {parsed.step_ms:g} ms of computing a step",
        title_justify="left",
    )
    table.add_column("strategy")
    for heading in ("ms\na step", "x ddp", "computing\n% of it", "exchange\nalone, ms", "MB sent\nby a rank"):
        table.add_column(heading, justify="right", no_wrap=True)
    base = predictions[BASELINE].seconds
    for name, prediction in sorted(predictions.items(), key=lambda item: item[1].seconds):
        table.add_row(
            name,
            f"{1e3 * prediction.seconds:.1f}",
            f"{base / prediction.seconds:.2f}",
            f"{0.1 * parsed.step_ms / prediction.seconds:.0f}",
            f"{1e3 * prediction.communication:.1f}",
            f"{1e-6 * prediction.bytes_sent:.2f}",
            style="bold" if name == BASELINE else None,
        )
    console = Console()
    console.print(table)
    console.print(
        "An alpha-beta-gamma model with equal tensors, gradients at a constant rate, and no other traffic. "
        "ring_powersgd and gossip are not predicted.",
        highlight=False,
    )


if __name__ == "__main__":
    main()
