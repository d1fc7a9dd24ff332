"""The demo's chapter on power: two jobs on a feed that does not carry both at full power.

The second one starts at once with its boards limited, and is lifted without a restart when the first one ends. Servers,
boards and watts are simulated; the operator, its leases and the agent that takes them are the product's own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from examples.demo_parts import NAMESPACE, Cluster, DemoError, Teller

HERE = Path(__file__).resolve().parent
FEED = HERE / "power-feed.yaml"
FEED_JOBS = ("feed-first", "feed-second")
FEED_SPEEDS = ((100, 3_800_000, 400), (50, 3_040_000, 200))
"""Per cent of the boards' limit, tokens per second on eight A100, watts of one board: invented, near the formula's speed of
this small model. One that is far from it would move the estimates of the class on all other types, and what was measured on
the CPUs would be taken for false."""


def await_status(
    cluster: Cluster,
    teller: Teller,
    name: str,
    doing: str,
    holds: Callable[[dict[str, Any]], bool],
    limit_s: float = 90,
) -> dict[str, Any]:
    """The status of a training job as soon as it is as wanted."""
    deadline = time.monotonic() + limit_s
    while True:
        status = cluster.status("trainingjob", name)
        if holds(status):
            return status
        if time.monotonic() > deadline:
            said = f"{status.get('phase')}: {status.get('message', '')}; {status.get('admission')}"
            raise DemoError(f"{name}: {doing} took longer than {limit_s:.0f} s ({said})")
        teller.tick(f"{name}: {doing}")
        time.sleep(1)


def feed_job(cluster: Cluster, name: str) -> None:
    """A job on eight A100 of the feed, a pod for each. Its pods are simulated, so no step is ever trained."""
    objects = yaml.safe_load_all((HERE / "train-python-stdlib.yaml").read_text())
    job = next(o for o in objects if o and o["kind"] == "TrainingJob")
    job["metadata"] = {"name": name, "namespace": NAMESPACE}
    batch = {"sequences": 8, "microBatch": 1}
    engine = {**job["spec"]["engine"], "mode": "resident", "steps": 100_000, "batch": batch}
    job["spec"] = {
        "engine": {key: value for key, value in engine.items() if key not in ("deviceMemory", "evaluation")},
        "shape": {"minPods": 8, "maxPods": 8, "memory": "2Gi"},
        "accelerators": ["A100"],
        "output": {"uri": f"pvc://feed/{name}"},
    }
    cluster.kube("apply", "-f", "-", stdin=json.dumps(job))


def state_speeds(cluster: Cluster, workload_class: str) -> None:
    """What an administrator would have measured: how fast the class is, and what it draws, under each limit."""
    cells = [
        {
            "accelerator": "A100",
            "accelerators": 8,
            "powerCapPercent": percent,
            "tokensPerSecond": speed,
            "watts": watts,
        }
        for percent, speed, watts in FEED_SPEEDS
    ]
    known = json.loads(cluster.kube("get", "performanceprofiles", "-o", "json"))["items"]
    name = next(
        (p["metadata"]["name"] for p in known if p["spec"]["workloadClass"] == workload_class), "demo-feed"
    )
    profile = {
        "apiVersion": "busbar.dev/v1alpha1",
        "kind": "PerformanceProfile",
        "metadata": {"name": name},
        "spec": {"workloadClass": workload_class, "cells": cells},
    }
    cluster.kube("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(profile))


def share_a_feed(cluster: Cluster, teller: Teller) -> str:
    """Two jobs on a feed that carries one and a half; returns what happened, for the story."""
    forget_feed(cluster)
    cluster.kube("apply", "-f", str(FEED))
    ready = '{.status.boardsLimited}{" "}{.status.drawWatts}'
    deadline = time.monotonic() + 90
    while not cluster.kube("get", "powerdomain", "demo-rack", "-o", f"jsonpath={ready}").startswith("true "):
        if time.monotonic() > deadline:
            raise DemoError("the boards of the feed demo-rack were not limited within 90 s")
        teller.tick("waiting until the boards of the feed are held to their leases")
        time.sleep(1)
    first, second = FEED_JOBS
    feed_job(cluster, first)
    running = await_status(cluster, teller, first, "starting", lambda s: s.get("phase") == "Running")
    if running["admission"].get("powerCapPercent"):
        raise DemoError(f"{first} was limited although its feed had the watts: {running['admission']}")
    state_speeds(cluster, running["workloadClass"])
    feed_job(cluster, second)
    capped = await_status(cluster, teller, second, "starting", lambda s: s.get("phase") == "Running")
    admission = capped["admission"]
    if admission.get("powerCapPercent") != FEED_SPEEDS[1][0]:
        raise DemoError(f"{second} did not start under the limit that its feed carries: {admission}")
    teller.say(f"{second} started in place of waiting: {admission['reason']}")
    used = await_status(
        cluster, teller, first, "metering", lambda s: bool((s.get("usage") or {}).get("energyJoules"))
    )
    rack = json.loads(cluster.kube("get", "powerdomain", "demo-rack", "-o", "json"))
    draw, budget = rack["status"].get("drawWatts") or 0.0, rack["spec"]["budgetWatts"]
    over = rack["status"].get("lastOverrun")
    if over or draw > budget:
        raise DemoError(f"the feed drew {draw:.0f} W of {budget} W; over its budget: {over}")
    cluster.kube("-n", NAMESPACE, "delete", "trainingjob", first, "--wait=true")
    lifted = await_status(
        cluster,
        teller,
        second,
        "being lifted",
        lambda s: "powerCapPercent" not in (s.get("admission") or {"powerCapPercent": 0}),
    )
    if lifted["attempt"] != capped["attempt"] or lifted["admission"]["id"] != admission["id"]:
        raise DemoError(f"{second} was restarted to be lifted")
    teller.say(f"{second} runs on without a limit, and without a restart")
    joules = [
        float(((status.get("usage") or {}).get("energyJoules")) or 0.0)
        for status in (used, cluster.status("trainingjob", second))
    ]
    forget_feed(cluster)
    return (
        f"On a feed for {budget} W the second of two jobs started at {admission['powerCapPercent']} % of its boards'"
        f" limit;\n  the feed drew {draw:.0f} W, the tenant used {sum(joules) / 3.6e6:.3f} kWh, and the limit went"
        " without a restart."
    )


def forget_feed(cluster: Cluster) -> None:
    """Remove the jobs and the feed."""
    cluster.kube("-n", NAMESPACE, "delete", "trainingjob", *FEED_JOBS, "--ignore-not-found", "--wait=true")
    cluster.kube("delete", "-f", str(FEED), "--ignore-not-found", "--wait=false")
