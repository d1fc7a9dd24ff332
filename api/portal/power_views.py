"""What the power page shows of feeds and nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from busbar.api.portal.formatting import number
from busbar.api.portal.pool_views import NodeView
from busbar.kube.contracts.power import Backend
from busbar.kube.contracts.power_view import FeedPower, NodePower


@dataclass(frozen=True)
class FeedView:
    """A feed with the nodes that hang directly on it."""

    name: str
    above: str
    """The feed above it; empty: none."""
    budget: str
    draw: str
    headroom: str
    leased: str
    """What its nodes may draw by their leases; empty: nothing is limited."""
    price: str
    """What a kilowatt-hour costs there, in work; empty: nothing, or nothing is known."""
    meter: str
    """The ledger beside the feed's own meter; empty: it has none, or there is nothing to compare."""
    percent: float | None
    """Of the budget that is drawn, and assumed of silent nodes; None: nothing is known."""
    problem: str
    told: str
    """How much of it is known, and of what kind."""
    nodes: list[NodeView] = field(default_factory=list)


def feed_views(feeds: Sequence[FeedPower], nodes: Sequence[NodePower]) -> list[FeedView]:
    """Each feed once, after the one above it."""
    return [_view(feed, nodes) for feed in _ordered(feeds)]


def _ordered(feeds: Sequence[FeedPower]) -> Iterator[FeedPower]:
    below: dict[str, list[FeedPower]] = {}
    names = {feed.name for feed in feeds}
    for feed in feeds:
        below.setdefault(feed.parent if feed.parent in names else "", []).append(feed)
    seen: set[str] = set()

    def walk(parent: str) -> Iterator[FeedPower]:
        for feed in below.get(parent, ()):
            seen.add(feed.name)
            yield feed
            yield from walk(feed.name)

    yield from walk("")
    yield from (feed for feed in feeds if feed.name not in seen)  # their parents form a cycle


def _view(feed: FeedPower, nodes: Sequence[NodePower]) -> FeedView:
    known = feed.draw_watts is not None or feed.assumed_watts > 0
    most = (feed.draw_watts or 0.0) + feed.assumed_watts
    return FeedView(
        name=feed.name,
        above=feed.parent,
        budget=kilowatts(feed.budget_watts),
        draw=kilowatts(feed.draw_watts) or "not measured",
        headroom=kilowatts(feed.headroom_watts),
        leased=kilowatts(feed.leased_watts),
        price=f"{feed.work_per_kilowatt_hour:.3g}" if feed.work_per_kilowatt_hour else "",
        meter=_meter(feed),
        percent=min(100.0, 100.0 * most / feed.budget_watts) if known else None,
        problem=_problem(feed),
        told=_told(feed),
        nodes=[node_view(node) for node in nodes if node.feeds[:1] == (feed.name,)],
    )


def _meter(feed: FeedPower) -> str:
    if feed.meter_error is None:
        return "its meter: no whole hour yet" if feed.metered and not feed.meter_problem else ""
    sign = "above" if feed.meter_error >= 0 else "below"
    return f"in the last whole hour the ledger is {abs(feed.meter_error):.1%} {sign} its meter"


def _problem(feed: FeedPower) -> str:
    if not feed.ready:
        return f"Not ready: {feed.reason}."
    if feed.draw_watts is not None and feed.draw_watts > feed.budget_watts:
        return "The draw is above the budget."
    return feed.meter_problem


def _told(feed: FeedPower) -> str:
    said = [f"{feed.nodes} nodes"]
    if feed.capped_nodes:
        said.append(f"{feed.capped_nodes} capped")
    if feed.silent_nodes:
        said.append(f"{feed.silent_nodes} silent ({kilowatts(feed.assumed_watts)} assumed)")
    if feed.simulated_nodes:
        said.append(f"{feed.simulated_nodes} simulated")
    return ", ".join(said)


def node_view(node: NodePower) -> NodeView:
    """One cell: its share of its nameplate from 0 to 10, and the same as text for screen readers."""
    share = (node.watts or 0.0) / node.nameplate_watts if node.nameplate_watts else 0.0
    amount = kilowatts(node.watts) or "?"
    state = f", silent for {node.age_seconds:.0f} s" if node.silent and node.age_seconds is not None else ""
    if node.watts is None:
        label = f"{node.name}: has never reported"
    else:
        kind = ", capped" if node.capped else ""
        kind += f" ({node.why})" if node.capped and node.why else ""
        if others := node.conflicting_boards:
            kind += f", {others} board{'' if others == 1 else 's'} with another's limit"
        kind += ", simulated" if node.boards_from.value == "simulated" else ""
        label = f"{node.name}: {amount} of {kilowatts(node.nameplate_watts)}{kind}{state}"
    return NodeView(
        name=node.name, heat=round(10 * min(1.0, share)), label=label, amount=amount, ready=not node.silent
    )


@dataclass(frozen=True)
class JobPower:
    """What a job draws now."""

    draw: str
    told: str


def job_power(ranks: Sequence[str], accelerators: int, nodes: Sequence[NodePower]) -> JobPower | None:
    """What the pods draw by the meters of their nodes, hosts included: of a node that they share, their part of its
    boards. None where nothing is measured.

    Args:
        ranks: the node of each pod.
        accelerators: of each pod.
    """
    measured = {
        node.name: node for node in nodes if node.watts is not None and node.boards and not node.silent
    }
    found = [measured[name] for name in ranks if name in measured]
    if not found or not accelerators:
        return None
    watts = sum((node.watts or 0.0) * min(1.0, accelerators / node.boards) for node in found)
    said = ["with its part of the hosts"]
    if len(found) < len(ranks):
        said.append(f"{len(found)} of {len(ranks)} pods are on nodes that report")
    capped = len({node.name for node in found if node.capped})
    if capped:
        said.append(f"boards limited on {capped} node{'' if capped == 1 else 's'}")
    if any(node.boards_from is Backend.SIMULATED for node in found):
        said.append("simulated")
    return JobPower(kilowatts(watts), ", ".join(said))


def kilowatts(watts: float | None) -> str:
    """`4.3 kW`; watts below one kilowatt; empty when there are none."""
    if watts is None:
        return ""
    return f"{number(watts / 1000, 1)} kW" if abs(watts) >= 1000 else f"{number(watts, 0)} W"
