"""Security headers on every answer, and a limit on every request's body. Pure ASGI, before any handler.

Strict-Transport-Security is added where the browser speaks TLS (`busbar.api.access.forwarded`): browsers then refuse to
come back without it for a year.

The Content-Security-Policy is strict: only our own files, no inline script or style, no framing, no other
origin. The limit holds whether a body announces its length or not.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

from busbar.api.errors import TooLarge, body_of

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 1024 * 1024
LARGE_BODIES = {("PUT", "/api/v1alpha1/database"): 1024 * 1024 * 1024}
"""Routes that read their body in pieces, after they know their caller."""
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", CSP.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
    (b"cache-control", b"no-store"),
)


HSTS = (b"strict-transport-security", b"max-age=31536000")


class _BodyTooLarge(Exception):
    pass


def with_security_headers(scope: Scope, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """An answer's headers plus the security headers that it has not set itself."""
    given = list(headers)
    present = {name for name, _ in given}
    wanted = (*_HEADERS, HSTS) if scope["app"].state.services.forwarded.is_https(scope) else _HEADERS
    return given + [header for header in wanted if header[0] not in present]


class SecurityMiddleware:
    """ASGI middleware around the whole application."""

    def __init__(self, app: App, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._max = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False
        read = 0
        headers = dict(scope.get("headers") or [])
        most = self._limit(scope, headers)

        async def bounded() -> Message:
            nonlocal read
            message = await receive()
            if message["type"] == "http.request":
                read += len(message.get("body") or b"")
                if read > most:
                    raise _BodyTooLarge
            return message

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": with_security_headers(scope, message.get("headers") or [])}
            await send(message)

        async def send_or_refuse(message: Message) -> None:
            if read > most and not started:
                raise _BodyTooLarge  # an application that caught the error may answer something else; this is the answer
            await send_with_headers(message)

        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > most:
            await self._refuse(send_with_headers, most)
            return
        try:
            await self._app(scope, bounded, send_or_refuse)
        except _BodyTooLarge:
            if not started:
                await self._refuse(send_with_headers, most)

    def _limit(self, scope: Scope, headers: Mapping[bytes, bytes]) -> int:
        """Only for callers with a token: for those with a cookie a form is read before they are known."""
        large = LARGE_BODIES.get((scope["method"], scope["path"])) if b"authorization" in headers else None
        return large or self._max

    async def _refuse(self, send: Send, most: int) -> None:
        error = TooLarge(f"the body is larger than {most} bytes")
        await send(
            {
                "type": "http.response.start",
                "status": error.status,
                "headers": [(b"content-type", b"application/json")],
            }
        )
        await send({"type": "http.response.body", "body": json.dumps(body_of(error)).encode()})
