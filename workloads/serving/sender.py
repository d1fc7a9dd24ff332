"""Writes to the socket between two processes, from any thread, and never waits for the other side."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable

MOST_BYTES = 256 * 2**20
"""That the other side has not read. Then it hangs, and this process ends rather than take more memory."""


class Sender:
    """What the socket does not take at once is sent by the event loop when it does."""

    def __init__(
        self, sock: socket.socket, loop: asyncio.AbstractEventLoop, on_loss: Callable[[], None]
    ) -> None:
        """`sock` does not block. `on_loss` is called in the loop when nothing can be sent any more."""
        self._socket = sock
        self._loop = loop
        self._on_loss = on_loss
        self._left = bytearray()
        self._lost = False
        self._lock = threading.Lock()

    def send(self, data: bytes) -> None:
        with self._lock:
            if self._lost:
                return
            waits = bool(self._left)
            sent = 0 if waits else self._try(data)
            if sent < len(data):
                self._left += memoryview(data)[sent:]
                if not waits:
                    self._loop.call_soon_threadsafe(self._watch)
            if len(self._left) > MOST_BYTES:
                self._lose()

    def close(self) -> None:
        """Nothing more is sent."""
        with self._lock:
            self._lost = True
            self._loop.remove_writer(self._socket)

    def _try(self, data: bytes | bytearray) -> int:
        """How many bytes the socket takes now."""
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self._lose()
            return len(data)

    def _watch(self) -> None:
        with self._lock:
            if not self._lost:
                self._loop.add_writer(self._socket, self._go_on)

    def _go_on(self) -> None:
        with self._lock:
            del self._left[: self._try(self._left)]
            if not self._left or self._lost:
                self._loop.remove_writer(self._socket)

    def _lose(self) -> None:
        self._lost = True
        self._left.clear()
        self._loop.call_soon_threadsafe(self._on_loss)
