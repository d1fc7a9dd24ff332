"""What waiting objects are told after a plan: the reason, the forecast, the place that is collected, the deadline's share.

A job is looked at again where the plan's record of it is another, and after a full plan; it is told nothing that its status
says already, nor, within ``explain_period_s``, another sentence of the same reason. Runs in the thread of the round; when
it is written is the matter of ``sentences.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from busbar.operator.decisions import Deadline, Decision, Forecast, Reserved, Wait
from busbar.operator.queue.controller import Item
from busbar.operator.scheduling.builder import SnapshotBuilder
from busbar.operator.training.deadline import is_told
from busbar.operator.training.reservation import moved, same_place
from busbar.operator.watch.caches import Caches
from busbar.operator.write.status import clip
from busbar.scheduler import JobId, Plan, Reservation, WaitingRecord, sentence
from busbar.scheduler.model.diff import differing

Told = dict[Item, tuple[list[Decision], bool]]
"""By object, what it is told, and whether that goes at once."""


@dataclass(frozen=True)
class Target:
    """The object that a job of the snapshot stands for."""

    item: Item
    version: str  # its resourceVersion when the snapshot was built
    index: int = 0


def target_of(builder: SnapshotBuilder, job: JobId) -> Target | None:
    found = builder.target(job)
    return None if found is None else Target(*found)


class Telling:
    """See the module's head."""

    def __init__(self, caches: Caches, explain_period_s: float, clock: Callable[[], float]) -> None:
        self._caches, self._period_s, self._clock = caches, explain_period_s, clock
        self._looked_at: tuple[WaitingRecord, ...] = ()
        """The records of the round before."""
        self._explained: dict[str, tuple[str, str, float]] = {}
        """By job: the code and the sentence that it was told last, and when."""

    def keep(self, builder: SnapshotBuilder) -> None:
        """Forgets jobs that are gone."""
        for gone in [job for job in self._explained if builder.job(JobId(job)) is None]:
            del self._explained[gone]

    def reasons(
        self,
        builder: SnapshotBuilder,
        made: Plan,
        acted: set[JobId],
        forecasts: Mapping[str, Forecast],
        *,
        full: bool,
    ) -> Told:
        """What waiting objects are told, and whether it goes at once: the reason is new to the object's status, or a
        place is won or lost."""
        places = {reservation.job: reservation for reservation in made.reservations}
        told: Told = {}
        for record in self._to_tell(made, {*places, *builder.reserved(), *forecasts}, full=full):
            job, target = builder.job(record.job), target_of(builder, record.job)
            if target is None or job is None or job.run is not None or record.job in acted:
                continue
            reserved, won_or_lost = self.reserved(places.get(record.job), target, made.at_s)
            wait, is_new = self.explain(record, target, at_once=won_or_lost)
            news = (wait, forecasts.get(record.job), reserved)
            found = [d for d in news if d is not None]
            if found:
                before, was_new = told.get(target.item, ([], False))
                told[target.item] = ([*before, *found], was_new or is_new or won_or_lost)
        return told

    def deadlines(self, builder: SnapshotBuilder, made: Plan, told: Told) -> set[Item]:
        """What jobs with deadlines are told, waiting or not, at once: added to `told`; the jobs."""
        shares = {share.job: share for share in made.deadlines}
        found: set[Item] = set()
        for name in builder.with_deadline():
            target = target_of(builder, name)
            job = self._caches.jobs.items.get(target.item.key) if target is not None else None
            if target is None or job is None:
                continue
            found.add(target.item)
            share, status = shares.get(name), job.status
            if not is_told(status.deadline if status else None, job.spec.deadline, share, made.at_s):
                before, _ = told.get(target.item, ([], False))
                told[target.item] = ([*before, Deadline(share)], True)
        return found

    def _to_tell(self, made: Plan, others: set[str], *, full: bool) -> Iterator[WaitingRecord]:
        """The records that are new, and those of the jobs named; all of them after a full plan."""
        before, self._looked_at = self._looked_at, made.waiting
        if full:
            yield from made.waiting
            return
        _, come = differing(before, made.waiting)
        yield from come
        if others := others.difference(record.job for record in come):
            yield from (record for record in made.waiting if record.job in others)

    def reserved(
        self, place: Reservation | None, target: Target, now_s: float
    ) -> tuple[Reserved | None, bool]:
        """The decision that writes the place of a TrainingJob, and whether the job got or lost it.

        None where people would see no difference.
        """
        job = self._caches.jobs.items.get(target.item.key) if target.item.kind == "TrainingJob" else None
        if job is None:
            return None, False
        written = job.status.reservation if job.status is not None else None
        if same_place(written, place) and not moved(written, place, now_s):
            return None, False
        return Reserved(place), (written is None) != (place is None)

    def explain(
        self, record: WaitingRecord, target: Target, *, at_once: bool = False
    ) -> tuple[Wait | None, bool]:
        """The decision that writes why the job waits, and whether its code is new to the object.

        None where the status says it, or where only the sentence differs and was written recently, perhaps by an
        earlier process; ``at_once``: another sentence goes with a write that is due anyhow.
        """
        text, code, now = sentence(record), str(record.code), self._clock()
        was = self._explained.get(record.job)
        written = self._written(target)
        if was is None and written is not None and written[0] == code:
            was = self._explained[record.job] = (code, clip(written[1]), now)
        is_new = was is None or was[0] != code or (written is not None and written[0] != code)
        period_s = 0.0 if at_once else self._period_s
        recent = was is not None and (was[1] == clip(text) or now - was[2] < period_s)
        if recent and not is_new:
            return None, False
        self._explained[record.job] = (code, clip(text), now)
        return Wait(code, text, record_for_members(record), target.index), is_new

    def _written(self, target: Target) -> tuple[str, str] | None:
        """Reason and message of the object's status; None for a pod of another controller, which has none."""
        if target.item.kind == "Pod":
            return None
        cache: Any = self._caches.jobs if target.item.kind == "TrainingJob" else self._caches.services
        obj = cache.items.get(target.item.key)
        status = obj.status if obj is not None else None
        return (str(status.reason or ""), str(status.message or "")) if status is not None else ("", "")


def record_for_members(record: WaitingRecord) -> dict[str, Any]:
    """The record as members of the tenant may read it: amounts, and no other tenant's name."""
    holders = [
        {"amount": h.amount_m, "guaranteed": h.guaranteed, "own": h.tenant == record.tenant}
        for h in record.holders
    ]
    fields: dict[str, Any] = {
        "code": str(record.code),
        "resource": record.resource,
        "requested": record.requested,
        "entitled": record.entitled,
        "allocated": record.allocated,
        "limit": record.limit,
        "free": record.free,
        "position": record.position,
        "mode": record.mode or None,
        "domain": record.domain or None,
        "closed": [{"why": c.why, "nodes": c.nodes} for c in record.closed] or None,
        "holders": holders or None,
        "changes": [{"kind": c.kind, "current": c.current, "needed": c.needed} for c in record.changes]
        or None,
    }
    return {k: v for k, v in fields.items() if v is not None}
