"""Measured speeds in job statuses update the performance table, within the limits of what is credible."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from tests.operator.builders import ENGINE, NOW, job, pool, tenant

from busbar.kube.types import TrainingJob
from busbar.operator.profiles.speeds import speed_report
from busbar.operator.profiles.table import performance_table, workload
from busbar.operator.scheduling.snapshot import ClusterObjects, build
from busbar.scheduler import Cell, PerformanceTable, Snapshot, Source
from busbar.scheduler.model.table import Conduct, Fault, TableView
from busbar.scheduler.performance.learning import quarantined

CONFIG = {
    "model_type": "llama",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 2048,
}
STEPS = 200_000
POOLS = (
    pool("a100", accelerator="A100", resourceName="nvidia.com/gpu"),
    pool("v100", accelerator="V100", resourceName="nvidia.com/gpu"),
)
TENANTS = {"team": "team"}


def ran(
    speed: float,
    name: str = "job",
    on: str = "A100",
    phase: str = "Running",
    ours: bool | None = True,
    **status: Any,
) -> TrainingJob:
    """A job that reports its speed; ``ours`` None: its status was written before images were checked."""
    engine = {**ENGINE, "model": {"config": CONFIG}, "steps": STEPS, "mode": "resident"}
    admission = {
        "id": "x", "pool": on.lower(), "accelerator": on, "mode": "resident", "pods": 1, "nodes": ["n"],
        "startedAt": NOW.isoformat(), "image": None if ours is None else {"verified": ours},
    }  # fmt: skip
    progress = {"step": 5, "totalSteps": STEPS, "tokensPerSecond": speed, "tokens": 100}
    return job(
        name,
        engine=engine,
        status={"phase": phase, "attempt": 1, "admission": admission, "progress": progress, **status},
    )


def done(speed: float, seconds: float, **more: Any) -> TrainingJob:
    end = (NOW + timedelta(seconds=seconds)).isoformat()
    return ran(speed, phase="Succeeded", completionTime=end, **more)


def speed_of(table: PerformanceTable, kind: str, cells: str = "learned") -> float:
    found: list[Cell] = [c for c in getattr(table, cells) if (c.accelerator, c.mode) == (kind, "resident")]
    assert len(found) == 1
    return found[0].speed


def tokens() -> float:
    found = workload(ran(1.0)).remaining(0)
    assert found is not None
    return found


@pytest.fixture
def formula() -> PerformanceTable:
    silent = ran(1.0).model_copy(update={"status": None})
    return performance_table((silent,), POOLS, TENANTS)


def test_without_reports_the_table_is_the_formulas(formula: PerformanceTable) -> None:
    assert not formula.learned
    assert not formula.records
    assert {c.source for c in formula.cells} == {Source.FORMULA}


def test_a_running_jobs_speed_moves_its_cell_and_the_type_where_it_never_ran(
    formula: PerformanceTable,
) -> None:
    half = speed_of(formula, "A100", "cells") * 0.5
    table = performance_table((ran(half),), POOLS, TENANTS)
    assert speed_of(table, "A100") < 0.75 * speed_of(formula, "A100", "cells")
    assert speed_of(table, "V100") < 0.95 * speed_of(formula, "V100", "cells")
    assert {c.accelerator: c.source for c in table.learned} == {"A100": Source.MEASURED, "V100": Source.RATIO}


def test_a_restarted_operator_reads_the_same_table_back(formula: PerformanceTable) -> None:
    seen = ClusterObjects(jobs=(ran(20_000.0),), pools=POOLS, tenants=(tenant("team", ["team"]),))
    first, second = build(seen, NOW), build(seen, NOW)
    assert first.table.learned
    assert first.table == second.table == Snapshot.from_json(first.to_json()).table
    assert first.table.records[0].tenant == "team"


def test_a_poll_that_says_nearly_the_same_changes_nothing() -> None:
    tables = [performance_table((ran(20_000.0 * (1 + off)),), POOLS, TENANTS) for off in (0.0, 0.001)]
    assert tables[0] == tables[1]


def test_a_finished_job_is_believed_where_the_clock_agrees(formula: PerformanceTable) -> None:
    speed = speed_of(formula, "A100", "cells") * 0.4
    table = performance_table((done(speed, tokens() / speed + 60),), POOLS, TENANTS)
    assert [r.verified for r in table.records] == [True]
    assert table.conduct == (Conduct("team", passed=1),)
    unverified = performance_table((ran(speed),), POOLS, TENANTS)
    assert (
        abs(math.log(speed_of(table, "A100") / speed))
        < abs(math.log(speed_of(unverified, "A100") / speed)) + 0.05
    )


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_finished_job_that_the_clock_contradicts_is_quarantined(
    formula: PerformanceTable, factor: float
) -> None:
    true = speed_of(formula, "A100", "cells")
    seconds = tokens() / true
    assert seconds > 3600
    liar = done(true * factor, seconds)
    table = performance_table((liar, ran(true * 0.8, name="next")), POOLS, TENANTS)
    assert {r.fault for r in quarantined(table)} == {Fault.COUNTERS, Fault.DISTRUSTED}
    silent = next(c for c in table.learned if (c.accelerator, c.mode) == ("A100", "resident"))
    assert silent.source is Source.RATIO
    assert silent.low is not None
    assert silent.high is not None
    assert math.sqrt(silent.low * silent.high) == pytest.approx(true, rel=0.01)  # the formula's value


def test_a_run_too_short_or_in_several_attempts_proves_nothing() -> None:
    for of in (done(5e7, 500), done(20_000.0, 1e6, attempt=2)):
        assert performance_table((of,), POOLS, TENANTS).conduct == ()


def test_a_speed_beyond_the_hardware_is_quarantined(formula: PerformanceTable) -> None:
    limit = next(c.limit for c in formula.cells if c.accelerator == "A100" and c.mode == "resident")
    table = performance_table((ran(limit * 1.1),), POOLS, TENANTS)
    assert [r.fault for r in quarantined(table)] == [Fault.IMPOSSIBLE]


# -- whose image reported it -------------------------------------------------------------------------------


def seen_by(table: PerformanceTable, tenant_name: str, kind: str = "A100") -> float:
    load = workload(ran(1.0))
    found = TableView(table).estimate(load.workload_class, kind, "resident", 1000, tenant_name)
    assert found is not None
    return found.speed


@pytest.mark.parametrize("ours", [False, None])
@pytest.mark.parametrize("ends", [False, True])
def test_what_another_image_says_moves_its_tenants_cells_and_nobody_elses(
    formula: PerformanceTable, ours: bool | None, ends: bool
) -> None:
    speed = speed_of(formula, "A100", "cells") * 0.5
    of = done(speed, tokens() / speed + 60, ours=ours) if ends else ran(speed, ours=ours)
    waits = ran(1.0, name="next").model_copy(update={"status": None})
    table = performance_table((of, waits), POOLS, TENANTS)
    assert (table.records, table.conduct, table.cells) == ((), (), formula.cells)
    assert {c.tenant for c in table.learned} == {"team"}
    for kind in ("A100", "V100"):
        assert seen_by(table, "others", kind) == seen_by(formula, "others", kind)
        assert seen_by(table, "team", kind) < 0.95 * seen_by(formula, "team", kind)


def test_what_another_image_says_is_bounded_as_any_word_and_teaches_no_ratio(
    formula: PerformanceTable,
) -> None:
    true = speed_of(formula, "A100", "cells")
    shared = performance_table((ran(true * 0.8),), POOLS, TENANTS)
    for wild in (true * 100, true / 100):
        table = performance_table((ran(true * 0.8), ran(wild, name="own", ours=False)), POOLS, TENANTS)
        assert table.records == shared.records
        assert [c for c in table.learned if not c.tenant] == list(shared.learned)
        assert seen_by(table, "team") == seen_by(shared, "team")


def test_a_run_that_the_clock_contradicts_gives_its_tenant_nothing_either(formula: PerformanceTable) -> None:
    true = speed_of(formula, "A100", "cells")
    table = performance_table((done(true * 2, tokens() / true, ours=False),), POOLS, TENANTS)
    assert table.learned == ()


def test_private_cells_are_read_back_from_a_snapshot() -> None:
    seen = ClusterObjects(jobs=(ran(20_000.0, ours=False),), pools=POOLS, tenants=(tenant("team", ["team"]),))
    first = build(seen, NOW)
    assert {c.tenant for c in first.table.learned} == {"team"}
    assert Snapshot.from_json(first.to_json()).table == first.table == build(seen, NOW).table


def drew(watts: float | None, seconds: float = 3600.0, **status: Any) -> TrainingJob:
    """A job of one accelerator that the ledger has charged with so many watts on average."""
    silent = ran(1.0).model_copy(update={"status": None})
    speed = speed_of(performance_table((silent,), POOLS, TENANTS), "A100", "cells") / 2
    joules = None if watts is None else watts * seconds
    return ran(speed, usage={"acceleratorSeconds": seconds, "energyJoules": joules}, **status)


def watts_of(table: PerformanceTable, kind: str) -> float:
    found = TableView(table).estimate(table.learned[0].workload_class, kind, "resident", 1000)
    assert found is not None
    return found.watts


def test_what_the_meters_say_replaces_the_nameplate_where_the_job_ran_and_nowhere_else() -> None:
    nameplate = performance_table((drew(None),), POOLS, TENANTS)
    table = performance_table((drew(251.0),), POOLS, TENANTS)
    assert watts_of(nameplate, "A100") == 400.0
    assert 251.0 <= watts_of(table, "A100") <= 251.0 * 1.06
    assert watts_of(table, "V100") == watts_of(nameplate, "V100")


@pytest.mark.parametrize(
    "job_",
    [
        pytest.param(drew(251.0, seconds=500.0), id="too short"),
        pytest.param(drew(251.0, attempt=2), id="perhaps on other boards before"),
        pytest.param(drew(60.0), id="no more than an idle board"),
        pytest.param(drew(601.0), id="more than the board can draw"),
        pytest.param(drew(0.0), id="nothing"),
    ],
)
def test_joules_that_cannot_be_those_of_its_boards_say_nothing(job_: TrainingJob) -> None:
    assert watts_of(performance_table((job_,), POOLS, TENANTS), "A100") == 400.0


def test_of_several_jobs_the_one_that_drew_most_counts() -> None:
    jobs = (drew(300.0, name="a"), drew(220.0, name="b"), drew(None, name="c"))
    for order in (jobs, jobs[::-1]):
        assert 300.0 <= watts_of(performance_table(order, POOLS, TENANTS), "A100") <= 320.0


def test_a_run_under_a_power_cap_teaches_the_cell_of_that_cap_and_nothing_once_it_was_lifted() -> None:
    def under(**admission: Any) -> TrainingJob:
        of = ran(500.0)
        assert of.status is not None
        assert of.status.admission is not None
        place = of.status.admission.model_copy(update=admission)
        return of.model_copy(update={"status": of.status.model_copy(update={"admission": place})})

    found = speed_report(under(power_cap_percent=70), "x", tokens(), "team")
    assert found is not None
    assert found.record.power_cap == 0.7
    assert speed_report(under(power_cap_percent=85, power_cap_changed_at=NOW), "x", tokens(), "team") is None
    assert speed_report(under(power_cap_changed_at=NOW), "x", tokens(), "team") is None


def test_a_speed_under_limits_counts_as_it_would_be_without_them() -> None:
    def read(**power: Any) -> float | None:
        made = ran(1000.0, power={"attempt": 1, "seconds": 900, **power})
        found = speed_report(made, "class", tokens(), "team")
        return None if found is None else math.exp(found.record.log_mean)

    plain = speed_report(ran(1000.0), "class", tokens(), "team")
    assert plain is not None
    without = math.exp(plain.record.log_mean)
    assert read(slowdown=1.2) == pytest.approx(1.2 * without, rel=0.05)
    assert read(slowdown=1.0) == without
    assert read(slowdown=1.2, attempt=7) == without
    assert read(slowdown=1.3) is None


def test_what_limits_cost_is_no_contradiction_between_speed_and_time() -> None:
    seconds = tokens() / 1000.0
    slowed = done(1000.0, seconds, power={"attempt": 1, "seconds": 900, "slowdown": 1.2})
    found = speed_report(slowed, "class", tokens(), "team")
    assert found is not None
    assert found.agrees
