"""The answer of `busbar simulate --serving`: a service's fleet and training jobs on one cluster, by each policy of the fleet."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
from .serving_pools import Pool, columns_of, out_of_reach, step_models
from .serving_result import ServingResult, late_for_each
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
        if not (math.isfinite(self.start_s) and self.start_s >= 0):
            raise ServingModelError(f"the start time is {self.start_s:g} s; it must be zero or more")
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

    @property
    def guarantee(self) -> dict[str, int]:
        """Accelerators of the service by type."""
        return {pool.type: pool.stock for pool in self.pools}

    @property
    def limits(self) -> Limits:
        return Limits(stock=self.guarantee, min_replicas=1)


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
    """Accelerators that a clairvoyant fleet leaves to training over those that the static one does; None: several types, or it
    leaves none."""
    undisturbed: tuple[SharedResult, ...] = ()
    """The same fleets without failures; empty: none were asked for."""
    beyond: tuple[int, str] = (0, "")
    """Requests that no pool serves within the SLO, and a sentence about them."""

    def to_json(self) -> dict[str, object]:
        """Numbers for people and programs."""
        return {
            "static_replicas": self.static_replicas,
            "static_type": self.static_type,
            "accelerators": self.capacity,
            "requests_no_pool_serves": self.beyond[0],
            "bound_training_over_static": None if self.bound_ratio is None else round(self.bound_ratio, 4),
            "fleets": [
                result.to_json() | self._beside(result.serving, number)
                for number, result in enumerate(self.results)
            ],
        }

    def _beside(self, serving: ServingResult, number: int) -> dict[str, object]:
        if not self.undisturbed:
            return {}
        calm = self.undisturbed[number]
        return {
            "attainment_without_failures": round(calm.serving.attainment, 5),
            "training_work_accelerator_h_without_failures": round(calm.training.work_h, 3),
            "replicas_lost": serving.told.stopped,
            "late_for_each_lost_replica": late_for_each(serving, calm.serving),
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
        TraceError: the load lasts too long.
    """
    trace.refuse_long()
    buckets = Buckets.of(trace)
    models, _ = step_models(question.pools, question.shape)
    columns = columns_of(question.pools, models, buckets, question.slo)
    minutes = rates_by_minute(trace, buckets)
    guarantee = question.guarantee
    bound = bounds(columns, minutes, question.limits, 0.0)
    static = static_replicas(bound.single, minutes)
    if "static" in question.policies and static > guarantee[bound.single.key]:
        raise ServingModelError(
            f"--pools: the static fleet needs {static} {bound.single.key}, and the service may have"
            f" {guarantee[bound.single.key]}; give it more, or leave the policy static out"
        )
    load = _Load(trace, jobs, question, buckets, columns, models, minutes, bound.single, static)
    calm = Failures()
    return SharedAnswer(
        tuple(load.simulate(name, question.failures, progress) for name in question.policies),
        static,
        bound.single.key,
        sum(question.cluster.capacity().values()),
        _bound_ratio(question, bound.mix_per_h, static),
        tuple(load.simulate(name, calm, progress) for name in question.policies)
        if question.failures.any
        else (),
        out_of_reach(trace, buckets, columns, models, question.slo),
    )


@dataclass(frozen=True, slots=True)
class _Load:
    """Requests and jobs, and what fleets are made of."""

    trace: ServingTrace
    jobs: Trace
    question: SharedQuestion
    buckets: Buckets
    columns: tuple[Column, ...]
    models: Mapping[str, StepModel]
    minutes: Sequence[Sequence[float]]
    single: Column
    static: int

    def simulate(self, name: str, failures: Failures, progress: Progress | None) -> SharedResult:
        """One fleet, beside the training jobs."""
        trace, question, policy = self.trace, self.question, self._policy(name)
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
        places = SharedCluster(
            self.jobs, question.cluster, PlannerPolicy(), settings, question.guarantee, question.give_s
        )
        shown = name if failures.any or not question.failures.any else f"{name} without failures"

        def show(done: float, total: float) -> None:
            if progress is not None:
                progress(shown, done, total)

        moves = Moves(kv_token_bytes(question.shape)) if name == "busbar" else None
        serving = ServingSettings(start_s=question.start_s, moves=moves, failures=failures)
        result = run(
            trace,
            self.buckets,
            self.columns,
            self.models,
            question.slo,
            policy,
            serving,
            show,
            places,
        )
        return SharedResult(name, result, places.figures(trace.duration_s), len(places.decisions))

    def _policy(self, name: str) -> Policy:
        question, single = self.question, self.single
        if name == "busbar":
            fleet = FleetSettings(start_s=question.start_s, down_after_s=max(300.0, question.start_s))
            return Ours.of(self.columns, question.limits, question.slo, fleet, self.trace.earlier)
        if name == "hpa":
            rated = rated_in_flight(self.models[single.key], single, self.buckets.means, self.minutes)
            return Hpa(single, rated, min(math.ceil(HPA_MOST * self.static), question.guarantee[single.key]))
        return Static(single, self.static)


def _bound_ratio(question: SharedQuestion, mix_per_h: float, static: int) -> float | None:
    if len(question.cluster.nodes) != 1:
        return None
    [capacity] = question.cluster.capacity().values()
    [pool] = question.pools
    if static >= capacity:  # the split leaves training nothing
        return None
    return (capacity - mix_per_h / pool.price_per_h) / (capacity - static)
