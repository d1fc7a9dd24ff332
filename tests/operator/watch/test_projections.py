"""The projection of Pods."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from tests.operator.builders import NOW

from busbar.operator.watch.projections import Pod, project_pod


def test_a_pods_requests_are_what_the_scheduler_counts() -> None:
    spec = {
        "containers": [
            {"name": "a", "resources": {"requests": {"cpu": "500m", "nvidia.com/gpu": "2"}}},
            {"name": "b", "resources": {"requests": {"cpu": "1"}}},
        ],
        "initContainers": [{"name": "i", "resources": {"requests": {"cpu": "3", "memory": "1Gi"}}}],
        "overhead": {"cpu": "100m"},
    }
    pod = project_pod({"metadata": {"name": "p", "namespace": "n"}, "spec": spec})
    assert (pod.requests.cpu_m, pod.requests.memory_mib, pod.requests.device("nvidia.com/gpu")) == (
        3100,
        1024,
        2,
    )


OWN_LIMITS = (
    "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. ",
    'Container main exceeded its local ephemeral storage limit "1Gi". ',
    'Usage of EmptyDir volume "scratch" exceeds the limit "1Gi". ',
)
OF_NODE = (
    "The node was low on resource: memory. Container main was using 9Gi, which exceeds its request of 1Gi. "
)


def failed(reason: str, message: str, *conditions: str) -> Pod:
    status = {
        "phase": "Failed",
        "reason": reason,
        "message": message,
        "conditions": [{"type": kind, "status": "True"} for kind in conditions],
    }
    return project_pod({"metadata": {"name": "p", "namespace": "n"}, "spec": {}, "status": status})


@pytest.mark.parametrize("message", OWN_LIMITS)
def test_a_pod_that_exceeds_its_own_limit_ends_by_its_own_fault(message: str) -> None:
    assert not failed("Evicted", message).evicted
    assert failed("Evicted", message, "DisruptionTarget").evicted


@pytest.mark.parametrize(
    ("reason", "message", "conditions"),
    [
        ("Evicted", OF_NODE, ("DisruptionTarget",)),
        ("Evicted", OF_NODE, ()),  # kubelets without the condition
        ("Evicted", "The node had condition: [DiskPressure]. ", ()),  # the kubelet refused to start it
        ("Evicted", "", ()),
        ("Terminated", "Pod was terminated in response to imminent node shutdown.", ()),
        ("", "", ("DisruptionTarget",)),
    ],
)
def test_a_pod_that_the_cluster_stops_ends_by_no_fault(
    reason: str, message: str, conditions: tuple[str, ...]
) -> None:
    assert failed(reason, message, *conditions).evicted
    assert not failed("", "", "Ready").evicted


def test_the_end_of_a_pod_says_when_it_began() -> None:
    times = {"startedAt": "2026-11-21T11:59:50Z", "finishedAt": "2026-11-21T12:00:00Z"}
    status = {
        "phase": "Succeeded",
        "containerStatuses": [{"state": {"terminated": {"exitCode": 0, **times}}}],
    }
    done = project_pod({"metadata": {"name": "p", "namespace": "n"}, "spec": {}, "status": status})
    assert done.exit is not None
    assert (done.exit.started_at, done.exit.finished_at) == (NOW - timedelta(seconds=10), NOW)


def test_a_pod_with_odd_annotations_is_read_like_any_other() -> None:
    notes = {"busbar.dev/draining-since": "soon", "busbar.dev/placement": "[]"}
    odd = project_pod({"metadata": {"name": "p", "namespace": "n", "annotations": notes}})
    assert odd.draining_since is None
    notes = {"busbar.dev/draining-since": "2026-11-21T12:00:00"}
    naive = project_pod({"metadata": {"name": "p", "namespace": "n", "annotations": notes}})
    assert naive.draining_since == NOW


def test_of_somebody_elses_pod_the_controller_is_told() -> None:
    def made_by(*owners: dict[str, object], **labels: str) -> str:
        meta = {"name": "p", "namespace": "n", "ownerReferences": list(owners), "labels": labels}
        return project_pod({"metadata": meta, "spec": {}}).owner

    controller = {"kind": "ReplicaSet", "name": "web-5d4c", "uid": "u", "controller": True}
    assert made_by({**controller, "controller": False}, controller) == "ReplicaSet web-5d4c"
    assert made_by() == ""
    assert made_by(controller, **{"busbar.dev/kind": "trainingjob"}) == "", "it is in our labels"


@pytest.mark.parametrize(
    ("phase", "ready", "since"),
    [
        ("Pending", "False", NOW),
        ("Pending", "True", None),
        ("Running", "False", None),
        ("Failed", "False", None),
    ],
)
def test_a_pod_that_its_node_still_prepares_says_since_when(
    phase: str, ready: str, since: datetime | None
) -> None:
    condition = {"type": "PodReadyToStartContainers", "status": ready, "lastTransitionTime": NOW.isoformat()}
    body = {
        "metadata": {"name": "p", "namespace": "n"},
        "status": {"phase": phase, "conditions": [condition]},
    }
    assert project_pod(body).unmounted_since == since
