"""Which experts are in memory where it does not hold all of them, and which one gives way. Without torch.

The layers of a pass come in a fixed order, so the next use of an expert can be estimated, in passes:

    wait = (layers until its layer is computed) / layers + (1 - p) / p

p is the part of the last passes that used it (of the first WINDOW the plain average, then one whose weights fall by 1/WINDOW
per pass): the passes until a use of that probability, less one. The expert with the longest wait gives way, which is Belady's rule (Belady 1966) with an
estimate in the place of the future. Where all experts are used in each pass it keeps a fixed set and reads the others; the
least recently used one would be the very next to be used then. Where some are used more often than others it keeps these.

Reading ahead goes on while enough of what was read ahead lately was used (`pays`): a wrong guess takes the disk, the processor
and a place, and where the most used experts are in memory already, what a router foresees of the others is mostly wrong.

An expert that is read ahead, because it was foreseen for the next layer, takes the place of one whose wait is a pass or more
(so it never costs a second read in this pass), and longer than its own by the part of foreseen experts that were used lately.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

WINDOW = 16
"""Passes over which the use of experts is averaged, and layers over which the part of foreseen ones that was used is."""
PAYS = 0.5
"""The least part of what was read ahead that has to be used."""
LATELY = 64
"""Experts read ahead over which that part is averaged, and layers after which it is tried again where it was too small."""
LEAST = 1 / 1024
"""The least probability of a use that is reckoned with."""


class ExpertPlaces:
    """Places for experts, each by (layer, expert). A busy one does not give way."""

    def __init__(self, layers: int, experts: int, places: int, per_token: int) -> None:
        self._layers = layers
        self._used: npt.NDArray[np.float64] = np.full((layers, experts), per_token / experts)
        self._place: npt.NDArray[np.int64] = np.full((layers, experts), -1)
        self.busy: npt.NDArray[np.bool_] = np.zeros((layers, experts), bool)
        """[layers, experts]: computed with, or read."""
        self.ahead: npt.NDArray[np.bool_] = np.zeros((layers, experts), bool)
        """[layers, experts]: read because it was foreseen, and not used since."""
        self.right = 0.5
        """The part of foreseen experts that were used, lately."""
        self._paid = 1.0
        """The part of those read ahead that were used, lately."""
        self._untried = 0
        """Layers since reading ahead was last tried."""
        self._passes: npt.NDArray[np.int64] = np.ones(layers, np.int64)
        """Of each layer, and one for what is taken at first."""
        self._free = list(range(places))[::-1]
        self._turns = np.arange(layers)
        self._foreseen: tuple[int, tuple[int, ...]] = (0, ())
        self._likely = self.right

    def place(self, layer: int, expert: int) -> int | None:
        """Where it is, or is read to."""
        found = int(self._place[layer, expert])
        return None if found < 0 else found

    def missing(self, layer: int, experts: Sequence[int]) -> list[int]:
        return [expert for expert in experts if self._place[layer, expert] < 0]

    def often(self, layer: int) -> list[int]:
        """Experts that more than half of the last passes used."""
        return [int(each) for each in np.flatnonzero(self._used[layer] > 0.5)]

    def count(self, layer: int, used: Sequence[int]) -> int:
        """A pass uses these experts of a layer. Returns how many of them had been read ahead for it."""
        self._passes[layer] += 1
        new = 1 / min(int(self._passes[layer]), WINDOW)
        self._used[layer] *= 1 - new
        self._used[layer, used] += new
        of, foreseen = self._foreseen
        if of == layer and foreseen:
            found = len(set(foreseen).intersection(used)) / len(foreseen)
            self.right += (found - self.right) / WINDOW
        right, read = int(self.ahead[layer, used].sum()), int(self.ahead[layer].sum())
        self._paid += (right - self._paid * read) / max(read, LATELY)
        self.ahead[layer] = False
        return right

    def pays(self) -> bool:
        """Whether experts should be read ahead for the next layer: they were used lately, or it is time to try again."""
        self._untried += 1
        if self._paid < PAYS and self._untried < LATELY:
            return False
        self._untried = 0
        return True

    def foresee(self, layer: int, experts: Sequence[int]) -> None:
        """The experts of the layer behind the present one are taken to be these."""
        self._foreseen = layer, tuple(experts)
        often = float(self._used[layer, self._foreseen[1]].mean()) if experts else 0.0
        self._likely = max(self.right, often, LEAST)

    def take(
        self, layer: int, experts: Sequence[int], now: int, *, ahead: bool = False
    ) -> list[tuple[int, int]]:
        """Gives experts of a layer, none of which has one, a place while `now` is computed: (expert, place) of as many as
        get one, the first ones first; they are busy. `ahead`: they are the foreseen ones."""
        found: list[tuple[int, int]] = []
        wanted = list(experts)
        while wanted and self._free:
            found.append((wanted.pop(0), self._free.pop()))
        if wanted:
            found += zip(wanted, self._freed(len(wanted), now, ahead=ahead), strict=False)
        for expert, place in found:
            self._place[layer, expert], self.busy[layer, expert] = place, True
            self.ahead[layer, expert] = ahead
        return found

    def drop(self, layer: int, expert: int) -> None:
        """It was not read: its place is free."""
        self._free.append(int(self._place[layer, expert]))
        self._place[layer, expert] = -1
        self.busy[layer, expert] = self.ahead[layer, expert] = False

    def waits(self, now: int) -> npt.NDArray[np.float64]:
        """[layers, experts]: passes until the next use, seen from layer `now`, which has its experts already."""
        until = (self._turns - now - 1) % self._layers + 1
        likely = np.maximum(self._used, LEAST)
        return until[:, None] / self._layers + (1 - likely) / likely

    def _freed(self, count: int, now: int, *, ahead: bool) -> list[int]:
        """Places of as many experts as may give way, those with the longest wait."""
        waits = self.waits(now)
        layer, experts = self._foreseen
        likely = self._likely
        wait = ((layer - now - 1) % self._layers + 1) / self._layers + (1 - likely) / likely
        if experts:
            waits[layer, experts] = -1.0 if ahead else np.minimum(waits[layer, experts], wait)
        waits[(self._place < 0) | self.busy] = -1.0
        able = np.flatnonzero(waits >= max(wait, 1.0) if ahead else waits >= 0)
        if len(able) > count:
            able = able[np.argpartition(-waits.ravel()[able], count)[:count]]
        places = []
        for index in able:
            at = np.unravel_index(index, waits.shape)
            places.append(int(self._place[at]))
            self._place[at] = -1
            self.ahead[at] = False
        return places
