"""Power-capped columns: jobs start under a limit where watts are short, and are lifted where watts are left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from busbar.scheduler import (
    ActionKind,
    Cell,
    Event,
    Job,
    JobKind,
    PerformanceTable,
    Placement,
    Plan,
    Policy,
    PowerDomain,
    Rate,
    Run,
    Snapshot,
    WaitCode,
    applied,
    check_plan,
    plan,
    react,
    sentence,
)
from busbar.scheduler.candidates.candidates import CandidateBuilder
from busbar.scheduler.model.table import TableView

from ..build import NOW, cluster, job, placed

POLICY = Policy(solver_seconds=None)
CAPS = {1.0: (10.0, 700.0), 0.85: (9.5, 590.0), 0.7: (9.0, 480.0), 0.5: (6.0, 350.0)}
"""Speed and watts of one accelerator by cap."""


def cells(caps: dict[float, tuple[float, float]] = CAPS, size: int = 8) -> tuple[Cell, ...]:
    return tuple(
        Cell("llm", "H100", size * 1000, speed=speed, watts=watts, power_cap=cap)
        for cap, (speed, watts) in caps.items()
    )


def rack(
    *jobs: Job,
    watts: float,
    nodes: int = 2,
    caps: dict[float, tuple[float, float]] = CAPS,
    limits: bool = True,
) -> Snapshot:
    """Nodes of eight H100 on one domain."""
    base = cluster(*jobs, H100=nodes)
    table = PerformanceTable(cells(caps), (Rate("H100", 1.0, 700.0),))
    on = tuple(replace(node, domain="rack", limits_boards=limits) for node in base.nodes)
    return replace(base, table=table, nodes=on, domains=(PowerDomain("rack", watts),))


def llm(name: str, size: int = 8, pods: int = 1, on: Placement | None = None, **kept: object) -> Job:
    return replace(job(name, size=size, pods=pods, on=on, workload_class="llm"), **kept)  # type: ignore[arg-type]


def at(name: str, cap: float = 1.0) -> Placement:
    return replace(placed("H100", name, size=8), power_cap=cap)


def made(snapshot: Snapshot) -> Plan:
    result = plan(snapshot, POLICY, NOW)[0]
    assert check_plan(snapshot, result) == []
    return result


def acted(result: Plan) -> dict[str, tuple[str, float]]:
    return {str(a.job)[4:]: (a.kind.value, a.to.power_cap) for a in result.actions if a.to is not None}


def caps_of(snapshot: Snapshot, which: int = 0) -> list[float]:
    builder = CandidateBuilder(snapshot, TableView(snapshot.table), POLICY, NOW)
    return [candidate.power_cap for candidate in builder.of(snapshot.jobs[which]).candidates]


def test_watts_are_shared_by_caps_where_they_bring_most() -> None:
    """Of 1,300 W for each pair of accelerators one takes 700, and the last 20 bring nobody anything. Of 1,000 W, 480 to each
    do more than 700 and nothing, or 590 and 350."""
    both = rack(llm("a"), llm("b"), watts=8 * (700 + 600))
    result = made(both)
    assert sorted(acted(result).values()) == [("start", 0.85), ("start", 1.0)]
    less = made(rack(llm("a"), llm("b"), watts=8 * 1000))
    assert sorted(acted(less).values()) == [("start", 0.7), ("start", 0.7)]
    capped = next(a for a in result.actions if a.to is not None and a.to.power_cap < 1)
    assert "limited to 85%" in capped.reason
    assert "95% of its best speed" in capped.reason
    assert plan(applied(both, result, NOW), POLICY, NOW)[0].actions == ()


def test_without_cells_for_caps_it_waits_as_before() -> None:
    both = rack(llm("a"), llm("b"), watts=8 * 1180, caps={1.0: (10.0, 700.0)})
    result = made(both)
    assert list(acted(result).values()) == [("start", 1.0)]
    [record] = result.waiting
    assert record.code is WaitCode.POWER
    bare = replace(both, nodes=tuple(replace(node, limits_boards=False) for node in both.nodes))
    assert plan(bare, POLICY, NOW)[0].to_json() == result.to_json()


def test_clusters_without_limiting_domains_have_no_more_candidates() -> None:
    capped = rack(llm("a"), watts=9e4)
    assert caps_of(capped) == [1.0, 0.85, 0.7, 0.5]
    for domains in ((), (PowerDomain("rack", 9e4, limits=False),)):
        nodes = tuple(replace(node, domain="rack" if domains else "") for node in capped.nodes)
        assert caps_of(replace(capped, domains=domains, nodes=nodes)) == [1.0]


@pytest.mark.parametrize(
    "one",
    [
        llm("half", size=4),
        llm("few", size=1, pods=4),
        llm("no whole node", size=3, pods=8),
        llm("serves", kind=JobKind.SERVING),
        llm("other", workload_class="unknown"),
    ],
)
def test_only_training_jobs_with_nodes_to_themselves_and_measured_caps_are_capped(one: Job) -> None:
    assert caps_of(rack(one, watts=100.0)) == [1.0]


def web(name: str, cap: float, size: int = 8, on: Placement | None = None) -> Job:
    made = llm(name, size, on=on, kind=JobKind.SERVING, preemptible=False, power_cap=cap, service="ns-a/web")
    return replace(made, workload_class="")


def test_a_replica_runs_under_the_cap_that_its_service_has_chosen_and_under_no_other() -> None:
    both = rack(web("a", 0.6), web("b", 0.6), watts=8 * 2 * 420)
    assert caps_of(both) == [0.6]
    result = made(both)
    assert acted(result) == {"a": ("start", 0.6), "b": ("start", 0.6)}
    less = made(replace(both, domains=(PowerDomain("rack", 8 * 2 * 420 - 1),)))
    assert len(less.actions) == 1
    [record] = less.waiting
    assert (record.code, record.requested) == (WaitCode.POWER, 8 * 420)
    lowered = replace(
        both, jobs=(web("a", 0.6, on=at("H100-0000", 0.6)),), domains=(PowerDomain("rack", 9e4),)
    )
    assert made(lowered).actions == (), "its service raises the cap"
    wrong = check_plan(replace(both, jobs=(web("a", 1.0), web("b", 0.6))), result)
    assert "ns-a/a: it must not run under a power cap of 0.6" in " ".join(wrong).replace("tenant-a", "ns-a")


def test_a_replica_that_cannot_be_limited_runs_without_a_cap() -> None:
    assert caps_of(rack(web("half", 0.6, size=4), watts=9e4)) == [1.0], "others on its node would be limited"
    assert caps_of(rack(web("a", 0.6), watts=9e4, limits=False)) == [1.0]
    assert caps_of(rack(web("a", 1.0), watts=9e4)) == [1.0]


def test_an_event_with_another_cap_of_a_replica_is_followed() -> None:
    before = rack(web("a", 0.6, on=at("H100-0000", 0.6)), web("b", 1.0), watts=8 * 1100)
    first, memo = plan(before, POLICY, NOW)
    assert [record.code for record in first.waiting] == [WaitCode.POWER]
    lower = replace(before, jobs=(before.jobs[0], web("b", 0.8)))
    answer, _ = react(lower, first, Event.between(before, lower, NOW + 1), memo)
    assert acted(answer) == {"b": ("start", 0.8)}
    assert check_plan(lower, answer) == []


@pytest.mark.parametrize(("size", "pods"), [(1, 8), (4, 2), (2, 8), (1, 16)])
def test_a_gang_that_fills_its_nodes_is_capped_on_nodes_of_its_own(size: int, pods: int) -> None:
    gang, count = llm("gang", size, pods), size * pods // 8
    full = rack(gang, watts=8 * 480 * count, nodes=4)
    table = PerformanceTable((*full.table.cells, *cells(size=16)), full.table.rates)
    full = replace(full, table=table)
    assert caps_of(full) == [1.0, 0.85, 0.7, 0.5]
    [action] = made(full).actions
    assert action.to is not None
    assert (action.to.power_cap, sorted({*action.to.nodes})) == (0.7, [f"H100-000{n}" for n in range(count)])
    small = job("small", on=placed("H100", "H100-0000"))
    [action] = made(
        replace(full, jobs=(gang, small), domains=(PowerDomain("rack", 8 * 480 * count + 700),))
    ).actions
    assert action.to is not None
    assert "H100-0000" not in action.to.nodes, "a board of another job would be limited as well"
    there = replace(
        full, jobs=(replace(gang, run=Run(action.to, NOW - 3600)),), domains=(PowerDomain("rack", 9e4),)
    )
    lifted = made(there)
    assert acted(lifted) == {"gang": ("lift", 1.0)}


def test_nodes_whose_boards_take_no_limits_are_left_out() -> None:
    one = rack(llm("a"), watts=8 * 480)
    assert acted(made(one)) == {"a": ("start", 0.7)}
    nodes = tuple(replace(node, limits_boards=node.name.endswith("1")) for node in one.nodes)
    [action] = made(replace(one, nodes=nodes)).actions
    assert action.to is not None
    assert action.to.nodes == ("H100-0001",)
    assert made(rack(llm("a"), watts=8 * 480, limits=False)).actions == ()


def test_a_cap_that_saves_nothing_is_left_out_and_four_are_the_most() -> None:
    useless = CAPS | {0.69: (8.0, 480.0)}
    assert caps_of(rack(llm("a"), watts=9e4, caps=useless)) == [1.0, 0.85, 0.7, 0.5]
    many = {cap / 10: (float(cap), cap * 70.0) for cap in range(1, 11)}
    assert caps_of(rack(llm("a"), watts=9e4, caps=many)) == [1.0, 0.9, 0.6, 0.4, 0.1]


def test_a_cap_bounds_what_is_counted_whatever_the_cell_says() -> None:
    dishonest = {1.0: (10.0, 700.0), 0.5: (6.0, 690.0)}
    assert acted(made(rack(llm("a"), watts=8 * 350, caps=dishonest))) == {"a": ("start", 0.5)}
    assert made(rack(llm("a"), watts=8 * 350 - 1, caps=dishonest)).actions == ()


def test_a_job_is_lifted_without_a_restart_when_watts_come_free() -> None:
    runs = llm("a", on=at("H100-0000", 0.7), preemptible=False)
    full = rack(runs, watts=8 * 600)
    result = made(full)
    [action] = result.actions
    assert (action.kind, acted(result), action.cost) == (ActionKind.LIFT, {"a": ("lift", 0.85)}, 0.0)
    after = applied(full, result, NOW)
    assert after.jobs[0].run is not None
    assert full.jobs[0].run is not None
    assert after.jobs[0].run.started_at_s == full.jobs[0].run.started_at_s
    assert plan(after, POLICY, NOW)[0].actions == ()
    assert acted(made(rack(runs, watts=8 * 700))) == {"a": ("lift", 1.0)}


def test_an_event_lifts_too() -> None:
    other = llm("b", on=at("H100-0001"))
    before = rack(llm("a", on=at("H100-0000", 0.7)), other, watts=8 * 1180)
    first, memo = plan(before, POLICY, NOW)
    assert first.actions == ()
    gone = replace(before, jobs=before.jobs[:1])
    answer, _ = react(gone, first, Event.between(before, gone, NOW + 1), memo)
    assert acted(answer) == {"a": ("lift", 1.0)}
    assert check_plan(gone, answer) == []


def test_a_job_that_waits_for_watts_comes_before_a_lift() -> None:
    runs = llm("a", on=at("H100-0000", 0.5), preemptible=False)
    waits = job("w", size=8, workload_class="opaque")
    both = rack(runs, waits, watts=8 * (350 + 600))
    result = made(both)
    assert result.actions == ()
    assert [record.code for record in result.waiting] == [WaitCode.POWER]
    assert acted(made(rack(runs, watts=8 * (350 + 600)))) == {"a": ("lift", 1.0)}


def test_no_lift_on_a_closed_domain() -> None:
    runs = rack(llm("a", on=at("H100-0000", 0.5)), watts=9e4)
    closed = replace(runs, domains=(PowerDomain("rack", 9e4, closed=True),))
    assert made(closed).actions == ()


def test_watts_have_a_price_where_they_are_short() -> None:
    short = made(rack(llm("a"), llm("b"), watts=8 * 1180))
    [price] = short.power_prices
    assert price.domain == "rack"
    assert price.price > 0
    enough = made(rack(llm("a"), llm("b"), watts=9e4))
    assert [one.price for one in enough.power_prices] == [0.0]
    assert Plan.from_json(short.to_json()) == short


def test_the_checker_refuses_what_no_agent_would_hold() -> None:
    one = rack(llm("a"), watts=8 * 480)
    result = made(one)
    assert check_plan(replace(one, domains=(PowerDomain("rack", 8 * 479.0),)), result)
    bare = replace(one, nodes=tuple(replace(node, limits_boards=False) for node in one.nodes))
    assert any("take no limits" in wrong for wrong in check_plan(bare, result))
    serves = replace(one, jobs=(replace(one.jobs[0], kind=JobKind.SERVING),))
    assert any("must not run under a power cap" in wrong for wrong in check_plan(serves, result))
    [action] = result.actions
    down = replace(action, kind=ActionKind.LIFT, assumed=at("H100-0000"), to=at("H100-0000", 0.5))
    runs = rack(llm("a", on=at("H100-0000")), watts=9e4)
    assert any("a lower cap" in wrong for wrong in check_plan(runs, replace(result, actions=(down,))))


def test_the_reason_counts_the_lowest_cap_and_the_least_that_is_missing_for_it() -> None:
    both = rack(llm("a", on=at("H100-0000"), preemptible=False), llm("b"), watts=8 * (700 + 300))
    result = made(both)
    assert result.actions == ()
    [record] = result.waiting
    assert (record.power_cap, record.requested, record.free) == (0.5, 2800, 2400)
    assert sentence(record) == (
        "Needs 2,800 W, with its boards limited to 50%, on the power domain rack, and 2,400 W of the 8,000 W that it has "
        "for jobs are free. It would start now with 400 W more there."
    )
    more = replace(both, domains=(PowerDomain("rack", 8000.0 + 400.0),))
    assert acted(made(more)) == {"b": ("start", 0.5)}
    never = made(rack(llm("a"), watts=2799.0))
    assert [(one.above_limit, one.requested) for one in never.waiting] == [(True, 2800)]


def test_a_state_follows_nodes_whose_boards_begin_to_take_limits() -> None:
    before = rack(llm("a"), watts=8 * 480, limits=False)
    first, memo = plan(before, POLICY, NOW)
    assert first.actions == ()
    after = replace(before, nodes=tuple(replace(node, limits_boards=True) for node in before.nodes))
    event = Event.between(before, after, NOW + 1)
    answer, _ = react(after, first, event, memo)
    assert answer == react(after, first, event)[0]
    assert acted(answer) == {"a": ("start", 0.7)}


def telling(snapshot: Snapshot, *names: str) -> Snapshot:
    """With nodes of which it is known who holds which board; without names, all."""
    nodes = (replace(one, tells_boards=not names or one.name in names) for one in snapshot.nodes)
    return replace(snapshot, nodes=tuple(nodes))


def small(name: str, on: str = "", cap: float = 1.0, size: int = 2, **kept: Any) -> Job:
    """A job of a few of a node's boards, for which caps were measured too."""
    place = replace(placed("H100", on, size=size), power_cap=cap) if on else None
    return llm(name, size, on=place, **kept)


def shared(*jobs: Job, watts: float, nodes: int = 1, **kept: object) -> Snapshot:
    made = rack(*jobs, watts=watts, nodes=nodes, **kept)  # type: ignore[arg-type]
    table = replace(made.table, cells=(*made.table.cells, *cells(size=2), *cells(size=4)))
    return telling(replace(made, table=table))


def test_pods_of_whole_boards_share_nodes_under_caps_where_it_is_known_who_holds_which_board() -> None:
    mix = (small("a"), small("b"), small("c"), web("d", 0.6, size=1))
    both = shared(*mix, watts=2 * 480 * 3 + 420)
    assert caps_of(both) == [1.0, 0.85, 0.7, 0.5]
    result = made(both)
    assert acted(result) == {
        "a": ("start", 0.7),
        "b": ("start", 0.7),
        "c": ("start", 0.7),
        "d": ("start", 0.6),
    }
    assert {a.to.nodes for a in result.actions if a.to is not None} == {("H100-0000",)}
    assert plan(applied(both, result, NOW), POLICY, NOW)[0].actions == ()
    unknown = telling(both, "nobody")
    assert caps_of(unknown) == [1.0]
    assert any("beside others" in wrong for wrong in check_plan(unknown, result))


@pytest.mark.parametrize(("size_m", "caps"), [(500, [1.0]), (1000, [1.0, 0.85, 0.7, 0.5])])
def test_parts_of_a_board_are_never_capped(size_m: int, caps: list[float]) -> None:
    one = llm("part", 1)
    one = replace(one, per_pod=replace(one.per_pod, accelerators_m=size_m))
    base = rack(one, watts=9e4)
    cell = tuple(replace(each, accelerators_m=size_m) for each in cells())
    pools = tuple(replace(pool, shareable=True) for pool in base.pools)
    both = telling(replace(base, pools=pools, table=replace(base.table, cells=cell)))
    assert caps_of(both) == caps


def test_a_pod_under_a_cap_stays_off_nodes_where_nobody_says_who_holds_boards() -> None:
    one = shared(small("a"), small("b", "H100-0000", size=4), watts=4 * 700 + 2 * 480, nodes=2)
    assert made(one).actions[0].to is not None
    for name in ("H100-0000", "H100-0001"):
        [action] = made(telling(one, name)).actions
        assert action.to is not None
        assert (action.to.nodes, action.to.power_cap) == ((name,), 0.7)


@pytest.mark.parametrize(("size", "pods"), [(4, 2), (2, 8)])
def test_a_gang_that_could_fill_nodes_may_share_those_that_tell(size: int, pods: int) -> None:
    gang, whole = llm("gang", size, pods), size * pods // 8
    nodes = whole + 1
    half = [small(f"there-{i}", f"H100-000{i}", size=4, preemptible=False) for i in range(nodes)]
    watts = 4 * 700 * nodes + 480 * size * pods
    base = shared(gang, *half, watts=watts, nodes=2 * nodes)
    table = replace(base.table, cells=(*base.table.cells, *cells(size=16)))
    both = replace(base, table=table)
    [action] = made(both).actions
    assert action.to is not None
    assert (action.to.power_cap, action.to.pods) == (0.7, pods)
    mixed = telling(both, *(f"H100-000{i}" for i in range(nodes)))
    builder = CandidateBuilder(mixed, TableView(mixed.table), POLICY, NOW)
    ways = {one.nodes for one in builder.of(gang).candidates if one.power_cap < 1}
    assert ways == {0, whole}, "on nodes of its own elsewhere"
    [action] = made(mixed).actions
    assert action.to is not None
    tell = {f"H100-000{i}" for i in range(nodes)}
    assert {*action.to.nodes} <= tell or tell.isdisjoint(action.to.nodes)


def test_a_job_on_a_shared_node_is_lifted_without_a_restart() -> None:
    runs = small("a", "H100-0000", 0.7, preemptible=False)
    other = small("b", "H100-0000", 0.5, preemptible=False, size=4)
    assert acted(made(shared(runs, other, watts=2 * 700 + 4 * 700))) == {
        "a": ("lift", 1.0),
        "b": ("lift", 1.0),
    }
    assert acted(made(shared(runs, other, watts=2 * 700 + 4 * 350))) == {"a": ("lift", 1.0)}
    assert made(shared(runs, other, watts=2 * 480 + 4 * 350)).actions == ()


def test_a_state_follows_nodes_of_which_it_becomes_known_who_holds_boards() -> None:
    after = shared(small("a"), watts=2 * 480)
    before = telling(after, "nobody")
    first, memo = plan(before, POLICY, NOW)
    assert first.actions == ()
    event = Event.between(before, after, NOW + 1)
    answer, _ = react(after, first, event, memo)
    assert answer == react(after, first, event)[0]
    assert acted(answer) == {"a": ("start", 0.7)}


def test_the_checker_counts_each_pod_of_a_shared_node_with_its_own_watts() -> None:
    both = shared(small("a"), small("b", "H100-0000", 0.5, preemptible=False), watts=2 * 480 + 2 * 350)
    result = made(both)
    assert acted(result) == {"a": ("start", 0.7)}
    less = replace(both, domains=(PowerDomain("rack", 2 * 480 + 2 * 350 - 1),))
    assert any("power domain rack" in wrong for wrong in check_plan(less, result))
    [action] = result.actions
    assert action.to is not None
    part = replace(action.to, per_pod=replace(action.to.per_pod, accelerators_m=1500))
    wrong = check_plan(both, replace(result, actions=(replace(action, to=part),)))
    assert any("a part of a board" in one for one in wrong)


def test_a_capped_job_stays_where_nobody_says_any_more_who_holds_boards() -> None:
    runs, waits = small("a", "H100-0000", 0.7), small("b")
    base = shared(runs, waits, watts=2 * 480 + 2 * 700)
    unknown = telling(base, "nobody")
    assert acted(made(unknown)) == {"b": ("start", 1.0)}, "and its watts are counted as before"
    alone = replace(unknown, jobs=(runs,), domains=(PowerDomain("rack", 9e4),))
    assert made(alone).actions == (), "it is lifted when it is known again"
    assert acted(made(telling(alone))) == {"a": ("lift", 1.0)}
