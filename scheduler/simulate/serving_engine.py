"""A service's fleet over time: requests are routed, replicas start, drain and cost; a policy decides their number.

Every second the policy sees what a gateway and the pods would report, and answers with replicas by column
(`serving_cluster.py` says what becomes of them). A replica costs from the decision to the end. The first `warm_up_s` are
simulated and not counted.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..autoscale.fleet import RATE_S, Decision, Observation
from ..autoscale.mix import Column
from ..autoscale.step_model import Slo, StepModel
from .serving_cluster import Cluster, Places, ServingSettings
from .serving_losses import Losses
from .serving_replica import Request
from .serving_result import ServingResult
from .serving_trace import Buckets, ServingTrace

REROUTE_S = 30.0
_END_S = 1e12


class Policy(Protocol):
    """Decides replicas by column, every second."""

    name: str

    def begin(self, rates: Sequence[float], now_s: float = 0.0) -> Mapping[str, int]: ...

    def decide(self, seen: Observation) -> Decision | None: ...

    def hold(self, stock: Mapping[str, int]) -> None:
        """Accelerators by pool that are there now."""

    def sleepers(self, now_s: float, wanted: int, most: int) -> int:
        """How many replicas above those wanted may sleep; asked every second if some may."""


def run(
    trace: ServingTrace,
    buckets: Buckets,
    columns: Sequence[Column],
    models: Mapping[str, StepModel],
    slo: Slo,
    policy: Policy,
    settings: ServingSettings | None = None,
    progress: Callable[[float, float], None] | None = None,
    places: Places | None = None,
) -> ServingResult:
    """Replay a trace under a policy.

    Args:
        places: gives replicas their places; None: there is room for all, at once.
    """
    settings = settings or ServingSettings()
    result = ServingResult(policy.name)
    cluster = Cluster(columns, models, slo, settings, asleep=settings.sleeping, places=places)
    index = [buckets.index(prompt) for prompt in trace.prompts]
    first = _first_rates(trace, index, len(buckets.means), settings.warm_up_s)
    begun = policy.begin(first)
    if places is not None:
        cluster.resize(begun, 0.0)
        cluster.admit(0.0, 0.0)
    else:
        cluster.wanted = dict(begun)
        for column in columns:
            for _ in range(begun.get(column.key, 0)):
                cluster.add(column, 0.0)
    cluster.reroute(first, 0.0)
    _Loop(trace, index, cluster, Losses(cluster), result, policy, len(buckets.means)).run(progress)
    return result


def _first_rates(trace: ServingTrace, index: Sequence[int], buckets: int, warm_up_s: float) -> list[float]:
    """Of the busiest minute of the warm-up: every policy begins with what that needs."""
    minutes = [[0.0] * buckets for _ in range(max(int(warm_up_s // 60), 1))]
    for at, bucket in zip(trace.arrivals_s, index, strict=True):
        if at >= 60 * len(minutes):
            break
        minutes[int(at // 60)][bucket] += 1 / 60
    return max(minutes, key=sum)


@dataclass(slots=True)
class _Loop:
    trace: ServingTrace
    index: Sequence[int]
    cluster: Cluster
    losses: Losses
    result: ServingResult
    policy: Policy
    buckets: int
    seconds: deque[list[int]] = field(default_factory=deque)
    counts: list[int] = field(default_factory=list)
    minute: list[float] = field(default_factory=list)
    rerouted_s: float = 0.0
    last_ready: dict[str, int] = field(default_factory=dict)

    def run(self, progress: Callable[[float, float], None] | None) -> None:
        trace, cluster = self.trace, self.cluster
        self.counts = [0] * self.buckets
        self.minute = [0.0] * self.buckets
        position, total = 0, len(trace)
        end = math.ceil(trace.duration_s)
        arrivals, prompts, outputs, index = trace.arrivals_s, trace.prompts, trace.outputs, self.index
        for second in range(1, end + 1):
            current = [0] * self.buckets
            while position < total and arrivals[position] < second:
                bucket = index[position]
                at = arrivals[position]
                cluster.route(Request(at, prompts[position], outputs[position], bucket), at)
                current[bucket] += 1
                position += 1
            self._tick(float(second), current)
            if progress is not None and second % 60 == 0:
                progress(second, end)
        self._finish()

    def _tick(self, now_s: float, current: list[int]) -> None:
        cluster = self.cluster
        cluster.admit(now_s, cluster.settings.start_s)
        self.seconds.append(current)
        for bucket, count in enumerate(current):
            self.counts[bucket] += count
            self.minute[bucket] += (count - self.minute[bucket]) / 60
        if len(self.seconds) > RATE_S:
            for bucket, count in enumerate(self.seconds.popleft()):
                self.counts[bucket] -= count
        before_s = now_s - cluster.slo.ttft_s / 2
        in_flight = len(cluster.held)
        overdue = sum(request.arrival_s <= before_s for request in cluster.held)
        for member in cluster.members:
            replica = member.replica
            replica.advance(now_s)
            in_flight += replica.in_flight
            overdue += replica.overdue(before_s)
            if replica.ended:
                self._count(replica.ended)
                replica.ended.clear()
        self.losses.advance(now_s)
        if cluster.settings.warm:
            wanted = sum(cluster.wanted.values())
            cluster.may_sleep = self.policy.sleepers(now_s, wanted, cluster.settings.warm)
        cluster.leave(now_s)
        stock = cluster.stock(now_s)
        if stock is not None:
            self.policy.hold(stock)
        ready, starting = cluster.counts(now_s)
        rates = tuple(count / min(RATE_S, len(self.seconds)) for count in self.counts)
        decision = self.policy.decide(Observation(now_s, rates, overdue, ready, starting, in_flight))
        if decision is not None:
            cluster.resize(decision.target, now_s)
            if now_s > cluster.settings.warm_up_s:
                self.result.causes[decision.cause.value] += 1
            ready, _ = cluster.counts(now_s)
        if ready != self.last_ready or cluster.changed or now_s - self.rerouted_s >= REROUTE_S:
            self._reroute(ready, now_s)
        self._charge(now_s)

    def _reroute(self, ready: dict[str, int], now_s: float) -> None:
        cluster = self.cluster
        self.last_ready, self.rerouted_s = ready, now_s
        cluster.reroute(self.minute, now_s)
        if cluster.held and cluster.ready:
            held, cluster.held = cluster.held, []
            for request in held:
                cluster.route(request, now_s)

    def _charge(self, now_s: float) -> None:
        cluster, result = self.cluster, self.result
        if now_s <= cluster.settings.warm_up_s:
            return
        result.hours += 1 / 3600
        by_key: Counter[str] = Counter()
        watts = 0.0
        for member in cluster.members:
            by_key[member.column.key] += 1
            result.cost += member.column.cost_per_h / 3600
            watts += member.column.watts
        for column, _ in cluster.dozing:
            asleep = column.cost_per_h / 3600
            result.cost += asleep
            result.asleep_cost += asleep
        for key, count in by_key.items():
            result.replica_hours[key] = result.replica_hours.get(key, 0.0) + count / 3600
            result.peak[key] = max(result.peak[key], count)
        result.peak_watts = max(result.peak_watts, watts)

    def _finish(self) -> None:
        """What is in flight at the end runs on, elsewhere if its replica is lost; what nobody took is late."""
        self.result.told = self.losses.close(math.ceil(self.trace.duration_s))
        for member in self.cluster.members:
            member.replica.advance(_END_S)
            self._count(member.replica.ended)
        self._count(self.cluster.held)

    def _count(self, ended: Sequence[Request]) -> None:
        result, slo = self.result, self.cluster.slo
        for request in ended:
            if request.arrival_s < self.cluster.settings.warm_up_s:
                continue
            result.requests += 1
            if request.refused:
                result.refused += 1
                continue
            if math.isfinite(request.end_s):
                result.output_tokens += request.output_tokens
            ttft = request.first_token_s - request.arrival_s
            result.ttft_s.append(ttft)
            if request.within(slo):
                result.within += 1
            elif ttft > slo.ttft_s:
                result.late_ttft += 1
            else:
                result.late_tpot += 1
