"""Leases for the nodes of the domains that limit them: the readings in, the scheduler's controller, messages out. Pure.

The controller (`busbar.scheduler.power`) decides. Here its input is made, and what it cannot know is taken care of:

* a node that has left the domains is kept out of their budgets until its lease has ended, and one whose domain is at
  fault out of those above it, and of those in which it was before;
* where a node has never reported, it counts with what its domain says of such nodes; where that says nothing, nothing
  above the lowest limits is leased on its feeds;
* a node that no policy limits any more is released: its boards get their default limits, by an explicit message, once
  its nameplate fits in every budget above it that binds others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from busbar.kube.contracts.power import LeaseMessage, LeaseState
from busbar.operator.agent.split import BoardWant, wanted
from busbar.operator.power.lines import Line, opened
from busbar.operator.power.membership import Membership
from busbar.operator.power.phases import PEAKS_S, fitted
from busbar.operator.power.readings import HOST, Reading
from busbar.operator.power.work import PLAIN, NodeWork, WorkKind
from busbar.scheduler.power import (
    PRIOR_CURVES,
    ControlSettings,
    Decision,
    Domain,
    DomainTree,
    Memory,
    NodePower,
    NodeTelemetry,
    PhaseLoad,
    begin,
    control,
)

TERM = 1
"""Of every leader: the lines number messages anew, so the controller's own terms need not."""
LEAST_W = 1e-3
"""A budget that is used up; the controller wants numbers above zero."""
FORGET_S = 60.0
"""What a board has drawn is wanted again for so long: a training job returns from a checkpoint within seconds."""


@dataclass(frozen=True, slots=True)
class Gone:
    """A node that was leased and hangs on no feed any more."""

    feeds: tuple[str, ...]
    watts: float
    until_s: float


@dataclass(frozen=True)
class State:
    """What is kept between rounds; a new leader begins with an empty one."""

    memory: Memory
    lines: Mapping[str, Line] = field(default_factory=dict)
    wants: Mapping[str, Mapping[str, BoardWant]] = field(default_factory=dict)
    """By node and board."""
    draws: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """By node whose domain lets bursts pass: means of a board since the report before, of the last minute."""
    counted: Mapping[str, tuple[tuple[str, ...], float]] = field(default_factory=dict)
    """Node to its feeds and what it counted with in the last round."""
    gone: Mapping[str, Gone] = field(default_factory=dict)
    homes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Node to the domains that it was in when its domain was last without fault."""


def new_leader(now_s: float) -> State:
    return State(begin(now_s, TERM))


@dataclass(frozen=True, slots=True)
class FeedLeases:
    """What the round says of one feed that binds leases."""

    leased_w: float
    floor_above_budget: bool = False
    unknown: tuple[str, ...] = ()
    """Nodes that have never reported, and of which nobody knows what they draw."""
    forecast_w: float = 0.0
    """What its nodes are expected to draw at most: boards as much as they wanted in the last minute, or as their limits
    leave them; nodes that nothing limits, their nameplates."""


@dataclass(frozen=True)
class Round:
    """A round's outcome."""

    state: State
    messages: tuple[LeaseMessage, ...] = ()
    feeds: Mapping[str, FeedLeases] = field(default_factory=dict)
    """Of the domains with a leased node on or below them."""
    why: Mapping[str, str] = field(default_factory=dict)
    """Why each limited node has its lease, in words."""


def take_round(
    state: State,
    found: Membership,
    readings: Mapping[str, Reading],
    now_s: float,
    settings: ControlSettings,
    works: Mapping[str, NodeWork] = MappingProxyType({}),
) -> Round:
    """One round over all domains.

    Args:
        works: by node, what its boards are used for; where it is not said, nothing is known.
    """
    state = _heard(state, found, readings, works, now_s, settings)
    placed = _Placed.of(found, readings, state)
    state = _forgetting(state, {name for name in state.counted if name not in placed.leaf})
    homes = {
        name: _up(placed.leaf[name], found) if name in placed.leaf else state.homes.get(name, ())
        for name in found.feeds
    }
    state = replace(state, homes=homes)
    limiting = {
        feed for node, leaf in placed.leaf.items() if found.is_limited(node) for feed in _up(leaf, found)
    }
    if not limiting:
        after = replace(state, counted={})
        return _released(after, found, readings, None, limiting, now_s, settings)
    tree = placed.tree(found)
    nodes = {
        name: node_power(
            readings[name], found.host_w[leaf], state.lines[name].is_full, works.get(name, PLAIN)
        )
        for name, leaf in placed.leaf.items()
    }
    telemetry = {
        name: _telemetry(
            readings[name],
            nodes[name],
            state.lines[name],
            state.wants[name],
            state.draws.get(name, ()),
            works.get(name, PLAIN),
        )
        for name in placed.leaf
    }
    decision = control(tree, nodes, telemetry, PRIOR_CURVES, now_s, state.memory, settings)
    lines, messages = _sent(state.lines, decision, readings, nodes, works, settings)
    counted = {
        report.node: (_up(report.domain, found), report.counted_w)
        for report in decision.nodes
        if found.is_limited(report.node)
    }
    after = replace(state, memory=decision.memory, lines=lines, counted=counted)
    ended = _released(after, found, readings, decision, limiting, now_s, settings)
    return replace(
        ended,
        messages=(*messages, *ended.messages),
        feeds=_feeds(decision, placed, limiting, found, _expected(nodes, telemetry)),
        why={report.node: report.sentence for report in decision.nodes if found.is_limited(report.node)},
    )


def _sent(
    before: Mapping[str, Line],
    decision: Decision,
    readings: Mapping[str, Reading],
    nodes: Mapping[str, NodePower],
    works: Mapping[str, NodeWork],
    settings: ControlSettings,
) -> tuple[dict[str, Line], list[LeaseMessage]]:
    """The leases as messages, and the lines with them under way."""
    lines = dict(before)
    messages = []
    for lease in decision.leases:
        lines[lease.node] = line = lines[lease.node].sent(lease.sequence)
        reading, parts = readings[lease.node], works.get(lease.node, PLAIN).parts
        messages.append(
            LeaseMessage(
                node=lease.node,
                epoch=reading.epoch,
                sequence=line.last,
                watts=lease.watts,
                host_watts=nodes[lease.node].host_w - _refused_w(reading),
                clock_s=reading.clock_s,
                ttl_s=settings.ttl_s,
                burst_j=lease.burst_s * lease.watts,
                board_part=parts.rest,
                board_parts=dict(parts.named),
            )
        )
    return lines, messages


def node_power(
    reading: Reading, host_w: float | None, unreachable: bool = False, work: NodeWork = PLAIN
) -> NodePower:
    """What the controller knows of the node; boards that refuse limits count with the host.

    Args:
        host_w: as the domain says; None: as the node's meters say.
        unreachable: nothing can be told to it.
    """
    obeying = [board for board in reading.boards.values() if not board.refuses]
    if host_w is None:
        host_w = sum(meter.nameplate_w for name, meter in reading.meters.items() if name == HOST)
    count = len(obeying)
    return NodePower(
        name=reading.node,
        host_w=host_w + _refused_w(reading),
        boards=count,
        board_min_w=sum(board.floor_w for board in obeying) / count if count else 0.0,
        board_max_w=sum(board.nameplate_w for board in obeying) / count if count else 0.0,
        weight=work.weight,
        controllable=reading.limits is not None and count > 0 and not unreachable,
        first_token=work.first_token,
    )


def _refused_w(reading: Reading) -> float:
    return sum(board.nameplate_w for board in reading.boards.values() if board.refuses)


def _most_w(reading: Reading | None, feed: str, found: Membership) -> float | None:
    """What a node of the feed draws at most if nobody limits it; None: nobody knows."""
    return (
        found.unreported_w[feed] if reading is None else node_power(reading, found.host_w[feed]).nameplate_w
    )


def _up(feed: str, found: Membership) -> tuple[str, ...]:
    return feed, *found.above[feed]


@dataclass(frozen=True)
class _Placed:
    """Which node the controller counts in which domain, and what it must leave free for the others."""

    leaf: Mapping[str, str]
    reserved_w: Mapping[str, float]
    unknown: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, found: Membership, readings: Mapping[str, Reading], state: State) -> _Placed:
        sound = found.domains.keys() - found.faults.keys()
        leaf: dict[str, str] = {}
        reserved: dict[str, float] = {}
        unknown: dict[str, list[str]] = {}
        for node, feeds in found.feeds.items():
            reading = readings.get(node)
            if reading is not None and len(feeds) == 1 and feeds[0] in sound:
                leaf[node] = feeds[0]
                continue
            most = [_most_w(reading, feed, found) for feed in feeds]
            over = {name for feed in feeds for name in _up(feed, found)}
            for name in over.union(state.homes.get(node, ())) & sound:
                if None in most:
                    unknown.setdefault(name, []).append(node)
                else:
                    reserved[name] = reserved.get(name, 0.0) + max(watts or 0.0 for watts in most)
        for left in state.gone.values():
            for name in sound.intersection(left.feeds):
                reserved[name] = reserved.get(name, 0.0) + left.watts
        return cls(leaf, reserved, {name: tuple(sorted(nodes)) for name, nodes in unknown.items()})

    def tree(self, found: Membership) -> DomainTree:
        """The sound domains with their nodes, and budgets less what is reserved."""
        nodes: dict[str, list[str]] = {}
        for node, leaf in self.leaf.items():
            nodes.setdefault(leaf, []).append(node)
        made = {
            name: replace(domain, nodes=tuple(nodes.get(name, ())), budget_w=self._budget_w(domain))
            for name, domain in found.sound.items()
        }
        return DomainTree(made, tuple(sorted(made, key=lambda name: (-len(found.above[name]), name))))

    def _budget_w(self, domain: Domain) -> float:
        if domain.name in self.unknown:
            return LEAST_W
        part = 1 - domain.margin_percent / 100
        return max(domain.budget_w - self.reserved_w.get(domain.name, 0.0) / part, LEAST_W)


def _heard(
    state: State,
    found: Membership,
    readings: Mapping[str, Reading],
    works: Mapping[str, NodeWork],
    now_s: float,
    settings: ControlSettings,
) -> State:
    """The state after the readings: lines, wants, and nodes that have left their feeds."""
    lines, wants, uncertain = {}, {}, set()
    for name, reading in readings.items():
        line = state.lines.get(name)
        rival = False
        if line is None:
            lines[name] = opened(reading)
        else:
            lines[name], rival = line.heard(reading)
        if rival or (reading.limits is not None and reading.limits.state is LeaseState.RELEASED):
            uncertain.add(name)
        wants[name] = _wants(state.wants.get(name, {}), reading, now_s)
    ends_s = now_s + (settings.ttl_s or 0.0) + settings.drift_s
    gone = {
        name: left for name, left in state.gone.items() if left.until_s > now_s and name not in found.feeds
    }
    for name, (feeds, watts) in state.counted.items():
        if name not in found.feeds:
            gone[name] = Gone(feeds, watts, ends_s)
    memory = _without(state.memory, uncertain)
    return replace(
        state, memory=memory, lines=lines, wants=wants, draws=_draws(state, found, readings, works), gone=gone
    )


def _draws(
    state: State, found: Membership, readings: Mapping[str, Reading], works: Mapping[str, NodeWork]
) -> dict[str, tuple[float, ...]]:
    """What is needed to see peaks, with what has been heard since the last round."""
    draws = {}
    for name, reading in readings.items():
        obeying = [board for board in reading.boards.values() if not board.refuses]
        kind = works.get(name, PLAIN).kind
        wanted_here = found.lets_bursts_pass(name) or (kind is WorkKind.SERVING and found.is_limited(name))
        if not obeying or not wanted_here:
            continue
        before = state.draws.get(name, ())
        known = state.memory.nodes.get(name)
        if known is not None and before and reading.clock_s <= known.clock_s:
            draws[name] = before  # the same report again
            continue
        mean_w = math.fsum(board.watts for board in obeying) / len(obeying)
        draws[name] = (*before[1 - PEAKS_S :], mean_w)
    return draws


def _without(memory: Memory, nodes: set[str]) -> Memory:
    """These nodes count with their nameplates until they confirm a message."""
    if nodes.isdisjoint(memory.nodes):
        return memory
    return replace(memory, nodes={n: known for n, known in memory.nodes.items() if n not in nodes})


def _forgetting(state: State, nodes: set[str]) -> State:
    """As `_without`, and what was sent to these nodes until now confirms nothing."""
    lines = {name: line.forgetting() if name in nodes else line for name, line in state.lines.items()}
    return replace(state, memory=_without(state.memory, nodes), lines=lines)


def _wants(last: Mapping[str, BoardWant], reading: Reading, now_s: float) -> dict[str, BoardWant]:
    return {
        uuid: wanted(
            last.get(uuid),
            board.watts,
            board.nameplate_w if board.limit_w is None else board.limit_w,
            board.nameplate_w,
            now_s,
            FORGET_S,
        )
        for uuid, board in reading.boards.items()
        if not board.refuses
    }


def _telemetry(
    reading: Reading,
    node: NodePower,
    line: Line,
    wants: Mapping[str, BoardWant],
    draws: Sequence[float],
    work: NodeWork,
) -> NodeTelemetry:
    """The reading in the controller's words. A board under a cap wants no more than that, and still counts with its
    nameplate wherever nothing is known to hold it."""
    obeying = {uuid: board for uuid, board in reading.boards.items() if not board.refuses}
    limits_w = [board.nameplate_w if board.limit_w is None else board.limit_w for board in obeying.values()]
    limits = reading.limits
    limit_w = node.host_w + math.fsum(limits_w)
    if limits is not None and limits.conflicts:
        limit_w = node.nameplate_w
    elif limits is not None and limits.free and limits.lease_watts is not None:
        limit_w = min(limit_w, limits.lease_watts)  # the bucket bounds the mean
    phases: tuple[PhaseLoad, ...] = ()
    spread_w = 0.0
    if obeying:
        most_w = {uuid: work.parts.of(uuid) * board.nameplate_w for uuid, board in obeying.items()}
        each_w = (max(min(wants[uuid].watts, most_w[uuid]), board.floor_w) for uuid, board in obeying.items())
        want_w = sum(each_w) / len(obeying)
        phases, spread_w = fitted(draws, want_w, node, work)
    return NodeTelemetry(
        node=reading.node,
        at_s=reading.at_s,
        epoch=line.number_of(reading.epoch),
        clock_s=reading.clock_s,
        sequence=line.told(reading),
        limit_w=limit_w,
        drawn_w=reading.watts,
        spread_w=spread_w,
        phases=phases,
        bucket_j=limits.bucket_j if limits is not None else None,
    )


def _expected(nodes: Mapping[str, NodePower], telemetry: Mapping[str, NodeTelemetry]) -> dict[str, float]:
    """What each node is expected to draw at most."""
    found = {}
    for name, node in nodes.items():
        most_w = max((load.board_w for load in telemetry[name].phases), default=node.board_max_w)
        found[name] = min(node.nameplate_w, node.host_w + node.slope * most_w)
        if node.controllable:
            found[name] = min(found[name], max(telemetry[name].limit_w, node.floor_w))
    return found


def _feeds(
    decision: Decision,
    placed: _Placed,
    limiting: set[str],
    found: Membership,
    expected_w: Mapping[str, float],
) -> dict[str, FeedLeases]:
    on: dict[str, float] = dict.fromkeys(limiting, 0.0)
    for node, leaf in placed.leaf.items():
        for name in limiting.intersection(_up(leaf, found)):
            on[name] += expected_w[node]
    reports = {report.domain: report for report in decision.domains}
    return {
        name: FeedLeases(
            leased_w=reports[name].counted_w + placed.reserved_w.get(name, 0.0),
            forecast_w=on[name] + placed.reserved_w.get(name, 0.0),
            floor_above_budget=name not in placed.unknown and reports[name].reason is not None,
            unknown=placed.unknown.get(name, ()),
        )
        for name in sorted(limiting & reports.keys())
    }


def _released(
    state: State,
    found: Membership,
    readings: Mapping[str, Reading],
    decision: Decision | None,
    limiting: set[str],
    now_s: float,
    settings: ControlSettings,
) -> Round:
    """Messages for nodes that nothing limits any more."""
    over = (
        {r.domain for r in decision.domains if r.domain in limiting and r.counted_w > r.usable_w * (1 + 1e-9)}
        if decision is not None
        else set()
    )
    messages, lines = [], dict(state.lines)
    for name, reading in readings.items():
        limits, line = reading.limits, lines[name]
        if limits is None or limits.state is LeaseState.RELEASED or found.is_limited(name) or line.is_full:
            continue
        feeds = {above for feed in found.feeds.get(name, ()) for above in _up(feed, found)}
        if feeds & over or now_s - reading.at_s > settings.stale_s:
            continue
        lines[name] = line = line.sent(0)
        messages.append(LeaseMessage(node=name, epoch=reading.epoch, sequence=line.last))
    released = {message.node for message in messages}
    return Round(_forgetting(replace(state, lines=lines), released), tuple(messages))
