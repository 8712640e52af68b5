"""Compare small messages between all ranks: plans, digests, measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from ringstrategy.errors import PlanMismatchError
from ringstrategy.transport.base import Peers, Waitable, Word

INDENT = "  "  # of a line that says what a parameter is
BUCKET = "bucket "  # begins a line that sums up those below it


def all_gather(peers: Peers, payload: Tensor) -> Callable[[], Tensor]:
    """Start sending `payload` (flat uint8, on the host, the same length on all ranks) to all.

    Returns a function that waits and returns all payloads, shape (size, length), row i from rank i.
    """
    table = torch.empty(peers.size, payload.numel(), dtype=torch.uint8, device="cpu")
    table[peers.rank] = payload
    handles = [peers.swap(target, payload, source, table[source]) for target, source in peers.pairs()]

    def collect() -> Tensor:
        for handle in handles:
            handle.wait()
        return table

    return collect


def all_gather_floats(peers: Peers, values: Sequence[float]) -> list[list[float]]:
    """Every rank's `values`, on every rank: row i from rank i, all of the same length. Waits for them."""
    gathered: list[Tensor] = []

    def gather() -> None:
        mine = torch.tensor(values, dtype=torch.float64, device="cpu").view(torch.uint8)
        gathered.append(all_gather(peers.control, mine)())

    peers.control.submit(gather, "while ranks compare measurements").wait()
    return gathered[0].view(torch.float64).tolist()


def agree(peers: Peers, word: Word) -> None:
    """Raise PlanMismatchError on every rank unless all say the same; it names the ranks and the difference."""
    table = all_gather(peers, torch.frombuffer(bytearray(word.digest), dtype=torch.uint8))()
    if any(not torch.equal(said, table[0]) for said in table):
        raise mismatch(dict(enumerate(all_gather_texts(peers, word.details()))))


def agree_beside(peers: Peers, word: Word, *, tagged: bool, where: str) -> Waitable:
    """`agree` before the exchanges that are submitted next.

    Over transports whose messages can carry it, and if the exchanges are `tagged`, it costs no message.
    """
    agreed = peers.only_with(word, tagged=tagged, where=where)
    return peers.control.submit(lambda: agree(peers.control, word), where) if agreed is None else agreed


def mismatch(texts: Mapping[int, str]) -> PlanMismatchError:
    """The error for ranks that differ, by the text of each; it quotes the first difference from the lowest rank."""
    first = min(texts)
    differing = [rank for rank, text in texts.items() if text != texts[first]]
    return PlanMismatchError(
        "the ranks differ, so nothing can be averaged: "
        + "; ".join(f"rank {rank} has {_difference(texts[rank], texts[first], first)}" for rank in differing)
        + ". Give every rank the same model, optimizers, strategy arguments and version of ringstrategy, and log what "
        "a scheduler monitors with sync_dist=True"
    )


def all_gather_texts(peers: Peers, text: str) -> list[str]:
    """Every rank's text, on every rank, by rank. Waits for them."""
    said = text.encode()
    length = torch.tensor([len(said)]).view(torch.uint8)
    lengths = all_gather(peers, length)().view(torch.int64).view(-1).tolist()
    padded = torch.frombuffer(bytearray(said.ljust(max(1, *lengths), b"\0")), dtype=torch.uint8)
    rows = zip(all_gather(peers, padded)(), lengths, strict=True)
    return [bytes(row[:length].tolist()).decode() for row, length in rows]


def compare_plans(peers: Peers, text: str) -> None:
    """Call `agree` on the communication thread, and wait for it."""
    word = Word(text, lambda: text)
    peers.control.submit(lambda: agree(peers.control, word), "while the ranks compare plans").wait()


def compare_changes(peers: Peers, text: str, new: Mapping[str, Tensor], gone: Iterable[str]) -> None:
    """Compare parameters that joined or left the model during training. Ranks whose model did not change are told."""
    lines = [text, *(f"{INDENT}{name}: {tuple(p.shape)} {p.dtype}, new" for name, p in new.items())]
    lines += [f"{INDENT}{name}: gone" for name in gone]
    with nullcontext() if peers.detector is None else peers.detector.progress.changing():
        compare_plans(peers, "\n".join(lines))


def _difference(text: str, reference: str, rank: int) -> str:
    """Quote a line that only one text has, and the line of the same name in the other, which is that `rank`'s.

    If parameters differ, quote them: the lines about buckets then differ too, but say less.
    """
    mine, theirs = text.splitlines(), reference.splitlines()
    only_mine = [line for line in mine if line not in set(theirs)]
    only_theirs = [line for line in theirs if line not in set(mine)]
    if all(line.startswith((INDENT, BUCKET)) for line in only_mine + only_theirs):
        parameters = [[x for x in lines if x.startswith(INDENT)] for lines in (only_mine, only_theirs)]
        if any(parameters):
            only_mine, only_theirs = parameters
    if not only_mine:
        if not only_theirs:
            return f"another order than rank {rank}"
        hint = " (is it frozen there?)" if only_theirs[0].startswith(INDENT) else ""
        return f"nothing{hint} where rank {rank} has '{only_theirs[0].strip()}'"
    name = only_mine[0].partition(":")[0]
    same_name = [line for line in only_theirs if line.partition(":")[0] == name]
    if not same_name and not name.startswith(INDENT):
        same_name = only_theirs
    other = f"'{same_name[0].strip()}'" if same_name else "nothing of that name"
    return f"'{only_mine[0].strip()}' where rank {rank} has {other}"
