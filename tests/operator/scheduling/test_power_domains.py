"""PowerDomain objects to the scheduler's domains: which limit, what is reserved on them, and which node hangs where."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.builders import NOW, pool, running, tenant
from tests.operator.power.parts import domain

from busbar.kube.informer import Key
from busbar.kube.types import PowerDomain
from busbar.kube.types.power_domain import PowerDomainStatus, PowerEnforcement
from busbar.operator.scheduling.builder import DOMAIN, NODE
from busbar.operator.scheduling.snapshot import ClusterObjects, build, builder_of
from busbar.operator.scheduling.wakes import matters
from busbar.operator.watch.projections import Node, Requests
from busbar.scheduler import PowerDomain as SDomain
from busbar.scheduler import Snapshot

A100 = pool("a100", accelerator="A100", resourceName="nvidia.com/gpu", nodeSelector={"pool": "a100"})


def node(name: str, rack: str = "", in_pool: bool = True) -> Node:
    labels = {"rack": rack} | ({"pool": "a100"} if in_pool else {})
    return Node(name, tuple(labels.items()), (), 8000, 32768, 100_000, (("nvidia.com/gpu", 8),), True)


def seen(*domains: PowerDomain, **fields: Any) -> ClusterObjects:
    base = ClusterObjects(
        pools=(A100,), tenants=(tenant("team", ["team"]),), nodes=(node("n0", "red"), node("n1", "blue"))
    )
    return replace(base, domains=domains, **fields)


def hangs(made: Snapshot) -> dict[str, str]:
    return {one.name: one.domain for one in made.nodes}


def test_domains_that_only_observe_are_not_in_the_snapshot() -> None:
    observing = seen(domain("red", 10_000.0, rack="red"))
    assert build(observing, NOW) == build(seen(), NOW)


def test_a_domain_that_limits_brings_its_tree_with_it() -> None:
    tree = (domain("row", 20_000.0), domain("red", 10_000.0, "row", "Static", 500.0, rack="red"))
    made = build(seen(*tree), NOW)
    assert made.domains == (
        SDomain("red", 9_900.0, "row", 500.0, limits=True),
        SDomain("row", 19_800.0, "", 0.0, limits=False),
    )
    assert hangs(made) == {"n0": "red", "n1": ""}


def test_accelerators_that_others_hold_count_with_their_nameplates() -> None:
    others = running(
        0,
        kind="",
        owner="",
        owner_uid="",
        node="n0",
        requests=Requests(100, devices=(("nvidia.com/gpu", 2),)),
    )
    limited = domain("red", 10_000.0, None, "Lease", 500.0, rack="red")
    [found] = build(seen(limited, pods=(others,)), NOW).domains
    assert found.reserved_w == 500.0 + 2 * 400.0


def test_a_domain_that_lacks_watts_for_what_runs_is_closed_until_it_does_not() -> None:
    limited = domain("red", 10_000.0, None, "Static", 500.0, rack="red")
    limited.spec.enforcement = PowerEnforcement.PREEMPT
    short = limited.model_copy(update={"status": PowerDomainStatus(short_watts=30.0)})
    builder = builder_of(seen(limited))
    assert not builder.snapshot(NOW).domains[0].closed
    builder.put(DOMAIN, Key("", "red"), short)
    assert builder.snapshot(NOW, full=False).domains[0].closed
    assert matters("PowerDomain", limited, short)
    assert not matters("PowerDomain", short, short)
    short.spec.enforcement = PowerEnforcement.CAP
    assert not build(seen(short), NOW).domains[0].closed, "what a status says is not asked then"


def test_jobs_may_run_under_caps_where_the_domains_own_agents_hold_all_boards() -> None:
    limited = domain("red", 10_000.0, None, "Lease", 500.0, rack="red")
    held = limited.model_copy(update={"status": PowerDomainStatus(boards_limited=True)})
    builder = builder_of(seen(limited))
    assert {one.name: one.limits_boards for one in builder.snapshot(NOW).nodes} == {"n0": False, "n1": False}
    builder.put(DOMAIN, Key("", "red"), held)
    after = builder.snapshot(NOW, full=False)
    assert {one.name: one.limits_boards for one in after.nodes} == {"n0": True, "n1": False}
    assert matters("PowerDomain", limited, held)
    row = domain("row", 20_000.0, None, "Static")
    observing = domain("red", 10_000.0, "row", "Observe", 500.0, rack="red")
    observing = observing.model_copy(update={"status": PowerDomainStatus(boards_limited=True)})
    assert not any(one.limits_boards for one in build(seen(row, observing), NOW).nodes)


def test_of_nodes_on_domains_that_limit_the_snapshot_says_whether_it_is_known_who_holds_their_boards() -> (
    None
):
    limited = domain("red", 10_000.0, None, "Lease", 500.0, rack="red")
    both = frozenset({"n0", "n1"})
    assert {one.name: one.tells_boards for one in build(seen(limited, telling=both), NOW).nodes} == {
        "n0": True,
        "n1": False,
    }
    builder = builder_of(seen(limited))
    before = builder.snapshot(NOW)
    assert not any(one.tells_boards for one in before.nodes)
    builder.tell_boards(both)
    after = builder.snapshot(NOW, full=False)
    assert [one.tells_boards for one in after.nodes] == [True, False]
    assert builder.snapshot(NOW, full=False).nodes is after.nodes
    builder.tell_boards(frozenset())
    assert builder.snapshot(NOW, full=False).nodes == before.nodes


def test_a_node_of_no_pool_counts_with_what_is_stated_for_it() -> None:
    limited = domain("red", 10_000.0, None, "Lease", 500.0, rack="red")
    limited.spec.unreported_node_watts = 6500.0
    [found] = build(seen(limited, nodes=(node("n0", "red"), node("n2", "red", in_pool=False))), NOW).domains
    assert found.reserved_w == 500.0 + 6500.0


@pytest.mark.parametrize(
    ("domains", "at"),
    [
        ((domain("row", 9e3, None, "Static"), domain("red", 1e4, "row", "Static", 1.0, rack="red")), "row"),  # too large
        ((domain("x", 1e4, None, "Static"), domain("red", 1e4, "gone", "Static", 1.0, rack="red")), ""),
        ((domain("x", 1e4, "red", "Static"), domain("red", 1e4, "x", "Static", 1.0, rack="red")), ""),  # a cycle
        ((domain("one", 1e4, None, "Static", 1.0, rack="red"), domain("two", 1e4, None, "Static", 1.0, rack="red")), "one"),
    ],
)  # fmt: skip
def test_a_domain_at_fault_holds_nothing_back(domains: tuple[PowerDomain, ...], at: str) -> None:
    assert hangs(build(seen(*domains), NOW))["n0"] == at


def test_what_does_not_change_stays_the_same_object() -> None:
    limited = domain("red", 10_000.0, None, "Lease", 500.0, rack="red")
    builder = builder_of(seen(limited))
    first = builder.snapshot(NOW)
    told = limited.model_copy(update={"status": None})
    builder.put(DOMAIN, Key("", "red"), told)
    second = builder.snapshot(NOW, full=False)
    assert second.nodes is first.nodes
    assert second.domains is first.domains
    builder.put(NODE, Key("", "n1"), node("n1", "red"))
    third = builder.snapshot(NOW, full=False)
    assert third.nodes[0] is first.nodes[0]
    assert hangs(third) == {"n0": "red", "n1": "red"}
    builder.put(DOMAIN, Key("", "red"), None)
    assert builder.snapshot(NOW, full=False).domains == ()


def test_a_change_of_its_spec_wakes_a_round_and_its_status_does_not() -> None:
    before = domain("red")
    after = domain("red", 2000.0)
    after.metadata.generation = 2
    assert matters("PowerDomain", before, after)
    assert matters("PowerDomain", None, before)
    assert not matters("PowerDomain", before, domain("red"))
