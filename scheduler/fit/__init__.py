"""What fits where, in which mode, at what predicted speed: formulas, before anything was measured.

    shape = ModelShape.from_config(config)          a transformers config.json
    need = memory(shape, batch, mode)               bytes on the device and on the host
    cell = prior(shape, batch, mode, accelerator)   a table cell with source "formula"

Pure arithmetic: no torch, no numpy, no files. The training engine's own plan is exact for the run at hand;
these are the estimates that a scheduler needs for accelerators where nothing ran yet.
"""

from .accelerators import DATA_SHEETS, Accelerator, accelerator
from .cells import prior, priors, workload_class
from .frozen import freezes_all, frozen_parameters, frozen_parts, unknown_patterns
from .memory import ALONE, MODES, Footprint, Gang, decided, memory
from .model import BatchShape, ModelShape
from .speed import tokens_per_s

__all__ = [
    "ALONE",
    "DATA_SHEETS",
    "MODES",
    "Accelerator",
    "BatchShape",
    "Footprint",
    "Gang",
    "ModelShape",
    "accelerator",
    "decided",
    "freezes_all",
    "frozen_parameters",
    "frozen_parts",
    "memory",
    "prior",
    "priors",
    "tokens_per_s",
    "unknown_patterns",
    "workload_class",
]
