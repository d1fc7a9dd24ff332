"""The pods of a TrainingJob, and the Service in which they find each other."""

from __future__ import annotations

import json
from dataclasses import dataclass

from busbar.kube.contracts import bearers, workload
from busbar.kube.contracts.bearers import Role
from busbar.kube.contracts.workload import Env
from busbar.kube.types import AcceleratorPool, TrainingJob
from busbar.kube.types.meta import (
    LABEL_ADMISSION_ID,
    LABEL_ATTEMPT,
    LABEL_JOB,
    LABEL_KIND,
    LABEL_RANK,
    LABEL_REPLACEMENT,
)
from busbar.kube.types.pod_template import PodTemplate
from busbar.operator.pods.manifests import (
    INIT,
    KIND_TRAINING,
    Body,
    Rendering,
    Volumes,
    identity_env,
    metadata_of,
    new_container,
    pinned_pod,
    resources_of,
)
from busbar.scheduler import Placement


def gang_service(job: TrainingJob) -> Body:
    """The headless Service that gives each rank a DNS name, also before the pod is ready."""
    name = job.metadata.name
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata_of(job, name, KIND_TRAINING, {}),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {LABEL_KIND: KIND_TRAINING, LABEL_JOB: name},
            "ports": [{"name": "rendezvous", "port": workload.MASTER_PORT, "protocol": "TCP"}],
        },
    }


def training_pod_name(job: str, attempt: int, rank: int, replacement: int = 0) -> str:
    """`replacement`: how many pods of this rank were lost in this attempt."""
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
    volumes = Volumes()
    own = _own_container(job, env, volumes, rendering)
    container, own_notes = own.container, own.annotations
    fabric = pool.spec.fabric if pool is not None and placement.pods > 1 else None
    if fabric is not None:  # what a job says of its own goes before
        own_notes = {**(fabric.annotations or {}), **own_notes}
        container["env"] = [{"name": k, "value": v} for k, v in (fabric.env or {}).items()] + container["env"]
    container["resources"] = resources_of(placement.per_pod, pool, gang=fabric is not None)
    labels = {
        **own.labels,
        LABEL_ATTEMPT: str(attempt),
        LABEL_RANK: str(rank),
        LABEL_ADMISSION_ID: admission_id,
    }
    if replacement:
        labels[LABEL_REPLACEMENT] = str(replacement)
    node = placement.nodes[rank]
    body = pinned_pod(
        job, name, KIND_TRAINING, labels, own_notes, container, volumes, pool, node, placement.pool
    )
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
    env = identity_env(job, KIND_TRAINING) | _gang_env(job, attempt, rank, placement.pods)
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


def _own_container(job: TrainingJob, env: dict[str, str], volumes: Volumes, rendering: Rendering) -> _Own:
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


def _engine_container(job: TrainingJob, env: dict[str, str], volumes: Volumes, rendering: Rendering) -> Body:
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
    container = new_container(rendering.workloads_image, env, volumes, port=True)
    container["command"] = [*INIT, "python", "-m", "busbar.workloads.training"]
    container["imagePullPolicy"] = rendering.pull_policy
    return container


def _template_container(template: PodTemplate, env: dict[str, str], volumes: Volumes) -> Body:
    container = new_container(template.image, env, volumes, port=template.port)
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
