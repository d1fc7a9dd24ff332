"""Faults in the scheduling loop, without a server: which of them end a round, and which end the operator."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tests.operator.builders import SETTINGS

from busbar.operator.errors import Fenced, PlanRefused
from busbar.operator.metrics import Metrics
from busbar.operator.scheduling import rounds as module
from busbar.operator.scheduling.rounds import Rounds
from busbar.scheduler import Job, JobId, Memo, Node, Plan, Policy, Pool, Resources, Snapshot, Tenant, plan

NOW = 1_000_000.0
WAITING = Snapshot(
    (Pool("H100", "H100"),),
    (Node("n", "H100", Resources(8000)),),
    (Tenant("a"),),
    (Job(JobId("x"), "x", "ns", "a", submitted_at_s=NOW),),
)


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
    async with asyncio.timeout(60):
        await tried.wait()  # again after the period, without a trigger
    task.cancel()


async def test_a_lost_lease_ends_a_round_and_none_begins_while_they_are_stopped() -> None:
    made, tried = rounds(), asyncio.Event()
    calls = 0

    async def once(*, full: bool = True) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            tried.set()
        raise Fenced("not held")

    made.once = once  # type: ignore[method-assign]
    made.wake()
    async with made.stopped:
        task = asyncio.create_task(made.run())
        await asyncio.sleep(0.05)
        assert calls == 0
    async with asyncio.timeout(60):
        await tried.wait()
    assert not task.done()
    task.cancel()


def spoiled(snapshot: Snapshot, policy: Policy, now: float, memo: Memo | None = None) -> tuple[Plan, Memo]:
    """A plan that gives the job nine pods although it requests one."""
    made, memo = plan(snapshot, policy, now, memo)
    actions = [
        replace(a, to=replace(a.to, nodes=("n",) * 9)) if a.to is not None else a for a in made.actions
    ]
    return replace(made, actions=tuple(actions)), memo


async def test_a_plan_that_the_checker_refuses_is_made_again_from_the_snapshot_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = rounds()
    calls: list[Policy] = []

    def once_spoiled(
        snapshot: Snapshot, policy: Policy, now: float, memo: Memo | None = None
    ) -> tuple[Plan, Memo]:
        calls.append(policy)
        return (spoiled if len(calls) == 1 else plan)(snapshot, policy, now, memo)

    monkeypatch.setattr(module, "plan", once_spoiled)
    good = made._decide(WAITING, NOW, full=True)
    assert [policy.solver for policy in calls] == [True, False]
    assert good.actions == plan(WAITING, Policy(), NOW)[0].actions != ()
    assert made._metrics.refused_plans._value.get() == 1
    assert "9 pods, wanted 1..1" in caplog.text
    assert made._last is None


async def test_of_a_plan_that_is_refused_twice_nothing_is_carried_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, again = rounds(), asyncio.Event()
    monkeypatch.setattr(module, "plan", spoiled)
    with pytest.raises(PlanRefused, match="9 pods"):
        made._decide(WAITING, NOW, full=True)
    assert made._metrics.refused_plans._value.get() == 2
    calls = 0

    async def once(*, full: bool = True) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            again.set()
        made._decide(WAITING, NOW, full=full)

    made.once = once  # type: ignore[method-assign]
    made.wake()
    task = asyncio.create_task(made.run())
    async with asyncio.timeout(60):
        await again.wait()  # a refused plan does not end the rounds
    task.cancel()
    assert "nothing is carried out in this round" in caplog.text
