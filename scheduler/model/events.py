"""What happened since the last decision: the argument of `react`.

An event names the time of the answer and the things to look at; several things may have happened at once. It
need not list every difference of the snapshot (the planning state finds those itself): a thing that is left
out is answered by the next full plan.

    Event.between(before, after, now)    everything that differs between two snapshots
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from operator import attrgetter

from .diff import differing
from .snapshot import DecayedUsage, Job, JobId, Pool, Snapshot, Tenant
from .table import Cell


class Happened(StrEnum):
    """What happened to something."""

    ARRIVED = "job-arrived"
    ENDED = "job-ended"
    CHANGED = "job-changed"
    RELEASED = "pods-released"
    """A job that was being stopped holds nothing any more; it waits, or is gone."""
    NODE_LOST = "node-lost"
    NODE_ADDED = "node-added"
    """Or changed, or ready again."""
    POOL = "pool-changed"
    TENANT = "tenant-changed"
    """Its weight, quota, priorities, or its users' weights."""
    SPEED = "speed-reported"


_FREEING = (Happened.ENDED, Happened.RELEASED, Happened.NODE_ADDED, Happened.POOL)


@dataclass(frozen=True, slots=True)
class Happening:
    """One thing that happened."""

    kind: Happened
    name: str
    """Of the job (its id), node, pool, tenant or workload class."""
    pool: str = ""
    """Where resources became free (ENDED, RELEASED), or the node's pool."""
    tenant: str = ""
    """The tenant that held them."""

    @property
    def frees(self) -> bool:
        """Whether there may be more room than before."""
        return self.kind in _FREEING


@dataclass(frozen=True, slots=True)
class Event:
    """Things that happened, and the time of the answer (seconds since the epoch)."""

    at_s: float
    happened: tuple[Happening, ...] = ()

    @classmethod
    def arrived(cls, at_s: float, *jobs: JobId) -> Event:
        """New waiting jobs."""
        return cls(at_s, tuple(Happening(Happened.ARRIVED, job) for job in jobs))

    @classmethod
    def ended(cls, at_s: float, job: Job) -> Event:
        """A job that ran is gone (`job` as it was)."""
        return cls(at_s, (_freed(Happened.ENDED, job),))

    @classmethod
    def released(cls, at_s: float, job: Job) -> Event:
        """A job that was being stopped holds nothing any more (`job` as it was)."""
        return cls(at_s, (_freed(Happened.RELEASED, job),))

    @classmethod
    def between(cls, before: Snapshot, after: Snapshot, at_s: float) -> Event:
        """Everything that differs."""
        found = [
            *_jobs(before, after),
            *_nodes(before, after),
            *(Happening(Happened.POOL, pool.name, pool.name) for pool in _pools(before, after)),
            *_tenants(before, after),
            *_speeds(before, after),
        ]
        return cls(at_s, tuple(sorted(found, key=lambda one: (one.kind, one.name, one.pool))))


def _freed(kind: Happened, job: Job) -> Happening:
    pool = "" if job.run is None else job.run.placement.pool
    return Happening(kind, job.id, pool, job.tenant)


def _jobs(before: Snapshot, after: Snapshot) -> list[Happening]:
    gone, come = differing(before.jobs, after.jobs)
    known = {job.id: job for job in gone}
    found: list[Happening] = []
    for job in come:
        was = known.pop(job.id, None)
        if was is None:
            found.append(Happening(Happened.ARRIVED, job.id))
        elif was != job:
            if was.run is not None and (job.run is None or job.run.placement != was.run.placement):
                found.append(_freed(Happened.RELEASED, was))
            if _asks(job) != _asks(was) and not _only_stopped(was, job):
                found.append(Happening(Happened.CHANGED, job.id))
    return found + [_freed(Happened.ENDED, job) for job in known.values() if job.run is not None]


_CHANGE_BY_THEMSELVES = {"run", "remaining_work", "attained_s"}
_STEADY = attrgetter(*(one.name for one in fields(Job) if one.name not in _CHANGE_BY_THEMSELVES))


def _asks(job: Job) -> tuple[object, ...]:
    """The job without what changes by itself while it runs."""
    run = job.run
    place = None if run is None else (run.placement, run.started_at_s, run.releasing)
    return (*_STEADY(job), place)


_CHANGE_BY_A_STOP = {"preemptions", "last_move_at_s"}
_STEADY_WHEN_STOPPED = attrgetter(
    *(one.name for one in fields(Job) if one.name not in _CHANGE_BY_THEMSELVES | _CHANGE_BY_A_STOP)
)


def _only_stopped(was: Job, job: Job) -> bool:
    """Whether the job has lost its place, which RELEASED says, and asks for what it asked for."""
    return was.run is not None and job.run is None and _STEADY_WHEN_STOPPED(was) == _STEADY_WHEN_STOPPED(job)


def _nodes(before: Snapshot, after: Snapshot) -> list[Happening]:
    gone, come = differing(before.nodes, after.nodes)
    known = {node.name: node for node in gone}
    found: list[Happening] = []
    for node in come:
        was = known.pop(node.name, None)
        if was != node:
            lost = was is not None and was.ready and not node.ready
            kind = Happened.NODE_LOST if lost else Happened.NODE_ADDED
            found.append(Happening(kind, node.name, node.pool))
    return found + [Happening(Happened.NODE_LOST, node.name, node.pool) for node in known.values()]


def _pools(before: Snapshot, after: Snapshot) -> set[Pool]:
    """Pools that changed; all, if power domains did: more or less may run in any."""
    if before.domains is not after.domains and set(before.domains) != set(after.domains):
        return set(after.pools)
    return set(after.pools) - set(before.pools)


def _tenants(before: Snapshot, after: Snapshot) -> list[Happening]:
    known, now = ({_terms(tenant) for tenant in snapshot.tenants} for snapshot in (before, after))
    return [Happening(Happened.TENANT, tenant.name) for tenant in now - known]


def _terms(tenant: Tenant) -> Tenant:
    """The tenant without its usage, which changes by itself."""
    weights = tuple(replace(user, usage=DecayedUsage()) for user in tenant.users if user.weight != 1.0)
    return replace(tenant, usage=DecayedUsage(), users=weights)


def _speeds(before: Snapshot, after: Snapshot) -> list[Happening]:
    """Classes whose speed, memory or watts changed somewhere; a learned cell's interval alone does not count."""
    if before.table is after.table:
        return []
    gone, come = differing(before.table.cells, after.table.cells)
    changed = set(gone) ^ set(come)
    gone, come = differing(before.table.learned, after.table.learned)
    changed |= _means(gone) ^ _means(come)
    return [Happening(Happened.SPEED, name) for name in sorted({cell.workload_class for cell in changed})]


def _means(learned: list[Cell]) -> set[Cell]:
    return {replace(cell, low=None, high=None, samples=0) for cell in learned}
