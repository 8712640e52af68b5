"""The values of one exchange, cut into a chunk for each rank that owns a sum, and chunks into pieces of one message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from ringstrategy.codecs.base import Codec
from ringstrategy.transport.base import Peers


class Pieces:
    """What a rank does with each piece on its way: add, encode, deliver.

    `pieces[chunk, k]` are the values of the k-th piece of a chunk, a view; chunks are counted modulo their number.

    Args:
        values: flat; of this rank before, the sum of all ranks after.
        chunks: each cut into the same number of pieces; of each piece where it begins and ends.
        codec: how pieces travel.
        residual: is added to each piece when it is first encoded or added to; None: nothing.
        lost: receives what this rank's encodes lose, in parameter space; None: nobody wants to know.
        seed: everyone's.
        rank: whose encodes these are.
        flags: ride behind the first piece of each chunk while it is a part of the sum; see `Collective.sum_`.

    Attributes:
        count: pieces of each chunk.
        in_place: the values' own bytes are the wire, so nothing is encoded or decoded but to add.
        stride: bytes that hold any piece's wire, a multiple of 16 so that each begins aligned for every dtype.
    """

    def __init__(
        self,
        values: Tensor,
        chunks: Sequence[Sequence[tuple[int, int]]],
        codec: Codec,
        *,
        residual: Tensor | None,
        lost: Tensor | None,
        seed: int,
        rank: int,
        flags: Tensor | None = None,
    ) -> None:
        self._values, self._codec, self._residual, self._lost = values, codec, residual, lost
        self._flags, self._flag_bytes = flags, 0 if flags is None else flags.numel()
        self._seed, self._own_seed = seed, codec.own_seed(seed, rank)
        self._chunks = chunks
        self.count = len(chunks[0])
        self.in_place = codec.raw(values) is not None
        self._nbytes = [[codec.nbytes(end - begin, values.dtype) for begin, end in chunk] for chunk in chunks]
        longest = max(map(max, self._nbytes))
        self.stride = -(-(longest + self._flag_bytes) // 16) * 16

    def _edges(self, chunk: int, k: int) -> tuple[int, int]:
        return self._chunks[chunk % len(self._chunks)][k]

    def part(self, whole: Tensor, chunk: int, k: int) -> Tensor:
        """What the piece is of `values`, of another tensor of the same shape."""
        begin, end = self._edges(chunk, k)
        return whole[begin:end]

    def __getitem__(self, place: tuple[int, int]) -> Tensor:
        return self.part(self._values, *place)

    def arriving(self, peers: Peers, name: str, count: int) -> list[Tensor]:
        """Memory for so many wires that arrive, the same at each call."""
        return self._wires(peers, name, count, self.stride)

    def leaving(self, peers: Peers, name: str, count: int) -> list[Tensor]:
        """Memory for so many wires that are encoded; none is needed if the values' own bytes are the message."""
        return self._wires(peers, name, count, 0 if self.in_place and self._flags is None else self.stride)

    def _wires(self, peers: Peers, name: str, count: int, stride: int) -> list[Tensor]:
        whole = peers.scratch(name, count * stride, self._values.device)
        return [whole[i * stride : (i + 1) * stride] for i in range(count)]

    def wire(self, chunk: int, k: int, memory: Tensor) -> Tensor:
        """As much of `memory` as the piece's bytes need."""
        return memory[: self._nbytes[chunk % len(self._nbytes)][k]]

    def part_of_sum(self, chunk: int, k: int, memory: Tensor) -> Tensor:
        """As much of `memory` as what `encode_part` makes of the piece needs."""
        return memory[: self._nbytes[chunk % len(self._nbytes)][k] + self._riding(k)]

    def _riding(self, k: int) -> int:
        """Bytes of flags behind a part of a sum."""
        return self._flag_bytes if k == 0 else 0

    def raw(self, chunk: int, k: int) -> Tensor:
        """The piece's own bytes, where they are the wire."""
        raw = self._codec.raw(self[chunk, k])
        assert raw is not None
        return raw

    def landing(self, chunk: int, k: int, memory: Tensor) -> Tensor:
        """Where a finished piece arrives: its values themselves if their bytes are the wire."""
        return self.raw(chunk, k) if self.in_place else self.wire(chunk, k, memory)

    def add_residual_(self, chunk: int, k: int) -> None:
        """To the piece's values, where their own bytes are the wire."""
        if self._residual is not None:
            self[chunk, k].add_(self.part(self._residual, chunk, k))

    def add_(self, chunk: int, k: int, arrived: Iterable[Tensor]) -> None:
        """Add what arrived to the piece, in that order."""
        for wire in arrived:
            self._codec.decode(wire, self[chunk, k], add=True)

    def encode_part(self, chunk: int, k: int, memory: Tensor, arrived: Sequence[Tensor] = ()) -> Tensor:
        """The message to the next who adds to the piece: its bytes and flags, those that arrived included.

        It is in `memory`, unless the values have all of it themselves. Wires are added in their order.
        """
        message = self.part_of_sum(chunk, k, memory)
        wire = self.encode_sum(chunk, k, message, arrived)
        if self._flags is None or k > 0:
            return wire
        if self.in_place:
            message[: wire.numel()].copy_(wire)
        message[wire.numel() :].copy_(self._flags)
        return message

    def encode_sum(self, chunk: int, k: int, memory: Tensor, arrived: Sequence[Tensor] = ()) -> Tensor:
        """The bytes of the piece plus the parts of its sum that arrived; a piece is encoded once."""
        wires = [self._without_flags(part, k) for part in arrived]
        if self.in_place:
            self.add_residual_(chunk, k)
            self.add_(chunk, k, wires)
            return self.raw(chunk, k)
        wire, (begin, end) = self.wire(chunk, k, memory), self._edges(chunk, k)
        self._codec.hop(
            wires,
            self._values[begin:end],
            wire,
            residual=None if self._residual is None else self._residual[begin:end],
            lost=None if self._lost is None else self._lost[begin:end],
            seed=self._seed,
            own_seed=self._own_seed,
            offset=begin,
        )
        return wire

    def _without_flags(self, part: Tensor, k: int) -> Tensor:
        """What arrived, its flags taken over."""
        if self._flags is None or k > 0:
            return part
        edge = part.numel() - self._flag_bytes
        self._flags.bitwise_or_(part[edge:])
        return part[:edge]

    def deliver_(self, chunk: int, k: int, wire: Tensor) -> None:
        """The bytes of the sum become the piece's values."""
        if not self.in_place:
            self._codec.deliver(wire, self[chunk, k], seed=self._seed)
