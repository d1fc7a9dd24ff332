"""Byte n-gram models to compare with: interpolated absolute discounting, counted on the same training bytes.

With c the counts, D the discount and h' the context h without its oldest byte,

    p_k(b | h) = max(c(hb) - D, 0) / c(h)  +  D |{b : c(hb) > 0}| / c(h)  *  p_{k-1}(b | h')

down to p_0, which is uniform over 256 bytes; an unseen context leaves all its mass to the shorter one.
`order` is the length of the context in bytes: order 1 is a bigram. (Chen and Goodman 1999, section 2.)
Counts are kept as sorted arrays of integer codes, so that a few megabytes take a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

DISCOUNT = 0.75
Codes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class _Level:
    """Counts of one context length: of (context, byte), and of contexts with their distinct followers."""

    grams: Codes
    gram_counts: npt.NDArray[np.int64]
    contexts: Codes
    context_counts: npt.NDArray[np.int64]
    followers: npt.NDArray[np.int64]

    @classmethod
    def count(cls, texts: Sequence[bytes], context: int) -> _Level:
        codes = [_codes(text, context) for text in texts if len(text) > context]
        everything = np.concatenate(codes) if codes else np.zeros(0, dtype=np.uint64)
        grams, gram_counts = np.unique(everything, return_counts=True)
        contexts, first, followers = np.unique(grams >> np.uint64(8), return_index=True, return_counts=True)
        sums = np.add.reduceat(gram_counts, first) if len(first) else np.zeros(0, dtype=np.int64)
        return cls(grams, gram_counts, contexts, sums, followers)

    def mix(self, codes: Codes, shorter: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Interpolate: this level's discounted estimate for `codes`, the rest from `shorter`."""
        total, distinct = (
            _look_up(self.contexts, values, codes >> np.uint64(8)).astype(np.float64)
            for values in (self.context_counts, self.followers)
        )
        count = _look_up(self.grams, self.gram_counts, codes).astype(np.float64)
        seen = total > 0
        safe = np.where(seen, total, 1.0)
        own = np.maximum(count - DISCOUNT, 0.0) / safe + DISCOUNT * distinct / safe * shorter
        return np.where(seen, own, shorter)


class NGramModel:
    """Counts of contexts of 0..order bytes."""

    def __init__(self, texts: Sequence[bytes], order: int) -> None:
        self.order = order
        self._levels = [_Level.count(texts, context) for context in range(order + 1)]

    def bits(self, text: bytes) -> float:
        """Total code length of `text` in bits; its first bytes have shorter contexts."""
        probabilities = np.full(len(text), 1 / 256)
        for context, level in enumerate(self._levels):
            if len(text) > context:
                tail = probabilities[context:]
                probabilities[context:] = level.mix(_codes(text, context), tail)
        return float(-np.log(probabilities).sum() / math.log(2))


def _codes(text: bytes, context: int) -> Codes:
    """For each position from `context` on: its context and itself as one integer, oldest byte highest."""
    array = np.frombuffer(text, dtype=np.uint8).astype(np.uint64)
    length = len(array) - context
    codes = np.zeros(length, dtype=np.uint64)
    for offset in range(context + 1):
        codes = (codes << np.uint64(8)) | array[offset : offset + length]
    return codes


def _look_up(keys: Codes, values: npt.NDArray[np.int64], wanted: Codes) -> npt.NDArray[np.int64]:
    """`values` of the `wanted` keys; 0 for those that are not there. `keys` is sorted."""
    if not len(keys):
        return np.zeros(len(wanted), dtype=np.int64)
    position = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[position] == wanted, values[position], 0)
