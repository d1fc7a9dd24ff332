"""A service's fleet over time: requests are routed, replicas start, drain and cost; a policy decides their number.

Every second the policy sees what a gateway and the pods would report, and answers with replicas by column. A new
replica is ready after the start time (or the wake time, while replicas sleep); a surplus one takes no more requests
and leaves when its last has ended. It costs from the decision to the end. The gateway splits each bucket over the
columns by the shares for what is ready, recomputed when that changes (`autoscale.shares`, which the real gateway runs, too),
and takes the replica with the least work in the column; where prompts queue there, the shortest queue of any type that
serves the bucket. The first `warm_up_s` are simulated and not counted.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..autoscale.fleet import RATE_S, Decision, Observation
from ..autoscale.mix import Column, routing_shares, spread
from ..autoscale.shares import PATIENCE, Turns
from ..autoscale.step_model import Slo, StepModel
from .serving_replica import Replica, Request
from .serving_trace import Buckets, ServingTrace

REROUTE_S = 30.0
_END_S = 1e12


class Places(Protocol):
    """Where replicas run, if not anywhere at once: a cluster that others use, too (`shared_cluster.py`)."""

    def ask(self, pool: str, now_s: float) -> str:
        """One more replica is wanted; returns its name."""

    def give_back(self, name: str, now_s: float) -> None:
        """A replica has left, or is not wanted any more."""

    def advance(self, now_s: float) -> list[tuple[str, float]]:
        """Replicas that have been placed since the last call, each with the time from which its place is free."""


class Policy(Protocol):
    """Decides replicas by column, every second."""

    name: str

    def begin(self, rates: Sequence[float], now_s: float = 0.0) -> Mapping[str, int]: ...

    def decide(self, seen: Observation) -> Decision | None: ...


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """What a simulation assumes."""

    start_s: float = 60.0
    sleeping: int = 0
    """Replicas with weights in host memory, of any type: they wake instead of starting. They cost nothing, which
    means that their accelerators are lent to others in the meantime."""
    wake_s: float = 5.0
    warm_up_s: float = 300.0
    warm: int = 0
    """At most so many surplus replicas sleep, each where it is, and wake before another one of their type starts: as
    `scaling.warm` of a ModelService does it. Nothing sleeps at first. They cost what they cost awake, and nobody takes
    their places."""


@dataclass(slots=True)
class ServingResult:
    """One policy on one trace."""

    policy: str
    requests: int = 0
    within: int = 0
    late_ttft: int = 0
    late_tpot: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    asleep_cost: float = 0.0
    """The part of it for replicas that slept (`ServingSettings.warm`)."""
    hours: float = 0.0
    replica_hours: dict[str, float] = field(default_factory=dict)
    peak: Counter[str] = field(default_factory=Counter)
    peak_watts: float = 0.0
    causes: Counter[str] = field(default_factory=Counter)
    ttft_s: array[float] = field(default_factory=lambda: array("f"))
    calibration: float | None = None

    @property
    def attainment(self) -> float:
        return self.within / self.requests if self.requests else 1.0

    @property
    def cost_per_h(self) -> float:
        return self.cost / self.hours if self.hours else 0.0

    def to_json(self) -> dict[str, object]:
        """Numbers for people and programs."""
        order = sorted(self.ttft_s)
        million = self.output_tokens / 1e6
        return {
            "policy": self.policy,
            "requests": self.requests,
            "attainment": round(self.attainment, 5),
            "late_ttft": self.late_ttft,
            "late_tpot": self.late_tpot,
            "ttft_p50_s": round(order[len(order) // 2], 3) if order else None,
            "ttft_p99_s": round(order[int(0.99 * (len(order) - 1))], 3) if order else None,
            "cost_per_h": round(self.cost_per_h, 3),
            "cost_asleep_per_h": round(self.asleep_cost / self.hours, 3) if self.hours else 0.0,
            "cost_per_million_output_tokens": round(self.cost / million, 3) if million else None,
            "replica_hours": {key: round(value, 2) for key, value in sorted(self.replica_hours.items())},
            "peak_replicas": dict(sorted(self.peak.items())),
            "peak_watts": round(self.peak_watts),
            "decisions": dict(sorted(self.causes.items())),
            "decisions_per_h": round(sum(self.causes.values()) / self.hours, 2) if self.hours else None,
            "forecast_calibration": None if self.calibration is None else round(self.calibration, 4),
        }


@dataclass(slots=True)
class _Member:
    column: Column
    ready_s: float
    replica: Replica
    woken: bool
    draining: bool = False
    place: str = ""
    """Its name at `Places`."""


@dataclass(slots=True)
class _Cluster:
    columns: Sequence[Column]
    models: Mapping[str, StepModel]
    slo: Slo
    settings: ServingSettings
    result: ServingResult
    members: list[_Member] = field(default_factory=list)
    ready: dict[str, list[_Member]] = field(default_factory=dict)
    shares: tuple[Mapping[str, float], ...] = ()
    turns: Turns = field(default_factory=Turns)
    held: list[Request] = field(default_factory=list)
    asleep: int = 0
    dozing: Counter[str] = field(default_factory=Counter)
    """Replicas that sleep where they are, by column (`ServingSettings.warm`)."""
    places: Places | None = None
    """None: there is room for all."""
    unplaced: dict[str, Column] = field(default_factory=dict)
    """Replicas that wait for a place."""

    def add(self, column: Column, now_s: float, ready_s: float, woken: bool = False, place: str = "") -> None:
        replica = Replica.of(self.models[column.key], self.slo, ready_s)
        self.members.append(_Member(column, ready_s, replica, woken, place=place))

    def admit(self, now_s: float, start_s: float) -> None:
        """The replicas that have a place now start."""
        for name, free_s in self.places.advance(now_s) if self.places is not None else ():
            self.add(self.unplaced.pop(name), now_s, max(now_s, free_s) + start_s, place=name)

    def counts(self, now_s: float) -> tuple[dict[str, int], dict[str, int]]:
        """Ready and starting replicas by column, without those that drain."""
        ready = dict.fromkeys((c.key for c in self.columns), 0)
        starting = dict(ready)
        for member in self.members:
            if not member.draining:
                (ready if member.ready_s <= now_s else starting)[member.column.key] += 1
        for column in self.unplaced.values():
            starting[column.key] += 1
        return ready, starting

    def resize(self, target: Mapping[str, int], now_s: float) -> None:
        """Start what is missing; stop what is too much, starting ones first, then the least work."""
        for column in self.columns:
            own = [m for m in self.members if m.column.key == column.key and not m.draining]
            waiting = [name for name, of in self.unplaced.items() if of.key == column.key]
            missing = target.get(column.key, 0) - len(own) - len(waiting)
            for name in waiting[len(waiting) + missing :] if missing < 0 else ():
                self._withdraw(name, now_s)
                missing += 1
            for _ in range(missing):
                if self.places is not None:
                    self.unplaced[self.places.ask(column.pool, now_s)] = column
                    continue
                here = self.dozing[column.key] > 0
                self.dozing[column.key] -= here
                woken = not here and self.asleep > 0
                self.asleep -= woken
                wait_s = self.settings.wake_s if here or woken else self.settings.start_s
                self.add(column, now_s, now_s + wait_s, woken)
            own.sort(
                key=lambda m: (m.ready_s <= now_s, -m.ready_s if m.ready_s > now_s else m.replica.work_s)
            )
            for member in own[: max(-missing, 0)]:
                member.draining = True

    def _withdraw(self, name: str, now_s: float) -> None:
        assert self.places is not None
        del self.unplaced[name]
        self.places.give_back(name, now_s)

    def leave(self, now_s: float) -> None:
        """Drained replicas go; their last requests are counted."""
        gone = [m for m in self.members if m.draining and (m.ready_s > now_s or not m.replica.in_flight)]
        for member in gone:
            if self.places is not None:
                self.places.give_back(member.place, now_s)
            self.asleep += member.woken
            if member.ready_s <= now_s and self.dozing.total() < self.settings.warm:
                self.dozing[member.column.key] += 1
        self.members = [m for m in self.members if m not in gone]

    def reroute(self, rates: Sequence[float], now_s: float) -> None:
        ready, _ = self.counts(now_s)
        self.shares = routing_shares(self.columns, spread(self.columns, rates, ready))
        self.ready = {
            key: [m for m in self.members if m.column.key == key and not m.draining and m.ready_s <= now_s]
            for key, count in ready.items()
            if count
        }

    def route(self, request: Request, now_s: float) -> None:
        """To the column whose turn it is, as the gateway does it, and there to the replica with the least work."""
        if not self.ready:
            self.held.append(request)
            return
        column = self.turns.next(
            request.bucket, self.shares[request.bucket], self.ready, self._wait_s, PATIENCE * self.slo.ttft_s
        )
        if column is None:
            # Nothing ready serves this bucket within the SLO, or it is new: the fastest prompt processing.
            column = min(self.ready, key=lambda key: (self.models[key].d_s, key))
        _least(self.ready[column]).replica.take(request, now_s)

    def _wait_s(self, column: str) -> float:
        """Seconds of prompts before a request that goes there now."""
        return _least(self.ready[column]).replica.prompt_s


def _least(members: Sequence[_Member]) -> _Member:
    return members[0] if len(members) == 1 else min(members, key=lambda m: m.replica.work_s)


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
    cluster = _Cluster(columns, models, slo, settings, result, asleep=settings.sleeping, places=places)
    index = [buckets.index(prompt) for prompt in trace.prompts]
    first = _first_rates(trace, index, len(buckets.means), settings.warm_up_s)
    begun = policy.begin(first)
    if places is not None:
        cluster.resize(begun, 0.0)
        cluster.admit(0.0, 0.0)
    else:
        for column in columns:
            for _ in range(begun.get(column.key, 0)):
                cluster.add(column, 0.0, 0.0)
    cluster.reroute(first, 0.0)
    _Loop(trace, index, cluster, policy, len(buckets.means)).run(progress)
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
    cluster: _Cluster
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
        cluster.leave(now_s)
        ready, starting = cluster.counts(now_s)
        rates = tuple(count / min(RATE_S, len(self.seconds)) for count in self.counts)
        decision = self.policy.decide(Observation(now_s, rates, overdue, ready, starting, in_flight))
        if decision is not None:
            cluster.resize(decision.target, now_s)
            if now_s > cluster.settings.warm_up_s:
                cluster.result.causes[decision.cause.value] += 1
            ready, _ = cluster.counts(now_s)
        if ready != self.last_ready or now_s - self.rerouted_s >= REROUTE_S:
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
        cluster, result = self.cluster, self.cluster.result
        if now_s <= cluster.settings.warm_up_s:
            return
        result.hours += 1 / 3600
        by_key: Counter[str] = Counter()
        watts = 0.0
        for member in cluster.members:
            by_key[member.column.key] += 1
            result.cost += member.column.cost_per_h / 3600
            watts += member.column.watts
        for column in cluster.columns:
            asleep = cluster.dozing[column.key] * column.cost_per_h / 3600
            result.cost += asleep
            result.asleep_cost += asleep
        for key, count in by_key.items():
            result.replica_hours[key] = result.replica_hours.get(key, 0.0) + count / 3600
            result.peak[key] = max(result.peak[key], count)
        result.peak_watts = max(result.peak_watts, watts)

    def _finish(self) -> None:
        """What is in flight at the end runs on; what nobody took is late."""
        for member in self.cluster.members:
            member.replica.advance(_END_S)
            self._count(member.replica.ended)
        self._count(self.cluster.held)

    def _count(self, ended: Sequence[Request]) -> None:
        result, slo = self.cluster.result, self.cluster.slo
        for request in ended:
            if request.arrival_s < self.cluster.settings.warm_up_s:
                continue
            result.requests += 1
            result.output_tokens += request.output_tokens
            ttft = request.first_token_s - request.arrival_s
            result.ttft_s.append(min(ttft, 1e6))
            if request.within(slo):
                result.within += 1
            elif ttft > slo.ttft_s:
                result.late_ttft += 1
            else:
                result.late_tpot += 1
