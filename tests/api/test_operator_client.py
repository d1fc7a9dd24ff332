"""Snapshots from the operator: one request for many pages."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from busbar.api import operator_client
from busbar.api.errors import Unavailable
from busbar.api.operator_client import OperatorClient


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
        return "snapshot"

    monkeypatch.setattr(client, "_fetch", fetch)
    monkeypatch.setattr(operator_client, "_decode", lambda text: text)
    waiting = [asyncio.create_task(client.current()) for _ in range(20)]
    await asyncio.sleep(0)
    release.set()
    answers: list[object] = await asyncio.gather(*waiting, return_exceptions=True)
    assert fetches == 1
    if away:
        assert {(type(a), getattr(a, "retry_after_s", None)) for a in answers} == {(Unavailable, 5)}
    else:
        assert set(answers) == {"snapshot"}
