"""A real server process for tests."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.free_port import free_port

from busbar.kube.contracts.bearers import Role, role_of

REPOSITORY = Path(__file__).parents[2]
START_LIMIT_S = 90.0


def with_descendants(pid: int) -> list[int]:
    """The process and those that descend from it and live, parents first."""
    found = [pid]
    for each in found:
        with suppress(OSError):
            found += map(int, Path(f"/proc/{each}/task/{each}/children").read_text().split())
    return found


@dataclass
class Service:
    """A server's client."""

    url: str
    token: str | None
    by_role: bool = False
    """A pod has a separate bearer for each kind of call."""

    def bearer(self, path: str) -> str | None:
        return f"{self.token}-{role_of(path)}" if self.by_role else self.token

    def get(self, path: str, token: str | None = None) -> tuple[int, dict[str, str], bytes]:
        return self.call("GET", path, None, token)

    def post(self, path: str, body: object) -> tuple[int, dict[str, str], Any]:
        status, headers, data = self.call("POST", path, json.dumps(body).encode())
        return status, headers, json.loads(data)

    def call(
        self,
        method: str,
        path: str,
        body: bytes | None,
        token: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        bearer = self.bearer(path) if token is None else token
        headers = {**({"Authorization": f"Bearer {bearer}"} if bearer else {}), **(headers or {})}
        request = urllib.request.Request(self.url + path, data=body, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, dict(error.headers), error.read()

    def status(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.get("/status")[2])
        return content

    def metric(self, name: str) -> float:
        """The sum over a metric's samples with this exact name."""
        text = self.get("/metrics")[2].decode()
        lines = re.findall(rf"^{re.escape(name)}\{{.*\}} (\S+)$", text, re.MULTILINE)
        assert lines, f"{name} is not exported"
        return sum(float(v) for v in lines)


@dataclass
class Running(Service):
    """A server process and its client."""

    process: subprocess.Popen[bytes] = field(kw_only=True)
    log_path: Path = field(kw_only=True)

    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def processes(self) -> list[int]:
        """Those that live, parents first: the supervisor, if there is one, the front, and the engine."""
        return with_descendants(self.process.pid)

    def wait_for(self, what: Any, limit_s: float = 60.0) -> None:
        """Polls until `what()` is true."""
        end = time.monotonic() + limit_s
        while not what():
            assert time.monotonic() < end, f"not within {limit_s} s; log:\n{self.log()}"
            time.sleep(0.02)


class OpenStream:
    """A streamed completion that the test reads step by step; closing it disconnects the client."""

    def __init__(self, server: Service, body: object, headers: dict[str, str] | None = None) -> None:
        self._connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
        path = "/v1/completions"
        bearer = {"Authorization": f"Bearer {server.bearer(path)}"} if server.token else {}
        self._connection.request("POST", path, json.dumps(body), bearer | (headers or {}))
        self.answer = self._connection.getresponse()
        self.status = self.answer.status
        self.headers = self.answer.headers

    def line(self) -> bytes:
        return self.answer.readline()

    def rest(self) -> bytes:
        """The rest of the stream."""
        with self:
            return self.answer.read()

    def close(self) -> None:
        self.answer.close()
        self._connection.close()

    def __enter__(self) -> OpenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def serving(
    folder: Path, *flags: str, env: dict[str, str] | None = None, token: str | None = None
) -> Iterator[Running]:
    """`python -m busbar.workloads.serving`, ready, killed at the end if it still runs."""
    port = free_port()
    command = [sys.executable, "-m", "busbar.workloads.serving"]
    if env is None:
        command += [str(folder), "--port", str(port), "--threads", "1", *flags]
    variables = {k: v for k, v in os.environ.items() if not k.startswith("BUSBAR_")}
    variables |= {"PYTHONPATH": str(REPOSITORY / ".src"), "OMP_NUM_THREADS": "1"}
    if token is not None and env is None:
        variables["BUSBAR_TOKEN"] = token
    with tempfile.TemporaryDirectory() as logs:
        if env is not None:
            variables |= env | {"BUSBAR_PORT": str(port), "BUSBAR_BEARERS_DIR": logs}
            for role in Role:
                (Path(logs) / role).write_text(f"{token}-{role}")
        path = Path(logs) / "log"
        with path.open("wb") as log:
            process = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        server = Running(url, token, by_role=env is not None, process=process, log_path=path)
        try:
            server.wait_for(lambda: process.poll() is not None or _is_ready(server), START_LIMIT_S)
            assert process.poll() is None, server.log()
            yield server
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def _is_ready(server: Running) -> bool:
    try:
        return server.get("/ready")[0] == 200
    except (urllib.error.URLError, ConnectionError):
        return False
