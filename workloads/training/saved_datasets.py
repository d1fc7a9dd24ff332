"""Folders that `datasets` wrote with `save_to_disk`: which of their files are data, in which order.

    state.json, dataset_info.json, data-00000-of-00002.arrow, ...          a data set
    dataset_dict.json, train/, test/                                       several, one in each folder

Of several the one called `train` is trained on, or the only one there is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from busbar.workloads.training.errors import InvalidJob, listed
from busbar.workloads.training.tables import FIELD

STATE, SETS = "state.json", "dataset_dict.json"


@dataclass(frozen=True)
class Saved:
    """One data set."""

    files: tuple[Path, ...]
    columns: frozenset[str] | None
    """Those that it shows (`set_format`); None: all."""
    note: str = ""
    """A sentence on what beside it is not read."""


def saved_in(folder: Path) -> Saved | None:
    """The data set of this folder; None where `datasets` did not write it. Raises InvalidJob."""
    if (folder / SETS).is_file():
        return _of_several(folder)
    if (folder / STATE).is_file() and (any(folder.glob("*.arrow")) or _lists_files(folder / STATE)):
        return _of_one(folder)
    return None


def _lists_files(state: Path) -> bool:
    """Whether it is of a data set, whose files may be gone, and not something else of this name."""
    try:
        return "_data_files" in json.loads(state.read_bytes())
    except (OSError, ValueError, RecursionError, TypeError):
        return False


def _of_several(folder: Path) -> Saved:
    names = _read(folder / SETS).get("splits")
    if not isinstance(names, list) or not names or not all(_is_file_name(name) for name in names):
        raise _damaged(folder / SETS, "lists no data sets")
    if "train" in names:
        chosen = "train"
    elif len(names) == 1:
        chosen = names[0]
    else:
        raise InvalidJob(
            FIELD,
            f"{folder.name} holds the data sets {listed(names)}, and none is called train",
            "name the folder of the one that is meant",
        )
    found = _of_one(folder / chosen)
    others = [name for name in names if name != chosen]
    note = f"of {folder.name} the data set {chosen} is read, and not {listed(others)}" if others else ""
    return Saved(found.files, found.columns, note)


def _of_one(folder: Path) -> Saved:
    state = _read(folder / STATE)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise InvalidJob(
            FIELD,
            f"{folder.name} was saved with a selection of its rows beside them",
            "save it again after flatten_indices()",
        )
    names = [str(each.get("filename", "")) for each in _objects(state.get("_data_files"))]
    if not names or not all(map(_is_file_name, names)):
        raise _damaged(folder / STATE, "lists no data files")
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise InvalidJob(FIELD, f"{folder.name} lacks {listed(missing)}", "copy the whole folder")
    shown = state.get("_format_columns")
    columns = frozenset(map(str, shown)) if isinstance(shown, list) else None
    return Saved(tuple(folder / name for name in names), columns)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as problem:
        raise _damaged(path, f"cannot be read: {problem}"[:300]) from problem
    if not isinstance(found, dict):
        raise _damaged(path, "is no object")
    return found


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    return (each if isinstance(each, dict) else {} for each in (value if isinstance(value, list) else ()))


def _is_file_name(name: Any) -> bool:
    """Not a path: what it names lies in the folder itself."""
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _damaged(path: Path, problem: str) -> InvalidJob:
    return InvalidJob(FIELD, f"{path.parent.name}/{path.name} {problem}", "save the data set again")
