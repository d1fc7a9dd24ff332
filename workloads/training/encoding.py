"""Rows as token ids, and which of them are learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from busbar.workloads.training.rows import Row


@dataclass(frozen=True)
class Encoded:
    ids: list[int]
    learned: list[bool] | None = None  # None: all


Encode = Callable[[Row], Encoded]


def encoder(tokenizer: Any) -> Encode:
    """Tokenizes with a `tokenizers.Tokenizer`, without the special tokens that it would add."""
    return lambda row: _joined(tokenizer, row) if row.joined else _by_part(tokenizer, row)


def _by_part(tokenizer: Any, row: Row) -> Encoded:
    parts = [_encoding(tokenizer, part.text).ids for part in row.parts]
    ids = [token for part in parts for token in part]
    if row.plain:
        return Encoded(ids)
    flags = [part.learned for part, own in zip(row.parts, parts, strict=True) for _ in own]
    return Encoded(ids, flags)


def _joined(tokenizer: Any, row: Row) -> Encoded:
    """A token is learned if it has a character of a learned part, as in `apply_chat_template`."""
    found = _encoding(tokenizer, row.text)
    learned, start = [False] * len(found.ids), 0
    for part in row.parts:
        end = start + len(part.text)
        if part.learned:
            tokens = (found.char_to_token(place) for place in range(start, end))
            first = next((token for token in tokens if token is not None), None)
            backwards = (found.char_to_token(place) for place in range(end - 1, start - 1, -1))
            last = next((token for token in backwards if token is not None), None)
            if first is not None and last is not None:
                learned[first : last + 1] = [True] * (last + 1 - first)
        start = end
    return Encoded(found.ids, learned)


def _encoding(tokenizer: Any, text: str) -> Any:
    """Of one text; as a batch, because then the library lets other threads run meanwhile."""
    return tokenizer.encode_batch([text], add_special_tokens=False)[0]
