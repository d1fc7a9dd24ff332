"""The scheduling loop: snapshot → plan → decisions, at once after an event and with a full plan periodically.

    events ──► wake ──(debounce)──► snapshot ──► react ──► decisions ──► each object's reconcile
    clock  ──► every round_period_s while something waits, less often where that is costly: plan instead of react

An event wakes a round if it asks for something or frees something (``wakes.py``); how soon, and how often a full plan is
made, follows from what rounds cost (``pace.py``).

Between two full plans ``react`` plans only for what differs between the last snapshot and this one; a waiting job
that is not affected keeps its reason until the next full plan.

The round runs the reconciles that admit and release, under the same locks as the workers, and waits for them, but not for
long (what waiting jobs are told goes its own way, see ``sentences.py``): the snapshots of the next rounds count those
that are in flight as carried out (``orders.py``). A decision names the resourceVersion it was made on; if the object has
changed since, its reconcile ignores the decision and the next round plans again.

Everything up to the decisions runs in a thread, so that a long round delays neither watches nor the lease. The event
loop only notes which objects changed (``changed``); the thread gives them to a ``SnapshotBuilder``, which makes again
what depends on them. What waiting jobs are told is looked at again where the plan's record is another, and for
all of them after a full plan.

Every plan goes through the independent checker before anything of it is carried out; between two full plans, which it
checks as a whole, it looks again at the jobs that differ. A plan that it refuses is
dropped and made once more from the snapshot alone (no memo, no solver); if that is refused too, nothing is
carried out, and the next round starts without a memo. ``busbar_refused_plans_total`` counts both.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from operator import attrgetter
from typing import Any

from busbar.kube.errors import ApiError, ConnectionFailed
from busbar.kube.informer import Key
from busbar.kube.types.lost_work import GivesWayTo
from busbar.operator.accounting.allocations import PoolRemarks
from busbar.operator.decisions import Admit, Deadline, Decision, Forecast, Lift, Release, Reserved, Wait
from busbar.operator.errors import Fenced, PlanRefused
from busbar.operator.metrics import Metrics
from busbar.operator.queue.controller import Controller, Item
from busbar.operator.scheduling.builder import KINDS, SnapshotBuilder
from busbar.operator.scheduling.orders import Order, Ordered, Orders
from busbar.operator.scheduling.pace import Pace
from busbar.operator.scheduling.sentences import Sentences
from busbar.operator.scheduling.snapshot import ClusterObjects, builder_of
from busbar.operator.settings import Settings
from busbar.operator.steady_clock import utc_now
from busbar.operator.training.deadline import is_told
from busbar.operator.training.reservation import moved, same_place
from busbar.operator.watch.caches import Caches
from busbar.operator.write.status import clip
from busbar.scheduler import (
    Action,
    ActionKind,
    Checker,
    Event,
    Job,
    JobId,
    JobKind,
    Memo,
    Objective,
    Plan,
    Policy,
    Reservation,
    SchedulerError,
    Snapshot,
    WaitingRecord,
    applied,
    plan,
    react,
    sentence,
)
from busbar.scheduler.model.diff import differing
from busbar.scheduler.performance.learning import quarantined

log = logging.getLogger(__name__)


_CODE = attrgetter("code")
FAULTS_LOGGED = 5  # of a refused plan, in the log
WHOLE_COLLECTION = 6  # so many full plans; about a minute

RELEASE_REASONS = {
    ActionKind.PREEMPT: "Preempted",
    ActionKind.MOVE: "Moved",
    ActionKind.GROW: "Resized",
    ActionKind.SHRINK: "Resized",
}
GAVE = {ActionKind.SHRINK: "shrunk", ActionKind.PREEMPT: "stopped", ActionKind.MOVE: "moved"}
"""What becomes of a training job that makes room for a replica, as the metric calls it."""


def policy_of(settings: Settings) -> Policy:
    """The scheduler's policy, from the settings."""
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


Changes = dict[tuple[str, Key], Any]
"""By kind and key, objects as they are now; None: gone."""


@dataclass(frozen=True)
class Work:
    """What a round begins with: all objects, or those that changed since the one before."""

    changes: Changes
    everything: ClusterObjects | None
    telling: frozenset[str]
    """Nodes of which it is known which pods hold which board."""
    orders: Mapping[Item, Ordered]
    """In flight."""
    forecasts: Mapping[str, Forecast]
    now: datetime
    full: bool


@dataclass
class Decided:
    """What the thread hands back to the event loop."""

    snapshot: Snapshot
    plan: Plan
    remarks: PoolRemarks
    reasons: Counter[str]
    faults: Counter[str]
    """Of quarantined speeds."""
    acting: dict[Item, list[Decision]] = field(default_factory=dict)
    """What starts and stops, by object."""
    orders: dict[Item, dict[JobId, Order]] = field(default_factory=dict)
    """The same, by job."""
    told: dict[Item, tuple[list[Decision], bool]] = field(default_factory=dict)
    """What waiting objects are told, and whether it goes at once."""
    silent: set[Item] = field(default_factory=set)
    """Objects that are told nothing more: they wait no longer."""
    held_back: Mapping[Item, str] = field(default_factory=dict)
    """Waiting jobs that are in no plan, and why."""
    waiting: set[Item] | None = None
    """After a full plan: all objects that wait."""
    cpu_s: float = 0.0
    """Of the thread, for all of this."""


class Rounds:
    """See the module's head."""

    def __init__(
        self,
        caches: Caches,
        controller: Controller,
        settings: Settings,
        metrics: Metrics,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
        sentences: Sentences | None = None,
        orders: Orders | None = None,
    ) -> None:
        self._caches, self._controller = caches, controller
        self._settings, self._metrics = settings, metrics
        self._policy = policy or policy_of(settings)
        self._clock = clock
        self._wake = asyncio.Event()
        self.sentences = sentences or Sentences(
            controller, per_s=settings.sentences_per_s, every_s=settings.explain_period_s, clock=clock
        )
        self.orders = orders or Orders(controller, self._read_again, self.wake)
        self.stopped = asyncio.Lock()  # held during a round, and by whoever lets none begin
        self._changes: Changes = {}
        self._builder: SnapshotBuilder | None = None  # None: the next round reads all objects
        self._looked_at: tuple[WaitingRecord, ...] = ()
        """The records of the round before."""
        self._memo: Memo | None = None
        self._checker = Checker()
        self._last: tuple[Snapshot, Plan] | None = None  # the round before
        self._outcome: tuple[Plan, Snapshot] | None = None
        self._gave: set[str] = set()
        """Actions of the last plan that make room for replicas of services."""
        self._planned = True  # False: the last attempt to plan failed
        self._plans = 0
        self._explained: dict[str, tuple[str, str, float]] = {}
        self._waiting = False
        self._pace = Pace(settings.round_debounce_s, settings.round_period_s)
        self.forecasts: dict[
            str, Forecast
        ] = {}  # by job: forecasts that the next round passes to the reconciles
        self.held_back: Mapping[Item, str] = {}
        """Jobs that wait outside of the last plan, and why (builder.py)."""
        # called with each round's snapshot
        self.after: Callable[[Snapshot, PoolRemarks], Awaitable[None]] | None = None

    def changed(self, kind: str, key: Key, new: Any) -> None:
        """An object is another one now; None: it is gone. The next round takes it in."""
        if kind in KINDS:
            self._changes[kind, key] = new

    def wake(self) -> None:
        """Something changed that a plan depends on."""
        self._wake.set()

    def forget(self) -> None:
        """The next round makes a full plan from the objects alone."""
        self._memo = self._last = self._builder = None

    def watt_prices(self) -> dict[str, float]:
        """What a watt-hour costs on each power domain that holds jobs back, in work, by the last plan."""
        return {} if self._last is None else {one.domain: one.work for one in self._last[1].power_prices}

    def lacking_watts(self) -> frozenset[str]:
        """The power domains on which jobs wait for watts that may come free, by the last plan."""
        waiting = () if self._last is None else self._last[1].waiting
        return frozenset(record.domain for record in waiting if record.domain and not record.never)

    @property
    def last(self) -> tuple[Snapshot, Plan] | None:
        """What was planned last, and on what; None before the first round and after a fault."""
        return self._last

    @property
    def outcome(self) -> Snapshot | None:
        """The snapshot of the last round as its plan leaves it: what the next round begins with, as far as is known
        now. None: as `last`."""
        if self._last is None:
            return None
        snapshot, made = self._last
        if self._outcome is None or self._outcome[0] is not made:
            self._outcome = made, applied(snapshot, made, made.at_s)
        return self._outcome[1]

    async def run(self) -> None:
        """Plans until cancelled; then nothing more of what was ordered begins."""
        try:
            await self._run()
        finally:
            await self.orders.close()

    async def _run(self) -> None:
        full_at = 0.0
        while True:
            period = self._settings.round_period_s
            try:
                # Not wait_for: in Python 3.11 it can lose a cancellation that arrives together with the event.
                async with asyncio.timeout(period):
                    await self._wake.wait()
                await asyncio.sleep(self._pace.debounce_s)
            except TimeoutError:
                if not self._waiting:
                    continue
            self._wake.clear()
            full = self._clock() - full_at >= self._pace.full_period_s
            if full:
                full_at = self._clock()
            try:
                async with self.stopped:
                    await self.once(full=full)
            except (ApiError, ConnectionFailed) as error:
                log.warning("round failed: %s", error)  # tried again at the next event, or after a period
                self._waiting = True
            except PlanRefused as error:
                log.error("nothing is carried out in this round: %s", error)
                self._waiting = True
            except SchedulerError as error:
                # No plan can be made on this snapshot: log an error; running jobs are still reconciled.
                log.error("round refused: %s", error, extra={"code": type(error).__name__})
            except Fenced as error:
                log.warning("round ended: %s", error)
                self._waiting = True
            except Exception:
                # A bug: running jobs are still reconciled, and the next round plans again.
                log.exception("round failed")
                self.forget()
                self._waiting = True

    async def once(self, *, full: bool = True) -> Plan:
        """One round."""
        started = time.perf_counter()
        everything = ClusterObjects.of(self._caches) if self._builder is None else None
        telling = self._caches.telling
        orders, forecasts = self.orders.in_flight, self.forecasts
        full = full or self._last is None
        work = Work(self._changes, everything, telling, orders, forecasts, utc_now(), full)
        self._changes, self.forecasts = {}, {}
        try:
            decided = await asyncio.to_thread(self._round, work)
        except Exception:
            self.forecasts = {**work.forecasts, **self.forecasts}
            raise
        self._metrics.rounds.observe(time.perf_counter() - started)
        self._show(decided)
        turned, self.held_back = self.held_back.keys() ^ decided.held_back.keys(), decided.held_back
        for item in turned:
            self._controller.add(*item)
        self._pace.took(decided.cpu_s, full=work.full)
        for item in decided.silent | decided.acting.keys():
            self.sentences.drop(item)
        if decided.waiting is not None:
            self.sentences.keep(decided.waiting)
        for item, (decisions, is_new) in decided.told.items():
            if item in decided.acting:  # a service of which one replica starts and another waits
                decided.acting[item] += decisions
            else:
                self.sentences.put(item, decisions, is_new=is_new)
        await self.orders.carry_out(decided.acting, decided.orders, self._check_soon)
        if self.after is not None:
            await self.after(decided.snapshot, decided.remarks)
        return decided.plan

    async def _read_again(self, item: Item) -> bool:
        return await self._caches.read_again(item.kind, item.key)

    def _check_soon(self) -> None:
        """A decision may not have been carried out (the object changed, the write failed)."""
        asyncio.get_running_loop().call_later(self._settings.round_check_s, self.wake)

    def _show(self, decided: Decided) -> None:
        self._waiting = bool(decided.plan.waiting or decided.plan.deadlines or decided.held_back)
        for metric, counts in (
            (self._metrics.waiting, decided.reasons),
            (self._metrics.quarantined, decided.faults),
        ):
            metric.clear()
            for reason, count in counts.items():
                metric.labels(reason).set(count)

    # -- in the thread ---------------------------------------------------------------------------------

    def _round(self, work: Work) -> Decided:
        """From the objects to the decisions."""
        began_s = time.thread_time()
        builder, snapshot = self._build(work)
        snapshot = self._with_reservations(snapshot)
        self._planned = False
        made = self._decide(snapshot, work.now.timestamp(), work.full)
        self._planned = True
        decided = Decided(
            snapshot,
            made,
            builder.remarks(),
            Counter({str(code): n for code, n in Counter(map(_CODE, made.waiting)).items()}),
            Counter(str(record.fault) for record in quarantined(snapshot.table)),
        )
        decided.held_back = builder.held_back()
        decided.acting, decided.orders = self._decisions(builder, made, work.orders)
        acted = {job for orders in decided.orders.values() for job in orders}
        decided.told = self._tell(builder, made, acted, work)
        due = self._tell_deadlines(builder, made, decided.told)
        if work.full:
            decided.waiting = set(builder.waiting()) | due
            for gone in [job for job in self._explained if builder.job(JobId(job)) is None]:
                del self._explained[gone]
        else:
            silent = {Item(*changed) for changed in work.changes if not builder.waits(Item(*changed))}
            decided.silent = silent - due
        decided.cpu_s = time.thread_time() - began_s
        return decided

    def _build(self, work: Work) -> tuple[SnapshotBuilder, Snapshot]:
        """The builder, and the snapshot; a builder that raised an exception is not used again."""
        builder, self._builder = self._builder, None
        if builder is None or work.everything is not None:
            builder = builder_of(work.everything or ClusterObjects(), self._policy.usage_half_life_s)
        else:
            for (kind, key), obj in work.changes.items():
                builder.put(kind, key, obj)
            builder.tell_boards(work.telling)
        builder.follow_orders(work.orders)
        snapshot = builder.snapshot(work.now, full=work.full)
        self._builder = builder
        return builder, snapshot

    def _with_reservations(self, snapshot: Snapshot) -> Snapshot:
        """What the last plan collects for jobs goes on being collected; without a last plan, what the statuses say.

        A round that follows one without a plan collects anew: what the statuses say may be why there was none.
        """
        if self._last is not None:
            return replace(snapshot, reservations=self._last[1].reservations)
        return snapshot if self._planned else replace(snapshot, reservations=())

    def _decide(self, snapshot: Snapshot, now: float, full: bool) -> Plan:
        """The checked plan for this snapshot: a full one, or a reaction to what changed since the last round.

        Raises:
            PlanRefused: the checker refuses it, and also one made from the snapshot alone.
        """
        disturbs = True
        if full or self._last is None:
            self._collect()
            made, self._memo = plan(snapshot, self._policy, now, self._memo)
            self._checker = Checker()  # counts everything again
        else:
            before, last = self._last
            made, self._memo = react(snapshot, last, Event.between(before, snapshot, now), self._memo)
            disturbs = bool(made.actions)  # otherwise it is checked with the next full plan
        if disturbs and self._faults(snapshot, made):
            self.forget()
            plain = replace(self._policy, solver=False)
            made, _ = plan(snapshot, plain, now)
            self._checker = Checker()
            if faults := self._faults(snapshot, made):
                raise PlanRefused(f"plan {made.id}: {'; '.join(faults[:FAULTS_LOGGED])}")
            # It was made under another policy: the next round must not react on top of it, and makes a full plan.
            return made
        if made.solver_error:
            log.warning("planned without the solver: %s", made.solver_error)
        self._last = (snapshot, made)
        return made

    def _collect(self) -> None:
        """Collects the cycles that each of Kopf's events is, before a plan makes everything old that is there (`planner`):
        old ones the collector never looks at by itself. Those of the time in which plans were made are found each sixth time.
        """
        self._plans += 1
        gc.collect(1 if self._plans % WHOLE_COLLECTION else 2)

    def _faults(self, snapshot: Snapshot, made: Plan) -> list[str]:
        """The faults that the independent checker finds in the plan."""
        faults = self._checker.check(snapshot, made)
        if faults:
            self._metrics.refused_plans.inc()
            text = "; ".join(faults[:FAULTS_LOGGED])
            log.error("plan refused: %s", text, extra={"plan": made.id, "faults": len(faults)})
        return faults

    def _decisions(
        self, builder: SnapshotBuilder, made: Plan, in_flight: Mapping[Item, Ordered]
    ) -> tuple[dict[Item, list[Decision]], dict[Item, dict[JobId, Order]]]:
        """What starts and stops, by object; and the jobs for which that is so."""
        decisions: dict[Item, list[Decision]] = {}
        orders: dict[Item, dict[JobId, Order]] = {}
        giving, takers = self._give(builder.job, made)
        for action in made.actions:
            target, job = _target(builder, action.job), builder.job(action.job)
            if target is None or job is None:
                continue
            decision = None
            if target.item not in in_flight:
                decision = self._decision(builder.job, action, job, target, takers.get(action.job))
            self._metrics.actions.labels(str(action.kind), "ordered" if decision else "early").inc()
            if decision is not None:
                if action.id in giving:
                    self._metrics.gives.labels(GAVE[action.kind]).inc()
                version = (
                    target.version if job.kind is not JobKind.SERVING else ""
                )  # pods are made under none
                order = Order(action.kind, job, action.to, made.at_s, version)
                orders.setdefault(target.item, {})[action.job] = order
                decisions.setdefault(target.item, []).append(decision)
                told = {"action": str(action.kind), "object": str(target.item), "index": target.index}
                log.info("action planned", extra={"plan": made.id, **told, "reason": action.reason})
        return decisions, orders

    def _give(
        self, jobs: Callable[[JobId], Job | None], made: Plan
    ) -> tuple[set[str], dict[JobId, GivesWayTo]]:
        """The actions by which training makes room for replicas of services, and that no plan before had; and the service
        of the first replica that each job makes room for."""
        takers: dict[JobId, GivesWayTo] = {}
        for action in made.actions:
            job = jobs(action.job) if action.after else None
            if job is not None and job.kind is JobKind.SERVING:
                for other in action.after:
                    takers.setdefault(other, _service_of(job))
        found = {action.id for action in made.actions if action.kind in GAVE and action.job in takers}
        before, self._gave = self._gave, found
        return found - before, takers

    def _tell(
        self, builder: SnapshotBuilder, made: Plan, acted: set[JobId], work: Work
    ) -> dict[Item, tuple[list[Decision], bool]]:
        """What waiting objects are told, and whether it goes at once: the reason is new to the object's status, or a
        place is won or lost."""
        places = {reservation.job: reservation for reservation in made.reservations}
        told: dict[Item, tuple[list[Decision], bool]] = {}
        for record in self._to_tell(made, {*places, *builder.reserved(), *work.forecasts}, full=work.full):
            job, target = builder.job(record.job), _target(builder, record.job)
            if target is None or job is None or job.run is not None or record.job in acted:
                continue
            reserved, won_or_lost = self._reserved(places.get(record.job), target, made.at_s)
            wait, is_new = self._explain(record, target, at_once=won_or_lost)
            news = (wait, work.forecasts.get(record.job), reserved)
            found = [d for d in news if d is not None]
            if found:
                before, was_new = told.get(target.item, ([], False))
                told[target.item] = ([*before, *found], was_new or is_new or won_or_lost)
        return told

    def _tell_deadlines(
        self, builder: SnapshotBuilder, made: Plan, told: dict[Item, tuple[list[Decision], bool]]
    ) -> set[Item]:
        """What jobs with deadlines are told, waiting or not, at once: added to `told`; the jobs."""
        shares = {share.job: share for share in made.deadlines}
        found: set[Item] = set()
        for name in builder.with_deadline():
            target = _target(builder, name)
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

    def _decision(
        self,
        jobs: Callable[[JobId], Job | None],
        action: Action,
        job: Job,
        target: Target,
        taker: GivesWayTo | None = None,
    ) -> Decision | None:
        if action.kind is ActionKind.START:
            before = (jobs(other) for other in action.after)
            if action.to is None or any(other is not None and other.run is not None for other in before):
                return None  # jobs that it waits for still hold resources
            return Admit(action.to, action.reason, target.version, target.index)
        if action.kind is ActionKind.LIFT and action.to is not None and action.assumed is not None:
            return Lift(action.to.power_cap, action.reason, action.assumed)
        reason = RELEASE_REASONS[action.kind]
        taken = action.kind in (ActionKind.PREEMPT, ActionKind.SHRINK) or action.makes_room_for is not None
        to = taker if job.kind is not JobKind.SERVING else None
        return Release(reason, action.reason, target.version, target.index, taken=taken, to=to)

    def _reserved(
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

    def _explain(
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
        period_s = 0.0 if at_once else self._settings.explain_period_s
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


def _service_of(replica: Job) -> GivesWayTo:
    namespace, _, name = replica.service.partition("/")
    return GivesWayTo(
        uid=replica.id.rpartition("/")[0], namespace=namespace, name=name, tenant=replica.tenant
    )


def _target(builder: SnapshotBuilder, job: JobId) -> Target | None:
    found = builder.target(job)
    return None if found is None else Target(*found)


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


__all__ = ["Rounds", "Target", "record_for_members"]
