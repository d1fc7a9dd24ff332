"""What others are told of the feeds and nodes. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from busbar.kube.contracts.power_view import (
    FeedPower,
    MeterHour,
    NodePower,
    PowerPicture,
    PowerSeries,
    Resolution,
)
from busbar.kube.types import ConditionStatus
from busbar.kube.types.reasons import Reason
from busbar.operator.power.draw import Draw
from busbar.operator.power.leasing import FeedLeases
from busbar.operator.power.membership import Membership
from busbar.operator.power.meters import Metered
from busbar.operator.power.preemption import FeedRelief
from busbar.operator.power.readings import Reading
from busbar.operator.power.reconcile import Seen, ready
from busbar.operator.power.rings import MINUTES, SECONDS, Series


def picture(
    found: Membership,
    draws: Mapping[str, Draw],
    readings: Mapping[str, Reading],
    now_s: float,
    fresh_s: float,
    leases: Mapping[str, FeedLeases],
    reliefs: Mapping[str, FeedRelief],
    prices: Mapping[str, float],
    meters: Mapping[str, Metered],
    why: Mapping[str, str] = MappingProxyType({}),
    by_pod: Collection[str] = (),
) -> PowerPicture:
    """All feeds, and all nodes on one or with a reading.

    Args:
        prices: of a watt-hour on each feed that holds jobs back, in work.
        why: each limited node has its lease.
        by_pod: nodes of which it is known which pods hold which board.
    """
    names = sorted({*found.feeds, *readings})
    return PowerPicture(
        feeds=tuple(
            _with_meter(feed, meters.get(name))
            for name in sorted(found.domains)
            for feed in (
                _feed(name, found, draws.get(name), leases.get(name), reliefs.get(name), prices.get(name)),
            )
        ),
        nodes=tuple(
            _node(name, found, readings.get(name), now_s, fresh_s).model_copy(
                update={"why": why.get(name, ""), "boards_by_pod": name in by_pod}
            )
            for name in names
        ),
    )


def series_of(name: str, series: Series | None, resolution: Resolution, now_s: float) -> PowerSeries:
    """The whole of one ring until now; gaps without a series."""
    count = SECONDS if resolution is Resolution.SECOND else MINUTES
    now = int(now_s) // resolution.period_s
    ring = None if series is None else series.seconds if resolution is Resolution.SECOND else series.minutes
    values = [None] * count if ring is None else ring.last(now, count)
    return PowerSeries(
        name=name,
        resolution=resolution,
        watts=tuple(None if watts is None else round(watts, 1) for watts in values),
    )


def _feed(
    name: str,
    found: Membership,
    draw: Draw | None,
    leases: FeedLeases | None,
    relief: FeedRelief | None,
    price: float | None,
) -> FeedPower:
    domain, nodes = found.domains[name], len(found.members[name])
    draw = draw or Draw(nodes=nodes, unknown=nodes)
    state = ready(name, found, Seen(draw, leases=leases, relief=relief))
    known = draw.unknown < draw.nodes
    room_w = domain.usable_w - draw.watts - draw.assumed_w
    return FeedPower(
        name=name,
        parent=domain.parent or "",
        budget_watts=domain.budget_w,
        ready=state.status is ConditionStatus.TRUE,
        reason=str(state.reason),
        nodes=nodes,
        draw_watts=round(draw.watts, 1) if draw.fresh else None,
        assumed_watts=round(draw.assumed_w, 1),
        headroom_watts=round(room_w, 1) if not draw.unknown else None,
        floor_watts=round(draw.floor_w, 1) if known else None,
        nameplate_watts=round(draw.nameplate_w, 1) if known else None,
        policy=domain.policy.value,
        leased_watts=round(leases.leased_w, 1) if leases is not None else None,
        capped_nodes=draw.capped,
        silent_nodes=draw.silent,
        simulated_nodes=draw.simulated,
        work_per_kilowatt_hour=round(1000 * price, 4) if price is not None else None,
    )


def _with_meter(feed: FeedPower, metered: Metered | None) -> FeedPower:
    if metered is None:
        return feed
    hours = tuple(
        MeterHour(
            start_s=hour.start_s,
            seconds=round(hour.seconds, 1),
            ledger_joules=round(hour.ledger_j, 1),
            meter_joules=round(hour.meter_j, 1),
            error=round(hour.error, 5) if hour.error is not None else None,
        )
        for hour in metered.book.hours
    )
    whole = metered.book.last_whole()
    problem = "" if metered.reason in (None, Reason.METER_READ) else metered.message
    error = round(whole.error, 5) if whole is not None and whole.error is not None else None
    return feed.model_copy(
        update={"metered": True, "meter_error": error, "meter_hours": hours, "meter_problem": problem}
    )


def _node(name: str, found: Membership, reading: Reading | None, now_s: float, fresh_s: float) -> NodePower:
    feeds: list[str] = []
    for feed in found.feeds.get(name, ()):
        feeds += [each for each in (feed, *found.above[feed]) if each not in feeds]
    if reading is None:
        return NodePower(name=name, feeds=tuple(feeds))
    return NodePower(
        name=name,
        feeds=tuple(feeds),
        watts=round(reading.watts, 1),
        floor_watts=round(reading.floor_w, 1),
        nameplate_watts=round(reading.nameplate_w, 1),
        boards=len(reading.boards),
        boards_from=reading.boards_from,
        host_from=reading.host_from,
        lease_watts=reading.limits.lease_watts if reading.limits is not None else None,
        capped=reading.is_capped,
        limits=reading.limits.state if reading.limits is not None else None,
        refusing_boards=sum(board.refuses for board in reading.boards.values()),
        conflicting_boards=len(reading.limits.conflicts) if reading.limits is not None else 0,
        age_seconds=round(max(0.0, now_s - reading.at_s), 1),
        silent=now_s - reading.at_s > fresh_s,
    )
