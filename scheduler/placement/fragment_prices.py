"""What the free part of a partly used accelerator (a fragment) is worth.

A fragment is worth the requests that will come to fill it, less what those requests could have filled
elsewhere. The existing fragments bid for the small requests expected soon: each takes the request that leaves
it most, and a request that too many fragments want gets a price, until as many are taken as will come. With
prices y and shares s

    worth(h) = mean over requests that fit h of (s - y + worth(h - s)),

weighted by how often a request comes and by how good it is for the fragment (PATIENCE: how much better a
request must be for a fragment to wait for it). So many equal fragments that only a rare request can fill are
worth little, and a fragment that two frequent requests fill exactly is worth its size. A whole free
accelerator is worth itself.

Sizes are counted in GRAIN thousandths: fragments rounded down, requests up.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

GRAIN = 10
WHOLE = 1000 // GRAIN
PATIENCE = 20.0
"""Thousandths of an accelerator by which a filling must be worse to come e times less often."""
ROUNDS = 50
"""Price corrections per call; they continue from the prices of the last call."""
STEP = 10.0
"""Largest change of a price in a round, in thousandths."""


class FragmentPrices:
    """Prices of small requests, and the worth of fragments that follows from them."""

    def __init__(self, often: Mapping[int, float], prices: Mapping[int, float] | None = None) -> None:
        """Index the requests by size.

        Args:
            often: thousandths requested -> how many such requests are expected. Whole ones are left out.
            prices: to continue from; by default all are 0.
        """
        sizes: dict[int, float] = {}
        for share_m, count in often.items():
            size = -(-share_m // GRAIN)
            if 0 < size < WHOLE and count > 0:
                sizes[size] = sizes.get(size, 0.0) + count
        self._size = np.array(sorted(sizes), dtype=np.int64)
        self._often = np.array([sizes[size] for size in sorted(sizes)])
        known = prices or {}
        self._price = np.array([known.get(GRAIN * size, 0.0) for size in sorted(sizes)], dtype=np.float64)
        self._fitting = np.searchsorted(self._size, np.arange(WHOLE), side="right")

    @property
    def prices(self) -> dict[int, float]:
        """By thousandths requested, rounded up to grains."""
        return {GRAIN * int(size): float(price) for size, price in zip(self._size, self._price, strict=True)}

    def worth(self) -> NDArray[np.float64]:
        """Worth in thousandths by size (0 to WHOLE)."""
        return self._value()[0]

    def adjust(self, fragments: NDArray[np.int64]) -> None:
        """Correct the prices, given the number of fragments of each size."""
        for _ in range(ROUNDS if self._size.size and fragments[1:WHOLE].any() else 0):
            _, chosen = self._value()
            taken = self._taken(chosen, fragments)
            excess = np.clip((taken - self._often) / self._often, -1.0, 1.0)
            self._price = np.clip(self._price + STEP * excess, 0.0, float(GRAIN) * self._size)

    def _value(self) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
        """By size of the fragment: its worth, and how likely each request that fits is the next one in it."""
        value = np.zeros(WHOLE + 1)
        value[WHOLE] = 1000.0
        gain = float(GRAIN) * self._size - self._price
        chosen: list[NDArray[np.float64]] = []
        for size in range(WHOLE):
            k = int(self._fitting[size])
            if not k:
                chosen.append(np.zeros(0))
                continue
            each = gain[:k] + value[size - self._size[:k]]
            weight = self._often[:k] * np.exp((each - each.max()) / PATIENCE)
            weight /= weight.sum()
            value[size] = max(float(weight @ each), value[size - 1])
            chosen.append(weight)
        return value, chosen

    def _taken(self, chosen: list[NDArray[np.float64]], fragments: NDArray[np.int64]) -> NDArray[np.float64]:
        """How many requests of each size all fragments would take until they are full."""
        left = fragments.astype(np.float64)
        taken = np.zeros(self._size.size)
        for size in range(WHOLE - 1, 0, -1):
            k = int(self._fitting[size])
            if k and left[size] > 0:
                flow = left[size] * chosen[size]
                taken[:k] += flow
                left[size - self._size[:k]] += flow
        return taken
