"""`busbar describe`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from busbar.cli.completions import objects
from busbar.cli.errors import NotFound, UsageProblem
from busbar.cli.output import age, columns, duration, emit, facts, output_option
from busbar.cli.session import Session, connected

SCALINGS = 10
"""Changes of a service's replicas that are shown."""
TENANT = ("tenant", "tenants", "bbtenant", "tenant.busbar.dev", "tenants.busbar.dev")

if TYPE_CHECKING:
    from busbar.cli.results import Event, Object


@click.command(
    epilog="""\b
Examples:
  busbar describe my-job
  busbar describe service/my-model -o yaml
  busbar describe my-job --watch                  follow it; exit 6 if it fails
  busbar describe tenant/research                 what it uses of its limits
"""
)
@click.argument("name", shell_complete=objects)
@click.option("-w", "--watch", is_flag=True, help="Follow until the job has ended or the service is ready.")
@output_option
@connected
def describe(session: Session, name: str, watch: bool, output: str) -> None:
    """Show one job, service or tenant: state, reason, progress, checkpoints, cost, events; a tenant's limits.

    NAME is a name, or job/NAME, service/NAME or tenant/NAME.
    """
    kind, _, tenant = name.rpartition("/")
    if kind.lower() in TENANT:
        if watch:
            raise UsageProblem(f"{name}: --watch follows jobs and services; a tenant never ends")
        document = _find_tenant(session, tenant)
        emit(output, document, lambda: _tenant(document), [f"tenant/{tenant}"])
        return
    found = session.find(name)
    if watch:
        from busbar.cli.follow import follow

        found = follow(lambda: session.client.get(found.kind, found.namespace, found.name))
    events = session.client.events(found) if output == "table" else []
    emit(output, found.document, lambda: _page(found, events), [found.reference])


def _find_tenant(session: Session, name: str) -> dict[str, Any]:
    for document in session.client.tenants():
        if document["metadata"]["name"] == name:
            return document
    raise NotFound(f"There is no tenant {name!r} that you may see. `busbar list tenants` shows yours.")


def _tenant(document: dict[str, Any]) -> str:
    from busbar.kube.types import Tenant
    from busbar.kube.types.inference import use_words
    from busbar.kube.types.limits import limit_rows
    from busbar.kube.types.tenant import TenantStatus

    tenant = Tenant.model_validate(document)
    spec, status = tenant.spec, tenant.status or TenantStatus()
    parts = [
        facts(
            [
                ("Name", tenant.metadata.name),
                ("Title", spec.display_name),
                ("Namespaces", ", ".join(spec.namespaces or [])),
                ("Weight", spec.weight),
                ("Running", status.running),
                ("Waiting", status.waiting),
                ("Held", ", ".join(f"{row.count:g} {row.accelerator}" for row in status.allocated or [])),
                ("Inference", use_words(spec.inference, status.inference)),
            ]
        )
    ]
    limits = limit_rows(spec.limits, spec.namespaces or (), status.limit_use or (), status.waiting_jobs)
    if not limits:
        return f"{parts[0]}\n\nLimits\nnone: the number of its objects is not limited"
    rows = [
        (row.namespace or "all", row.what, f"{row.used:.10g}" if row.used is not None else None, row.most)
        for row in limits
    ]
    return "\n\n".join([*parts, "Limits\n" + columns(["namespace", "what", "used", "limit"], rows)])


def _page(found: Object, events: list[Event]) -> str:
    from busbar.cli.results import TRAINING_JOB

    common: list[tuple[str, object]] = [
        ("Name", found.name),
        ("Namespace", found.namespace),
        ("Kind", found.kind.name),
        ("Age", age(found.created_at)),
        ("Phase", found.phase),
        ("Reason", found.reason),
        ("Message", found.message),
    ]
    own = _job(found) if found.kind is TRAINING_JOB else _service(found)
    parts = [facts(common + own)]
    scalings = _scalings(found) if found.kind is not TRAINING_JOB else ""
    if scalings:
        parts.append(scalings)
    if found.kind is not TRAINING_JOB:
        parts += filter(None, (_departures(found), _crashes(found)))
    conditions = [c for c in found.status.get("conditions") or [] if isinstance(c, dict)]
    if conditions:
        rows = [(c.get("type"), c.get("status"), c.get("reason"), c.get("message")) for c in conditions]
        parts.append("Conditions\n" + columns(["type", "status", "reason", "message"], rows))
    if events:
        lines = [(e.last_seen, e.type, e.reason, e.object, e.message) for e in events[:20]]
        parts.append("Events\n" + columns(["last seen", "type", "reason", "object", "message"], lines))
    return "\n\n".join(parts)


def _step(seconds: dict[str, Any]) -> str | None:
    """Measured and predicted seconds of a step."""
    predicted, measured = seconds.get("predicted"), seconds.get("measured")
    if predicted is None:
        return None
    if not measured:
        return f"{predicted:.3g} s predicted"
    return f"{measured:.3g} s (predicted {predicted:.3g}, {seconds.get('ratio') or 0:.2f} of it)"


def _speed(progress: dict[str, Any]) -> str | None:
    tokens, tflops = progress.get("tokensPerSecond"), progress.get("modelTflops")
    if not tokens:
        return None
    return f"{tokens:.0f} tokens/s" + (f", {tflops:.3g} model TFLOP/s" if tflops else "")


def _phases(percent: dict[str, Any]) -> str | None:
    from busbar.kube.types.training_status import StepPhases
    from busbar.kube.types.training_words import phase_words

    return phase_words(StepPhases.model_validate(percent)) or None


def power_words(status: Mapping[str, Any]) -> tuple[str, str]:
    """Of a job its power cap, and the limits of its boards with what they have cost; each empty where there is none."""
    from busbar.kube.types.training_status import TrainingJobStatus
    from busbar.kube.types.training_words import cap_words, limit_words

    admission = status.get("admission") or {}
    cap = cap_words(admission.get("powerCapPercent"), admission.get("powerCapWatts"))
    fields = {name: status[name] for name in ("attempt", "power") if name in status}
    limits = limit_words(TrainingJobStatus.model_validate(fields).power_of_attempt)
    return f"{cap}, until its feed has watts left" if cap else "", limits


def _checkpoint(checkpoint: dict[str, Any]) -> str | None:
    from busbar.kube.types.training_status import CheckpointStatus
    from busbar.kube.types.training_words import disk_words

    if not checkpoint.get("step"):
        return None
    rate = disk_words(CheckpointStatus.model_validate(checkpoint))
    return ", ".join(filter(None, (f"step {checkpoint['step']}", checkpoint.get("savedAt"), rate)))


def _slow_link(slow: dict[str, Any] | None) -> str | None:
    from busbar.kube.types.training_status import SlowLink
    from busbar.kube.types.training_words import link_words

    return link_words(SlowLink.model_validate(slow)) if slow else None


def _slowest(workers: list[dict[str, Any]]) -> str | None:
    from busbar.kube.types.training_status import Worker
    from busbar.kube.types.training_words import slowest_words

    return slowest_words([Worker.model_validate(each) for each in workers]) or None


def _replaced(replaced: list[dict[str, Any]]) -> str | None:
    from busbar.kube.types.training_status import ReplacedPod
    from busbar.kube.types.training_words import replaced_words

    return replaced_words([ReplacedPod.model_validate(each) for each in replaced]) or None


def _charged(lost: dict[str, Any]) -> str | None:
    """What of the lost work is charged to the services that the job gave way to."""
    from busbar.kube.types.lost_work import LostWork
    from busbar.kube.types.service_words import charged_words

    return charged_words(LostWork.model_validate(lost)) or None if lost else None


def _job(found: Object) -> list[tuple[str, object]]:
    from busbar.kube.types.training_words import moment_words

    status, progress = found.status, found.progress
    steps = f"{progress.step} of {progress.total_steps} steps" if progress.total_steps else None
    checkpoint = _part(status, "checkpoint")
    lost, evaluation = _part(status, "lostWork"), _part(status, "evaluation")
    power_cap, power_limits = power_words(status)
    quality = None
    if evaluation.get("bitsPerByte") is not None:
        quality = f"{evaluation['bitsPerByte']:.3f} bits per byte"
        if evaluation.get("bigramBitsPerByte") is not None:
            quality += f" (bigram {evaluation['bigramBitsPerByte']:.3f}"
            if evaluation.get("ngramBitsPerByte") is not None:
                quality += f", n-gram {evaluation['ngramBitsPerByte']:.3f}"
            quality += ")"
    return [
        *_placement(status),
        *_forecast(status),
        ("Power cap", power_cap or None),
        ("Power limits", power_limits or None),
        ("Place", _place(status)),
        ("Progress", steps),
        ("Bad rows", _part(status, "progress").get("badRows") or None),
        ("Activations", _part(status, "progress").get("activations")),
        ("Moments", moment_words(_part(found.spec, "engine").get("state")) or None),
        ("Deadline", _deadline(found)),
        ("Trained", _trained(_part(status, "model"))),
        *_adapters(status),
        ("Loss", progress.loss),
        ("Speed", _speed(_part(status, "progress"))),
        ("Step", _step(_part(_part(status, "progress"), "stepSeconds"))),
        ("Spent on", _phases(_part(_part(status, "progress"), "phases"))),
        ("Lost pods", _replaced(_part(status, "admission").get("replaced") or [])),
        ("Slowest rank", _slowest(_part(status, "progress").get("workers") or [])),
        ("Slow link", _slow_link(_part(status, "progress").get("slowLink"))),
        *_memory(_part(status, "memory")),
        ("Left", duration(progress.eta_seconds) if progress.eta_seconds is not None else None),
        ("Checkpoint", _checkpoint(checkpoint)),
        ("Attempts", status.get("attempt")),
        ("Preemptions", status.get("preemptions")),
        (
            "Lost work",
            f"{lost['steps']} steps, {duration(lost.get('seconds') or 0)}" if lost.get("steps") else None,
        ),
        ("Of it charged", _charged(lost)),
        ("Quality", quality),
        ("Output", status.get("outputUri") or _part(found.spec, "output").get("uri")),
        *_usage(status),
    ]


def _memory(memory: dict[str, Any]) -> list[tuple[str, object]]:
    """What the plan has the memories and disks for."""
    from busbar.kube.types.training_status import MemoryPlace, MemoryUse
    from busbar.kube.types.training_words import memory_words

    known = MemoryUse.model_validate(memory)
    return [
        (f"{place.value.capitalize()} memory" if place is not MemoryPlace.DISK else "Disk", words)
        for place in MemoryPlace
        if (words := memory_words(known, place))
    ]


def _trained(model: dict[str, Any]) -> str | None:
    """The adapter, or that weights are frozen, and how much is trained; nothing where that is everything."""
    trained, whole = model.get("trainableParameters", 0), model.get("parameters", 0)
    what = model.get("adapter") or ("weights that are not frozen" if trained < whole else None)
    return None if what is None else f"{what}: {trained:,} of {whole:,} parameters"


def _adapters(status: dict[str, Any]) -> list[tuple[str, object]]:
    """Each of several adapters."""
    from busbar.kube.types.training_status import AdapterProgress
    from busbar.kube.types.training_words import adapter_words

    rows = [AdapterProgress.model_validate(row) for row in status.get("adapters") or []]
    return [(f"Adapter {row.name}", adapter_words(row)) for row in rows]


def _service(found: Object) -> list[tuple[str, object]]:
    from busbar.kube.types.service_access import Access
    from busbar.kube.types.service_status import ModelServiceStatus
    from busbar.kube.types.service_words import (
        access_facts,
        adapter_facts,
        count_words,
        level_facts,
        loss_facts,
        pool_words,
    )

    status, known = found.status, ModelServiceStatus.model_validate(found.status)
    access = found.spec.get("access")
    return [
        ("Model", status.get("modelId")),
        ("URL", status.get("url")),
        ("Replicas", count_words(known)),
        ("Pools", ", ".join(pool_words(row) for row in known.pools or ())),
        *access_facts(Access.model_validate(access) if access else None, known),
        *adapter_facts(known),
        *level_facts(known),
        *loss_facts(known),
        *_usage(status),
    ]


def _scalings(found: Object) -> str:
    """The last changes of a service's replicas, the newest first."""
    from busbar.kube.types.service_status import ModelServiceStatus
    from busbar.kube.types.service_words import change_words

    history = ModelServiceStatus.model_validate(found.status).scaling_history or []
    rows = [
        (age(entry.time), change_words(entry), entry.cause, entry.reason)
        for entry in reversed(history[-SCALINGS:])
    ]
    return "Last scalings\n" + columns(["age", "change", "cause", "why"], rows) if rows else ""


def _departures(found: Object) -> str:
    """The last replicas of a service whose streams moved when they left, the newest first."""
    from busbar.kube.types.service_status import ModelServiceStatus
    from busbar.kube.types.service_words import departure_words

    known = ModelServiceStatus.model_validate(found.status).departures or []
    rows = [(age(row.time), row.replica, departure_words(row)) for row in reversed(known)]
    return "Streams that moved\n" + columns(["age", "replica", "what"], rows) if rows else ""


def _crashes(found: Object) -> str:
    """The last crashes of a service's replicas that serve again, the newest first."""
    from busbar.kube.types.service_status import ModelServiceStatus
    from busbar.kube.types.service_words import crash_words

    known = ModelServiceStatus.model_validate(found.status).crashes or []
    rows = [(age(row.time), row.replica, crash_words(row)) for row in reversed(known)]
    return "Crashes\n" + columns(["age", "replica", "what ended its server"], rows) if rows else ""


def _placement(status: dict[str, Any]) -> list[tuple[str, object]]:
    admission = _part(status, "admission")
    if not admission:
        return []
    where = f"{admission.get('pods')} × {admission.get('acceleratorsPerPod')} {admission.get('accelerator')}"
    return [
        ("Pool", admission.get("pool")),
        ("Shape", where),
        ("Mode", admission.get("mode")),
        ("Nodes", ", ".join(admission.get("nodes") or [])),
        ("Why there", admission.get("reason")),
    ]


def _forecast(status: dict[str, Any]) -> list[tuple[str, object]]:
    """When a waiting job is expected to start and to end."""
    forecast = _part(status, "forecast")

    def said(p50: str, p90: str) -> str | None:
        if not forecast.get(p50) or not forecast.get(p90):
            return None
        return f"likely {_ahead(forecast[p50])}, nine times in ten {_ahead(forecast[p90])} or sooner"

    return [("Starts", said("startP50", "startP90")), ("Ends", said("endP50", "endP90"))]


def _deadline(found: Object) -> str | None:
    """The deadline, and what is said of it."""
    at, said = found.spec.get("deadline"), _part(found.status, "deadline")
    if not at:
        return None
    return f"{at}: {said['message']}" if said.get("message") else str(at)


def _place(status: dict[str, Any]) -> str | None:
    """The place that is collected for a waiting job."""
    found = _part(status, "reservation")
    if not found:
        return None
    from busbar.kube.types.training_status import Reservation

    return Reservation.model_validate(found).sentence(datetime.now(UTC))


def _ahead(moment: str) -> str:
    left_s = (datetime.fromisoformat(moment) - datetime.now(UTC)).total_seconds()
    return f"in {duration(left_s)}" if left_s > 0 else "any moment"


def _usage(status: dict[str, Any]) -> list[tuple[str, object]]:
    usage = _part(status, "usage")
    seconds = usage.get("acceleratorSeconds")
    return [
        ("Used", f"{duration(seconds)} of accelerators" if seconds else None),
        ("Cost", f"{usage['cost']:.2f}" if usage.get("cost") else None),
        ("Energy", _energy(usage.get("energyJoules") or 0.0, _part(status, "progress"))),
    ]


def _energy(joules: float, progress: dict[str, Any]) -> str | None:
    """So far, and at the end if the rest uses as much for each step."""
    if not joules:
        return None
    step, total = progress.get("step") or 0, progress.get("totalSteps") or 0
    in_all = f", about {joules * total / step / 3.6e6:.3f} at its end" if 0 < step < total else ""
    return f"{joules / 3.6e6:.3f} kWh so far{in_all}"


def _part(document: dict[str, Any], name: str) -> dict[str, Any]:
    part = document.get(name)
    return part if isinstance(part, dict) else {}
