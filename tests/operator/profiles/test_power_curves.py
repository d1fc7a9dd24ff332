"""Curves of power limits in profiles, and the cells of capped jobs that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
from tests.operator.builders import NOW
from tests.operator.profiles.parts import CLASS, POOLS, TEAM, TENANT_OF, look, profile, written
from tests.operator.profiles.test_speeds import done, ran, tokens

from busbar.kube.types import PerformanceProfile, TrainingJob
from busbar.kube.types.performance_profile import MOST_COMPARISONS, PerformanceProfileStatus, PowerCurve
from busbar.operator.profiles import power_curves
from busbar.operator.profiles.paces import Work
from busbar.operator.profiles.power_curves import grew, stored
from busbar.operator.profiles.table import performance_table
from busbar.scheduler import Cell, Source
from busbar.scheduler.model.table import TableView
from busbar.scheduler.power import Phase
from busbar.scheduler.power.curves import KNOWN_S, LEVELS, Compared, Evidence, curve_of, slowdown

ON_A100 = Work(CLASS, "A100", "resident")
EVIDENCE: Evidence = {(60, 100): Compared(400.0, 0.25), (80, 100): Compared(500.0, 0.05)}


def cells(of: PerformanceProfile, *jobs: TrainingJob) -> dict[tuple[str, float], Cell]:
    """Those under caps, by type and cap."""
    table = performance_table(jobs, POOLS, TENANT_OF, (of,), (TEAM,))
    return {(cell.accelerator, cell.power_cap): cell for cell in table.learned if cell.power_cap < 1}


def test_what_was_learned_is_written_and_read_again() -> None:
    made = written(profile(), ran(1e4), limits={ON_A100: EVIDENCE})
    assert stored(CLASS, made.status) == {ON_A100: EVIDENCE}
    assert made.status is not None
    assert made.status.power_curves
    (curve,) = made.status.power_curves
    assert (curve.accelerator, curve.mode) == ("A100", "resident")
    slow = {point.percent: point.slowdown for point in curve.points}
    assert list(slow) == [level for level in LEVELS if level >= 60], "below is only what is published"
    assert slow[100] == 1.0
    assert slow[60] == pytest.approx(1.28, abs=0.03)


def test_the_phases_of_serving_have_a_curve_each() -> None:
    phases = {ON_A100._replace(phase=phase): EVIDENCE for phase in (Phase.PREFILL, Phase.DECODE)}
    made = written(profile(), ran(1e4), limits={ON_A100: EVIDENCE} | phases)
    assert stored(CLASS, made.status) == {ON_A100: EVIDENCE} | phases
    assert made.status is not None
    assert [curve.phase for curve in made.status.power_curves or ()] == ["Decode", "Prefill", "Training"]
    unknown = [{"accelerator": "A100", "phase": "Dreaming", "comparisons": [
        {"percent": 60, "againstPercent": 100, "seconds": 400.0, "logSlower": 0.2}]}]  # fmt: skip
    assert stored(CLASS, PerformanceProfileStatus.model_validate({"powerCurves": unknown})) == {}


def test_without_news_what_is_written_stays() -> None:
    made = written(profile(), ran(1e4), limits={ON_A100: EVIDENCE})
    again = written(made, ran(1e4), now=NOW + timedelta(hours=1))
    assert again.status is not None
    assert made.status is not None
    assert again.status.power_curves == made.status.power_curves
    on_v100 = ON_A100._replace(accelerator="V100")
    more = written(again, ran(1e4), now=NOW + timedelta(hours=2), limits={on_v100: EVIDENCE})
    assert stored(CLASS, more.status).keys() == {ON_A100, on_v100}


def test_a_quarter_more_evidence_is_a_reason_to_write() -> None:
    def worth(seconds: float) -> Mapping[Work, Evidence]:
        return {ON_A100: {(60, 100): Compared(seconds, 0.25)}}

    def curves(seconds: float) -> list[PowerCurve] | None:
        status = written(profile(), ran(1e4), limits=worth(seconds)).status
        return None if status is None else status.power_curves

    assert not grew(curves(400.0), curves(480.0))
    assert grew(curves(400.0), curves(520.0))
    assert grew(None, curves(480.0))
    made = written(profile(), done(1e4, tokens() / 1e4), limits=worth(400.0))
    soon = NOW + timedelta(minutes=10)
    assert look(made, now=soon, limits=worth(480.0)).status is None
    assert look(made, now=soon, limits=worth(520.0)).status is not None


@pytest.mark.parametrize(
    "wrong",
    [
        {"percent": 100, "againstPercent": 60},
        {"percent": 60, "againstPercent": 60},
        {"percent": 61, "againstPercent": 100},
        {"percent": 60, "againstPercent": 105},
        {"percent": 60, "againstPercent": 100, "seconds": 0},
        {"percent": 60, "againstPercent": 100, "logSlower": 5.0},
    ],
)
def test_what_cannot_be_is_left_out_and_the_rest_counts(wrong: dict[str, Any]) -> None:
    good = {"percent": 80, "againstPercent": 100, "seconds": 30.0, "logSlower": 0.1}
    lines = [{"seconds": 30.0, "logSlower": 0.1} | wrong, good]
    status = PerformanceProfileStatus.model_validate(
        {"powerCurves": [{"accelerator": "A100", "comparisons": lines}]}
    )
    assert stored(CLASS, status) == {ON_A100: {(80, 100): Compared(30.0, 0.1)}}


def test_more_comparisons_than_fit_leave_the_weakest_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power_curves, "MOST_COMPARISONS", 1)
    made = written(profile(), ran(1e4), limits={ON_A100: EVIDENCE})
    assert stored(CLASS, made.status) == {ON_A100: {(80, 100): EVIDENCE[80, 100]}}
    assert len(LEVELS) * (len(LEVELS) - 1) // 2 <= MOST_COMPARISONS


def test_cells_under_caps_follow_from_the_others_down_to_the_lowest_measured_limit() -> None:
    made = written(profile(), ran(1e4), limits={ON_A100: EVIDENCE})
    found = cells(made, ran(1e4))
    assert {(kind, cap) for kind, cap in found} == {("A100", 0.8), ("A100", 0.7), ("A100", 0.6)}
    view = TableView(performance_table((ran(1e4),), POOLS, TENANT_OF, (made,), (TEAM,)))
    assert view.power_caps(CLASS, "A100", "resident", "team") == (0.8, 0.7, 0.6)
    whole = view.estimate(CLASS, "A100", "resident", 1000)
    assert whole is not None
    for cap in (0.8, 0.7, 0.6):
        under = view.estimate(CLASS, "A100", "resident", 1000, power_cap=cap)
        assert under is not None
        assert under.speed == pytest.approx(whole.speed / slowdown(curve_of(EVIDENCE), cap))
        assert under.watts == pytest.approx(cap * 400)
        assert found["A100", cap].source is Source.RATIO


def test_too_little_evidence_makes_no_cells() -> None:
    little = {ON_A100: {(60, 100): Compared(KNOWN_S - 1, 0.25)}}
    assert cells(written(profile(), ran(1e4), limits=little), ran(1e4)) == {}
    enough = {ON_A100: {(60, 100): Compared(KNOWN_S, 0.25)}}
    assert cells(written(profile(), ran(1e4), limits=enough), ran(1e4)) != {}


def test_what_people_state_of_caps_stands_alone() -> None:
    line = {
        "accelerator": "A100",
        "accelerators": 1,
        "powerCapPercent": 65,
        "tokensPerSecond": 5e3,
        "watts": 260,
    }
    made = written(profile(cells=[line]), ran(1e4), limits={ON_A100: EVIDENCE})
    assert {cap for kind, cap in cells(made, ran(1e4)) if kind == "A100"} <= {0.65}
    view = TableView(performance_table((ran(1e4),), POOLS, TENANT_OF, (made,), (TEAM,)))
    assert view.power_caps(CLASS, "A100", "resident", "team") == (0.65,)


def test_a_profile_shows_the_cells_that_follow() -> None:
    made = written(profile(), done(1e4, tokens() / 1e4), limits={ON_A100: EVIDENCE})
    later = written(made, ran(1e4), now=NOW + timedelta(hours=1), limits={ON_A100: EVIDENCE})
    assert later.status is not None
    shown = {(c.accelerator, c.power_cap_percent): c for c in later.status.cells or ()}
    assert shown["A100", 60].tokens_per_second < shown["A100", 100].tokens_per_second
    assert ("A100", 50) not in shown
