"""The tensors in the safetensors files of a model folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from busbar.workloads.serving.errors import ModelCorrupt, ModelFileMissing


class Checkpoint(Mapping[str, torch.Tensor]):
    """The tensors of a folder's shards, each read anew at every look.

    A file is mapped anew for each tensor: a mapping that stays keeps every page that was read in memory.
    """

    def __init__(self, folder: Path) -> None:
        self._shard: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for shard in _shards(folder):
            try:
                with safe_open(str(shard), framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118  (not a dict)
                        self._shard[name] = shard
                        self.shapes[name] = tuple(file.get_slice(name).get_shape())
            except (SafetensorError, OSError) as error:
                raise ModelCorrupt(f"{shard} cannot be read as safetensors: {error}") from error

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(str(self._shard[name]), framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._shard

    def __iter__(self) -> Iterator[str]:
        return iter(self._shard)

    def __len__(self) -> int:
        return len(self._shard)


def _shards(folder: Path) -> list[Path]:
    single, index = "model.safetensors", folder / "model.safetensors.index.json"
    if (
        index.is_file() and not (folder / single).is_file()
    ):  # where both are, transformers reads the one file, too
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelCorrupt(f"{index} is not a shard index: {error!r}") from error
    else:
        names = [single]
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ModelFileMissing(
                f"{folder / name} is missing: the engine reads weights from safetensors files only"
            )
    return [folder / name for name in names]
