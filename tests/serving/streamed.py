"""Engines whose memory holds some of their layers only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from busbar.workloads.serving.architecture import read_architecture
from busbar.workloads.serving.dtype_choice import choose_dtypes
from busbar.workloads.serving.loader import context_limit
from busbar.workloads.serving.settings import EngineSettings
from busbar.workloads.serving.stream_load import WeightReader
from busbar.workloads.serving.stream_plan import Needs

CPU = torch.device("cpu")


def needs_of(settings: EngineSettings) -> Needs:
    arch = read_architecture(settings.model_dir)
    dtypes = choose_dtypes(settings.dtype, arch.dtype, CPU)
    draft = None if settings.draft_dir is None else read_architecture(settings.draft_dir)
    reader = WeightReader(settings, arch, CPU, dtypes, context_limit(settings, arch), draft)
    return reader.needs


def expert_settings(folder: Path, places: int, where: Path, **changes: Any) -> dict[str, Any]:
    """Settings with which so many experts of the model have a place, no fewer than for two tokens."""
    settings = streamed_settings(folder, 0, where, **{"stream_unit": "experts", **changes})
    needs = needs_of(EngineSettings(folder, **settings))
    assert needs.experts is not None
    more = places - needs.experts.least_places
    return settings | {"memory_bytes": needs.least_bytes + more * needs.experts.bytes}


def streamed_settings(folder: Path, stay: int, where: Path, **changes: Any) -> dict[str, Any]:
    """Settings with which `stay` layers of the model stay in memory."""
    settings: dict[str, Any] = {
        "weights": "stream",
        "stream_dir": where,
        "stream_depth": 1,
        "block_tokens": 16,
        "threads": 1,
        "kv_bytes": 2**20,
        "max_batched_tokens": 64,
    } | changes
    needs = needs_of(EngineSettings(folder, **settings))
    return settings | {"memory_bytes": needs.least_bytes + stay * needs.layer_bytes}
