"""`guaranteedKv` and `maxKv` of a ModelService, from its manifest to the blocks in the engine's cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.operator.builders import RENDERING, placement, pool, service
from tests.serving.engines import greedy_params, tokens_of
from tests.serving.models import greedy

from busbar.kube.contracts.bearers import Role
from busbar.kube.types import ModelService
from busbar.operator.pods import manifests
from busbar.workloads.serving.delta import Delta
from busbar.workloads.serving.errors import BadRequest
from busbar.workloads.serving.fairness import Owner
from busbar.workloads.serving.loader import Loaded, load
from busbar.workloads.serving.pod import from_environment
from busbar.workloads.serving.report import tenant_blocks

BLOCK = 16 * 2 * 2 * 2 * 16 * 4
"""Bytes of a block of 16 tokens of the tiny Llama: layers, k and v, heads, numbers, float32."""
SHARED = {"tenants": [{"name": "guest", "guaranteedKv": 0.5}, {"name": "sales", "maxKv": 0.25}]}


def started(of: ModelService, model: Path, bearers: Path) -> Loaded:
    """The engine as the operator's pod starts it: its environment and arguments, with this machine's folders."""
    body = manifests.service_pod(
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
        core.admissible(150, 11, "sales")
