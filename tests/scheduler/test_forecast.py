"""Start now, or when: forecasts from simulated futures."""

from __future__ import annotations

from dataclasses import replace

from busbar.scheduler import Finished, JobId, Policy, WaitCode, what_if

from .build import NOW, cluster, job, placed

HISTORY = tuple(Finished("a", 8000, seconds) for seconds in (7300.0, 7400.0, 7500.0, 9000.0, 11000.0))


def test_a_job_that_fits_starts_now_and_nothing_is_changed() -> None:
    snapshot = cluster(job("other"), H100=1)
    forecast = what_if(snapshot, Policy(), job("x"), NOW)
    assert forecast.starts_now
    assert forecast.action is not None
    assert len(snapshot.jobs) == 1


def test_a_job_behind_another_waits_as_long_as_history_says() -> None:
    running = job("old", size=8, on=placed("H100", "H100-0000", size=8), preemptible=False)
    forecast = what_if(cluster(running, H100=1), Policy(), job("x", size=8), NOW, HISTORY)
    assert not forecast.starts_now
    assert forecast.p50_s is not None
    assert forecast.p90_s is not None
    # It has run 7,200 s; those that did ran 100 to 3,800 s more.
    assert 100 <= forecast.p50_s <= forecast.p90_s <= 3800


def test_the_seed_decides_and_the_order_does_not() -> None:
    running = [
        job(f"r{i}", size=4, on=placed("H100", "H100-0000", size=4), preemptible=False) for i in range(2)
    ]
    one = cluster(*running, H100=1)
    other = replace(one, jobs=one.jobs[::-1])
    new = job("x", size=8)
    assert what_if(one, Policy(), new, NOW, HISTORY, 3) == what_if(other, Policy(), new, NOW, HISTORY, 3)


def test_what_can_never_start_gets_a_reason_and_no_date() -> None:
    forecast = what_if(cluster(H100=1), Policy(), job("x", size=8, pods=2), NOW)
    assert forecast.p50_s is None
    assert forecast.record is not None
    assert forecast.record.code in (WaitCode.NODE_TOO_SMALL, WaitCode.UNKNOWN_TENANT)
    assert forecast.record.job == JobId("uid-x")
