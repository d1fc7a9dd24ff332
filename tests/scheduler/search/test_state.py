"""The planning state equals the snapshot, whether it was built from it or updated to it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from busbar.scheduler import Job, Objective, Policy, Snapshot, SnapshotError
from busbar.scheduler.search.follow import follow
from busbar.scheduler.search.queues import Order
from busbar.scheduler.search.round import Round
from busbar.scheduler.search.start import order
from busbar.scheduler.search.state import PlanningState

from ..build import NOW, cluster, job, nodes, placed

POLICY = Policy()


def _running(name: str, tenant: str, size: int, node: int = 0) -> Job:
    return job(name, tenant, size, on=placed("H100", f"H100-{node:04d}", size=size))


def _releasing(one: Job) -> Job:
    assert one.run is not None
    return replace(one, run=replace(one.run, releasing=True))


def _facts(state: PlanningState) -> dict[str, object]:
    """The parts of the state that decisions read."""
    pool = state.cluster.pools["H100"]
    return {
        "waiting": sorted(state.waiting),
        "releasing": sorted(state.releasing),
        "held": {key: sorted(jobs) for key, jobs in state.held.items() if jobs},
        "units": {tenant: state.holdings.units(tenant) for tenant in state.holdings.tenants},
        "entitled": state.holdings.entitled,
        "free": pool.free_now,
        "free after releases": pool.free_later,
        "on nodes": {n.name: sorted(one.job.id for one in state.on_node("H100", n.name)) for n in pool.nodes},
        "moved": state.moved,
        "mean run": state.mean_run_s(NOW),
        "started": {name: one.started_at_s for name, one in state.assignments.items()},
        "value": state.value(),
        "bound": state.bound(),
        "order": {name: one.option.candidates for name, one in state.assignments.items()},
    }


def test_the_state_lists_running_waiting_and_releasing_jobs_and_free_capacity() -> None:
    stopping = _releasing(_running("s", "b", 2))
    state = PlanningState(cluster(_running("r", "a", 3), stopping, job("w", "b"), H100=1), POLICY, NOW)
    assert state.waiting.keys() == {"uid-w"}
    assert state.releasing.keys() == {"uid-s"}
    assert state.held["H100", "a"].keys() == {"uid-r"}
    pool = state.cluster.pools["H100"]
    assert pool.free_m() == 8000 - 3000 - 2000
    assert pool.free_m(later=True) == 8000 - 3000
    assert state.holdings.held("a", "H100") == 3000
    assert state.holdings.held("b", "H100") == 0, "what is being stopped counts against limits only"
    assert state.holdings.counted_m("b", "H100") == 2000


def test_following_a_change_gives_what_a_new_state_gives() -> None:
    a, b, c = _running("a", "a", 3), _running("b", "b", 4, node=1), job("c", "b", size=2)
    before = cluster(a, b, c, job("d", "a"), H100=2)
    started = replace(c, run=_running("c", "b", 2).run)
    more = (*before.nodes, *nodes("H100", 1, first=2))
    after = replace(before, nodes=more, jobs=(_releasing(a), started, job("d", "a"), job("e", "a", size=8)))
    state = PlanningState(before, POLICY, NOW)
    state.rank()
    prices = dict(state.market.prices)
    assert follow(state, after)
    assert _facts(state) == _facts(PlanningState(after, POLICY, NOW, prices, state.share_prices))


@pytest.mark.parametrize(
    "asked",
    [
        {"most_devices": 1},
        {"more_host_memory_mib": 200_000},
        {"required_domain": 1},
        {"node_selector": (("disk", "fast"),)},
        {"priority": 300},
        {"attained_s": 90_000.0},
        {"user": "ann"},
        {"yields": True},
    ],
)
def test_following_another_request_of_a_job_gives_what_a_new_state_gives(asked: dict[str, Any]) -> None:
    before = cluster(_running("a", "a", 3), job("c", "b", size=2), job("d", "b"), job("e", "b"), H100=2)
    after = replace(before, jobs=tuple(replace(one, **asked) for one in before.jobs[:2]) + before.jobs[2:])
    state = PlanningState(before, POLICY, NOW)
    state.rank()
    _line(state)
    assert follow(state, after)
    fresh = PlanningState(after, POLICY, NOW, state.market.prices, state.share_prices)
    fresh.rank()
    assert _facts(state) == _facts(fresh)
    assert _line(state) == _line(fresh)
    assert {t: n for t, n in state.asking.items() if n} == {t: n for t, n in fresh.asking.items() if n}
    assert state.priorities == fresh.priorities


def test_a_job_that_goes_on_where_it_ran_is_followed() -> None:
    one, other = _running("a", "a", 3), _running("b", "b", 4, node=1)
    assert one.run is not None
    before = cluster(one, other, H100=2)
    run = replace(one.run, started_at_s=NOW - 900.0, saved_at_s=NOW)
    after = replace(before, jobs=(replace(one, run=run, last_move_at_s=NOW - 900.0), other))
    state = PlanningState(before, POLICY, NOW)
    state.rank()
    for snapshot in (after, before):
        assert follow(state, snapshot)
        assert _facts(state) == _facts(PlanningState(snapshot, POLICY, NOW, state.market.prices, {}))


def test_jobs_that_were_stopped_stand_in_groups_of_equal_requests() -> None:
    stopped = [
        replace(job(name, "b", size=size), last_move_at_s=NOW)
        for name, size in zip("abc", (2, 2, 4), strict=True)
    ]
    before = cluster(*stopped, job("d", "b", size=2), H100=2)
    state = PlanningState(before, POLICY, NOW)
    assert _groups(state) == [["uid-a", "uid-b"], ["uid-c"]]
    assert follow(state, replace(before, jobs=before.jobs[1:]))
    assert _groups(state) == [["uid-b"], ["uid-c"]]
    assert follow(state, replace(before, jobs=before.jobs[:2]))
    assert _groups(state) == [["uid-a", "uid-b"]], "an empty group is forgotten"


def _groups(state: PlanningState) -> list[list[str]]:
    groups = state.queues.groups(state.ranked)
    return sorted(sorted(group) for kinds in groups.values() for group in kinds.values())


def test_a_job_that_was_stopped_stands_beside_the_queues() -> None:
    before = cluster(_running("a", "b", 3), job("c", "b", size=2), job("d", "b"), H100=2)
    stopped = replace(before.jobs[0], run=None, last_move_at_s=NOW)
    started = replace(before.jobs[2], run=_running("d", "b", 1).run)
    state = PlanningState(before, POLICY, NOW)
    assert [key[-1] for key in _line(state)] == ["uid-d", "uid-c"]
    assert follow(state, replace(before, jobs=(stopped, before.jobs[1], started)))
    assert [key[-1] for key in _line(state)] == ["uid-c"]
    assert state.queues.stopped.keys() == {"uid-a"}


def _line(state: PlanningState) -> list[Order]:
    """The queued jobs of the second tenant, in order."""
    return list(state.queues.line("b", partial(order, Round(state, NOW))))


def test_the_state_is_rebuilt_where_a_change_may_affect_all_jobs() -> None:
    before = cluster(job("a"), H100=1)
    dearer = replace(before, pools=(replace(before.pools[0], price_per_hour=2.0),))
    assert not follow(PlanningState(before, POLICY, NOW), dearer)
    makespan = PlanningState(before, Policy(objective=Objective.MAKESPAN), NOW)
    assert not follow(makespan, cluster(job("a"), job("b"), H100=1)), (
        "one more job changes the makespan program"
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: replace(s, jobs=(*s.jobs, *s.jobs)), "two jobs are called 'uid-a'"),
        (lambda s: replace(s, nodes=(*s.nodes, *s.nodes)), "two nodes are called 'H100-0000'"),
        (lambda s: replace(s, nodes=nodes("L4", 1)), "names the pool 'L4', which is not in the snapshot"),
        (lambda s: replace(s, jobs=(replace(s.jobs[0], min_pods=2),)), "pods 2..1 is not a range"),
    ],
)
def test_a_snapshot_that_contradicts_itself_is_refused(change: object, text: str) -> None:
    snapshot: Snapshot = change(cluster(job("a"), H100=1))  # type: ignore[operator]
    with pytest.raises(SnapshotError, match=text):
        PlanningState(snapshot, POLICY, NOW)
