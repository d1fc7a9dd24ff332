"""One record for every waiting job: new ones for those that were looked at, the last plan's for the rest.

A full plan looks at everybody. An answer to an event keeps what it did not touch, with the stamp of the plan
that made it. What a record says is worked out in `reasons.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from .books import Seat
from .fill import order
from .plans import Action, WaitCode, WaitingRecord
from .reasons import Book
from .round import Round
from .types import JobId


def records(
    round_: Round,
    blocked: Iterable[Seat],
    actions: Iterable[Action],
    identity: str,
    kept: Mapping[JobId, WaitingRecord] | None = None,
) -> tuple[WaitingRecord, ...]:
    """One record for every job that does not run or start now, in order of job id.

    Args:
        blocked: jobs that were tried in vain, in this order.
        kept: records of an earlier plan, for jobs that were not looked at again; None: a full plan.
    """
    made = _Records(round_, identity, kept)
    after = {action.job for action in actions if action.after}
    for seat in blocked:
        if seat.placement is None:
            made.tried(seat)
    for seat in round_.changed:
        if seat.waits_for_release or seat.job.id in after:
            made.add(seat, made.book.simple(seat, WaitCode.PREEMPTING))
        elif seat.placement is None and seat.job.run is not None and seat.job.id not in made.found:
            made.add(seat, made.book.record(seat))
    for seat in round_.books.releasing.values():
        if not made.keep(seat, WaitCode.RELEASING):
            made.add(seat, made.book.simple(seat, WaitCode.RELEASING))
    for seat in round_.books.waiting.values():
        if seat.job.id not in made.found and not made.keep(seat):
            made.tried(seat)
    return tuple(made.found[job] for job in sorted(made.found))


class _Records:
    """The records made so far."""

    def __init__(self, round_: Round, identity: str, kept: Mapping[JobId, WaitingRecord] | None) -> None:
        self.book = Book(round_)
        self.found: dict[JobId, WaitingRecord] = {}
        self._round = round_
        self._identity = identity
        self._kept = {} if kept is None else kept
        self._full = kept is None
        self._position: dict[str, int] = {}
        self._queues: dict[str, dict[JobId, int]] = {}
        self._limited = {
            (record.tenant, record.resource)
            for record in self._kept.values()
            if record.code in (WaitCode.CEILING, WaitCode.BORROW_LIMIT)
        }

    def add(self, seat: Seat, record: WaitingRecord, position: int = 0) -> None:
        job = seat.job
        self.found[job.id] = replace(
            record,
            job=job.id,
            offer=record.offer or self.book.offer(seat, record.resource),
            position=position,
            round=self._identity,
            waited_s=max(0.0, self._round.now - job.submitted_at_s),
        )

    def keep(self, seat: Seat, code: WaitCode | None = None) -> bool:
        """Take over the record of an earlier plan, if there is one (of this code)."""
        known = self._kept.get(seat.job.id)
        stale = known is None or (code is None and known.code is WaitCode.RELEASING)
        if known is None or stale or (code is not None and known.code is not code):
            return False
        self.found[seat.job.id] = known
        return True

    def tried(self, seat: Seat) -> None:
        """A job without a place."""
        self.add(seat, self._behind(self.book.record(seat)), self._place(seat))

    def _place(self, seat: Seat) -> int:
        """The job's place in the queue of its tenant."""
        tenant = seat.job.tenant
        if self._full:
            self._position[tenant] = self._position.get(tenant, 0) + 1
            return self._position[tenant]
        if tenant not in self._queues:
            queue = [other for other in self._round.books.waiting.values() if other.job.tenant == tenant]
            queue.sort(key=lambda other: order(self._round, other))
            self._queues[tenant] = {other.job.id: number for number, other in enumerate(queue, 1)}
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
