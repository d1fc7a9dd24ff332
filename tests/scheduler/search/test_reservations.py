"""Reservations: who gets one, where, what may start beside it, and that it is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from benchmarks.scheduling import generator
from benchmarks.scheduling.decision import reclaimed

from busbar.scheduler import (
    Event,
    Job,
    JobId,
    Plan,
    Policy,
    Reservation,
    Run,
    Snapshot,
    applied,
    check_plan,
    plan,
    react,
    sentence,
    updated,
)
from busbar.scheduler.model.snapshot import Delta

from ..build import NOW, cluster, job, placed, speeds, tenant

POLICY = Policy(solver_seconds=None)
HOUR = 3600.0


def known(name: str, hours: float = 1.0, size: int = 1, pods: int = 1, **more: Any) -> Job:
    """A job that takes this long with its accelerators: the class has speed 1 on one, and n ** 0.9 on n."""
    work = hours * HOUR * (size * pods) ** 0.9
    return job(name, size=size, pods=pods, workload_class="c", remaining=work, **more)


def fast(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, table=speeds("c", **{pool.name: 1.0 for pool in snapshot.pools}))


def made(snapshot: Snapshot, now: float = NOW, policy: Policy = POLICY) -> Plan:
    result, _ = plan(snapshot, policy, now)
    assert check_plan(snapshot, result) == []
    again = plan(applied(snapshot, result, now), policy, now)[0]
    assert again.actions == ()
    return result


def reserved(result: Plan) -> dict[str, tuple[tuple[str, ...], float, int]]:
    return {
        r.job.removeprefix("uid-"): (r.placement.nodes, round(r.start_s - NOW, 3), r.collected)
        for r in result.reservations
    }


def started(result: Plan) -> set[str]:
    return {action.job.removeprefix("uid-") for action in result.actions if action.to is not None}


def held(name: str, node: int, hours: float, size: int = 8, of: str = "a", **more: Any) -> Job:
    """A job that runs for two hours already and for `hours` more."""
    on = placed("H100", f"H100-{node:04d}", size=size)
    return known(name, hours, size=size, tenant=of, on=on, **more)


GANG: dict[str, Any] = {"size": 8, "pods": 2, "priority": 500}


def test_a_higher_priority_reserves_the_nodes_that_are_free_first() -> None:
    fixed = [held(f"r{i}", i, hours, preemptible=False) for i, hours in enumerate((3, 1, 2))]
    result = made(fast(cluster(*fixed, known("gang", **GANG), H100=3)))
    assert reserved(result) == {"gang": (("H100-0001", "H100-0002"), 2 * HOUR, 0)}


def test_a_right_takes_what_has_run_its_minimum_and_stops_nobody_before_all_is_there() -> None:
    young = held("young", 0, 9)
    assert young.run is not None
    young = replace(young, run=replace(young.run, started_at_s=NOW - 100))
    snapshot = fast(cluster(young, held("old", 1, 9), known("gang", **GANG), H100=2))
    result = made(snapshot)
    assert reserved(result) == {"gang": (("H100-0000", "H100-0001"), 200.0, 1)}
    assert result.actions == ()
    later = made(applied(snapshot, result, NOW), NOW + 200)
    assert started(later) == {"gang"}


def test_what_starts_beside_a_reservation_is_gone_in_time_or_can_be_stopped() -> None:
    waits = [
        known("short", 0.9, size=8, preemptible=False),
        known("long", 5, size=8, preemptible=False),
        known("stopped", 5, size=8),
    ]
    before = fast(cluster(held("r", 0, 1, preemptible=False), known("gang", **GANG), H100=2))
    last, memo = plan(before, POLICY, NOW)
    for one, fits in zip(waits, (True, False, True), strict=True):
        after = updated(before, Delta(jobs=(one,)))
        answer, _ = react(after, last, Event.between(before, after, NOW + 1), None)
        assert check_plan(after, answer) == []
        assert (started(answer) == {one.name}) is fits, one.name
        assert reserved(answer)["gang"][0] == ("H100-0000", "H100-0001")
    assert memo is not None


def test_an_answer_to_an_event_keeps_reservations_and_the_next_plan_makes_new_ones() -> None:
    runs = [held("r0", 0, 9, preemptible=False), held("r1", 1, 1, preemptible=False)]
    before = fast(cluster(*runs, known("first", size=8, priority=500), known("small"), H100=2))
    last, memo = plan(before, POLICY, NOW)
    assert reserved(last) == {"first": (("H100-0001",), HOUR, 0)}
    after = updated(before, Delta(jobs=(known("second", size=8, priority=500),)))
    answer, _ = react(after, last, Event.between(before, after, NOW + 1), memo)
    assert [r.placement for r in answer.reservations] == [r.placement for r in last.reservations]
    assert set(reserved(made(after, NOW + 10))) == {"first", "second"}


def test_a_job_in_reserved_room_is_stopped_when_the_rest_is_collected() -> None:
    before = fast(cluster(held("r", 0, 1, preemptible=False), known("gang", **GANG), H100=2))
    last, _ = plan(before, POLICY, NOW)
    beside = known("beside", 5, size=8, on=placed("H100", "H100-0001", size=8), since=NOW + 60, priority=100)
    now = NOW + HOUR
    after = updated(applied(before, last, NOW), Delta(jobs=(beside,), gone_jobs=(JobId("uid-r"),)))
    assert started(made(after, now)) == {"gang"}
    equal = replace(after, jobs=tuple(replace(j, priority=100) for j in after.jobs))
    in_its_room = replace(after.reservations[0], backfilled=(beside.id,))
    for known_, first in (((in_its_room,), True), (after.reservations, False)):
        result = made(replace(equal, reservations=known_), now)
        assert (started(result) == {"gang"}) is first, (
            "only what was started in its room gives way to its equal"
        )
    unknown = replace(after.reservations[0], backfilled=None)
    assert started(made(replace(equal, reservations=(unknown,)), now)) == {"gang"}, "read from a status"


def test_what_starts_in_the_room_of_a_reservation_is_remembered() -> None:
    before = fast(cluster(held("r", 0, 1, preemptible=False), known("gang", **GANG), H100=2))
    last = made(before)
    assert [r.backfilled for r in last.reservations] == [()]
    waits = [known("brief", 0.5, size=4, priority=100), known("later", 0.5, size=4, priority=100)]
    after = updated(applied(before, last, NOW), Delta(jobs=tuple(waits)))
    second = made(after, NOW + 60)
    assert started(second) == {"brief", "later"}
    assert [r.backfilled for r in second.reservations] == [(JobId("uid-brief"), JobId("uid-later"))]
    third = made(applied(after, second, NOW + 60), NOW + 120)
    assert third.reservations[0].backfilled == second.reservations[0].backfilled


@pytest.mark.parametrize(
    ("weight", "pods", "passes"),
    [(1, 1, True), (3, 1, False), (1, 2, False)],
    ids=["above", "at", "too large"],
)
def test_a_share_passes_the_patience_of_a_tenant_above_its_own(weight: int, pods: int, passes: bool) -> None:
    """Tenant a holds twelve of sixteen: more than its share of eight, or with three times the weight just its share. A job
    that no share could hold is passed by nobody."""
    owners = (replace(tenant("a"), weight=float(weight)), tenant("b"))
    runs = [held(f"r{size}", size < 8, size, size=size, preemptible=False) for size in (8, 3, 1)]
    patient = known("patient", 1, size=8, pods=pods, submitted=NOW - 10 * HOUR)
    before = fast(cluster(*runs, patient, tenants=owners, H100=2))
    last = made(before)
    assert "patient" in reserved(last)
    more = [known(f"b{i}", 99, size=4, tenant="b", preemptible=False) for i in range(2)]
    after = updated(applied(before, last, NOW), Delta(jobs=tuple(more)))
    answer, _ = react(after, last, Event.between(before, after, NOW + 1), None)
    assert started(answer) == ({"b0"} if passes else set())
    assert started(made(after)) == started(answer)


def test_of_equal_rights_the_patient_larger_job_is_not_passed() -> None:
    fresh = [known(f"f{i}", submitted=NOW) for i in range(8)]
    for waited_h, first in ((1.9, False), (2.1, True)):
        large = known("large", size=8, submitted=NOW - waited_h * HOUR)
        result = made(fast(cluster(*fresh, large, H100=1)))
        assert (started(result) == {"large"}) is first
    endless = replace(POLICY, patience=0.0)
    result = made(fast(cluster(*fresh, large, H100=1)), policy=endless)
    assert started(result) == {f"f{i}" for i in range(8)}


@pytest.mark.parametrize(("waited_h", "stopped"), [(1.5, True), (2.5, False)])
def test_a_job_that_had_waited_for_its_patience_keeps_its_place(waited_h: float, stopped: bool) -> None:
    """Smaller jobs of equal right do not take it by value, although each of them is worth more per accelerator."""
    since = NOW - 0.1 * HOUR
    runs = known(
        "large", size=8, on=placed("H100", "H100-0000", size=8), since=since, saved=NOW,
        submitted=since - waited_h * HOUR,
    )  # fmt: skip
    fresh = [known(f"f{i}", 0.2, size=4, submitted=NOW) for i in range(2)]
    assert started(made(fast(cluster(runs, *fresh, H100=1)))) == ({"f0", "f1"} if stopped else set())


def test_a_share_is_collected_on_whole_nodes() -> None:
    """b holds all; a is entitled to half, and its gang needs two whole nodes of four."""
    jobs = [held(f"b{i}", i % 4, 9, size=1, of="b") for i in range(32)]
    young = [
        replace(one, run=replace(one.run, started_at_s=NOW - 30.0 * i))
        for i, one in enumerate(jobs)
        if one.run is not None
    ]
    snapshot = fast(cluster(*young, known("gang", size=8, pods=2), H100=4))
    result = made(snapshot)
    (nodes, start_s, _) = reserved(result)["gang"]
    assert len(set(nodes)) == 2
    assert 0 < start_s <= POLICY.min_run_s
    later = made(applied(snapshot, result, NOW), NOW + POLICY.min_run_s)
    assert started(later) == {"gang"}
    assert sum(action.to is None for action in later.actions) == 16


def test_a_reservation_is_kept_where_the_surplus_that_it_takes_from_has_become_less() -> None:
    """b is entitled to 24 of 32, and collects three nodes of a, which holds all. On the fourth a's job ends: what a has
    beyond its share is two nodes now."""
    jobs = [held(f"a{i}", i, 9) for i in range(4)]
    young = [
        replace(one, run=replace(one.run, started_at_s=NOW - 100)) for one in jobs if one.run is not None
    ]
    waits = known("gang", size=8, pods=3, tenant="b")
    before = fast(cluster(*young, waits, tenants=(tenant("a"), tenant("b", weight=3.0)), H100=4))
    last, memo = plan(before, POLICY, NOW)
    nodes = last.reservations[0].placement.nodes
    assert reserved(last) == {"gang": (nodes, 200.0, 0)}
    (gone,) = (one for one in young if one.run is not None and one.run.placement.nodes[0] not in nodes)
    after = updated(before, Delta(gone_jobs=(gone.id,)))
    answer, _ = react(after, last, Event.between(before, after, NOW + 1), memo)
    assert [r.placement for r in answer.reservations] == [r.placement for r in last.reservations]


def test_a_place_is_kept_and_a_node_only_exchanged_for_one_that_is_there() -> None:
    fixed = [held(f"r{i}", i, 2 + i / 100, preemptible=False) for i in range(4)]
    before = fast(cluster(*fixed, known("gang", **GANG), H100=4))
    result = made(before)
    assert reserved(result)["gang"][0] == ("H100-0000", "H100-0001")
    later = applied(before, result, NOW)
    jobs = {one.name: one for one in later.jobs}
    slower = replace(jobs["r0"], remaining_work=2.5 * HOUR * 8**0.9)
    same = made(updated(later, Delta(jobs=(slower,))))
    assert reserved(same)["gang"][0] == ("H100-0000", "H100-0001"), "not for 25 minutes of 150"
    ended = made(updated(later, Delta(gone_jobs=(JobId("uid-r3"),))))
    assert reserved(ended)["gang"][0] == ("H100-0000", "H100-0003")


def test_a_guarantee_passes_a_reservation_and_a_fair_share_does_not() -> None:
    owner = (tenant("a"), tenant("b", H100=(8, None, None)), tenant("c"))
    before = fast(cluster(held("r", 0, 9, preemptible=False), known("gang", **GANG), tenants=owner, H100=2))
    last = made(before)
    assert "gang" in reserved(last)
    for whose, passes in (("b", True), ("c", False)):
        one = known("one", 99, size=8, tenant=whose, preemptible=False)
        after = updated(applied(before, last, NOW), Delta(jobs=(one,)))
        assert (started(made(after)) == {"one"}) is passes


def test_the_record_says_where_and_when() -> None:
    fixed = [held(f"r{i}", i, hours, preemptible=False) for i, hours in enumerate((1, 2))]
    result = made(fast(cluster(*fixed, known("gang", **GANG), H100=3)))
    record = result.record(JobId("uid-gang"))
    assert record is not None
    assert record.reservation == result.reservations[0]
    assert "It is next: starts by 12 Jan 14:46 UTC on H100, 1 of 2 nodes collected." in sentence(record)


def test_one_accelerator_needs_no_reservation() -> None:
    full = [held(f"r{i}", 0, 9, size=1, preemptible=False) for i in range(8)]
    assert made(fast(cluster(*full, known("one", priority=500), H100=1))).reservations == ()


def test_a_run_ends_the_reservation() -> None:
    before = fast(cluster(held("r", 0, 1, preemptible=False), known("gang", **GANG), H100=2))
    last = made(before)
    after = applied(before, last, NOW)
    place = last.reservations[0].placement
    runs = tuple(
        replace(one, run=Run(place, NOW)) if one.name == "gang" else one
        for one in after.jobs
        if one.name != "r"
    )
    assert made(replace(after, jobs=runs)).reservations == ()


def _leaving(name: str, node: int, size: int) -> Job:
    one = held(name, node, 9, size=size)
    assert one.run is not None
    return replace(one, run=replace(one.run, releasing=True))


def _promise(name: str, *names: str, size: int, after_s: float = 0.0) -> Reservation:
    place = placed("H100", *names, size=size)
    return Reservation(JobId("uid-" + name), place, (NOW - 60,) * len(names), NOW + after_s, 0)


def test_a_place_that_is_there_is_kept_from_reservations_that_still_wait() -> None:
    """`early` waits for the other node, and the room of `ready` would be there sooner."""
    jobs = [held("r", 0, 9, preemptible=False), _leaving("gone", 1, 8)]
    early, ready = (known(name, size=8, priority=500) for name in ("early", "ready"))
    snapshot = replace(
        fast(cluster(*jobs, known("low", priority=1), early, ready, H100=2)),
        reservations=(
            _promise("early", "H100-0000", size=8, after_s=9 * HOUR),
            _promise("ready", "H100-0001", size=8),
        ),
    )
    assert {name: row[0] for name, row in reserved(made(snapshot)).items()} == {
        "early": ("H100-0000",),
        "ready": ("H100-0001",),
    }


def test_places_that_are_there_are_kept_pod_by_pod_also_on_one_node() -> None:
    """Two jobs wait for the same job to leave: each keeps the places that the plan before gave it."""
    wide, whole = known("wide", size=2, pods=2), known("whole", size=4)
    snapshot = replace(
        fast(
            cluster(_leaving("gone", 0, 8), held("r", 1, 9, size=6, preemptible=False), wide, whole, H100=2)
        ),
        reservations=(
            _promise("wide", "H100-0000", "H100-0001", size=2),
            _promise("whole", "H100-0000", size=4),
        ),
    )
    assert {name: row[0] for name, row in reserved(made(snapshot)).items()} == {
        "wide": ("H100-0000", "H100-0001"),
        "whole": ("H100-0000",),
    }


def test_a_node_that_has_gone_is_exchanged_and_the_rest_of_the_place_kept() -> None:
    """`gang` collected nodes 0 and 2; node 2 was removed from the cluster since."""
    busy = [held(f"r{i}", i, 9, preemptible=False) for i in range(2)]
    gang, low = known("gang", priority=500, size=8, pods=2), known("low", priority=1)
    snapshot = replace(
        fast(cluster(*busy, low, gang, H100=2)),
        reservations=(_promise("gang", "H100-0000", "H100-0002", size=8, after_s=9 * HOUR),),
    )
    assert reserved(made(snapshot))["gang"][0] == ("H100-0000", "H100-0001")
    (gone,) = (
        replace(one, placement=placed("H100", "H100-0002", size=8), since_s=(NOW - 60,))
        for one in snapshot.reservations
    )
    alone = replace(
        fast(cluster(*busy, low, known("gang", priority=500, size=8), H100=2)), reservations=(gone,)
    )
    assert set(reserved(made(alone))) == {"gang"}


def test_who_passes_a_reservation_and_is_not_stopped_for_it_moves_its_start() -> None:
    """Both `urgent` jobs pass `wide`, which cannot start before they have ended; so `small` has time to run before."""
    wide = known("wide", 0.1, size=8, pods=3, priority=100, preemptible=False)
    urgent = known("urgent", 3, size=8, priority=500), known("short", 0.1, size=2, priority=500)
    small = known("small", 1, size=1, pods=2, priority=100, preemptible=False)
    result = made(fast(cluster(wide, *urgent, small, H100=3)))
    assert reserved(result)["wide"][1] == 3 * HOUR
    assert started(result) == {"urgent", "short", "small"}


def test_a_patient_job_does_not_take_a_place_that_was_promised() -> None:
    promised, large = known("promised", size=4), known("large", size=8, submitted=NOW - 9 * HOUR)
    snapshot = replace(
        fast(cluster(_leaving("gone", 0, 8), promised, large, H100=1)),
        reservations=(_promise("promised", "H100-0000", size=4),),
    )
    assert list(reserved(made(snapshot))) == ["promised"]


def test_a_place_that_waits_for_a_release_is_kept_whatever_its_size() -> None:
    """Both wait for the job that leaves; the older one comes first, and the other one must not get what is free."""
    older = known("older", size=2, submitted=NOW - 5 * HOUR)
    younger = known("younger", size=4, submitted=NOW - 60)
    busy = held("r", 0, 9, size=2, preemptible=False)
    result = made(fast(cluster(_leaving("gone", 0, 4), busy, older, younger, H100=1)))
    assert started(result) == {"older"}
    assert reserved(result) == {"younger": (("H100-0000",), 0.0, 1)}


def test_who_can_leave_in_time_stays_beside_a_reservation() -> None:
    """`short` waits for a release on a node that is collected for `gang`, and will be gone long before its start."""
    jobs = [_leaving("gone", 0, 8), held("r", 1, 1, preemptible=False)]
    short, gang = known("short", 0.1, size=4), known("gang", **GANG)
    promises = (
        _promise("gang", "H100-0000", "H100-0001", size=8, after_s=HOUR),
        _promise("short", "H100-0000", size=4),
    )
    snapshot = replace(fast(cluster(*jobs, short, gang, H100=2)), reservations=promises)
    assert {name: row[0] for name, row in reserved(made(snapshot)).items()} == {
        "gang": ("H100-0000", "H100-0001"),
        "short": ("H100-0000",),
    }


RIGHT: dict[str, Any] = {"priority": 500}


def test_a_place_is_not_taken_from_a_reservation_that_is_kept_after_it() -> None:
    """`first` waits for node 0; on node 1, which is collected for `second`, it could start now."""
    jobs = [held("r", 0, 9, preemptible=False), held("s", 1, 1, size=4, preemptible=False)]
    first, second = known("first", 9, size=4, preemptible=False, **RIGHT), known("second", size=8, **RIGHT)
    promises = (
        _promise("first", "H100-0000", size=4, after_s=9 * HOUR),
        _promise("second", "H100-0001", size=8, after_s=HOUR),
    )
    snapshot = replace(
        fast(cluster(*jobs, known("low", priority=1), first, second, H100=2)), reservations=promises
    )
    assert {name: row[0] for name, row in reserved(made(snapshot)).items()} == {
        "first": ("H100-0000",),
        "second": ("H100-0001",),
    }


@pytest.mark.parametrize("seed", range(3))
def test_a_guarantee_of_a_quarter_of_the_cluster_is_reclaimed_beside_reservations(seed: int) -> None:
    lent, gang = reclaimed(generator.generate(20, 40, 40, seed=seed))
    result = made(updated(lent, Delta(jobs=(gang,))), generator.NOW)
    assert gang.id in {action.job for action in result.actions if action.to is not None}


def test_a_job_waits_since_its_submission_also_where_times_begin_with_its_trace() -> None:
    """A trace's clock begins with 0, and jobs may have waited before it."""
    early = job("early", submitted=-4 * 3600.0)
    assert early.waits_since_s == -4 * 3600.0
    assert replace(early, last_move_at_s=-60.0).waits_since_s == -60.0
    assert replace(early, last_move_at_s=-5 * 3600.0).waits_since_s == -4 * 3600.0
