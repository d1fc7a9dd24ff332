"""What the table learns: cells for every row and type, from given cells and reported speeds.

    1. The start: a row's formula, or the accelerators' data sheets.
    2. Verified reports (reports.py) go through the tree (speed_model.py): a mean and an interval for every cell.
    3. Unverified reports count only inside that interval, and those far outside it not at all: a tenant's claims
       cannot move its exchange rates further than verified evidence leaves open.
    4. Both together go through the tree once more and become `PerformanceTable.learned`.

Rows with nodes come from reports that say them. They start where the row of the same size without nodes does, and take
its place: once a size was measured on some number of nodes, the formula's row for any number says nothing more. In the
tree a class on several nodes is a class of its own beside that on one: a slow network says little about one node.

Exploration: where nothing was measured, tenants without a guarantee (`explorers`) see an optimistic speed,
half a standard deviation up, so that a type is tried even if its data sheet is too modest. This stops when
`EXPLORED` of all accelerator-seconds went to cells without a measurement (`PerformanceTable.explored`).

A learned cell keeps its speed until it should change by more than `STEADY`, so that noise moves nothing; its
interval is always the fresh one.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

import numpy as np

from ..fit.accelerators import accelerator as data_sheet
from ..model.table import (
    SCALING_EXPONENT,
    Cell,
    Fault,
    PerformanceTable,
    Place,
    Record,
    Source,
    on_any_nodes,
    type_of,
)
from .reports import Noise, distrusted, noise
from .speed_model import (
    DATA_SHEET_PRIOR,
    FORMULA_PRIOR,
    Floats,
    Observed,
    Posterior,
    Prior,
    number,
    posterior,
)
from .speed_model import learn as learn_covariances

QUANTILE = 1.645
"""Standard deviations from the mean to the 5 % and 95 % quantiles."""
FAR = 4.0
"""A report this many standard deviations from its expected value is not used."""
FAR_AT_LEAST = 0.3
"""And at least this far (in the logarithm)."""
STEADY = 0.02
"""A learned speed changes in steps of at least this much, relatively."""
EXPLORED = 0.03
"""Part of the accelerator-seconds that may go to unmeasured cells before exploration stops."""
MOST_DOUBT = 1.0
"""Standard deviation of the logarithm above which the mean is not raised any further."""

Row = tuple[str, int, str, float, int]
"""Class, thousandths of an accelerator, mode, power cap, nodes (0: any number)."""


def family(workload_class: str) -> str:
    """Classes of one model family have similar ratios; the family is what stands before the first blank, or
    the first dash."""
    head, blank, _ = workload_class.partition(" ")
    return head if blank else workload_class.partition("-")[0]


def learn(
    table: PerformanceTable,
    wanted: Iterable[Row] = (),
    accelerators: Iterable[str] = (),
    explorers: Iterable[str] = (),
    tried: Container[str] | None = None,
) -> PerformanceTable:
    """The table with fresh learned cells.

    Args:
        wanted: rows to answer for, besides those with cells or reports.
        accelerators: the same for types.
        explorers: tenants that may see optimistic speeds of unmeasured cells.
        tried: workload classes that they may try them with; None: all.
    """
    evidence = _Evidence(table, wanted, accelerators)
    if not evidence.kinds:
        return table
    learned: list[Cell] = []
    faults: dict[tuple[str, ...], str] = {}
    for rows, prior in ((evidence.with_formula, FORMULA_PRIOR), (evidence.without, DATA_SHEET_PRIOR)):
        if rows:
            group = _Group(evidence, rows, prior)
            learned += group.cells()
            faults |= group.outside
    if table.explored.share < EXPLORED:
        open_to = [cell for cell in learned if tried is None or cell.workload_class in tried]
        learned += [trial for tenant in sorted(set(explorers)) for trial in _hopeful_cells(open_to, tenant)]
    records = tuple(_marked(record, faults) for record in table.records)
    learned.sort(key=lambda cell: (*cell.place, cell.tenant))
    return replace(table, learned=tuple(learned), records=records)


def _hopeful_cells(learned: list[Cell], tenant: str) -> list[Cell]:
    """Optimistic cells for one tenant."""
    return [
        replace(cell, speed=cell.speed * math.exp(round(_spread(cell), 1) / 2), tenant=tenant, trial=True)
        for cell in learned
        if cell.source is Source.RATIO and not cell.tenant
    ]


def _spread(cell: Cell) -> float:
    """Standard deviation of the logarithm, from the interval."""
    return math.log(cell.high / cell.low) / (2 * QUANTILE) if cell.low and cell.high else 0.0


def quarantined(table: PerformanceTable) -> tuple[Record, ...]:
    """Reports that are not used, each with its reason."""
    doubted = distrusted(table)
    found = []
    for record in table.records:
        if record.fault:
            found.append(record)
        elif record.tenant in doubted and not record.verified:
            found.append(replace(record, fault=Fault.DISTRUSTED.value))
    return tuple(found)


def _identity(record: Record) -> tuple[str, ...]:
    return (*map(str, record.place), record.tenant, record.job, str(record.verified))


def _marked(record: Record, faults: dict[tuple[str, ...], str]) -> Record:
    """A record far outside its interval is judged again by what is known now; other faults stay."""
    if record.fault not in ("", Fault.OUTSIDE):
        return record
    fault = faults.get(_identity(record), "")
    return record if fault == record.fault else replace(record, fault=fault)


class _Evidence:
    """Cells and records by place, and where every row starts."""

    def __init__(self, table: PerformanceTable, wanted: Iterable[Row], accelerators: Iterable[str]) -> None:
        self.table = table
        self.noise: Noise = noise(table.records)
        self.given = {cell.place: cell for cell in sorted(table.cells, key=_trust) if not cell.tenant}
        self.formula = {
            cell.place: cell for cell in table.cells if not cell.tenant and cell.source is Source.FORMULA
        }
        self.before = {cell.place: cell for cell in table.learned if not cell.tenant}
        kinds = {rate.accelerator for rate in table.rates} | {cell.accelerator for cell in table.cells}
        self.kinds = sorted(kinds | {r.accelerator for r in table.records} | set(accelerators))
        self.rates = {rate.accelerator: rate.rate for rate in table.rates}
        seen = {_row(record.place) for record in table.records}
        seen |= {_row(place) for place, cell in self.given.items() if cell.source is not Source.FORMULA}
        rows = seen | {_row(place) for place in self.given} | set(wanted)
        named = {_general(row) for row in seen if row[4]}
        rows -= {row for row in named if row not in seen}
        formulas = {_row(place) for place in self.formula}
        self.with_formula = sorted(row for row in rows if row in formulas or _general(row) in formulas)
        self.without = sorted(rows - set(self.with_formula))

    def stated(self, place: Place) -> Cell | None:
        """The given cell of a place, or the one for any number of nodes."""
        return self.given.get(place) or self.given.get(on_any_nodes(place))

    def start(self, row: Row) -> list[float]:
        """Log speed of the row on every type before any measurement."""
        sheet = [math.log(self._rate(kind)) for kind in self.kinds]
        known = {
            i: math.log(cell.speed)
            for i, kind in enumerate(self.kinds)
            if (cell := self._formula(_place(row, kind))) is not None and cell.speed > 0
        }
        if known:
            shift = sum(value - sheet[i] for i, value in known.items()) / len(known)
        else:
            shift = SCALING_EXPONENT * math.log(max(row[1], 1) / 1000)
        return [known.get(i, sheet[i] + shift) for i in range(len(self.kinds))]

    def _formula(self, place: Place) -> Cell | None:
        return self.formula.get(place) or self.formula.get(on_any_nodes(place))

    def _rate(self, kind: str) -> float:
        sheet = data_sheet(type_of(kind))
        rate = self.rates.get(kind, self.rates.get(type_of(kind), 1.0))
        return max(rate if sheet is None else sheet.rate, 1e-9)


def _trust(cell: Cell) -> tuple[bool, bool, int, float]:
    """Sort key of the given cells of one place: the last one is used."""
    return (cell.source is Source.OVERRIDE, cell.source is Source.MEASURED, cell.samples, cell.speed)


def _row(place: Place) -> Row:
    return (place[0], *place[2:])


def _general(row: Row) -> Row:
    return (*row[:4], 0)


def _place(row: Row, kind: str) -> Place:
    return (row[0], kind, *row[1:])


@dataclass(frozen=True, slots=True)
class _Observation:
    """One observation: the deviation from where the row starts, its variance, and its record."""

    row: int
    kind: int
    deviation: float
    variance: float
    record: Record | None = None
    samples: int = 1


class _Group:
    """Rows with the same kind of start, and what the tree says about them."""

    def __init__(self, evidence: _Evidence, rows: list[Row], prior: Prior) -> None:
        self.evidence, self.rows = evidence, rows
        self.index = {row: i for i, row in enumerate(rows)}
        self.types = {kind: i for i, kind in enumerate(evidence.kinds)}
        self.starts = np.array([evidence.start(row) for row in rows])
        groups = [(row[0], row[4] > 1) for row in rows]
        self.class_of = number(groups)
        self.family_of = number([family(name) for name, _ in sorted(set(groups))])
        self.outside: dict[tuple[str, ...], str] = {}
        sure, unsure = self._observations()
        first = self._observed(sure)
        base = posterior(first, learn_covariances(first, prior))
        self.seen = sure + [o for item in unsure if (o := self._bounded(item, base)) is not None]
        full = first if len(self.seen) == len(sure) else self._observed(self.seen)
        self.posterior = base if full is first else posterior(full, learn_covariances(full, prior))

    def _observations(self) -> tuple[list[_Observation], list[_Observation]]:
        """Verified observations, and unverified ones."""
        sure: list[_Observation] = []
        unsure: list[_Observation] = []
        for place, cell in sorted(self.evidence.given.items()):
            row = self.index.get(_row(place))
            if row is None or cell.speed <= 0 or cell.source not in (Source.MEASURED, Source.OVERRIDE):
                continue
            kind = self.types[cell.accelerator]
            value = math.log(cell.speed) - self.starts[row, kind]
            sure.append(_Observation(row, kind, value, self._variance(cell), None, max(cell.samples, 1)))
        doubted = distrusted(self.evidence.table)
        for record in self.evidence.table.records:
            row = self.index.get(_row(record.place))
            if row is None or not record.reports or record.fault not in ("", Fault.OUTSIDE):
                continue
            kind = self.types[record.accelerator]
            given = self.evidence.stated(record.place)
            if given is not None and 0 < given.limit < math.exp(record.log_mean):
                self.outside[_identity(record)] = Fault.IMPOSSIBLE.value
                continue
            value = record.log_mean - self.starts[row, kind]
            item = _Observation(row, kind, value, self.evidence.noise.of(record), record, record.reports)
            if record.verified:
                sure.append(item)
            elif record.tenant not in doubted:
                unsure.append(item)
        return sure, unsure

    def _variance(self, cell: Cell) -> float:
        if cell.low and cell.high and 0 < cell.low < cell.high:
            return (math.log(cell.high / cell.low) / (2 * QUANTILE)) ** 2
        if cell.source is Source.OVERRIDE:
            return 1e-6
        return self.evidence.noise.report / max(cell.samples, 1) + self.evidence.noise.run

    def _observed(self, seen: list[_Observation]) -> Observed:
        precision: Floats = np.zeros_like(self.starts)
        scaled: Floats = np.zeros_like(self.starts)
        for item in seen:
            precision[item.row, item.kind] += 1 / item.variance
            scaled[item.row, item.kind] += item.deviation / item.variance
        means = np.divide(scaled, precision, out=np.zeros_like(scaled), where=precision > 0)
        return Observed(self.class_of, self.family_of, means, precision)

    def _bounded(self, item: _Observation, base: Posterior) -> _Observation | None:
        """An unverified report, moved into the interval that verified ones leave; None: far outside it."""
        assert item.record is not None
        mean, spread = float(base.mean[item.row, item.kind]), float(base.deviation[item.row, item.kind])
        off = item.deviation - mean
        if abs(off) > max(FAR_AT_LEAST, FAR * math.sqrt(spread**2 + item.variance)):
            self.outside[_identity(item.record)] = Fault.OUTSIDE.value
            return None
        kept = max(-QUANTILE * spread, min(QUANTILE * spread, off))
        return replace(item, deviation=mean + kept, variance=item.variance + (off - kept) ** 2)

    def cells(self) -> list[Cell]:
        """One per row and type, except where impossible or overridden."""
        samples: dict[tuple[int, int], int] = {}
        latest: dict[tuple[int, int], Record] = {}
        watts: dict[tuple[int, int], float] = {}
        for item in self.seen:
            at = (item.row, item.kind)
            samples[at] = samples.get(at, 0) + item.samples
            if item.record is not None:
                latest[at] = item.record
                watts[at] = max(watts.get(at, 0.0), item.record.watts)
        mean = self.starts + self.posterior.mean
        found: list[Cell] = []
        for i, row in enumerate(self.rows):
            for kind, k in self.types.items():
                given = self.evidence.stated(_place(row, kind))
                if given is not None and (given.speed <= 0 or given.source is Source.OVERRIDE):
                    continue
                estimate = _SpeedEstimate(
                    float(mean[i, k]), float(self.posterior.deviation[i, k]), samples.get((i, k), 0)
                )
                before = self.evidence.before.get(_place(row, kind))
                cell = _cell(row, kind, estimate, given, latest.get((i, k)), before)
                found.append(replace(cell, watts=watts.get((i, k)) or cell.watts))
        return found


@dataclass(frozen=True, slots=True)
class _SpeedEstimate:
    """Mean and standard deviation of a log speed, and the number of reports behind it."""

    mean: float
    spread: float
    samples: int

    @property
    def speed(self) -> float:
        return math.exp(self.mean + min(self.spread, MOST_DOUBT) ** 2 / 2)


def _cell(
    row: Row,
    kind: str,
    estimate: _SpeedEstimate,
    given: Cell | None,
    record: Record | None,
    before: Cell | None,
) -> Cell:
    """The learned cell; memory is the report's, else the given cell's."""
    name, size, mode, cap, nodes = row
    memory_mib = 0 if given is None else given.memory_mib
    if record is not None:
        memory_mib = record.memory_mib or memory_mib
    return Cell(
        name,
        kind,
        size,
        mode,
        speed=_steady(estimate.speed, before),
        low=math.exp(estimate.mean - QUANTILE * estimate.spread),
        high=math.exp(estimate.mean + QUANTILE * estimate.spread),
        memory_mib=memory_mib,
        host_memory_mib=0 if given is None else given.host_memory_mib,
        watts=0.0 if given is None else given.watts,
        power_cap=cap,
        source=Source.MEASURED if estimate.samples else Source.RATIO,
        samples=estimate.samples,
        limit=0.0 if given is None else given.limit,
        nodes=nodes,
    )


def _steady(speed: float, before: Cell | None) -> float:
    """The speed that the cell had, unless it should change by more than `STEADY`."""
    return speed if before is None or abs(before.speed / speed - 1) > STEADY else before.speed
