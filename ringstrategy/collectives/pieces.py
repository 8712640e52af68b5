"""The values of one exchange in pieces: chunks, one a rank, cut into what one message carries."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ringstrategy.codecs.base import Codec
from ringstrategy.collectives.base import cut_chunks, wire_stride


class Pieces:
    """What a rank does with each piece on its way: prepare, encode, add, deliver.

    `pieces[chunk, k]` are the values of the k-th piece of a chunk, a view; chunks are counted modulo their number.

    Args:
        values: flat; of this rank before, the sum of all ranks after.
        size: ranks, and so chunks.
        segments: most pieces of a chunk.
        codec: how pieces travel.
        residual: is added to each piece before it is first encoded or added to; None: nothing.
        lost: receives what this rank's encodes lose, in parameter space; None: nobody wants to know.
        seed: everyone's.
        rank: whose encodes these are.

    Attributes:
        count: pieces of each chunk.
        in_place: the values' own bytes are the wire, so nothing is encoded or decoded but to add.
        stride: bytes that hold any piece's wire, a multiple of 16.
    """

    def __init__(
        self,
        values: Tensor,
        size: int,
        segments: int,
        codec: Codec,
        *,
        residual: Tensor | None,
        lost: Tensor | None,
        seed: int,
        rank: int,
    ) -> None:
        self._values, self._codec, self._residual, self._lost = values, codec, residual, lost
        self._seed, self._own_seed = seed, codec.own_seed(seed, rank)
        self._chunks = cut_chunks(values, size, segments, codec.block)
        self.count = len(self._chunks[0])
        self.in_place = codec.raw(values) is not None
        self.stride = wire_stride(self._chunks, codec, values)

    def _edges(self, place: tuple[int, int]) -> tuple[int, int]:
        chunk, k = place
        return self._chunks[chunk % len(self._chunks)][k]

    def _of(self, whole: Tensor | None, place: tuple[int, int]) -> Tensor | None:
        begin, end = self._edges(place)
        return None if whole is None else whole[begin:end]

    def __getitem__(self, place: tuple[int, int]) -> Tensor:
        begin, end = self._edges(place)
        return self._values[begin:end]

    def wire(self, chunk: int, k: int, memory: Tensor) -> Tensor:
        """As much of `memory` as the piece's bytes need."""
        begin, end = self._edges((chunk, k))
        return memory[: self._codec.nbytes(end - begin, self._values.dtype)]

    def landing(self, chunk: int, k: int, memory: Tensor) -> Tensor:
        """Where a finished piece arrives: its values themselves if their bytes are the wire."""
        raw = self._codec.raw(self[chunk, k])
        return self.wire(chunk, k, memory) if raw is None else raw

    def prepare_(self, chunk: int, k: int) -> None:
        """Before the piece is first encoded or added to."""
        piece, residual, lost = self[chunk, k], self._of(self._residual, (chunk, k)), self._of(self._lost, (chunk, k))
        if residual is not None:
            piece.add_(residual)
        self._codec.prepare_(piece, self._seed)
        if lost is not None:
            # so that what the encode leaves as it was comes back through `restore_lost_` as it was
            self._codec.prepare_(lost, self._seed)

    def encode(self, chunk: int, k: int, memory: Tensor) -> Tensor:
        """The piece's bytes, in `memory` unless the values have them themselves."""
        return self.add_and_encode(chunk, k, (), memory)

    def add_and_encode(self, chunk: int, k: int, arrived: Sequence[Tensor], memory: Tensor) -> Tensor:
        """The bytes of the piece plus what arrived, in that order of addition."""
        place, piece = (chunk, k), self[chunk, k]
        if self.in_place:
            for summand in arrived:
                self._codec.decode(summand, piece, add=True)
            return self.landing(chunk, k, memory)
        wire = self.wire(chunk, k, memory)
        lost, begin = self._of(self._lost, place), self._edges(place)[0]
        if arrived:
            self._codec.reduce(arrived, piece, wire, lost=lost, seed=self._own_seed, offset=begin)
        else:
            self._codec.encode(piece, wire, lost=lost, seed=self._own_seed, offset=begin)
        return wire

    def restore_lost_(self, chunk: int, k: int) -> None:
        """Turn what the encode lost back into parameter space; it may stand where the wire is busy."""
        lost = self._of(self._lost, (chunk, k))
        if lost is not None:
            self._codec.restore_(lost, self._seed)

    def deliver_(self, chunk: int, k: int, wire: Tensor) -> None:
        """The bytes of the sum become the piece's values."""
        if not self.in_place:
            piece = self[chunk, k]
            self._codec.decode(wire, piece)
            self._codec.restore_(piece, self._seed)
