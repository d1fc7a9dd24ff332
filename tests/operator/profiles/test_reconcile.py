"""When a profile is written, and the bounds on profiles and on their evidence."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.operator.builders import NOW, SETTINGS
from tests.operator.profiles.parts import TENANT_OF, cell, finished, formula, look, profile, waiting, written
from tests.operator.profiles.test_speeds import ran

from busbar.kube.types import PerformanceProfile, TrainingJob
from busbar.kube.types.performance_profile import CellSource
from busbar.operator.profiles.keeper import MOST_PROFILES, made_room
from busbar.operator.profiles.observations import fold, read
from busbar.operator.profiles.table import report_of
from busbar.scheduler.performance.reports import MOST_RECORDS


def test_a_profile_is_written_once_while_nothing_changes() -> None:
    of = written(profile(), waiting())
    assert cell(of, "A100").source is CellSource.PRIOR
    later = look(of, waiting(), now=NOW + timedelta(days=1))
    assert (later.status, later.again_s) == (None, None)


def test_a_speed_within_a_step_is_not_written_and_one_beyond_it_is() -> None:
    def at(speed: float) -> TrainingJob:
        return ran(speed)

    speed = math.exp(round(math.log(formula("A100") * 0.6) / 0.05) * 0.05)
    of = written(profile(), at(speed))
    later = NOW + timedelta(seconds=20)
    assert look(of, at(speed * 1.01), now=later).status is None
    assert look(of, at(speed * 1.3), now=later).status is not None


def test_news_waits_until_the_period_since_the_last_write_is_over() -> None:
    of = written(profile(), waiting())
    update = look(of, finished(0.4), waiting(), now=NOW + timedelta(seconds=4))
    assert update.status is None
    assert update.again_s == pytest.approx(SETTINGS.profile_period_s - 4)


def test_evidence_of_a_class_is_bounded_and_the_least_informative_goes() -> None:
    one = report_of(finished(0.4), TENANT_OF)
    assert one is not None
    runs = [
        replace(
            one,
            run=f"u-{i}",
            record=replace(one.record, accelerators_m=1000 * (i + 1), tenant=f"t{i}"),
            agrees=None if i % 2 else True,
        )
        for i in range(MOST_RECORDS + 50)
    ]
    whole = fold(read(profile(), {}), runs)
    assert len(whole.records) == MOST_RECORDS
    assert sum(r.verified for r in whole.records) == (MOST_RECORDS + 50) // 2
    assert len(whole.counted.runs) == MOST_RECORDS
    assert not fold(whole, runs[-50:]) is not whole


def test_profiles_are_bounded_and_the_one_that_was_idle_longest_goes() -> None:
    label = {"busbar.dev/discovered": "true"}

    def made(i: int, **more: Any) -> PerformanceProfile:
        of = profile(f"p{i}", workloadClass=f"c{i}", **more)
        written_at = {"last_updated": NOW + timedelta(minutes=i)}
        status = written(profile(), waiting()).status
        assert status is not None
        of = of.model_copy(update={"status": status.model_copy(update=written_at)})
        of.metadata.labels = label
        return of

    there = [made(i) for i in range(MOST_PROFILES)]
    there[0].metadata.labels = {}
    actions = made_room(["new", "newer"], there, {"c1"})
    assert [type(a).__name__ for a in actions] == ["Delete", "Create", "Delete", "Create"]
    assert [a.key.name for a in actions] == ["p2", "new", "p3", "newer"]
    assert made_room(["new"], there, {p.spec.workload_class for p in there}) == ()


def test_a_profile_is_named_after_its_class_unless_the_name_is_taken() -> None:
    [plain] = made_room(["llama-7B-3f9a0c11"], (), set())
    assert plain.key.name == "llama-7b-3f9a0c11"
    [other] = made_room(["llama-7B-3f9a0c11"], (profile("llama-7b-3f9a0c11"),), set())
    assert other.key.name.startswith("llama-7b-3f9a0c11-")
