"""Which reported speeds are accepted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.scheduler import PerformanceTable, Policy, Snapshot, Source
from busbar.scheduler.fit import BatchShape, ModelShape, prior
from busbar.scheduler.model.table import Fault
from busbar.scheduler.performance.learning import learn, quarantined
from busbar.scheduler.performance.reports import absorb, contradicted, distrusted, overstated, settle
from busbar.scheduler.search.state import PlanningState

from ..build import NOW
from ..strategies import snapshots
from ..tables import KNOWN, RATES, cell, report, told

quiet = settings(max_examples=40, deadline=None, derandomize=True)


def test_a_speed_beyond_the_hardware_is_quarantined_and_shown() -> None:
    model, batch = ModelShape("llama", 12, 768, 2048, 12, 12, 64, 32000), BatchShape(32, 512, 4)
    start = prior(model, batch, "resident", "H100", name="m")
    assert start.limit > start.speed
    table = learn(PerformanceTable((start,), RATES))
    after = told(table, report(start.limit * 1.01, name="m", trusted=True))
    assert [(r.fault, r.tenant) for r in quarantined(after)] == [(Fault.IMPOSSIBLE, "a")]
    assert after.learned == table.learned
    for odd in (math.inf, math.nan, 0.0, -1.0):
        assert told(table, report(odd, name="m")).learned == table.learned


@quiet
@given(st.sampled_from((0.2, 0.4, 2.5, 6.0)), st.sampled_from(("H100", "L4")))
def test_a_report_far_outside_the_interval_changes_nothing(factor: float, kind: str) -> None:
    lie = report(cell(KNOWN, kind).speed * factor, kind)
    after = told(KNOWN, lie)
    assert [r.fault for r in quarantined(after)] == [Fault.OUTSIDE]
    assert after.learned == KNOWN.learned


@quiet
@given(st.floats(0.5, 2.0))
def test_a_tenants_report_counts_inside_the_interval_only(factor: float) -> None:
    start = cell(KNOWN, "V100")
    table = KNOWN
    for number in range(20):
        table = told(table, report(start.speed * factor, "V100", job=f"j{number}"))
    after = cell(table, "V100")
    assert start.low is not None
    assert start.high is not None
    assert start.low * 0.97 <= after.speed <= start.high * 1.03


def test_a_consistent_job_is_believed_and_an_inconsistent_one_discredits_its_tenant() -> None:
    speed = cell(KNOWN, "V100").speed
    true = absorb(KNOWN, [report(speed * 1.4, "V100", total_work=speed * 1.4 * 3000) for _ in range(10)])
    honest = learn(settle(true, "j", speed * 1.4 * 3000))
    assert honest.conduct[0].passed == 1
    assert [r.verified for r in honest.records] == [True]
    assert cell(honest, "V100").speed == pytest.approx(speed * 1.4, rel=0.05)

    lie = learn(settle(true, "j", speed * 3000))
    assert distrusted(lie) == {"a"}
    assert [r.fault for r in quarantined(lie)] == [Fault.COUNTERS]
    assert lie.learned == KNOWN.learned
    again = told(lie, report(speed * 0.8, "V100", job="k"))
    assert Fault.DISTRUSTED in {r.fault for r in quarantined(again)}
    assert again.learned == KNOWN.learned
    other = told(lie, report(speed * 0.8, "V100", job="k", tenant="b"))
    assert cell(other, "V100").speed < speed


def test_a_job_cannot_claim_more_work_than_it_has() -> None:
    table = KNOWN
    for _ in range(10):
        table = absorb(table, [report(60.0, total_work=15 * 3000.0)])
    assert contradicted(table, "j")
    assert learn(table).learned == KNOWN.learned
    assert not distrusted(table)
    assert distrusted(settle(table, "j", 15 * 3000.0)) == {"a"}


def test_progress_counts_at_most_at_the_high_quantile() -> None:
    table = told(KNOWN, report(60.0, total_work=1e6))
    high = cell(KNOWN, "H100").high
    assert high is not None
    assert overstated(table, "j") == pytest.approx((60.0 - high) * 300.0)
    assert overstated(told(KNOWN, report(30.0)), "j") == 0.0


@quiet
@given(snapshots(), st.lists(st.floats(0.1, 10.0), min_size=3, max_size=3))
def test_what_a_tenant_reports_never_changes_what_it_is_entitled_to(
    snapshot: Snapshot, factors: list[float]
) -> None:
    cells = tuple(replace(c, source=Source.MEASURED, samples=1) for c in snapshot.table.cells)
    snapshot = replace(snapshot, table=learn(replace(snapshot.table, cells=cells)))
    lies = [
        report(c.speed * factors[i % 3], c.accelerator, c.workload_class, f"j{i}")
        for i, c in enumerate(cells)
    ]
    after = replace(snapshot, table=told(snapshot.table, *lies))
    entitled = [PlanningState(s, Policy(), NOW).holdings.entitled for s in (snapshot, after)]
    assert entitled[0] == entitled[1]
