"""Tenants and pools: labels, bindings, usage, discovery."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.operator.builders import NOW, pool, tenant

from busbar.kube.informer import Key
from busbar.kube.resources import NAMESPACES, ROLE_BINDINGS
from busbar.kube.types import Tenant
from busbar.kube.types.tenant import MOST_USERS
from busbar.operator.actions import Apply, Delete
from busbar.operator.holdings import PoolHolding, TenantHolding
from busbar.operator.pods import Node
from busbar.operator.pool import accelerator_name, discover
from busbar.operator.pool import reconcile as reconcile_pool
from busbar.operator.tenant import TenantView, disown, reconcile, revoke
from busbar.operator.usage import scheduler_tenant
from busbar.operator.world import BindingSeen, NamespaceSeen, tenant_of_namespace

LABELS = (("busbar.dev/tenant", "a"), ("pod-security.kubernetes.io/enforce", "restricted"))


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
    decision = reconcile(view(late, tenant("a", ["ns"])))
    assert decision.actions == ()
    assert decision.status is not None
    assert decision.status.conditions is not None
    assert decision.status.conditions[0].reason == "NamespaceTaken"


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


def test_a_namespace_that_nobody_claims_any_more_loses_our_labels() -> None:
    apply = disown(NamespaceSeen("ns", LABELS, False), {})
    assert apply is not None
    assert apply.body["metadata"]["labels"] == {}
    assert disown(NamespaceSeen("ns", LABELS, False), {"ns": "a"}) is None


def test_usage_adds_what_was_held_and_decays() -> None:
    holding = TenantHolding({"H100": 2.0}, {"h100": 2.0}, 1, 0)
    first = reconcile(view(tenant("a", ["ns"]), labels=LABELS, holding=holding, rates={"H100": 3.0}))
    assert first.status is not None
    of = tenant("a", ["ns"]).model_copy(update={"status": first.status})
    half_life = 100.0
    later = view(of, labels=LABELS, holding=holding, rates={"H100": 3.0}, now=NOW + timedelta(seconds=100))
    second = reconcile(replace(later, half_life_s=half_life))
    assert second.status is not None
    assert second.status.usage is not None
    assert second.status.usage.accelerator_seconds == 200
    assert second.status.usage.work_units == 600
    assert second.status.decayed is not None
    assert second.status.decayed.work == 600
    gone = replace(later, half_life_s=half_life, now=NOW + timedelta(seconds=200), holding=TenantHolding())
    third = reconcile(replace(gone, tenant=of.model_copy(update={"status": second.status})))
    assert third.status is not None
    assert third.status.decayed is not None
    assert third.status.decayed.work == 600 / 2 + 600
    assert third.status.held == 0


def _held(**users: float) -> TenantHolding:
    held = {user: {"H100": count} for user, count in users.items()}
    return TenantHolding({"H100": sum(users.values())}, {}, len(users), 0, held)


def test_use_is_counted_by_user_and_a_restarted_operator_plans_on_the_same() -> None:
    of = tenant(
        "a", ["ns"], members=[{"subject": {"kind": "User", "name": "v"}, "role": "member", "weight": 3}]
    )
    base = replace(view(of, labels=LABELS, rates={"H100": 3.0}), half_life_s=100.0)
    for number, holding in enumerate((_held(u=2.0, v=1.0), _held(u=1.0, v=2.0), TenantHolding())):
        now = NOW + timedelta(seconds=100 * number)
        made = reconcile(replace(base, tenant=of, holding=holding, now=now)).status
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


def test_a_change_of_users_is_written_though_the_tenant_holds_as_much() -> None:
    of = tenant("a", ["ns"])
    first = reconcile(view(of, labels=LABELS, holding=_held(u=1.0), rates={"H100": 3.0})).status
    of = of.model_copy(update={"status": first})
    soon: dict[str, Any] = {"labels": LABELS, "rates": {"H100": 3.0}, "now": NOW + timedelta(seconds=9)}
    assert reconcile(view(of, holding=_held(u=1.0), **soon)).status is None
    second = reconcile(view(of, holding=_held(v=1.0), **soon)).status
    assert second is not None
    assert {user.name: user.rate for user in second.users or ()} == {"u": 0.0, "v": 3.0}


def test_a_crowd_of_users_is_kept_within_bounds() -> None:
    crowd = _held(**{f"u{i:03d}": 1.0 for i in range(MOST_USERS)})
    first = reconcile(view(tenant("a", ["ns"]), labels=LABELS, holding=crowd)).status
    of = tenant("a", ["ns"]).model_copy(update={"status": first})
    late = view(of, labels=LABELS, holding=_held(new=1.0), now=NOW + timedelta(seconds=100))
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
    holding = TenantHolding({"H100": 1.0}, {}, 1, 0)
    first = reconcile(view(of, labels=LABELS, holding=holding))
    assert first.status is not None
    of = of.model_copy(update={"status": first.status})
    second = reconcile(view(of, labels=LABELS, holding=holding, now=NOW + timedelta(hours=1)))
    assert second.status is not None
    assert second.status.budgets is not None
    assert second.status.budgets[0].accelerator_hours == 1.0


# -- pools ---------------------------------------------------------------------------------------------


def test_a_pool_says_what_it_has() -> None:
    decision = reconcile_pool(pool(), PoolHolding(2, 8.0, 3.0), NOW)
    assert decision.status is not None
    assert (decision.status.capacity, decision.status.free) == (8.0, 5.0)
    again = pool().model_copy(update={"status": decision.status})
    assert reconcile_pool(again, PoolHolding(2, 8.0, 3.0), NOW + timedelta(hours=1)).status is None


def test_known_devices_without_a_pool_are_discovered_once_per_product() -> None:
    labels = (("nvidia.com/gpu.memory", "81559"), ("nvidia.com/gpu.product", "NVIDIA-H100-80GB-HBM3"))
    nodes = [
        Node(
            f"n{i}",
            labels,
            (("nvidia.com/gpu", "", "NoSchedule"),),
            8000,
            1,
            1,
            (("nvidia.com/gpu", 8),),
            True,
        )
        for i in range(2)
    ]
    [create] = discover(nodes, [pool()])
    assert create.body["spec"]["accelerator"] == "H100"
    assert create.body["spec"]["memoryGib"] == 79.6
    covering = pool("mine", nodeSelector={"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"})
    assert discover(nodes, [covering]) == []
    name = create.body["metadata"]["name"]
    edited = pool(name, nodeSelector={"somebody": "chose-other-nodes"})
    assert discover(nodes, [edited]) == []  # a create would be refused at every round


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA-H100-80GB-HBM3", "H100"),
        ("NVIDIA-A100-SXM4-40GB", "A100"),
        ("Tesla-V100-SXM2-32GB", "V100"),
        ("NVIDIA-L4", "L4"),
        ("NVIDIA-GeForce-RTX-4090", "RTX-4090"),
        ("Tesla-T4", "T4"),
        ("NVIDIA-L40S", "L40S"),
        ("NVIDIA-GH200-480GB", "GH200"),
    ],
)
def test_the_type_is_read_from_the_products_name(product: str, name: str) -> None:
    assert accelerator_name(product) == name
