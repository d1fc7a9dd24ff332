"""The reconcile of a PowerDomain: its status from the tree and its nodes. Pure."""

from __future__ import annotations

from datetime import datetime

from busbar.kube.types import PowerDomain
from busbar.kube.types.power_domain import PowerDomainStatus
from busbar.kube.types.reasons import ConditionType, Reason
from busbar.operator.power.membership import Fault, Membership
from busbar.operator.write.status import clip, conditions


def reconcile(domain: PowerDomain, found: Membership, now: datetime) -> PowerDomainStatus | None:
    """The domain's new status; None where the old one says the same."""
    old = domain.status or PowerDomainStatus()
    name, generation = domain.metadata.name, domain.metadata.generation
    nodes = len(found.members[name])
    ready, why = _readiness(found.faults.get(name), nodes)
    new = old.model_copy(
        update={
            "observed_generation": generation,
            "nodes": nodes,
            "conditions": conditions(
                old.conditions,
                {ConditionType.READY: ready},
                why.reason,
                clip(why.message),
                generation,
                now,
            ),
        }
    )
    return None if new == old else new


def _readiness(fault: Fault | None, nodes: int) -> tuple[bool, Fault]:
    if fault is not None:
        return False, fault
    if not nodes:
        return False, Fault(Reason.NO_NODES, "No node has the labels of this domain or of one below it.")
    return True, Fault(Reason.OBSERVING, f"{nodes} nodes hang on this feed; nothing limits them.")
