"""Connections whose requests do not arrive in time are closed."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest
from tests.gateway.parts import House, route

HEAD_S = 0.3
ASK = b"GET /health HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
async def hasty(house: House) -> House:
    """A gateway with short limits."""
    house.overrides.update({"header_timeout_s": HEAD_S, "idle_timeout_s": 4 * HEAD_S})
    await house.stop_gateway()
    await house.start_gateway()
    return house


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    at = urlsplit(url)
    return await asyncio.open_connection(at.hostname, at.port)


async def ended(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(20):
            return await reader.read() == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("sent", [b"", ASK + b"X-A: "])
async def test_a_head_that_does_not_end_is_cut_off(hasty: House, sent: bytes) -> None:
    for url in (hasty.public, hasty.internal):
        reader, writer = await connect(url)

        async def drips(to: asyncio.StreamWriter = writer) -> None:
            while sent:
                to.write(b"a")
                await asyncio.sleep(HEAD_S / 5)

        writer.write(sent)
        dripping = asyncio.create_task(drips())
        assert await ended(reader)
        dripping.cancel()
        writer.close()


async def test_requests_in_time_share_a_connection_for_longer_than_the_limit(hasty: House) -> None:
    reader, writer = await connect(hasty.public)
    async with asyncio.timeout(30):
        for _ in range(4):
            writer.write(ASK)
            await asyncio.sleep(HEAD_S / 3)
            writer.write(b"\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            await reader.readexactly(3)
            await asyncio.sleep(HEAD_S * 1.5)
    writer.write(ASK)
    assert await ended(reader), "the second head of a connection counts too"
    writer.close()


async def test_an_idle_connection_is_closed(hasty: House) -> None:
    reader, writer = await connect(hasty.public)
    writer.write(ASK + b"\r\n")
    await reader.readexactly(10)
    async with asyncio.timeout(20):
        await reader.read()
    writer.close()


async def test_an_answer_may_take_longer_than_the_limit(hasty: House) -> None:
    engine = await hasty.engine("hello", " world")
    engine.pause_at = 1
    await hasty.publish(route("m", engine))
    async with hasty.post({"model": "m", "stream": True}) as response:
        await response.content.readuntil(b"\n\n")
        await asyncio.sleep(HEAD_S * 1.5)
        engine.go.set()
        assert b" world" in await response.content.read()
