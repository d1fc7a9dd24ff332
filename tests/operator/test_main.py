"""What the operator's process sets for itself."""

from __future__ import annotations

import asyncio
import ssl
from asyncio import sslproto

import pytest

from busbar.operator.main import TLS_RECORD_BYTES, read_records


async def test_encrypted_data_is_read_by_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sslproto.SSLProtocol, "max_size", sslproto.SSLProtocol.max_size)

    def buffer() -> int:
        """Bytes that a new connection reads into at a time."""
        loop, context = asyncio.get_running_loop(), ssl.create_default_context()
        made = sslproto.SSLProtocol(
            loop, asyncio.Protocol(), context, loop.create_future(), server_hostname="any"
        )
        size = len(made.get_buffer(-1))
        made.connection_lost(None)
        return size

    assert buffer() > TLS_RECORD_BYTES, "asyncio's own"
    read_records()
    assert buffer() == TLS_RECORD_BYTES
