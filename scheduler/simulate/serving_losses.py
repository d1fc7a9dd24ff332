"""What becomes of simulated replicas that fail (`serving_failures.py` says which): as in the product, by its own code and times.

- A process that ends breaks its connections: its requests go on elsewhere at once, and its container starts again where it is.
- A replica that hangs, or whose node is away, is silent. What its requests have heard is counted as the gateway counts it
  (`autoscale.contacts`): they go on elsewhere after `NOTICED_S`. The operator asks the replica's port, and decides by both
  (`autoscale.reach`) whether it is lost: then another one starts beside it. Else one starts when Kubernetes says that its node does
  not answer.
- What hangs is started again by its liveness probe; a readiness probe takes it out of the routes before. Both come with the
  kubelet, so neither does anything on a node that is away.
- It counts again when its port has answered for long enough. It leaves when it has been lost for `NODE_LOST_S` and enough others
  serve, or its node has been silent for so long; until then both are paid.

Requests of a lost replica compute the prompt and the tokens so far anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..autoscale.contacts import NOTICED_S, Waits
from ..autoscale.reach import (
    LIVENESS,
    POLL_PERIOD_S,
    POLL_TIMEOUT_S,
    READINESS,
    Evidence,
    PortSeen,
    Reach,
    Seen,
    heard,
    is_deaf,
    may_answer_again,
    starts,
    with_port,
)
from .serving_cluster import Cluster
from .serving_member import Member, Told
from .serving_replica import Request


@dataclass(slots=True)
class Losses:
    """Of one service. `advance` is called every second, after the replicas' own steps."""

    cluster: Cluster
    reach: Reach = field(default_factory=Reach)

    def advance(self, now_s: float) -> None:
        """What has failed stops, what is noticed is resumed, beside what does not answer others start, and it is given up."""
        cluster = self.cluster
        away = cluster.places.failed(now_s) if cluster.places is not None else ()
        before = {member for member in cluster.members if member.replaced}
        gone = {member for member in cluster.members if self._step(member, member.place in away, now_s)}
        for column, place in [row for row in cluster.dozing if row[1] in away]:
            cluster.dozing.remove((column, place))
            self._give_back(place, now_s)
        if any(member.failed_s is not None or member.replaced for member in cluster.members):
            self._look(now_s)
        differs = before != {member for member in cluster.members if member.replaced}
        for member in gone:
            self._give_back(member.place, now_s)
        if gone:
            cluster.members = [m for m in cluster.members if m not in gone]
        if differs:  # after those that are given up have left: their places are free
            cluster.resize(cluster.wanted, now_s)

    def close(self, now_s: float) -> Told:
        """The load has ended: the requests of all lost replicas go on elsewhere, noticed or not."""
        cluster = self.cluster
        lost = [member for member in cluster.members if member.failed_s is not None]
        for member in lost:
            member.failed_s = -math.inf
        for member in lost:
            self._again(member.replica.give_up(), now_s)
        cluster.told.node_failures = cluster.places.node_failures if cluster.places is not None else 0
        return cluster.told

    # -- what fails ----------------------------------------------------------------------------------

    def _step(self, member: Member, away: bool, now_s: float) -> bool:
        """One replica until now; whether it is gone."""
        cluster, told = self.cluster, self.cluster.told
        counted = now_s > cluster.settings.warm_up_s
        if away and member.away_s is None:
            told.lost_replicas += counted
            member.away_s = now_s
            self._falls_silent(member, NOTICED_S, now_s)
        elif not away and (member.away_s is not None or now_s >= member.ends_s):
            told.replica_failures += counted and member.away_s is None
            self._starts_again(member, now_s)
        elif member.failed_s is None and now_s >= member.hangs_s:
            told.replica_hangs += counted
            self._falls_silent(member, READINESS.failed_s, now_s)
        if member.failed_s is None:
            return False
        since_s = now_s - member.failed_s
        if member.away_s is None and since_s >= LIVENESS.failed_s:
            self._starts_again(member, now_s)
            return False
        self._notice(member, since_s, now_s)
        return member.away_s is not None and self._is_given_up(member, now_s - member.away_s, now_s)

    def _falls_silent(self, member: Member, open_s: float, now_s: float) -> None:
        """It answers nobody from now on, and requests are sent there for `open_s` more."""
        if member.failed_s is None:
            member.failed_s, member.open_s = now_s, open_s
            member.replica.stopped = True
            member.unanswered_since = [now_s] * member.replica.in_flight

    def _notice(self, member: Member, since_s: float, now_s: float) -> None:
        """The gateway, of a replica that has been silent for so long."""
        if since_s >= NOTICED_S and member.replica.in_flight:
            for _ in member.unanswered_since:
                member.contact.failed(now_s)
            member.unanswered_since.clear()
            self._again(member.replica.give_up(), now_s)
        elif since_s - 1 < member.open_s <= since_s:
            self.cluster.reopen(now_s)

    def _is_given_up(self, member: Member, since_s: float, now_s: float) -> bool:
        """Whether a replica leaves whose node has been away for so long."""
        settings = self.cluster.settings
        if since_s >= settings.failures.unready_s and not member.on_silent_node:
            wanted = member.draining_s is None and member.lost_s is None
            self.cluster.told.by_node += wanted and now_s > settings.warm_up_s
            member.on_silent_node = True
        return since_s >= settings.failures.lost_s or (member.draining_s is not None and since_s >= NOTICED_S)

    def _starts_again(self, member: Member, now_s: float) -> None:
        """Its process has failed or is ended, or its node is back: its container starts again where it is."""
        given = member.replica.give_up()
        member.away_s, member.on_silent_node = None, False
        member.unanswered_since.clear()
        self.cluster.starts(member, now_s + self.cluster.settings.start_s)
        member.began_s = now_s
        self._again(given, now_s)

    def _again(self, requests: Iterable[Request], now_s: float) -> None:
        """Requests that lost their replica go to others."""
        cluster = self.cluster
        cluster.reopen(now_s)
        for request in requests:
            if cluster.counts_in(request):
                begun = request.generated > 0
                cluster.told.resumed += begun
                cluster.told.retried += not begun
            cluster.route(request, now_s)

    def _give_back(self, place: str, now_s: float) -> None:
        if self.cluster.places is not None:
            self.cluster.places.give_back(place, now_s)

    # -- what is seen of it --------------------------------------------------------------------------

    def _look(self, now_s: float) -> None:
        """What the operator decides by the gateway's word and the ports, and which of the lost replicas leave."""
        cluster = self.cluster
        ports = {member.name: _port(member, now_s) for member in cluster.members}
        others = bool(cluster.dozing) or (cluster.places is not None and cluster.places.others_answer())
        serving = {m.name: m for m in cluster.members if m.draining_s is None}
        said = {name: _said(member, now_s) for name, member in serving.items()}
        ready = {name: cluster.is_ready(member, now_s) for name, member in serving.items()}
        starting = {
            name for name, m in serving.items() if starts(ready[name], m.lost_s is not None, said[name])
        }
        deaf = is_deaf([seen for name, seen in ports.items() if name not in starting]) and not others
        seen = [
            Seen(
                name,
                with_port(said[name], ports[name], deaf, now_s),
                now_s - member.began_s,
                member.lost_s is not None,
                ready[name],
            )
            for name, member in serving.items()
        ]
        for name, lost in self.reach.look(seen, now_s).items():
            member = serving[name]
            counted = lost and not member.on_silent_node and now_s > cluster.settings.warm_up_s
            cluster.told.by_gateway += counted
            member.lost_s = now_s if lost else None
        serves = sum(_takes_requests(member, now_s) for member in serving.values())
        desired = sum(cluster.wanted.values())
        for member in serving.values():
            if member.lost_s is None or member.on_silent_node:  # what is there leaves with its node
                continue
            if not may_answer_again(now_s - member.lost_s, serves, desired):
                member.draining_s = now_s


def _takes_requests(member: Member, now_s: float) -> bool:
    return member.failed_s is None and not member.replaced and member.ready_s <= now_s


def _said(member: Member, now_s: float) -> Evidence:
    """What the operator has of one replica from the gateway."""
    if member.failed_s is None and member.ready_s <= now_s and member.replica.in_flight:
        member.contact.heard(now_s)
    waits = Waits.of(((None, since) for since in member.unanswered_since), now_s)
    said = member.contact.said(waits, now_s)
    return heard([] if said is None else [said])


def _port(member: Member, now_s: float) -> PortSeen:
    """What the operator knows of its port: an answer at once, silence after the time of a poll."""
    up = PortSeen(True, _poll_s(member.ready_s))
    if member.failed_s is not None:
        down = PortSeen(False, _poll_s(member.failed_s))
        return down if now_s >= down.since_s + POLL_TIMEOUT_S else up
    return up if now_s >= up.since_s else PortSeen(False, _poll_s(member.began_s))


def _poll_s(at_s: float) -> float:
    """The next time at which ports are asked."""
    return POLL_PERIOD_S * math.ceil(at_s / POLL_PERIOD_S)
