"""A server that was started again within its container is told of once: in the status and by an event."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from pydantic import ValidationError
from tests.operator.builders import NOW, RENDERING, SETTINGS, replica, service

from busbar.kube.contracts.workload import MOST_CAUSE, RestartReport, ServingStatus
from busbar.kube.types.service_status import MOST_CRASHES
from busbar.operator.serving.crashes import PAUSE
from busbar.operator.serving.reconcile import reconcile
from busbar.operator.serving.view import ModelPlace, ServiceUpdate, ServiceView
from busbar.operator.watch.projections import Pod

AT = NOW - timedelta(seconds=2)
CAUSE = "the engine's process was ended by signal 9 (SIGKILL), so the replica ended too"


def view(*pods: Pod, **readings: ServingStatus) -> ServiceView:
    of = service(replicas=len(pods), status={"desiredReplicas": len(pods), "observedGeneration": 1})
    place = ModelPlace(uri="pvc://claim/model")
    return ServiceView(of, pods, NOW, SETTINGS, RENDERING, place, readings=readings)


def crashed(count: int = 1, at: datetime = AT, cause: str = CAUSE) -> ServingStatus:
    return ServingStatus(ready=True, restarted=RestartReport(count=count, cause=cause, at=at))


def after(seen: ServiceView, update: ServiceUpdate, seconds: float, **readings: ServingStatus) -> ServiceView:
    """The view a while later, with the status that was written."""
    of = seen.service.model_copy(update={"status": update.status or seen.status})
    return replace(seen, service=of, now=seen.now + timedelta(seconds=seconds), readings=readings)


def test_a_crash_is_a_row_an_event_and_a_restart() -> None:
    pod = replica(0, restarts=1)
    seen = view(pod, **{pod.uid: crashed(count=2)})
    told = reconcile(seen)
    assert told.status is not None
    assert told.status.restarts == 3
    (row,) = told.status.crashes or []
    assert (row.time, row.replica, row.uid, row.restarts) == (AT, pod.key.name, pod.uid, 2)
    text = f"Replica {pod.key.name} crashed, and serves again: {CAUSE} (2 restarts of its server since its container began)."
    assert told.notices == (("ReplicaCrashed", text),)
    again = reconcile(after(seen, told, 120, **{pod.uid: crashed(count=2)}))
    assert again.notices == ()
    assert again.status is None or again.status.crashes == told.status.crashes


def test_a_replica_that_crashes_again_and_again_is_told_of_once_a_minute() -> None:
    pod = replica(0)
    seen = view(pod, **{pod.uid: crashed()})
    update = reconcile(seen)
    soon = after(seen, update, 30, **{pod.uid: crashed(2, AT + timedelta(seconds=29))})
    assert reconcile(soon).notices == ()
    late = after(seen, update, PAUSE.total_seconds(), **{pod.uid: crashed(4, AT + timedelta(seconds=59))})
    told = reconcile(late)
    assert [reason for reason, _ in told.notices] == ["ReplicaCrashed"]
    assert told.status is not None
    assert [row.restarts for row in told.status.crashes or ()] == [1, 4]


def test_a_container_that_was_started_again_counts_anew() -> None:
    pod = replica(0)
    seen = view(pod, **{pod.uid: crashed(count=5)})
    update = reconcile(seen)
    started = after(seen, update, 600, **{pod.uid: crashed(1, AT + timedelta(seconds=590))})
    told = reconcile(replace(started, pods=(replace(pod, restarts=1),)))
    assert told.status is not None
    assert told.status.restarts == 2
    assert [row.restarts for row in told.status.crashes or ()] == [5, 1]


def test_nothing_is_told_where_nothing_crashed_and_only_the_last_rows_are_kept() -> None:
    quiet = reconcile(view(replica(0), **{replica(0).uid: ServingStatus(ready=True)}))
    assert (quiet.notices, quiet.status and quiet.status.crashes) == ((), None)
    pods = [replica(index) for index in range(MOST_CRASHES + 2)]
    told = reconcile(view(*pods, **{pod.uid: crashed() for pod in pods}))
    assert told.status is not None
    assert [row.replica for row in told.status.crashes or ()] == [pod.key.name for pod in pods[2:]]


@pytest.mark.parametrize(
    ("change", "accepted"),
    [
        ({}, True),
        ({"count": 0}, False),
        ({"cause": "x" * MOST_CAUSE}, True),
        ({"cause": "x" * (MOST_CAUSE + 1)}, False),
        ({"at": "2026-01-01T00:00:00"}, False),  # without a zone it could not be compared
        ({"at": "yesterday"}, False),
    ],
)
def test_a_report_that_cannot_be_used_is_refused(change: dict[str, object], accepted: bool) -> None:
    told: dict[str, object] = {"count": 1, "cause": CAUSE, "at": datetime(2026, 1, 1, tzinfo=UTC).isoformat()}
    if accepted:
        assert ServingStatus.model_validate({"restarted": told | change}).restarted is not None
    else:
        with pytest.raises(ValidationError):
            ServingStatus.model_validate({"restarted": told | change})
