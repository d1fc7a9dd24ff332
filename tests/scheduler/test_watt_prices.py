"""Watts cost what they bring others: where a feed is full, the job with more work per watt-hour starts first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from busbar.scheduler import (
    Cell,
    Event,
    Job,
    PerformanceTable,
    Plan,
    Policy,
    PowerDomain,
    Rate,
    Snapshot,
    WaitCode,
    applied,
    check_plan,
    plan,
    react,
)
from busbar.scheduler.candidates.watt_market import WattLimit
from busbar.scheduler.placement.watt_limits import most_watts, watt_limits
from busbar.scheduler.search.state import PlanningState

from .build import NOW, cluster, job, placed

POLICY = Policy(solver_seconds=None)
DRAWS = {"hot": 700.0, "warm": 600.0, "cool": 300.0}
"""Watts of an accelerator by class; all classes do the same work with it."""


def table() -> PerformanceTable:
    cells = tuple(
        Cell(name, kind, size * 1000, speed=float(size), watts=watts * (1.0 if kind == "H100" else 0.1))
        for name, watts in DRAWS.items()
        for kind in ("H100", "L4")
        for size in (1, 8)
    )
    return PerformanceTable(cells, (Rate("H100", 1.0, 700.0), Rate("L4", 1.0, 70.0)))


def of(workload: str, name: str = "", size: int = 8, **more: object) -> Job:
    return job(name or workload, size=size, workload_class=workload, remaining=8e4, **more)  # type: ignore[arg-type]


def fed(*jobs: Job, watts: float, **pools: int) -> Snapshot:
    base = cluster(*jobs, tenants=(), **(pools or {"H100": 4}))
    nodes = tuple(replace(node, domain="row") for node in base.nodes)
    return replace(base, nodes=nodes, table=table(), domains=(PowerDomain("row", watts),))


def made(snapshot: Snapshot) -> Plan:
    result, memo = plan(snapshot, POLICY, NOW)
    assert check_plan(snapshot, result) == []
    assert plan(applied(snapshot, result, NOW), POLICY, NOW, memo)[0].actions == ()
    return result


def started(result: Plan) -> set[str]:
    return {action.job.removeprefix("uid-") for action in result.actions if action.to is not None}


def test_on_a_full_feed_the_job_with_more_work_per_watt_hour_starts_first() -> None:
    """The hot job waits longer, and starts first for that where watts are not scarce."""
    jobs = of("hot", submitted=NOW - 7200), *(of("cool", f"cool{i}", submitted=NOW - 3600) for i in range(2))
    full = made(fed(*jobs, watts=8 * 700.0))
    assert started(full) == {"cool0", "cool1"}
    [price] = full.power_prices
    assert (price.domain, price.price > 0) == ("row", True)
    # The hot job would have the last watts: eight accelerators do eight unit-hours of work an hour for 5,600 W.
    assert price.work == pytest.approx(8 / 5600)
    roomy = made(fed(*jobs, watts=8 * 1300.0))
    assert (started(roomy), [one.price for one in roomy.power_prices]) == ({"hot", "cool0", "cool1"}, [0.0])
    one_node = made(fed(*jobs, watts=8 * 1300.0, H100=1))
    assert (started(one_node), [one.price for one in one_node.power_prices]) == ({"hot"}, [0.0])


def test_a_feed_is_filled_with_the_jobs_that_bring_most_for_its_watts() -> None:
    hot = [of("hot", f"hot{i}", submitted=NOW - 7200) for i in range(3)]
    cool = [of("cool", f"cool{i}") for i in range(3)]
    result = made(fed(*hot, *cool, watts=8 * 1600.0, H100=8))
    assert started(result) == {"cool0", "cool1", "cool2", "hot0"}


def test_rights_come_before_the_price_of_a_watt() -> None:
    hot, cool = of("hot", priority=500), of("cool")
    assert started(made(fed(hot, cool, watts=8 * 700.0))) == {"hot"}


def test_what_is_scarce_decides_the_type() -> None:
    """An L4 does the same work for a tenth of the watts, so H100s stay for those that find no L4."""
    jobs = [of("hot", f"j{i}", 1) for i in range(10)]
    result = made(fed(*jobs, watts=8 * 70.0 + 2 * 700.0, H100=2, L4=1))
    assert started(result) == {one.name for one in jobs}
    on = [action.to.pool for action in result.actions if action.to is not None]
    assert (on.count("L4"), on.count("H100")) == (8, 2)


def test_a_waiting_job_is_told_the_price_of_what_it_lacks() -> None:
    result = made(fed(of("hot"), of("warm"), watts=8 * 700.0))
    [record] = result.waiting
    assert (record.code, record.resource) == (WaitCode.POWER, "watts")
    assert record.price == result.power_prices[0].price > 0
    assert 0 < record.offer < record.price * 1.2


def test_answers_to_events_use_the_prices_of_the_plan() -> None:
    hot = of("hot", on=placed("H100", "H100-0000", size=8))
    waits = [of("warm", submitted=NOW - 7200), of("cool")]
    before = fed(hot, *waits, watts=8 * 700.0)
    result, memo = plan(before, POLICY, NOW)
    assert started(result) == set()
    after = replace(before, jobs=before.jobs[1:])
    event = Event.between(before, after, NOW + 1)
    answer, _ = react(after, result, event, memo)
    assert answer == react(after, result, event)[0]
    assert answer.power_prices == result.power_prices
    assert started(answer) == {"cool"}
    assert answer.bound >= answer.value


def test_nodes_that_change_their_feed_change_what_their_watts_cost() -> None:
    before = fed(of("hot"), of("cool"), watts=8 * 700.0)
    result, memo = plan(before, POLICY, NOW)
    free = tuple(replace(node, domain="") for node in before.nodes)
    after = replace(applied(before, result, NOW), nodes=free)
    event = Event.between(before, after, NOW + 1)
    answer, _ = react(after, result, event, memo)
    assert answer == react(after, result, event)[0]
    assert started(answer) == {"hot"}


def limits(snapshot: Snapshot) -> tuple[WattLimit, ...]:
    state = PlanningState(snapshot, POLICY, NOW)
    bids = [one for own in state.assignments.values() for one in own.option.candidates]
    return watt_limits(state.cluster, most_watts(bids))


def test_limits_are_those_of_the_domains_that_bind() -> None:
    """Two racks of two nodes, 5,600 W each, on a row."""
    base = fed(of("hot"), watts=1e6)
    racks = tuple(
        replace(node, domain=f"rack-{i // 2}")
        for i, node in enumerate(sorted(base.nodes, key=lambda n: n.name))
    )

    def on(row_w: float, *rack_w: float) -> tuple[WattLimit, ...]:
        below = tuple(PowerDomain(f"rack-{i}", watts, "row") for i, watts in enumerate(rack_w))
        return limits(replace(base, nodes=racks, domains=(PowerDomain("row", row_w), *below)))

    assert on(1e6, 1e6, 1e6) == ()
    assert on(22_399.0, 1e6, 1e6) == (WattLimit(("H100",), ("row",), 22_399.0),)
    assert on(1e6, 1e6, 5000.0) == (WattLimit(("H100",), ("rack-1",), 11_200.0 + 5000.0),)
    assert on(1e6, 3000.0, 5000.0) == (WattLimit(("H100",), ("rack-0", "rack-1"), 8000.0),)
    assert on(7000.0, 3000.0, 5000.0) == (WattLimit(("H100",), ("row",), 7000.0),)
    assert on(-5.0, 3000.0, 5000.0) == (WattLimit(("H100",), ("row",), 0.0),)


def test_pools_on_one_feed_share_a_limit_and_others_have_their_own() -> None:
    base = fed(of("hot"), watts=1e6, H100=1, L4=2)
    feeds = (PowerDomain("row", 3000.0), PowerDomain("other", 100.0))
    assert limits(replace(base, domains=feeds)) == (WattLimit(("H100", "L4"), ("row",), 3000.0),)
    split = tuple(
        replace(node, domain="other" if node.name == "L4-0001" else node.domain) for node in base.nodes
    )
    both = limits(replace(base, domains=feeds, nodes=split))
    assert both == (WattLimit(("H100", "L4"), ("other", "row"), 3100.0),)
    apart = tuple(replace(node, domain="other" if node.pool == "L4" else "row") for node in base.nodes)
    own = limits(replace(base, domains=feeds, nodes=apart))
    assert own == (WattLimit(("H100",), ("row",), 3000.0), WattLimit(("L4",), ("other",), 100.0))
