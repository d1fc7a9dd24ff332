"""`guaranteedKv` and `maxKv` of a ModelService, from its manifest to the blocks in the engine's cache."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.operator.builders import RENDERING, SETTINGS, placement, pool, replica, service
from tests.serving.engines import greedy_params, tokens_of
from tests.serving.inside import serving_inside
from tests.serving.models import greedy
from tests.serving.processes import OpenStream
from tests.serving.processes import Service as Caller
from tests.serving.test_sleep_by_operator import BEARERS, BODY, LOOPBACK

from busbar.kube.contracts.bearers import Role
from busbar.kube.contracts.workload import ServingStatus
from busbar.kube.types import ModelService
from busbar.operator.metrics import Metrics
from busbar.operator.pods import replica_pods
from busbar.operator.pods.prober import Prober
from busbar.operator.serving.reconcile import reconcile
from busbar.operator.serving.view import ModelPlace, ServiceView
from busbar.operator.write.actions import PostToPod
from busbar.workloads.serving.delta import Delta
from busbar.workloads.serving.errors import BadRequest
from busbar.workloads.serving.fairness import Owner
from busbar.workloads.serving.loader import Loaded, load
from busbar.workloads.serving.pod import from_environment
from busbar.workloads.serving.report import tenant_blocks
from busbar.workloads.serving.settings import EngineSettings

BLOCK = 16 * 2 * 2 * 2 * 16 * 4
"""Bytes of a block of 16 tokens of the tiny Llama: layers, k and v, heads, numbers, float32."""
SHARED = {"tenants": [{"name": "guest", "guaranteedKv": 0.5}, {"name": "sales", "maxKv": 0.25}]}


def started(of: ModelService, model: Path, bearers: Path) -> Loaded:
    """The engine as the operator's pod starts it: its environment and arguments, with this machine's folders."""
    body = replica_pods.service_pod(
        of, index=0, model_uri="pvc://claim/model", placement=placement(), pool=pool(), rendering=RENDERING
    )
    container = body["spec"]["containers"][0]
    env = {row["name"]: row["value"] for row in container["env"] if "value" in row}
    for role in Role:
        (bearers / role).write_text(f"secret-{role}")
    env |= {"BUSBAR_MODEL_DIR": str(model), "BUSBAR_BEARERS_DIR": str(bearers)}
    settings = from_environment(env, container["args"]).engine
    return load(replace(settings, threads=1), "web", lambda: 0.0)


def test_a_guest_gets_its_guaranteed_blocks_from_a_full_cache(
    llama: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, model = llama
    of = service(access=SHARED, kvCacheMemory=str(41 * BLOCK), maxModelLen=320, args=["--block-tokens", "16"])
    core = started(of, folder, tmp_path).core
    assert core.scheduler.pool.total == 40
    shares = {row.tenant: (row.guaranteed, row.most) for row in tenant_blocks(core.scheduler)}
    assert shares == {"guest": (20, 40), "sales": (0, 10)}

    own = [[n + 1, *range(2, 100)] for n in range(8)]
    guest = [[n + 101, *range(20, 150)] for n in range(2)]
    found: dict[str, list[Delta]] = {}

    def step() -> None:
        for delta in core.step():
            found.setdefault(delta.request_id, []).append(delta)

    for n, prompt in enumerate(own):
        core.submit(f"own{n}", prompt, greedy_params(40), 0.0, Owner(tenant="team"))
    while core.scheduler.pool.free > 8:
        step()
    for n, prompt in enumerate(guest):
        core.submit(f"guest{n}", prompt, greedy_params(20), 1.0, Owner(tenant="guest"))
    most = 0
    while not core.idle:
        step()
        most = max(most, {row.tenant: row.held for row in tenant_blocks(core.scheduler)}["guest"])
    assert most >= 18  # two requests of 131 and 20 tokens, beside an owner that had filled the cache
    assert core.scheduler.preemption_count > 0
    for name, prompts, length in (("own", own, 40), ("guest", guest, 20)):
        for n, prompt in enumerate(prompts):
            assert tokens_of(found[f"{name}{n}"]) == greedy(model, prompt, length)

    with pytest.raises(BadRequest, match="under your tenant's KV quota the maximum context length is 160"):
        core.context_limits.check(150, 11, "sales")


async def test_the_operator_changes_shares_while_a_stream_runs(deep: Path) -> None:
    settings = EngineSettings(deep, block_tokens=16, threads=1)
    with serving_inside(settings, "tiny", bearers=BEARERS) as server:
        pod = replica(0, ip="127.0.0.1", port=urlsplit(server.url).port or 0)
        prober = Prober(SETTINGS, Metrics(), lambda: [pod], lambda name: LOOPBACK, lambda pod: None)

        async def reconciled(access: dict[str, Any] | None) -> tuple[list[str], ServingStatus]:
            await prober.poll_once()
            view = ServiceView(
                service(replicas=1, minReplicas=0, access=access), (pod,), datetime.now(UTC), SETTINGS, RENDERING,
                ModelPlace(uri="pvc://claim/model"), readings=prober.serving,
            )  # fmt: skip
            posts = [each for each in reconcile(view).actions if isinstance(each, PostToPod)]
            for post in posts:
                prober.post(post, pod)
            await asyncio.gather(*prober._tasks)
            return [post.path for post in posts], prober.serving[pod.uid]

        try:
            body = {**BODY, "max_tokens": 400, "stream": True}
            with OpenStream(Caller(server.url, BEARERS[Role.INFER]), body) as stream:
                assert stream.line().startswith(b"data: ")
                posted, status = await reconciled(SHARED)
                assert posted == ["/kv_shares"]
                total = status.kv_blocks_total
                assert {row.tenant: (row.guaranteed, row.most) for row in status.kv_tenants} == {
                    "guest": (total // 2, total),
                    "sales": (0, total // 4),
                }
                assert (await reconciled(SHARED))[0] == []
                rest = await asyncio.to_thread(stream.answer.read)
            assert b'"finish_reason":"length","token_index":400' in rest
            too_little = {"tenants": [{"name": "sales", "maxKv": 1e-9}]}
            posted, status = await reconciled(too_little)
            assert "less than one block" in status.kv_shares_refused
            assert len(status.kv_tenants) == 2
            assert (await reconciled(too_little))[0] == []  # it is not asked again
            assert (await reconciled(None))[1].kv_tenants == []
        finally:
            await prober.close()
