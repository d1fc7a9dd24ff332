"""Ports for processes that tests start."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port for a process that is about to start, reserved for a minute.

    A connection on this port has just been closed here (TIME_WAIT), so the kernel assigns the port to no other process;
    a server that asks for this port with SO_REUSEADDR gets it.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            listener.accept()[0].close()
        return port
