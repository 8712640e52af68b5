"""`ringstrategy-plan` and the cost model that it asks: one screen with one answer, in code that can be pasted."""

from __future__ import annotations

import gc
import json
import re
import types
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from fakes import FakePeers, on_all_ranks
from lightning.pytorch.strategies import StrategyRegistry
from pairs import all_pairs
from scripts import ROOT
from torch import Tensor, nn
from torch.nn import Parameter

import ringstrategy
from ringstrategy import (
    AllReduce,
    BlockInt,
    BySize,
    Codec,
    Collective,
    Direct,
    Gaussian,
    Hierarchical,
    Identity,
    LocalSGD,
    Native,
    Ring,
    RingStrategy,
    Rotated,
    TopK,
)
from ringstrategy.app import accuracy, reference
from ringstrategy.app.advice import MATERIAL, Row, beaten, recommended, tempting
from ringstrategy.app.plan import Arguments, candidates, main, parse, predictor
from ringstrategy.app.plan_picture import curves
from ringstrategy.collectives import Summand, mean_
from ringstrategy.cost.model import CodecCost, Link, Machines, Work, exchange_cost
from ringstrategy.cost.step import Prediction, Profile, predict
from ringstrategy.names import STRATEGIES

ACCURACY, TOOLS = ((ROOT / "docs" / name).read_text() for name in ("performance.md", "tools.md"))
RESULTS = ROOT / "benchmarks" / "results"
GIVEN = ["--parameters", "10M", "--hosts", "4", "--step-ms", "50"]
NAMES: dict[str, Any] = {name: getattr(ringstrategy, name) for name in ringstrategy.__all__}


def row(strategy: str, seconds: float, worst: float = 0.0) -> Row:
    return Row(strategy, Prediction(seconds, seconds, 1, 1), worst, f"{worst} %", None)


def rows_of(asked: Arguments) -> list[Row]:
    at, _ = predictor(asked)
    return at(asked.rate)


# What is predicted


def test_all_names_and_hierarchies_are_predicted() -> None:
    for rate in ("100mbit", "100Mbits/s", "12.5MB/s"):
        asked = parse([*GIVEN, "--rate", rate, "--devices-per-host", "2", "--codec-gb-per-s", "10"])
        assert asked.rate == 1e8
    found = {row.strategy: row.prediction for row in rows_of(asked)}
    assert {f'"{name}"' for name in [*STRATEGIES, "ddp"]} - set(found) == {
        *('"ring_powersgd"', '"central_storage"'),
        *(f'"{name}"' for name in ("gossip", "gossip_exponential", "gossip_int8", "push_sum")),
    }
    apart, ring = found['"local_sgd"'], found['"ring"']
    assert apart.bytes_across == pytest.approx(ring.bytes_across / 16, rel=0.01)
    assert apart.seconds - ring.communication / 16 == pytest.approx(0.05, rel=0.1)
    assert 60 < ring.bytes_across / found['"diloco_int4"'].bytes_across < 130
    assert 240 < ring.bytes_across / found['"diloco_sign"'].bytes_across < 500
    assert found['"diloco_int4"'].seconds < found['"diloco"'].seconds < apart.seconds
    wire = 2 * 7 / 8 * 4e7 * 8 / (0.95 * 1e8)  # a flat ring leaves each host once, however many ranks it has
    assert found['"ring"'].communication == pytest.approx(wire, rel=0.05)
    assert found['"ring"'].seconds > found['"ring_int8"'].seconds > found['"ring_int4"'].seconds
    hierarchical = found["RingStrategy(AllReduce(collective=Hierarchical()))"].communication
    assert hierarchical == pytest.approx(wire * (2 * 3 / 4) / (2 * 7 / 8), rel=0.05)
    int8 = found["RingStrategy(AllReduce(BlockInt(8), Hierarchical()))"].seconds
    assert found['"ring_auto"'].seconds <= 1.001 * min(found['"ring"'].seconds, found['"ring_int8"'].seconds, int8)


def test_the_picture_shows_what_is_recommended_on_slower_and_faster_links(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*GIVEN, "--rate", "1gbit", "--picture", str(tmp_path / "new" / "plan.svg")])
    assert "</svg>" in (tmp_path / "new" / "plan.svg").read_text()
    assert '"ring_int4"' in capsys.readouterr().out
    asked = parse([*GIVEN, "--rate", "1gbit"])
    rates, seconds = curves(predictor(asked)[0], asked.rate)
    assert rates[[0, len(rates) // 2, -1]].tolist() == pytest.approx([1e7, 1e9, 1e11])
    assert {'"ddp"', '"ring_int4"', '"ring_int8"', '"diloco_sign"'} <= seconds.keys()
    assert seconds['"ddp"'] == sorted(seconds['"ddp"'], reverse=True)
    assert seconds['"ddp"'][len(rates) // 2] == rows_of(asked)[0].seconds
    with pytest.raises(SystemExit):
        parse([*GIVEN, "--rate", "1gbit", "--picture", "plan.gif"])
    assert "--picture is a file of .png, .svg, .pdf, got plan.gif" in capsys.readouterr().err


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("servers", [1, 2, 3, 4])
def test_the_busiest_link_of_servers_bounds_a_step(
    servers: int, devices: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each server gets its share of all gradients, and sends its share of the parameters to all ranks."""
    given = [*GIVEN, "--rate", "1gbit", "--devices-per-host", str(devices), "--codec-gb-per-s", "1000"]
    given += ["--servers", str(servers), "--cores", "4"]
    found = {row.strategy: row.prediction for row in rows_of(parse(given))}
    ranks, share = 4 * devices, min(servers, devices) / servers  # of the first host, which has most
    arrives, leaves = (ranks - devices) * share * 4e7, devices * (1 - share) * 4e7  # gradients
    one = found[f"RingStrategy(ParameterServer({servers}))"]
    assert one.bytes_across == pytest.approx(arrives + leaves, rel=0.01)
    without = 4e7 * devices if servers < ranks else 0.0  # of gradients, the last host
    seconds = max(arrives, leaves, without) * 8 / (0.95 * 1e9)
    assert one.communication == pytest.approx(2 * seconds, rel=0.05)
    assert max(2 * seconds, 0.05) < one.seconds < 2 * seconds + 0.06
    every = found['"parameter_server"']
    assert every == found['"parameter_server_async"']
    assert every.bytes_across == pytest.approx(2 * (1 - 1 / 4) * devices * 4e7, rel=0.01)
    assert every.bytes_sent == pytest.approx(2 * (1 - 1 / ranks) * 4e7, rel=0.01)
    main(given)
    assert f"RingStrategy(ParameterServer({servers})) " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        parse([*given[:-4], "--servers", str(ranks + 1)])
    assert f"at most the number of ranks, {ranks}" in capsys.readouterr().err


def test_what_is_shown_can_be_pasted_and_its_figures_are_known() -> None:
    for name, algorithm in candidates(True).items():
        made = eval(name, NAMES) if "(" in name else name != "ddp" and StrategyRegistry.get(name)
        if made:
            assert isinstance(made, RingStrategy)
            assert repr(made.algorithm) == repr(algorithm)
        assert isinstance(algorithm.codec, Codec)
        key = algorithm.codec, algorithm.feeds_back(algorithm.codec)
        assert key in reference.CODECS, f"print its figures by python -m ringstrategy.app.reference: {key}"
        assert key in accuracy.TEXT, f"measure it by ringstrategy-train -m: {key}"


def test_losses_are_those_that_were_measured() -> None:
    rows = {}
    for line in ACCURACY.split("<!-- accuracy: begin")[1].split("<!-- accuracy: end")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        differences = [re.match(r"[+-]\d+\.\d(?= %)", cell) for cell in cells[1:3]]
        if all(differences):
            rows[cells[0]] = tuple(float(found[0]) for found in differences if found)
    for name, algorithm in candidates(False).items():
        assert isinstance(algorithm.codec, Codec)
        found = accuracy.TEXT[algorithm.codec, algorithm.feeds_back(algorithm.codec)]
        row = "`BlockInt(4)`, `Direct`" if "(" in name else f"`{name}`"
        assert found == ((0, 0) if algorithm.codec.lossless else rows[row])
    text = (RESULTS / "accuracy.md").read_text().split("## Every wire and knob")[1]
    cells = [line.split("|") for line in text.splitlines() if line.startswith("| int8 |")][:2]  # AdamW, SGD, on text
    assert accuracy.TEXT[BlockInt(8), True] == tuple(round(float(line[4]), 1) for line in cells)
    words = [accuracy.in_words(codec, codec == BlockInt(8)) for codec in (Identity(), BlockInt(8), BlockInt(4), TopK())]
    assert words == ["exact", "<=0.5 %", "0.5-0.9 %", "7-17 %"]


# What it recommends


def test_nothing_lossier_is_recommended_unless_it_gains() -> None:
    ddp, fp16, int8 = row('"ddp"', 1.0), row("fp16", 0.55, 0.1), row("int8", 0.5, 0.2)
    assert recommended([ddp, fp16, int8]) is fp16, "int8 is faster, but not by enough"
    assert recommended([ddp, fp16, row("int8", 0.55 / MATERIAL / 1.01, 0.2)]).strategy == "int8"
    assert recommended([ddp, fp16, row("sign", 0.01, 3.7)]) is fp16, "however fast it is"
    nearly = row('"ring"', 0.9)
    assert recommended([ddp, nearly]) is ddp, "of two that lose nothing the first"
    assert recommended([ddp, row("int8", 1.01 / MATERIAL, 0.2)]) is ddp
    # what loses a little is named only if it gains
    fast = row("int2", 0.4, 0.9)
    assert tempting([int8, row("int2", 0.45, 0.9)], int8) is None
    assert tempting([int8, row("sign", 0.1, 3.7)], int8) is None
    assert tempting([int8, fast], int8) is fast
    # who is no faster and loses no less is beaten
    ring, fp8 = row("ring", 1.0), row("fp8", 0.5, 0.3)
    assert beaten([ddp, ring, int8, fp8, fast]) == [ring, fp8]


NETWORKS = {
    "24M --hosts 4 --rate 1gbit --step-ms 250 --cores 0.5": '"ring_int4"',
    "7B --hosts 8 --rate 100gbit --step-ms 1000": '"ddp"',
    "7B --hosts 8 --rate 100gbit --step-ms 1000 --codec-gb-per-s 1000": '"ring_int4"',
    "350M --hosts 16 --devices-per-host 4 --rate 10gbit --step-ms 300": (
        "RingStrategy(AllReduce(Rotated(Gaussian(4)), Hierarchical(Direct())))"
    ),
    "1.5B --hosts 24 --devices-per-host 2 --rate 12.5MB/s --step-ms 0.5 --cores 0.1": None,
}


@pytest.mark.parametrize(("network", "strategy"), NETWORKS.items(), ids=NETWORKS)
def test_the_answer_is_one_screen_with_one_recommendation(
    network: str, strategy: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--parameters", *network.split()])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    [given] = [line.strip() for line in lines if line.startswith("  strategy=")]
    assert strategy is None or given == f"strategy={strategy}"
    assert any(line.startswith(given.removeprefix("strategy=")) for line in lines), "it has a row"
    imports = [line.strip() for line in lines if re.match("  (import|from) ", line)]
    exec("\n".join(imports), scope := {})
    assert given == 'strategy="ddp"' or "ringstrategy" in scope or isinstance(eval(given[9:], scope), RingStrategy)
    assert ("plain ddp" in "\n".join(lines)) == (given == 'strategy="ddp"')


def test_the_page_shows_what_the_command_prints_on_any_machine(capsys: pytest.CaptureFixture[str]) -> None:
    [(command, shown)] = re.findall(r"```bash\nringstrategy-plan (.*)\n```\n\n```text\n(.*?)```", TOOLS, re.DOTALL)
    main(command.split())
    assert capsys.readouterr().out == shown


# A model of one's own


class Own(lightning.LightningModule):
    """Of two layers, the first of which is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(24, 40, bias=False).requires_grad_(False), nn.Linear(40, 1000, bias=False))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.net[1].parameters())


class Served(Own):
    """With data."""

    def train_dataloader(self) -> Any:
        return batches()


def batches() -> Any:
    return torch.utils.data.DataLoader(torch.randn(160, 24), 8)


def layer() -> nn.Module:
    return nn.Linear(3, 4)


OWN = ["--hosts", "4", "--rate", "1gbit", "--model"]


def test_a_model_has_its_own_parameters_step_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    trained = 4 * 40 * 1000
    for given in ([f"{__name__}:Served"], [f"{__name__}:Own", "--data", f"{__name__}:batches"]):
        asked = parse([*OWN, *given])
        assert {name: each.shape for name, each in asked.parameters.items()} == {"net.1.weight": (1000, 40)}
        assert 0 < asked.backward_part < 1
        assert asked.optimizer == 2 * trained
        flops = 2 * 8 * (24 * 40 + 2 * 40 * 1000)  # forward twice, backward of the second
        counted = parse([*OWN, *given, "--tflops", "0.001"])
        assert counted.step_ms == pytest.approx(1e3 * flops / 1e9)
    main([*OWN, f"{__name__}:Own", "--step-ms", "20", "--json"])
    said = json.loads(capsys.readouterr().out)
    rows = {row["strategy"]: row for row in said["rows"]}
    assert rows['"ring"']["bytes_per_host"] == pytest.approx(2 * 3 / 4 * trained, rel=0.01)
    assert rows['"ring"']["times_ddp"] == pytest.approx(1, rel=0.1)
    assert said["recommended"] in rows
    extra = {name.strip('"'): row["extra_bytes_per_rank"] for name, row in rows.items()}
    assert (extra["ring"], extra["ring_int8"], extra["ddp"]) == (0, 0, trained), "buckets are where gradients live"
    main([*OWN, f"{__name__}:Own", "--step-ms", "20", "--memory", "1GB"])
    assert re.search(r"parameters\s160\skB\sand\sas\smuch.*AdamW\s320\skB", out := capsys.readouterr().out, re.DOTALL)
    assert "TOO MUCH" not in out
    main([*OWN, f"{__name__}:Own", "--step-ms", "20", "--memory", "700kB"])
    assert re.search(r"TOO\sMUCH\sfor\sa\sdevice\sof\s700\skB", capsys.readouterr().out)


def held_by(algorithm: object) -> int:
    """Bytes of the memory that it reaches, the ranks' own aside."""
    seen, found, todo = set[int](), dict[int, int](), [algorithm]
    while todo:
        each = todo.pop()
        if id(each) not in seen and not isinstance(each, (type, types.ModuleType, FakePeers)):
            seen.add(id(each))
            if isinstance(each, Tensor) and not isinstance(each, Parameter):
                found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
            cells = (each.__closure__ or ()) if isinstance(each, types.FunctionType) else None
            todo += gc.get_referents(each) if cells is None else [cell.cell_contents for cell in cells]
    return sum(found.values())


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "diloco_int4", "diloco_sign"])
def test_local_sgd_has_as_many_copies_as_it_says(name: str) -> None:
    def copies(peers: FakePeers) -> float:
        algorithm = STRATEGIES[name]()
        assert isinstance(algorithm, LocalSGD)
        parameters = {str(i): Parameter(torch.randn(300, 300)) for i in range(4)}
        algorithm.setup(parameters, peers)
        for _ in range(33):
            algorithm.after_step(list(parameters.values()))
        memory = {each.untyped_storage().data_ptr() for each in parameters.values()}
        assert len(memory) == 4
        return held_by(algorithm) / (4 * 4 * 300 * 300) - algorithm.copies

    assert on_all_ranks(2, copies) == pytest.approx([0, 0], abs=0.05)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--model torch:nothing --step-ms 1", "'torch:nothing' is not found: .* write it like my_module:MyModel"),
        ("--model torch:pi --step-ms 1", "'torch:pi' is to be a class or a function without arguments"),
        ("--model torch.nn:Linear --step-ms 1", r"write a function without arguments that returns the model"),
        ("--model torch.nn:Identity --step-ms 1", "Identity has no parameter that requires a gradient"),
        (f"--model {__name__}:Own", "--data or --step-ms is needed: Own has no train_dataloader"),
        (f"--model {__name__}:layer", "--step-ms is needed: a Linear is no LightningModule"),
        (f"--model {__name__}:Own --step-ms 1 --tflops 1", "pass one of them"),
        ("--parameters 1M", "--step-ms is needed: .* or pass --model"),
        ("--parameters 1M --step-ms 1 --memory 1GB", "--memory needs --model"),
        ("--parameters 1M --step-ms 1 --data x:y", "--data needs --model"),
    ],
)
def test_what_cannot_be_planned_is_said(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--hosts", "4", "--rate", "1gbit", *arguments.split()])
    assert re.search(words, capsys.readouterr().err)


# The cost model: it sends what collectives send, and keeps the closed forms

NOTHING = Work(0.0, 0.0)
FREE = CodecCost(NOTHING, NOTHING, NOTHING, NOTHING)
SLOW = Link(1e-3, 1e-7)
EXACT, INT8 = Identity(), BlockInt(8)
CODECS: list[Codec] = [EXACT, INT8, Rotated(Gaussian(4)), TopK()]
MANY = 1 << 20


def machines(
    hosts: str, cost: CodecCost = FREE, across: Link = SLOW, crowding: float = 0.0, transport: float = 0.0
) -> Machines:
    costs = {(codec, feedback): cost for codec in CODECS for feedback in (False, True)}
    return Machines(tuple(hosts), across, Link(0.0, 0.0), 0.0, costs, crowding, transport)


def test_the_model_sends_the_bytes_that_the_collective_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringstrategy.collectives.base.SMALLEST_SEGMENT", 1 << 15)  # four in a chunk
    numel = 1000 * 256

    def sent(peers: FakePeers, collective: Collective, codec: Codec) -> int | None:
        mean_(Summand(torch.randn(numel), codec), peers, collective)
        return peers.stats.bytes_sent

    flat = all_pairs([Ring(), Ring(1), Direct(), BySize()], CODECS, ["ab", "abc", "abcd", "abcdefg"])
    for collective, codec, hosts in [*flat, *((Hierarchical(), codec, "aabb") for codec in CODECS[:3])]:
        if codec.hop_by_hop or isinstance(collective, Direct):
            real = on_all_ranks(len(hosts), partial(sent, collective=collective, codec=codec), hosts)
            predicted = exchange_cost(machines(hosts), collective, codec, numel)
            assert predicted.bytes_sent == real[0] > 0, (collective, codec, hosts)


def test_links_alone_take_what_the_formula_says() -> None:
    for size in (2, 4, 9):
        hosts, numel, hops = machines("abcdefghi"[:size]), size * 1000, 2 * (size - 1)
        wire = hops / size * 4 * numel * SLOW.beta
        for collective in (Ring(1), Native()):
            assert exchange_cost(hosts, collective, Identity(), numel).seconds == pytest.approx(
                hops * SLOW.alpha + wire
            )
        # everyone to everyone: both phases pay the latency once, and the same bytes queue up on one link
        direct = 2 * SLOW.alpha + wire
        assert exchange_cost(hosts, Direct(1), Identity(), numel).seconds == pytest.approx(direct)
        for collective in (Direct(), BySize()):  # in two calls
            queued = exchange_cost(replace(hosts, queues=True), collective, Identity(), numel)
            assert queued.seconds == pytest.approx(direct)
    shared = replace(machines("aabb"), queues=True)
    assert exchange_cost(shared, BySize(), Identity(), MANY) == exchange_cost(shared, Ring(), Identity(), MANY)


def test_a_codec_takes_the_time_of_its_calls_and_what_computes_beside_it() -> None:
    numel, one = 4 << 16, Work(1e-3, 1e-9)
    for field, calls in {"encode": 1, "relay": 3, "decode": 4}.items():
        given = replace(machines("abcd", replace(FREE, **{field: one}), Link(0.0, 0.0)), crowding=1.0)
        alone, beside = (exchange_cost(given, Ring(1), INT8, numel, beside_computing=on) for on in (False, True))
        assert alone.seconds == alone.busy == pytest.approx(calls * one.seconds(numel // 4)), field
        assert beside.seconds == pytest.approx(2 * alone.seconds)


@pytest.mark.parametrize(
    ("hosts", "collective", "share"),
    [
        ("abcd", Native(), 2 * 3 / 4),
        ("abcd", Ring(1), 2 * 3 / 4),
        ("abcd", Direct(1), 2 * 3 / 4),
        ("aabb", Native(), 2 * 3 / 4),  # the ring leaves a host once
        ("aabb", Ring(1), 2 * 3 / 4),
        ("aabb", Hierarchical(), 2 * 1 / 2),  # as two hosts with one rank each
        ("aabb", Direct(1), 2 * (2 * 2 / 4)),  # two ranks, each two quarters in both phases
        ("aaaa", Ring(1), 0),
        ("aaaa", Native(), 0),
    ],
    ids=str,
)
def test_ranks_of_one_host_share_its_link(hosts: str, collective: Collective, share: float) -> None:
    cost = exchange_cost(machines(hosts, across=Link(0.0, 1e-7)), collective, Identity(), MANY)
    assert cost.bytes_across == pytest.approx(share * 4 * MANY, rel=0.01)
    assert cost.seconds == pytest.approx(share * 4 * MANY * 1e-7, rel=0.02)


# A step of eight buckets of a million values


def step(given: Machines, profile: Profile, codec: Codec = EXACT) -> Prediction:
    parameters = {str(i): Parameter(torch.empty(MANY, device="meta")) for i in range(8)}
    return predict(AllReduce(codec, bucket_mb=1), parameters, given, profile)


def test_a_step_hides_what_fits_behind_the_backward() -> None:
    given = machines("abcd", across=Link(0.0, 1e-9))
    wire = 1.5 * 32 * MANY * 1e-9
    for backward in (0.01, 1.0):
        found = step(given, Profile(0.3, backward))
        last = wire / 8  # of the last bucket, which nothing can hide
        assert found.communication == pytest.approx(wire)
        assert found.seconds == pytest.approx(0.3 + max(backward + last, wire + backward / 8))


def test_where_cores_are_shared_codecs_slow_the_backward_down() -> None:
    cost = replace(FREE, encode=Work(0.0, 1e-8), relay=Work(0.0, 1e-8), decode=Work(0.0, 1e-8))
    alone, shared = (
        step(machines("abcd", cost, Link(0.0, 1e-12), crowding), Profile(0.0, 2.0), BlockInt(8)).seconds
        for crowding in (0.0, 1.0)
    )
    busy = 2 * 8 * MANY * 1e-8  # of all chunks one encode or relay and one decode
    assert alone == pytest.approx(2.0 + busy / 8, rel=0.01)
    assert shared == pytest.approx(2.0 + busy, rel=0.05)
