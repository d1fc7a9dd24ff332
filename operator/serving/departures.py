"""What became of the streams of replicas that leave: a row of the status and an event for each one whose streams moved.

A replica of our engine counts them from the beginning of its drain. They are read when its last request is gone, which
the replica waits for before it ends (`workloads/serving/process.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from busbar.kube.contracts.workload import ServingStatus
from busbar.kube.types.reasons import Reason
from busbar.kube.types.service_status import MOST_DEPARTURES, Departure, ModelServiceStatus
from busbar.kube.types.service_words import departure_words
from busbar.operator.serving.view import ServiceView
from busbar.operator.watch.projections import Pod


def departures(view: ServiceView) -> list[Departure] | None:
    """The status's rows, with those of replicas that have just become empty; None for none."""
    old = view.status.departures or []
    known = {row.uid for row in old}
    new = [_row(view, pod, reading) for pod, reading in _empty(view) if pod.uid not in known]
    return [*old, *new][-MOST_DEPARTURES:] or None


def departure_notices(old: ModelServiceStatus, new: ModelServiceStatus) -> list[tuple[str, str]]:
    """The events of the rows that are new."""
    known = {row.uid for row in old.departures or ()}
    return [
        (Reason.STREAMS_MOVED, f"Replica {row.replica} leaves: {departure_words(row)}.")
        for row in new.departures or ()
        if row.uid not in known
    ]


def _empty(view: ServiceView) -> Iterator[tuple[Pod, ServingStatus]]:
    """Replicas whose drain is over and of which streams moved."""
    for pod in view.pods:
        reading = view.readings.get(pod.uid)
        if reading is None or reading.drain is None or reading.running or reading.waiting:
            continue
        if reading.drain.copied or reading.drain.recomputed:
            yield pod, reading


def _row(view: ServiceView, pod: Pod, reading: ServingStatus) -> Departure:
    assert reading.drain is not None
    return Departure(
        time=view.now,
        replica=pod.key.name,
        uid=pod.uid,
        requests=reading.drain.requests,
        copied=reading.drain.copied,
        recomputed=reading.drain.recomputed,
    )
