"""The ledger's checkpoint at a clean stop: what it has, when it is written, and what the next operator makes of it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from dataclasses import replace
from typing import Any, cast

import pytest
from tests.operator.builders import SETTINGS
from tests.operator.energy.test_checkpoint import Mortal
from tests.operator.energy.test_ledger import uuids
from tests.operator.serving.test_history import Server
from tests.operator.serving.test_series_store import Lost

from busbar.kube.client import KubeClient
from busbar.operator.agent.simulated import SimulatedBoards
from busbar.operator.energy.checkpoint import decode
from busbar.operator.energy.keeper import NAME, CheckpointKeeper
from busbar.operator.write.kept_object import DATA

PERIOD_S = 600.0


def keeper(server: Server, row: Mortal, period_s: float = PERIOD_S) -> CheckpointKeeper:
    client = cast(KubeClient, server)
    settings = replace(SETTINGS, power_key=b"k" * 32, energy_checkpoint_s=period_s)
    return CheckpointKeeper(client, client, row.ledger, settings, lambda: row.second + 0.9)


def ticks(row: Mortal, seconds: int) -> None:
    for _ in range(seconds):
        row.tick()


async def ran(of: CheckpointKeeper, seconds: float = 0.05) -> None:
    """It runs for a moment, and is cancelled."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(of.run(), seconds)


async def test_a_stop_writes_what_was_counted_since_the_last_period() -> None:
    server, row = Server(), Mortal()
    ticks(row, 20)
    stopped = keeper(server, row)
    await ran(stopped)
    assert server.writes == 0
    await stopped.save()
    found = decode(base64.b64decode(server.objects[NAME]["binaryData"][DATA]))
    assert found == row.ledger.checkpoint(row.second + 0.9)
    assert found.totals["uid-row"] == pytest.approx(row.feed("row").joules, abs=0.01)


async def test_an_operator_that_heard_no_node_leaves_the_last_checkpoint_as_it_is() -> None:
    server, row = Server(), Mortal()
    ticks(row, 5)
    await keeper(server, row).save()
    kept = dict(server.objects)
    row.ledger = row.born()
    await keeper(server, row).save()
    assert server.objects == kept


async def test_a_write_that_the_stop_interrupted_does_not_keep_the_last_one_out() -> None:
    server, row = Lost(), Mortal()
    ticks(row, 5)
    stopped = keeper(server, row, period_s=0.01)
    await ran(stopped)
    assert server.writes == 1
    ticks(row, 5)
    await stopped.save()
    found = decode(base64.b64decode(server.objects[NAME]["binaryData"][DATA]))
    assert found.totals["uid-row"] == pytest.approx(row.feed("row").joules, abs=0.01)


async def estimated_wrong_j(*, clean: bool) -> float:
    """By how much the feed's total is wrong where agents restart with the operator, 20 s after the last periodic checkpoint
    and after their boards began to draw less."""
    server, row = Server(), Mortal()
    ticks(row, 60)
    stopped = keeper(server, row)
    await stopped.save()
    periodic: dict[str, Any] = dict(server.objects)
    for name, agent in row.agents.items():
        assert isinstance(agent.boards, SimulatedBoards)
        agent.boards.written.update(dict.fromkeys(uuids(name), 50.0))
    ticks(row, 20)
    if clean:
        await stopped.save()
    else:
        server.objects = periodic
    row.agents = {name: row.agent(name, epoch="e1") for name in row.agents}
    row.ledger, row.readings = row.born(), {}
    await keeper(server, row).load()
    ticks(row, 3)
    return abs(row.feed("row").joules - sum(row.truth_j.values()))


async def test_where_meters_begin_anew_meanwhile_the_last_mean_counts_from_the_stop_on() -> None:
    killed_j, stopped_j = await estimated_wrong_j(clean=False), await estimated_wrong_j(clean=True)
    assert stopped_j < killed_j / 4
