"""The port `busbar` of a training pod: a few read-only pages and one command, in threads of their own.

    GET  /health       the process lives                                    no bearer
    GET  /ready        it trains (or has trained)                           no bearer
    GET  /status       JSON for the operator                                the bearer for reading
    GET  /metrics      the same for Prometheus                              the bearer for reading
    POST /checkpoint   save at the end of this step; answers when durable   the bearer for commands

Bearers are compared in constant time; a pod without a bearer refuses what it would open. Standard library only: it answers before torch is imported, and needs nothing a GPU image lacks.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from busbar.kube.contracts.bearers import Bearers, is_allowed
from busbar.workloads.training.control import Control
from busbar.workloads.training.status import Status

SAVE_TIMEOUT_S = 120.0  # a large model on a slow disk; the operator asks again


class Port:
    """The HTTP server of one run. Port 0 chooses a free one; `number` tells which."""

    def __init__(self, status: Status, control: Control, bearers: Bearers, host: str, number: int) -> None:
        handler = type("Handler", (_Handler,), {"status": status, "control": control, "bearers": bearers})
        self._server = ThreadingHTTPServer((host, number), handler)
        self._server.daemon_threads = True
        self.number = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="port", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    status: Status
    control: Control
    bearers: Bearers
    timeout = 10  # seconds for a request's head, so that idle connections end
    server_version = "busbar"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not self._allowed(path):
            return
        match path:
            case "/health":
                self._json(200, {"ok": True})
            case "/ready":
                ready = self.status.phase not in ("Preparing", "Failed")
                self._json(200 if ready else 503, {"ready": ready, "phase": self.status.phase})
            case "/status":
                self._json(200, self.status.to_json())
            case "/metrics":
                self._send(200, "text/plain; version=0.0.4; charset=utf-8", self.status.to_prometheus())
            case _:
                self._json(404, _error("not-found", f"there is no {path} here"))

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        if not self._allowed(path):
            return
        if path != "/checkpoint":
            self._json(404, _error("not-found", f"there is no {path} here"))
            return
        request = self.control.request_save()
        if not request.answered.wait(SAVE_TIMEOUT_S):
            self._json(504, _error("timeout", "the checkpoint is not durable yet; ask again"))
        elif request.problem is not None:
            self._json(409, _error("not-saved", request.problem))
        else:
            self._json(200, {"step": request.step, "durable": True})

    def _allowed(self, path: str) -> bool:
        if is_allowed(path, self.headers.get("Authorization"), self.bearers):
            return True
        self._json(401, _error("unauthorized", f"{path} needs the job's bearer for this kind of call"))
        return False

    def _json(self, code: int, document: Any) -> None:
        self._send(code, "application/json", json.dumps(document).encode())

    def _send(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Access logs would drown the run's own lines."""


def _error(code: str, message: str) -> dict[str, dict[str, str]]:
    return {"error": {"code": code, "message": message}}
