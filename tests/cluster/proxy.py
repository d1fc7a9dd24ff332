"""A reverse proxy in front of the real API server that injects the faults a client must survive.

It speaks plain HTTP on loopback and TLS to the server. Every *write* (POST, PUT, PATCH, DELETE) that is not a
Lease or a review is numbered from 1. Faults:

* ``kill_at(n, "before" | "after")``: the n-th write is not forwarded, or forwarded and its answer dropped; from then
  on no request of this client is forwarded (what a SIGKILL at that moment looks like from the server), and ``killed``
  is set, until ``revive()``. ``kill_each("before" | "after")`` does so once for each different write, and
  ``kill_next("before" | "after", part)`` at the next write whose path contains ``part``.
* ``answer(matches, status, …)``: the next matching requests are answered here (409, 410, 429 with Retry-After), until
  ``forgive()``.
* ``answer_after(matches, status, …)``: the same, but the server has done what was asked.
* ``delay_s``: every answer comes so much later; watches only begin later.
* ``cut_watches()``: every open watch is disconnected; ``stall_watches(part)``: they stay open and send nothing more, or
  only those whose path contains ``part``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
from aiohttp import web

WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_TELLING = ("phase", "reason", "replicas", "desiredReplicas", "observedGeneration")
_HOP = frozenset(
    {"connection", "transfer-encoding", "content-length", "content-encoding", "host", "keep-alive"}
)


@dataclass
class Write:
    """One write as it was forwarded."""

    number: int
    method: str
    path: str
    body: Any
    status: int = 0

    @property
    def likeness(self) -> tuple[object, ...]:
        """Identity of a write: two writes that differ only in times and versions are the same."""
        status = self.body.get("status") if isinstance(self.body, dict) else None
        about = {k: str(v) for k, v in status.items() if k in _TELLING} if isinstance(status, dict) else {}
        fields = tuple(sorted(status)) if isinstance(status, dict) else ()
        reason = self.body.get("reason") if isinstance(self.body, dict) else None
        path = "/events" if self.path.endswith("/events") else self.path
        return (self.method, path, reason, fields, tuple(sorted(about.items())))

    def __str__(self) -> str:
        return f"{self.number} {self.method} {self.path} -> {self.status}"


@dataclass
class Fault:
    """An answer given instead of the server's."""

    matches: Callable[[str, str], bool]
    status: int
    reason: str
    headers: dict[str, str]
    times: int
    is_done: bool = False  # the server gets the request before


@dataclass
class FaultProxy:
    """See the module's head. Use as an async context manager."""

    upstream: str
    ca_file: Path
    writes: list[Write] = field(default_factory=list)
    killed: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    requests: int = 0
    expired_watches: int = 0
    """Watches that the server ended because it had forgotten what they asked for."""
    delay_s: float = 0.0
    _kill: tuple[int, Literal["before", "after"]] | None = None
    _each: Literal["before", "after"] | None = None
    _next: tuple[Literal["before", "after"], str] | None = None
    _met: set[tuple[object, ...]] = field(default_factory=set)
    _dead: bool = False
    _faults: list[Fault] = field(default_factory=list)
    _watches: dict[asyncio.Task[Any], str] = field(default_factory=dict)  # to its path
    _session: aiohttp.ClientSession | None = None
    _runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        tls = ssl.create_default_context(cafile=str(self.ca_file))
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls), auto_decompress=True, trust_env=False
        )
        app = web.Application(client_max_size=8 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut_watches()
        assert self._runner is not None
        assert self._session is not None
        await self._runner.cleanup()
        await self._session.close()

    # -- faults ----------------------------------------------------------------------------------------

    def kill_at(self, number: int, when: Literal["before", "after"]) -> None:
        """Kills the client at write ``number``, counted from the proxy's start."""
        self._kill = (number, when)

    def kill_each(self, when: Literal["before", "after"]) -> None:
        """Kills the client at every write that differs from all before it."""
        self._each = when

    def kill_next(self, when: Literal["before", "after"], part: str) -> None:
        """Kills the client at its next write whose path contains ``part``."""
        self._next = (when, part)

    def _dies(self, write: Write, when: Literal["before", "after"]) -> bool:
        if self._kill == (write.number, when):
            return True
        if self._next is not None and self._next[0] == when and self._next[1] in write.path:
            self._next = None
            return True
        if self._each != when or write.likeness in self._met:
            return False
        self._met.add(write.likeness)
        return True

    @property
    def died_at(self) -> int:
        """The number of different writes at which ``kill_each`` killed; concurrent writes count as one."""
        return len(self._met)

    def revive(self) -> None:
        """Forwards requests again, for the next client."""
        self._dead, self._kill = False, None
        self.killed.clear()

    def answer(
        self,
        matches: Callable[[str, str], bool],
        status: int,
        reason: str,
        *,
        headers: dict[str, str] | None = None,
        times: int = 1,
    ) -> None:
        """The next ``times`` requests for which ``matches(method, path)`` is true get this Status instead."""
        self._faults.append(Fault(matches, status, reason, headers or {}, times))

    def answer_after(
        self, matches: Callable[[str, str], bool], status: int, reason: str, *, times: int = 1
    ) -> None:
        """The next ``times`` matching requests are passed on, and then answered by this Status."""
        self._faults.append(Fault(matches, status, reason, {}, times, is_done=True))

    def forgive(self) -> None:
        """Forwards every request to the server again."""
        self._faults.clear()

    def cut_watches(self) -> None:
        for task in list(self._watches):
            task.cancel()

    def stall_watches(self, part: str = "") -> None:
        """Watches that are open now and whose path contains ``part`` send nothing more; new ones work."""
        for task, path in self._watches.items():
            if part in path:
                task.stalled = True  # type: ignore[attr-defined]

    def watches(self, part: str) -> int:
        """How many watches are open whose path contains ``part``."""
        return sum(part in path for path in self._watches.values())

    # -- passing on ------------------------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        if self._dead:
            return self._hang_up(request)
        body = await request.read()
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        counted = request.method in WRITES and not _uncounted(request.path)
        write: Write | None = None
        if counted:
            write = Write(len(self.writes) + 1, request.method, request.path, _parsed(body))
            self.writes.append(write)
            if self._dies(write, "before"):
                return self._die(request)
        fault = next(
            (f for f in self._faults if f.times > 0 and f.matches(request.method, request.path)), None
        )
        if fault is not None:
            fault.times -= 1
            if fault.is_done:
                await self._pass(request, body, None)
            if write is not None:
                write.status = fault.status
            status = {
                "kind": "Status",
                "status": "Failure",
                "reason": fault.reason,
                "code": fault.status,
                "message": "injected",
            }
            return web.json_response(status, status=fault.status, headers=fault.headers)
        try:
            if request.query.get("watch") == "true":
                return await self._watch(request)
            return await self._pass(request, body, write)
        except (aiohttp.ClientError, ConnectionError):
            return self._hang_up(request)  # one of the two sides went away

    async def _pass(self, request: web.Request, body: bytes, write: Write | None) -> web.StreamResponse:
        assert self._session is not None
        async with self._session.request(
            request.method, self.upstream + request.raw_path, data=body or None, headers=_headers(request)
        ) as response:
            answer = await response.read()
            if write is not None:
                write.status = response.status
                if self._dies(write, "after"):
                    return self._die(request)
            if self._dead:
                return self._hang_up(request)
            headers = {k: v for k, v in response.headers.items() if k.lower() not in _HOP}
            return web.Response(body=answer, status=response.status, headers=headers)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        task = asyncio.current_task()
        assert task is not None
        self._watches[task] = request.path
        try:
            async with self._session.get(
                self.upstream + request.raw_path,
                headers=_headers(request),
                timeout=aiohttp.ClientTimeout(total=None),
            ) as response:
                mine = web.StreamResponse(
                    status=response.status, headers={"Content-Type": "application/json"}
                )
                await mine.prepare(request)
                async for chunk in response.content.iter_any():
                    self.expired_watches += b'"code":410' in chunk
                    if self._dead:
                        break
                    if getattr(task, "stalled", False):
                        await asyncio.Event().wait()
                    await mine.write(chunk)
                return mine
        except asyncio.CancelledError:
            if request.transport is not None:
                request.transport.abort()
            raise
        finally:
            self._watches.pop(task, None)

    def _die(self, request: web.Request) -> web.StreamResponse:
        self._dead = True
        self.killed.set()
        self.cut_watches()
        return self._hang_up(request)

    def _hang_up(self, request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=503)


def every_second(*parts: str) -> Callable[[str, str], bool]:
    """Matches every second write whose path contains one of ``parts``."""
    seen = 0

    def matches(method: str, path: str) -> bool:
        nonlocal seen
        if method == "GET" or not any(part in path for part in parts):
            return False
        seen += 1
        return seen % 2 == 0

    return matches


def _headers(request: web.Request) -> dict[str, str]:
    return {k: v for k, v in request.headers.items() if k.lower() not in _HOP | {"accept-encoding"}}


def _uncounted(path: str) -> bool:
    return "/leases" in path or path.endswith(("tokenreviews", "subjectaccessreviews"))


def _parsed(body: bytes) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(body)
    return None
