"""What a PerformanceProfile holds, in the scheduler's terms: stated and predicted cells, evidence, accounts.

    read(profile)          objects ──► Known
    fold(known, runs)      the runs that ended and are not counted yet join the evidence, each once
    hold(known, stays)     accelerator-seconds up to now, where somebody had measured and where nobody had

The snapshot's table folds in memory what the next write of the profile will keep (profiles.py), so it is the same
before and after that write, and the same for the operator that starts after a crash between the two. Each class has
one profile: of several that name it, the one that was made first.

A tenant stands in a profile as a digest of its uid, which nobody but the operator can read in the other direction.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from busbar.kube.types import PerformanceProfile, Tenant
from busbar.kube.types.performance_profile import (
    MOST_CONDUCT,
    MOST_RUNS,
    CellSource,
    CountedRuns,
    Evidence,
    HeldTime,
    ProfileCell,
    StatedCell,
    TenantConduct,
)
from busbar.kube.types.training_job import Admission
from busbar.operator.speeds import Said
from busbar.scheduler import Cell, PerformanceTable, Source
from busbar.scheduler.reports import close
from busbar.scheduler.table import Conduct, Record

HALF_LIFE_S = 7 * 86400.0
"""What was held counts half after a week: a quiet year is no allowance for a month of trying."""

_DIGEST = re.compile(r"[0-9a-f]{16}")

Place = tuple[str, int, str, float]
"""Accelerator, thousandths of an accelerator, mode, power cap: a cell within its class."""


@dataclass(frozen=True)
class Known:
    """One class as its profile has it."""

    workload_class: str
    stated: tuple[Cell, ...] = ()
    predicted: tuple[Cell, ...] = ()
    """The formulas' cells, kept for when no job of the class is there to make them anew."""
    learned: tuple[Cell, ...] = ()
    """As they were last written: a cell keeps its speed until it should change by more than a step."""
    records: tuple[Record, ...] = ()
    conduct: tuple[Conduct, ...] = ()
    counted: CountedRuns = field(default_factory=CountedRuns)
    held: HeldTime = field(default_factory=HeldTime)

    def has(self, run: Said) -> bool:
        """Whether the run is in the evidence."""
        if run.run in self.counted.runs:
            return True
        return bool(self.counted.before and run.ended and run.ended <= self.counted.before)

    @property
    def measured(self) -> frozenset[Place]:
        """Places of which somebody has told something that was written down."""
        cells = [c for c in self.learned if c.source is Source.MEASURED]
        return frozenset(place_of(c) for c in (*self.stated, *cells))


@dataclass(frozen=True)
class Stay:
    """A job at a place, from admission to its end; `until` None: it is there."""

    place: Place
    since: datetime
    until: datetime | None = None


def place_of(cell: Cell | Record) -> Place:
    return (cell.accelerator, cell.accelerators_m, cell.mode, cell.power_cap)


def place_of_line(line: ProfileCell) -> Place:
    return (line.accelerator, line.accelerators * 1000, line.mode, line.power_cap_percent / 100)


def place_of_admission(at: Admission) -> Place:
    return (at.accelerator, at.pods * at.accelerators_per_pod * 1000, at.mode or "resident", 1.0)


def digests(tenants: Iterable[Tenant]) -> dict[str, str]:
    """Tenant's name to what stands for it in profiles."""
    return {t.metadata.name: _digest(t.metadata.uid) for t in tenants}


def _digest(text: str) -> str:
    return hashlib.sha256(f"tenant/{text}".encode()).hexdigest()[:16]


def _key(tenant: str, keys: Mapping[str, str]) -> str:
    """What stands for a tenant; a digest that was read stays, and a name never gets out."""
    return keys.get(tenant) or (tenant if _DIGEST.fullmatch(tenant) else _digest(tenant))


def by_class(profiles: Iterable[PerformanceProfile]) -> dict[str, PerformanceProfile]:
    """The profile that counts for each class."""
    found: dict[str, PerformanceProfile] = {}
    for profile in sorted(profiles, key=_age):
        found.setdefault(profile.spec.workload_class, profile)
    return found


def slack_at(profile: PerformanceProfile, admission: Admission) -> float | None:
    """Mean over low of the speeds believed of an admission's place; None: nothing is."""
    for cell in (profile.status.cells if profile.status is not None else None) or ():
        if place_of_line(cell) == place_of_admission(admission):
            return max(1.0, cell.tokens_per_second / cell.low) if cell.low else None
    return None


def _age(profile: PerformanceProfile) -> tuple[float, str]:
    made = profile.metadata.creation_timestamp
    return (made.timestamp() if made is not None else 0.0, profile.metadata.name)


# -- reading -------------------------------------------------------------------------------------------


def read(profile: PerformanceProfile, names: Mapping[str, str]) -> Known:
    """What the profile holds.

    Args:
        names: digest to tenant; a digest that nobody has stays what it is.
    """
    name, status = profile.spec.workload_class, profile.status
    stated = tuple(_stated(name, cell) for cell in profile.spec.cells or ())
    if status is None:
        return Known(name, stated)
    cells = status.cells or []
    return Known(
        name,
        stated,
        tuple(_predicted(name, cell) for cell in cells if cell.predicted is not None),
        tuple(
            _learned(name, cell) for cell in cells if cell.source in (CellSource.MEASURED, CellSource.RATIO)
        ),
        tuple(_record(name, each, names) for each in status.evidence or ()),
        tuple(Conduct(names.get(c.tenant, c.tenant), c.passed, c.failed) for c in status.conduct or ()),
        status.counted or CountedRuns(),
        status.held or HeldTime(),
    )


def mib(gib: float | None) -> int:
    return round((gib or 0.0) * 1024)


def _stated(name: str, cell: StatedCell) -> Cell:
    final = cell.override or cell.tokens_per_second == 0
    return Cell(
        name,
        cell.accelerator,
        cell.accelerators * 1000,
        cell.mode,
        cell.tokens_per_second,
        cell.low,
        cell.high,
        mib(cell.memory_gib),
        watts=cell.watts or 0.0,
        power_cap=cell.power_cap_percent / 100,
        source=Source.OVERRIDE if final else Source.MEASURED,
        samples=0 if final else 1,
    )


def _predicted(name: str, cell: ProfileCell) -> Cell:
    return replace(
        _learned(name, cell),
        speed=cell.predicted or 0.0,
        low=None,
        high=None,
        memory_mib=mib(cell.memory_gib),
        host_memory_mib=mib(cell.host_memory_gib),
        watts=cell.watts or 0.0,
        limit=cell.limit or 0.0,
        source=Source.FORMULA,
    )


def _learned(name: str, cell: ProfileCell) -> Cell:
    return Cell(
        name,
        cell.accelerator,
        cell.accelerators * 1000,
        cell.mode,
        cell.tokens_per_second,
        cell.low,
        cell.high,
        power_cap=cell.power_cap_percent / 100,
        source=Source.MEASURED if cell.source is CellSource.MEASURED else Source.RATIO,
    )


def _record(name: str, each: Evidence, names: Mapping[str, str]) -> Record:
    return Record(
        name,
        each.accelerator,
        each.accelerators * 1000,
        each.mode,
        each.power_cap_percent / 100,
        names.get(each.tenant, each.tenant),
        reports=each.reports,
        runs=each.runs,
        log_mean=each.log_mean,
        within=each.within,
        between=each.between,
        squares=each.squares,
        verified=each.verified,
        fault=each.fault or "",
    )


# -- writing -------------------------------------------------------------------------------------------


def evidence_of(record: Record, keys: Mapping[str, str]) -> Evidence:
    """A record of ended jobs as it stands in a profile."""
    return Evidence(
        tenant=_key(record.tenant, keys),
        accelerator=record.accelerator,
        accelerators=record.accelerators_m // 1000,
        mode=record.mode,
        power_cap_percent=round(record.power_cap * 100),
        reports=record.reports,
        runs=record.runs,
        log_mean=record.log_mean,
        within=record.within,
        between=record.between,
        squares=record.squares,
        verified=record.verified,
        fault=record.fault or None,
    )


def most_checked(conduct: Iterable[Conduct]) -> list[Conduct]:
    """As many as a profile holds."""
    best = sorted(conduct, key=lambda c: (-c.passed - c.failed, c.tenant))[:MOST_CONDUCT]
    return sorted(best, key=lambda c: c.tenant)


def conduct_of(conduct: Conduct, keys: Mapping[str, str]) -> TenantConduct:
    return TenantConduct(tenant=_key(conduct.tenant, keys), passed=conduct.passed, failed=conduct.failed)


# -- adding up -----------------------------------------------------------------------------------------


def fold(known: Known, runs: Iterable[Said]) -> Known:
    """The class after the runs that ended and were not counted yet. The order of the runs does not matter."""
    ended = {run.run: run for run in runs if run.ended is not None}
    fresh = sorted((r for r in ended.values() if not known.has(r)), key=lambda r: (r.ended, r.run))
    if not fresh:
        return known
    table = PerformanceTable(records=known.records, conduct=known.conduct)
    for run in fresh:
        own = replace(run.record, job=run.run)
        table = close(replace(table, records=(*table.records, own)), run.run, run.agrees)
    runs_counted = [*known.counted.runs, *(run.run for run in fresh)]
    dropped, kept = runs_counted[:-MOST_RUNS], runs_counted[-MOST_RUNS:]
    before = known.counted.before
    for name in dropped:
        end = ended[name].ended if name in ended else None
        before = max(filter(None, (before, end)), default=None)
    return replace(
        known,
        records=table.records,
        conduct=table.conduct,
        counted=CountedRuns(before=before, runs=kept),
    )


def forget(counted: CountedRuns, jobs: Iterable[str]) -> CountedRuns:
    """Without the runs of jobs that are gone: nobody can count them again."""
    here = set(jobs)
    kept = [run for run in counted.runs if run.rpartition("-")[0] in here]
    return counted if kept == counted.runs else counted.model_copy(update={"runs": kept})


def hold(known: Known, stays: Iterable[Stay], now: datetime) -> HeldTime:
    """The account of exploration up to ``now``. What is not written down yet counts as not measured."""
    old = known.held
    fade = 0.5 ** (_seconds(old.as_of, now) / HALF_LIFE_S) if old.as_of is not None else 1.0
    measured, unmeasured = old.measured * fade, old.unmeasured * fade
    for stay in stays:
        since = max(stay.since, old.as_of) if old.as_of is not None else stay.since
        amount = _seconds(since, min(stay.until or now, now)) * stay.place[1] / 1000
        if stay.place in known.measured:
            measured += amount
        else:
            unmeasured += amount
    return HeldTime(measured=round(measured, 1), unmeasured=round(unmeasured, 1), as_of=now)


def _seconds(since: datetime, until: datetime) -> float:
    return max(0.0, (until - since) / timedelta(seconds=1))
