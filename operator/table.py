"""What the snapshot says about speed and memory: the workload of each job, and the performance table.

The formulas are the scheduler's (``busbar.scheduler.fit``); this module only reads the objects at hand into them:
a job's class from its model, batch and optimizer; exchange rates from the pools' accelerator types; and prior
cells for every class that runs or waits on every type that a pool offers. What jobs measured (speeds.py) goes
through ``busbar.scheduler.learning``: a class's own cells, and through learned ratios those where it never ran.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from busbar.kube.types import AcceleratorPool, TrainingJob, quantity
from busbar.kube.types.training_engine import EngineMode, TrainingEngine
from busbar.kube.types.training_job import TERMINAL_PHASES
from busbar.operator.speeds import has_spoken, measured
from busbar.scheduler import Cell, PerformanceTable, Rate
from busbar.scheduler.fit import BatchShape, ModelShape, accelerator, memory, prior, workload_class
from busbar.scheduler.learning import learn

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
) -> PerformanceTable:
    """Rates, prior cells for the classes of these jobs, and what was learned from their speeds.

    Args:
        tenant_of: namespace to tenant: whose word a report is.
    """
    jobs = tuple(jobs)
    table = _priors(jobs, pools)
    loads = [(job, workload(job)) for job in jobs if job.status is not None]
    said = [
        (job, load.workload_class, load.remaining(0) or 0.0) for job, load in loads if load.workload_class
    ]
    records, conduct = measured(said, tenant_of or {})
    if not records:
        return table
    return _learned(replace(table, records=records, conduct=conduct))


@lru_cache(maxsize=4)
def _learned(table: PerformanceTable) -> PerformanceTable:
    """Learning is the same for the same records: most events change none."""
    return learn(table)


def _priors(jobs: Iterable[TrainingJob], pools: Iterable[AcceleratorPool]) -> PerformanceTable:
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
    return PerformanceTable(cells=tuple(cells[k] for k in sorted(cells)), rates=tuple(rates))


@lru_cache(maxsize=4096)
def _prior(model: ModelShape, batch: BatchShape, mode: str, key: str, size_m: int, unit_m: int) -> Cell:
    return prior(model, batch, mode, key, size_m, None, unit_m)
