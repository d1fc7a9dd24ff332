"""How a TrainingJob gives its place back: preempted, suspended, without a tenant, or ended."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from tests.operator.builders import (
    NOW,
    ended,
    job,
    phase,
    running,
    running_job,
    view,
    with_status,
)

from busbar.kube.types import TrainingJob
from busbar.operator.decisions import Release, Wait
from busbar.operator.training.reconcile import reconcile
from busbar.operator.write.actions import Delete, PostToPod


def preempted() -> TrainingJob:
    of = running_job()
    update = reconcile(view(of, running(port=9400)), Release("Preempted", "makes room", "7", taken=True))
    assert phase(update) == "Preempting"
    assert update.actions == ()
    return with_status(of, update)


def test_a_preemption_is_counted_and_dated() -> None:
    for reason, taken, count in (("Preempted", True, 1), ("Resized", True, 1), ("Moved", False, None)):
        update = reconcile(view(running_job(), running(port=9400)), Release(reason, "x", "7", taken=taken))
        assert update.status is not None
        assert update.status.preemptions == count
        assert update.status.last_move_time is not None


def test_a_preempted_job_is_asked_to_save_before_its_pods_are_deleted() -> None:
    update = reconcile(view(preempted(), running(port=9400)))
    assert [type(a) for a in update.actions] == [PostToPod]


def test_nothing_is_deleted_while_the_answer_is_awaited() -> None:
    uid = running().uid
    assert reconcile(view(preempted(), running(port=9400), asked={uid: False})).actions == ()


def test_the_answer_or_the_deadline_deletes_the_pods() -> None:
    of, lead = preempted(), running(port=9400)
    answered = reconcile(view(of, lead, asked={lead.uid: True}))
    overdue = reconcile(view(of, lead, asked={lead.uid: False}, now=NOW + timedelta(seconds=60)))
    for update in (answered, overdue):
        assert [type(a) for a in update.actions] == [Delete]


def test_a_pod_without_the_port_is_stopped_by_its_signal_alone() -> None:
    update = reconcile(view(preempted(), running()))
    assert [(type(a), getattr(a, "grace_s", None)) for a in update.actions] == [(Delete, 60)]


def test_the_place_is_released_only_when_the_pods_are_gone() -> None:
    of = preempted()
    assert reconcile(view(of, running(port=9400, deleting=True), asked={})).status is None
    update = reconcile(view(of))
    assert phase(update) == "Queued"
    assert update.status is not None
    assert update.status.admission is None
    assert update.status.preemptions == 1


def test_a_job_that_finishes_while_it_is_asked_has_succeeded() -> None:
    assert phase(reconcile(view(preempted(), ended()))) == "Succeeded"


def test_suspending_releases_and_then_rests() -> None:
    of = running_job()
    of = of.model_copy(update={"spec": of.spec.model_copy(update={"suspend": True})})
    update = reconcile(view(of, running()))
    assert phase(update) == "Preempting"
    done = reconcile(view(with_status(of, update)))
    assert phase(done) == "Suspended"
    assert done.status is not None
    assert not done.status.preemptions


def test_a_job_whose_tenant_is_gone_saves_and_rests_until_there_is_one_again() -> None:
    update = reconcile(view(running_job(), running(), has_tenant=False))
    assert phase(update) == "Preempting"
    done = reconcile(view(with_status(running_job(), update), has_tenant=False))
    assert done.status is not None
    assert (done.status.phase, done.status.reason) == ("Suspended", "TenantGone")
    at_rest = with_status(running_job(), done)
    waits = Wait(reason="NoTenant", message="Its namespace belongs to no tenant.")
    assert phase(reconcile(view(at_rest, has_tenant=False), waits)) == "Suspended"
    assert (
        phase(reconcile(view(at_rest), Wait(reason="InsufficientCapacity", message="It waits."))) == "Queued"
    )


def test_a_job_that_never_ran_waits_for_a_tenant_like_for_anything_else() -> None:
    waits = Wait(reason="NoTenant", message="Its namespace belongs to no tenant.")
    assert phase(reconcile(view(job(), has_tenant=False), waits)) == "Queued"


def test_a_pod_that_its_node_does_not_let_go_is_named_with_what_to_do() -> None:
    dead = running(deleting=True, deletes_at=NOW - timedelta(seconds=61))
    waits = reconcile(view(job(status={"attempt": 1, "phase": "Queued", "reason": "Retrying"}), dead))
    leaves = reconcile(view(preempted(), dead))
    for update, where in ((waits, "Queued"), (leaves, "Preempting")):
        assert phase(update) == where
        assert update.status is not None
        assert update.status.reason == "PodStuck"
        assert "node-0" in (update.status.message or "")
    soon = replace(dead, deletes_at=NOW)
    assert reconcile(view(preempted(), soon)).status is None
