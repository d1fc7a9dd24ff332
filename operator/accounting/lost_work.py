"""Lost work of training that gave way to services: settled in the job, added up in the service and the tenant. Pure.

Each of the three statuses is written in one piece with its marker, so that an operator that is killed between two writes counts
nothing twice. A job keeps what each service owes it as a total that never decreases; a service remembers the total that it
has counted of each job that exists, and adds what is more; so does a tenant with its services. What a job has lost is settled when
the next attempt says from which step it resumed, and not before: a job that is deleted in between is charged to nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from busbar.kube.types.lost_work import (
    MOST_CHARGED,
    MOST_COUNTED,
    ChargedLoss,
    CountedLoss,
    GivesWayTo,
    Loss,
    LostWork,
    LostWorkCaused,
    TenantLoss,
    TenantLostWork,
    UnsettledLoss,
)
from busbar.kube.types.training_status import Admission

DIGITS = 6


def gave_way(
    lost: LostWork | None,
    to: GivesWayTo,
    admission: Admission,
    price_per_hour: float,
    asked: datetime,
    ended: datetime,
) -> LostWork:
    """The job's lost work when the last pod of an attempt that gave way has ended.

    Args:
        price_per_hour: of one accelerator of its pool.
        asked: when it was asked to save and stop.
    """
    before = (
        settled(lost, 0, 0.0) or LostWork()
    )  # an earlier one that never resumed has lost no step to this service
    verified = admission.image is not None and admission.image.verified
    ran = (asked - admission.admitted_at) / timedelta(seconds=1) if admission.admitted_at else 0.0
    unsettled = UnsettledLoss(
        **to.model_dump(include={"uid", "namespace", "name", "tenant"}),
        accelerators=float(admission.pods * admission.accelerators_per_pod),
        price_per_hour=price_per_hour,
        saving_seconds=round(max(0.0, (ended - asked) / timedelta(seconds=1)), 3),
        ran_seconds=round(max(0.0, ran), 3) if verified else 0.0,
    )
    return before.model_copy(update={"unsettled": unsettled})


def settled(lost: LostWork | None, steps: int, seconds: float) -> LostWork | None:
    """With what the attempt lost that gave way, by the first word of the next one: `steps` repeated steps, which took
    `seconds`."""
    if lost is None or lost.unsettled is None:
        return lost
    one = lost.unsettled
    repeated = min(seconds, one.ran_seconds) if steps > 0 else 0.0
    held = round((repeated + one.saving_seconds) * one.accelerators, DIGITS)
    loss = Loss(times=1, accelerator_seconds=held, cost=round(held / 3600 * one.price_per_hour, DIGITS))
    known = {entry.uid: entry for entry in lost.charged or ()}
    old = known.get(one.uid)
    if old is None and len(known) >= MOST_CHARGED:
        return lost.model_copy(update={"unsettled": None})
    base = old or ChargedLoss(uid=one.uid, namespace=one.namespace, name=one.name, tenant=one.tenant)
    known[one.uid] = base.model_copy(update=_sum(base, loss))
    return lost.model_copy(update={"charged": list(known.values()), "unsettled": None})


def caused(old: LostWorkCaused | None, charged: Mapping[str, tuple[str, Loss]]) -> LostWorkCaused | None:
    """What a service has caused, with what is new; the old one where nothing is.

    Args:
        charged: by the uid of each job that exists, its tenant and what it has lost to this service.
    """
    before = old or LostWorkCaused()
    counted, new = _counted(before.counted or (), {uid: loss for uid, (_, loss) in charged.items()})
    tenants = {entry.tenant: entry for entry in before.tenants or ()}
    total: Loss = before
    for uid, loss in new.items():
        tenant = charged[uid][0]
        of = tenants.get(tenant, TenantLoss(tenant=tenant))
        tenants[tenant] = of.model_copy(update=_sum(of, loss))
        total = total.model_copy(update=_sum(total, loss))
    if not new:
        return old
    most = sorted(tenants.values(), key=lambda t: (-t.accelerator_seconds, t.tenant))[:MOST_CHARGED]
    return before.model_copy(
        update={
            **_amounts(total),
            "tenants": sorted(most, key=lambda t: t.tenant) or None,
            "counted": counted or None,
        }
    )


def of_tenant(
    old: TenantLostWork | None, tenant: str, services: Iterable[tuple[str, str, LostWorkCaused | None]]
) -> tuple[TenantLostWork | None, Loss, Loss]:
    """A tenant's lost work, and what is new of it: caused and suffered.

    Args:
        services: uid, tenant and what it has caused, of all services that exist.
    """
    seen = [(uid, owner, loss) for uid, owner, loss in services if loss is not None]
    before = old or TenantLostWork()
    by_own = {uid: loss for uid, owner, loss in seen if owner == tenant}
    by_any = {uid: part for uid, _, loss in seen for part in loss.tenants or () if part.tenant == tenant}
    causes, new_caused = _counted(before.counted_caused or (), by_own)
    suffers, new_suffered = _counted(before.counted_suffered or (), by_any)
    more, less = _total(new_caused.values()), _total(new_suffered.values())
    made = TenantLostWork(
        caused=before.caused.model_copy(update=_sum(before.caused, more)),
        suffered=before.suffered.model_copy(update=_sum(before.suffered, less)),
        counted_caused=causes or None,
        counted_suffered=suffers or None,
    )
    return (made if new_caused or new_suffered else old), more, less


def _counted(
    before: Sequence[CountedLoss], seen: Mapping[str, Loss]
) -> tuple[list[CountedLoss], dict[str, Loss]]:
    """What is counted of each object, and what is new. Objects that are gone are forgotten where their lines are needed: one
    that this operator has not seen yet must not be counted again. One for which there is no line waits."""
    known = {entry.uid: entry for entry in before}
    gone = sorted(known.keys() - seen.keys())
    new: dict[str, Loss] = {}
    for uid, loss in sorted(seen.items()):
        if uid not in known and len(known) >= MOST_COUNTED:
            if not gone:
                continue
            del known[gone.pop()]
        old = known.get(uid, CountedLoss(uid=uid))
        more = Loss(
            times=max(0, loss.times - old.times),
            accelerator_seconds=round(max(0.0, loss.accelerator_seconds - old.accelerator_seconds), DIGITS),
            cost=round(max(0.0, loss.cost - old.cost), DIGITS),
        )
        if more != Loss():
            new[uid] = more
            known[uid] = old.model_copy(update=_sum(old, more))
    return sorted(known.values(), key=lambda entry: entry.uid), new


def _total(losses: Iterable[Loss]) -> Loss:
    found = Loss()
    for loss in losses:
        found = found.model_copy(update=_sum(found, loss))
    return found


def _sum(one: Loss, other: Loss) -> dict[str, float]:
    return {
        "times": one.times + other.times,
        "accelerator_seconds": round(one.accelerator_seconds + other.accelerator_seconds, DIGITS),
        "cost": round(one.cost + other.cost, DIGITS),
    }


def _amounts(loss: Loss) -> dict[str, float]:
    return _sum(loss, Loss())
