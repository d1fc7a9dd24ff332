"""The performance table: (class, accelerator key, shape, engine mode, power cap) -> speed, memory, watts.

A shape is a number of accelerators and of nodes. A cell may leave out the nodes (0): it stands for every number for
which nothing better is known. Of cells with nodes the one that has as many as the gang, or next more, answers: eight
accelerators on one node and on two are two cells, and three nodes are as slow as four. An accelerator key is a type, or
a type and the link class of its pool (`accelerator_key`); cells of the type answer for link classes without cells.

A cell says where it comes from and how wrong it may be. `TableView` answers questions for which there is no
cell, in this order, and says which step answered:

    override               a person set it
    learned                `learning.py`: what the reports say of this cell and of its neighbours
    measured / formula     a given cell: somebody ran it, or `busbar.scheduler.fit` predicted it
    shape                  same class, accelerator and mode: between two sizes by the exponent that leads from one
                           to the other, elsewhere scaled sublinearly from the nearest
    ratio                  same class on another accelerator, times the ratio seen in other classes
    rate                   nothing known of the class: the accelerator's exchange rate

Plans use the mean of an answer, promises its low quantile. The table also carries what it learned from
(`records`, `conduct`), so a snapshot is enough to continue learning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from .diff import differing

SCALING_EXPONENT = 0.9
"""Speed on n times the accelerators if no cell says better: n ** 0.9."""
UNKNOWN_SPREAD = 0.5
"""Relative half-width of the interval of an answer that no cell supports."""


LINK = "/"
"""Between type and link class in an accelerator key."""


def accelerator_key(accelerator: str, link: str = "") -> str:
    """The table's key of an accelerator type in a pool with this link class ("": none is known)."""
    return f"{accelerator}{LINK}{link}" if link else accelerator


def type_of(key: str) -> str:
    """The accelerator type of a key."""
    return key.partition(LINK)[0]


def link_of(key: str) -> str:
    """The link class of a key; "": none."""
    return key.partition(LINK)[2]


def named_nodes(accelerators_m: int, nodes: int) -> int:
    """The nodes in the key of a cell: one accelerator stands on one node anyway, and its cells do not name it."""
    return nodes if accelerators_m > 1000 else 0


class Source(StrEnum):
    """Where a number comes from, best last."""

    RATE = "rate"
    RATIO = "ratio"
    SHAPE = "shape"
    FORMULA = "formula"
    MEASURED = "measured"
    OVERRIDE = "override"


_TRUST = {source: rank for rank, source in enumerate(Source)}

Place = tuple[str, str, int, str, float, int]
"""Class, accelerator key, thousandths of an accelerator, mode, power cap, nodes."""


def on_any_nodes(place: Place) -> Place:
    """The place of the cell that stands for every number of nodes."""
    return (*place[:5], 0)


_BySize = dict[int, dict[int, "Cell"]]
"""Cells by size, then by nodes."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What one accelerator of a type counts in shares and quota, relative to a type taken as 1."""

    accelerator: str
    rate: float = 1.0
    watts: float = 0.0
    """Nameplate watts of one accelerator, used where no cell says better."""
    idle_watts: float = 0.0
    """What one draws that nobody uses; 0: not known."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One entry. `speed` 0 means impossible there (for example: does not fit); such a cell is kept and used."""

    workload_class: str
    accelerator: str
    """Accelerator key."""
    accelerators_m: int
    """Thousandths of an accelerator, all pods together."""
    mode: str = "resident"
    speed: float = 0.0
    """Work units per second of the whole job, mean."""
    low: float | None = None
    """5 % quantile of the speed; None: not known."""
    high: float | None = None
    """95 % quantile."""
    memory_mib: int = 0
    """Device memory needed per accelerator; 0: not known."""
    host_memory_mib: int = 0
    """Host memory needed per pod in this mode; the larger of this and the pod's request counts."""
    watts: float = 0.0
    """Per accelerator; 0: not known."""
    power_cap: float = 1.0
    """Fraction of the board's limit."""
    source: Source = Source.FORMULA
    samples: int = 0
    tenant: str = ""
    """"" : shared. Otherwise only this tenant's jobs see the cell."""
    limit: float = 0.0
    """No speed above this is possible on this hardware; 0: not known."""
    trial: bool = False
    """`speed` is optimistic, so that somebody tries the cell; `low` and `high` are as always."""
    nodes: int = 0
    """Different nodes that the job's pods stand on; 0: any number."""

    @property
    def place(self) -> Place:
        """What tells it from the class's other cells, and the class."""
        return (
            self.workload_class, self.accelerator, self.accelerators_m, self.mode, self.power_cap, self.nodes,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Estimate:
    """An answer: mean speed, its 90 % interval, and its source."""

    speed: float
    low: float
    high: float
    memory_mib: int
    host_memory_mib: int
    watts: float
    source: Source


class Fault(StrEnum):
    """Why reports are not used. Values never change."""

    IMPOSSIBLE = "AboveHardwareLimit"
    COUNTERS = "ContradictsProgress"
    OUTSIDE = "FarOutsideInterval"
    DISTRUSTED = "TenantReportedFalsely"


@dataclass(frozen=True, slots=True)
class Record:
    """Reported speeds of one cell by one tenant: of one job while it runs, of all its ended jobs after.

    Speeds are kept as logarithms. `within` and `between` are sums of squared differences over all reports:
    from the mean of their run, and of that from the mean of all.
    """

    workload_class: str
    accelerator: str
    accelerators_m: int
    mode: str = "resident"
    power_cap: float = 1.0
    tenant: str = ""
    job: str = ""
    """The running job that reports; "": jobs that have ended."""
    reports: int = 0
    runs: int = 1
    log_mean: float = 0.0
    within: float = 0.0
    between: float = 0.0
    squares: float = 0.0
    """Sum over the runs of the square of their number of reports."""
    work: float = 0.0
    """Work that the reports claim: speed x seconds."""
    seconds: float = 0.0
    verified: bool = False
    """The reports were checked against something that the tenant cannot forge."""
    fault: str = ""
    """Why the record is not used (`Fault`); empty: it is."""
    memory_mib: int = 0
    watts: float = 0.0
    nodes: int = 0
    """As in the cell; 0: not known."""

    @property
    def place(self) -> Place:
        """The cell."""
        return (
            self.workload_class, self.accelerator, self.accelerators_m, self.mode, self.power_cap, self.nodes,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Conduct:
    """How many of a tenant's ended jobs passed and failed the check of their reports."""

    tenant: str
    passed: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Exploration:
    """Accelerator-seconds held where nothing had been measured yet, and in all."""

    unmeasured_s: float = 0.0
    total_s: float = 0.0

    @property
    def share(self) -> float:
        return self.unmeasured_s / self.total_s if self.total_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class PerformanceTable:
    """The cells and the exchange rates, as they stand in a snapshot, and what was learned from reports."""

    cells: tuple[Cell, ...] = ()
    """Given: formulas, measurements that people brought, overrides."""
    rates: tuple[Rate, ...] = field(default_factory=tuple)
    learned: tuple[Cell, ...] = ()
    """Made by `learning.learn` from `cells` and `records`; used before any given cell but an override."""
    records: tuple[Record, ...] = ()
    conduct: tuple[Conduct, ...] = ()
    explored: Exploration = field(default_factory=Exploration)


@dataclass(slots=True)
class _Class:
    """The cells of one class."""

    cells: dict[tuple[str, str, str, float], _BySize] = field(default_factory=dict)
    """By tenant ("": shared), accelerator key, mode and power cap."""
    accelerators: dict[str, set[str]] = field(default_factory=dict)
    """Those that have a cell, by tenant."""

    def facts(self) -> object:
        """What plans depend on; intervals do not count, as plans use the mean."""
        return {
            key: {
                (size, nodes): (c.speed, c.memory_mib, c.host_memory_mib, c.watts)
                for size, by_nodes in sizes.items()
                for nodes, c in by_nodes.items()
            }
            for key, sizes in self.cells.items()
        }


class TableView:
    """A table indexed for questions. Build once per table; its answers never change.

    With `before`, the view of an earlier table that differs in a few cells, classes whose cells are the same
    are taken over. The answers are those of a view built afresh.
    """

    def __init__(self, table: PerformanceTable, before: TableView | None = None) -> None:
        self.table = table
        self._rates = {rate.accelerator: rate for rate in table.rates}
        self._classes: dict[str, _Class] = {}
        self._cache: dict[tuple[str, str, str, int, str, float, int], Estimate | None] = {}
        self._ratios: dict[tuple[str, str], float] | None = None
        self._by_ratio: set[str] = set()
        """Classes for which an answer used the ratios."""
        self.changed: frozenset[str] = frozenset()
        """Classes for which plans may find other answers than in the view before."""
        if before is None:
            self._enter(table.cells, table.learned)
            return
        fresh = differing_classes(before.table, table)
        self._classes = {name: known for name, known in before._classes.items() if name not in fresh}
        self._enter(
            [cell for cell in table.cells if cell.workload_class in fresh],
            [cell for cell in table.learned if cell.workload_class in fresh],
        )
        self._by_ratio = set(before._by_ratio)
        self.changed = frozenset(name for name in fresh if self._facts(name) != before._facts(name))
        if self._by_ratio and self._learned_ratios() != before._learned_ratios():
            self.changed |= self._by_ratio

    def _enter(self, cells: Iterable[Cell], learned: Iterable[Cell]) -> None:
        for cell in (*sorted(cells, key=_order), *learned):
            known = self._classes.setdefault(cell.workload_class, _Class())
            known.accelerators.setdefault(cell.tenant, set()).add(cell.accelerator)
            key = (cell.tenant, cell.accelerator, cell.mode, cell.power_cap)
            known.cells.setdefault(key, {}).setdefault(cell.accelerators_m, {})[cell.nodes] = cell

    def modes(self, workload_class: str, tenant: str = "") -> tuple[str, ...]:
        """Engine modes for which the class has a cell, by name."""
        known = self._classes.get(workload_class)
        cells = () if known is None else known.cells
        return tuple(sorted({mode for owner, _, mode, _ in cells if owner in ("", tenant)}))

    def power_caps(
        self, workload_class: str, accelerator: str, mode: str, tenant: str = ""
    ) -> tuple[float, ...]:
        """The power caps below 1 for which the class has cells of its own on this accelerator key, descending."""
        known = self._classes.get(workload_class)
        keys = (accelerator, type_of(accelerator))
        found = {
            cap
            for owner, key, own, cap in (() if known is None else known.cells)
            if cap < 1 and own == mode and key in keys and owner in ("", tenant)
        }
        return tuple(sorted(found, reverse=True))

    def node_counts(self, workload_class: str, mode: str, tenant: str = "") -> tuple[int, ...]:
        """The numbers of nodes for which the class has cells in this mode, ascending."""
        known = self._classes.get(workload_class)
        found: set[int] = set()
        for (owner, _, own, _), sizes in () if known is None else known.cells.items():
            if owner in ("", tenant) and own == mode:
                found.update(*sizes.values())
        return tuple(sorted(found - {0}))

    def _facts(self, workload_class: str) -> object:
        known = self._classes.get(workload_class)
        return None if known is None else known.facts()

    @property
    def differs_by_tenant(self) -> bool:
        """Whether some cells are only for one tenant."""
        return any(known.accelerators.keys() - {""} for known in self._classes.values())

    def rate(self, accelerator: str) -> float:
        """Exchange rate; 1 for an unknown type."""
        known = self._rates.get(accelerator) or self._rates.get(type_of(accelerator))
        return 1.0 if known is None else known.rate

    def nameplate_watts(self, accelerator: str) -> float:
        """The most that one accelerator of this type draws; 0: not known."""
        known = self._rates.get(accelerator) or self._rates.get(type_of(accelerator))
        return 0.0 if known is None else known.watts

    def idle_watts(self, accelerator: str) -> float:
        """What one accelerator of this type draws while nobody uses it; 0: not known."""
        known = self._rates.get(accelerator) or self._rates.get(type_of(accelerator))
        return 0.0 if known is None else known.idle_watts

    def knows(self, workload_class: str, tenant: str = "") -> bool:
        """Whether the class has any cell."""
        known = self._classes.get(workload_class)
        return known is not None and ("" in known.accelerators or tenant in known.accelerators)

    def estimate(
        self,
        workload_class: str,
        accelerator: str,
        mode: str,
        accelerators_m: int,
        tenant: str = "",
        power_cap: float = 1.0,
        nodes: int = 0,
    ) -> Estimate | None:
        """Speed, memory and watts of a class on this many accelerators; None if a cell says impossible, or if
        the class is known but has no cell for this mode.

        Args:
            accelerator: accelerator key.
            nodes: different nodes that the pods stand on; 0: as few as there is a cell for.
        """
        key = (workload_class, accelerator, mode, accelerators_m, tenant, power_cap, nodes)
        if key not in self._cache:
            self._cache[key] = self._answer(*key)
        return self._cache[key]

    def memory_mib(
        self, workload_class: str, accelerator: str, mode: str, accelerators_m: int, tenant: str = ""
    ) -> int:
        """Device memory per accelerator by the nearest cell, also where that says impossible, or else as on other
        accelerators; 0: not known."""
        own = self._shapes(workload_class, accelerator, mode, tenant, 1.0, 0)
        if own:
            return _nearest(own, accelerators_m).memory_mib
        elsewhere = self.estimate(workload_class, accelerator, mode, accelerators_m, tenant)
        return 0 if elsewhere is None else elsewhere.memory_mib

    def _answer(
        self,
        workload_class: str,
        accelerator: str,
        mode: str,
        accelerators_m: int,
        tenant: str,
        power_cap: float,
        nodes: int,
    ) -> Estimate | None:
        own = self._shapes(workload_class, accelerator, mode, tenant, power_cap, nodes)
        if own:
            near = _nearest(own, accelerators_m)
            if near.speed <= 0:
                return None
            if near.accelerators_m == accelerators_m:
                return self._of_cell(near, accelerators_m, near.source)
            exponent = _exponent_around(own, accelerators_m)
            return self._of_cell(near, accelerators_m, Source.SHAPE, exponent)
        if not self.knows(workload_class, tenant):
            if mode != "resident":
                return None
            speed = self.rate(accelerator) * (accelerators_m / 1000) ** SCALING_EXPONENT
            return self._unsupported(speed, accelerator, Source.RATE)
        for other in sorted(self._accelerators(workload_class, tenant)):
            if not self._shapes(workload_class, other, mode, tenant, power_cap, nodes):
                continue  # no cell for this mode there either
            base = self.estimate(workload_class, other, mode, accelerators_m, tenant, power_cap, nodes)
            if base is not None:
                self._by_ratio.add(workload_class)
                speed = base.speed * self._ratio(other, accelerator)
                return self._unsupported(speed, accelerator, Source.RATIO, base)
        return None

    def _accelerators(self, workload_class: str, tenant: str) -> set[str]:
        known = self._classes[workload_class].accelerators
        return known.get("", set()) | known.get(tenant, set())

    def _shapes(
        self, workload_class: str, accelerator: str, mode: str, tenant: str, power_cap: float, nodes: int
    ) -> dict[int, Cell]:
        """By size, the cells that answer for this number of nodes."""
        known = self._classes.get(workload_class)
        if known is None:
            return {}
        for key in dict.fromkeys((accelerator, type_of(accelerator))):
            shared = known.cells.get(("", key, mode, power_cap), {})
            own = known.cells.get((tenant, key, mode, power_cap), {}) if tenant else {}
            if shared or own:
                sizes = {size: shared.get(size, {}) | own.get(size, {}) for size in shared | own}
                return {size: _on_nodes(cells, nodes) for size, cells in sizes.items()}
        return {}

    def _of_cell(
        self, cell: Cell, accelerators_m: int, source: Source, exponent: float = SCALING_EXPONENT
    ) -> Estimate:
        scale = (accelerators_m / cell.accelerators_m) ** exponent if cell.accelerators_m else 1.0
        spread = UNKNOWN_SPREAD if source is Source.SHAPE else 0.0
        low = cell.speed * (1 - spread) if cell.low is None else cell.low
        high = cell.speed * (1 + spread) if cell.high is None else cell.high
        return Estimate(
            cell.speed * scale,
            low * scale,
            high * scale,
            cell.memory_mib,
            cell.host_memory_mib,
            cell.watts or self.nameplate_watts(cell.accelerator),
            source,
        )

    def _unsupported(
        self, speed: float, accelerator: str, source: Source, measured: Estimate | None = None
    ) -> Estimate:
        """An estimate without a cell of this accelerator; what the job needs of memory is taken from where it was
        measured."""
        low, high = speed * (1 - UNKNOWN_SPREAD), speed * (1 + UNKNOWN_SPREAD)
        memory_mib, host_mib = (measured.memory_mib, measured.host_memory_mib) if measured else (0, 0)
        return Estimate(speed, low, high, memory_mib, host_mib, self.nameplate_watts(accelerator), source)

    def _learned_ratios(self) -> dict[tuple[str, str], float]:
        if self._ratios is None:
            self._ratios = _ratios(self.table.cells)
        return self._ratios

    def _ratio(self, source: str, target: str) -> float:
        learned = self._learned_ratios().get((source, target))
        return self.rate(target) / max(self.rate(source), 1e-12) if learned is None else learned


def _on_nodes(cells: dict[int, Cell], nodes: int) -> Cell:
    """Of the cells of one size, by nodes, the one that answers for so many (0: as few as possible)."""
    exact, general = cells.get(nodes), cells.get(0)
    if general is not None and general.source is Source.OVERRIDE:
        return exact if exact is not None and exact.source is Source.OVERRIDE else general
    if exact is not None and nodes:
        return exact
    named = [count for count in cells if count]
    if general is not None and (not named or general.source is Source.MEASURED):
        return general
    enough = [count for count in named if count >= nodes]
    return cells[min(enough) if enough else max(named)]


def _nearest(cells: dict[int, Cell], accelerators_m: int) -> Cell:
    """The cell of this size, or else of the size nearest to it."""
    exact = cells.get(accelerators_m)
    if exact is not None:
        return exact
    return min(cells.values(), key=lambda c: (abs(c.accelerators_m - accelerators_m), c.accelerators_m))


def _exponent_around(cells: dict[int, Cell], accelerators_m: int) -> float:
    """How speed grows between the next smaller and the next larger size; the general exponent where one is missing
    or impossible."""
    below = max((size for size in cells if 0 < size < accelerators_m), default=None)
    above = min((size for size in cells if size > accelerators_m), default=None)
    if below is None or above is None or cells[below].speed <= 0 or cells[above].speed <= 0:
        return SCALING_EXPONENT
    return math.log(cells[above].speed / cells[below].speed) / math.log(above / below)


def differing_classes(before: PerformanceTable, after: PerformanceTable) -> set[str]:
    """Classes with a cell that only one of the two tables has."""
    fresh: set[str] = set()
    for old, new in ((before.cells, after.cells), (before.learned, after.learned)):
        gone, come = differing(old, new)
        fresh |= {cell.workload_class for cell in set(gone) ^ set(come)}
    return fresh


def _order(cell: Cell) -> tuple[int, int, str, str, int, str, float, int]:
    """Ascending trust, so that a better cell replaces a worse one; the rest makes the order deterministic."""
    return (
        _TRUST[cell.source],
        cell.samples,
        cell.workload_class,
        cell.accelerator,
        cell.accelerators_m,
        cell.tenant,
        cell.speed,
        cell.nodes,
    )


def _ratios(cells: Iterable[Cell]) -> dict[tuple[str, str], float]:
    """Median over (class, shape, mode) of the speed on one accelerator over another; shared cells only."""
    rows: dict[tuple[str, int, str, int], dict[str, float]] = {}
    for cell in sorted(cells, key=_order):
        if cell.speed > 0 and not cell.tenant:
            key = (cell.workload_class, cell.accelerators_m, cell.mode, cell.nodes)
            rows.setdefault(key, {})[cell.accelerator] = cell.speed
    seen: dict[tuple[str, str], list[float]] = {}
    for row in rows.values():
        for source, base in row.items():
            for target, speed in row.items():
                if source != target:
                    seen.setdefault((source, target), []).append(speed / base)
    return {pair: median(values) for pair, values in seen.items()}
