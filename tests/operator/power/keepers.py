"""PowerKeepers of tests: they write nothing, and time is the test's."""

from __future__ import annotations

from typing import Any, cast

from prometheus_client import CollectorRegistry
from tests.operator.builders import SETTINGS

from busbar.operator.metrics import Metrics
from busbar.operator.power.keeper import PowerKeeper
from busbar.operator.power.metrics import PowerMetrics
from busbar.operator.queue.controller import Controller
from busbar.operator.watch.caches import Caches
from busbar.operator.write.writer import Writer


def keeper_of(
    caches: Caches, clock: list[float], metrics: PowerMetrics | None = None, **fields: Any
) -> PowerKeeper:
    """`clock` has one item, the time now."""
    return PowerKeeper(
        caches,
        cast(Writer, None),
        Controller(Metrics(), workers=1),
        SETTINGS,
        metrics or PowerMetrics(CollectorRegistry()),
        clock=lambda: clock[0],
        **fields,
    )
