"""The run as the scheduler's formulas see it. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from busbar.scheduler.fit import BatchShape, ModelShape, workload_class
from busbar.scheduler.fit.speed import model_flops_per_token
from busbar.workloads.training.settings import EngineSpec


def batch_shape(spec: EngineSpec) -> BatchShape:
    """What one of its steps reads and trains."""
    return BatchShape(
        spec.batch.sequences,
        spec.data.sequence_length,
        spec.batch.micro_batch,
        spec.dtype,
        spec.activations,
        spec.freeze,
        spec.loss,
        spec.scratch_disk_bytes,
        spec.optimizer.name,
        spec.state,
        spec.mlp,
        spec.sequence,
        spec.gradient_sums,
        spec.data.packing,
    )


def class_of(config: Mapping[str, Any], spec: EngineSpec) -> str:
    """The scheduler's workload class; an architecture that it cannot size has no class of its own."""
    try:
        whole = workload_class(ModelShape.from_config(config), batch_shape(spec))
    except ValueError:
        return f"{config.get('model_type', 'unknown')}-unsized"
    return whole if spec.adapter is None else f"{whole}-adapter"  # faster than training all of it


def flops_per_token(config: Mapping[str, Any], spec: EngineSpec) -> int | None:
    """Floating-point operations that training on one token takes; None: not known, or of an adapter."""
    if spec.adapter is not None:
        return None
    try:
        return model_flops_per_token(ModelShape.from_config(config), batch_shape(spec))
    except ValueError:
        return None
