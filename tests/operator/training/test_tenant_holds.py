"""What a tenant's limit of pods, its budget and claims that do not exist keep from starting, and what they leave alone."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from tests.operator.builders import (
    NOW,
    admit,
    admitted,
    gang,
    gated,
    job,
    phase,
    running,
    view,
    with_status,
)

from busbar.operator.accounting.budgets import Hold
from busbar.operator.decisions import Wait
from busbar.operator.pods.room import PodRoom
from busbar.operator.training.claim import claims
from busbar.operator.training.reconcile import reconcile
from busbar.operator.training.view import JobUpdate


def test_a_gang_that_the_limit_of_pods_cannot_hold_waits_whole_and_says_so() -> None:
    short = view(gang(4), pod_room=PodRoom(6, 3))
    update = reconcile(short, admit(4))
    assert update.actions == ()
    assert phase(update) == "Queued"
    assert update.status is not None
    assert update.status.reason == "PodLimit"
    assert "needs 4 pods, and 3 of the 6 are left" in (update.status.message or "")
    assert update.status.admission is None
    assert update.status.retry_at == NOW + timedelta(seconds=30)
    assert update.again_s == 30.0
    assert phase(reconcile(replace(short, pod_room=PodRoom(6, 4)), admit(4))) == "Admitted"


def test_a_job_that_the_limit_of_pods_cannot_hold_leaves_the_plan_before_it_preempts_anybody() -> None:
    for decision in (None, Wait("InsufficientCapacity", "Needs 4 H100.", {})):
        update = reconcile(view(gang(4), pod_room=PodRoom(6, 3)), decision)
        assert update.status is not None
        assert update.status.reason == "PodLimit"
        assert update.status.retry_at is not None
    assert reconcile(view(gang(4), pod_room=PodRoom(6, 4))) == JobUpdate()


SPENT = "Nothing is left of the tenant's budget of 50 kWh a month."


def test_a_job_of_a_tenant_whose_budget_is_spent_is_not_admitted_and_says_so_once() -> None:
    held = view(gang(4), budget=Hold(SPENT))
    update = reconcile(held, admit(4))
    assert (phase(update), update.actions) == ("Queued", ())
    assert update.status is not None
    assert (update.status.reason, update.status.message) == ("BudgetSpent", SPENT)
    assert update.status.preview is not None
    assert update.status.preview.reason == SPENT
    told = with_status(gang(4), update)
    assert reconcile(view(told, budget=Hold(SPENT))) == JobUpdate()
    assert phase(reconcile(view(told), admit(4))) == "Admitted"


def test_a_budget_that_stops_what_runs_has_it_save_and_wait() -> None:
    stops = Hold(SPENT, stops=True)
    of = admitted(gang(1))
    update = reconcile(view(of, running(0), budget=stops))
    assert update.status is not None
    assert (update.status.phase, update.status.reason) == ("Preempting", "BudgetSpent")
    assert not update.status.preemptions
    gone = reconcile(view(with_status(of, update), budget=stops))
    assert gone.status is not None
    assert (gone.status.phase, gone.status.reason, gone.status.message) == ("Queued", "BudgetSpent", SPENT)
    assert gone.status.retry_at is None
    waits = reconcile(view(with_status(of, gone), budget=stops), admit(1))
    assert (phase(waits) if waits.status is not None else "Queued", waits.actions) == ("Queued", ())
    assert phase(reconcile(view(with_status(of, gone)), admit(1))) == "Admitted"
    moved = gang(4, status={"phase": "Queued", "reason": "Moved", "attempt": 1})
    assert phase(reconcile(view(moved, budget=stops), admit(4))) == "Queued"
    kept = admitted(gang(1, preemptible=False))
    assert reconcile(view(kept, running(0), budget=stops)) == reconcile(view(kept, running(0)))


def test_a_spent_budget_stops_nothing_that_runs_and_nothing_that_is_only_moved() -> None:
    of = admitted(gang(1))
    assert reconcile(view(of, running(0), budget=Hold(SPENT))) == reconcile(view(of, running(0)))
    for reason in ("Moved", "Resized"):
        moved = gang(4, status={"phase": "Queued", "reason": reason, "attempt": 1})
        assert phase(reconcile(view(moved, budget=Hold(SPENT)), admit(4))) == "Admitted"


def test_a_job_whose_namespace_is_being_deleted_takes_no_place_and_gives_one_back_that_it_cannot_use() -> (
    None
):
    waits = view(gang(2), is_ending=True)
    update = reconcile(waits, admit(2))
    assert update.actions == ()
    assert update.status is not None
    assert (update.status.phase, update.status.reason) == ("Queued", "NamespaceEnding")
    assert update.status.retry_at == NOW + timedelta(seconds=600)
    begun = reconcile(view(admitted(gang(2), 2), is_ending=True))
    assert begun.actions == ()
    assert phase(begun) == "Preempting"
    whole = view(admitted(gang(2), 2), running(0), running(1), is_ending=True)
    assert phase(reconcile(whole)) == "Running", "what runs is the namespace controller's to end"


LACKS = "PersistentVolumeClaim data does not exist in namespace team; it starts when it is there."


def test_a_job_that_lacks_a_claim_is_in_no_plan_until_it_is_there() -> None:
    update = reconcile(view(gang(2), missing_claims=LACKS), admit(2))
    assert (phase(update), update.actions) == ("Queued", ())
    assert update.status is not None
    assert (update.status.reason, update.status.message) == ("ClaimMissing", LACKS)
    assert update.status.preview is not None
    assert (update.status.preview.starts_now, update.status.preview.reason) == (False, LACKS)
    told = with_status(gang(2), update)
    assert claims(told, (), "team", NOW) == ()
    assert reconcile(view(told, missing_claims=LACKS), admit(2)) == JobUpdate()
    there = reconcile(view(told), admit(2))
    assert there.status is not None
    assert (there.status.phase, there.status.reason, there.status.preview) == ("Queued", "Waiting", None)
    again = with_status(gang(2), there)
    assert len(claims(again, (), "team", NOW)) == 1
    assert phase(reconcile(view(again), admit(2))) == "Admitted"


def test_a_gang_whose_claim_went_before_its_pods_were_placed_gives_its_place_back() -> None:
    begun = view(admitted(gang(2), 2), running(0), gated(1), missing_claims=LACKS)
    update = reconcile(begun)
    assert update.status is not None
    assert (update.status.phase, update.status.reason) == ("Preempting", "ClaimMissing")
    whole = view(admitted(gang(2), 2), running(0), running(1), missing_claims=LACKS)
    assert phase(reconcile(whole)) == "Running", "what is placed has mounted it"


def test_what_others_are_guaranteed_is_told_once_and_admits_nothing() -> None:
    told = reconcile(view(job(preemptible=False), held_back="It may take 1."), admit())
    assert told.status is not None
    assert (told.status.phase, told.status.reason) == ("Queued", "GuaranteesOfOthers")
    assert told.status.admission is None
    again = reconcile(view(with_status(job(preemptible=False), told), held_back="It may take 0."))
    assert again.status is None
    freed = reconcile(view(with_status(job(preemptible=False), told)), admit())
    assert freed.status is not None
    assert freed.status.admission is not None
