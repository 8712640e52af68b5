"""The values of one exchange, cut into a chunk for each rank that owns a sum, and chunks into pieces of one message."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ringstrategy.codecs.base import derive_seed
from ringstrategy.collectives.base import Summand, cut, cut_chunks, pieces_of
from ringstrategy.kernels.layout import Part
from ringstrategy.transport.base import Peers

_ALIGNED = 16  # bytes: so that each wire begins aligned for every dtype


class Pieces:
    """What a rank does with each piece on its way: add, encode, deliver.

    `pieces[chunk, k]` are the values of the k-th piece of a chunk, a view; chunks are counted modulo their number.

    Args:
        summand: of this rank before, the sum of all ranks after.
        chunks: each cut into the same number of pieces; of each piece where it begins and ends.
        rank: whose encodes these are.
        flags: ride behind the first piece of each chunk while it is a part of the sum; see `Collective.sum_`.
        riders: each cut into as many chunks of one piece, which travels behind the first piece of the chunk.
        copied: the values' own bytes are never the wire, because these riders lie in the middle of a message.
        gap: values that chunks lack to begin at whole blocks, as codecs count them.

    Attributes:
        count: pieces of each chunk.
        in_place: the values' own bytes are the wire, so nothing is encoded or decoded but to add.
        stride: bytes that hold any piece's wire, a multiple of 16 so that each begins aligned for every dtype.
    """

    def __init__(
        self,
        summand: Summand,
        chunks: Sequence[Sequence[tuple[int, int]]],
        rank: int,
        flags: Tensor | None = None,
        riders: Sequence[Pieces] = (),
        *,
        copied: bool = False,
        gap: int = 0,
    ) -> None:
        self._values, self._codec, self._residual = summand.values, summand.codec, summand.residual
        self._lost, self._source = summand.lost, summand.source
        self._flags, self._flag_bytes = flags, 0 if flags is None else flags.numel()
        self._seed, self._own_seed = summand.seed, derive_seed(summand.seed, rank)
        # which count on chunks that begin at whole blocks
        self._launches = None if gap else self._codec.launches(summand.values, summand.seed)
        self._gap = gap
        self._chunks = chunks
        self.count = len(chunks[0])
        self.in_place = self._codec.raw(self._values) is not None and not riders and not copied
        dtype = self._values.dtype
        self._nbytes = [[self._codec.nbytes(end - begin, dtype) for begin, end in chunk] for chunk in chunks]
        self._riders: list[list[tuple[Pieces, int]]] = []  # by chunk: where their bytes begin in its first message
        self._bytes_of_sum: list[list[int]] = []  # riders included
        for place, (first, *others) in enumerate(self._nbytes):
            riding, end = [], first
            for rider in riders:
                riding.append((rider, _aligned(end)))
                end = _aligned(end) + rider._bytes_of_sum[place][0]
            self._riders.append(riding)
            self._bytes_of_sum.append([end, *others])
        self.stride = _aligned(max(map(max, self._bytes_of_sum)) + self._flag_bytes)

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
        """As much of `memory` as the bytes of the piece and its riders need."""
        return memory[: self._bytes_of_sum[chunk % len(self._chunks)][k]]

    def part_of_sum(self, chunk: int, k: int, memory: Tensor) -> Tensor:
        """As much of `memory` as what `encode_part` makes of the piece needs."""
        flags = self._flag_bytes if k == 0 else 0
        return memory[: self._bytes_of_sum[chunk % len(self._chunks)][k] + flags]

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

    def add_(self, chunk: int, k: int, arrived: Sequence[Tensor]) -> None:
        """Add what arrived to the piece, in that order."""
        self._codec.add(arrived, self[chunk, k])

    def encode_part(self, chunk: int, k: int, memory: Tensor, arrived: Sequence[Tensor] = ()) -> Tensor:
        """The message to the next who adds to the piece: its bytes and flags, those that arrived included.

        It is in `memory`, unless the values have all of it themselves. Wires are added in their order.
        """
        message = self.part_of_sum(chunk, k, memory)
        return self._with_flags(message, self.encode_sum(chunk, k, message, arrived), k)

    def encode_parts(self, chunks: Sequence[int], memories: Sequence[Tensor]) -> list[Tensor]:
        """`encode_part` of the first piece of each of several chunks, in one launch where the codec can."""
        if self._launches is None:
            return [self.encode_part(chunk, 0, memory) for chunk, memory in zip(chunks, memories, strict=True)]
        self._encode([self._cut(chunk, 0, memory) for chunk, memory in zip(chunks, memories, strict=True)])
        messages = []
        for chunk, memory in zip(chunks, memories, strict=True):
            for rider, place in self._riding(chunk, 0):
                rider.encode_part(chunk, 0, memory[place:])
            messages.append(self._with_flags(self.part_of_sum(chunk, 0, memory), self.wire(chunk, 0, memory), 0))
        return messages

    def _with_flags(self, message: Tensor, wire: Tensor, k: int) -> Tensor:
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
        if self._source is not None:
            self._encode([self._cut(chunk, k, memory)], [self._own(chunk, k, wire) for wire in wires])
        else:
            self._hop(chunk, k, memory, wires)
        for rider, place in self._riding(chunk, k):
            rider.encode_sum(chunk, 0, memory[place:], [wire[place:] for wire in wires])
        return self.wire(chunk, k, memory)

    def _hop(self, chunk: int, k: int, memory: Tensor, wires: Sequence[Tensor]) -> None:
        begin, end = self._edges(chunk, k)
        self._codec.hop(
            [self._own(chunk, k, wire) for wire in wires],
            self._values[begin:end],
            self._own(chunk, k, memory),
            residual=None if self._residual is None else self._residual[begin:end],
            lost=None if self._lost is None else self._lost[begin:end],
            seed=self._seed,
            own_seed=self._own_seed,
            offset=begin + chunk % len(self._chunks) * self._gap,
        )

    def _encode(self, parts: Sequence[Part], arrived: Sequence[Tensor] = ()) -> None:
        assert self._launches is not None
        self._launches.encode(
            self._values,
            parts,
            arrived,
            source=self._source,
            residual=self._residual,
            lost=self._lost,
            seed=self._own_seed,
        )

    def _cut(self, chunk: int, k: int, message: Tensor) -> Part:
        return Part(*self._edges(chunk, k), self._own(chunk, k, message))

    def _own(self, chunk: int, k: int, message: Tensor) -> Tensor:
        """What is the piece's own of a message."""
        return message[: self._nbytes[chunk % len(self._chunks)][k]]

    def _riding(self, chunk: int, k: int) -> Sequence[tuple[Pieces, int]]:
        """The riders of a message, and where their bytes begin."""
        return self._riders[chunk % len(self._chunks)] if k == 0 else ()

    def _without_flags(self, part: Tensor, k: int) -> Tensor:
        """What arrived, its flags taken over."""
        if self._flags is None or k > 0:
            return part
        edge = part.numel() - self._flag_bytes
        self._flags.bitwise_or_(part[edge:])
        return part[:edge]

    def keep_sum_(self, chunk: int, k: int, arrived: Sequence[Tensor]) -> None:
        """The piece becomes its sum with what arrived, added in that order; nothing of it is encoded, or lost."""
        values = self[chunk, k]
        if self._residual is not None:
            values.add_(self.part(self._residual, chunk, k))
        if self._lost is not None:
            self.part(self._lost, chunk, k).zero_()
        for wire in arrived:
            self._codec.deliver(self._own(chunk, k, wire), values, seed=self._seed, add=True)

    def deliver_(self, chunk: int, k: int, wire: Tensor) -> None:
        """The bytes of the sum become the piece's values."""
        if self.in_place:
            return
        self._codec.deliver(self._own(chunk, k, wire), self[chunk, k], seed=self._seed)
        for rider, place in self._riding(chunk, k):
            rider.deliver_(chunk, 0, wire[place:])

    def deliver_all_(self, chunks: Sequence[int], wires: Sequence[Tensor]) -> None:
        """`deliver_` the first pieces of several chunks, in one launch where the codec can."""
        if self._launches is not None:
            parts = [self._cut(chunk, 0, wire) for chunk, wire in zip(chunks, wires, strict=True)]
            self._launches.decode(parts, self._values)
        for chunk, wire in zip(chunks, wires, strict=True):
            if self._launches is None:
                self.deliver_(chunk, 0, wire)
                continue
            for rider, place in self._riding(chunk, 0):
                rider.deliver_(chunk, 0, wire[place:])


def cut_pieces(
    summand: Summand,
    peers: Peers,
    segments: int,
    *,
    flags: Tensor | None,
    riders: Sequence[Summand],
) -> Pieces:
    """One chunk for each rank, each in at most `segments` pieces; of the riders in one."""

    def chunks(one: Summand, segments: int) -> list[list[tuple[int, int]]]:
        return cut_chunks(one.values, peers.size, segments, one.codec.block)

    riding = [Pieces(rider, chunks(rider, 1), peers.rank, copied=True) for rider in riders]
    return Pieces(summand, chunks(summand, segments), peers.rank, flags, riding)


def cut_shards(summand: Summand, peers: Peers, segments: int) -> Pieces:
    """One chunk for each rank, all of one length, each in at most `segments` pieces.

    ValueError unless the values can be cut so.
    """
    shard, rest = divmod(summand.values.numel(), peers.size)
    if rest:
        raise ValueError(f"{summand.values.numel()} values cannot be cut into {peers.size} chunks of one length")
    count = pieces_of(summand.values, peers.size, segments)
    chunks = [cut(rank * shard, (rank + 1) * shard, count, summand.codec.block) for rank in range(peers.size)]
    return Pieces(summand, chunks, peers.rank, gap=-shard % summand.codec.block)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
