"""Which beginnings of prompts a replica's prefix cache probably has, as far as this gateway has sent them there. Pure.

An engine keeps the keys and values of prompts in blocks of 64 tokens and finds them by chained hashes. The gateway has
no tokenizer, so it cuts text where 64 tokens usually end (256 bytes) and token ids exactly, and chains the same way: a
block stands for all that is before it. Hashes are salted like the engine's, by tenant, adapter and `cache_salt`: what
one tenant sent never makes another's request go anywhere. Each replica has a table of its own, with as many blocks as
its cache holds; the least recently used leave first.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

BLOCK_TOKENS = 64
BLOCK_BYTES = 256
MOST_BLOCKS = 1024
"""Looked at of one prompt: 64k tokens."""
USUAL_BLOCKS = 4096
"""Of a replica that does not tell the size of its cache."""


def blocks_of(document: dict[str, Any], *salt: str) -> tuple[bytes, ...]:
    """The chained names of the whole blocks of a request's prompt."""
    data, size = _prompt(document)
    names: list[bytes] = []
    last = blake2b(
        "\0".join([*salt, str(document.get("cache_salt") or "")]).encode(errors="replace")
    ).digest()[:16]
    for end in range(size, min(len(data), size * MOST_BLOCKS) + 1, size):
        last = blake2b(last + data[end - size : end], digest_size=16).digest()
        names.append(last)
    return tuple(names)


def _prompt(document: dict[str, Any]) -> tuple[bytes, int]:
    """The prompt as bytes whose beginning does not depend on its end, and the bytes of a block."""
    prompt = document.get("prompt", document.get("input"))
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        try:
            return array("I", prompt).tobytes(), BLOCK_TOKENS * 4
        except OverflowError:  # no token; the engine will say so
            return b"", BLOCK_BYTES
    if isinstance(prompt, str):
        return prompt.encode(errors="replace"), BLOCK_BYTES
    # Templates put the tools before the messages.
    parts = [
        document.get("tools"),
        document.get("instructions"),
        *_items(document.get("messages")),
        *_items(prompt),
    ]
    text = "\0".join(json.dumps(part, separators=(",", ":")) for part in parts if part is not None)
    return text.encode(), BLOCK_BYTES


def _items(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else ()


class PrefixTable:
    """The blocks of one replica."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self.most = USUAL_BLOCKS

    def __len__(self) -> int:
        return len(self._blocks)

    def found(self, blocks: Sequence[bytes]) -> int:
        """How many of a prompt's first blocks are there."""
        count = 0
        for block in blocks:
            if block not in self._blocks:
                break
            count += 1
        return count

    def add(self, blocks: Sequence[bytes]) -> None:
        """The replica gets a prompt with these blocks. Its last blocks leave first, as in the engine."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.most:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """The replica has lost its cache."""
        self._blocks.clear()
