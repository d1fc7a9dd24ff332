"""Requests that were accepted in the last minute, in a memory-mapped ring that outlives the process.

Limits per minute count what was accepted within 60 s. A gateway that is killed and started again must not forget it,
so each accepted request has an entry: whose it is is written once, its tokens twice, when it is accepted (what it may
use at most) and when it ends (what it did use). Storing is a memory write; a SIGKILL loses nothing. After a restart a
request that had not ended counts what its slot says was delivered (`inflight`).

    entry:  u64 number (0: none) · f64 unix time · i64 tokens (below 0: reserved, not ended)
            request id · key id · tenant · service

When more requests are accepted within a minute than the ring has entries, the oldest are overwritten: a restart then
forgets them, the running process does not.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from busbar.gateway.files import map_file

ENTRIES = 32_768
_NUMBER = struct.Struct("<Q")
_TOKENS = struct.Struct("<q")
_REST = struct.Struct("<d40s40s64s128s")
_TOKENS_AT = 8
_REST_AT = 16
ENTRY_BYTES = _REST_AT + _REST.size


@dataclass(frozen=True)
class Admission:
    """One accepted request, as a former process left it."""

    at: float
    """Unix time."""
    tokens: int
    key_id: str
    tenant: str
    service: str
    """`namespace/name`."""


class AdmissionRing:
    """A fixed number of entries in one file; the oldest is overwritten."""

    def __init__(self, path: Path, entries: int = ENTRIES) -> None:
        self._map = map_file(path, lambda _: entries * ENTRY_BYTES)
        self._entries = entries
        self._last = max(self._number(index) for index in range(entries))

    def add(self, at: float, request_id: str, key_id: str, tenant: str, service: str, reserved: int) -> int:
        """The number of a new entry."""
        self._last += 1
        start = self._last % self._entries * ENTRY_BYTES
        _NUMBER.pack_into(self._map, start, 0)
        texts = (text.encode() for text in (request_id, key_id, tenant, service))
        _REST.pack_into(self._map, start + _REST_AT, at, *texts)
        _TOKENS.pack_into(self._map, start + _TOKENS_AT, -1 - reserved)
        _NUMBER.pack_into(self._map, start, self._last)
        return self._last

    def settle(self, number: int, tokens: int) -> None:
        """The request of an entry has ended."""
        index = number % self._entries
        if self._number(index) == number:  # else it has been overwritten
            _TOKENS.pack_into(self._map, index * ENTRY_BYTES + _TOKENS_AT, tokens)

    def left_over(self, delivered: Mapping[str, int], since: float) -> Iterator[Admission]:
        """What a former process accepted after `since`, oldest first; requests that had not ended are settled.

        Args:
            delivered: tokens of requests that had not ended, by request id.
        """
        for step in range(1, self._entries + 1):
            index = (self._last + step) % self._entries
            number, start = self._number(index), index * ENTRY_BYTES
            tokens: int = _TOKENS.unpack_from(self._map, start + _TOKENS_AT)[0]
            at, *texts = _REST.unpack_from(self._map, start + _REST_AT)
            if not number or at <= since:
                continue
            request_id, key_id, tenant, service = (
                text.rstrip(b"\0").decode(errors="replace") for text in texts
            )
            if tokens < 0:
                tokens = delivered.get(request_id, 0)
                self.settle(number, tokens)
            yield Admission(at, tokens, key_id, tenant, service)

    def close(self) -> None:
        self._map.close()

    def _number(self, index: int) -> int:
        number: int = _NUMBER.unpack_from(self._map, index * ENTRY_BYTES)[0]
        return number
