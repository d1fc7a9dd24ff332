"""How a server process ends: SIGTERM, a drain, and requests that are still on their way."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.serving.processes import Running, serving
from tests.serving.test_server import MODEL, PROMPT, open_stream


@contextlib.contextmanager
def half_sent(server: Running) -> Iterator[tuple[http.client.HTTPConnection, bytes]]:
    """A request whose body is still arriving, which a drain waits for, and the rest of the body."""
    body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 4}).encode()
    address = server.url.removeprefix("http://")
    with contextlib.closing(http.client.HTTPConnection(address, timeout=60)) as connection:
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Authorization", f"Bearer {server.token}")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body[:10])
        yield connection, body[10:]


def test_sigterm_lets_running_streams_end_and_refuses_new_ones(llama: tuple[Path, Any]) -> None:
    flags = ("--model-id", MODEL, "--drain-seconds", "60")
    with serving(llama[0], *flags, token="secret") as server, half_sent(server) as (connection, rest):
        streams = [open_stream(server, 400) for _ in range(3)]
        for stream in streams:
            stream.line()
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: server.get("/ready")[0] == 503)
        status, headers, body = server.post("/v1/completions", {"model": MODEL, "prompt": "a"})
        assert (status, body["error"]["type"]) == (503, "ServiceUnavailableError")
        assert "Retry-After" in headers
        assert server.get("/health")[0] == 200
        connection.send(rest)
        assert connection.getresponse().status == 200
        ends: list[bytes] = [b""] * 3

        def read(index: int) -> None:
            ends[index] = streams[index].rest()

        readers = [threading.Thread(target=read, args=(i,)) for i in range(3)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        assert all(end.endswith(b"data: [DONE]\n\n") for end in ends)
        assert all(b'"finish_reason":"length","token_index":400' in end for end in ends)
        assert server.process.wait(60) == 0


def test_a_drain_waits_for_a_request_whose_body_is_still_arriving(llama: tuple[Path, Any]) -> None:
    with serving(llama[0], "--model-id", MODEL, "--drain-seconds", "60", token="secret") as server:
        with half_sent(server) as (connection, rest):
            server.wait_for(lambda: server.post("/drain", {})[2]["running"] == 1)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for(lambda: server.get("/ready")[0] == 503)
            with pytest.raises(subprocess.TimeoutExpired):
                server.process.wait(2.0)  # longer than the cleanup takes
            connection.send(rest)
            answer = connection.getresponse()
            assert answer.status == 200
            assert json.loads(answer.read())["usage"]["completion_tokens"] >= 1
        assert server.process.wait(60) == 0


def test_a_pod_drains_on_request_and_cuts_when_its_time_is_over(deep: Path) -> None:
    spec = {"model": {"trainingJob": "x"}, "kvCacheMemory": "64Mi", "drainSeconds": 0}
    env = {
        "BUSBAR_SPEC": json.dumps(spec),
        "BUSBAR_JOB_NAME": MODEL,
        "BUSBAR_NAMESPACE": "demo",
        "BUSBAR_MODEL_DIR": str(deep),
    }
    with serving(deep, env=env, token="secret") as server:
        assert server.status()["modelId"] == MODEL
        assert server.status()["kvBlocksTotal"] == 63  # 64 MiB of 1 MiB blocks, less the scratch one
        for name in (MODEL, f"demo/{MODEL}"):
            status, _, answer = server.post(
                "/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1}
            )
            assert (status, answer["model"]) == (200, name)
        for path, foreign in (
            ("/status", "infer"),
            ("/v1/models", "read"),
            ("/drain", "read"),
            ("/drain", "infer"),
        ):
            method = "POST" if path == "/drain" else "GET"
            assert server.call(method, path, None, f"secret-{foreign}")[0] == 401
        assert server.get("/ready")[0] == 200
        streams = [open_stream(server, 490) for _ in range(8)]  # still running during the next calls
        streams[0].line()
        assert server.post("/drain", {})[2] == {"draining": True, "running": 8}
        assert server.get("/ready")[0] == 503
        assert server.post("/v1/completions", {"model": MODEL, "prompt": "a"})[0] == 503
        assert server.status()["draining"] is True
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            rest = stream.rest()
            assert b'"error":{"message":"the server is shutting down' in rest
            assert rest.endswith(b"data: [DONE]\n\n")
        assert server.process.wait(60) == 143
        assert all(json.loads(line)["message"] for line in server.log().splitlines())
        assert "secret" not in server.log()
