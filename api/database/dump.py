"""The tables as lines of JSON, equal for SQLite and PostgreSQL. Pure.

    {"busbar": "database", "format": 1, "revision": "0002", "version": "0.1.0", "at": "…", "tables": ["subjects", …]}
    {"table": "subjects", "columns": ["name", …]}
    ["ann", …]                                                  one line for each row, values in order of the columns
    {"table": "audit", "columns": […]}
    …
    {"rows": 1234, "sha256": "…"}                               of every byte before this line

Tables come in the order of their foreign keys. Times are RFC 3339 in UTC, with microseconds. Browser sessions are left
out (a backup lets nobody in who has only a cookie), and so are the lease of the replica that writes the history, and people's files and batches (a backup would hold every prompt). The digest shows damage; it is no proof of who wrote the file.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Float, Integer, String, Table

from busbar.api.database import tables
from busbar.api.database.types import Utc, storable
from busbar.api.errors import Invalid

FORMAT = 1
LEFT_OUT = frozenset(
    {"sessions", "leases", "budget_leases", "lease_rounds", "files", "file_parts", "batches", "batch_lines"}
)
MAX_LINE_BYTES = 16 * 1024 * 1024
Row = dict[str, Any]


def dumped() -> list[Table]:
    """The tables of a backup, each after those that its foreign keys name."""
    return [table for table in tables.metadata.sorted_tables if table.name not in LEFT_OUT]


@dataclass(frozen=True)
class Header:
    """The first line: what wrote the dump, and for which schema."""

    revision: str
    version: str
    at: datetime


class Writer:
    """Makes the lines, and counts and digests them."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._rows = 0

    def header(self, header: Header) -> bytes:
        return self._line(
            {
                "busbar": "database",
                "format": FORMAT,
                "revision": header.revision,
                "version": header.version,
                "at": _time_text(header.at),
                "tables": [table.name for table in dumped()],
            }
        )

    def table(self, table: Table) -> bytes:
        return self._line({"table": table.name, "columns": [column.name for column in table.columns]})

    def row(self, table: Table, row: Mapping[str, Any]) -> bytes:
        self._rows += 1
        values = (row[column.name] for column in table.columns)
        return self._line([_time_text(v) if isinstance(v, datetime) else v for v in values])

    def trailer(self) -> bytes:
        return _as_line({"rows": self._rows, "sha256": self._digest.hexdigest()})

    def _line(self, document: object) -> bytes:
        line = _as_line(document)
        self._digest.update(line)
        return line


class Reader:
    """Takes the bytes of a dump in pieces and gives back its rows, each one checked.

    Nothing that it gave may be kept before `finish` has returned: only then is the digest known to be right.
    """

    def __init__(self, revision: str) -> None:
        self._revision = revision
        self._digest = hashlib.sha256()
        self._rest = b""
        self._number = 0
        self._tables = dumped()
        self._table: Table | None = None
        self._parsers: list[Callable[[Any], Any]] = []
        self._ended = False
        self.header: Header | None = None
        self.rows = 0

    def feed(self, piece: bytes) -> Iterator[tuple[Table, Row]]:
        """The rows that end within this piece.

        Raises:
            Invalid: the dump is not one, is damaged, or is of another schema; the message names the line.
        """
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise self._wrong("is longer than a row can be")
        for line in lines:
            self._number += 1
            found = self._take(line)
            if found is not None:
                yield found

    def finish(self) -> None:
        """Check that the dump is complete. Raises Invalid."""
        if self._rest or not self._ended:
            raise Invalid("the backup of the database is cut short: its last line is missing")

    def _take(self, line: bytes) -> tuple[Table, Row] | None:
        if self._ended:
            raise self._wrong("comes after the end")
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._wrong("is not JSON") from error
        if isinstance(found, dict) and "sha256" in found:
            self._end(found)
            return None
        self._digest.update(line + b"\n")
        if self.header is None:
            self._begin(found)
        elif isinstance(found, dict):
            self._next_table(found)
        else:
            return self._row(found)
        return None

    def _begin(self, found: object) -> None:
        if not isinstance(found, dict) or found.get("busbar") != "database":
            raise Invalid("this is not a backup of Busbar's database")
        if found.get("format") != FORMAT:
            raise Invalid(f"the backup has format {found.get('format')!r}, and this version reads {FORMAT}")
        revision, version = str(found.get("revision")), str(found.get("version"))
        if revision != self._revision:
            raise Invalid(
                f"the backup has schema revision {revision} (Busbar {version}) and this database has "
                f"{self._revision}; restore with the version that made it, then upgrade"
            )
        if found.get("tables") != [table.name for table in self._tables]:
            raise self._wrong("names other tables than this version has")
        try:
            self.header = Header(revision, version, _time(found.get("at")))
        except ValueError as error:
            raise self._wrong(str(error)) from error

    def _next_table(self, found: Mapping[str, Any]) -> None:
        table = self._tables.pop(0) if self._tables else None
        if table is None or found.get("table") != table.name:
            raise self._wrong("begins another table than the one that is due")
        if found.get("columns") != [column.name for column in table.columns]:
            raise self._wrong(f"names other columns than the table {table.name} has")
        self._table = table
        self._parsers = [_parser(column) for column in table.columns]

    def _row(self, found: object) -> tuple[Table, Row]:
        if self._table is None or not isinstance(found, list) or len(found) != len(self._parsers):
            raise self._wrong("is not a row of its table")
        row: Row = {}
        for column, parse, value in zip(self._table.columns, self._parsers, found, strict=True):
            try:
                row[column.name] = parse(value)
            except (ValueError, OverflowError) as error:
                raise self._wrong(f"is not a row of {self._table.name}: {column.name} {error}") from error
        self.rows += 1
        return self._table, row

    def _end(self, found: Mapping[str, Any]) -> None:
        if self._tables or self.header is None:
            raise self._wrong("ends the backup before its last table")
        if found.get("rows") != self.rows or found.get("sha256") != self._digest.hexdigest():
            raise Invalid(
                "the backup of the database is damaged: its lines do not have the digest at its end"
            )
        self._ended = True

    def _wrong(self, why: str) -> Invalid:
        return Invalid(f"line {self._number} of the backup of the database {why}")


def _as_line(document: object) -> bytes:
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n"


def _time_text(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def _time(value: object) -> datetime:
    moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    if moment is None or moment.tzinfo is None:
        raise ValueError("is not a time with its zone")
    return moment.astimezone(UTC)


def _integer(bits: int) -> Callable[[object], int]:
    most = 2 ** (bits - 1)

    def parse(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not -most <= value < most:
            raise ValueError(f"is not an integer of {bits} bits")
        return value

    return parse


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError("is not a number")
    return float(value)


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("is not true or false")
    return value


def _texts(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError("is not a list of texts")
    return value


def _text(chars: int | None) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError("is not a text")
        if value != storable(value, chars if chars is not None else len(value)):
            raise ValueError("is a text that the database cannot hold")
        return value

    return parse


def _parser(column: Column[Any]) -> Callable[[Any], Any]:
    """What checks a column's values; the only columns of JSON hold lists of texts."""
    kind = column.type
    parse: Callable[[Any], Any]
    if isinstance(kind, Utc):
        parse = _time
    elif isinstance(kind, Boolean):
        parse = _boolean
    elif isinstance(kind, Integer):
        parse = _integer(64 if isinstance(kind, BigInteger) else 32)
    elif isinstance(kind, Float):
        parse = _number
    elif isinstance(kind, String):
        parse = _text(kind.length)
    else:
        parse = _texts
    return _optional(parse) if column.nullable else parse


def _optional(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else parse(value)
