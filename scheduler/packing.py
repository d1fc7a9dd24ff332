"""Which node, and which accelerators of it, a request should take so that the rest stays useful.

Fragmentation-aware packing after Weng et al. (FGD, ATC'23) asks how much of a node the *next* typical request
could not use. Three things are different here:

- **Filling, not the next request.** A node with eight free accelerators and CPU for three requests serves any
  next request, and five of its accelerators are lost all the same. So a node counts by how much of it could be
  used if it were *filled* with one kind of request: as far as its CPU goes.
- **Holes have a worth of their own** (`holes.py`): what is expected to come and fill them, not their size.
- **Who cannot use a hole at all does not count**: the mean is over the kinds that the hole is large enough for,
  so that the CPU, the device model and the number of devices decide between nodes, and the worth between holes.

    worth(node) = sum over its devices of worth(hole) * mean over kinds fitting the hole of usable(kind, node)
    usable = 0 where CPU, model or devices are lacking for one request; else min(1, CPU left / CPU to fill it)

A request goes where worth falls least; losses within STEP count as equal, and of equals the first node is
taken. What is known of the future is only how often each kind of request comes (`workload`).

Scores are kept per (kind, machine) and only those of machines that changed are computed again, so a decision
costs a fraction of a millisecond and not a pass over the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .holes import GRAIN, WHOLE, HoleMarket

STEP = 10.0
"""Thousandths of an accelerator below which two losses count as equal."""
AHEAD = 0.3
"""Requests are expected for so much of the cluster when holes are priced."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Request:
    """What one pod asks for. `devices` > 1 means whole devices."""

    cpu_m: int
    memory_mib: int
    devices: int
    share_m: int
    """Thousandths of each device."""
    models: frozenset[str] = frozenset()
    """Allowed device models; empty: any."""

    @property
    def kind(self) -> Request:
        """Without memory, which is checked but never decides about accelerators."""
        return Request(self.cpu_m, 0, self.devices, self.share_m, self.models)

    @property
    def each_m(self) -> int:
        """Taken from each device."""
        return 1000 if self.devices > 1 else self.share_m


@dataclass(frozen=True, slots=True)
class Machine:
    """One node, empty."""

    name: str
    cpu_m: int
    memory_mib: int
    devices: int
    model: str


def typical(requests: Iterable[Request], cover: float = 0.95) -> list[tuple[Request, float]]:
    """The most frequent kinds that together cover so much of the requests, with renormalised weights."""
    counts: dict[Request, int] = {}
    for request in requests:
        counts[request.kind] = counts.get(request.kind, 0) + 1
    total = sum(counts.values())
    ordered = sorted(
        counts.items(),
        key=lambda item: (-item[1], item[0].cpu_m, item[0].devices, item[0].share_m, sorted(item[0].models)),
    )
    chosen: list[tuple[Request, int]] = []
    covered = 0
    for kind, count in ordered:
        if covered >= cover * total:
            break
        chosen.append((kind, count))
        covered += count
    return [(kind, count / covered) for kind, count in chosen]


@dataclass(frozen=True, slots=True)
class Rows:
    """States of nodes, one per row: what is left. Columns: distinct shares that the workload asks for."""

    cpu_m: Ints
    model: Ints
    count: Ints
    """Devices with at least that share free."""
    amount: Floats
    """Thousandths free on them."""
    value: Floats
    """Their worth, over the part of the workload that could use a hole of that size."""


class Packer:
    """Places requests one by one, for good. `worth` and `steps` may be overridden by other measures."""

    def __init__(self, machines: Sequence[Machine], workload: Sequence[tuple[Request, float]]) -> None:
        self.machines = list(machines)
        self.cpu = np.array([machine.cpu_m for machine in machines], dtype=np.int64)
        self.memory = np.array([machine.memory_mib for machine in machines], dtype=np.int64)
        width = max((machine.devices for machine in machines), default=1)
        held = [[1000] * m.devices + [0] * (width - m.devices) for m in machines]
        self.free = np.array(held, dtype=np.int64).reshape(len(held), width)
        models = sorted({machine.model for machine in machines})
        self._model = np.array([models.index(machine.model) for machine in machines], dtype=np.int64)
        self._models = models
        self._learn([(kind, weight) for kind, weight in workload if kind.devices])
        self._scores: dict[Request, _Scores] = {}
        self._changes: list[int] = []
        self._priced = -1
        self._price()

    def _learn(self, workload: Sequence[tuple[Request, float]]) -> None:
        shares = sorted({kind.each_m for kind, _ in workload})
        self._need_cpu = np.array([kind.cpu_m for kind, _ in workload], dtype=np.int64)
        self._need_devices = np.array([kind.devices for kind, _ in workload], dtype=np.int64)
        self._asked = np.array([kind.devices * kind.each_m for kind, _ in workload], dtype=np.float64)
        self._column = np.array([shares.index(kind.each_m) for kind, _ in workload], dtype=np.int64)
        self._weight = np.array([weight for _, weight in workload])
        access = [[not kind.models or model in kind.models for kind, _ in workload] for model in self._models]
        self._access = np.array(access, dtype=np.bool_).reshape(len(self._models), len(workload))
        size = np.arange(WHOLE + 1)[:, None]
        self._fits_size = size >= -(-np.array(shares, dtype=np.int64) // GRAIN)[None, :]
        self._amount_of = np.where(self._fits_size, float(GRAIN) * size, 0.0)
        by_column = np.bincount(self._column, self._weight, len(shares)) if shares else np.zeros(0)
        self._users = (self._fits_size * by_column).sum(axis=1)
        ahead = AHEAD * 1000 * sum(machine.devices for machine in self.machines)
        asked = float(self._weight @ self._asked) or 1.0
        often: dict[int, float] = {}
        for kind, weight in workload:
            often[kind.each_m] = often.get(kind.each_m, 0.0) + weight * kind.devices * ahead / asked
        self._market = HoleMarket(often)

    def _price(self) -> None:
        """Value all holes anew: at the start, and after as many placements as there are machines."""
        self._priced = len(self._changes)
        worth = self._market.worth(np.bincount(self.free.ravel() // GRAIN, minlength=WHOLE + 1))
        each = np.divide(worth, self._users, out=np.zeros(WHOLE + 1), where=self._users > 0)
        self._value_of = np.where(self._fits_size, each[:, None], 0.0)
        size = self.free // GRAIN
        self._count = self._fits_size[size].sum(axis=1)
        self._amount = self._amount_of[size].sum(axis=1)
        self._value = self._value_of[size].sum(axis=1)
        every = np.arange(len(self.machines))
        self._now = self.worth(self._rows(every))

    def _rows(self, nodes: Ints) -> Rows:
        return Rows(
            self.cpu[nodes], self._model[nodes], self._count[nodes], self._amount[nodes], self._value[nodes]
        )

    def worth(self, rows: Rows) -> Floats:
        """Thousandths of accelerators that the rest of these nodes is good for."""
        cpu = rows.cpu_m[:, None]
        served = (
            (self._need_cpu <= cpu)
            & self._access[rows.model]
            & (rows.count[:, self._column] >= self._need_devices)
        )
        to_fill = rows.amount[:, self._column] * (self._need_cpu / self._asked)
        enough = np.minimum(1.0, cpu / np.maximum(to_fill, 1.0))
        good = self._weight * enough * rows.value[:, self._column]
        total: Floats = np.where(served, good, 0.0).sum(axis=1)
        return total

    def steps(self, loss: Floats, request: Request) -> Floats:
        """Losses made comparable; lower is better."""
        return np.rint(loss / STEP)

    def place(self, request: Request) -> int | None:
        """Place the request on the best machine; None if it fits nowhere."""
        scores = self._fresh(request.kind)
        loss = np.where(self.memory >= request.memory_mib, scores.loss, np.inf)
        best = int(np.argmin(loss)) if loss.size else -1
        if best < 0 or loss[best] == np.inf:
            return None
        self._take(best, request, int(scores.device[best]))
        if len(self._changes) - self._priced >= len(self.machines):
            self._price()
        return best

    def _fresh(self, kind: Request) -> _Scores:
        """Scores of this kind on all machines as they are now."""
        scores = self._scores.get(kind)
        if scores is None:
            scores = self._scores[kind] = _Scores(len(self.machines))
        if scores.seen < self._priced or scores.seen < 0:
            stale = np.arange(len(self.machines))
        else:
            stale = np.array(sorted(set(self._changes[scores.seen :])), dtype=np.int64)
        scores.seen = len(self._changes)
        if stale.size:
            scores.loss[stale], scores.device[stale] = self._rank(stale, kind)
        return scores

    def _rank(self, nodes: Ints, kind: Request) -> tuple[Floats, Ints]:
        """For each node: the loss (inf: does not fit) and the device for a share (-1: whole devices or none)."""
        loss = np.full(nodes.size, np.inf)
        device = np.full(nodes.size, -1, dtype=np.int64)
        room = self.free[nodes] >= max(kind.each_m, 1)
        fits = (self.cpu[nodes] >= kind.cpu_m) & (room.sum(axis=1) >= kind.devices)
        if kind.models and kind.devices:
            fits &= np.array([model in kind.models for model in self._models])[self._model[nodes]]
        at = np.flatnonzero(fits)
        if not at.size:
            return loss, device
        if kind.devices == 0 or kind.each_m >= 1000:
            after = self._after(nodes[at], kind, WHOLE, kind.devices)
            loss[at] = self.steps(self._now[nodes[at]] - self.worth(after), kind)
            return loss, device
        row, column = np.nonzero(room[at] & _first_of_equals(self.free[nodes[at]]))
        own = nodes[at][row]
        after = self._after(own, kind, self.free[own, column] // GRAIN, 1)
        each = np.full(room[at].shape, np.inf)
        each[row, column] = self.steps(self._now[own] - self.worth(after), kind)
        device[at] = each.argmin(axis=1)
        loss[at] = each.min(axis=1)
        return loss, device

    def _after(self, nodes: Ints, kind: Request, size: Ints | int, devices: int) -> Rows:
        """These nodes when `devices` holes of a size were used by one request."""
        rows = self._rows(nodes)
        cpu_m = rows.cpu_m - kind.cpu_m
        if not devices:
            return Rows(cpu_m, rows.model, rows.count, rows.amount, rows.value)
        left = np.maximum(size - -(-kind.each_m // GRAIN), 0)
        return Rows(
            cpu_m,
            rows.model,
            rows.count - devices * (self._fits_size[size] * 1 - self._fits_size[left]),
            rows.amount - devices * (self._amount_of[size] - self._amount_of[left]),
            rows.value - devices * (self._value_of[size] - self._value_of[left]),
        )

    def _take(self, i: int, request: Request, device: int) -> None:
        self.cpu[i] -= request.cpu_m
        self.memory[i] -= request.memory_mib
        if device >= 0:
            self.free[i, device] -= request.share_m
        elif request.devices:
            self.free[i, np.flatnonzero(self.free[i] == 1000)[: request.devices]] = 0
        size = self.free[i] // GRAIN
        self._count[i] = self._fits_size[size].sum(axis=0)
        self._amount[i] = self._amount_of[size].sum(axis=0)
        self._value[i] = self._value_of[size].sum(axis=0)
        self._now[i] = self.worth(self._rows(np.array([i])))[0]
        self._changes.append(i)


class _Scores:
    """Losses of one kind of request on all machines, as of a number of changes."""

    def __init__(self, machines: int) -> None:
        self.loss: Floats = np.full(machines, np.inf)
        self.device: Ints = np.full(machines, -1, dtype=np.int64)
        self.seen = -1


def _first_of_equals(free: Ints) -> NDArray[np.bool_]:
    """Per row: False where an earlier device has just as much free."""
    same = free[:, :, None] == free[:, None, :]
    first: NDArray[np.bool_] = ~np.tril(same, -1).any(axis=2)
    return first
