"""The parts of a simulated queue, and two small answers: fair shares, and whom to stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EPS = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class RunOption:
    """One way to run: this many pods of this size in this pool."""

    pool: int
    per_pod_m: int
    pods: int
    units: float
    """In exchange-rate units, all pods."""


@dataclass(frozen=True, slots=True, eq=False)
class QueueRequest:
    """What jobs of one kind request; options best first. One object per kind: they are compared by identity."""

    options: tuple[RunOption, ...]
    accelerators_m: int
    priority: int = 100
    serving: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """A tenant as the queue sees it."""

    weight: float
    floor: float
    """Guaranteed, in units."""
    limit: float
    """Ceiling, in units."""


@dataclass(slots=True)
class QueuedJob:
    """A job in a future."""

    tenant: int
    request: QueueRequest
    submitted_at_s: float
    left_s: float
    option: RunOption | None = None
    nodes: tuple[int, ...] = ()
    """Where it runs; -1: on an unknown node."""
    started_at_s: float = 0.0
    preemptions: int = 0
    preemptible: bool = True
    ends_at_s: float = 0.0
    number: int = 0
    """Distinguishes its runs."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The parts of the policy that matter here."""

    lateness_s: float
    min_run_s: float
    max_preemptions: int
    churn: float
    min_disruption_budget: int
    restart_s: float


@dataclass(frozen=True)
class QueueStart:
    """The queue at the moment the futures begin. `free` is per pool and node; -1: nothing may start there."""

    now: float
    free: tuple[tuple[int, ...], ...]
    capacity: float
    """All pools, in units."""
    shares: tuple[Share, ...]
    rules: Rules


Arrival = tuple[float, int, QueueRequest, float]
"""Time, tenant, request, and how long it will run."""


def fair_shares(demand: Sequence[float], shares: Sequence[Share], capacity: float) -> list[float]:
    """Weighted max-min under demand and ceilings; no tenant below its guarantee, as far as it requests it."""
    want = [min(amount, share.limit) for amount, share in zip(demand, shares, strict=True)]
    if any(share.floor > 0 for share in shares):
        return _with_floors(want, shares, capacity)
    got = [0.0] * len(want)
    active = sorted((i for i, a in enumerate(want) if a > EPS), key=lambda i: want[i] / shares[i].weight)
    left, weights = capacity, sum(shares[i].weight for i in active)
    for i in active:
        got[i] = min(want[i], max(0.0, left) * shares[i].weight / weights)
        left -= got[i]
        weights -= shares[i].weight
        if weights <= 0:
            break
    return got


def _with_floors(want: Sequence[float], shares: Sequence[Share], capacity: float) -> list[float]:
    """The level at which min(demand, max(guarantee, level x weight)) just fills the capacity."""

    def at(level: float) -> list[float]:
        return [min(w, max(s.floor, level * s.weight)) for w, s in zip(want, shares, strict=True)]

    low, high = 0.0, max(capacity, 1.0) / min(share.weight for share in shares)
    if sum(at(high)) <= capacity:
        return at(high)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(at(middle)) <= capacity else (low, middle)
    return at(low)


def cheapest(row: list[int], on: dict[int, list[QueuedJob]], option: RunOption) -> list[QueuedJob] | None:
    """Victims whose end makes room for all pods: node by node, fewest units per pod gained."""
    ask = option.per_pod_m
    missing = option.pods - sum([amount // ask for amount in row if amount >= ask])
    offers: list[tuple[float, int, int, list[QueuedJob]]] = []
    for node, jobs in on.items():
        free, cost, taken = max(row[node], 0), 0.0, []
        base = free // ask
        for job in jobs:
            assert job.option is not None
            free += job.option.per_pod_m * (1 if len(job.nodes) == 1 else job.nodes.count(node))
            cost += job.option.units
            taken.append(job)
            gained = free // ask - base
            if gained > 0:
                offers.append((cost / gained, node, gained, list(taken)))
                break
    offers.sort(key=lambda offer: offer[:2])
    chosen: dict[int, QueuedJob] = {}
    for _, _, gained, jobs in offers:
        if missing <= 0:
            break
        chosen |= {id(job): job for job in jobs}
        missing -= gained
    return list(chosen.values()) if missing <= 0 else None
