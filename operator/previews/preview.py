"""What the next round would do with a draft: one plan on the snapshot with the draft in it, read off in words.

    snapshot with the draft ── plan, without the solver ── the draft's action, or its waiting record ── PreviewAnswer

Pure, and slow enough for a process of its own (worker.py). Members read amounts; only admins read the names
of other tenants and of nodes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from busbar.kube.contracts.preview import Change, NodeLoad, NodeLoads, PreviewAnswer, span
from busbar.kube.types import ModelService
from busbar.kube.types.reasons import Reason
from busbar.operator.accounting import budgets
from busbar.operator.forecasts.worker import Answer, Question
from busbar.operator.pods.volume_claims import claims_of_job, claims_of_service, missing
from busbar.operator.previews.replicas import NEVER, budget_answer, of_replicas, over_pods, room_of
from busbar.operator.scheduling.snapshot import ClusterObjects, Draft, is_draft
from busbar.operator.serving.engine_mode import engine_mode
from busbar.operator.serving.view import model_uri
from busbar.operator.training import deadline
from busbar.operator.watch.caches import tenant_of_namespace
from busbar.scheduler import (
    Action,
    ActionKind,
    Job,
    JobId,
    Placement,
    Plan,
    Policy,
    Snapshot,
    TableView,
    WaitCode,
    plan,
    sentence,
)
from busbar.scheduler.candidates.draw import Draws


@dataclass(frozen=True)
class PreviewQuestion:
    """All that an answer depends on."""

    base: Snapshot | None
    """Without the draft; None: that of the question before."""
    drafts: tuple[Job, ...]
    """The draft's jobs; none: nothing is made of it, or they stand in the base already."""
    policy: Policy
    now: float
    key: str
    """`namespace/name` of the draft."""
    service: bool
    admin: bool
    kept_back: tuple[PreviewAnswer, ...] = ()
    """Of a service, an answer for each replica that is not offered to the scheduler."""
    forecast: Question | None = None
    """When it would start, if it waits, asked without a snapshot; None: too few jobs have ended here to say."""

    @property
    def snapshot(self) -> Snapshot:
        """With the draft."""
        assert self.base is not None
        if not self.drafts:
            return self.base
        return replace(self.base, jobs=tuple(sorted((*self.base.jobs, *self.drafts), key=lambda job: job.id)))


@dataclass(frozen=True)
class Hold:
    """No question: a snapshot that the next ones will be about."""

    base: Snapshot


@dataclass(frozen=True)
class Calibration:
    """How earlier forecasts turned out."""

    forecasts: int = 0
    before_p50: float | None = None
    before_p90: float | None = None


def answer(question: PreviewQuestion) -> PreviewAnswer:
    """Plan the snapshot and read off what became of the draft."""
    snapshot = question.snapshot
    jobs = jobs_of(snapshot, question.key)
    if not jobs:
        reason = (
            "It asks for no replicas now: it starts when a request arrives."
            if question.service
            else "The operator made nothing to place of this object; read its message after creating it."
        )
        when = "With the first request" if question.service else "Not known"
        return PreviewAnswer(starts_now=False, possible=True, reason=reason, when=when)
    decided, _ = plan(snapshot, question.policy, question.now, None)
    starts = {a.job: a for a in decided.actions if a.kind is ActionKind.START}
    if question.service:
        return _service(question, snapshot, jobs, decided, starts)
    started = [job for job in jobs if job.id in starts]
    if started:
        found = _starting(snapshot, started[0], starts[started[0].id], question.admin)
        return found.model_copy(update={"deadline": _of_deadline(started[0], decided)})
    waits = _waiting(jobs[0], decided, question.admin)
    return waits.model_copy(update={"deadline": _of_deadline(jobs[0], decided)})


def _service(
    question: PreviewQuestion,
    snapshot: Snapshot,
    jobs: Sequence[Job],
    decided: Plan,
    starts: Mapping[JobId, Action],
) -> PreviewAnswer:
    """What becomes of all its replicas, and how many have room where nothing else runs."""
    found = [
        _starting(snapshot, job, starts[job.id], question.admin)
        if job.id in starts
        else _waiting(job, decided, question.admin, advise=not starts.keys() & {each.id for each in jobs})
        for job in jobs
    ]
    most = None
    if not all(each.pool for each in found):
        empty = replace(snapshot, jobs=tuple(job for job in jobs if job.run is None))
        alone, _ = plan(empty, question.policy, question.now, None)
        records = [record for job in jobs if (record := alone.record(job.id)) is not None]
        if all(record.foreseeable for record in records):
            most = sum(action.kind is ActionKind.START for action in alone.actions)
            most += len(question.kept_back)
    return of_replicas([*found, *question.kept_back], most)


def _of_deadline(job: Job, decided: Plan) -> str:
    """What is said of the draft's deadline; empty without one. Jobs that it names are of the draft's own tenant."""
    if job.deadline_s is None:
        return ""
    share = next((share for share in decided.deadlines if share.job == job.id), None)
    return deadline.sentence(share, datetime.fromtimestamp(job.deadline_s, UTC))


def held_by_tenant(seen: ClusterObjects, draft: Draft, now: datetime) -> PreviewAnswer | None:
    """The answer where the draft's tenant has spent its budget, or where its limit of pods leaves too few for a job.

    None: neither, or the job runs already. A service gets its least number of replicas whatever is spent.
    """
    if isinstance(draft, ModelService):
        return None
    if any(job.key == draft.key and job.status and job.status.admission for job in seen.jobs):
        return None
    name = tenant_of_namespace(seen.tenants).get(draft.metadata.namespace or "", "")
    tenant = next((t for t in seen.tenants if t.metadata.name == name), None)
    if tenant is None:
        return None
    hold = budgets.hold(tenant, now)
    if hold.why:
        return budget_answer(hold)
    return over_pods(room_of(seen, tenant, draft), draft.spec.shape.min_pods)


def held_by_model(seen: ClusterObjects, draft: Draft) -> PreviewAnswer | None:
    """The answer for a service whose model a TrainingJob has not made, or never will."""
    model = model_uri(draft, seen.jobs) if isinstance(draft, ModelService) else None
    if model is None or not model.problem:
        return None
    when = NEVER if model.final else "When the TrainingJob has succeeded"
    return PreviewAnswer(
        starts_now=False,
        possible=not model.final,
        reason=model.problem,
        when=when,
        code=Reason.MODEL_NOT_READY,
    )


def held_by_claims(seen: ClusterObjects, draft: Draft) -> PreviewAnswer | None:
    """The answer where the draft's pods would mount a claim that does not exist; None: they would not, or it runs."""
    if seen.volume_claims is None:
        return None
    if isinstance(draft, ModelService):
        claims = claims_of_service(draft, model_uri(draft, seen.jobs).uri)
    elif any(job.key == draft.key and job.status and job.status.admission for job in seen.jobs):
        return None
    else:
        claims = claims_of_job(draft)
    text = missing(draft.metadata.namespace or "", claims, seen.volume_claims)
    if not text:
        return None
    when = "When somebody has created what is missing"
    return PreviewAnswer(starts_now=False, possible=True, reason=text, when=when, code=Reason.CLAIM_MISSING)


def jobs_of(snapshot: Snapshot, key: str) -> list[Job]:
    """The scheduler's jobs of a draft: those with the ids that drafts get, or those that wait under the draft's
    own name (a draft of something that exists already)."""
    found = [job for job in snapshot.jobs if is_draft(job.id)]
    return found or [job for job in snapshot.jobs if job.run is None and key in (job.key, job.service)]


def _starting(snapshot: Snapshot, job: Job, action: Action, admin: bool) -> PreviewAnswer:
    placement = action.to
    assert placement is not None  # a start always says where
    pool = next(p for p in snapshot.pools if p.name == placement.pool)
    count = placement.accelerators_m / 1000
    cost = pool.price_per_hour * count
    after = len(action.after)
    table = TableView(snapshot.table)
    speed = _speeds(table, job, placement, placement.power_cap)
    seconds = [job.remaining_work / s for s in speed] if speed and job.remaining_work else [None, None, None]
    finish = seconds[0]
    watts = count * _watts(Draws(snapshot, table), table, job, placement) if not pool.is_cpu else 0.0
    energy = [None if s is None or not watts else round(watts * s / 3.6e6, 3) for s in seconds]
    full = _speeds(table, job, placement, 1.0) if placement.power_cap < 1 else None
    return PreviewAnswer(
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
        accelerator_hours=round(count * finish / 3600, 3) if finish is not None else None,
        watts=round(watts, 1) or None,
        kilowatt_hours=energy[0],
        kilowatt_hours_low=energy[2],
        kilowatt_hours_high=energy[1],
        power_cap_percent=None if placement.power_cap >= 1 else round(100 * placement.power_cap),
        power_cap_speed=round(speed[0] / full[0], 3) if speed and full else None,
    )


def _watts(draws: Draws, table: TableView, job: Job, placement: Placement) -> float:
    """What one accelerator of the job draws there; 0: not known."""
    size_m, cap = placement.accelerators_m, placement.power_cap
    found = table.estimate(job.workload_class, placement.key, placement.mode, size_m, job.tenant, cap)
    return draws.watts(placement.key, found, cap)


def _speeds(
    table: TableView, job: Job, placement: Placement, cap: float
) -> tuple[float, float, float] | None:
    """Mean, low and high speed at the placement under a power cap, if the table knows the class."""
    if not job.workload_class or not table.knows(job.workload_class, job.tenant):
        return None
    size_m, nodes = placement.accelerators_m, placement.spread
    found = table.estimate(job.workload_class, placement.key, placement.mode, size_m, job.tenant, cap, nodes)
    if found is None or found.speed <= 0 or found.low <= 0 or not math.isfinite(found.speed):
        return None
    return found.speed, found.low, found.high


def _waiting(job: Job, decided: Plan, admin: bool, *, advise: bool = True) -> PreviewAnswer:
    """`advise`: name the changes with which it would start."""
    record = decided.record(job.id)
    if record is None:
        reason = "The scheduler did not decide about it in this round; it will look again in the next."
        return PreviewAnswer(starts_now=False, possible=True, reason=reason, when="Not known")
    if not advise:
        record = replace(record, changes=())
    never = record.never
    if never:
        when = NEVER
    elif record.code is WaitCode.POWER:
        when = "When other jobs on its power domain have ended, or its budget is raised"
    elif not record.foreseeable:
        when = "Not before closed nodes are opened"
    elif record.position > 1:
        when = f"After {record.position - 1} other waiting job{'s' if record.position > 2 else ''} of your tenant"
    else:
        when = "When what it waits for is free"
    return PreviewAnswer(
        starts_now=False,
        possible=not never,
        reason=sentence(record, admin),
        when=when,
        code=record.code.value,
        changes=tuple(
            Change(kind=str(c.kind), current=str(c.current), needed=str(c.needed)) for c in record.changes
        ),
    )


def with_forecast(waits: PreviewAnswer, found: Answer | None, kept: Calibration) -> PreviewAnswer:
    """The answer for a waiting draft with what can be said of when it starts."""
    start, end = (found.start_s, found.end_s) if found is not None else (None, None)
    when = (
        waits.when
        if start is None
        else f"Likely in {span(start[0])}, nine times in ten within {span(start[1])}"
    )
    return waits.model_copy(
        update={
            "when": when,
            "start_p50_seconds": start[0] if start else None,
            "start_p90_seconds": start[1] if start else None,
            "end_p50_seconds": end[0] if end else None,
            "end_p90_seconds": end[1] if end else None,
            "past_forecasts": kept.forecasts,
            "past_before_p50": kept.before_p50,
            "past_before_p90": kept.before_p90,
        }
    )


def with_engine_mode(starts: PreviewAnswer, seen: ClusterObjects, draft: Draft) -> PreviewAnswer:
    """The answer for a service that starts, with the mode in which its engine does and why; or that there is none."""
    if not isinstance(draft, ModelService) or not starts.pool:
        return starts
    pool = next((pool for pool in seen.pools if pool.metadata.name == starts.pool), None)
    choice = engine_mode(draft, model_uri(draft, seen.jobs).made_by, pool)
    if choice is None or not choice.reason:
        return starts
    if not choice.fits:
        return PreviewAnswer(
            starts_now=False, possible=False, reason=choice.reason, when=NEVER, mode=choice.mode
        )
    return starts.model_copy(update={"mode": choice.mode, "reason": f"{starts.reason} {choice.reason}"})


def if_suspended(found: PreviewAnswer, draft: Draft) -> PreviewAnswer:
    """The answer for a draft with `spec.suspend`, which nothing is placed for until that is false."""
    if not draft.spec.suspend or not found.possible:
        return found
    when = "When spec.suspend is false"
    if not found.starts_now:
        when += f", and then: {found.when}"
    return found.model_copy(
        update={"starts_now": False, "when": when, "reason": f"It is suspended. Otherwise: {found.reason}"}
    )


def as_sentence(text: str) -> str:
    """With a capital and a full stop."""
    text = text.strip()
    if not text:
        return ""
    return text[0].upper() + text[1:] + ("" if text[-1] in ".!?" else ".")


def loads_of(snapshot: Snapshot) -> NodeLoads:
    """Capacity and allocation per node, from the scheduler's own view."""
    pools = {pool.name: pool for pool in snapshot.pools}
    used: dict[str, int] = defaultdict(int)
    for job in snapshot.jobs:
        if job.run is not None:
            for name in job.run.placement.nodes:
                used[name] += job.run.placement.per_pod.accelerators_m
    loads = []
    for node in snapshot.nodes:
        pool = pools.get(node.pool)
        if pool is None:
            continue
        capacity = (
            pool.cpu_accelerators_m(node.capacity.cpu_m) if pool.is_cpu else node.capacity.accelerators_m
        )
        loads.append(
            NodeLoad(
                name=node.name,
                pool=node.pool,
                accelerator=pool.accelerator,
                ready=node.ready,
                capacity=capacity / 1000,
                allocated=used[node.name] / 1000,
            )
        )
    return NodeLoads(nodes=sorted(loads, key=lambda load: (load.pool, load.name)))
