"""Pods of a TrainingJob that are refused, not placed, not pulled, or whose names are taken."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.operator.builders import (
    NOW,
    admitted,
    gang,
    gated,
    job,
    phase,
    pod,
    running,
    view,
    with_status,
)

from busbar.kube.resources import PODS
from busbar.operator.training.reconcile import reconcile
from busbar.operator.training.view import holders
from busbar.operator.watch.projections import Pod
from busbar.operator.write.actions import Create, Delete


def test_a_gang_that_cannot_be_placed_is_torn_down_and_queued_again() -> None:
    of = admitted(gang(2), 2)
    stuck = pod(1, unschedulable_since=NOW - timedelta(seconds=61), problem="Unschedulable: no room")
    update = reconcile(view(of, running(0), stuck))
    assert phase(update) == "Preempting"
    assert update.status is not None
    assert update.status.reason == "GangIncomplete"
    assert "no room" in (update.status.message or "")


QUOTA = 'pods "job-1-0" is forbidden: exceeded quota: team'


def test_a_refused_pod_is_told_where_a_person_reads_it_and_tried_again() -> None:
    update = reconcile(view(admitted(job()), refused=QUOTA))
    assert update.status is not None
    assert (update.status.phase, update.status.reason) == ("Admitted", "PodsRefused")
    assert QUOTA in (update.status.message or "")
    assert [a.resource for a in update.actions if isinstance(a, Create)] == [PODS]


def test_a_job_whose_pods_are_refused_gives_its_place_back() -> None:
    update = reconcile(view(admitted(job()), refused=QUOTA, now=NOW + timedelta(seconds=61)))
    assert phase(update) == "Preempting"
    assert update.status is not None
    assert QUOTA in (update.status.message or "")


@pytest.mark.parametrize("pods", [(), (gated(0), gated(1))], ids=["never made", "never let go"])
def test_a_gang_whose_pods_never_come_does_not_keep_its_place_for_ever(pods: tuple[Pod, ...]) -> None:
    update = reconcile(view(admitted(gang(2), 2), *pods, now=NOW + timedelta(seconds=901)))
    assert phase(update) == "Preempting"
    assert update.status is not None
    assert update.status.reason == "GangIncomplete"


def foreign(rank: int = 0, **fields: Any) -> Pod:
    """Somebody else's pod under the name of one of the job's."""
    return replace(pod(rank), **{"kind": "", "job": "", "owner_uid": "uid-other", **fields})


@pytest.mark.parametrize(
    ("owner", "said"), [("ReplicaSet web-5d4c", "ReplicaSet web-5d4c"), ("", "nobody")], ids=["owned", "bare"]
)
def test_a_job_whose_pods_name_is_taken_says_by_whom_and_gives_its_place_back(owner: str, said: str) -> None:
    of = admitted(gang(2), 2)
    held = holders(of, (gated(0),), {p.key: p for p in (gated(0), foreign(1, owner=owner))})
    update = reconcile(view(of, gated(0), holders=held))
    assert phase(update) == "Preempting"
    assert update.status is not None
    assert f"Pod job-1-1 exists already and belongs to {said}" in (update.status.message or "")
    assert not update.actions
    queued = reconcile(view(with_status(of, update)))
    assert queued.status is not None
    assert (queued.status.phase, queued.status.admission) == ("Queued", None)
    assert "Pod job-1-1" in (queued.status.message or "")


def test_the_pods_of_an_earlier_object_of_the_name_are_waited_for() -> None:
    of = admitted(job())
    held = (replace(pod(0), owner_uid="uid-before"),)
    waits = reconcile(view(of, holders=held))
    assert waits.status is not None
    assert (waits.status.phase, waits.status.reason) == ("Admitted", "PodsRefused")
    assert "belongs to an earlier object named job" in (waits.status.message or "")
    assert (waits.actions, waits.again_s) == ((), 1.0)
    assert phase(reconcile(view(of, holders=held, now=NOW + timedelta(seconds=61)))) == "Preempting"
    leaving = (foreign(deleting=True),)
    assert phase(reconcile(view(of, holders=leaving))) == "Admitted"


def test_only_pods_of_others_hold_a_name() -> None:
    of = admitted(job())
    for mine, others in (((pod(0),), ()), ((pod(1),), ()), ((), (foreign(0),)), ((), ())):
        assert holders(of, mine, {p.key: p for p in (*mine, *others)}) == others
    assert holders(of, (pod(0),), {pod(0).key: foreign(0)}) == (), (
        "all its pods are there: no name is looked up"
    )
    assert holders(job(), (), {foreign(0).key: foreign(0)}) == (), "without an admission it needs no name"
    assert reconcile(view(of, pod(0), holders=(foreign(1),))).status is not None


def unpullable(rank: int = 0) -> Pod:
    return pod(rank, node=f"node-{rank}", problem="ImagePullBackOff: Back-off pulling image own")


def test_an_image_that_cannot_be_pulled_uses_up_the_tries_and_waits_longer_each_time() -> None:
    of, waits = admitted(gang(2, retryLimit=2), 2), []
    late = NOW + timedelta(seconds=901)
    for restarts in (1, 2):
        torn = reconcile(view(of, unpullable(0), unpullable(1), now=late))
        assert phase(torn) == "Preempting"
        assert torn.status is not None
        assert (torn.status.reason, torn.status.restarts) == ("GangIncomplete", restarts)
        freed = reconcile(view(with_status(of, torn), now=late))
        assert phase(freed) == "Queued"
        assert freed.status is not None
        assert freed.status.restarts == restarts
        assert freed.status.retry_at is not None
        waits.append((freed.status.retry_at - late).seconds)
        of = admitted(gang(2, retryLimit=2), 2, restarts=restarts)
    assert waits == [15, 30]
    end = reconcile(view(of, unpullable(0), unpullable(1), now=late))
    assert phase(end) == "Failed"
    assert end.status is not None
    assert end.status.reason == "RetryLimitReached"
    assert "ImagePullBackOff: Back-off pulling image own. This was try 3 of 3." in (end.status.message or "")
    assert len([a for a in end.actions if isinstance(a, Delete)]) == 2


@pytest.mark.parametrize("other", [pod(1), gated(1, node="node-1")], ids=["without a node", "gated"])
def test_a_gang_that_the_cluster_does_not_place_loses_no_try(other: Pod) -> None:
    pods = (unpullable(0), other)
    update = reconcile(view(admitted(gang(2, retryLimit=0), 2), *pods, now=NOW + timedelta(seconds=901)))
    assert phase(update) == "Preempting"
    assert update.status is not None
    assert not update.status.restarts
