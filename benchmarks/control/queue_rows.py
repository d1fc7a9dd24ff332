"""The situations that `queues.py` measures, and the manifests of their jobs and nodes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.cluster.operator_process import COMMAND

from busbar.kube.client import Object
from busbar.kube.resources import JOBS, PODS, TRAINING_JOBS, Resource
from busbar.local.simulated import DURATION, TAINT

ROOT = Path(__file__).resolve().parent.parent.parent
GPU = "nvidia.com/gpu"
URGENT = "urgent"
OPT_IN = {"busbar.dev/queue": "true"}


@dataclass(frozen=True)
class Row:
    """One situation."""

    name: str
    jobs: int
    pods: int
    """Of one job."""
    seconds: float | None
    """How long a pod runs; None: until it is deleted."""
    nodes: int
    per_node: int
    tenants: int = 1
    guaranteed: int = 0
    """Accelerators of each tenant."""
    made_of: Resource = TRAINING_JOBS
    queued: bool = True
    """Whether a queue decides about them."""
    arrive_s: float = 0.0
    """Within so long they are submitted; 0: as fast as can be."""
    killed: bool = False
    storm: int = 0
    """Jobs of a second tenant, which alone has a guarantee: they come when all the others run, and take their places."""
    settings: dict[str, str] = field(default_factory=dict)
    """Variables of the operator."""
    bars: dict[str, float] = field(default_factory=dict)

    @property
    def namespaces(self) -> list[str]:
        """One for each tenant."""
        return [f"team-{number}" for number in range(self.tenants)]

    @property
    def places(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True)
class Queue:
    """Who decides: the operator, or another queue."""

    command: tuple[str, ...] = tuple(COMMAND)
    setup: Path | None = None
    labels: dict[str, str] = field(default_factory=lambda: dict(OPT_IN))
    source: Path = ROOT / ".src"

    @property
    def is_ours(self) -> bool:
        return self.command == tuple(COMMAND)


FIT = Row("fit", 500, 1, 30, 200, 4, bars={"all_ended_s": 80, "cpu_ms_per_job": 12, "writes_per_job": 9})
TENANTS = Row(
    "tenants", 1000, 1, 20, 50, 4, tenants=10, guaranteed=20,
    bars={"all_ended_s": 170, "cpu_ms_per_job": 20, "writes_per_job": 11, "operator_peak_mib": 140},
)  # fmt: skip
GANGS = Row(
    "gangs", 20, 50, 30, 250, 4,
    bars={"last_running_s": 22, "all_ended_s": 58, "cpu_ms_per_pod": 5, "writes_per_pod": 5.2},
)  # fmt: skip
ROWS = (
    FIT,
    TENANTS,
    GANGS,
    Row("large-gangs", 5, 400, 30, 500, 4, bars={"cpu_ms_per_pod": 5, "writes_per_pod": 5.2}),
    Row(
        "arrivals", 15_000, 1, 10, 200, 4, tenants=10, guaranteed=80, arrive_s=60.0,
        bars={"cpu_ms_per_job": 12, "operator_peak_mib": 400, "longest_free_s": 2, "writes_per_waiting_minute": 1},
    ),
    Row(
        "storm", 200, 1, 120, 50, 4, tenants=2, guaranteed=200, storm=200,
        settings={"BUSBAR_OPERATOR_GUARANTEE_RECLAIM_S": "10"},
    ),
    replace(TENANTS, name="killed", killed=True, bars={"admits_again_s": 21, "pods_doubled": 0}),
    Row("idle", 2000, 1, None, 500, 4, bars={"idle_cpu_percent": 2, "idle_calls_per_s": 3}),
    Row("floor", 500, 1, 30, 200, 4, made_of=PODS, queued=False),
    *(replace(row, name=f"{row.name}-jobs", made_of=JOBS, bars={}) for row in (FIT, TENANTS, GANGS)),
    replace(FIT, name="floor-jobs", made_of=JOBS, queued=False, bars={}),
)  # fmt: skip


def scaled(row: Row, scale: float) -> Row:
    """A smaller cluster with fewer jobs; its bars are left out."""
    if scale == 1.0:
        return row
    counts = {name: max(1, round(getattr(row, name) * scale)) for name in ("jobs", "nodes")}
    return replace(
        row, **counts, guaranteed=round(row.guaranteed * scale), storm=round(row.storm * scale), bars={}
    )


def node(number: int, per_node: int) -> Object:
    name = f"node-{number:04d}"
    labels = {"type": "kwok", "kubernetes.io/hostname": name, "nvidia.com/gpu.count": str(per_node),
              "busbar.dev/accelerator": "H100"}  # fmt: skip
    notes = {"kwok.x-k8s.io/node": "fake", "sim.busbar.dev/cpu": "64", "sim.busbar.dev/memory": "512Gi"}
    metadata = {"name": name, "labels": labels, "annotations": notes}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {"taints": [TAINT]}}


def job(number: int, row: Row, name: str = "job") -> Object:
    """A TrainingJob."""
    notes = {DURATION: str(row.seconds)} if row.seconds is not None else {}
    template = {"image": "registry.test/own:1", "command": ["true"], "metadata": {"annotations": notes}}
    shape = {"minPods": row.pods, "maxPods": row.pods, "acceleratorsPerPod": 1, "cpu": "1", "memory": "1Gi"}
    spec: Object = {"template": template, "shape": shape}
    return {
        "apiVersion": TRAINING_JOBS.api_version, "kind": "TrainingJob", "metadata": {"name": f"{name}-{number:05d}"},
        "spec": spec,
    }  # fmt: skip


def pod_spec() -> Object:
    """What the pod of such a job has, as its own controller or nobody's makes it."""
    size = {GPU: "1", "cpu": "1", "memory": "1Gi"}
    container = {
        "name": "main", "image": "registry.test/own:1", "resources": {"requests": size, "limits": size},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }  # fmt: skip
    secure = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    return {
        "containers": [container], "tolerations": [{**TAINT, "operator": "Equal"}], "restartPolicy": "Never",
        "securityContext": secure, "automountServiceAccountToken": False,
    }  # fmt: skip


def bare_pod(number: int, row: Row) -> Object:
    metadata = {"name": f"pod-{number:05d}", "annotations": {DURATION: str(row.seconds)}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod_spec()}


def batch_job(number: int, row: Row, queue: Queue) -> Object:
    """A Job of Kubernetes, which a queue takes in by its label; another queue than ours gets it suspended."""
    template = {"metadata": {"annotations": {DURATION: str(row.seconds)}}, "spec": pod_spec()}
    spec: Object = {"parallelism": row.pods, "completions": row.pods, "backoffLimit": 0, "template": template}
    if row.queued and not queue.is_ours:
        spec["suspend"] = True
    labels = queue.labels if row.queued else {}
    metadata = {"name": f"job-{number:05d}", "labels": labels}
    return {"apiVersion": JOBS.api_version, "kind": "Job", "metadata": metadata, "spec": spec}
