"""Reported speeds: absorbed, checked against what cannot be forged, and kept.

    absorb           a round's reports go into one record per running job and cell
    settle           a job ended: what its reports add up to is compared with the work it had to do
    close            the same if somebody else has compared: the job's record joins those of ended jobs
    add_exploration  accelerator-seconds spent where nothing was measured yet, and in all

A report is the tenant's claim until it is *verified*: it came from an engine that we built
(`Report.trusted`), or its job ended and speed x seconds by our own clock adds up to the job's work. A job
whose claims exceed its work, or miss it at the end, contradicts its own counters: none of its reports is
used. Of a tenant whose jobs fail this check only verified reports are used, until honest jobs outnumber the
others again.

Everything is a pure function from table to table. The order of the reports of one round does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..model.table import (
    Cell,
    Conduct,
    Exploration,
    Fault,
    PerformanceTable,
    Place,
    Record,
    named_nodes,
    on_any_nodes,
)

NOISE = 0.1
"""Prior standard deviation of the logarithm of one report."""
RUN_NOISE = 0.02
"""The same between runs of one cell (other nodes, other neighbours)."""
NOISE_WEIGHT = 20.0
"""The two numbers above count like this many observations."""
MOST_NOISE = 0.1
"""Noise between runs excuses a job whose counters do not add up by at most this."""
KEPT = 400
"""Reports that one record of ended jobs stands for at most: older ones fade."""
SLACK = 0.02
"""Part of a job's work by which its counters may be off before noise is considered (starts, rounding)."""
SIGMAS = 3.0
"""Sums of reports may miss the truth by this many standard deviations."""
MOST_RECORDS = 256
"""Records of ended jobs kept per workload class: one per cell, tenant and outcome. Beyond that the least
informative are dropped: first unused ones, then unverified ones, then those of few reports."""
HONEST = 10
"""A tenant is distrusted while more than one in this many of its ended jobs failed the check."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a job reported of its speed since its last report."""

    job: str
    tenant: str
    workload_class: str
    accelerator: str
    """Accelerator key."""
    accelerators_m: int
    speed: float
    """Work per second."""
    seconds: float
    """The duration, by our own clock."""
    mode: str = "resident"
    power_cap: float = 1.0
    total_work: float | None = None
    """All work of the job, as it was submitted; None: not known."""
    trusted: bool = False
    """From an engine of ours, by the digest of its image."""
    memory_mib: int = 0
    watts: float = 0.0
    """From the node agent; never from the job."""
    nodes: int = 0
    """Different nodes that its pods stood on; 0: not known."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Variance of the logarithm of one report inside a run, and between runs of one cell."""

    report: float
    run: float

    def of(self, record: Record) -> float:
        """Variance of the record's mean."""
        count = max(record.reports, 1)
        return self.report / count + self.run * max(record.squares, 1.0) / count**2


def noise(records: Iterable[Record], doubtful: bool = False) -> Noise:
    """Both variances from all records that are used, with a prior (analysis of variance).

    Args:
        doubtful: include jobs whose counters did not add up: judging by the spread of those that passed would
            shrink the estimate again and again.
    """
    faults = ("", Fault.COUNTERS) if doubtful else ("",)
    found = [record for record in records if record.reports and record.fault in faults]
    reports, runs = sum(r.reports for r in found), sum(r.runs for r in found)
    within = math.fsum(record.within for record in found)
    report = (NOISE_WEIGHT * NOISE**2 + within) / (NOISE_WEIGHT + reports - runs)
    between = math.fsum(record.between for record in found) - (runs - len(found)) * report
    weight = NOISE_WEIGHT / 4 * max(1.0, reports / max(runs, 1))
    several = math.fsum(record.reports - record.squares / record.reports for record in found)
    run = (weight * RUN_NOISE**2 + between) / (weight + several)
    return Noise(report, max(run, 1e-8))


def absorb(table: PerformanceTable, reports: Iterable[Report]) -> PerformanceTable:
    """The table after a round's reports. Its answers do not change until `learning.learn` is called."""
    groups: dict[tuple[str, ...], list[Report]] = {}
    for report in reports:
        if report.seconds > 0 and report.accelerators_m > 0:
            groups.setdefault(_sort_key(report), []).append(report)
    if not groups:
        return table
    records = {_record_key(record): record for record in table.records}
    limits = _limits(table.cells)
    for key in sorted(groups):
        fresh = _summary(groups[key], limits)
        place = _record_key(fresh)
        records[place] = _more(records[place], fresh) if place in records else fresh
    totals = {r.job: r.total_work for group in groups.values() for r in group if r.total_work}
    for job, total in totals.items():
        _check_running(records, job, total)
    return replace(table, records=tuple(records[key] for key in sorted(records)))


def settle(
    table: PerformanceTable, job: str, total_work: float | None, failed: bool = False
) -> PerformanceTable:
    """The table after a job has ended.

    Args:
        total_work: all the work it had to do; None: not known, so nothing can be checked.
        failed: it ended without doing all its work; it cannot be checked either.
    """
    mine = [record for record in table.records if record.job == job]
    if not mine:
        return table
    agrees: bool | None = None
    if any(record.fault == Fault.COUNTERS for record in mine):
        agrees = False
    elif total_work is not None and total_work > 0 and not failed:
        claimed = math.fsum(record.work for record in mine)
        agrees = abs(claimed / total_work - 1) <= _tolerance(mine, noise(table.records, doubtful=True))
    return close(table, job, agrees)


def close(table: PerformanceTable, job: str, agrees: bool | None) -> PerformanceTable:
    """The table with a job's reports among those of ended jobs.

    Args:
        agrees: whether its reports agree with the work it had to do; None: unknown.
    """
    mine = [record for record in table.records if record.job == job]
    if not mine:
        return table
    others = {_record_key(record): record for record in table.records if record.job != job}
    for record in mine:
        fault = record.fault if agrees is not False else Fault.COUNTERS.value
        closed = replace(
            record, job="", fault=fault, verified=record.verified or (agrees is True and not fault)
        )
        key = _record_key(closed)
        others[key] = _faded(_joined(others[key], closed)) if key in others else closed
    for name in sorted({record.workload_class for record in mine}):
        _bound(others, name)
    conduct = {c.tenant: c for c in table.conduct}
    if agrees is not None and not all(record.verified for record in mine):
        name = mine[0].tenant
        old = conduct.get(name, Conduct(name))
        conduct[name] = replace(old, passed=old.passed + agrees, failed=old.failed + (not agrees))
    return replace(
        table,
        records=tuple(others[key] for key in sorted(others)),
        conduct=tuple(conduct[name] for name in sorted(conduct)),
    )


def _bound(records: dict[_Key, Record], workload_class: str) -> None:
    """Drop the least informative records of ended jobs of a class beyond `MOST_RECORDS`."""
    ended = [
        key for key, record in records.items() if not record.job and record.workload_class == workload_class
    ]

    def worth(key: _Key) -> tuple[bool, bool, int]:
        record = records[key]
        return not record.fault, record.verified, record.reports

    for key in sorted(sorted(ended), key=worth, reverse=True)[MOST_RECORDS:]:
        del records[key]


def add_exploration(table: PerformanceTable, unmeasured_s: float, total_s: float) -> PerformanceTable:
    """Add accelerator-seconds to the account of exploration."""
    old = table.explored
    return replace(table, explored=Exploration(old.unmeasured_s + unmeasured_s, old.total_s + total_s))


def distrusted(table: PerformanceTable) -> frozenset[str]:
    """Tenants whose unverified reports are not used now."""
    return frozenset(c.tenant for c in table.conduct if c.failed * HONEST > c.passed + c.failed)


def contradicted(table: PerformanceTable, job: str) -> bool:
    """Whether this running job's reports contradict its counters."""
    return any(r.job == job and r.fault == Fault.COUNTERS for r in table.records)


def overstated(table: PerformanceTable, job: str) -> float:
    """Work that a running job claims beyond the high quantiles of its cells: it counts as not done."""
    highs = {c.place: c.high for c in table.learned}
    excess = 0.0
    for record in table.records:
        if record.job == job:
            high = highs.get(record.place)
            excess += 0.0 if high is None else max(0.0, record.work - high * record.seconds)
    return excess


_Key = tuple[str, str, int, str, float, int, str, str, bool, str]


def _record_key(record: Record) -> _Key:
    """Running jobs: one record per job and cell. Ended ones: one per tenant, cell and outcome."""
    outcome = (False, "") if record.job else (record.verified, record.fault)
    return (*record.place, record.tenant, record.job, *outcome)


def _sort_key(report: Report) -> tuple[str, ...]:
    cell = (report.workload_class, report.accelerator, str(report.accelerators_m), report.mode)
    return (*cell, repr(report.power_cap), str(report.nodes), report.tenant, report.job)


def _limits(cells: Iterable[Cell]) -> dict[Place, float]:
    return {c.place: c.limit for c in cells if c.limit > 0}


def _summary(reports: list[Report], limits: dict[Place, float]) -> Record:
    """One record of a round's reports of one job in one cell. One impossible report marks all of it."""
    first = reports[0]
    empty = Record(
        first.workload_class,
        first.accelerator,
        first.accelerators_m,
        first.mode,
        first.power_cap,
        first.tenant,
        first.job,
        verified=all(report.trusted for report in reports),
        memory_mib=max(report.memory_mib for report in reports),
        watts=max(report.watts for report in reports),
        nodes=named_nodes(first.accelerators_m, first.nodes),
    )
    limit = limits.get(empty.place) or limits.get(on_any_nodes(empty.place), math.inf)
    if any(not math.isfinite(r.speed) or not 0 < r.speed <= limit for r in reports):
        return replace(empty, fault=Fault.IMPOSSIBLE.value)
    logs = sorted(math.log(report.speed) for report in reports)
    mean = math.fsum(logs) / len(logs)
    return replace(
        empty,
        reports=len(logs),
        squares=float(len(logs) ** 2),
        log_mean=mean,
        within=math.fsum((value - mean) ** 2 for value in logs),
        work=math.fsum(sorted(report.speed * report.seconds for report in reports)),
        seconds=math.fsum(sorted(report.seconds for report in reports)),
    )


def _pooled(old: Record, new: Record) -> tuple[int, float, float]:
    """The number of both records' reports, their mean, and the squared distance of the two means."""
    count = old.reports + new.reports
    apart = new.log_mean - old.log_mean
    part = new.reports / count if count else 0.0
    return count, old.log_mean + apart * part, apart**2 * old.reports * part


def _more(old: Record, new: Record) -> Record:
    """A run's record after more of its own reports."""
    count, mean, apart = _pooled(old, new)
    return replace(
        old,
        reports=count,
        log_mean=mean,
        within=old.within + new.within + apart,
        squares=float(count**2),
        work=old.work + new.work,
        seconds=old.seconds + new.seconds,
        verified=old.verified and new.verified,
        fault=old.fault or new.fault,
        memory_mib=max(old.memory_mib, new.memory_mib),
        watts=new.watts or old.watts,
    )


def _joined(old: Record, new: Record) -> Record:
    """Two records of ended runs as one."""
    count, mean, apart = _pooled(old, new)
    return replace(
        old,
        reports=count,
        runs=old.runs + new.runs,
        log_mean=mean,
        within=old.within + new.within,
        between=old.between + new.between + apart,
        squares=old.squares + new.squares,
        work=old.work + new.work,
        seconds=old.seconds + new.seconds,
        memory_mib=max(old.memory_mib, new.memory_mib),
        watts=max(old.watts, new.watts),
    )


def _faded(record: Record) -> Record:
    """At most `KEPT` reports, so that a machine that changed is learned again after a while."""
    if record.reports <= KEPT:
        return record
    part = KEPT / record.reports
    return replace(
        record,
        reports=KEPT,
        runs=max(1, round(record.runs * part)),
        within=record.within * part,
        between=record.between * part,
        squares=record.squares * part**2,
        work=record.work * part,
        seconds=record.seconds * part,
    )


def _tolerance(records: list[Record], usual: Noise) -> float:
    """How far, relatively, honest reports may add up to something else than the job's work."""
    work = math.fsum(record.work for record in records)
    if work <= 0:
        return SLACK
    variance = math.fsum(
        (record.work / work) ** 2 * (usual.report / max(record.reports, 1) + min(usual.run, MOST_NOISE**2))
        for record in records
    )
    return SLACK + SIGMAS * math.sqrt(variance)


def _check_running(records: dict[_Key, Record], job: str, total_work: float) -> None:
    """Mark a running job that claims to have done more than its work: it contradicts itself."""
    mine = [key for key, record in records.items() if record.job == job]
    found = [records[key] for key in mine]
    usual = noise(records.values(), doubtful=True)
    if math.fsum(record.work for record in found) > total_work * (1 + _tolerance(found, usual)):
        for key in mine:
            records[key] = replace(records[key], fault=records[key].fault or Fault.COUNTERS.value)
