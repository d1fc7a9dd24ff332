"""Does every tenant get its share of the work? Three to ten tenants with a backlog that never ends.

A node of a fast type and a node of a slow one for each tenant, of eight accelerators. The first tenant comes alone and takes everything; the
others follow within the first hour. On the fast type a job is up to 1, 3, 10 or 20 times as fast as on the slow one: of
the first tenant least, of the last one most. Jobs have one or two accelerators and last one to six hours on the
fast type; their lengths are known. A tenant's entitlement is the work that its jobs would do with an equal part of each
type, which an exchange can only improve.

A row is one number of tenants and one ratio. From the second hour on it gives the least work of any tenant in any hour
as a part of its entitlement (bar: 0.95), how often a tenant was below that, the moves per job that ran (bar: 2), and
whether at the end any tenant would do more work with the places of another less the best of its jobs (envy).
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from benchmarks.progress import shown
from benchmarks.scheduling.replay import Arrival, Outcome, Situation, replay
from benchmarks.scheduling.scenario_parts import cluster, job

from busbar.scheduler import Cell, Tenant

KINDS = ("fast", "slow")
PER_NODE = 8
TENANTS = (3, 5, 10)
RATIOS = (1.0, 3.0, 10.0, 20.0)
HOURS = 6
LEAST_SHARE = 0.95
MOST_MOVES = 2.0
SIZES = (1, 2)
BACKLOG = 2.5
"""Work offered by each tenant, in multiples of its share."""


def speeds(tenants: int, ratio: float) -> dict[str, float]:
    """How many times as fast each tenant's jobs are on the fast type."""
    return {f"t{i}": ratio ** ((i + 1) / tenants) for i in range(tenants)}


def situation(tenants: int, ratio: float, seed: int = 1) -> Situation:
    """One replay."""
    random = Random(seed)
    by_tenant = speeds(tenants, ratio)
    table = {name: {"fast": fast, "slow": 1.0} for name, fast in by_tenant.items()}
    table["train"] = {"fast": ratio**0.5, "slow": 1.0}  # the exchange rates
    larger = tuple(
        Cell(name, kind, 1000 * gpus, speed=gpus * speed)
        for name, row in table.items()
        for kind, speed in row.items()
        for gpus in SIZES[1:]
    )
    base = cluster(
        dict.fromkeys(KINDS, tenants), *(Tenant(name) for name in by_tenant), speeds=table, cells=larger
    )
    coming: list[Arrival] = []
    for number, name in enumerate(by_tenant):
        offered, i = 0.0, 0
        while offered < BACKLOG * HOURS * PER_NODE * len(KINDS):
            gpus, hours = random.choice(SIZES), random.uniform(1, 6)
            at = 3600.0 * number / tenants
            coming.append(job(f"{name}-{i:03d}", hours, gpus=gpus, at=at, tenant=name, workload=name))
            offered, i = offered + gpus * hours, i + 1
    return Situation(base, tuple(coming), HOURS)


def rows() -> list[dict[str, Any]]:
    """One row per number of tenants and ratio."""
    return list(shown("work shares", _measured()))


def _measured() -> Iterator[tuple[float, dict[str, Any]]]:
    cases = [(tenants, ratio) for tenants in TENANTS for ratio in RATIOS]
    for number, (tenants, ratio) in enumerate(cases, 1):
        yield number / len(cases), _row(tenants, ratio, replay(situation(tenants, ratio)))


def _row(tenants: int, ratio: float, found: Outcome) -> dict[str, Any]:
    fast = speeds(tenants, ratio)
    entitled = {name: PER_NODE * (fast[name] + 1.0) for name in fast}
    parts = {
        (name, hour): found.work(name, hour, hour + 1) / entitled[name]
        for name in fast
        for hour in range(1, HOURS)
    }
    moves = sum(found.moves.values()) / max(len(found.first_start_s), 1)
    envious = _envious(found, fast)
    least = min(parts.values())
    below = [
        f"{name} in hour {hour}: {part:.2f}" for (name, hour), part in parts.items() if part < LEAST_SHARE
    ]
    return {
        "tenants": tenants,
        "ratio": ratio,
        "least_part": round(least, 3),
        "mean_part": round(sum(parts.values()) / len(parts), 3),
        "below": below,
        "hours": len(parts),
        "moves_per_job": round(moves, 3),
        "envious": envious,
        "met": least >= LEAST_SHARE and moves <= MOST_MOVES and not envious,
    }


def _envious(found: Outcome, fast: dict[str, float]) -> list[str]:
    """Tenants that would do more with the places of another, less the one that is worth most to them."""
    places: dict[str, list[tuple[str, float]]] = {name: [] for name in fast}
    for name, place in found.placements.items():
        if place is not None:
            places[name.partition("-")[0]].append((place.accelerator, place.accelerators_m / 1000))

    def worth(name: str, of: list[tuple[str, float]]) -> list[float]:
        return [gpus * (fast[name] if kind == "fast" else 1.0) for kind, gpus in of]

    return [
        f"{name} of {other}"
        for name, own in places.items()
        for other, theirs in places.items()
        if other != name
        and sum(w := worth(name, theirs)) - max(w, default=0.0) > sum(worth(name, own)) + 1e-9
    ]
