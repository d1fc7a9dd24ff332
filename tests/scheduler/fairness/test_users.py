"""The third level of fair share: the users of one tenant, and the effect of past use."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from random import Random

from benchmarks.scheduling.entitled import rows
from hypothesis import given
from hypothesis import strategies as st

from busbar.scheduler import (
    ActionKind,
    DecayedUsage,
    Event,
    Job,
    Plan,
    Policy,
    Snapshot,
    Tenant,
    User,
    applied,
    check_plan,
    plan,
    react,
    updated,
)
from busbar.scheduler.fairness.fair_share import Claim, Demand, entitlements, user_shares
from busbar.scheduler.model.snapshot import Delta
from busbar.scheduler.search.state import PlanningState

from ..build import NOW, cluster, job, placed
from ..strategies import KINDS, USERS, peopled, snapshots
from ..test_planner import decide, started, stopped
from ..test_properties import POLICY, quiet
from ..test_react import changes

WEEK_S = Policy().usage_half_life_s


def of(user: str, one: Job) -> Job:
    return replace(one, user=user)


def test_the_hand_worked_clusters_are_exact() -> None:
    assert [row["case"] for row in rows() if not row["met"]] == []
    assert len(rows()) == 32


def test_a_user_who_comes_late_gets_a_share_of_free_capacity() -> None:
    many = [of("u", job(f"u{i}", submitted=NOW - 9000)) for i in range(20)]
    few = [of("v", job(f"v{i}", submitted=NOW - 10)) for i in range(3)]
    result = decide(cluster(*many, *few, H100=1))
    assert Counter(name[0] for name in started(result)) == {"u": 5, "v": 3}


def test_a_colleague_below_its_share_takes_back_what_another_has_above() -> None:
    held = [of("u", job(f"u{i}", on=placed("H100", "H100-0000"))) for i in range(8)]
    waiting = [of("u", job("more")), *(of("v", job(f"v{i}")) for i in range(6))]
    result = decide(cluster(*held, *waiting, H100=1))
    assert len(stopped(result)) == 4
    assert len(started(result)) == 4
    assert all(name.startswith("v") for name in started(result))


def test_react_shares_between_users_of_a_tenant_too() -> None:
    held = [of("u", job(f"u{i}", on=placed("H100", "H100-0000"))) for i in range(8)]
    before = cluster(*held, of("u", job("more")), H100=1)
    made, memo = plan(before, POLICY, NOW)
    after = updated(before, Delta(jobs=(of("v", job("v")),)))
    event = Event.between(before, after, NOW)
    told, memo = react(after, made, event, memo)
    assert (len(stopped(told)), started(told)) == (1, {"v"})
    assert react(after, made, event)[0] == told
    ended = updated(applied(after, told, NOW), Delta(gone_jobs=(told.actions[0].job,)))
    assert check_plan(ended, react(ended, told, Event.between(after, ended, NOW), memo)[0]) == []


def test_priority_counts_before_the_users_turn() -> None:
    many = [of("u", job(f"u{i}", priority=200)) for i in range(8)]
    result = decide(cluster(*many, of("v", job("v")), H100=1))
    assert started(result) == {f"u{i}" for i in range(8)}


def test_a_user_has_no_right_that_its_tenant_has_not() -> None:
    mine = [of("u", job(f"a{i}", "a", on=placed("H100", "H100-0000"))) for i in range(4)]
    theirs = [job(f"b{i}", "b", on=placed("H100", "H100-0000")) for i in range(4)]
    stuck = tuple(replace(one, preemptible=False) for one in mine)
    result = decide(cluster(*stuck, *theirs, of("v", job("v", "a")), job("b", "b"), H100=1))
    assert result.actions == ()


def test_users_weigh_as_their_tenant_says() -> None:
    waiting = [of(user, job(f"{user}{i}")) for user in "uv" for i in range(8)]
    heavy = Tenant("a", users=(User("u", weight=3.0),))
    result = decide(cluster(*waiting, tenants=(heavy,), H100=1))
    assert Counter(name[0] for name in started(result)) == {"u": 6, "v": 2}


def _used(units: float) -> DecayedUsage:
    """The decayed use of a user who has held so many units for a long time."""
    return DecayedUsage().add(units * WEEK_S, NOW, WEEK_S)


def test_of_two_users_who_would_borrow_the_one_with_less_past_use_does() -> None:
    idle = Tenant("c")
    for busy, other in (("a", "b"), ("b", "a")):
        tenants = (Tenant(busy, usage=_used(3.0)), Tenant(other, usage=_used(1.0)), idle)
        result = decide(cluster(job("a", "a", size=8), job("b", "b", size=8), tenants=tenants, H100=1))
        assert started(result) == {other}


def test_of_two_users_the_one_with_less_past_use_starts_first() -> None:
    known = Tenant("a", users=(User("u", usage=_used(4.0)), User("v", usage=_used(1.0))))
    waiting = [of("u", job("u", size=8, submitted=NOW - 9000)), of("v", job("v", size=8))]
    assert started(decide(cluster(*waiting, tenants=(known,), H100=1))) == {"v"}


def test_past_use_decays_with_its_half_life() -> None:
    usage = _used(10.0)
    assert usage.mean_held(NOW + WEEK_S, WEEK_S) == usage.mean_held(NOW, WEEK_S) / 2
    for_ever = DecayedUsage()
    for hour in range(24 * 7 * 20):
        for_ever = for_ever.add(10.0 * 3600, hour * 3600.0, WEEK_S)
    assert abs(for_ever.mean_held(for_ever.as_of_s, WEEK_S) - 10.0) < 0.05


@quiet
@given(peopled(), st.randoms(use_true_random=False))
def test_plans_for_users_are_allowed_and_settle_whatever_the_order(
    snapshot: Snapshot, random: Random
) -> None:
    made = plan(snapshot, POLICY, NOW)[0]
    assert check_plan(snapshot, made) == []
    assert plan(applied(snapshot, made, NOW), POLICY, NOW)[0].actions == ()
    mixed = tuple(replace(t, users=tuple(random.sample(t.users, len(t.users)))) for t in snapshot.tenants)
    jobs = tuple(random.sample(snapshot.jobs, len(snapshot.jobs)))
    assert plan(replace(snapshot, tenants=mixed, jobs=jobs), POLICY, NOW)[0] == made
    assert Snapshot.from_json(json.loads(json.dumps(snapshot.to_json()))) == snapshot


@quiet
@given(st.data(), peopled())
def test_react_gives_the_same_answer_for_users_without_a_memo(
    data: st.DataObject, snapshot: Snapshot
) -> None:
    made, memo = plan(snapshot, POLICY, NOW)
    now = NOW
    for number in range(3):
        before, now = applied(snapshot, made, now), now + 40.0
        snapshot = data.draw(changes(before, number, now))
        late = DecayedUsage(1e6 * number, now)
        tenants = tuple(replace(t, usage=late, users=(User("u", usage=late),)) for t in snapshot.tenants)
        snapshot = replace(snapshot, tenants=tenants)
        event = Event.between(before, snapshot, now)
        told, memo = react(snapshot, made, event, memo)
        assert told == react(snapshot, made, event)[0]
        assert check_plan(snapshot, told) == []
        made = told


@quiet
@given(snapshots(), st.sampled_from((0.0, 1e5, 1e7)))
def test_past_use_changes_no_entitlement(snapshot: Snapshot, work: float) -> None:
    usage = DecayedUsage(work, NOW)
    tenants = tuple(replace(t, usage=usage, users=(User("u", usage=usage),)) for t in snapshot.tenants)
    plain = tuple(replace(t, usage=DecayedUsage(), users=()) for t in snapshot.tenants)
    holdings_of = [
        PlanningState(replace(snapshot, tenants=found), POLICY, NOW).holdings for found in (tenants, plain)
    ]
    assert holdings_of[0].entitled == holdings_of[1].entitled
    for tenant in snapshot.tenants:
        for user in USERS:
            assert holdings_of[0].user_entitled(tenant.name, user) == holdings_of[1].user_entitled(
                tenant.name, user
            )


demands = st.dictionaries(
    st.frozensets(st.sampled_from(KINDS), min_size=1), st.integers(1, 12).map(float), min_size=1, max_size=2
).map(lambda rows: tuple(sorted(rows.items(), key=lambda row: sorted(row[0]))))
CAPACITY = {"H100": 8.0, "L4": 6.0, "V100": 4.0}


def _shares(
    own: dict[str, tuple[float, Demand]], others: list[Demand], type_limit: dict[str, float]
) -> tuple[float, dict[str, float]]:
    """The entitlement of the tenant and of each of its users, with other tenants present."""
    together = tuple(row for _, demand in own.values() for row in demand)
    claims = [
        Claim("t", "", 1.0, 0.0, float("inf"), together, type_limit),
        *(Claim(f"o{i}", "", 1.0, 0.0, float("inf"), demand) for i, demand in enumerate(others)),
    ]
    entitled = entitlements(claims, CAPACITY)
    return entitled["t"], user_shares(claims, entitled, "t", own, CAPACITY)


@quiet
@given(
    st.dictionaries(
        st.sampled_from("uvwx"), st.tuples(st.sampled_from((0.5, 1.0, 3.0)), demands), min_size=2
    ),
    st.lists(demands, max_size=2),
    st.dictionaries(st.sampled_from(KINDS), st.integers(1, 6).map(float), max_size=2),
)
def test_users_share_all_that_their_tenant_is_entitled_to_and_weight_never_hurts(
    own: dict[str, tuple[float, Demand]], others: list[Demand], type_limit: dict[str, float]
) -> None:
    total, shares = _shares(own, others, type_limit)
    assert abs(sum(shares.values()) - total) < 1e-4
    for user, (_, demand) in own.items():
        assert -1e-9 <= shares[user] <= sum(amount for _, amount in demand) + 1e-6
    user, (weight, demand) = next(iter(own.items()))
    heavier, inside = _shares({**own, user: (2 * weight, demand)}, others, type_limit)
    assert abs(heavier - total) < 1e-6
    assert inside[user] >= shares[user] - 1e-4


def test_users_of_a_tenant_with_uneven_gangs_reach_a_stable_plan() -> None:
    """Two users with gangs that do not divide evenly reach a stable plan."""
    jobs = [of("u", job(f"u{i}", size=3, on=placed("H100", f"H100-{i:04d}", size=3))) for i in range(3)]
    jobs += [of("v", job(f"v{i}", size=5)) for i in range(4)]
    snapshot, now = cluster(*jobs, H100=3), NOW
    counts: Counter[ActionKind] = Counter()
    for _ in range(30):
        made: Plan = plan(snapshot, POLICY, now)[0]
        assert check_plan(snapshot, made) == []
        counts.update(action.kind for action in made.actions)
        snapshot, now = applied(snapshot, made, now), now + 400.0
    assert counts[ActionKind.PREEMPT] <= 3
    assert plan(snapshot, POLICY, now)[0].actions == ()
