"""Speeds that people state in the spec of a profile."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from tests.operator.builders import NOW
from tests.operator.profiles.parts import (
    POOLS,
    TEAM,
    TENANT_OF,
    cell,
    finished,
    formula,
    look,
    profile,
    snapshot,
    waiting,
    written,
)

from busbar.kube.types import PerformanceProfile
from busbar.kube.types.performance_profile import CellSource
from busbar.operator.profiles.table import performance_table
from busbar.scheduler import Policy, plan


def stating(speed: float, **more: Any) -> PerformanceProfile:
    return profile(cells=[{"accelerator": "A100", "accelerators": 1, "tokensPerSecond": speed, **more}])


def test_a_stated_speed_wins_over_the_formula_and_teaches_the_other_types() -> None:
    table = performance_table((waiting(),), POOLS, TENANT_OF, (stating(formula("A100") / 2),), (TEAM,))
    learned = {c.accelerator: c for c in table.learned if not c.tenant}
    assert learned["A100"].speed == pytest.approx(formula("A100") / 2, rel=0.05)
    assert learned["V100"].speed < 0.9 * formula("V100")
    assert learned["A100"].memory_mib == next(c.memory_mib for c in table.cells if c.accelerator == "A100")


def test_a_measurement_refines_a_stated_speed_but_not_an_override() -> None:
    speed = formula("A100") / 2
    plain = performance_table((finished(0.4), waiting()), POOLS, TENANT_OF, (stating(speed),), (TEAM,))
    assert next(c.speed for c in plain.learned if c.accelerator == "A100") < 0.99 * speed
    final = stating(speed, override=True)
    snap = snapshot(final, jobs=(finished(0.4), waiting()))
    assert not [c for c in snap.table.learned if c.accelerator == "A100"]
    status = written(final, finished(0.4), waiting())
    assert cell(status, "A100").source is CellSource.STATED
    assert cell(status, "A100").tokens_per_second == speed
    assert cell(status, "A100").predicted == pytest.approx(formula("A100"), rel=1e-5)


def test_the_note_of_a_stated_speed_stands_beside_it() -> None:
    status = written(stating(1234.0, note="from the vendor"), waiting())
    assert cell(status, "A100").note == "from the vendor"
    assert cell(status, "V100").note is None


def test_a_statement_that_is_taken_back_leaves_the_formula() -> None:
    stated = written(stating(1234.0, note="from the vendor"), waiting())
    assert cell(stated, "A100").source is CellSource.STATED
    bare = profile(status=stated.to_wire()["status"])
    later = written(bare.model_copy(deep=True), waiting(), now=NOW + timedelta(minutes=1))
    assert cell(later, "A100").source is CellSource.PRIOR
    assert cell(later, "A100").tokens_per_second == pytest.approx(formula("A100"), rel=1e-5)


def test_a_speed_of_zero_says_that_the_class_cannot_run_there() -> None:
    snap = snapshot(stating(0), jobs=(waiting(),))
    [action] = plan(snap, Policy(), NOW.timestamp())[0].actions
    assert action.to is not None
    assert action.to.accelerator == "V100"


def test_of_two_profiles_of_a_class_the_first_counts_and_the_other_says_so() -> None:
    late = stating(99.0).model_copy(deep=True)
    first = profile("first")
    table = performance_table(
        (waiting(),), POOLS, TENANT_OF, (profile("late", created="2026-11-02T00:00:00Z"), first), (TEAM,)
    )
    assert not table.learned
    status = look(late, waiting(), counts="first").status
    assert status is not None
    assert [c.reason for c in status.conditions or ()] == ["ClassTaken"]
    assert status.cells is None
