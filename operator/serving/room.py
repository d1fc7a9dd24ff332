"""What the scheduler's last snapshot leaves to a service: the rows of quota, power and stock that its mix must keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from busbar.kube.types import ModelService
from busbar.operator.pods.claims import per_pod
from busbar.scheduler import Job, JobId, JobKind, Snapshot
from busbar.scheduler.autoscale.columns import Column, Limits, Row, held_back_by
from busbar.scheduler.explain.service_room import ServiceRoom, ServiceRooms

_Key = tuple[str, int | None, str, tuple[str, ...]]


class RoomReader:
    """Reads each snapshot once, and each service in it once."""

    def __init__(self) -> None:
        self._last: tuple[Snapshot, ServiceRooms, dict[_Key, ServiceRoom]] | None = None

    def of(
        self, snapshot: Snapshot | None, service: ModelService, tenant: str, pools: Iterable[str]
    ) -> ServiceRoom | None:
        """None: no round was planned yet. Threads may call it at the same time: at worst a room is computed twice."""
        if snapshot is None:
            return None
        last = self._last
        if last is None or last[0] is not snapshot:
            last = self._last = (snapshot, ServiceRooms(snapshot), {})
        meta, names = service.metadata, tuple(sorted(pools))
        key = meta.uid, meta.generation, tenant, names
        found = last[2].get(key)
        if found is None:
            replica = Job(
                id=JobId(meta.uid),
                name=meta.name,
                namespace=meta.namespace or "",
                tenant=tenant,
                kind=JobKind.SERVING,
                per_pod=per_pod(service.spec.shape),
                service=f"{meta.namespace}/{meta.name}",
            )
            found = last[2][key] = last[1].of(replica, names)
        return found


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
    names = held_back_by(columns, target, limits)
    return (
        f"{load:.3g} requests/s need more replicas, held back by {' and by '.join(names)}." if names else ""
    )
