"""What others are collected for: a claim is kept off the jobs whose room it is, and no further; half of the reservations
at most are for patience, those that are kept included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from busbar.scheduler import JobId, Policy, applied, plan
from busbar.scheduler.search.claim import Claim
from busbar.scheduler.search.holds import Hold
from busbar.scheduler.search.proposal import propose
from busbar.scheduler.search.round import Round
from busbar.scheduler.search.rules import PRIORITY
from busbar.scheduler.search.state import PlanningState
from busbar.scheduler.search.victim_groups import Victim, VictimGroup

from ..build import NOW, cluster, job, placed, speeds

HALVES = ("cheap", "dear")


def _round(priority: int) -> Round:
    """Two jobs of half a node each on one node, one of which loses little; a claim of half a node; and the holder of a
    reservation, with priority 300."""
    on = placed("H100", "H100-0000", size=4)
    runs = [job("cheap", size=4, on=on, saved=NOW - 10), job("dear", size=4, on=on)]
    waits = [job("claim", size=4, priority=priority), job("holder", size=4, priority=300)]
    return Round(PlanningState(cluster(*runs, *waits, H100=1), Policy(), NOW), NOW)


def _collect(round_: Round, *leaving: str) -> None:
    """Collect half of the node for the holder, from these jobs."""
    holder = round_.assignments[JobId("uid-holder")]
    nodes = round_.cluster.pools["H100"]
    hold = Hold(holder, holder.option.candidates[0], nodes, {0: NOW}, [0])
    hold.leaving = {JobId(f"uid-{name}"): round_.assignments[JobId(f"uid-{name}")] for name in leaving}
    round_.holds[holder.job.id] = hold
    hold.apply()


@pytest.mark.parametrize(
    ("priority", "leaving", "stopped"),
    [
        (200, (), {"cheap"}),
        (200, ("cheap",), {"dear"}),
        (200, ("dear",), {"cheap"}),
        (200, HALVES, set()),
        (400, HALVES, {"cheap"}),
    ],
    ids=["nobody's", "the cheap one's", "the dear one's", "both", "passes"],
)
def test_a_claim_is_kept_off_the_jobs_whose_room_is_collected_for_others(
    priority: int, leaving: tuple[str, ...], stopped: set[str]
) -> None:
    round_ = _round(priority)
    if leaving:
        _collect(round_, *leaving)
    assignment = round_.assignments[JobId("uid-claim")]
    done = propose(Claim(round_, assignment, assignment.option.candidates[0]), (PRIORITY,))
    assert bool(done) is bool(stopped)
    assert {name for name in HALVES if round_.assignments[JobId(f"uid-{name}")].placement is None} == stopped


def test_only_reservations_that_a_job_does_not_pass_bar_it() -> None:
    for priority, bars in ((200, True), (400, False)):
        round_ = _round(priority)
        _collect(round_, "dear")
        claim, holder = (round_.assignments[JobId(f"uid-{name}")] for name in ("claim", "holder"))
        assert round_.barring(claim, "H100") == (list(round_.holds.values()) if bars else [])
        assert round_.barring(holder, "H100") == []
        assert round_.barring(claim, "other") == []


def test_a_group_without_some_jobs_knows_what_the_others_cost() -> None:
    round_ = _round(200)
    nodes = round_.cluster.pools["H100"]
    victims = [
        Victim(round_.assignments[JobId(f"uid-{name}")], cost, nodes)
        for name, cost in zip(HALVES, (1.0, 8.0), strict=True)
    ]
    group = VictimGroup(victims, nodes)
    assert group.least(4000).tolist() == [1.0]
    left = group.without({JobId("uid-cheap")})
    assert (left.count, left.least(4000).tolist(), left.least(8000).tolist()) == (1, [8.0], [16.0])
    assert group.without({JobId("uid-claim")}) is group
    assert group.without({JobId(f"uid-{name}") for name in HALVES}).count == 0
    assert (group.count, group.least(4000).tolist()) == (2, [1.0]), "the group itself is not changed"


def test_kept_reservations_count_for_the_limit_on_patience() -> None:
    """Of two reservations one may be for patience. It is made with the first plan, and the second plan, which keeps it,
    makes no other; with room for four, both have one."""
    running: dict[str, Any] = {"workload_class": "c", "remaining": 9e5, "preemptible": False}
    runs = [job(f"r{i}", size=8, on=placed("H100", f"H100-{i:04d}", size=8), **running) for i in range(4)]
    waits = [
        job(f"p{i}", size=8, pods=2, workload_class="c", remaining=3600.0, submitted=NOW - 90_000 - i)
        for i in range(2)
    ]
    small = job("small", workload_class="c", remaining=3600.0, submitted=NOW)
    snapshot = cluster(*runs, *waits, small, H100=4)
    snapshot = replace(snapshot, table=speeds("c", H100=1.0))
    for most, expected in ((2, 1), (4, 2)):
        policy = Policy(solver=False, reservations=most)
        first, _ = plan(snapshot, policy, NOW)
        after = applied(snapshot, first, NOW)
        assert after.reservations == first.reservations
        second, _ = plan(after, policy, NOW + 10)
        assert (len(first.reservations), len(second.reservations)) == (expected, expected)
        assert second.reservations[0].job == first.reservations[0].job
