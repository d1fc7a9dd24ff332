"""Elastic victims: which jobs shrink, to what size, and which do not."""

from __future__ import annotations

from dataclasses import replace

from busbar.scheduler import ActionKind, Job, JobId, Plan, Policy, applied, check_plan, plan, stale
from busbar.scheduler.model.apply import applied as carried_out

from ..build import NOW, cluster, job, placed, tenant

POLICY = Policy(solver_seconds=None)
OWNER = (tenant("a", H100=(4, None, None)),)


def elastic(name: str, tenant: str, least: int, *on: str, size: int = 1, saved: float = NOW) -> Job:
    """A running job of `size`-accelerator pods on these nodes that may go down to `least` pods."""
    one = job(name, tenant, size=size, on=placed("H100", *on, size=size), saved=saved)
    return replace(one, min_pods=least, max_pods=len(on))


def decide(*jobs: Job, nodes: int = 1, tenants: tuple = OWNER) -> Plan:  # type: ignore[type-arg]
    snapshot = cluster(*jobs, tenants=tenants, H100=nodes)
    result, _ = plan(snapshot, POLICY, NOW)
    assert check_plan(snapshot, result) == []
    assert plan(applied(snapshot, result, NOW), POLICY, NOW)[0].actions == ()
    return result


def kinds(result: Plan) -> dict[str, tuple[ActionKind, int]]:
    """The action on each job, and its number of pods afterwards."""
    return {str(a.job)[4:]: (a.kind, 0 if a.to is None else a.to.pods) for a in result.actions}


def test_an_elastic_victim_keeps_what_is_not_needed() -> None:
    lent = elastic("lent", "b", 2, *["H100-0000"] * 8)
    result = decide(lent, job("x", "a", size=4))
    assert kinds(result) == {"lent": (ActionKind.SHRINK, 4), "x": (ActionKind.START, 1)}
    shrink, start = result.actions if result.actions[0].kind is ActionKind.SHRINK else result.actions[::-1]
    assert start.after == (lent.id,)
    assert shrink.cost == 8 * 30.0
    assert "for a job with a stronger claim" in shrink.reason


def test_a_job_does_not_shrink_below_its_minimum_size() -> None:
    lent = elastic("lent", "b", 6, *["H100-0000"] * 8)
    result = decide(lent, job("x", "a", size=4))
    assert kinds(result) == {"lent": (ActionKind.PREEMPT, 0), "x": (ActionKind.START, 1)}


def test_the_victim_is_the_job_that_loses_least_work_per_accelerator_freed() -> None:
    # The elastic job repeats 30 s on 4 accelerators for the 2 that are needed, the other 30 s on 2, or 600 s.
    lent = elastic("lent", "b", 1, *["H100-0000"] * 4)
    rigid = job("rigid", "b", size=4, on=placed("H100", "H100-0000", size=4), saved=NOW)
    mine = job("x", "a", size=2)
    assert rigid.run is not None
    old = replace(rigid, run=replace(rigid.run, saved_at_s=NOW - 570))
    assert kinds(decide(lent, old, mine)) == {"lent": (ActionKind.SHRINK, 2), "x": (ActionKind.START, 1)}
    small = replace(
        rigid, per_pod=mine.per_pod, run=replace(rigid.run, placement=placed("H100", "H100-0000", size=2))
    )
    filler = job("filler", "b", size=2, on=placed("H100", "H100-0000", size=2), preemptible=False)
    assert kinds(decide(lent, small, filler, mine))["rigid"] == (ActionKind.PREEMPT, 0)


def test_a_fair_share_is_given_back_in_part_where_the_whole_job_is_covered_by_it() -> None:
    grown = elastic("grown", "b", 1, *["H100-0000"] * 8)
    result = decide(grown, *[job(f"x{i}", "a") for i in range(8)], tenants=())
    found = kinds(result)
    assert found.pop("grown") == (ActionKind.SHRINK, 4)
    assert set(found.values()) == {(ActionKind.START, 1)}
    assert len(found) == 4


def test_an_elastic_victim_frees_whole_nodes_for_a_claim_that_needs_them() -> None:
    names = [f"H100-{i:04d}" for i in range(4) for _ in range(2)]
    lent = elastic("lent", "b", 2, *names, size=4)
    result = decide(
        lent, job("x", "a", size=8, pods=2), nodes=4, tenants=(tenant("a", H100=(16, None, None)),)
    )
    assert kinds(result) == {"lent": (ActionKind.SHRINK, 4), "x": (ActionKind.START, 2)}
    (shrink,) = [a for a in result.actions if a.kind is ActionKind.SHRINK]
    assert shrink.to is not None
    assert len(set(shrink.to.nodes)) == 2


def test_a_gang_that_needs_all_that_is_lent_takes_no_more() -> None:
    """Stopping every victim frees just enough: all are stopped but the one whose devices make room for a pod on no
    node."""
    jobs = [
        job(f"lent-{i}", "b", 4, on=placed("H100", f"H100-{i // 2:04d}", size=4), since=NOW - 9000)
        for i in range(4)
    ]
    kept = [job("kept", "owner", 4, on=placed("H100", "H100-0002", size=4), since=NOW - 9000)]
    apart = [job("apart", "b", 2, on=placed("H100", "H100-0002", size=2), since=NOW - 9000)]
    gang = job("gang", "owner", 8, pods=2)
    now = cluster(*jobs, *kept, *apart, gang, tenants=(tenant("owner", H100=(20, None, None)),), H100=3)
    result, _ = plan(now, Policy(solver_seconds=None), NOW)
    stopped = {str(a.job) for a in result.actions if a.kind is ActionKind.PREEMPT}
    assert stopped == {f"uid-lent-{i}" for i in range(4)}
    assert [str(a.job) for a in result.actions if a.kind is ActionKind.START] == ["uid-gang"]


def test_a_lower_priority_shrinks_for_a_higher_one_of_its_tenant() -> None:
    low = replace(elastic("low", "a", 1, *["H100-0000"] * 8), priority=10)
    result = decide(low, job("high", "a", size=4, priority=500), tenants=())
    assert kinds(result)["low"] == (ActionKind.SHRINK, 4)


def test_two_claims_in_one_round_take_from_the_same_victim_once() -> None:
    lent = elastic("lent", "b", 1, *["H100-0000"] * 8)
    rigid = job("rigid", "b", size=8, on=placed("H100", "H100-0001", size=8), saved=NOW - 3600)
    result = decide(
        lent,
        rigid,
        *(job(f"x{i}", "a", size=3) for i in range(2)),
        nodes=2,
        tenants=(tenant("a", H100=(8, None, None)),),
    )
    assert kinds(result) == {
        "lent": (ActionKind.SHRINK, 2),
        "x0": (ActionKind.START, 1),
        "x1": (ActionKind.START, 1),
    }


def test_a_job_that_was_shrunk_too_often_keeps_its_place_against_a_fair_share() -> None:
    grown = replace(elastic("grown", "b", 1, *["H100-0000"] * 8), preemptions=POLICY.max_preemptions)
    assert decide(grown, job("x", "a"), tenants=()).actions == ()
    assert kinds(decide(grown, job("x", "a", size=4)))["grown"] == (ActionKind.SHRINK, 4)


def test_a_shrink_counts_as_a_preemption_and_is_idempotent() -> None:
    snapshot = cluster(
        elastic("lent", "b", 2, *["H100-0000"] * 8), job("x", "a", size=4), tenants=OWNER, H100=1
    )
    result, _ = plan(snapshot, POLICY, NOW)
    again, _ = plan(snapshot, POLICY, NOW)
    assert [a.id for a in again.actions] == [a.id for a in result.actions]
    after = carried_out(snapshot, result, NOW)
    lent = next(j for j in after.jobs if j.id == JobId("uid-lent"))
    assert (lent.preemptions, lent.last_move_at_s) == (1, NOW)
    assert carried_out(after, result, NOW) == after
    (shrink,) = [a for a in result.actions if a.kind is ActionKind.SHRINK]
    assert stale(after, shrink) is None
    gone = replace(snapshot, jobs=tuple(replace(j, run=None) for j in snapshot.jobs))
    assert stale(gone, shrink) is not None


def test_a_job_grows_back_only_after_its_minimum_runtime_and_where_that_pays() -> None:
    lent = replace(elastic("lent", "b", 2, *["H100-0000"] * 8), remaining_work=1e6)
    snapshot = cluster(lent, job("x", "a", size=4), tenants=OWNER, H100=1)
    after = applied(snapshot, plan(snapshot, POLICY, NOW)[0], NOW)
    alone = replace(after, jobs=tuple(j for j in after.jobs if j.id == lent.id))
    assert plan(alone, POLICY, NOW + POLICY.min_run_s - 1)[0].actions == ()
    (grow,) = plan(alone, POLICY, NOW + POLICY.min_run_s)[0].actions
    assert (grow.kind, grow.to and grow.to.pods) == (ActionKind.GROW, 8)
    nearly = replace(alone, jobs=tuple(replace(j, remaining_work=400.0) for j in alone.jobs))
    assert plan(nearly, POLICY, NOW + POLICY.min_run_s)[0].actions == ()
