"""The workload class of each job, and the performance table of the snapshot: speed and memory of each class.

The formulas are the scheduler's (``busbar.scheduler.fit``); this module derives their input from the objects:
a job's class from its model, batch and optimizer; exchange rates from the pools' accelerator types; prior cells for
every class that runs or waits on every type that a pool offers; and from the PerformanceProfiles what people state
and what ended jobs measured (observations.py). All that, and the reports of running jobs (speeds.py), goes through
``busbar.scheduler.performance.learning``: a class's own cells, and through learned ratios those where it never ran.

Reports of images that are not the platform's stay with their tenant: the learning runs once more with these reports
added, and what it finds for their classes becomes cells that only this tenant's jobs see.

Memory: a cell asks for what was planned, or for more where believed jobs have used more in just this cell.

Exploration: for tenants without a guarantee, unmeasured cells of classes that have jobs get optimistic speeds, while
the share of accelerator time spent on unmeasured placements is below ``learning.EXPLORED``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import TypeVar

from busbar.kube.types import AcceleratorPool, PerformanceProfile, Tenant, TrainingJob, quantity
from busbar.kube.types.training_engine import TrainingEngine
from busbar.kube.types.training_job import TrainingJobSpec
from busbar.kube.types.training_sections import Activations, EngineMode, OptimizerName, Order
from busbar.kube.types.training_status import TERMINAL_PHASES
from busbar.operator.pools.nodes import link_class
from busbar.operator.profiles.observations import (
    ClassObservations,
    believable_mib,
    by_class,
    digests,
    doubted,
    fold,
    read,
    record_key,
)
from busbar.operator.profiles.power_curves import capped
from busbar.operator.profiles.speeds import SpeedReport, has_reported, speed_report
from busbar.scheduler import Cell, PerformanceTable, Rate
from busbar.scheduler.fit import (
    ALONE,
    BatchShape,
    Gang,
    ModelShape,
    accelerator,
    decided,
    memory,
    prior,
    workload_class,
)
from busbar.scheduler.model.table import (
    Conduct,
    Exploration,
    Place,
    Record,
    accelerator_key,
    on_any_nodes,
    type_of,
)
from busbar.scheduler.performance.learning import EXPLORED, learn

T = TypeVar("T")
AUTO_MODES = (EngineMode.RESIDENT.value, EngineMode.OPTIMIZER_OFFLOAD.value)
STREAMED = EngineMode.PARAMETER_OFFLOAD.value


@dataclass(frozen=True)
class Workload:
    """A job as the performance table describes it; without a class the table has nothing about it."""

    workload_class: str = ""
    modes: tuple[str, ...] = ("resident",)
    steps: int = 0
    model: ModelShape | None = None
    batch: BatchShape | None = None
    gang: Gang = ALONE

    def remaining(self, step: int) -> float | None:
        """Tokens left; None where the class is unknown."""
        return float(max(0, self.steps - step) * self.batch.tokens) if self.batch is not None else None


@dataclass(frozen=True)
class Asked:
    """A class, and the sizes and types in which a job asks for it: it needs the formulas' cells."""

    workload_class: str
    model: ModelShape
    batch: BatchShape
    modes: tuple[str, ...]
    accelerators_m: int
    accelerators: tuple[str, ...]
    """Empty: any."""
    gang: Gang = ALONE


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What the table has from one job."""

    asked: Asked | None = None
    """None: it has ended without a report, or nothing is known of its class."""
    report: SpeedReport | None = None
    load: Workload | None = None
    """What its spec asks for; None: of no one job."""
    spec: TrainingJobSpec | None = None
    """That `load` was read from."""


@lru_cache(maxsize=4096)
def _shared(one: T) -> T:
    """The one that was seen first of those that are equal: thousands of jobs ask for the same."""
    return one


def facts_of(job: TrainingJob, tenant: str, known: JobFacts | None = None) -> JobFacts:
    """What the table has from this job of this tenant.

    Args:
        known: the same of the job as it was; of the same spec it is not read again.
    """
    known = known if known is not None and known.spec is job.spec else None
    load = known.load if known is not None and known.load is not None else _shared(workload(job))
    reported = job.status is not None and has_reported(job.status)
    nothing = JobFacts(None, None, load, job.spec)
    if load.model is None or load.batch is None:
        return nothing
    report = speed_report(job, load.workload_class, load.remaining(0) or 0.0, tenant) if reported else None
    if job.status is not None and job.status.phase in TERMINAL_PHASES and not reported:
        return nothing
    if known is not None and known.asked is not None:
        return JobFacts(known.asked, report, load, job.spec)
    shape = job.spec.shape
    size_m = shape.accelerators_per_pod * shape.min_pods * 1000
    types = tuple(job.spec.accelerators or ())
    asked = Asked(load.workload_class, load.model, load.batch, load.modes, size_m, types, load.gang)
    return JobFacts(_shared(asked), report, load, job.spec)


def workload(job: TrainingJob) -> Workload:
    """The class, and the modes that the job may run in."""
    engine = job.spec.engine
    if engine is None:
        return Workload()
    modes: tuple[str, ...] = (str(engine.mode.value),)
    if engine.mode is EngineMode.AUTO:
        offloaded = engine.optimizer.name is not OptimizerName.ZEROTH_ORDER
        modes = AUTO_MODES if offloaded else AUTO_MODES[:1]
        modes += (STREAMED,) if _can_stream(engine, job.spec.shape.max_pods) else ()
    if engine.model.config is None:
        return Workload(
            modes=modes, steps=engine.all_steps
        )  # the weights are on a claim that the operator cannot read
    batch = BatchShape(
        sequences=engine.batch.sequences,
        sequence_length=engine.data.sequence_length,
        micro_batch=engine.batch.micro_batch,
        dtype=engine.dtype.value,
        activations=engine.activations.value,
        freeze=tuple(engine.freeze or ()),
        loss=engine.loss.value,
        mlp=engine.mlp.value,
        gradient_sums=engine.gradient_sums.value,
        packing=engine.data.packing.value,
        sequence_parallel=engine.processes_per_sequence,
        optimizer=engine.optimizer.name.value,
        state=engine.state.value,
        scratch_disk_bytes=0 if engine.scratch_disk is None else quantity.to_bytes(engine.scratch_disk),
    )
    try:
        model = ModelShape.from_config(_config(engine))
    except (ValueError, ZeroDivisionError):
        return Workload(modes=modes, steps=engine.all_steps)  # the engine will report what is missing
    gang = _gang(engine, job.spec.shape.min_pods)
    return Workload(
        _class_name(model, batch),
        _fitting(modes, engine, model, batch, gang),
        engine.all_steps,
        model,
        batch,
        gang,
    )


def _gang(engine: TrainingEngine, pods: int) -> Gang:
    """With the fewest pods, each of which needs the most then."""
    if engine.parallelism is None:
        return Gang(pods)
    fixed, each = engine.parallelism.order is Order.FIXED, engine.processes_per_pod
    return Gang(pods * each, engine.parallelism.sharding.value, fixed, each)


def _can_stream(engine: TrainingEngine, pods: int) -> bool:
    """Whether the weights may be on the host: as the engine says, but for what only the model itself tells."""
    fixed = engine.parallelism is not None and engine.parallelism.order is Order.FIXED
    alone = pods * engine.processes_per_pod == 1
    return alone and not fixed and engine.activations is not Activations.KEEP


@lru_cache(maxsize=4096)
def _class_name(model: ModelShape, batch: BatchShape) -> str:
    """Every round asks for every job's."""
    return workload_class(model, batch)


def _config(engine: TrainingEngine) -> dict[str, object]:
    """The model's config; a tokenizer that the job trains determines the vocabulary."""
    config: dict[str, object] = dict(engine.model.config or {})
    if engine.tokenizer is not None and engine.tokenizer.train is not None:
        config["vocab_size"] = engine.tokenizer.train.vocab_size
    return config


def _fitting(
    modes: tuple[str, ...], engine: TrainingEngine, model: ModelShape, batch: BatchShape, gang: Gang
) -> tuple[str, ...]:
    """The modes that fit into ``deviceMemory``, else the last one; the engine checks exactly."""
    if engine.device_memory is None or len(modes) == 1:
        return modes
    limit = quantity.to_bytes(engine.device_memory)
    return (
        tuple(
            mode
            for mode in modes
            if memory(model, decided(model, batch, mode, limit, gang), mode, gang).device_bytes <= limit
        )
        or modes[-1:]
    )


def knows(table: PerformanceTable, job: TrainingJob, pools: Iterable[AcceleratorPool]) -> bool:
    """Whether a table that was made without this job says of it what one made with it would."""
    there, asked = {cell.place for cell in table.cells}, facts_of(job, "").asked
    return asked is None or all(cell.place in there for cell in _priors((asked,), pools)[1])


def rates_of(pools: Iterable[AcceleratorPool]) -> dict[str, float]:
    """Exchange rate of each type that a pool offers; 1 for a type without a data sheet."""
    found: dict[str, float] = {}
    for pool in pools:
        known = accelerator(pool.spec.accelerator)
        found[pool.spec.accelerator] = known.rate if known is not None else 1.0
    return found


def performance_table(
    jobs: Iterable[TrainingJob],
    pools: Iterable[AcceleratorPool],
    tenant_of: Mapping[str, str] | None = None,
    profiles: Iterable[PerformanceProfile] = (),
    tenants: Iterable[Tenant] = (),
    *,
    absent_too: bool = False,
) -> PerformanceTable:
    """`table_of` for these jobs.

    Args:
        tenant_of: namespace to tenant.
    """
    tenant_of = tenant_of or {}
    facts = [facts_of(job, tenant_of.get(job.metadata.namespace or "", "")) for job in jobs]
    return table_of(facts, pools, profiles, tenants, absent_too=absent_too)


def table_of(
    facts: Iterable[JobFacts],
    pools: Iterable[AcceleratorPool],
    profiles: Iterable[PerformanceProfile] = (),
    tenants: Iterable[Tenant] = (),
    *,
    absent_too: bool = False,
) -> PerformanceTable:
    """Rates, cells for the classes of these jobs, and what was learned from their speeds and from earlier ones'.

    Args:
        absent_too: also the cells of classes that have a profile and no job.
    """
    facts, tenants, profiles = tuple(facts), tuple(tenants), tuple(profiles)
    reports = [each.report for each in facts if each.report is not None]
    rates, priors = _priors({each.asked for each in facts if each.asked is not None}, pools)
    known = known_classes(reports, profiles, tenants)
    present = {cell.workload_class for cell in priors}
    formulas = {cell.place: cell for cell in priors}
    shown = present | known.keys() if absent_too else present
    stated = [_whole(c, _at(formulas, c.place)) for each in known.values() for c in each.stated]
    cells = (*priors, *sorted(stated, key=attrgetter("place")))
    # Classes and sizes without a job also contribute to the ratios; their cells are returned only with absent_too.
    absent = [c for each in known.values() for c in each.predicted if c.place not in formulas]
    whole = (*sorted(absent, key=attrgetter("place")), *cells)
    table = PerformanceTable(cells=tuple(c for c in whole if c.workload_class in shown), rates=rates)
    records = [r for each in known.values() for r in each.records]
    records += [each.record for each in reports if each.ended is None and each.image_verified]
    private = _private_records(reports)
    table = replace(
        table,
        records=tuple(sorted(records, key=lambda r: (r.place, r.tenant, r.job, r.verified, r.fault))),
        conduct=_conduct(known.values()),
        explored=_explored(known.values()),
    )
    if not records and not stated and not private:
        return replace(table, learned=tuple(_capped(table, profiles)))
    before = [c for each in known.values() for c in each.learned]
    start = replace(
        table,
        cells=whole,
        learned=tuple(sorted(before, key=attrgetter("place"))),
        explored=Exploration(),
    )
    explorers = _explorers(tenants) if table.explored.share < EXPLORED else frozenset()
    # Plans use the stated memory or the formula's, and more where believed jobs have used more: a job's report must
    # not reduce what others are given.
    planned = {cell.place: cell.memory_mib for cell in whole}
    if records or stated:
        made = _learned(start, explorers, frozenset(present))
        wrong = doubted(made)
        needs = _raised(planned, (r for r in made.records if record_key(r) not in wrong))
        learned = _with_memory((c for c in made.learned if c.workload_class in shown), needs)
        table = replace(table, learned=learned, records=made.records)
    table = replace(table, learned=(*table.learned, *_capped(table, profiles)))
    own: list[Cell] = []
    for each in private.values():
        seen = [c for c in _private_cells(start, each) if c.workload_class in shown]
        own += _with_memory(seen, _raised(planned, each))
    return replace(table, learned=(*table.learned, *own))


def _capped(table: PerformanceTable, profiles: Iterable[PerformanceProfile]) -> list[Cell]:
    """The cells under power caps that follow from the table's others."""
    found: list[Cell] = []
    for name, profile in sorted(by_class(profiles).items()):
        if profile.status is not None and profile.status.power_curves:
            cells, learned = (
                [cell for cell in of if cell.workload_class == name] for of in (table.cells, table.learned)
            )
            found += capped(name, profile.status, cells, learned)
    return found


def with_classes(
    table: PerformanceTable, later: PerformanceTable, classes: AbstractSet[str]
) -> PerformanceTable:
    """The table with the cells of these classes as they are in a later one."""

    def merged(own: Iterable[Cell], others: Iterable[Cell]) -> tuple[Cell, ...]:
        kept = (cell for cell in own if cell.workload_class not in classes)
        return (*kept, *(cell for cell in others if cell.workload_class in classes))

    return replace(
        table, cells=merged(table.cells, later.cells), learned=merged(table.learned, later.learned)
    )


def _raised(planned: Mapping[Place, int], records: Iterable[Record]) -> dict[Place, int]:
    """MiB of device memory per accelerator by cell: the planned, or what a job has used in just this cell."""
    needs = dict(planned)
    for record in records:
        expected = _at(planned, record.place)
        if expected:
            used = believable_mib(record, expected)
            needs[record.place] = max(_at(needs, record.place) or 0, used)
    return needs


def _with_memory(cells: Iterable[Cell], needs: Mapping[Place, int]) -> tuple[Cell, ...]:
    return tuple(replace(cell, memory_mib=_at(needs, cell.place) or 0) for cell in cells)


def _at(known: Mapping[Place, T], place: Place) -> T | None:
    """What is known of a place, or of its size on any number of nodes."""
    return known.get(place) or known.get(on_any_nodes(place))


def _private_records(reports: Iterable[SpeedReport]) -> dict[str, tuple[Record, ...]]:
    """By tenant, the reports of images that are not the platform's, except those that the clock contradicts."""
    found: dict[str, list[Record]] = {}
    for each in reports:
        if not each.image_verified and each.agrees is not False and each.record.tenant:
            found.setdefault(each.record.tenant, []).append(each.record)
    return {name: tuple(sorted(found[name], key=lambda r: (r.place, r.job))) for name in sorted(found)}


def _private_cells(start: PerformanceTable, records: tuple[Record, ...]) -> list[Cell]:
    """What one tenant sees of the classes of these records: within the same bounds as any unverified report."""
    classes = {record.workload_class for record in records}
    made = _learned(replace(start, records=(*start.records, *records)), frozenset(), frozenset())
    tenant = records[0].tenant
    return [replace(c, tenant=tenant) for c in made.learned if c.workload_class in classes]


@lru_cache(maxsize=64)
def _learned(table: PerformanceTable, explorers: frozenset[str], classes: frozenset[str]) -> PerformanceTable:
    """Cached: learning depends only on the records, and most events change none."""
    return learn(table, explorers=explorers, tried=classes)


def known_classes(
    reports: Iterable[SpeedReport], profiles: Iterable[PerformanceProfile], tenants: Iterable[Tenant]
) -> dict[str, ClassObservations]:
    """Every class with a profile or an ended job, with all ended runs counted."""
    names = {digest: name for name, digest in digests(tenants).items()}
    found = {name: read(profile, names) for name, profile in by_class(profiles).items()}
    runs: dict[str, list[SpeedReport]] = {}
    for each in reports:
        if each.ended is not None and each.image_verified:
            runs.setdefault(each.record.workload_class, []).append(each)
    for name in sorted(runs):
        found[name] = fold(found.get(name, ClassObservations(name)), runs[name])
    return dict(sorted(found.items()))


def class_of(job: TrainingJob) -> str:
    """The job's workload class; empty where it is not known."""
    written = job.status.workload_class if job.status is not None else None
    return written or workload(job).workload_class


def report_of(job: TrainingJob, tenant_of: Mapping[str, str]) -> SpeedReport | None:
    """The speed that a job reported; None where it reported none, or its class is unknown."""
    if job.status is None or not has_reported(job.status):
        return None
    return facts_of(job, tenant_of.get(job.metadata.namespace or "", "")).report


def _conduct(known: Iterable[ClassObservations]) -> tuple[Conduct, ...]:
    """Each tenant's conduct, summed over all classes."""
    found: dict[str, Conduct] = {}
    for each in known:
        for c in each.conduct:
            old = found.get(c.tenant, Conduct(c.tenant))
            found[c.tenant] = Conduct(c.tenant, old.passed + c.passed, old.failed + c.failed)
    return tuple(found[name] for name in sorted(found))


def _explored(known: Iterable[ClassObservations]) -> Exploration:
    """Time held for exploration as last written; profiles are written every minute while jobs explore."""
    unmeasured = total = 0.0
    for each in known:
        unmeasured += each.held.unmeasured
        total += each.held.unmeasured + each.held.measured
    return Exploration(unmeasured, total)


def _explorers(tenants: Iterable[Tenant]) -> frozenset[str]:
    """Tenants without a guarantee: what they hold may be used for exploration, as no guarantee depends on it."""
    return frozenset(
        t.metadata.name for t in tenants if not any(q.guaranteed > 0 for q in t.spec.quota or ())
    )


def _whole(cell: Cell, formula: Cell | None) -> Cell:
    """A stated cell; fields that were not stated come from the formula."""
    if formula is None:
        return cell
    return replace(
        cell,
        memory_mib=cell.memory_mib or formula.memory_mib,
        host_memory_mib=cell.host_memory_mib or formula.host_memory_mib,
        watts=cell.watts or formula.watts,
        limit=formula.limit,
    )


def _priors(
    asked: Iterable[Asked], pools: Iterable[AcceleratorPool]
) -> tuple[tuple[Rate, ...], tuple[Cell, ...]]:
    """Exchange rates of the pools' types, and the formulas' cells for what is asked."""
    units: dict[str, int] = {}
    memory_mib: dict[str, int] = {}  # where pools state it; of several, the least
    for pool in pools:
        key = accelerator_key(pool.spec.accelerator, link_class(pool))
        if pool.spec.memory_gib and not pool.spec.is_cpu:
            stated = int(pool.spec.memory_gib * 1024)
            memory_mib[key] = min(stated, memory_mib.get(key, stated))
        units.setdefault(key, quantity.to_millis(pool.spec.unit) if pool.spec.is_cpu else 1000)
    rates: list[Rate] = []
    for key in sorted({type_of(key) for key in units}):
        known = accelerator(key)
        rates.append(Rate(key, known.rate, known.watts, known.idle_watts) if known is not None else Rate(key))
    cells: dict[tuple[str, str, int, str], Cell] = {}
    for each in asked:
        for key in units:
            if each.accelerators and type_of(key) not in each.accelerators:
                continue
            for mode in each.modes:
                place = (each.workload_class, key, each.accelerators_m, mode)
                shape = (each.model, each.batch, mode, key, each.accelerators_m, units[key])
                cell = _prior(*shape, memory_mib.get(key), each.gang)
                cells[place] = max(cells.get(place, cell), cell, key=_needs)  # of gangs in several forms
    return tuple(rates), tuple(cells[k] for k in sorted(cells))


def _needs(cell: Cell) -> tuple[int, int]:
    return cell.memory_mib, cell.host_memory_mib


@lru_cache(maxsize=4096)
def _prior(
    model: ModelShape,
    batch: BatchShape,
    mode: str,
    key: str,
    size_m: int,
    unit_m: int,
    memory_mib: int | None,
    gang: Gang,
) -> Cell:
    return prior(model, batch, mode, key, size_m, None, unit_m, memory_mib, gang)
