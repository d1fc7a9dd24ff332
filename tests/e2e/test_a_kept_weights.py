"""A replica whose engine is killed serves again in its pod, from weights that were kept, and its stream goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from tests.e2e.instance import ROOT, Cluster, small_job

pytestmark = pytest.mark.node

MODEL, SERVICE = "python-stdlib", "kept"
TOKENS = 400


def apply_service(cluster: Cluster) -> None:
    """One replica that keeps its weights, of the demo's model; where this file runs alone, of another one."""
    model = MODEL
    if cluster.is_gone("trainingjob", MODEL):
        model = "small-model"
        job = small_job(model, steps=20)
        job["spec"]["engine"]["model"]["config"]["max_position_embeddings"] = 512
        cluster.submit(job)
    example = yaml.safe_load((ROOT / "examples" / "serve-python-stdlib.yaml").read_text())
    example["metadata"]["name"] = SERVICE
    # In a fixed order, a prompt that is computed again behind what was answered gives the same tokens, bit for bit.
    own = {"minReplicas": 1, "maxReplicas": 1, "args": ["--keep-weights", "--deterministic"]}
    example["spec"] |= {**own, "model": {"trainingJob": model}}
    cluster.kube("-n", "demo", "apply", "-f", "-", stdin=json.dumps(example))


def pod_of(cluster: Cluster) -> dict[str, Any]:
    [found] = cluster.get("-n", "demo", "pods", "-l", f"busbar.dev/job={SERVICE}")["items"]
    [container] = found["status"]["containerStatuses"]
    return {**container, "name": found["metadata"]["name"], "uid": found["metadata"]["uid"]}


def processes_of(pod: str) -> Iterator[tuple[int, int]]:
    """Those of a pod on this machine, each with its parent."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"HOSTNAME={pod}".encode() in (process / "environ").read_bytes().split(b"\0"):
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                yield int(process.name), int(fields[1])


def engine_of(pod: str) -> int:
    """The supervisor starts the front, and the front the engine, which starts nobody."""
    found = dict(processes_of(pod))
    [engine] = found.keys() - found.values()
    return engine


def client_of(cluster: Cluster) -> openai.OpenAI:
    token = cluster.kube(
        "-n", "busbar-system", "exec", "deploy/busbar-api", "--", "busbar-api", "token", "create",
        "--subject", "demo-user", "--role", "user", "--scopes", "inference", "--tenant", "demo",
    ).strip()  # fmt: skip
    return openai.OpenAI(base_url=f"{cluster.gateway_url}/v1", api_key=token, max_retries=0, timeout=60)


def stream(client: openai.OpenAI) -> Iterator[str]:
    """The pieces of an answer, and the number of its tokens at the end."""
    for chunk in client.completions.create(
        model=SERVICE,
        prompt="def read(self, size=-1):\n",
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    ):
        if chunk.choices:
            yield chunk.choices[0].text
        if chunk.usage is not None:
            yield f" [{chunk.usage.completion_tokens}]"


def test_a_killed_engine_serves_again_in_its_pod_and_no_stream_is_lost(cluster: Cluster) -> None:
    apply_service(cluster)
    cluster.wait("a replica", lambda: cluster.status("modelservice", SERVICE).get("readyReplicas") == 1, 180)
    client, before = client_of(cluster), pod_of(cluster)
    undisturbed = "".join(stream(client))
    assert undisturbed.endswith(f" [{TOKENS}]")

    engine, pieces = engine_of(before["name"]), stream(client)
    told = [next(pieces) for _ in range(5)]
    os.kill(engine, signal.SIGKILL)
    pause_s, last = 0.0, time.monotonic()
    for piece in pieces:
        told.append(piece)
        pause_s, last = max(pause_s, time.monotonic() - last), time.monotonic()
    assert "".join(told) == undisturbed
    assert pause_s > 0.1, "the answer had ended before the kill"
    print(f"the stream paused for {pause_s:.1f} s")

    [row] = cluster.wait("the row", lambda: cluster.status("modelservice", SERVICE).get("crashes"), 20)
    assert (row["replica"], row["restarts"]) == (before["name"], 1)
    assert "ended by signal 9 (SIGKILL)" in row["cause"]
    after = pod_of(cluster)
    assert (after["uid"], after["restartCount"], after["containerID"]) == (
        before["uid"], 0, before["containerID"],
    )  # fmt: skip
    log = cluster.kube("-n", "demo", "logs", before["name"])
    assert log.count("weights are kept in") == 1
    assert log.count("weights are mapped from") == 1
    cluster.kube("-n", "demo", "delete", "modelservice", SERVICE, "--wait=false")
