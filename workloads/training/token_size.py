"""How many tokens a run will have on disk, before they are made: from a sample of its text.

A file of texts has its bytes times the tokens per byte of the sample; a file of rows its rows times the tokens per row of it:
a table says how many it has, and of a JSONL file the lines at its beginning tell. The sample is the beginnings of the documents
that are read first, so the number is near the true one where documents are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from busbar.workloads.training.corpus import Document
from busbar.workloads.training.encoding import Encode
from busbar.workloads.training.rows import text_row

_DOCUMENTS = 32  # of the sample
_TEXT = 16 * 1024  # characters of each, if it is a text
_ROWS = 32  # of each, if it has rows
_LINES_BYTES = 256 * 1024  # of each JSONL file, in which lines are counted


def expected_tokens(documents: Sequence[Document], encode: Encode) -> int:
    """Of all `documents`, of which the first ones are looked at. Raises InvalidJob for a row that is not skipped."""
    per_byte, per_row = _Rate(), _Rate()
    for document in documents[:_DOCUMENTS]:
        if document.rows is None:
            text = next((piece.row.text[:_TEXT] for piece in document.pieces()), "")
            per_byte.add(len(encode(text_row(text)).ids), len(text.encode()))
            continue
        for _, pieces in islice(document.units(), _ROWS):
            per_row.add(sum(len(encode(piece.row).ids) for piece in pieces) + 1, 1)
    texts = [document for document in documents if document.rows is None]
    rows = sum(row_count(document) for document in documents if document.rows is not None)
    size = sum(_size(document) for document in texts)
    return round(per_byte.of(size) + per_row.of(rows)) + len(texts)


class _Rate:
    """Tokens per unit of what was sampled; one where nothing was."""

    def __init__(self) -> None:
        self._tokens = self._units = 0

    def add(self, tokens: int, units: int) -> None:
        self._tokens += tokens
        self._units += units

    def of(self, units: int) -> float:
        return units * (self._tokens / self._units if self._units else 1.0)


def row_count(document: Document) -> int:
    """Rows of a table, or about as many as a JSONL file has."""
    if document.table is not None:
        return (document.table.rows if document.end is None else document.end) - document.start
    size = _size(document)
    with document.path.open("rb") as file:
        file.seek(document.start)
        beginning = file.read(min(size, _LINES_BYTES))
    lines = max(1, beginning.count(b"\n") + (not beginning.endswith(b"\n") and len(beginning) == size))
    return round(size / max(1, len(beginning)) * lines)


def _size(document: Document) -> int:
    """Bytes of its part of the file."""
    end = document.path.stat().st_size if document.end is None else document.end
    return end - document.start
