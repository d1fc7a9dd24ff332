"""What would become of the replicas that a service begins with, in one answer.

jobs of the draft ── budget, guarantees ── plan ──► one answer for each replica ── of_replicas ──► the service's answer
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime

from busbar.kube.contracts.preview import PreviewAnswer
from busbar.kube.informer import Key
from busbar.kube.types import ModelService, Tenant
from busbar.kube.types.reasons import Reason
from busbar.operator.accounting import budgets
from busbar.operator.accounting.budgets import Hold
from busbar.operator.accounting.non_preemptible import NonPreemptible
from busbar.operator.pods.room import PodRoom, Promised, pod_room
from busbar.operator.scheduling.snapshot import ClusterObjects, Draft
from busbar.operator.serving.external import external_words
from busbar.operator.serving.replicas import startable
from busbar.operator.serving.target_outlook import target_outlook
from busbar.operator.serving.view import model_uri
from busbar.operator.watch.caches import tenant_of_namespace
from busbar.scheduler import Job, JobKind, Snapshot

NEVER = "Never, unless something is changed"


def of_replicas(found: Sequence[PreviewAnswer], most: int | None = None) -> PreviewAnswer:
    """One answer for all replicas of a service, from one for each.

    Args:
        most: as many of them would have room where nothing else ran; None: not known.
    """
    total = len(found)
    starting = [each for each in found if each.pool]
    waiting = [each for each in found if not each.pool]
    counts = {"replicas": total, "replicas_starting": len(starting)}
    never = most is not None and most < total
    ceiling = f" Where nothing else runs, {most} of the {total} replicas have room." if never and most else ""
    if not starting:
        first = waiting[0]
        possible = not never and all(each.possible for each in waiting)
        reason = first.reason + ceiling
        when = f"{first.when}; never for more than {most} of them" if ceiling else first.when
        return first.model_copy(update={**counts, "possible": possible, "reason": reason, "when": when})
    first, pools = starting[0], Counter(each.pool for each in starting)
    totals = {
        "pods": sum(each.pods for each in starting),
        "accelerators": sum(each.accelerators for each in starting),
        "nodes": tuple(sorted({node for each in starting for node in each.nodes})),
        "cost_per_hour": _sum([each.cost_per_hour for each in starting]),
        "watts": _sum([each.watts for each in starting]),
        "pool": ", ".join(pools),
        "accelerator": ", ".join(dict.fromkeys(each.accelerator for each in starting)),
        "mode": ", ".join(dict.fromkeys(each.mode for each in starting)),
    }
    reason, when = first.reason, first.when
    if len(pools) > 1:
        reason += f" By pool: {', '.join(f'{count} in {pool}' for pool, count in pools.items())}."
    now = sum(each.starts_now for each in starting)
    if not waiting:
        later = next((each.when for each in starting if not each.starts_now), "")
        when = when if now in (0, total) else f"Now for {now} of {total} replicas; for the others: {later}"
        return first.model_copy(
            update={**counts, **totals, "starts_now": now == total, "reason": reason, "when": when}
        )
    told = waiting[0]
    later = NEVER if never and len(starting) == most else told.when
    return first.model_copy(
        update={
            **counts,
            **totals,
            "starts_now": False,
            "possible": not never and all(each.possible for each in waiting),
            "code": told.code,
            "reason": f"{len(starting)} of its {total} replicas start: {reason} The next one: {told.reason}{ceiling}",
            "when": f"{when} for {len(starting)} of {total} replicas; for the others: {later}",
        }
    )


def _sum(values: Sequence[float | None]) -> float | None:
    """None where one is not known."""
    known = [value for value in values if value is not None]
    return round(sum(known), 4) if len(known) == len(values) else None


def offered(
    base: Snapshot, seen: ClusterObjects, draft: Draft, jobs: Sequence[Job], now: datetime
) -> tuple[tuple[Job, ...], tuple[PreviewAnswer, ...]]:
    """The jobs of a draft that the round would plan, and an answer for each of the others: replicas that a spent budget or the
    tenant's limit of pods keeps from starting, and what would keep other tenants from their guarantees."""
    kept_back: list[PreviewAnswer] = []
    if isinstance(draft, ModelService):
        jobs, kept_back = _startable(seen, draft, jobs, now)
    allowed, answer = within_guarantees(base, jobs)
    if answer is not None:
        kept_back = [answer] * (len(jobs) - len(allowed)) + kept_back
    return allowed, tuple(kept_back)


def _startable(
    seen: ClusterObjects, service: ModelService, jobs: Sequence[Job], now: datetime
) -> tuple[Sequence[Job], list[PreviewAnswer]]:
    """The replicas that the tenant's budgets and its limit of pods allow, and an answer for each of the others."""
    name = tenant_of_namespace(seen.tenants).get(service.metadata.namespace or "", "")
    tenant = next((t for t in seen.tenants if t.metadata.name == name), None)
    if tenant is None:
        return jobs, []
    hold = budgets.hold(tenant, now)
    paid = jobs[: startable(service, (), hold)] if hold.why else jobs
    unpaid = [budget_answer(hold)] * (len(jobs) - len(paid))
    room = room_of(seen, tenant, service)
    lacking = over_pods(room, len(paid))
    if room is None or lacking is None:
        return paid, unpaid
    return paid[: room.left], [lacking] * (len(paid) - room.left) + unpaid


def room_of(seen: ClusterObjects, tenant: Tenant, draft: Draft) -> PodRoom | None:
    """What the tenant's limit of pods leaves to a draft; None: there is no limit."""
    key = Key(draft.metadata.namespace or "", draft.metadata.name)
    return pod_room(tenant, key, seen.pods, seen.jobs, Promised())


def over_pods(room: PodRoom | None, pods: int) -> PreviewAnswer | None:
    """The answer where so many pods are more than the tenant's limit leaves; None: they are not."""
    reason = room.lacking(pods) if room is not None else ""
    if room is None or not reason:
        return None
    possible = pods <= room.most
    when = "When enough pods of the namespace have ended" if possible else ""
    return PreviewAnswer(starts_now=False, possible=possible, reason=reason, when=when, code=Reason.POD_LIMIT)


def held_at_zero(draft: Draft) -> PreviewAnswer | None:
    """The answer for a service whose external target is zero and which no request wakes; None: it is another."""
    if (
        not isinstance(draft, ModelService)
        or draft.spec.external_replicas != 0
        or not draft.spec.min_replicas
    ):
        return None
    return PreviewAnswer(
        starts_now=False,
        possible=True,
        reason=f"{external_words(draft.spec)}: it has no replicas, and no request starts one, because minReplicas is not 0.",
        when="When that target is above 0, or minReplicas is 0 and a request arrives",
    )


def budget_answer(hold: Hold) -> PreviewAnswer:
    """The answer for what is not started because its tenant's budget is spent."""
    return PreviewAnswer(
        starts_now=False,
        possible=True,
        reason=hold.why,
        when="When the budget's next period begins, or when it is raised",
        code=Reason.BUDGET_SPENT,
    )


def within_guarantees(base: Snapshot, jobs: Sequence[Job]) -> tuple[tuple[Job, ...], PreviewAnswer | None]:
    """The jobs of a draft that may begin, and the answer for the others: those that are not preemptible and would keep other
    tenants from their guarantees. None: there are no others."""
    if (
        not jobs
        or all(job.preemptible for job in jobs)
        or any(other.run is not None and other.key == jobs[0].key for other in base.jobs)
    ):
        return tuple(jobs), None
    known = NonPreemptible()
    guaranteed = {
        t.name: {q.accelerator: q.guaranteed_m for q in t.quotas if q.guaranteed_m} for t in base.tenants
    }
    known.set_limits(base.pools, base.nodes, guaranteed)
    for other in base.jobs:
        if not other.preemptible and not other.yields:
            known.hold(other)
    # The round offers jobs in the order of their submission, so the first that lacks room is followed by others that do.
    offered = [(job, known.offer(job)) for job in jobs]
    allowed = tuple(job for job, offer in offered if offer is not None)
    if len(allowed) == len(jobs):
        return allowed, None
    lacking = next(job for job, offer in offered if offer is None)
    when = "When enough work that is not preemptible has ended"
    if lacking.kind is not JobKind.SERVING:
        when += ", or as a preemptible job"
    text = known.lacking(lacking)
    return allowed, PreviewAnswer(
        starts_now=False, possible=True, reason=text, when=when, code=Reason.GUARANTEES_OF_OTHERS
    )


def with_target(found: PreviewAnswer, seen: ClusterObjects, service: ModelService) -> PreviewAnswer:
    """The answer, with what is known of the service's latency target where no type keeps it."""
    tenant = tenant_of_namespace(seen.tenants).get(service.metadata.namespace or "", "")
    made_by = model_uri(service, seen.jobs).made_by
    text = target_outlook(service, seen.pools, tenant, made_by)
    if not text:
        return found
    return found.model_copy(
        update={"reason": f"{found.reason} {text}", "code": found.code or Reason.TARGET_UNREACHABLE}
    )
