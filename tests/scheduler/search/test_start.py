"""The order in which jobs start when there is free capacity, and jobs that do not fit."""

from __future__ import annotations

from dataclasses import replace

from busbar.scheduler import JobId, JobKind, Policy, Snapshot, Tenant, User
from busbar.scheduler.search.round import Round
from busbar.scheduler.search.start import order, start_waiting
from busbar.scheduler.search.state import PlanningState

from ..build import NOW, cluster, job, placed, tenant


def _round(snapshot: Snapshot) -> Round:
    return Round(PlanningState(snapshot, Policy(), NOW), NOW)


def _started(snapshot: Snapshot) -> tuple[set[str], list[str]]:
    """The jobs that start, and those that do not, in the order in which they were tried."""
    round_ = _round(snapshot)
    left = start_waiting(round_)
    return {one.job.name for one in round_.changed}, [one.job.name for one in left]


def test_priority_comes_before_serving_and_serving_before_age() -> None:
    high = job("high", priority=200, submitted=NOW - 10)
    replica = job("replica", kind=JobKind.SERVING, submitted=NOW - 20)
    old, new = job("old", submitted=NOW - 9000), job("new", submitted=NOW - 30)
    round_ = _round(cluster(old, new, replica, high, H100=1))
    turns = sorted(round_.waiting(), key=lambda one: order(round_, one))
    assert [one.job.name for one in turns] == ["high", "replica", "old", "new"]


def test_of_replicas_those_that_requests_wait_for_come_first_whatever_their_size_and_age() -> None:
    foreseen = job("foreseen", kind=JobKind.SERVING, submitted=NOW - 9000)
    awaited = replace(job("awaited", size=4, kind=JobKind.SERVING, submitted=NOW - 20), needed_now=True)
    high = job("high", priority=200, submitted=NOW - 10)
    round_ = _round(cluster(foreseen, awaited, high, H100=1))
    turns = sorted(round_.waiting(), key=lambda one: order(round_, one))
    assert [one.job.name for one in turns] == ["high", "awaited", "foreseen"]


def test_a_job_that_was_stopped_comes_after_its_equals() -> None:
    stopped = replace(job("stopped", submitted=NOW - 9000), last_move_at_s=NOW - 299)
    round_ = _round(cluster(stopped, job("new", submitted=NOW), H100=1))
    turns = sorted(round_.waiting(), key=lambda one: order(round_, one))
    assert [one.job.name for one in turns] == ["new", "stopped"]


def test_the_tenant_that_holds_least_for_its_weight_comes_first() -> None:
    # a holds 3 with weight 4, b holds 1 with weight 1: 0.75 against 1.
    running = [
        job(f"{name}-runs", name, size, on=placed("H100", "H100-0000", size=size))
        for name, size in (("a", 3), ("b", 1))
    ]
    waiting = [job("of-a", "a", size=4), job("of-b", "b", size=4)]
    snapshot = cluster(*running, *waiting, tenants=(Tenant("a", weight=4.0), Tenant("b")), H100=1)
    assert _started(snapshot) == ({"of-a"}, ["of-b"])


def test_a_guarantee_comes_before_the_tenant_that_holds_least() -> None:
    running = job("runs", "a", 4, on=placed("H100", "H100-0000", size=4))
    snapshot = cluster(
        running,
        job("owner", "a", size=4),
        job("guest", "b", size=4),
        tenants=(tenant("a", H100=(8, None, None)), tenant("b")),
        H100=1,
    )
    assert _started(snapshot) == ({"owner"}, ["guest"])


def test_the_users_of_a_tenant_take_turns() -> None:
    both = [replace(job(f"u{i}", size=4, submitted=NOW - 9000), user="u") for i in range(2)]
    late = replace(job("v0", size=4, submitted=NOW - 10), user="v")
    assert _started(cluster(*both, late, H100=1)) == ({"u0", "v0"}, ["u1"])
    heavy = Tenant("a", users=(User("u", weight=3.0),))
    small = [replace(one, per_pod=replace(one.per_pod, accelerators_m=2000)) for one in both]
    more = replace(small[0], id=JobId("uid-u2"), name="u2")
    others = [replace(job(f"v{i}", size=2, submitted=NOW - 10), user="v") for i in range(2)]
    started, _ = _started(cluster(*small, more, *others, tenants=(heavy,), H100=1))
    assert started == {"u0", "u1", "u2", "v0"}, "with weights 3 and 1 they have six and two of eight"


def test_a_job_that_does_not_fit_is_passed_over() -> None:
    large, small = job("large", size=8, priority=200), job("small", size=2)
    running = job("runs", size=4, on=placed("H100", "H100-0000", size=4))
    assert _started(cluster(large, small, running, H100=1)) == ({"small"}, ["large"])


def test_a_limit_of_the_quota_holds_a_job_back() -> None:
    capped = tenant("a", H100=(0, None, 3))
    snapshot = cluster(job("two", size=2), job("more", size=2, submitted=NOW), tenants=(capped,), H100=1)
    assert _started(snapshot) == ({"two"}, ["more"])
