"""Whether stopping anybody could give a claim its watts: a bound that saves searches and changes no plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from tests.scheduler.build import NOW, cluster, job, placed, tenant
from tests.scheduler.strategies import capped, powered
from tests.scheduler.test_power import on_feeds

from busbar.scheduler import Plan, Policy, PowerDomain, Snapshot, plan
from busbar.scheduler.search import proposal
from busbar.scheduler.search.victims import choose_victims

POLICY = Policy(solver=False)


def _searches(snapshot: Snapshot) -> tuple[int, Plan]:
    """How often victims were looked for, and the plan."""
    calls = 0

    def counted(*given: object) -> object:
        nonlocal calls
        calls += 1
        return choose_victims(*given)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proposal, "choose_victims", counted)
        made = plan(snapshot, POLICY, NOW)[0]
    return calls, made


def _borrowed(budget_w: float) -> Snapshot:
    """Team a waits with a guarantee of 8 accelerators; team b holds two of three nodes, at 700 W each accelerator."""
    borrowed = [job(f"b{i}", "b", size=8, on=placed("H100", f"H100-000{i}", size=8)) for i in range(2)]
    tenants = (tenant("a", H100=(8, None, None)), tenant("b"))
    bare = cluster(*borrowed, job("mine", "a", size=8), tenants=tenants, H100=3)
    return on_feeds(bare, lambda _: "hall", PowerDomain("hall", budget_w))


def test_nobody_is_searched_for_where_all_together_give_too_few_watts() -> None:
    calls, made = _searches(_borrowed(5000.0))
    assert calls == 0
    assert made.actions == ()
    calls, made = _searches(_borrowed(11_200.0))
    assert calls > 0
    assert {action.job for action in made.actions if action.to is not None} == {"uid-mine"}


def test_only_victims_that_the_claim_may_stop_count() -> None:
    snapshot = _borrowed(11_200.0)
    kept = tuple(replace(one, preemptible=one.tenant == "a") for one in snapshot.jobs)
    assert _searches(replace(snapshot, jobs=kept))[0] == 0


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(powered() | capped())
def test_no_plan_is_another_without_the_bounds(snapshot: Snapshot) -> None:
    expected = plan(snapshot, POLICY, NOW)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proposal, "could_carry", lambda claim: True)
        patch.setattr(proposal, "carried_without", lambda claim, groups: True)
        assert plan(snapshot, POLICY, NOW)[0] == expected
