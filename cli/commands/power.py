"""`busbar power`, `busbar power nodes`, `busbar power watch` and `busbar power explain`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from busbar.cli.commands.describe import power_words
from busbar.cli.completions import objects
from busbar.cli.options import FiniteRange
from busbar.cli.output import columns, duration, emit, output_option, wire
from busbar.cli.session import Session, connected

if TYPE_CHECKING:
    from busbar.kube.contracts.power_view import FeedPower, NodePower

BAR = 20
"""Characters of a bar: the whole budget."""
MOVED = 0.02
"""Of the lease before: leases that change by less are not told."""
BY_POD = "It is known which pods hold which of its boards."
NOT_BY_POD = (
    "Which pods hold which of its boards is not known: energy is charged by numbers of boards, and only pods that have "
    "the node to themselves start under power caps."
)


@click.group(
    invoke_without_command=True,
    epilog="""\b
Examples:
  busbar power                the tree of feeds: draw against budget
  busbar power -o json
  busbar power nodes
  busbar power watch
  busbar power explain NODE
""",
)
@output_option
@connected
@click.pass_context
def power(context: click.Context, session: Session, output: str) -> None:
    """Show what feeds draw, as a tree: # is drawn, + assumed of silent nodes, the bar is the budget.

    Members see the feeds of the nodes that they may use.
    """
    if context.invoked_subcommand is not None:
        return
    found = session.client.power_domains()
    emit(output, {"items": wire(found)}, lambda: _tree(found), [feed.name for feed in found])


@power.command(epilog="\b\nExamples:\n  busbar power nodes\n  busbar power nodes -o json")
@output_option
@connected
def nodes(session: Session, output: str) -> None:
    """Show what nodes draw, and where the numbers come from; simulated ones are invented."""
    found = session.client.power_nodes()
    emit(output, {"items": wire(found)}, lambda: _nodes(found), [node.name for node in found])


@power.command(epilog="\b\nExamples:\n  busbar power watch\n  busbar power watch --every 10 --times 6")
@click.option(
    "--every",
    type=FiniteRange(1, 3600),
    default=2.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--times", type=click.IntRange(1), help="Stop after so many looks. Default: never.")
@connected
def watch(session: Session, every: float, times: int | None) -> None:
    """Show the tree of feeds again and again, and whose leases and limits have changed in between."""
    before: Mapping[str, NodePower] | None = None
    looks = 0
    while True:
        feeds = session.client.power_domains()
        found = {node.name: node for node in session.client.power_nodes()}
        click.clear()  # does nothing where there is no terminal
        click.echo(_tree(feeds))
        for line in () if before is None else moves(before, found):
            click.echo(line)
        before, looks = found, looks + 1
        if looks == times:
            return
        time.sleep(every)


def moves(before: Mapping[str, NodePower], now: Mapping[str, NodePower]) -> Iterator[str]:
    """A line for each node whose lease, limits or reports have changed."""
    for name, node in now.items():
        old = before.get(name)
        if old is None:
            yield f"{name}: new"
            continue
        if old.silent != node.silent:
            yield f"{name}: {'silent' if node.silent else 'reports again'}"
        if limits(old) != limits(node):
            yield f"{name}: {limits(old)} -> {limits(node)}"
        had, has = old.lease_watts, node.lease_watts
        if had is not None and has is not None and abs(has - had) > MOVED * had:
            yield f"{name}: lease {watts(had)} -> {watts(has)}"
    yield from (f"{name}: gone" for name in before if name not in now)


@power.command(
    epilog="""\b
Examples:
  busbar power explain gpu-node-3
  busbar power explain my-job
  busbar power explain job/my-job -n research -o json
"""
)
@click.argument("name", shell_complete=objects)
@output_option
@connected
def explain(session: Session, name: str, output: str) -> None:
    """Say what limits a node, or the nodes of a job, and which feeds are above them.

    NAME is a node, or a job that you may see: NAME or job/NAME. A job that waits for watts says for which.
    """
    known = {node.name: node for node in session.client.power_nodes()}
    lines: list[str] = []
    if name in known:
        places = [name]
    else:
        from busbar.cli.results import TRAINING_JOB

        status = session.find(name, TRAINING_JOB).document.get("status") or {}
        places = list(dict.fromkeys((status.get("admission") or {}).get("nodes") or ()))
        lines.append(_job(name.rpartition("/")[2], status, places, known))
    feeds = {feed.name: feed for feed in session.client.power_domains()}
    nodes = [known[place] for place in places if place in known]
    above = [feeds[feed] for feed in dict.fromkeys(f for node in nodes for f in node.feeds) if feed in feeds]
    lines += [explained(node, feeds) for node in nodes]
    document = {"nodes": wire(nodes), "domains": wire(above)}
    text = "\n".join([*lines, *([_tree(above)] if above else [])])
    emit(output, document, lambda: text, [node.name for node in nodes])


def _job(name: str, status: Mapping[str, Any], places: Sequence[str], known: Mapping[str, NodePower]) -> str:
    """Where the job is, or why it is not."""
    if not places:
        return f"{name} has no nodes: {status.get('message') or 'nobody has looked at it yet'}"
    lost = [place for place in places if place not in known]
    parts = [f"{name} has its place on {', '.join(places)}."]
    for what, words in zip(("Its power cap", "Power limits"), power_words(status), strict=True):
        if words:
            parts.append(f"{what}: {words}.")
    if lost:
        parts.append(f"Nothing is known of the watts of {', '.join(lost)}.")
    return " ".join(parts)


def explained(node: NodePower, feeds: Mapping[str, FeedPower]) -> str:
    """What a node draws, what limits it and why, in sentences."""
    from busbar.kube.contracts.power import LeaseState

    parts = [
        f"{node.name} hangs on {node.feeds[0]}." if node.feeds else f"{node.name} hangs on no power domain."
    ]
    if node.watts is None:
        return f"{parts[0]} It has never reported what it draws."
    parts.append(
        f"It draws {watts(node.watts)}, at most {watts(node.nameplate_watts)}, and {watts(node.floor_watts)} with its "
        f"boards at their lowest limits."
    )
    if node.silent:
        parts.append(f"It is silent: these are the numbers of {duration(node.age_seconds or 0.0)} ago.")
    policy = feeds[node.feeds[0]].policy if node.feeds and node.feeds[0] in feeds else "Observe"
    if node.limits is None:
        parts.append("Its agent may set no limits, so feeds count it with what it can draw at most.")
    elif node.limits is LeaseState.LEASED:
        parts.append(f"A lease of {watts(node.lease_watts)} limits it, by the policy {policy} of its domain.")
    elif node.limits is LeaseState.STANDING:
        parts.append("It has no lease in force, so its boards are at their lowest limits.")
    else:
        parts.append("Its boards are released: they have their default limits.")
    parts += [f"Why: {node.why}."] if node.why else []
    if node.refusing_boards and node.limits is not None:
        parts.append(f"{node.refusing_boards} of its {node.boards} boards take no limit.")
    if node.conflicting_boards:
        parts.append(
            f"Something else writes limits of {node.conflicting_boards} of its {node.boards} boards."
        )
    short = [name for name in node.feeds if name in feeds and feeds[name].reason == "FloorAboveBudget"]
    if short:
        parts.append(f"Even the lowest limits are above the budget of {', '.join(short)}.")
    if node.boards:
        parts.append(BY_POD if node.boards_by_pod else NOT_BY_POD)
    return " ".join(parts)


def _tree(found: Sequence[FeedPower]) -> str:
    if not found:
        return "There is no power domain with a node that you may use."
    heads = [
        "domain",
        "use",
        "draw",
        "leased",
        "budget",
        "headroom",
        "nodes",
        "capped",
        "silent",
        "simulated",
        "work/kWh",
        "meter",
    ]
    heads.append("reason")
    return columns(heads, [_row(feed, depth) for feed, depth in _ordered(found)])


def _row(feed: FeedPower, depth: int) -> list[object]:
    return [
        "  " * depth + feed.name,
        bar(feed.draw_watts, feed.assumed_watts, feed.budget_watts),
        watts(feed.draw_watts),
        "-" if feed.leased_watts is None else watts(feed.leased_watts),
        watts(feed.budget_watts),
        watts(feed.headroom_watts),
        feed.nodes,
        feed.capped_nodes,
        feed.silent_nodes,
        feed.simulated_nodes,
        "-" if feed.work_per_kilowatt_hour is None else f"{feed.work_per_kilowatt_hour:.3g}",
        metered(feed),
        feed.reason,
    ]


def metered(feed: FeedPower) -> str:
    """The ledger beside the feed's own meter: `-3.1%` of it in the last whole hour; `failed`; `-` without a meter."""
    if feed.meter_problem:
        return "failed"
    if feed.meter_error is not None:
        return f"{feed.meter_error:+.1%}"
    return "?" if feed.metered else "-"


def _ordered(found: Sequence[FeedPower]) -> Iterator[tuple[FeedPower, int]]:
    """Each feed below its parent; those whose chain of parents leads nowhere come last, at the root."""
    below: dict[str, list[FeedPower]] = {}
    names = {feed.name for feed in found}
    for feed in found:
        below.setdefault(feed.parent if feed.parent in names else "", []).append(feed)
    seen: set[str] = set()

    def walk(parent: str, depth: int) -> Iterator[tuple[FeedPower, int]]:
        for feed in below.get(parent, ()):
            seen.add(feed.name)
            yield feed, depth
            yield from walk(feed.name, depth + 1)

    yield from walk("", 0)
    yield from ((feed, 0) for feed in found if feed.name not in seen)


def bar(draw_watts: float | None, assumed_watts: float, budget_watts: float) -> str:
    """`[######+++...........]  62%`; beyond the budget it ends in `>`. Unknown: empty."""
    if draw_watts is None and not assumed_watts:
        return f"[{'.' * BAR}]    ?"
    drawn = draw_watts or 0.0
    part, whole = (round(BAR * min(1.0, w / budget_watts)) for w in (drawn, drawn + assumed_watts))
    share = (drawn + assumed_watts) / budget_watts
    end = ">" if share > 1 else "]"
    return f"[{'#' * part}{'+' * (whole - part)}{'.' * (BAR - whole)}{end} {share:4.0%}"


def watts(value: float | None) -> str:
    """`850 W`, `12.3 kW`, `1.25 MW`; `?` where it is not known."""
    if value is None:
        return "?"
    for unit, size, digits in (("MW", 1e6, 2), ("kW", 1e3, 1)):
        if abs(value) >= size:
            return f"{value / size:.{digits}f} {unit}"
    return f"{value:.0f} W"


def limits(node: NodePower) -> str:
    """`leased, capped`, with the boards that take no limit or have another's; `not ours`: the agent may set none."""
    told = ["not ours" if node.limits is None else node.limits.value.lower()]
    told += ["capped"] if node.capped else []
    told += [f"{node.refusing_boards} refuse"] if node.refusing_boards and node.limits is not None else []
    told += [f"{node.conflicting_boards} in conflict"] if node.conflicting_boards else []
    return ", ".join(told)


def _nodes(found: Sequence[NodePower]) -> str:
    heads = [
        "node",
        "domain",
        "draw",
        "lease",
        "limits",
        "nameplate",
        "boards",
        "by pod",
        "boards from",
        "host from",
    ]
    heads.append("last report")
    rows = [
        (
            node.name,
            node.feeds[0] if node.feeds else "",
            watts(node.watts),
            "-" if node.lease_watts is None else watts(node.lease_watts),
            limits(node),
            watts(node.nameplate_watts),
            node.boards,
            "yes" if node.boards_by_pod else "no",
            node.boards_from.value,
            node.host_from.value,
            "never"
            if node.age_seconds is None
            else duration(node.age_seconds) + (" silent" if node.silent else ""),
        )
        for node in found
    ]
    return columns(heads, rows)
