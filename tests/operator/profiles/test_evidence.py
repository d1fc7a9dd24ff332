"""A profile keeps the speeds that jobs measured, across the end of the jobs, restarts of the operator, and crashes
between writes."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta

import pytest
from tests.operator.builders import NOW
from tests.operator.profiles.parts import (
    KEYS,
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
from tests.operator.profiles.test_speeds import done, ran, tokens

from busbar.kube.types import TrainingJob
from busbar.kube.types.performance_profile import CellSource
from busbar.operator.profiles.observations import Stay, slack_at
from busbar.operator.profiles.reconcile import PastAttempt, leaves, left_behind
from busbar.operator.profiles.table import performance_table, report_of
from busbar.scheduler import Policy, Snapshot, Source, plan
from busbar.scheduler.model.table import Fault


def test_what_an_ended_job_measured_is_there_when_the_job_is_gone() -> None:
    kept = written(profile(), finished(0.4), waiting())
    table = performance_table((waiting(),), POOLS, TENANT_OF, (kept,), (TEAM,))
    [record] = table.records
    assert (record.tenant, record.job, record.verified) == ("team", "", True)
    learned = {c.accelerator: c for c in table.learned if not c.tenant}
    assert learned["A100"].source is Source.MEASURED
    assert learned["A100"].speed == pytest.approx(formula("A100") * 0.4, rel=0.1)
    assert learned["V100"].speed < 0.75 * formula("V100")


def test_what_an_ended_job_drew_is_there_when_the_job_is_gone() -> None:
    usage = {"acceleratorSeconds": 3600.0, "energyJoules": 250.0 * 3600.0}
    speed = formula("A100") * 0.4
    kept = written(profile(), done(speed, tokens() / speed, usage=usage), waiting())
    drawn = cell(kept, "A100").watts
    assert drawn is not None
    assert 250.0 <= drawn <= 265.0
    assert cell(kept, "V100").watts == 300.0  # nobody ran there: the nameplate
    table = performance_table((waiting(),), POOLS, TENANT_OF, (kept,), (TEAM,))
    assert {c.accelerator: c.watts for c in table.learned if not c.tenant}["A100"] == drawn


def test_an_end_is_told_by_the_lowest_speed_believed_of_the_place() -> None:
    of = written(profile(), finished(0.4), waiting())
    admission = ran(1.0).status.admission  # type: ignore[union-attr]
    assert admission is not None
    measured = cell(of, "A100")
    assert measured.low is not None
    assert slack_at(of, admission) == measured.tokens_per_second / measured.low > 1
    guessed = slack_at(of, admission.model_copy(update={"accelerator": "V100"}))
    assert guessed is not None
    assert guessed > measured.tokens_per_second / measured.low  # no job has run there
    assert slack_at(of, admission.model_copy(update={"pods": 64})) is None
    assert slack_at(profile(), admission) is None


def test_a_restarted_operator_without_the_jobs_makes_the_same_plan() -> None:
    of = profile()
    jobs = (finished(0.2, "slow"), finished(2.0, "fast", on="V100"), waiting())
    before = snapshot(of, jobs=jobs)
    kept = written(of, *jobs)
    after = snapshot(kept, jobs=(waiting(),))
    plain = snapshot(jobs=(waiting(),))
    now = NOW.timestamp()
    actions = [plan(s, Policy(), now)[0].actions for s in (before, after, plain)]
    assert [(a.kind, a.job, a.to) for a in actions[0]] == [(a.kind, a.job, a.to) for a in actions[1]]
    assert [a.to and a.to.accelerator for a in actions[0]] == ["V100"]
    assert [a.to and a.to.accelerator for a in actions[2]] == ["A100"]
    # Both have the same value in every cell, to the last digit; the second has it only from the profile.
    assert {c.accelerator: c.speed for c in before.table.learned} == pytest.approx(
        {c.accelerator: c.speed for c in after.table.learned}, rel=1e-5
    )
    assert before.table.records == after.table.records
    assert before.table.conduct == after.table.conduct
    assert not plain.table.learned


def test_a_snapshot_is_the_same_before_and_after_the_write_and_again_after_the_next() -> None:
    jobs = (finished(0.4), waiting())
    first = written(profile(), *jobs)
    second = look(first, *jobs, now=NOW + timedelta(seconds=30))
    assert second.status is None
    one, two = snapshot(profile(), jobs=jobs), snapshot(first, jobs=jobs)
    assert one.table.records == two.table.records
    assert Snapshot.from_json(two.to_json()).table == two.table


def test_each_run_is_counted_once_however_often_it_is_seen() -> None:
    of = profile()
    jobs: tuple[TrainingJob, ...] = (finished(0.4), waiting())
    for minute in range(3):
        of = written(of, *jobs, now=NOW + timedelta(hours=minute)) if minute == 0 else of
        jobs = (*jobs, finished(0.4, name=f"more-{minute}"))
        of = written(of, *jobs, now=NOW + timedelta(hours=minute + 1))
    assert of.status is not None
    [evidence] = of.status.evidence or []
    assert (evidence.reports, evidence.runs) == (4, 4)
    assert (of.status.conduct or [])[0].passed == 4
    assert cell(of, "A100").reports == 4


def test_counted_runs_of_jobs_that_are_gone_need_not_be_listed() -> None:
    of = written(profile(), finished(0.4), waiting())
    assert of.status is not None
    assert of.status.counted is not None
    assert of.status.counted.runs == ["uid-job-1"]
    of = written(of, finished(0.4, name="more"), now=NOW + timedelta(minutes=1))
    assert of.status is not None
    assert of.status.counted is not None
    assert of.status.counted.runs == ["uid-more-1"]
    assert (of.status.evidence or [])[0].runs == 2


def test_an_attempt_that_gave_its_place_back_is_kept_too() -> None:
    speed = formula("A100") * 0.4
    old = ran(speed)
    assert old.status is not None
    queued = old.model_copy(update={"status": old.status.model_copy(update={"admission": None})})
    admitted = old.status.model_copy(
        update={
            "admission": old.status.admission and old.status.admission.model_copy(update={"admitted_at": NOW})
        }
    )
    old = old.model_copy(update={"status": admitted})
    assert leaves(old, queued)
    assert leaves(old, None)
    assert not leaves(old, old)
    left = left_behind(old, report_of(old, TENANT_OF), NOW + timedelta(hours=1))
    assert left is not None
    of = written(profile(), queued, left=(left,), now=NOW + timedelta(hours=1))
    assert of.status is not None
    [evidence] = of.status.evidence or []
    assert evidence.log_mean == pytest.approx(math.log(speed), abs=0.05)
    assert not evidence.verified
    assert of.status.held is not None
    assert of.status.held.unmeasured == pytest.approx(3600)


@pytest.mark.parametrize("ours", [False, None])
def test_what_another_image_said_is_no_evidence_ended_or_left_behind(ours: bool | None) -> None:
    speed = formula("A100") * 0.7
    of_ended = done(speed, tokens() / speed + 60, name="ended", ours=ours)
    gone = ran(speed, name="gone", ours=ours)
    report = report_of(gone, TENANT_OF)
    assert report is not None
    left = PastAttempt(
        report.run, Stay(("A100", 1000, "resident", 1.0, 0), NOW, NOW), replace(report, ended=NOW)
    )
    of = written(profile(), of_ended, ran(speed, ours=ours), left=(left,))
    assert of.status is not None
    assert not of.status.evidence
    assert not of.status.conduct
    assert of.status.counted is None or not of.status.counted.runs
    assert {c.source for c in of.status.cells or ()} == {CellSource.PRIOR}


def test_a_profile_names_no_tenant_and_no_job() -> None:
    text = str(written(profile(), finished(0.4, name="secret-job"), ran(20_000.0, name="other")).to_wire())
    assert "'team'" not in text
    assert "secret-job'" not in text
    assert KEYS["team"] in text


def test_a_distrusted_tenant_stays_distrusted_without_its_jobs_and_gets_one_event() -> None:
    true = formula("A100")
    liar = done(true * 2, tokens() / true)
    update = look(profile(), liar, waiting())
    assert update.refuted == ("uid-job",)
    kept = written(profile(), liar, waiting())
    assert cell(kept, "A100").quarantined == 1
    assert look(kept, liar, waiting(), now=NOW + timedelta(hours=1)).refuted == ()
    table = performance_table((ran(true * 0.8, name="next"),), POOLS, TENANT_OF, (kept,), (TEAM,))
    assert table.conduct[0].failed == 1
    assert {r.fault for r in table.records if r.job == ""} == {Fault.COUNTERS}
