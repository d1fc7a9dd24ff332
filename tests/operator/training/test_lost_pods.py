"""Pods on nodes that do not answer: jobs of the platform's engine go on elsewhere, and others wait for a person."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.operator.builders import (
    NOW,
    SETTINGS,
    admitted,
    ended,
    gang,
    job,
    phase,
    running,
    view,
    with_status,
)

from busbar.kube.types import TrainingJob
from busbar.operator.training.reconcile import reconcile
from busbar.operator.training.view import JobUpdate
from busbar.operator.watch.projections import Pod
from busbar.operator.write.actions import Delete

SINCE = NOW - timedelta(seconds=SETTINGS.node_lost_s)
SHORT = SINCE + timedelta(seconds=1)


def runs(pods: int = 1, **spec: Any) -> TrainingJob:
    of = admitted(job(shape={"minPods": pods, "maxPods": pods}, **spec), pods)
    return with_status(of, reconcile(view(of, *(running(rank) for rank in range(pods)))))


def told(of: TrainingJob, *pods: Pod, **silent: datetime) -> JobUpdate:
    """With nodes that are silent since some time, `node_0` for node-0."""
    return reconcile(view(of, *pods, silent={name.replace("_", "-"): at for name, at in silent.items()}))


def forced(update: JobUpdate) -> list[str]:
    """Pods that are deleted without their node's word."""
    return [each.key.name for each in update.actions if isinstance(each, Delete) and each.grace_s == 0]


def test_a_job_goes_on_elsewhere_when_its_node_has_been_silent_for_long() -> None:
    early = told(runs(), running(), node_0=SHORT)
    assert (early.status, forced(early)) == (None, [])
    update = told(runs(), running(), node_0=SINCE)
    assert phase(update) == "Queued"
    assert update.status is not None
    assert (update.status.reason, update.status.restarts, update.status.admission) == ("NodeLost", 0, None)
    assert (update.status.message or "").startswith(
        "Node node-0 does not answer; the job starts again from its checkpoint elsewhere. The next attempt"
    )
    after = with_status(runs(), update)
    assert forced(told(after, running(), node_0=SINCE)) == ["job-1-0"]
    dying = running(deleting=True, deletes_at=NOW - timedelta(hours=1))
    assert forced(told(after, dying, node_0=SINCE)) == ["job-1-0"], "its node will never confirm the end"


def test_a_job_of_an_own_image_waits_for_a_person() -> None:
    of = admitted(gang(1), 1)
    of = with_status(of, reconcile(view(of, running())))
    assert told(of, running(), node_0=SINCE - timedelta(hours=1)).status is None
    dead = running(deleting=True, deletes_at=NOW - timedelta(hours=1))
    stopped = with_status(of, told(of, dead, node_0=SINCE))
    left = told(stopped, dead, node_0=SINCE)
    assert left.status is not None
    assert (left.status.reason, forced(left)) == ("PodStuck", [])


def test_what_fails_beside_a_silent_node_does_not_count() -> None:
    others = (ended(0, 1), running(1))
    update = told(runs(2), *others, node_1=NOW)  # rank 0 ended because it lost rank 1
    assert update.status is not None
    assert (update.status.reason, update.status.restarts) == ("NodeLost", 0)
    counted = told(runs(2), *others)
    assert counted.status is not None
    assert (counted.status.reason, counted.status.restarts) == ("Retrying", 1)


def test_only_the_pods_of_the_lost_node_are_deleted_without_its_word() -> None:
    pods = (running(0), running(1))
    of = with_status(runs(2), told(runs(2), *pods, node_1=SINCE))
    update = told(of, *pods, node_1=SINCE)
    assert [(each.key.name, each.grace_s) for each in update.actions if isinstance(each, Delete)] == [
        ("job-1-0", of.spec.preemption.grace_period_seconds),
        ("job-1-1", 0),
    ]


@pytest.mark.parametrize("deleting", [False, True])
def test_a_job_that_is_being_stopped_does_not_wait_for_a_lost_node(deleting: bool) -> None:
    pods = (running(0, port=9400, deleting=deleting), running(1))
    suspended = runs(2).model_copy(deep=True)
    suspended.spec.suspend = True
    of = with_status(suspended, reconcile(view(suspended, *pods)))
    update = told(of, *pods, node_0=SINCE)
    assert forced(update) == ["job-1-0"]
    assert not [each for each in update.actions if not isinstance(each, Delete)], "it cannot be asked to save"
