"""`busbar backup` and `busbar restore` against a real API server with the whole chart, the API and the operator.

The drill: jobs of every state, tokens and usage; a backup; everything deleted and an empty database; a restore.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
import zipfile
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.api.conftest import SECRET, SERVICE, apps_of, sqlite_template
from tests.api.memory_kube import MemoryKube
from tests.api.scripted_operator import ScriptedOperator
from tests.cli.conftest import Done, run_busbar
from tests.cli.loopback import listening
from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster, engine_job, gang_job, with_the_charts_rights
from tests.cluster.kubelet import Script, said
from tests.cluster.rights import SYSTEM

from busbar.api import services as wiring
from busbar.api.access.identity import CallerRole
from busbar.api.kubernetes.client import Kubernetes
from busbar.api.records.compute import AMOUNTS, ComputeTotals
from busbar.api.records.usage_ledger import By
from busbar.api.services import Services
from busbar.api.settings import Settings
from busbar.cli.client import Client
from busbar.cli.errors import BusbarError
from busbar.cli.restored_objects import RESTORING
from busbar.cli.restoring import Restoring
from busbar.kube.client import Object
from busbar.kube.contracts.usage import UsageRecord
from busbar.kube.login import Login
from busbar.kube.resources import (
    ACCELERATOR_POOLS,
    MODEL_SERVICES,
    PERFORMANCE_PROFILES,
    SECRETS,
    TENANTS,
    TRAINING_JOBS,
)

__all__ = ["sqlite_template"]
JOBS = ("ended", "runs", "held")
START = datetime(2026, 1, 1, tzinfo=UTC)


def ends_soon(pod: Object) -> Script:
    """Only the job `ended` comes to an end."""
    message = said(step=10, totalSteps=10, loss=1.5, tokens=1000)
    return Script(run_s=0.3, message=message) if pod["metadata"]["name"].startswith("ended-") else Script()


def is_in(phase: str) -> Callable[[dict[str, Any]], bool]:
    return lambda status: status.get("phase") == phase


class Drill:
    """A cluster, the file, and one API at a time."""

    def __init__(self, cluster: Cluster, platform: ApiServer, template: Path, folder: Path) -> None:
        self.cluster = cluster
        self.platform = platform
        self.folder = folder
        self.file = folder / "backup.zip"
        self._template = template
        self._monkeypatch = pytest.MonkeyPatch()

    @contextlib.asynccontextmanager
    async def api(self, name: str) -> AsyncIterator[Services]:
        """The API on a new database; the commands that follow go to it as an admin."""
        database = self.folder / f"{name}.db"
        shutil.copy(self._template, database)
        login = Login(
            server=self.platform.url,
            ca_pem=self.platform.ca_file.read_text(),
            token=self.platform.service_account_token(SYSTEM, "busbar-api"),
        )
        settings = Settings(session_secret=SECRET, database_url=f"sqlite+aiosqlite:///{database}")
        built = wiring.build(settings, Kubernetes(login), ScriptedOperator(MemoryKube()))
        tasks = await built.start()
        await built.store.synced(60)
        token, _ = await built.tokens.create("root", created_by="test", role=CallerRole.ADMIN)
        async with listening(apps_of(built)[0]) as url:
            with self._monkeypatch.context() as environment:
                environment.setenv("BUSBAR_SERVER", url)
                environment.setenv("BUSBAR_TOKEN", token)
                environment.setenv("XDG_CONFIG_HOME", str(self.folder))
                environment.setenv("KUBECONFIG", str(self.platform.kubeconfig()))
                yield built
        await built.stop(tasks)

    async def busbar(self, *arguments: str) -> Done:
        return await asyncio.to_thread(run_busbar, *arguments)

    async def jobs(self) -> dict[str, Object]:
        return {name: await self.cluster.get(TRAINING_JOBS, name) for name in JOBS}

    async def profiles(self) -> set[str]:
        items, _ = await self.cluster.client.list(PERFORMANCE_PROFILES)
        return {item["metadata"]["name"] for item in items}

    async def work(self, services: Services) -> None:
        """Three jobs and a service, made through REST, so with an owner: one job has ended, one runs, one is suspended."""
        client = Client(os.environ["BUSBAR_SERVER"], os.environ["BUSBAR_TOKEN"])
        for manifest in (engine_job("ended"), gang_job("runs", 1), gang_job("held", 1, suspend=True)):
            document = {"apiVersion": TRAINING_JOBS.api_version, **manifest}
            document["metadata"] = {**document["metadata"], "labels": {"team": "search"}}
            await asyncio.to_thread(client.create, document, self.cluster.namespace)
        await asyncio.to_thread(client.create, SERVICE, self.cluster.namespace)
        client.close()
        for name, phase in (("ended", "Succeeded"), ("runs", "Running"), ("held", "Suspended")):
            await self.cluster.until(TRAINING_JOBS, name, is_in(phase))
        record = UsageRecord(
            seq=1, key_id="k", tenant="t", namespace="n", service="chat", model="chat", prompt_tokens=10,
            completion_tokens=20, request_id="r", finished_at=datetime.now(UTC) - timedelta(minutes=5),
        )  # fmt: skip
        await services.usage_ledger.accept("g1", [record])

    async def purge(self) -> None:
        """Delete every object of ours, and the pods."""
        admin = self.platform.admin
        tenant = f"tenant-{self.cluster.namespace}"
        await self.cluster.client.patch(TENANTS, tenant, {"spec": {"onDelete": "stop"}})
        for name in JOBS:
            await self.cluster.client.delete(TRAINING_JOBS, name, self.cluster.namespace)
        await self.cluster.client.delete(MODEL_SERVICES, "chat", self.cluster.namespace)
        for profile in await self.profiles():
            await self.cluster.client.delete(PERFORMANCE_PROFILES, profile)
        await self.cluster.client.delete(TENANTS, tenant)
        await self.cluster.client.delete(ACCELERATOR_POOLS, self.cluster.namespace)
        for name in await self.cluster.pods():
            path = f"/api/v1/namespaces/{self.cluster.namespace}/pods/{name}"
            admin.request("DELETE", path, {"gracePeriodSeconds": 0}).expect()
        assert await self.cluster.pods() == {}


@contextlib.asynccontextmanager
async def drill(platform: ApiServer, template: Path, folder: Path) -> AsyncIterator[Drill]:
    async with with_the_charts_rights(platform, script=ends_soon) as cluster:
        yield Drill(cluster, platform, template, folder)


async def usage(services: Services) -> tuple[list[ComputeTotals], Any]:
    """Usage by tenant. A database adds up in the order of its rows, so sums differ in their last digits."""
    await services.history.flush()
    until = datetime.now(UTC) + timedelta(hours=1)
    compute = await services.history.compute.totals("tenant", since=START, until=until, tenants=None)
    rounded = [
        replace(total, **{name: round(getattr(total, name), 9) for name in AMOUNTS}) for total in compute
    ]
    return rounded, await services.usage_ledger.usage(By.TENANT, since=START, until=until, tenants=None)


async def usage_of(services: Services, objects: list[Object]) -> tuple[list[ComputeTotals], Any]:
    """Usage by tenant, once the history has heard of all that these objects' statuses say."""
    told = [obj["status"].get("usage", {}).get("acceleratorSeconds", 0.0) for obj in objects]
    async with asyncio.timeout(30):
        while True:
            used = await usage(services)
            if used[0] and used[0][0].accelerator_seconds == pytest.approx(sum(told)):
                return used
            await asyncio.sleep(0.1)


async def until_history_says(services: Services, wanted: Any) -> None:
    """The watch delivers statuses a little after they were written."""
    async with asyncio.timeout(30):
        while await usage(services) != wanted:  # noqa: ASYNC110 - no event for it
            await asyncio.sleep(0.1)


def people_made(obj: Object) -> dict[str, Any]:
    """What a restore brings back of an object's metadata and spec."""
    meta = obj["metadata"]
    return {"labels": meta.get("labels"), "annotations": meta.get("annotations"), "spec": obj["spec"]}


async def test_objects_usage_and_tokens_are_back_and_an_ended_job_does_not_run_again(
    platform: ApiServer, sqlite_template: Path, tmp_path: Path
) -> None:
    async with drill(platform, sqlite_template, tmp_path) as here:
        cluster = here.cluster
        phrase = tmp_path / "phrase"
        phrase.write_text("correct horse battery staple\n")
        async with here.api("first") as services:
            await cluster.start()
            await here.work(services)
            text, _ = await services.tokens.create("alice", created_by="test")
            await cluster.kill()  # from now on nothing changes
            jobs, profiles = await here.jobs(), await here.profiles()
            service = await cluster.get(MODEL_SERVICES, "chat")
            tenant = await cluster.get(TENANTS, f"tenant-{cluster.namespace}")
            key = await cluster.client.get(SECRETS, "busbar-workload-key", SYSTEM)
            used = await usage_of(services, [*jobs.values(), service])
            done = await here.busbar("backup", str(here.file), "--passphrase-file", str(phrase))
            assert (done.code, done.out) == (0, f"{here.file} written\n"), done.err
            assert "3 trainingjobs" in done.err
        assert stat.S_IMODE(here.file.stat().st_mode) == 0o600
        with zipfile.ZipFile(here.file) as archive:
            assert key["data"]["key"] not in archive.read("workload-key.json").decode()
        await here.purge()
        other = {"data": {"key": "b3RoZXI="}}
        await cluster.client.patch(SECRETS, "busbar-workload-key", other, SYSTEM)
        async with here.api("second") as services:
            done = await here.busbar("restore", str(here.file), "--passphrase-file", str(phrase))
            assert (done.code, done.out) == (0, f"{here.file} restored\n"), done.err
            restored = await here.jobs()
            for name in JOBS:
                assert people_made(restored[name]) == people_made(jobs[name])
                assert restored[name]["metadata"]["uid"] != jobs[name]["metadata"]["uid"]
            assert jobs["ended"]["metadata"]["annotations"] == {"busbar.dev/requester": "root"}
            assert restored["ended"]["status"] == jobs["ended"]["status"]
            assert "admission" not in restored["runs"]["status"]
            assert restored["runs"]["status"]["usage"] == jobs["runs"]["status"]["usage"]
            assert people_made(await cluster.get(MODEL_SERVICES, "chat")) == people_made(service)
            assert await here.profiles() == profiles
            again = await cluster.get(TENANTS, f"tenant-{cluster.namespace}")
            assert again["spec"] == tenant["spec"]
            assert again["status"]["usage"] == tenant["status"]["usage"]
            now = (await cluster.client.get(SECRETS, "busbar-workload-key", SYSTEM))["data"]
            assert now == {**key["data"], "former": "b3RoZXI="}  # the operator has made pods under it
            await until_history_says(services, used)
            client = Client(os.environ["BUSBAR_SERVER"], text)
            assert (await asyncio.to_thread(client.me)).subject == "alice"
            client.close()
            await cluster.start()
            await cluster.until(TRAINING_JOBS, "runs", is_in("Running"))
            await cluster.until(TRAINING_JOBS, "held", is_in("Suspended"))
            assert [pod for pod in await cluster.pods() if not pod.startswith("chat-")] == ["runs-2-0"]
            assert (await cluster.get(TRAINING_JOBS, "ended"))["status"]["phase"] == "Succeeded"
            done = await here.busbar("restore", str(here.file))
            assert done.code == 1
            assert "into an unused database only; this one has 1 people, 1 tokens of others" in done.err


async def test_an_interrupted_restore_is_taken_up_again_while_the_operator_runs(
    platform: ApiServer, sqlite_template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with drill(platform, sqlite_template, tmp_path) as here:
        cluster = here.cluster
        async with here.api("first") as services:
            await cluster.start()
            await here.work(services)
            done = await here.busbar("backup", str(here.file))
            assert done.code == 0, done.err
            await cluster.kill()
            jobs = await here.jobs()
        await here.purge()
        await cluster.start()
        async with here.api("second") as services:
            with monkeypatch.context() as cut:
                cut.setattr(Restoring, "load", _interrupted)
                assert (await here.busbar("restore", str(here.file))).code == 1
            found = await here.jobs()
            assert all(job["spec"]["suspend"] for job in found.values())
            assert {job["metadata"]["annotations"][RESTORING] for job in found.values()} == {
                job["metadata"]["uid"] for job in jobs.values()
            }
            with monkeypatch.context() as cut:
                cut.setattr(Restoring, "finish", _interrupted)
                assert (await here.busbar("restore", str(here.file))).code == 1
            done = await here.busbar("restore", str(here.file))
            assert (done.code, "go on with --continue" in done.err) == (1, True)
            done = await here.busbar("restore", str(here.file), "--continue")
            assert done.code == 0, done.err
            await cluster.until(TRAINING_JOBS, "runs", is_in("Running"))
            restored = await here.jobs()
            assert {name: people_made(job) for name, job in restored.items()} == {
                name: people_made(job) for name, job in jobs.items()
            }
            ended = restored["ended"]["status"]
            assert (ended["phase"], ended["attempt"]) == ("Succeeded", 1)
            assert not [name for name in await cluster.pods() if name.startswith("ended-")]


def _interrupted(*_: object) -> None:
    raise BusbarError("interrupted")
