"""The text: which files, in which order, and which are held out.

`builtin://python-stdlib` is the source of the running Python's standard library: real text that every machine
has. A claim's file or folder is read as it is: every file that is text (no NUL byte), hidden ones left out. In
`.jsonl` and `.ndjson` files each line is an object whose field `text` is a document. A file is held out by a hash
of its name, so that adding files never moves others between the two sides; of a single file the end is held out.

Files are read in pieces of bounded size: neither a huge file nor a huge line has to fit into memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.text_files import (
    EMPTY,
    FIELD,
    RECORD_BYTES,
    RECORD_SUFFIXES,
    Found,
    find,
    holds_records,
)

PIECE_BYTES = 256 * 1024
_FOREIGN = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Document:
    """A file of text, or of records; or the part of it between two bytes."""

    name: str  # relative path with slashes
    path: Path
    start: int = 0
    end: int | None = None

    def pieces(self) -> Iterator[tuple[bool, str]]:
        """The text in order, in pieces of about PIECE_BYTES; True where a new document begins."""
        if holds_records(self.path):
            for record in self._records():
                yield from _cut(record)
            return
        first = True
        for raw in self._blocks():
            yield first, raw.decode("utf-8", errors="replace")
            first = False
        if first:
            yield True, ""

    def texts(self, limit: int) -> Iterator[bytes]:
        """Each document as UTF-8; one of more than `limit` bytes is cut to a few more than that."""
        if holds_records(self.path):
            for record in self._records():
                yield record.encode()[: limit + 1]
            return
        kept = bytearray()
        for _, piece in self.pieces():
            kept += piece.encode()
            if len(kept) > limit:
                break
        yield bytes(kept[: limit + 1])

    def _blocks(self) -> Iterator[bytes]:
        """Bytes cut behind a line, or where a line is too long between two characters."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            rest = b""
            while block := self._read(file, PIECE_BYTES - len(rest)):
                rest += block
                if len(rest) < PIECE_BYTES:
                    continue
                cut = rest.rfind(b"\n") + 1 or _last_character(rest)
                yield rest[:cut]
                rest = rest[cut:]
            if rest:
                yield rest

    def _read(self, file: BinaryIO, size: int) -> bytes:
        return file.read(size if self.end is None else max(0, min(size, self.end - file.tell())))

    def _records(self) -> Iterator[str]:
        with self.path.open("rb") as file:
            file.seek(self.start)
            number = 0
            while line := file.readline(RECORD_BYTES + 1):
                number += 1
                if len(line) > RECORD_BYTES:
                    raise self._bad(number, f"is longer than {RECORD_BYTES} bytes", "split the record")
                if line.strip():
                    yield self._record(line, number)
                if self.end is not None and file.tell() >= self.end:
                    return

    def _record(self, line: bytes, number: int) -> str:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as problem:  # the latter: nested a thousand times
            raise self._bad(number, f"is not JSON: {problem}", "correct it") from problem
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise self._bad(
                number, f"has no field `text` of type string, but {keys:.200}", "write the text there"
            )
        return text.encode("utf-8", errors="replace").decode()  # JSON may hold half of a surrogate pair

    def _bad(self, number: int, what: str, remedy: str) -> InvalidJob:
        where = "" if self.start == 0 else f" after byte {self.start}"
        return InvalidJob(FIELD, f"{self.name}, line {number}{where}, {what}", remedy)


@dataclass(frozen=True)
class Corpus:
    train: tuple[Document, ...]  # sorted by name
    holdout: tuple[Document, ...]
    digest: str  # of names and contents
    notes: tuple[str, ...] = ()  # sentences on what is not in it


def open_corpus(uri: str, place: Path | None, holdout_fraction: float, root: Path | None = None) -> Corpus:
    """The corpus behind `uri`. Raises InvalidJob.

    Args:
        place: the file or folder where a claim's URI is found.
        root: the folder that links must not leave; None: `place` itself.
    """
    if uri == "builtin://python-stdlib":
        found = Found(_python_stdlib(Path(sysconfig.get_path("stdlib"))))
    elif place is None or not place.exists():
        raise InvalidJob(FIELD, f"{uri} is not here", f"put the text into {place}")
    else:
        found = find(place, root)
        for name, path in found.files:
            if path.stat().st_size == 0:
                found.leave_out(name, EMPTY)
    notes = tuple(found.notes())
    if len(found.files) == len(found.left_out.get(EMPTY, ())):
        more = "".join(f" ({note})" for note in notes)
        raise InvalidJob(
            FIELD, f"{uri} holds no text{more}", "name text or JSONL; Parquet and archives are not read"
        )
    documents = [Document(name, path) for name, path in found.files]
    digest = _digest(documents)
    if len(documents) == 1:
        kept, held = _split(documents[0], holdout_fraction)
    else:
        held = [document for document in documents if _is_held_out(document.name, holdout_fraction)]
        kept = [document for document in documents if document not in set(held)]
    if not kept:
        raise InvalidJob(
            "spec.engine.data.holdoutFraction", "leaves no file to train on", "lower it, or add files"
        )
    return Corpus(tuple(kept), tuple(held), digest, notes)


def _python_stdlib(root: Path) -> list[tuple[str, Path]]:
    found = [(path.relative_to(root), path) for path in root.rglob("*.py") if path.is_file()]
    kept = [(name, path) for name, path in found if not _FOREIGN & set(name.parts)]
    return [(name.as_posix(), path) for name, path in sorted(kept)]


def _is_held_out(name: str, fraction: float) -> bool:
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big") < fraction * 2**64


def _split(document: Document, fraction: float) -> tuple[list[Document], list[Document]]:
    """A single file: its last lines, about `fraction` of its bytes, are held out."""
    size = document.path.stat().st_size
    with document.path.open("rb") as file:
        file.seek(int(size * (1 - fraction)))
        file.readline(RECORD_BYTES)
        cut = file.tell()
    if fraction == 0 or cut >= size:
        return [document], []
    return [replace(document, end=cut)], [replace(document, start=cut)]


def _cut(text: str) -> Iterator[tuple[bool, str]]:
    for start in range(0, max(1, len(text)), PIECE_BYTES):
        yield start == 0, text[start : start + PIECE_BYTES]


def _last_character(data: bytes) -> int:
    """Where the last whole UTF-8 character of `data` ends; the end where it is not UTF-8."""
    for back in range(1, 4):
        if data[-back] & 0xC0 == 0xC0:  # the first byte of a character of more than one
            return len(data) - back
        if data[-back] & 0x80 == 0:
            break
    return len(data)


def _digest(documents: list[Document]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        digest.update(os.fsencode(document.name) + b"\0")  # a file's name need not be Unicode
        if holds_records(document.path) and document.path.suffix not in RECORD_SUFFIXES:
            digest.update(b"records\0")  # which other versions read as text
        with document.path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
