"""The waiting jobs of a snapshot in queues of equal requests, so that an answer to an event looks at their heads alone.

The jobs of a queue have one tenant, one user, the same request, and the same candidates worth their price; they stand in
the order in which they are tried (`start.order`). Jobs that were stopped once stand beside the queues, in groups by the same
rule: their order changes with time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from ..model.snapshot import JobId

if TYPE_CHECKING:
    from .state import Assignment, RankedCandidate

T = TypeVar("T")

Order = tuple[int, int, bool, float, float, JobId]
Request = tuple[object, ...]
Worth = tuple[tuple[int, int], ...] | None
Kind = tuple[str, str, Worth]
"""Tenant, user, and shapes and pods of the candidates that are worth their price (None: all)."""


Group = dict[JobId, "Assignment"]
"""Jobs of one request and kind in no order."""


def request_of(assignment: Assignment) -> Request:
    """What decides where a job fits; equal only while both jobs exist."""
    return id(assignment.option.shared), assignment.job.node_selector, assignment.job.required_domain


def kind_of(assignment: Assignment) -> Kind:
    """Whose job it is and what of its request is worth its price. Its candidates have been ranked."""
    return assignment.job.tenant, assignment.job.user, _worth(assignment.ranked or ())


class WaitingQueues:
    """Queues that follow what is added and dropped. A job is sorted in when the queues are next looked at."""

    def __init__(self) -> None:
        self._fresh: dict[JobId, Assignment] = {}
        self._queues: dict[Request, dict[Kind, list[Order]]] = {}
        self._groups: dict[Request, dict[Kind, Group]] = {}
        self._where: dict[JobId, tuple[Request, Kind, Order | None]] = {}
        """In which queue a job stands; without an order: in which group."""
        self._lines: dict[str, list[Order]] = {}
        """The same jobs by tenant, in order."""
        self.stopped: dict[JobId, Assignment] = {}
        """Jobs that were stopped once."""
        self._apart: dict[JobId, Assignment] = {}
        """Of these, those that are in no group yet."""

    def add(self, assignment: Assignment) -> None:
        """A job that waits."""
        if assignment.job.last_move_at_s is None:
            self._fresh[assignment.job.id] = assignment
        else:
            self.stopped[assignment.job.id] = self._apart[assignment.job.id] = assignment

    def drop(self, job: JobId) -> None:
        """The job waits no longer, or is another one now."""
        where = self._where.pop(job, None)
        for kept in (self._fresh, self.stopped, self._apart):
            kept.pop(job, None)
        if where is None:
            return
        request, kind, order = where
        if order is None:
            del self._groups[request][kind][job]
            _forget_empty(self._groups, request, kind)
        else:
            queue, line = self._queues[request][kind], self._lines[kind[0]]
            del queue[bisect_left(queue, order)], line[bisect_left(line, order)]
            _forget_empty(self._queues, request, kind)

    def sort_again(self, waiting: Iterable[Assignment]) -> None:
        """The order of jobs is another one now; these wait."""
        for kept in (
            self._fresh,
            self._queues,
            self._groups,
            self._where,
            self._lines,
            self.stopped,
            self._apart,
        ):
            kept.clear()
        for assignment in waiting:
            self.add(assignment)

    def settled(self, order: Callable[[Assignment], Order]) -> Mapping[Request, Mapping[Kind, list[Order]]]:
        """The queues, by request and kind. Each job is named by the end of its sort key."""
        grown: dict[int, list[Order]] = {}
        for assignment in self._fresh.values():
            own, job = order(assignment), assignment.job
            request, kind = request_of(assignment), kind_of(assignment)
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

    def groups(self, ranked: Callable[[Assignment], object]) -> Mapping[Request, Mapping[Kind, Group]]:
        """The jobs that were stopped once, by request and kind.

        Args:
            ranked: ranks the candidates of a job.
        """
        for job, assignment in self._apart.items():
            ranked(assignment)
            request, kind = request_of(assignment), kind_of(assignment)
            self._where[job] = request, kind, None
            self._groups.setdefault(request, {}).setdefault(kind, {})[job] = assignment
        self._apart.clear()
        return self._groups

    def line(self, tenant: str, order: Callable[[Assignment], Order]) -> Sequence[Order]:
        """The sort keys of all jobs of a tenant that stand in queues, in order."""
        self.settled(order)
        return self._lines.get(tenant, ())


def _forget_empty(rows: dict[Request, dict[Kind, T]], request: Request, kind: Kind) -> None:
    if not rows[request][kind]:
        del rows[request][kind]
        if not rows[request]:
            del rows[request]


def _worth(ranked: Sequence[RankedCandidate]) -> Worth:
    """Which candidates are worth their price; None: all."""
    if not ranked or ranked[-1].profit >= 0:
        return None
    return tuple(sorted((row.shape, row.candidate.pods) for row in ranked if row.profit >= 0))
