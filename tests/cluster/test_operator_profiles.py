"""PerformanceProfiles on the real API server, with the chart's rights: created, updated, kept, and marked when their
values are rejected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import QUICK, Cluster, engine_job, with_the_charts_rights
from tests.cluster.kubelet import Script, image_id, said
from tests.cluster.tenancy import becomes

from busbar.kube.client import Object
from busbar.kube.resources import PERFORMANCE_PROFILES, TRAINING_JOBS
from busbar.scheduler import PerformanceTable

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 512,
}
SPEED = 1000.0


def job(name: str, **spec: Any) -> Object:
    made = engine_job(name, **spec)
    made["spec"]["engine"]["model"]["config"] = CONFIG
    return made


def spoke(speed: float = SPEED) -> str:
    return said(step=10, totalSteps=10, loss=1.5, tokens=1000, tokensPerSecond=speed)


def training(seconds: float, speed: float = SPEED) -> dict[str, Any]:
    return {
        "kind": "training",
        "phase": "Training",
        "step": int(seconds * 10),
        "totalSteps": 100_000,
        "loss": 2.0,
        "tokens": int(seconds * speed),
        "tokensPerSecond": speed,
        "report": {
            "class": "x",
            "accelerator": "cpu",
            "tokensPerSecond": speed,
            "plannedDeviceBytes": 6 << 20,
            "peakDeviceBytes": 4 << 20,
        },
    }


async def the_profile(cluster: Cluster) -> Object:
    """Waits for the only profile and returns it."""

    async def profiles() -> list[Object]:
        return (await cluster.client.list(PERFORMANCE_PROFILES))[0]

    [found] = await becomes(profiles, lambda there: there != [])
    return cast(Object, found)


def table(cluster: Cluster) -> PerformanceTable:
    assert cluster.operator is not None
    return cluster.operator.snapshot().table


async def becomes_table(cluster: Cluster, holds: Callable[[PerformanceTable], bool]) -> None:
    async def now() -> PerformanceTable:
        return table(cluster)

    await becomes(now, holds)


async def gone(cluster: Cluster, name: str) -> None:
    async def names() -> list[str]:
        found, _ = await cluster.client.list(TRAINING_JOBS, cluster.namespace)
        return [o["metadata"]["name"] for o in found]

    await becomes(names, lambda there: name not in there)


async def test_what_a_job_measured_outlives_it_and_the_operator(platform: ApiServer) -> None:
    async with with_the_charts_rights(
        platform, script=lambda pod: Script(run_s=0.3, message=spoke())
    ) as cluster:
        await cluster.start()
        await cluster.create(job("one", ttlSecondsAfterFinished=0))
        await gone(cluster, "one")
        profile = await the_profile(cluster)
        name, status = profile["metadata"]["name"], profile["status"]
        assert profile["spec"]["workloadClass"].lower() == name
        [evidence] = status["evidence"]
        assert (evidence["accelerator"], evidence["reports"], evidence["runs"]) == ("cpu", 1, 1)
        text = str(profile["status"])
        assert f"tenant-{cluster.namespace}" not in text
        await cluster.until(
            PERFORMANCE_PROFILES,
            name,
            lambda s: any(c["source"] == "Measured" and c["reports"] == 1 for c in s.get("cells") or ()),
        )
        await cluster.kill()
        await cluster.start()
        await cluster.create(job("two", suspend=True))
        told = await cluster.until(TRAINING_JOBS, "two", lambda s: s.get("phase") == "Suspended")
        assert told["workloadClass"] == profile["spec"]["workloadClass"]
        [record] = table(cluster).records
        assert (record.tenant, record.runs) == (f"tenant-{cluster.namespace}", 1)
        [cell] = [c for c in table(cluster).learned if c.mode == "resident"]
        assert cell.samples == 1


async def test_an_attempt_that_is_stopped_and_a_running_job_that_is_deleted_are_kept(
    apiserver: ApiServer,
) -> None:
    async with Cluster(apiserver, script=lambda pod: Script(status=training)) as cluster:
        await cluster.start()
        await cluster.create(job("stopped"))

        def runs(status: dict[str, Any]) -> bool:
            return bool((status.get("progress") or {}).get("tokensPerSecond"))

        running = await cluster.until(TRAINING_JOBS, "stopped", runs)
        assert (running["memory"]["plannedDeviceMib"], running["memory"]["peakDeviceMib"]) == (6, 4)
        profile = await the_profile(cluster)
        patch = {"spec": {"suspend": True}}
        await cluster.client.patch(TRAINING_JOBS, "stopped", patch, cluster.namespace)
        await cluster.until(
            PERFORMANCE_PROFILES,
            profile["metadata"]["name"],
            lambda s: sum(e["runs"] for e in s.get("evidence") or ()) == 1,
        )
        await cluster.create(job("deleted"))
        await cluster.until(TRAINING_JOBS, "deleted", runs)
        await cluster.client.delete(TRAINING_JOBS, "deleted", cluster.namespace)
        kept = await cluster.until(
            PERFORMANCE_PROFILES,
            profile["metadata"]["name"],
            lambda s: sum(e["runs"] for e in s.get("evidence") or ()) == 2,
        )
        assert kept["held"]["measured"] + kept["held"]["unmeasured"] > 0
        cells = [c for c in kept["cells"] if "measuredMemoryGib" in c]
        assert [c["measuredMemoryGib"] for c in cells] == [4 / 1024]


async def test_a_speed_is_kept_for_all_only_under_a_digest_that_is_accepted(platform: ApiServer) -> None:
    def runs(pod: Object) -> Script:
        return Script(run_s=0.3, message=spoke())

    digest = image_id(QUICK.workloads_image).rpartition("@")[2]
    async with with_the_charts_rights(platform, script=runs) as cluster:
        cluster.settings = replace(cluster.settings, workloads_digests=(f"sha256:{'0' * 64}",))
        await cluster.start()
        await cluster.create(job("moved"))
        ended = await cluster.until(TRAINING_JOBS, "moved", lambda s: s.get("phase") == "Succeeded")
        assert ended["admission"]["image"] == {
            "verified": False,
            "digest": digest,
            "message": "The image that runs has a digest that is not accepted.",
        }
        profile = await the_profile(cluster)
        name = profile["metadata"]["name"]
        looked = await cluster.until(PERFORMANCE_PROFILES, name, lambda s: "held" in s)
        assert not looked.get("evidence")
        await becomes_table(
            cluster, lambda t: {c.tenant for c in t.learned} == {f"tenant-{cluster.namespace}"}
        )
        await cluster.kill()
        cluster.settings = replace(cluster.settings, workloads_digests=(digest,))
        await cluster.start()
        await cluster.create(job("checked", ttlSecondsAfterFinished=0))
        await gone(cluster, "checked")
        kept = await cluster.until(PERFORMANCE_PROFILES, name, lambda s: bool(s.get("evidence")))
        [evidence] = kept["evidence"]
        assert (evidence["reports"], evidence["runs"]) == (1, 1)


async def test_a_speed_that_cannot_be_right_is_shown_at_the_job_and_in_the_profile(
    apiserver: ApiServer,
) -> None:
    script = Script(status=lambda seconds: training(seconds, 1e12))
    async with Cluster(apiserver, script=lambda pod: script) as cluster:
        await cluster.start()
        await cluster.create(job("liar"))
        profile = await the_profile(cluster)
        await cluster.until(
            PERFORMANCE_PROFILES, profile["metadata"]["name"], lambda s: s.get("quarantined", 0) >= 1
        )
        await cluster.create(job("next", suspend=True))  # a round

        async def quarantined() -> list[Object]:
            return [e for e in await cluster.events() if e["reason"] == "SpeedQuarantined"]

        told = await becomes(quarantined, lambda events: events != [])
        assert told[0]["involvedObject"]["name"] == "liar"
        assert told[0]["type"] == "Warning"
        assert "far from what is known of jobs like it" in told[0]["message"]


async def test_a_stated_speed_reaches_the_plan_without_a_restart(apiserver: ApiServer) -> None:
    async with Cluster(apiserver, script=lambda pod: Script(status=training)) as cluster:
        await cluster.start()
        await cluster.create(job("one", suspend=True))
        status = await cluster.until(TRAINING_JOBS, "one", lambda s: bool(s.get("workloadClass")))
        await cluster.create(
            {
                "kind": "PerformanceProfile",
                "metadata": {"name": "ours"},
                "spec": {
                    "workloadClass": status["workloadClass"],
                    "cells": [{"accelerator": "cpu", "accelerators": 1, "tokensPerSecond": 0, "note": "no"}],
                },
            }
        )
        patch = {"spec": {"suspend": False}}
        await cluster.until(PERFORMANCE_PROFILES, "ours", lambda s: bool(s.get("cells")))
        await cluster.client.patch(TRAINING_JOBS, "one", patch, cluster.namespace)
        runs = await cluster.until(TRAINING_JOBS, "one", lambda s: s.get("phase") == "Running")
        assert runs["admission"]["mode"] == "optimizer-offload"  # by the formula, resident would be faster
