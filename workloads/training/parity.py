"""Parity of the ranks' states: any m of n ranks may be lost, and the others give their bytes back.

A rank's state is cut into n - m chunks. One chunk of each of n - m ranks, and m parities of them on the other m ranks, make
a stripe; there are n stripes, and every rank has one part of each. For n = 4 and m = 1:

              rank 0     rank 1     rank 2     rank 3
    stripe 0  parity 0   chunk 0    chunk 1    chunk 2
    stripe 1  chunk 2    parity 0   chunk 0    chunk 1
    stripe 2  chunk 1    chunk 2    parity 0   chunk 0
    stripe 3  chunk 0    chunk 1    chunk 2    parity 0

So a rank holds n / (n - m) times its state. A parity is a sum over the field GF(2^8) of the chunks, each times a
coefficient; any n - m parts of a stripe give all of it (Reed and Solomon's code). The coefficients are a Cauchy matrix,
scaled so that the first parity is the plain exclusive or, which is all that m = 1 computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

MOST_RANKS = 256  # with several parities: the field has so many elements, and a Cauchy matrix needs one for each row and column
_GRAIN = 4096  # chunks are multiples of so many bytes
_POLYNOMIAL = 0x11D  # x^8 + x^4 + x^3 + x^2 + 1, of which 2 is a generator


@dataclass(frozen=True)
class Stripes:
    """How the states of `ranks` are spread so that any `parity` of them may be lost. Raises ValueError."""

    ranks: int
    parity: int

    def __post_init__(self) -> None:
        if not 0 <= self.parity < self.ranks or (self.parity > 1 and self.ranks > MOST_RANKS):
            raise ValueError(
                f"{self.parity} of {self.ranks} ranks cannot be lost: fewer than all, and one of more than {MOST_RANKS}"
            )

    @property
    def chunks(self) -> int:
        """Into which a rank's state is cut; so many parts of a stripe give all of it."""
        return self.ranks - self.parity

    def chunk_bytes(self, size: int) -> int:
        """Of ranks of which the largest state has `size` bytes; the rest of the last chunk is zeros."""
        return -(-size // (self.chunks * _GRAIN)) * _GRAIN

    def held_bytes(self, size: int) -> int:
        """What a rank holds then: its state and its parities."""
        return self.ranks * self.chunk_bytes(size)

    def part(self, rank: int, stripe: int) -> int:
        """Which part of `stripe` is with `rank`: parities count from 0 on, chunks from `parity` on."""
        return (rank - stripe) % self.ranks

    def holder(self, part: int, stripe: int) -> int:
        """The rank that has it."""
        return (stripe + part) % self.ranks

    def sent(self) -> list[tuple[int, int, int]]:
        """(offset, chunk, parity): every rank sends the chunk to the rank `offset` after it, which adds it to the parity."""
        every = [(offset, parity) for offset in range(1, self.ranks) for parity in range(self.parity)]
        placed = [(offset, (parity - self.parity - offset) % self.ranks, parity) for offset, parity in every]
        return [each for each in placed if each[1] < self.chunks]

    @cached_property
    def generator(self) -> list[list[int]]:
        """The coefficients of the chunks in each part of a stripe."""
        rows = self._parity_rows()
        return rows + [[int(row == column) for column in range(self.chunks)] for row in range(self.chunks)]

    def _parity_rows(self) -> list[list[int]]:
        if self.parity <= 1:
            return [[1] * self.chunks] * self.parity
        cauchy = [
            [inverse((self.chunks + row) ^ column) for column in range(self.chunks)]
            for row in range(self.parity)
        ]
        return [[divide(each, first) for each, first in zip(row, cauchy[0], strict=True)] for row in cauchy]

    def weights(self, wanted: int, known: Sequence[int]) -> list[int]:
        """What the `known` parts of a stripe, as many as there are chunks, add up to the `wanted` one with."""
        rows = [self.generator[part] for part in known]
        columns = [list(column) for column in zip(*rows, strict=True)]
        return solve(columns, self.generator[wanted])


def solve(matrix: Sequence[Sequence[int]], wanted: Sequence[int]) -> list[int]:
    """x with `matrix` x = `wanted`, by elimination. Raises ValueError if there is no single one."""
    rows = [[*row, value] for row, value in zip(matrix, wanted, strict=True)]
    for column in range(len(rows)):
        pivot = next((n for n in range(column, len(rows)) if rows[n][column]), None)
        if pivot is None:
            raise ValueError("the equations do not determine the bytes")
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [divide(each, rows[column][column]) for each in rows[column]]
        for n, row in enumerate(rows):
            if n != column and row[column]:
                rows[n] = [
                    each ^ multiply(row[column], other) for each, other in zip(row, rows[column], strict=True)
                ]
    return [row[-1] for row in rows]


def multiply(one: int, other: int) -> int:
    powers, logarithms = _tables()
    return powers[logarithms[one] + logarithms[other]] if one and other else 0


def inverse(one: int) -> int:
    powers, logarithms = _tables()
    return powers[255 - logarithms[one]]


def divide(one: int, other: int) -> int:
    return multiply(one, inverse(other))


@cache
def _tables() -> tuple[list[int], list[int]]:
    """Powers of 2, and the exponent of each element but 0."""
    powers, logarithms = [1], [0] * 256
    for exponent in range(1, 510):
        doubled = powers[-1] << 1
        powers.append(doubled ^ _POLYNOMIAL if doubled > 255 else doubled)
        logarithms[powers[-1]] = exponent % 255
    return powers, logarithms
