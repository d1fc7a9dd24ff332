"""The reconcile of a PerformanceProfile: its status, and when a change is written.

The status stores what the performance table is made of: evidence of ended runs (each counted once), the time held for
exploration, and the present cells. It is written

    when a run has ended, or a cell moved by a step, was measured for the first time or was stated differently:
        at once, but at most every `profile_period_s`
    while jobs run on an unmeasured placement: every `explore_period_s`; on a measured one: a tenth as often

The speeds and the evidence come from ``table.py`` and ``observations.py``; this module does not change them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from busbar.kube.types import PerformanceProfile, TrainingJob
from busbar.kube.types.performance_profile import (
    MOST_CELLS,
    CellSource,
    PerformanceProfileStatus,
    PhaseWatts,
    PowerCurve,
    ProfileCell,
)
from busbar.kube.types.reasons import ConditionType, Reason
from busbar.kube.types.service_status import MeasuredReplica
from busbar.kube.types.training_status import TERMINAL_PHASES
from busbar.operator.profiles.observations import (
    ClassObservations,
    Place,
    Stay,
    believable_mib,
    conduct_of,
    doubted,
    evidence_of,
    fold,
    forget,
    hold,
    most_checked,
    on_any_nodes,
    place_of,
    place_of_admission,
    place_of_line,
    read,
    record_key,
)
from busbar.operator.profiles.paces import Work
from busbar.operator.profiles.phase_draws import DrawPlace, PhaseDraw
from busbar.operator.profiles.phase_watts import with_draws
from busbar.operator.profiles.power_curves import capped_replicas, grew, written
from busbar.operator.profiles.speeds import SpeedReport, run_of
from busbar.operator.profiles.table import report_of
from busbar.operator.settings import Settings
from busbar.operator.write.status import conditions
from busbar.scheduler import Cell, PerformanceTable, Source
from busbar.scheduler.model.table import Record, link_of, type_of
from busbar.scheduler.performance.learning import STEADY
from busbar.scheduler.power.curves import Evidence

NARROWER = 0.1
"""A bound of an interval is written when its logarithm has changed by this much."""
RARELY = 10
"""Time held on measured placements is written this many times less often: no decision depends on its last minutes."""
_RANK = {CellSource.STATED: 0, CellSource.MEASURED: 1, CellSource.RATIO: 2, CellSource.PRIOR: 3}


_RESET: dict[str, object] = {"reports": 0, "quarantined": 0, "note": None}


@dataclass(frozen=True)
class PastAttempt:
    """An attempt that has ended and is no longer in its job's status, or whose job is gone."""

    run: str
    stay: Stay
    report: SpeedReport | None


@dataclass(frozen=True)
class ProfileView:
    """The whole input of one reconcile of one profile."""

    profile: PerformanceProfile
    counts: str
    """Name of the profile that counts for the class."""
    table: PerformanceTable
    jobs: tuple[TrainingJob, ...]
    """The jobs of the class."""
    uids: frozenset[str]
    """The uids of all existing jobs."""
    left: tuple[PastAttempt, ...]
    tenant_of: Mapping[str, str]
    keys: Mapping[str, str]
    """Tenant to its digest."""
    now: datetime
    settings: Settings
    serving: tuple[MeasuredReplica, ...] = ()
    """The measured lines of accepted services for the class."""
    limits: Mapping[Work, Evidence] = field(default_factory=dict)
    """What power limits cost the class, as far as that was learned since the operator's start."""
    draws: Mapping[tuple[DrawPlace, int], PhaseDraw] = field(default_factory=dict)
    """What boards of the class's replicas draw, by place and limit in per cent, as far as that is known since then."""


@dataclass(frozen=True)
class ProfileUpdate:
    status: PerformanceProfileStatus | None = None
    again_s: float | None = None
    refuted: tuple[str, ...] = ()
    """Uids of jobs whose speed contradicts their work; an event follows once the status is written."""


def reconcile(view: ProfileView) -> ProfileUpdate:
    """See the module's head."""
    old = view.profile.status or PerformanceProfileStatus()
    if view.counts != view.profile.metadata.name:
        return _taken(view, old)
    known = read(view.profile, {key: name for name, key in view.keys.items()})
    runs = [report for job in view.jobs if (report := report_of(job, view.tenant_of)) is not None]
    runs += [left.report for left in view.left if left.report is not None]
    runs = [report for report in runs if report.image_verified]
    stays = [stay for job in view.jobs if (stay := stay_of(job)) is not None]
    stays += [left.stay for left in view.left]
    whole = fold(known, runs)
    new = _status(view, old, known, whole, stays)
    changed = whole is not known or _moved(old, new)
    wait = _due_in(view, known, stays, changed)
    if wait is None or wait > 0:
        return ProfileUpdate(None, wait)
    wrong = tuple(s.record.job for s in runs if s.agrees is False and s.ended and not known.has(s))
    return ProfileUpdate(new, _look_again(view, whole, stays), wrong)


def stay_of(job: TrainingJob) -> Stay | None:
    """The job's time at its placement; None without an admission."""
    status = job.status
    if status is None or status.admission is None or status.admission.admitted_at is None:
        return None
    ended = status.completion_time if status.phase in TERMINAL_PHASES else None
    return Stay(place_of_admission(status.admission), status.admission.admitted_at, ended)


def leaves(old: TrainingJob, new: TrainingJob | None) -> bool:
    """Whether a job's change removes an attempt from its status: the admission was cleared, or the job is gone."""
    if old.status is None or old.status.admission is None:
        return False
    return new is None or run_of(new) != run_of(old) or stay_of(new) is None


def left_behind(old: TrainingJob, report: SpeedReport | None, now: datetime) -> PastAttempt | None:
    """The attempt that the status no longer shows, as it was last seen."""
    stay = stay_of(old)
    if stay is None:
        return None
    ended = stay.until or now
    if report is not None and report.ended is None:
        report = replace(report, ended=ended)
    return PastAttempt(run_of(old), Stay(stay.place, stay.since, ended), report)


def too_soon(profile: PerformanceProfile, now: datetime, settings: Settings) -> float | None:
    """Seconds until the profile may be written again; None: it may be now."""
    if profile.status is None or profile.status.last_updated is None:
        return None
    left = settings.profile_period_s - (now - profile.status.last_updated) / timedelta(seconds=1)
    return left if left > 0 else None


def _taken(view: ProfileView, old: PerformanceProfileStatus) -> ProfileUpdate:
    text = f"PerformanceProfile {view.counts} describes this class already; put the cells there."
    new = PerformanceProfileStatus(
        observed_generation=view.profile.metadata.generation,
        conditions=conditions(
            old.conditions, {ConditionType.READY: False}, Reason.CLASS_TAKEN, text,
            view.profile.metadata.generation, view.now,
        ),
    )  # fmt: skip
    return ProfileUpdate(new if new != old else None)


# -- when ----------------------------------------------------------------------------------------------


def _due_in(
    view: ProfileView, known: ClassObservations, stays: Iterable[Stay], changed: bool
) -> float | None:
    """Seconds until the status should be written; None: there is nothing to write."""
    status = view.profile.status
    if status is None or status.last_updated is None:
        return 0.0
    settings, until = view.settings, known.held.as_of
    age = (view.now - status.last_updated) / timedelta(seconds=1)
    held = [s for s in stays if until is None or s.until is None or s.until > until]
    if changed or any(s.until is not None for s in held):
        return max(0.0, settings.profile_period_s - age)
    if not held:
        return None
    if any(not known.measures(s.place) for s in held):
        # Reconciled more often than it is written, so that its first report is written soon.
        left = settings.explore_period_s - age
        return max(0.0, min(left, settings.profile_period_s))
    return max(0.0, settings.explore_period_s * RARELY - age)


def _look_again(view: ProfileView, whole: ClassObservations, stays: Iterable[Stay]) -> float | None:
    going = [s for s in stays if s.until is None]
    if not going:
        return None
    tried = any(not whole.measures(s.place) for s in going)
    return view.settings.profile_period_s if tried else view.settings.explore_period_s


def _moved(old: PerformanceProfileStatus, new: PerformanceProfileStatus) -> bool:
    """Whether the two differ by more than small changes of numbers."""
    if (old.observed_generation, old.conditions) != (new.observed_generation, new.conditions):
        return True
    if grew(old.power_curves, new.power_curves):
        return True
    before = {place_of_line(c): c for c in old.cells or ()}
    after = {place_of_line(c): c for c in new.cells or ()}
    return before.keys() != after.keys() or any(_differs(before[k], after[k]) for k in after)


def _differs(old: ProfileCell, new: ProfileCell) -> bool:
    if (old.source, old.quarantined, old.memory_gib) != (new.source, new.quarantined, new.memory_gib):
        return True
    return (
        _apart(old.tokens_per_second, new.tokens_per_second) > STEADY / 2
        or _apart(old.measured_memory_gib, new.measured_memory_gib) > NARROWER
        or _apart(old.watts, new.watts) > NARROWER
        or _draws_differ(old.phase_watts or PhaseWatts(), new.phase_watts or PhaseWatts())
        or _apart(old.low, new.low) > NARROWER
        or _apart(old.high, new.high) > NARROWER
    )


def _draws_differ(old: PhaseWatts, new: PhaseWatts) -> bool:
    return any(_apart(getattr(old, name), getattr(new, name)) > NARROWER for name in PhaseWatts.model_fields)


def _apart(old: float | None, new: float | None) -> float:
    if not old or not new:
        return 0.0 if (old or 0.0) == (new or 0.0) else math.inf
    return abs(math.log(old / new))


# -- what ----------------------------------------------------------------------------------------------


def _status(
    view: ProfileView,
    old: PerformanceProfileStatus,
    known: ClassObservations,
    whole: ClassObservations,
    stays: Iterable[Stay],
) -> PerformanceProfileStatus:
    curves = written(old.power_curves, view.limits)
    cells = _cells(view, old.cells or (), whole, curves)
    cells = with_draws(cells, old.cells or (), view.profile.spec.workload_class, view.draws)
    measured = sum(cell.source is CellSource.MEASURED for cell in cells)
    reason = Reason.MEASURED if measured else Reason.NOT_MEASURED
    text = f"Jobs measured {measured} of {len(cells)} places."
    generation = view.profile.metadata.generation
    return PerformanceProfileStatus(
        observed_generation=generation,
        conditions=conditions(
            old.conditions, {ConditionType.READY: True}, reason, text, generation, view.now
        ),
        places=len(cells),
        measured=measured,
        quarantined=sum(cell.quarantined for cell in cells),
        cells=cells,
        evidence=[evidence_of(record, view.keys) for record in whole.records] or None,
        conduct=[conduct_of(c, view.keys) for c in most_checked(whole.conduct)] or None,
        counted=forget(whole.counted, view.uids),
        held=hold(known, stays, view.now),
        power_curves=curves,
        last_updated=view.now,
    )


def _cells(
    view: ProfileView,
    old: Iterable[ProfileCell],
    whole: ClassObservations,
    curves: Iterable[PowerCurve] | None,
) -> list[ProfileCell]:
    """The class's cells: the old ones, overridden by the table, then by what people stated."""
    name = whole.workload_class
    found = {
        place_of_line(cell): cell.model_copy(update=_RESET)
        for cell in map(_unstated, old)
        if cell is not None and (cell.step_model is None or cell.power_cap_percent == 100)
    }
    for cell in view.table.cells:
        if cell.workload_class == name and cell.source is Source.FORMULA:
            found[place_of(cell)] = _predicted(cell, found.get(place_of(cell)))
    for cell in view.table.learned:
        if cell.workload_class == name and not cell.tenant:
            found[place_of(cell)] = _learned(cell, _at(found, place_of(cell)))
    for line in view.serving:
        found[_place_of_replica(line)] = _served(line, found.get(_place_of_replica(line)))
    found |= {place_of_line(cell): cell for cell in capped_replicas(curves, found.values())}
    records = [r for r in view.table.records if r.workload_class == name]
    wrong = doubted(view.table)
    for record in records:
        at = found.get(place_of(record))
        if at is not None:
            doubt = record_key(record) in wrong
            field = "quarantined" if doubt else "reports"
            count = getattr(at, field) + max(1, record.reports)
            found[place_of(record)] = at.model_copy(update={field: count} | _used(at, record, doubt))
    for cell in whole.stated:
        at = _at(found, place_of(cell))
        if at is None or cell.source is Source.OVERRIDE or not at.reports:
            found[place_of(cell)] = _stated(cell, at)
    for stated in view.profile.spec.cells or ():
        at = found.get(place_of_line(stated))
        if at is not None:
            found[place_of_line(stated)] = at.model_copy(update={"note": stated.note})
    best = sorted(_telling(found), key=lambda item: (_RANK[item[1].source], -item[1].reports, item[0]))
    return [cell for _, cell in sorted(best[:MOST_CELLS], key=lambda item: item[0])]


def _at(found: Mapping[Place, ProfileCell], place: Place) -> ProfileCell | None:
    """The cell of a place so far, or what is planned of any number of nodes."""
    general = found.get(on_any_nodes(place))
    if place in found or general is None:
        return found.get(place)
    own = {"nodes": place[4], "source": CellSource.PRIOR, "measured_memory_gib": None}
    return general.model_copy(update=_RESET | own)


def _telling(found: Mapping[Place, ProfileCell]) -> list[tuple[Place, ProfileCell]]:
    """The cells without those for any number of nodes that were not measured where other cells of the size were."""
    named = {on_any_nodes(place) for place in found if place[4]}
    guessed = (CellSource.PRIOR, CellSource.RATIO)
    return [
        (place, cell)
        for place, cell in found.items()
        if place[4] or place not in named or cell.source not in guessed
    ]


def _unstated(cell: ProfileCell) -> ProfileCell | None:
    """The cell without what people stated (that is read from the spec again): the formula's cell, or None."""
    if cell.source is not CellSource.STATED:
        return cell
    if cell.predicted is None:
        return None
    fields = {"tokens_per_second": cell.predicted, "low": None, "high": None, "source": CellSource.PRIOR}
    return cell.model_copy(update=fields)


def _base(cell: Cell) -> ProfileCell:
    return ProfileCell(
        accelerator=type_of(cell.accelerator),
        link_class=link_of(cell.accelerator),
        accelerators=cell.accelerators_m // 1000,
        nodes=cell.nodes,
        mode=cell.mode,
        power_cap_percent=round(cell.power_cap * 100),
        tokens_per_second=0.0,
        source=CellSource.PRIOR,
    )


def _predicted(cell: Cell, at: ProfileCell | None) -> ProfileCell:
    fields: dict[str, object] = {"predicted": _short(cell.speed), "limit": _short(cell.limit) or None}
    fields |= _needs(cell)
    if at is None or at.source is CellSource.PRIOR:
        fields |= {"tokens_per_second": _short(cell.speed), "source": CellSource.PRIOR}
        fields |= {"low": _short(cell.low), "high": _short(cell.high)}
    return (at or _base(cell)).model_copy(update=fields)


def _learned(cell: Cell, at: ProfileCell | None) -> ProfileCell:
    fields: dict[str, object] = {
        "tokens_per_second": _short(cell.speed),
        "low": _short(cell.low),
        "high": _short(cell.high),
        "source": CellSource.MEASURED if cell.source is Source.MEASURED else CellSource.RATIO,
    }
    fields |= _needs(cell)
    if at is not None and at.memory_gib:
        fields["memory_gib"] = at.memory_gib  # as planned; admission asks for more where a job has used more
    return (at or _base(cell)).model_copy(update=fields)


def _served(line: MeasuredReplica, at: ProfileCell | None) -> ProfileCell:
    """The cell of a placement where replicas of the class measured their speed."""
    return ProfileCell(
        accelerator=line.accelerator,
        accelerators=line.accelerators,
        mode=line.mode,
        tokens_per_second=line.tokens_per_second or 0.0,
        prefill_tokens_per_second=line.prefill_tokens_per_second,
        step_model=line.step_model,
        kv_tokens=line.kv_tokens,
        measured_memory_gib=line.memory_gib,
        source=CellSource.MEASURED,
        predicted=at.predicted if at is not None else None,
        reports=line.step_model.steps,
    )


def _place_of_replica(line: MeasuredReplica) -> Place:
    return (line.accelerator, line.accelerators * 1000, line.mode, 1.0, 0)


def _used(at: ProfileCell, record: Record, doubt: bool) -> dict[str, object]:
    """The most memory that jobs have used there, including this record."""
    used = believable_mib(record, round((at.memory_gib or 0.0) * 1024))
    if doubt or not used:
        return {}
    return {"measured_memory_gib": max(used / 1024, at.measured_memory_gib or 0.0)}


def _stated(cell: Cell, at: ProfileCell | None) -> ProfileCell:
    fields: dict[str, object] = {"tokens_per_second": cell.speed, "source": CellSource.STATED}
    fields |= {"low": cell.low, "high": cell.high} | _needs(cell)
    return (at or _base(cell)).model_copy(update=fields)


def _needs(cell: Cell) -> dict[str, object]:
    """Memory and watts, where the cell has them."""
    found = {
        "memory_gib": cell.memory_mib / 1024,
        "host_memory_gib": cell.host_memory_mib / 1024,
        "watts": cell.watts,
    }
    return {name: value for name, value in found.items() if value}


def _short(value: float | None) -> float | None:
    """Rounded to six significant digits: more is noise."""
    return None if value is None else float(f"{value:.6g}")
