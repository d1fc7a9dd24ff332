"""What pages show of jobs. Pure: an object and a time in, plain values out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from busbar.api.portal.formatting import ago, as_number, kilowatt_hours, money, number
from busbar.api.portal.object_views import Badge, ConditionRows, badge, conditions
from busbar.kube.contracts.preview import span
from busbar.kube.types import TrainingJob
from busbar.kube.types.forecast import StartForecast
from busbar.kube.types.lost_work import LostWork
from busbar.kube.types.meta import ANNOTATION_REQUESTER
from busbar.kube.types.service_words import (
    charged_words,
)
from busbar.kube.types.training_status import (
    TERMINAL_PHASES,
    CheckpointStatus,
    EvaluationResult,
    MemoryPlace,
    MemoryUse,
    Preview,
    Progress,
    TrainedModel,
    TrainingJobStatus,
    TrainingPhase,
    Usage,
    Worker,
)
from busbar.kube.types.training_words import (
    adapter_words,
    cap_words,
    disk_words,
    limit_words,
    link_words,
    memory_words,
    moment_words,
    owner_words,
    owners_at,
    phase_words,
    replaced_words,
    size_words,
    slowest_words,
)

_PLACES = {MemoryPlace.DEVICE: "Device", MemoryPlace.HOST: "Host", MemoryPlace.DISK: "Disk"}
_AGAIN = {
    "recompute": "activations are recomputed",
    "swap": "activations are recomputed from inputs in host memory",
}
ACTIVE = ("Admitted", "Starting", "Running", "Preempting")
FILTERS: dict[str, tuple[str, ...]] = {
    "active": ACTIVE,
    "waiting": ("Pending", "Queued"),
    "finished": ("Succeeded", "Failed"),
    "suspended": ("Suspended",),
}
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
    adapter: str
    trained: str
    bad_rows: str
    activations: str
    moments: str
    """In which format AdamW's are kept, if not exactly."""
    deadline: str
    deadline_said: str
    loss: str
    speed: str
    spent_on: str
    """What its steps are spent on; empty: not told."""
    slowest: str  # rank of a gang, in words
    slow_link: str
    """How slow the link to its accelerator is; empty: it is not."""
    lost_pods: str  # and made again, in words
    workers: tuple[tuple[int, str, float], ...]  # rank, seconds of a step, percent of the slowest's
    memory: tuple[tuple[str, str, tuple[tuple[str, str, float], ...]], ...]
    """By place: its name, what is planned and measured in words, and what it is for: name, size, percent of the largest."""
    eta: str
    eta_range: str
    checkpoint: str
    checkpoint_step: int | None
    checkpoint_rate: str
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
    energy: str
    """kWh; empty where none was measured."""
    energy_in_all: str
    """kWh at its end, if the rest uses as much for each step; empty where nobody knows."""
    power_cap: str
    """The limit of its boards, if it was admitted under one."""
    power_limits: str
    """What limits of its feed have cost it, in words; empty where none limits its boards."""
    nodes: tuple[str, ...]
    """Of each rank of its admission; empty once it has ended."""
    accelerators_per_pod: int
    suspended: bool
    finished: bool
    deleting: bool
    evaluation: dict[str, float]
    adapters: tuple[tuple[str, str], ...]
    """Name and progress of each, where a job trains several."""
    output: str
    conditions: ConditionRows
    waiting: list[tuple[str, str]]
    changes: list[dict[str, str]]
    preview: dict[str, Any]
    forecast: dict[str, str]
    place: str


def job_view(job: TrainingJob, now: datetime) -> JobView:
    """The view of a TrainingJob."""
    meta, spec, status = job.metadata, job.spec, job.status or TrainingJobStatus()
    progress, checkpoint = status.progress or Progress(), status.checkpoint or CheckpointStatus()
    admission, usage, waiting = status.admission, status.usage or Usage(), status.waiting or {}
    phase = status.phase or TrainingPhase.PENDING
    step, total = progress.step, progress.total_steps
    return JobView(
        namespace=meta.namespace or "",
        name=meta.name,
        uid=meta.uid,
        href=f"/jobs/{meta.namespace}/{meta.name}",
        badge=badge(job, phase),
        reason=status.reason or "",
        message=status.message or "",
        requester=meta.annotations.get(ANNOTATION_REQUESTER, ""),
        age=ago(meta.creation_timestamp, now),
        step=step,
        total=total,
        percent=100.0 * step / total if total else None,
        adapter=_what_is_trained(status.model),
        trained=_trained(status.model),
        bad_rows=number(progress.bad_rows or None, 0),
        activations=_AGAIN.get(progress.activations or "", ""),
        moments=moment_words(None if spec.engine is None else spec.engine.state),
        deadline=f"{spec.deadline.astimezone(UTC):%d %b %H:%M} UTC" if spec.deadline is not None else "",
        deadline_said=status.deadline.message if status.deadline is not None else "",
        loss=number(progress.loss, 4),
        speed=number(progress.tokens_per_second, 0),
        spent_on="" if progress.phases is None else phase_words(progress.phases),
        slowest=slowest_words(progress.workers or []),
        slow_link=link_words(progress.slow_link),
        lost_pods=replaced_words((admission and admission.replaced) or []),
        workers=_workers(progress.workers or []),
        memory=_memory(status.memory),
        eta=_eta(progress, phase),
        eta_range=_eta_range(progress, now),
        checkpoint=ago(checkpoint.saved_at, now),
        checkpoint_step=checkpoint.step if status.checkpoint is not None else None,
        checkpoint_rate=disk_words(checkpoint),
        lost=_lost(status.lost_work),
        pool=admission.pool if admission is not None else "",
        accelerator=admission.accelerator if admission is not None else "",
        mode=(admission.mode if admission is not None else None) or "",
        pods=f"{admission.pods} × {admission.accelerators_per_pod}"
        if admission is not None and admission.pods
        else "",
        why_here=admission.reason if admission is not None else "",
        attempt=status.attempt or 0,
        preemptions=status.preemptions or 0,
        restarts=status.restarts or 0,
        cost=money(usage.cost),
        accelerator_hours=number(usage.accelerator_seconds / 3600, 2),
        energy=kilowatt_hours(usage.energy_joules),
        energy_in_all=kilowatt_hours(usage.energy_joules * total / step)
        if usage.energy_joules and 0 < step < total and phase not in TERMINAL_PHASES
        else "",
        power_cap=cap_words(admission.power_cap_percent, admission.power_cap_watts)
        if admission is not None
        else "",
        power_limits=limit_words(status.power_of_attempt),
        nodes=tuple(admission.nodes) if admission is not None and phase not in TERMINAL_PHASES else (),
        accelerators_per_pod=admission.accelerators_per_pod if admission is not None else 0,
        suspended=spec.suspend,
        finished=phase in TERMINAL_PHASES,
        deleting=meta.deletion_timestamp is not None,
        evaluation=_evaluation(status.evaluation),
        adapters=tuple((row.name, adapter_words(row)) for row in status.adapters or ()),
        output=status.output_uri or (spec.output.uri if spec.output is not None else ""),
        conditions=conditions(status, now),
        waiting=waiting_facts(waiting),
        changes=[c for c in waiting.get("changes") or [] if isinstance(c, dict)],
        preview=_preview(status.preview),
        forecast=_forecast(status.forecast, now),
        place=status.reservation.sentence(now) if status.reservation is not None else "",
    )


def _what_is_trained(model: TrainedModel | None) -> str:
    """The adapter, or that weights are frozen; empty where everything is trained."""
    if model is None or model.adapter is not None:
        return (model.adapter if model is not None else None) or ""
    return "weights that are not frozen" if model.trainable_parameters < model.parameters else ""


def _trained(model: TrainedModel | None) -> str:
    """How much is trained; empty where that is everything."""
    if model is None or not _what_is_trained(model):
        return ""
    return f"{number(model.trainable_parameters, 0)} of {number(model.parameters, 0)} parameters"


def _evaluation(found: EvaluationResult | None) -> dict[str, float]:
    result = found or EvaluationResult()
    figures = {
        "This model": result.bits_per_byte,
        "Bigram": result.bigram_bits_per_byte,
        "N-gram": result.ngram_bits_per_byte,
    }
    return {label: value for label, value in figures.items() if value is not None}


def matches(job: TrainingJob, chosen: str, text: str) -> bool:
    """Whether a job passes the list's filter."""
    phase = (job.status.phase if job.status is not None else None) or TrainingPhase.PENDING
    if chosen in FILTERS and badge(job, phase).text not in FILTERS[chosen]:
        return False
    wanted = text.strip().lower()
    return not wanted or wanted in _searched(job).lower()


def _searched(job: TrainingJob) -> str:
    """Where the list's filter looks: name, requester, pool and reason."""
    meta, status = job.metadata, job.status or TrainingJobStatus()
    pool = status.admission.pool if status.admission is not None else ""
    requester = meta.annotations.get(ANNOTATION_REQUESTER, "")
    return f"{meta.namespace}/{meta.name} {requester} {pool} {status.reason or ''}"


def waiting_facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The scheduler's waiting record for people; amounts are thousandths of an accelerator, or MiB of
    memory."""
    memory = record.get("resource") in ("memory", "ephemeral-storage", "device-memory")
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


def _preview(found: Preview | None) -> dict[str, Any]:
    """What the last scheduling round would do with a job; empty when unknown."""
    if found is None:
        return {}
    return {
        "starts_now": found.starts_now,
        "pool": found.pool or "",
        "mode": found.mode or "",
        "reason": found.reason,
    }


def _forecast(found: StartForecast | None, now: datetime) -> dict[str, str]:
    """When a waiting job is expected to start and end; empty when there is no forecast."""
    if found is None:
        return {}
    return {
        "start": _ahead(found.start_p50, now),
        "start_late": _ahead(found.start_p90, now),
        "end": _ahead(found.end_p50, now) if found.end_p50 is not None else "",
        "end_late": _ahead(found.end_p90, now) if found.end_p90 is not None else "",
        "made": ago(found.made_at, now),
    }


def _ahead(moment: datetime, now: datetime) -> str:
    left_s = (moment - now).total_seconds()
    return f"in {span(left_s)}" if left_s > 0 else "any moment"


def _eta(progress: Progress, phase: TrainingPhase) -> str:
    if phase is not TrainingPhase.RUNNING:
        return ""
    return span(progress.eta_seconds) if progress.eta_seconds is not None else progress.eta or ""


def _workers(workers: Sequence[Worker]) -> tuple[tuple[int, str, float], ...]:
    """The pods of a gang by rank."""
    most = max((each.own_seconds for each in workers), default=0.0)
    return tuple(
        (each.rank, f"{each.own_seconds:g}", 100 * each.own_seconds / most if most else 0.0)
        for each in sorted(workers, key=lambda each: each.rank)
    )


def _memory(memory: MemoryUse | None) -> tuple[tuple[str, str, tuple[tuple[str, str, float], ...]], ...]:
    """The plan's bytes by owner; empty where they are not known."""
    if memory is None or not memory.owners:
        return ()
    bare = memory.model_copy(update={"owners": None})
    found = []
    for place, title in _PLACES.items():
        rows = owners_at(memory, place)
        most = max((row.mib for row in rows), default=0)
        if most:
            bars = tuple((owner_words(row), size_words(row.mib), 100 * row.mib / most) for row in rows)
            total = memory_words(bare, place) or size_words(sum(row.mib for row in rows))
            found.append((title, total, bars))
    return tuple(found)


def _eta_range(progress: Progress, now: datetime) -> str:
    """Time left at the present speed, and at the lowest plausible speed of its place."""
    middle, late = progress.eta_p50, progress.eta_p90
    if middle is None or late is None or middle <= now:
        return ""
    return f"{span((middle - now).total_seconds())} at this speed, {span((late - now).total_seconds())} at the slowest believed"


def _lost(lost: LostWork | None) -> str:
    words = f"{lost.steps} steps, {span(lost.seconds)}" if lost is not None and lost.steps else ""
    charged = charged_words(lost)
    return f"{words}; charged: {charged}".removeprefix("; ") if charged else words
