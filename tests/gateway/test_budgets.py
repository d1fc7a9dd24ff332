"""Budgets over HTTP and over the death of the process: 429 with OpenAI's headers, and sums that are exact."""

from __future__ import annotations

import asyncio
import signal
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import pytest
from tests.gateway.parts import KEY_A, PATIENCE_S, House, route, text_of
from tests.gateway.test_process import Process, process

from busbar.kube.contracts.allowances import NANO, Account, CostAllowance

__all__ = ["process"]

PRICE = {"prompt": 1.0, "cached": 0.5, "output": 10.0}
"""Per million: the engine's prompts of 7 tokens cost 7,000 billionths, each word 10,000."""


def month(limit_nano: int) -> CostAllowance:
    now = datetime.now(UTC)
    return CostAllowance(
        period="month",
        started=now.replace(day=1, hour=0, minute=0, second=0, microsecond=0),
        ends=now + timedelta(days=20),
        limit_nano=limit_nano,
    )


async def test_answers_say_what_is_left_and_a_429_when_to_come_again(house: House) -> None:
    limits = Account(name="key/id-a", requests_per_minute=3, tokens_per_minute=1000)
    house.api.know(KEY_A, "tenant-a", "team-a", accounts=[limits])
    await house.publish(route("m", await house.engine("a", "b", "c")))
    for stream, left in ((False, "2"), (True, "1")):
        async with house.post({"model": "m", "prompt": "hi", "max_tokens": 9, "stream": stream}) as answer:
            assert answer.status == 200
            await answer.read()
            assert answer.headers["x-ratelimit-limit-tokens"] == "1000"
            assert answer.headers["x-ratelimit-remaining-requests"] == left
            assert answer.headers["x-ratelimit-reset-requests"].endswith("s")
    # Both have ended with 10 tokens each, of the third its reservation counts.
    async with house.post({"model": "m", "prompt": [1, 2], "max_tokens": 8}) as answer:
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(1000 - 20 - 10)
    async with house.post({"model": "m", "prompt": "hi"}) as answer:
        error = (await answer.json())["error"]
        assert answer.status == 429
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "requests")
        assert 1 <= int(answer.headers["Retry-After"]) <= 61
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"


async def test_a_request_over_the_whole_limit_is_a_400_and_a_smaller_one_is_served(house: House) -> None:
    house.api.know(
        KEY_A, "tenant-a", "team-a", accounts=[Account(name="tenant/tenant-a", tokens_per_minute=50)]
    )
    await house.publish(route("m", await house.engine("a")))
    status, document = await house.ask(max_tokens=20, n=3)
    assert (status, document["error"]["param"]) == (400, "max_tokens")
    assert (await house.ask(max_tokens=20))[0] == 200


async def test_failed_requests_give_their_tokens_back(house: House) -> None:
    limits = Account(name="key/id-a", tokens_per_minute=100, costs=[month(NANO)])
    house.api.know(KEY_A, "tenant-a", "team-a", accounts=[limits])
    engine = await house.engine("a")
    await house.publish(route("m", engine, price=PRICE))
    engine.status = 400
    for _ in range(3):
        assert (await house.ask(max_tokens=90))[0] == 400
    engine.status = 200
    assert (await house.ask(max_tokens=90))[0] == 200


async def test_the_price_counts_cached_tokens_apart_and_reaches_the_ledger(house: House) -> None:
    engine = await house.engine("a", "b")
    engine.cached_tokens = 4
    await house.publish(route("m", engine, price=PRICE))
    for stream in (False, True):
        async with house.post({"model": "m", "prompt": "hi", "stream": stream}) as answer:
            await answer.read()
    await house.api.wait_for(2)
    for record in house.api.records.values():
        assert (record["cachedTokens"], record["costNano"]) == (4, 3 * 1000 + 4 * 500 + 2 * 10_000)


async def test_an_adapter_has_a_price_of_its_own(house: House) -> None:
    engine = await house.engine("a", "b")
    adapters = [{"name": "dear", "price": {"prompt": 0.0, "cached": 0.0, "output": 40.0}}, {"name": "same"}]
    await house.publish(route("m", engine, price=PRICE, adapters=adapters))
    for model in ("m", "m:same", "m:dear"):
        assert (await house.ask(model))[0] == 200
    await house.api.wait_for(3)
    base, same, dear = (record["costNano"] for record in house.api.records.values())
    assert (same, dear) == (base, 2 * 40_000)


async def test_a_request_reserves_money_at_its_adapters_price(house: House) -> None:
    house.api.know(KEY_A, "tenant-a", "team-a", accounts=[Account(name="key/id-a", costs=[month(500_000)])])
    engine = await house.engine("a")
    dear = {"name": "dear", "price": {"prompt": 0.0, "cached": 0.0, "output": 40.0}}
    await house.publish(route("m", engine, price=PRICE, adapters=[dear]))
    status, document = await house.ask("m:dear", max_tokens=30)
    assert (status, document["error"]["param"]) == (400, "max_tokens")
    assert (await house.ask("m", max_tokens=30))[0] == 200


async def test_a_spent_budget_is_insufficient_quota(house: House) -> None:
    house.api.know(KEY_A, "tenant-a", "team-a", accounts=[Account(name="key/id-a", costs=[month(60_000)])])
    engine = await house.engine("a", "b", "c")
    await house.publish(route("m", engine, price=PRICE), route("free", engine))
    assert (await house.ask(max_tokens=4))[0] == 200
    async with house.post({"model": "m", "prompt": "hi", "max_tokens": 4}) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (429, "insufficient_quota")
        assert int(answer.headers["Retry-After"]) > 60
    assert (await house.ask("free", max_tokens=4))[0] == 200
    async with house.session.get(house.internal + "/metrics") as metrics:  # type: ignore[union-attr]
        assert 'busbar_gateway_requests_limited_total{kind="money"} 1.0' in await metrics.text()


async def test_what_was_used_is_exact_over_a_kill_9(process: Process) -> None:
    """One request delivered to the API, one on disk only, one cut off in mid-stream: none is forgotten, none twice."""
    house = process.house
    limits = Account(name="key/id-a", tokens_per_minute=1000, costs=[month(NANO)])
    house.api.know(KEY_A, "tenant-a", "team-a", accounts=[limits])
    engine = await house.engine("a", "b", "c")
    await house.operator.publish(route("m", engine, price=PRICE))
    await process.start()
    assert text_of(await process.stream()) == "abc"
    await house.api.wait_for(1)
    house.api.away = True
    assert text_of(await process.stream()) == "abc"
    engine.pause_at = 2
    async with process.post(stream=True, max_tokens=100) as response:
        got = b""
        while b'"b"' not in got:
            got += await response.content.readuntil(b"\n\n")
        await process.end(signal.SIGKILL)
        with pytest.raises(aiohttp.ClientError):
            await response.content.read()
    async with asyncio.timeout(PATIENCE_S):
        await engine.cancelled.wait()
    engine.pause_at = None
    house.api.away = False
    used_tokens = 10 + 10 + 9
    spent = 37_000 + 37_000 + 27_000

    # The budget is now so small that a billionth too much or too little would show.
    for limit, status in ((spent + 17_000 - 1, 429), (spent + 17_000, 200)):
        await process.end(signal.SIGKILL)
        limits = Account(name="key/id-a", tokens_per_minute=1000, costs=[month(limit)])
        house.api.know(KEY_A, "tenant-a", "team-a", accounts=[limits])
        await process.start()
        async with process.post(prompt=[1] * 7, max_tokens=1) as answer:
            assert answer.status == status, await answer.text()
            left = int(answer.headers["x-ratelimit-remaining-tokens"])
    assert left == 1000 - used_tokens - 8
    records: list[dict[str, Any]] = list(house.api.records.values())
    assert sum(r["costNano"] for r in records if r["completionTokens"] in (2, 3)) in (spent, spent + 37_000)
