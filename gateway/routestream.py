"""Follows the operator's stream of routes, and keeps the last ones on disk.

The stream is NDJSON: a whole document per line, one at every change and one every 15 s. When it disconnects or times
out, it is opened again after a jittered back-off; meanwhile, and after a restart while the operator is unavailable,
the last document is used: an address of a dead replica costs a retry (see `endpoint_picker`), no address would cost
the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import aiohttp
from pydantic import ValidationError

from busbar.gateway.files import write_atomically
from busbar.kube.contracts.routes import PATH, RESEND_S, Routes
from busbar.kube.token_file import TokenFile

log = logging.getLogger("busbar.gateway.routes")

SILENCE_S = 3 * RESEND_S
LINE_BYTES = 16 * 1024 * 1024


class RouteStream:
    """Calls `apply` with every new document, first with the one from disk."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        token: TokenFile,
        saved: Path,
        apply: Callable[[Routes], None],
        *,
        pause_s: float = 0.5,
        pause_max_s: float = 3.0,
    ) -> None:
        self._session = session
        self._url = url.rstrip("/") + PATH
        self._token = token
        self._saved = saved
        self._apply = apply
        self._pause_s = pause_s
        self._pause_max_s = pause_max_s
        self.current: Routes | None = None
        self.connected = False

    def load(self) -> bool:
        """Put the document from disk in force; False when there is none that can be read."""
        try:
            document = Routes.model_validate_json(self._saved.read_bytes())
        except FileNotFoundError:
            return False
        except (OSError, ValidationError) as error:
            log.warning("saved_routes_unreadable", extra={"file": str(self._saved), "error": _short(error)})
            return False
        self.current = document
        self._apply(document)
        return True

    async def run(self) -> None:
        """Follow until cancelled."""
        pause = self._pause_s
        silent = False  # one line when it breaks, not one per attempt
        while True:
            try:
                async with contextlib.aclosing(self._documents()) as documents:
                    async for document in documents:
                        pause = self._pause_s
                        silent = False
                        await self._take(document)
                log.info("routes_stream_ended", extra={"url": self._url})
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                if not silent:
                    log.warning("routes_stream_broken", extra={"url": self._url, "error": _short(error)})
                silent = True
            finally:
                self.connected = False
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, self._pause_max_s)

    async def _documents(self) -> AsyncGenerator[Routes, None]:
        headers = self._token.header()
        timeout = aiohttp.ClientTimeout(total=None, connect=5, sock_read=SILENCE_S)
        async with self._session.get(
            self._url, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}")
            self.connected = True
            rest = b""
            async for data in response.content.iter_any():
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > LINE_BYTES:
                    raise ValueError(f"a routes document over {LINE_BYTES} bytes")
                for line in lines:
                    if line.strip():
                        yield Routes.model_validate_json(line)

    async def _take(self, document: Routes) -> None:
        same = self.current is not None and document.services == self.current.services
        self.current = document
        if same:
            return
        self._apply(document)
        log.info("routes_changed", extra={"revision": document.revision, "services": len(document.services)})
        try:
            data = document.model_dump_json(by_alias=True).encode()
            await asyncio.to_thread(write_atomically, self._saved, data)
        except OSError as error:
            log.error("routes_not_saved", extra={"file": str(self._saved), "error": str(error)})


def _short(error: Exception) -> str:
    """Errors of pydantic quote their input, which has bearers in it: only say which fields."""
    if isinstance(error, ValidationError):
        fields = sorted({".".join(map(str, item["loc"])) for item in error.errors(include_input=False)})
        return f"a document that is not routes, at {', '.join(fields[:5])}"
    return f"{type(error).__name__}: {error}"
