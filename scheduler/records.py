"""One record for every waiting job: new ones for those that were looked at, the last plan's for the rest.

A full plan looks at everybody. An answer to an event keeps what it did not touch, with the stamp of the plan
that made it, and says of the jobs that it stops, which can be hundreds, only that: why they wait is said once they
do. What a record says is worked out in `reasons.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace

from .books import Seat
from .fill import order
from .plans import MARKED, Action, Known, WaitCode, WaitingRecord
from .reasons import Book
from .round import Round
from .types import JobId


def records(
    round_: Round,
    blocked: Iterable[Seat],
    actions: Iterable[Action],
    identity: str,
    last: Known | None = None,
    touched: Set[JobId] = frozenset(),
) -> Known:
    """One record for every job that does not run or start now, in order of job id.

    Args:
        blocked: jobs that were tried in vain, in this order.
        last: records of an earlier plan, for jobs that were not looked at again; None: a full plan.
        touched: jobs that were looked at again.
    """
    made = _Records(round_, identity, last, touched)
    after = {action.job for action in actions if action.after}
    for seat in blocked:
        if seat.placement is None and (last is None or seat.job.run is None):
            made.tried(seat)
    for seat in round_.changed:
        if seat.waits_for_release or seat.job.id in after:
            made.add(seat, made.book.simple(seat, WaitCode.PREEMPTING))
        elif seat.placement is None and seat.job.run is not None and seat.job.id not in made.found:
            made.add(
                seat, made.book.record(seat) if last is None else made.book.simple(seat, WaitCode.RELEASING)
            )
    for seat in round_.books.releasing.values():
        if not made.keep_releasing(seat):
            made.add(seat, made.book.simple(seat, WaitCode.RELEASING))
    waiting = round_.books.waiting
    kept = made.kept()
    for job in sorted(waiting.keys() - made.found.keys() - kept.keys()):
        made.tried(waiting[job])
    return made.all(kept)


class _Records:
    """The records made so far."""

    def __init__(
        self, round_: Round, identity: str, last: Known | None, touched: Set[JobId] = frozenset()
    ) -> None:
        self.book = Book(round_)
        self.found: dict[JobId, WaitingRecord] = {}
        self._round = round_
        self._identity = identity
        self._last = Known.of(()) if last is None else last
        self._touched = touched
        self._full = last is None
        self._position: dict[str, int] = {}
        self._waiting: dict[str, list[Seat]] = {}
        self._queues: dict[str, dict[JobId, int]] = {}
        self._limited = {
            (record.tenant, record.resource)
            for job, record in self._last.marked.items()
            if job not in touched and record.code in (WaitCode.CEILING, WaitCode.BORROW_LIMIT)
        }

    def add(self, seat: Seat, record: WaitingRecord, position: int = 0) -> None:
        job = seat.job
        self.found[job.id] = record.stamped(
            job.id,
            record.offer or self.book.offer(seat, record.resource),
            position,
            self._identity,
            max(0.0, self._round.now - job.submitted_at_s),
        )

    def keep_releasing(self, seat: Seat) -> bool:
        """Take over the record of an earlier plan of a job that is still being stopped, if there is one."""
        known = self._last.marked.get(seat.job.id)
        if known is None or known.code is not WaitCode.RELEASING:
            return False
        self.found[seat.job.id] = known
        return True

    def kept(self) -> dict[JobId, WaitingRecord]:
        """The records of an earlier plan of the jobs that still wait and were not looked at again."""
        last, waiting = self._last, self._round.books.waiting
        kept = dict(last.by_job)
        for job in self._touched | (kept.keys() - waiting.keys()):
            kept.pop(job, None)
        for job, record in last.marked.items():
            if record.code is WaitCode.RELEASING:
                kept.pop(job, None)
        return kept

    def all(self, kept: dict[JobId, WaitingRecord]) -> Known:
        """The records made and those kept, in order of job id."""
        marked = {job: record for job, record in self._last.marked.items() if kept.get(job) is record}
        marked |= {job: record for job, record in self.found.items() if record.code in MARKED}
        kept |= self.found
        by_job = {job: kept[job] for job in sorted(kept)}
        return Known(tuple(by_job.values()), by_job, marked)

    def tried(self, seat: Seat) -> None:
        """A job without a place."""
        self.add(seat, self._behind(self.book.record(seat)), self._place(seat))

    def _place(self, seat: Seat) -> int:
        """The job's place in the queue of its tenant."""
        tenant = seat.job.tenant
        if self._full:
            self._position[tenant] = self._position.get(tenant, 0) + 1
            return self._position[tenant]
        if not self._waiting:
            for other in self._round.books.waiting.values():
                self._waiting.setdefault(other.job.tenant, []).append(other)
        if tenant not in self._queues:
            queue = sorted(order(self._round, other) for other in self._waiting[tenant])
            self._queues[tenant] = {key[-1]: number for number, key in enumerate(queue, 1)}
        return self._queues[tenant][seat.job.id]

    def _behind(self, record: WaitingRecord) -> WaitingRecord:
        """More quota helps the first job that waits for it; to those behind it nothing is promised."""
        if record.code not in (WaitCode.CEILING, WaitCode.BORROW_LIMIT):
            return record
        row = (record.tenant, record.resource)
        if row in self._limited:
            return replace(record, changes=tuple(c for c in record.changes if c.kind != "quota"))
        self._limited.add(row)
        return record
