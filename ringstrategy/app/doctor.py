"""`ringstrategy-doctor`: do the ranks reach each other, how fast are their links, and which strategy suits these?"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from torch import Tensor

from ringstrategy._version import __version__
from ringstrategy.app import plan
from ringstrategy.app.text import text_table
from ringstrategy.codecs import BlockInt, Gaussian, Rotated
from ringstrategy.cost.probe import codec_cost
from ringstrategy.failure.board import has_agent_store
from ringstrategy.failure.reach import address_of
from ringstrategy.transport.connect import this_host

_ROUNDS = 20  # messages there and back, of which the latency is the median
_CHUNK = 1 << 20  # bytes
_MOST_CHUNKS = 256
_MANY = 16  # hosts; of more only neighbours are measured
_INTERFACE = "GLOO_SOCKET_IFNAME"
Card = dict[str, Any]


def main(arguments: list[str] | None = None) -> None:
    """The console script. Exits with 1 if something is wrong, and says what on the rank that sees it."""
    asked, of_planner = _parse(arguments)
    torch.set_num_threads(1)
    try:
        cards, links = _examine(timedelta(seconds=asked.timeout))
    except (RuntimeError, ValueError) as error:
        sys.exit(f"ringstrategy-doctor: {error}")
    wrong = problems(cards)
    if int(os.environ.get("RANK", 0)) == 0:
        if asked.json:
            print(json.dumps({"ranks": cards, "links": links, "problems": wrong}, indent=2))
        else:
            _tell(cards, links, wrong, of_planner)
    sys.exit(1 if wrong else 0)


def _parse(arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="ringstrategy-doctor",
        description="Start it as you start training: by torchrun, by srun, or once in a shell of each host with "
        "--rank, --size and --master. It compares versions, checks that all ranks reach each other, and measures each "
        "link. What else you pass goes to ringstrategy-plan, such as --model, or --parameters and --step-ms.",
    )
    parser.add_argument("--rank", type=int, help="of this process, from 0; default: what the launcher says")
    parser.add_argument("--size", type=int, help="number of processes")
    parser.add_argument("--master", help="host:port, a free port of the host of rank 0")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds to wait for others; default %(default)s")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    asked, rest = parser.parse_known_args(arguments)
    by_hand = asked.rank, asked.size, asked.master
    if any(each is not None for each in by_hand):
        address, _, port = str(asked.master).rpartition(":")
        if None in by_hand or not (address and port.isdecimal()):
            parser.error("pass --rank, --size and --master=host:port together")
        if not 0 <= asked.rank < asked.size:
            parser.error(f"--rank is 0 to {asked.size - 1}, got {asked.rank}")
        _set(asked.rank, asked.size, address.strip("[]"), int(port))
    elif "RANK" not in os.environ and SLURMEnvironment.detect():
        slurm = SLURMEnvironment(auto_requeue=False)
        _set(slurm.global_rank(), slurm.world_size(), slurm.main_address, slurm.main_port)
    elif "RANK" not in os.environ:
        _set(0, 1, "127.0.0.1", 0)
    return asked, rest


def _set(rank: int, size: int, address: str, port: int) -> None:
    """As launchers do."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR=address, MASTER_PORT=str(port))


def _examine(timeout: timedelta) -> tuple[list[Card], list[dict[str, Any]]]:
    """What each rank says of itself, and the links between hosts. RuntimeError names who is not reached."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mine = _card(rank)  # first, since kernels may have to be compiled
    store = _store(rank, size, timeout)
    store.set(f"card/{rank}", json.dumps(mine))
    cards = _all(store, "card", size, timeout)
    if size == 1:
        return cards, []
    try:
        group = dist.PrefixStore("group", store)
        dist.init_process_group("gloo", store=group, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        hint = " ".join(problems(cards)) or f"Set {_INTERFACE} on each host to the interface that leads to the others."
        raise RuntimeError(
            f"rank {rank} on {socket.gethostname()} could not connect to all other ranks. {hint} ({error})"
        ) from error
    first = {card["host"]: card["rank"] for card in reversed(cards)}
    ranks = sorted(first.values())
    pairs = list(itertools.combinations(ranks, 2)) if len(ranks) <= _MANY else list(itertools.pairwise(ranks))
    found = list[dict[str, Any]]()
    for number, pair in enumerate(pairs):
        if rank == 0:
            print(f"link {number + 1} of {len(pairs)}", file=sys.stderr, flush=True)
        try:
            if rank in pair:
                found.append(_measure(rank, *pair))
            dist.barrier()
        except RuntimeError as error:
            one, other = (cards[each]["name"] for each in pair)
            raise RuntimeError(
                f"the connection between {one} and {other} failed while it was measured: {error}"
            ) from error
    store.set(f"links/{rank}", json.dumps(found))
    links = list(itertools.chain.from_iterable(_all(store, "links", size, timeout)))
    dist.barrier()  # who has the store leaves last
    dist.destroy_process_group()
    return cards, links


def _store(rank: int, size: int, timeout: timedelta) -> dist.Store:
    if size == 1:
        return dist.HashStore()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = rank == 0 and not has_agent_store()
    try:
        store = dist.TCPStore(address, port, size, serves, timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank} on {socket.gethostname()} has no connection to {address}:{port}, which leads from here to "
            f"{address_of(address) or 'no address'}. Is rank 0 started there, is the port open in its firewall, "
            f"and is no other program listening at it? ({error})"
        ) from error
    return dist.PrefixStore("ringstrategy/doctor", store)


def _all(store: dist.Store, what: str, size: int, timeout: timedelta) -> list[Any]:
    """What each rank has written. RuntimeError names those who have not."""
    keys = [f"{what}/{rank}" for rank in range(size)]
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        try:
            missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        except RuntimeError:
            raise RuntimeError("rank 0 has ended: see what it says") from error
        raise RuntimeError(
            f"nothing was heard of rank {', '.join(missing)} of {size}: start it, within {timeout.total_seconds():g} s"
        ) from error
    return [json.loads(store.get(key)) for key in keys]


def _card(rank: int) -> Card:
    int8, int4 = (codec_cost(codec, False, torch.device("cpu")) for codec in (BlockInt(8), Rotated(Gaussian(4))))
    return {
        "rank": rank,
        "host": this_host(),
        "name": socket.gethostname(),
        "address": address_of(socket.gethostname()),
        "interface": os.environ.get(_INTERFACE),
        "interfaces": [name for _, name in socket.if_nameindex() if name != "lo"],
        "cores": len(os.sched_getaffinity(0)),
        "gpus": torch.cuda.device_count(),
        "int8_gb_per_s": 4e-9 / int8.encode.per_value,
        "int4_gb_per_s": 4e-9 / int4.encode.per_value,
        "versions": {
            "ringstrategy": __version__,
            "torch": torch.__version__,
            "lightning": lightning.__version__,
            "Python": platform.python_version(),
        },
    }


def _measure(me: int, one: int, other: int) -> dict[str, Any]:
    """Of the link between two ranks, on both of them; returned is what this one has sent."""
    peer = other if me == one else one
    small, chunk = (torch.zeros(nbytes, dtype=torch.uint8) for nbytes in (8, _CHUNK))
    took = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for sender in (one, other):
            if sender == me:
                dist.send(small, peer)
            else:
                dist.recv(small, peer)
        took.append(time.perf_counter() - began)
    latency = statistics.median(took) / 2
    for sender in (one, other):
        if sender == me:
            seconds = _send(chunk, 1, peer, small)
            many = max(1, min(_MOST_CHUNKS, round(1 / seconds)))
            rate = 8 * _CHUNK * many / max(_send(chunk, many, peer, small) - latency, 1e-9)
        else:
            _receive(chunk, peer, small)
            _receive(chunk, peer, small)
    return {"from": me, "to": peer, "bits_per_second": rate, "latency_seconds": latency}


def _send(chunk: Tensor, many: int, peer: int, small: Tensor) -> float:
    """Seconds until all has been received."""
    dist.send(torch.tensor([many]), peer)
    began = time.perf_counter()
    for _ in range(many):
        dist.send(chunk, peer)
    dist.recv(small, peer)
    return time.perf_counter() - began


def _receive(chunk: Tensor, peer: int, small: Tensor) -> None:
    dist.recv(many := torch.tensor([0]), peer)
    for _ in range(int(many)):
        dist.recv(chunk, peer)
    dist.send(small, peer)


def problems(cards: Sequence[Card]) -> list[str]:
    """What is wrong with these ranks, with the cure."""
    found = []
    for package in cards[0]["versions"]:
        by_version: dict[str, list[str]] = {}
        for card in cards:
            by_version.setdefault(card["versions"][package], []).append(f"{card['rank']} ({card['name']})")
        if len(by_version) > 1:
            having = "; ".join(f"{version} on rank {', '.join(ranks)}" for version, ranks in by_version.items())
            found.append(f"{package} differs: {having}. Install the same everywhere.")
    if len({card["host"] for card in cards}) > 1:
        told = dict[str, Card]()
        for card in cards:
            if card["interface"] is None and (not card["address"] or card["address"].startswith(("127.", "::1"))):
                told.setdefault(card["host"], card)
        found += [
            f"On {card['name']} its own name leads to {card['address'] or 'no address'}, where no other reaches it. "
            f"Set {_INTERFACE} there to the interface that leads to the others, of {', '.join(card['interfaces'])}."
            for card in told.values()
        ]
    return found


def _tell(cards: list[Card], links: list[dict[str, Any]], wrong: list[str], of_planner: list[str]) -> None:
    print(", ".join(f"{package} {version}" for package, version in cards[0]["versions"].items()), "on rank 0")
    by_host: dict[str, list[Card]] = {}
    for card in cards:
        by_host.setdefault(card["host"], []).append(card)
    rows = [
        [
            here[0]["name"],
            ", ".join(str(card["rank"]) for card in here),
            str(here[0]["cores"]),
            str(here[0]["gpus"]),
            here[0]["interface"] or here[0]["address"] or "-",
            *(f"{min(card[codec] for card in here):.3g}" for codec in ("int8_gb_per_s", "int4_gb_per_s")),
        ]
        for here in by_host.values()
    ]
    print(text_table(["host", "ranks", "cores", "GPUs", "address", "int8 GB/s", "int4 GB/s"], rows))
    if links:
        firsts = [here[0] for here in by_host.values()]
        rate = {(link["from"], link["to"]): link for link in links}
        print("\nMbit/s from each host to each other, and ms one way:")
        print(
            text_table(
                ["from", *(card["name"] for card in firsts)],
                [[one["name"], *(_cell(rate.get((one["rank"], other["rank"]))) for other in firsts)] for one in firsts],
            )
        )
    print()
    for each in wrong:
        print(f"WRONG: {each}")
    if not wrong:
        print("All ranks reach each other." if len(cards) > 1 else "One process alone: start it on all hosts.")
    if links and not wrong:
        slowest, latency = (
            min(link["bits_per_second"] for link in links),
            max(link["latency_seconds"] for link in links),
        )
        given = ["--hosts", str(len(by_host)), "--devices-per-host", str(max(map(len, by_host.values())))]
        given += ["--rate", f"{slowest / plan.PAYLOAD / 1e6:.4g}mbit", "--latency-us", f"{1e6 * latency:.4g}"]
        given += ["--measure-codecs"]
        if of_planner:
            print()
            plan.main([*given, *of_planner])
        else:
            print("Which strategy for this network? Add your model, or --parameters 25M --step-ms 250:")
            print(f"  ringstrategy-plan {' '.join(given)} --model my_module:MyModel")


def _cell(link: dict[str, Any] | None) -> str:
    return "-" if link is None else f"{1e-6 * link['bits_per_second']:.4g}; {1e3 * link['latency_seconds']:.2g}"


if __name__ == "__main__":
    main()
