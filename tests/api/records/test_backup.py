"""Backup and restore of the database: between SQLite and PostgreSQL, damaged files, used databases, the routes."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import select
from tests.api.conftest import BASE, NOW, SECRET, World, running, seed
from tests.api.database.test_dump import Edit, again, changed, fixed
from tests.api.memory_kube import MemoryKube

from busbar.api.access.identity import Caller, CallerRole
from busbar.api.access.tokens import TokenState
from busbar.api.database import tables
from busbar.api.database.dump import LEFT_OUT, dumped
from busbar.api.errors import Conflict, Invalid
from busbar.api.records.backup import DatabaseState
from busbar.api.records.usage_ledger import By
from busbar.api.settings import Settings
from busbar.kube.contracts.usage import UsageRecord
from busbar.kube.resources import TRAINING_JOBS

ROOT = Caller("root", role=CallerRole.ADMIN)
USAGE = {"acceleratorSeconds": 3600.25, "workUnits": 1800.125, "cost": 2.5}
RANGE: Any = {"since": NOW - timedelta(days=1), "until": NOW + timedelta(days=1)}


async def fill(world: World) -> None:
    """A token of root and of alice, a revoked one, inference usage, a job with usage and a curve, and an audit trail."""
    services = world.services
    await world.token("root", CallerRole.ADMIN)
    text = await world.token("alice", description="the chat app · ü")
    gone = await services.tokens.page(subject="alice")
    await world.token("alice")
    async with services.audit.write("alice", "create", "TrainingJob", name="ada-run"):
        await services.token_service.revoke(ROOT, gone[0].id)
    assert text.startswith("bb_")
    record = UsageRecord(
        seq=2**40,
        key_id="k",
        tenant="ada",
        namespace="ada-lab",
        service="chat",
        model="chat",
        prompt_tokens=10,
        completion_tokens=20,
        request_id="r",
        finished_at=NOW - timedelta(hours=1, microseconds=1),
    )
    await services.usage_ledger.accept("g1", [record])
    await world.settle()
    written = world.kube.status(
        TRAINING_JOBS,
        "ada-lab",
        "ada-run",
        phase="Running",
        usage=USAGE,
        progress={"step": 7, "loss": 1.0 / 3.0, "tokensPerSecond": 1e-7},
    )
    services.store.observe(TRAINING_JOBS, written)
    await services.history.flush()


async def lines_of(world: World) -> list[bytes]:
    return b"".join([piece async for piece in world.services.backup.dump(ROOT)]).splitlines(keepends=True)


def rows_of(lines: list[bytes]) -> dict[str, list[Any]]:
    """The rows by table, without the audit trail, which a restore adds to."""
    found: dict[str, list[Any]] = {}
    for line in lines[1:-1]:
        row = json.loads(line)
        if isinstance(row, dict):
            rows: list[Any] = []
            found[row["table"]] = rows
        else:
            rows.append(row)
    found.pop("audit")
    return found


async def sent(lines: list[bytes], uids: dict[str, str] | None = None) -> AsyncIterator[bytes]:
    """A request's body, in pieces that end anywhere."""
    body = json.dumps({"uids": uids or {}}).encode() + b"\n" + b"".join(lines)
    for at in range(0, len(body), 1000):
        yield body[at : at + 1000]


@pytest.fixture
async def source(settings: Settings, sqlite_template: Path, tmp_path: Path) -> AsyncIterator[World]:
    """An API on SQLite whose database is filled."""
    shutil.copy(sqlite_template, tmp_path / "source.db")
    kube = MemoryKube()
    seed(kube)
    async with running(
        replace(settings, database_url=f"sqlite+aiosqlite:///{tmp_path}/source.db"), kube
    ) as made:
        await fill(made)
        yield made


@pytest.fixture
async def target(database_url: str) -> AsyncIterator[World]:
    """An API on an empty database of each kind, over a cluster whose objects have other uids."""
    kube = MemoryKube()
    seed(kube)
    made_with = Settings(session_secret=SECRET, database_url=database_url, gateway_url="http://127.0.0.1:9")
    async with running(made_with, kube) as made:
        yield made


def uids_of(old: World, new: World) -> dict[str, str]:
    """The mapping that a restore of all objects makes."""

    def by_name(world: World) -> dict[tuple[str, str, str], str]:
        return {
            key: obj["metadata"]["uid"]
            for key, obj in world.kube.objects.items()
            if key[0] in ("trainingjobs", "modelservices")
        }

    after = by_name(new)
    return {uid: after[key] for key, uid in by_name(old).items()}


async def test_tokens_usage_history_and_audit_are_the_same_on_either_database(
    source: World, target: World
) -> None:
    before = await lines_of(source)
    old, new = source.services, target.services
    revision = json.loads(before[0])["revision"]
    assert await new.backup.state(ROOT) == DatabaseState(revision, version("busbar"), True, [])
    uids = {uid: f"new-{uid}" for uid in uids_of(source, target)}
    done = await new.backup.restore(ROOT, sent(before, uids))
    assert done.rows == sum(line.startswith(b"[") for line in before)
    assert await new.tokens.page() == await old.tokens.page()
    assert len(await new.tokens.page(state=TokenState.LIVE)) == 2
    assert await new.usage_ledger.usage(By.TENANT, tenants=None, **RANGE) == await old.usage_ledger.usage(
        By.TENANT, tenants=None, **RANGE
    )
    totals = await new.history.compute.totals("tenant", tenants=None, **RANGE)
    assert [(t.group, t.accelerator_seconds, t.cost) for t in totals if t.cost] == [("ada", 3600.25, 2.5)]
    running_job = next(uid for key, uid in _jobs(source).items() if key == "ada-run")
    assert [p["loss"] for p in await new.history.curve(f"new-{running_job}")] == [1.0 / 3.0]
    trail = [(e.id, e.subject, e.action) for e in await new.audit.page()]
    assert [row[1:] for row in trail[:1]] == [("root", "restore")]
    assert trail[1:] == [(e.id, e.subject, e.action) for e in await old.audit.page()]


def _jobs(world: World) -> dict[str, str]:
    return {
        key[2]: obj["metadata"]["uid"] for key, obj in world.kube.objects.items() if key[0] == "trainingjobs"
    }


async def test_a_backup_of_what_was_restored_has_the_same_rows(source: World, target: World) -> None:
    before = await lines_of(source)
    uids = uids_of(source, target)
    await target.services.backup.restore(ROOT, sent(before, uids))
    kept, restored = rows_of(before), rows_of(await lines_of(target))
    for name in ("subjects", "tokens", "ledger", "ledger_cursor", "samples"):
        assert [_renamed(row, uids) for row in kept[name]] == restored[name], name


def _renamed(row: list[Any], uids: dict[str, str]) -> list[Any]:
    return [uids.get(value, value) if isinstance(value, str) else value for value in row]


async def test_new_rows_get_ids_after_the_restored_ones(source: World, target: World) -> None:
    for number in range(20):
        await source.services.audit.note("alice", "create", "TrainingJob", "", str(number), "Done", "", "")
    before = await lines_of(source)
    last = (await source.services.audit.page(limit=1))[0].id
    await target.services.audit.note("root", "create", "Token", "", "", "Done", "", "")
    await target.services.backup.restore(ROOT, sent(before))
    following = await target.services.audit.page(limit=3)
    assert [(e.id - last, e.action, e.kind) for e in following] == [
        (2, "restore", "Database"),
        (1, "create", "Token"),
        (0, "backup", "Database"),
    ]
    async with target.services.database.read() as db:
        ids = (await db.execute(select(tables.samples.c.id))).scalars().all()
    assert len(ids) == len(set(ids)) == 1


async def test_what_the_caller_needed_to_log_in_does_not_block_and_stays(
    source: World, target: World
) -> None:
    before = await lines_of(source)
    mine = await target.token("root", CallerRole.ADMIN)
    await target.services.sessions.open(ROOT)
    await target.services.history.flush()  # rows of objects that exist
    await target.services.backup.restore(ROOT, sent(before))
    http = httpx2.AsyncClient(
        transport=target.public._transport,
        base_url="http://busbar.test",
        headers={"Authorization": f"Bearer {mine}"},
    )
    assert (await http.get(f"{BASE}/me")).json()["subject"] == "root"
    assert len(await target.services.tokens.page()) == 4


async def test_objects_that_exist_keep_the_totals_of_their_status(source: World, target: World) -> None:
    before = await lines_of(source)
    newer = {**USAGE, "acceleratorSeconds": 7200.5}
    await target.settle()
    written = target.kube.status(TRAINING_JOBS, "ada-lab", "ada-run", phase="Running", usage=newer)
    target.services.store.observe(TRAINING_JOBS, written)
    await target.services.history.flush()
    await target.services.backup.restore(ROOT, sent(before, uids_of(source, target)))
    totals = await target.services.history.compute.totals("tenant", tenants=None, **RANGE)
    assert [t.accelerator_seconds for t in totals if t.group == "ada"] == [7200.5]


async def _token_of_alice(world: World) -> None:
    await world.token("alice")


async def _usage(world: World) -> None:
    record = UsageRecord(
        seq=1, key_id="k", tenant="t", namespace="n", service="s", model="m", prompt_tokens=1, completion_tokens=1,
        request_id="r", finished_at=NOW,
    )  # fmt: skip
    await world.services.usage_ledger.accept("g", [record])


async def _a_deleted_job(world: World) -> None:
    await world.settle()
    await world.services.history.flush()
    world.kube.remove(TRAINING_JOBS, "ada-run", "ada-lab")
    await world.settle()
    await world.services.history.flush()


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (_token_of_alice, "1 people, 1 tokens of others"),
        (_usage, "1 rows of inference usage, 1 gateways that delivered usage"),
        (_a_deleted_job, "1 jobs and services that no longer exist"),
    ],
)
async def test_a_used_database_is_left_as_it_is(source: World, target: World, use: Any, what: str) -> None:
    await use(target)
    before, mine = await lines_of(source), rows_of(await lines_of(target))
    state = await target.services.backup.state(ROOT)
    assert (state.unused, ", ".join(state.found)) == (False, what)
    with pytest.raises(Conflict, match=what):
        await target.services.backup.restore(ROOT, sent(before))
    assert rows_of(await lines_of(target)) == mine


BAD: list[tuple[str, Edit, str]] = [
    ("cut short", lambda lines: lines[:-1], "cut short"),
    ("another value", changed(b'"the chat app', b'"the chad app'), "damaged"),
    ("a subject of Kubernetes", fixed(b'"alice"', b'"system:admin"'), "never writes"),
    (
        "a group of Kubernetes",
        fixed(b'["alice",[]', b'["alice",["system:masters"]'),
        "reserved for Kubernetes",
    ),
    ("a role that does not exist", fixed(b'"admin"', b'"super"'), "never writes"),
    ("a token of nobody", fixed(b'["alice",[]', b'["alive",[]'), "contradict"),
]


@pytest.mark.parametrize(("edit", "says"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
async def test_a_file_that_is_not_whole_and_ours_changes_nothing(
    source: World, target: World, edit: Edit, says: str
) -> None:
    await target.token("root", CallerRole.ADMIN)
    await target.services.history.flush()
    mine = rows_of(await lines_of(target))
    with pytest.raises(Invalid, match=says):
        await target.services.backup.restore(ROOT, sent(edit(await lines_of(source))))
    assert rows_of(await lines_of(target)) == mine
    newest = (await target.services.audit.page())[1]
    assert (newest.action, newest.outcome) == ("restore", "Invalid")


@pytest.mark.parametrize(
    "line", [b"", b"[]", b'{"uids": 1}', b'{"uids": {"a": "x", "b": "x"}}', b'{"uids": {"a": ""}}']
)
async def test_a_mapping_of_uids_that_makes_no_sense_is_refused(world: World, line: bytes) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield line + b"\n"

    with pytest.raises(Invalid):
        await world.services.backup.restore(ROOT, body())


async def test_a_dump_is_of_one_moment(target: World) -> None:
    query = select(tables.tokens.c.id)
    async with target.services.backup._moment() as db:
        before = (await db.execute(query)).all()
        await target.token("carol")
        assert (await db.execute(query)).all() == before
    async with target.services.database.write() as tx:
        assert len((await tx.execute(query)).all()) == len(before) + 1


async def test_every_table_is_dumped_or_left_out_on_purpose() -> None:
    assert {table.name for table in dumped()} | LEFT_OUT == set(tables.metadata.tables)


async def test_only_admins_read_or_replace_the_database(world: World) -> None:
    alice, root = await world.as_("alice"), await world.as_("root", CallerRole.ADMIN)
    for method, path in (("GET", "/database"), ("GET", "/database/state"), ("PUT", "/database")):
        answer = await alice.request(method, BASE + path, content=b"")
        assert (answer.status_code, answer.json()["error"]["message"]) == (403, "this is for admins")
    answer = await root.get(f"{BASE}/database")
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    assert answer.headers["cache-control"] == "no-store"
    assert json.loads(answer.content.splitlines()[0])["busbar"] == "database"
    assert (await world.services.audit.page(limit=1))[0].action == "backup"


async def test_a_restore_over_http_may_be_larger_than_other_bodies(source: World, target: World) -> None:
    lines = await lines_of(source)
    filler = next(json.loads(line) for line in lines if b'"create","TrainingJob"' in line)
    more = [json.dumps([10_000 + n, *filler[1:-2], "x" * 400, ""]).encode() + b"\n" for n in range(3000)]
    at = next(i for i, line in enumerate(lines) if b'"create","TrainingJob"' in line)
    body = b"".join([piece async for piece in sent(again([*lines[: at + 1], *more, *lines[at + 1 :]]))])
    assert len(body) > 1024 * 1024
    root = await target.as_("root", CallerRole.ADMIN)
    answer = await root.put(f"{BASE}/database", content=body)
    assert (answer.status_code, answer.json()["madeBy"]) == (200, version("busbar")), answer.text
    cookie = await target.public.put(f"{BASE}/database", content=body, headers={"Cookie": "busbar_session=x"})
    assert cookie.status_code == 413
    refused = await root.put(f"{BASE}/database", content=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "Conflict")
