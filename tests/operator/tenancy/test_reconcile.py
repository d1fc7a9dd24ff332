"""Tenants: labels, bindings, usage."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.operator.builders import NOW, tenant

from busbar.kube.informer import Key
from busbar.kube.resources import NAMESPACES, ROLE_BINDINGS
from busbar.kube.types import Tenant
from busbar.kube.types.tenant import MOST_USERS
from busbar.operator.accounting.allocations import TenantAllocation
from busbar.operator.accounting.usage import scheduler_tenant
from busbar.operator.tenancy.reconcile import TenantView, reconcile, release, revoke
from busbar.operator.watch.caches import tenant_of_namespace
from busbar.operator.watch.small_projections import BindingSeen, NamespaceSeen
from busbar.operator.write.actions import Apply, Delete

LABELS = (("busbar.dev/tenant", "a"), ("pod-security.kubernetes.io/enforce", "restricted"))
RELEASED = (("busbar.dev/released", "a"), ("pod-security.kubernetes.io/enforce", "restricted"))


def view(of: Tenant, *others: Tenant, labels: tuple[tuple[str, str], ...] = (), **fields: Any) -> TenantView:
    owners = tenant_of_namespace([of, *others])
    base = TenantView(of, owners, {"ns": NamespaceSeen("ns", labels, False)}, (), NOW)
    return replace(base, **fields)


def test_a_tenants_namespace_is_labelled_once() -> None:
    [action] = reconcile(view(tenant("a", ["ns"]))).actions
    assert isinstance(action, Apply)
    assert action.resource is NAMESPACES
    assert dict(LABELS) == action.body["metadata"]["labels"]
    assert reconcile(view(tenant("a", ["ns"]), labels=LABELS)).actions == ()


def test_the_second_claim_gets_a_condition_and_no_namespace() -> None:
    late = tenant("b", ["ns"], created="2026-11-02T00:00:00Z")
    update = reconcile(view(late, tenant("a", ["ns"])))
    assert update.actions == ()
    assert update.status is not None
    assert update.status.conditions is not None
    assert update.status.conditions[0].reason == "NamespaceTaken"


def test_members_become_rolebindings_and_former_members_lose_theirs() -> None:
    member = {"subject": {"kind": "User", "name": "ann"}, "role": "admin"}
    of = tenant("a", ["ns"], members=[member])
    old = BindingSeen(Key("ns", "busbar-a-viewer"), "uid-1", "busbar-tenant-viewer", (("User", "bob", ""),))
    foreign = BindingSeen(Key("ns", "busbar-other-viewer"), "uid-2", "busbar-tenant-viewer", ())
    actions = reconcile(view(of, labels=LABELS, bindings=(old, foreign))).actions
    [apply] = [a for a in actions if isinstance(a, Apply)]
    assert apply.resource is ROLE_BINDINGS
    assert apply.body["roleRef"]["name"] == "busbar-tenant-admin"
    assert apply.body["subjects"] == [
        {"kind": "User", "name": "ann", "apiGroup": "rbac.authorization.k8s.io"}
    ]
    assert [a.key.name for a in actions if isinstance(a, Delete)] == ["busbar-a-viewer"]


def test_rights_in_a_namespace_end_with_the_tenant_that_gave_them() -> None:
    of_a = BindingSeen(Key("ns", "busbar-a-admin"), "uid-1", "busbar-tenant-admin", ())
    of_b = BindingSeen(Key("ns", "busbar-b-viewer"), "uid-2", "busbar-tenant-viewer", ())
    elsewhere = BindingSeen(Key("else", "busbar-a-admin"), "uid-3", "busbar-tenant-admin", ())
    not_ours = BindingSeen(Key("ns", "own"), "uid-4", "view", ())
    seen = (of_a, of_b, elsewhere, not_ours)

    def gone(owner_of: dict[str, str], deleting: bool = False) -> list[str]:
        actions = revoke(NamespaceSeen("ns", LABELS, deleting), owner_of, seen)
        return [a.uid for a in actions if isinstance(a, Delete)]

    assert gone({}) == ["uid-1", "uid-2"]
    assert gone({"ns": "a"}) == ["uid-2"]
    assert gone({}, deleting=True) == []


def test_a_binding_with_another_role_is_made_again() -> None:
    of = tenant("a", ["ns"], members=[{"subject": {"kind": "User", "name": "ann"}, "role": "viewer"}])
    wrong = BindingSeen(Key("ns", "busbar-a-viewer"), "uid-1", "cluster-admin", (("User", "ann", ""),))
    [action] = reconcile(view(of, labels=LABELS, bindings=(wrong,))).actions
    assert isinstance(action, Delete)


def test_a_namespace_that_nobody_claims_any_more_stays_closed_under_a_mark() -> None:
    let_go = release(NamespaceSeen("ns", LABELS, False, "uid-1"), {})
    assert let_go is not None
    assert let_go.apply.body["metadata"] == {"name": "ns", "labels": dict(RELEASED)}
    notice = let_go.notice
    assert (notice.kind, notice.name, notice.uid) == ("Namespace", "ns", "uid-1")
    assert notice.reason == "NamespaceReleased"
    for label in ("Tenant a ", "busbar.dev/released", "pod-security.kubernetes.io/enforce"):
        assert label in notice.message


@pytest.mark.parametrize(
    ("labels", "deleting", "owner_of"),
    [
        (LABELS, False, {"ns": "a"}),
        (LABELS, True, {}),
        (RELEASED, False, {}),
        (RELEASED[1:], False, {}),
        ((), False, {}),
    ],
    ids=["claimed", "in deletion", "let go before", "lifted by a person", "never a tenant's"],
)
def test_what_is_not_ours_to_let_go_is_left_alone(
    labels: tuple[tuple[str, str], ...], deleting: bool, owner_of: dict[str, str]
) -> None:
    assert release(NamespaceSeen("ns", labels, deleting), owner_of) is None


@pytest.mark.parametrize("name", ["a", "b"], ids=["the same tenant", "another"])
def test_a_tenant_takes_over_a_namespace_that_was_let_go_in_one_write(name: str) -> None:
    """Our field manager owns the mark, so one apply without it removes the mark and adds the label."""
    [action] = reconcile(view(tenant(name, ["ns"]), labels=RELEASED)).actions
    assert isinstance(action, Apply)
    wanted = {"busbar.dev/tenant": name, "pod-security.kubernetes.io/enforce": "restricted"}
    assert action.body["metadata"]["labels"] == wanted


def test_usage_adds_what_was_held_and_decays() -> None:
    allocation = TenantAllocation({"H100": 2.0}, {"h100": 2.0}, 1, 0)
    first = reconcile(view(tenant("a", ["ns"]), labels=LABELS, allocation=allocation, rates={"H100": 3.0}))
    assert first.status is not None
    of = tenant("a", ["ns"]).model_copy(update={"status": first.status})
    half_life = 100.0
    later = view(
        of, labels=LABELS, allocation=allocation, rates={"H100": 3.0}, now=NOW + timedelta(seconds=100)
    )
    second = reconcile(replace(later, half_life_s=half_life))
    assert second.status is not None
    assert second.status.usage is not None
    assert second.status.usage.accelerator_seconds == 200
    assert second.status.usage.work_units == 600
    assert second.status.decayed is not None
    assert second.status.decayed.work == 600
    gone = replace(
        later, half_life_s=half_life, now=NOW + timedelta(seconds=200), allocation=TenantAllocation()
    )
    third = reconcile(replace(gone, tenant=of.model_copy(update={"status": second.status})))
    assert third.status is not None
    assert third.status.decayed is not None
    assert third.status.decayed.work == 600 / 2 + 600
    assert third.status.held == 0


def _held(**users: float) -> TenantAllocation:
    held = {user: {"H100": count} for user, count in users.items()}
    return TenantAllocation({"H100": sum(users.values())}, {}, len(users), 0, held)


def test_use_is_counted_by_user_and_a_restarted_operator_plans_on_the_same() -> None:
    of = tenant(
        "a", ["ns"], members=[{"subject": {"kind": "User", "name": "v"}, "role": "member", "weight": 3}]
    )
    base = replace(view(of, labels=LABELS, rates={"H100": 3.0}), half_life_s=100.0)
    for number, allocation in enumerate((_held(u=2.0, v=1.0), _held(u=1.0, v=2.0), TenantAllocation())):
        now = NOW + timedelta(seconds=100 * number)
        made = reconcile(replace(base, tenant=of, allocation=allocation, now=now)).status
        assert made is not None
        of = of.model_copy(update={"status": made})
    # Two, then one of three units per second, each for a half-life.
    assert of.status is not None
    assert {user.name: user.work for user in of.status.users or ()} == {
        "u": 600 / 2 + 300,
        "v": 300 / 2 + 600,
    }
    stored = Tenant.model_validate(of.model_dump(by_alias=True, mode="json"))
    seen = scheduler_tenant(stored, now + timedelta(seconds=100), 100.0)
    assert seen == scheduler_tenant(of, now + timedelta(seconds=100), 100.0)
    assert {user.name: (user.weight, user.usage.work) for user in seen.users} == {
        "u": (1, 300),
        "v": (3, 375),
    }
    assert seen.usage.work == 675


def test_where_work_of_the_tenant_runs_is_written() -> None:
    first = reconcile(
        view(tenant("a", ["ns"]), allocation=TenantAllocation({"cpu": 1.0}, running=1, running_in=("ns",)))
    )
    assert first.status is not None
    assert first.status.running_in == ["ns"]
    of = tenant("a", ["ns"]).model_copy(update={"status": first.status})
    last = reconcile(view(of, allocation=TenantAllocation())).status
    assert last is not None
    assert last.running_in is None


def test_a_change_of_users_is_written_though_the_tenant_holds_as_much() -> None:
    of = tenant("a", ["ns"])
    first = reconcile(view(of, labels=LABELS, allocation=_held(u=1.0), rates={"H100": 3.0})).status
    of = of.model_copy(update={"status": first})
    soon: dict[str, Any] = {"labels": LABELS, "rates": {"H100": 3.0}, "now": NOW + timedelta(seconds=9)}
    assert reconcile(view(of, allocation=_held(u=1.0), **soon)).status is None
    second = reconcile(view(of, allocation=_held(v=1.0), **soon)).status
    assert second is not None
    assert {user.name: user.rate for user in second.users or ()} == {"u": 0.0, "v": 3.0}


def test_a_crowd_of_users_is_kept_within_bounds() -> None:
    crowd = _held(**{f"u{i:03d}": 1.0 for i in range(MOST_USERS)})
    first = reconcile(view(tenant("a", ["ns"]), labels=LABELS, allocation=crowd)).status
    of = tenant("a", ["ns"]).model_copy(update={"status": first})
    late = view(of, labels=LABELS, allocation=_held(new=1.0), now=NOW + timedelta(seconds=100))
    second = reconcile(late).status
    assert second is not None
    assert second.users is not None
    assert len(second.users) == MOST_USERS
    assert "new" in {user.name for user in second.users}


def test_nothing_is_written_while_nothing_changes() -> None:
    first = reconcile(view(tenant("a", ["ns"]), labels=LABELS))
    of = tenant("a", ["ns"]).model_copy(update={"status": first.status})
    assert reconcile(view(of, labels=LABELS, now=NOW + timedelta(seconds=300))).status is None


def test_a_budget_counts_its_own_period() -> None:
    of = tenant("a", ["ns"], budgets=[{"period": "day", "acceleratorHours": 10}])
    allocation = TenantAllocation({"H100": 1.0}, {}, 1, 0)
    first = reconcile(view(of, labels=LABELS, allocation=allocation))
    assert first.status is not None
    of = of.model_copy(update={"status": first.status})
    second = reconcile(view(of, labels=LABELS, allocation=allocation, now=NOW + timedelta(hours=1)))
    assert second.status is not None
    assert second.status.budgets is not None
    assert second.status.budgets[0].accelerator_hours == 1.0
    assert second.status.budgets[0].used_percent == 10.0


def test_energy_goes_to_the_totals_and_to_the_budget_of_kilowatt_hours() -> None:
    of = tenant("a", ["ns"], budgets=[{"period": "day", "kilowattHours": 2, "warnAtPercent": 40}])
    first = reconcile(view(of, labels=LABELS, energy_joules=None))
    assert first.status is not None
    assert first.notices == ()
    of = of.model_copy(update={"status": first.status})
    later = NOW + timedelta(minutes=1)
    used = view(of, labels=LABELS, energy_joules=3.6e6, drawn_watts=500.0, now=later)
    second = reconcile(used)
    assert second.status is not None
    assert second.status.usage is not None
    assert second.status.usage.energy_joules == 3.6e6
    use = (second.status.budgets or [])[0]
    assert (use.kilowatt_hours, use.kilowatt_hours_left, use.state) == (1.0, 1.0, "Warning")
    assert use.exhausted == later + timedelta(hours=2)
    assert [reason for reason, _ in second.notices] == ["BudgetWarning"]
    budget = (second.status.conditions or [])[-1]
    assert (budget.type, budget.status, budget.reason) == ("WithinBudget", "True", "BudgetWarning")
    of = of.model_copy(update={"status": second.status})
    assert reconcile(replace(used, tenant=of)).status is None, "nothing has changed"


def test_a_tenant_is_looked_at_again_when_its_budget_will_be_spent() -> None:
    of = tenant("a", ["ns"], budgets=[{"period": "day", "acceleratorHours": 10}])
    allocation = TenantAllocation({"H100": 1800.0}, {}, 0, 0)
    assert reconcile(view(of, labels=LABELS, allocation=allocation)).again_s == 20.0
    assert reconcile(view(of, labels=LABELS)).again_s == 60.0
    late = NOW.replace(hour=23, minute=59, second=45)
    assert reconcile(view(of, labels=LABELS, now=late)).again_s == 15.0
