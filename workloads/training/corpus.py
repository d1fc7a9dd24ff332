"""The text: which files, in which order, and which are held out.

`builtin://python-stdlib` is the source of the running Python's standard library: real text that every machine
has. A claim's file or folder is read as it is: every file that is text (no NUL byte), hidden ones left out. In
`.jsonl` and `.ndjson` files each line is a row (see `rows`), and so is each row of Parquet files and of folders that
`datasets` saved (see `tables`, `saved_datasets`). A file is held out by a hash of its name, so that adding files never
moves others between the two sides; of a single file the end is held out.

Files are read in pieces of bounded size: neither a huge file nor a huge line has to fit into memory.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.rows import BadRow, Piece, Row, RowReader, text_row
from busbar.workloads.training.tables import FIELD, Table
from busbar.workloads.training.text_files import (
    EMPTY,
    RECORD_BYTES,
    RECORD_SUFFIXES,
    Found,
    find,
    holds_records,
)

PIECE_BYTES = 256 * 1024
READERS = 4  # files that are read at once for their checksum
_FOREIGN = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


Skipped = Callable[[InvalidJob], object]  # is told of each row that is left out


def _not_told(refusal: InvalidJob) -> None:
    return


@dataclass(frozen=True)
class Document:
    """A file of text, or of rows; or the part of it between two bytes, of a table between two rows."""

    name: str  # relative path with slashes
    path: Path
    start: int = 0
    end: int | None = None
    rows: RowReader | None = None  # None: the file is a text
    table: Table | None = None

    def pieces(self, skipped: Skipped = _not_told) -> Iterator[Piece]:
        """The rows in order, texts in pieces of about PIECE_BYTES. Raises InvalidJob for a row that is not skipped."""
        for _, pieces in self.units(skipped=skipped):
            yield from pieces

    def units(self, first: int = 0, skipped: Skipped = _not_told) -> Iterator[tuple[int, Iterator[Piece]]]:
        """The pieces of each row, or each piece of a text alone, with its number, from `first` on: those before it are passed over
        without being looked into. Raises InvalidJob as `pieces` does."""
        if self.rows is not None:
            for number, row in self._rows(self.rows, skipped, first):
                yield number, _cut(row)
            return
        number = -1
        for number, raw in enumerate(self._blocks()):
            if number >= first:
                piece = Piece(number == 0, text_row(raw.decode("utf-8", errors="replace")))
                yield number, iter((piece,))
        if number < 0 and first == 0:
            yield 0, iter((Piece(True, text_row("")),))

    def whole(self, limit: int) -> Iterator[Row]:
        """Each row; a text of more than `limit` bytes is cut to a few more than that."""
        if self.rows is not None:
            yield from (row for _, row in self._rows(self.rows, _not_told))
            return
        kept = ""
        size = 0
        for piece in self.pieces():
            kept += piece.row.text
            size += len(piece.row.text.encode())
            if size > limit:
                break
        yield text_row(kept)

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

    def _rows(self, reader: RowReader, skipped: Skipped, first: int = 0) -> Iterator[tuple[int, Row]]:
        """Each row that is not left out, with the number of its record; records before `first` are not made rows."""
        for number, (where, make) in enumerate(self._makers(reader)):
            if number < first:
                continue
            try:
                row = make()
            except BadRow as bad:
                refusal = InvalidJob(
                    FIELD,
                    f"{self.name}, {where}, {bad.problem}",
                    f"{bad.remedy}, or leave such rows out with data.onBadRow: skip",
                )
                if not reader.skips:
                    raise refusal from bad
                skipped(refusal)
            else:
                yield number, row

    def _makers(self, reader: RowReader) -> Iterator[tuple[str, Callable[[], Row]]]:
        """Where each row is, and what makes it one; the latter may raise BadRow."""
        if self.table is not None:
            for number, record in self.table.records(reader.names, self.start, self.end):
                yield f"row {number}", partial(_of_table, reader, record)
            return
        after = "" if self.start == 0 else f" after byte {self.start}"
        for number, line in self._lines():
            yield f"line {number}{after}", partial(_read_line, reader, line)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Lines that are not blank, by their number; of one that is too long its beginning."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            number = 0
            while line := file.readline(RECORD_BYTES + 1):
                number += 1
                if number == 1 and self.start == 0:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield number, line
                while len(line) > RECORD_BYTES and not line.endswith(b"\n"):
                    line = file.readline(RECORD_BYTES + 1)  # the rest of a line that is too long
                if self.end is not None and file.tell() >= self.end:
                    return


@dataclass(frozen=True)
class Corpus:
    train: tuple[Document, ...]  # sorted by name
    holdout: tuple[Document, ...]
    digest: str  # of names and contents
    notes: tuple[str, ...] = ()  # sentences on what is not in it

    @property
    def has_rows(self) -> bool:
        return any(document.rows is not None for document in (*self.train, *self.holdout))


def open_corpus(
    uri: str,
    place: Path | None,
    holdout_fraction: float,
    root: Path | None = None,
    *,
    rows: RowReader | None = None,
    form: str | None = None,
) -> Corpus:
    """The corpus behind `uri`. Raises InvalidJob.

    Args:
        place: the file or folder where a claim's URI is found.
        root: the folder that links must not leave; None: `place` itself.
        rows: how rows are read.
        form: `text` or `jsonl`, of all files; None: by each file's ending. Tables have their own.
    """
    reader = rows or RowReader()
    if uri == "builtin://python-stdlib":
        found = Found(_python_stdlib(Path(sysconfig.get_path("stdlib"))))
    elif place is None or not place.exists():
        raise InvalidJob(FIELD, f"{uri} is not here", f"put the text into {place}")
    else:
        found = find(place, root)
        _look_at_tables(found, reader, form)
        for name, path in found.files:
            if path.stat().st_size == 0 or (name in found.tables and found.tables[name].rows == 0):
                found.leave_out(name, EMPTY)
    notes = tuple(found.notes())
    if len(found.files) == len(found.left_out.get(EMPTY, ())):
        more = "".join(f" ({note})" for note in notes)
        raise InvalidJob(
            FIELD, f"{uri} holds no text{more}", "name text, JSONL or Parquet; archives are not read"
        )
    documents = [
        Document(name, path, rows=reader if _holds_rows(path, form) else None)
        if (table := found.tables.get(name)) is None
        else Document(name, path, rows=reader, table=table)
        for name, path in found.files
        if name not in found.tables or found.tables[name].rows
    ]
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


def _look_at_tables(found: Found, reader: RowReader, form: str | None) -> None:
    """Raises InvalidJob for a table that is damaged, or has no column that is read."""
    for name, table in found.tables.items():
        if form is not None:
            raise InvalidJob(
                "spec.engine.data.format",
                f"is {form}, and {name} is {table.kind}",
                "remove it: files are read by what they are",
            )
        if table.path.stat().st_size:
            found.tables[name] = table.looked_at(reader.names)


def _python_stdlib(root: Path) -> list[tuple[str, Path]]:
    found = [(path.relative_to(root), path) for path in root.rglob("*.py") if path.is_file()]
    kept = [(name, path) for name, path in found if not _FOREIGN & set(name.parts)]
    return [(name.as_posix(), path) for name, path in sorted(kept)]


def _is_held_out(name: str, fraction: float) -> bool:
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big") < fraction * 2**64


def _split(document: Document, fraction: float) -> tuple[list[Document], list[Document]]:
    """A single file: its last lines, about `fraction` of its bytes, are held out; of a table its last rows."""
    if document.table is not None:
        count = document.table.rows
        cut = max(int(count * (1 - fraction)), 1)
        return _cut_at(document, cut, count) if fraction else ([document], [])
    size = document.path.stat().st_size
    with document.path.open("rb") as file:
        file.seek(int(size * (1 - fraction)))
        file.readline(RECORD_BYTES)
        cut = file.tell()
    return _cut_at(document, cut, size) if fraction else ([document], [])


def _cut_at(document: Document, cut: int, size: int) -> tuple[list[Document], list[Document]]:
    if cut >= size:
        return [document], []
    return [replace(document, end=cut)], [replace(document, start=cut)]


def _read_line(reader: RowReader, line: bytes) -> Row:
    if len(line) > RECORD_BYTES:
        raise BadRow(f"is longer than {RECORD_BYTES} bytes", "split the record")
    return reader.read(line)


def _of_table(reader: RowReader, record: dict[str, Any] | None) -> Row:
    if record is None:
        raise BadRow("holds bytes that are not UTF-8", "correct it")
    row = reader.of(record)
    if len(row.text) > RECORD_BYTES:
        raise BadRow(f"is longer than {RECORD_BYTES} characters", "split the record")
    return row


def _holds_rows(path: Path, form: str | None) -> bool:
    return holds_records(path) if form is None else form == "jsonl"


def _cut(row: Row) -> Iterator[Piece]:
    """A text in pieces; another row as it is."""
    if not row.plain:
        yield Piece(True, row)
        return
    text = row.text
    for start in range(0, max(1, len(text)), PIECE_BYTES):
        yield Piece(start == 0, text_row(text[start : start + PIECE_BYTES]))


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
    with ThreadPoolExecutor(READERS) as pool:
        for document, content in zip(documents, pool.map(_content, documents), strict=True):
            digest.update(os.fsencode(document.name) + b"\0")  # a file's name need not be Unicode
            is_named_so = document.path.suffix in RECORD_SUFFIXES
            if (document.rows is not None) != is_named_so:  # which others read in the other way
                digest.update(b"text\0" if is_named_so else b"records\0")
            if document.table is not None and document.table.only is not None:
                digest.update("\0".join(sorted(document.table.only)).encode() + b"\0")
            digest.update(content)
    return digest.hexdigest()


def _content(document: Document) -> bytes:
    with document.path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
