"""Writes tensors as a checkpoint without a run: the bytes in blocks, as the snapshot delivers them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from busbar.workloads.training.checkpoint import CheckpointFolder
from busbar.workloads.training.layout import Layout


def write_state(
    folder: CheckpointFolder,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    facts: Mapping[str, Any],
    block: int = 4096,
) -> int:
    layout = Layout.of([(name, tensor.dtype, tensor.numel()) for name, tensor in tensors.items()])
    return folder.write(step, layout, _blocks(layout, tensors, block), facts)


def _blocks(layout: Layout, tensors: Mapping[str, torch.Tensor], size: int) -> Iterator[torch.Tensor]:
    data = torch.cat([tensors[entry.name].contiguous().view(torch.uint8) for entry in layout.entries])
    for start in range(0, data.numel(), size):
        yield data[start : start + size]
