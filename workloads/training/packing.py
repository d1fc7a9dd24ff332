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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from busbar.workloads.training.corpus import Document, Skipped
from busbar.workloads.training.encoding import Encode
from busbar.workloads.training.errors import InvalidJob

Tokens = npt.NDArray[np.uint32]
NOT_LEARNED = np.uint32(1 << 31)  # a token that is read and has no loss
TOKEN = np.uint32(~NOT_LEARNED)
IGNORED = -100  # the label that torch's cross-entropy leaves out
PART_TOKENS = 2**14  # that are cut at once
WINDOW_TOKENS = 2**18
_WINDOWS = 2**33  # keys of windows are apart from those of whole passes: seeds are below 2**31


def document_order(documents: Sequence[Document], seed: int) -> list[Document]:
    """A seeded shuffle that does not depend on any library's random generator."""
    return sorted(documents, key=lambda doc: hashlib.sha256(os.fsencode(f"{seed}:{doc.name}")).digest())


def pack(
    documents: Sequence[Document],
    encode: Encode,
    separator: int,
    tokens_wanted: int,
    sequence_length: int,
    progress: Callable[[int], None] = lambda done: None,
    skipped: Skipped = lambda refusal: None,
) -> Iterator[Tokens]:
    """Tokens of as many documents as `tokens_wanted` asks for, in the given order, piece by piece.

    Tokens that are not learned carry the bit NOT_LEARNED. Sequences without any that is learned are left out.
    """
    kept = 0
    waiting: list[Tokens] = []
    size = 0
    for part in _marked(documents, encode, separator, skipped):
        waiting.append(part)
        size += part.size
        if kept + size < tokens_wanted and size < max(sequence_length, PART_TOKENS):
            continue
        rows, rest = _cut_rows(np.concatenate(waiting), sequence_length)
        good = rows[_learns(rows)].reshape(-1)[: tokens_wanted - kept]
        waiting, size = [rest], rest.size
        kept += good.size
        yield good
        progress(kept)
        if kept >= tokens_wanted:
            return
    rows, rest = _cut_rows(np.concatenate([np.empty(0, np.uint32), *waiting]), sequence_length)
    yield np.concatenate([rows[_learns(rows)].reshape(-1), rest])[: tokens_wanted - kept]


def _marked(
    documents: Sequence[Document], encode: Encode, separator: int, skipped: Skipped
) -> Iterator[Tokens]:
    """The tokens of each piece, behind the separator where a document begins."""
    ends = True  # whether the document before is one whose end is learned
    for document in documents:
        for piece in document.pieces(skipped):
            found = encode(piece.row)
            first = [separator if ends else separator | NOT_LEARNED] if piece.begins else []
            ids = np.asarray([*first, *found.ids], dtype=np.uint32)
            if found.learned is not None:
                ids[len(first) :][~np.asarray(found.learned, dtype=np.bool_)] |= NOT_LEARNED
            ends = piece.row.ends
            yield ids


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
    """The training stream cut into sequences, shape [count, sequence_length]."""

    sequences: Tokens  # with the bit NOT_LEARNED
    seed: int
    window: int  # sequences that are shuffled together in the first pass

    @classmethod
    def cut(cls, stream: Tokens, sequence_length: int, seed: int, batch: int) -> Packed:
        count = stream.size // sequence_length
        if count < batch:
            raise InvalidJob(
                "spec.engine.data",
                f"holds {count} sequences of {sequence_length} tokens, and one step needs {batch}",
                "add text, shorten data.sequenceLength, or lower batch.sequences",
            )
        rows = stream[: count * sequence_length].reshape(count, sequence_length)
        return cls(rows, seed, window_sequences(sequence_length, batch))

    def indices(self, step: int, batch: int) -> list[int]:
        """Rows of step `step` (from 0). Each row comes once per pass, in an order of its own per pass."""
        return [self._row(position) for position in range(step * batch, (step + 1) * batch)]

    def _row(self, position: int) -> int:
        count = len(self.sequences)
        epoch, place = divmod(position, count)
        if epoch:
            return int(_order(self.seed, epoch, count)[place])
        window, place = divmod(place, self.window)
        first = window * self.window
        return first + int(_order(self.seed + _WINDOWS, window, min(self.window, count - first))[place])

    def batch(self, step: int, batch: int) -> npt.NDArray[np.int64]:
        """Token ids of step `step`, shape [batch, sequence_length]."""
        return (self.sequences[self.indices(step, batch)] & TOKEN).astype(np.int64)

    def labels(self, step: int, batch: int) -> npt.NDArray[np.int64] | None:
        """The same with IGNORED where a token is not learned; None where all are."""
        rows = self.sequences[self.indices(step, batch)]
        hidden = (rows & NOT_LEARNED) != 0
        return np.where(hidden, IGNORED, (rows & TOKEN).astype(np.int64)) if hidden.any() else None

    def seen_runs(self, steps: int, batch: int) -> list[Tokens]:
        """The tokens that steps 0..steps-1 trained on, as runs of consecutive text (with the bit NOT_LEARNED)."""
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
