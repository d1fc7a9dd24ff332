"""The machines of a gang, measured by all its ranks together; of one process, by itself.

Each rank measures its own machine at the same time as the others do (see `probe`), so what they have in common is shared as it
will be in the run. Then they exchange gradients and weights as a step does, in two sizes: the least time and the rate of
an exchange follow from both, and how much of an exchange's time a device loses that computes meanwhile. What the slowest
rank has found counts for all, because the others wait for it.

Buffers are its own, and no random number is drawn but from generators of its own: no bit of the training changes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from busbar.scheduler.fit.exchange import Link, Links
from busbar.workloads.training import probe
from busbar.workloads.training.prediction import Probe
from busbar.workloads.training.ranks import Pending, Ranks

MOST_BYTES = 16 * 2**20
"""Of a group, whole, that is exchanged to measure."""
LESS = 16
"""So many times less is exchanged as well, which tells what an exchange costs whatever its size."""
TIMES = 3
"""Of which the median counts."""
WORK_SIZE = 256
"""Rows and columns of the matrices that are multiplied beside an exchange."""
MOST_PRODUCTS = 10_000


def together(
    ranks: Ranks,
    path: Path,
    key: str,
    own: Callable[[], Probe],
    links: Callable[[], Links],
) -> Probe:
    """The slowest rank's probe, alike on all ranks, which all call this; from `path` where every rank has one of `key` there.

    Raises ValueError, alike on all ranks, where one of them could not be measured.

    Args:
        own: measures this rank's machine.
        links: measures what is between the ranks, with all of them.
    """
    found, problem = probe.read(path, key), ""
    if ranks.most([int(found is None)])[0]:
        found = None
        try:
            found = own()
        except Exception as failure:  # a part of a model may not run where the whole does
            problem = f"{failure}"
    every = ranks.gather((found, problem))
    if problems := [said for _, said in every if said]:
        raise ValueError(problems[0])
    known = [each for each, _ in every if each is not None]
    slowest = max(known, key=lambda each: each.block.forward_s + each.block.backward_s)
    if ranks.size > 1 and slowest.links is None:
        assert found is not None
        between = links()
        found, slowest = replace(found, links=between), replace(slowest, links=between)
    if found is not None:
        with suppress(OSError):  # it is measured anew
            probe.write(path, key, found)
    return slowest


def measure_links(
    ranks: Ranks,
    device: torch.device,
    elements: int,
    gradients: torch.dtype,
    weights: torch.dtype,
    *,
    fixed: bool,
) -> Links:
    """Of exchanges between all ranks, which all call this. Raises RuntimeError when a rank is lost.

    Args:
        elements: of the largest group.
        fixed: gradients are added up in a fixed order.
    """

    def summed(own: torch.Tensor, whole: torch.Tensor) -> Pending:
        if fixed:
            return ranks.start_all_to_all(torch.empty_like(whole), whole)
        return ranks.start_reduce_scatter(own, whole)

    def gathered(own: torch.Tensor, whole: torch.Tensor) -> Pending:
        return ranks.start_all_gather(whole, whole.view(ranks.size, -1)[ranks.rank])

    sums = _Exchange(ranks, device, elements, gradients, summed)
    gathers = _Exchange(ranks, device, elements, weights, gathered)
    every = ranks.gather(Links(sums.link(), gathers.link(), sums.busy()))
    del sums, gathers
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Links(
        _slowest([each.gradients for each in every]),
        _slowest([each.weights for each in every]),
        max(each.busy for each in every),
    )


def _slowest(found: Sequence[Link]) -> Link:
    return Link(max(each.latency_s for each in found), min(each.bytes_per_s for each in found))


class _Exchange:
    """One kind of exchange, of buffers of its own."""

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        elements: int,
        dtype: torch.dtype,
        start: Callable[[torch.Tensor, torch.Tensor], Pending],
    ) -> None:
        self._ranks, self._device, self._start = ranks, device, start
        most = min(elements, MOST_BYTES // dtype.itemsize)
        self._each = max(LESS, -(-most // ranks.size))  # elements of a rank's part
        self._whole = torch.zeros(self._each * ranks.size, dtype=dtype, device=device)
        self._own = torch.zeros(self._each, dtype=dtype, device=device)
        self._alone_s = 0.0  # of the whole buffer, when it was measured

    def link(self) -> Link:
        little, much = self._each // LESS, self._each
        few, many = self._sent(little), self._sent(much)
        short, self._alone_s = self._seconds(little), self._seconds(much)
        long = self._alone_s
        rate = (many - few) / max(long - short, 1e-9)
        if short >= long:  # noise: as if all of it were bytes
            return Link(0.0, many / max(long, 1e-9))
        return Link(max(0.0, short - few / rate), rate)

    def busy(self) -> float:
        """Part of its seconds that a device which computes meanwhile is held up; after `link`."""
        alone = self._alone_s
        self._products(1)  # which warms up
        count = min(MOST_PRODUCTS, max(1, round(1.5 * alone / max(self._products(4) / 4, 1e-6))))
        lost = []
        for _ in range(TIMES):
            computing = self._products(count)
            self._ranks.gather("together")
            both = self._timed(self._each, count)
            lost.append((both - max(computing, alone)) / max(alone, 1e-9))
        return min(1.0, max(0.0, statistics.median(lost)))

    def _products(self, count: int) -> float:
        started = self._now()
        self._multiply(count)
        return self._now() - started

    def _multiply(self, count: int) -> None:
        factor = torch.ones(WORK_SIZE, WORK_SIZE, device=self._device)
        for _ in range(count):
            factor @ factor

    def _seconds(self, each: int) -> float:
        self._timed(each)  # which warms up
        return statistics.median(self._timed(each) for _ in range(TIMES))

    def _timed(self, each: int, products: int = 0) -> float:
        """Seconds of one exchange, and of so many products beside it."""
        started = self._now()
        pending = self._start(self._own[:each], self._whole[: each * self._ranks.size])
        if products:
            self._multiply(products)
        pending.wait()
        return self._now() - started

    def _sent(self, each: int) -> int:
        return (self._ranks.size - 1) * each * self._own.itemsize

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()
