"""What a simulation replays: jobs with their true lengths, and a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One job as it really is. The policy sees of it only what a snapshot shows."""

    id: str
    arrival_s: float
    work: float
    """Steps to do (or seconds at speed 1 where the trace gives durations)."""
    speeds: Mapping[str, float]
    """True work per second of the whole job, by accelerator; 0 or missing: impossible there."""
    workload_class: str = ""
    pods: int = 1
    per_pod_m: int = 1000
    """Thousandths of an accelerator per pod."""
    tenant: str = "all"
    user: str = ""
    priority: int = 100
    max_pods: int | None = None

    @property
    def accelerators(self) -> float:
        return self.pods * self.per_pod_m / 1000

    def best_s(self) -> float:
        """Seconds it takes alone on its fastest accelerator."""
        return self.work / max(self.speeds.values())


@dataclass(frozen=True, slots=True)
class TraceCluster:
    """Nodes per accelerator type."""

    nodes: Mapping[str, int]
    accelerators_per_node: Mapping[str, int] = field(default_factory=dict)
    """Default 1."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Exchange rates; default 1."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """Money per accelerator-hour."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Tenants' weights; default 1."""

    def per_node(self, accelerator: str) -> int:
        return self.accelerators_per_node.get(accelerator, 1)

    def capacity(self) -> dict[str, int]:
        """Accelerators per type."""
        return {kind: count * self.per_node(kind) for kind, count in self.nodes.items()}


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs in order of arrival."""

    name: str
    jobs: tuple[TraceJob, ...]
    measured: tuple[int, int] | None = None
    """Half-open range of job numbers that statistics are made of; None: all."""

    def measured_jobs(self) -> tuple[TraceJob, ...]:
        return self.jobs if self.measured is None else self.jobs[slice(*self.measured)]
