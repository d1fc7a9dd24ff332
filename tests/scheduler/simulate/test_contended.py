"""The load of the row `contended` is that of the jobs whose completion is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.scheduling.contended import MEASURED, loaded
from benchmarks.scheduling.static_makespan import least_s

from busbar.scheduler.simulate.trace import TraceCluster, TraceJob

KINDS = ("v100", "p100", "k80")
TABLE = {
    kind: {("job", size): speed * size for size in (1, 2, 4, 8)}
    for kind, speed in zip(KINDS, (4.0, 2.0, 1.0), strict=True)
}


@pytest.mark.parametrize("load", [0.9, 1.1])
def test_the_measured_jobs_ask_for_the_stated_part_of_the_capacity(load: float) -> None:
    trace = loaded(TABLE, 3, load)
    first, last = MEASURED
    work_h = sum(job.work / job.speeds["v100"] * job.accelerators for job in trace.jobs[first:last]) / 3600
    span_h = (trace.jobs[last].arrival_s - trace.jobs[first].arrival_s) / 3600
    # All jobs are alike: a P100 is half a V100, a K80 a quarter, for each of them.
    assert work_h / span_h == pytest.approx(load * 36 * (1 + 0.5 + 0.25), rel=1e-6)


def test_one_job_may_be_split_for_the_load_and_not_for_the_makespan() -> None:
    one = TraceJob("one", 0.0, 3600.0, {"v100": 1.0, "p100": 1.0}, "job")
    cluster = TraceCluster({"v100": 1, "p100": 1})
    assert least_s([one], cluster) == pytest.approx(3600)
    assert least_s([one], cluster, split=True) == pytest.approx(1800)
    assert least_s([one, replace(one, id="other")], cluster) == pytest.approx(3600)
