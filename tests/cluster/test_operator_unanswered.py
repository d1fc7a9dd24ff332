"""A replica that dies or hangs while Kubernetes calls it ready: how soon another one starts beside it, on the real API server.

Its port is a process of its own, which is killed or stopped; the gateway is the real one. How long it takes is printed, with
production times.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import QUICK, Cluster
from tests.cluster.kubelet import Script
from tests.cluster.tenancy import becomes
from tests.cluster.test_operator_serving import service
from tests.gateway.parts import KEY_A, House, route, started

from busbar.kube.client import Object
from busbar.kube.resources import MODEL_SERVICES
from busbar.operator.watch.projections import ANNOTATION_UNANSWERED

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.say({"kind": "serving", "ready": True, "running": 0, "waiting": 0})
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        self.say({"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}], "usage": usage})
    def say(self, answer):
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass

class Server(ThreadingHTTPServer):
    def handle_error(self, request, client):
        pass  # who asked has left

Server((sys.argv[1], 9400), Handler).serve_forever()
"""
TIMES = replace(QUICK, poll_period_s=2.0, poll_timeout_s=2.0, demand_period_s=1.0)
"""Those of production."""
GATEWAY = {
    "probe_after_s": 10.0,
    "probe_timeout_s": 5.0,
    "connect_timeout_s": 3.0,
    "suspect_s": 1.0,
    "suspect_max_s": 30.0,
}
PATIENCE_S = 180.0
"""Of each step, on a slow machine too."""


def nobody_serves(pod: Object) -> Script:
    return Script()


def process(ip: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SERVER, ip])


async def address(cluster: Cluster, name: str) -> str:
    pods = await becomes(
        cluster.pods, lambda found: bool(((found.get(name) or {}).get("status") or {}).get("podIP"))
    )
    return str(pods[name]["status"]["podIP"])


async def asks(house: House) -> None:
    """A client, five times a second, whatever it is told."""
    waiting: set[asyncio.Task[Any]] = set()

    async def one() -> None:
        with contextlib.suppress(aiohttp.ClientError, asyncio.CancelledError):
            await house.ask("web")

    try:
        while True:
            task = asyncio.create_task(one())
            waiting.add(task)
            task.add_done_callback(waiting.discard)
            await asyncio.sleep(0.2)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def noted(cluster: Cluster) -> set[str]:
    """The replicas at which it is noted that they answer nobody."""
    pods = await cluster.pods()
    return {n for n, p in pods.items() if ANNOTATION_UNANSWERED in (p["metadata"].get("annotations") or {})}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_another_replica_starts_beside_one_that_answers_nobody_and_leaves_when_it_does_again(
    apiserver: ApiServer, tmp_path: Path, how: signal.Signals
) -> None:
    folder, token = tmp_path / "gateway", tmp_path / "token"
    folder.mkdir()
    token.write_text("of-operator")
    async with (
        started(House(folder, overrides=dict(GATEWAY))) as house,
        Cluster(apiserver, script=nobody_serves, settings=TIMES) as cluster,
    ):
        await cluster.start(gateway_url=house.internal, gateway_token_file=str(token))
        await cluster.create(service("web", replicas=2, drainSeconds=1))
        ips = [await address(cluster, f"web-{index}") for index in range(2)]
        processes = [process(ip) for ip in ips]
        asking = asyncio.create_task(asks(house))
        try:
            ends = [
                {"pod": f"web-{index}", "url": f"http://{ip}:9400", "ready": True}
                for index, ip in enumerate(ips)
            ]
            house.api.know(KEY_A, "tenant-a", cluster.namespace)
            await house.publish(route("web", *ends, namespace=cluster.namespace))
            await cluster.until(MODEL_SERVICES, "web", lambda s: s.get("readyReplicas") == 2)
            await asyncio.sleep(3.0)  # both are heard, by the operator and by the gateway
            assert await noted(cluster) == set()

            processes[0].send_signal(how)
            began = time.monotonic()
            await becomes(lambda: noted(cluster), lambda names: names == {"web-0"}, PATIENCE_S)
            decided_s = time.monotonic() - began
            await becomes(cluster.pods, lambda found: "web-2" in found)
            print(
                f"{how.name}: decided after {decided_s:.1f} s, created after {time.monotonic() - began:.1f} s"
            )

            if how is signal.SIGKILL:
                processes[0].wait()
                processes[0] = process(ips[0])
            else:
                processes[0].send_signal(signal.SIGCONT)
            began = time.monotonic()
            await becomes(lambda: noted(cluster), lambda names: not names, PATIENCE_S)
            counts_s = time.monotonic() - began
            await becomes(cluster.pods, lambda found: set(found) == {"web-0", "web-1"}, PATIENCE_S)
            print(
                f"{how.name}: counts again after {counts_s:.1f} s, the other one withdrawn after "
                f"{time.monotonic() - began:.1f} s"
            )
            found = {e["reason"] for e in await cluster.events()}
            assert {"ReplicaUnanswered", "ReplicaAnswers"} <= found
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            for each in processes:
                each.kill()
                each.wait()
