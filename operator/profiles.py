"""The reconcile of a PerformanceProfile: what its status should say, and when that is worth a write.

The status is the memory of the table: evidence of runs that ended (each counted once), the account of exploration, and
the cells as they are believed now. It is written

    when a run has ended, a cell moved by a step, was measured for the first time or was stated otherwise:
        at once, but at most every `profile_period_s`
    while jobs hold a place that nobody measured: every `explore_period_s`; a measured one: ten times as rarely

A cell's speed and evidence are what ``table.py`` and ``evidence.py`` make of the same objects; nothing is decided here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from busbar.kube.types import PerformanceProfile, TrainingJob
from busbar.kube.types.performance_profile import (
    MOST_CELLS,
    CellSource,
    PerformanceProfileStatus,
    ProfileCell,
)
from busbar.kube.types.reasons import ConditionType, Reason
from busbar.kube.types.training_job import TERMINAL_PHASES
from busbar.operator.evidence import (
    Known,
    Stay,
    conduct_of,
    evidence_of,
    fold,
    forget,
    hold,
    most_checked,
    place_of,
    place_of_admission,
    place_of_line,
    read,
)
from busbar.operator.settings import Settings
from busbar.operator.speeds import Said, run_of
from busbar.operator.status import conditions
from busbar.operator.table import said_by
from busbar.scheduler import Cell, PerformanceTable, Source
from busbar.scheduler.learning import STEADY, quarantined

NARROWER = 0.1
"""A change of an interval's end, of its logarithm, that is worth a write."""
RARELY = 10
"""The account of measured places is written so much more rarely: nothing is decided by its last minutes."""
_RANK = {CellSource.STATED: 0, CellSource.MEASURED: 1, CellSource.RATIO: 2, CellSource.PRIOR: 3}


@dataclass(frozen=True)
class Left:
    """An attempt that has ended and no longer stands in its job's status, or whose job is gone."""

    run: str
    stay: Stay
    said: Said | None


@dataclass(frozen=True)
class ProfileView:
    """All that one look at a profile sees."""

    profile: PerformanceProfile
    counts: str
    """Name of the profile that counts for the class."""
    table: PerformanceTable
    jobs: tuple[TrainingJob, ...]
    """Those of the class."""
    uids: frozenset[str]
    """Of all jobs that exist."""
    left: tuple[Left, ...]
    tenant_of: Mapping[str, str]
    keys: Mapping[str, str]
    """Tenant to what stands for it here."""
    now: datetime
    settings: Settings


@dataclass(frozen=True)
class Decision:
    status: PerformanceProfileStatus | None = None
    again_s: float | None = None
    refuted: tuple[str, ...] = ()
    """Uids of jobs whose speed turned out to contradict their work; told once the status is written."""


def reconcile(view: ProfileView) -> Decision:
    """See the module's head."""
    old = view.profile.status or PerformanceProfileStatus()
    if view.counts != view.profile.metadata.name:
        return _taken(view, old)
    known = read(view.profile, {key: name for name, key in view.keys.items()})
    runs = [said for job in view.jobs if (said := said_by(job, view.tenant_of)) is not None]
    runs += [left.said for left in view.left if left.said is not None]
    stays = [stay for job in view.jobs if (stay := stay_of(job)) is not None]
    stays += [left.stay for left in view.left]
    whole = fold(known, runs)
    new = _status(view, old, known, whole, stays)
    changed = whole is not known or _moved(old, new)
    wait = _due_in(view, known, stays, changed)
    if wait is None or wait > 0:
        return Decision(None, wait)
    wrong = tuple(s.record.job for s in runs if s.agrees is False and s.ended and not known.has(s))
    return Decision(new, _look_again(view, whole, stays), wrong)


def stay_of(job: TrainingJob) -> Stay | None:
    """Where the job is or, ended, was; None where it holds nothing."""
    status = job.status
    if status is None or status.admission is None or status.admission.admitted_at is None:
        return None
    ended = status.completion_time if status.phase in TERMINAL_PHASES else None
    return Stay(place_of_admission(status.admission), status.admission.admitted_at, ended)


def leaves(old: TrainingJob, new: TrainingJob | None) -> bool:
    """Whether a job's change takes an attempt out of sight: it gave its place back, or the job is gone."""
    if old.status is None or old.status.admission is None:
        return False
    return new is None or run_of(new) != run_of(old) or stay_of(new) is None


def left_behind(old: TrainingJob, said: Said | None, now: datetime) -> Left | None:
    """The attempt that is out of sight, as it was last seen."""
    stay = stay_of(old)
    if stay is None:
        return None
    ended = stay.until or now
    if said is not None and said.ended is None:
        said = Said(said.run, said.record, ended, said.agrees)
    return Left(run_of(old), Stay(stay.place, stay.since, ended), said)


def too_soon(profile: PerformanceProfile, now: datetime, settings: Settings) -> float | None:
    """Seconds until the profile may be written again; None: it may be now."""
    if profile.status is None or profile.status.last_updated is None:
        return None
    left = settings.profile_period_s - (now - profile.status.last_updated) / timedelta(seconds=1)
    return left if left > 0 else None


def _taken(view: ProfileView, old: PerformanceProfileStatus) -> Decision:
    text = f"PerformanceProfile {view.counts} describes this class already; put the cells there."
    new = PerformanceProfileStatus(
        observed_generation=view.profile.metadata.generation,
        conditions=conditions(
            old.conditions, {ConditionType.READY: False}, Reason.CLASS_TAKEN, text,
            view.profile.metadata.generation, view.now,
        ),
    )  # fmt: skip
    return Decision(new if new != old else None)


# -- when ----------------------------------------------------------------------------------------------


def _due_in(view: ProfileView, known: Known, stays: Iterable[Stay], changed: bool) -> float | None:
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
    if any(s.place not in known.measured for s in held):
        # Looked at more often than it is written: its first report is awaited.
        left = settings.explore_period_s - age
        return max(0.0, min(left, settings.profile_period_s))
    return max(0.0, settings.explore_period_s * RARELY - age)


def _look_again(view: ProfileView, whole: Known, stays: Iterable[Stay]) -> float | None:
    going = [s for s in stays if s.until is None]
    if not going:
        return None
    tried = any(s.place not in whole.measured for s in going)
    return view.settings.profile_period_s if tried else view.settings.explore_period_s


def _moved(old: PerformanceProfileStatus, new: PerformanceProfileStatus) -> bool:
    """Whether the two say something different of the class, numbers that hardly changed aside."""
    if (old.observed_generation, old.conditions) != (new.observed_generation, new.conditions):
        return True
    before = {place_of_line(c): c for c in old.cells or ()}
    after = {place_of_line(c): c for c in new.cells or ()}
    return before.keys() != after.keys() or any(_differs(before[k], after[k]) for k in after)


def _differs(old: ProfileCell, new: ProfileCell) -> bool:
    if (old.source, old.quarantined, old.memory_gib) != (new.source, new.quarantined, new.memory_gib):
        return True
    return (
        _apart(old.tokens_per_second, new.tokens_per_second) > STEADY / 2
        or _apart(old.low, new.low) > NARROWER
        or _apart(old.high, new.high) > NARROWER
    )


def _apart(old: float | None, new: float | None) -> float:
    if not old or not new:
        return 0.0 if (old or 0.0) == (new or 0.0) else math.inf
    return abs(math.log(old / new))


# -- what ----------------------------------------------------------------------------------------------


def _status(
    view: ProfileView, old: PerformanceProfileStatus, known: Known, whole: Known, stays: Iterable[Stay]
) -> PerformanceProfileStatus:
    cells = _cells(view, old.cells or (), whole)
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
        last_updated=view.now,
    )


def _cells(view: ProfileView, old: Iterable[ProfileCell], whole: Known) -> list[ProfileCell]:
    """The class's cells: as they were, then what the table says now, then what people state."""
    name = whole.workload_class
    found = {
        place_of_line(cell): cell.model_copy(update={"reports": 0, "quarantined": 0})
        for cell in map(_unstated, old)
        if cell is not None
    }
    for cell in view.table.cells:
        if cell.workload_class == name and cell.source is Source.FORMULA:
            found[place_of(cell)] = _predicted(cell, found.get(place_of(cell)))
    for cell in view.table.learned:
        if cell.workload_class == name and not cell.tenant:
            found[place_of(cell)] = _learned(cell, found.get(place_of(cell)))
    told = [r for r in view.table.records if r.workload_class == name]
    doubted = {(r.place, r.tenant, r.job, r.verified): r for r in quarantined(view.table)}
    for record in told:
        at = found.get(place_of(record))
        if at is not None:
            doubt = (record.place, record.tenant, record.job, record.verified) in doubted
            field = "quarantined" if doubt else "reports"
            count = getattr(at, field) + max(1, record.reports)
            found[place_of(record)] = at.model_copy(update={field: count})
    for cell in whole.stated:
        at = found.get(place_of(cell))
        if at is None or cell.source is Source.OVERRIDE or not at.reports:
            found[place_of(cell)] = _stated(cell, at)
    best = sorted(found.items(), key=lambda item: (_RANK[item[1].source], -item[1].reports, item[0]))
    return [cell for _, cell in sorted(best[:MOST_CELLS], key=lambda item: item[0])]


def _unstated(cell: ProfileCell) -> ProfileCell | None:
    """The cell without what people stated, which is asked of them again: by formula, or not at all."""
    if cell.source is not CellSource.STATED:
        return cell
    if cell.predicted is None:
        return None
    fields = {"tokens_per_second": cell.predicted, "low": None, "high": None, "source": CellSource.PRIOR}
    return cell.model_copy(update=fields)


def _base(cell: Cell) -> ProfileCell:
    return ProfileCell(
        accelerator=cell.accelerator,
        accelerators=cell.accelerators_m // 1000,
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
    return (at or _base(cell)).model_copy(update=fields | _needs(cell))


def _stated(cell: Cell, at: ProfileCell | None) -> ProfileCell:
    fields: dict[str, object] = {"tokens_per_second": cell.speed, "source": CellSource.STATED}
    fields |= {"low": cell.low, "high": cell.high} | _needs(cell)
    return (at or _base(cell)).model_copy(update=fields)


def _needs(cell: Cell) -> dict[str, object]:
    """Memory and watts, where the cell knows them."""
    found = {
        "memory_gib": cell.memory_mib / 1024,
        "host_memory_gib": cell.host_memory_mib / 1024,
        "watts": cell.watts,
    }
    return {name: value for name, value in found.items() if value}


def _short(value: float | None) -> float | None:
    """Six digits: more is noise."""
    return None if value is None else float(f"{value:.6g}")
