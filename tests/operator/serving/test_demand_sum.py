"""The demand of several gateways is read as one: nothing counts twice, and a restart is no fall."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.operator.builders import SETTINGS

from busbar.kube.contracts.allowances import CostAllowance
from busbar.kube.contracts.demand import (
    AccountUse,
    Demand,
    ReplicaContact,
    ServiceDemand,
    SizeCount,
    Totals,
    WindowDemand,
)
from busbar.kube.informer import Key
from busbar.operator.serving.attainment import Attainment
from busbar.operator.serving.demand import DemandReader
from busbar.operator.serving.demand_sum import FRESH_S, SILENT_S, DemandSum

NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)


def demand(arrivals: int = 0, counted: float = 500.0, accounts: Any = (), **fields: Any) -> Demand:
    size = SizeCount(prompt=1, output=2, count=2, prompt_tokens=200, output_tokens=30)
    window = WindowDemand(seconds=60, arrivals=arrivals, answered=arrivals, sizes=[size] if arrivals else [])
    service = ServiceDemand(
        namespace="team",
        name="web",
        arrivals=arrivals,
        windows=[window],
        totals=Totals(answered=arrivals, within=arrivals),
        **fields,
    )
    return Demand(services=[service], accounts=list(accounts), as_of=NOW, counted_seconds=counted)


def the(found: Demand | None) -> ServiceDemand:
    assert found is not None
    (service,) = found.services
    return service


def test_two_gateways_are_added_up() -> None:
    both = DemandSum(["a", "b"], 0.0)
    both.take("a", demand(5, waiting=1, in_flight=2, last_request_age_seconds=4.0), 10.0)
    both.take("b", demand(7, counted=90.0, in_flight=3, oldest_wait_seconds=2.0, overdue=1), 11.0)
    found = both.sum(11.0)
    service = the(found)
    assert (service.waiting, service.in_flight, service.arrivals, service.overdue) == (1, 5, 12, 1)
    assert (service.last_request_age_seconds, service.oldest_wait_seconds) == (5.0, 2.0)
    window = service.window(60)
    assert window is not None
    assert (window.arrivals, window.answered, window.sizes[0].count) == (12, 12, 4)
    assert found is not None
    assert found.counted_seconds == 90.0, "a window is full when it is full everywhere"


def test_each_gateway_keeps_its_own_word_on_a_replica_and_one_that_is_silent_has_none() -> None:
    both = DemandSum(["a", "b"], 0.0)
    fails = ReplicaContact(pod="web-0", url="http://10.0.0.1:9400", failures=2, failing_seconds=4.0)
    hears = ReplicaContact(pod="web-0", url="http://10.0.0.1:9400", heard_seconds=1.0)
    both.take("a", demand(5, replicas=[fails]), 10.0)
    both.take("b", demand(7, replicas=[hears]), 11.0)
    assert the(both.sum(11.0)).replicas == [fails, hears]
    both.take("b", demand(7), 11.0 + FRESH_S)
    assert the(both.sum(11.0 + FRESH_S)).replicas == [], (
        "the first is not fresh, the second has another release"
    )


def test_a_restarted_gateway_is_no_drop_and_its_requests_count_once() -> None:
    both, attained = DemandSum(["a", "b"], 0.0), Attainment()
    seen = []
    for at, a, b in ((1, 5, 7), (2, 6, 7), (3, 1, 8), (4, 2, 9)):  # a restarted before its third reading
        both.take("a", demand(a), at)
        both.take("b", demand(b), at)
        service = the(both.sum(at))
        seen.append(service.arrivals)
        assert service.totals is not None
        attained.take(service.totals, float(at))
    assert seen == [12, 13, 15, 17]
    assert attained.over(300.0, 4.0) == (1.0, 5)


def test_a_silent_gateway_keeps_replicas_for_a_while_and_raises_none() -> None:
    both = DemandSum(["a", "b"], 0.0)
    both.take("a", demand(5, in_flight=4, overdue=2, oldest_wait_seconds=9.0), 10.0)
    both.take("b", demand(7, in_flight=1), 10.0)
    for at, in_flight, overdue, counted in (
        (10.0 + FRESH_S, 5, 2, 500.0),
        (11.0 + FRESH_S, 5, 0, 0.0),
        (10.0 + SILENT_S, 1, 0, 500.0),
    ):
        both.take("b", demand(7, in_flight=1), at)
        found = both.sum(at)
        service = the(found)
        assert found is not None
        assert (service.in_flight, service.overdue, found.counted_seconds) == (in_flight, overdue, counted)
        assert service.arrivals == 12
    assert both.sum(10.0 + SILENT_S + FRESH_S + 1) is None, "nobody answers any more"


def test_a_gateway_that_was_not_heard_yet_may_have_requests() -> None:
    both = DemandSum(["a", "b"], 0.0)
    assert both.sum(1.0) is None
    both.take("a", demand(5), 1.0)
    found = both.sum(1.0)
    assert found is not None
    assert found.counted_seconds == 0.0
    both.take("a", demand(5), SILENT_S)
    found = both.sum(SILENT_S)
    assert found is not None
    assert found.counted_seconds == 500.0


def test_tokens_and_times_are_added_up_over_gateways_and_restarts() -> None:
    def told(tokens: int, **times: int) -> Demand:
        found = demand(tokens)
        totals = Totals(
            answered=tokens, prompt_tokens=tokens, first_token={int(k[1:]): n for k, n in times.items()}
        )
        services = [found.services[0].model_copy(update={"totals": totals})]
        return found.model_copy(update={"services": services})

    both = DemandSum(["a", "b"], 0.0)
    both.take("b", told(7, c30=4, c33=3), 1.0)
    seen = []
    for at, reading in enumerate((told(5, c30=5), told(6, c30=5, c31=1), told(6, c31=6)), start=1):
        both.take("a", reading, float(at))  # the third is of another process: fewer took as long
        totals = the(both.sum(float(at))).totals
        assert totals is not None
        seen.append((totals.prompt_tokens, totals.first_token))
    assert seen == [
        (12, {30: 9, 33: 3}),
        (13, {30: 9, 31: 1, 33: 3}),
        (19, {30: 9, 31: 7, 33: 3}),
    ]


@pytest.mark.parametrize(("counted", "more"), [(500.0, 0), (3.0, 7)], ids=["older", "newer than the sum"])
def test_what_a_gateway_counted_before_it_was_first_heard_is_left_out_unless_it_is_all_new(
    counted: float, more: int
) -> None:
    both = DemandSum(["a", "b"], 0.0)
    both.take("a", demand(5), 1.0)
    assert the(both.sum(1.0)).arrivals == 5
    both.take("b", demand(7, counted=counted), 4.0)
    assert the(both.sum(4.0)).arrivals == 5 + more
    both.take("b", demand(9, counted=counted + 1), 5.0)
    assert the(both.sum(5.0)).arrivals == 5 + more + 2
    both.take("b", demand(1, counted=0.5), 6.0)  # it restarts
    assert the(both.sum(6.0)).arrivals == 5 + more + 2 + 1


def test_money_that_the_ledger_has_counts_once_and_what_each_gateway_has_besides_is_added() -> None:
    def account(spent: int, pending: int) -> AccountUse:
        day = CostAllowance(
            period="day",
            started=NOW,
            ends=NOW + timedelta(days=1),
            limit_nano=1000,
            spent_nano=spent,
            pending_nano=pending,
        )
        return AccountUse(tenant="ada", requests=2, tokens=10, costs=[day])

    both = DemandSum(["a", "b"], 0.0)
    both.take("a", demand(accounts=[account(110, 10)]), 1.0)
    both.take("b", demand(accounts=[account(125, 20)]), 1.0)
    found = both.sum(1.0)
    assert found is not None
    (used,) = found.accounts
    assert (used.requests, used.tokens) == (4, 20)
    assert [(cost.spent_nano, cost.pending_nano) for cost in used.costs] == [(135, 30)]


async def test_of_one_gateway_no_services_of_the_past_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = DemandReader(replace(SETTINGS, gateway_url="http://127.0.0.1:1"), lambda _: None)
    names = [f"web-{number}" for number in range(3)]

    async def answers(session: aiohttp.ClientSession, url: str) -> Demand:
        service = ServiceDemand(namespace="team", name=names.pop(), waiting=1)
        return Demand(services=[service], as_of=NOW, counted_seconds=1.0)

    monkeypatch.setattr(reader, "_answer", answers)
    async with aiohttp.ClientSession() as session:
        for _ in range(3):
            await reader._ask(session)
    found = reader.of(Key("team", "web-0"))
    assert found is not None
    assert found.waiting == 1
    assert not any(gateway.totals for gateway in reader._sum._gateways.values())


async def test_the_reader_asks_each_gateway_and_goes_on_while_one_is_away() -> None:
    answer = demand(5, in_flight=2).model_dump_json(by_alias=True)

    async def demand_of(request: web.Request) -> web.Response:
        return web.Response(text=answer, content_type="application/json")

    app = web.Application()
    app.router.add_get("/demand", demand_of)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    for _ in range(2):
        await web.TCPSite(runner, "127.0.0.1", 0).start()
    urls = [f"http://127.0.0.1:{port}" for _, port in runner.addresses]
    reader = DemandReader(
        replace(SETTINGS, gateway_url=",".join([*urls, "http://127.0.0.1:1"])), lambda _: None
    )
    async with aiohttp.ClientSession() as session:
        await reader._ask(session)
        await reader._ask(session)
    await runner.cleanup()
    found = reader.of(Key("team", "web"))
    assert found is not None
    assert (found.in_flight, found.arrivals, reader.reading) == (4, 10, 2)
    assert reader.counted_s == 0.0, "the third may have requests"
