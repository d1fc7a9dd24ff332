"""The ResourceQuota of a tenant's limits: what it says, that edits are reverted, and the use that the status shows."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.operator.builders import NOW, tenant

from busbar.kube.informer import Key
from busbar.operator.tenancy.reconcile import TenantView, reconcile, revoke
from busbar.operator.watch.caches import tenant_of_namespace
from busbar.operator.watch.small_projections import NamespaceSeen, QuotaSeen, project_quota
from busbar.operator.write.actions import Action, Apply, Delete

LABELS = (("busbar.dev/tenant", "a"), ("pod-security.kubernetes.io/enforce", "restricted"))
LIMITS = {
    "trainingJobs": 1000,
    "modelServices": 2,
    "pods": 8,
    "persistentVolumeClaims": 3,
    "storageGib": 2048,
}
HARD = {
    "count/trainingjobs.busbar.dev": "1000",
    "count/modelservices.busbar.dev": "2",
    "pods": "8",
    "persistentvolumeclaims": "3",
    "requests.storage": "2048Gi",
}
STORED = {**HARD, "count/trainingjobs.busbar.dev": "1k", "requests.storage": "2Ti"}
"""As the API server writes them."""


def view(
    *quotas: QuotaSeen, limits: dict[str, Any] | None, spaces: tuple[str, ...] = ("ns",), **fields: Any
) -> TenantView:
    of = tenant("a", list(spaces), limits=limits)
    seen = {name: NamespaceSeen(name, LABELS, False) for name in spaces}
    return TenantView(of, tenant_of_namespace([of]), seen, (), NOW, quotas=quotas, **fields)


def actions_of(*quotas: QuotaSeen, limits: dict[str, Any] | None = LIMITS) -> list[Action]:
    return list(reconcile(view(*quotas, limits=limits)).actions)


def stored(
    hard: dict[str, str] = STORED,
    name: str = "busbar-tenant-limits",
    used: dict[str, str] | None = None,
    **spec: Any,
) -> QuotaSeen:
    meta = {"name": name, "namespace": "ns", "uid": "uid-1"}
    return project_quota(
        {"metadata": meta, "spec": {"hard": hard, **spec}, "status": {"used": used} if used else {}}
    )


def test_each_namespace_gets_one_quota_of_what_is_limited() -> None:
    update = reconcile(view(limits=LIMITS, spaces=("ns", "ns-2")))
    applied = [a for a in update.actions if isinstance(a, Apply)]
    assert [a.key for a in applied] == [
        Key("ns", "busbar-tenant-limits"),
        Key("ns-2", "busbar-tenant-limits"),
    ]
    assert all(a.body["spec"] == {"hard": HARD} for a in applied)
    assert applied[0].body["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "busbar"
    [only] = actions_of(limits={"pods": 0})
    assert isinstance(only, Apply)
    assert only.body["spec"]["hard"] == {"pods": "0"}


@pytest.mark.parametrize("limits", [None, {}, {"waitingJobs": 5}], ids=["none", "empty", "not countable"])
def test_without_limits_there_is_no_quota_and_an_earlier_one_goes(limits: dict[str, Any] | None) -> None:
    assert actions_of(limits=limits) == []
    [action] = actions_of(stored(), stored(name="people-own-it"), limits=limits)
    assert isinstance(action, Delete)
    assert (action.key, action.uid) == (Key("ns", "busbar-tenant-limits"), "uid-1")


def test_one_that_stands_as_it_should_is_left_alone_however_its_numbers_are_written() -> None:
    assert actions_of(stored()) == []
    assert actions_of(stored(HARD)) == []


def test_one_that_was_edited_is_put_back() -> None:
    [changed] = actions_of(stored({**STORED, "pods": "80"}))
    assert isinstance(changed, Apply)
    assert changed.body["spec"]["hard"] == HARD
    [missing] = actions_of(stored({"pods": "8"}))
    assert isinstance(missing, Apply)


@pytest.mark.parametrize(
    "edited",
    [stored({**STORED, "services": "1"}), stored(scopes=["Terminating"])],
    ids=["a row more", "only some pods"],
)
def test_what_an_apply_would_leave_is_made_again(edited: QuotaSeen) -> None:
    gone, again = actions_of(edited)
    assert isinstance(gone, Delete)
    assert isinstance(again, Apply)
    assert again.body["spec"]["hard"] == HARD


def test_it_goes_with_the_tenants_claim() -> None:
    namespace = NamespaceSeen("ns", LABELS, False)
    ours, other = stored(), stored(name="people-own-it")
    assert [a.key for a in revoke(namespace, {}, (), quotas=(ours, other)) if isinstance(a, Delete)] == [
        ours.key
    ]
    assert revoke(namespace, {"ns": "b"}, (), quotas=(ours, other)) == []


def test_the_status_says_what_kubernetes_counts() -> None:
    used = {"pods": "3", "requests.storage": "1536Mi", "services": "9"}
    first = reconcile(view(stored(used=used), limits=LIMITS, waiting_jobs=4)).status
    assert first is not None
    assert first.to_wire()["limitUse"] == [{"namespace": "ns", "pods": 3, "storageGib": 1.5}]
    assert first.waiting_jobs == 4


def test_a_changed_use_is_written_a_little_later_and_ends_with_the_limits() -> None:
    first = view(stored(used={"pods": "3"}), limits={"pods": 8})
    of = first.tenant.model_copy(update={"status": reconcile(first).status})

    def after(seconds: float, *quotas: QuotaSeen, limits: dict[str, Any] | None = None) -> Any:
        seen = view(*quotas, limits=limits)
        told = seen.tenant.model_copy(update={"status": of.status})
        return reconcile(replace(seen, tenant=told, now=NOW + timedelta(seconds=seconds)))

    changed = stored(used={"pods": "4"})
    soon = after(1, changed, limits={"pods": 8})
    assert soon.status is None
    assert soon.again_s == 5.0
    late = after(6, changed, limits={"pods": 8}).status
    assert [use.pods for use in late.limit_use] == [4]
    assert after(6, limits=None).status.limit_use is None
