"""Parquet files, and Arrow streams as `datasets` saves them: their rows as records, in constant memory.

A row group or a batch may hold hundreds of megabytes. Parquet is read page by page, and only the columns that can be
trained on; a stream is a map of its file, of which a few rows at a time are made objects. Rows are numbered from 1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from busbar.workloads.training.errors import InvalidJob

FIELD = "spec.engine.data.uri"
AT_ONCE_BYTES = 2**20
"""Rows of about so many bytes are made objects at a time, by the mean length of the file's rows."""
MOST_AT_ONCE = 16
"""Rows, however short they are: a file's own sizes may be those of its dictionaries, and rows that repeat become long ones."""
BUFFER_BYTES = 2**20
"""Of a file read ahead, for each column."""


class Kind(StrEnum):
    PARQUET = "Parquet"
    STREAM = "Arrow"
    """An Arrow IPC stream: a `.arrow` file of a folder that `datasets` saved."""


@dataclass(frozen=True)
class Table:
    """How one file is read. Methods raise InvalidJob where it is damaged, or lacks the columns."""

    kind: Kind
    name: str
    path: Path
    only: frozenset[str] | None = None
    """Columns that its data set shows; None: all."""
    rows: int = 0
    """As `looked_at` found them."""

    def looked_at(self, wanted: Collection[str]) -> Table:
        """The same with its rows counted, if it has one of the wanted columns."""
        with self._readable():
            if self.kind is Kind.PARQUET:
                with self._parquet() as file:
                    schema, rows = file.schema_arrow, file.metadata.num_rows
            else:
                schema, rows = self._stream_facts()
            self._columns(schema, wanted)
            return replace(self, rows=rows)

    def records(
        self, wanted: Collection[str], start: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """Rows `start` to `end` with their numbers: of the wanted columns, those that it has. None: it is not UTF-8."""
        with self._readable():
            number = start
            for batch in self._slices(wanted, start, end):
                for record in _objects(batch):
                    number += 1
                    yield number, _without_nulls(record)

    def _slices(self, wanted: Collection[str], start: int, end: int | None) -> Iterator[Any]:
        """Batches of few rows."""
        place = 0
        for batch in self._pages(wanted, start) if self.kind is Kind.PARQUET else self._batches():
            first, last = max(start - place, 0), batch.num_rows
            if end is not None:
                last = min(last, end - place)
            if first < last and self.kind is Kind.STREAM:
                batch = batch.select(self._columns(batch.schema, wanted))
            step = _at_once(batch.nbytes, batch.num_rows) if first < last else 1
            for at in range(first, last, step):
                yield batch.slice(at, min(step, last - at))
            place += batch.num_rows
            if end is not None and place >= end:
                return

    def _pages(self, wanted: Collection[str], start: int) -> Iterator[Any]:
        """Batches of Parquet from the first row on. Rows before `start` are not decoded where whole row groups are."""
        import pyarrow as pa

        with self._parquet() as file:
            columns, facts = self._columns(file.schema_arrow, wanted), file.metadata
            for index in range(facts.num_row_groups):
                group = facts.row_group(index)
                if group.num_rows <= start:
                    start -= group.num_rows
                    yield pa.RecordBatch.from_struct_array(pa.nulls(group.num_rows, pa.struct([])))
                    continue
                start = 0
                sizes = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
                size = sum(
                    each.total_uncompressed_size
                    for path, each in sizes.items()
                    if path.split(".")[0] in columns
                )
                rows = _at_once(size, group.num_rows)
                yield from file.iter_batches(rows, [index], columns, use_threads=False)

    def _parquet(self) -> Any:
        from pyarrow import parquet

        return parquet.ParquetFile(
            self.path,
            pre_buffer=False,  # which would read whole row groups
            buffer_size=BUFFER_BYTES,
            page_checksum_verification=True,
        )

    def _stream_facts(self) -> tuple[Any, int]:
        """Its schema, and its rows; reads no more than the heads of its batches."""
        import pyarrow as pa

        with pa.memory_map(str(self.path)) as file, pa.ipc.open_stream(file) as stream:
            return stream.schema, sum(batch.num_rows for batch in stream)

    def _batches(self) -> Iterator[Any]:
        import pyarrow as pa

        with pa.memory_map(str(self.path)) as file, pa.ipc.open_stream(file) as stream:
            yield from stream

    def _columns(self, schema: Any, wanted: Collection[str]) -> list[str]:
        shown = [name for name in schema.names if self.only is None or name in self.only]
        found = [name for name in shown if name in wanted]
        if not found:
            names = " or ".join(f"`{name}`" for name in sorted(wanted))
            has = ", ".join(f"`{name}`" for name in shown[:20]) or "none"
            raise InvalidJob(
                FIELD,
                f"{self.name} has no column {names}; its columns are {has}",
                "name the one that is meant in data.fields",
            )
        return found

    @contextmanager
    def _readable(self) -> Iterator[None]:
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError, EOFError) as problem:
            raise InvalidJob(
                FIELD,
                f"{self.name} cannot be read as {self.kind}: {' '.join(str(problem).split())[:300]}",
                "write it again, or remove it",
            ) from problem


def _objects(batch: Any) -> list[dict[str, Any] | None]:
    """Its rows; a column of text may hold bytes that are none, which is seen only here."""
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [None]
        return [each for at in range(batch.num_rows) for each in _objects(batch.slice(at, 1))]


def _at_once(size: int, rows: int) -> int:
    """How many rows to make objects of at a time, where so many have this size."""
    return min(max(AT_ONCE_BYTES * rows // max(size, 1), 1), MOST_AT_ONCE)


def _without_nulls(value: Any) -> Any:
    """A table has all its fields in every row, null where a row has none; JSON leaves those out, and templates ask whether
    a message has them."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_without_nulls(item) for item in value]
    return value
