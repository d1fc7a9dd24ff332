"""The status of a ModelService: phase and conditions, replicas, usage, and what is written how often."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from itertools import takewhile

from busbar.kube.types import ServicePhase
from busbar.kube.types.meta import LABEL_JOB, LABEL_KIND
from busbar.kube.types.reasons import Reason
from busbar.kube.types.service_status import (
    MOST_DECISIONS,
    MeasuredReplica,
    ModelServiceStatus,
    ScalingCause,
    ScalingDecision,
    ServiceLevelStatus,
)
from busbar.operator.accounting.lost_work import caused
from busbar.operator.decisions import Decision, Wait
from busbar.operator.pods import manifests
from busbar.operator.pods.engine_image import EngineImage
from busbar.operator.pods.replica_place import place_of
from busbar.operator.pods.unmounted import mounts_of_claims, why_not_started
from busbar.operator.pods.volume_claims import claims_of_service
from busbar.operator.profiles.serving_speeds import measured, remembered
from busbar.operator.profiles.table import rates_of
from busbar.operator.serving.adapters import adapter_rows
from busbar.operator.serving.conditions import conditions_of, outlines
from busbar.operator.serving.crashes import crashes, restarts_of
from busbar.operator.serving.departures import departures
from busbar.operator.serving.fleet_plan import Change
from busbar.operator.serving.load_status import load_fields
from busbar.operator.serving.replicas import kept_pods, startable
from busbar.operator.serving.scaling_status import (
    by_pool,
    capped_words,
    forecast_status,
    level_status,
    per_token,
    pool_rows,
)
from busbar.operator.serving.shortage import shortage
from busbar.operator.serving.tenant_status import kv_parts, tenant_rows
from busbar.operator.serving.view import ServiceView
from busbar.operator.watch.projections import Pod, Sleep
from busbar.operator.write.status import Held, add_usage, clip


def status_of(
    view: ServiceView, decisions: tuple[Decision, ...], desired: int, why: Change
) -> ModelServiceStatus | None:
    """The status to write; None: nothing of it changed."""
    service, old = view.service, view.status
    alive = [p for p in view.pods if not p.ended]
    serving = [p for p in alive if p.takes_requests]
    phase, reason, message = _phase(view, desired, alive, serving, decisions)
    counted = old.last_usage_time
    due = counted is None or view.now - counted >= timedelta(seconds=view.settings.usage_period_s)
    fields: dict[str, object] = {
        "observed_generation": service.metadata.generation,
        "replicas": len([p for p in alive if not p.deleting]),
        "ready_replicas": len(serving),
        "desired_replicas": desired,
        "sleeping_replicas": sum(p.sleep is Sleep.ASLEEP and not p.leaving for p in alive) or None,
        "restarts": sum(restarts_of(p, view.readings) for p in alive),
        "selector": f"{LABEL_KIND}={manifests.KIND_SERVICE},{LABEL_JOB}={service.metadata.name}",
        "model_id": service.spec.model_id or service.metadata.name,
        "url": view.settings.gateway_public_url,
        "pools": pool_rows(service, alive, view.pools, view.plan, desired, view.watts if due else None)
        or None,
        "adapters": adapter_rows(service, serving, view.readings, old.adapters) or None,
        "departures": departures(view),
        "crashes": crashes(view, alive),
        "lost_work_caused": caused(old.lost_work_caused, view.lost),
        "phase": phase,
        "reason": str(reason),
        "message": clip(message),
    }
    entry = _entry(view, alive, desired, why)
    if entry is not None:
        fields["scaling_history"] = [*(old.scaling_history or ()), entry][-MOST_DECISIONS:]
    if is_scaling(old, desired):
        fields["last_scale_time"] = view.now
    lacks = shortage(view, desired, decisions)
    found = conditions_of(view, phase, reason, message, running=bool(serving), lacks=lacks)
    if (phase, reason) != (old.phase, old.reason) or outlines(found) != outlines(old.conditions):
        fields["conditions"] = found
    seen = _last_request(view)
    transition = any(
        fields[k] != getattr(old, k)
        for k in ("phase", "reason", "replicas", "desired_replicas", "sleeping_replicas")
    )
    if seen is not None and (
        transition or old.last_request_time is None or seen - old.last_request_time >= timedelta(seconds=15)
    ):
        fields["last_request_time"] = seen
    tenants = tenant_rows(view.service, view.demand, serving, view.readings, old.tenants)
    holds = bool(alive) or bool(old.replicas)
    level = level_status(service, view.plan, view.day)
    tells = "last_request_time" in fields or transition or due or _rule(level) != _rule(old.slo)
    if tells:
        fields["slo"], fields["forecast"] = level, forecast_status(view.plan)
        fields["cost_per_million_tokens"], fields["joules_per_token"] = per_token(view.day)
    if tells or kv_parts(tenants) != kv_parts(old.tenants):  # a replica has others since it was asked
        fields["tenants"] = tenants
    if transition or due:
        fields |= load_fields(view, serving)
    new = old.model_copy(update=fields)
    if transition or (due and holds):
        new = _count(view, new.model_copy(update={"measured": _measured(view, alive)}))
    return new if new != old else None


def _entry(view: ServiceView, alive: list[Pod], desired: int, why: Change) -> ScalingDecision | None:
    """The next line of the scaling history; None: nothing changes, and what holds it back is told already."""
    old, history = view.status, view.status.scaling_history or ()
    held = view.plan.held if view.plan is not None else None
    if old.desired_replicas is None:
        return None
    capped = capped_words(view.service, view.plan)
    if not is_scaling(old, desired) and capped:
        load = view.plan.ahead.now if view.plan is not None and view.plan.ahead is not None else None
        why = Change(ScalingCause.POWER, "", load, why.capacity_rps)
    elif not is_scaling(old, desired):
        same = takewhile(lambda entry: entry.desired == desired, reversed(history))
        if held is None or not desired or held.cause in {entry.cause for entry in same}:
            return None
        why = held
    said = (
        why.reason,
        capped,
        woken_words(alive, old.desired_replicas, desired),
        surplus_words(view, desired),
    )
    return ScalingDecision(
        time=view.now,
        previous=old.desired_replicas,
        desired=desired,
        previous_pools={row.pool: row.desired for row in old.pools or () if row.desired} or None,
        desired_pools={
            name: count for name, count in (by_pool(view.service, view.plan, desired) or {}).items() if count
        }
        or None,
        cause=why.cause,
        requests_per_second=why.load_rps,
        capacity_per_second=why.capacity_rps,
        reason=clip(" ".join(words for words in said if words)),
    )


def _measured(view: ServiceView, alive: list[Pod]) -> list[MeasuredReplica] | None:
    """What replicas measured. Forgotten while the service is suspended, when its model may change."""
    if view.service.spec.suspend and not alive:
        return None
    engine = EngineImage(view.rendering.workloads_image, view.settings.workloads_digests)
    lines = measured(((pod, place_of(pod)) for pod in alive), view.readings, engine, view.held_pods)
    return remembered(view.status.measured, lines) or None


def _rule(level: ServiceLevelStatus | None) -> str | None:
    return level.scaled_by if level is not None else None


def _count(view: ServiceView, status: ModelServiceStatus) -> ModelServiceStatus:
    """Adds usage since the last write, for the replicas that the old status names."""
    old = view.status
    since = old.last_usage_time or view.now
    seconds = (view.now - since) / timedelta(seconds=1)
    usage = status.usage
    per_pod = float(view.service.spec.shape.accelerators_per_pod)
    for entry in old.pools or ():
        pool = view.pools.get(entry.pool)
        rate = rates_of([pool])[pool.spec.accelerator] if pool is not None else 1.0
        usage = add_usage(usage, Held.of(entry.replicas * per_pod, pool, rate), seconds, view.energy_joules)
    return status.model_copy(update={"usage": usage, "last_usage_time": view.now})


def _last_request(view: ServiceView) -> datetime | None:
    """When the gateway last saw a request; from the status where the gateway does not know."""
    demand = view.demand
    if demand is None or demand.last_request_age_seconds is None:
        return view.status.last_request_time
    moment = (view.now - timedelta(seconds=demand.last_request_age_seconds)).replace(microsecond=0)
    known = view.status.last_request_time
    return moment if known is None or moment > known else known


def _phase(
    view: ServiceView, desired: int, alive: list[Pod], serving: list[Pod], decisions: tuple[Decision, ...]
) -> tuple[ServicePhase, str, str]:
    old = view.status
    if view.off is not None:
        if alive:
            text = f"{view.off[1]} {len(alive)} replicas finish their requests."
            return ServicePhase.DRAINING, Reason.DRAINING, text
        return ServicePhase.SUSPENDED, *view.off
    if not view.model.uri:
        return ServicePhase.PENDING, Reason.MODEL_NOT_READY, view.model.problem
    if view.missing_claims and not alive:
        return ServicePhase.PENDING, Reason.CLAIM_MISSING, view.missing_claims
    if serving:
        text = f"{len(serving)} of {desired} replicas take requests."
        if len(serving) > desired:
            text = f"{len(serving)} replicas take requests; {len(serving) - desired} of them will leave."
        waits = _wait(decisions)
        if len(serving) < desired and view.hindered:
            text = f"{text} Others cannot be made, and are tried again: {view.hindered}"
        elif _held(view, desired):
            text = f"{text} {view.budget.why}"
        elif len(serving) < desired and waits is not None:
            text = f"{text} {waits.message}"
        elif len(serving) < desired:
            told = old.message if old.reason == Reason.SERVING and old.message is not None else ""
            also = f"{text} {view.held_back}".rstrip()
            text = told if told.startswith(text) and told != text else also
        return ServicePhase.READY, Reason.SERVING, text
    asleep = [p for p in alive if p.sleep is Sleep.ASLEEP and not p.leaving]
    if desired == 0:
        if len(alive) > len(asleep):
            text = f"{len(alive) - len(asleep)} replicas finish their requests and leave."
            return ServicePhase.DRAINING, Reason.DRAINING, text
        if asleep:
            text = f"No replica takes requests; a request wakes one of {len(asleep)} that sleep."
            return ServicePhase.IDLE, Reason.IDLE, text
        return ServicePhase.IDLE, Reason.IDLE, "No replica runs; a request wakes the service."
    waits = _wait(decisions)
    starting = [p for p in alive if p.stays and not p.parked]
    waking = [p for p in starting if p.sleep is Sleep.WAKING]
    waking += [p for p in alive if p.stays and p.parked][: max(0, desired - len(starting))]
    if waking and len(waking) >= len(starting):
        return ServicePhase.STARTING, Reason.STARTING, f"{len(waking)} of {desired} replicas are waking up."
    if starting:
        mounts = mounts_of_claims(claims_of_service(view.service, view.model.uri))
        problem = why_not_started(starting, view.now, mounts)
        return (
            ServicePhase.STARTING,
            Reason.STARTING,
            problem or f"{len(starting)} of {desired} replicas are starting.",
        )
    if view.hindered:
        text = f"Its pods cannot be made, and are tried again: {view.hindered}"
        return ServicePhase.QUEUED, Reason.PODS_REFUSED, text
    if _held(view, desired):
        return ServicePhase.QUEUED, Reason.BUDGET_SPENT, view.budget.why
    if waits is not None:
        return ServicePhase.QUEUED, waits.reason, waits.message
    if view.held_back:
        said = old.message if old.reason == Reason.GUARANTEES_OF_OTHERS else None
        # The amounts in it may differ by now: a wait is told once.
        return ServicePhase.QUEUED, Reason.GUARANTEES_OF_OTHERS, said or view.held_back
    over = (Reason.BUDGET_SPENT, Reason.GUARANTEES_OF_OTHERS)
    told_before = old.phase is ServicePhase.QUEUED and old.reason not in over
    if told_before and old.reason and old.message:
        return ServicePhase.QUEUED, old.reason, old.message
    return ServicePhase.QUEUED, Reason.WAITING, "Waiting for the scheduler's next round."


def _held(view: ServiceView, desired: int) -> bool:
    """Whether replicas are wanted that are not started because the tenant's budget is spent."""
    kept = len(kept_pods(view.service, view.pods))
    return bool(view.budget.why) and desired > kept and not startable(view.service, view.pods, view.budget)


def _wait(decisions: tuple[Decision, ...]) -> Wait | None:
    return next((d for d in decisions if isinstance(d, Wait)), None)


def surplus_words(view: ServiceView, desired: int) -> str:
    """Why replicas that are not wanted any more sleep or leave; empty where the number does not fall, or none may sleep."""
    if view.warmth is None or view.off is not None or desired >= (view.status.desired_replicas or 0):
        return ""
    return view.warmth.choose(desired).reason


def woken_words(pods: Iterable[Pod], before: int, desired: int) -> str:
    """A sentence about the sleeping replicas that a change of the count wakes; empty for none."""
    asleep = sum(p.parked and not p.leaving for p in pods)
    woken = min(asleep, max(0, desired - before))
    return f"Sleeping replicas that wake: {woken}." if woken else ""


def is_scaling(old: ModelServiceStatus, desired: int) -> bool:
    """Whether the number of desired replicas changes."""
    return old.desired_replicas is not None and desired != old.desired_replicas
