"""The weights of a result in files of safetensors, written one tensor after another, in any order.

`save_pretrained` takes all weights at once. Where ranks have a slice of each, rank 0 has whole ones only while it gathers
them, so their places in the files are laid out first. Names, files and index are those that `from_pretrained` reads.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from busbar.workloads.training.saved_model import INDEX, SINGLE

RUN_BYTES = 16 * 2**20  # that are brought to the host at a time
NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class WeightFiles:
    def __init__(self, folder: Path, tensors: Mapping[str, torch.Tensor], file_bytes: int) -> None:
        """Lay out files of about `file_bytes` for tensors of these shapes and types, whose content comes later."""
        parts = _split(tensors, file_bytes)
        self._places: dict[str, tuple[Path, int]] = {}
        files: dict[str, str] = {}
        for number, names in enumerate(parts, 1):
            many = f"model-{number:05}-of-{len(parts):05}.safetensors"
            path = folder / (SINGLE if len(parts) == 1 else many)
            self._begin(path, {name: tensors[name] for name in names})
            files |= dict.fromkeys(names, path.name)
        if len(parts) > 1:
            sizes = {"total_size": sum(map(_bytes, tensors.values()))}
            index = {"metadata": sizes, "weight_map": files}
            (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def write(self, name: str, tensor: torch.Tensor) -> None:
        path, start = self._places[name]
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        with path.open("r+b", buffering=0) as file:
            for first in range(0, flat.numel(), RUN_BYTES):
                data = flat[first:][:RUN_BYTES].cpu().numpy().data
                done = 0
                while done < len(data):
                    done += os.pwrite(file.fileno(), data[done:], start + first + done)

    def _begin(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, tensor in tensors.items():
            end = offset + _bytes(tensor)
            header[name] = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + offset)
        for name in tensors:
            self._places[name] = path, 8 + len(text) + header[name]["data_offsets"][0]


def _split(tensors: Mapping[str, torch.Tensor], file_bytes: int) -> list[list[str]]:
    """Names of the tensors of each file."""
    parts: list[list[str]] = []
    room = 0
    for name, tensor in tensors.items():
        size = _bytes(tensor)
        if not parts or size > room:
            parts.append([])
            room = file_bytes
        parts[-1].append(name)
        room -= size
    return parts


def _bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize
