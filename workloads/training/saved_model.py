"""The files of a saved model, checked before anything is allocated. No torch here.

A model that `save_pretrained` wrote is one file of safetensors, or several and an index of which tensor is in which.
Whether those tensors are the ones that the model's code asks for is known when it is made (`model.ModelRecipe`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from busbar.workloads.training.errors import InvalidJob, listed

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FIELD = "spec.engine.model.uri"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SAVE_AGAIN = "save the model again with save_pretrained, and copy the whole folder"


@dataclass(frozen=True)
class StoredTensor:
    """Where a file has a tensor."""

    file: Path
    dtype: str  # in safetensors' words, such as BF16
    shape: tuple[int, ...]
    start: int  # bytes


def check_files(folder: Path) -> None:
    """Raises InvalidJob unless `folder` holds whole safetensors files with all tensors of its index."""
    if (folder / SINGLE).is_file():
        _tensors(folder / SINGLE)
        return
    if not (folder / INDEX).is_file():
        raise InvalidJob(FIELD, f"{folder} holds {_instead(folder)}", _SAVE_AGAIN)
    wanted = _index(folder / INDEX)
    missing = [shard for shard in wanted if not (folder / shard).is_file()]
    if missing:
        raise InvalidJob(
            FIELD, f"{folder} lacks {listed(missing)}, of {len(wanted)} files in its index", _SAVE_AGAIN
        )
    for shard, tensors in wanted.items():
        lost = sorted(tensors - set(_tensors(folder / shard)))
        if lost:
            raise InvalidJob(FIELD, f"{folder / shard} lacks {listed(lost)}", _SAVE_AGAIN)


def vectors(folder: Path) -> set[str]:
    """Names of the tensors with fewer than two dimensions: of these old versions saved some that nothing reads."""
    return {name for name, tensor in stored_tensors(folder).items() if len(tensor.shape) < 2}


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a saved model, by name."""
    shards = [SINGLE] if (folder / SINGLE).is_file() else list(_index(folder / INDEX))
    return {name: tensor for shard in shards for name, tensor in _tensors(folder / shard).items()}


def weights_identity(folder: Path) -> str:
    """SHA-256 over `config.json` and the files of the weights: what an adapter belongs to."""
    shards = [SINGLE] if (folder / SINGLE).is_file() else sorted(_index(folder / INDEX))
    digest = hashlib.sha256()
    for name in ("config.json", *shards):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _instead(folder: Path) -> str:
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if shards:
        return f"{listed(shards)} without {INDEX}"
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return f"its weights as {listed(pickles)}, which may run code when read, and no safetensors"
    return f"no weights: neither {SINGLE} nor {INDEX}"


def _index(path: Path) -> dict[str, set[str]]:
    """Names of the tensors by file."""
    try:
        places: Mapping[str, str] = json.loads(path.read_text())["weight_map"]
        shards: dict[str, set[str]] = {}
        for tensor, shard in places.items():
            if Path(shard).name != shard:
                raise InvalidJob(FIELD, f"{path} names {shard}, which is not a file beside it", _SAVE_AGAIN)
            shards.setdefault(shard, set()).add(tensor)
        return shards
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise InvalidJob(FIELD, f"{path} is not an index of weights: {problem!r}", _SAVE_AGAIN) from problem


def _tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors in a file whose header accounts for all of its bytes."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size:
                raise ValueError("its header is cut off")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        needed = 8 + length + max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        if needed != size:
            raise ValueError(f"it has {size} bytes of {needed}")
        return {
            name: StoredTensor(
                path, str(entry["dtype"]), tuple(entry["shape"]), 8 + length + int(entry["data_offsets"][0])
            )
            for name, entry in header.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as problem:
        raise InvalidJob(
            FIELD, f"{path} is not a whole safetensors file: {problem}", _SAVE_AGAIN
        ) from problem
