"""One row for each rule of the policy on pod templates: what it refuses in a pod's spec, and the accepted neighbour."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.cluster.admission_rows import GATED, QUEUED, PodRow, pod
from tests.cluster.manifests import JSON
from tests.cluster.rule_row import Change

_C = "spec/containers/0"
_SC = f"{_C}/securityContext"
_POD = "spec/securityContext"
_CLAIM: Change = {"spec/resourceClaims": [{"name": "gpu", "resourceClaimName": "gpu"}]}
_CLASS: Change = {f"{_C}/resources": {"limits": {"deviceclass.resource.kubernetes.io/gpu": "1"}}}
_SELINUX = f"{_POD}/seLinuxOptions"
_APPARMOR = "container.apparmor.security.beta.kubernetes.io/main"
_HTTP: JSON = {"path": "/", "port": 80}


def _first(**security: Any) -> list[JSON]:
    """An init container like the main one, with this changed in its securityContext."""
    main = pod()["spec"]["containers"][0]
    return [{**main, "name": "first", "securityContext": main["securityContext"] | security}]


ROWS = (
    PodRow("host network", {"spec/hostNetwork": True}, "hostNetwork must be false or left out"),
    PodRow("host processes", {"spec/hostPID": True}, "hostPID must be false or left out"),
    PodRow("host IPC", {"spec/hostIPC": True}, "hostIPC must be false or left out"),
    PodRow(
        "host path",
        {"spec/volumes": [{"name": "host", "hostPath": {"path": "/"}}]},
        "nothing of the node such as hostPath",
        {"spec/volumes": [{"name": "host", "emptyDir": {}}]},
    ),
    PodRow(
        "kernel settings",
        {f"{_POD}/sysctls": [{"name": "kernel.msgmax", "value": "1"}]},
        "may name only what Pod Security calls safe",
        {f"{_POD}/sysctls": [{"name": "net.ipv4.tcp_syncookies", "value": "1"}]},
    ),
    PodRow(
        "root allowed for the pod",
        {f"{_POD}/runAsNonRoot": False, f"{_SC}/runAsNonRoot": True},
        "runAsNonRoot must be true, or left to every container",
        {f"{_POD}/runAsNonRoot": ..., f"{_SC}/runAsNonRoot": True},
    ),
    PodRow(
        "root allowed for a container",
        {f"{_SC}/runAsNonRoot": False},
        "runAsNonRoot must be true here or for the pod",
        {f"{_SC}/runAsNonRoot": False, "spec/hostUsers": False},
    ),
    PodRow(
        "root not ruled out", {f"{_POD}/runAsNonRoot": ...}, "runAsNonRoot must be true here or for the pod"
    ),
    PodRow(
        "AppArmor by annotation",
        {"metadata/annotations": {_APPARMOR: "unconfined"}},
        "must say runtime/default or localhost/ and a profile",
        {"metadata/annotations": {_APPARMOR: "localhost/mine"}},
    ),
    PodRow("node's name", {"spec/nodeName": "gpu-1"}, "nodeName goes past every queue of the cluster"),
    PodRow(
        "a job's label",
        {"metadata/labels": {"busbar.dev/job": "other"}},
        "a template may carry only busbar.dev/queue",
        {"metadata/labels": {"busbar.dev/queue": "true"}},
    ),
    PodRow(
        "a placement's annotation",
        {"metadata/annotations": {"busbar.dev/node": "gpu-1"}},
        "may carry no annotations under busbar.dev/",
        {"metadata/annotations": {"example.com/node": "gpu-1"}},
    ),
    PodRow(
        "resource claim", _CLAIM, "resourceClaims are for pods that wait in the queue", {**_CLAIM, **GATED}
    ),
    PodRow(
        "device class", _CLASS, "device classes are for pods that wait in the queue", {**_CLASS, **QUEUED}
    ),
    PodRow(
        "host port",
        {f"{_C}/ports": [{"containerPort": 80, "hostPort": 80}]},
        "ports may have no hostPort",
        {f"{_C}/ports": [{"containerPort": 80}]},
    ),
    *(
        PodRow(
            f"host in {probe}",
            {f"{_C}/{probe}": {"httpGet": {**_HTTP, "host": "127.0.0.1"}}},
            "probes and lifecycle hooks may name no host",
            {f"{_C}/{probe}": {"httpGet": _HTTP}},
        )
        for probe in ("livenessProbe", "readinessProbe", "startupProbe")
    ),
    PodRow(
        "host in a probe by socket",
        {f"{_C}/livenessProbe": {"tcpSocket": {"port": 80, "host": "127.0.0.1"}}},
        "probes and lifecycle hooks may name no host",
        {f"{_C}/livenessProbe": {"tcpSocket": {"port": 80}}},
    ),
    *(
        PodRow(
            f"host in {hook}",
            {f"{_C}/lifecycle": {hook: {"httpGet": {**_HTTP, "host": "127.0.0.1"}}}},
            "probes and lifecycle hooks may name no host",
            {f"{_C}/lifecycle": {hook: {"httpGet": _HTTP}}},
        )
        for hook in ("postStart", "preStop")
    ),
    PodRow(
        "privilege escalation",
        {f"{_SC}/allowPrivilegeEscalation": ...},
        "allowPrivilegeEscalation must be set to false",
    ),
    PodRow(
        "kept capabilities",
        {f"{_SC}/capabilities": {"drop": ["NET_RAW"]}},
        "capabilities.drop must list ALL",
    ),
    PodRow(
        "added capability",
        {f"{_SC}/capabilities/add": ["SYS_ADMIN"]},
        "capabilities.add may list only NET_BIND_SERVICE",
        {f"{_SC}/capabilities/add": ["NET_BIND_SERVICE"]},
    ),
    PodRow(
        "unmasked /proc",
        {f"{_SC}/procMount": "Unmasked", "spec/hostUsers": False},
        "procMount must be Default or left out",
        {f"{_SC}/procMount": "Default", "spec/hostUsers": False},
    ),
    PodRow(
        "no seccomp in a container",
        {f"{_SC}/seccompProfile": {"type": "Unconfined"}},
        "must be RuntimeDefault or Localhost, here or for the pod",
        {f"{_SC}/seccompProfile": {"type": "RuntimeDefault"}},
    ),
    PodRow(
        "seccomp not named",
        {f"{_POD}/seccompProfile": ...},
        "must be RuntimeDefault or Localhost, here or for the pod",
        {f"{_POD}/seccompProfile": ..., f"{_SC}/seccompProfile": {"type": "RuntimeDefault"}},
    ),
    PodRow(
        "no seccomp for the pod",
        {
            f"{_POD}/seccompProfile": {"type": "Unconfined"},
            f"{_SC}/seccompProfile": {"type": "RuntimeDefault"},
        },
        "must be RuntimeDefault or Localhost, or left to every container",
    ),
    PodRow(
        "root",
        {f"{_POD}/runAsUser": 0},
        "runAsUser must not be 0",
        {f"{_POD}/runAsUser": 0, "spec/hostUsers": False},
    ),
    PodRow(
        "root in an init container",
        {"spec/initContainers": _first(runAsUser=0)},
        "runAsUser must not be 0",
        {"spec/initContainers": _first(runAsUser=1)},
    ),
    PodRow(
        "AppArmor off",
        {f"{_SC}/appArmorProfile": {"type": "Unconfined"}},
        "must be RuntimeDefault or Localhost, or left out",
        {f"{_SC}/appArmorProfile": {"type": "RuntimeDefault"}},
    ),
    PodRow(
        "SELinux type",
        {_SELINUX: {"type": "spc_t"}},
        "must be one that containers may have",
        {_SELINUX: {"type": "container_t"}},
    ),
    *(
        PodRow(
            f"SELinux {part}",
            {_SELINUX: {part: "system_u", "level": "s0"}},
            "may name neither user nor role",
            {_SELINUX: {"level": "s0"}},
        )
        for part in ("user", "role")
    ),
)


def workloads(sample: JSON) -> Iterator[JSON]:
    """Every kind that holds a pod template, with this pod's."""
    labels = {"app": "sample"}
    meta = sample["metadata"]
    template: JSON = {
        "metadata": {"labels": labels | meta["labels"], "annotations": meta["annotations"]},
        "spec": sample["spec"],
    }
    once: JSON = {**template, "spec": {**sample["spec"], "restartPolicy": "Never"}}
    spec: JSON = {"selector": {"matchLabels": labels}, "template": template}

    def made(api_version: str, kind: str, **body: Any) -> JSON:
        head = {"name": meta["name"], "namespace": meta["namespace"]}
        return {"apiVersion": api_version, "kind": kind, "metadata": head, **body}

    yield made("apps/v1", "Deployment", spec=spec)
    yield made("apps/v1", "ReplicaSet", spec=spec)
    yield made("apps/v1", "DaemonSet", spec=spec)
    yield made("apps/v1", "StatefulSet", spec={**spec, "serviceName": "sample"})
    yield made("v1", "ReplicationController", spec={"selector": labels, "template": template})
    yield made("v1", "PodTemplate", template=template)
    yield made("batch/v1", "Job", spec={"suspend": True, "template": once})
    cron: JSON = {"schedule": "0 0 * * *", "jobTemplate": {"spec": {"template": once}}}
    yield made("batch/v1", "CronJob", spec=cron)


def deployment(sample: JSON) -> JSON:
    """A Deployment of this pod."""
    return next(workloads(sample))
