"""Before anything is made: where it would run, when, in which mode, at what cost, or exactly why not.

    draft ── dry run at the API server (schema, rules, policies) ── snapshot with the draft from the operator
          ── plan in a thread ── the draft's action, or its waiting record in words
          ── if it waits: when it would start, from the operator, which alone remembers how jobs went

There is one snapshot builder (the operator's) and one planner (`busbar.scheduler`); the answer is what the
next scheduling round would say. Members read amounts; only admins read other tenants' names and node names.
A forecast is times and counts, and says nothing of whose jobs it was learned from.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from busbar.api.authorization import Authorizer
from busbar.api.clock import Clock, utc_now
from busbar.api.errors import Invalid, Unavailable
from busbar.api.identity import Caller
from busbar.api.kubernetes import Object
from busbar.api.objects import Objects, metadata_of
from busbar.api.operator_client import Snapshots
from busbar.api.settings import Settings
from busbar.kube.contracts.forecast import ForecastAnswer
from busbar.kube.resources import Resource

if TYPE_CHECKING:
    from busbar.scheduler import Action, Job, Plan, Policy, Snapshot

log = logging.getLogger(__name__)

DRAFT_NAME = "preview"
PLANS_AT_ONCE = 2
"""Planning is pure computing: more threads would only take time from everybody's other requests."""
DRAFT_ID = "draft"
"""The scheduler's id of a draft in the operator's snapshot."""


@dataclass(frozen=True)
class Change:
    """The smallest change of one kind that would let it start now."""

    kind: str
    current: str
    needed: str


@dataclass(frozen=True)
class Preview:
    """The answer. Empty strings and None mean "not known" or "does not apply"."""

    starts_now: bool
    possible: bool
    """False: waiting will not help, something must be changed."""
    reason: str
    """One sentence: why here, or exactly why not."""
    when: str
    """Now, after which preemptions, or that it waits, in words."""
    code: str = ""
    """The scheduler's machine-readable reason when it waits."""
    pool: str = ""
    accelerator: str = ""
    mode: str = ""
    pods: int = 0
    accelerators: float = 0.0
    """All pods together."""
    nodes: tuple[str, ...] = ()
    """For admins."""
    cost_per_hour: float | None = None
    finishes_in_seconds: float | None = None
    finishes_in_low_seconds: float | None = None
    finishes_in_high_seconds: float | None = None
    estimated_cost: float | None = None
    changes: tuple[Change, ...] = field(default_factory=tuple)
    start_p50_seconds: float | None = None
    """Until it starts, if it waits: as likely sooner as later."""
    start_p90_seconds: float | None = None
    """With nine chances in ten to be sooner."""
    end_p50_seconds: float | None = None
    """Until it has ended, where its speed is known."""
    end_p90_seconds: float | None = None
    past_forecasts: int = 0
    """Earlier forecasts here whose moment has passed."""
    past_before_p50: float | None = None
    """How many of them, as a share, started before the median that was told (0.5 would be perfect)."""
    past_before_p90: float | None = None


class Previews:
    """Plans drafts for callers."""

    def __init__(
        self,
        objects: Objects,
        snapshots: Snapshots,
        authorizer: Authorizer,
        settings: Settings,
        clock: Clock = utc_now,
    ) -> None:
        self._objects = objects
        self._snapshots = snapshots
        self._authorizer = authorizer
        self._settings = settings
        self._now = clock
        self._planning = asyncio.Semaphore(PLANS_AT_ONCE)

    async def preview(self, caller: Caller, resource: Resource, namespace: str, body: Object) -> Preview:
        """What would happen to the draft.

        Raises:
            Invalid: it would not even be created; says which field.
            Unavailable: the operator is away.
        """
        body = dict(body)
        meta = dict(metadata_of(body))
        if not meta.get("name") and not meta.get("generateName"):
            meta["name"] = DRAFT_NAME
        body["metadata"] = meta
        draft = await self._objects.draft(caller, resource, namespace, body)
        stored = await self._objects.dry_run(resource, draft)
        stored.setdefault("kind", resource.kind)
        stored.setdefault("apiVersion", resource.api_version)
        if (stored.get("spec") or {}).get("suspend"):
            return Preview(
                starts_now=False,
                possible=True,
                reason="It is created suspended and starts when spec.suspend becomes false.",
                when="When it is resumed",
                code="Suspended",
            )
        snapshot = await self._snapshots.with_draft(stored)
        admin = await self._authorizer.is_admin(caller)
        async with self._planning:
            found = await asyncio.to_thread(answer, snapshot, stored, self._now(), admin, self._policy())
        if found.starts_now or not found.possible or not found.code:
            return found
        try:
            return with_forecast(found, await self._snapshots.forecast(stored))
        except (Invalid, Unavailable) as error:
            log.info("a preview has no forecast: %s", error)  # why it waits is worth showing without
            return found

    def _policy(self) -> Policy:
        """The operator's, without the part that takes seconds."""
        from busbar.scheduler import Objective, Policy

        return Policy(
            objective=Objective(self._settings.objective),
            usage_half_life_s=self._settings.usage_half_life_s,
            guarantee_reclaim_s=self._settings.guarantee_reclaim_s,
            solver=False,
        )


def answer(
    snapshot: Snapshot, draft: Object, now: datetime, admin: bool, policy: Policy | None = None
) -> Preview:
    """Plan the snapshot and read off what became of the draft. Pure, and slow enough for a thread."""
    from busbar.scheduler import ActionKind, Policy, plan

    jobs = jobs_of(snapshot, draft)
    service = draft["kind"] == "ModelService"
    if not jobs:
        reason = (
            "It asks for no replicas now: it starts when a request arrives."
            if service
            else "The operator made nothing to place of this object; read its message after creating it."
        )
        return Preview(
            starts_now=False,
            possible=True,
            reason=reason,
            when="With the first request" if service else "Not known",
        )
    decided, _ = plan(snapshot, policy or Policy(solver=False), now.timestamp(), None)
    starts = {a.job: a for a in decided.actions if a.kind is ActionKind.START}
    started = [job for job in jobs if job.id in starts]
    if started:
        return _starting(snapshot, started[0], starts[started[0].id], admin)
    return _waiting(snapshot, jobs[0], decided, admin)


def jobs_of(snapshot: Snapshot, draft: Object) -> list[Job]:
    """The scheduler's jobs of a draft: the one with the id that the operator gives drafts, or those that
    wait under the draft's own name (a draft of something that exists already)."""
    found = [job for job in snapshot.jobs if job.id == DRAFT_ID]
    if found:
        return found
    meta = draft["metadata"]
    key = f"{meta['namespace']}/{meta.get('name') or ''}"
    return [job for job in snapshot.jobs if job.run is None and key in (job.key, job.service)]


def _starting(snapshot: Snapshot, job: Job, action: Action, admin: bool) -> Preview:
    placement = action.to
    assert placement is not None  # a start always says where
    pool = next(p for p in snapshot.pools if p.name == placement.pool)
    count = placement.accelerators_m / 1000
    cost = pool.price_per_hour * count
    after = len(action.after)
    speed = _speeds(snapshot, job, action)
    seconds = [job.remaining_work / s for s in speed] if speed and job.remaining_work else [None, None, None]
    finish = seconds[0]
    return Preview(
        starts_now=not after,
        possible=True,
        reason=as_sentence(action.reason),
        when="Now" if not after else f"As soon as {after} preempted job{'s' if after > 1 else ''} made room",
        pool=placement.pool,
        accelerator=placement.accelerator,
        mode=placement.mode,
        pods=placement.pods,
        accelerators=count,
        nodes=placement.nodes if admin else (),
        cost_per_hour=round(cost, 4),
        finishes_in_seconds=finish,
        finishes_in_low_seconds=seconds[2],
        finishes_in_high_seconds=seconds[1],
        estimated_cost=round(cost * finish / 3600, 4) if finish is not None else None,
    )


def _speeds(snapshot: Snapshot, job: Job, action: Action) -> tuple[float, float, float] | None:
    """Mean, low and high speed at the placement, if the table knows the class."""
    from busbar.scheduler import TableView

    placement = action.to
    table = TableView(snapshot.table)
    if placement is None or not job.workload_class or not table.knows(job.workload_class, job.tenant):
        return None
    found = table.estimate(
        job.workload_class, placement.accelerator, placement.mode, placement.accelerators_m, job.tenant
    )
    if found is None or found.speed <= 0 or found.low <= 0 or not math.isfinite(found.speed):
        return None
    return found.speed, found.low, found.high


def _waiting(snapshot: Snapshot, job: Job, decided: Plan, admin: bool) -> Preview:
    from busbar.scheduler import sentence
    from busbar.scheduler.plans import NEVER

    record = decided.record(job.id)
    if record is None:
        return Preview(
            starts_now=False,
            possible=True,
            reason="The scheduler did not decide about it in this round; it will look again in the next.",
            when="Not known",
        )
    never = record.code in NEVER
    if never:
        when = "Never, unless something is changed"
    elif record.position > 1:
        when = f"After {record.position - 1} other waiting job{'s' if record.position > 2 else ''} of your tenant"
    else:
        when = "When what it waits for is free"
    return Preview(
        starts_now=False,
        possible=not never,
        reason=sentence(record, admin),
        when=when,
        code=record.code.value,
        changes=tuple(Change(c.kind, c.current, c.needed) for c in record.changes),
    )


def with_forecast(waits: Preview, found: ForecastAnswer) -> Preview:
    """The preview of a waiting draft with what can be said of when it starts."""
    p50, p90 = found.start_p50_seconds, found.start_p90_seconds
    when = (
        waits.when
        if p50 is None or p90 is None
        else f"Likely in {span(p50)}, nine times in ten within {span(p90)}"
    )
    return replace(
        waits,
        when=when,
        start_p50_seconds=p50,
        start_p90_seconds=p90,
        end_p50_seconds=found.end_p50_seconds,
        end_p90_seconds=found.end_p90_seconds,
        past_forecasts=found.promises,
        past_before_p50=found.before_p50,
        past_before_p90=found.before_p90,
    )


def as_sentence(text: str) -> str:
    """With a capital and a full stop."""
    text = text.strip()
    if not text:
        return ""
    return text[0].upper() + text[1:] + ("" if text[-1] in ".!?" else ".")


def span(seconds: float | None) -> str:
    """A duration for people."""
    if seconds is None or not math.isfinite(seconds):
        return "not known"
    if seconds < 90:
        return f"{round(seconds)} s"
    left = timedelta(seconds=round(seconds))
    hours, minutes = divmod(left.seconds // 60, 60)
    if left.days:
        return f"{left.days} d {hours} h"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"
