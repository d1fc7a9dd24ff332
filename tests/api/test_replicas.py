"""Two replicas of the API on one PostgreSQL and a real API server: under load, killed, stopped and rolled, they lose and
double nothing."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import select
from tests.api.conftest import BASE, JOB, NOW
from tests.api.process import ApiProcess
from tests.api.test_apiserver import make_tenant
from tests.cluster.apiserver import ApiServer, Client
from tests.cluster.conftest import platform  # noqa: F401 - the fixture, used by name

from busbar.api.access.tokens import Tokens
from busbar.api.database import tables
from busbar.api.database.engine import Database

pytestmark = [
    pytest.mark.apiserver,
    pytest.mark.postgres,
    pytest.mark.parametrize("database_url", ["postgresql"], indirect=True),
]
LEASE_S = 1.5
"""A quarter of the real one, so that the test takes seconds."""
START = (
    "import sys; from busbar.api.records import leadership as lease; "
    f"lease.LEASE_S, lease.RENEW_S = {LEASE_S}, {LEASE_S / 3}; "
    "from busbar.api.main import main; sys.exit(main())"
)
HOME = "replicas"
WATCHED: dict[str, Any] = {**JOB, "metadata": {"name": "watched", "namespace": HOME}}
"""The job whose curve is looked at."""


@dataclass
class Clients:
    """People and a gateway that ask any replica, and ask another one where it does not answer."""

    replicas: tuple[ApiProcess, ApiProcess]
    operator: Client
    alice: dict[str, str]
    gateway: dict[str, str]
    made: dict[str, int] = field(default_factory=dict)
    """Job to the answer of its submission; 0: none came."""
    delivered: int = 0
    steps: int = 0
    refused: Counter[int] = field(default_factory=Counter)
    _turn: int = 0

    def next_one(self) -> ApiProcess:
        self._turn += 1
        return self.replicas[self._turn % 2]

    async def deliver(self) -> None:
        """Ten records of usage, to one replica after the other until it is acknowledged, and then to the other again."""
        records = [
            {
                "seq": seq, "keyId": "k", "tenant": HOME, "namespace": HOME, "service": "chat", "model": "m",
                "promptTokens": 2, "completionTokens": seq, "requestId": f"r{seq}", "finishedAt": NOW.isoformat(),
            }
            for seq in range(self.delivered + 1, self.delivered + 11)
        ]  # fmt: skip
        acknowledged = 0
        while acknowledged < 2:
            one = self.next_one()
            url = f"http://127.0.0.1:{one.internal}/internal/usage"
            with contextlib.suppress(httpx2.HTTPError):
                answer = await one.http.post(
                    url, json={"gateway": "g", "records": records}, headers=self.gateway, timeout=1
                )
                self.refused[answer.status_code] += 1
                if answer.status_code == 200:
                    assert answer.json()["acceptedThrough"] == self.delivered + 10
                    acknowledged += 1
        self.delivered += 10

    async def submit(self) -> None:
        name, one = f"job-{len(self.made)}", self.next_one()
        self.made[name] = 0
        with contextlib.suppress(httpx2.HTTPError):
            answer = await one.http.post(
                f"{BASE}/namespaces/{HOME}/trainingjobs",
                json={**JOB, "metadata": {"name": name}},
                headers=self.alice,
                timeout=1,
            )
            self.made[name] = answer.status_code

    async def train(self) -> None:
        """As the operator would write it."""
        self.steps += 1
        status = {
            "attempt": 1,
            "phase": "Running",
            "progress": {"step": self.steps, "loss": 1.0},
            "usage": {"acceleratorSeconds": float(self.steps)},
        }
        merged = await asyncio.to_thread(
            self.operator.merge, WATCHED, {"status": status}, subresource="/status"
        )
        merged.expect()


@contextlib.asynccontextmanager
async def busy(clients: Clients) -> AsyncIterator[None]:
    """Load while the block runs."""
    stopping = asyncio.Event()

    async def work() -> None:
        while not stopping.is_set():
            await asyncio.gather(clients.deliver(), clients.submit(), clients.train())
            await asyncio.sleep(0.05)

    task = asyncio.create_task(work())
    try:
        yield
    finally:
        stopping.set()
        await task


async def leader(
    replicas: tuple[ApiProcess, ApiProcess], before: tuple[int, int]
) -> tuple[ApiProcess, float]:
    """The one that began to write the history after `before`, and after how many seconds."""
    since = time.monotonic()
    async with asyncio.timeout(60):
        while True:
            for replica, terms in zip(replicas, before, strict=True):
                if replica.terms > terms:
                    return replica, time.monotonic() - since
            await asyncio.sleep(0.02)


async def test_under_load_a_kill_a_stop_and_a_rolling_restart_lose_and_double_nothing(
    platform: ApiServer,  # noqa: F811
    tmp_path: Path,
    database_url: str,
) -> None:
    make_tenant(platform, HOME, {"alice": "member"})
    database = Database(database_url)
    gateway = platform.service_account_token("busbar-system", "busbar-gateway", "busbar-api")
    operator = platform.service_account("busbar-system", "busbar-operator")
    text, token = await Tokens(database).create("alice", created_by="test")
    command = [sys.executable, "-c", START]

    def terms() -> tuple[int, int]:
        return both[0].terms, both[1].terms

    async with (
        ApiProcess(platform, tmp_path / "first", database_url, command) as first,
        ApiProcess(platform, tmp_path / "second", database_url, command) as second,
    ):
        both = (first, second)
        bearer = {"Authorization": f"Bearer {text}"}
        clients = Clients(both, operator, bearer, {"Authorization": f"Bearer {gateway}"})
        platform.admin.create(WATCHED).expect()
        leads, _ = await leader(both, (0, 0))
        async with busy(clients):
            before = terms()
            await leads.end(signal.SIGKILL)
            heir, killed_s = await leader(both, before)
            assert heir is not leads
            await leads.start()

            before = terms()
            heir.process.send_signal(signal.SIGSTOP)
            third, stopped_s = await leader(both, before)
            assert third is leads
            heir.process.send_signal(signal.SIGCONT)

            for replica in both:  # a rolling restart
                await replica.end(signal.SIGTERM)
                assert replica.process.returncode == 0
                await replica.start()
        print(
            f"another replica wrote the history {killed_s:.1f} s after a kill, {stopped_s:.1f} s after a stop"
        )
        path = f"/apis/busbar.dev/v1alpha1/namespaces/{HOME}/trainingjobs"
        exist = {item["metadata"]["name"] for item in platform.admin.get(path).expect()["items"]}
        # The history follows: what was written last, and every object; the lists of both replicas are complete when ready.
        async with asyncio.timeout(60):
            while not await _has(database, clients.steps, exist):  # noqa: ASYNC110 - no event for it
                await asyncio.sleep(0.1)

    await _nothing_is_lost_or_doubled(database, clients, exist)
    async with database.read() as db:
        used = (await db.execute(select(tables.tokens.c.last_used_at))).scalar_one()
    await database.close()
    assert used is not None
    assert token.last_used_at is None


async def _nothing_is_lost_or_doubled(database: Database, clients: Clients, exist: set[str]) -> None:
    """In the ledger, the trail and the history; `exist`: the names of all jobs."""
    async with database.read() as db:
        ledger = (await db.execute(select(tables.ledger))).mappings().all()
        trail = (
            (await db.execute(select(tables.audit).where(tables.audit.c.action == "create"))).mappings().all()
        )
        jobs = (await db.execute(select(tables.jobs))).mappings().all()
        samples = (await db.execute(select(tables.samples).order_by(tables.samples.c.id))).mappings().all()

    assert clients.delivered >= 50
    assert sorted(row["seq"] for row in ledger) == list(range(1, clients.delivered + 1))
    assert sum(row["completion_tokens"] for row in ledger) == clients.delivered * (clients.delivered + 1) // 2

    submitted = exist - {"watched"}
    told = {name for name, code in clients.made.items() if code == 201}
    assert set(clients.made.values()) <= {0, 201}
    assert told <= submitted <= set(clients.made)
    rows = Counter(row["name"] for row in trail if row["outcome"] == "Done")
    assert told <= set(rows) <= submitted
    assert set(rows.values()) == {1}

    assert sorted(row["name"] for row in jobs) == sorted(exist)
    assert [row["deleted_at"] for row in jobs] == [None] * len(jobs)
    (row,) = [row for row in jobs if row["name"] == "watched"]
    assert row["accelerator_seconds"] == clients.steps
    assert sorted(point["step"] for point in samples) == list(range(1, clients.steps + 1))


async def _has(database: Database, step: int, names: set[str]) -> bool:
    """Whether the history knows these jobs, and this step of the one that is watched."""
    async with database.read() as db:
        rows = (await db.execute(select(tables.jobs.c.name, tables.jobs.c.step))).mappings().all()
    known = {row["name"]: row["step"] for row in rows}
    return names <= set(known) and known.get("watched") == step
