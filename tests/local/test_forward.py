"""The loopback forwarder, against a real server on loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from busbar.local.forward import forward, parse


@contextmanager
def held_port() -> Iterator[int]:
    """A port that no other process is given meanwhile.

    It is bound but does not listen: a connection to it is refused until a process that asks for this port, such as the
    forwarder, listens there.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def test_a_rule_is_parsed() -> None:
    assert parse("30080=10.77.0.2:30080") == (30080, "10.77.0.2", 30080)


async def test_bytes_go_both_ways_and_the_end_is_passed_on() -> None:
    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read()).upper())
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(shout, "127.0.0.1", 0)
    with held_port() as near:
        task = asyncio.create_task(forward([(near, "127.0.0.1", server.sockets[0].getsockname()[1])]))
        reader, writer = await connect(near)
        writer.write(b"hello")
        writer.write_eof()
        assert await reader.read() == b"HELLO"
        writer.close()
        await writer.wait_closed()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    server.close()
    await server.wait_closed()


async def test_a_target_that_does_not_answer_closes_the_connection() -> None:
    with held_port() as near, held_port() as nobody:
        task = asyncio.create_task(forward([(near, "127.0.0.1", nobody)]))
        reader, writer = await connect(near)
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    for _ in range(200):
        try:
            return await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            await asyncio.sleep(0.01)
    raise AssertionError("the forwarder did not start")
