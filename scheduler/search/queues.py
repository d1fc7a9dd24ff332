"""The waiting jobs of a snapshot in queues of equal requests, so that an answer to an event looks at their heads alone.

The jobs of a queue have one tenant, one user, the same request, and the same candidates worth their price; they stand in
the order in which they are tried (`start.order`). Jobs that were stopped once stand beside the queues: their order changes
with time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..model.snapshot import JobId

if TYPE_CHECKING:
    from .state import Assignment, RankedCandidate

Order = tuple[int, int, bool, float, float, JobId]
Request = tuple[object, ...]
Worth = tuple[tuple[int, int], ...] | None
Kind = tuple[str, str, Worth]
"""Tenant, user, and shapes and pods of the candidates that are worth their price (None: all)."""


def request_of(assignment: Assignment) -> Request:
    """What decides where a job fits; equal only while both jobs exist."""
    return id(assignment.option.shared), assignment.job.node_selector, assignment.job.required_domain


class WaitingQueues:
    """Queues that follow what is added and dropped. A job is sorted in when the queues are next looked at."""

    def __init__(self) -> None:
        self._fresh: dict[JobId, Assignment] = {}
        self._queues: dict[Request, dict[Kind, list[Order]]] = {}
        self._where: dict[JobId, tuple[Request, Kind, Order]] = {}
        self._lines: dict[str, list[Order]] = {}
        """The same jobs by tenant, in order."""
        self.stopped: dict[JobId, Assignment] = {}
        """Jobs that were stopped once."""

    def add(self, assignment: Assignment) -> None:
        """A job that waits."""
        kept = self._fresh if assignment.job.last_move_at_s is None else self.stopped
        kept[assignment.job.id] = assignment

    def drop(self, job: JobId) -> None:
        """The job waits no longer, or is another one now."""
        where = self._where.pop(job, None)
        if where is None:
            self._fresh.pop(job, None)
            self.stopped.pop(job, None)
            return
        request, kind, order = where
        queue, line = self._queues[request][kind], self._lines[kind[0]]
        del queue[bisect_left(queue, order)], line[bisect_left(line, order)]
        if not queue:
            del self._queues[request][kind]
            if not self._queues[request]:
                del self._queues[request]

    def sort_again(self, waiting: Iterable[Assignment]) -> None:
        """The order of jobs is another one now; these wait."""
        for kept in (self._fresh, self._queues, self._where, self._lines, self.stopped):
            kept.clear()
        for assignment in waiting:
            self.add(assignment)

    def settled(self, order: Callable[[Assignment], Order]) -> Mapping[Request, Mapping[Kind, list[Order]]]:
        """The queues, by request and kind. Each job is named by the end of its sort key."""
        grown: dict[int, list[Order]] = {}
        for assignment in self._fresh.values():
            own, job = order(assignment), assignment.job
            request, kind = request_of(assignment), (job.tenant, job.user, _worth(assignment.ranked or ()))
            self._where[job.id] = request, kind, own
            queue = self._queues.setdefault(request, {}).setdefault(kind, [])
            line = self._lines.setdefault(job.tenant, [])
            for grows in (queue, line):
                grows.append(own)
                grown[id(grows)] = grows
        for queue in grown.values():
            queue.sort()
        self._fresh.clear()
        return self._queues

    def line(self, tenant: str, order: Callable[[Assignment], Order]) -> Sequence[Order]:
        """The sort keys of all jobs of a tenant that stand in queues, in order."""
        self.settled(order)
        return self._lines.get(tenant, ())


def _worth(ranked: Sequence[RankedCandidate]) -> Worth:
    """Which candidates are worth their price; None: all."""
    if not ranked or ranked[-1].profit >= 0:
        return None
    return tuple(sorted((row.shape, row.candidate.pods) for row in ranked if row.profit >= 0))
