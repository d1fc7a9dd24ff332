"""A replica that leaves, whose streams others go on with, is told of once: in the status and by an event."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from tests.operator.builders import RENDERING, SETTINGS, replica, service

from busbar.kube.contracts.workload import DrainReport, ServingStatus
from busbar.kube.types.service_status import MOST_DEPARTURES
from busbar.operator.serving.reconcile import reconcile
from busbar.operator.serving.view import ModelPlace, ServiceView
from busbar.operator.watch.projections import Pod

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def view(pod: Pod, reading: ServingStatus) -> ServiceView:
    of = service(replicas=0, minReplicas=0)
    place = ModelPlace(uri="pvc://claim/model")
    return ServiceView(of, (pod,), NOW, SETTINGS, RENDERING, place, readings={pod.uid: reading})


def draining(running: int = 0, **drain: int) -> ServingStatus:
    return ServingStatus(draining=True, running=running, drain=DrainReport(**drain))


def test_streams_that_moved_are_told_once_their_replica_is_empty() -> None:
    pod = replica(2, draining_since=NOW - timedelta(seconds=3))
    busy = reconcile(view(pod, draining(running=1, requests=7, copied=4)))
    assert busy.status is not None
    assert busy.status.departures is None
    empty = view(pod, draining(requests=7, copied=4, recomputed=1))
    told = reconcile(empty)
    assert told.status is not None
    assert told.status.departures is not None
    (row,) = told.status.departures
    assert (row.time, row.replica, row.uid) == (NOW, pod.key.name, pod.uid)
    words = (
        "5 of 7 requests went on at other replicas, 4 with their keys and values, "
        "1 by computing their tokens again"
    )
    assert told.notices == (("StreamsMoved", f"Replica {pod.key.name} leaves: {words}."),)
    known = replace(empty, service=empty.service.model_copy(update={"status": told.status}))
    again = reconcile(replace(known, now=NOW + timedelta(seconds=1)))
    assert again.notices == ()
    assert again.status is None or again.status.departures == told.status.departures


def test_nothing_is_told_where_nothing_moved_or_nobody_tells() -> None:
    pod = replica(0, draining_since=NOW - timedelta(seconds=3))
    for reading in (draining(requests=3), ServingStatus(draining=True), ServingStatus()):
        update = reconcile(view(pod, reading))
        assert update.status is not None
        assert update.status.departures is None
        assert update.notices == ()


def test_a_replica_that_somebody_else_deletes_tells_too_and_only_the_last_rows_are_kept() -> None:
    of = service(replicas=0, minReplicas=0)
    for index in range(MOST_DEPARTURES + 2):
        pod = replace(replica(index, deleting=True), uid=f"uid-{index}")
        seen = replace(view(pod, draining(requests=1, copied=1)), service=of)
        status = reconcile(seen).status
        assert status is not None
        of = of.model_copy(update={"status": status})
    rows = of.status.departures if of.status is not None else None
    assert [row.uid for row in rows or ()] == [f"uid-{i}" for i in range(2, MOST_DEPARTURES + 2)]
