"""The pods of a ModelService's replicas, with Busbar's own engine or another one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from busbar.kube.contracts import bearers, workload
from busbar.kube.contracts.bearers import Role
from busbar.kube.contracts.workload import Env, ReplicaRole
from busbar.kube.types import AcceleratorPool, ModelService, quantity
from busbar.kube.types.engines import FOREIGN, ForeignEngine
from busbar.kube.types.meta import LABEL_ADMISSION_ID, LABEL_RANK
from busbar.kube.types.model_service import MAX_REPLICAS, ModelServiceSpec
from busbar.operator.pods.manifests import (
    INIT,
    KIND_SERVICE,
    Body,
    Rendering,
    Volumes,
    identity_env,
    new_container,
    pinned_pod,
    resources_of,
)
from busbar.operator.pods.model_server_stop import pre_stop
from busbar.operator.pods.replica_place import placement_note
from busbar.operator.watch.projections import ANNOTATION_PLACEMENT
from busbar.scheduler import Placement
from busbar.scheduler.autoscale.reach import LIVENESS, READINESS, Probe

DRAIN_MARGIN_S = 15
FIRST_DECODE = MAX_REPLICAS
"""Of a service whose replicas have roles those that decode have numbers from here on, and those that compute prompts smaller ones. So
the replica that takes the place of one that is leaving has its role, although that still has its number."""


def service_pod_name(service: str, index: int) -> str:
    return f"{service}-{index}"


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
    volumes = Volumes()
    model_id = spec.model_id or service.metadata.name
    env = identity_env(service, KIND_SERVICE)
    secret = bearers.secret_name(rendering.workload_key, service.metadata.uid)
    engine = FOREIGN.get(spec.engine)
    env[Env.BEARERS_DIR] = volumes.bearers(
        secret, *(tuple(Role) if engine is None else (engine.config_file,))
    )
    env[Env.MODEL_DIR] = volumes.claim(model_uri, read_only=True)
    # Our engine finds them below ARTIFACTS_ROOT by their addresses in its spec.
    adapters = {a.name: volumes.claim(a.uri, read_only=True) for a in spec.adapters or ()}
    env[Env.MODEL_ID] = model_id
    env[Env.ACCELERATOR] = placement.accelerator
    env[Env.GRACE_SECONDS] = str(spec.drain_seconds)
    env[Env.SPEC] = json.dumps(spec.model_dump(mode="json", by_alias=True, exclude_none=True))
    if mode:
        env[Env.MODE] = mode
    if engine is None:
        env[Env.ROLE] = replica_role(spec, index)
    container = new_container(spec.image or rendering.workloads_image, env, volumes, port=True)
    container["imagePullPolicy"] = rendering.pull_policy
    if engine is None:
        container |= _own_start(spec)
    else:
        container |= _foreign_start(engine, spec, model_id, env[Env.MODEL_DIR], adapters, pool)
    container["resources"] = resources_of(placement.per_pod, pool)
    labels = {LABEL_RANK: str(index), LABEL_ADMISSION_ID: f"{service.metadata.uid[:8]}-{index}"}
    node = placement.nodes[0]
    body = pinned_pod(service, name, KIND_SERVICE, labels, {}, container, volumes, pool, node, placement.pool)
    body["metadata"]["annotations"][ANNOTATION_PLACEMENT] = placement_note(placement)
    body["spec"]["restartPolicy"] = "Always"
    body["spec"]["terminationGracePeriodSeconds"] = spec.drain_seconds + DRAIN_MARGIN_S
    return body


def _own_start(spec: ModelServiceSpec) -> Body:
    return {
        "command": [*INIT, "python", "-m", "busbar.workloads.serving"],
        "args": list(spec.args or ()),
        **_probes(workload.READY_PATH, workload.HEALTH_PATH),
    }


def _foreign_start(
    engine: ForeignEngine,
    spec: ModelServiceSpec,
    model_id: str,
    model_dir: str,
    adapters: Mapping[str, str],
    pool: AcceleratorPool | None,
) -> Body:
    """How an engine that is not ours is started, probed and stopped; `adapters` are folders by name."""
    args = [
        engine.model_flag, model_dir, "--served-model-name", model_id, "--port", str(workload.PORT),
        "--config", f"{bearers.FOLDER}/{engine.config_file}", *engine.always, *_limits(engine, spec),
        *_parallel(engine, spec, pool), *_adapters(engine, model_id, adapters), *(spec.args or ()),
    ]  # fmt: skip
    return {
        **({"command": list(engine.command)} if engine.command else {}),
        "args": args,
        "lifecycle": pre_stop(engine, workload.PORT, spec.drain_seconds),
        **_probes(engine.ready_path, engine.health_path),
    }


def _probes(ready_path: str, health_path: str) -> Body:
    """When a replica takes requests, and when its container is started again."""
    return {
        "readinessProbe": _probe(READINESS, ready_path),
        "livenessProbe": _probe(LIVENESS, health_path) | {"initialDelaySeconds": 120},
    }


def _probe(probe: Probe, path: str) -> Body:
    return {
        "httpGet": {"path": path, "port": workload.PORT_NAME},
        "periodSeconds": probe.period_s,
        "failureThreshold": probe.failures,
        "timeoutSeconds": probe.timeout_s,
    }


def _limits(engine: ForeignEngine, spec: ModelServiceSpec) -> list[str]:
    """The limits of the spec as the engine's own flags; `spec.args` come after them and win."""
    flags: list[str] = []
    if spec.max_model_len is not None:
        flags += [engine.length_flag, str(spec.max_model_len)]
    if spec.kv_cache_memory is not None and engine.kv_bytes_flag is not None:
        flags += [engine.kv_bytes_flag, str(quantity.to_bytes(spec.kv_cache_memory))]
    return flags


def _parallel(engine: ForeignEngine, spec: ModelServiceSpec, pool: AcceleratorPool | None) -> list[str]:
    """The flag with which the engine uses all accelerators of the pod, where `spec.args` do not say how they are used."""
    count = spec.shape.accelerators_per_pod
    if pool is None or pool.spec.is_cpu or count == 1:
        return []
    if any(re.match(engine.parallel_args, arg) for arg in spec.args or ()):
        return []
    return ["--tensor-parallel-size", str(count)]


def _adapters(engine: ForeignEngine, model_id: str, folders: Mapping[str, str]) -> list[str]:
    """The engine's flags for adapters, under the names by which the gateway asks for them."""
    if not folders:
        return []
    before = f"{model_id}:" if engine.full_adapter_names else ""
    return [
        "--enable-lora",
        engine.adapters_flag,
        *(f"{before}{n}={folder}" for n, folder in folders.items()),
    ]
