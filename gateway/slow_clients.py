"""A limit on how long a request's head may take to arrive: aiohttp's server has none.

Between the server and each connection stands a guard. It starts a timer when the connection opens, and when the first
bytes after a request come; the application's outermost middleware says when a head is complete. Idle connections are
the server's own business (`keepalive_timeout`), and the body is the handler's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HeadLimit:
    """Makes the guarded protocols of one application."""

    def __init__(self, head_s: float) -> None:
        self._head_s = head_s
        self._guards: dict[asyncio.BaseProtocol, _Guard] = {}
        self._connection: Callable[[], asyncio.Protocol] | None = None

    async def listen(
        self, connection: Callable[[], asyncio.Protocol], host: str, port: int
    ) -> asyncio.Server:
        """Take connections, each by a new protocol of the server of an application that has `middleware`."""
        self._connection = connection
        return await asyncio.get_running_loop().create_server(self._guarded, host, port, backlog=128)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Tells the connection's guard that a head is complete, and that its answer is."""
        guard = self._guards.get(request.protocol)
        if guard is None:  # the client has left
            return await handler(request)
        guard.head_arrived()
        try:
            return await handler(request)
        finally:
            guard.answered()

    def _guarded(self) -> _Guard:
        assert self._connection is not None
        guard = _Guard(self._connection(), self._head_s, self._forget)
        self._guards[guard.inner] = guard
        return guard

    def _forget(self, inner: asyncio.Protocol) -> None:
        self._guards.pop(inner, None)


class _Guard(asyncio.Protocol):
    """Passes everything on to the server's protocol, and cuts a connection whose head does not come."""

    def __init__(
        self, inner: asyncio.Protocol, head_s: float, lost: Callable[[asyncio.Protocol], None]
    ) -> None:
        self.inner = inner
        self._head_s = head_s
        self._lost = lost
        self._in_hand = False
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.BaseTransport | None = None

    def head_arrived(self) -> None:
        self._in_hand = True
        self._cancel()

    def answered(self) -> None:
        self._in_hand = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._expect_head()
        self.inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if not self._in_hand and self._timer is None:
            self._expect_head()
        self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        self._lost(self.inner)
        self.inner.connection_lost(exc)

    def _expect_head(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._head_s, self._cut)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cut(self) -> None:
        if isinstance(self._transport, asyncio.WriteTransport):
            self._transport.abort()
