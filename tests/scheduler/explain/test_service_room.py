"""How many replicas of a service there is room for: never fewer than the planner admits, and no more where one row binds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.scheduler.build import NOW, gpus, job, nodes, placed, pool, tenant

from busbar.scheduler import (
    ActionKind,
    Job,
    JobId,
    JobKind,
    Node,
    PerformanceTable,
    Policy,
    PowerDomain,
    Quota,
    Rate,
    Snapshot,
    plan,
)
from busbar.scheduler.autoscale.columns import LimitKind
from busbar.scheduler.explain.service_room import BudgetLeft, ServiceRoom, ServiceRooms, Spent

RATES = PerformanceTable(
    rates=(Rate("L4", 1.0, watts=72.0, idle_watts=12.0), Rate("H100", 4.0, watts=700.0, idle_watts=100.0))
)
POOLS = (pool("l4", "L4"), pool("h100", "H100"))


def replica(number: int = 0, node: str = "", kind: str = "L4", size: int = 1, **fields: object) -> Job:
    place = placed(kind.lower(), node, accelerator=kind, size=size) if node else None
    made = job(f"web-{number}", "a", size, kind=JobKind.SERVING, preemptible=False, on=place)
    return replace(made, service="ns-a/web", **fields)  # type: ignore[arg-type]


def cluster(*jobs: Job, quotas: tuple[Quota, ...] = (), **fields: object) -> Snapshot:
    values = {
        "pools": POOLS,
        "nodes": (*nodes("l4", 2, 4), *nodes("h100", 1, 4)),
        "tenants": (replace(tenant("a"), quotas=quotas), tenant("b")),
        "jobs": jobs,
        "table": RATES,
    }
    return Snapshot(**{**values, **fields})  # type: ignore[arg-type]


def room(snapshot: Snapshot, size: int = 1) -> ServiceRoom:
    return ServiceRooms(snapshot).of(replica(99, size=size), ["l4", "h100", "another"])


def rows(snapshot: Snapshot) -> dict[str, tuple[dict[str, float], float]]:
    return {row.name: (dict(row.weights), round(row.most, 6)) for row in room(snapshot).rows}


def test_stock_is_what_others_that_cannot_be_stopped_leave_node_by_node() -> None:
    assert room(cluster()).stock == {"l4": 8, "h100": 4}
    held = (
        replica(0, "l4-0000"),
        job("fixed", "b", 3, on=placed("l4", "l4-0000", accelerator="L4", size=3), preemptible=False),
        job("may-stop", "b", 4, on=placed("l4", "l4-0001", accelerator="L4", size=4)),
        replace(replica(0, "h100-0000", "H100"), id=JobId("x"), service="ns-a/other"),
        replace(replica(1, "h100-0000", "H100"), id=JobId("y"), service="ns-a/other", yields=True),
    )
    assert room(cluster(*held)).stock == {"l4": 5, "h100": 3}
    assert room(cluster(*held), size=2).stock == {"l4": 2, "h100": 1}, "one of node 0 is left over"
    away = cluster(*held, nodes=tuple(replace(n, ready=False) for n in cluster().nodes))
    assert room(away).stock == {"l4": 1, "h100": 0}, "only what runs there"


def test_quota_rows_leave_what_the_tenants_other_work_does_not_hold() -> None:
    quotas = (Quota("L4", 2000, borrowable_m=4000), Quota("*", 0, ceiling_m=20_000))
    held = (replica(0, "l4-0000"), job("train", "a", 2, on=placed("l4", "l4-0001", accelerator="L4", size=2)))
    assert rows(cluster(*held, quotas=quotas)) == {
        "the tenant's quota of L4": ({"l4": 1.0}, 4.0),
        "the tenant's quota of accelerators": ({"l4": 1.0, "h100": 4.0}, 18.0),
    }


def test_power_rows_count_what_all_nodes_of_a_pool_hang_on() -> None:
    domains = (
        PowerDomain("site", 4000.0),
        PowerDomain("left", 500.0, "site"),
        PowerDomain("seen", 9.0, "site", limits=False),
    )
    where = {"l4-0000": "left", "l4-0001": "left", "h100-0000": "seen"}
    hung = tuple(replace(node, domain=where[node.name]) for node in cluster().nodes)
    held = (replica(0, "l4-0000"), job("train", "b", 2, on=placed("l4", "l4-0001", accelerator="L4", size=2)))
    found = rows(cluster(*held, domains=domains, nodes=hung))
    # Idle: 8 x 12 + 4 x 100 W; each L4 that works adds 60 W, each H100 600 W. Two L4 are somebody else's.
    assert found == {
        "the power of domain left": ({"l4": 60.0}, 500 - 96 - 120.0),
        "the power of domain site": ({"l4": 60.0, "h100": 600.0}, 4000 - 96 - 400 - 120.0),
    }
    split = tuple(replace(node, domain="seen" if node.name == "l4-0001" else node.domain) for node in hung)
    assert set(rows(cluster(*held, domains=domains, nodes=split))) == {"the power of domain site"}
    closed = (replace(domains[0], closed=True), *domains[1:])
    assert rows(cluster(*held, domains=closed, nodes=hung))["the power of domain site"][1] == 60.0


def test_what_replicas_draw_under_caps_is_told_where_their_boards_can_be_limited_and_no_others_with_them() -> (
    None
):
    domains = (PowerDomain("site", 4000.0),)
    hung = tuple(replace(node, domain="site", limits_boards=True) for node in cluster().nodes)
    found = room(cluster(domains=domains, nodes=hung), size=4).boards
    assert {name: [draw.at(cap) for cap in (1.0, 0.5)] for name, draw in found.items()} == {
        "l4": [240, 96], "h100": [2400, 1000]
    }  # fmt: skip
    assert room(cluster(domains=domains, nodes=hung), size=1).boards == {}, "four share a node"
    tell = tuple(replace(node, tells_boards=True) for node in hung)
    assert set(room(cluster(domains=domains, nodes=tell), size=1).boards) == {"l4", "h100"}
    some = (replace(tell[0], tells_boards=False), *tell[1:])
    assert set(room(cluster(domains=domains, nodes=some), size=1).boards) == {"h100"}
    one = (replace(hung[0], limits_boards=False), *hung[1:])
    assert set(room(cluster(domains=domains, nodes=one), size=4).boards) == {"h100"}
    observed = (replace(domains[0], limits=False),)
    assert room(cluster(domains=observed, nodes=hung), size=4).boards == {}, "no domain limits"
    capped = replica(0, "l4-0000", size=4)
    assert capped.run is not None
    limited = replace(capped.run, placement=replace(capped.run.placement, power_cap=0.5))
    runs = replace(capped, run=limited, power_cap=0.5)
    # Idle boards draw 8 x 12 + 4 x 100 W; what the service's own replica draws is its room.
    assert rows(cluster(runs, domains=domains, nodes=hung))["the power of domain site"][1] == 4000 - 496


def test_rows_of_domains_on_which_others_lack_watts_are_named() -> None:
    assert ServiceRooms(cluster(), ["site"]).of(replica(99), ["l4"]).short == {"the power of domain site"}


def test_budget_rows_pay_the_tenants_other_work_first_and_a_replica_for_an_hour() -> None:
    priced = (replace(POOLS[0], price_per_hour=0.7), replace(POOLS[1], price_per_hour=7.5))
    held = (
        replica(0, "l4-0000"),
        job("train", "a", 2, on=placed("l4", "l4-0001", accelerator="L4", size=2)),
        job("theirs", "b", 2, on=placed("l4", "l4-0000", accelerator="L4", size=2)),
    )

    def paid(*left: BudgetLeft, size: int = 1) -> dict[str, tuple[dict[str, float], float]]:
        rooms = ServiceRooms(cluster(*held, pools=priced))
        found = rooms.paid(replica(99, size=size), ["l4", "h100", "another"], left)
        assert all(row.kind is LimitKind.BUDGET for row in found)
        return {row.name: (dict(row.weights), round(row.most, 6)) for row in found}

    assert paid() == {}
    assert paid(BudgetLeft("month", Spent.COST, 9.0, 300.0)) == {
        "the tenant's budget of cost a month": ({"l4": 0.7, "h100": 7.5}, 9.0 - 1.4)
    }
    assert paid(BudgetLeft("day", Spent.KILOWATT_HOURS, 2.0, 300.0), size=2) == {
        "the tenant's budget of kWh a day": ({"l4": 0.144, "h100": 1.4}, 2.0 - 0.144)
    }
    assert paid(BudgetLeft("week", Spent.ACCELERATOR_HOURS, 3.0, 0.5)) == {
        "the tenant's budget of accelerator-hours a week": ({"l4": 1.0, "h100": 1.0}, 6.0 - 2.0)
    }, "for the half hour until the period ends"
    assert paid(BudgetLeft("day", Spent.COST, 0.0, 0.0))["the tenant's budget of cost a day"][1] == -1.4
    free = ServiceRooms(cluster(*held)).paid(replica(99), ["l4"], [BudgetLeft("day", Spent.COST, 0.0, 9.0)])
    assert free == (), "without a price, money limits nothing"


def test_a_pool_is_in_a_zone_if_all_of_its_nodes_are() -> None:
    def zoned(**zones: str) -> Snapshot:
        return cluster(
            nodes=tuple(
                replace(node, topology=(zones[node.name.replace("-", "_")], "", "rack-1", ""))
                for node in cluster().nodes
            )
        )

    assert room(cluster()).zones == {}
    assert room(zoned(l4_0000="a", l4_0001="a", h100_0000="b")).zones == {"l4": "a", "h100": "b"}
    assert room(zoned(l4_0000="a", l4_0001="b", h100_0000="b")).zones == {"h100": "b"}
    assert room(zoned(l4_0000="a", l4_0001="", h100_0000="")).zones == {}


@pytest.mark.parametrize("seed", range(12))
def test_the_planner_admits_exactly_what_the_tightest_row_leaves_in_an_idle_cluster(seed: int) -> None:
    rng = random.Random(seed)
    quotas = (Quota("L4", rng.randint(0, 3) * 1000, ceiling_m=rng.randint(3, 12) * 1000),)
    node_list = tuple(Node(f"l4-{i}", "l4", gpus(4), domain="feed") for i in range(2))
    domains = (PowerDomain("feed", rng.uniform(100, 700)),)
    running = tuple(replica(i, f"l4-{i % 2}") for i in range(rng.randint(0, 2)))
    waiting = tuple(replica(i) for i in range(len(running), 12))
    base = cluster(quotas=quotas, pools=POOLS[:1], nodes=node_list, domains=domains)
    found = ServiceRooms(replace(base, jobs=running)).of(replica(99), ["l4"])
    most = min([found.stock["l4"], *(int(row.most // row.weights["l4"]) for row in found.rows)])
    made, _ = plan(replace(base, jobs=(*running, *waiting)), Policy(), NOW)
    started = sum(action.kind is ActionKind.START for action in made.actions)
    assert started == max(0, most - len(running))
