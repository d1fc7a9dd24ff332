"""Power domains of a snapshot: what is refused, how they travel, and what the checker counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from busbar.scheduler import (
    Event,
    Happened,
    Policy,
    PowerDomain,
    Rate,
    Snapshot,
    SnapshotError,
    check_plan,
    plan,
)

from ..build import NOW, cluster, job, nodes

POLICY = Policy(solver_seconds=None)


def on_one_feed(snapshot: Snapshot, name: str, *domains: PowerDomain) -> Snapshot:
    """The snapshot with these domains; all nodes hang on the one named, and an H100 draws 700 W."""
    on = tuple(replace(node, domain=name) for node in snapshot.nodes)
    table = replace(snapshot.table, rates=(Rate("H100", 1.0, 700.0),))
    return replace(snapshot, nodes=on, domains=domains, table=table)


@pytest.mark.parametrize(
    ("domains", "says"),
    [
        ((PowerDomain("a", 1.0), PowerDomain("a", 1.0)), "two power domains are called 'a'"),
        (
            (PowerDomain("a", 1.0, "b"),),
            "power domain 'a' names the parent 'b', which is not in the snapshot",
        ),
        (
            (PowerDomain("a", 1.0, "b"), PowerDomain("b", 1.0, "a")),
            "power domain 'a': the chain of parents returns to 'a'",
        ),
        (
            (PowerDomain("b", 1.0),),
            "node 'H100-0000' names the power domain 'a', which is not in the snapshot",
        ),
        ((PowerDomain("a", float("nan")),), "power domain 'a': nan W usable and 0.0 W reserved"),
        ((PowerDomain("a", 1.0, reserved_w=-1.0),), "power domain 'a': 1.0 W usable and -1.0 W reserved"),
    ],
)
def test_domains_that_are_no_tree_are_refused(domains: tuple[PowerDomain, ...], says: str) -> None:
    snapshot = on_one_feed(cluster(H100=1), "a", *domains)
    with pytest.raises(SnapshotError) as caught:
        plan(snapshot, POLICY, NOW)
    assert str(caught.value) == says


def test_domains_survive_json() -> None:
    snapshot = on_one_feed(cluster(job("a"), H100=1), "a", PowerDomain("a", 1.0, limits=False))
    assert Snapshot.from_json(snapshot.to_json()) == snapshot
    assert nodes("H100", 1)[0].domain == ""


def test_the_checker_refuses_what_the_planner_would_not_make() -> None:
    bare = cluster(job("a"), job("b"), H100=1)
    both, _ = plan(bare, POLICY, NOW)
    tight = on_one_feed(bare, "rack", PowerDomain("row", 1000.0), PowerDomain("rack", 9e9, "row"))
    faults = check_plan(tight, both)
    assert faults == [
        "power domain row: 1400 W before anybody has left, on 1000",
        "power domain row: 1400 W on 1000",
    ]


def test_the_checker_counts_starts_that_do_not_wait_for_those_who_leave() -> None:
    bare = cluster(job("a"), job("b"), H100=1)
    both, _ = plan(bare, POLICY, NOW)
    one = replace(both, actions=both.actions[:1])
    assert "power domain rack: 700 W on 0" in check_plan(
        on_one_feed(bare, "rack", PowerDomain("rack", 800.0, reserved_w=800.0)), one
    )
    observed = on_one_feed(bare, "rack", PowerDomain("rack", 0.0, limits=False))
    assert check_plan(observed, both) == []


def test_a_change_of_a_domain_concerns_every_pool() -> None:
    before = on_one_feed(cluster(H100=1, L4=1), "a", PowerDomain("a", 1.0))
    after = replace(before, domains=(PowerDomain("a", 2.0),))
    found = Event.between(before, after, NOW).happened
    assert [(one.kind, one.pool) for one in found] == [(Happened.POOL, "H100"), (Happened.POOL, "L4")]
