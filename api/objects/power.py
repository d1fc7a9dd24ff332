"""What feeds and nodes draw, as far as a caller may see it.

Admins see everything. Everybody else sees the nodes of the pools that a tenant of theirs may use, and the totals of the
feeds on which these nodes hang: amounts, and no names of other nodes, tenants or jobs, nor what a meter's address says.
"""

from __future__ import annotations

from busbar.api.access.authorization import Authorizer
from busbar.api.access.identity import Caller
from busbar.api.errors import Invalid, NotFound
from busbar.api.kubernetes.client import KubeApi, translated
from busbar.api.objects.cluster import Cluster
from busbar.api.objects.events import Event, newest
from busbar.api.objects.operator_client import Operator
from busbar.kube.contracts.power_view import FeedPower, NodePower, PowerPicture, PowerSeries, Resolution
from busbar.kube.resources import EVENTS, POWER_DOMAINS

CLUSTER_EVENTS = "default"
"""The namespace of events about objects that are in none."""


class PowerViews:
    """Reads the operator's picture for callers."""

    def __init__(self, kube: KubeApi, cluster: Cluster, authorizer: Authorizer, operator: Operator) -> None:
        self._kube = kube
        self._cluster, self._authorizer, self._operator = cluster, authorizer, operator

    async def feeds(self, caller: Caller) -> tuple[FeedPower, ...]:
        """Power domains, by name."""
        return (await self._visible(caller)).feeds

    async def nodes(self, caller: Caller) -> tuple[NodePower, ...]:
        """Nodes that have reported or hang on a feed, by name."""
        return (await self._visible(caller)).nodes

    async def series(self, caller: Caller, feed: str, node: str, resolution: Resolution) -> PowerSeries:
        """The means of one feed or of one node.

        Raises:
            Invalid: not exactly one of the two is named.
            NotFound: there is none of this name that the caller may see.
        """
        if bool(feed) == bool(node):
            raise Invalid("name either a domain or a node")
        seen = await self._visible(caller)
        if feed not in {f.name for f in seen.feeds} and node not in {n.name for n in seen.nodes}:
            raise NotFound(
                f"there is no {'domain' if feed else 'node'} {feed or node!r}, or you may not see it"
            )
        return await self._operator.power_series(feed, node, resolution)

    async def events(self, caller: Caller) -> list[Event]:
        """What happened to power domains, newest first; nothing for who is no admin, because it names nodes and work."""
        if not await self._authorizer.is_admin(caller):
            return []
        with translated("events of power domains"):
            found, _ = await self._kube.list(
                EVENTS, CLUSTER_EVENTS, field_selector=f"involvedObject.kind={POWER_DOMAINS.kind}"
            )
        return newest(found)

    async def _visible(self, caller: Caller) -> PowerPicture:
        if await self._authorizer.is_admin(caller):
            return await self._operator.power()
        mine = {load.name for load in await self._cluster.nodes(caller)}
        if not mine:
            return PowerPicture()
        whole = await self._operator.power()
        nodes = tuple(node for node in whole.nodes if node.name in mine)
        feeds = {feed for node in nodes for feed in node.feeds}
        return PowerPicture(
            feeds=tuple(_for_member(feed, feeds) for feed in whole.feeds if feed.name in feeds), nodes=nodes
        )


def _for_member(feed: FeedPower, visible: set[str]) -> FeedPower:
    parent = feed.parent if feed.parent in visible else ""
    return feed.model_copy(update={"parent": parent, "meter_problem": ""})
