"""Metrics of services with a latency target or with replicas that may sleep, of all changes of a service's replicas, and of all
replicas that are lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from busbar.kube.informer import Key
from busbar.operator.serving.fleet_plan import Change, Plan
from busbar.operator.serving.history import Counts
from busbar.operator.watch.projections import Pod, Sleep

_SERVICE = ["namespace", "service"]
_KINDS = ("now", "forecast", "p90")
_TIMES = ("5m", "1h", "24h")
_STATES = ("ready", "starting", "sleeping")
"""The others leave."""
LOST_BY = ("gateway", "node")
_REACTION_S = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass(frozen=True)
class Scaled:
    """One change of the desired replicas."""

    why: Change
    before: int
    desired: int


@dataclass(frozen=True)
class _Awaited:
    """Replicas that a decision added because more came than the others sustain."""

    since_s: float
    desired: int


class ScalingMetrics:
    """Their names never change: dashboards and tests depend on them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.demand = Gauge(
            "busbar_service_demand_rps",
            "Requests per second: now, expected when a replica asked for now would be ready, and its 90 % quantile",
            [*_SERVICE, "kind"],
            registry=registry,
        )
        self.capacity = Gauge(
            "busbar_service_capacity_rps",
            "Requests per second that the ready replicas sustain within the latency target",
            _SERVICE,
            registry=registry,
        )
        self.kept = Gauge(
            "busbar_service_slo_ratio",
            "Answers within the latency target over all requests, of five minutes, of an hour and of a day",
            [*_SERVICE, "over"],
            registry=registry,
        )
        self.decisions = Counter(
            "busbar_service_scale_decisions_total",
            "Changes of the desired replicas by cause",
            ["cause"],
            registry=registry,
        )

        self.solving = Histogram(
            "busbar_mix_solve_seconds",
            "One decision about a service with a latency target, solver included",
            buckets=(0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0),
            registry=registry,
        )
        self.reaction = Histogram(
            "busbar_service_reaction_seconds",
            "From the first reading of the gateway with more load than the wanted replicas sustain, or with requests that "
            "wait too long, to the decision that adds some, and until as many are ready",
            ["step"],
            buckets=_REACTION_S,
            registry=registry,
        )
        for step in ("decision", "ready"):
            self.reaction.labels(step)
        self._awaited: dict[Key, _Awaited] = {}
        self.replicas = Gauge(
            "busbar_service_replicas",
            "Replicas that take requests, that start or wake, and that sleep, by AcceleratorPool",
            [*_SERVICE, "pool", "state"],
            registry=registry,
        )
        self.lost = Counter(
            "busbar_service_lost_replicas_total",
            "Replicas beside which another one starts: gateways and the replica's own port say that it answers nobody (gateway), "
            "or Kubernetes says so of its node (node); each is counted once, by who says it first",
            ["cause"],
            registry=registry,
        )
        for cause in LOST_BY:
            self.lost.labels(cause)
        self._lost: dict[Key, frozenset[str]] = {}
        """The uids of the replicas that are lost now and are counted."""
        self._in_pools: dict[Key, frozenset[str]] = {}
        """The pools that were shown last."""

    def show(
        self,
        key: Key,
        plan: Plan | None,
        scaled: Scaled | None,
        pods: Iterable[Pod] = (),
        now_s: float = 0.0,
        day: Counts | None = None,
    ) -> None:
        """After a reconcile of the service.

        Args:
            pods: its replicas; none where it has neither a latency target nor replicas that may sleep.
            now_s: by the clock that `Plan.over_since_s` is told by.
            day: what came in the last 24 hours; None: it is not known.
        """
        pods = tuple(pods)
        self._show_replicas(key, pods)
        if scaled is not None:
            self.decisions.labels(scaled.why.cause.value).inc()
        self._show_reaction(key, plan, scaled, sum(pod.takes_requests for pod in pods), now_s)
        if plan is None:
            self.forget(key)
            return
        name = (key.namespace, key.name)
        if plan.ahead is not None:
            numbers = (plan.ahead.now, plan.ahead.at_ready, plan.ahead.upper)
            for kind, rps in zip(_KINDS, numbers, strict=True):
                self.demand.labels(*name, kind).set(rps)
        else:
            self._drop(self.demand, name, _KINDS)
        if plan.capacity_rps is not None:
            self.capacity.labels(*name).set(plan.capacity_rps)
        else:
            self._drop(self.capacity, name, ())
        of_day = day.within / day.requests if day is not None and day.requests else None
        for over, share in zip(_TIMES, (plan.attainment[0], plan.attainment_hour[0], of_day), strict=True):
            if share is not None:
                self.kept.labels(*name, over).set(share)
            else:
                self._drop(self.kept, name, (over,))

    def _show_reaction(
        self, key: Key, plan: Plan | None, scaled: Scaled | None, ready: int, now_s: float
    ) -> None:
        """Of changes that the load made; one that it did not is the end of what was awaited."""
        if plan is None:
            self._awaited.pop(key, None)
            return
        if scaled is not None:
            self._awaited.pop(key, None)
            if scaled.desired > scaled.before and plan.over_since_s is not None:
                self.reaction.labels("decision").observe(max(0.0, now_s - plan.over_since_s))
                self._awaited[key] = _Awaited(plan.over_since_s, scaled.desired)
        awaited = self._awaited.get(key)
        if awaited is not None and ready >= awaited.desired:
            self.reaction.labels("ready").observe(max(0.0, now_s - awaited.since_s))
            del self._awaited[key]

    def show_lost(self, key: Key, pods: Iterable[Pod], reach: Mapping[str, bool]) -> None:
        """Counts the replicas that are lost since the last call.

        Args:
            pods: all of the service, those on silent nodes marked.
            reach: what was decided about them now: True where one is lost (`Reach.look`).
        """
        before = self._lost.pop(key, frozenset())
        now: set[str] = set()
        for pod in pods:
            noted = pod.unanswered_since is not None
            by_gateway = reach.get(pod.uid, noted)
            if pod.leaving or pod.parked or not (by_gateway or pod.silent):
                continue
            now.add(pod.uid)
            if pod.uid not in before and not noted:
                self.lost.labels("gateway" if by_gateway else "node").inc()
        if now:
            self._lost[key] = frozenset(now)

    def gone(self, key: Key) -> None:
        """The service is deleted."""
        self._awaited.pop(key, None)
        self._lost.pop(key, None)
        self.forget(key)
        self._show_replicas(key, [])

    def _show_replicas(self, key: Key, pods: Iterable[Pod]) -> None:
        by_pool: dict[str, list[Pod]] = {}
        for pod in pods:
            if pod.stays:
                by_pool.setdefault(pod.pool, []).append(pod)
        for pool in self._in_pools.pop(key, frozenset()) - by_pool.keys():
            self._drop(self.replicas, (key.namespace, key.name, pool), _STATES)
        for pool, here in by_pool.items():
            ready, parked = sum(p.takes_requests for p in here), sum(p.parked for p in here)
            sleeping = sum(p.sleep is Sleep.ASLEEP for p in here)
            for state, count in zip(_STATES, (ready, len(here) - ready - parked, sleeping), strict=True):
                self.replicas.labels(key.namespace, key.name, pool, state).set(count)
        if by_pool:
            self._in_pools[key] = frozenset(by_pool)

    def forget(self, key: Key) -> None:
        """The service has no latency target."""
        name = (key.namespace, key.name)
        self._drop(self.demand, name, _KINDS)
        self._drop(self.kept, name, _TIMES)
        self._drop(self.capacity, name, ())

    def _drop(self, gauge: Gauge, name: tuple[str, ...], last: tuple[str, ...]) -> None:
        for labels in ((*name, value) for value in last) if last else (name,):
            with suppress(KeyError):
                gauge.remove(*labels)
