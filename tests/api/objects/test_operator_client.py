"""Requests to the operator: one for many pages, and previews passed on."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from busbar.api.errors import Unavailable
from busbar.api.objects.operator_client import OperatorClient
from busbar.kube.contracts.preview import NodeLoad
from busbar.kube.contracts.service_plan import ServicePlanRequest
from busbar.kube.contracts.service_series import SeriesSpan


@pytest.mark.parametrize("away", [True, False])
async def test_those_who_wait_share_one_answer_or_one_failure(
    away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = OperatorClient("http://127.0.0.1:9", "/nowhere")
    fetches = 0
    release = asyncio.Event()

    async def fetch(*_: Any) -> str:
        nonlocal fetches
        fetches += 1
        await release.wait()
        if away:
            raise Unavailable("the operator does not answer", retry_after_s=5)
        return '{"nodes": [{"name": "n", "pool": "p", "accelerator": "L4", "ready": true, "capacity": 8, "allocated": 2}]}'

    monkeypatch.setattr(client, "_fetch", fetch)
    waiting = [asyncio.create_task(client.nodes()) for _ in range(20)]
    await asyncio.sleep(0)
    release.set()
    answers: list[object] = await asyncio.gather(*waiting, return_exceptions=True)
    assert fetches == 1
    if away:
        assert {(type(a), getattr(a, "retry_after_s", None)) for a in answers} == {(Unavailable, 5)}
    else:
        assert [node.share for answer in answers for node in cast(list[NodeLoad], answer)] == [0.25] * 20


async def test_a_draft_is_sent_with_the_callers_standing_and_its_answer_comes_back_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = OperatorClient("http://127.0.0.1:9", "/nowhere")
    sent: list[Any] = []
    said = (
        '{"startsNow": false, "possible": true, "reason": "It waits.", "when": "Later", "code": "Position"}'
    )

    async def fetch(*request: Any) -> str:
        sent.append(request)
        return said

    monkeypatch.setattr(client, "_fetch", fetch)
    draft = {"kind": "TrainingJob", "spec": {"template": {"image": "x"}}}
    found = await client.preview(draft, admin=True)
    assert sent == [("POST", "/preview", {"object": draft, "admin": True})]
    assert (found.reason, found.waits, found.start_p50_seconds) == ("It waits.", True, None)
    said = "[]"
    with pytest.raises(Unavailable, match="cannot be read"):
        await client.preview(draft, admin=False)


async def test_a_question_for_a_plan_is_passed_on_and_its_answer_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = OperatorClient("http://127.0.0.1:9", "/nowhere")
    sent: list[Any] = []

    async def fetch(*request: Any) -> str:
        sent.append(request)
        return '{"possible": false, "reason": "Nothing is known.", "rate": 4}'

    monkeypatch.setattr(client, "_fetch", fetch)
    asked = ServicePlanRequest(namespace="team", name="web", rate=4, ttft_milliseconds=500)
    found = await client.service_plan(asked)
    body = {"namespace": "team", "name": "web", "rate": 4.0, "ttftMilliseconds": 500.0}
    assert sent == [("POST", "/service-plan", body)]
    assert (found.possible, found.reason, found.pools) == (False, "Nothing is known.", ())


async def test_the_series_of_a_service_are_asked_for_by_its_name_and_span(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = OperatorClient("http://127.0.0.1:9", "/nowhere")
    sent: list[Any] = []

    async def fetch(*request: Any) -> str:
        sent.append(request)
        return (
            '{"namespace": "team", "name": "web", "span": "24h", "begins": "2026-11-29T00:00:00Z", "percentile": 99,'
            ' "requestsPerSecond": [null, 2.5]}'
        )

    monkeypatch.setattr(client, "_fetch", fetch)
    found = await client.service_series("team", "web", SeriesSpan.DAY)
    assert sent == [("GET", "/service-series?namespace=team&name=web&span=24h", None)]
    assert (found.requests_per_second, found.pools) == ((None, 2.5), ())
