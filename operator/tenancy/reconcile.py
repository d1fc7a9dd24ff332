"""The reconcile of a Tenant: labels, policies and quotas of its namespaces, RoleBindings of its members, counted use.

A namespace belongs to one tenant: the first one created that claims it; a later claim only gets a condition.
Namespaces are never created or deleted here. One that its tenant releases, by deletion or by leaving it out of its
spec, may contain objects that wait for the restrictions to end. So it stays closed: Pod Security remains, and the
label ``busbar.dev/released`` replaces the tenant's label until a person removes it or a tenant claims the namespace.

Use is counted by integration: the status says what was held at a moment, and each write adds that rate times the
time since, so no transition is counted twice and a restarted operator continues from the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from busbar.kube.contracts.demand import AccountUse
from busbar.kube.informer import Key
from busbar.kube.resources import NAMESPACES, ROLE_BINDINGS
from busbar.kube.types import AcceleratorPool, Condition, Tenant
from busbar.kube.types.budget import BudgetUse
from busbar.kube.types.limits import LimitUse
from busbar.kube.types.lost_work import LostWorkCaused
from busbar.kube.types.meta import LABEL_RELEASED, LABEL_TENANT
from busbar.kube.types.reasons import ConditionType, Reason
from busbar.kube.types.tenant import (
    AcceleratorCount,
    Role,
    TenantStatus,
    TenantUsage,
)
from busbar.operator.accounting import budgets, inference
from busbar.operator.accounting.allocations import TenantAllocation
from busbar.operator.accounting.lost_work import of_tenant
from busbar.operator.accounting.usage import HALF_LIFE_S, counted, same_rates, users_counted
from busbar.operator.tenancy import limits, network_policy
from busbar.operator.watch.caches import MANAGED_BY
from busbar.operator.watch.small_projections import BindingSeen, NamespaceSeen, PolicySeen, QuotaSeen
from busbar.operator.write.actions import Action, Apply, Delete
from busbar.operator.write.events import Notice
from busbar.operator.write.status import conditions

COUNTS_S = 5.0
SOONEST_S = 1.0
"""Between two looks at a budget that is nearly spent."""
TENANT_ROLES = frozenset(f"busbar-tenant-{role}" for role in Role)
JOULES_PER_KWH = 3.6e6
POD_SECURITY = "pod-security.kubernetes.io/enforce"


@dataclass(frozen=True)
class TenantView:
    """The whole input of one reconcile of one tenant."""

    tenant: Tenant
    owner_of: Mapping[str, str]  # namespace → tenant; of several claims the first counts
    namespaces: Mapping[str, NamespaceSeen]
    bindings: tuple[BindingSeen, ...]
    now: datetime
    policies: tuple[PolicySeen, ...] = ()
    quotas: tuple[QuotaSeen, ...] = ()
    waiting_jobs: int | None = None  # TrainingJobs that wait; None: the tenant does not limit them
    platform: str = ""  # the platform's namespace, which NetworkPolicies allow; empty: none are kept
    allocation: TenantAllocation = field(default_factory=TenantAllocation)
    free_by_type: Mapping[str, float] = field(default_factory=dict)
    pools: tuple[AcceleratorPool, ...] = ()
    rates: Mapping[str, float] = field(default_factory=dict)
    energy_joules: float | None = None  # its new total; None: nothing is measured
    drawn_watts: float = 0.0  # now
    inference: AccountUse | None = None  # what the gateway says that it uses; None: nothing
    lost: tuple[
        tuple[str, str, LostWorkCaused | None], ...
    ] = ()  # by service: uid, tenant, what it has caused
    usage_period_s: float = 60.0
    half_life_s: float = HALF_LIFE_S


@dataclass(frozen=True)
class TenantUpdate:
    status: TenantStatus | None = None
    actions: tuple[Action, ...] = ()
    again_s: float | None = None
    notices: tuple[tuple[str, str], ...] = ()  # events about budgets: reason, message


def reconcile(view: TenantView) -> TenantUpdate:
    """See the module's head."""
    name = view.tenant.metadata.name
    claimed = (
        list(view.tenant.spec.namespaces or ()) if view.tenant.metadata.deletion_timestamp is None else []
    )
    own = [n for n in claimed if view.owner_of.get(n) == name]
    present = [n for n in own if n in view.namespaces and not view.namespaces[n].deleting]
    actions: list[Action] = [
        *_labels(view, name, present),
        *_bindings(view, name, present),
        *network_policy.keep(name, view.platform, present, view.policies),
        *limits.keep(view.tenant.spec.limits, own, present, view.quotas),
    ]
    old = view.tenant.status or TenantStatus()
    again = view.usage_period_s if _counts_agree(view, old) else COUNTS_S
    counted_now = _counted(view, old)
    status = _status(view, claimed, own, present, counted_now)
    used = counted_now.budgets or []
    notices = budgets.changes(view.tenant.spec.budgets or (), old, used) if status is not None else []
    if status is not None:
        notices += inference.changes(old.inference, counted_now.inference)
    return TenantUpdate(status, tuple(actions), _sooner(again, used, view.now), tuple(notices))


def _sooner(again_s: float, used: list[BudgetUse], now: datetime) -> float:
    """Not later than when a budget is spent or its period ends."""
    moments = [when for use in used for when in (use.exhausted, use.ends) if when is not None]
    return min([again_s, *(max(SOONEST_S, (when - now) / timedelta(seconds=1)) for when in moments)])


# -- namespaces and members ----------------------------------------------------------------------------


def _labels(view: TenantView, tenant: str, present: list[str]) -> list[Action]:
    wanted = {LABEL_TENANT: tenant, POD_SECURITY: "restricted"}
    actions: list[Action] = []
    for name in present:
        labels = dict(view.namespaces[name].labels)
        if any(labels.get(k) != v for k, v in wanted.items()):
            actions.append(Apply(NAMESPACES, _namespace(name, wanted)))
    return actions


@dataclass(frozen=True)
class Release:
    """The write that releases a namespace, and the event about it."""

    apply: Apply
    notice: Notice


def release(namespace: NamespaceSeen, owner_of: Mapping[str, str]) -> Release | None:
    """Replaces the tenant's label by ``busbar.dev/released`` in one apply, where no tenant claims the namespace.

    The apply contains Pod Security too: server-side apply removes what its owner leaves out. A namespace without the
    tenant's label is left alone, so a released label that a person removed does not come back.
    """
    labels = dict(namespace.labels)
    if LABEL_TENANT not in labels or namespace.name in owner_of or namespace.deleting:
        return None
    tenant = labels[LABEL_TENANT]
    kept = {LABEL_RELEASED: tenant, POD_SECURITY: "restricted"}
    text = (
        f"Tenant {tenant} let this namespace go. Pod Security restricted and Busbar's admission policies stay: look "
        f"at what its members left here, then remove the labels {LABEL_RELEASED} and {POD_SECURITY}, or name the "
        "namespace in a Tenant."
    )
    notice = Notice("v1", "Namespace", "", namespace.name, namespace.uid, Reason.NAMESPACE_RELEASED, text)
    return Release(Apply(NAMESPACES, _namespace(namespace.name, kept)), notice)


def revoke(
    namespace: NamespaceSeen,
    owner_of: Mapping[str, str],
    bindings: Iterable[BindingSeen],
    policies: Iterable[PolicySeen] = (),
    platform: str = "",
    quotas: Iterable[QuotaSeen] = (),
) -> list[Action]:
    """Removes the rights that we gave to members of a tenant that does not own the namespace (any more), and the
    NetworkPolicy and ResourceQuota of a namespace that has no owner.

    A tenant's own reconcile cannot do it: a deleted tenant is not reconciled again.
    """
    if namespace.deleting:
        return []
    owner = owner_of.get(namespace.name)
    kept = {_binding_name(owner, role) for role in Role} if owner is not None else set()
    rights: list[Action] = [
        Delete(ROLE_BINDINGS, b.key, b.uid)
        for b in bindings
        if b.key.namespace == namespace.name and b.role in TENANT_ROLES and b.key.name not in kept
    ]
    return [
        *rights,
        *network_policy.remove(namespace.name, owner, platform, policies),
        *limits.remove(namespace.name, owner, quotas),
    ]


def _binding_name(tenant: str, role: Role) -> str:
    return f"busbar-{tenant}-{role}"


def _namespace(name: str, labels: Mapping[str, str]) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": dict(labels)}}


def _bindings(view: TenantView, tenant: str, present: list[str]) -> list[Action]:
    """One RoleBinding per namespace and role that has members; others of ours are removed."""
    seen = {b.key: b for b in view.bindings}
    wanted: dict[Key, tuple[Role, tuple[tuple[str, str, str], ...]]] = {}
    for role in Role:
        subjects = tuple(
            sorted(
                (str(m.subject.kind), m.subject.name, m.subject.namespace or "")
                for m in view.tenant.spec.members or ()
                if m.role is role
            )
        )
        if subjects:
            for namespace in present:
                wanted[Key(namespace, _binding_name(tenant, role))] = (role, subjects)
    actions: list[Action] = []
    for key, (role, subjects) in sorted(wanted.items()):
        old = seen.get(key)
        if old is not None and old.role != f"busbar-tenant-{role}":
            actions.append(
                Delete(ROLE_BINDINGS, key, old.uid)
            )  # the role of a binding cannot be changed; the next reconcile makes it again
        elif old is None or old.subjects != subjects:
            actions.append(Apply(ROLE_BINDINGS, _binding(key, role, subjects)))
    for key, old in sorted(seen.items()):
        if key not in wanted and any(key.name == _binding_name(tenant, role) for role in Role):
            actions.append(Delete(ROLE_BINDINGS, key, old.uid))
    return actions


def _binding(key: Key, role: Role, subjects: tuple[tuple[str, str, str], ...]) -> dict[str, object]:
    rendered: list[dict[str, str]] = []
    for kind, name, namespace in subjects:
        subject = {"kind": kind, "name": name}
        if kind == "ServiceAccount":
            subject["namespace"] = namespace
        else:
            subject["apiGroup"] = "rbac.authorization.k8s.io"
        rendered.append(subject)
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {
            "name": key.name,
            "namespace": key.namespace,
            "labels": {MANAGED_BY: "busbar", "app.kubernetes.io/component": "tenant"},
        },
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": f"busbar-tenant-{role}",
        },
        "subjects": rendered,
    }


# -- status --------------------------------------------------------------------------------------------


def _status(
    view: TenantView, claimed: list[str], own: list[str], present: list[str], counted_now: TenantStatus
) -> TenantStatus | None:
    old = view.tenant.status or TenantStatus()
    generation = view.tenant.metadata.generation
    taken = [n for n in claimed if n not in own]
    missing = [n for n in own if n not in present]
    if taken:
        names = ", ".join(taken)
        reason, text = (
            Reason.NAMESPACE_TAKEN,
            f"Another tenant claimed first: {names}. Remove it from one of them.",
        )
    elif missing:
        reason, text = Reason.NAMESPACE_MISSING, f"These namespaces do not exist: {', '.join(missing)}."
    else:
        reason, text = Reason.NAMESPACES_READY, f"{len(present)} namespaces belong to the tenant."
    made = conditions(
        old.conditions, {ConditionType.READY: not taken and not missing}, reason, text, generation, view.now
    )
    allocated = dict(view.allocation.allocated)
    age = view.now - old.last_updated if old.last_updated is not None else timedelta.max
    same = _by_type(old.allocated) == allocated and old.observed_generation == generation
    same = same and (old.running_in or []) == list(view.allocation.running_in)
    same = same and _ready(old.conditions) == made and same_rates(old, _by_user(view))
    same = same and _states(old) == _states(counted_now)
    same = same and inference.states(old.inference) == inference.states(counted_now.inference)
    # Counts of jobs change often and matter little: they are written a little later, not at each change.
    recount = not _counts_agree(view, old) and age >= timedelta(seconds=COUNTS_S)
    energy = old.usage.energy_joules if old.usage is not None else 0.0
    counts = bool(allocated) or (view.energy_joules or 0.0) > energy
    counts = counts or not inference.same(old.inference, counted_now.inference)
    due = counts and age >= timedelta(seconds=view.usage_period_s)
    if same and not recount and not due and old.last_updated is not None:
        return None
    guaranteed = {q.accelerator: q.guaranteed for q in view.tenant.spec.quota or () if q.guaranteed}
    borrowed = {
        k: round(v - guaranteed.get(k, 0.0), 3) for k, v in allocated.items() if v > guaranteed.get(k, 0.0)
    }
    lent = {
        k: round(g - allocated.get(k, 0.0) - view.free_by_type.get(k, 0.0), 3)
        for k, g in guaranteed.items()
        if g - allocated.get(k, 0.0) > view.free_by_type.get(k, 0.0)
    }
    budget = _budget_condition(view, old, counted_now)
    return counted_now.model_copy(
        update={
            "observed_generation": generation,
            "conditions": [*made, *([budget] if budget is not None else [])],
            "allocated": _counts(allocated),
            "borrowed": _counts(borrowed),
            "lent": _counts(lent),
            "held": round(sum(allocated.values()), 3),
            "running": view.allocation.running,
            "waiting": view.allocation.waiting,
            "waiting_jobs": view.waiting_jobs,
            "limit_use": _limit_use(view),
            "running_in": list(view.allocation.running_in) or None,
            "last_updated": view.now,
        }
    )


def _ready(found: list[Condition] | None) -> list[Condition]:
    return [c for c in found or () if c.type == ConditionType.READY]


def _states(status: TenantStatus) -> list[tuple[object, ...]]:
    """What is written at once of budgets when it changes."""
    return [(use.period, use.started, use.state) for use in status.budgets or ()]


def _budget_condition(view: TenantView, old: TenantStatus, new: TenantStatus) -> Condition | None:
    before = next((c for c in old.conditions or () if c.type == ConditionType.WITHIN_BUDGET), None)
    generation = view.tenant.metadata.generation
    return budgets.condition(view.tenant.spec.budgets or (), new.budgets or (), before, generation, view.now)


def _counts_agree(view: TenantView, old: TenantStatus) -> bool:
    return (old.running or 0, old.waiting or 0) == (view.allocation.running, view.allocation.waiting) and (
        old.waiting_jobs,
        old.limit_use or None,
    ) == (view.waiting_jobs, _limit_use(view))


def _limit_use(view: TenantView) -> list[LimitUse] | None:
    name = view.tenant.metadata.name
    own = (n for n in view.tenant.spec.namespaces or () if view.owner_of.get(n) == name)
    return limits.used(view.tenant.spec.limits, own, view.quotas) or None


def _counted(view: TenantView, old: TenantStatus) -> TenantStatus:
    """The old status, with what it says was held counted up to now."""
    since = old.last_updated or view.now
    seconds = max(0.0, (view.now - since) / timedelta(seconds=1))
    held = _by_type(old.allocated)
    usage = old.usage or TenantUsage()
    cost = 0.0
    for accelerator, count in held.items():
        cost += count * seconds / 3600.0 * _price(view, accelerator)
    energy = usage.energy_joules if view.energy_joules is None else view.energy_joules
    used = budgets.Amounts(
        sum(held.values()) * seconds / 3600.0, cost, max(0.0, energy - usage.energy_joules) / JOULES_PER_KWH
    )
    lost, caused, suffered = of_tenant(old.lost_work, view.tenant.metadata.name, view.lost)
    charged = budgets.Amounts(
        (caused.accelerator_seconds - suffered.accelerator_seconds) / 3600.0, caused.cost - suffered.cost
    )
    before = _rate(view, held)
    now_rate = _rate(view, view.allocation.allocated)
    return old.model_copy(
        update={
            "usage": TenantUsage(
                accelerator_seconds=round(usage.accelerator_seconds + sum(held.values()) * seconds, 3),
                work_units=round(usage.work_units + before * seconds, 6),
                energy_joules=energy,
                cost=round(usage.cost + cost, 6),
            ),
            "decayed": counted(old.decayed, now_rate, view.now, view.half_life_s),
            "users": users_counted(old, _by_user(view), view.now, view.half_life_s),
            "budgets": budgets.counted(
                view.tenant.spec.budgets or (), old, used, _per_hour(view), since, view.now, charged
            ),
            "lost_work": lost,
            "inference": inference.use_of(
                view.tenant.spec.inference, view.inference, old.inference, view.now
            ),
        }
    )


def _per_hour(view: TenantView) -> budgets.Amounts:
    """What the tenant uses now."""
    held = view.allocation.allocated
    cost = sum(count * _price(view, accelerator) for accelerator, count in held.items())
    return budgets.Amounts(sum(held.values()), cost, view.drawn_watts / 1000.0)


def _rate(view: TenantView, held: Mapping[str, float]) -> float:
    """Work units per second."""
    return sum(count * view.rates.get(kind, 1.0) for kind, count in held.items())


def _by_user(view: TenantView) -> dict[str, float]:
    return {name: _rate(view, held) for name, held in view.allocation.by_user.items()}


def _by_type(counts: list[AcceleratorCount] | None) -> dict[str, float]:
    return {c.accelerator: c.count for c in counts or ()}


def _counts(by_type: Mapping[str, float]) -> list[AcceleratorCount] | None:
    return [AcceleratorCount(accelerator=k, count=v) for k, v in sorted(by_type.items())] or None


def _price(view: TenantView, accelerator: str) -> float:
    """The price of a type; the mean of its pools' prices where several offer it."""
    prices = [p.spec.price_per_hour for p in view.pools if p.spec.accelerator == accelerator]
    return sum(prices) / len(prices) if prices else 0.0
