"""A server whose metrics are those of an engine in turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def answering(answers: list[bytes], first_after_s: float = 0.0) -> Iterator[int]:
    """Its port. It goes through these answers; the last one stays for ever."""
    late = [first_after_s]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if late:
                time.sleep(late.pop())
            body = answers.pop(0) if len(answers) > 1 else answers[0]
            with suppress(OSError):  # the client did not wait for it
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
