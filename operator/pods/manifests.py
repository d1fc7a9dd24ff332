"""What is the same in the pods of jobs and of services, and the Secret that both mount: pure functions to JSON bodies.

Everything a user may not choose is fixed here: no service-account token, uid 65532 with a read-only root
file system, no privilege, only claims, ConfigMaps, Secrets and scratch of the same namespace, the pool's own
tolerations, and our scheduling gate from creation on, but for a job's only pod: it has nobody to wait for, and exists
because it was admitted. A pod is pinned to its node by name affinity, so it cannot run elsewhere than the admission in
the job's status says. The bearers of a pod's port are in a Secret (``bearers_secret``) that is mounted as files, so that
reading the pod does not reveal them. `training_pods.py` and `replica_pods.py` make the bodies with these.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from typing import Any

from busbar.kube.contracts import bearers, workload
from busbar.kube.contracts.bearers import Role
from busbar.kube.contracts.workload import Env
from busbar.kube.types import AcceleratorPool, ModelService, TrainingJob
from busbar.kube.types.engines import FOREIGN
from busbar.kube.types.meta import (
    LABEL_JOB,
    LABEL_KIND,
    SCHEDULING_GATE,
    Resource,
    claim_of,
)
from busbar.operator.watch.projections import (
    ANNOTATION_NODE,
    ANNOTATION_POOL,
    CONTAINER,
)
from busbar.scheduler import Resources

Body = dict[str, Any]

KIND_TRAINING = "trainingjob"
KIND_SERVICE = "modelservice"
INIT = ["/usr/bin/tini", "--"]
"""PID 1 must not be the trainer or the server: one that is killed ends the container by its code."""
MAX_VOLUME_NAME_CHARS = 63


@dataclass(frozen=True)
class Rendering:
    """What pods need from the operator's own settings."""

    workloads_image: str
    pull_policy: str
    workload_key: bytes
    former_workload_key: bytes = b""
    """While the key is rotated: pods that exist may have been made under it."""


def bearers_secret(owner: TrainingJob | ModelService, rendering: Rendering) -> Body | None:
    """The Secret that the pods of this object mount; None where they declare no port.

    It is applied, not created: where another type of Secret has the name, the API server refuses the apply (a type
    cannot change), so pods never mount somebody else's Secret.
    """
    kind = KIND_TRAINING
    roles: tuple[Role, ...] = (Role.READ, Role.COMMAND)
    if isinstance(owner, ModelService):
        kind, roles = KIND_SERVICE, tuple(Role)
    elif owner.spec.template is not None and not owner.spec.template.port:
        return None
    key, uid = rendering.workload_key, owner.metadata.uid
    data = {str(role): bearers.bearer_for(key, uid, role) for role in roles}
    if isinstance(owner, ModelService) and (engine := FOREIGN.get(owner.spec.engine)) is not None:
        data[engine.config_file] = f'api-key: "{data[Role.INFER]}"\n'
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata_of(owner, bearers.secret_name(key, uid), kind, {}),
        "type": bearers.SECRET_TYPE,
        "immutable": True,
        "data": {name: base64.b64encode(text.encode()).decode() for name, text in data.items()},
    }


def new_container(image: str, env: dict[str, str], volumes: Volumes, *, port: bool) -> Body:
    """The pod's container, without its resources; `port`: it answers the operator."""
    container: Body = {
        "name": CONTAINER,
        "image": image,
        "env": [{"name": str(k), "value": v} for k, v in env.items()],
        "volumeMounts": volumes.mounts(),
        "terminationMessagePath": workload.TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    if port:
        container["ports"] = [{"name": workload.PORT_NAME, "containerPort": workload.PORT, "protocol": "TCP"}]
    return container


def resources_of(per_pod: Resources, pool: AcceleratorPool | None, *, gang: bool = False) -> Body:
    """The container's requests and limits; `gang`: with the devices of the pool's fabric."""
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    if pool is not None and not pool.spec.is_cpu:
        count = -(-per_pod.accelerators_m // 1000)
        devices = {pool.spec.resource_name: 1} | dict(pool.spec.fabric_devices if gang else {})
        requests |= {name: str(each * count) for name, each in devices.items()}
        limits |= requests
    if per_pod.cpu_m:
        requests["cpu"] = f"{per_pod.cpu_m}m"
    if per_pod.memory_mib:
        requests["memory"] = limits["memory"] = f"{per_pod.memory_mib}Mi"
    if per_pod.ephemeral_mib:
        requests["ephemeral-storage"] = limits["ephemeral-storage"] = f"{per_pod.ephemeral_mib}Mi"
    return {"requests": requests, "limits": limits}


def identity_env(obj: Resource, kind: str) -> dict[str, str]:
    """Whose pod it is and the port on which it answers."""
    meta = obj.metadata
    return {
        Env.JOB_NAME: meta.name,
        Env.NAMESPACE: meta.namespace or "",
        Env.JOB_UID: meta.uid,
        Env.KIND: kind,
        Env.PORT: str(workload.PORT),
        "HOME": "/tmp",
    }


class Volumes:
    """Volumes of a pod; each claim is mounted once, at /artifacts/<claim>."""

    def __init__(self) -> None:
        self._claims: dict[str, bool] = {}
        self._own: list[Body] = []
        self._secret: tuple[str, tuple[str, ...]] | None = None  # name, keys

    def bearers(self, secret: str, *keys: str) -> str:
        """Mounts these keys of the bearers' Secret; returns the folder in the container."""
        self._secret = secret, keys
        return bearers.FOLDER

    def claim(self, uri: str, *, read_only: bool = False) -> str:
        """The path in the container of a pvc:// address."""
        claim, path = claim_of(uri)
        self._claims[claim] = self._claims.get(claim, True) and read_only
        root = f"{workload.ARTIFACTS_ROOT}/{claim}"
        return f"{root}/{path}" if path else root

    def own(self, volume: Body) -> None:
        """A volume of the user's template."""
        self._own.append(volume)

    def mounts(self) -> list[Body]:
        """What the container mounts."""
        mounts: list[Body] = [
            {"name": "busbar-tmp", "mountPath": "/tmp"},
            {"name": "busbar-shm", "mountPath": workload.SHARED_MEMORY},
        ]
        if self._secret is not None:
            mounts.append({"name": bearers.VOLUME, "mountPath": bearers.FOLDER, "readOnly": True})
        for claim, read_only in self._claims.items():
            mount = {"name": _claim_volume(claim), "mountPath": f"{workload.ARTIFACTS_ROOT}/{claim}"}
            mounts.append(mount | ({"readOnly": True} if read_only else {}))
        for volume in self._own:
            mount = {"name": volume["name"], "mountPath": volume["mountPath"]}
            mounts.append(mount | ({"readOnly": True} if volume.get("readOnly") else {}))
        return mounts

    def volumes(self) -> list[Body]:
        """What the pod has."""
        # Processes of a pod exchange data through /dev/shm: loaders of PyTorch, NCCL, vLLM's workers. A runtime gives it 64 MiB;
        # a volume has what the pod's limit of memory leaves, and counts in it.
        volumes: list[Body] = [
            {"name": "busbar-tmp", "emptyDir": {}},
            {"name": "busbar-shm", "emptyDir": {"medium": "Memory"}},
        ]
        if self._secret is not None:
            name, keys = self._secret
            # The pod's group may read the files (fsGroup), nobody may write them.
            items = [{"key": key, "path": key} for key in map(str, keys)]
            secret = {"secretName": name, "defaultMode": 0o440, "items": items}
            volumes.append({"name": bearers.VOLUME, "secret": secret})
        for claim in self._claims:
            volumes.append({"name": _claim_volume(claim), "persistentVolumeClaim": {"claimName": claim}})
        for volume in self._own:
            volumes.append({"name": volume["name"], **_source(volume)})
        return volumes


def _claim_volume(claim: str) -> str:
    """The volume's name of a claim. Two claims never share one: a name that is no DNS label, or too long for one
    with our prefix, becomes its digest behind a prefix of its own."""
    name = f"busbar-claim-{claim}"
    if "." not in claim and len(name) <= MAX_VOLUME_NAME_CHARS:
        return name
    return f"busbar-pvc-{hashlib.sha256(claim.encode()).hexdigest()[:40]}"


def _source(volume: Body) -> Body:
    if volume.get("claim"):
        return {"persistentVolumeClaim": {"claimName": volume["claim"]}}
    if volume.get("configMap"):
        return {"configMap": {"name": volume["configMap"]}}
    if volume.get("secret"):
        return {"secret": {"secretName": volume["secret"]}}
    return {"emptyDir": volume.get("emptyDir") or {}}


def metadata_of(owner: Resource, name: str, kind: str, labels: dict[str, str]) -> Body:
    """Of a thing that belongs to `owner` and is deleted with it."""
    meta = owner.metadata
    return {
        "name": name,
        "namespace": meta.namespace,
        "labels": {
            **labels,
            LABEL_KIND: kind,
            LABEL_JOB: meta.name,
            "app.kubernetes.io/name": "busbar-workload",
            "app.kubernetes.io/instance": meta.name[:63].rstrip("-."),
            "app.kubernetes.io/component": kind,
            "app.kubernetes.io/managed-by": "busbar",
        },
        "ownerReferences": [
            {
                "apiVersion": owner.api_version,
                "kind": owner.kind,
                "name": meta.name,
                "uid": meta.uid,
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ],
    }


def pinned_pod(
    owner: Resource,
    name: str,
    kind: str,
    labels: dict[str, str],
    notes: dict[str, str],
    container: Body,
    volumes: Volumes,
    pool: AcceleratorPool | None,
    node: str,
    pool_name: str,
) -> Body:
    """A gated pod with this container, pinned to `node`; `notes` are annotations."""
    metadata = metadata_of(owner, name, kind, labels)
    metadata["annotations"] = {**notes, ANNOTATION_NODE: node, ANNOTATION_POOL: pool_name}
    tolerations = [
        t.model_dump(mode="json", by_alias=True, exclude_none=True)
        for t in ((pool.spec.tolerations if pool is not None else None) or ())
    ]
    runtime = pool.spec.runtime_class_name if pool is not None else None
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {
            **({"runtimeClassName": runtime} if runtime is not None else {}),
            "schedulingGates": [{"name": SCHEDULING_GATE}],
            "affinity": node_affinity(node),
            "tolerations": tolerations,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": workload.UID,
                "runAsGroup": workload.UID,
                "fsGroup": workload.UID,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": volumes.volumes(),
        },
    }


def node_affinity(node: str) -> Body:
    """Only this node, by its object's name, which unlike the hostname label is unique and cannot change."""
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
