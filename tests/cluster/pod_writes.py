"""Fields of a queued pod that only the operator may change: one row for each field that the API server lets change.

A row is refused to an administrator, who has every right. Its neighbours are the same change by the operator, and by
the administrator on a pod that is not ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.cluster.admission_rows import GATED, QUEUED, TENANT_NAMESPACE, pod
from tests.cluster.manifests import JSON
from tests.cluster.rule_row import Change, edited

from busbar.kube.contracts.bearers import SECRET_PREFIX, SECRET_TYPE

OURS: Change = {
    "metadata/labels": {
        "busbar.dev/kind": "trainingjob",
        "busbar.dev/job": "sample",
        "example.com/team": "a",
    },
    "metadata/annotations": {"busbar.dev/node": "gpu-1"},
    "metadata/ownerReferences": [
        {
            "apiVersion": "busbar.dev/v1alpha1",
            "kind": "TrainingJob",
            "name": "sample",
            "uid": "5f0c8a52-7d0e-4a53-9d2b-0b7d5f2c9a11",
            "controller": True,
        }
    ],
}
PLAIN: Change = {"metadata/labels": {"example.com/team": "a"}}
POD = "only Busbar's operator changes a pod of a TrainingJob or ModelService"
EPHEMERAL = "a pod of a TrainingJob or ModelService takes no ephemeral containers"
RESIZE = "a pod keeps the resources that it was admitted with by Busbar's queue"
STATUS = "only those who run pods write the status of one in Busbar's queue"
STATUS_MARKS = "labels and finalizers of a pod in Busbar's queue are not written through its status"
STATUS_NOTES = "annotations under busbar.dev/ are not written through a pod's status"
CHILD = "what Busbar's operator makes for a TrainingJob or ModelService is changed by it alone"


@dataclass(frozen=True)
class PodWrite:
    """One change of a stored pod, as a JSON merge patch, and the words of its refusal."""

    name: str
    patch: Callable[[JSON], JSON]
    says: str = POD
    part: str = ""
    """The subresource that is written."""
    before: Change = field(default_factory=dict)
    """How the stored pod differs from `owned`."""
    of: Change = field(default_factory=lambda: OURS)
    spares_others: bool = True
    """Whether the same change of a pod that is not ours is accepted."""
    alone: bool = True
    """Whether no other rule refuses it."""

    @property
    def subresource(self) -> str:
        return f"/{self.part}" if self.part else ""

    def target(self, name: str) -> JSON:
        return edited(pod(name=name), {**self.of, **self.before})

    def other(self, name: str) -> JSON:
        return edited(pod(name=name), {**PLAIN, **self.before})


def meta(**changes: object) -> Callable[[JSON], JSON]:
    return lambda stored: {"metadata": changes}


def spec(**changes: object) -> Callable[[JSON], JSON]:
    return lambda stored: {"spec": changes}


def container(kind: str = "containers", **changes: object) -> Callable[[JSON], JSON]:
    """The first container with these fields; a merge patch contains the whole list."""
    return lambda stored: {"spec": {kind: [{**stored["spec"][kind][0], **changes}]}}


def tolerating(stored: JSON) -> JSON:
    return {"spec": {"tolerations": [*stored["spec"]["tolerations"], {"key": "x", "operator": "Exists"}]}}


_STEERED = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [
                {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["gpu-2"]}]}
            ]
        }
    }
}
_FIRST = [{**pod()["spec"]["containers"][0], "name": "first"}]
_DEBUG = {k: v for k, v in pod()["spec"]["containers"][0].items() if k != "resources"} | {"name": "debug"}
_MORE = {"requests": {"cpu": "200m"}}

WRITES = (
    PodWrite("label", meta(labels={"example.com/team": "b"})),
    PodWrite("our label removed", meta(labels={"busbar.dev/kind": None}), spares_others=False, alone=False),
    PodWrite("annotation", meta(annotations={"example.com/note": "x"})),
    PodWrite("owner reference removed", meta(ownerReferences=None)),
    PodWrite(
        "owner reference replaced",
        meta(ownerReferences=[{**OURS["metadata/ownerReferences"][0], "uid": "0", "name": "other"}]),
    ),
    PodWrite("finalizer", meta(finalizers=["example.com/hold"])),
    PodWrite("image", container(image="registry.example.com/other:1")),
    PodWrite(
        "image of an init container",
        container("initContainers", image="registry.example.com/other:1"),
        before={"spec/initContainers": _FIRST},
    ),
    PodWrite("active deadline", spec(activeDeadlineSeconds=5)),
    PodWrite("toleration", tolerating),
    PodWrite(
        "grace period",
        spec(terminationGracePeriodSeconds=1),
        before={"spec/terminationGracePeriodSeconds": -1},
    ),
    PodWrite("gate lifted", spec(schedulingGates=None), before=GATED, spares_others=False, alone=False),
    PodWrite(
        "another gate lifted",
        spec(schedulingGates=None),
        before={"spec/schedulingGates": [{"name": "example.com/gate"}]},
    ),
    PodWrite(
        "node selector", spec(nodeSelector={"gpu": "best"}), before=GATED, spares_others=False, alone=False
    ),
    PodWrite("affinity", spec(affinity=_STEERED), before=GATED, spares_others=False, alone=False),
    PodWrite(
        "ephemeral container",
        spec(ephemeralContainers=[_DEBUG]),
        EPHEMERAL,
        "ephemeralcontainers",
    ),
    PodWrite("resources", container(resources=_MORE), RESIZE, "resize"),
    PodWrite("resources of a queued pod", container(resources=_MORE), RESIZE, "resize", of=QUEUED),
    PodWrite("status", lambda stored: {"status": {"phase": "Failed"}}, STATUS, "status"),
    PodWrite(
        "status of a queued pod", lambda stored: {"status": {"phase": "Failed"}}, STATUS, "status", of=QUEUED
    ),
    PodWrite("label by status", meta(labels={"example.com/team": "b"}), STATUS_MARKS, "status"),
    PodWrite("our label by status", meta(labels={"busbar.dev/kind": None}), STATUS_MARKS, "status"),
    PodWrite("finalizer by status", meta(finalizers=["example.com/hold"]), STATUS_MARKS, "status"),
    PodWrite(
        "our annotation by status",
        meta(annotations={"busbar.dev/node": "gpu-2"}),
        STATUS_NOTES,
        "status",
    ),
)

_SYSTEM = "system:serviceaccount:kube-system:"
KUBELET = ("system:node:gpu-1", "system:nodes")
WRITERS: tuple[tuple[tuple[str, ...], str, Callable[[JSON], JSON]], ...] = (
    *(
        (who, "status", lambda stored: {"status": {"phase": "Failed"}})
        for who in (
            KUBELET,
            ("system:kube-scheduler",),
            ("system:kube-controller-manager",),
            *(
                (f"{_SYSTEM}{name}",)
                for name in (
                    "device-taint-eviction-controller",
                    "disruption-controller",
                    "node-controller",
                    "pod-garbage-collector",
                    "resource-claim-controller",
                )
            ),
        )
    ),
    *(
        ((who,), "", meta(ownerReferences=None, finalizers=["foregroundDeletion"]))
        for who in (f"{_SYSTEM}generic-garbage-collector", "system:kube-controller-manager")
    ),
    ((f"{_SYSTEM}network-plugin",), "status", meta(annotations={"example.com/address": "10.0.0.1"})),
)
"""Who writes a pod of ours, which part of it, and what."""

STRANGERS = tuple(
    f"{_SYSTEM}{name}"
    for name in ("job-controller", "replicaset-controller", "statefulset-controller", "daemon-set-controller")
)
"""Controllers of other owners: they adopt pods, and write the pods that they own."""


def child(kind: str, name: str, **metadata: object) -> JSON:
    """A Service or Secret as the operator makes it for a job."""
    body: JSON = {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": TENANT_NAMESPACE,
            "labels": OURS["metadata/labels"],
            "ownerReferences": OURS["metadata/ownerReferences"],
            **metadata,
        },
    }
    if kind == "Service":
        body["spec"] = {"clusterIP": "None", "selector": {"a": "b"}, "ports": [{"port": 80}]}
    elif metadata.get("labels") is None:  # the only Secrets that the operator may make
        body["type"] = SECRET_TYPE
        body["metadata"]["name"] = SECRET_PREFIX + name
    return body
