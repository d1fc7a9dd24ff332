"""What a round decides: a full plan first, then answers to what changed."""

from __future__ import annotations

from typing import Any, cast

import pytest

from busbar.operator.rounds import Rounds
from busbar.scheduler import Job, JobId, Node, Policy, Pool, Resources, Snapshot, SolverError, Tenant, updated
from busbar.scheduler.types import Delta

NOW = 1_000_000.0


def _job(name: str, size: int) -> Job:
    return Job(JobId(name), name, "ns", "a", per_pod=Resources(1000 * size), submitted_at_s=NOW)


def _rounds() -> Rounds:
    unused = cast(Any, None)
    return Rounds(unused, unused, unused, unused, Policy())


def _cluster(*jobs: Job) -> Snapshot:
    return Snapshot((Pool("H100", "H100"),), (Node("n", "H100", Resources(8000)),), (Tenant("a"),), jobs)


async def test_between_full_plans_only_what_changed_is_answered() -> None:
    rounds = _rounds()
    before = _cluster(_job("wide", 16))
    first = await rounds._decide(before, NOW, full=False)
    assert first.priced_at_s == NOW
    after = updated(before, Delta(jobs=(_job("new", 2),)))
    second = await rounds._decide(after, NOW + 5, full=False)
    assert [str(action.job) for action in second.actions] == ["new"]
    assert second.priced_at_s == NOW
    assert second.record(JobId("wide")) == first.record(JobId("wide"))
    third = await rounds._decide(after, NOW + 10, full=True)
    assert third.priced_at_s == NOW + 10
    kept = third.record(JobId("wide"))
    assert kept is not None
    assert kept.round == third.id


async def test_a_start_that_was_refused_is_ordered_again() -> None:
    rounds = _rounds()
    snapshot = _cluster(_job("x", 1))
    first = await rounds._decide(snapshot, NOW, full=True)
    again = await rounds._decide(snapshot, NOW + 1, full=False)
    assert again.actions == first.actions != ()


async def test_a_broken_solver_is_said_and_the_plan_is_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object, **more: object) -> None:
        raise SolverError("out of order")

    monkeypatch.setattr("busbar.scheduler.solver.solve", broken)
    jobs = [_job(f"x{i}", 5) for i in range(2)]
    made = await _rounds()._decide(_cluster(*jobs), NOW, full=True)
    assert len(made.actions) == 1
    assert "out of order" in caplog.text
