"""Services at zero replicas, an unavailable API or operator, and an orderly shutdown."""

from __future__ import annotations

import asyncio
import stat
from typing import Any

import pytest
from tests.gateway.parts import KEY_A2, PATIENCE_S, House, route, text_of


async def get(house: House, path: str, token: str | None = None) -> tuple[int, str]:
    assert house.session is not None
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with house.session.get(house.internal + path, headers=headers) as response:
        return response.status, await response.text()


async def demand(house: House) -> list[dict[str, Any]]:
    assert house.session is not None
    headers = {"Authorization": "Bearer of-operator"}
    async with house.session.get(house.internal + "/demand", headers=headers) as response:
        assert response.status == 200
        return list((await response.json())["services"])


async def waiting(house: House, number: int) -> None:
    """Waits until so many requests are queued."""
    async with asyncio.timeout(PATIENCE_S):
        while sum(service["waiting"] for service in await demand(house)) != number:
            pass


async def test_a_request_at_zero_shows_as_demand_and_is_answered_when_a_replica_is_ready(
    house: House,
) -> None:
    await house.publish(route("m"))
    asking = asyncio.create_task(house.ask())
    await waiting(house, 1)
    (service,) = await demand(house)
    assert (service["name"], service["arrivals"], service["inFlight"]) == ("m", 1, 0)
    await house.publish(route("m", await house.engine("awake")))
    status, answer = await asking
    assert (status, answer["choices"][0]["text"]) == (200, "awake")
    assert [s["waiting"] for s in await demand(house)] == [0]


async def test_no_request_fails_while_a_service_goes_from_one_to_two_to_zero_and_back(house: House) -> None:
    first, second, third = [await house.engine("a", "b", "c") for _ in range(3)]
    await house.publish(route("m", first))
    done: list[str] = []
    going = True

    async def client() -> None:
        while going:
            done.append(text_of(await house.stream()))

    async def reached(number: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(done) < number:  # noqa: ASYNC110
                await asyncio.sleep(0)

    clients = [asyncio.create_task(client()) for _ in range(4)]
    await reached(20)
    await house.publish(route("m", first, second))
    await reached(40)
    gone = {"pod": "x", "url": first.url, "ready": True, "draining": True}
    await house.publish(route("m", gone, second))
    await first.stop()
    await reached(60)
    await second.stop()  # before the routes change
    await house.publish(route("m"))
    await waiting(house, 4)
    await house.publish(route("m", third))
    await reached(80)
    going = False
    await asyncio.gather(*clients)
    assert set(done) == {"abc"}


async def test_the_queue_of_a_service_is_bounded_and_refusals_have_retry_after(house: House) -> None:
    await house.stop_gateway()
    house.overrides.update(hold_limit=2)
    await house.start_gateway()
    await house.publish(route("m"))
    held = [asyncio.create_task(house.ask()) for _ in range(2)]
    await waiting(house, 2)
    async with house.post({"model": "m"}) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) > 0
    await house.publish(route("m", await house.engine()))
    assert [status for status, _ in await asyncio.gather(*held)] == [200] * 2


async def test_a_request_that_waited_too_long_gets_an_error_with_retry_after(house: House) -> None:
    await house.stop_gateway()
    house.overrides.update(hold_timeout_s=0.1)
    await house.start_gateway()
    await house.publish(route("m"))
    async with house.post({"model": "m"}) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) > 0
        error = (await response.json())["error"]
    assert error["code"] == "unavailable"
    assert "became ready" in error["message"]
    assert [service["waiting"] for service in await demand(house)] == [0]


async def test_one_user_cannot_fill_the_queue(house: House) -> None:
    await house.stop_gateway()
    house.overrides.update(hold_limit=3, hold_limit_per_user=2)
    await house.start_gateway()
    await house.publish(route("m"))
    held = [asyncio.create_task(house.ask()) for _ in range(2)]
    await waiting(house, 2)
    async with house.post({"model": "m"}) as response:
        assert response.status == 429
        assert "Retry-After" in response.headers
    held.append(asyncio.create_task(house.ask(api_key=KEY_A2)))
    await waiting(house, 3)
    await house.publish(route("m", await house.engine()))
    assert [status for status, _ in await asyncio.gather(*held)] == [200] * 3


async def test_a_client_that_leaves_the_queue_is_no_demand_any_more(house: House) -> None:
    await house.publish(route("m"))
    asking = asyncio.create_task(house.ask())
    await waiting(house, 1)
    asking.cancel()
    await waiting(house, 0)


async def test_a_suspended_service_answers_at_once(house: House) -> None:
    await house.publish(route("m", suspended=True))
    status, answer = await house.ask()
    assert status == 503
    assert "suspended" in answer["error"]["message"]


async def test_inference_goes_on_without_operator_and_api(house: House) -> None:
    await house.publish(route("m", await house.engine("a")))
    assert (await house.ask())[0] == 200
    await house.operator.stop()
    house.api.away = True
    assert (await house.ask())[0] == 200
    assert text_of(await house.stream()) == "a"
    house.api.away = False
    await house.api.wait_for(3)
    assert house.api.total("id-a") == (3, 21, 3)


async def test_a_gateway_that_starts_without_an_operator_uses_the_last_routes(house: House) -> None:
    await house.publish(route("m", await house.engine("a")))
    assert (await house.ask())[0] == 200
    saved = await house.routes_saved()
    await house.stop_gateway()
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600  # it contains bearers
    await house.operator.stop()
    await house.start_gateway()
    assert (await house.ask())[0] == 200


async def test_saved_routes_that_cannot_be_read_are_ignored(house: House) -> None:
    await house.publish(route("m", await house.engine("a")))
    saved = await house.routes_saved()
    await house.stop_gateway()
    saved.write_bytes(b"{")
    await house.start_gateway()
    await house.publish(route("m", await house.engine("b")))
    assert (await house.ask())[0] == 200


async def test_the_stream_of_routes_is_opened_again(house: House) -> None:
    await house.publish(route("m"))
    assert house.operator.connections == 1
    await house.operator.stop()
    await house.operator.start()
    await house.publish(route("m", await house.engine("a")))
    assert house.operator.connections == 2
    assert (await house.ask())[0] == 200


async def test_demand_is_for_the_operator_only(house: House) -> None:
    await house.publish(route("m"))
    assert (await get(house, "/demand"))[0] == 401
    assert (await get(house, "/demand", "forged"))[0] == 401
    assert (await get(house, "/demand", "of-somebody"))[0] == 403
    assert (await get(house, "/demand", "of-operator"))[0] == 200


async def test_metrics_name_a_service_only_to_those_who_may_know(house: House) -> None:
    await house.publish(route("secret-name", await house.engine("a")))
    await house.ask("secret-name")
    for token in (None, "forged", "of-somebody"):
        status, text = await get(house, "/metrics", token)
        assert status == 200
        assert 'busbar_gateway_requests_total{code="200"} 1.0' in text
        assert "secret-name" not in text
        assert "team-a" not in text
    _, text = await get(house, "/metrics", "of-operator")
    line = 'busbar_gateway_service_tokens_total{kind="completion",namespace="team-a",service="secret-name",tenant="tenant-a"} 1.0'
    assert line in text


async def test_the_public_port_offers_neither_demand_nor_metrics(house: House) -> None:
    assert house.session is not None
    for path in ("/demand", "/metrics", "/internal/usage"):
        async with house.session.get(house.public + path) as response:
            assert response.status == 404


@pytest.mark.parametrize("stream", [True, False])
async def test_sigterm_finishes_running_requests_and_refuses_waiting_ones(house: House, stream: bool) -> None:
    engine = await house.engine("a", "b")
    engine.pause_at = 1
    await house.publish(route("m", engine), route("asleep"))
    running = asyncio.create_task(house.stream() if stream else house.ask())
    async with asyncio.timeout(PATIENCE_S):
        await engine.arrived.wait()
    held = asyncio.create_task(house.ask("asleep"))
    await waiting(house, 1)
    stopping = asyncio.create_task(house.stop_gateway())
    status, _ = await held
    assert status == 503
    assert not running.done()
    engine.go.set()
    result = await running
    assert (text_of(result) if stream else result[1]["choices"][0]["text"]) == "ab"  # type: ignore[arg-type]
    await stopping
    assert house.api.total("id-a") == (1, 7, 2)


async def test_the_demand_tells_how_many_came_how_large_they_were_and_who_got_what_was_promised(
    house: House,
) -> None:
    kept, missed = {"ttftMs": 600_000, "tpotMs": 600_000}, {"ttftMs": 1, "tpotMs": 1}
    engine = await house.engine("a", "b", "c")
    await house.publish(route("m", engine, slo=kept))
    assert text_of(await house.stream()) == "abc"
    assert (await house.ask())[0] == 200
    (service,) = await demand(house)
    totals = service["totals"]
    times = [totals.pop(name) for name in ("firstToken", "perToken")]
    assert totals == {
        "answered": 2, "within": 2, "lateFirstToken": 0, "lateTokens": 0, "refused": 0, "promptTokens": 14,
        "outputTokens": 6,
    }  # fmt: skip
    assert [sum(each.values()) for each in times] == [1, 1], "of the stream; another answer shows no times"
    assert [w["seconds"] for w in service["windows"]] == [10, 60, 180]
    assert service["oldestWaitSeconds"] is None
    await house.publish(route("m", slo=missed))
    asking = asyncio.create_task(house.ask())
    await waiting(house, 1)
    async with asyncio.timeout(PATIENCE_S):
        # An answer that is no stream is late after the targets of its three tokens together.
        while ((await demand(house))[0]["oldestWaitSeconds"] or 0.0) <= 0.003:
            pass
    assert (await demand(house))[0]["overdue"] == 1
    await house.publish(route("m", engine, slo=missed))
    assert (await asking)[0] == 200
    assert (await demand(house))[0]["totals"]["within"] == 2
