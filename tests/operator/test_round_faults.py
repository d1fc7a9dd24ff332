"""Faults in the scheduling loop, without a server: which end a round, and which the operator."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tests.operator.builders import SETTINGS

from busbar.operator.errors import Fenced
from busbar.operator.metrics import Metrics
from busbar.operator.rounds import Rounds


def rounds() -> Rounds:
    nothing: Any = None
    return Rounds(nothing, nothing, replace(SETTINGS, round_debounce_s=0.0, round_period_s=0.01), Metrics())


async def test_a_fault_in_planning_ends_the_round_and_not_the_operator() -> None:
    made, tried = rounds(), asyncio.Event()
    calls = 0

    async def once(*, full: bool = True) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyError("a fault of ours")
        tried.set()

    made.once = once  # type: ignore[method-assign]
    made.wake()
    task = asyncio.create_task(made.run())
    async with asyncio.timeout(5):
        await tried.wait()  # again after the period, with nobody waking it
    task.cancel()


async def test_a_lost_lease_ends_the_rounds() -> None:
    made = rounds()

    async def once(*, full: bool = True) -> Any:
        raise Fenced("not held")

    made.once = once  # type: ignore[method-assign]
    made.wake()
    with pytest.raises(Fenced):
        async with asyncio.timeout(5):
            await made.run()
