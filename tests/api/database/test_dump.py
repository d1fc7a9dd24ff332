"""The dump of the database: lines of JSON, what is refused of them, and its accepted neighbour."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import BigInteger, Boolean, Column, Float, Integer, String

from busbar.api.database.dump import Header, Reader, Row, Writer, dumped
from busbar.api.database.types import Utc
from busbar.api.errors import Invalid

AT = datetime(2026, 3, 1, 12, 30, 0, 123456, tzinfo=UTC)
Edit = Callable[[list[bytes]], list[bytes]]


def value_of(column: Column[Any]) -> Any:
    """A plausible value; texts are their column's name."""
    kind = column.type
    if isinstance(kind, Utc):
        return AT
    if isinstance(kind, Boolean):
        return True
    if isinstance(kind, Integer):
        return 2**40 if isinstance(kind, BigInteger) else 2**31 - 1
    if isinstance(kind, Float):
        return 1.0 / 3.0
    return column.name if isinstance(kind, String) else ["a", "ü"]


def sample(**changes: Any) -> dict[str, Row]:
    """A row of every table; `changes` replaces values of columns wherever they are."""
    return {
        table.name: {c.name: changes.get(c.name, value_of(c)) for c in table.columns} for table in dumped()
    }


def lines_of(rows: dict[str, Row]) -> list[bytes]:
    writer = Writer()
    lines = [writer.header(Header("0002", "0.1.0", AT))]
    for table in dumped():
        lines += [writer.table(table), writer.row(table, rows[table.name])]
    return [*lines, writer.trailer()]


def read(text: bytes, piece_bytes: int = 1 << 20) -> dict[str, Row]:
    reader = Reader("0002")
    pieces = [text[at : at + piece_bytes] for at in range(0, len(text), piece_bytes)]
    found = {table.name: row for piece in pieces for table, row in reader.feed(piece)}
    reader.finish()
    return found


def again(lines: list[bytes]) -> list[bytes]:
    """The same with a digest that is right."""
    rows = sum(line.startswith(b"[") for line in lines)
    digest = hashlib.sha256(b"".join(lines[:-1])).hexdigest()
    trailer = json.dumps({"rows": rows, "sha256": digest}, separators=(",", ":"))
    return [*lines[:-1], trailer.encode() + b"\n"]


def changed(old: bytes, new: bytes) -> Edit:
    def edit(lines: list[bytes]) -> list[bytes]:
        text = b"".join(lines)
        assert old in text
        return text.replace(old, new).splitlines(keepends=True)

    return edit


def fixed(old: bytes, new: bytes) -> Edit:
    return lambda lines: again(changed(old, new)(lines))


GOOD = lines_of(sample())
BAD: list[tuple[str, Edit, str]] = [
    ("nothing", lambda _: [], "cut short"),
    ("another file", lambda _: [b'{"kind": "List"}\n'], "not a backup"),
    ("not JSON", lambda lines: [lines[0], b"\x00\xff\n", *lines[1:]], "line 2 .* is not JSON"),
    ("without its end", lambda lines: lines[:-1], "cut short"),
    ("half of its last line", lambda lines: [*lines[:-1], lines[-1][:20]], "cut short"),
    ("half of the tables", lambda lines: again([*lines[:4], lines[-1]]), "before its last table"),
    ("something after the end", lambda lines: [*lines, b"[]\n"], "after the end"),
    ("rows before a table", lambda lines: again([lines[0], *lines[2:]]), "is not a row of its table"),
    ("another value", changed(b'\n["id","subject"', b'\n["id","somebody"'), "damaged"),
    ("a row removed", lambda lines: [*lines[:2], *lines[3:]], "damaged"),
    ("a row twice", lambda lines: [*lines[:3], lines[2], *lines[3:]], "damaged"),
    ("another revision", fixed(b'"0002"', b'"0001"'), "schema revision 0001 .* has 0002"),
    ("another format", fixed(b'"format":1', b'"format":2'), "format 2"),
    ("another column", fixed(b'"prefix","sha256"', b'"prefix","sha1"'), "other columns than the table tokens"),
    ("another table", fixed(b'{"table":"tokens"', b'{"table":"toking"'), "another table"),
    ("a number that is text", fixed(b"1099511627776", b'"1099511627776"'), "is not an integer"),
    ("a number that is too large", fixed(b"1099511627776", b"9" * 30), "is not an integer of 64 bits"),
    ("a count that PostgreSQL cannot hold", fixed(b"2147483647", b"2147483648"), "an integer of 32 bits"),
    ("a share that is a text", fixed(b"0.3333333333333333", b'"a third"'), "is not a number"),
    ("a share that is none", fixed(b"0.3333333333333333", b"NaN"), "is not a number"),
    ("a word for yes", fixed(b",true,", b',"yes",'), "hidden is not true or false"),
    ("a time without a zone", fixed(b"+00:00", b""), "is not a time"),
    ("a text that is too long", fixed(b'\n["id","subject"', b'\n["id","' + b"x" * 300 + b'"'), "database cannot hold"),
    ("a NUL", fixed(b'\n["id","subject"', b'\n["id","\\u0000"'), "subject is a text that the database cannot hold"),
    ("half a surrogate pair", fixed(b'\n["id","subject"', b'\n["id","\\ud800"'), "the database cannot hold"),
    ("a text that is none", fixed(b'\n["id","subject"', b'\n["id",null'), "subject is not a text"),
    ("groups that are a text", fixed('["a","ü"]'.encode(), b'"a"'), "is not a list of texts"),
]  # fmt: skip


def test_rows_come_back_as_they_were() -> None:
    assert read(b"".join(GOOD)) == sample()


@pytest.mark.parametrize(("edit", "says"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_a_dump_that_is_not_whole_is_refused_with_a_sentence(edit: Edit, says: str) -> None:
    with pytest.raises(Invalid, match=says):
        read(b"".join(edit(list(GOOD))))


def test_a_line_longer_than_any_row_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("busbar.api.database.dump.MAX_LINE_BYTES", 1000)
    with pytest.raises(Invalid, match="longer than a row"):
        list(Reader("0002").feed(b"[" * 1001))


def test_the_digest_made_anew_is_right() -> None:
    assert again(GOOD) == GOOD


def test_times_of_other_zones_and_absent_values_are_kept() -> None:
    east = AT.astimezone(timezone(timedelta(hours=5)))
    found = read(b"".join(lines_of(sample(finished_at=east, loss=None, tenant="t"))))
    assert found["ledger"]["finished_at"] == AT
    assert found["samples"]["loss"] is None


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=200)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    TEXTS,
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-(2**63), 2**63 - 1),
    st.lists(TEXTS, max_size=3),
    st.integers(1, 3000),
)
def test_any_value_survives_in_pieces_of_any_size(
    text: str, number: float, count: int, groups: list[str], piece_bytes: int
) -> None:
    rows = sample(description=text, cost=number, seq=count, groups=groups)
    assert read(b"".join(lines_of(rows)), piece_bytes) == rows
