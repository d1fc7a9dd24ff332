"""The answer of `busbar simulate --serving`: a service's fleet and training jobs on one cluster, by each policy of the fleet."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..autoscale.fleet import FleetSettings
from ..autoscale.mix import Column, Limits
from ..autoscale.step_model import Slo, StepModel, kv_token_bytes
from ..errors import ServingModelError
from ..fit.accelerators import accelerator
from ..fit.model import ModelShape
from ..model.plans import Policy as PlannerPolicy
from .engine import SETTLE_S, Settings, node_name
from .serving_cluster import Moves, ServingSettings
from .serving_engine import Policy, run
from .serving_failures import Failures
from .serving_policies import HPA_MOST, Hpa, Ours, Static, bounds, rated_in_flight, static_replicas
from .serving_pools import Pool, columns_of, step_models
from .serving_result import ServingResult
from .serving_trace import Buckets, ServingTrace, rates_by_minute
from .shared_cluster import SharedCluster, TrainingFigures
from .trace import Trace, TraceCluster

Progress = Callable[[str, float, float], None]


@dataclass(frozen=True, slots=True)
class SharedQuestion:
    """What runs where."""

    pools: tuple[Pool, ...]
    """Of the service: what it is guaranteed, and may have at most, of each type."""
    cluster: TraceCluster
    slo: Slo
    shape: ModelShape
    start_s: float = 60.0
    give_s: float = 10.0
    """Until training that gives way has freed its accelerators."""
    policies: tuple[str, ...] = ("busbar", "static")
    check: bool = False
    """Let the independent checker examine every plan."""
    failures: Failures = field(default_factory=Failures)
    """Of nodes, which training stands on, too, and of replicas."""

    def __post_init__(self) -> None:
        capacity = self.cluster.capacity()
        for pool in self.pools:
            if pool.zone:
                raise ServingModelError(
                    f"--pools: {pool.name} names a zone, and the cluster's nodes are in none; leave it out"
                )
            if pool.stock > capacity.get(pool.type, 0):
                raise ServingModelError(
                    f"--pools: the service is to have {pool.stock} {pool.type}, the cluster has"
                    f" {capacity.get(pool.type, 0)}"
                )


@dataclass(frozen=True, slots=True)
class SharedResult:
    """One policy of the fleet."""

    policy: str
    serving: ServingResult
    training: TrainingFigures
    plans: int

    def to_json(self) -> dict[str, object]:
        """Numbers for people and programs."""
        return {
            "policy": self.policy,
            "serving": self.serving.to_json(),
            "training": self.training.to_json(),
            "plans": self.plans,
        }


@dataclass(frozen=True, slots=True)
class SharedAnswer:
    """All policies, and what bounds the gain over the static fleet."""

    results: tuple[SharedResult, ...]
    static_replicas: int
    static_type: str
    capacity: int
    bound_ratio: float | None
    """Accelerators that a clairvoyant fleet leaves to training over those that the static one does; None: several types."""

    def to_json(self) -> dict[str, object]:
        """Numbers for people and programs."""
        return {
            "static_replicas": self.static_replicas,
            "static_type": self.static_type,
            "accelerators": self.capacity,
            "bound_training_over_static": None if self.bound_ratio is None else round(self.bound_ratio, 4),
            "fleets": [result.to_json() for result in self.results],
        }


def reference_speeds(cluster: TraceCluster) -> dict[str, float]:
    """How fast a job of the trace is on each type: by data sheet, 1 on an A100.

    Raises:
        ServingModelError: a type has no data sheet.
    """
    found: dict[str, float] = {}
    for kind in sorted(cluster.nodes):
        device = accelerator(kind)
        if device is None:
            raise ServingModelError(f"--cluster: there is no data sheet of {kind!r}")
        found[kind] = device.rate
    return found


def share(
    trace: ServingTrace, jobs: Trace, question: SharedQuestion, progress: Progress | None = None
) -> SharedAnswer:
    """Simulate each policy on the same requests and jobs.

    Raises:
        ServingModelError: bad numbers, or no pool holds the model or meets the SLO, or the static fleet needs more than the
            service may have.
    """
    buckets = Buckets.of(trace)
    models, _ = step_models(question.pools, question.shape)
    columns = columns_of(question.pools, models, buckets, question.slo)
    minutes = rates_by_minute(trace, buckets)
    guarantee = {pool.type: pool.stock for pool in question.pools}
    limits = Limits(stock=guarantee, min_replicas=1)
    bound = bounds(columns, minutes, limits, 0.0)
    static = static_replicas(bound.single, minutes)
    if "static" in question.policies and static > guarantee[bound.single.key]:
        raise ServingModelError(
            f"--pools: the static fleet needs {static} {bound.single.key}, and the service may have"
            f" {guarantee[bound.single.key]}; give it more, or leave the policy static out"
        )
    results = []
    for name in question.policies:
        policy: Policy
        if name == "busbar":
            fleet = FleetSettings(start_s=question.start_s, down_after_s=max(300.0, question.start_s))
            policy = Ours.of(columns, limits, question.slo, fleet, trace.earlier)
        elif name == "hpa":
            rated = rated_in_flight(models[bound.single.key], bound.single, buckets.means, minutes)
            most = min(math.ceil(HPA_MOST * static), guarantee[bound.single.key])
            policy = Hpa(bound.single, rated, most)
        else:
            policy = Static(bound.single, static)
        results.append(_one(trace, jobs, question, policy, columns, models, buckets, guarantee, progress))
    return SharedAnswer(
        tuple(results),
        static,
        bound.single.key,
        sum(question.cluster.capacity().values()),
        _bound_ratio(question, bound.mix_per_h, static),
    )


def _one(
    trace: ServingTrace,
    jobs: Trace,
    question: SharedQuestion,
    policy: Policy,
    columns: tuple[Column, ...],
    models: Mapping[str, StepModel],
    buckets: Buckets,
    guarantee: Mapping[str, int],
    progress: Progress | None,
) -> SharedResult:
    failures = question.failures
    settings = Settings(
        settle_s=SETTLE_S,
        check=question.check,
        failures=tuple(
            (row.at_s, node_name(row.pool, row.node), row.until_s - row.at_s) for row in failures.listed
        ),
        node_mtbf_s=failures.node_mtbf_s,
        repair_s=failures.repair_s,
        seed=failures.seed,
    )
    places = SharedCluster(jobs, question.cluster, PlannerPolicy(), settings, guarantee, question.give_s)

    def show(done: float, total: float) -> None:
        if progress is not None:
            progress(policy.name, done, total)

    moves = Moves(kv_token_bytes(question.shape)) if policy.name == "busbar" else None
    serving = ServingSettings(start_s=question.start_s, moves=moves, failures=failures)
    result = run(trace, buckets, columns, models, question.slo, policy, serving, show, places)
    return SharedResult(policy.name, result, places.figures(trace.duration_s), len(places.decisions))


def _bound_ratio(question: SharedQuestion, mix_per_h: float, static: int) -> float | None:
    if len(question.cluster.nodes) != 1:
        return None
    [capacity] = question.cluster.capacity().values()
    [pool] = question.pools
    return (capacity - mix_per_h / pool.price_per_h) / (capacity - static)
