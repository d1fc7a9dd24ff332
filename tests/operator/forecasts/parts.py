"""Shared by the tests of forecasts: recorded forecasts, ended jobs, and a snapshot in which two jobs wait."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from tests.operator.builders import NOW, job

from busbar.kube.types import TrainingJob
from busbar.scheduler import (
    Cell,
    Job,
    JobId,
    Node,
    PerformanceTable,
    Placement,
    Pool,
    Resources,
    Run,
    Snapshot,
    Tenant,
)

T = NOW.timestamp()


def tenant_of(namespace: str) -> str:
    return {"team": "a"}.get(namespace, "")


def ended(name: str, seconds: float, at: datetime = NOW, phase: str = "Succeeded") -> TrainingJob:
    usage = {"acceleratorSeconds": seconds, "workUnits": seconds}
    return job(name, status={"phase": phase, "completionTime": at.isoformat(), "usage": usage, "attempt": 1})


def promise(made_s: float, p50_s: float, p90_s: float, started_s: float | None = None) -> dict[str, Any]:
    at = {
        "madeAt": made_s, "startP50": made_s + p50_s, "startP90": made_s + p90_s, "startedAt": started_s,
    }  # fmt: skip
    moments = {k: (NOW + timedelta(seconds=v)).isoformat() for k, v in at.items() if v is not None}
    return {**moments, "simulatedP50Seconds": p50_s, "simulatedP90Seconds": p90_s, "attempt": 0}


def full() -> Snapshot:
    """One node of eight accelerators, allocated for the next two hours; two jobs wait for all of it."""
    place = Placement("H100", "H100", "resident", ("n",), Resources(8000))
    runs = Job(
        JobId("old"), "old", "team", "a", per_pod=Resources(8000), preemptible=False, run=Run(place, T - 7200)
    )
    waits = [
        Job(
            JobId(name), name, "team", "a", per_pod=Resources(8000), submitted_at_s=T, workload_class="c",
            remaining_work=1000.0,
        )
        for name in ("x", "y")
    ]  # fmt: skip
    cells = (Cell("c", "H100", 8000, "resident", speed=10.0, low=5.0, high=20.0),)
    return Snapshot(
        (Pool("H100", "H100"),), (Node("n", "H100", Resources(8000)),), (Tenant("a"),), (runs, *waits),
        PerformanceTable(cells=cells),
    )  # fmt: skip
