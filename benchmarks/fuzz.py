"""How many hostile messages each codec decodes without harm: any bytes, broken messages, wrong lengths, odd addresses.

python -m benchmarks fuzz --payloads 1000000 --out outputs/fuzz.jsonl

A payload is one message. It goes through `decode`, `add`, `hop` and `deliver`. Each of them must refuse a message
of a wrong length, or at an address at which its format cannot be read. The laws:

- Only `out` is written: what lies before and behind it stays, and so does the message. A refusal writes nothing.
- The same bytes decode to the same values, wherever they lie, through Numba as through torch.
- `add` adds what `decode` writes. `deliver` writes what `decode` and `restore_` give. `hop` sends a block that is
  finite if the sum is, and one that is not if the sum is not.
- An unbroken message of finite values decodes to finite values.

Each round has a seed: it is 16 payloads of one codec, for one number of values. An error names the seed, and
`--seed SEED --payloads 1` repeats the round. Rounds run in a process of their own, so that a crash names the seed too.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.ranks import results_of
from benchmarks.rows import Row
from ringstrategy import BlockFloat8, BlockInt, Cast, Codec, Gaussian, Identity, Rotated, Sign, TopK

CODECS: list[Codec] = [
    *(Identity(), Cast("float16"), Cast("bfloat16"), Sign(), Sign(512), Gaussian(4), Gaussian(1, 64), Gaussian(7, 24)),
    *(BlockInt(bits) for bits in range(2, 9)),
    *(BlockInt(3, 24), BlockInt(5, 64)),
    *(BlockInt(4, rounding="stochastic"), BlockFloat8("e4m3"), BlockFloat8("e5m2", 64)),
    *(Rotated(), Rotated(Sign()), Rotated(BlockInt(3, 512))),
    *(TopK(), TopK(3, 100), TopK(5, 1000), TopK(2, 30_000)),
]
_ROUND = 16  # payloads
_GUARD = 40  # values before and behind what may be written: more than a vector of any processor
_CANARY = 0x5A  # each byte of a guard
_HEADERS = (0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F7F, 0x0001, 0x8000, 0x0000)  # bfloat16
_SEED = 11  # of rotations and of stochastic rounding
_MODERATE = 1e4  # float16 carries it
_PLAIN = "plain"  # a message that an encode has written
_KINDS = (_PLAIN, "random", "flipped", "headers", "filled", "moved", "short", "long")


class Harm(AssertionError):
    """A law that a payload broke."""


class Guarded:
    """A tensor between guards, `shift` bytes from where its dtype would have it begin."""

    def __init__(self, numel: int, dtype: torch.dtype, shift: int = 0) -> None:
        begin, nbytes = _GUARD * dtype.itemsize + shift, numel * dtype.itemsize
        self._memory = torch.full((begin + nbytes + _GUARD * dtype.itemsize,), _CANARY, dtype=torch.uint8)
        self._begin, self._end = begin, begin + nbytes
        self.values = self._memory[begin : self._end].view(dtype)

    def intact(self) -> bool:
        """Whether the guards are as they were."""
        memory = self._memory
        return bool((memory[: self._begin] == _CANARY).all() and (memory[self._end :] == _CANARY).all())


@dataclass(frozen=True)
class _Payload:
    kind: str
    wire: Tensor  # uint8, as a peer has sent it
    is_sized: bool  # it has the length that the plan gives


def _payload(kind: str, codec: Codec, values: Tensor, draw: random.Random) -> _Payload:
    """One message of this kind for as many values as there are; `values` are finite."""
    nbytes = codec.nbytes(values.numel(), values.dtype)
    lengths = {"short": nbytes - draw.randint(1, max(1, min(nbytes, 20))), "long": nbytes + draw.randint(1, 20)}
    length = max(lengths.get(kind, nbytes), 0)
    held = Guarded(length, torch.uint8, draw.randint(1, 15) if kind == "moved" else -_GUARD % 16)
    wire = held.values
    if length == nbytes and kind not in ("random", "filled"):
        codec.encode(values, aligned := torch.zeros(nbytes, dtype=torch.uint8), seed=draw.getrandbits(62))
        wire.copy_(aligned)
    elif kind == "filled":
        wire.fill_(draw.choice((0x00, 0xFF, 0x80, 0x7F)))
    else:
        wire.copy_(torch.frombuffer(bytearray(draw.randbytes(length)) or bytearray(1), dtype=torch.uint8)[:length])
    for _ in range(draw.randint(1, 8) if length and kind in ("flipped", "moved") else 0):
        wire[draw.randrange(length)] ^= 1 << draw.randrange(8)
    if kind == "headers":
        for _ in range(min(4, length // 2)):
            place = 2 * draw.randrange(length // 2)
            pattern = draw.choice(_HEADERS)
            wire[place], wire[place + 1] = pattern & 0xFF, pattern >> 8
    return _Payload(kind, wire, length == nbytes)


@contextmanager
def _in_torch() -> Iterator[None]:
    """Without Numba: by the reference."""
    modules = "ringstrategy.kernels.compiled."
    with (
        mock.patch(modules + "block_kernels", return_value=None),
        mock.patch(modules + "sparse_kernels", return_value=None),
        mock.patch(modules + "rotate_kernel", return_value=None),
    ):
        yield


def _same(one: Tensor, other: Tensor) -> bool:
    """The same numbers, or both NaN."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _law(holds: object, words: str) -> None:
    if not holds:
        raise Harm(words)


class _Round:
    """Payloads of one codec for one number of values."""

    def __init__(self, codec: Codec, seed: int) -> None:
        self.draw = random.Random(seed)
        block = max(codec.block, 8)
        few = (0, 1, 7, 8, 9, block - 1, block, block + 1, 3 * block + 5)
        self.codec, self.numel = codec, self.draw.choice((*few, self.draw.randint(0, 2 * block + 20)))
        self.dtype = self.draw.choice((torch.float32,) * 5 + (torch.float64, torch.float16, torch.bfloat16))
        self.generator = torch.Generator().manual_seed(seed)
        self.counts: Counter[str] = Counter()

    def values(self) -> Tensor:
        """Finite, as gradients are."""
        return torch.randn(self.numel, generator=self.generator).to(self.dtype)

    def run(self) -> None:
        """All payloads; `Harm` if one breaks a law."""
        for place in range(_ROUND):
            payload = _payload(self.draw.choice(_KINDS), self.codec, self.values(), self.draw)
            try:
                self._check(payload)
            except Exception as error:
                raise Harm(
                    f"payload {place}, {payload.kind}, {payload.wire.numel()} bytes for {self.numel} {self.dtype} of "
                    f"{self.codec}: {type(error).__name__}: {error}"
                ) from error
            self.counts["payloads"] += 1

    def _check(self, payload: _Payload) -> None:
        wire, before = payload.wire, payload.wire.clone()
        calls = self._calls(wire)
        readable = payload.is_sized
        if readable and payload.kind == "moved":
            readable = _is_read(lambda: self.codec.decode(wire, torch.empty(self.numel, dtype=self.dtype)))
        if not readable:
            for name, call in calls.items():
                out = self._out()
                untouched = out.values.clone()
                _law(not _is_read(partial(call, out.values)), f"{name} did not refuse it")
                _law(_same(out.values, untouched) and out.intact(), f"{name} wrote something and then refused it")
            self.counts["refused"] += 1
            return
        results = {"begun": self._out().values}
        for name, call in calls.items():
            out = self._out()
            call(out.values)
            _law(out.intact(), f"{name} wrote outside of `out`")
            _law(torch.equal(wire, before), f"{name} changed the message")
            results[name] = out.values
        self._check_values(payload, before, results)

    def _out(self) -> Guarded:
        """What is to be written; full of numbers that are no one's."""
        out = Guarded(self.numel, self.dtype, self.draw.randrange(4) * self.dtype.itemsize)
        out.values.copy_(torch.linspace(-2, 2, self.numel))
        return out

    def _calls(self, wire: Tensor) -> dict[str, Callable[[Tensor], None]]:
        codec = self.codec

        def hop(out: Tensor) -> None:
            sent = Guarded(codec.nbytes(self.numel, self.dtype), torch.uint8, -_GUARD % 16)
            codec.hop([wire], out, sent.values, seed=_SEED, own_seed=_SEED)
            _law(sent.intact(), "`hop` wrote outside of what it sends")
            codec.decode(sent.values, out)  # to be looked at

        return {
            "decode": lambda out: codec.decode(wire, out),
            "add": lambda out: codec.add([wire], out),
            "deliver": lambda out: codec.deliver(wire, out, seed=_SEED),
            "hop": hop,
        }

    def _check_values(self, payload: _Payload, bytes_: Tensor, results: dict[str, Tensor]) -> None:
        decoded = results["decode"]
        again = torch.empty(self.numel, dtype=self.dtype)
        with _in_torch():
            self.codec.decode(bytes_, again)
        _law(_same(decoded, again), "other values than through torch")
        if payload.kind == _PLAIN:
            _law(decoded.isfinite().all(), "finite values became something else")
        if self.dtype != torch.float32:
            return  # others are rounded once more
        turned, total = decoded.clone(), results["begun"] + decoded
        self.codec.restore_(turned, _SEED)
        _law(_same(results["deliver"], turned), "`deliver` gives other values than `decode` and `restore_`")
        _law(_same(results["add"], total), "`add` adds other values than `decode` writes")
        own = results["begun"].clone()
        self.codec.prepare_(own, _SEED)
        self._check_sent(own + decoded, results["hop"])

    def _check_sent(self, total: Tensor, sent: Tensor) -> None:
        step = self.codec.block if self.codec.block > 1 else max(self.numel, 1)
        for begin in range(0, self.numel, step):
            part, arrived = total[begin : begin + step], sent[begin : begin + step]
            if not part.isfinite().all():
                _law(not arrived.isfinite().all(), "a sum that is not finite was sent as one that is")
            elif part.abs().max() < _MODERATE:
                _law(arrived.isfinite().all(), "a finite sum was sent as one that is not")


def _is_read(call: Callable[[], None]) -> bool:
    """Whether it does not refuse."""
    try:
        call()
    except (ValueError, RuntimeError):
        return False
    return True


def check(codec: Codec, seed: int) -> Counter[str]:
    """A round; how many payloads there were, and how many of them had to be refused."""
    round_ = _Round(codec, seed)
    round_.run()
    return round_.counts


def _check_seed(seed: int) -> Counter[str]:
    return check(CODECS[seed % len(CODECS)], seed)


def fuzz(seed: int, payloads: int) -> dict[str, Counter[str]]:
    """Counts by codec; SystemExit with the seed to repeat if a payload did harm."""
    seeds = range(seed, seed + math.ceil(payloads / _ROUND))
    results, wrong = results_of(1, _check_seed, seeds, end=math.inf)
    if wrong:
        again = f"python -m benchmarks fuzz --seed {seeds[min(len(results), len(seeds) - 1)]} --payloads 1"
        sys.exit(f"{wrong[0]}; repeat it with {again}")
    counts: dict[str, Counter[str]] = {}
    for one, [found] in zip(seeds, results, strict=True):
        counts.setdefault(str(CODECS[one % len(CODECS)]), Counter()).update(found)
    return counts


def main(given: Sequence[str]) -> None:
    """Decode so many payloads, and print a row for each codec."""
    parser = harness.arguments("fuzz", __doc__, rounds=None, cases=False)
    parser.add_argument("--payloads", type=int, default=1_000_000, help="at least so many, in whole rounds")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each has the next one")
    options = parser.parse_args(given)
    begin = time.perf_counter()
    counts = fuzz(options.seed, options.payloads)
    took = time.perf_counter() - begin
    rows = [
        Row(
            benchmark="fuzz",
            case=codec,
            seed=options.seed,
            **harness.made_with(),
            payloads=found["payloads"],
            refused=found["refused"],
        )
        for codec, found in counts.items()
    ]
    total = sum(found["payloads"] for found in counts.values())
    harness.publish(f"{total} hostile messages, none of which did harm, in {took:.0f} s", rows, options.out)
