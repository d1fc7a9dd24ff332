"""Running elastic jobs give pods to each other where that does more work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from busbar.scheduler import Cell, Job, PerformanceTable, Policy, Rate, Snapshot, User, check_plan, plan

from ..build import NOW, cluster, job, tenant
from .test_growth import elastic, settled

POLICY = Policy(solver_seconds=None)
CELLS = tuple(Cell("flat", "H100", 1000 * pods, speed=float(pods) ** 0.5) for pods in range(1, 9))
"""Four pods are twice as fast as one, and eight not three times."""
TABLE = PerformanceTable(CELLS, (Rate("H100"),))


def _beside(large: int, small: int, **about: object) -> tuple[Job, Job]:
    """Two jobs that have hours to run, of so many pods."""
    jobs = (elastic("large", 1, 8, on=large), elastic("small", 1, 8, on=small))
    known = {"workload_class": "flat", "remaining_work": 20 * 3600 * 8**0.5}
    first, second = (replace(one, **(known | about)) for one in jobs)  # type: ignore[arg-type]
    return first, second


def _settled(*jobs: Job, snapshot: Snapshot | None = None) -> dict[str, int]:
    return settled(replace(snapshot or cluster(*jobs, H100=1), table=TABLE))


@pytest.mark.parametrize("large", [7, 6])
def test_pods_go_where_they_do_more_work(large: int) -> None:
    found = _settled(*_beside(large, 8 - large))
    assert sum(found.values()) == 8
    assert found["large"] - found["small"] <= 2


def test_equal_jobs_stay_as_they_are() -> None:
    assert _settled(*_beside(4, 4)) == {"large": 4, "small": 4}


def test_restarts_must_pay() -> None:
    """Ten minutes before their ends, and an hour after the last checkpoint."""
    for about in ({"remaining_work": 600.0}, {"restart_s": 7200.0}):
        made, _ = plan(replace(cluster(*_beside(7, 1, **about), H100=1), table=TABLE), POLICY, NOW)
        assert made.actions == ()


def test_users_keep_what_they_have() -> None:
    large, small = _beside(7, 1)
    users = (User("ada"), User("bob"))
    team = replace(tenant("a"), users=users)
    snapshot = cluster(replace(large, user="ada"), replace(small, user="bob"), tenants=(team,), H100=1)
    made, _ = plan(replace(snapshot, table=TABLE), POLICY, NOW)
    assert check_plan(replace(snapshot, table=TABLE), made) == []
    assert made.actions == ()


def test_a_pool_that_somebody_waits_for_is_left_alone() -> None:
    large, small = _beside(7, 1)
    waits = replace(job("waits", size=2, workload_class="flat"), preemptible=False)
    others = (replace(large, preemptible=False), small)
    made, _ = plan(replace(cluster(*others, waits, H100=1), table=TABLE), POLICY, NOW)
    assert made.actions == ()
