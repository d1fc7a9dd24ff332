"""One run of the row under a law, and what came of it beside the same row without any limit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..power import (
    ControlSettings,
    Domain,
    HeldLease,
    Lease,
    Memory,
    NodePower,
    NodeTelemetry,
    Phase,
    PhaseLoad,
    PowerPolicy,
    accepted,
    allowed_w,
    control,
    domain_tree,
)
from ..power.burst import bucket_after, passing
from ..power.leases import TERM, Grant, NodeMemory
from .power_load import Requests
from .power_row import STEP_S, STEPS_PER_S, Floats, Layout, Row, ServerModel

HIGH_WEIGHT = 4.0
"""What a second lost by high-priority serving counts beside one lost by the others."""
WARM_UP_S = 60.0
"""Requests that arrive earlier are not counted: the row begins empty."""
LAST_S = 120.0
"""Requests that arrive in the last so many seconds are not counted: they may not have ended."""


@dataclass(frozen=True, slots=True)
class Delay:
    """How the controller reaches the nodes."""

    period_s: int
    """Between rounds of the controller."""
    telemetry_s: int
    """Age of what it sees."""
    actuation_s: float
    """From sending a lease to its limits being in force."""
    memory_s: float
    """Over which phase shares are averaged."""
    settings: ControlSettings


DELAYS = {
    "inband": Delay(1, 0, 1.0, 8.0, ControlSettings()),
    "outofband": Delay(
        2, 2, 40.0, 60.0, ControlSettings(ttl_s=None, stale_s=20, repeat_s=90, raise_per_s=1.0, deadband=0.02)
    ),
}


class Law(Protocol):
    """What limits the boards. The methods are called in this order, `second` after every tenth step."""

    def limits(self) -> tuple[Floats, Floats]:
        """For the next step: the limit of each server's boards, and the part of the watts that a clock lets through."""

    def after(self, watts: Floats) -> None:
        """What the servers drew in the step."""

    def second(self, now_s: float, row: Row, mean_w: Floats) -> None:
        """A second has passed in which the servers drew so much in the mean."""


class Unlimited:
    """No law: the twin that latencies are compared with."""

    def __init__(self, places: Layout, model: ServerModel) -> None:
        self._limits = np.full(places.total, model.board_max_w), np.ones(places.total)

    def limits(self) -> tuple[Floats, Floats]:
        return self._limits

    def after(self, watts: Floats) -> None:
        return

    def second(self, now_s: float, row: Row, mean_w: Floats) -> None:
        return


class LeaseLaw:
    """Busbar's controller (`scheduler.power`) with the node's side of the lease, behind delays."""

    def __init__(
        self, places: Layout, model: ServerModel, budget_w: float, policy: PowerPolicy, delay: Delay
    ) -> None:
        self.places, self.model, self.delay = places, model, delay
        self.names = [f"s{row:04}" for row in range(places.total)]
        self.nodes = {name: self._node(row, name) for row, name in enumerate(self.names)}
        self.tree = domain_tree((Domain("row", budget_w, policy=policy, nodes=tuple(self.names)),))
        self.curves = {
            Phase.PREFILL: model.compute,
            Phase.TRAINING: model.compute,
            Phase.DECODE: model.compute.softened(0.5),
        }
        self._messages: deque[tuple[float, Lease]] = deque()
        self._told: deque[tuple[float, dict[str, NodeTelemetry]]] = deque()
        self._means: deque[Floats] = deque(maxlen=60)
        self._read = np.zeros(places.serving)
        self._prefill, self._decode = np.full(places.serving, 0.3), np.full(places.serving, 0.7)
        self._stretch_s = np.zeros(places.serving)
        self.host_w = np.array([self.nodes[name].host_w for name in self.names])
        self._whole = np.ones(len(self.names))
        self._begin()

    @property
    def floor_percent(self) -> float:
        """Of the budget less its margin: what the servers may draw under the lowest limits of their boards."""
        return 100 * sum(node.floor_w for node in self.nodes.values()) / self.tree.domains["row"].usable_w

    def _node(self, row: int, name: str) -> NodePower:
        model, serving = self.model, row < self.places.serving
        return NodePower(
            name,
            (model.serving_host_w if serving else model.training_host_w) + model.host_reserve_w,
            model.boards,
            model.board_min_w,
            model.board_max_w,
            model.board_factor,
            HIGH_WEIGHT if row < self.places.high else 1.0,
            first_token=1.0 if row < self.places.high else 0.0,
        )

    def _begin(self) -> None:
        """Equal leases are in force and confirmed, as if the policy had been Static until now."""
        settings, domain = self.delay.settings, self.tree.domains["row"]
        self.memory = Memory(1, 0.0, 1)
        self.held, known = {}, {}
        burst_s = domain.ride_through_s if domain.policy is PowerPolicy.LEASE_WITH_BURST else 0.0
        for name, node in self.nodes.items():
            watts = min(max(domain.usable_w / len(self.names), node.floor_w), node.nameplate_w)
            lease = Lease(name, watts, TERM + 1, 1, settings.ttl_s, node.board_limit_w(watts), burst_s)
            self.held[name] = HeldLease(1, node.floor_w, lease)
            grant = Grant(TERM + 1, watts, 0.0, settings.ends_s(0.0))
            known[name] = NodeMemory(1, -1.0, 0.0, TERM + 1, grants=(grant,))
        self.memory = Memory(1, 0.0, 1, known)
        self._hold(0.0)
        self.level_j = self.lease_w * self.burst_s
        self.passes = np.ones(len(self.names))

    def _hold(self, now_s: float) -> None:
        self.lease_w = np.array([allowed_w(self.held[name], now_s) for name in self.names])
        self.burst_s = np.array(
            [lease.burst_s if (lease := self.held[name].lease) else 0.0 for name in self.names]
        )
        slope = self.model.boards * self.model.board_factor
        self.board_w = np.clip(
            (self.lease_w - self.host_w) / slope, self.model.board_min_w, self.model.board_max_w
        )
        self._limit_w, self._bursts = self.board_w, bool(self.burst_s.any())

    def limits(self) -> tuple[Floats, Floats]:
        if self._bursts:
            before, self.passes = self.passes, passing(self.level_j, self.lease_w, self.burst_s, self.passes)
            if self._limit_w is self.board_w or (self.passes != before).any():
                self._limit_w = self.board_w + self.passes * (self.model.board_max_w - self.board_w)
        return self._limit_w, self._whole

    def after(self, watts: Floats) -> None:
        if self._bursts:
            self.level_j = bucket_after(self.level_j, self.lease_w, watts, self.burst_s, STEP_S)

    def second(self, now_s: float, row: Row, mean_w: Floats) -> None:
        while self._messages and self._messages[0][0] <= now_s:
            lease = self._messages.popleft()[1]
            self.held[lease.node] = accepted(self.held[lease.node], lease, now_s)
        self._hold(now_s)
        self._measure(row, mean_w)
        if round(now_s) % self.delay.period_s:
            return
        self._told.append((now_s, self._telemetry(now_s, mean_w)))
        while len(self._told) > 1 and self._told[1][0] <= now_s - self.delay.telemetry_s:
            self._told.popleft()
        told = self._told[0][1]
        decision = control(self.tree, self.nodes, told, self.curves, now_s, self.memory, self.delay.settings)
        self.memory = decision.memory
        self._messages.extend((now_s + self.delay.actuation_s, lease) for lease in decision.leases)

    def _measure(self, row: Row, mean_w: Floats) -> None:
        """Running means of the phases, as if no limit slowed them down: tokens read at full speed."""
        keep = np.exp(-1 / self.delay.memory_s)
        prefill = np.clip((row.read - self._read) / self.model.prefill_tokens_per_s, 0, 1)
        self._read = row.read
        decode = np.where(row.sequences > 0, 1 - prefill, 0.0)
        self._prefill = keep * self._prefill + (1 - keep) * prefill
        self._decode = keep * self._decode + (1 - keep) * decode
        self._stretch_s = (row.read / self.model.prefill_tokens_per_s) / np.maximum(row.stretches, 1)
        self._decode_w = row.decode_w
        self._means.append(mean_w)

    def _telemetry(self, now_s: float, mean_w: Floats) -> dict[str, NodeTelemetry]:
        spread = np.std(np.array(self._means), axis=0)
        spread[self.places.serving :] = 0.0
        told = (self.lease_w, mean_w, spread, self.burst_s, self.level_j)
        rows = zip(self.names, self._phases(), *(each.tolist() for each in told), strict=True)
        found = {}
        for name, phases, lease_w, drawn_w, spread_w, burst_s, level_j in rows:
            held = self.held[name]
            found[name] = NodeTelemetry(
                name,
                now_s,
                held.epoch,
                now_s,
                held.sequence,
                lease_w,
                drawn_w,
                spread_w,
                phases,
                level_j if burst_s else None,
            )
        return found

    def _phases(self) -> list[tuple[PhaseLoad, ...]]:
        """Of each server, those that serve first."""
        model = self.model
        told = (self._prefill, self._decode, self._stretch_s, self._decode_w)
        found: list[tuple[PhaseLoad, ...]] = []
        for prefill, decode, stretch_s, decode_w in zip(*(each.tolist() for each in told), strict=True):
            decode = min(decode, 1 - prefill)
            found.append(
                (
                    PhaseLoad(Phase.PREFILL, prefill, model.prefill_w, stretch_s),
                    PhaseLoad(Phase.DECODE, decode, decode_w),
                    PhaseLoad(Phase.IDLE, max(1 - prefill - decode, 0.0), model.idle_w),
                )
            )
        return found + [(PhaseLoad(Phase.TRAINING, 1.0, model.training_w),)] * self.places.training


@dataclass(frozen=True)
class Outcome:
    """What a run measured."""

    feed_w: Floats
    """Mean of every second."""
    first_s: Floats
    done_s: Floats
    tokens: float
    work_s: float
    """Server-seconds of training at full speed."""

    @property
    def joules(self) -> float:
        return float(self.feed_w.sum())


def run(
    places: Layout,
    model: ServerModel,
    requests: Requests,
    law: Law,
    seconds: int,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Simulate so many seconds."""
    row = Row(places, requests, model, seconds, seed)
    feed_w = np.zeros(seconds)
    for second in range(seconds):
        total = np.zeros(places.total)
        for _ in range(STEPS_PER_S):
            watts = row.step(*law.limits())
            law.after(watts)
            total += watts
        mean_w = total / STEPS_PER_S
        feed_w[second] = mean_w.sum()
        law.second(float(second + 1), row, mean_w)
        if progress is not None:
            progress(second + 1)
    sizes = np.array([job.stop - job.start for job in row.jobs])
    return Outcome(feed_w, row.first_s, row.done_s, row.tokens, float((row.work_s * sizes).sum()))


@dataclass(frozen=True, slots=True)
class Figures:
    """A run beside its unlimited twin. Ratios of latency are ours over theirs; None where there is nothing to divide."""

    over_s: int
    """Seconds whose mean is above the budget."""
    over_10s: int
    """The same for means of ten seconds."""
    worst_percent: float
    """The highest second above the budget; negative: below it."""
    over_1_percent_run_s: int
    """The longest run of seconds more than 1 % above the budget."""
    peak_percent: float
    """Of the budget."""
    high_p50: float | None
    high_p99: float | None
    high_first_p99: float | None
    low_p50: float | None
    low_p99: float | None
    within_5_percent: float | None
    """Part of the high-priority requests that took at most 1.05 times the twin's 99th percentile."""
    training_speed: float | None
    joules_per_token: float | None
    """Over the twin's."""
    requests: int
    tokens: float
    kilowatt_hours: float


def figures(ours: Outcome, twin: Outcome, requests: Requests, budget_w: float, seconds: int) -> Figures:
    """Compare; requests that have not ended count with the time that they have taken so far."""
    over = ours.feed_w > budget_w
    tens = ours.feed_w[: seconds // 10 * 10].reshape(-1, 10).mean(axis=1)
    counted = (requests.at_s >= min(WARM_UP_S, seconds / 4)) & (
        requests.at_s < seconds - min(LAST_S, seconds / 4)
    )

    def ratio(rows: NDArray[np.bool_], percent: float, first: bool = False) -> float | None:
        if not rows.any():
            return None
        mine, theirs = (
            np.percentile(_taken(one.first_s if first else one.done_s, requests, seconds)[rows], percent)
            for one in (ours, twin)
        )
        return float(mine / theirs) if theirs > 0 else None  # prompts of one token take no time here

    high, low = counted & requests.high, counted & ~requests.high
    within = None
    if high.any():
        bar = 1.05 * np.percentile(_taken(twin.done_s, requests, seconds)[high], 99)
        within = float((_taken(ours.done_s, requests, seconds)[high] <= bar).mean())
    return Figures(
        over_s=int(over.sum()),
        over_10s=int((tens > budget_w).sum()) * 10,
        worst_percent=100 * float(ours.feed_w.max() / budget_w - 1),
        over_1_percent_run_s=_longest(ours.feed_w > 1.01 * budget_w),
        peak_percent=100 * float(ours.feed_w.max() / budget_w),
        high_p50=ratio(high, 50),
        high_p99=ratio(high, 99),
        high_first_p99=ratio(high, 99, first=True),
        low_p50=ratio(low, 50),
        low_p99=ratio(low, 99),
        within_5_percent=within,
        training_speed=ours.work_s / twin.work_s if twin.work_s else None,
        joules_per_token=(ours.joules / ours.tokens) / (twin.joules / twin.tokens)
        if ours.tokens and twin.tokens
        else None,
        requests=int(np.isfinite(ours.done_s).sum()),
        tokens=ours.tokens,
        kilowatt_hours=ours.joules / 3.6e6,
    )


def _taken(end_s: Floats, requests: Requests, seconds: int) -> Floats:
    taken: Floats = np.where(np.isfinite(end_s), end_s, float(seconds)) - requests.at_s
    return taken


def _longest(over: NDArray[np.bool_]) -> int:
    longest = run_s = 0
    for one in over.tolist():
        run_s = run_s + 1 if one else 0
        longest = max(longest, run_s)
    return longest
