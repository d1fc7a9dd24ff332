"""Which files of a claim are text or tables, and what was left out and why.

Nothing is left out silently: `Found.left_out` has it by reason, for the log of the run, and for the refusal where no
text remains. Hidden files and folders (`.git`, `.cache`) are not counted.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from busbar.workloads.training.errors import InvalidJob, listed
from busbar.workloads.training.saved_datasets import Saved, saved_in
from busbar.workloads.training.tables import FIELD, Kind, Table

RECORD_BYTES = 16 * 2**20  # of one line of a JSONL file
RECORD_SUFFIXES = {".jsonl", ".ndjson"}
BINARY, UNREADABLE, LINKED = "binary", "not readable", "links to folders"
EMPTY = "empty"
PARQUET_SUFFIXES = {".parquet", ".pq"}
OTHER_TABLES = {".arrow": "Arrow", ".feather": "Feather", ".orc": "ORC", ".avro": "Avro"}
PROBE_BYTES = 8192  # of a file, by which its kind is judged


@dataclass
class Found:
    """Files to read by their name in the claim, in order; and the names of the others by reason."""

    files: list[tuple[str, Path]] = field(default_factory=list)
    tables: dict[str, Table] = field(default_factory=dict)
    """Those of the files that are no text."""
    beside: list[str] = field(default_factory=list)
    """Sentences on data sets of which a part is read."""
    left_out: dict[str, list[str]] = field(default_factory=dict)
    other_encoding: list[str] = field(default_factory=list)

    def leave_out(self, name: str, reason: str) -> None:
        self.left_out.setdefault(reason, []).append(name)

    def notes(self) -> list[str]:
        """A sentence per reason."""
        sentences = [
            f"{len(names)} in {FIELD} gave no text, {reason}: {listed(names)}"
            for reason, names in self.left_out.items()
        ]
        if self.other_encoding:
            sentences.append(
                f"{len(self.other_encoding)} in {FIELD} are not UTF-8, and what is not is read as U+FFFD: "
                f"{listed(self.other_encoding)}"
            )
        return sentences + self.beside


def find(place: Path, root: Path | None) -> Found:
    """The files of `place`, a file or a folder. Raises InvalidJob for a link that leads out of `root`."""
    found = Found()
    if not place.is_dir():
        _look_at(found, place.name, place, root or place.parent)
        return found
    for path, saved in sorted(_walk(place, found), key=lambda each: each[0]):
        name = path.relative_to(place)
        if not any(part.startswith(".") for part in name.parts):
            _look_at(found, name.as_posix(), path, root or place, saved)
    return found


def _walk(place: Path, found: Found) -> Iterator[tuple[Path, Saved | None]]:
    """Files, and links to folders, which are not followed; of a folder that `datasets` saved those with its rows."""

    def unreadable(problem: OSError) -> None:
        found.leave_out(Path(problem.filename).relative_to(place).as_posix(), UNREADABLE)

    for folder, folders, files in os.walk(place, onerror=unreadable):
        here = Path(folder)
        if (saved := saved_in(here)) is not None:
            folders.clear()
            found.beside += [saved.note] if saved.note else []
            yield from ((path, saved) for path in saved.files)
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from ((here / name, None) for name in files)
        yield from ((here / name, None) for name in folders if (here / name).is_symlink())


def _look_at(found: Found, name: str, path: Path, root: Path, saved: Saved | None = None) -> None:
    try:
        if not path.resolve(strict=True).is_relative_to(root.resolve()):
            raise InvalidJob(
                FIELD, f"{path} is a link that leads out of {root}", "copy the file there, or remove the link"
            )
        if path.is_dir():
            found.leave_out(name, LINKED)
        elif not path.is_file():  # opening a pipe would wait for its writer
            found.leave_out(name, UNREADABLE)
        elif saved is not None:
            _take(found, Table(Kind.STREAM, name, path, saved.columns))
        elif path.suffix.lower() in PARQUET_SUFFIXES:
            _take(found, Table(Kind.PARQUET, name, path))
        else:
            _look_into(found, name, path)
    except (OSError, RuntimeError):  # RuntimeError: links in a circle
        found.leave_out(name, UNREADABLE)


def _take(found: Found, table: Table) -> None:
    with table.path.open("rb"):  # whether it may be
        found.files.append((table.name, table.path))
        found.tables[table.name] = table


def _look_into(found: Found, name: str, path: Path) -> None:
    if (kind := OTHER_TABLES.get(path.suffix.lower())) is not None:
        raise InvalidJob(
            FIELD,
            f"{name} is {kind}, which is read only in a folder that datasets saved with save_to_disk"
            if kind == "Arrow"
            else f"{name} is {kind}, which is not read",
            "convert it to Parquet or JSONL, or remove it",
        )
    with path.open("rb") as file:
        start = file.read(PROBE_BYTES)
    if b"\0" in start:
        found.leave_out(name, BINARY)
        return
    try:
        codecs.getincrementaldecoder("utf-8")().decode(
            start
        )  # which takes a character that is cut at the end
    except UnicodeDecodeError:
        found.other_encoding.append(name)
    found.files.append((name, path))


def holds_records(path: Path) -> bool:
    """Whether each line is a JSON object: by the file's suffix, and of a `.json` by its first two lines."""
    suffix = path.suffix.lower()
    return suffix in RECORD_SUFFIXES or (suffix == ".json" and _begins_with_records(path))


def _begins_with_records(path: Path) -> bool:
    with path.open("rb") as file:
        lines = (file.readline(RECORD_BYTES).removeprefix(codecs.BOM_UTF8).strip() for _ in range(2))
        return all(line.startswith(b"{") and line.endswith(b"}") for line in lines)
