"""Prior cells of the performance table for a training job."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import Field, asdict, fields

from ..model.table import Cell, Source
from .accelerators import Accelerator, accelerator
from .memory import ALONE, CPU_RUNTIME_BYTES, HOST_RUNTIME_BYTES, Footprint, Gang, decided, memory
from .model import BatchShape, ModelShape
from .speed import speed_limit, tokens_per_s

PRIOR_ERROR = 0.5
"""Half-width of a prior's interval, relative: data sheets are no better than that."""


_ALWAYS_SAID = ("dtype",)
"""Fields that may be left out and are in the digest all the same: they were there from the start."""


def workload_class(model: ModelShape, batch: BatchShape) -> str:
    """Readable name and digest of what speed depends on, for example `llama-7M-3f9a0c11`.

    What `auto` does with activations follows from the accelerator and the mode; what a job says of them counts.
    """
    shape = {each.name: getattr(batch, each.name) for each in fields(batch) if _is_said(batch, each)}
    if batch.freeze:
        shape["freeze"] = sorted(set(batch.freeze))
    dimensions = asdict(model)
    if not model.experts:
        del dimensions["experts"], dimensions["experts_per_token"]
    text = json.dumps([dimensions, shape, batch.optimizer], sort_keys=True)
    size = model.parameters
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if size >= scale:
            return f"{model.architecture}-{size / scale:.0f}{unit}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return f"{model.architecture}-{size}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _is_said(batch: BatchShape, choice: Field[object]) -> bool:
    """Whether the digest has a field. One that may be left out is not in it unless the job says something else there, so
    that a class keeps its name when there is one field more."""
    if choice.name == "optimizer":
        return False  # it stands beside them
    if choice.name == "gradient_sums":
        return batch.gradient_bytes != batch.weight_bytes
    return choice.name in _ALWAYS_SAID or getattr(batch, choice.name) != choice.default


def prior(
    model: ModelShape,
    batch: BatchShape,
    mode: str,
    key: str,
    accelerators_m: int = 1000,
    name: str | None = None,
    unit_m: int = 1000,
    memory_mib: int | None = None,
    gang: Gang = ALONE,
) -> Cell:
    """The formula's cell for one (mode, accelerator, size).

    Args:
        key: accelerator key of the pool. An unknown type gets the speed of an A100 with twice the doubt.
        name: workload class; None: derived from the shapes.
        unit_m: CPU pools: millicores of one accelerator.
        memory_mib: of one accelerator; None: by its data sheet. It decides what `auto` does with activations.
        gang: the processes that share the memory's need, not the speed.
    """
    class_name = name or workload_class(model, batch)
    device = accelerator(key)
    known: Accelerator = device if device is not None else _unknown()
    has_mib = known.memory_mib if memory_mib is None else memory_mib
    batch = decided(model, batch, mode, has_mib * 2**20 if has_mib and known.name != "cpu" else None, gang)
    count = accelerators_m / 1000 * (unit_m / 1000 if known.name == "cpu" else 1.0)
    need = memory(model, batch, mode, gang)
    speed = tokens_per_s(model, batch, mode, known, count)
    error = PRIOR_ERROR if device is not None else min(2 * PRIOR_ERROR, 0.9)
    return Cell(
        workload_class=class_name,
        accelerator=key,
        accelerators_m=accelerators_m,
        mode=mode,
        speed=speed,
        low=speed * (1 - error),
        high=speed * (1 + error),
        memory_mib=0 if known.name == "cpu" else need.device_mib,
        host_memory_mib=_pod_host_mib(need, gang.per_pod, on_cpu=known.name == "cpu"),
        watts=known.watts,
        source=Source.FORMULA,
        limit=0.0 if device is None else speed_limit(model, known, count),
    )


def _pod_host_mib(need: Footprint, processes: int, *, on_cpu: bool) -> int:
    """What a pod requests of its node: with room for what the plan does not count, and for a per cent by which it may differ.
    A CPU has no memory but that."""
    planned = need.host_bytes + (need.device_bytes if on_cpu else 0)
    runtime = CPU_RUNTIME_BYTES if on_cpu else HOST_RUNTIME_BYTES
    return processes * (planned + planned // 100 + runtime) // 2**20 + 1


def priors(
    model: ModelShape,
    batch: BatchShape,
    modes: Iterable[str],
    keys: Iterable[str],
    accelerators_m: Iterable[int] = (1000,),
    name: str | None = None,
) -> tuple[Cell, ...]:
    """Cells for all combinations, in a stable order."""
    sizes = sorted(set(accelerators_m))
    return tuple(
        prior(model, batch, mode, key, size, name)
        for key in sorted(set(keys))
        for mode in modes
        for size in sizes
    )


def _unknown() -> Accelerator:
    found = accelerator("A100")
    assert found is not None
    return found
