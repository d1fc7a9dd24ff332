"""From documents to the batch of step n.

Documents are taken in a seeded order, each after an end-of-text token, and laid end to end until the run has
the tokens it will need (or the corpus ends: then it is read again, in another order). The stream is cut into
sequences of fixed length. Which sequences step n trains on is a pure function of (seed, n): a resumed run
needs no memory of its place.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from busbar.workloads.training.corpus import Document
from busbar.workloads.training.errors import InvalidJob

Tokens = npt.NDArray[np.uint32]


def document_order(documents: Sequence[Document], seed: int) -> list[Document]:
    """A seeded shuffle that does not depend on any library's random generator."""
    return sorted(documents, key=lambda doc: hashlib.sha256(os.fsencode(f"{seed}:{doc.name}")).digest())


def pack(
    documents: Sequence[Document],
    encode: Callable[[str], Sequence[int]],
    separator: int,
    tokens_wanted: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Tokens:
    """Tokens of as many documents as `tokens_wanted` asks for, in the given order, as one stream."""
    parts: list[Tokens] = []
    count = 0
    for document in documents:
        ids = np.asarray([separator, *encode(document.text())], dtype=np.uint32)
        parts.append(ids)
        count += ids.size
        progress(count)
        if count >= tokens_wanted:
            break
    return np.concatenate(parts)[:tokens_wanted]


@dataclass(frozen=True)
class Packed:
    """The training stream cut into sequences, shape [count, sequence_length]."""

    sequences: Tokens
    seed: int

    @classmethod
    def cut(cls, stream: Tokens, sequence_length: int, seed: int, batch: int) -> Packed:
        count = stream.size // sequence_length
        if count < batch:
            raise InvalidJob(
                "spec.engine.data",
                f"holds {count} sequences of {sequence_length} tokens, and one step needs {batch}",
                "add text, shorten data.sequenceLength, or lower batch.sequences",
            )
        return cls(stream[: count * sequence_length].reshape(count, sequence_length), seed)

    def indices(self, step: int, batch: int) -> list[int]:
        """Rows of step `step` (from 0). Each row comes once per pass, in an order of its own per pass."""
        count = len(self.sequences)
        positions = range(step * batch, (step + 1) * batch)
        return [int(_order(self.seed, position // count, count)[position % count]) for position in positions]

    def batch(self, step: int, batch: int) -> npt.NDArray[np.int64]:
        return self.sequences[self.indices(step, batch)].astype(np.int64)

    def seen_runs(self, steps: int, batch: int) -> list[Tokens]:
        """The tokens that steps 0..steps-1 trained on, as runs of consecutive text."""
        seen = sorted({row for step in range(steps) for row in self.indices(step, batch)})
        runs: list[list[int]] = []
        for row in seen:
            if runs and runs[-1][-1] == row - 1:
                runs[-1].append(row)
            else:
                runs.append([row])
        return [self.sequences[run[0] : run[-1] + 1].reshape(-1) for run in runs]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
    """The order of rows in one pass. Philox is counter-based: the same on every machine and numpy version."""
    keys = np.random.Generator(np.random.Philox(key=[seed, epoch])).random(count)
    return np.argsort(keys, kind="stable")
