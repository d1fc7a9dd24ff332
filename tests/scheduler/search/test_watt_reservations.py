"""Reservations on power domains: a start is promised when room and watts come free, and the watts are kept until then."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from busbar.scheduler import (
    Job,
    JobId,
    JobKind,
    Plan,
    Policy,
    PowerDomain,
    Rate,
    Snapshot,
    applied,
    check_plan,
    plan,
)

from ..build import NOW, cluster, job, placed, speeds, tenant

POLICY = Policy(solver_seconds=None)
HOUR = 3600.0
FIRST = {"size": 8, "priority": 500}


def timed(name: str, hours: float, size: int = 8, **more: object) -> Job:
    """A job that takes so long, as it does one unit a second whatever its size."""
    return job(name, size=size, workload_class="c", remaining=hours * HOUR, **more)  # type: ignore[arg-type]


def runs(name: str, hours: float, on: str, size: int = 8, of: str = "H100", **more: object) -> Job:
    more.setdefault("preemptible", False)
    return timed(name, hours, size, on=placed(of, on, size=size), **more)


def fed(snapshot: Snapshot, *domains: PowerDomain, racks: bool = False) -> Snapshot:
    """All nodes on "row", or each on the domain of its name; an H100 draws 700 W, an L4 100."""
    table = speeds("c", H100=1.0, L4=1.0)
    cells = tuple(
        replace(cell, accelerators_m=size * 1000) for cell in table.cells for size in (1, 2, 4, 8, 16)
    )
    table = replace(table, cells=cells, rates=(Rate("H100", 1.0, 700.0), Rate("L4", 0.2, 100.0)))
    nodes = tuple(replace(node, domain=node.name if racks else "row") for node in snapshot.nodes)
    return replace(snapshot, table=table, nodes=nodes, domains=domains)


def row(jobs: int, *all_jobs: Job, **pools: int) -> Snapshot:
    """A feed for so many jobs of eight H100."""
    return fed(cluster(*all_jobs, tenants=(), **pools), PowerDomain("row", 5600.0 * jobs))


def made(snapshot: Snapshot, now: float = NOW) -> Plan:
    result = plan(snapshot, POLICY, now)[0]
    assert check_plan(snapshot, result) == []
    assert plan(applied(snapshot, result, now), POLICY, now)[0].actions == ()
    return result


def promised(result: Plan) -> dict[str, tuple[tuple[str, ...], float]]:
    return {
        one.job.removeprefix("uid-"): (one.placement.nodes, round(one.start_s - NOW, 3))
        for one in result.reservations
    }


def started(result: Plan) -> set[str]:
    return {action.job.removeprefix("uid-") for action in result.actions if action.to is not None}


def test_the_start_is_promised_for_when_the_watts_come_free() -> None:
    """Four nodes are free, and the feed carries two jobs: the first to end makes room for one."""
    busy = [runs("r0", 3, "H100-0000"), runs("r1", 1, "H100-0001")]
    lower = timed("lower", 9, preemptible=False)
    result = made(row(2, *busy, timed("first", 2, **FIRST), lower, H100=6))
    assert started(result) == set()
    (nodes, after), *_ = promised(result).values()
    assert after == HOUR
    assert set(nodes).isdisjoint({"H100-0000", "H100-0001"})
    assert list(promised(result)) == ["first"]


def test_watts_of_other_pools_count_and_as_many_ends_are_awaited_as_are_needed() -> None:
    busy = [runs(f"l{i}", 1.0 + i, f"L4-{i:04d}", of="L4") for i in range(7)]
    lower = timed("lower", 9, 1, preemptible=False, accelerators=("L4",))
    first = timed("first", 2, accelerators=("H100",), **FIRST)
    four = fed(cluster(*busy, first, lower, H100=1, L4=8), PowerDomain("row", 5600.0 + 3 * 800.0))
    assert promised(made(four)) == {"first": (("H100-0000",), 4 * HOUR)}
    roomy = replace(four, domains=(PowerDomain("row", 5600.0 + 7 * 800.0),))
    assert started(made(roomy)) == {"first"}


def test_nothing_is_promised_where_watts_never_come_free() -> None:
    serves = replace(runs("s", 1, "H100-0000"), kind=JobKind.SERVING)
    lower = timed("lower", 9, preemptible=False)
    snapshot = row(1, serves, timed("first", 2, **FIRST), lower, H100=3)
    result = made(snapshot)
    assert (promised(result), started(result)) == ({}, set())
    ends = replace(snapshot, jobs=(runs("s", 1, "H100-0000"), *snapshot.jobs[1:]))
    assert [after for _, after in promised(made(ends)).values()] == [HOUR]


def test_nothing_is_promised_on_a_closed_domain() -> None:
    busy, lower = runs("busy", 1, "H100-0000"), timed("lower", 9, preemptible=False)
    open_ = row(1, busy, timed("first", 2, **FIRST), lower, H100=3)
    assert list(promised(made(open_))) == ["first"]
    closed = replace(open_, domains=(PowerDomain("row", 5600.0, closed=True),))
    assert promised(made(closed)) == {}


def test_nodes_are_chosen_whose_feed_carries_the_job_first() -> None:
    """The nodes of the first two feeds are free and stay without watts; the third is busy, and has them in an hour."""
    feeds = (
        PowerDomain("H100-0000", 700.0),
        PowerDomain("H100-0001", 5600.0),
        PowerDomain("H100-0002", 5600.0),
        PowerDomain("H100-0003", 5600.0),
    )
    busy = [runs("r1", 5, "H100-0001", 4), runs("r2", 1, "H100-0002"), runs("r3", 3, "H100-0003")]
    lower = timed("lower", 9, preemptible=False)
    result = made(fed(cluster(*busy, timed("first", 2, **FIRST), lower, H100=4), *feeds, racks=True))
    assert promised(result) == {"first": (("H100-0002",), HOUR)}


def test_what_is_collected_goes_to_nobody_who_would_still_draw_it() -> None:
    """The feed carries the first in line, whose watts come when the busy job has ended, and 2,800 W more."""
    busy, first = runs("busy", 1, "H100-0000"), timed("first", 2, **FIRST)
    long, short = timed("long", 2, 4, submitted=NOW - 60), timed("short", 0.5, 4)
    snapshot = fed(cluster(busy, first, long, H100=4), PowerDomain("row", 5600.0 + 2800.0))
    assert started(made(snapshot)) == {"long"}
    half = fed(cluster(runs("busy", 1, "H100-0000", 4), first, long, H100=4), PowerDomain("row", 5600.0))
    assert started(made(half)) == set()
    assert started(made(replace(half, jobs=(*half.jobs, short)))) == {"short"}


def test_who_would_be_stopped_for_it_must_stand_on_its_nodes() -> None:
    """A job of unknown length may use collected nodes, and none of the collected watts of the feed elsewhere."""
    busy = runs("busy", 2, "H100-0000", 4)
    unknown = job("unknown", size=4, workload_class="c")
    snapshot = fed(cluster(busy, timed("first", 2, **FIRST), unknown, H100=4), PowerDomain("row", 5600.0))
    result = made(snapshot)
    assert list(promised(result)) == ["first"]
    assert started(result) == set()


def test_two_reservations_never_count_on_the_same_watts() -> None:
    busy = [runs("r0", 1, "H100-0000"), runs("r1", 3, "H100-0001")]
    waits = [timed("first", 9, priority=500), timed("second", 9, priority=400)]
    lower = timed("lower", 9, preemptible=False)
    result = made(row(2, *busy, *waits, lower, H100=8))
    assert sorted(after for _, after in promised(result).values()) == [HOUR, 3 * HOUR]
    assert promised(result)["first"][1] == HOUR


def test_a_lower_cap_is_collected_where_full_power_never_fits() -> None:
    base = row(1, runs("busy", 1, "H100-0000", 2), timed("first", 2, **FIRST), timed("lower", 9), H100=3)
    [cell] = [cell for cell in base.table.cells if cell.accelerators_m == 8000 and cell.accelerator == "H100"]
    low = replace(cell, power_cap=0.5, watts=350.0, speed=0.6)
    table = replace(base.table, cells=(*base.table.cells, low))
    nodes = tuple(replace(node, limits_boards=True) for node in base.nodes)
    snapshot = replace(base, table=table, nodes=nodes, domains=(PowerDomain("row", 3000.0),))
    result = made(snapshot)
    [one] = result.reservations
    assert (one.job, one.placement.power_cap) == (JobId("uid-first"), 0.5)
    assert one.start_s == NOW + HOUR


def test_a_capped_place_is_given_up_where_nobody_says_any_more_who_holds_boards() -> None:
    busy = [runs("busy", 1, "H100-0000", 1), runs("there", 9, "H100-0001", 1)]
    base = row(1, *busy, timed("first", 2, size=4, priority=500), H100=2)
    [cell] = [cell for cell in base.table.cells if cell.accelerators_m == 4000 and cell.accelerator == "H100"]
    low = replace(cell, power_cap=0.5, watts=350.0, speed=0.6)
    nodes = tuple(replace(node, limits_boards=True, tells_boards=True) for node in base.nodes)
    table = replace(base.table, cells=(*base.table.cells, low))
    both = replace(base, table=table, nodes=nodes, domains=(PowerDomain("row", 2700.0),))
    [one] = made(both).reservations
    [name] = {*one.placement.nodes}
    assert one.placement.power_cap == 0.5
    other = next(node.name for node in nodes if node.name != name)
    fewer = tuple(replace(node, tells_boards=node.name == other) for node in nodes)
    [again] = made(replace(both, nodes=fewer, reservations=(one,))).reservations
    assert {*again.placement.nodes} == {other}
    free = replace(both, nodes=fewer, reservations=(one,), jobs=both.jobs[1:])
    [action] = made(free).actions
    assert action.to is not None
    assert (action.to.nodes, action.to.power_cap) == ((other,), 0.5)


@pytest.mark.parametrize("seed", range(6))
def test_promises_are_kept_while_small_jobs_arrive(seed: int) -> None:
    """Jobs end when they were expected to. Small ones with watts enough arrive all the time; the large one starts when it
    was promised to, at the latest."""
    random, now = Random(seed), NOW
    sizes = random.choices((1, 2, 4), k=6)
    jobs = [runs(f"r{i}", random.uniform(0.5, 4.0), f"H100-{i:04d}", size) for i, size in enumerate(sizes)]
    jobs.append(timed("first", 2, priority=500))
    snapshot = fed(cluster(*jobs, H100=10), PowerDomain("row", 700.0 * max(8, sum(sizes))))
    promise: float | None = None
    for step in range(60):
        small = timed(f"s{step:02d}", random.uniform(0.2, 5.0), random.choice((1, 2)), submitted=now)
        snapshot = replace(snapshot, jobs=(*snapshot.jobs, small))
        result = plan(snapshot, POLICY, now)[0]
        assert check_plan(snapshot, result) == []
        snapshot = applied(snapshot, result, now)
        if "first" in started(result):
            break
        [one] = [one for one in result.reservations if one.job == "uid-first"]
        assert promise is None or one.start_s <= promise + 1.0
        promise = one.start_s
        rest = min(one.remaining_work or 0.0 for one in snapshot.jobs if one.run is not None)
        rest = min(rest, max(1.0, promise - now), 600.0)
        now += rest
        left = (
            replace(one, remaining_work=(one.remaining_work or 0.0) - rest) if one.run is not None else one
            for one in snapshot.jobs
        )
        snapshot = replace(snapshot, jobs=tuple(one for one in left if (one.remaining_work or 0.0) > 1e-6))
    assert "first" in started(result)
    assert promise is None or now <= promise + 1.0


def test_no_place_is_told_that_the_last_start_of_a_plan_has_taken() -> None:
    """`gang` collects the L4 in vain: `old` is there first, by its tenant's share. Watts are not short."""
    jobs = [
        timed("wide", 3, size=4, pods=3),
        timed("first", 1, priority=500),
        timed("small", 1, size=1, priority=1),
        timed("old", 3, size=2, pods=3, priority=1, tenant="b", submitted=NOW - 9 * HOUR),
        timed("gang", 3, pods=3, preemptible=False),
    ]
    snapshot = cluster(*jobs, tenants=(tenant("a"), tenant("b")), H100=1, L4=3)
    result = made(fed(snapshot, PowerDomain("row", 1e9)))
    assert started(result) >= {"first", "old"}
    assert all(start_s > 0 for _, start_s in promised(result).values())


def test_a_start_that_moves_leaves_time_for_those_who_were_tried_before() -> None:
    """`lower` passes `late`, which waits for its watts then; so `other`, which comes before `lower`, has time, too."""
    late, lower = timed("late", 0.1, size=4, priority=1), timed("lower", 3, size=1)
    first = timed("first", 1, size=2, priority=500, submitted=NOW - 9 * HOUR)
    other = timed("other", 3, size=1, tenant="b")
    snapshot = cluster(late, lower, first, other, tenants=(tenant("a"), tenant("b")), H100=1)
    result = made(fed(snapshot, PowerDomain("row", 2880.0)))
    assert started(result) == {"lower", "first", "other"}
    assert promised(result) == {"late": (("H100-0000",), 3 * HOUR)}
