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
what depends on them. ``telling.py`` says what waiting jobs are told.

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
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from operator import attrgetter
from typing import Any

from busbar.kube.errors import ApiError, ConnectionFailed
from busbar.kube.informer import Key
from busbar.kube.types.lost_work import GivesWayTo
from busbar.operator.accounting.allocations import PoolRemarks
from busbar.operator.decisions import Admit, Decision, Forecast, Lift, Release
from busbar.operator.errors import Fenced, PlanRefused
from busbar.operator.metrics import Metrics
from busbar.operator.queue.controller import Controller, Item
from busbar.operator.scheduling.builder import KINDS, SnapshotBuilder
from busbar.operator.scheduling.orders import Order, Ordered, Orders
from busbar.operator.scheduling.pace import Pace
from busbar.operator.scheduling.sentences import Sentences
from busbar.operator.scheduling.snapshot import ClusterObjects, builder_of
from busbar.operator.scheduling.telling import Target, Telling, Told, target_of
from busbar.operator.settings import Settings
from busbar.operator.steady_clock import utc_now
from busbar.operator.watch.caches import Caches
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
    SchedulerError,
    Snapshot,
    applied,
    plan,
    react,
)
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
    told: Told = field(default_factory=dict)
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
        self._memo: Memo | None = None
        self._checker = Checker()
        self._last: tuple[Snapshot, Plan] | None = None  # the round before
        self._outcome: tuple[Plan, Snapshot] | None = None
        self._gave: set[str] = set()
        """Actions of the last plan that make room for replicas of services."""
        self._planned = True  # False: the last attempt to plan failed
        self._plans = 0
        self._telling = Telling(caches, settings.explain_period_s, clock)
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
        decided.told = self._telling.reasons(builder, made, acted, work.forecasts, full=work.full)
        due = self._telling.deadlines(builder, made, decided.told)
        if work.full:
            decided.waiting = set(builder.waiting()) | due
            self._telling.keep(builder)
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
            target, job = target_of(builder, action.job), builder.job(action.job)
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


def _service_of(replica: Job) -> GivesWayTo:
    namespace, _, name = replica.service.partition("/")
    return GivesWayTo(
        uid=replica.id.rpartition("/")[0], namespace=namespace, name=name, tenant=replica.tenant
    )
