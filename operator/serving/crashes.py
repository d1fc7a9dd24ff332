"""Crashes after which a replica's server was started again within its container: a row of the status and an event for each.

A container that ends is counted by its kubelet, and its pod says so. Of a server that its supervisor starts again
(`--keep-weights`, `workloads/serving/supervisor.py`) only the next server tells. It is the tenant's container, so it is believed
once in PAUSE at most; what came in between is in the count of the next row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta

from busbar.kube.contracts.workload import ServingStatus
from busbar.kube.types.reasons import Reason
from busbar.kube.types.service_status import MOST_CRASHES, ModelServiceStatus, ServerCrash
from busbar.kube.types.service_words import crash_words
from busbar.operator.serving.view import ServiceView
from busbar.operator.watch.projections import Pod
from busbar.operator.write.status import clip

PAUSE = timedelta(seconds=60)


def restarts_of(pod: Pod, readings: Mapping[str, ServingStatus]) -> int:
    """Of its container, and of the server in it."""
    reading = readings.get(pod.uid)
    within = reading.restarted.count if reading is not None and reading.restarted is not None else 0
    return pod.restarts + within


def crashes(view: ServiceView, alive: Iterable[Pod]) -> list[ServerCrash] | None:
    """The status's rows, with those of crashes that are told for the first time; None for none."""
    old = view.status.crashes or []
    last = {row.uid: row for row in old}
    return [*old, *_new(view, alive, last)][-MOST_CRASHES:] or None


def crash_notices(old: ModelServiceStatus, new: ModelServiceStatus) -> list[tuple[str, str]]:
    """The events of the rows that are new."""
    known = {(row.uid, row.time) for row in old.crashes or ()}
    return [
        (Reason.REPLICA_CRASHED, f"Replica {row.replica} crashed, and serves again: {crash_words(row)}.")
        for row in new.crashes or ()
        if (row.uid, row.time) not in known
    ]


def _new(view: ServiceView, alive: Iterable[Pod], last: Mapping[str, ServerCrash]) -> Iterator[ServerCrash]:
    for pod in alive:
        reading = view.readings.get(pod.uid)
        if reading is None or reading.restarted is None:
            continue
        time, told = reading.restarted.at.replace(microsecond=0), last.get(pod.uid)
        if told is None or (time > told.time and view.now - told.time >= PAUSE):
            yield ServerCrash(
                time=time,
                replica=pod.key.name,
                uid=pod.uid,
                restarts=reading.restarted.count,
                cause=clip(reading.restarted.cause),
            )
