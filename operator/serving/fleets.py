"""How many replicas the latency target of a service needs, and in which pools: `scheduler.autoscale.fleet` on live data.

    gateway's demand ──► sizes, rates ─┐
    replicas' step models ──► columns ─┼──► Fleet.decide, once per reading ──► target by pool
    pods ──► ready and starting ───────┘

The decisions are those of `busbar plan-capacity`. What this module adds is what a simulation does not have: speeds that
are not known yet, a gateway that is away or has just started (nothing changes then), an operator that restarts (the
last target is in the status; nothing leaves before the window has passed again), and pools whose replicas are not
placed (another pool is asked after `PATIENCE_S`).

State is in memory, by service. The load of earlier days goes on over restarts (`history_keeper.py`); the sizes, the
attainment and the forecast's errors begin anew with the process.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from busbar.kube.contracts.demand import ServiceDemand
from busbar.kube.types.service_status import ScalingCause
from busbar.operator.errors import TargetUnreachable
from busbar.operator.serving.attainment import HOUR_S, RECENT_S, Attainment
from busbar.operator.serving.fleet_input import (
    DOWN_AFTER_S,
    Seen,
    alive,
    columns_of,
    limits_of,
    moved,
    ready,
    settings_of,
    split,
    target_of,
    ways_of,
)
from busbar.operator.serving.fleet_plan import Ahead, Change, Plan
from busbar.operator.serving.fleet_words import cause_sentence, hindrance
from busbar.operator.serving.power_caps import Capping, as_measured, caps_of
from busbar.operator.serving.replica_speed import Speeds, slo_of, speeds
from busbar.operator.serving.room import (
    held_back_sentence,
    out_of_stock,
)
from busbar.operator.serving.shares import Shares, shares_now
from busbar.operator.serving.sizes import Sizes
from busbar.operator.serving.trust import WINDOW_S, Trust
from busbar.scheduler.autoscale.fleet import RATE_S, Cause, Fleet, Observation
from busbar.scheduler.autoscale.mix import Column, LimitKind, capacity, carried_at, spread
from busbar.scheduler.autoscale.step_model import Slo
from busbar.scheduler.errors import ServingModelError

COLUMNS_S = 30.0
"""Speeds and limits are read again after so long, or when a pool is added or removed."""
PATIENCE_S = 30.0
"""A replica that is not placed for so long is asked for in another pool."""
BLOCKED_S = 300.0
"""A pool that placed no replica is not asked again for so long."""
CAUSES = {
    Cause.FORECAST: ScalingCause.FORECAST,
    Cause.PANIC: ScalingCause.PANIC,
    Cause.IDLE: ScalingCause.IDLE,
    Cause.SWITCH: ScalingCause.SWITCH,
    Cause.BUDGET: ScalingCause.BUDGET,
    Cause.DOMAINS: ScalingCause.BOUNDS,
}
LIMITED = {
    LimitKind.QUOTA: ScalingCause.QUOTA,
    LimitKind.POWER: ScalingCause.POWER,
    LimitKind.BUDGET: ScalingCause.BUDGET,
}
"""Why replicas are fewer than the load needs."""


@dataclass(frozen=True)
class _Rooms:
    """Requests per second within the target, and where they go for it."""

    of: object
    """What it was computed from."""
    all_ready: float
    each: Mapping[str, float]
    """Of one replica, by pool."""
    shares: Shares


@dataclass
class _State:
    since_s: float
    counted_at_s: float
    """When the gateway last told how many requests came."""
    attainment: Attainment = field(default_factory=Attainment)
    sizes: Sizes = field(default_factory=Sizes)
    trust: Trust = field(default_factory=Trust)
    sized_at_s: float | None = None
    reading: int = -1
    asked: int | None = None
    """The number of replicas that somebody outside decided, when the plan was made."""
    fleet: Fleet | None = None
    columns_at_s: float = 0.0
    """0: they must be made anew."""
    speeds: Speeds = field(default_factory=lambda: Speeds({}, {}))
    target: dict[str, int] | None = None
    change: Change | None = None
    held: Change | None = None
    over_since_s: float | None = None
    waiting_since: dict[str, float] = field(default_factory=dict)
    blocked_until: dict[str, float] = field(default_factory=dict)
    plan: Plan = field(default_factory=lambda: Plan(unreachable=None))
    rooms: _Rooms | None = None
    capping: Capping = field(default_factory=Capping)


class Fleets:
    """The fleets of all services with a latency target."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}

    def keep(self, uids: Iterable[str]) -> None:
        """Forgets all other services. Another thread may plan for one meanwhile."""
        known = set(uids)
        for uid in list(self._states):
            if uid not in known:
                self._states.pop(uid, None)

    def without_target(self, uid: str) -> None:
        """Forgets a service that has no latency target (any more)."""
        self._states.pop(uid, None)

    def shares(self, uid: str) -> Shares:
        """Where the gateway shall send each class of a service's prompts."""
        state = self._states.get(uid)
        return state.plan.shares if state is not None else ()

    def latest(self, uid: str) -> Plan | None:
        """What `plan` said last; None: the service has no latency target, or it was not asked yet."""
        state = self._states.get(uid)
        return state.plan if state is not None else None

    def outlook(self, uid: str, demand: ServiceDemand | None) -> tuple[Sizes, float]:
        """The sizes of a service's requests, and the part of the computed rates that is believed. Of a service that has
        no latency target, the sizes of the last three minutes."""
        state = self._states.get(uid)
        if state is not None and state.sizes.known:
            return copy.deepcopy(state.sizes), state.trust.factor
        sizes, window = Sizes(), demand.window(180) if demand is not None else None
        if window is not None:
            sizes.learn(window.sizes, 0.0)
        return sizes, 1.0

    def plan(self, seen: Seen) -> Plan:
        """What the target says now. Calls for one service must not overlap."""
        state = self._states.setdefault(seen.service.metadata.uid, _State(seen.now_s, seen.now_s))
        asked = seen.service.spec.external_replicas
        if seen.demand is not None and (seen.reading != state.reading or asked != state.asked):
            if seen.reading != state.reading:
                _learn(state, seen, seen.demand)
            state.reading, state.asked = seen.reading, asked
            state.plan = _plan(state, seen, seen.demand)
        elif seen.demand is None:
            state.plan = _blind(state, seen)
        recent, hour = (state.attainment.over(s, seen.now_s) for s in (RECENT_S, HOUR_S))
        over = state.over_since_s
        return replace(state.plan, attainment=recent, attainment_hour=hour, over_since_s=over)


def _learn(state: _State, seen: Seen, demand: ServiceDemand) -> None:
    if demand.totals is not None:
        state.attainment.take(demand.totals, seen.now_s)
    last = state.sized_at_s
    if last is None or seen.now_s - last >= RATE_S:
        window = demand.window(RATE_S if last is not None and seen.now_s - last < 2 * RATE_S else 180)
        if window is not None:
            state.sizes.learn(window.sizes, seen.now_s)
            state.sized_at_s = seen.now_s


def _held(state: _State, seen: Seen) -> dict[str, int] | None:
    """The target so far, also after a restart of the operator."""
    return state.target if state.target is not None else target_of(seen.service)


def _blind(state: _State, seen: Seen) -> Plan:
    """The gateway does not answer, or has no routes yet: the target stays as it is."""
    if seen.service.spec.external_replicas is not None:
        state.target = None  # it may be given back before the gateway answers: then what is there stays
    target = _held(state, seen)
    text = "The gateway says nothing of the requests; the replicas stay as they are."
    _rest(state, seen)
    return replace(state.plan, target=target, message=text, ahead=None)


def _rest(state: _State, seen: Seen) -> None:
    """What is not watched may have been needed: nothing leaves before a whole window was seen again."""
    if state.fleet is not None:
        state.fleet.rest_until_s = seen.now_s + state.fleet.settings.down_after_s


def _plan(state: _State, seen: Seen, demand: ServiceDemand) -> Plan:
    slo = slo_of(seen.service.spec.slo)
    if slo is None:
        return _in_flight(state, seen, "spec.slo.ttftMilliseconds is not set", unreachable="")
    window = demand.window(RATE_S)
    if window is None:
        if seen.now_s - state.counted_at_s < DOWN_AFTER_S and _held(state, seen):
            return _blind(state, seen)
        return _in_flight(state, seen, "the gateway does not count requests by size")
    state.counted_at_s = seen.now_s
    if not state.sizes.known:
        target, young = target_of(seen.service), seen.now_s - state.since_s < DOWN_AFTER_S
        if young and state.target is None and target is not None:
            text = "No request was answered since the operator or the gateway started."
            return Plan(target, text, unreachable=None)
        return _in_flight(state, seen, "no request was answered yet, so their sizes are not known")
    try:
        fleet = _fleet(state, seen, slo)
    except TargetUnreachable as error:
        said = str(error)
        return _in_flight(state, seen, said, unreachable=f"{said[0].upper()}{said[1:]}.")
    except ServingModelError as error:
        return _in_flight(state, seen, str(error))
    if seen.counted_s < RATE_S + 1:  # a full window is less than what it should be
        return _told(state, seen, fleet, None, "The gateway has just started; the replicas stay as they are.")
    rate = window.arrivals / RATE_S
    seen = state.capping.weighed(seen)
    message = ""
    try:
        _decide(state, seen, fleet, rate, demand)
    except ServingModelError as error:
        message = str(error)
    room = _rooms(state, seen, fleet).all_ready
    settled = sum(ready(seen).values()) == sum((state.target or {}).values())
    if state.trust.take(demand.window(WINDOW_S), slo.percentile, room, settled, seen.now_s):
        state.columns_at_s = 0.0
    return _told(state, seen, fleet, rate, message)


def _in_flight(state: _State, seen: Seen, why: str, unreachable: str | None = None) -> Plan:
    state.target, state.change, state.held, state.over_since_s = None, None, None, None
    _rest(state, seen)
    scaling = seen.service.spec.scaling
    zones = "scaling.minZones is" if scaling.zone_reserve is None else "scaling.minZones and zoneReserve are"
    also = f" Meanwhile {zones} not looked at." if scaling.min_zones is not None else ""
    return Plan(message=f"Replicas are counted by requests in flight: {why}.{also}", unreachable=unreachable)


# -- the fleet ---------------------------------------------------------------------------------------


def _fleet(state: _State, seen: Seen, slo: Slo) -> Fleet:
    """The service's fleet with today's speeds and limits.

    Raises:
        ServingModelError: no pool has a speed, or none keeps the target; says why.
    """
    names = {pool.metadata.name for pool in seen.pools}
    fleet = state.fleet
    fresh = seen.now_s - state.columns_at_s < COLUMNS_S
    if fleet is not None and fleet.slo == slo and fresh and names == _names(state.speeds):
        return fleet
    limitable = seen.room.boards if seen.room is not None else caps_of(seen.service)
    state.speeds = speeds(seen.service, seen.pools, seen.profiles, slo, seen.made_by, limitable)
    columns = columns_of(seen, state.speeds, state.sizes, slo, _blocked(state, seen), state.trust.factor)
    settings = settings_of(seen)
    capped = _cap(state, seen, columns, slo, settings.down_after_s)
    columns, seen = state.capping.columns(), state.capping.weighed(seen)
    limits = limits_of(seen, columns, state.target or {}, _blocked(state, seen))
    if fleet is None or fleet.slo != slo:
        fleet = Fleet(
            columns, limits, slo, settings, rest_until_s=seen.now_s + settings.down_after_s, days=seen.days
        )
        state.fleet = fleet
    fleet.adopt(columns, limits, settings, state.sizes.shares)
    if capped:
        fleet.plan_soon()
    # What replicas do under the caps that the status has is known with the first room.
    state.columns_at_s = 0.0 if state.capping.waits else seen.now_s
    return fleet


def _cap(state: _State, seen: Seen, columns: tuple[Column, ...], slo: Slo, hold_s: float) -> bool:
    """Choose the power caps of the service's replicas; whether they changed."""
    target, fleet = _held(state, seen) or alive(seen), state.fleet
    ways = ways_of(seen, columns, state.speeds, state.sizes, slo, state.trust.factor)
    limits = as_measured(limits_of(seen, columns, target, _blocked(state, seen)), seen)
    bound = fleet is not None and fleet.limited is LimitKind.POWER
    wanted = [fleet.wanted_rps * share for share in state.sizes.shares] if fleet is not None and bound else []
    return state.capping.decide(seen, ways, target, limits, wanted, hold_s)


def _blocked(state: _State, seen: Seen) -> list[str]:
    return [name for name, until in state.blocked_until.items() if until > seen.now_s]


def _names(known: Speeds) -> set[str]:
    return {*known.models, *known.refused}


# -- one decision --------------------------------------------------------------------------------------


def _decide(state: _State, seen: Seen, fleet: Fleet, rate: float, demand: ServiceDemand) -> None:
    """Changes the state's target, if there is reason to."""
    running = alive(seen)
    fleet.limits = limits_of(seen, fleet.columns, state.target or {}, _blocked(state, seen))
    desired = seen.service.status.desired_replicas if seen.service.status is not None else None
    spec = seen.service.spec
    deciding = spec.external_replicas is None and not seen.off and bool(desired)
    if spec.external_replicas is not None:
        # Whoever wrote it knew why: once it is taken away, nothing leaves before a whole window was seen.
        state.target = _external(state, seen, fleet, rate, spec.external_replicas or desired or 0)
        _rest(state, seen)
    elif not deciding:
        state.target = running  # who takes over again begins with what runs
    elif state.target is None:
        state.target = target_of(seen.service) or moved(
            fleet.columns, fleet.limits, running, desired or 0, desired or 0
        )
    target = dict(state.target)
    if deciding:
        if sum(target.values()) == sum(running.values()) and spec.scaling.min_zones is None:
            target = dict(running)  # the scheduler may have chosen another pool of the same type
        _give_up_where_nothing_is_placed(state, seen, fleet, target, running)
        _within_bounds(state, fleet, target)
    state.target = target
    fleet.limits = limits_of(seen, fleet.columns, state.target or {}, _blocked(state, seen))
    state.over_since_s = _over_since(state, seen, fleet, rate, demand, target)
    serving = {name: min(count, target.get(name, 0)) for name, count in ready(seen).items()}
    bound = fleet.limited is LimitKind.POWER
    decision = fleet.decide(
        Observation(
            now_s=seen.now_s,
            rates=tuple(rate * share for share in state.sizes.shares),
            overdue=demand.overdue,
            ready=serving,
            starting={name: count - serving.get(name, 0) for name, count in target.items()},
            in_flight=demand.in_flight,
        )
    )
    if fleet.limited is LimitKind.POWER and not bound:
        state.columns_at_s = 0.0  # lower power caps may let more replicas run
    state.held = None
    if not deciding or (decision is None and fleet.limited is None):
        return
    room = _rooms(state, seen, fleet).all_ready
    if decision is not None:
        state.target = {name: count for name, count in decision.target.items() if count}
        said = cause_sentence(decision.cause, decision.load_rps, rate, room, fleet.limits)
        state.change = Change(CAUSES[decision.cause], said, decision.load_rps, room)
    if fleet.limited is not None:
        load = fleet.wanted_rps
        text = held_back_sentence(fleet.columns, fleet.limits, state.target or {}, load)
        state.held = Change(LIMITED[fleet.limited], text, load, room)
        if decision is not None and decision.cause in (Cause.FORECAST, Cause.PANIC):
            state.change = state.held


def _over_since(
    state: _State, seen: Seen, fleet: Fleet, rate: float, demand: ServiceDemand, target: Mapping[str, int]
) -> float | None:
    """Since when the wanted replicas do not suffice, as `Plan.over_since_s` has it."""
    each = _rooms(state, seen, fleet).each
    sustained = sum(each.get(name, 0.0) * count for name, count in target.items())
    if not demand.overdue and rate <= sustained:
        return None
    return state.over_since_s if state.over_since_s is not None else seen.now_s


def _external(state: _State, seen: Seen, fleet: Fleet, rate: float, desired: int) -> dict[str, int]:
    """The pools of the replicas that somebody outside decides: as they say, or by the mix."""
    by_pool, running = seen.service.spec.scaling.external, alive(seen)
    if by_pool is not None:
        return {name: count for name, count in by_pool.items() if count}
    if sum(running.values()) == desired:
        return running
    target = dict(state.target if state.target is not None else running)
    if sum(target.values()) == desired:
        _give_up_where_nothing_is_placed(state, seen, fleet, target, running)
    limits = limits_of(seen, fleet.columns, target, _blocked(state, seen))
    load = [rate * share for share in state.sizes.shares]
    return split(fleet.columns, limits, load, target, desired)


def _give_up_where_nothing_is_placed(
    state: _State, seen: Seen, fleet: Fleet, target: dict[str, int], running: Mapping[str, int]
) -> None:
    """A pool that has not placed a replica for `PATIENCE_S` is asked no more for a while, if there is another one; one without
    room for it loses it at once, and is asked again when it has room."""
    names = [pool.metadata.name for pool in seen.pools]
    for name in [column.key for column in fleet.columns]:
        if target.get(name, 0) <= running.get(name, 0):
            state.waiting_since.pop(name, None)
            continue
        since = state.waiting_since.setdefault(name, seen.now_s)
        others = [n for n in names if n != name and state.blocked_until.get(n, 0.0) <= seen.now_s]
        is_full = not _has_room(seen, name, running) and any(_has_room(seen, n, target) for n in others)
        if not others or not (is_full or seen.now_s - since >= PATIENCE_S):
            continue
        text = f"Pool {name} has no room for the replicas that it lacks; other pools are asked."
        if not is_full:
            state.blocked_until[name] = seen.now_s + BLOCKED_S
            text = f"Pool {name} placed no replica for {PATIENCE_S:.0f} s; other pools are asked."
        target[name] = running.get(name, 0)
        del state.waiting_since[name]
        state.columns_at_s = 0.0  # the limits, and where no pool with a speed is left, the others
        state.change = Change(ScalingCause.NO_ROOM, text)


def _has_room(seen: Seen, pool: str, replicas: Mapping[str, int]) -> bool:
    """Whether the nodes that are there hold more than these replicas; they do not where one has failed, or others took it."""
    room = seen.room.stock.get(pool) if seen.room is not None else None
    return room is None or room > replicas.get(pool, 0)


def _within_bounds(state: _State, fleet: Fleet, target: dict[str, int]) -> None:
    """Moves the target between `minReplicas` and `maxReplicas`."""
    least, most = fleet.limits.min_replicas, fleet.limits.quota
    before = sum(target.values())
    target.update(moved(fleet.columns, fleet.limits, target, least, most if most is not None else before))
    if sum(target.values()) != before:
        state.change = Change(ScalingCause.BOUNDS, f"The service has {least} to {most} replicas.")


def _told(state: _State, seen: Seen, fleet: Fleet, rate: float | None, message: str) -> Plan:
    rooms = _rooms(state, seen, fleet)
    ahead = None
    if rate is not None:
        made = fleet.forecast.forecast(seen.now_s)
        lead_s = fleet.settings.forecast.horizon_s
        ahead = Ahead(
            rate,
            made.expected,
            made.upper,
            lead_s,
            made.method,
            fleet.forecast.calibration,
            fleet.late_share,
        )
    target = state.target if state.target is not None else target_of(seen.service) or alive(seen)
    full = frozenset(
        out_of_stock(fleet.columns, fleet.limits, target, rooms.each, ahead.upper)
        if ahead is not None
        else ()
    )
    upper = ahead.upper if ahead is not None else None
    message = message or hindrance(seen, fleet, target, rooms.each, upper, state.speeds)
    if state.trust.factor < 1:
        believed = f"Replicas count for {100 * state.trust.factor:.0f} % of their computed rate: answers were late below it."
        message = f"{believed} {message}".rstrip()
    return Plan(
        target,
        message,
        state.change,
        ahead,
        rooms.all_ready,
        rooms.each,
        shares=rooms.shares,
        held=state.held,
        modes=dict(state.speeds.modes),
        predicted=frozenset(state.speeds.predicted),
        full=full,
        caps=dict(state.capping.caps or {}),
        caps_reason=state.capping.reason,
    )


def _rooms(state: _State, seen: Seen, fleet: Fleet) -> _Rooms:
    """What the ready replicas sustain together, and one in each pool with a speed."""
    here = ready(seen)
    of = (state.columns_at_s, state.sized_at_s, sorted(here.items()))
    if state.rooms is None or state.rooms.of != of:
        sizes, before = state.sizes.shares, state.rooms.shares if state.rooms is not None else ()
        each = {
            c.key: capacity([c], sizes, {c.key: 1}) for c in fleet.columns if c.key in state.speeds.models
        }
        level = spread(fleet.columns, sizes, here)
        shares = shares_now(fleet.columns, level, before)
        state.rooms = _Rooms(of, carried_at(level, sizes), each, shares)
    return state.rooms
