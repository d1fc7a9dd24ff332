"""Watts as a resource: no plan puts more into a power domain than it may carry, and where none limits nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from busbar.scheduler import (
    Event,
    Job,
    JobKind,
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

from .build import NOW, cluster, job, placed, speeds, tenant
from .strategies import capped, powered

POLICY = Policy(solver_seconds=None)
quiet = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


def on_feeds(
    snapshot: Snapshot, hangs: Callable[[str], str], *domains: PowerDomain, watts: float = 700.0
) -> Snapshot:
    """The snapshot with these domains; `hangs` names that of each node, and an H100 draws so much."""
    table = replace(snapshot.table, rates=(Rate("H100", 1.0, watts), Rate("L4", 0.5, 72.0)))
    on = tuple(replace(node, domain=hangs(node.name)) for node in snapshot.nodes)
    return replace(snapshot, table=table, nodes=on, domains=domains)


def started(result: Plan) -> set[str]:
    return {action.job.removeprefix("uid-") for action in result.actions if action.to is not None}


def made(snapshot: Snapshot) -> Plan:
    result = plan(snapshot, POLICY, NOW)[0]
    assert check_plan(snapshot, result) == []
    return result


# -- for every snapshot ---------------------------------------------------------------------------------------


@quiet
@given(powered() | capped())
def test_no_plan_puts_more_into_a_domain_than_it_may_carry(snapshot: Snapshot) -> None:
    result, memo = plan(snapshot, POLICY, NOW)
    assert check_plan(snapshot, result) == []
    after = applied(snapshot, result, NOW)
    assert plan(after, POLICY, NOW)[0].actions == ()
    gone = [each for each in after.jobs if each.run is not None][:2]
    later = replace(after, jobs=tuple(each for each in after.jobs if each not in gone))
    event = Event.between(snapshot, later, NOW + 1)
    answer, _ = react(later, result, event, memo)
    assert check_plan(later, answer) == []
    assert react(later, result, event)[0] == answer


@quiet
@given(powered(), st.booleans())
def test_domains_that_only_observe_change_nothing(snapshot: Snapshot, there: bool) -> None:
    observed = tuple(replace(domain, limits=False) for domain in snapshot.domains) if there else ()
    bare = replace(
        snapshot,
        domains=observed,
        nodes=tuple(replace(n, domain=n.domain if there else "") for n in snapshot.nodes),
    )
    without = replace(bare, domains=(), nodes=tuple(replace(node, domain="") for node in snapshot.nodes))
    one, memo = plan(bare, POLICY, NOW)
    other, other_memo = plan(without, POLICY, NOW)
    assert one.to_json() == other.to_json()
    after, bare_after = applied(without, other, NOW), applied(bare, one, NOW)
    event = Event.between(without, after, NOW + 1)
    answers = react(bare_after, one, event, memo)[0], react(after, other, event, other_memo)[0]
    assert answers[0].to_json() == answers[1].to_json()


# -- what is counted ------------------------------------------------------------------------------------------


def test_a_domain_carries_as_many_jobs_as_its_watts() -> None:
    four = cluster(*(job(f"j{i}") for i in range(4)), H100=2)
    assert len(started(made(on_feeds(four, lambda _: "rack", PowerDomain("rack", 1400.0))))) == 2
    assert len(started(made(on_feeds(four, lambda _: "rack", PowerDomain("rack", 1399.0))))) == 1
    assert (
        len(started(made(on_feeds(four, lambda _: "rack", PowerDomain("rack", 1400.0, reserved_w=1.0))))) == 1
    )


def test_on_a_closed_domain_nothing_is_added_whatever_is_free() -> None:
    runs = job("runs", on=placed("H100", "H100-0000"))
    waits = on_feeds(
        cluster(runs, job("waits"), H100=2), lambda _: "rack", PowerDomain("rack", 9e3, closed=True)
    )
    result = made(waits)
    assert not result.actions
    [record] = result.waiting
    assert (record.code, record.domain, record.free, record.requested) == (WaitCode.POWER, "rack", 0, 700)
    assert started(made(replace(waits, domains=(PowerDomain("rack", 9e3),)))) == {"waits"}
    other = on_feeds(
        cluster(runs, job("waits"), H100=2),
        lambda name: "rack" if name.endswith("0") else "open",
        PowerDomain("rack", 9e3, closed=True),
        PowerDomain("open", 9e3),
    )
    [action] = made(other).actions
    assert action.to is not None
    assert action.to.nodes == ("H100-0001",)


def test_every_level_of_the_tree_counts() -> None:
    four = cluster(*(job(f"j{i}") for i in range(4)), H100=2)
    racks = [PowerDomain(f"H100-000{i}", 1400.0, "row") for i in range(2)]
    assert len(started(made(on_feeds(four, lambda name: name, PowerDomain("row", 2100.0), *racks)))) == 3
    assert len(started(made(on_feeds(four, lambda name: name, PowerDomain("row", 9e3), *racks)))) == 4


def test_free_accelerators_draw_what_idle_ones_do() -> None:
    two = on_feeds(cluster(job("a"), job("b"), H100=1), lambda _: "rack", PowerDomain("rack", 2100.0))
    idle = replace(two, table=replace(two.table, rates=(Rate("H100", 1.0, 700.0, 100.0),)))
    # Eight idle ones draw 800 W, and a job's 600 W more.
    assert (len(started(made(two))), len(started(made(idle)))) == (2, 2)
    less = replace(idle, domains=(PowerDomain("rack", 1999.0),))
    assert len(started(made(less))) == 1


def test_watts_of_the_table_come_before_the_nameplate() -> None:
    table = speeds("x", H100=1.0)
    cool = replace(table, cells=(replace(table.cells[0], watts=350.0),))
    three = [job(f"j{i}", workload_class="x") for i in range(3)]
    snapshot = on_feeds(
        replace(cluster(*three, H100=1), table=cool), lambda _: "rack", PowerDomain("rack", 1050.0)
    )
    assert len(started(made(snapshot))) == 3


def test_a_gang_shares_the_watts_of_its_domain() -> None:
    """Each node alone has room for two of its pods; the rack carries three."""
    gang = cluster(job("g", pods=4), H100=2)
    racks = (PowerDomain("rack", 2100.0), PowerDomain("other", 700.0))
    assert started(made(on_feeds(gang, lambda _: "rack", *racks))) == set()
    split = on_feeds(gang, lambda name: "rack" if name.endswith("0") else "other", *racks)
    [action] = made(split).actions
    assert action.to is not None
    assert sorted(action.to.nodes) == ["H100-0000"] * 3 + ["H100-0001"]


def test_a_gang_finds_the_rack_that_carries_it() -> None:
    gang = replace(job("g", pods=2, size=2), required_domain=1)
    bare = cluster(gang, H100=4)
    at = {name: f"rack-{i // 2}" for i, name in enumerate(node.name for node in bare.nodes)}
    bare = replace(bare, nodes=tuple(replace(node, topology=(at[node.name],)) for node in bare.nodes))
    feeds = (
        PowerDomain("row", 2800.0),
        PowerDomain("rack-0", 1400.0, "row"),
        PowerDomain("rack-1", 2800.0, "row"),
    )
    [action] = made(on_feeds(bare, lambda name: at[name], *feeds)).actions
    assert action.to is not None
    assert {at[name] for name in action.to.nodes} == {"rack-1"}


def test_what_was_above_before_is_nobodys_fault_and_nothing_is_added() -> None:
    runs = [job(f"r{i}", on=placed("H100", "H100-0000")) for i in range(2)]
    snapshot = on_feeds(cluster(*runs, job("w"), H100=1), lambda _: "rack", PowerDomain("rack", 700.0))
    result = made(snapshot)
    assert result.actions == ()
    assert result.waiting[0].code is WaitCode.POWER


# -- who gives way --------------------------------------------------------------------------------------------


def test_victims_give_back_their_watts_where_accelerators_are_free() -> None:
    low = [job(f"low{i}", size=2, on=placed("H100", f"H100-000{i}", size=2), priority=50) for i in range(2)]
    high = job("high", size=4, priority=200)
    snapshot = on_feeds(cluster(*low, high, H100=2), lambda _: "row", PowerDomain("row", 2800.0))
    result = made(snapshot)
    start = next(action for action in result.actions if action.job == "uid-high")
    assert set(start.after) == {"uid-low0", "uid-low1"}
    after = applied(snapshot, result, NOW)
    assert after != snapshot


def test_a_job_is_not_stopped_for_watts_that_are_elsewhere() -> None:
    low = job("low", size=2, on=placed("H100", "H100-0000", size=2), priority=50)
    high = job("high", size=4, priority=200)
    feeds = (PowerDomain("H100-0000", 1400.0), PowerDomain("H100-0001", 1400.0))
    assert made(on_feeds(cluster(low, high, H100=2), lambda name: name, *feeds)).actions == ()


def test_a_guarantee_gets_the_watts_that_others_borrowed() -> None:
    borrowed = [job(f"b{i}", "b", size=8, on=placed("H100", f"H100-000{i}", size=8)) for i in range(2)]
    mine = job("mine", "a", size=8)
    tenants = (tenant("a", H100=(8, None, None)), tenant("b"))
    bare = cluster(*borrowed, mine, tenants=tenants, H100=3)
    snapshot = on_feeds(bare, lambda _: "row", PowerDomain("row", 11_200.0))
    assert "mine" in started(made(snapshot))


def test_serving_counts_like_training() -> None:
    two = [job(f"s{i}", kind=JobKind.SERVING) for i in range(2)]
    assert (
        len(started(made(on_feeds(cluster(*two, H100=1), lambda _: "rack", PowerDomain("rack", 1000.0)))))
        == 1
    )


def test_the_end_of_a_job_in_another_pool_frees_watts() -> None:
    runs: Job = job("run", on=placed("L4", "L4-0000", size=8), size=8)
    waits = job("wait", accelerators=("H100",))
    both = on_feeds(cluster(runs, waits, H100=1, L4=1), lambda _: "row", PowerDomain("row", 1000.0))
    result, memo = plan(both, POLICY, NOW)
    assert result.waiting[0].code is WaitCode.POWER
    alone = replace(both, jobs=(waits,))
    answer, _ = react(alone, result, Event.ended(NOW + 1, runs), memo)
    assert started(answer) == {"wait"}


def test_a_larger_budget_starts_what_waited() -> None:
    two = on_feeds(cluster(job("a"), job("b"), H100=1), lambda _: "rack", PowerDomain("rack", 1000.0))
    result, memo = plan(two, POLICY, NOW)
    after = applied(two, result, NOW)
    more = replace(after, domains=(PowerDomain("rack", 1400.0),))
    answer, _ = react(more, result, Event.between(after, more, NOW + 1), memo)
    assert len(started(answer)) == 1
