"""Building blocks of scenarios: bars, clusters, jobs, streams, and readings of the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from benchmarks.scheduling.replay import ROUND_S, Arrival, Outcome, Situation

from busbar.scheduler import (
    Cell,
    Job,
    JobId,
    JobKind,
    Node,
    PerformanceTable,
    Placement,
    Policy,
    Pool,
    Rate,
    Resources,
    Run,
    Snapshot,
    Tenant,
)

Value = float | str | bool
H = 3600.0
MIN_RUN_S = Policy().min_run_s


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar on a value."""

    kind: Literal["at most", "at least", "exactly"]
    value: Value

    def met(self, found: Value) -> bool:
        if self.kind == "exactly":
            return found == self.value
        assert not isinstance(found, str)
        assert not isinstance(self.value, str)
        return found <= self.value + 1e-9 if self.kind == "at most" else found >= self.value - 1e-9


@dataclass(frozen=True, slots=True)
class Scenario:
    """One row."""

    name: str
    promise: str
    """The rule that the row is an example of."""
    why: str
    """The derivation of the expected value."""
    bar: Bar
    unit: str
    situation: Situation
    read: Callable[[Outcome], Value]
    neighbour: bool = False


def at_most(value: float) -> Bar:
    return Bar("at most", value)


def at_least(value: float) -> Bar:
    return Bar("at least", value)


def exactly(value: Value) -> Bar:
    return Bar("exactly", value)


# Clusters and jobs


def cluster(
    nodes: dict[str, int],
    *tenants: Tenant,
    size: int = 8,
    speeds: dict[str, dict[str, float]] | None = None,
    cells: tuple[Cell, ...] = (),
    racks: int = 0,
    memory_mib: int = 0,
) -> Snapshot:
    """One pool per type, of so many nodes.

    Args:
        speeds: by workload class and type; the exchange rates are those of the class "train".
        racks: nodes of one rack; 0: no topology.
    """
    speeds = speeds or {"train": dict.fromkeys(nodes, 1.0)}
    found = tuple(
        Cell(name, kind, 1000, speed=speed) for name, row in speeds.items() for kind, speed in row.items()
    )
    rates = speeds.get("train", dict.fromkeys(nodes, 1.0))
    return Snapshot(
        pools=tuple(Pool(kind.lower(), kind, memory_mib=memory_mib) for kind in nodes),
        nodes=tuple(
            Node(
                _node(kind, i),
                kind.lower(),
                Resources(1000 * size, 64_000, 524_288),
                topology=(f"rack-{i // racks}",) if racks else (),
            )
            for kind, count in nodes.items()
            for i in range(count)
        ),
        tenants=tenants or (Tenant("a"),),
        table=PerformanceTable(found + cells, tuple(Rate(kind, rates[kind]) for kind in nodes)),
    )


def _node(kind: str, i: int) -> str:
    return f"{kind.lower()}-{i}"


def job(
    name: str,
    hours: float,
    *,
    gpus: int = 1,
    pods: int = 1,
    most: int | None = None,
    at: float = 0.0,
    tenant: str = "a",
    user: str = "",
    kind: JobKind = JobKind.TRAINING,
    workload: str = "train",
    priority: int = 100,
    on: tuple[str, list[int]] | None = None,
    since: float = -7200.0,
    accelerators: tuple[str, ...] = (),
    preemptible: bool = True,
    domain: int | None = None,
    modes: tuple[str, ...] = ("resident",),
    cpu_m: int = 1000,
) -> Arrival:
    """`pods` pods of `gpus` accelerators each, up to `most` if elastic, arriving at `at` seconds.

    Args:
        on: type and nodes (one per pod) where it runs at the start of the replay, since `since`.
    """
    per_pod = Resources(1000 * gpus, cpu_m, 1024)
    run = None
    if on is not None:
        of, where = on
        names = tuple(_node(of, i) for i in where)
        run = Run(Placement(of.lower(), of, modes[0], names, per_pod), since, 0.0)
        at = since
    return Arrival(
        Job(
            JobId(name), name, "ns-" + tenant, tenant, kind, user, workload, pods, most or pods, per_pod,
            accelerators, (), modes, priority=priority, preemptible=preemptible, required_domain=domain,
            submitted_at_s=at, run=run, attained_s=0.0 if run is None else -since * gpus * len(run.placement.nodes),
        ),
        hours,
    )  # fmt: skip


def stream(
    load: float,
    capacity: int,
    hours: float,
    *,
    gpus: int = 4,
    lengths_h: tuple[float, ...] = (1.0,),
    tenant: str = "a",
    priority: int = 100,
) -> tuple[Arrival, ...]:
    """Jobs that offer this fraction of the capacity as load; their lengths alternate."""
    gap_s = sum(lengths_h) / len(lengths_h) * H * gpus / (load * capacity)
    return tuple(
        job(
            f"s{i:04d}",
            lengths_h[i % len(lengths_h)],
            gpus=gpus,
            at=i * gap_s,
            tenant=tenant,
            priority=priority,
        )
        for i in range(int(hours * H / gap_s))
    )


MIXED_H = (0.1, 0.5, 0.2, 0.6, 0.3, 0.4, 0.23)
"""Lengths with which recently started jobs are spread over all nodes."""


def wait_h(name: str) -> Callable[[Outcome], Value]:
    return lambda outcome: outcome.wait_s(name) / H


def wait_s(name: str) -> Callable[[Outcome], Value]:
    return lambda outcome: outcome.wait_s(name)


def pods(name: str) -> Callable[[Outcome], Value]:
    return lambda outcome: outcome.pods(name)


def on(name: str) -> Callable[[Outcome], Value]:
    return lambda outcome: outcome.accelerator(name)


def moves(outcome: Outcome) -> Value:
    return sum(outcome.moves.values())


TWO = (Tenant("a"), Tenant("b"))
"""Tenants of equal weight."""
PROMPT_S = MIN_RUN_S + 2 * ROUND_S
"""Limit on the wait for a guarantee: the last victim runs `min_run_s`, the next full plan stops it, and one more round
for the arrival itself."""
