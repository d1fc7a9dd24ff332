"""Use of a time range by object, summed for an export: accelerator time, energy, money, lost work, tokens.

Amounts are differences of the running totals (records/compute.py), so that consecutive ranges add up. Requests and
tokens are those of the usage ledger. Joules per token are the joules of a service's replicas over all its tokens, also
of those that were served while no energy was measured.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, Select, Text, and_, cast, func, or_, select

from busbar.api.database import tables
from busbar.api.database.engine import Database
from busbar.api.errors import Invalid
from busbar.api.records.compute import AMOUNTS, up_to
from busbar.kube.resources import MODEL_SERVICES, TRAINING_JOBS

JOULES_PER_KWH = 3.6e6
NAMES = ("tenant", "namespace", "name", "uid", "kind", "requester", "pool")
"""Columns of `jobs` that an export reads."""
MOST_ROWS = 50_000
"""Of objects and days in one export."""


class Group(StrEnum):
    """What an export has a line for."""

    TENANT = "tenant"
    NAMESPACE = "namespace"
    USER = "user"
    JOB = "job"
    SERVICE = "service"


@dataclass(frozen=True)
class Reach:
    """Whose use a caller may see; None in place of a set: everybody's."""

    tenants: Collection[str] | None = None
    whole: Collection[str] | None = None
    """Of these tenants also that of other users by name."""
    user: str = ""


@dataclass(frozen=True)
class ObjectUse:
    """What one object has used in a period."""

    uid: str
    kind: str
    tenant: str
    namespace: str
    name: str
    user: str
    pool: str
    """The last one."""
    since: datetime
    until: datetime
    accelerator_seconds: float
    work_units: float
    energy_joules: float
    cost: float
    lost_seconds: float
    caused_seconds: float
    """Accelerator-seconds that training lost to the replicas of a service."""
    caused_cost: float


@dataclass(frozen=True)
class Line:
    """One line of an export; texts that the group does not have are empty."""

    tenant: str = ""
    namespace: str = ""
    name: str = ""
    user: str = ""
    objects: int = 0
    accelerator_hours: float = 0.0
    work_units: float = 0.0
    kilowatt_hours: float | None = None
    """None: none was measured."""
    cost: float = 0.0
    lost_hours: float = 0.0
    caused_hours: float = 0.0
    """Accelerator-hours that training lost to replicas."""
    caused_cost: float = 0.0
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    joules_per_token: float | None = None


@dataclass(frozen=True)
class Tokens:
    """What one service has served."""

    tenant: str
    namespace: str
    service: str
    requests: int
    prompt_tokens: int
    completion_tokens: int


class UsageExport:
    """Reads the compute table and the ledger."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def lines(self, by: Group, since: datetime, until: datetime, reach: Reach) -> list[Line]:
        """The lines of a group; the range begins and ends with whole hours."""
        used = await self._uses(since, until, reach, by)
        tokens = [] if by in (Group.USER, Group.JOB) else await self._tokens(since, until, reach.tenants)
        return lines(by, used, tokens)

    async def days(self, since: datetime, until: datetime, reach: Reach) -> list[ObjectUse]:
        """The use of each object on each day (UTC) that the range touches, whole days; by object, then by day.

        Raises:
            Invalid: there are too many.
        """
        start, end = whole_days(since, until)
        jobs, compute, before = tables.jobs, tables.compute, up_to(start, "before")
        day: Any = func.substr(cast(compute.c.at, Text), 1, 10).label("day")
        names = [jobs.c[name] for name in NAMES]
        query = (
            select(
                *names,
                day,
                *(func.max(compute.c[name]).label(name) for name in AMOUNTS),
                *(func.max(func.coalesce(before.c[name], 0.0)).label(f"before_{name}") for name in AMOUNTS),
            )
            .join_from(compute, jobs, jobs.c.uid == compute.c.uid)
            .join(before, before.c.uid == compute.c.uid, isouter=True)
            .where(compute.c.at >= start, compute.c.at < end, *_visible(jobs, reach, None))
            .group_by(*names, day)
            .order_by(*names, day)
            .limit(MOST_ROWS + 1)
        )
        async with self._db.read() as db:
            rows = (await db.execute(query)).mappings().all()
        if len(rows) > MOST_ROWS:
            raise Invalid(f"more than {MOST_ROWS} rows; ask for a shorter time", field="since")
        return by_day(dict(row) for row in rows)

    async def _uses(self, since: datetime, until: datetime, reach: Reach, by: Group) -> list[ObjectUse]:
        jobs, before, after = tables.jobs, up_to(since, "before"), up_to(until, "after")
        amounts = [(after.c[name] - func.coalesce(before.c[name], 0.0)).label(name) for name in AMOUNTS]
        query = (
            select(*(jobs.c[name] for name in NAMES), *amounts)
            .join_from(after, jobs, jobs.c.uid == after.c.uid)
            .join(before, before.c.uid == after.c.uid, isouter=True)
            .where(after.c.at >= since, *_visible(jobs, reach, by))
            .order_by(jobs.c.tenant, jobs.c.namespace, jobs.c.name, jobs.c.uid)
            .limit(MOST_ROWS + 1)
        )
        async with self._db.read() as db:
            rows = (await db.execute(query)).mappings().all()
        if len(rows) > MOST_ROWS:
            raise Invalid(f"more than {MOST_ROWS} objects; ask for a shorter time", field="since")
        return [_use(dict(row), since, until) for row in rows]

    async def _tokens(
        self, since: datetime, until: datetime, tenants: Collection[str] | None
    ) -> list[Tokens]:
        ledger = tables.ledger
        keys = [ledger.c.tenant, ledger.c.namespace, ledger.c.service]
        sums = [
            func.count().label("requests"),
            func.coalesce(func.sum(ledger.c.prompt_tokens), 0).label("prompt_tokens"),
            func.coalesce(func.sum(ledger.c.completion_tokens), 0).label("completion_tokens"),
        ]
        query: Select[Any] = (
            select(*keys, *sums)
            .where(ledger.c.finished_at >= since, ledger.c.finished_at < until)
            .group_by(*keys)
            .order_by(*keys)
        )
        if tenants is not None:
            query = query.where(ledger.c.tenant.in_(sorted(tenants)))
        async with self._db.read() as db:
            rows = (await db.execute(query)).mappings().all()
        return [
            Tokens(
                row["tenant"],
                row["namespace"],
                row["service"],
                int(row["requests"]),
                int(row["prompt_tokens"]),
                int(row["completion_tokens"]),
            )
            for row in rows
        ]


def lines(by: Group, used: Iterable[ObjectUse], tokens: Iterable[Tokens]) -> list[Line]:
    """The sums of each group, sorted by its texts."""
    found: dict[tuple[str, ...], Line] = {}
    joules: dict[tuple[str, ...], float] = {}
    for use in used:
        if by is Group.JOB and use.kind != TRAINING_JOBS.kind:
            continue
        if by is Group.SERVICE and use.kind != MODEL_SERVICES.kind:
            continue
        key = _key(by, use.tenant, use.namespace, use.name, use.user)
        line = found.get(key, Line(*key))
        joules[key] = joules.get(key, 0.0) + use.energy_joules
        found[key] = replace(
            line,
            objects=line.objects + 1,
            accelerator_hours=line.accelerator_hours + use.accelerator_seconds / 3600,
            work_units=line.work_units + use.work_units,
            kilowatt_hours=joules[key] / JOULES_PER_KWH or None,
            cost=line.cost + use.cost,
            lost_hours=line.lost_hours + use.lost_seconds / 3600,
            caused_hours=line.caused_hours + use.caused_seconds / 3600,
            caused_cost=line.caused_cost + use.caused_cost,
        )
    for told in tokens:
        key = _key(by, told.tenant, told.namespace, told.service, "")
        line = found.get(key, Line(*key))
        found[key] = replace(
            line,
            requests=line.requests + told.requests,
            prompt_tokens=line.prompt_tokens + told.prompt_tokens,
            completion_tokens=line.completion_tokens + told.completion_tokens,
        )
    if by is Group.SERVICE:
        found = {key: _with_joules_per_token(line, joules.get(key, 0.0)) for key, line in found.items()}
    return [found[key] for key in sorted(found)]


def by_day(rows: Iterable[dict[str, Any]]) -> list[ObjectUse]:
    """Each day's use, from the running totals at the ends of days, sorted by object and day."""
    found: list[ObjectUse] = []
    uid, told = "", dict[str, float]()
    for row in rows:
        if row["uid"] != uid:
            uid, told = str(row["uid"]), {name: float(row[f"before_{name}"]) for name in AMOUNTS}
        start = datetime.fromisoformat(row["day"]).replace(tzinfo=UTC)
        used = {name: float(row[name]) - told[name] for name in AMOUNTS}
        told = {name: float(row[name]) for name in AMOUNTS}
        found.append(_use({**row, **used}, start, start + timedelta(days=1)))
    return found


def whole_days(since: datetime, until: datetime) -> tuple[datetime, datetime]:
    """From the first day (UTC) that a range touches to the end of its last."""
    start, last = (
        when.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        for when in (since, until - timedelta(microseconds=1))
    )
    return start, last + timedelta(days=1)


def _key(by: Group, tenant: str, namespace: str, name: str, user: str) -> tuple[str, str, str, str]:
    return (
        tenant,
        namespace if by in (Group.NAMESPACE, Group.JOB, Group.SERVICE) else "",
        name if by in (Group.JOB, Group.SERVICE) else "",
        user if by is Group.USER else "",
    )


def _with_joules_per_token(line: Line, joules: float) -> Line:
    tokens = line.prompt_tokens + line.completion_tokens
    return replace(line, joules_per_token=joules / tokens) if tokens and joules > 0 else line


def _visible(jobs: Any, reach: Reach, by: Group | None) -> Sequence[ColumnElement[bool]]:
    """By user, members see themselves only, and admins of a tenant everybody in it."""
    if reach.tenants is None:
        return ()
    mine: ColumnElement[bool] = jobs.c.tenant.in_(sorted(reach.tenants))
    if by is not Group.USER:
        return (mine,)
    return (and_(mine, or_(jobs.c.tenant.in_(sorted(reach.whole or ())), jobs.c.requester == reach.user)),)


def _use(row: dict[str, Any], since: datetime, until: datetime) -> ObjectUse:
    amounts = {name: max(0.0, float(row[name])) for name in AMOUNTS}
    texts = {name: str(row[name]) for name in NAMES}
    return ObjectUse(
        uid=texts["uid"],
        kind=texts["kind"],
        tenant=texts["tenant"],
        namespace=texts["namespace"],
        name=texts["name"],
        user=texts["requester"],
        pool=texts["pool"],
        since=since,
        until=until,
        accelerator_seconds=amounts["accelerator_seconds"],
        work_units=amounts["work_units"],
        energy_joules=amounts["energy_joules"],
        cost=amounts["cost"],
        lost_seconds=amounts["lost_seconds"],
        caused_seconds=amounts["caused_seconds"],
        caused_cost=amounts["caused_cost"],
    )
