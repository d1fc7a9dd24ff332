"""From documents to the batch of step n.

Documents are taken in a seeded order, each after an end-of-text token (the separator), and laid end to end until the run has
the tokens it will need (or the corpus ends: then it is read again, in another order). The stream goes to a file
piece by piece, and training reads it from there. It is cut into
sequences of fixed length. Which sequences step n trains on is a pure function of (seed, n), whatever the number
of steps: a resumed run needs no memory of its place, and a finished one may go on. So the first pass is shuffled
in windows of a fixed size, of which a longer run only has more.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from busbar.workloads.training.corpus import Document, Skipped
from busbar.workloads.training.encoding import Encode
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.rows import Piece

Tokens = npt.NDArray[np.uint32]
TOKEN_BYTES = 4
NOT_LEARNED = np.uint32(1 << 31)  # a token that is read and has no loss
BEGINS = np.uint32(1 << 30)  # the first token of a document, which is the separator
TOKEN = np.uint32(BEGINS - 1)
IGNORED = -100  # the label that torch's cross-entropy leaves out
PART_TOKENS = 2**14  # that are cut at once
WINDOW_TOKENS = 2**18
_WINDOWS = 2**33  # keys of windows are apart from those of whole passes: seeds are below 2**31


def document_order(documents: Sequence[Document], seed: int) -> list[Document]:
    """A seeded shuffle that does not depend on any library's random generator."""
    return sorted(documents, key=lambda doc: hashlib.sha256(os.fsencode(f"{seed}:{doc.name}")).digest())


@dataclass(frozen=True)
class Place:
    """Where a stream of tokens stands, so that it can go on from there."""

    document: int = 0  # that is read next, in the seeded order
    unit: int = 0  # of it (see `Document.units`)
    ends: bool = True  # whether the document before is one whose end is learned
    kept: int = 0  # tokens of the stream
    rest: tuple[int, ...] = ()  # those behind them, which make no whole sequence yet


START = Place()


def pack(
    documents: Sequence[Document],
    encode: Encode,
    separator: int,
    tokens_wanted: int,
    sequence_length: int,
    skipped: Skipped = lambda refusal: None,
    start: Place = START,
) -> Iterator[tuple[Tokens, Place | None]]:
    """Tokens of as many documents as `tokens_wanted` asks for, in the given order, piece by piece, and where the stream stands
    behind them; None inside of a row.

    Tokens that are not learned carry the bit NOT_LEARNED, and the separators BEGINS. Sequences without any that is learned are left out.
    """
    kept = start.kept
    waiting: list[Tokens] = [np.asarray(start.rest, dtype=np.uint32)]
    size = waiting[0].size
    for part, behind in _marked(documents, encode, separator, skipped, start):
        waiting.append(part)
        size += part.size
        if kept + size < tokens_wanted and size < max(sequence_length, PART_TOKENS):
            continue
        rows, rest = _cut_rows(np.concatenate(waiting), sequence_length)
        good = rows[_learns(rows)].reshape(-1)[: tokens_wanted - kept]
        waiting, size = [rest], rest.size
        kept += good.size
        yield good, None if behind is None else replace(behind, kept=kept, rest=tuple(rest.tolist()))
        if kept >= tokens_wanted:
            return
    rows, rest = _cut_rows(np.concatenate([np.empty(0, np.uint32), *waiting]), sequence_length)
    yield np.concatenate([rows[_learns(rows)].reshape(-1), rest])[: tokens_wanted - kept], None


def _marked(
    documents: Sequence[Document], encode: Encode, separator: int, skipped: Skipped, start: Place
) -> Iterator[tuple[Tokens, Place | None]]:
    """The tokens of each piece, behind the separator where a document begins; and the place behind them."""
    ends = start.ends
    for index in range(start.document, len(documents)):
        first = start.unit if index == start.document else 0
        for number, pieces in documents[index].units(first, skipped):
            behind = Place(index, number + 1)
            for piece, is_last in _and_whether_last(pieces):
                ids = _ids(encode, piece, separator if ends else separator | NOT_LEARNED)
                ends = piece.row.ends
                yield ids, replace(behind, ends=ends) if is_last else None


def _ids(encode: Encode, piece: Piece, separator: np.uint32 | int) -> Tokens:
    found = encode(piece.row)
    first = [separator | BEGINS] if piece.begins else []
    ids = np.asarray([*first, *found.ids], dtype=np.uint32)
    if found.learned is not None:
        ids[len(first) :][~np.asarray(found.learned, dtype=np.bool_)] |= NOT_LEARNED
    return ids


def _and_whether_last(pieces: Iterator[Piece]) -> Iterator[tuple[Piece, bool]]:
    before = next(pieces)
    for piece in pieces:
        yield before, False
        before = piece
    yield before, True


def _cut_rows(tokens: Tokens, sequence_length: int) -> tuple[Tokens, Tokens]:
    whole = tokens.size // sequence_length * sequence_length
    return tokens[:whole].reshape(-1, sequence_length), tokens[whole:]


def _learns(rows: Tokens) -> npt.NDArray[np.bool_]:
    """Which sequences have a token to learn; the first one of a sequence is never predicted."""
    return np.asarray(((rows[:, 1:] & NOT_LEARNED) == 0).any(axis=1))


def window_sequences(sequence_length: int, batch: int) -> int:
    """Sequences of one window: about WINDOW_TOKENS, and two steps at least."""
    return max(2 * batch, WINDOW_TOKENS // sequence_length)


def tokens_for(steps: int, batch: int, sequence_length: int) -> int:
    """Tokens that the first pass of a run needs: whole windows, so that their order does not depend on `steps`."""
    window = window_sequences(sequence_length, batch)
    return -(-steps * batch // window) * window * sequence_length


@dataclass(frozen=True)
class Packed:
    """The training stream cut into sequences, shape [count, sequence_length], with the bits NOT_LEARNED and BEGINS."""

    there: Callable[[int], Tokens]
    """The sequences that are there: so many of them at least, or all that there will ever be."""
    seed: int
    window: int  # sequences that are shuffled together in the first pass

    @classmethod
    def cut(cls, stream: Tokens, sequence_length: int, seed: int, batch: int) -> Packed:
        """Of a stream that is whole. Raises InvalidJob."""
        rows, _ = _cut_rows(stream, sequence_length)
        return cls.growing(lambda count: rows, sequence_length, seed, batch)

    @classmethod
    def growing(cls, there: Callable[[int], Tokens], sequence_length: int, seed: int, batch: int) -> Packed:
        """Of one that may still be made; waits for the first window. Raises InvalidJob."""
        packed = cls(there, seed, window_sequences(sequence_length, batch))
        count = len(there(packed.window))
        if count < batch:
            raise InvalidJob(
                "spec.engine.data",
                f"holds {count} sequences of {sequence_length} tokens, and one step needs {batch}",
                "add text, shorten data.sequenceLength, or lower batch.sequences",
            )
        return packed

    @property
    def sequences(self) -> Tokens:
        """All of them."""
        return self.there(sys.maxsize)

    def indices(self, step: int, batch: int) -> list[int]:
        """Rows of step `step` (from 0). Each row comes once per pass, in an order of its own per pass."""
        return [self._row(position) for position in range(step * batch, (step + 1) * batch)]

    def _row(self, position: int) -> int:
        window, place = divmod(position, self.window)
        first = window * self.window
        count = len(self.there(first + self.window))  # of all where the window is not whole
        if position < count:
            return first + int(_order(self.seed + _WINDOWS, window, min(self.window, count - first))[place])
        epoch, place = divmod(position, count)
        return int(_order(self.seed, epoch, count)[place])

    def batch(self, step: int, batch: int) -> npt.NDArray[np.int64]:
        """Token ids of step `step`, shape [batch, sequence_length]."""
        return (self._rows(step, batch) & TOKEN).astype(np.int64)

    def labels(self, step: int, batch: int) -> npt.NDArray[np.int64] | None:
        """The same with IGNORED where a token is not learned; None where all are."""
        rows = self._rows(step, batch)
        hidden = (rows & NOT_LEARNED) != 0
        return np.where(hidden, IGNORED, (rows & TOKEN).astype(np.int64)) if hidden.any() else None

    def positions(self, step: int, batch: int) -> npt.NDArray[np.int64]:
        """The place of each token in its document, shape [batch, sequence_length]; a document that goes on from another
        sequence begins anew."""
        begins = (self._rows(step, batch) & BEGINS) != 0
        places = np.arange(begins.shape[1], dtype=np.int64)
        return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)

    def _rows(self, step: int, batch: int) -> Tokens:
        chosen = self.indices(step, batch)
        return self.there(0)[chosen]

    def seen_runs(self, steps: int, batch: int) -> list[Tokens]:
        """The tokens that steps 0..steps-1 trained on, as runs of consecutive text (with their bits)."""
        seen = np.zeros(len(self.sequences) + 2, dtype=np.int8)
        for step in range(steps):
            seen[[row + 1 for row in self.indices(step, batch)]] = 1
        edges = np.flatnonzero(np.diff(seen)).reshape(-1, 2).tolist()
        return [self.sequences[first:last].reshape(-1) for first, last in edges]


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
    """The order of rows in one pass or window. Philox is counter-based: the same on every machine and numpy version."""
    keys = np.random.Generator(np.random.Philox(key=[seed, epoch])).random(count)
    return np.argsort(keys, kind="stable")
