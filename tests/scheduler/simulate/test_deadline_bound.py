"""The bound of the row `deadlines`: what each job could keep alone."""

from __future__ import annotations

from benchmarks.scheduling.deadlines import TYPE, in_reach

from busbar.scheduler.simulate.trace import Trace, TraceCluster, TraceJob


def job(name: str, deadline_s: float | None, max_pods: int = 4) -> TraceJob:
    """A hundred seconds on one accelerator, fifty on two; four are no faster."""
    measured = {TYPE: {(1, 1): 1.0, (2, 1): 2.0, (4, 1): 2.0}}
    return TraceJob(
        name, 1000.0, 100.0, {TYPE: 1.0}, "job", max_pods=max_pods, deadline_s=deadline_s, measured=measured
    )


def test_a_deadline_is_in_reach_with_the_fastest_size_that_the_job_may_have_and_after_its_start() -> None:
    cluster = TraceCluster({TYPE: 1}, {TYPE: 4})
    jobs = (job("two", 1051.0), job("late", 1049.0), job("one", 1051.0, max_pods=1), job("none", None))
    assert in_reach(Trace("t", jobs), cluster, 0.0) == 1
    assert in_reach(Trace("t", jobs), cluster, 2.0) == 0
