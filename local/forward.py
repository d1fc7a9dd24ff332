"""Small TCP forwarders on 127.0.0.1 of the machine, so that a browser reaches the portal.

``python -m busbar.local.forward 30080=10.64.0.2:30080 …`` listens on each port of 127.0.0.1 and joins every
connection to the address behind the ``=``.  If the target does not answer, the connection is closed: the platform may
still be starting.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

CHUNK = 64 * 1024


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(CHUNK):
            target.write(data)
            await target.drain()
        if target.can_write_eof():
            target.write_eof()


async def _join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
    try:
        far_reader, far_writer = await asyncio.wait_for(asyncio.open_connection(host, port), 10)
    except (OSError, TimeoutError):
        writer.close()
        return
    await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
    for end in (writer, far_writer):
        end.close()
        with suppress(OSError):
            await end.wait_closed()


async def forward(rules: list[tuple[int, str, int]]) -> None:
    """Serve every rule (local port, far host, far port) until cancelled."""

    async def listen(port: int, far_host: str, far_port: int) -> asyncio.Server:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await _join(reader, writer, far_host, far_port)

        return await asyncio.start_server(connected, "127.0.0.1", port)

    servers = [await listen(*rule) for rule in rules]
    await asyncio.gather(*(server.serve_forever() for server in servers))


def parse(argument: str) -> tuple[int, str, int]:
    """``30080=10.64.0.2:30080`` as (30080, "10.64.0.2", 30080)."""
    local, _, far = argument.partition("=")
    host, _, port = far.rpartition(":")
    return int(local), host, int(port)


if __name__ == "__main__":
    asyncio.run(forward([parse(argument) for argument in sys.argv[1:]]))
