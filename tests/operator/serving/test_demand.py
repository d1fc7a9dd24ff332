"""The demand that the gateway reports."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import aiohttp
from aiohttp import web
from tests.operator.builders import SETTINGS

from busbar.kube.informer import Key
from busbar.operator.serving.demand import DemandReader


async def test_a_demand_that_comes_in_pieces_is_read_whole() -> None:
    services = [{"namespace": "team", "name": f"web-{i}", "inFlight": i} for i in range(50)]
    text = json.dumps({"services": services, "asOf": "2026-11-21T12:00:00Z"}).encode()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(text), 1000):
            await response.write(text[start : start + 1000])
            await asyncio.sleep(0)
        return response

    app = web.Application()
    app.router.add_get("/demand", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    settings = replace(SETTINGS, gateway_url=f"http://127.0.0.1:{runner.addresses[0][1]}")
    reader = DemandReader(settings, lambda key: None)
    async with aiohttp.ClientSession() as session:
        await reader._ask(session)
    await runner.cleanup()
    found = reader.of(Key("team", "web-49"))
    assert found is not None
    assert found.in_flight == 49
