"""Which step model counts for a service's replicas in each pool, or a sentence why none does.

The service's own measurements come first (`status.measured`): they are of its own image and decide nothing for others.
For a type that it has not measured, the PerformanceProfile of its class counts, filled by other services, if this
service runs the platform's engine as they did. Where its replicas on one type run in several engine modes (while they
are replaced, or in pools that differ in memory) the slowest counts, of a profile the usual one.

A model is refused that no engine can have: coefficients that are negative or not a number, fitted to few steps, or with
an error too large to tell whether the target is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter

from busbar.kube.types import AcceleratorPool, ModelService, PerformanceProfile
from busbar.kube.types.model_service import ServiceLevel
from busbar.kube.types.performance_profile import StepModel as Reported
from busbar.kube.types.service_status import MeasuredReplica
from busbar.operator.profiles.serving_speeds import is_ours
from busbar.scheduler.autoscale.step_model import Slo, StepModel
from busbar.scheduler.errors import ServingModelError

LEAST_STEPS = 64
"""The engine trusts its own model from as many steps on."""
MOST_ERROR = 0.5
"""Part of the target per token that the model's error may reach."""
MOST_SECONDS = 60.0
"""No coefficient is larger: a step for one more token takes no minute."""
RESIDENT = "resident"


@dataclass(frozen=True)
class Speeds:
    """What is known of a service's replicas, by pool."""

    models: Mapping[str, StepModel]
    refused: Mapping[str, str]
    """Why a pool that the service may use has no model."""


def slo_of(level: ServiceLevel | None) -> Slo | None:
    """The targets, if they are both there."""
    if level is None or level.ttft_milliseconds is None or level.tpot_milliseconds is None:
        return None
    return Slo(level.ttft_milliseconds / 1000, level.tpot_milliseconds / 1000, level.percentile or 99.0)


def speeds(
    service: ModelService,
    pools: Iterable[AcceleratorPool],
    profiles: Iterable[PerformanceProfile],
    slo: Slo,
) -> Speeds:
    """The step models for the pools that the service may use."""
    lines = list((service.status.measured if service.status is not None else None) or ())
    shared = _shared(lines, profiles) if is_ours(service) else {}
    count = service.spec.shape.accelerators_per_pod
    models: dict[str, StepModel] = {}
    refused: dict[str, str] = {}
    for pool in pools:
        name, kind = pool.metadata.name, pool.spec.accelerator
        own = [(m.step_model, m.kv_tokens) for m in lines if (m.accelerator, m.accelerators) == (kind, count)]
        found = max(own, key=_step_s) if own else shared.get((kind, count))
        if found is None:
            refused[name] = f"no replica has measured its speed on {kind} yet"
            continue
        try:
            models[name] = usable(kind, *found, slo)
        except ServingModelError as error:
            refused[name] = str(error)
    return Speeds(models, refused)


def usable(kind: str, reported: Reported, kv_tokens: int | None, slo: Slo) -> StepModel:
    """The step model that an engine reported.

    Raises:
        ServingModelError: it cannot decide anything; says why.
    """
    if reported.steps < LEAST_STEPS:
        raise ServingModelError(
            f"the speed on {kind} is known from {reported.steps} steps; {LEAST_STEPS} are needed"
        )
    if not kv_tokens:
        raise ServingModelError(f"replicas on {kind} do not report how many tokens of context they hold")
    numbers = (
        reported.seconds_per_step,
        reported.seconds_per_sequence,
        reported.seconds_per_thousand_context_tokens / 1000,
        reported.seconds_per_prompt_token,
    )
    if any(math.isfinite(number) and number > MOST_SECONDS for number in numbers):
        raise ServingModelError(f"the step model of {kind} has a coefficient above {MOST_SECONDS:g} s")
    model = StepModel(kind, *numbers, 0.0, float(kv_tokens))
    if not reported.rms_error_seconds <= MOST_ERROR * slo.tpot_s:
        raise ServingModelError(
            f"the step model of {kind} errs by {1000 * reported.rms_error_seconds:.3g} ms per step, more than half of"
            f" the target of {1000 * slo.tpot_s:g} ms per token"
        )
    return model


def _shared(
    lines: Iterable[MeasuredReplica], profiles: Iterable[PerformanceProfile]
) -> dict[tuple[str, int], tuple[Reported, int | None]]:
    """The cells of the profiles of the service's class, by type and accelerators of a replica."""
    classes = {line.workload_class for line in lines}
    cells = [
        (cell.mode == RESIDENT, (cell.accelerator, cell.accelerators), (cell.step_model, cell.kv_tokens))
        for profile in sorted(profiles, key=lambda p: p.metadata.name, reverse=True)
        if profile.spec.workload_class in classes and profile.status is not None
        for cell in profile.status.cells or ()
        if cell.step_model is not None and cell.power_cap_percent == 100
    ]
    return {place: known for _, place, known in sorted(cells, key=itemgetter(0))}


def _step_s(known: tuple[Reported, int | None]) -> float:
    """Of a step without anything in it, in which engine modes differ most."""
    return known[0].seconds_per_step
