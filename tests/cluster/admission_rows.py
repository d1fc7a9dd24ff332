"""Attempts to escape from a namespace or to bypass the queue, one row each, with an accepted neighbour.

The attempts are what a member of a tenant could send. `pod()` is a pod that the tenant's namespace accepts; a row
changes it in one place.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.manifests import JSON, model_service, pool, profile, template_job
from tests.cluster.rule_row import Change, edited

TENANT_NAMESPACE = "team-a"
OPEN_NAMESPACE = "no-team"
DEVICE = "nvidia.com/gpu"
TAINT = "busbar.dev/pool-a"
GATE = "busbar.dev/admission"
GATED: Change = {"spec/schedulingGates": [{"name": GATE}]}
QUEUED: Change = {"metadata/labels": {"busbar.dev/queue": "true"}}


def pod(namespace: str = TENANT_NAMESPACE, name: str = "sample") -> JSON:
    """A pod that Pod Security "restricted" and our policies accept: it requests no resource of a pool."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {}, "annotations": {}},
        "spec": {
            "containers": [
                {
                    "name": "main",
                    "image": "registry.example.com/app:1",
                    "resources": {"requests": {"cpu": "100m"}},
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        },
    }


def job(name: str = "sample", *, suspend: bool = False, labels: dict[str, str] | None = None) -> JSON:
    """A batch/v1 Job of such a pod."""
    template = pod()["spec"] | {"restartPolicy": "Never"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": TENANT_NAMESPACE, "labels": labels or {}},
        "spec": {"suspend": suspend, "template": {"spec": template}},
    }


@dataclass(frozen=True)
class PodRow:
    """A pod that is refused with these words; `neighbour` is the change that is accepted."""

    name: str
    change: Change
    says: str
    neighbour: Change = field(default_factory=dict)

    def bad(self) -> JSON:
        return edited(pod(), self.change)

    def good(self) -> JSON:
        return edited(pod(), self.neighbour)


RESTRICTED = 'violates PodSecurity "restricted:latest"'
_CONTAINER = "spec/containers/0"


def _init(container: JSON) -> list[JSON]:
    return [{**copy.deepcopy(pod()["spec"]["containers"][0]), "name": "first", **container}]


ESCAPES = (
    PodRow("host network", {"spec/hostNetwork": True}, RESTRICTED),
    PodRow("host processes", {"spec/hostPID": True}, RESTRICTED),
    PodRow("host IPC", {"spec/hostIPC": True}, RESTRICTED),
    PodRow(
        "host path",
        {"spec/volumes": [{"name": "host", "hostPath": {"path": "/"}}]},
        RESTRICTED,
        {"spec/volumes": [{"name": "host", "emptyDir": {}}]},
    ),
    PodRow(
        "host port",
        {f"{_CONTAINER}/ports": [{"containerPort": 80, "hostPort": 80}]},
        RESTRICTED,
        {f"{_CONTAINER}/ports": [{"containerPort": 80}]},
    ),
    PodRow(
        "privileged container",
        {f"{_CONTAINER}/securityContext": {"privileged": True}},
        RESTRICTED,
    ),
    PodRow(
        "privileged init container",
        {"spec/initContainers": _init({"securityContext": {"privileged": True}})},
        RESTRICTED,
        {"spec/initContainers": _init({})},
    ),
    PodRow(
        "privilege escalation", {f"{_CONTAINER}/securityContext/allowPrivilegeEscalation": True}, RESTRICTED
    ),
    PodRow(
        "added capability",
        {f"{_CONTAINER}/securityContext/capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]}},
        RESTRICTED,
        {f"{_CONTAINER}/securityContext/capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}},
    ),
    PodRow("kept capabilities", {f"{_CONTAINER}/securityContext/capabilities": {}}, RESTRICTED),
    PodRow("root", {"spec/securityContext/runAsUser": 0}, RESTRICTED, {"spec/securityContext/runAsUser": 1}),
    PodRow("perhaps root", {"spec/securityContext/runAsNonRoot": ...}, RESTRICTED),
    PodRow(
        "no seccomp",
        {"spec/securityContext/seccompProfile": {"type": "Unconfined"}},
        RESTRICTED,
    ),
    PodRow(
        "unmasked /proc",
        {f"{_CONTAINER}/securityContext/procMount": "Unmasked", "spec/hostUsers": False},
        RESTRICTED,
        {f"{_CONTAINER}/securityContext/procMount": "Default", "spec/hostUsers": False},
    ),
    PodRow(
        "kernel settings",
        {"spec/securityContext/sysctls": [{"name": "kernel.msgmax", "value": "1"}]},
        RESTRICTED,
        {"spec/securityContext/sysctls": [{"name": "net.ipv4.ip_unprivileged_port_start", "value": "0"}]},
    ),
    PodRow(
        "SELinux type",
        {"spec/securityContext/seLinuxOptions": {"type": "spc_t"}},
        RESTRICTED,
        {"spec/securityContext/seLinuxOptions": {"type": "container_t"}},
    ),
    PodRow(
        "AppArmor off",
        {"spec/securityContext/appArmorProfile": {"type": "Unconfined"}},
        RESTRICTED,
        {"spec/securityContext/appArmorProfile": {"type": "RuntimeDefault"}},
    ),
    PodRow(
        "Windows host process",
        {"spec/securityContext/windowsOptions": {"hostProcess": True}, "spec/hostNetwork": True},
        RESTRICTED,
    ),
    PodRow(
        "network file system",
        {"spec/volumes": [{"name": "nfs", "nfs": {"server": "nfs.example.com", "path": "/"}}]},
        RESTRICTED,
        {"spec/volumes": [{"name": "nfs", "persistentVolumeClaim": {"claimName": "nfs"}}]},
    ),
    PodRow("node's name", {"spec/nodeName": "gpu-1"}, "spec.nodeName goes past every queue"),
    PodRow(
        "preempting priority",
        {"spec/priorityClassName": "busbar-test-urgent"},
        "a PriorityClass that preempts goes past the queue",
        {"spec/priorityClassName": "busbar-test-patient"},
    ),
    PodRow(
        "a job's labels",
        {"metadata/labels": {"busbar.dev/job": "other"}},
        "labels under busbar.dev/ are written by Busbar's operator",
        {"metadata/labels": {"example.com/job": "other"}},
    ),
    PodRow(
        "an admission's label",
        {"metadata/labels": {"busbar.dev/admission-id": "other"}, **GATED},
        "labels under busbar.dev/ are written by Busbar's operator",
        GATED,
    ),
    PodRow(
        "a placement's annotation",
        {"metadata/annotations": {"busbar.dev/node": "gpu-1"}},
        "annotations under busbar.dev/ are written by Busbar's operator",
        {"metadata/annotations": {"example.com/node": "gpu-1"}},
    ),
)

_LIMITS: Change = {f"{_CONTAINER}/resources": {"limits": {DEVICE: "1"}}}
_INIT_LIMITS: Change = {"spec/initContainers": _init({"resources": {"limits": {DEVICE: "1"}}})}
_ASKS = f"asks for {DEVICE} of AcceleratorPool pool-a without waiting in the queue"
_TOLERATES = "this pod tolerates a taint of AcceleratorPool pool-a without waiting in the queue"

JUMPS = (
    PodRow("device in a container", _LIMITS, _ASKS, {**_LIMITS, **GATED}),
    PodRow("device in an init container", _INIT_LIMITS, _ASKS, {**_INIT_LIMITS, **GATED}),
    PodRow(
        "device in a restartable init container",
        {
            "spec/initContainers": _init({"restartPolicy": "Always", "resources": {"limits": {DEVICE: "1"}}}),
        },
        _ASKS,
        {"spec/initContainers": _init({"restartPolicy": "Always"})},
    ),
    PodRow(
        "device of the second pool",
        {f"{_CONTAINER}/resources": {"limits": {"amd.com/gpu": "1"}}},
        "asks for amd.com/gpu of AcceleratorPool pool-b without waiting",
        {f"{_CONTAINER}/resources": {"limits": {"example.com/fpga": "1"}}},
    ),
    PodRow(
        "another gate than ours",
        {**_LIMITS, "spec/schedulingGates": [{"name": "example.com/gate"}]},
        _ASKS,
        {**_LIMITS, "spec/schedulingGates": [{"name": "example.com/gate"}, {"name": GATE}]},
    ),
    PodRow(
        "opting in with another value",
        {**_LIMITS, "metadata/labels": {"busbar.dev/queue": "yes"}},
        _ASKS,
        {**_LIMITS, **QUEUED},
    ),
    PodRow(
        "toleration of the taint by key",
        {"spec/tolerations": [{"key": TAINT, "operator": "Exists"}]},
        _TOLERATES,
        {"spec/tolerations": [{"key": "example.com/taint", "operator": "Exists"}]},
    ),
    PodRow(
        "toleration of the taint by value",
        {"spec/tolerations": [{"key": TAINT, "operator": "Equal", "value": "yes", "effect": "NoSchedule"}]},
        _TOLERATES,
        {"spec/tolerations": [{"key": TAINT, "operator": "Equal", "value": "yes"}], **GATED},
    ),
    PodRow(
        "toleration of everything",
        {"spec/tolerations": [{"operator": "Exists"}]},
        _TOLERATES,
        {"spec/tolerations": [{"operator": "Exists"}], **QUEUED},
    ),
    PodRow(
        "resource claim",
        {"spec/resourceClaims": [{"name": "gpu", "resourceClaimName": "gpu"}]},
        "spec.resourceClaims must wait in the queue",
        {"spec/resourceClaims": [{"name": "gpu", "resourceClaimName": "gpu"}], **GATED},
    ),
    PodRow(
        "device class as an extended resource",
        {f"{_CONTAINER}/resources": {"limits": {"deviceclass.resource.kubernetes.io/gpu": "1"}}},
        "asks for a device class must wait in the queue",
        {f"{_CONTAINER}/resources": {"limits": {"deviceclass.resource.kubernetes.io/gpu": "1"}}, **GATED},
    ),
)


def pools() -> list[JSON]:
    """Two pools with devices, one of them tainted, and one of cores."""

    def make(name: str, **spec: Any) -> JSON:
        return {
            "apiVersion": "busbar.dev/v1alpha1",
            "kind": "AcceleratorPool",
            "metadata": {"name": name},
            "spec": {"nodeSelector": {"pool": name}, **spec},
        }

    tolerations = [{"key": TAINT, "operator": "Equal", "value": "yes", "effect": "NoSchedule"}]
    return [
        make("pool-a", accelerator="H100", resourceName=DEVICE, tolerations=tolerations),
        make("pool-b", accelerator="MI300", resourceName="amd.com/gpu"),
        make("pool-cpu", accelerator="cpu", resourceName="cpu", unit="500m"),
    ]


def kinds() -> list[JSON]:
    """One object of each of our kinds; the namespaced ones, which come first, in the tenant's namespace."""
    trained, served = template_job(), model_service()
    for document in (trained, served):
        document["metadata"]["namespace"] = TENANT_NAMESPACE
    tenant: JSON = {
        "apiVersion": "busbar.dev/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": "of-status"},
        "spec": {},
    }
    return [trained, served, pool(), tenant, profile()]


def priority_classes() -> list[JSON]:
    """One whose pods preempt others, and one whose pods do not."""
    return [
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": f"busbar-test-{name}"},
            "value": 1000,
            "preemptionPolicy": policy,
        }
        for name, policy in (("urgent", "PreemptLowerPriority"), ("patient", "Never"))
    ]
