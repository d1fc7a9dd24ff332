"""An ASGI application on a real loopback port, in the test's own event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import uvicorn


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """Serves the application inside the block; gives its address."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", ws="none"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with asyncio.timeout(30):
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        listener.close()


def app_of(client: httpx2.AsyncClient) -> Any:
    """The application behind an in-process client, reused because building another takes half a second."""
    transport = client._transport
    assert isinstance(transport, httpx2.ASGITransport)
    return transport.app
