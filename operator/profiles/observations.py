"""What a PerformanceProfile holds, in the scheduler's types: stated and predicted cells, evidence, exploration.

    read(profile)          the profile as ClassObservations
    fold(known, runs)      adds the runs that have ended and are not counted yet to the evidence, each once
    hold(known, stays)     accelerator-seconds up to now, on measured and on unmeasured placements

The snapshot's table folds in memory what the next write of the profile will store (profiles/reconcile.py), so it is
the same before and after that write, and after a crash between the two. Each class has one profile: of several that
name it, the first one created.

A profile contains a digest of a tenant's uid, not its name; only the operator can map it back.
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
from busbar.kube.types.training_status import Admission
from busbar.operator.profiles.speeds import SpeedReport
from busbar.scheduler import Cell, PerformanceTable, Source
from busbar.scheduler.model.table import (
    Conduct,
    Record,
    accelerator_key,
    link_of,
    named_nodes,
    type_of,
)
from busbar.scheduler.performance.learning import quarantined
from busbar.scheduler.performance.reports import close

HALF_LIFE_S = 7 * 86400.0
"""Held time counts half after a week, so that a quiet year does not allow a month of exploration."""

BELIEVABLE = 4.0
"""Measured memory beyond this many times the planned is not used: more likely the report is wrong."""

_DIGEST = re.compile(r"[0-9a-f]{16}")

Place = tuple[str, int, str, float, int]
"""Accelerator key, thousandths of an accelerator, mode, power cap, nodes: a cell within its class."""


@dataclass(frozen=True)
class ClassObservations:
    """Everything that the profile of one class holds."""

    workload_class: str
    stated: tuple[Cell, ...] = ()
    predicted: tuple[Cell, ...] = ()
    """The formulas' cells, stored for the time when the class has no job from which they can be computed."""
    learned: tuple[Cell, ...] = ()
    """As last written: a cell keeps its speed until it changes by more than a step."""
    records: tuple[Record, ...] = ()
    conduct: tuple[Conduct, ...] = ()
    counted: CountedRuns = field(default_factory=CountedRuns)
    held: HeldTime = field(default_factory=HeldTime)

    def has(self, run: SpeedReport) -> bool:
        """Whether the run is in the evidence."""
        if run.run in self.counted.runs:
            return True
        return bool(self.counted.before and run.ended and run.ended <= self.counted.before)

    @property
    def measured(self) -> frozenset[Place]:
        """Placements with a stated or measured cell in the profile."""
        cells = [c for c in self.learned if c.source is Source.MEASURED]
        return frozenset(place_of(c) for c in (*self.stated, *cells))

    def measures(self, place: Place) -> bool:
        """Whether the placement was measured or stated, be it for any number of nodes."""
        return not self.measured.isdisjoint({place, on_any_nodes(place)})


@dataclass(frozen=True)
class Stay:
    """A job's time at one placement, from its admission to its end; `until` None: it is still there."""

    place: Place
    since: datetime
    until: datetime | None = None


def place_of(cell: Cell | Record) -> Place:
    return cell.place[1:]


def on_any_nodes(place: Place) -> Place:
    """The cell that stands for every number of nodes of which nothing better is known."""
    return (*place[:4], 0)


def doubted(table: PerformanceTable) -> frozenset[tuple[object, ...]]:
    """The records of a table that are not believed, by ``record_key``."""
    return frozenset(record_key(record) for record in quarantined(table))


def record_key(record: Record) -> tuple[object, ...]:
    """What tells the records of a table apart."""
    return (record.place, record.tenant, record.job, record.verified)


def believable_mib(record: Record, planned_mib: int) -> int:
    """The device memory that a record reports, in MiB; 0 where it reports none or more than can be believed."""
    return 0 if planned_mib and record.memory_mib > BELIEVABLE * planned_mib else record.memory_mib


def place_of_line(line: ProfileCell | StatedCell) -> Place:
    return (key_of_line(line), line.accelerators * 1000, line.mode, line.power_cap_percent / 100, line.nodes)


def key_of_line(line: ProfileCell | StatedCell | Evidence) -> str:
    return accelerator_key(line.accelerator, line.link_class)


def place_of_admission(at: Admission) -> Place:
    size_m = at.pods * at.accelerators_per_pod * 1000
    nodes = named_nodes(size_m, len(set(at.nodes)))
    cap = 1.0 if at.power_cap_percent is None else at.power_cap_percent / 100
    return (accelerator_key(at.accelerator, at.link_class or ""), size_m, at.mode or "resident", cap, nodes)


def digests(tenants: Iterable[Tenant]) -> dict[str, str]:
    """Tenant's name to its digest in profiles."""
    return {t.metadata.name: _digest(t.metadata.uid) for t in tenants}


def _digest(text: str) -> str:
    return hashlib.sha256(f"tenant/{text}".encode()).hexdigest()[:16]


def _key(tenant: str, keys: Mapping[str, str]) -> str:
    """A tenant's digest; a digest that was read stays as it is, and a name is never written."""
    return keys.get(tenant) or (tenant if _DIGEST.fullmatch(tenant) else _digest(tenant))


def by_class(profiles: Iterable[PerformanceProfile]) -> dict[str, PerformanceProfile]:
    """The profile that counts for each class."""
    found: dict[str, PerformanceProfile] = {}
    for profile in sorted(profiles, key=_age):
        found.setdefault(profile.spec.workload_class, profile)
    return found


def slack_at(profile: PerformanceProfile, admission: Admission) -> float | None:
    """Mean over lower bound of the profile's speed for an admission's placement; None where it has none."""
    cells = (profile.status.cells if profile.status is not None else None) or ()
    known, place = {place_of_line(cell): cell for cell in cells}, place_of_admission(admission)
    cell = known.get(place) or known.get(on_any_nodes(place))
    return max(1.0, cell.tokens_per_second / cell.low) if cell is not None and cell.low else None


def _age(profile: PerformanceProfile) -> tuple[float, str]:
    made = profile.metadata.creation_timestamp
    return (made.timestamp() if made is not None else 0.0, profile.metadata.name)


# -- reading -------------------------------------------------------------------------------------------


def read(profile: PerformanceProfile, names: Mapping[str, str]) -> ClassObservations:
    """What the profile holds.

    Args:
        names: digest to tenant; a digest that no tenant has is kept as it is.
    """
    name, status = profile.spec.workload_class, profile.status
    stated = tuple(_stated(name, cell) for cell in profile.spec.cells or ())
    if status is None:
        return ClassObservations(name, stated)
    cells = status.cells or []
    return ClassObservations(
        name,
        stated,
        tuple({c.place: c for c in (_predicted(name, x) for x in cells if x.predicted is not None)}.values()),
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
        key_of_line(cell),
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
        nodes=named_nodes(cell.accelerators * 1000, cell.nodes),
    )


def _predicted(name: str, cell: ProfileCell) -> Cell:
    """The formula's cell; the formulas do not know nodes."""
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
        nodes=0,
    )


def _learned(name: str, cell: ProfileCell) -> Cell:
    return Cell(
        name,
        key_of_line(cell),
        cell.accelerators * 1000,
        cell.mode,
        cell.tokens_per_second,
        cell.low,
        cell.high,
        power_cap=cell.power_cap_percent / 100,
        source=Source.MEASURED if cell.source is CellSource.MEASURED else Source.RATIO,
        nodes=cell.nodes,
    )


def _record(name: str, each: Evidence, names: Mapping[str, str]) -> Record:
    return Record(
        name,
        key_of_line(each),
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
        memory_mib=each.memory_mib or 0,
        watts=each.watts or 0.0,
        nodes=each.nodes,
    )


# -- writing -------------------------------------------------------------------------------------------


def evidence_of(record: Record, keys: Mapping[str, str]) -> Evidence:
    """A record of ended jobs as it stands in a profile."""
    return Evidence(
        tenant=_key(record.tenant, keys),
        accelerator=type_of(record.accelerator),
        link_class=link_of(record.accelerator),
        accelerators=record.accelerators_m // 1000,
        nodes=record.nodes,
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
        memory_mib=record.memory_mib or None,
        watts=record.watts or None,
    )


def most_checked(conduct: Iterable[Conduct]) -> list[Conduct]:
    """As many as fit into a profile: those with the most checked runs."""
    best = sorted(conduct, key=lambda c: (-c.passed - c.failed, c.tenant))[:MOST_CONDUCT]
    return sorted(best, key=lambda c: c.tenant)


def conduct_of(conduct: Conduct, keys: Mapping[str, str]) -> TenantConduct:
    return TenantConduct(tenant=_key(conduct.tenant, keys), passed=conduct.passed, failed=conduct.failed)


# -- adding up -----------------------------------------------------------------------------------------


def fold(known: ClassObservations, runs: Iterable[SpeedReport]) -> ClassObservations:
    """The class with the ended runs that were not counted yet. The order of the runs does not matter."""
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
    """Without the runs of deleted jobs, which cannot be counted again."""
    here = set(jobs)
    kept = [run for run in counted.runs if run.rpartition("-")[0] in here]
    return counted if kept == counted.runs else counted.model_copy(update={"runs": kept})


def hold(known: ClassObservations, stays: Iterable[Stay], now: datetime) -> HeldTime:
    """The time held up to ``now``. A speed that is not yet stored in the profile counts as unmeasured."""
    old = known.held
    fade = 0.5 ** (_seconds(old.as_of, now) / HALF_LIFE_S) if old.as_of is not None else 1.0
    measured, unmeasured = old.measured * fade, old.unmeasured * fade
    for stay in stays:
        since = max(stay.since, old.as_of) if old.as_of is not None else stay.since
        amount = _seconds(since, min(stay.until or now, now)) * stay.place[1] / 1000
        if known.measures(stay.place):
            measured += amount
        else:
            unmeasured += amount
    return HeldTime(measured=round(measured, 1), unmeasured=round(unmeasured, 1), as_of=now)


def _seconds(since: datetime, until: datetime) -> float:
    return max(0.0, (until - since) / timedelta(seconds=1))
