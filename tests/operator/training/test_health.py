"""A gang's slow pod, and a plan of memory that does not hold, are conditions and events."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.operator.builders import NOW, admitted, job, running, view, with_status

from busbar.kube.types import Condition, TrainingJob
from busbar.kube.types.training_status import TrainingJobStatus
from busbar.operator.pods.readings import parse_reading
from busbar.operator.training.health import news
from busbar.operator.training.reconcile import reconcile
from busbar.operator.watch.projections import Exit

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
    ((reason, message),) = news(of.status, slow)
    assert (reason, "rank 2" in message) == ("SlowPod", True)
    assert not list(news(slow, read(of.model_copy(update={"status": slow}), 1.0, 1.0, 2.5, minutes=2)))
    assert not list(news(None, of.status or TrainingJobStatus()))


MIB = 2**20


def told(
    of: TrainingJob,
    pod: Any,
    host: dict[str, tuple[int, int | None]],
    device: tuple[int, int] | None = None,
    minutes: int = 1,
) -> TrainingJobStatus:
    """The status after the engine has said what was planned and measured, in MiB."""
    phases: dict[str, dict[str, int]] = {}
    for name, (planned, measured) in host.items():
        phases[name] = {"plannedBytes": planned * MIB}
        if measured is not None:
            phases[name]["measuredBytes"] = measured * MIB
    said: dict[str, Any] = {
        "kind": "training",
        "phase": "Training",
        "step": minutes,
        "memory": {"phases": phases},
    }
    if device is not None:
        bytes_of = {"plannedDeviceBytes": device[0] * MIB, "peakDeviceBytes": device[1] * MIB}
        said["report"] = {
            "class": "w",
            "accelerator": "cpu",
            "tokensPerSecond": 1e3,
            "samples": 20,
            **bytes_of,
        }
    reading = parse_reading(said)
    assert reading is not None
    update = reconcile(view(of, pod, now=NOW + timedelta(minutes=minutes), readings={pod.uid: reading}))
    assert update.status is not None
    return update.status


def fits(status: TrainingJobStatus) -> Condition | None:
    return next((c for c in status.conditions or () if c.type == "PlanFits"), None)


@pytest.mark.parametrize(
    ("host", "device", "holds"),
    [
        ({"start": (800, 900), "step": (1000, None)}, None, "True"),  # above its phase, below the plan
        ({"start": (800, 790), "step": (4000, 4199)}, None, "True"),
        ({"start": (800, 790), "step": (4000, 4201)}, None, "False"),
        ({"step": (100, 227)}, None, "True"),  # of little, what a heap keeps
        ({"step": (100, 229)}, None, "False"),
        ({"step": (1000, 900)}, (4000, 4201), "False"),
        ({"step": (1000, 900)}, (2000, 2000), "True"),
    ],
)
def test_more_memory_than_planned_is_told_once(
    host: dict[str, tuple[int, int | None]], device: tuple[int, int] | None, holds: str
) -> None:
    of, pod = admitted(job(), 1), running(0)
    of = with_status(of, reconcile(view(of, pod)))
    status = told(of, pod, host, device)
    found = fits(status)
    assert found is not None
    assert (found.status, found.reason) == (holds, "PlanKept" if holds == "True" else "PlanExceeded")
    assert f"host {max(peak or 0 for _, peak in host.values())} MiB of" in found.message
    assert [reason for reason, _ in news(of.status, status)] == ["PlanExceeded"] * (holds == "False")
    later = told(of.model_copy(update={"status": status}), pod, host, device, minutes=2)
    assert not list(news(status, later))


def test_before_anything_is_measured_there_is_no_word_of_the_plan() -> None:
    of, pod = admitted(job(), 1), running(0)
    of = with_status(of, reconcile(view(of, pod)))
    assert fits(told(of, pod, {"step": (1000, None)})) is None
    assert fits(told(of, pod, {"step": (0, 500)})) is None


def test_the_end_keeps_what_was_told_of_the_plan_and_a_refused_one_is_told_with_the_engines_sentence() -> (
    None
):
    of, pod = admitted(job(), 1), running(0)
    of = with_status(of, reconcile(view(of, pod)))
    of = of.model_copy(update={"status": told(of, pod, {"step": (1000, 900)})})
    done = reconcile(view(of, replace(pod, phase="Succeeded", exit=Exit(0, "Completed", "", NOW))))
    assert done.status is not None
    assert fits(done.status) is not None
    why = "the host needs 9.1 GiB of 8 GiB. Nothing was allocated. What would help: ..."
    said = {"kind": "training", "phase": "Failed", "message": why, "errorCode": "does-not-fit"}
    ended = replace(pod, phase="Failed", exit=Exit(2, "Error", json.dumps(said), NOW))
    failed = reconcile(view(of, ended)).status
    assert failed is not None
    assert failed.phase == "Failed"
    found = fits(failed)
    assert found is not None
    assert (found.status, found.reason, found.message) == ("False", "PlanRefused", why)


def saved(slow: int | None, rate: int = 40) -> TrainingJobStatus:
    """A status with a checkpoint, of which so many were slow."""
    checkpoint = {
        "step": 9,
        "uri": "pvc://out/run/checkpoints",
        "mibPerSecond": rate,
        "usualMibPerSecond": 310,
    }
    checkpoint |= {} if slow is None else {"slowInARow": slow}
    admission = {"id": "x", "pool": "p", "accelerator": "A100", "pods": 1, "nodes": ["node-7"]}
    return TrainingJobStatus.model_validate({"checkpoint": checkpoint, "admission": admission})


def linked(direction: str | None) -> TrainingJobStatus:
    """A status of a run whose link is slow in this direction, if it is."""
    slow = {"direction": direction, "mibPerSecond": 3100, "usualMibPerSecond": 24_800}
    progress = {"step": 9} | ({} if direction is None else {"slowLink": slow})
    admission = {"id": "x", "pool": "p", "accelerator": "A100", "pods": 1, "nodes": ["node-7"]}
    return TrainingJobStatus.model_validate({"progress": progress, "admission": admission})


def test_a_link_that_became_slow_is_an_event_once() -> None:
    [(reason, message)] = news(linked(None), linked("load"))
    assert reason == "SlowLink"
    assert message.startswith(
        "The link to the host is slow: 3100 MiB/s to the accelerator (usually 24800), so each step takes longer. Look at node "
        "node-7: has the card lost lanes"
    )
    assert list(news(linked("load"), linked("store"))) == []
    assert list(news(linked("load"), linked(None))) == []
    assert ["MiB/s from the accelerator" in each[1] for each in news(None, linked("store"))] == [True]


def test_a_disk_that_became_slow_is_an_event_once() -> None:
    assert list(news(saved(None, 300), saved(1))) == []
    [(reason, message)] = news(saved(1), saved(2))
    assert reason == "SlowDisk"
    assert message == (
        "The last 2 checkpoints were written to pvc://out/run/checkpoints at less than half of the usual 310 MiB/s, the newest "
        "at 40 MiB/s. Look at the volume of the claim, and at node node-7: what else uses the disk, or the network to it?"
    )
    assert list(news(saved(2), saved(3))) == []
    assert [each[0] for each in news(None, saved(3))] == ["SlowDisk"]
    assert list(news(saved(3), saved(None, 300))) == []
    assert [each[0] for each in news(saved(None, 300), saved(2))] == ["SlowDisk"]
