"""What the scheduler's last snapshot leaves to a service: the rows of quota, budgets, power and stock that its mix must keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from busbar.kube.types import ModelService
from busbar.operator.pods.claims import per_pod
from busbar.scheduler import Job, JobId, JobKind, Snapshot
from busbar.scheduler.autoscale.columns import Column, Limits, Row, held_back_by
from busbar.scheduler.explain.service_room import BudgetLeft, ServiceRoom, ServiceRooms

_Key = tuple[str, int | None, str, tuple[str, ...]]


class RoomReader:
    """Reads each snapshot once, and each service in it once."""

    def __init__(self) -> None:
        self._last: tuple[Snapshot, ServiceRooms, dict[_Key, ServiceRoom]] | None = None

    def of(
        self,
        snapshot: Snapshot | None,
        service: ModelService,
        tenant: str,
        pools: Iterable[str],
        budgets: Iterable[BudgetLeft] = (),
        lacking: Iterable[str] = (),
    ) -> ServiceRoom | None:
        """None: no round was planned yet. Threads may call it at the same time: at worst a room is computed twice.

        Args:
            budgets: what is left of those of its tenant now.
            lacking: names of power domains on which the round left jobs waiting for watts.
        """
        if snapshot is None:
            return None
        last = self._last
        if last is None or last[0] is not snapshot:
            last = self._last = (snapshot, ServiceRooms(snapshot, lacking), {})
        meta, names = service.metadata, tuple(sorted(pools))
        key = meta.uid, meta.generation, tenant, names
        found = last[2].get(key)
        replica = Job(
            id=JobId(meta.uid),
            name=meta.name,
            namespace=meta.namespace or "",
            tenant=tenant,
            kind=JobKind.SERVING,
            per_pod=per_pod(service.spec.shape),
            service=f"{meta.namespace}/{meta.name}",
        )
        if found is None:
            found = last[2][key] = last[1].of(replica, names)
        paid = last[1].paid(replica, names, budgets)
        return replace(found, rows=(*found.rows, *paid)) if paid else found


def no_less_than(rows: Iterable[Row], replicas: Mapping[str, int]) -> tuple[Row, ...]:
    """The rows, each at least as large as what these replicas take: what is above a limit is taken back by the scheduler, and
    is no reason not to add where nothing limits."""
    return tuple(
        replace(row, most=max(row.most, sum(row.weights.get(pool, 0.0) * n for pool, n in replicas.items())))
        for row in rows
    )


def held_back(
    columns: Sequence[Column],
    limits: Limits,
    target: Mapping[str, int],
    each: Mapping[str, float],
    load: float,
) -> str:
    """Which rows keep the service from the replicas that it would need for a load; empty where it has them.

    Args:
        target: replicas by pool.
        each: requests per second of one, by pool with a known speed.
    """
    if sum(each.get(pool, 0.0) * count for pool, count in target.items()) >= load:
        return ""
    return held_back_sentence(columns, limits, target, load) if held_back_by(columns, target, limits) else ""


def out_of_stock(
    columns: Sequence[Column],
    limits: Limits,
    target: Mapping[str, int],
    each: Mapping[str, float],
    load: float,
) -> set[str]:
    """The pools of a service whose load needs more replicas than all of them have room for; empty where one has, or where it is
    not only room that is missing. Arguments as for `held_back`."""
    if sum(each.get(pool, 0.0) * count for pool, count in target.items()) >= load:
        return set()
    used = {c.pool: 0 for c in columns}
    for c in columns:
        used[c.pool] += c.accelerators * target.get(c.key, 0)
    has_room = any(
        c.pool not in limits.stock or used[c.pool] + c.accelerators <= limits.stock[c.pool] for c in columns
    )
    bounded = limits.quota is not None and sum(target.values()) >= limits.quota
    return set() if has_room or bounded or held_back_by(columns, target, limits) else set(used)


def held_back_sentence(
    columns: Sequence[Column], limits: Limits, target: Mapping[str, int], load: float
) -> str:
    """That the replicas for a load are held back, and by which rows."""
    names = held_back_by(columns, target, limits) or ["limits that leave no room for a better mix"]
    return f"{load:.3g} requests/s need more replicas, held back by {' and by '.join(names)}."


def zones_missing(asked: int | None, limits: Limits, room: ServiceRoom | None) -> str:
    """That the replicas cannot stand in as many zones as asked; empty where they can."""
    if asked is None or limits.min_domains >= asked:
        return ""
    if room is None:
        return "The zones of the pools are not known before the scheduler's first round."
    open_zones = sorted({zone for pool, zone in room.zones.items() if room.stock.get(pool, 0) > 0})
    named = f" ({', '.join(open_zones)})" if open_zones else ""
    return (
        f"scaling.minZones is {asked}, and the pools that the service may use have room in {limits.min_domains}{named}."
        " A pool is in a zone if all of its nodes have that label."
    )


def reserve_missing(asked: float | None, lost: tuple[float, str] | None) -> str:
    """That there is no room for what `scaling.zoneReserve` asks for; empty where there is.

    Args:
        lost: the part of the load that is carried without a zone, and that zone, where that is too little.
    """
    if asked is None or lost is None:
        return ""
    return (
        f"scaling.zoneReserve is {asked:g}, and there is room for replicas that carry {100 * lost[0]:.0f} % of the load without"
        f" zone {lost[1]}."
    )
