"""Placement: shared devices, fragmentation, topology domains."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from busbar.scheduler import (
    Action,
    ActionKind,
    Event,
    Job,
    JobId,
    Node,
    Placement,
    Plan,
    Policy,
    Pool,
    Quota,
    Resources,
    Run,
    Snapshot,
    Tenant,
    applied,
    check_plan,
    plan,
    react,
    updated,
)
from busbar.scheduler.model.snapshot import Delta

from ..build import NOW

POLICY = Policy(solver=False)


def share(name: str, amount_m: int, pods: int = 1, tenant: str = "a", **more: object) -> Job:
    job = Job(
        JobId(name), name, "ns", tenant, min_pods=pods, max_pods=pods, per_pod=Resources(amount_m), submitted_at_s=NOW - 60
    )  # fmt: skip
    return replace(job, **more)  # type: ignore[arg-type]


def snapshot(jobs: list[Job], nodes: int = 1, devices: int = 2, shareable: bool = True) -> Snapshot:
    return Snapshot(
        (Pool("T4", "T4", shareable=shareable),),
        tuple(Node(f"n{i}", "T4", Resources(1000 * devices)) for i in range(nodes)),
        (Tenant("a"), Tenant("b")),
        tuple(jobs),
    )


def held(job: Job, *devices: int, node: str = "n0", since: float = NOW - 7200) -> Job:
    placement = Placement("T4", "T4", "resident", (node,) * len(devices), job.per_pod, devices)
    return replace(job, run=Run(placement, since, since))


def started(snapshot: Snapshot) -> dict[str, Placement]:
    made, _ = plan(snapshot, POLICY, NOW)
    assert check_plan(snapshot, made) == []
    return {str(a.job): a.to for a in made.actions if a.kind is ActionKind.START and a.to is not None}


def test_two_halves_of_two_devices_are_no_whole_one() -> None:
    running = [held(share("x", 600), 0), held(share("y", 600), 1)]
    # 0.8 of an accelerator is free on the node, and neither 0.6 nor a whole one fits.
    assert started(snapshot([*running, share("z", 600)])) == {}
    assert started(snapshot([*running, share("w", 1000)])) == {}
    assert started(snapshot([*running, share("v", 400)]))["v"].devices == (0,)


def test_shares_of_one_gang_name_their_devices() -> None:
    found = started(snapshot([share("g", 600, pods=3)], devices=4))
    assert sorted(found["g"].devices) == [0, 1, 2]
    assert started(snapshot([share("g", 600, pods=3)], devices=2)) == {}


def test_a_whole_accelerator_is_not_put_under_a_share() -> None:
    found = started(snapshot([held(share("x", 300), 1), share("w", 1000), share("v", 1000)]))
    assert len(found) == 1


def test_a_share_that_names_no_device_holds_a_whole_one() -> None:
    unnamed = share("x", 100)
    placement = Placement("T4", "T4", "resident", ("n0",), unnamed.per_pod)
    unnamed = replace(unnamed, run=Run(placement, NOW - 60))
    assert len(started(snapshot([unnamed, *(share(f"w{i}", 1000) for i in range(2))]))) == 1


def test_a_share_goes_where_one_is_already() -> None:
    waiting = [share("half", 500), *(share(f"whole{i}", 1000) for i in range(3))]
    found = started(snapshot([held(share("x", 500), 1), *waiting]))
    assert found["half"].devices == (1,)


def test_a_guarantee_is_taken_back_on_one_device() -> None:
    """Two thirds of each device are used: another two thirds need one of the two jobs stopped, not parts of both."""
    lent = [held(share(f"x{i}", 700, tenant="b"), i) for i in range(2)]
    mine = share("mine", 700)
    before = snapshot([*lent, mine])
    before = replace(before, tenants=(Tenant("a", quotas=(Quota("T4", 1000),)), Tenant("b")))
    made, _ = plan(before, POLICY, NOW)
    assert check_plan(before, made) == []
    assert sorted(a.kind for a in made.actions) == [ActionKind.PREEMPT, ActionKind.START]
    after = applied(before, made, NOW)
    assert plan(after, POLICY, NOW)[0].actions == ()


def test_the_checker_counts_devices() -> None:
    base = snapshot([held(share("x", 600), 0), share("z", 600)])

    def refused(*devices: int) -> list[str]:
        to = Placement("T4", "T4", "resident", ("n0",), Resources(600), devices)
        return check_plan(base, Plan("p", NOW, (Action("1", ActionKind.START, JobId("z"), to),)))

    assert refused(1) == []
    assert any("1200 thousandths of device 0" in text for text in refused(0))
    assert any("no device 2" in text for text in refused(2))
    assert any("do not say on which devices" in text for text in refused())


def test_requests_leave_whole_nodes_for_jobs_that_need_them() -> None:
    """A one-accelerator job avoids the node that a waiting job of four needs, although best fit would choose it."""
    nodes = (Node("a", "T4", Resources(4000)), Node("b", "T4", Resources(5000)))
    jobs = [share("one", 1000, priority=200), *(share(f"four{i}", 4000) for i in range(2))]
    found = started(replace(snapshot(jobs), nodes=nodes))
    assert found["one"].nodes == ("b",)
    assert len(found) == 3


def test_equal_gains_go_to_the_pool_that_loses_least() -> None:
    pools = (Pool("p8", "G"), Pool("q1", "G"))
    nodes = (Node("a", "p8", Resources(8000)), Node("z", "q1", Resources(1000)))
    jobs = [share("one", 1000, priority=200), share("eight", 8000)]
    found = started(replace(snapshot(jobs), pools=pools, nodes=nodes))
    assert (found["one"].nodes, found["eight"].nodes) == (("z",), ("a",))


def racks(*sizes: int, levels: tuple[tuple[str, ...], ...]) -> Snapshot:
    nodes = tuple(
        Node(f"n{i}", "T4", Resources(1000 * size), topology=levels[i]) for i, size in enumerate(sizes)
    )
    return replace(snapshot([], shareable=False), nodes=nodes)


@pytest.mark.parametrize(
    ("pods", "where"),
    [
        (2, {"n3"}),  # one node, though the first rack would hold it with less room
        (4, {"n2", "n3"}),  # one rack
        (5, {"n0", "n1", "n2", "n3"}),  # the zone
    ],
)
def test_a_gang_prefers_the_deepest_domain_that_holds_it(pods: int, where: set[str]) -> None:
    base = racks(1, 1, 1, 3, 8, levels=(("z", "r1"), ("z", "r1"), ("z", "r2"), ("z", "r2"), ("y", "r3")))
    taken = held(share("x", 1000), node="n4")
    taken = replace(taken, run=Run(Placement("T4", "T4", "resident", ("n4",), Resources(8000)), NOW - 60))
    found = started(replace(base, jobs=(replace(taken, per_pod=Resources(8000)), share("g", 1000, pods))))
    assert set(found["g"].nodes) <= where
    assert len(found["g"].nodes) == pods


def test_a_required_domain_is_cleared_though_victims_elsewhere_are_cheaper() -> None:
    levels = tuple((f"r{i // 2}",) for i in range(4))
    jobs = [
        replace(
            share(f"v{i}", 1000, tenant="b"),
            # The cheapest two stand in different racks: n0 and n2.
            run=Run(
                Placement("T4", "T4", "resident", (f"n{i}",), Resources(1000)),
                NOW - 9000,
                NOW - 100 * (1 + i % 2),
            ),
        )
        for i in range(4)
    ]
    gang = share("gang", 1000, pods=2, required_domain=1)
    base = replace(racks(1, 1, 1, 1, levels=levels), jobs=(*jobs, gang))
    base = replace(base, tenants=(Tenant("a", quotas=(Quota("T4", 2000),)), Tenant("b")))
    found = started(base)
    assert set(found["gang"].nodes) in ({"n0", "n1"}, {"n2", "n3"})


def test_nodes_in_no_rack_do_not_make_one() -> None:
    base = racks(1, 1, levels=(("z", ""), ("z", "")))
    assert started(replace(base, jobs=(share("g", 1000, pods=2, required_domain=2),))) == {}
    assert "g" in started(replace(base, jobs=(share("g", 1000, pods=2, required_domain=1),)))
    assert "g" in started(replace(base, jobs=(share("g", 1000, pods=2),)))


@st.composite
def shared(draw: st.DrawFn) -> Snapshot:
    """Clusters where most jobs ask for shares, some of them running."""
    sizes = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(1, 3)))]
    nodes = tuple(Node(f"n{i}", "T4", Resources(1000 * size, 8000)) for i, size in enumerate(sizes))
    left = {(node.name, k): 1000 for node, size in zip(nodes, sizes, strict=True) for k in range(size)}
    jobs = []
    for number in range(draw(st.integers(0, 8))):
        amount = draw(st.sampled_from((200, 300, 500, 600, 700, 1000, 2000)))
        job = share(
            f"j{number}", amount, draw(st.sampled_from((1, 1, 1, 2))), draw(st.sampled_from("ab")),
            priority=draw(st.sampled_from((50, 100, 200))),
            preemptible=draw(st.booleans()),
        )  # fmt: skip
        place = next((key for key, free in left.items() if free >= amount), None)
        if amount < 1000 and job.min_pods == 1 and place is not None and draw(st.booleans()):
            left[place] -= amount
            job = held(job, place[1], node=place[0], since=NOW - draw(st.sampled_from((10, 5000))))
            if draw(st.integers(0, 5)) == 0 and job.run is not None:
                job = replace(job, run=replace(job.run, releasing=True))
        jobs.append(job)
    guarantee = Quota("T4", 1000 * draw(st.integers(0, 3)))
    return Snapshot(
        (Pool("T4", "T4", shareable=True),),
        nodes,
        (Tenant("a", quotas=(guarantee,)), Tenant("b")),
        tuple(jobs),
    )


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(shared())
def test_shares_are_placed_by_device_and_stay(base: Snapshot) -> None:
    made, memo = plan(base, POLICY, NOW)
    assert check_plan(base, made) == []
    assert Plan.from_json(made.to_json()) == made
    after = applied(base, made, NOW)
    assert plan(after, POLICY, NOW)[0].actions == ()
    gone = updated(after, Delta(gone_jobs=tuple(job.id for job in after.jobs[:1])))
    event = Event.between(after, gone, NOW + 400)
    told, _ = react(gone, made, event, memo)
    assert check_plan(gone, told) == []
    assert told == react(gone, made, event)[0]
