"""Why pods that have their node do not run yet."""

from __future__ import annotations

from datetime import timedelta

from tests.operator.builders import NOW, admitted, gang, job, pod, running, view

from busbar.operator.pods.unmounted import MOUNTED_WITHIN_S, mounts_of_job, why_not_started
from busbar.operator.training.reconcile import reconcile

LONG_AGO = NOW - timedelta(seconds=MOUNTED_WITHIN_S)
VOLUMES = [
    {"name": "a", "mountPath": "/a", "configMap": "settings"},
    {"name": "b", "mountPath": "/b", "secret": "token"},
    {"name": "c", "mountPath": "/c", "claim": "data"},
    {"name": "d", "mountPath": "/d", "emptyDir": {}},
]
MOUNTING = job(output=None, template={"image": "x", "volumes": VOLUMES})


def test_what_the_pods_mount_is_named_when_their_node_does_not_get_on() -> None:
    mounts = mounts_of_job(MOUNTING)
    assert mounts == ["ConfigMap settings", "Secret token", "PersistentVolumeClaim data"]
    late = pod(1, node="n1", unmounted_since=LONG_AGO)
    text = why_not_started([pod(0), late], NOW, mounts)
    assert "ConfigMap settings, Secret token, PersistentVolumeClaim data" in text
    assert late.key.name in text
    assert "n1" in text


def test_a_pod_that_mounts_nothing_may_wait_for_its_network() -> None:
    text = why_not_started([pod(0, node="n1", unmounted_since=LONG_AGO)], NOW, ())
    assert "network" in text
    assert "mounts" not in text


def test_nothing_is_said_of_a_pod_that_was_bound_just_now() -> None:
    just_now = LONG_AGO + timedelta(seconds=1)
    assert why_not_started([pod(0, unmounted_since=just_now), pod(1)], NOW, ["Secret token"]) == ""


def test_what_a_container_says_comes_first() -> None:
    told = pod(1, problem="ImagePullBackOff: no such image")
    late = pod(0, unmounted_since=LONG_AGO)
    assert why_not_started([late, told], NOW, ()) == "ImagePullBackOff: no such image"


def test_a_job_says_it_while_it_starts() -> None:
    update = reconcile(view(admitted(gang(2), 2), running(0), pod(1, node="n1", unmounted_since=LONG_AGO)))
    assert update.status is not None
    assert (update.status.phase, update.status.reason) == ("Starting", "Starting")
    assert "not ready on n1" in (update.status.message or "")
