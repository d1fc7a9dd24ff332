"""What holds replicas back or takes them away: budgets, guarantees, nodes that do not answer, claims that do not exist."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from tests.operator.builders import (
    NOW,
    SETTINGS,
    admit,
    placement,
    replica,
    service,
)
from tests.operator.serving.test_reconcile import view, wanting

from busbar.operator.accounting.budgets import Hold
from busbar.operator.decisions import Admit
from busbar.operator.pods.silent_nodes import with_silence
from busbar.operator.serving.claims import claims as serving_claims
from busbar.operator.serving.reconcile import reconcile
from busbar.operator.serving.view import ServiceView
from busbar.operator.watch.projections import Pod
from busbar.operator.write.actions import Create, Delete, Patch, PostToPod


def test_a_budget_that_stops_what_runs_leaves_a_service_no_replica() -> None:
    stops = Hold("Nothing is left of the tenant's budget.", stops=True)
    of = wanting(2, minReplicas=1)
    drains = reconcile(view(of, replica(0), budget=stops), (admit(index=1),))
    assert not any(isinstance(a, Create) for a in drains.actions)
    assert drains.status is not None
    assert (drains.status.phase, drains.status.desired_replicas) == ("Draining", 0)
    off = reconcile(view(of.model_copy(update={"status": drains.status}), budget=stops), (admit(index=0),))
    assert off.status is not None
    assert (off.status.phase, off.status.reason, off.status.message) == (
        "Suspended",
        "BudgetSpent",
        stops.why,
    )
    assert off.actions == ()


def test_a_spent_budget_holds_replicas_beyond_the_least_number_and_none_below() -> None:
    held = "Nothing is left of the tenant's budget."
    of = wanting(3, minReplicas=1)
    first = reconcile(view(of, budget=Hold(held)), (admit(index=0), admit(index=1)))
    assert [a.key.name for a in first.actions if isinstance(a, Create)] == ["web-0"]
    more = reconcile(view(of, replica(0), budget=Hold(held)), (admit(index=1),))
    assert more.actions == ()
    assert more.status is not None
    assert more.status.message == f"1 of 3 replicas take requests. {held}"
    none = service(replicas=2, minReplicas=0, status={"desiredReplicas": 2, "observedGeneration": 1})
    waits = reconcile(view(none, budget=Hold(held)))
    assert waits.status is not None
    assert (waits.status.phase, waits.status.reason, waits.status.message) == ("Queued", "BudgetSpent", held)
    again = reconcile(view(none.model_copy(update={"status": waits.status})))
    assert again.status is not None
    assert again.status.reason == "Waiting"


def test_replicas_that_would_keep_others_from_their_guarantees_are_told_of_once() -> None:
    text = "It is not preemptible and needs 1 cpu, of which it may take 0."
    of = service(replicas=2, status={"phase": "Queued", "desiredReplicas": 2})
    waits = reconcile(view(of, held_back=text)).status
    assert waits is not None
    assert (waits.phase, waits.reason, waits.message) == ("Queued", "GuaranteesOfOthers", text)
    told = of.model_copy(update={"status": waits})
    later = reconcile(view(told, held_back=f"{text} Or 1 by now.")).status
    assert later is None or later.message == text
    freed = reconcile(view(told)).status
    assert freed is not None
    assert freed.reason == "Waiting"
    part = reconcile(view(of, replica(0), held_back=text)).status
    assert part is not None
    assert (part.phase, part.message) == ("Ready", f"1 of 2 replicas take requests. {text}")


SILENT_LONG = NOW - timedelta(seconds=SETTINGS.node_lost_s)


@pytest.mark.parametrize("changes", [{}, {"deleting": True}, {"draining_since": NOW}, {"phase": "Succeeded"}])
def test_a_replica_whose_node_does_not_answer_is_deleted_without_its_word(changes: dict[str, Any]) -> None:
    pods = replica(0, **changes), replica(1, node="node-1")
    update = reconcile(view(wanting(2), *pods, silent={"node-0": SILENT_LONG}))
    assert [(a.key.name, a.grace_s) for a in update.actions if isinstance(a, Delete)] == [("web-0", 0)]
    assert not [a for a in update.actions if isinstance(a, Patch | PostToPod)], (
        "nobody is asked who cannot answer"
    )
    why = "Replica web-0 is on node node-0, which does not answer; it is replaced."
    assert update.notices == (() if changes else (("ReplicaReplaced", why),))


def on_silent_node(*pods: Pod, **fields: Any) -> ServiceView:
    """A service that wants one replica; node-0 does not answer for less than `node_lost_s`."""
    silent = {"node-0": SILENT_LONG + timedelta(seconds=1)}
    return view(wanting(1), *with_silence(pods, silent), silent=silent, **fields)


def test_beside_a_replica_whose_node_does_not_answer_another_one_starts_at_once() -> None:
    update = reconcile(on_silent_node(replica(0)), (admit(index=1),))
    assert [a.key.name for a in update.actions if isinstance(a, Create)] == ["web-1"]
    assert not [a for a in update.actions if isinstance(a, Patch | PostToPod | Delete)], "it may come back"
    both = on_silent_node(replica(0), replica(1, node="node-1"))
    assert reconcile(both).actions == ()
    update = reconcile(on_silent_node(replica(0), replica(1, node="node-1", ready=False)))
    assert update.status is not None
    assert (update.status.phase, update.status.ready_replicas) == ("Starting", 0)


def test_a_replica_whose_node_answers_again_stays_and_the_one_that_starts_beside_it_leaves() -> None:
    update = reconcile(view(wanting(1), replica(0), replica(1, node="node-1", ready=False)))
    assert [a.key.name for a in update.actions if isinstance(a, Patch)] == ["web-1"], "it is to drain"


def test_a_service_that_lacks_a_claim_is_in_no_plan_and_makes_nothing_until_it_is_there() -> None:
    lacks = "PersistentVolumeClaim claim does not exist in namespace team; it starts when it is there."
    admits = (Admit(placement(), "there is room", "7", 0),)
    update = reconcile(view(wanting(1), missing_claims=lacks), admits)
    assert update.status is not None
    assert (update.status.phase, update.status.reason, update.status.message) == (
        "Pending",
        "ClaimMissing",
        lacks,
    )
    assert not [action for action in update.actions if isinstance(action, Create)]
    told = wanting(1).model_copy(update={"status": update.status})
    assert serving_claims(told, (), (), "team", NOW) == []
    there = reconcile(view(told), ())
    assert there.status is not None
    assert there.status.reason != "ClaimMissing"
    again = told.model_copy(update={"status": there.status})
    assert len(serving_claims(again, (), (), "team", NOW)) == 1
