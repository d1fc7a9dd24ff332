"""Small builders for the pure tests: objects, pods and views with defaults for everything that a test does not set."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from busbar.kube.contracts import bearers
from busbar.kube.informer import Key
from busbar.kube.types import AcceleratorPool, ModelService, Tenant, TrainingJob
from busbar.operator.decisions import Admit
from busbar.operator.pods.manifests import KIND_SERVICE, KIND_TRAINING, Rendering
from busbar.operator.settings import Settings
from busbar.operator.training.reconcile import reconcile
from busbar.operator.training.view import JobUpdate, JobView
from busbar.operator.watch.projections import Exit, Pod, Requests
from busbar.scheduler import Placement, Resources

NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)
RENDERING = Rendering("registry/busbar-workloads:1", "IfNotPresent", b"0123456789abcdef0123456789abcdef")
SETTINGS = Settings(workload_key=RENDERING.workload_key)
ENGINE: dict[str, Any] = {
    "model": {"config": {"model_type": "llama"}},
    "tokenizer": {"train": {"vocabSize": 512}},
    "data": {"uri": "builtin://python-stdlib"},
    "steps": 100,
}


def engine_of(config: dict[str, Any]) -> dict[str, Any]:
    """That trains a model of this config."""
    vocabulary = config.get("vocab_size", ENGINE["tokenizer"]["train"]["vocabSize"])
    return {**ENGINE, "model": {"config": config}, "tokenizer": {"train": {"vocabSize": vocabulary}}}


def pool(name: str = "cpu", **spec: Any) -> AcceleratorPool:
    body = {"accelerator": "cpu", "resourceName": "cpu", "nodeSelector": {"pool": name}, **spec}
    return AcceleratorPool.model_validate(
        {"metadata": {"name": name, "generation": 1}, "kind": "AcceleratorPool", "spec": body}
    )


def tenant(name: str, namespaces: list[str], *, created: str = "2026-11-01T00:00:00Z", **spec: Any) -> Tenant:
    meta = {
        "name": name,
        "uid": f"uid-{name}",
        "generation": 1,
        "resourceVersion": "1",
        "creationTimestamp": created,
    }
    return Tenant.model_validate(
        {"metadata": meta, "kind": "Tenant", "spec": {"namespaces": namespaces, **spec}}
    )


def job(
    name: str = "job", *, status: dict[str, Any] | None = None, deleting: bool = False, **spec: Any
) -> TrainingJob:
    body: dict[str, Any] = {"output": {"uri": "pvc://claim/model"}, **spec}
    if "template" not in body:
        body.setdefault("engine", ENGINE)
    meta: dict[str, Any] = {
        "name": name, "namespace": "team", "uid": f"uid-{name}", "generation": 1, "resourceVersion": "7",
        "creationTimestamp": "2026-11-21T11:00:00Z",
    }  # fmt: skip
    if deleting:
        meta["deletionTimestamp"] = "2026-11-21T11:59:00Z"
    return TrainingJob.model_validate(
        {"metadata": meta, "kind": "TrainingJob", "spec": body, "status": status}
    )


def gang(size: int, **spec: Any) -> TrainingJob:
    return job(template={"image": "own"}, shape={"minPods": size, "maxPods": size}, **spec)


def service(name: str = "web", *, status: dict[str, Any] | None = None, **spec: Any) -> ModelService:
    meta = {
        "name": name, "namespace": "team", "uid": f"uid-{name}", "generation": 1, "resourceVersion": "7",
        "creationTimestamp": "2026-11-21T11:00:00Z",
    }  # fmt: skip
    body = {"model": {"uri": "pvc://claim/model"}, **spec}
    return ModelService.model_validate(
        {"metadata": meta, "kind": "ModelService", "spec": body, "status": status}
    )


def placement(pods: int = 1, **fields: Any) -> Placement:
    base = Placement(
        "cpu", "cpu", "resident", tuple(f"node-{i}" for i in range(pods)), Resources(1000, 1000, 2048)
    )
    return replace(base, **fields)


def admit(pods: int = 1, *, version: str = "7", index: int = 0) -> Admit:
    return Admit(placement(pods), "there is room", version, index)


def pod(
    rank: int = 0, *, attempt: int = 1, owner: str = "job", kind: str = KIND_TRAINING, **fields: Any
) -> Pod:
    name = f"{owner}-{attempt}-{rank}" if kind == KIND_TRAINING else f"{owner}-{rank}"
    base = Pod(
        key=Key("team", name), uid=f"uid-{name}", phase="Pending", created_at=NOW, node="", requests=Requests(1000),
        kind=kind, job=owner, attempt=attempt, rank=rank, owner_uid=f"uid-{owner}", pinned=f"node-{rank}", pool="cpu",
        bearers=bearers.secret_name(RENDERING.workload_key, f"uid-{owner}"),
    )  # fmt: skip
    return replace(base, **fields)


def gated(rank: int = 0, **fields: Any) -> Pod:
    return pod(rank, gates=("busbar.dev/admission",), **fields)


def running(rank: int = 0, **fields: Any) -> Pod:
    values: dict[str, Any] = {
        "phase": "Running",
        "node": f"node-{rank}",
        "ready": True,
        "started_at": NOW,
        **fields,
    }
    return pod(rank, **values)


def ended(rank: int = 0, code: int = 0, message: str = "", **fields: Any) -> Pod:
    how = Exit(code, "" if code else "Completed", message, NOW)
    values: dict[str, Any] = {
        "phase": "Failed" if code else "Succeeded",
        "exit": how,
        "node": f"node-{rank}",
        **fields,
    }
    return pod(rank, **values)


def replica(index: int, **fields: Any) -> Pod:
    values: dict[str, Any] = {
        "owner": "web", "kind": KIND_SERVICE, "attempt": 0, "phase": "Running", "ready": True, "port": 9400,
        "ip": "10.0.0.5", "node": "node-0", **fields,
    }  # fmt: skip
    return pod(index, **values)


def view(of: TrainingJob, *pods: Pod, **fields: Any) -> JobView:
    base = JobView(job=of, pods=pods, now=NOW, settings=SETTINGS, rendering=RENDERING, pool=pool())
    return replace(base, **fields)


def admitted(of: TrainingJob, pods: int = 1, **changes: Any) -> TrainingJob:
    """The job after an admission, with the status that a reconcile writes."""
    update = reconcile(view(of), admit(pods))
    assert update.status is not None
    return with_status(of, update, **changes)


def with_status(of: TrainingJob, update: JobUpdate, **changes: Any) -> TrainingJob:
    """The job after a decision's status is written."""
    assert update.status is not None
    return of.model_copy(update={"status": update.status.model_copy(update=changes)})


def queued(**status: Any) -> TrainingJob:
    return job(status={"phase": "Queued", "reason": "InsufficientCapacity", **status})


def running_job(**changes: object) -> TrainingJob:
    of = admitted(job())
    return with_status(of, reconcile(view(of, running())), **changes)


def phase(update: JobUpdate) -> str | None:
    return update.status.phase if update.status is not None else None
