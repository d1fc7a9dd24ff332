"""Limits on how long a request's head and body may take to arrive: uvicorn has neither.

A head is awaited from the opening of the connection, or from the first byte after a request; a body from the end of its
head. When the time is over, the connection is closed; who has sent something and got no answer is told 408.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def protocol(head_s: float, body_s: float) -> type[H11Protocol]:
    """Uvicorn's protocol (`Config.http`) with these limits, in seconds."""
    return type("LimitedProtocol", (_Limited,), {"head_s": head_s, "body_s": body_s})


class _Limited(H11Protocol):
    head_s: float
    body_s: float
    _awaited: type[h11.IDLE] | type[h11.SEND_BODY] | None = None
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._follow()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _follow(self) -> None:
        """Let the timer be that of the part which is awaited now."""
        state = self.conn.their_state
        awaited = state if state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing() else None
        if awaited is self._awaited:
            return
        self._stop()
        self._awaited = awaited
        if awaited is not None:
            limit_s = self.head_s if awaited is h11.IDLE else self.body_s
            self._timer = self.loop.call_later(limit_s, self._cut)

    def _stop(self) -> None:
        self._awaited = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cut(self) -> None:
        state, cycle = self.conn.their_state, self.cycle
        if state is not self._awaited:  # the whole request came, and its answer has gone out
            return
        sent = bool(self.conn.trailing_data[0]) if state is h11.IDLE else not cycle.response_started
        if sent:
            self.transport.write(_TIMED_OUT)
        self.transport.close()
