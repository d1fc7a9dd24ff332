"""Which step model counts for a service's replicas in each pool, or a sentence why none does.

The service's own measurements come first (`status.measured`): they are of its own image and decide nothing for others.
For a type that it has not measured, the PerformanceProfile of its class counts, filled by other services, if this
service runs the platform's engine as they did. A speed counts in the engine mode that a replica would have in the pool; where it
was not measured and the model's dimensions are known, it is predicted by what was (`autoscale/predicted.py`). Where they are not
known, no mode can be told, and the slowest of the modes that its replicas run in on that type counts, of a profile the usual one.

A model is refused that no engine can have: coefficients that are negative or not a number, fitted to few steps, or with
an error too large to tell whether the target is kept.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from busbar.kube.types import AcceleratorPool, ModelService, PerformanceProfile
from busbar.kube.types.model_service import ServiceLevel
from busbar.kube.types.performance_profile import ProfileCell
from busbar.kube.types.performance_profile import StepModel as Reported
from busbar.kube.types.service_status import MeasuredReplica
from busbar.operator.profiles.serving_speeds import is_ours
from busbar.operator.profiles.table import Workload
from busbar.operator.serving.engine_mode import Fit, engine_fit
from busbar.scheduler.autoscale.predicted import predicted
from busbar.scheduler.autoscale.step_model import Slo, StepModel
from busbar.scheduler.errors import ServingModelError

LEAST_STEPS = 64
"""The engine trusts its own model from as many steps on."""
PERCENTILE = 99.0
"""Of the answers that a target is for, where `spec.slo.percentile` says nothing."""
MOST_ERROR = 0.5
"""Part of the target per token that the model's error may reach."""
MOST_SECONDS = 60.0
"""No coefficient is larger: a step for one more token takes no minute."""
RESIDENT = "resident"
Known = dict[tuple[str, int, str], tuple[Reported, int | None]]
"""Reported step models and the tokens that fit, by type, accelerators of a replica and engine mode."""


@dataclass(frozen=True)
class Speeds:
    """What is known of a service's replicas, by pool."""

    models: dict[str, StepModel]
    refused: dict[str, str]
    """Why a pool that the service may use has no model."""
    modes: dict[str, str] = field(default_factory=dict)
    """Engine modes, where they are chosen."""
    predicted: dict[str, str] = field(default_factory=dict)
    """What a model is predicted by that was not measured, as a sentence."""
    capped: dict[str, dict[float, StepModel]] = field(default_factory=dict)
    """By pool and power cap, where the profile of the class has both the measured place and what the cap costs there."""


def slo_of(level: ServiceLevel | None) -> Slo | None:
    """The targets, if they are both there."""
    if level is None or level.ttft_milliseconds is None or level.tpot_milliseconds is None:
        return None
    return Slo(level.ttft_milliseconds / 1000, level.tpot_milliseconds / 1000, level.percentile or PERCENTILE)


def speeds(
    service: ModelService,
    pools: Iterable[AcceleratorPool],
    profiles: Iterable[PerformanceProfile],
    slo: Slo,
    made_by: Workload | None = None,
    limitable: Collection[str] = (),
) -> Speeds:
    """The step models for the pools that the service may use, in the engine mode that a replica would have there.

    Args:
        made_by: what is known of the model; None: nothing, so no mode is chosen and no speed is predicted.
        limitable: pools in which replicas can run under power caps. Where the profile has what caps cost there, lines that were
            measured under limits do not count: they would be slowed twice.
    """
    pools = tuple(pools)
    lines = list((service.status.measured if service.status is not None else None) or ())
    shared: Known = {}
    slowdowns: dict[tuple[str, int, str], dict[float, tuple[float, float]]] = {}
    for cells in _cells(lines, profiles) if is_ours(service) else ():
        shared |= _shared(cells)
        slowdowns |= _slowdowns(cells)
    slowest_last = sorted(lines, key=lambda line: line.step_model.seconds_per_step)
    every, free = _own(slowest_last), _own(line for line in slowest_last if not line.limited)
    known, count = shared | every, service.spec.shape.accelerators_per_pod
    fits = {pool.metadata.name: engine_fit(service, made_by, pool) for pool in pools}
    places = [(p.spec.accelerator, fit) for p in pools if (fit := fits[p.metadata.name]) is not None]
    made = Speeds({}, {}, {name: fit.choice.mode for name, fit in fits.items() if fit is not None}, {})
    for pool in pools:
        name, kind, fit = pool.metadata.name, pool.spec.accelerator, fits[pool.metadata.name]
        mode = RESIDENT if fit is None else fit.choice.mode
        under = slowdowns.get((kind, count, mode), {})
        own = free if under and name in limitable else every
        found = (
            (shared | own).get((kind, count, mode))
            if fit is not None
            else _slowest(own, kind, count)
            or shared.get((kind, count, RESIDENT))
            or _slowest(shared, kind, count)
        )
        try:
            if fit is not None and not fit.choice.fits:
                raise ServingModelError(f"on {kind}: {fit.choice.reason.rstrip('.')}")
            if found is not None:
                made.models[name] = usable(kind, *found, slo)
                made.capped[name] = {
                    cap: made.models[name].under_cap(
                        f"{kind} at {100 * cap:.0f} % of its watts", cap, *slower
                    )
                    for cap, slower in under.items()
                }
            else:
                made.models[name], made.predicted[name] = _predicted(fit, places, known, count, kind, slo)
        except ServingModelError as error:
            made.refused[name] = str(error)
    return made


def _predicted(
    fit: Fit | None, fits: Iterable[tuple[str, Fit]], known: Known, count: int, kind: str, slo: Slo
) -> tuple[StepModel, str]:
    """A step model by what replicas of this class have measured on other types or in other modes, and a sentence that says so.

    Raises:
        ServingModelError: the model's dimensions are not known, or nothing usable was measured.
    """
    nothing = f"no replica has measured its speed on {kind} yet"
    if fit is None:
        raise ServingModelError(nothing)
    measured = []
    for (other, accelerators, mode), found in sorted(known.items(), key=lambda item: item[0]):
        place = next((at.place for name, at in fits if name == other), None)
        if place is None or accelerators != count:
            continue
        with suppress(ServingModelError):
            measured.append((replace(place, mode=mode), usable(other, *found, slo)))
    try:
        model = predicted(fit.model, fit.serving, fit.place, measured)
    except ServingModelError:
        raise ServingModelError(nothing) from None
    sources = sorted({f"{at.device.name} ({at.mode})" for at, _ in measured})
    why = f" {fit.choice.reason}" if fit.choice.reason else ""
    return model, f"The speed on {kind} ({fit.choice.mode}) is predicted by {', '.join(sources)}.{why}"


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


def _cells(
    lines: Iterable[MeasuredReplica], profiles: Iterable[PerformanceProfile]
) -> list[list[ProfileCell]]:
    """Of each profile of the service's class, the cells that say what a step takes."""
    classes = {line.workload_class for line in lines}
    return [
        [cell for cell in profile.status.cells or () if cell.step_model is not None]
        for profile in sorted(profiles, key=lambda p: p.metadata.name, reverse=True)
        if profile.spec.workload_class in classes and profile.status is not None
    ]


def _own(lines: Iterable[MeasuredReplica]) -> Known:
    return {(m.accelerator, m.accelerators, m.mode): (m.step_model, m.kv_tokens) for m in lines}


def _shared(cells: Iterable[ProfileCell]) -> Known:
    return {
        _place(cell): (cell.step_model, cell.kv_tokens)
        for cell in cells
        if cell.step_model is not None and cell.power_cap_percent == 100
    }


def _slowdowns(cells: Sequence[ProfileCell]) -> dict[tuple[str, int, str], dict[float, tuple[float, float]]]:
    """By how much steps that read prompts, and those that decode, take longer under each cap that a place has cells for. These
    cells follow from the one without a cap (`profiles/power_curves.py`), and only their ratios count: so they hold beside a
    speed that the service has measured itself."""
    whole = {_place(cell): cell.step_model for cell in cells if cell.power_cap_percent == 100}
    found: dict[tuple[str, int, str], dict[float, tuple[float, float]]] = {}
    for cell in cells:
        full, under = whole.get(_place(cell)), cell.step_model
        if full is None or under is None or cell.power_cap_percent >= 100:
            continue
        if min(full.seconds_per_prompt_token, full.seconds_per_step) > 0:
            reads = under.seconds_per_prompt_token / full.seconds_per_prompt_token
            decodes = under.seconds_per_step / full.seconds_per_step
            cap = cell.power_cap_percent / 100
            found.setdefault(_place(cell), {})[cap] = max(reads, 1.0), max(decodes, 1.0)
    return found


def _place(cell: ProfileCell) -> tuple[str, int, str]:
    return cell.accelerator, cell.accelerators, cell.mode


def _slowest(known: Known, kind: str, accelerators: int) -> tuple[Reported, int | None] | None:
    """Of all modes, by a step without anything in it, in which modes differ most."""
    found = [each for (name, count, _), each in known.items() if (name, count) == (kind, accelerators)]
    return max(found, key=lambda each: each[0].seconds_per_step, default=None)
