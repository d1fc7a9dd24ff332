"""The pods, Services and Secrets that we make: pure functions from an object and its admission to JSON bodies.

Everything a user may not choose is fixed here: no service-account token, uid 65532 with a read-only root
file system, no privilege, only claims, ConfigMaps, Secrets and scratch of the same namespace, the pool's own
tolerations, and our scheduling gate from creation on, but for a job's only pod: it has nobody to wait for, and exists
because it was admitted. A pod is pinned to its node by name affinity, so it cannot run elsewhere than the admission in
the job's status says. The bearers of a pod's port are in a Secret (``bearers_secret``) that is mounted as files, so that
reading the pod does not reveal them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from busbar.kube.contracts import bearers, workload
from busbar.kube.contracts.bearers import Role
from busbar.kube.contracts.workload import Env, ReplicaRole
from busbar.kube.types import AcceleratorPool, ModelService, TrainingJob, quantity
from busbar.kube.types.meta import (
    LABEL_ADMISSION_ID,
    LABEL_ATTEMPT,
    LABEL_JOB,
    LABEL_KIND,
    LABEL_RANK,
    LABEL_REPLACEMENT,
    SCHEDULING_GATE,
    Resource,
    claim_of,
)
from busbar.kube.types.model_service import MAX_REPLICAS, ModelServiceSpec, ServiceEngine
from busbar.kube.types.pod_template import PodTemplate
from busbar.operator.pods.model_server_stop import pre_stop
from busbar.operator.pods.replica_place import placement_note
from busbar.operator.watch.projections import (
    ANNOTATION_NODE,
    ANNOTATION_PLACEMENT,
    ANNOTATION_POOL,
    CONTAINER,
)
from busbar.scheduler import Placement, Resources

Body = dict[str, Any]

KIND_TRAINING = "trainingjob"
KIND_SERVICE = "modelservice"
INIT = [
    "/usr/bin/tini",
    "--",
]  # PID 1 must not be the trainer: a killed trainer ends the container by its code
DRAIN_MARGIN_S = 15
MAX_VOLUME_NAME_CHARS = 63
FIRST_DECODE = MAX_REPLICAS
"""Of a service whose replicas have roles those that decode have numbers from here on, and those that compute prompts smaller ones. So
the replica that takes the place of one that is leaving has its role, although that still has its number."""
_PARALLEL = re.compile(r"(--(tensor|pipeline|data)-parallel-size|-tp|-pp|-dp)\b")


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
    if isinstance(owner, ModelService) and owner.spec.engine is ServiceEngine.VLLM:
        data[bearers.VLLM_CONFIG] = f'api-key: "{data[Role.INFER]}"\n'
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(owner, bearers.secret_name(key, uid), kind, {}),
        "type": bearers.SECRET_TYPE,
        "immutable": True,
        "data": {name: base64.b64encode(text.encode()).decode() for name, text in data.items()},
    }


def gang_service(job: TrainingJob) -> Body:
    """The headless Service that gives each rank a DNS name, also before the pod is ready."""
    name = job.metadata.name
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, name, KIND_TRAINING, {}),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {LABEL_KIND: KIND_TRAINING, LABEL_JOB: name},
            "ports": [{"name": "rendezvous", "port": workload.MASTER_PORT, "protocol": "TCP"}],
        },
    }


def service_pod_name(service: str, index: int) -> str:
    return f"{service}-{index}"


def training_pod_name(job: str, attempt: int, rank: int, replacement: int = 0) -> str:
    again = f"-r{replacement}" if replacement else ""
    return f"{job}-{attempt}-{rank}{again}"


def training_pod(
    job: TrainingJob,
    *,
    attempt: int,
    rank: int,
    admission_id: str,
    placement: Placement,
    pool: AcceleratorPool | None,
    rendering: Rendering,
    replacement: int = 0,
) -> Body:
    """One pinned pod of a job; gated, if it is one of several. One that replaces another has its name in DNS."""
    name = training_pod_name(job.metadata.name, attempt, rank, replacement)
    env = _training_env(job, placement, pool, attempt, rank, replacement)
    volumes = _Volumes()
    own = _own_container(job, env, volumes, rendering)
    container, own_notes = own.container, own.annotations
    fabric = pool.spec.fabric if pool is not None and placement.pods > 1 else None
    if fabric is not None:  # what a job says of its own goes before
        own_notes = {**(fabric.annotations or {}), **own_notes}
        container["env"] = [{"name": k, "value": v} for k, v in (fabric.env or {}).items()] + container["env"]
    container["resources"] = _resources(placement.per_pod, pool, gang=fabric is not None)
    labels = {
        **own.labels,
        LABEL_ATTEMPT: str(attempt),
        LABEL_RANK: str(rank),
        LABEL_ADMISSION_ID: admission_id,
    }
    if replacement:
        labels[LABEL_REPLACEMENT] = str(replacement)
    node = placement.nodes[rank]
    body = _pod(job, name, KIND_TRAINING, labels, own_notes, container, volumes, pool, node, placement.pool)
    if placement.pods == 1:
        del body["spec"]["schedulingGates"]
    body["spec"] |= {k: v for k, v in own.spec.items() if v}
    body["spec"]["restartPolicy"] = "Never"
    body["spec"]["hostname"] = training_pod_name(job.metadata.name, attempt, rank)
    body["spec"]["subdomain"] = job.metadata.name
    body["spec"]["terminationGracePeriodSeconds"] = job.spec.preemption.grace_period_seconds
    return body


def _training_env(
    job: TrainingJob,
    placement: Placement,
    pool: AcceleratorPool | None,
    attempt: int,
    rank: int,
    replacement: int,
) -> dict[str, str]:
    """What the operator tells a pod of a job, but for what it mounts."""
    env = _identity_env(job, KIND_TRAINING) | _gang_env(job, attempt, rank, placement.pods)
    env[Env.ATTEMPT] = str(attempt)
    if replacement:
        env[Env.REPLACEMENT] = str(replacement)
    env[Env.MODE] = placement.mode
    env[Env.ACCELERATOR] = placement.accelerator
    env[Env.GRACE_SECONDS] = str(job.spec.preemption.grace_period_seconds)
    asks = job.spec.shape.cpu is not None or pool is None or pool.spec.is_cpu
    if placement.per_pod.cpu_m and asks:  # on GPUs what nobody asked for is a request, and no bound
        env[Env.CPU_MILLICORES] = str(placement.per_pod.cpu_m)
    env[Env.CHECKPOINT] = json.dumps(
        job.spec.checkpoint.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"uri"})
    )
    return env


@dataclass(frozen=True)
class _Own:
    """What a job's engine or template says of its pods."""

    container: Body
    spec: Body
    """Fields of the pod."""
    labels: dict[str, str]
    annotations: dict[str, str]


def _own_container(job: TrainingJob, env: dict[str, str], volumes: _Volumes, rendering: Rendering) -> _Own:
    """The container, with all that is mounted in it."""
    if job.spec.template is None or job.spec.template.port:
        env[Env.BEARERS_DIR] = volumes.bearers(
            bearers.secret_name(rendering.workload_key, job.metadata.uid), Role.READ, Role.COMMAND
        )
    if job.spec.output is not None:
        env[Env.OUTPUT_DIR] = volumes.claim(job.spec.output.uri)
        checkpoint = job.spec.checkpoint.uri or f"{job.spec.output.uri.rstrip('/')}/checkpoints"
        env[Env.CHECKPOINT_DIR] = volumes.claim(checkpoint)
    if job.spec.engine is not None:
        return _Own(_engine_container(job, env, volumes, rendering), {}, {}, {})
    assert job.spec.template is not None  # CEL: exactly one of engine and template
    template = job.spec.template
    return _Own(
        _template_container(template, env, volumes),
        {"imagePullSecrets": [{"name": s.name} for s in template.image_pull_secrets or ()]},
        dict((template.metadata and template.metadata.labels) or {}),
        dict((template.metadata and template.metadata.annotations) or {}),
    )


def replica_role(spec: ModelServiceSpec, index: int) -> ReplicaRole:
    """Of the replica with this number."""
    if spec.prefill_replicas is None:
        return ReplicaRole.BOTH
    return ReplicaRole.PREFILL if index < FIRST_DECODE else ReplicaRole.DECODE


def service_pod(
    service: ModelService,
    *,
    index: int,
    model_uri: str,
    placement: Placement,
    pool: AcceleratorPool | None,
    rendering: Rendering,
    mode: str = "",
) -> Body:
    """One gated, pinned replica of a ModelService; in this engine mode, if one was chosen."""
    name = service_pod_name(service.metadata.name, index)
    spec = service.spec
    volumes = _Volumes()
    model_id = spec.model_id or service.metadata.name
    env = _identity_env(service, KIND_SERVICE)
    secret = bearers.secret_name(rendering.workload_key, service.metadata.uid)
    vllm = spec.engine is ServiceEngine.VLLM
    env[Env.BEARERS_DIR] = volumes.bearers(secret, *((bearers.VLLM_CONFIG,) if vllm else tuple(Role)))
    env[Env.MODEL_DIR] = volumes.claim(model_uri, read_only=True)
    # Our engine finds them below ARTIFACTS_ROOT by their addresses in its spec.
    adapters = {a.name: volumes.claim(a.uri, read_only=True) for a in spec.adapters or ()}
    env[Env.MODEL_ID] = model_id
    env[Env.ACCELERATOR] = placement.accelerator
    env[Env.GRACE_SECONDS] = str(spec.drain_seconds)
    env[Env.SPEC] = json.dumps(spec.model_dump(mode="json", by_alias=True, exclude_none=True))
    if mode:
        env[Env.MODE] = mode
    if not vllm:
        env[Env.ROLE] = replica_role(spec, index)
    container = _container(spec.image or rendering.workloads_image, env, volumes, port=True)
    container["imagePullPolicy"] = rendering.pull_policy
    if spec.engine is ServiceEngine.BUILTIN:
        container["command"] = [*INIT, "python", "-m", "busbar.workloads.serving"]
        container["args"] = list(spec.args or ())
    else:
        container["args"] = [
            "--model", env[Env.MODEL_DIR], "--served-model-name", model_id, "--port", str(workload.PORT),
            "--config", f"{bearers.FOLDER}/{bearers.VLLM_CONFIG}", *_vllm_limits(spec),
            *_vllm_parallel(spec, pool), *_vllm_adapters(model_id, adapters), *(spec.args or ()),
        ]  # fmt: skip
        container["lifecycle"] = pre_stop(workload.PORT, spec.drain_seconds)
    container |= _probes(workload.HEALTH_PATH if vllm else workload.READY_PATH)
    container["resources"] = _resources(placement.per_pod, pool)
    labels = {LABEL_RANK: str(index), LABEL_ADMISSION_ID: f"{service.metadata.uid[:8]}-{index}"}
    node = placement.nodes[0]
    body = _pod(service, name, KIND_SERVICE, labels, {}, container, volumes, pool, node, placement.pool)
    body["metadata"]["annotations"][ANNOTATION_PLACEMENT] = placement_note(placement)
    body["spec"]["restartPolicy"] = "Always"
    body["spec"]["terminationGracePeriodSeconds"] = spec.drain_seconds + DRAIN_MARGIN_S
    return body


def _probes(ready_path: str) -> Body:
    """When a replica takes requests, and when its container is started again."""
    return {
        "readinessProbe": {
            "httpGet": {"path": ready_path, "port": workload.PORT_NAME},
            "periodSeconds": 1,
            "failureThreshold": 2,
            "timeoutSeconds": 2,
        },
        "livenessProbe": {
            "httpGet": {"path": workload.HEALTH_PATH, "port": workload.PORT_NAME},
            "initialDelaySeconds": 120,
            "periodSeconds": 20,
            "failureThreshold": 6,
            "timeoutSeconds": 5,
        },
    }


def _vllm_limits(spec: ModelServiceSpec) -> list[str]:
    """The limits of the spec as vLLM's own flags; `spec.args` come after them and win."""
    flags: list[str] = []
    if spec.max_model_len is not None:
        flags += ["--max-model-len", str(spec.max_model_len)]
    if spec.kv_cache_memory is not None:
        flags += ["--kv-cache-memory-bytes", str(quantity.to_bytes(spec.kv_cache_memory))]
    return flags


def _vllm_parallel(spec: ModelServiceSpec, pool: AcceleratorPool | None) -> list[str]:
    """The flag with which vLLM uses all accelerators of the pod, where `spec.args` do not say how they are used."""
    count = spec.shape.accelerators_per_pod
    if pool is None or pool.spec.is_cpu or count == 1 or any(_PARALLEL.match(arg) for arg in spec.args or ()):
        return []
    return ["--tensor-parallel-size", str(count)]


def _vllm_adapters(model_id: str, folders: Mapping[str, str]) -> list[str]:
    """vLLM's flags for adapters, under the names by which the gateway asks for them."""
    if not folders:
        return []
    return [
        "--enable-lora",
        "--lora-modules",
        *(f"{model_id}:{name}={folder}" for name, folder in folders.items()),
    ]


# -- containers ----------------------------------------------------------------------------------------


def _engine_container(job: TrainingJob, env: dict[str, str], volumes: _Volumes, rendering: Rendering) -> Body:
    engine = job.spec.engine
    assert engine is not None
    env[Env.SPEC] = json.dumps(engine.model_dump(mode="json", by_alias=True, exclude_none=True))
    if engine.data.uri.startswith("pvc://"):
        env[Env.DATA_DIR] = volumes.claim(engine.data.uri)
    for each in engine.adapters or ():
        if each.data is not None and each.data.uri.startswith("pvc://"):
            volumes.claim(each.data.uri)  # found by its address, as a tokenizer is
    if engine.model.uri is not None:
        env[Env.MODEL_DIR] = volumes.claim(engine.model.uri)
    if engine.tokenizer is not None and engine.tokenizer.uri is not None:
        volumes.claim(engine.tokenizer.uri)  # the engine finds it below ARTIFACTS_ROOT by its address
    container = _container(rendering.workloads_image, env, volumes, port=True)
    container["command"] = [*INIT, "python", "-m", "busbar.workloads.training"]
    container["imagePullPolicy"] = rendering.pull_policy
    return container


def _template_container(template: PodTemplate, env: dict[str, str], volumes: _Volumes) -> Body:
    container = _container(template.image, env, volumes, port=template.port)
    own = [v.model_dump(mode="json", by_alias=True, exclude_none=True) for v in template.env or ()]
    # Ours come last: of two variables with the same name the later one counts.
    container["env"] = own + container["env"]
    fields: Body = {
        "imagePullPolicy": template.image_pull_policy,
        "command": template.command,
        "args": template.args,
        "workingDir": template.working_dir,
        "envFrom": [
            e.model_dump(mode="json", by_alias=True, exclude_none=True) for e in template.env_from or ()
        ],
    }
    container |= {k: v for k, v in fields.items() if v}
    for volume in template.volumes or ():
        volumes.own(volume.model_dump(mode="json", by_alias=True, exclude_none=True))
    container["volumeMounts"] = volumes.mounts()
    return container


def _container(image: str, env: dict[str, str], volumes: _Volumes, *, port: bool) -> Body:
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


def _resources(per_pod: Resources, pool: AcceleratorPool | None, *, gang: bool = False) -> Body:
    """`gang`: with the devices of the pool's fabric."""
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


# -- environment ---------------------------------------------------------------------------------------


def _identity_env(obj: Resource, kind: str) -> dict[str, str]:
    meta = obj.metadata
    return {
        Env.JOB_NAME: meta.name,
        Env.NAMESPACE: meta.namespace or "",
        Env.JOB_UID: meta.uid,
        Env.KIND: kind,
        Env.PORT: str(workload.PORT),
        "HOME": "/tmp",
    }


def _gang_env(job: TrainingJob, attempt: int, rank: int, size: int) -> dict[str, str]:
    """Of the pod's first process. Where there are several, it is not said to be one: the pod starts them."""
    name, each = job.metadata.name, 1 if job.spec.engine is None else job.spec.engine.processes_per_pod
    # One pod meets nobody: it has no Service, hence no name in DNS.
    master = f"{training_pod_name(name, attempt, 0)}.{name}" if size > 1 else "127.0.0.1"
    return {
        Env.RANK: str(rank * each),
        Env.WORLD_SIZE: str(size * each),
        **({Env.LOCAL_RANK: "0"} if each == 1 else {}),
        Env.LOCAL_WORLD_SIZE: str(each),
        Env.NODE_RANK: str(rank),
        Env.GROUP_RANK: str(rank),
        Env.MASTER_ADDR: master,
        Env.MASTER_PORT: str(workload.MASTER_PORT),
        Env.PET_NNODES: str(size),
        Env.PET_NODE_RANK: str(rank),
        Env.PET_MASTER_ADDR: master,
        Env.PET_MASTER_PORT: str(workload.MASTER_PORT),
        Env.PET_NPROC_PER_NODE: "1",
    }


# -- the pod -------------------------------------------------------------------------------------------


class _Volumes:
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
        self._own.append(volume)

    def mounts(self) -> list[Body]:
        mounts: list[Body] = [
            {"name": "busbar-tmp", "mountPath": "/tmp"},
            {"name": "busbar-shm", "mountPath": "/dev/shm"},
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


def _metadata(owner: Resource, name: str, kind: str, labels: dict[str, str]) -> Body:
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


def _pod(
    owner: Resource,
    name: str,
    kind: str,
    labels: dict[str, str],
    notes: dict[str, str],
    container: Body,
    volumes: _Volumes,
    pool: AcceleratorPool | None,
    node: str,
    pool_name: str,
) -> Body:
    metadata = _metadata(owner, name, kind, labels)
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
