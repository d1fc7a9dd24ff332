"""The scheduling loop: snapshot → plan → orders, at once after an event and fully every so often.

    events ──► wake ──(debounce)──► snapshot ──► react ──► orders ──► each object's reconcile
    clock  ──► every round_period_s while something waits: plan instead of react

Between two full plans ``react`` answers what differs between the last snapshot and this one; what waits and was
not touched by that keeps its reason until the next full plan.

The round carries its orders out itself, through the same reconciles and under the same locks as everybody, and
waits for them before it looks again: a snapshot is never older than the admissions of the round before it. An
order names the resourceVersion it was made on; an object that changed since refuses it and waits for the next
round. ``plan`` runs in a thread, so that a long optimization holds up neither watches nor the lease.

Every plan goes through the independent checker before anything of it is carried out. A plan that it refuses is
dropped and made once more from the snapshot alone (no memo, no solver); if that is refused too, nothing is
carried out, and the next round begins afresh. ``busbar_refused_plans_total`` counts both.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from busbar.kube.errors import ApiError, ConnectionFailed
from busbar.operator.controller import Controller, Item, utc_now
from busbar.operator.errors import Fenced, PlanRefused
from busbar.operator.metrics import Metrics
from busbar.operator.orders import Admit, Foretold, Order, Release, Wait
from busbar.operator.pods import Pod
from busbar.operator.settings import Settings
from busbar.operator.snapshot import Seen, build
from busbar.operator.world import World
from busbar.scheduler import (
    Action,
    ActionKind,
    Event,
    Job,
    JobKind,
    Memo,
    Objective,
    Plan,
    Policy,
    SchedulerError,
    Snapshot,
    WaitingRecord,
    check_plan,
    early,
    plan,
    react,
    sentence,
)
from busbar.scheduler.learning import quarantined

log = logging.getLogger(__name__)


FAULTS_SAID = 5  # of a refused plan, in the log

RELEASE_REASONS = {
    ActionKind.PREEMPT: "Preempted",
    ActionKind.MOVE: "Moved",
    ActionKind.GROW: "Resized",
    ActionKind.SHRINK: "Resized",
}


def policy_of(settings: Settings) -> Policy:
    """How this cluster wants to decide."""
    return Policy(
        objective=Objective(settings.objective),
        usage_half_life_s=settings.usage_half_life_s,
        guarantee_reclaim_s=settings.guarantee_reclaim_s,
    )


@dataclass(frozen=True)
class Target:
    """The object that a job of the snapshot stands for."""

    item: Item
    version: str  # its resourceVersion when the snapshot was built
    index: int = 0


class Rounds:
    """See the module's head."""

    def __init__(
        self,
        world: World,
        controller: Controller,
        settings: Settings,
        metrics: Metrics,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._world, self._controller = world, controller
        self._settings, self._metrics = settings, metrics
        self._policy = policy or policy_of(settings)
        self._clock = clock
        self._wake = asyncio.Event()
        self._memo: Memo | None = None
        self._last: tuple[Snapshot, Plan] | None = None  # the round before
        self._explained: dict[str, tuple[str, str, float]] = {}
        self._waiting = False
        self.foretold: dict[str, Foretold] = {}  # by job: forecasts that the next round hands on
        self.after: Callable[[Snapshot], Awaitable[None]] | None = None  # told of each round's snapshot

    def wake(self) -> None:
        """Something changed that a plan depends on."""
        self._wake.set()

    @property
    def last(self) -> tuple[Snapshot, Plan] | None:
        """What was planned last, and on what; None before the first round and after a fault."""
        return self._last

    async def run(self) -> None:
        full_at = 0.0
        while True:
            period = self._settings.round_period_s
            try:
                # Not wait_for: in Python 3.11 it can swallow a cancellation that meets the event.
                async with asyncio.timeout(period):
                    await self._wake.wait()
                await asyncio.sleep(self._settings.round_debounce_s)
            except TimeoutError:
                if not self._waiting:
                    continue
            self._wake.clear()
            full = self._clock() - full_at >= period
            if full:
                full_at = self._clock()
            try:
                await self.once(full=full)
            except (ApiError, ConnectionFailed) as error:
                log.warning("round failed: %s", error)  # again at the next event, or in a period
                self._waiting = True
            except PlanRefused as error:
                log.error("nothing is carried out in this round: %s", error)
                self._waiting = True
            except SchedulerError as error:
                # A snapshot that cannot be planned on: say so loudly, and go on serving what runs.
                log.error("round refused code=%s: %s", type(error).__name__, error)
            except Fenced:
                raise
            except Exception:
                # A fault of ours: what runs is still served, read and ended; planning tries again.
                log.exception("round failed")
                self._memo = self._last = None
                self._waiting = True

    async def once(self, *, full: bool = True) -> Plan:
        """One round."""
        started = time.perf_counter()
        now = utc_now()
        snapshot = build(Seen.of(self._world), now, half_life_s=self._policy.usage_half_life_s)
        targets = self._targets(snapshot)
        made = await self._decide(snapshot, now.timestamp(), full)
        self._metrics.rounds.observe(time.perf_counter() - started)
        self._waiting = bool(made.waiting)
        reasons = Counter(str(r.code) for r in made.waiting)
        self._metrics.waiting.clear()
        for reason, count in reasons.items():
            self._metrics.waiting.labels(reason).set(count)
        self._metrics.quarantined.clear()
        for reason, count in Counter(r.fault for r in quarantined(snapshot.table)).items():
            self._metrics.quarantined.labels(reason).set(count)
        orders = self._orders(snapshot, made, targets)
        await asyncio.gather(*(self._controller.process(i, tuple(o)) for i, o in orders.items()))
        if any(not isinstance(o, Wait | Foretold) for each in orders.values() for o in each):
            # An order may have been refused (the object changed, the write failed): look whether it was done.
            asyncio.get_running_loop().call_later(self._settings.round_check_s, self.wake)
        if self.after is not None:
            await self.after(snapshot)
        return made

    async def _decide(self, snapshot: Snapshot, now: float, full: bool) -> Plan:
        """The plan for this snapshot, checked: a full one, or an answer to what changed since the last round.

        Raises:
            PlanRefused: the checker finds fault with it, and with another made from the snapshot alone.
        """
        if full or self._last is None:
            made, self._memo = await asyncio.to_thread(plan, snapshot, self._policy, now, self._memo)
        else:
            before, last = self._last
            made, self._memo = react(snapshot, last, Event.between(before, snapshot, now), self._memo)
        if await self._faults(snapshot, made):
            self._memo = self._last = None
            plain = replace(self._policy, solver=False)
            made, _ = await asyncio.to_thread(plan, snapshot, plain, now)
            if faults := await self._faults(snapshot, made):
                raise PlanRefused(f"version {made.version}: {'; '.join(faults[:FAULTS_SAID])}")
            # Its policy is not ours: nothing is answered on top of it, the next round plans afresh.
            return made
        if made.solver_error:
            log.warning("planned without the solver: %s", made.solver_error)
        self._last = (snapshot, made)
        return made

    async def _faults(self, snapshot: Snapshot, made: Plan) -> list[str]:
        """What the independent checker finds wrong with the plan."""
        faults = await asyncio.to_thread(check_plan, snapshot, made)
        if faults:
            self._metrics.refused_plans.inc()
            text = "; ".join(faults[:FAULTS_SAID])
            log.error("plan refused version=%d faults=%d: %s", made.version, len(faults), text)
        return faults

    def _targets(self, snapshot: Snapshot) -> dict[str, Target]:
        """Job id to object."""
        by_uid: dict[str, Target] = {}
        for kind, cache in (("TrainingJob", self._world.jobs), ("ModelService", self._world.services)):
            for key, obj in cache.items.items():
                by_uid[obj.metadata.uid] = Target(Item(kind, key), obj.metadata.resource_version or "")
        pods: dict[str, Pod] = {p.uid: p for p in self._world.pods.items.values() if p.queued}
        found: dict[str, Target] = {}
        for job in snapshot.jobs:
            uid, _, index = job.id.partition("/")
            target = by_uid.get(uid)
            if target is not None:
                found[job.id] = replace(target, index=int(index or 0))
            elif uid in pods:
                found[job.id] = Target(Item("Pod", pods[uid].key), "")
        return found

    def _orders(self, snapshot: Snapshot, made: Plan, targets: dict[str, Target]) -> dict[Item, list[Order]]:
        jobs = {job.id: job for job in snapshot.jobs}
        orders: dict[Item, list[Order]] = {}
        acted: set[str] = set()
        for action in made.actions:
            target = targets.get(action.job)
            if target is None:
                continue
            order = self._order(snapshot, action, jobs[action.job], target)
            self._metrics.actions.labels(str(action.kind), "ordered" if order else "early").inc()
            if order is not None:
                acted.add(action.job)
                orders.setdefault(target.item, []).append(order)
                log.info(
                    "plan action=%s object=%s index=%d reason=%s",
                    action.kind,
                    target.item,
                    target.index,
                    action.reason,
                )
        for record in made.waiting:
            target = targets.get(record.job)
            if target is not None and record.job not in acted and jobs[record.job].run is None:
                # A reason goes first; the forecast then waits for the next round.
                said = self._explain(record, target, jobs[record.job]) or self.foretold.pop(record.job, None)
                if said is not None:
                    orders.setdefault(target.item, []).append(said)
        for started in self.foretold.keys() - {record.job for record in made.waiting}:
            del self.foretold[started]
        for gone in [j for j in self._explained if j not in jobs]:
            del self._explained[gone]
        return orders

    def _order(self, snapshot: Snapshot, action: Action, job: Job, target: Target) -> Order | None:
        if action.kind is ActionKind.START:
            if action.to is None or early(snapshot, action):
                return None
            return Admit(action.to, action.reason, target.version, target.index)
        reason = RELEASE_REASONS[action.kind]
        taken = action.kind in (ActionKind.PREEMPT, ActionKind.SHRINK)
        return Release(reason, action.reason, target.version, target.index, taken=taken)

    def _explain(self, record: WaitingRecord, target: Target, job: Job) -> Wait | None:
        """The order to say why; None where it was said, or said something like it a moment ago."""
        text = sentence(record)
        code = str(record.code)
        was = self._explained.get(record.job)
        now = self._clock()
        said = was is not None and was[0] == code and not self._unsaid(target, code)
        if said and was is not None and (was[1] == text or now - was[2] < self._settings.explain_period_s):
            return None
        self._explained[record.job] = (code, text, now)
        return Wait(code, text, record_for_members(record), target.index)

    def _unsaid(self, target: Target, code: str) -> bool:
        """Whether the object's status does not say so, whatever we remember."""
        if target.item.kind == "Pod":
            return False
        cache: Any = self._world.jobs if target.item.kind == "TrainingJob" else self._world.services
        obj = cache.items.get(target.item.key)
        status = obj.status if obj is not None else None
        return status is None or status.reason != code


def record_for_members(record: WaitingRecord) -> dict[str, Any]:
    """The record as it may stand in a tenant's object: amounts, and no other tenant's name."""
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
        "holders": holders or None,
        "changes": [{"kind": c.kind, "current": c.current, "needed": c.needed} for c in record.changes]
        or None,
    }
    return {k: v for k, v in fields.items() if v is not None}


def matters(kind: str, old: Any, new: Any) -> bool:
    """Whether a change of an object can change a plan; progress and heartbeats do not."""
    if old is None or new is None:
        return True
    if kind == "Pod":
        return _pod_facts(old) != _pod_facts(new)
    if kind == "TrainingJob":
        return _job_facts(old) != _job_facts(new)
    if kind == "ModelService":
        return _service_facts(old) != _service_facts(new)
    if kind in ("AcceleratorPool", "Tenant", "PerformanceProfile"):
        return bool(old.metadata.generation != new.metadata.generation)
    return kind == "Node"


def _pod_facts(pod: Pod) -> tuple[object, ...]:
    return (pod.uid, pod.place, pod.ended, pod.gated, pod.deleting, pod.draining_since, pod.requests)


def _job_facts(job: Any) -> tuple[object, ...]:
    status = job.status
    facts = (
        (status.phase, status.admission and status.admission.id, status.release, status.retry_at)
        if status
        else ()
    )
    return (job.metadata.uid, job.metadata.generation, job.metadata.deletion_timestamp, *facts)


def _service_facts(service: Any) -> tuple[object, ...]:
    desired = service.status.desired_replicas if service.status else None
    return (service.metadata.uid, service.metadata.generation, service.metadata.deletion_timestamp, desired)


__all__ = ["JobKind", "Rounds", "Target", "matters", "record_for_members"]
