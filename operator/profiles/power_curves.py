"""Curves of power limits: how a profile stores them, and the cells of capped jobs that follow from them. Pure.

A profile has for each accelerator type and mode the comparisons that were made (`paces.py`) and the curve that fits
them. A job may start under a cap where cells say what that costs: the cells of the class without a cap, at the speed
that the curve leaves, down to the lowest limit that was measured. Cells that people state for caps of a type, and those
that capped jobs measured, come before them. Cells of serving classes follow in the same way, with their step models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from busbar.kube.types.performance_profile import (
    MOST_COMPARISONS,
    MOST_CURVES,
    CellSource,
    CurvePoint,
    LimitComparison,
    PerformanceProfileStatus,
    PowerCurve,
    ProfileCell,
    StepModel,
)
from busbar.operator.profiles.paces import Work
from busbar.scheduler import Cell, Source
from busbar.scheduler.fit import accelerator
from busbar.scheduler.model.table import Place, type_of
from busbar.scheduler.power import Phase
from busbar.scheduler.power.curves import (
    KNOWN_S,
    LEVELS,
    PUBLISHED,
    Compared,
    Evidence,
    Pair,
    fitted,
    seconds_of,
    slowdown,
)

CAPS = (80, 70, 60, 50)
"""Percent. Above them little is saved, and below them hardly any work is worth its watts."""
STEP_UP = 1.25
"""Evidence is written when it is worth so many times what is written."""


def stored(workload_class: str, status: PerformanceProfileStatus | None) -> dict[Work, dict[Pair, Compared]]:
    """The evidence of a class; what cannot be is left out."""
    return _evidence(workload_class, status.power_curves if status is not None else None)


def _evidence(workload_class: str, curves: Iterable[PowerCurve] | None) -> dict[Work, dict[Pair, Compared]]:
    found: dict[Work, dict[Pair, Compared]] = {}
    for curve in curves or ():
        pairs: dict[Pair, Compared] = {}
        for each in curve.comparisons:
            low, high = each.percent, each.against_percent
            if low < high and low in LEVELS and high in LEVELS:
                try:
                    pairs[low, high] = Compared(each.seconds, each.log_slower)
                except ValueError:
                    continue
        if pairs and curve.phase in PUBLISHED:
            found[Work(workload_class, curve.accelerator, curve.mode, Phase(curve.phase))] = pairs
    return found


def written(old: Iterable[PowerCurve] | None, evidence: Mapping[Work, Evidence]) -> list[PowerCurve] | None:
    """The curves of one class to write: fresh ones where something was learned, and those that stand there."""
    found = {_key(curve): curve for curve in old or ()}
    for work, of in evidence.items():
        curve = _curve(work, of)
        found[_key(curve)] = curve
    most = sorted(found.items(), key=lambda item: (-_worth_s(item[1]), item[0]))[:MOST_CURVES]
    return [curve for _, curve in sorted(most)] or None


def grew(old: Iterable[PowerCurve] | None, new: Iterable[PowerCurve] | None) -> bool:
    """Whether there is so much more evidence that it should be written."""
    before = {_key(curve): _worth_s(curve) for curve in old or ()}
    return any(_worth_s(curve) > STEP_UP * before.get(_key(curve), 0.0) for curve in new or ())


def _key(curve: PowerCurve) -> tuple[str, str, str]:
    return curve.accelerator, curve.mode, curve.phase


def _worth_s(curve: PowerCurve) -> float:
    return sum(each.seconds for each in curve.comparisons)


def _curve(work: Work, evidence: Evidence) -> PowerCurve:
    lowest = min(low for low, _ in evidence)
    most = sorted(evidence.items(), key=lambda item: (-item[1].seconds, item[0]))[:MOST_COMPARISONS]
    return PowerCurve(
        accelerator=work.accelerator,
        mode=work.mode,
        phase=work.phase.value,
        points=[
            CurvePoint(percent=level, slowdown=round(factor, 3))
            for level, (_, factor) in zip(LEVELS, fitted(work.phase, evidence).points, strict=True)
            if level >= lowest
        ],
        comparisons=[
            LimitComparison(
                percent=low,
                against_percent=high,
                log_slower=round(known.log_slower, 4),
                seconds=round(known.seconds, 1),
            )
            for (low, high), known in sorted(most)
            if known.seconds >= 0.1
        ],
    )


def capped(
    workload_class: str,
    status: PerformanceProfileStatus | None,
    cells: Iterable[Cell],
    learned: Iterable[Cell],
) -> list[Cell]:
    """Cells under caps that follow from the others.

    Args:
        cells: of the table, of this class.
        learned: the same, which come before `cells`.
    """
    curves = {
        (work.accelerator, work.mode): of
        for work, of in stored(workload_class, status).items()
        if work.phase is Phase.TRAINING and seconds_of(of) >= KNOWN_S
    }
    shared = [cell for cell in (*cells, *learned) if not cell.tenant]
    own = {(cell.accelerator, cell.mode) for cell in shared if cell.power_cap < 1}
    whole: dict[Place, Cell] = {cell.place: cell for cell in shared if cell.power_cap >= 1}
    found = []
    for cell in whole.values():
        evidence = curves.get((type_of(cell.accelerator), cell.mode))
        if evidence is None or cell.speed <= 0 or (cell.accelerator, cell.mode) in own:
            continue
        slow, lowest = dict(fitted(Phase.TRAINING, evidence).points), min(low for low, _ in evidence)
        found += [_under(cell, cap / 100, slow[cap / 100]) for cap in CAPS if cap >= lowest]
    return sorted(found, key=lambda cell: cell.place)


def _under(cell: Cell, cap: float, slow: float) -> Cell:
    sheet = accelerator(type_of(cell.accelerator))
    nameplate_w = sheet.watts if sheet is not None else 0.0
    draws_w = cell.watts or nameplate_w
    return replace(
        cell,
        speed=cell.speed / slow,
        low=cell.low / slow if cell.low else None,
        high=cell.high / slow if cell.high else None,
        watts=min(draws_w, cap * nameplate_w) if nameplate_w else 0.0,
        power_cap=cap,
        source=Source.RATIO,
        samples=0,
    )


def capped_replicas(curves: Iterable[PowerCurve] | None, cells: Iterable[ProfileCell]) -> list[ProfileCell]:
    """Cells of a serving class under caps, which follow from those without: the step model with what a limit costs steps that
    decode, and its seconds per prompt token with what it costs those that read prompts. Both must have been measured."""
    known = {work: of for work, of in _evidence("", curves).items() if seconds_of(of) >= KNOWN_S}
    found = []
    for cell in cells:
        if cell.step_model is None or cell.power_cap_percent < 100:
            continue
        prefill, decode = (
            known.get(Work("", cell.accelerator, cell.mode, phase)) for phase in (Phase.PREFILL, Phase.DECODE)
        )
        if prefill is None or decode is None:
            continue
        lowest = max(min(low for low, _ in of) for of in (prefill, decode))
        reads, decodes = fitted(Phase.PREFILL, prefill), fitted(Phase.DECODE, decode)
        found += [
            _replica_under(cell, cap, slowdown(reads, cap / 100), slowdown(decodes, cap / 100))
            for cap in CAPS
            if cap >= lowest
        ]
    return found


def _replica_under(cell: ProfileCell, cap: int, reads: float, decodes: float) -> ProfileCell:
    model, prompts = cell.step_model, cell.prefill_tokens_per_second
    assert model is not None
    sheet = accelerator(cell.accelerator)
    slower = StepModel(
        seconds_per_step=decodes * model.seconds_per_step,
        seconds_per_sequence=decodes * model.seconds_per_sequence,
        seconds_per_thousand_context_tokens=decodes * model.seconds_per_thousand_context_tokens,
        seconds_per_prompt_token=reads * model.seconds_per_prompt_token,
        rms_error_seconds=max(reads, decodes) * model.rms_error_seconds,
        steps=model.steps,
    )
    return cell.model_copy(
        update={
            "power_cap_percent": cap,
            "tokens_per_second": cell.tokens_per_second / decodes,
            "prefill_tokens_per_second": None if prompts is None else prompts / reads,
            "step_model": slower,
            "watts": None if sheet is None else cap / 100 * sheet.watts,
            "source": CellSource.RATIO,
            "predicted": None,
            "reports": 0,
        }
    )
