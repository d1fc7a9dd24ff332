"""A whole API in one process: real application, real database, in-memory Kubernetes, real planner.

Two tenants live in the cluster: `ada` (alice: member, vera: viewer, adam: admin) with namespace `ada-lab`,
and `bob-corp` (bob) with `bob-lab`. No response to alice may mention anything of Bob's.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from sqlalchemy import text
from tests.api.memory_kube import MemoryKube
from tests.api.postgres import Server
from tests.api.scripted_operator import ScriptedOperator

from busbar.api import services as wiring
from busbar.api.access.identity import CallerRole, Scope
from busbar.api.app import internal_app, public_app
from busbar.api.database import tables
from busbar.api.database.engine import make_engine
from busbar.api.database.migrate import migrate
from busbar.api.kubernetes.store import WATCHED
from busbar.api.services import Services
from busbar.api.settings import Settings
from busbar.kube.resources import ACCELERATOR_POOLS, MODEL_SERVICES, PODS, TENANTS, TRAINING_JOBS
from busbar.kube.types import TrainingJob

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
SECRET = "0123456789abcdefghijklmnopqrstuvwxyz"
BASE = "/api/v1alpha1"
GATEWAY = "system:serviceaccount:busbar-system:busbar-gateway"
JOB: dict[str, Any] = {
    "apiVersion": "busbar.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "stdlib"},
    "spec": {
        "engine": {
            "model": {"config": {"model_type": "llama", "hidden_size": 128}},
            "tokenizer": {"train": {"vocabSize": 4096}},
            "data": {"uri": "builtin://python-stdlib"},
            "steps": 100,
        },
        "shape": {"cpu": "500m", "memory": "1Gi"},
        "accelerators": ["cpu"],
        "output": {"uri": "pvc://stdlib/model"},
    },
}
SERVICE: dict[str, Any] = {
    "apiVersion": "busbar.dev/v1alpha1",
    "kind": "ModelService",
    "metadata": {"name": "chat"},
    "spec": {
        "model": {"uri": "pvc://stdlib/model"},
        "minReplicas": 0,
        "maxReplicas": 2,
        "accelerators": ["cpu"],
    },
}


class Clock:
    """A clock that moves only when a test moves it."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now

    def forward(self, **amount: float) -> None:
        self.now += timedelta(**amount)


@dataclass
class World:
    """The application, the cluster and the clients that a test uses."""

    services: Services
    kube: MemoryKube
    operator: ScriptedOperator
    clock: Clock
    public: httpx2.AsyncClient
    internal: httpx2.AsyncClient

    async def token(
        self,
        subject: str,
        role: CallerRole = CallerRole.USER,
        scopes: tuple[Scope, ...] = (Scope.REST, Scope.INFERENCE),
        **more: Any,
    ) -> str:
        text_, _ = await self.services.tokens.create(
            subject, created_by="test", role=role, scopes=scopes, **more
        )
        return text_

    async def as_(self, subject: str, role: CallerRole = CallerRole.USER) -> httpx2.AsyncClient:
        """A client with a new token of the subject."""
        token = await self.token(subject, role)
        return client(self.public, {"Authorization": f"Bearer {token}"})

    async def settle(self) -> None:
        """Waits until the store has exactly the objects of the cluster."""
        async with asyncio.timeout(30):
            while not self._seen():  # noqa: ASYNC110 - there is no event for "a watch has caught up"
                await asyncio.sleep(0)

    async def until_listed(self, namespace: str, name: str) -> None:
        """Waits until the store has a job of this name, and so everything that was written before it."""
        async with asyncio.timeout(30):
            while self.services.store.find(TrainingJob, name, namespace) is None:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0)

    def _seen(self) -> bool:
        def version(plural: str, obj: dict[str, Any]) -> tuple[str, str, str, str]:
            meta = obj["metadata"]
            return plural, meta.get("namespace") or "", meta["name"], meta["resourceVersion"]

        seen = {
            (r.plural, obj.metadata.namespace or "", obj.metadata.name, obj.metadata.resource_version)
            for r, kind in WATCHED.items()
            for obj in self.services.store.all(kind)
        }
        watched = {resource.plural for resource in WATCHED}
        return seen == {version(key[0], obj) for key, obj in self.kube.objects.items() if key[0] in watched}


def client(like: httpx2.AsyncClient, headers: dict[str, str]) -> httpx2.AsyncClient:
    """Another client of the same application."""
    return httpx2.AsyncClient(transport=like._transport, base_url=like.base_url, headers=headers)


def seed(kube: MemoryKube) -> None:
    """Two tenants, three pools, a job and a service of each tenant, and pods with logs."""
    for name, namespace, members in (
        ("ada", "ada-lab", [("alice", "member"), ("vera", "viewer"), ("adam", "admin")]),
        ("bob-corp", "bob-lab", [("bob", "member")]),
    ):
        kube.put(
            TENANTS,
            {
                "metadata": {"name": name},
                "spec": {
                    "displayName": name,
                    "namespaces": [namespace],
                    "members": [
                        {"subject": {"kind": "User", "name": n}, "role": role} for n, role in members
                    ],
                    "weight": 1,
                    "quota": [{"accelerator": "cpu", "guaranteed": 1}],
                },
            },
        )
    for name, accelerator, resource, tenants in (
        ("cpu", "cpu", "cpu", None),
        ("h100", "H100", "nvidia.com/gpu", ["ada", "bob-corp"]),
        ("bobs-own", "L4", "nvidia.com/gpu", ["bob-corp"]),
    ):
        spec: dict[str, Any] = {
            "accelerator": accelerator,
            "resourceName": resource,
            "nodeSelector": {"pool": name},
            "pricePerHour": 2.5,
        }
        if tenants is not None:
            spec["tenants"] = tenants
        kube.put(
            ACCELERATOR_POOLS,
            {
                "metadata": {"name": name},
                "spec": spec,
                "status": {"nodes": 1, "capacity": 8, "allocated": 0, "free": 8},
            },
        )
    for namespace, prefix in (("ada-lab", "ada"), ("bob-lab", "bob")):
        kube.put(TRAINING_JOBS, {**JOB, "metadata": {"name": f"{prefix}-run", "namespace": namespace}})
        kube.put(MODEL_SERVICES, {**SERVICE, "metadata": {"name": f"{prefix}-chat", "namespace": namespace}})
        pod = f"{prefix}-run-1-0"
        labels = {
            "busbar.dev/job": f"{prefix}-run",
            "busbar.dev/kind": "trainingjob",
            "busbar.dev/attempt": "1",
            "busbar.dev/rank": "0",
        }
        kube.put(
            PODS,
            {
                "metadata": {"name": pod, "namespace": namespace, "labels": labels},
                "status": {"phase": "Running"},
            },
        )
        kube.logs[namespace, pod] = [f"{prefix} step 1\n".encode(), f"{prefix} step 2\n".encode()]


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """A PostgreSQL server in a temporary folder."""
    with Server.start() as server:
        yield server


@pytest.fixture(scope="session")
def sqlite_template() -> Iterator[Path]:
    """A migrated, empty SQLite file: copying it is faster than migrating for every test."""
    with tempfile.TemporaryDirectory(prefix="busbar-db-") as folder:
        path = Path(folder, "template.db")
        with ThreadPoolExecutor(1) as thread:  # the first caller may be a fixture inside a running loop
            thread.submit(asyncio.run, migrate(f"sqlite+aiosqlite:///{path}")).result()
        yield path


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    target = tmp_path / "api.db"
    shutil.copy(sqlite_template, target)
    return f"sqlite+aiosqlite:///{target}"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
async def database_url(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """An empty migrated database of each kind."""
    if request.param == "sqlite":
        yield request.getfixturevalue("sqlite_url")
        return
    server: Server = request.getfixturevalue("postgres_server")
    url = server.url
    await migrate(url)
    yield url
    engine = make_engine(url)
    async with engine.begin() as connection:
        names = ", ".join(table.name for table in tables.metadata.sorted_tables)
        await connection.execute(text(f"TRUNCATE {names} CASCADE"))
    await engine.dispose()


@pytest.fixture
def settings(sqlite_url: str) -> Settings:
    return Settings(session_secret=SECRET, database_url=sqlite_url, gateway_url="http://127.0.0.1:9")


@pytest.fixture
async def world(settings: Settings) -> AsyncIterator[World]:
    """A running API with two tenants."""
    kube = MemoryKube()
    seed(kube)
    async with running(settings, kube) as made:
        yield made


@cache
def _apps() -> list[FastAPI]:
    return []


def apps_of(built: Services) -> list[FastAPI]:
    """Both applications over these services. Their routes are made once, because that takes most of a test's time."""
    if built.settings.oidc is not None:
        return [public_app(built), internal_app(built)]
    if not _apps():
        _apps().extend([public_app(built), internal_app(built)])
    for app in _apps():
        app.state.services = built
    return _apps()


class running:
    """Start an API over a cluster, and stop it."""

    def __init__(self, settings: Settings, kube: MemoryKube) -> None:
        self._settings = settings
        self._kube = kube

    async def __aenter__(self) -> World:
        clock = Clock()
        operator = ScriptedOperator(self._kube)
        built = wiring.build(
            replace(self._settings), self._kube, operator, clock=clock, backoff_s=(0.001, 0.01)
        )
        await built.store.start()
        await built.store.synced(30)
        public, internal = (
            httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://busbar.test")
            for app in apps_of(built)
        )
        self._world = World(built, self._kube, operator, clock, public, internal)
        return self._world

    async def __aexit__(self, *_: object) -> None:
        await self._world.services.stop([])
        await self._world.public.aclose()
        await self._world.internal.aclose()
