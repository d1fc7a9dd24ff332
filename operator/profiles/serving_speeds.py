"""Speeds that serving replicas measured, for a service's status and for the cells of PerformanceProfiles.

Replicas of one accelerator type measure nearly the same; of each type the one with the most measured steps is
used, and before others one whose running container was checked (`pods/engine_image.py`). Only what such a replica of
our own engine measured is shared: a report from any other image could falsify a class that all tenants share. Nor is what
one measured whose boards power limits held: the table's speeds are those without limits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from busbar.kube.contracts.report import ServingReport
from busbar.kube.contracts.workload import ServingStatus
from busbar.kube.types import ModelService
from busbar.kube.types.engines import ServiceEngine
from busbar.kube.types.performance_profile import StepModel
from busbar.kube.types.service_status import MOST_MEASURED, MeasuredReplica
from busbar.operator.pods.engine_image import EngineImage, check
from busbar.operator.watch.projections import Pod
from busbar.scheduler import Placement
from busbar.scheduler.fit.online import TRUSTED_STEPS

GIB = 2**30


def is_ours(service: ModelService) -> bool:
    """Whether the replicas run our engine from the platform's image."""
    return service.spec.engine is ServiceEngine.BUILTIN and service.spec.image is None


def measured(
    places: Iterable[tuple[Pod, Placement | None]],
    readings: Mapping[str, ServingStatus],
    engine: EngineImage,
    held_pods: Collection[str] = (),
) -> list[MeasuredReplica]:
    """One line for each placement and class for which a replica has measured a speed.

    Args:
        held_pods: uids of pods whose boards power limits have held lately.
    """
    best: dict[tuple[str, str, int, str], tuple[tuple[bool, bool, int], MeasuredReplica]] = {}
    for pod, placement in places:
        reading = readings.get(pod.uid)
        report = reading.report if reading is not None else None
        if placement is None or report is None or report.step_model is None:
            continue
        held = pod.uid in held_pods
        line = _line(placement, report, verified=check(None, (pod,), engine).verified, limited=held)
        place = _place(line)
        rank = (line.verified, not line.limited, report.step_model.steps)
        if place not in best or rank > best[place][0]:
            best[place] = (rank, line)
    return [best[place][1] for place in sorted(best)][:MOST_MEASURED]


def remembered(
    old: Iterable[MeasuredReplica] | None, new: Iterable[MeasuredReplica]
) -> list[MeasuredReplica]:
    """The new lines, and the old ones of the same class for placements where no replica runs now, in whatever mode. A new
    line of too few steps to decide anything does not take the place of an old one that had enough: those of a vLLM begin
    anew with the operator that counts them."""
    old = list(old or ())
    trusted = {_place(line): line for line in old if line.step_model.steps >= TRUSTED_STEPS}
    new = [
        line if line.step_model.steps >= TRUSTED_STEPS else trusted.get(_place(line), line) for line in new
    ]
    classes = {line.workload_class for line in new}
    places = {_place(line)[:3] for line in new}
    kept = [
        line for line in old if not new or (line.workload_class in classes and _place(line)[:3] not in places)
    ]
    return sorted([*new, *kept], key=_place)[:MOST_MEASURED]


def _place(line: MeasuredReplica) -> tuple[str, str, int, str]:
    return (line.workload_class, line.accelerator, line.accelerators, line.mode)


def of_class(services: Iterable[ModelService], workload_class: str) -> list[MeasuredReplica]:
    """The lines of accepted services for a class; of several for one placement the first."""
    found: dict[tuple[str, int, str], MeasuredReplica] = {}
    for service in sorted(services, key=lambda s: s.metadata.uid):
        for line in believed(service):
            if line.workload_class == workload_class:
                found.setdefault((line.accelerator, line.accelerators, line.mode), line)
    return list(found.values())


def believed(service: ModelService) -> list[MeasuredReplica]:
    """The lines of a service that may fill cells of the shared table."""
    return [line for line in checked(service) if not line.limited]


def checked(service: ModelService) -> list[MeasuredReplica]:
    """The lines of a service whose replicas run our engine, also those that were measured under limits."""
    status = service.status
    lines = status.measured or () if status is not None and is_ours(service) else ()
    return [line for line in lines if line.verified]


def _line(placement: Placement, report: ServingReport, *, verified: bool, limited: bool) -> MeasuredReplica:
    model = report.step_model
    assert model is not None
    return MeasuredReplica(
        workload_class=report.workload_class,
        accelerator=placement.accelerator,
        accelerators=max(1, placement.per_pod.accelerators_m // 1000),
        mode=report.mode,
        tokens_per_second=_short(report.decode_tokens_per_second),
        prefill_tokens_per_second=_short(report.prefill_tokens_per_second),
        memory_gib=_memory_gib(report),
        kv_tokens=report.cache_tokens,
        step_model=StepModel(**{name: _short(getattr(model, name)) for name in StepModel.model_fields}),
        verified=verified,
        limited=limited,
    )


def _memory_gib(report: ServingReport) -> float | None:
    """What stays on the accelerator; None: the engine does not tell."""
    if not report.weight_bytes:
        return None
    return round((max(0, report.weight_bytes - report.streamed_bytes) + report.kv_bytes) / GIB, 3)


def _short(value: float | None) -> float | None:
    """Rounded to four significant digits: more is noise, and would cause a write each time."""
    return None if value is None else float(f"{value:.4g}")
