"""What a request costs the rest of the cluster: how much less useful a node is with the request on it.

Fragmentation-aware packing after Weng et al. (FGD, ATC'23) measures how much of a node the *next* typical
request could not use. Three things are different here:

- **Filling, not the next request.** A node with eight free accelerators and CPU for three requests serves any
  next request, and still five of its accelerators are lost. So a node counts by how much of it could be used if
  it were *filled* with one kind of request: as far as its CPU goes.
- **Fragments have a value of their own** (`fragment_prices.py`): what is expected to come and fill them, not
  their size.
- **Requests that cannot use a fragment at all do not count**: the mean is over the kinds that the fragment is
  large enough for, so that CPU, device model and number of devices decide between nodes, and the value between
  fragments.

    worth(node) = sum over its devices of worth(fragment) * mean over kinds fitting the fragment of usable(kind, node)
    usable = 0 if CPU, model or devices are lacking for one request; else min(1, CPU left / CPU to fill it)

The loss of a placement is the fall of the worth, in steps of STEP: smaller differences do not count. All that
is known of the future is how often each kind of request comes (`workload`).

Nodes are not scored one by one: only what is left of them matters (`NodeState`), and many nodes have the same
left. A `Scorer` computes each loss once. `node_index.py` keeps the nodes by state and finds the one with the
least loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .fragment_prices import GRAIN, WHOLE, FragmentPrices

STEP = 10.0
"""Thousandths of an accelerator below which two losses count as equal."""
AHEAD = 0.3
"""Requests are expected for this part of the cluster when fragments are priced."""
MAX_REMEMBERED_STATES = 30_000
"""States remembered before all are forgotten."""

T = TypeVar("T", np.int64, np.float64)
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NodeState = tuple[int, int, int, tuple[int, ...]]
"""What is left of a node: the number of its model, millicores, whole devices, and the thousandths left on
each partly used device, in the order of the devices; of equal losses the first is taken."""


@dataclass(frozen=True, slots=True)
class PodRequest:
    """What one pod requests. `devices` > 1 means whole devices."""

    cpu_m: int
    memory_mib: int
    devices: int
    share_m: int
    """Thousandths of each device."""
    models: frozenset[str] = frozenset()
    """Allowed device models; empty: any."""

    @property
    def kind(self) -> PodRequest:
        """Without memory, which is checked but never decides about accelerators."""
        return PodRequest(self.cpu_m, 0, self.devices, self.share_m, self.models)

    @property
    def each_m(self) -> int:
        """Taken from each device."""
        return 1000 if self.devices > 1 else self.share_m


Workload = Sequence[tuple[PodRequest, float]]
"""Kinds of requests and how often each comes (their sum is 1)."""


def typical(counts: Mapping[PodRequest, int], cover: float = 0.95) -> Workload:
    """The most frequent kinds that together cover this part of the requests, with renormalised weights."""
    kinds: dict[PodRequest, int] = {}
    for request, count in counts.items():
        kinds[request.kind] = kinds.get(request.kind, 0) + count
    total = sum(kinds.values())
    ordered = sorted(
        kinds.items(),
        key=lambda item: (-item[1], item[0].cpu_m, item[0].devices, item[0].share_m, sorted(item[0].models)),
    )
    chosen: list[tuple[PodRequest, int]] = []
    covered = 0
    for kind, count in ordered:
        if covered >= cover * total:
            break
        chosen.append((kind, count))
        covered += count
    return [(kind, count / covered) for kind, count in chosen]


@dataclass(frozen=True, slots=True)
class Rows:
    """States, one per row. Columns: distinct shares that the workload asks for."""

    cpu_m: Ints
    model: Ints
    count: Ints
    """Devices with at least that share free."""
    amount: Floats
    """Thousandths free on them."""
    value: Floats
    """Their worth, over the part of the workload that could use a fragment of that size."""


Loss = tuple[float, int]
"""Steps, and the thousandths left on the device that a share should use (0: no share)."""


class Scorer:
    """Losses under one workload. `worth` and `steps` may be overridden by other measures."""

    def __init__(
        self,
        models: Sequence[str],
        workload: Workload,
        capacity_m: int,
        prices: Mapping[int, float] | None = None,
    ) -> None:
        """Index the workload.

        Args:
            models: of the devices; states name them by their index here.
            capacity_m: thousandths of accelerators in the cluster.
            prices: of shares, from an earlier `price`.
        """
        self._models = list(models)
        self._learn([(kind, weight) for kind, weight in workload if kind.devices], capacity_m, prices or {})
        self._value_fragments()

    def _learn(self, workload: Workload, capacity_m: int, prices: Mapping[int, float]) -> None:
        shares = sorted({kind.each_m for kind, _ in workload})
        self._need_cpu = np.array([kind.cpu_m for kind, _ in workload], dtype=np.int64)
        self.counts_cpu = bool(self._need_cpu.any())
        """Whether the CPU left on a node matters to the workload."""
        self._need_devices = np.array([kind.devices for kind, _ in workload], dtype=np.int64)
        self._asked = np.array([kind.devices * kind.each_m for kind, _ in workload], dtype=np.float64)
        self._column = np.array([shares.index(kind.each_m) for kind, _ in workload], dtype=np.int64)
        self._weight = np.array([weight for _, weight in workload], dtype=np.float64)
        access = [[not kind.models or model in kind.models for kind, _ in workload] for model in self._models]
        self._access = np.array(access, dtype=np.bool_).reshape(len(self._models), len(workload))
        size = np.arange(WHOLE + 1)[:, None]
        self._fits_size = size >= -(-np.array(shares, dtype=np.int64) // GRAIN)[None, :]
        self._amount_of = np.where(self._fits_size, float(GRAIN) * size, 0.0)
        by_column = np.bincount(self._column, self._weight, len(shares)) if shares else np.zeros(0)
        self._users = (self._fits_size * by_column).sum(axis=1)
        asked = float(self._weight @ self._asked) or 1.0
        often: dict[int, float] = {}
        for kind, weight in workload:
            coming = weight * kind.devices * AHEAD * capacity_m / asked
            often[kind.each_m] = often.get(kind.each_m, 0.0) + coming
        self._prices_of_shares = FragmentPrices(often, prices)

    @property
    def shares(self) -> bool:
        """Whether the workload requests parts of devices."""
        return bool(self._prices_of_shares.prices)

    @property
    def prices(self) -> dict[int, float]:
        """What each share costs when fragments are valued, in thousandths of an accelerator."""
        return self._prices_of_shares.prices

    def price(self, parts: Sequence[int]) -> None:
        """Compute the value of all fragments again.

        Args:
            parts: thousandths left on the partly used devices.
        """
        sizes = np.array(parts, dtype=np.int64) // GRAIN
        self._prices_of_shares.adjust(np.bincount(sizes, minlength=WHOLE + 1))
        self._value_fragments()

    def _value_fragments(self) -> None:
        each = np.divide(
            self._prices_of_shares.worth(), self._users, out=np.zeros(WHOLE + 1), where=self._users > 0
        )
        self._value_of = np.where(self._fits_size, each[:, None], 0.0)
        self._forget()

    def _forget(self) -> None:
        columns = self._fits_size.shape[1]
        self._ids: dict[NodeState, int] = {}
        self._rows = Rows(
            np.zeros(0, np.int64), np.zeros(0, np.int64),
            np.zeros((0, columns), np.int64), np.zeros((0, columns)), np.zeros((0, columns)),
        )  # fmt: skip
        self._now = np.zeros(0)
        self._losses: dict[PodRequest, dict[NodeState, Loss | None]] = {}

    def losses(self, states: Sequence[NodeState], kind: PodRequest) -> list[Loss | None]:
        """What placing one request costs in each state; None if it does not fit."""
        if len(self._ids) > MAX_REMEMBERED_STATES:
            self._forget()
        known = self._losses.setdefault(kind, {})
        new = [state for state in dict.fromkeys(states) if state not in known]
        if new:
            known.update(zip(new, self._rank(new, kind), strict=True))
        return [known[state] for state in states]

    def _enter(self, states: Sequence[NodeState]) -> Ints:
        """Row numbers of the states; unknown states are added."""
        new = [state for state in dict.fromkeys(states) if state not in self._ids]
        if new:
            first = len(self._ids)
            rows, old = self._described(new), self._rows
            need = first + len(new)
            if need > len(self._now):
                more = max(need, 2 * len(self._now)) - first
                self._rows = Rows(
                    _longer(old.cpu_m, first, more), _longer(old.model, first, more),
                    _longer(old.count, first, more), _longer(old.amount, first, more),
                    _longer(old.value, first, more),
                )  # fmt: skip
                self._now = _longer(self._now, first, more)
            for name in Rows.__slots__:
                getattr(self._rows, name)[first:need] = getattr(rows, name)
            self._now[first:need] = self.worth(rows)
            self._ids.update(zip(new, range(first, need), strict=True))
        ids = self._ids
        return np.array([ids[state] for state in states], dtype=np.int64)

    def _described(self, states: Sequence[NodeState]) -> Rows:
        whole = np.array([state[2] for state in states], dtype=np.int64)[:, None]
        count = whole * self._fits_size[WHOLE]
        amount = whole * self._amount_of[WHOLE]
        value = whole * self._value_of[WHOLE]
        most = max(len(state[3]) for state in states)
        if most:
            parts = [[*state[3], *([0] * (most - len(state[3])))] for state in states]
            size = np.array(parts, dtype=np.int64) // GRAIN
            count = count + self._fits_size[size].sum(axis=1)
            amount = amount + self._amount_of[size].sum(axis=1)
            value = value + self._value_of[size].sum(axis=1)
        return Rows(
            np.array([state[1] for state in states], dtype=np.int64),
            np.array([state[0] for state in states], dtype=np.int64),
            count,
            amount,
            value,
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
        enough = np.where(to_fill <= cpu, 1.0, cpu / np.maximum(to_fill, 1.0))
        good = self._weight * enough * rows.value[:, self._column]
        total: Floats = np.where(served, good, 0.0).sum(axis=1)
        return total

    def steps(self, loss: Floats, request: PodRequest) -> Floats:
        """Losses in steps; lower is better. (Rounded first: sums differ in the last digits.)"""
        return np.rint(np.round(loss, 6) / STEP)

    def _rank(self, states: Sequence[NodeState], kind: PodRequest) -> list[Loss | None]:
        allowed = [not kind.models or model in kind.models for model in self._models]
        found: list[Loss | None] = [None] * len(states)
        share = kind.devices == 1 and kind.each_m < 1000
        at: list[int] = []
        sizes: list[int] = []
        for row, (model, cpu_m, whole, parts) in enumerate(states):
            if cpu_m < kind.cpu_m or (kind.devices and not allowed[model]):
                continue
            if share:
                for size in dict.fromkeys(parts):
                    if size >= kind.share_m:
                        at.append(row)
                        sizes.append(size)
            if whole >= kind.devices:
                at.append(row)
                sizes.append(1000)
        if not at:
            return found
        ids = self._enter([states[row] for row in at])
        after = self._after(ids, kind, np.array(sizes, dtype=np.int64) // GRAIN)
        loss = self.steps(self._now[ids] - self.worth(after), kind).tolist()
        for row, size, steps in zip(at, sizes, loss, strict=True):
            best = found[row]
            if best is None or steps < best[0]:
                found[row] = (steps, size if share else 0)
        return found

    def _after(self, ids: Ints, kind: PodRequest, size: Ints) -> Rows:
        """These states after one request has used fragments of this size."""
        known, devices = self._rows, kind.devices
        count, amount, value = known.count[ids], known.amount[ids], known.value[ids]
        if devices:
            left = np.maximum(size - -(-kind.each_m // GRAIN), 0)
            count = count - devices * (self._fits_size[size] * 1 - self._fits_size[left])
            amount = amount - devices * (self._amount_of[size] - self._amount_of[left])
            value = value - devices * (self._value_of[size] - self._value_of[left])
        return Rows(known.cpu_m[ids] - kind.cpu_m, known.model[ids], count, amount, value)


def _longer(array: NDArray[T], used: int, more: int) -> NDArray[T]:
    return np.concatenate([array[:used], np.zeros((more, *array.shape[1:]), array.dtype)])
