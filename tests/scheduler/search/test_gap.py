"""Whole jobs give way to a tenant below its fair share where that brings the two closer (rule `gap`)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.scheduler import (
    Action,
    ActionKind,
    Job,
    Node,
    Policy,
    Reservation,
    Snapshot,
    Tenant,
    applied,
    check_plan,
    plan,
)

from ..build import NOW, gpus, job, placed, pool, tenant

POLICY = Policy(solver=False, reservations=0)
SIZE = 4


def _nodes(count: int) -> tuple[Node, ...]:
    return tuple(Node(f"H100-{i:04d}", "H100", gpus(SIZE)) for i in range(count))


def _running(name: str, of: str, node: int, size: int, **more: object) -> Job:
    on = placed("H100", f"H100-{node:04d}", size=size)
    return replace(job(name, of, size, on=on, saved=NOW - 60), **more)  # type: ignore[arg-type]


def _snapshot(tenants: tuple[Tenant, ...], count: int, jobs: list[Job]) -> Snapshot:
    return Snapshot(pools=(pool("H100"),), nodes=_nodes(count), tenants=tenants, jobs=tuple(jobs))


def _made(snapshot: Snapshot, now: float = NOW) -> tuple[Action, ...]:
    made = plan(snapshot, POLICY, now)[0]
    assert check_plan(snapshot, made) == []
    return made.actions


def _named(actions: tuple[Action, ...], kind: ActionKind) -> set[str]:
    return {one.job.removeprefix("uid-") for one in actions if one.kind is kind}


def _two(held: list[tuple[str, int]], size: int, *, weights: tuple[float, float] = (1, 1)) -> Snapshot:
    """Tenant a waits with one job; b runs these (name, size), one on each node, and has more waiting."""
    running = [_running(name, "b", i, amount) for i, (name, amount) in enumerate(held)]
    waiting = [job("w", "a", size), *(job(f"v{i}", "b", SIZE) for i in range(4))]
    both = (tenant("a", weights[0]), tenant("b", weights[1]))
    return _snapshot(both, len(held), [*running, *waiting])


def test_a_job_larger_than_what_its_tenant_holds_above_its_share_gives_way() -> None:
    # a is entitled to 2 of 12 and has nothing; b holds 12 of 10 in jobs of four.
    actions = _made(_two([("r0", 4), ("r1", 4), ("r2", 4)], 2, weights=(1, 5)))
    assert _named(actions, ActionKind.START) == {"w"}
    assert len(_named(actions, ActionKind.PREEMPT)) == 1


def test_so_does_one_for_a_job_larger_than_its_tenants_share() -> None:
    # a is entitled to 8/3 of 16 and would hold three: 9/8 of it. b keeps 12 of 40/3.
    snapshot = _two([(f"r{i}", 4) for i in range(4)], 3, weights=(1, 5))
    assert _named(_made(snapshot), ActionKind.START) == {"w"}


def test_nobody_gives_way_who_would_then_be_the_worse_one() -> None:
    # Two of four each: b would have nothing. Who waits longer has its turn (`turn`).
    snapshot = _two([("r0", 4)], 4)
    fresh = tuple(replace(one, submitted_at_s=NOW - 60) for one in snapshot.jobs)
    assert _made(replace(snapshot, jobs=fresh)) == ()


def test_nobody_gives_way_to_a_tenant_that_would_then_hold_more_for_its_share() -> None:
    # a is entitled to 1 of 8 and would hold four of it; b holds 8 of 7, less for its share than a would.
    assert _made(_two([("r0", 4), ("r1", 4)], 4, weights=(1, 7))) == ()


def test_what_is_inside_a_guarantee_does_not_give_way() -> None:
    snapshot = _two([("r0", 4), ("r1", 4), ("r2", 4)], 2, weights=(1, 5))
    a, b = snapshot.tenants
    kept = replace(b, quotas=tenant("b", H100=(9, None, None)).quotas)
    assert _made(replace(snapshot, tenants=(a, kept))) == ()


def test_a_job_of_too_many_preemptions_and_one_that_has_just_started_do_not_give_way() -> None:
    snapshot = _two([("r0", 4), ("r1", 4), ("r2", 4)], 2, weights=(1, 5))
    tired = tuple(replace(one, preemptions=POLICY.max_preemptions) for one in snapshot.jobs)
    assert _made(replace(snapshot, jobs=tired)) == ()
    early = tuple(
        replace(one, run=replace(one.run, started_at_s=NOW - POLICY.min_run_s / 2)) if one.run else one
        for one in snapshot.jobs
    )
    assert _made(replace(snapshot, jobs=early)) == ()


def test_a_job_whose_reservation_is_on_other_nodes_than_that_of_one_alike_is_tried_by_itself() -> None:
    snapshot = _two([("r0", 4), ("r1", 4)], 2, weights=(1, 2))
    early = tuple(
        replace(one, run=replace(one.run, started_at_s=NOW - 60)) if one.name == "r0" and one.run else one
        for one in snapshot.jobs
        if one.name != "w"
    )
    alike = tuple(job(f"w{i}", "a", 2, submitted=NOW - 3600 + i) for i in range(2))
    known = tuple(
        Reservation(one.id, placed("H100", f"H100-{i:04d}", size=2), (NOW - 60,), NOW + 7200)
        for i, one in enumerate(alike)
    )
    snapshot = replace(snapshot, jobs=(*early, *alike), reservations=known)
    made = plan(snapshot, replace(POLICY, reservations=8), NOW)[0]
    assert _named(made.actions, ActionKind.PREEMPT) == {"r1"}, "the one on the node of w0 has just started"


# -- any tenants with jobs that do not divide --------------------------------------------------------------------


@st.composite
def _contended(draw: st.DrawFn) -> Snapshot:
    """Full nodes, two to four tenants, endless jobs of one to four accelerators, some of which wait."""
    names = ("a", "b", "c", "d")[: draw(st.integers(2, 4))]
    tenants = tuple(
        tenant(
            name, draw(st.sampled_from((1, 1, 2, 3))), H100=(0, None, draw(st.sampled_from((None, 3, 6, 9))))
        )
        for name in names
    )
    count = draw(st.integers(1, 4))
    jobs: list[Job] = []
    held: Counter[str] = Counter()
    for node in range(count):
        free = SIZE
        while free:
            of, size = draw(st.sampled_from(tenants)), draw(st.integers(1, free))
            most_m = of.quotas[0].ceiling_m
            if most_m is not None and 1000 * (held[of.name] + size) > most_m:
                break
            held[of.name] += size
            jobs.append(_running(f"r{len(jobs):02d}", of.name, node, size))
            free -= size
    for i in range(draw(st.integers(1, 6))):
        jobs.append(job(f"w{i:02d}", draw(st.sampled_from(names)), draw(st.integers(1, SIZE))))
    return _snapshot(tenants, count, jobs)


def _shares(snapshot: Snapshot) -> dict[str, float]:
    """Max-min shares of the accelerators by weight, none above what its tenant asks for or may hold."""
    asked: Counter[str] = Counter()
    for one in snapshot.jobs:
        asked[one.tenant] += one.per_pod.accelerators_m
    most = {
        one.name: min(asked[one.name], one.quotas[0].ceiling_m or asked[one.name]) / 1000
        for one in snapshot.tenants
    }
    left, open_ = float(SIZE * len(snapshot.nodes)), {one.name: one.weight for one in snapshot.tenants}
    found: dict[str, float] = {}
    while open_:
        level = left / sum(open_.values())
        full = [name for name, weight in open_.items() if most[name] <= level * weight]
        for name in full or list(open_):
            found[name] = most[name] if full else level * open_[name]
            left -= found[name]
            del open_[name]
    return found


def _held(snapshot: Snapshot) -> Counter[str]:
    held: Counter[str] = Counter()
    for one in snapshot.jobs:
        held[one.tenant] += 0 if one.run is None else one.run.placement.accelerators_m // 1000
    return held


def _narrowing(snapshot: Snapshot) -> list[tuple[str, str]]:
    """(waiting job, running job): the first could take the place of the second, and the two tenants would come closer."""
    shares, held, found = _shares(snapshot), _held(snapshot), []
    quotas = {one.name: one.quotas[0].ceiling_m for one in snapshot.tenants}
    free = {node.name: SIZE for node in snapshot.nodes}
    running = [(one, one.run.placement) for one in snapshot.jobs if one.run is not None]
    for _, place in running:
        free[place.nodes[0]] -= place.accelerators_m // 1000
    for asks in (one for one in snapshot.jobs if one.run is None):
        size, share = asks.per_pod.accelerators_m // 1000, shares[asks.tenant]
        now, ceiling_m = held[asks.tenant] / share, quotas[asks.tenant]
        then = (held[asks.tenant] + size) / share
        if now >= 1 - POLICY.least_rise - 1e-3 or (
            ceiling_m is not None and 1000 * (held[asks.tenant] + size) > ceiling_m
        ):
            continue
        for gives, place in running:
            amount, other = place.accelerators_m // 1000, shares[gives.tenant]
            before, after = held[gives.tenant] / other, (held[gives.tenant] - amount) / other
            enough = amount + free[place.nodes[0]] >= size and gives.preemptions < POLICY.max_preemptions
            least = now + POLICY.least_rise * (then - now)
            if enough and before > max(then, 1) + 1e-3 and after >= least + 1e-3:
                found.append((asks.name, gives.name))
    return found


@settings(max_examples=60, deadline=None)
@given(_contended())
def test_steps_that_narrow_a_gap_come_to_an_end_and_none_is_taken_back(snapshot: Snapshot) -> None:
    now, taken, quiet = NOW, set[tuple[str, str]](), 0
    for _ in range(40):
        made = plan(snapshot, POLICY, now)[0]
        assert check_plan(snapshot, made) == [], "quotas hold, and everything fits"
        stopped = _named(made.actions, ActionKind.PREEMPT)
        for one in made.actions:
            if one.kind is ActionKind.START:
                pairs = {(one.job.removeprefix("uid-"), name.removeprefix("uid-")) for name in one.after}
                pairs = {pair for pair in pairs if pair[1] in stopped}
                assert not {(victim, asked) for asked, victim in pairs} & taken, "taken back"
                taken |= pairs
        snapshot = applied(snapshot, made, now)
        now += max(POLICY.share_run_s, POLICY.min_run_s) + 1
        quiet = 0 if made.actions else quiet + 1
        if quiet == 2:
            break
    assert quiet == 2, "it does not settle"
    assert _narrowing(snapshot) == []


@pytest.mark.parametrize("part", [0.0, 1.0])
def test_how_much_the_lower_tenant_must_gain_is_a_policy(part: float) -> None:
    # b keeps 8 of 10, which is less than all of its share that a comes to.
    snapshot = _two([("r0", 4), ("r1", 4), ("r2", 4)], 2, weights=(1, 5))
    made = plan(snapshot, replace(POLICY, least_rise=part), NOW)[0]
    assert bool(made.actions) == (part == 0.0)
