"""Connections whose requests do not arrive in time are closed."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import uvicorn
from tests.api.conftest import BASE, World, apps_of

from busbar.api.serve import _config

HEAD_S, BODY_S = 0.3, 0.5
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def port(world: World) -> AsyncIterator[int]:
    """The public port, with short limits."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    short = replace(world.services.settings, header_timeout_s=HEAD_S, body_timeout_s=BODY_S)
    server = uvicorn.Server(_config(short, apps_of(world.services)[0], 0))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with asyncio.timeout(30):
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0)
    yield listener.getsockname()[1]
    server.should_exit = True
    await serving


async def dripped(port: int, first: bytes, drip: bytes, *, most_s: float = 10) -> tuple[bytes, float]:
    """What comes back until the connection is closed, and after how long, while a byte is sent now and then."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    started = time.monotonic()
    writer.write(first)

    async def drips() -> None:
        while drip:
            await asyncio.sleep(HEAD_S / 5)
            writer.write(drip)

    dripping = asyncio.create_task(drips())
    got = b""
    try:
        async with asyncio.timeout(most_s):
            while part := await reader.read(1000):
                got += part
    except ConnectionError:  # a drip met the closed connection
        pass
    finally:
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)
        writer.close()
    return got, time.monotonic() - started


POST = f"POST {BASE}/tokens HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 900\r\n"


async def test_a_head_that_does_not_end_is_cut_off(port: int) -> None:
    got, after_s = await dripped(port, b"GET /health HTTP/1.1\r\nX-A: ", b"a")
    assert got.startswith(b"HTTP/1.1 408 ")
    assert after_s >= HEAD_S


async def test_a_connection_on_which_nothing_comes_is_closed_without_a_word(port: int) -> None:
    assert (await dripped(port, b"", b""))[0] == b""


async def test_a_body_that_does_not_end_is_cut_off(world: World, port: int) -> None:
    key = f"Authorization: Bearer {await world.token('alice')}\r\n\r\n"
    got, after_s = await dripped(port, (POST + key).encode(), b" ")
    assert got.startswith(b"HTTP/1.1 408 ")
    assert after_s >= BODY_S


async def test_a_body_that_nobody_reads_is_cut_off_too(port: int) -> None:
    """The refusal goes out at once, and the rest of the body is not waited for."""
    unread = POST.replace("/tokens", "/namespaces/ada-lab/trainingjobs")
    got, _ = await dripped(port, (unread + "\r\n").encode(), b" ")
    assert got.startswith(b"HTTP/1.1 401 ")
    assert b"HTTP/1.1 408 " not in got


async def test_requests_in_time_share_a_connection_for_longer_than_the_limits(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop's clock moves only here, so that a busy machine makes nobody late."""
    loop = asyncio.get_running_loop()
    now_s = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now_s)

    async def passes(seconds: float) -> None:
        nonlocal now_s
        for _ in range(20):  # what was written has arrived before
            await asyncio.sleep(0)
        now_s += seconds
        for _ in range(20):
            await asyncio.sleep(0)

    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(4):
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        await passes(HEAD_S * 0.9)
        writer.write(b"\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        await passes(HEAD_S * 1.5)
    writer.write(b"GET /health HTTP/1.1\r\n")
    rest = asyncio.create_task(reader.read())
    while not rest.done():
        await passes(HEAD_S)
    assert rest.result().startswith(b"HTTP/1.1 408 "), "the second head of a connection counts too"
    writer.close()
