"""One record for every waiting job: new ones for jobs that were examined, the last plan's for the rest.

A full plan examines every job. An answer to an event keeps the records it did not touch, with the id of the
plan that made them. Of the jobs that it stops, which can be hundreds, it reports only that they are being
stopped; why they wait is reported once they do. `pending_reasons.py` decides what a record says.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from functools import partial
from itertools import filterfalse

from ..model.plans import REACT_CODES, Action, RecordIndex, WaitCode, WaitingRecord
from ..model.snapshot import JobId, Reservation
from ..search.queues import Order
from ..search.round import Round
from ..search.start import order
from ..search.state import Assignment
from .pending_reasons import PendingReasons


def records(
    round_: Round,
    blocked: Iterable[Assignment],
    actions: Iterable[Action],
    identity: str,
    last: RecordIndex | None = None,
    touched: Set[JobId] = frozenset(),
    reservations: Iterable[Reservation] = (),
) -> RecordIndex:
    """One record for every job that does not run or start now, in order of job id.

    Args:
        blocked: jobs that could not start, in the order in which they were tried.
        last: records of an earlier plan, for jobs that were not examined again; None: a full plan.
        touched: jobs that were examined again.
        reservations: of this plan; all of them were examined.
    """
    made = _Records(round_, identity, last, touched)
    made.reservations = {one.job: one for one in reservations}
    after = {action.job for action in actions if action.after}
    for promise in round_.promised_places.values():
        made.keep_promised(promise.hold.holder)
    for assignment in blocked:
        if assignment.placement is None and (last is None or assignment.job.run is None):
            made.tried(assignment)
    for assignment in round_.changed:
        if assignment.job.id in made.found:
            continue
        if assignment.waits_for_release or assignment.job.id in after:
            made.add(assignment, made.reasons.simple(assignment, WaitCode.PREEMPTING))
        elif assignment.placement is None and assignment.job.run is not None:
            made.add(
                assignment,
                made.reasons.record(assignment)
                if last is None
                else made.reasons.simple(assignment, WaitCode.RELEASING),
            )
    for assignment in round_.state.releasing.values():
        if not made.keep_releasing(assignment):
            made.add(assignment, made.reasons.simple(assignment, WaitCode.RELEASING))
    waiting, known = round_.state.waiting, made.known
    gone = made.gone()
    unknown = {*filterfalse(known.__contains__, waiting), *filter(waiting.__contains__, gone)}
    unknown.update(one.job.id for one in round_.lost_promised_places())
    for job in sorted(filterfalse(made.found.__contains__, unknown)):
        made.tried(waiting[job])
    return made.all(gone)


class _Records:
    """The records made so far."""

    def __init__(
        self, round_: Round, identity: str, last: RecordIndex | None, touched: Set[JobId] = frozenset()
    ) -> None:
        self.reasons = PendingReasons(round_)
        self.found: dict[JobId, WaitingRecord] = {}
        self.reservations: dict[JobId, Reservation] = {}
        self._round = round_
        self._identity = identity
        self._last = RecordIndex.of(()) if last is None else last
        self._touched = touched
        self._full = last is None
        self._position: dict[str, int] = {}
        self._lines: dict[str, list[Order]] = {}
        self._beside: defaultdict[str, list[Assignment]] | None = None
        """Jobs that wait and do not stand in the state's queues, by tenant."""
        self._limited = {
            (record.tenant, record.resource)
            for job, record in self._last.with_react_code.items()
            if job not in touched and record.code in (WaitCode.CEILING, WaitCode.BORROW_LIMIT)
        }

    def add(self, assignment: Assignment, record: WaitingRecord, position: int = 0) -> None:
        job = assignment.job
        self.found[job.id] = record.stamped(
            job.id,
            record.offer or self.reasons.offer(assignment, record.resource),
            position,
            self._identity,
            max(0.0, self._round.now - job.submitted_at_s),
            self.reservations.get(job.id),
        )

    def keep_releasing(self, assignment: Assignment) -> bool:
        """Keep the earlier record of a job that is still being stopped, if there is one."""
        known = self._last.with_react_code.get(assignment.job.id)
        if known is None or known.code is not WaitCode.RELEASING:
            return False
        self.found[assignment.job.id] = known
        return True

    def keep_promised(self, assignment: Assignment) -> None:
        """Keep the earlier record of a job that still has the place that it was promised."""
        job = assignment.job.id
        if self._round.keeps_promised_place(assignment):
            known, reservation = self._last.with_react_code[job], self.reservations.get(job)
            if known.reservation != reservation:
                own = known.offer, known.position, known.round, known.waited_s
                known = known.stamped(job, *own, reservation)
            self.found[job] = known

    @property
    def known(self) -> Mapping[JobId, WaitingRecord]:
        """The earlier records."""
        return self._last.by_job

    def gone(self) -> set[JobId]:
        """The jobs whose earlier record does not stand any more: they were examined again, or do not wait."""
        known, waiting = self.known, self._round.state.waiting
        gone = {job for job in self._touched if job in known}
        gone.update(filterfalse(waiting.__contains__, known))
        releasing = self._last.with_react_code.items()
        gone.update(job for job, record in releasing if record.code is WaitCode.RELEASING)
        return gone

    def all(self, gone: set[JobId]) -> RecordIndex:
        """The records made and those kept, in order of job id."""
        by_job = dict(self.known)
        for job in filterfalse(self.found.__contains__, gone):
            del by_job[job]
        in_order = all(map(by_job.__contains__, self.found))
        by_job |= self.found  # a record in place of another keeps its place
        if not in_order:
            names = sorted(by_job)
            by_job = dict(zip(names, map(by_job.__getitem__, names), strict=True))
        with_react_code = {
            job: record for job, record in self._last.with_react_code.items() if by_job.get(job) is record
        }
        with_react_code |= {job: record for job, record in self.found.items() if record.code in REACT_CODES}
        return RecordIndex(tuple(by_job.values()), by_job, with_react_code)

    def tried(self, assignment: Assignment) -> None:
        """Add the record of a job without a place."""
        self.add(assignment, self._behind(self.reasons.record(assignment)), self._place(assignment))

    def _place(self, assignment: Assignment) -> int:
        """The job's position in the queue of its tenant."""
        tenant = assignment.job.tenant
        if self._full:
            self._position[tenant] = self._position.get(tenant, 0) + 1
            return self._position[tenant]
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = self._line(tenant)
        return bisect_left(line, order(self._round, assignment)) + 1

    def _line(self, tenant: str) -> list[Order]:
        """The sort keys of the tenant's jobs that wait, in order."""
        round_, waiting, queues = self._round, self._round.state.waiting, self._round.state.queues
        if self._beside is None:
            self._beside = defaultdict(list)
            moved = (one for one in round_.changed if one.job.run is not None)
            for one in (*queues.stopped.values(), *moved):
                if one.job.id in waiting:
                    self._beside[one.job.tenant].append(one)
        line = [key for key in queues.line(tenant, partial(order, round_)) if key[-1] in waiting]
        line += [order(round_, one) for one in self._beside[tenant]]
        line.sort()
        return line

    def _behind(self, record: WaitingRecord) -> WaitingRecord:
        """More quota, or more watts, help the first job that waits for them; to those behind it nothing is promised."""
        if record.code is WaitCode.POWER:
            row = ("", record.domain)
        elif record.code in (WaitCode.CEILING, WaitCode.BORROW_LIMIT):
            row = (record.tenant, record.resource)
        else:
            return record
        if row in self._limited:
            return replace(
                record, changes=tuple(c for c in record.changes if c.kind not in ("quota", "watts"))
            )
        self._limited.add(row)
        return record
