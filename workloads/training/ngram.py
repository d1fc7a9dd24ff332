"""Byte n-gram models to compare with: interpolated absolute discounting, counted on the same training bytes.

With c the counts, D the discount and h' the context h without its oldest byte,

    p_k(b | h) = max(c(hb) - D, 0) / c(h)  +  D |{b : c(hb) > 0}| / c(h)  *  p_{k-1}(b | h')

down to p_0, which is uniform over 256 bytes; an unseen context leaves all its mass to the shorter one.
`order` is the length of the context in bytes: order 1 is a bigram. (Chen and Goodman 1999, section 2.)

Only contexts that occur in the texts to be scored are counted, so that memory depends on these texts and not on
the training bytes, which are read piece by piece, once per order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

DISCOUNT = 0.75
Codes = npt.NDArray[np.uint64]
Runs = Callable[[], Iterable[Iterable[bytes]]]
"""Gives the training text anew each time: runs of consecutive text, each in pieces of any size."""


def ngram_bits(
    training: Runs,
    texts: Sequence[bytes],
    orders: Sequence[int],
    scored: Sequence[npt.NDArray[np.bool_] | None] | None = None,
) -> dict[int, list[float]]:
    """Code length in bits of each text under the model of each order; a text's first bytes have shorter contexts.

    Args:
        scored: which bytes of each text count; None: all.
    """
    masks = scored or [None] * len(texts)
    probabilities = [np.full(len(text), 1 / 256) for text in texts]
    bits: dict[int, list[float]] = {}
    for context in range(max(orders) + 1):
        level = _Level(texts, context)
        for run in training():
            level.count(run)
        for text, known in zip(texts, probabilities, strict=True):
            if len(text) > context:
                known[context:] = level.mix(_codes(text, context), known[context:])
        if context in orders:
            bits[context] = [
                float(-np.log(known if mask is None else known[mask]).sum() / math.log(2))
                for known, mask in zip(probabilities, masks, strict=True)
            ]
    return bits


class _Level:
    """Counts of one context length, for the contexts of `texts`: of the context, and of it with each byte."""

    def __init__(self, texts: Sequence[bytes], context: int) -> None:
        self._context = context
        wanted = [_codes(text, context) for text in texts if len(text) > context]
        everything = np.concatenate(wanted) if wanted else np.zeros(0, dtype=np.uint64)
        self._grams = np.unique(everything)
        self._contexts = np.unique(self._grams >> np.uint64(8))
        self._gram_counts = np.zeros(len(self._grams), dtype=np.int64)
        self._context_counts = np.zeros(len(self._contexts), dtype=np.int64)
        self._seen = np.zeros((len(self._contexts), 256), dtype=np.bool_)

    def count(self, run: Iterable[bytes]) -> None:
        tail = b""
        for piece in run:
            data = tail + piece
            self._add(_codes(data, self._context))
            tail = data[max(0, len(data) - self._context) :]

    def _add(self, codes: Codes) -> None:
        if not len(self._grams):
            return
        place, known = _find(self._contexts, codes >> np.uint64(8))
        place, codes = place[known], codes[known]
        self._context_counts += np.bincount(place, minlength=len(self._contexts))
        self._seen[place, (codes & np.uint64(255)).astype(np.int64)] = True
        place, known = _find(self._grams, codes)
        self._gram_counts += np.bincount(place[known], minlength=len(self._grams))

    def mix(self, codes: Codes, shorter: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Interpolate: this level's discounted estimate for `codes`, the rest from `shorter`."""
        context = np.searchsorted(self._contexts, codes >> np.uint64(8))
        total = self._context_counts[context].astype(np.float64)
        distinct = self._seen.sum(axis=1)[context].astype(np.float64)
        count = self._gram_counts[np.searchsorted(self._grams, codes)].astype(np.float64)
        seen = total > 0
        safe = np.where(seen, total, 1.0)
        own = np.maximum(count - DISCOUNT, 0.0) / safe + DISCOUNT * distinct / safe * shorter
        return np.where(seen, own, shorter)


def _find(keys: Codes, wanted: Codes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Where each of `wanted` would be in the sorted `keys`, and whether it is there."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return place, keys[place] == wanted


def _codes(text: bytes, context: int) -> Codes:
    """For each position from `context` on: its context and itself as one integer, oldest byte highest."""
    array = np.frombuffer(text, dtype=np.uint8).astype(np.uint64)
    length = max(0, len(array) - context)
    codes = np.zeros(length, dtype=np.uint64)
    for offset in range(context + 1):
        codes = (codes << np.uint64(8)) | array[offset : offset + length]
    return codes
