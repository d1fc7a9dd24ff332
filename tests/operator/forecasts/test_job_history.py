"""What is recorded of ended jobs and of forecasts."""

from __future__ import annotations

from datetime import timedelta

from tests.operator.builders import NOW, admitted, job, queued
from tests.operator.forecasts.parts import T, ended, promise, tenant_of

from busbar.operator.forecasts.job_history import JobHistory


def test_ended_jobs_are_read_off_their_objects_in_the_order_in_which_they_ended() -> None:
    history = JobHistory()
    late = ended("late", 60, NOW + timedelta(hours=1))
    history.rebuild([late, ended("early", 30), ended("never-ran", 0), queued()], tenant_of)
    assert [row.seconds for row in history.ended] == [30, 60]
    assert history.ended[0].tenant == "a"
    assert history.ended[0].accelerators_m == 1000
    history.observe(late, tenant_of)
    assert len(history.ended) == 2


def test_a_restarted_operator_knows_the_promises_that_stand_in_statuses() -> None:
    jobs = [
        job("kept", status={"phase": "Running", "promise": promise(-5000, 100, 900, -4950)}),
        job("late", status={"phase": "Running", "promise": promise(-5000, 100, 900, -1000)}),
        job("open", status={"phase": "Queued", "promise": promise(-50, 100, 900)}),
    ]
    live, restarted = JobHistory(), JobHistory()
    for each in jobs:
        live.observe(each.model_copy(update={"status": None}), tenant_of)
        live.observe(each, tenant_of)
    restarted.rebuild(jobs, tenant_of)
    assert restarted.outcomes == live.outcomes
    assert [outcome.waited_s for _, outcome in restarted.outcomes] == [50, 4000, None]


def test_a_promise_counts_when_its_moment_has_passed_and_not_when_it_is_kept_early() -> None:
    history = JobHistory()
    history.observe(job("a", status={"promise": promise(-50, 100, 900, -40)}), tenant_of)
    assert [kept.promises for kept in history.kept(T)] == [0, 0]
    assert history.kept(T + 60)[0].share == 1.0
    history.observe(job("b", status={"promise": promise(-50, 100, 900)}), tenant_of)
    assert (history.kept(T + 60)[0].promises, history.kept(T + 60)[0].share) == (2, 0.5)
    assert history.kept(T + 60)[1].promises == 0


def test_a_withdrawn_job_takes_its_promise_with_it_and_a_started_one_leaves_it() -> None:
    history = JobHistory()
    waits = job("w", status={"promise": promise(-50, 100, 900)})
    runs = job("r", status={"promise": promise(-50, 100, 900, -10), "usage": {"acceleratorSeconds": 10}})
    for each in (waits, runs):
        history.observe(each, tenant_of)
        history.forget(each, tenant_of, NOW)
    assert [key for key, _ in history.outcomes] == ["uid-r/0"]
    assert [row.seconds for row in history.ended] == [10]


def test_a_job_that_is_deleted_while_it_runs_ran_until_then() -> None:
    history = JobHistory()
    history.forget(admitted(job("r"), last_usage_time=NOW - timedelta(seconds=60)), tenant_of, NOW)
    assert [row.seconds for row in history.ended] == [60]


def test_a_job_in_nobodys_namespace_says_nothing() -> None:
    history = JobHistory()
    history.rebuild([ended("x", 60)], lambda namespace: "")
    assert history.ended == ()
