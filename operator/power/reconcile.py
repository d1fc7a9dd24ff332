"""The reconcile of a PowerDomain: its status from the tree, its nodes and what they draw. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from busbar.kube.types import Condition, ConditionStatus, PowerDomain
from busbar.kube.types.power_domain import PowerDomainStatus, PowerOverrun
from busbar.kube.types.reasons import ConditionType, Reason
from busbar.operator.power.draw import Draw, Overrun
from busbar.operator.power.energy import FeedEnergy
from busbar.operator.power.leasing import FeedLeases
from busbar.operator.power.membership import Membership
from busbar.operator.power.meters import Metered
from busbar.operator.power.preemption import FeedRelief
from busbar.operator.write.status import clip

MEASURED = (Reason.FLOOR_ABOVE_BUDGET, Reason.NODES_UNKNOWN)
"""Why a domain is not ready that only what was measured tells."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was measured of a feed."""

    draw: Draw
    overrun: Overrun | None = None
    energy: FeedEnergy | None = None
    leases: FeedLeases | None = None
    """None: nothing on the feed is limited, or this operator has not decided yet."""
    relief: FeedRelief | None = None
    """None: its budget stops no work."""
    meter: Metered | None = None
    """None: it has no meter, or nobody has looked at it yet."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A condition without its times."""

    status: ConditionStatus
    reason: str
    message: str


def reconcile(
    domain: PowerDomain, found: Membership, seen: Seen | None, now: datetime, *, due: bool
) -> PowerDomainStatus | None:
    """The domain's new status; None where there is nothing to write.

    Args:
        seen: None while the operator has not had time to hear of every node; then the status keeps what it says.
        due: whether numbers may be written; without it only what changes a condition, the nodes or the generation is.
    """
    old = domain.status or PowerDomainStatus()
    generation = domain.metadata.generation
    nodes = len(found.members[domain.metadata.name])
    limited = domain.metadata.name in found.limited
    observed = {ConditionType.READY: ready(domain.metadata.name, found, seen)}
    numbers: dict[str, object] = {}
    if seen is None and observed[ConditionType.READY].reason == Reason.LEASING:
        was = next((c for c in old.conditions or () if c.type == ConditionType.READY), None)
        if was is not None and was.reason in MEASURED:
            del observed[ConditionType.READY]
    if seen is not None:
        observed[ConditionType.WITHIN_BUDGET] = _within(domain.spec.budget_watts, seen.draw, seen.relief)
        observed[ConditionType.TELEMETRY_FRESH] = _fresh(seen.draw)
        if limited:
            observed[ConditionType.CAP_CONFLICT] = _conflict(seen.draw)
        numbers = _numbers(found.domains[domain.metadata.name].usable_w, seen, old)
        if seen.leases is not None:
            numbers["leased_watts"] = round(seen.leases.leased_w, 1)
        short_w = seen.relief.short_w if seen.relief is not None else None
        numbers["short_watts"] = round(short_w, 1) if short_w is not None else None
        if limited:
            numbers["boards_limited"] = not seen.draw.refusing and not seen.draw.unknown
    if domain.spec.meter is not None and seen is not None:
        observed[ConditionType.METER_READ] = _metered(seen.meter)
        if seen.meter is not None:
            numbers["meter"] = seen.meter.status
    elif domain.spec.meter is None:
        numbers["meter"] = None
    if not limited:
        numbers["boards_limited"] = None
        numbers["leased_watts"] = None
    gone = {
        *(() if limited else (ConditionType.CAP_CONFLICT,)),
        *(() if domain.spec.meter is not None else (ConditionType.METER_READ,)),
    }
    before = {c.type: c for c in old.conditions or () if c.type not in gone}
    new = old.model_copy(
        update={
            "observed_generation": generation,
            "nodes": nodes,
            **numbers,
            "conditions": [
                *(
                    _condition(before.get(kind), kind, what, generation, now)
                    for kind, what in observed.items()
                ),
                *(c for kind, c in before.items() if kind not in observed),
            ],
        }
    )
    if new == old or not (due or _facts(new) != _facts(old)):
        return None
    return new


def ready(name: str, found: Membership, seen: Seen | None) -> Observation:
    """Whether the domain does what its policy says."""
    fault, nodes = found.faults.get(name), len(found.members[name])
    if fault is not None:
        return Observation(ConditionStatus.FALSE, fault.reason, fault.message)
    if not nodes:
        text = "No node has the labels of this domain or of one below it."
        return Observation(ConditionStatus.FALSE, Reason.NO_NODES, text)
    limited = name in found.limited
    relief = seen.relief if seen is not None else None
    if relief is not None and relief.lacks_w > 0:
        return Observation(ConditionStatus.FALSE, Reason.FLOOR_ABOVE_BUDGET, _lacking(relief))
    if limited and seen is not None and seen.leases is not None:
        if unknown := seen.leases.unknown:
            text = f"{_some(unknown)} never reported: leases stay at the lowest limits until all nodes have."
            return Observation(ConditionStatus.FALSE, Reason.NODES_UNKNOWN, text)
        if seen.leases.floor_above_budget and relief is None:
            text = "Hosts, and boards at their lowest limits, add up to more than the budget less its margin."
            return Observation(ConditionStatus.FALSE, Reason.FLOOR_ABOVE_BUDGET, text)
    text = f"{nodes} nodes hang on this feed; "
    text += "leases limit their boards." if limited else "nothing limits them."
    if limited and seen is not None and seen.draw.refusing:
        text += f" {_some(seen.draw.refusing)} boards that take no limits: these count with their nameplates."
    if relief is not None and seen is not None and seen.leases is not None and seen.leases.floor_above_budget:
        text += " All are at their lowest limits, which fit in the budget as long as idle boards stay idle."
    if relief is not None and relief.short_w is not None:
        text += f" What was stopped waits: the least of it lacks {relief.short_w:,.0f} W."
    if seen is not None and seen.draw.simulated:
        text += f" The watts of {seen.draw.simulated} are simulated."
    return Observation(ConditionStatus.TRUE, Reason.LEASING if limited else Reason.OBSERVING, text)


def _lacking(relief: FeedRelief) -> str:
    """Why the floor of what runs does not fit, and what is done about it."""
    text = (
        f"What runs needs {relief.usable_w + relief.lacks_w:,.0f} W with all boards at their lowest limits, "
        f"{relief.lacks_w:,.0f} W more than the budget less its margin; "
    )
    if relief.leaving:
        text += f"{relief.leaving} jobs or replicas are being stopped."
    elif relief.remains_w < relief.lacks_w:
        text += "if that lasts, work is stopped."
    else:
        text += "nothing that runs may be stopped for it."
    if relief.remains_w > 0:
        text += f" {relief.remains_w:,.0f} W will still be lacking then: raise the budget, or take work or nodes off."
    return text


def _some(nodes: Sequence[str]) -> str:
    """`Node a has`, `Nodes a and b have`, `Nodes a, b and 3 more have`."""
    if len(nodes) == 1:
        return f"Node {nodes[0]} has"
    if len(nodes) == 2:
        return f"Nodes {nodes[0]} and {nodes[1]} have"
    return f"Nodes {nodes[0]}, {nodes[1]} and {len(nodes) - 2} more have"


def _conflict(draw: Draw) -> Observation:
    if draw.conflicts:
        text = f"{_some(draw.conflicts)} a limit that something else has written; such a node counts with its nameplate."
        return Observation(ConditionStatus.TRUE, Reason.CAP_CONFLICT, text)
    text = "Nothing else writes limits of the boards."
    return Observation(ConditionStatus.FALSE, Reason.NO_CONFLICT, text)


def _metered(meter: Metered | None) -> Observation:
    if meter is None or meter.reason is None:
        text = "Nobody has looked at the meter yet."
        return Observation(ConditionStatus.UNKNOWN, Reason.METER_NOT_READ_YET, text)
    good = meter.reason is Reason.METER_READ
    return Observation(ConditionStatus.TRUE if good else ConditionStatus.FALSE, meter.reason, meter.message)


def _within(budget_w: float, draw: Draw, relief: FeedRelief | None) -> Observation:
    """True and False only where it is known: silent nodes count with their nameplates, unknown ones prove nothing.

    A domain that stops work for its budget is not within it while it has work to stop.
    """
    if relief is not None and relief.lacks_w > 0:
        return Observation(ConditionStatus.FALSE, Reason.FLOOR_ABOVE_BUDGET, _lacking(relief))
    if not draw.nodes:
        return Observation(ConditionStatus.UNKNOWN, Reason.NO_NODES, "There are no nodes.")
    if draw.watts > budget_w:
        text = f"The draw of {draw.watts:.0f} W is above the budget of {budget_w:g} W."
        return Observation(ConditionStatus.FALSE, Reason.OVER_BUDGET, text)
    if draw.unknown:
        text = f"{draw.unknown} of {draw.nodes} nodes have never reported what they draw."
        return Observation(ConditionStatus.UNKNOWN, Reason.NOT_MEASURED, text)
    most_w = draw.watts + draw.assumed_w
    if most_w > budget_w:
        text = f"With the nameplates of {draw.silent} silent nodes it could draw {most_w:.0f} W of {budget_w:g} W."
        return Observation(ConditionStatus.UNKNOWN, Reason.NOT_MEASURED, text)
    text = f"It draws at most {most_w:.0f} W of {budget_w:g} W."
    return Observation(ConditionStatus.TRUE, Reason.WITHIN_BUDGET, text)


def _fresh(draw: Draw) -> Observation:
    if not draw.nodes:
        return Observation(ConditionStatus.UNKNOWN, Reason.NO_NODES, "There are no nodes.")
    if draw.silent:
        text = f"{draw.silent} of {draw.nodes} nodes do not report what they draw."
        return Observation(ConditionStatus.FALSE, Reason.NODES_SILENT, text)
    return Observation(
        ConditionStatus.TRUE, Reason.ALL_REPORT, f"All {draw.nodes} nodes report what they draw."
    )


def _numbers(usable_w: float, seen: Seen, old: PowerDomainStatus) -> dict[str, object]:
    draw, over = seen.draw, seen.overrun
    known, all_known = draw.unknown < draw.nodes, draw.unknown == 0
    return {
        "draw_watts": round(draw.watts, 1) if draw.fresh else None,
        "assumed_watts": round(draw.assumed_w, 1) if known else None,
        "headroom_watts": round(usable_w - draw.watts - draw.assumed_w, 1) if all_known else None,
        "capped_nodes": draw.capped if known else None,
        "floor_watts": round(draw.floor_w, 1) if known else None,
        "nameplate_watts": round(draw.nameplate_w, 1) if known else None,
        "silent_nodes": draw.silent,
        "simulated_nodes": draw.simulated,
        "telemetry_age_seconds": round(max(0.0, draw.age_s)) if draw.age_s is not None else None,
        "energy_joules": seen.energy.joules if seen.energy is not None else old.energy_joules,
        "unassigned_joules": seen.energy.unassigned_joules
        if seen.energy is not None
        else old.unassigned_joules,
        "last_overrun": _overrun(over) if over is not None else old.last_overrun,
    }


def _overrun(over: Overrun) -> PowerOverrun:
    return PowerOverrun(
        start_time=over.start.replace(microsecond=0),
        seconds=round(over.seconds, 1),
        worst_watts=round(over.worst_w, 1),
        kilojoules=round(over.joules / 1000, 3),
    )


def _condition(
    old: Condition | None, kind: str, what: Observation, generation: int, now: datetime
) -> Condition:
    since = old.last_transition_time if old is not None and old.status is what.status else None
    return Condition(
        type=kind,
        status=what.status,
        reason=what.reason,
        message=clip(what.message),
        last_transition_time=since or now.replace(microsecond=0),
        observed_generation=generation,
    )


def _facts(status: PowerDomainStatus) -> tuple[object, ...]:
    """What is written at once when it changes."""
    conditions = [(c.type, c.status, c.reason) for c in status.conditions or ()]
    short = status.short_watts is None
    return status.observed_generation, status.nodes, short, status.boards_limited, conditions
