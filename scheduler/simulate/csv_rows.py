"""Rows of CSV files as people have them: also with a byte order mark and Windows line ends."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from ..errors import TraceError


def named_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, row) of a file whose first line names the columns.

    Raises:
        TraceError: the file is no text in UTF-8, names a column twice, or has a row of another length.
    """
    names: list[str] | None = None
    for line, cells in cells_of(path):
        if names is None:
            names = cells
            twice = [name for name, count in Counter(names).items() if count > 1 and name]
            if twice:
                raise TraceError(f"{path}:{line}: the column {twice[0]!r} is there twice; take one out")
            continue
        if len(cells) != len(names):
            raise TraceError(
                f"{path}:{line}: {len(cells)} values under {len(names)} columns; complete the line or take it out"
            )
        yield line, dict(zip(names, cells, strict=True))


def cells_of(path: Path, delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of all lines that are not empty. Raises TraceError if the file is no text in UTF-8."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, skipinitialspace=True)
        try:
            for cells in reader:
                if cells:
                    yield reader.line_num, cells
        except UnicodeDecodeError as error:  # found while a block of lines is read
            raise TraceError(
                f"{path}: behind line {reader.line_num} is what is no text in UTF-8 ({error.reason}); save it as UTF-8, and"
                " unpack a file that is compressed"
            ) from error
        except csv.Error as error:
            raise TraceError(f"{path}: line {reader.line_num} is no CSV: {error}") from error


def moment_s(row: Mapping[str, str], column: str) -> float:
    """Seconds since the epoch of a time in ISO 8601. Without a zone it is UTC, whatever this machine's is: clocks that are put
    forward or back would move jobs. Raises KeyError, ValueError."""
    text = row[column]
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"column {column!r} is {text!r}, no time such as 2017-10-09 07:01:55") from None
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()


def whole(row: Mapping[str, str], column: str) -> int:
    """A whole number, also as a table with gaps writes it: 8.0. Raises KeyError, ValueError."""
    number = value_of(row, column)
    if not number.is_integer():
        raise ValueError(f"column {column!r} is {row[column]!r}, no whole number")
    return int(number)


def value_of(row: Mapping[str, str], column: str) -> float:
    """A finite number. Raises KeyError, ValueError."""
    text = row[column]
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"column {column!r} is {text!r}, no finite number")
    return number


def fault(error: Exception) -> str:
    """What is wrong with a row, for people."""
    return f"column {error} is missing" if isinstance(error, KeyError) else str(error)
