"""A gang's slow pod is a condition and an event."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tests.operator.builders import NOW, admitted, job, running, view, with_status

from busbar.kube.types import Condition, TrainingJob
from busbar.kube.types.training_job import TrainingJobStatus
from busbar.operator.pods.readings import parse_reading
from busbar.operator.training.degraded import news
from busbar.operator.training.reconcile import reconcile

PODS = tuple(running(rank) for rank in range(3))


def gang() -> TrainingJob:
    of = admitted(job(shape={"minPods": 3, "maxPods": 3}), 3)
    return with_status(of, reconcile(view(of, *PODS)))


def read(of: TrainingJob, *seconds: float, minutes: int = 1) -> TrainingJobStatus:
    """The status after rank 0 has said how long each rank takes, the slowest first."""
    order = sorted(range(len(seconds)), key=lambda rank: -seconds[rank])
    workers: list[dict[str, Any]] = [{"rank": rank, "ownSeconds": seconds[rank]} for rank in order]
    said = parse_reading({"kind": "training", "phase": "Training", "step": minutes, "workers": workers})
    assert said is not None
    update = reconcile(view(of, *PODS, now=NOW + timedelta(minutes=minutes), readings={PODS[0].uid: said}))
    assert update.status is not None
    return update.status


def degraded(status: TrainingJobStatus) -> Condition | None:
    return next((c for c in status.conditions or () if c.type == "Degraded"), None)


def test_a_gang_whose_pods_keep_pace_has_no_such_condition() -> None:
    assert degraded(read(gang(), 1.0, 1.4, 1.0)) is None
    assert degraded(read(gang())) is None


def test_a_slow_pod_is_named_with_its_node_until_it_keeps_pace_again() -> None:
    of = gang()
    slow = read(of, 1.0, 1.6, 1.0)
    found = degraded(slow)
    assert found is not None
    assert (found.status, found.reason) == ("True", "SlowPod")
    assert (
        found.message
        == "The others wait for rank 1: 1.6 s of each step, 1.60 times the others. It is on node-1."
    )
    of = of.model_copy(update={"status": slow})
    still = degraded(read(of, 1.0, 1.3, 1.0, minutes=2))  # between both limits nothing changes
    assert still is not None
    assert (still.status, still.last_transition_time) == ("True", found.last_transition_time)
    over = read(of, 1.0, 1.2, 1.0, minutes=3)
    ended = degraded(over)
    assert ended is not None
    assert (ended.status, ended.message) == ("False", "No pod keeps the others waiting.")
    assert ended.last_transition_time > found.last_transition_time
    kinds = [c.type for c in over.conditions or ()]
    assert len(kinds) == len(set(kinds))


def test_an_event_is_told_when_a_pod_becomes_slow_and_not_again() -> None:
    of = gang()
    slow = read(of, 1.0, 1.0, 2.0)
    told = news(of.status, slow)
    assert told is not None
    assert (told[0], "rank 2" in told[1]) == ("SlowPod", True)
    assert news(slow, read(of.model_copy(update={"status": slow}), 1.0, 1.0, 2.5, minutes=2)) is None
    assert news(None, of.status or TrainingJobStatus()) is None
