"""The contract of a topology: who averages with whom, at which step, with which weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

_LONGEST = 10_000  # steps multiplied out before a topology counts as one that does not mix
_ROUNDING = 1e-12  # of eigenvalues


class Topology(ABC):
    """A mixing matrix W for each step, as a pure function: any rank can compute any other's row, and nothing is sent.

    Rank i's parameters become the sum of W[i, j] times those of rank j. Columns sum to 1 at every size and step, so
    the mean over ranks stays; rows do too if `doubly_stochastic`. Implementations are frozen dataclasses: equal
    topologies compare equal and print their arguments.
    """

    static: bool = True  # is W the same at every step?
    symmetric: bool = True  # is W[i, j] == W[j, i]?
    doubly_stochastic: bool = True  # do rows sum to 1 too? If not, only push-sum averages right

    @abstractmethod
    def weights(self, rank: int, size: int, step: int) -> dict[int, float]:
        """Row `rank` of W at `step`: {source: weight}, `rank` itself included, zeros left out."""

    def check(self, size: int) -> None:
        """Raise a ValueError with the cure if there is no such topology of `size` ranks."""

    def period(self, size: int) -> int:
        """After how many steps W repeats; how many to look at if it never does."""
        return 1

    def matrix(self, size: int, step: int) -> Tensor:
        """W at `step`, float64 of shape (size, size)."""
        self.check(size)
        matrix = torch.zeros(size, size, dtype=torch.float64)
        for rank in range(size):
            row = self.weights(rank, size, step)
            matrix[rank, list(row)] = torch.tensor(list(row.values()), dtype=torch.float64)
        return matrix

    def degree(self, size: int) -> int:
        """The most messages that one rank sends in a step."""
        self.check(size)
        most = 0
        for step in range(self.period(size)):
            sent = [0] * size
            for rank in range(size):
                for source in self.weights(rank, size, step):
                    sent[source] += source != rank
            most = max(most, *sent)
        return most

    def spectral_gap(self, size: int) -> float:
        """1 - r, where differences between ranks shrink by the factor r a step, in the long run.

        1 for what averages exactly; near 0 for what mixes slowly. Of a static topology r is the second largest modulus
        of W's eigenvalues; else the same of the product over one `period`, as a mean factor a step.
        """
        if size == 1:
            return 1.0
        steps = self.period(size)
        product = torch.eye(size, dtype=torch.float64)
        for step in range(steps):
            product = self.matrix(size, step) @ product
        # Columns sum to 1, so this removes the eigenvalue 1 and no other. Some LAPACKs do not converge on the matrix of
        # an exact mean; here it leaves only zeros.
        differences = product - 1 / size
        symmetric = self.static and self.symmetric
        moduli = torch.linalg.eigvalsh(differences).abs() if symmetric else torch.linalg.eigvals(differences).abs()
        second = float(moduli.max())
        return 1.0 if second < _ROUNDING else max(0.0, 1.0 - second ** (1.0 / steps))

    def steps_to_consensus(self, size: int, within: float = 1e-3) -> int | None:
        """Steps until every difference between ranks has shrunk to `within` of its first size; None: never.

        Differences are measured as the largest root mean square over the ranks that any start can leave.
        """
        if size == 1:
            return 0
        if self.static and self.symmetric:
            factor = 1.0 - self.spectral_gap(size)
            if factor > 1.0 - _ROUNDING:
                return None
            return 1 if factor <= within else math.ceil(math.log(within) / math.log(factor) - _ROUNDING)
        product = torch.eye(size, dtype=torch.float64)
        for step in range(_LONGEST):
            product = self.matrix(size, step) @ product
            apart = product / product.sum(1, keepdim=True)  # push-sum's division; by 1 if doubly stochastic
            apart -= apart.mean(0)
            # the norm costs far more than this bound of it
            if float(apart.norm()) <= within * math.sqrt(size) and float(torch.linalg.matrix_norm(apart, 2)) <= within:
                return step + 1
        return None


def uniform(rank: int, neighbours: Iterable[int]) -> dict[int, float]:
    """Equal weights for oneself and the neighbours: right where all ranks have equally many."""
    sources = {rank, *neighbours}
    return dict.fromkeys(sorted(sources), 1.0 / len(sources))


def metropolis(rank: int, neighbours: dict[int, int], degree: int) -> dict[int, float]:
    """Metropolis-Hastings weights, symmetric and doubly stochastic on any undirected graph (Xiao and Boyd 2004).

    Args:
        rank: whose row.
        neighbours: {neighbour: its number of neighbours}.
        degree: of `rank`.
    """
    row = {peer: 1.0 / (1 + max(degree, theirs)) for peer, theirs in neighbours.items()}
    row[rank] = 1.0 - sum(row.values())
    return {peer: weight for peer, weight in sorted(row.items()) if weight > 0 or peer == rank}
