"""What the snapshot says about speed and memory: the workload of each job, and the performance table.

The formulas are the scheduler's (``busbar.scheduler.fit``); this module only reads the objects at hand into them:
a job's class from its model, batch and optimizer; exchange rates from the pools' accelerator types; prior cells for
every class that runs or waits on every type that a pool offers; and from the PerformanceProfiles what people state
and what ended jobs measured (evidence.py). All that, and what running jobs say (speeds.py), goes through
``busbar.scheduler.learning``: a class's own cells, and through learned ratios those where it never ran.

Exploration: tenants that are guaranteed nothing are shown hopeful speeds where nobody measured, for classes of which
there are jobs, while the profiles' account of held time leaves room (``learning.EXPLORED``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from busbar.kube.types import AcceleratorPool, PerformanceProfile, Tenant, TrainingJob, quantity
from busbar.kube.types.training_engine import EngineMode, TrainingEngine
from busbar.kube.types.training_job import TERMINAL_PHASES
from busbar.operator.evidence import Known, by_class, digests, fold, read
from busbar.operator.speeds import Said, has_spoken, said
from busbar.scheduler import Cell, PerformanceTable, Rate
from busbar.scheduler.fit import BatchShape, ModelShape, accelerator, memory, prior, workload_class
from busbar.scheduler.learning import EXPLORED, learn
from busbar.scheduler.table import Conduct, Exploration

AUTO_MODES = (EngineMode.RESIDENT.value, EngineMode.OPTIMIZER_OFFLOAD.value)


@dataclass(frozen=True)
class Workload:
    """A job as the performance table knows it; without a class nothing is known of it."""

    workload_class: str = ""
    modes: tuple[str, ...] = ("resident",)
    steps: int = 0
    model: ModelShape | None = None
    batch: BatchShape | None = None

    def remaining(self, step: int) -> float | None:
        """Tokens left; None where the class is not known."""
        return float(max(0, self.steps - step) * self.batch.tokens) if self.batch is not None else None


def workload(job: TrainingJob) -> Workload:
    """The class, and the modes that the job may run in."""
    engine = job.spec.engine
    if engine is None:
        return Workload()
    modes = AUTO_MODES if engine.mode is EngineMode.AUTO else (str(engine.mode.value),)
    if engine.model.config is None:
        return Workload(modes=modes, steps=engine.steps)  # weights on a claim: the operator cannot read it
    batch = BatchShape(
        sequences=engine.batch.sequences,
        sequence_length=engine.data.sequence_length,
        micro_batch=engine.batch.micro_batch,
        dtype=engine.dtype.value,
    )
    try:
        model = ModelShape.from_config(_config(engine))
    except (ValueError, ZeroDivisionError):
        return Workload(modes=modes, steps=engine.steps)  # the engine will say what is missing
    return Workload(
        workload_class(model, batch, engine.optimizer.name.value),
        _fitting(modes, engine, model, batch),
        engine.steps,
        model,
        batch,
    )


def _config(engine: TrainingEngine) -> dict[str, object]:
    """The model's config; a tokenizer that is trained on the spot decides the vocabulary."""
    config: dict[str, object] = dict(engine.model.config or {})
    if engine.tokenizer is not None and engine.tokenizer.train is not None:
        config["vocab_size"] = engine.tokenizer.train.vocab_size
    return config


def _fitting(
    modes: tuple[str, ...], engine: TrainingEngine, model: ModelShape, batch: BatchShape
) -> tuple[str, ...]:
    """Without the modes that exceed ``deviceMemory``; the last one stays, and the engine has the last word."""
    if engine.device_memory is None or len(modes) == 1:
        return modes
    limit = quantity.to_bytes(engine.device_memory)
    return tuple(m for m in modes if memory(model, batch, m).device_bytes <= limit) or modes[-1:]


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
    """Rates, cells for the classes of these jobs, and what was learned from their speeds and from earlier ones'.

    Args:
        tenant_of: namespace to tenant: whose word a report is.
        absent_too: also the cells of classes that have a profile and no job.
    """
    jobs, tenants = tuple(jobs), tuple(tenants)
    rates, priors = _priors(jobs, pools)
    known = known_classes(jobs, tenant_of or {}, profiles, tenants)
    present = {cell.workload_class for cell in priors}
    formulas = {_place(cell): cell for cell in priors}
    shown = present | known.keys() if absent_too else present
    stated = [_whole(c, formulas.get(_place(c))) for each in known.values() for c in each.stated]
    cells = (*priors, *sorted(stated, key=_place))
    # Classes and sizes without a job here and now teach the ratios; the classes' cells are shown to those who ask.
    absent = [c for each in known.values() for c in each.predicted if _place(c) not in formulas]
    whole = (*sorted(absent, key=_place), *cells)
    table = PerformanceTable(cells=tuple(c for c in whole if c.workload_class in shown), rates=rates)
    records = [r for each in known.values() for r in each.records]
    records += [each.record for each in _said(jobs, tenant_of or {}) if each.ended is None]
    table = replace(
        table,
        records=tuple(sorted(records, key=lambda r: (r.place, r.tenant, r.job, r.verified, r.fault))),
        conduct=_conduct(known.values()),
        explored=_explored(known.values()),
    )
    if not records and not stated:
        return table
    before = [c for each in known.values() for c in each.learned]
    start = replace(
        table,
        cells=whole,
        learned=tuple(sorted(before, key=_place)),
        explored=Exploration(),
    )
    explorers = _explorers(tenants) if table.explored.share < EXPLORED else frozenset()
    made = _learned(start, explorers, frozenset(present))
    learned = tuple(cell for cell in made.learned if cell.workload_class in shown)
    return replace(table, learned=learned, records=made.records)


@lru_cache(maxsize=4)
def _learned(table: PerformanceTable, explorers: frozenset[str], classes: frozenset[str]) -> PerformanceTable:
    """Learning is the same for the same records: most events change none."""
    return learn(table, explorers=explorers, tried=classes)


def known_classes(
    jobs: Iterable[TrainingJob],
    tenant_of: Mapping[str, str],
    profiles: Iterable[PerformanceProfile],
    tenants: Iterable[Tenant],
) -> dict[str, Known]:
    """Every class with a profile or an ended job, with all ended runs counted."""
    names = {digest: name for name, digest in digests(tenants).items()}
    found = {name: read(profile, names) for name, profile in by_class(profiles).items()}
    runs: dict[str, list[Said]] = {}
    for each in _said(jobs, tenant_of):
        if each.ended is not None:
            runs.setdefault(each.record.workload_class, []).append(each)
    for name in sorted(runs):
        found[name] = fold(found.get(name, Known(name)), runs[name])
    return dict(sorted(found.items()))


def class_of(job: TrainingJob) -> str:
    """The job's workload class; empty where it is not known."""
    written = job.status.workload_class if job.status is not None else None
    return written or workload(job).workload_class


def said_by(job: TrainingJob, tenant_of: Mapping[str, str]) -> Said | None:
    """What a job said of its speed; None where it said nothing, or nothing is known of its class."""
    if job.status is None or not has_spoken(job.status):
        return None
    load = workload(job)
    if not load.workload_class:
        return None
    tenant = tenant_of.get(job.metadata.namespace or "", "")
    return said(job, load.workload_class, load.remaining(0) or 0.0, tenant)


def _said(jobs: Iterable[TrainingJob], tenant_of: Mapping[str, str]) -> list[Said]:
    return [each for job in jobs if (each := said_by(job, tenant_of)) is not None]


def _conduct(known: Iterable[Known]) -> tuple[Conduct, ...]:
    """Each tenant's over all classes."""
    found: dict[str, Conduct] = {}
    for each in known:
        for c in each.conduct:
            old = found.get(c.tenant, Conduct(c.tenant))
            found[c.tenant] = Conduct(c.tenant, old.passed + c.passed, old.failed + c.failed)
    return tuple(found[name] for name in sorted(found))


def _explored(known: Iterable[Known]) -> Exploration:
    """The account as it was last written; profiles are written every minute while there is something to try."""
    unmeasured = total = 0.0
    for each in known:
        unmeasured += each.held.unmeasured
        total += each.held.unmeasured + each.held.measured
    return Exploration(unmeasured, total)


def _explorers(tenants: Iterable[Tenant]) -> frozenset[str]:
    """Tenants that nothing is guaranteed: what they hold is nobody's right, so it may be used to try things."""
    return frozenset(
        t.metadata.name for t in tenants if not any(q.guaranteed > 0 for q in t.spec.quota or ())
    )


def _whole(cell: Cell, formula: Cell | None) -> Cell:
    """A stated cell, with what the formula says of all that was not stated."""
    if formula is None:
        return cell
    return replace(
        cell,
        memory_mib=cell.memory_mib or formula.memory_mib,
        host_memory_mib=cell.host_memory_mib or formula.host_memory_mib,
        watts=cell.watts or formula.watts,
        limit=formula.limit,
    )


def _place(cell: Cell) -> tuple[str, str, int, str, float]:
    return (cell.workload_class, cell.accelerator, cell.accelerators_m, cell.mode, cell.power_cap)


def _priors(
    jobs: Iterable[TrainingJob], pools: Iterable[AcceleratorPool]
) -> tuple[tuple[Rate, ...], tuple[Cell, ...]]:
    """Exchange rates of the pools' types, and the formulas' cells for the classes of these jobs."""
    units: dict[str, int] = {}
    for pool in pools:
        cpu = pool.spec.resource_name == "cpu"
        units.setdefault(pool.spec.accelerator, quantity.to_millis(pool.spec.unit) if cpu else 1000)
    rates: list[Rate] = []
    for key in sorted(units):
        known = accelerator(key)
        rates.append(Rate(key, known.rate, known.watts) if known is not None else Rate(key))
    cells: dict[tuple[str, str, int, str], Cell] = {}
    for job in jobs:
        if job.status is not None and job.status.phase in TERMINAL_PHASES and not has_spoken(job.status):
            continue
        load = workload(job)
        if load.model is None or load.batch is None:
            continue
        size_m = job.spec.shape.accelerators_per_pod * job.spec.shape.min_pods * 1000
        for key in job.spec.accelerators or units:
            for mode in load.modes:
                place = (load.workload_class, key, size_m, mode)
                if key in units and place not in cells:
                    cells[place] = _prior(load.model, load.batch, mode, key, size_m, units[key])
    return tuple(rates), tuple(cells[k] for k in sorted(cells))


@lru_cache(maxsize=4096)
def _prior(model: ModelShape, batch: BatchShape, mode: str, key: str, size_m: int, unit_m: int) -> Cell:
    return prior(model, batch, mode, key, size_m, None, unit_m)
