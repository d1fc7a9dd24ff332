"""Tokens of requests in hand, in a memory-mapped file that outlives the process.

A stream that the gateway's own death cuts off has delivered tokens, and they must be counted as well. Each
request therefore owns a slot of a mapped file: who it is for is written once, the two counters are stored
just before each event goes to the client. Storing is a memory write; the pages belong to the kernel, so a
SIGKILL loses nothing. After a power failure the counters may be some seconds old.

    slot:  u32 state (0 free, 1 in use) · u32 length · u32 crc32 of the JSON · u32 cached prompt tokens
           u64 prompt tokens · u64 completion tokens · JSON

A slot is freed only after its record lies in the spool. If the process dies between the two, the restart
finds both; the request id tells that they are the same, and it is counted once. For that to hold after a
power failure too, the slots are flushed before a record leaves the spool.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from busbar.gateway.errors import SpoolError
from busbar.gateway.files import map_file

SLOT_BYTES = 2048
_HEAD = struct.Struct("<IIIIQQ")
_STATE = struct.Struct("<I")
_COUNTERS = struct.Struct("<IQQ")
_COUNTERS_AT = 12


class Slot:
    """The counters of one request."""

    def __init__(self, inflight: InflightTable, index: int) -> None:
        self._map = inflight._map
        self.index = index
        self._at = index * SLOT_BYTES + _COUNTERS_AT
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0

    def set(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> None:
        """Store what has been delivered so far."""
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = completion_tokens
        self.cached_tokens = cached_tokens
        _COUNTERS.pack_into(self._map, self._at, cached_tokens, prompt_tokens, completion_tokens)


class InflightTable:
    """A fixed number of slots in one file."""

    def __init__(self, path: Path, slots: int) -> None:
        self._map = map_file(path, lambda old: max(slots * SLOT_BYTES, old - old % SLOT_BYTES))
        self._all = len(self._map) // SLOT_BYTES
        self._free = [index for index in reversed(range(self._all)) if self._state(index) == 0]

    @property
    def in_use(self) -> int:
        return self._all - len(self._free)

    def left_over(self) -> list[tuple[int, dict[str, Any]]]:
        """Slots that a former process left in use, as (index, who with both token counts)."""
        found = []
        for index in range(self._all):
            if self._state(index) != 1:
                continue
            _, length, crc, cached, prompt, completion = _HEAD.unpack_from(self._map, index * SLOT_BYTES)
            start = index * SLOT_BYTES + _HEAD.size
            text = self._map[start : start + min(length, SLOT_BYTES - _HEAD.size)]
            if zlib.crc32(text) == crc:
                who = json.loads(text)
                tokens = {"promptTokens": prompt, "completionTokens": completion, "cachedTokens": cached}
                found.append((index, {**who, **tokens}))
            else:
                self.free(index)
        return found

    def take(self, who: Mapping[str, Any]) -> Slot:
        """A slot for a new request; raises SpoolError when none is left."""
        text = json.dumps(who, separators=(",", ":")).encode()
        if len(text) > SLOT_BYTES - _HEAD.size:
            raise SpoolError(f"usage of {who.get('requestId')}: {len(text)} bytes do not fit into a slot")
        if not self._free:
            raise SpoolError("no free slot: too many requests in hand")
        index = self._free.pop()
        start = index * SLOT_BYTES
        _HEAD.pack_into(self._map, start, 0, len(text), zlib.crc32(text), 0, 0, 0)
        self._map[start + _HEAD.size : start + _HEAD.size + len(text)] = text
        _STATE.pack_into(self._map, start, 1)
        return Slot(self, index)

    def free(self, index: int) -> None:
        """Give a slot back."""
        _STATE.pack_into(self._map, index * SLOT_BYTES, 0)
        self._free.append(index)

    def flush(self) -> None:
        """Make the slots durable as they are now. Raises SpoolError when the disk fails."""
        try:
            self._map.flush()
        except OSError as error:
            raise SpoolError(f"usage of running requests: {error}") from error

    def close(self) -> None:
        self._map.close()

    def _state(self, index: int) -> int:
        state: int = _STATE.unpack_from(self._map, index * SLOT_BYTES)[0]
        return state
