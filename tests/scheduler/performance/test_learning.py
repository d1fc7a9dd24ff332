"""What the table learns from reports: calibrated, stable, and robust against false reports."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from benchmarks.scheduling.learning import coverage, hidden, run, shaped
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from busbar.scheduler import (
    Cell,
    PerformanceTable,
    Policy,
    Snapshot,
    Source,
    TableView,
    applied,
    plan,
)
from busbar.scheduler.fit import BatchShape, ModelShape, prior
from busbar.scheduler.model.events import Event, Happened, Happening
from busbar.scheduler.performance.learning import EXPLORED, STEADY, learn
from busbar.scheduler.performance.reports import add_exploration, distrusted, settle
from busbar.scheduler.performance.speed_model import DATA_SHEET_PRIOR, FORMULA_PRIOR, Observed, posterior
from busbar.scheduler.performance.speed_model import learn as covariances
from busbar.scheduler.simulate.engine import Settings, simulate
from busbar.scheduler.simulate.readers import gavel, gavel_throughputs
from busbar.scheduler.simulate.speeds import true_table
from busbar.scheduler.simulate.trace import Trace, TraceCluster

from ..build import NOW
from ..strategies import snapshots
from ..tables import KINDS, KNOWN, RATES, cell, report, told, width

DATA = Path(__file__).parents[1] / "data" / "gavel"
T1 = TraceCluster({"v100": 8, "p100": 16, "k80": 24})
quiet = settings(max_examples=40, deadline=None, derandomize=True)


# -- the tree ------------------------------------------------------------------------------------------


@quiet
@given(st.integers(0, 2**31), st.integers(1, 4))
def test_more_reports_never_widen_an_interval(seed: int, kinds: int) -> None:
    random = np.random.default_rng(seed)
    classes, families = np.array([0, 0, 1, 2, 2]), np.array([0, 1, 1])
    precision = np.asarray(random.integers(0, 3, (5, kinds)) * 50.0, np.float64)
    values = random.normal(0, 1, (5, kinds)) * (precision > 0)
    before = Observed(classes, families, values, precision)
    q = covariances(before, DATA_SHEET_PRIOR)
    extra = np.asarray(random.integers(0, 2, (5, kinds)) * 50.0, np.float64)
    more = Observed(classes, families, values, precision + extra)
    assert (posterior(more, q).deviation <= posterior(before, q).deviation + 1e-9).all()


@quiet
@given(st.integers(0, 2**31))
def test_the_tree_gives_what_one_large_gaussian_gives(seed: int) -> None:
    random = np.random.default_rng(seed)
    class_of, family_of, kinds = np.array([0, 1, 1, 2]), np.array([0, 0, 1]), 2
    precision = np.asarray(random.integers(0, 2, (4, kinds)) * 100.0, np.float64)
    values = random.normal(0, 1, (4, kinds)) * (precision > 0)
    observed = Observed(class_of, family_of, values, precision)
    q = covariances(observed, FORMULA_PRIOR)
    found = posterior(observed, q)
    full = np.zeros((8, 8))
    for i in range(4):
        for j in range(4):
            block = q[0].copy()
            if family_of[class_of[i]] == family_of[class_of[j]]:
                block += q[1]
            if class_of[i] == class_of[j]:
                block += q[2]
            full[2 * i : 2 * i + 2, 2 * j : 2 * j + 2] = block + (q[3] if i == j else 0)
    at = np.flatnonzero(precision.ravel())
    gain = full[:, at] @ np.linalg.inv(full[np.ix_(at, at)] + np.diag(1 / precision.ravel()[at]))
    mean = gain @ values.ravel()[at]
    deviation = np.sqrt(np.diag(full - gain @ full[at]))
    assert found.mean.ravel() == pytest.approx(mean, abs=1e-8)
    assert found.deviation.ravel() == pytest.approx(deviation, abs=1e-8)


def test_the_intervals_cover_what_they_say() -> None:
    """Gavel's rates: four in ten are reported with 10 % noise. P100 rates are reported like the others in the first
    case and not at all in the second, where P100s have only a data-sheet speed with one common error."""
    rates = gavel_throughputs(DATA / "simulation_throughputs.json")
    truth = {
        (name, kind, 1000 * size): speed
        for kind, rows in rates.items()
        for (name, size), speed in rows.items()
        if speed > 0
    }
    for unseen, most in (("", 0.95), ("p100", 0.99)):
        inside = count = 0
        for seed in range(8):
            random = Random(seed)
            cells = tuple(
                Cell(*key, speed=speed * math.exp(random.gauss(0, 0.1)), source=Source.MEASURED, samples=1)
                for key, speed in sorted(truth.items())
                if random.random() < 0.4 and key[1] != unseen
            )
            table = learn(PerformanceTable(cells), [(n, s, "resident", 1.0, 0) for n, _, s in truth], rates)
            for found in table.learned:
                key = (found.workload_class, found.accelerator, found.accelerators_m)
                if key in truth:
                    assert found.low is not None
                    assert found.high is not None
                    inside += found.low <= truth[key] <= found.high
                    count += 1
        assert 0.85 <= inside / count <= most


# -- learning ------------------------------------------------------------------------------------------


def test_a_type_that_nobody_used_starts_wide_and_the_first_report_moves_it_for_every_class() -> None:
    before = {name: cell(KNOWN, "V100", name) for name in ("x", "y-1", "y-2")}
    assert all(found.source is Source.RATIO and width(found) > 1.0 for found in before.values())
    after = told(KNOWN, report(before["x"].speed * 0.6, "V100", trusted=True))
    assert cell(after, "V100").source is Source.MEASURED
    for name, old in before.items():
        assert cell(after, "V100", name).speed < 0.9 * old.speed
        assert width(cell(after, "V100", name)) < width(old)
    assert cell(after, "L4").speed == pytest.approx(cell(KNOWN, "L4").speed, rel=0.02)


def test_repeated_reports_narrow_their_cell() -> None:
    widths = []
    table = KNOWN
    for number in range(6):
        table = told(table, report(5.2, "V100", job=f"j{number}", trusted=True))
        widths.append(width(cell(table, "V100")))
    assert widths == sorted(widths, reverse=True)
    assert cell(table, "V100").samples == 6
    assert cell(table, "V100").speed == pytest.approx(5.2, rel=0.05)


@quiet
@given(st.randoms(use_true_random=False), st.lists(st.floats(0.5, 50), min_size=2, max_size=12))
def test_the_order_of_a_rounds_reports_changes_nothing(random: Random, speeds: list[float]) -> None:
    reports = [
        report(speed, KINDS[i % 3], ("x", "y-1")[i % 2], f"j{i % 4}", tenant="ab"[i % 2], total_work=1e4)
        for i, speed in enumerate(speeds)
    ]
    assert told(KNOWN, *random.sample(reports, len(reports))) == told(KNOWN, *reports)


def test_a_snapshot_with_what_was_learned_survives_json_and_learns_on_alike() -> None:
    table = add_exploration(
        settle(told(KNOWN, report(6.0, "V100", total_work=1800.0)), "j", 1800.0), 10.0, 500.0
    )
    again = Snapshot.from_json(json.loads(json.dumps(Snapshot(table=table).to_json()))).table
    assert again == table
    assert told(again, report(7.0, "L4", job="k")) == told(table, report(7.0, "L4", job="k"))


@quiet
@given(snapshots(), st.lists(st.floats(-0.01, 0.01), min_size=6, max_size=6))
def test_one_percent_of_noise_in_reports_moves_nothing(snapshot: Snapshot, noise: list[float]) -> None:
    cells = tuple(replace(c, source=Source.MEASURED, samples=30) for c in snapshot.table.cells)
    resident = [c for c in cells if c.mode == "resident"]
    snapshot = replace(snapshot, table=learn(replace(snapshot.table, cells=cells)))
    now = NOW
    for _ in range(8):
        result = plan(snapshot, Policy(), now)[0]
        if not result.actions:
            break
        snapshot = applied(snapshot, result, now)
        now += 400.0
    assume(not plan(snapshot, Policy(), now)[0].actions)
    reports = [
        report(c.speed * (1 + n), c.accelerator, c.workload_class, f"j{i}", trusted=True)
        for i, (c, n) in enumerate(zip(resident, noise, strict=True))
    ]
    after = told(snapshot.table, *reports)
    speeds = [(c.accelerator, c.speed) for c in snapshot.table.learned]
    assert [(c.accelerator, c.speed) for c in after.learned] == speeds
    assert plan(replace(snapshot, table=after), Policy(), now)[0].actions == ()


def test_a_learned_speed_changes_when_it_is_wrong_by_more() -> None:
    table = KNOWN
    for number in range(200):
        table = told(table, report(33.0, job=f"j{number}", trusted=True))
    assert cell(table, "H100").speed == pytest.approx(33.0, rel=2 * STEADY)


def test_a_row_without_measurements_starts_from_data_sheets() -> None:
    row = ("x", 2000, "resident", 1.0, 0)
    assert learn(PerformanceTable(), [row]) == PerformanceTable()
    table = learn(PerformanceTable(rates=RATES), [row])
    assert [c.accelerator for c in table.learned] == list(KINDS)
    assert cell(table, "H100").speed > cell(table, "L4").speed
    assert all(width(c) > 2.0 for c in table.learned)


def test_only_a_changed_speed_is_an_event() -> None:
    def news(table: PerformanceTable) -> list[Happening]:
        return list(Event.between(Snapshot(table=KNOWN), Snapshot(table=table), NOW).happened)

    steady = told(KNOWN, report(30.0, trusted=True))
    assert steady.learned != KNOWN.learned
    assert news(steady) == []
    changed = news(told(KNOWN, report(5.2, "V100", trusted=True)))
    assert {(one.kind, one.name) for one in changed} >= {(Happened.SPEED, "x")}


def test_a_row_starts_from_the_formulas_and_keeps_its_impossible_cells() -> None:
    model = ModelShape("llama", 12, 768, 2048, 12, 12, 64, 32000)
    batch = BatchShape(32, 512, 4)
    given_ = [prior(model, batch, "resident", kind, name="m") for kind in KINDS]
    table = learn(PerformanceTable((*given_[:2], replace(given_[2], speed=0.0)), RATES))
    assert [c.accelerator for c in table.learned] == ["H100", "L4"]
    for found, start in zip(table.learned, given_, strict=False):
        assert found.low is not None
        assert found.high is not None
        assert found.low < start.speed < found.high
        assert found.memory_mib == start.memory_mib
    view = TableView(table)
    assert view.estimate("m", "V100", "resident", 1000) is None
    slower = told(table, report(given_[0].speed / 2, name="m", trusted=True))
    assert cell(slower, "L4", "m").speed < 0.9 * cell(table, "L4", "m").speed


def test_reports_do_not_change_an_override_and_each_power_cap_is_its_own_cell() -> None:
    table = learn(
        PerformanceTable(
            (
                Cell("x", "H100", 1000, speed=7.0, source=Source.OVERRIDE),
                Cell("x", "L4", 1000, speed=2.0, source=Source.MEASURED, samples=9),
                Cell("x", "L4", 1000, speed=1.5, source=Source.MEASURED, samples=9, power_cap=0.6),
            ),
            RATES,
        )
    )
    view = TableView(told(table, report(9.0)))
    full, capped = (view.estimate("x", "L4", "resident", 1000, power_cap=cap) for cap in (1.0, 0.6))
    assert view.estimate("x", "H100", "resident", 1000).speed == 7.0  # type: ignore[union-attr]
    assert full is not None
    assert full.speed == pytest.approx(2.0, rel=0.05)
    assert capped is not None
    assert capped.speed == pytest.approx(1.5, rel=0.05)


def test_exploration_raises_speeds_for_allowed_tenants_only_and_within_its_budget() -> None:
    tempted = learn(KNOWN, explorers=("a",))
    assert cell(tempted, "V100", tenant="a").speed > 1.1 * cell(tempted, "V100").speed
    assert {c.tenant for c in tempted.learned if c.trial} == {"a"}
    assert not [c for c in tempted.learned if c.trial and c.accelerator == "H100" and c.workload_class == "x"]
    view = TableView(tempted)
    for tenant, trial in (("a", True), ("b", False)):
        estimate = view.estimate("x", "V100", "resident", 1000, tenant)
        assert estimate is not None
        assert (estimate.speed > cell(tempted, "V100").speed) is trial
    spent = add_exploration(KNOWN, EXPLORED * 1000 + 1, 1000.0)
    assert not [c for c in learn(spent, explorers=("a",)).learned if c.trial]


# -- in the simulator ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace() -> Trace:
    found = gavel(DATA / "max_min_fairness.trace", gavel_throughputs(DATA / "simulation_throughputs.json"))
    return shaped(replace(found, jobs=found.jobs[:40]))


def test_hidden_speeds_cost_little_and_exploration_is_bounded(trace: Trace) -> None:
    full = simulate(trace, T1, Policy(), Settings()).to_json()["mean_h"]
    result, learner = run(trace, T1, seed=1)
    assert result.to_json()["mean_h"] <= 1.1 * full
    assert learner.table.explored.share <= 0.05
    assert coverage([learner])["all"] > 0.8
    assert run(trace, T1, seed=1)[0].jobs == result.jobs


def test_hidden_speeds_do_not_appear_in_the_table(trace: Trace) -> None:
    truth, table = true_table(trace, T1), hidden(trace, T1, 3)
    possible = [c for c in truth.cells if c.speed > 0]
    assert not [c for c in table.cells if c.accelerator == "p100" and c.speed > 0]
    assert len([c for c in table.cells if c.speed > 0]) < 0.3 * len(possible)
    assert not {c.speed for c in table.cells if c.speed > 0} & {c.speed for c in possible}


def test_a_tenant_that_reports_false_speeds_is_distrusted(trace: Trace) -> None:
    jobs = tuple(replace(job, tenant="ab"[i % 2]) for i, job in enumerate(trace.jobs))
    two = replace(trace, jobs=jobs)
    honest = []
    for seed in (1, 2, 3):
        _, learner = run(two, T1, seed=seed, lie=lambda job, kind: 2.0 if job.tenant == "a" else 1.0)
        conduct = {c.tenant: c for c in learner.table.conduct}
        assert (conduct["a"].passed, conduct["a"].failed) == (0, 20)
        assert distrusted(learner.table) == {"a"}
        honest.append((conduct["b"].passed, conduct["b"].failed))
    # Of sixty honest jobs one had noise of 3.3 standard deviations (13 % where 12 % are allowed).
    assert sum(passed for passed, _ in honest) >= 59, honest
