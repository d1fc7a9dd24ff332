"""Small performance tables and reports for tests."""

from __future__ import annotations

import math

from busbar.scheduler import Cell, PerformanceTable, Rate, Source
from busbar.scheduler.performance.learning import learn
from busbar.scheduler.performance.reports import Report, absorb

KINDS = ("H100", "L4", "V100")
RATES = tuple(Rate(kind, rate) for kind, rate in zip(KINDS, (3.0, 0.5, 1.0), strict=True))


def report(speed: float, kind: str = "H100", name: str = "x", job: str = "j", **more: object) -> Report:
    fields = {"tenant": "a", "accelerators_m": 1000, "seconds": 300.0} | more
    return Report(job=job, workload_class=name, accelerator=kind, speed=speed, **fields)  # type: ignore[arg-type]


def told(table: PerformanceTable, *reports: Report) -> PerformanceTable:
    return learn(absorb(table, reports))


def cell(table: PerformanceTable, kind: str, name: str = "x", tenant: str = "") -> Cell:
    return next(
        c for c in table.learned if (c.workload_class, c.accelerator, c.tenant) == (name, kind, tenant)
    )


def width(found: Cell) -> float:
    assert found.low
    assert found.high
    return math.log(found.high / found.low)


def measured(*speeds: tuple[str, str, float], samples: int = 50) -> PerformanceTable:
    cells = tuple(
        Cell(name, kind, 1000, speed=speed, source=Source.MEASURED, samples=samples)
        for name, kind, speed in speeds
    )
    return learn(PerformanceTable(cells, RATES))


KNOWN = measured(
    ("x", "H100", 30.0), ("x", "L4", 5.0), ("y-1", "H100", 3.0), ("y-1", "L4", 0.6), ("y-2", "H100", 9.0)
)
