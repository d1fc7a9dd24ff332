"""Joules in the statuses of a job, its tenant and its feed, on the real API server with a simulated node."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import QUICK, Cluster, gang_job
from tests.cluster.kubelet import Script
from tests.cluster.replicas import home, two
from tests.cluster.tenancy import becomes
from tests.cluster.test_operator_kill import Side
from tests.cluster.test_operator_power import KEY, feed, simulator
from tests.cluster.test_operator_standby import stops

from busbar.kube.contracts.power import SIMULATED_LABEL
from busbar.kube.resources import CONFIG_MAPS, NODES, POWER_DOMAINS, TENANTS, TRAINING_JOBS
from busbar.operator.energy.checkpoint import Checkpoint, decode
from busbar.operator.energy.keeper import NAME
from busbar.operator.main import END_S
from busbar.operator.write.kept_object import DATA

MOST_W = 900.0
"""Two boards of 400 W and a host of 100 W."""


def joules(status: dict[str, Any]) -> float:
    return float((status.get("usage") or {}).get("energyJoules") or 0.0)


async def test_a_job_pays_for_its_node_and_a_killed_operator_goes_on_from_the_totals(
    apiserver: ApiServer, tmp_path: Path
) -> None:
    settings = replace(QUICK, power_key=KEY, power_status_s=0.5, usage_period_s=0.5)
    async with Cluster(apiserver, settings=settings, script=lambda pod: Script(run_s=None)) as cluster:
        node, tenant = f"{cluster.namespace}-node-0", f"tenant-{cluster.namespace}"
        async with simulator(tmp_path, node) as (url, _):
            await cluster.client.patch(NODES, node, {"metadata": {"labels": {SIMULATED_LABEL: ""}}})
            await cluster.create(feed("row", 20_000, pool=cluster.namespace))
            clock, began_s = asyncio.get_running_loop().time, asyncio.get_running_loop().time()
            operator = await cluster.start(power_simulator_url=url)
            idle = await cluster.until(POWER_DOMAINS, "row", lambda s: s.get("energyJoules", 0) > 0)
            assert idle["unassignedJoules"] == idle["energyJoules"]
            await cluster.create(gang_job("work", 1))
            await cluster.until(TRAINING_JOBS, "work", lambda s: joules(s) > 0)
            first = await cluster.until(TENANTS, tenant, lambda s: joules(s) > 0)
            shown = operator.metrics.registry.get_sample_value
            assert shown(
                "busbar_energy_joules_total", {"tenant": tenant, "kind": "job", "source": "simulated"}
            )

            await cluster.kill()
            await cluster.start(power_simulator_url=url)
            again = await cluster.until(TENANTS, tenant, lambda s: joules(s) > joules(first))
            whole = await cluster.until(
                POWER_DOMAINS, "row", lambda s: s["energyJoules"] - s["unassignedJoules"] >= joules(again)
            )
            assert whole["energyJoules"] <= MOST_W * (clock() - began_s + 1)


PARTS = ("/tenants/", "/powerdomains/", "/trainingjobs/")


async def test_every_joule_is_written_once_whatever_becomes_of_the_writes(
    apiserver: ApiServer, tmp_path: Path
) -> None:
    """Writes of totals are refused, or done and answered by an error. Once the job holds nothing any more, its tenant
    and the feed agree to the joule, and with the metric."""
    settings = replace(QUICK, power_key=KEY, power_status_s=0.3, usage_period_s=0.3)
    async with Cluster(apiserver, settings=settings, script=lambda pod: Script(run_s=None)) as cluster:
        node, tenant = f"{cluster.namespace}-node-0", f"tenant-{cluster.namespace}"
        async with simulator(tmp_path, node) as (url, _):
            await cluster.client.patch(NODES, node, {"metadata": {"labels": {SIMULATED_LABEL: ""}}})
            await cluster.create(feed("row", 20_000, pool=cluster.namespace))
            operator = await cluster.start(power_simulator_url=url)
            await cluster.create(gang_job("work", 1))
            await cluster.until(TENANTS, tenant, lambda s: joules(s) > 0)
            for done in (True, False):
                await fail_writes(cluster, tenant, done=done)
            await cluster.client.patch(TRAINING_JOBS, "work", {"spec": {"suspend": True}}, cluster.namespace)
            await becomes(cluster.pods, lambda pods: pods == {})

            async def apart() -> float:
                row, of = await cluster.status(POWER_DOMAINS, "row"), await cluster.status(TENANTS, tenant)
                return abs(float(row["energyJoules"]) - float(row["unassignedJoules"]) - joules(of))

            await becomes(apart, lambda found: bool(found < 0.1))
            labels = {"tenant": tenant, "kind": "job", "source": "simulated"}
            shown = operator.metrics.registry.get_sample_value("busbar_energy_joules_total", labels) or 0.0
            assert abs(shown - joules(await cluster.status(TENANTS, tenant))) < 0.1


async def fail_writes(cluster: Cluster, tenant: str, *, done: bool) -> None:
    """Three writes of a status of each kind are answered by an error, after they were done or instead; then all is well
    again, and the tenant's total goes on."""
    hit: set[str] = set()
    give = cluster.proxy.answer_after if done else cluster.proxy.answer
    for part in PARTS:
        give(totals_of(part, hit), 500, "InternalError", times=3)

    async def parts_hit() -> int:
        return len(hit)

    await becomes(parts_hit, lambda found: bool(found == len(PARTS)))
    before = joules(await cluster.status(TENANTS, tenant))
    await cluster.until(TENANTS, tenant, lambda s: joules(s) > before + 50)
    cluster.proxy.forgive()
    await cluster.until(TENANTS, tenant, lambda s: joules(s) > before + 100)


def totals_of(part: str, hit: set[str]) -> Callable[[str, str], bool]:
    """Whether a request writes a status of this kind; those that do are noted."""

    def matches(method: str, path: str) -> bool:
        found = method in ("PUT", "PATCH") and part in path and path.endswith("/status")
        hit.update([part] if found else [])
        return found

    return matches


DEATHS: tuple[tuple[Side, str], ...] = (
    ("before", "/tenants/"),
    ("after", "/tenants/"),
    ("before", "/powerdomains/"),
    ("after", "/powerdomains/"),
    ("before", "/configmaps"),
    ("after", "/configmaps"),
)


async def test_whatever_write_the_operator_dies_at_no_joule_is_lost_and_none_counted_twice(
    apiserver: ApiServer, tmp_path: Path
) -> None:
    """It dies before and after each kind of write that tells of joules, checkpoints among them, and is away for a while.
    Statuses of jobs are hardly ever written, as with 2,000 of them. At the end the feed has what the meters have counted,
    and the tenant has the rest of what is nobody's."""
    settings = replace(
        QUICK, power_key=KEY, power_status_s=0.3, usage_period_s=600.0, energy_checkpoint_s=0.3
    )
    async with Cluster(apiserver, settings=settings, script=lambda pod: Script(run_s=None)) as cluster:
        node, tenant = f"{cluster.namespace}-node-0", f"tenant-{cluster.namespace}"
        async with simulator(tmp_path, node) as (url, _):
            await cluster.client.patch(NODES, node, {"metadata": {"labels": {SIMULATED_LABEL: ""}}})
            await cluster.create(feed("row", 20_000, pool=cluster.namespace))
            row = (await cluster.get(POWER_DOMAINS, "row"))["metadata"]["uid"]
            await cluster.start(power_simulator_url=url)
            await becomes(lambda: counted(cluster, row), lambda found: found is not None)
            began = await counted(cluster, row)
            cluster.proxy.kill_next("before", "/trainingjobs/")
            await cluster.create(gang_job("work", 1))
            await died(cluster)
            cluster.proxy.kill_next("after", "/trainingjobs/")
            await cluster.start(power_simulator_url=url)
            await died(cluster)
            await cluster.start(power_simulator_url=url)
            for weight, (side, part) in enumerate(DEATHS, 2):
                await becomes(lambda: counted(cluster, row), lambda found: found is not None)
                cluster.proxy.kill_next(side, part)
                await cluster.client.patch(TENANTS, tenant, {"spec": {"weight": weight}})
                await died(cluster)
                await cluster.start(power_simulator_url=url)
            await cluster.client.patch(TRAINING_JOBS, "work", {"spec": {"suspend": True}}, cluster.namespace)
            await becomes(cluster.pods, lambda pods: pods == {})
            await becomes(lambda: counted(cluster, row), lambda found: found is not None)

            async def apart() -> float:
                of = await cluster.status(TENANTS, tenant)
                told = await cluster.status(POWER_DOMAINS, "row")
                return abs(float(told["energyJoules"]) - float(told["unassignedJoules"]) - joules(of))

            await becomes(apart, lambda found: bool(found < 0.1))
            job, of = await cluster.status(TRAINING_JOBS, "work"), await cluster.status(TENANTS, tenant)
            assert joules(of) - 3 * MOST_W < joules(job) <= joules(of) + 0.1  # the last seconds of its pod
            assert await counted(cluster, row) == pytest.approx(began, abs=0.5)


async def test_a_stop_writes_how_far_all_is_counted_and_the_next_operator_goes_on_from_there(
    apiserver: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUSBAR_POWER_KEY_FILE", str(tmp_path / "power-key"))
    monkeypatch.setenv("BUSBAR_OPERATOR_POWER_STATUS_S", "0.5")
    monkeypatch.setenv("BUSBAR_OPERATOR_ENERGY_CHECKPOINT_S", "600")

    async def kept(cluster: Cluster) -> Checkpoint | None:
        found, _ = await cluster.client.list(CONFIG_MAPS, home(cluster))
        data = [each["binaryData"][DATA] for each in found if each["metadata"]["name"] == NAME]
        return decode(base64.b64decode(data[0])) if data else None

    async with Cluster(apiserver) as cluster:
        node = f"{cluster.namespace}-node-0"
        async with simulator(tmp_path, node) as (url, _):
            monkeypatch.setenv("BUSBAR_OPERATOR_POWER_SIMULATOR_URL", url)
            await cluster.client.patch(NODES, node, {"metadata": {"labels": {SIMULATED_LABEL: ""}}})
            row = await cluster.create(feed("row", 20_000, pool=cluster.namespace))
            began_s = time.monotonic()
            async with two(cluster, tmp_path, lease_s=20.0) as (first, second):
                await cluster.until(POWER_DOMAINS, "row", lambda s: s.get("energyJoules", 0) > 0)
                assert await kept(cluster) is None, "a period is ten minutes"
                await stops(first)
                told = (await cluster.status(POWER_DOMAINS, "row"))["energyJoules"]
                cut = await kept(cluster)
                assert cut is not None
                assert time.time() - cut.at_s < END_S
                assert (set(cut.nodes), cut.nodes[node].counted_ago_s < 5) == ({node}, True)
                assert cut.totals[row["metadata"]["uid"]] >= told
                await second.to_lead()
                whole = await cluster.until(
                    POWER_DOMAINS, "row", lambda s: s["energyJoules"] > cut.totals[row["metadata"]["uid"]]
                )
                assert whole["energyJoules"] <= MOST_W * (time.monotonic() - began_s + 1)


async def died(cluster: Cluster) -> None:
    """The operator has died, and has been away for a moment."""
    await asyncio.wait_for(cluster.proxy.killed.wait(), 30)
    await cluster.kill()
    await asyncio.sleep(0.4)
    cluster.proxy.revive()


async def counted(cluster: Cluster, row: str) -> float | None:
    """What the meters had counted when the feed's total began, by the operator's ledger: always the same, if nothing is
    lost or doubled. None before it has heard the node."""
    assert cluster.operator is not None
    power, ledger = cluster.operator.handlers.power, cluster.operator.handlers.energy
    if not power.gatherer.readings:
        return None
    cut = ledger.checkpoint(time.monotonic())
    if not cut.nodes or row not in cut.totals or next(iter(cut.nodes.values())).read_ago_s > 3:
        return None
    return sum(m.joules for n in cut.nodes.values() for m in n.meters.values()) - cut.totals[row]
