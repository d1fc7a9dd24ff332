"""From objects to what pages show. Pure: an object and a time in, plain values out."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from busbar.api.clock import parse_time
from busbar.api.cluster import model_id
from busbar.api.kubernetes import Object
from busbar.api.portal.words import ago, grouped, money, number, whole
from busbar.api.preview import span
from busbar.api.projection import as_number
from busbar.kube.types.meta import ANNOTATION_REQUESTER

TONES = {
    "Running": "go",
    "Ready": "go",
    "Succeeded": "done",
    "Admitted": "go",
    "Starting": "go",
    "Pending": "wait",
    "Queued": "wait",
    "Preempting": "wait",
    "Draining": "wait",
    "Idle": "rest",
    "Suspended": "rest",
    "Failed": "bad",
}
ACTIVE = ("Admitted", "Starting", "Running", "Preempting")
FILTERS: dict[str, tuple[str, ...]] = {
    "active": ACTIVE,
    "waiting": ("Pending", "Queued"),
    "finished": ("Succeeded", "Failed"),
    "suspended": ("Suspended",),
}


@dataclass(frozen=True)
class Badge:
    """A phase as a coloured word."""

    text: str
    tone: str


@dataclass(frozen=True)
class JobView:
    """A TrainingJob as lists and its page show it."""

    namespace: str
    name: str
    uid: str
    href: str
    badge: Badge
    reason: str
    message: str
    requester: str
    age: str
    step: int
    total: int
    percent: float | None
    loss: str
    speed: str
    eta: str
    eta_range: str
    checkpoint: str
    checkpoint_step: int | None
    lost: str
    pool: str
    accelerator: str
    mode: str
    pods: str
    why_here: str
    attempt: int
    preemptions: int
    restarts: int
    cost: str
    accelerator_hours: str
    suspended: bool
    finished: bool
    deleting: bool
    evaluation: dict[str, float]
    output: str
    conditions: list[dict[str, str]]
    waiting: list[tuple[str, str]]
    changes: list[dict[str, str]]
    preview: dict[str, Any]
    forecast: dict[str, str]


def job_view(obj: Object, now: datetime) -> JobView:
    """The view of a TrainingJob."""
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    progress, admission = status.get("progress") or {}, status.get("admission") or {}
    checkpoint, lost = status.get("checkpoint") or {}, status.get("lostWork") or {}
    usage, waiting = status.get("usage") or {}, status.get("waiting") or {}
    phase = str(status.get("phase") or "Pending")
    step, total = whole(progress.get("step")), whole(progress.get("totalSteps"))
    return JobView(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        href=f"/jobs/{meta['namespace']}/{meta['name']}",
        badge=Badge("Deleting" if meta.get("deletionTimestamp") else phase, TONES.get(phase, "wait")),
        reason=str(status.get("reason") or ""),
        message=str(status.get("message") or ""),
        requester=str((meta.get("annotations") or {}).get(ANNOTATION_REQUESTER, "")),
        age=ago(meta.get("creationTimestamp"), now),
        step=step,
        total=total,
        percent=100.0 * step / total if total else None,
        loss=number(progress.get("loss"), 4),
        speed=grouped(progress.get("tokensPerSecond")),
        eta=_eta(progress, phase),
        eta_range=_eta_range(progress, now),
        checkpoint=ago(checkpoint.get("savedAt"), now),
        checkpoint_step=checkpoint.get("step"),
        lost=_lost(lost),
        pool=str(admission.get("pool") or ""),
        accelerator=str(admission.get("accelerator") or ""),
        mode=str(admission.get("mode") or ""),
        pods=f"{admission['pods']} × {admission.get('accelerators_per_pod', admission.get('acceleratorsPerPod', 1))}"
        if admission.get("pods")
        else "",
        why_here=str(admission.get("reason") or ""),
        attempt=whole(status.get("attempt")),
        preemptions=whole(status.get("preemptions")),
        restarts=whole(status.get("restarts")),
        cost=money(usage.get("cost")),
        accelerator_hours=number((as_number(usage.get("acceleratorSeconds")) or 0) / 3600, 2),
        suspended=bool(spec.get("suspend")),
        finished=phase in ("Succeeded", "Failed"),
        deleting=bool(meta.get("deletionTimestamp")),
        evaluation={
            label: value
            for label, key in (
                ("This model", "bitsPerByte"),
                ("Bigram", "bigramBitsPerByte"),
                ("N-gram", "ngramBitsPerByte"),
            )
            if (value := as_number((status.get("evaluation") or {}).get(key))) is not None
        },
        output=str(status.get("outputUri") or (spec.get("output") or {}).get("uri") or ""),
        conditions=conditions(status, now),
        waiting=waiting_facts(waiting),
        changes=[c for c in waiting.get("changes") or [] if isinstance(c, dict)],
        preview=_preview(status.get("preview") or {}),
        forecast=_forecast(status.get("forecast") or {}, now),
    )


@dataclass(frozen=True)
class ServiceView:
    """A ModelService as lists and its page show it."""

    namespace: str
    name: str
    uid: str
    href: str
    badge: Badge
    reason: str
    message: str
    requester: str
    age: str
    model: str
    source: str
    ready: int
    desired: int
    span: str
    pools: str
    url: str
    suspended: bool
    external: bool
    """A person set the replica count; the autoscaler keeps out."""
    deleting: bool
    cost: str
    accelerator_hours: str
    conditions: list[dict[str, str]]
    scaling: list[dict[str, str]]
    can_answer: bool


def service_view(obj: Object, now: datetime) -> ServiceView:
    """The view of a ModelService."""
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    phase = str(status.get("phase") or "Pending")
    model, usage = spec.get("model") or {}, status.get("usage") or {}
    low = int(spec.get("minReplicas", 1))
    high = int(spec.get("maxReplicas") or max(low, 1))
    return ServiceView(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        href=f"/services/{meta['namespace']}/{meta['name']}",
        badge=Badge("Deleting" if meta.get("deletionTimestamp") else phase, TONES.get(phase, "wait")),
        reason=str(status.get("reason") or ""),
        message=str(status.get("message") or ""),
        requester=str((meta.get("annotations") or {}).get(ANNOTATION_REQUESTER, "")),
        age=ago(meta.get("creationTimestamp"), now),
        model=model_id(obj),
        source=f"TrainingJob {model['trainingJob']}"
        if model.get("trainingJob")
        else str(model.get("uri") or ""),
        ready=whole(status.get("readyReplicas")),
        desired=whole(status.get("desiredReplicas")),
        span=f"{low} to {high}",
        pools=", ".join(f"{p.get('replicas', 0)} on {p.get('pool', '')}" for p in status.get("pools") or []),
        url=str(status.get("url") or ""),
        suspended=bool(spec.get("suspend")),
        external=spec.get("replicas") is not None,
        deleting=bool(meta.get("deletionTimestamp")),
        cost=money(usage.get("cost")),
        accelerator_hours=number((as_number(usage.get("acceleratorSeconds")) or 0) / 3600, 2),
        conditions=conditions(status, now),
        scaling=[
            {
                "when": ago(row.get("time"), now),
                "change": f"{row.get('previous', 0)} → {row.get('desired', 0)}",
                "reason": str(row.get("reason") or ""),
            }
            for row in reversed(status.get("scalingHistory") or [])
        ],
        can_answer=not spec.get("suspend") and phase not in ("Failed", "Suspended"),
    )


def matches(view: JobView, chosen: str, text: str) -> bool:
    """Whether a job passes the list's filter."""
    if chosen in FILTERS and view.badge.text not in FILTERS[chosen]:
        return False
    wanted = text.strip().lower()
    return (
        not wanted
        or wanted in f"{view.namespace}/{view.name} {view.requester} {view.pool} {view.reason}".lower()
    )


def conditions(status: Object, now: datetime) -> list[dict[str, str]]:
    """Conditions in the standard form, for a table."""
    return [
        {
            "type": str(c.get("type", "")),
            "status": str(c.get("status", "")),
            "reason": str(c.get("reason", "")),
            "message": str(c.get("message", "")),
            "since": ago(c.get("lastTransitionTime"), now),
        }
        for c in status.get("conditions") or []
    ]


_FACTS = (
    ("code", "Code"),
    ("resource", "Resource"),
    ("requested", "Asked for"),
    ("entitled", "Fair share now"),
    ("allocated", "Tenant holds"),
    ("limit", "Limit"),
    ("free", "Free"),
    ("position", "Place in the queue"),
)
_AMOUNTS = ("requested", "entitled", "allocated", "limit", "free")


def waiting_facts(record: Object) -> list[tuple[str, str]]:
    """The scheduler's record in words; amounts are thousandths of an accelerator, or MiB of memory."""
    memory = record.get("resource") in ("memory", "host-memory")
    facts = []
    for key, label in _FACTS:
        value = record.get(key)
        if value in (None, "", 0) and key not in ("free", "allocated"):
            continue
        if value is None:
            continue
        if key in _AMOUNTS:
            amount = as_number(value) or 0.0
            value = f"{number(amount, 0)} MiB" if memory else number(amount / 1000, 2)
        facts.append((label, str(value)))
    return facts


def _preview(found: Object) -> dict[str, Any]:
    """What the last scheduling round would do with a job; empty when nothing is said."""
    if not found:
        return {}
    return {
        "starts_now": bool(found.get("startsNow")),
        "pool": str(found.get("pool") or ""),
        "mode": str(found.get("mode") or ""),
        "reason": str(found.get("reason") or ""),
    }


def _forecast(found: Object, now: datetime) -> dict[str, str]:
    """When a waiting job is expected to start and end; empty when nothing is foretold."""
    middle, late = parse_time(found.get("startP50")), parse_time(found.get("startP90"))
    if middle is None or late is None:
        return {}
    end, last = parse_time(found.get("endP50")), parse_time(found.get("endP90"))
    return {
        "start": _ahead(middle, now),
        "start_late": _ahead(late, now),
        "end": _ahead(end, now) if end is not None else "",
        "end_late": _ahead(last, now) if last is not None else "",
        "made": ago(found.get("madeAt"), now),
    }


def _ahead(moment: datetime, now: datetime) -> str:
    left_s = (moment - now).total_seconds()
    return f"in {span(left_s)}" if left_s > 0 else "any moment"


def _eta(progress: Object, phase: str) -> str:
    if phase != "Running":
        return ""
    seconds = as_number(progress.get("etaSeconds"))
    return span(seconds) if seconds is not None else str(progress.get("eta") or "")


def _eta_range(progress: Object, now: datetime) -> str:
    """How long the rest takes at this speed, and at the lowest that is believed of its place."""
    middle, late = parse_time(progress.get("etaP50")), parse_time(progress.get("etaP90"))
    if middle is None or late is None or middle <= now:
        return ""
    return f"{span((middle - now).total_seconds())} at this speed, {span((late - now).total_seconds())} at the slowest believed"


def _lost(lost: Object) -> str:
    steps = whole(lost.get("steps"))
    return f"{steps} steps, {span(as_number(lost.get('seconds')) or 0.0)}" if steps else ""
