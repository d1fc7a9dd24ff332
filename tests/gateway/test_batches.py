"""/v1/files and /v1/batches through a gateway and the real API, as the `openai` client uses them."""

from __future__ import annotations

import asyncio
import io
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any

import aiohttp
import openai
import pytest
from sqlalchemy.exc import OperationalError
from tests.api.conftest import GATEWAY, World, settings, sqlite_template, sqlite_url, world
from tests.cli.loopback import app_of, listening
from tests.gateway.parts import PATIENCE_S, House, route
from tests.gateway.test_process import Process

from busbar.api.errors import TooLarge
from busbar.api.records.usage_ledger import By
from busbar.gateway import batch_runner
from busbar.kube.contracts.batches import Claim, Lent, Settled
from busbar.kube.contracts.workload import BATCH_HEADER
from busbar.kube.types.budget import Period
from busbar.kube.types.inference import CostLimit, InferenceLimits

__all__ = ["settings", "sqlite_template", "sqlite_url", "world"]

OURS = {"tenant": "ada", "namespace": "ada-lab"}


def jsonl(*names: str, **body: Any) -> bytes:
    rows = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": name, **body},
        }
        for name in names
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
async def real(world: World, house: House) -> AsyncIterator[House]:
    """The gateway's test set-up with the real API; alice's namespace is ada-lab."""
    world.kube.users["to-api"] = {"username": GATEWAY, "groups": ["system:serviceaccounts"]}
    await house.stop_gateway()
    house.overrides.update(batch_lines=4, batch_poll_s=0.02)
    async with listening(app_of(world.internal)) as url:
        house.overrides["api_url"] = url
        await house.start_gateway()
        yield house
        await house.stop_gateway()


@pytest.fixture
async def client(real: House, world: World) -> AsyncIterator[openai.AsyncOpenAI]:
    key = await world.token("alice", tenant="ada")
    async with openai.AsyncOpenAI(base_url=f"{real.public}/v1", api_key=key, max_retries=0) as made:
        yield made


async def begin(client: openai.AsyncOpenAI, data: bytes) -> str:
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(data), "in.jsonl", "batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"run": "7"}
    )
    return batch.id


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await check():  # noqa: ASYNC110 - the batch is in another process
            await asyncio.sleep(0.02)


async def ended(client: openai.AsyncOpenAI, batch: str) -> openai.types.Batch:
    async def done() -> bool:
        return (await client.batches.retrieve(batch)).status in ("completed", "cancelled", "failed")

    await until(done)
    return await client.batches.retrieve(batch)


async def answers(client: openai.AsyncOpenAI, file: str | None) -> list[dict[str, Any]]:
    assert file is not None
    return [json.loads(line) for line in (await client.files.content(file)).text.splitlines()]


async def used(world: World) -> list[tuple[int, int, int]]:
    now = world.services.clock()
    found = await world.services.usage_ledger.usage(
        By.KEY, since=now - timedelta(days=3650), until=now + timedelta(days=3650), tenants=None
    )
    return [(row.requests, row.prompt_tokens, row.completion_tokens) for row in found]


async def test_a_batch_runs_as_batch_work_of_its_key_and_a_bad_line_fails_alone(
    real: House, world: World, client: openai.AsyncOpenAI
) -> None:
    engine = await real.engine("a", "b")
    await real.publish(route("m", engine, **OURS))
    data = jsonl("one", "two", "three") + b"{bad\n" + jsonl("four", model="unknown")
    batch = await ended(client, await begin(client, data))
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
        5,
        3,
        2,
    )
    assert batch.metadata == {"run": "7"}
    good = await answers(client, batch.output_file_id)
    assert [row["custom_id"] for row in good] == ["one", "two", "three"]
    assert {row["response"]["body"]["choices"][0]["text"] for row in good} == {"ab"}
    bad = await answers(client, batch.error_file_id)
    assert [(row["custom_id"], (row["error"] or {}).get("code")) for row in bad] == [
        (None, "invalid_request"),
        ("four", None),
    ]
    assert bad[1]["response"]["body"]["error"]["code"] == "model_not_found"
    assert all(BATCH_HEADER in headers for headers in engine.seen_headers)
    await real.stop_gateway()
    assert await used(world) == [(3, 21, 6)]


async def test_lines_go_on_at_the_next_gateway_and_each_is_answered_and_charged_once(
    real: House, world: World, client: openai.AsyncOpenAI
) -> None:
    engine = await real.engine("a", "b")
    await real.publish(route("m", engine, **OURS))
    batch = await begin(client, jsonl(*(f"n{n}" for n in range(12))))

    async def some() -> bool:
        counts = (await client.batches.retrieve(batch)).request_counts
        return counts is not None and counts.completed >= 3

    await until(some)
    engine.pause_at = 0
    before = len(engine.bodies)

    async def held() -> bool:
        return len(engine.bodies) > before and engine.running > 0

    await until(held)
    await real.stop_gateway()  # the lines that wait go back to the API
    engine.pause_at = None
    real.overrides["public_address"] = client.base_url.netloc.decode()
    await real.start_gateway()
    await real.publish(route("m", engine, **OURS))
    done = await ended(client, batch)
    assert done.status == "completed"
    good = await answers(client, done.output_file_id)
    assert [row["custom_id"] for row in good] == [f"n{n}" for n in range(12)]
    await real.stop_gateway()
    assert sum(row[2] for row in await used(world)) == 24


async def test_a_batch_survives_kill_9_of_its_gateway_exactly_once(
    real: House, world: World, client: openai.AsyncOpenAI
) -> None:
    await real.stop_gateway()
    process = Process(real)
    engine = await real.engine("a", "b")
    await real.operator.publish(route("m", engine, **OURS))
    await process.start()
    key = client.api_key
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{process.port}/v1", api_key=key, max_retries=0
    ) as asks:
        batch = await begin(asks, jsonl(*(f"n{n}" for n in range(16))))

        async def some() -> bool:
            counts = (await asks.batches.retrieve(batch)).request_counts
            return counts is not None and counts.completed >= 5

        await until(some)
        engine.pause_at = 0  # the rest hangs in the engine
        for _ in range(2):
            await asyncio.sleep(0.1)
            await process.end(signal.SIGKILL)
            await process.start()
        engine.pause_at = None
        engine.go.set()
        done = await ended(asks, batch)
        good = await answers(asks, done.output_file_id)
        assert [row["custom_id"] for row in good] == [f"n{n}" for n in range(16)]
    await process.end(signal.SIGTERM)
    assert sum(row[2] for row in await used(world)) == 32


async def test_a_cancelled_batch_ends_its_requests_at_the_engine(
    real: House, client: openai.AsyncOpenAI
) -> None:
    engine = await real.engine("a")
    engine.pause_at = 0
    await real.publish(route("m", engine, **OURS))
    batch = await begin(client, jsonl(*(f"n{n}" for n in range(9))))
    async with asyncio.timeout(PATIENCE_S):
        await engine.arrived.wait()
    assert (await client.batches.cancel(batch)).status == "cancelling"
    done = await ended(client, batch)
    assert (done.status, done.output_file_id) == ("cancelled", None)
    async with asyncio.timeout(PATIENCE_S):
        await engine.cancelled.wait()
    assert len(engine.bodies) <= 4
    with pytest.raises(openai.ConflictError):
        await client.batches.cancel(batch)


async def test_a_batch_counts_in_its_keys_budget_and_waits_when_it_is_spent(
    real: House, world: World
) -> None:
    price = {"prompt": 1.0, "cached": 1.0, "output": 10.0}
    engine = await real.engine("a", "b")
    await real.publish(route("m", engine, price=price, **OURS))
    limits = InferenceLimits(budgets=[CostLimit(period=Period.MONTH, cost=0.000_060)])
    key, _ = await world.services.tokens.create("alice", created_by="test", tenant="ada", limits=limits)
    async with openai.AsyncOpenAI(base_url=f"{real.public}/v1", api_key=key, max_retries=0) as client:
        # A request costs 7 + 2 * 10 millionths, and may cost as much: two fit, and a third does not.
        batch = await begin(client, jsonl("a", "b", "c", prompt=[1] * 7, max_tokens=2))

        async def two() -> bool:
            counts = (await client.batches.retrieve(batch)).request_counts
            return counts is not None and counts.completed == 2

        await until(two)
        await asyncio.sleep(0.2)
        assert await two()
        assert (await client.batches.retrieve(batch)).status == "in_progress"
        assert len(engine.bodies) == 2


async def test_a_revoked_key_ends_the_rest_of_its_batch(real: House, world: World) -> None:
    real.overrides.update(key_cache_s=0.0)
    await real.stop_gateway()
    await real.start_gateway()
    engine = await real.engine("a")
    engine.pause_at = 0
    await real.publish(route("m", engine, **OURS))
    key, token = await world.services.tokens.create("alice", created_by="test", tenant="ada")
    other = await world.token("alice", tenant="ada")
    async with (
        openai.AsyncOpenAI(base_url=f"{real.public}/v1", api_key=key, max_retries=0) as client,
        openai.AsyncOpenAI(base_url=f"{real.public}/v1", api_key=other, max_retries=0) as asks,
    ):
        batch = await begin(client, jsonl(*(f"n{n}" for n in range(6))))
        async with asyncio.timeout(PATIENCE_S):
            await engine.arrived.wait()
        await world.services.tokens.revoke(token.id, owner=None)
        engine.pause_at = None
        engine.go.set()
        done = await ended(asks, batch)
        assert done.request_counts is not None
        assert 1 <= done.request_counts.completed <= 4
        for row in await answers(asks, done.error_file_id):
            assert row["response"]["body"]["error"]["code"] == "invalid_api_key"


async def test_files_are_listed_read_and_deleted_by_their_owner_alone(
    real: House, world: World, client: openai.AsyncOpenAI
) -> None:
    large = jsonl(*(f"n{n}" for n in range(3)), prompt="x" * 400_000)
    file = await client.files.create(file=("big.jsonl", large), purpose="batch")
    assert (await client.files.content(file.id)).content == large
    assert [each.id async for each in client.files.list()] == [file.id]
    theirs = await world.token("bob", tenant="bob-corp")
    async with openai.AsyncOpenAI(base_url=f"{real.public}/v1", api_key=theirs, max_retries=0) as bob:
        assert [each.id async for each in bob.files.list()] == []
        with pytest.raises(openai.NotFoundError):
            await bob.files.content(file.id)
        with pytest.raises(openai.NotFoundError):
            await bob.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
    assert (await client.files.delete(file.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(file.id)


async def test_what_cannot_be_served_says_why(real: House, client: openai.AsyncOpenAI) -> None:
    async def refusal(method: str, path: str, **more: Any) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {client.api_key}"}
        assert real.session is not None
        async with real.session.request(method, real.public + path, headers=headers, **more) as response:
            return response.status, (await response.json())["error"]["message"]

    file = (await client.files.create(file=("a", jsonl("a")), purpose="batch")).id
    window = {"completion_window": "24h", "endpoint": "/v1/completions", "input_file_id": file}
    for body, says in (
        ({**window, "completion_window": "1h"}, "completion_window must be '24h'"),
        ({**window, "endpoint": "/v1/images"}, "endpoint must be one of"),
        ({**window, "output_expires_after": {}}, "'output_expires_after' is not served"),
        ({**window, "metadata": {"a": 5}}, "metadata"),
        ([], "must be a JSON object"),
    ):
        status, message = await refusal("POST", "/v1/batches", json=body)
        assert (status, says in message) == (400, True), message
    assert (await refusal("POST", "/v1/batches", json={**window, "input_file_id": "x"}))[0] == 404
    assert (await refusal("GET", "/v1/batches/x"))[0] == 404
    assert (await refusal("GET", "/v1/files?limit=1000"))[0] == 400
    assert (await refusal("POST", "/v1/files", json={}))[0] == 400
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("other", b"x", filename="x")
    assert "not served" in (await refusal("POST", "/v1/files", data=form))[1]
    form = aiohttp.FormData({"purpose": "fine-tune"})
    form.add_field("file", b"x", filename="x")
    assert "purpose must be 'batch'" in (await refusal("POST", "/v1/files", data=form))[1]
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", io.BytesIO(b"x" * (102 << 20)), filename="x")
    assert (await refusal("POST", "/v1/files", data=form))[0] == 413


async def test_a_form_may_arrive_in_any_pieces(real: House, client: openai.AsyncOpenAI) -> None:
    """Cut at many places, and into the smallest pieces."""

    def form(purpose: str) -> bytes:
        return (
            f'--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
            '--cut\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n{}\n\r\n--cut--\r\n'
        ).encode()

    async def upload(pieces: list[bytes]) -> tuple[int, str]:
        async def slowly() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece
                await asyncio.sleep(0.002)

        headers = {
            "Authorization": f"Bearer {client.api_key}",
            "Content-Type": "multipart/form-data; boundary=cut",
        }
        assert real.session is not None
        async with real.session.post(f"{real.public}/v1/files", data=slowly(), headers=headers) as answer:
            return answer.status, await answer.text()

    whole = form("batch")
    for cut in range(0, len(whole), 7):
        status, text = await upload(
            [whole[:cut], whole[cut:]] if cut else [whole[i : i + 1] for i in range(len(whole))]
        )
        assert (status, json.loads(text).get("bytes")) == (200, 3), (cut, text)
    long = form("x" * 300)
    for pieces in ([long], [long[:90], long[90:]]):
        status, text = await upload(pieces)
        assert (status, "'purpose' is too long" in text) == (400, True), text


async def test_an_answer_waits_for_an_api_that_is_away(
    real: House, world: World, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await real.engine("a")
    await real.publish(route("m", engine, **OURS))
    settle, tried = world.services.batches.settle, 0

    async def away(told: Settled) -> bool:
        nonlocal tried
        tried += 1
        if tried < 4:
            raise OperationalError("insert", None, Exception("away"))
        return await settle(told)

    monkeypatch.setattr(world.services.batches, "settle", away)
    done = await ended(client, await begin(client, jsonl("a")))
    assert (done.status, len(engine.bodies), tried) == ("completed", 1, 4)
    await real.stop_gateway()
    assert await used(world) == [(1, 7, 1)]


async def test_an_answer_that_the_api_does_not_take_is_an_error_and_the_line_runs_once(
    real: House, world: World, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await real.engine("a")
    await real.publish(route("m", engine, **OURS))
    settle = world.services.batches.settle

    async def full(told: Settled) -> bool:
        if told.status == 200:
            raise TooLarge("the body is larger than 1048576 bytes")
        return await settle(told)

    monkeypatch.setattr(world.services.batches, "settle", full)
    done = await ended(client, await begin(client, jsonl("a")))
    assert (done.status, len(engine.bodies)) == ("completed", 1)
    (row,) = await answers(client, done.error_file_id)
    assert row["response"]["status_code"] == 500
    assert "the body is larger than 1048576 bytes" in row["response"]["body"]["error"]["message"]


async def test_a_line_that_meets_a_defect_does_not_run_again_at_once(
    real: House, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await real.engine("a")
    await real.publish(route("m", engine, **OURS))
    tried: list[str] = []

    def broken(document: dict[str, Any], *salt: str) -> tuple[bytes, ...]:
        tried.append(document["prompt"])
        if document["prompt"] == "bad":
            raise RuntimeError("a defect")
        return ()

    monkeypatch.setattr("busbar.gateway.proxy.blocks_of", broken)
    batch = await begin(client, jsonl("bad", *(f"n{n}" for n in range(20))))

    async def others() -> bool:
        counts = (await client.batches.retrieve(batch)).request_counts
        return counts is not None and counts.completed == 20

    await until(others)
    assert tried.count("bad") == 1


async def test_a_gateway_stops_although_the_api_does_not_answer(
    real: House, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = asyncio.Event()

    async def claim(wanted: Claim) -> Lent:
        await silent.wait()
        return Lent(lines=[])

    monkeypatch.setattr(world.services.batches, "claim", claim)
    monkeypatch.setattr(batch_runner, "GIVE_BACK_S", 0.05)
    try:
        async with asyncio.timeout(PATIENCE_S / 2):
            await real.stop_gateway()
    finally:
        silent.set()
