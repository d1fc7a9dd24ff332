"""A gang over several pools that are alike; and nothing else changes for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.scheduler import (
    Event,
    Job,
    JobId,
    Placement,
    Policy,
    Pool,
    Reservation,
    Snapshot,
    Tenant,
    applied,
    check_plan,
    plan,
    react,
    updated,
    what_if,
)
from busbar.scheduler.model.alike import Together, standing_for
from busbar.scheduler.model.snapshot import Delta, Node

from ..build import NOW, gpus, job, placed

POLICY = Policy(solver_seconds=None)


def cluster(*jobs: Job, old: int = 1, new: int = 1, **differs: Any) -> Snapshot:
    """Two pools of H100 with so many nodes of eight; `differs`: what the new one has of its own."""
    pools = (Pool("old", "H100"), replace(Pool("new", "H100"), **differs))
    nodes = tuple(
        Node(f"{name}-{i}", name, gpus(8)) for name, n in (("old", old), ("new", new)) for i in range(n)
    )
    return Snapshot(pools, nodes, (Tenant("a"), Tenant("b")), jobs)


def placements(snapshot: Snapshot) -> dict[str, Placement]:
    made, _ = plan(snapshot, POLICY, NOW)
    assert check_plan(snapshot, made) == []
    after = applied(snapshot, made, NOW)
    assert plan(after, POLICY, NOW)[0].actions == ()
    return {one.name: one.run.placement for one in after.jobs if one.run is not None}


def test_a_gang_takes_nodes_of_two_pools_and_is_in_the_pool_of_its_first_node() -> None:
    found = placements(cluster(job("gang", size=8, pods=2)))["gang"]
    assert (sorted(found.nodes), found.pool) == (["new-0", "old-0"], found.nodes[0].partition("-")[0])


def test_a_gang_stays_in_one_pool_if_one_holds_it() -> None:
    found = placements(cluster(job("gang", size=8, pods=2), old=2, new=1))["gang"]
    assert (found.pool, sorted(found.nodes)) == ("old", ["old-0", "old-1"])


@pytest.mark.parametrize(
    "differs",
    [{"accelerator": "A100"}, {"tenants": ("b",)}, {"price_per_hour": 2.0}, {"reserved": gpus(1)}],
    ids=["type", "tenants", "price", "kept free"],
)
def test_pools_that_differ_are_not_brought_together(differs: dict[str, Any]) -> None:
    assert placements(cluster(job("gang", size=8, pods=2), **differs)) == {}


def test_a_job_that_names_a_pool_keeps_to_it() -> None:
    only = replace(job("gang", size=8, pods=2), pools=("old",))
    assert placements(cluster(only)) == {}
    assert placements(cluster(replace(only, pools=("new", "old"))))["gang"].pods == 2
    assert set(placements(cluster(only, old=2))["gang"].nodes) == {"old-0", "old-1"}
    single = replace(job("one", size=8), pools=("old",))
    taken = job("r", "b", 8, on=placed("old", "old-0", size=8, accelerator="H100"), preemptible=False)
    assert "one" not in placements(cluster(single, taken))


def test_a_required_domain_is_kept() -> None:
    gang = replace(job("gang", size=8, pods=2), required_domain=1)
    apart = cluster(gang)
    assert placements(apart) == {}
    racks = tuple(replace(node, topology=("rack",)) for node in apart.nodes)
    assert placements(replace(apart, nodes=racks))["gang"].pods == 2


def test_what_runs_is_where_the_caller_said() -> None:
    runs = job("r", "b", 8, on=placed("old", "old-0", size=8, accelerator="H100"), priority=1)
    snapshot = cluster(runs, job("w", "b", 8, pods=2, priority=500))
    made, _ = plan(snapshot, POLICY, NOW)
    assert check_plan(snapshot, made) == []
    stopped = next(action for action in made.actions if action.job == runs.id)
    assert runs.run is not None
    assert stopped.assumed == runs.run.placement


def test_an_answer_to_an_event_uses_both_pools_and_keeps_reservations() -> None:
    fixed = job("r", size=8, on=placed("old", "old-0", size=8, accelerator="H100"), preemptible=False)
    gang = job("gang", size=8, pods=2, priority=500)
    before = cluster(fixed, gang)
    last, memo = plan(before, POLICY, NOW)
    (kept,) = last.reservations
    assert sorted(kept.placement.nodes) == ["new-0", "old-0"]
    assert kept.placement.pool == kept.placement.nodes[0].partition("-")[0]
    held = last.record(gang.id)
    assert held is not None
    assert held.reservation == kept
    after = updated(applied(before, last, NOW), Delta(gone_jobs=(fixed.id,)))
    event = Event.between(before, after, NOW + 1)
    answer, _ = react(after, last, event, memo)
    assert react(after, last, event, None)[0] == answer
    assert check_plan(after, answer) == []
    assert [action.job for action in answer.actions] == [gang.id]


def test_a_gang_whose_pools_are_not_alike_any_more_keeps_its_nodes() -> None:
    across = placed("new", "new-0", "old-0", size=8, accelerator="H100")
    gang = replace(job("gang", size=8, pods=2, on=across), preemptible=False)
    snapshot = cluster(gang, job("w", "b", 8), price_per_hour=2.0)
    assert "w" not in placements(snapshot)
    stopping = replace(gang, run=replace(gang.run, releasing=True)) if gang.run is not None else gang
    made, _ = plan(replace(snapshot, jobs=(stopping, snapshot.jobs[1])), POLICY, NOW)
    assert all(action.after for action in made.actions)


def test_a_forecast_knows_that_the_gang_will_fit() -> None:
    fixed = job("r", size=8, on=placed("old", "old-0", size=8, accelerator="H100"), preemptible=False)
    found = what_if(cluster(fixed), POLICY, job("gang", "b", 8, pods=2), NOW)
    assert not found.starts_now
    assert found.p50_s is not None
    assert what_if(cluster(), POLICY, job("gang", size=8, pods=2), NOW).starts_now


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 3), st.sampled_from("ab")), max_size=6),
    st.integers(0, 2),
    st.integers(0, 2),
)  # fmt: skip
def test_plans_are_allowed_and_settle(asked: list[tuple[int, int, str]], old: int, new: int) -> None:
    jobs = [job(f"j{i}", whose, size, pods) for i, (size, pods, whose) in enumerate(asked)]
    placements(cluster(*jobs, old=old, new=new))


def test_pools_with_different_fabrics_are_not_alike() -> None:
    pools = [Pool("a", "H100", fabric="ib"), Pool("b", "H100", fabric="ib"), Pool("c", "H100")]
    assert standing_for(pools) == {"a": "a", "b": "a", "c": "c"}


def test_a_snapshot_without_pools_that_are_alike_stays_the_same_object() -> None:
    snapshot = cluster(job("x"), price_per_hour=2.0)
    together = Together.of(snapshot)
    assert together.snapshot is snapshot
    made, _ = plan(snapshot, POLICY, NOW)
    assert together.parted(made) is made
    assert standing_for(snapshot.pools) == {"old": "old", "new": "new"}
    reserved = Reservation(snapshot.jobs[0].id, placed("old", "old-0"), (NOW,), NOW, 1)
    assert together.joined(replace(made, reservations=(reserved,))).reservations == (reserved,)


def test_the_place_of_a_start_that_waits_is_in_the_pool_that_stands_for_its_own() -> None:
    snapshot = cluster(job("x"), old=1, new=1)
    together = Together.of(snapshot)
    made, _ = plan(snapshot, POLICY, NOW)
    place = placed("old", "old-0", accelerator="H100")
    waits = replace(made.actions[0], to=place, after=(JobId("y"),))
    (joined,) = together.joined(replace(made, actions=(waits,))).actions
    assert joined == replace(waits, to=replace(place, pool="new"))
