"""`ringstrategy-plan`: which strategy to take on machines that one does not have, by how long a step would take."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from ringstrategy.algorithms.auto import Auto, eligible
from ringstrategy.algorithms.gradients.allreduce import AllReduce
from ringstrategy.algorithms.parameters.local_sgd import LocalSGD
from ringstrategy.algorithms.server.parameter_server import ParameterServer
from ringstrategy.app import accuracy, reference, subject
from ringstrategy.app.advice import APART, Row, apart, recommended, screen
from ringstrategy.app.outputs import make_writable
from ringstrategy.codecs import BlockInt, Codec
from ringstrategy.collectives import Direct, Hierarchical, Native
from ringstrategy.cost.model import CodecCost, Link, Machines, Work
from ringstrategy.cost.probe import codec_cost, pack_seconds
from ringstrategy.cost.step import Apart, Profile, Served, predict, predict_apart, predict_served
from ringstrategy.extras import require
from ringstrategy.names import STRATEGIES, as_code
from ringstrategy.transport.stats import byte_count

PAYLOAD = 0.95  # of a link's nominal rate: the rest is headers of Ethernet, IP and TCP
POST_SECONDS = 3e-5  # to start a message, in Python and gloo
WAKE_SECONDS = 3e-3  # until a thread that a message has woken gets a core on which another computes: a time slice
TRANSPORT_SECONDS = 8e-10  # of a core, to send or to receive a byte: in the kernel, and in gloo's thread
_TENSORS = 48  # that a model of unknown shape is taken to be made of, all of one size
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_RATES = "write it like 100mbit or 10Gbps, in bits, or like 1.25GB/s, in bytes"
BASELINE = "ddp"
PICTURES = ".png", ".svg", ".pdf"

CodecCosts = dict[tuple[Codec, bool], CodecCost]  # without and with feedback


def candidates(hierarchical: bool) -> dict[str, AllReduce]:
    """The strategies that are compared, by what to pass to `Trainer(strategy=...)`: a name, or code.

    Torch DDP, the registered names that reduce gradients in buckets, 4 bits without a rotation; and if `hierarchical`,
    for several hosts with several ranks each, all of ours over a hierarchy too.
    """
    named: dict[str, AllReduce] = {BASELINE: AllReduce(collective=Native())}
    for name, make in STRATEGIES.items():
        algorithm = make()
        if isinstance(algorithm, AllReduce):
            named[name] = algorithm
    others = [AllReduce(BlockInt(4), Direct())]
    if hierarchical:
        ours = [algorithm for algorithm in [*named.values(), *others] if not isinstance(algorithm.collective, Native)]
        others += [AllReduce(codec_of(algorithm), Hierarchical(algorithm.collective)) for algorithm in ours]
    return {**named, **{f"RingStrategy({as_code(algorithm)})": algorithm for algorithm in others}}


def codec_of(algorithm: AllReduce) -> Codec:
    """Of one without a policy."""
    assert isinstance(algorithm.codec, Codec)
    return algorithm.codec


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


def _keys(algorithms: Iterable[AllReduce]) -> list[tuple[Codec, bool]]:
    """Each codec, and whether its errors are fed back, once."""
    pairs = [(codec_of(algorithm), algorithm.feeds_back(codec_of(algorithm))) for algorithm in algorithms]
    return list(dict.fromkeys(pairs))


def measured_codecs(algorithms: Iterable[AllReduce], device: torch.device) -> CodecCosts:
    """Measure what the codecs cost here on one thread, as well as other load on the machine allows."""
    return {key: codec_cost(*key, device) for key in _keys(algorithms)}


def _given_codecs(algorithms: Iterable[AllReduce], gb_per_second: float) -> CodecCosts:
    pass_over = Work(0.0, 4e-9 / gb_per_second)
    return {key: CodecCost(pass_over, pass_over, pass_over, pass_over) for key in _keys(algorithms)}


@dataclass(frozen=True)
class _Speeds:
    """Of codecs, and seconds to copy a value into a bucket."""

    codecs: CodecCosts
    pack: float
    source: str  # in words


def _speeds(algorithms: Iterable[AllReduce], arguments: Arguments) -> _Speeds:
    if arguments.codec_gb_per_s is not None:
        given = _given_codecs(algorithms, arguments.codec_gb_per_s)
        return _Speeds(given, 4e-9 / arguments.codec_gb_per_s, "encoded, as --codec-gb-per-s says.")
    on_gpus = "on GPUs add --codec-gb-per-s 1000 (an estimate)"
    if not arguments.measure_codecs:
        source = f"encoded by one core of {reference.PROCESSOR}; {on_gpus}, for this machine --measure-codecs."
        return _Speeds(reference.CODECS, reference.PACK_SECONDS, source)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # codecs get one core
    costs, packing = measured_codecs(algorithms, device), pack_seconds(device)
    where = f"one core of this machine; {on_gpus}" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return _Speeds(costs, packing, f"encoded, measured just now on {where}.")


@dataclass(frozen=True)
class Arguments:
    """The user's question; rates in bits a second.

    Attributes:
        parameters: that are trained, without memory.
        optimizer: bytes of its state in each rank. None: as much as AdamW's.
        device: bytes that a rank's device has. None: unknown.
        computing: where `step_ms` comes from, in words.
        of_model: whether `parameters` are a model's own.
    """

    parameters: Mapping[str, Parameter]
    hosts: int
    devices_per_host: int
    rate: float
    inside_rate: float
    step_ms: float
    backward_part: float
    latency_us: float
    cores: float
    servers: int | None
    codec_gb_per_s: float | None
    measure_codecs: bool
    optimizer: int | None = None
    device: float | None = None
    computing: str = ""
    of_model: bool = False
    json: bool = False
    picture: Path | None = None


def _count(text: str) -> float:
    """`350M` -> 3.5e8."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([kmgb]?)", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: write it like 350M, 1.5B, 25e6 or 25000000")
    return float(match[1]) * _UNITS[match[2]]


def _bytes(text: str) -> float:
    """`24GB` -> 2.4e10."""
    return _count(text.strip().lower().removesuffix("b"))


def _rate(text: str) -> float:
    """`10gbit`, `10Gbps`, `1.25GB/s` -> 1e10 bits a second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)([a-z/]*)", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: {_RATES}")
    number, prefix, unit = match.groups()
    if unit in ("bps", "b/s") or unit.lower() in ("bit", "bits", "bit/s", "bits/s"):
        bits = 1.0
    elif unit in ("Bps", "B/s") or unit.lower() in ("byte/s", "bytes/s"):
        bits = 8.0
    elif prefix and unit.lower() in ("", "b", "bps", "b/s"):
        raise argparse.ArgumentTypeError(
            f"{text!r} may be bits or bytes: write {number}{prefix.lower()}bit or {number}{prefix.upper()}B/s"
        )
    else:
        raise argparse.ArgumentTypeError(f"{text!r}: {_RATES}")
    return bits * float(number) * _UNITS[prefix.lower()]


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
        description="Which strategy for my network? Predicts the time of a training step on machines that you do not "
        "have, for torch DDP and for each name that reduces gradients, and recommends one.",
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--parameters", type=_count, help="of the model: 350M, 1.5B; all of one size, in float32")
    model.add_argument("--model", help="my_module:MyModel, a class or a function without arguments that makes it")
    parser.add_argument("--data", help="my_module:make_data, a LightningDataModule or a DataLoader for --model")
    parser.add_argument("--hosts", type=_whole, required=True)
    parser.add_argument("--devices-per-host", type=_whole, default=1)
    parser.add_argument("--rate", type=_rate, required=True, help="of each host's link: 100mbit, 10Gbps, 1.25GB/s")
    parser.add_argument(
        "--step-ms",
        type=_positive,
        help="a step without any exchange, milliseconds; default: --model, a LightningModule, is trained here for 13",
    )
    parser.add_argument(
        "--tflops",
        type=_positive,
        help="what a device there really computes in a second; --step-ms is then the operations of a step of --model",
    )
    parser.add_argument(
        "--backward-part",
        type=_share,
        help="of that step; exchanges hide behind it; default 0.6, or what was measured",
    )
    parser.add_argument("--memory", type=_bytes, help="of a device, such as 24GB: warn if --model needs more")
    parser.add_argument("--inside-rate", type=_rate, default=1e11, help="between devices of one host; default 100gbit")
    parser.add_argument(
        "--latency-us", type=_positive, default=100.0, help="from host to host, software included; default 100"
    )
    parser.add_argument(
        "--cores",
        type=_positive,
        default=2.0,
        help="that each device's process has for itself: with less than 2, codecs slow the computing down; default 2",
    )
    parser.add_argument(
        "--servers", type=_whole, help="show a parameter server of so many ranks, the first ones; default: all serve"
    )
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument(
        "--codec-gb-per-s",
        type=_positive,
        help="fp32 gradients that any codec encodes or decodes in a second there (a GPU: some 1000, an estimate); "
        f"default: what one core of {reference.PROCESSOR} does",
    )
    speed.add_argument(
        "--measure-codecs",
        action="store_true",
        help="measure the codecs on this machine instead: on a GPU if there is one, else on one core",
    )
    parser.add_argument("--json", action="store_true", help="print all rows as JSON")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.png", help="draw the step's time against the rate of the links"
    )
    asked = parser.parse_args(arguments)
    if asked.servers is not None and asked.servers > asked.hosts * asked.devices_per_host:
        parser.error(f"--servers is at most the number of ranks, {asked.hosts * asked.devices_per_host}")
    if asked.step_ms and asked.tflops:
        parser.error("--step-ms and --tflops say the same: pass one of them")
    if asked.model is None:
        if asked.step_ms is None:
            parser.error("--step-ms is needed: how long a step takes without any exchange; or pass --model")
        for option in ("data", "memory"):
            if getattr(asked, option) is not None:
                parser.error(f"--{option} needs --model")
    if asked.picture is not None:
        require("ringstrategy-plan --picture", "matplotlib")
        if asked.picture.suffix not in PICTURES:
            parser.error(f"--picture is a file of {', '.join(PICTURES)}, got {asked.picture}")
        make_writable(asked.picture.parent, parser, "--picture")
    try:
        return _asked(asked)
    except ValueError as error:
        parser.error(str(error))


def _asked(asked: argparse.Namespace) -> Arguments:
    """With the model's parameters, and the time of its step."""
    same = "hosts", "devices_per_host", "rate", "inside_rate", "latency_us", "cores", "servers"
    given = {name: getattr(asked, name) for name in (*same, "codec_gb_per_s", "measure_codecs", "json", "picture")}
    step_ms, part, optimizer, computing = asked.step_ms, 0.6, None, ""
    if asked.model is None:
        each = max(1, round(asked.parameters / _TENSORS))
        parameters = {str(i): Parameter(torch.empty(each, device="meta")) for i in range(_TENSORS)}
    else:
        module = subject.made(asked.model)
        parameters = subject.trained(module)
        if step_ms is None:
            data = None if asked.data is None else subject.made(asked.data)
            step = subject.measure(module, data, count=asked.tflops is not None)
            part, optimizer = step.backward / step.seconds, step.optimizer
            step_ms, computing = 1e3 * step.seconds, f" (measured here, on a {step.device.upper()})"
            if step.flops is not None:
                step_ms = 1e-9 * step.flops / asked.tflops
                computing = f" ({step.flops / 1e9:.3g} GFLOP at {asked.tflops:g} TFLOP/s)"
    return Arguments(
        parameters,
        step_ms=step_ms,
        backward_part=asked.backward_part or part,
        optimizer=optimizer,
        device=asked.memory,
        computing=computing,
        of_model=asked.model is not None,
        **given,
    )


def predictor(arguments: Arguments) -> tuple[Callable[[float], list[Row]], str]:
    """What predicts each candidate at a rate in bits a second, torch DDP first; and where codecs' speeds come from."""
    named = candidates(arguments.hosts > 1 and arguments.devices_per_host > 1)
    hosts = [str(host) for host in range(arguments.hosts) for _ in range(arguments.devices_per_host)]
    may_choose = eligible(Auto().allow, hosts)
    speeds = _speeds([*named.values(), *may_choose], arguments)

    def at(rate: float) -> list[Row]:
        return _rows(replace(arguments, rate=rate), named, may_choose, speeds)

    return at, speeds.source


def _rows(
    arguments: Arguments, named: Mapping[str, AllReduce], may_choose: Sequence[AllReduce], speeds: _Speeds
) -> list[Row]:
    ranks = arguments.hosts * arguments.devices_per_host
    there = machines(
        arguments.hosts,
        arguments.devices_per_host,
        arguments.rate,
        inside_bits_per_second=arguments.inside_rate,
        latency=1e-6 * arguments.latency_us,
        cores=arguments.cores,
        codecs=speeds.codecs,
        pack_seconds=speeds.pack,
    )
    step = 1e-3 * arguments.step_ms
    profile = Profile(rest=step * (1 - arguments.backward_part), backward=step * arguments.backward_part)
    parameters = arguments.parameters
    values = sum(map(torch.numel, parameters.values()))

    def row(name: str, algorithm: AllReduce) -> Row:
        [key] = _keys([algorithm])
        cost = speeds.codecs[key]
        return Row(
            strategy=name if name.endswith(")") else f'"{name}"',
            prediction=predict(algorithm, parameters, there, profile),
            worst=accuracy.worst(*key),
            loss=accuracy.in_words(*key),
            codec_gb_per_s=_gb_per_second(key[0], cost),
            extra=_extra(algorithm, parameters),
        )

    def seldom(name: str, algorithm: LocalSGD) -> Row:
        codec = algorithm.codec if isinstance(algorithm.codec, Codec) else algorithm.codec.codec  # type: ignore[attr-defined]
        key = codec, False
        schedule = algorithm.schedule
        how = Apart(algorithm.collective, codec, key[1], schedule.interval, schedule.late, algorithm.fragments)
        prediction = predict_apart(how, values, there, profile)
        return Row(
            f'"{name}"',
            prediction,
            APART,
            "apart",
            _gb_per_second(codec, speeds.codecs[key]),
            extra=4 * values * algorithm.copies,
        )

    def served(name: str, algorithm: ParameterServer) -> Row:
        assert isinstance(algorithm.codec, Codec)
        count = ranks if algorithm.servers == "all" else int(algorithm.servers)
        bucket = int(algorithm.bucket_mb * 2**20) // 4
        how = Served(count, algorithm.codec, algorithm.error_feedback, algorithm.pull, bucket)
        prediction, apart = predict_served(how, values, there, profile), algorithm.mode != "sync"
        return Row(name, prediction, APART if apart else 0.0, "apart" if apart else "exact", None, "(" in name)

    rows = [row(name, algorithm) for name, algorithm in named.items()]
    rows += [
        served(f'"{name}"', made) for name, make in STRATEGIES.items() if isinstance(made := make(), ParameterServer)
    ]
    if asked_for := arguments.servers:
        made = ParameterServer(asked_for)
        rows.append(served(f"RingStrategy(ParameterServer({asked_for}))", made))
    rows += [seldom(name, made) for name, make in STRATEGIES.items() if isinstance(made := make(), LocalSGD)]
    chosen = min((row("ring_auto", made) for made in may_choose), key=lambda row: row.seconds)
    return [*rows, chosen]


def _gb_per_second(codec: Codec, cost: CodecCost) -> float | None:
    """Of float32 that it encodes; None: nothing is encoded."""
    return None if codec.lossless else 4e-9 / cost.encode.per_value


def _extra(algorithm: AllReduce, parameters: Mapping[str, Parameter]) -> int:
    """Bytes in each rank beside parameters, gradients and the optimizer's state: residuals, and DDP's buckets."""
    if isinstance(algorithm.collective, Native):
        return subject.nbytes(parameters)
    codec = codec_of(algorithm)
    return sum(4 * each.numel() for each in parameters.values()) if algorithm.feeds_back(codec) else 0


def _memory(asked: Arguments, rows: list[Row]) -> str:
    """Of a rank, in words; a warning if a device has less."""
    mine = subject.nbytes(asked.parameters)
    optimizer, whose = (2 * mine, "AdamW") if asked.optimizer is None else (asked.optimizer, "the optimizer")
    best = recommended(rows)
    extra = {row.strategy: row.extra for row in (rows[0], best, apart(rows, best)) if row and row.extra is not None}
    more = ", ".join(f"{name} {byte_count(nbytes)}" for name, nbytes in extra.items())
    dtypes = ", ".join(sorted({str(each.dtype).removeprefix("torch.") for each in asked.parameters.values()}))
    text = (
        f"Memory a rank, activations and buffers aside: parameters {byte_count(mine)} and as much of gradients in "
        f"{dtypes}, {whose} {byte_count(optimizer)}; and {more}."
    )
    if asked.device is not None and 2 * mine + optimizer + max(extra.values()) > asked.device:
        text += f" TOO MUCH for a device of {byte_count(asked.device)}."
    return text


def _as_json(asked: Arguments, rows: list[Row], setting: str) -> str:
    """All rows, the baseline first; seconds, bytes, per cent."""
    best = recommended(rows)
    answer: dict[str, Any] = {
        "setting": setting,
        "step_seconds": 1e-3 * asked.step_ms,
        "recommended": best.strategy,
        "rows": [
            {
                "strategy": row.strategy,
                "seconds": row.seconds,
                "times_ddp": rows[0].seconds / row.seconds,
                "communication_seconds": row.prediction.communication,
                "bytes_per_host": row.prediction.bytes_across,
                "loss_percent": None if row.worst == APART else row.worst,
                "trains_apart": row.worst == APART,
                "extra_bytes_per_rank": row.extra,
            }
            for row in rows
        ],
    }
    return json.dumps(answer, indent=2)


def _several(number: float, noun: str) -> str:
    return f"{number:g} {noun}{'' if number == 1 else 's'}"


def main(arguments: list[str] | None = None) -> None:
    """The console script."""
    asked = parse(arguments)
    at, source = predictor(asked)
    rows = at(asked.rate)
    if asked.picture:
        from ringstrategy.app.plan_picture import draw

        draw(at, asked.rate, 1e-3 * asked.step_ms, asked.picture)
    ranks = asked.hosts * asked.devices_per_host
    values = sum(map(torch.numel, asked.parameters.values()))
    setting = (
        f"{values / 1e6:.4g} M parameters, {_several(ranks, 'rank')} on {_several(asked.hosts, 'host')} "
        f"of {asked.rate / 1e9:g} Gbit/s ({asked.rate / 8e6:g} MB/s), {_several(asked.cores, 'core')} a rank, "
        f"{asked.step_ms:.4g} ms of computing a step{asked.computing}: predicted, in the lab up to 30 % too fast."
    )
    if asked.json:
        print(_as_json(asked, rows, setting))
    else:
        print(screen(rows, setting, source, _memory(asked, rows) if asked.of_model else ""))


if __name__ == "__main__":
    main()
