"""The controller: domains, nodes, telemetry and curves in; leases out, each with its reason.

A round has four steps. It notes what the nodes confirmed (`leases.heard`); it finds what every node should have
(`allocate`); it lowers at once; and it raises only as far as, in every domain up the tree, the sum of all that nodes
may still draw by *earlier* messages leaves room. What a node may draw is counted from everything ever sent to it, so
the sum stays within the budget whichever messages are late, lost or out of order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..errors import PowerError
from .allocate import LONG, Demand, Floats, Indices, allocate, segments
from .burst import shared
from .decision import ControlSettings, Decision, DomainReport, Excess, Memory, NodeReport
from .domains import Domain, DomainTree, PowerPolicy
from .leases import (
    TERM,
    Grant,
    Lease,
    LeaseReason,
    NodeMemory,
    granted,
    heard,
)
from .telemetry import Curves, NodePower, NodeTelemetry, Phase, PhaseLoad, plausible

NO_LIMIT = (LeaseReason.OBSERVED, LeaseReason.UNCONTROLLABLE, LeaseReason.CONFLICT)
"""Nodes that count with all they can draw."""


@dataclass(slots=True)
class _View:
    """One node in this round. Not frozen, which would cost three times as much to make."""

    node: NodePower
    domain: Domain
    memory: NodeMemory
    told: NodeTelemetry | None
    """Fresh and plausible telemetry."""
    counted_w: float
    seen_s: float
    """Leases that ended until then are over."""
    fixed_w: float | None
    """It gets this and takes no part in the sharing."""
    reason: LeaseReason


def control(
    tree: DomainTree,
    nodes: Mapping[str, NodePower],
    telemetry: Mapping[str, NodeTelemetry],
    curves: Curves,
    now: float,
    memory: Memory,
    settings: ControlSettings,
) -> Decision:
    """One round.

    Args:
        tree: the domains (`domain_tree`); nodes that no domain lists are left alone.
        telemetry: the newest answer of each node, whatever its age.
        now: seconds on the controller's monotonic clock.

    Raises:
        PowerError: a domain lists a node that is not in `nodes`.
    """
    names = sorted(tree.leaf_of)
    if missing := [name for name in names if name not in nodes]:
        raise PowerError(f"domain {tree.leaf_of[missing[0]]!r} lists the unknown node {missing[0]!r}")
    views = [
        _view(nodes[name], tree.domains[tree.leaf_of[name]], telemetry.get(name), memory, now, settings)
        for name in names
    ]
    rows = {name: row for row, name in enumerate(names)}
    members = {
        name: np.array([rows[node] for node in tree.members[name]], dtype=np.intp) for name in tree.order
    }
    burst_s = _burst_s(views, _last_sent(views, now), tree)
    targets, reasons = _targets(views, tree, members, curves, burst_s)
    counted = np.array([view.counted_w for view in views])
    excess = _excess(counted, tree, members, memory, now)
    granted_w = _within_budgets(views, targets, counted, tree, members, excess, memory, now, settings)
    over = np.zeros(len(views), dtype=bool)
    for name in excess:
        over[members[name]] = True
    reports, kept, sent = _write(views, targets, granted_w, burst_s, over, reasons, memory, now, settings)
    after = Memory(memory.term, now, sent, kept, excess)
    return Decision(tuple(reports), _domain_reports(views, reports, tree, members), after)


def _view(
    node: NodePower,
    domain: Domain,
    told: NodeTelemetry | None,
    memory: Memory,
    now: float,
    settings: ControlSettings,
) -> _View:
    known = memory.nodes.get(node.name) or NodeMemory(inherited_ends_s=settings.ends_s(now))
    if told is not None and not plausible(node, told):
        told = None
    if told is not None and (told.epoch, told.clock_s) < (known.epoch, known.clock_s):
        told = None
    if told is not None:
        known = heard(known, told.epoch, told.clock_s, told.sequence, memory.term, now, told.at_s)
        most_w = known.counted_w(node.floor_w, node.nameplate_w, told.at_s)
        if known.conflict != (told.limit_w > 1.02 * most_w):
            known = replace(known, conflict=not known.conflict)
    fresh = told is not None and now - min(told.at_s, known.advanced_s) <= settings.stale_s
    seen_s = known.heard_s if settings.limits_stay else now
    counted_w = known.counted_w(node.floor_w, node.nameplate_w, seen_s)
    free = settings.limits_stay and known.may_run_free
    silent_w = counted_w if settings.ttl_s is None or settings.limits_stay else node.floor_w
    if free:  # if all processes of the node are dead, nothing limits its boards
        silent_w = node.nameplate_w
    fixed_w, reason = _fixed(node, domain, known, None if fresh else silent_w, seen_s)
    if reason in NO_LIMIT or (reason is LeaseReason.STALE and free):
        counted_w = node.nameplate_w
    return _View(node, domain, known, told if fresh else None, counted_w, seen_s, fixed_w, reason)


def _fixed(
    node: NodePower, domain: Domain, known: NodeMemory, silent_w: float | None, seen_s: float
) -> tuple[float | None, LeaseReason]:
    """Nodes that take no part in the sharing, and why. The first rule that holds decides.

    Args:
        silent_w: what a node without fresh telemetry will keep; None: its telemetry is fresh.
    """
    if domain.policy is PowerPolicy.OBSERVE:
        return node.nameplate_w, LeaseReason.OBSERVED
    if not node.controllable:
        return node.nameplate_w, LeaseReason.UNCONTROLLABLE
    if known.conflict:
        return node.nameplate_w, LeaseReason.CONFLICT
    if silent_w is not None:
        return silent_w, LeaseReason.STALE
    if not known.certain(seen_s):
        return node.floor_w, LeaseReason.UNKNOWN
    return None, LeaseReason.SHARE


def _targets(
    views: Sequence[_View], tree: DomainTree, members: Mapping[str, Indices], curves: Curves, burst_s: Floats
) -> tuple[Floats, list[LeaseReason]]:
    """What every node should have."""
    base = np.array([view.node.floor_w if view.fixed_w is None else view.fixed_w for view in views])
    reasons = [view.reason for view in views]
    free = np.array([view.fixed_w is None for view in views], dtype=bool)
    static = free & np.array([view.domain.policy is PowerPolicy.STATIC for view in views], dtype=bool)
    if static.any():
        equal = np.full(len(views), np.inf)
        for name in tree.order:
            rows = members[name]
            if free[rows].any():
                share = (tree.domains[name].usable_w - base[rows][~free[rows]].sum()) / free[rows].sum()
                equal[rows] = np.minimum(equal[rows], share)
        nameplate = np.array([view.node.nameplate_w for view in views])
        base = np.where(static, np.clip(equal, base, nameplate), base)
        reasons = [LeaseReason.STATIC if static[row] else reason for row, reason in enumerate(reasons)]
    sharing = np.flatnonzero(free & ~static)
    targets = base.copy()
    if len(sharing):
        place = np.full(len(views), -1, dtype=np.intp)
        place[sharing] = np.arange(len(sharing))
        rooms = []
        for name in tree.order:
            rows = members[name]
            inside = place[rows]
            rooms.append((inside[inside >= 0], tree.domains[name].usable_w - float(base[rows].sum())))
        found = segments([_demand(views[int(row)], float(burst_s[row])) for row in sharing], curves)
        targets[sharing] += allocate(found, rooms)
    return targets, reasons


def _demand(view: _View, burst_s: float) -> Demand:
    burst = view.domain.policy is PowerPolicy.LEASE_WITH_BURST
    told = view.told
    assert told is not None  # a node without fresh telemetry has a fixed lease
    phases = told.phases or (
        PhaseLoad(Phase.TRAINING, 1.0, view.node.board_max_w),
    )  # unknown work: the worst
    return Demand(view.node, phases, told.spread_w, burst, burst_s, told.bucket_j)


def _excess(
    counted: Floats, tree: DomainTree, members: Mapping[str, Indices], memory: Memory, now: float
) -> dict[str, Excess]:
    """The domains whose nodes may draw more than the budget by what was sent to them, and since when."""
    found = {}
    for name in tree.order:
        usable_w = tree.domains[name].usable_w
        if counted[members[name]].sum() > usable_w * (1 + 1e-9):
            before = memory.excess.get(name)
            again = before is None or usable_w < before.usable_w
            found[name] = Excess(now if again or before is None else before.since_s, usable_w)
    return found


def _within_budgets(
    views: Sequence[_View],
    targets: Floats,
    counted: Floats,
    tree: DomainTree,
    members: Mapping[str, Indices],
    excess: Mapping[str, Excess],
    memory: Memory,
    now: float,
    settings: ControlSettings,
) -> Floats:
    """The part of every target that can be granted now.

    What rises above what the node may draw anyway must fit, in every domain, beside all that the others may draw. In
    a domain above its budget nothing rises, and all that is sent from then on must fit in the budget by itself:
    earlier leases end or are replaced, and then the budget holds, whichever messages arrived.
    """
    nameplate = np.array([view.node.nameplate_w for view in views])
    granted_w = np.minimum(
        targets, _last_sent(views, now) + settings.raise_per_s * nameplate * (now - memory.at_s)
    )
    for name in tree.order:
        rows = members[name]
        counts = [counted[rows]]
        if name in excess:
            counts.append(_sent_since([views[int(row)] for row in rows], excess[name].since_s, settings))
        for count in counts:
            rise = np.maximum(granted_w[rows] - count, 0.0)
            room = max(tree.domains[name].usable_w - count.sum(), 0.0)
            part = min(room / rise.sum(), 1.0) if rise.any() else 1.0
            granted_w[rows] = np.minimum(granted_w[rows], count + rise * part * (1 - 1e-12))
    return np.maximum(granted_w, [view.node.floor_w for view in views])


def _burst_s(views: Sequence[_View], leased_w: Floats, tree: DomainTree) -> Floats:
    """Of every node the depth of its bucket in seconds of its lease.

    A domain's breaker rides through so many joules: its time at the leases of all nodes. They go to the nodes whose
    peaks are short, by weight, and to none of these more than a long queue of prompts draws above the lease. Nodes that
    train get none: what begins there does not end within a second, and all nodes of a job begin at once.
    """
    found = np.zeros(len(views))
    by_domain: dict[str, list[int]] = {}
    for row, view in enumerate(views):
        if view.domain.policy is PowerPolicy.LEASE_WITH_BURST:
            by_domain.setdefault(view.domain.name, []).append(row)
    for name, rows in by_domain.items():
        most_j = {row: peak_j for row in rows if (peak_j := _long_peak_j(views[row], float(leased_w[row])))}
        peaks = list(most_j)
        if peaks:
            weights = np.array([views[row].node.weight for row in peaks])
            ride_j = tree.domains[name].ride_through_s * float(leased_w[rows].sum())
            found[peaks] = shared(ride_j, weights, np.array(list(most_j.values()))) / leased_w[peaks]
    return found


def _long_peak_j(view: _View, leased_w: float) -> float:
    """What a long queue of prompts draws above the lease; infinite where nobody knows how long it lasts; 0: no peaks."""
    if view.told is None or view.fixed_w is not None:
        return 0.0
    for load in view.told.phases:
        if load.phase is Phase.PREFILL and load.share > 0:
            excess_w = view.node.host_w + view.node.slope * load.board_w - leased_w
            return LONG * load.stretch_s * max(excess_w, 0.0) if load.stretch_s else math.inf
    return 0.0


def _last_sent(views: Sequence[_View], now: float) -> Floats:
    newest = ((view.memory.newest, view.node.floor_w) for view in views)
    return np.array(
        [grant.watts if grant is not None and grant.ends_s > now else floor_w for grant, floor_w in newest]
    )


def _sent_since(views: Sequence[_View], since_s: float, settings: ControlSettings) -> Floats:
    """Of every node what was sent since then; of one that nobody hears and whose limits stay, all that counts."""
    return np.array(
        [
            view.counted_w
            if view.reason in NO_LIMIT or (settings.limits_stay and view.told is None)
            else view.memory.sent_since_w(view.node.floor_w, view.node.nameplate_w, since_s, view.seen_s)
            for view in views
        ]
    )


def _write(
    views: Sequence[_View],
    targets: Floats,
    granted_w: Floats,
    burst_s: Floats,
    over: NDArray[np.bool_],
    reasons: Sequence[LeaseReason],
    memory: Memory,
    now: float,
    settings: ControlSettings,
) -> tuple[list[NodeReport], dict[str, NodeMemory], int]:
    reports, kept, sent = [], {}, memory.sent
    for row, view in enumerate(views):
        target_w, watts = float(targets[row]), float(granted_w[row])
        reason = _reason(view, reasons[row], target_w, watts)
        lease, known = None, view.memory
        if view.told is not None and reason not in (LeaseReason.OBSERVED, LeaseReason.UNCONTROLLABLE):
            if view.reason is LeaseReason.CONFLICT:
                watts = view.node.floor_w
            chosen = _chosen(view, watts, bool(over[row]), now, settings)
            if chosen is not None:
                sent += 1
                lease, known = _lease(
                    view, view.told, chosen, float(burst_s[row]), memory.term * TERM + sent, now, settings
                )
        kept[view.node.name] = known
        counted_w = max(view.counted_w, lease.watts if lease else 0.0)
        reports.append(NodeReport(view.node.name, view.domain.name, target_w, counted_w, reason, lease))
    return reports, kept, sent


def _reason(view: _View, reason: LeaseReason, target_w: float, watts: float) -> LeaseReason:
    if view.fixed_w is not None or reason is LeaseReason.STATIC:
        return reason
    if watts < target_w - 1.0:
        return LeaseReason.WAITING
    if target_w >= view.node.nameplate_w - 1.0:
        return LeaseReason.UNLIMITED
    newest = view.memory.newest
    before = newest.watts if newest is not None else view.node.floor_w
    if abs(watts - before) > 0.05 * before:
        return LeaseReason.RAISED if watts > before else LeaseReason.LOWERED
    return LeaseReason.SHARE


def _chosen(view: _View, watts: float, over: bool, now: float, settings: ControlSettings) -> float | None:
    """The watts to write now; None: nothing is to be written.

    Args:
        over: a budget above this node is exceeded by what is counted, so that even a small step down is due.
    """
    newest = view.memory.newest
    if newest is None or newest.ends_s <= now:
        return watts
    same = abs(watts - newest.watts) <= settings.deadband * newest.watts and not (
        over and watts < newest.watts
    )
    # Holding the old watts is allowed only while they are counted, which `newest` is.
    confirmed = view.memory.confirmed >= newest.sequence
    if settings.ttl_s is not None:
        if same and confirmed and now - newest.sent_s < settings.renew_s:
            return None
        return newest.watts if same else watts
    if not confirmed and now - newest.sent_s < settings.repeat_s and (same or watts > newest.watts):
        return None
    if same:
        return None if confirmed else newest.watts
    return watts


def _lease(
    view: _View,
    told: NodeTelemetry,
    watts: float,
    burst_s: float,
    sequence: int,
    now: float,
    settings: ControlSettings,
) -> tuple[Lease, NodeMemory]:
    lease = Lease(
        node=view.node.name,
        watts=watts,
        sequence=sequence,
        epoch=told.epoch,
        until_clock_s=None if settings.ttl_s is None else told.clock_s + settings.ttl_s,
        board_limit_w=view.node.board_limit_w(watts),
        burst_s=burst_s,
    )
    return lease, granted(
        view.memory, Grant(sequence, watts, now, settings.ends_s(now), burst_s > 0), view.seen_s
    )


def _domain_reports(
    views: Sequence[_View], reports: Sequence[NodeReport], tree: DomainTree, members: Mapping[str, Indices]
) -> tuple[DomainReport, ...]:
    found = []
    for name, domain in tree.domains.items():
        inside = [int(row) for row in members[name]]
        least_w = sum(
            views[row].node.nameplate_w if views[row].reason in NO_LIMIT else views[row].node.floor_w
            for row in inside
        )
        found.append(
            DomainReport(
                domain=name,
                budget_w=domain.budget_w,
                usable_w=domain.usable_w,
                counted_w=sum(reports[row].counted_w for row in inside),
                floor_w=least_w,
                drawn_w=sum(told.drawn_w for row in inside if (told := views[row].told) is not None),
                reason=LeaseReason.FLOOR if least_w > domain.usable_w else None,
            )
        )
    return tuple(found)
