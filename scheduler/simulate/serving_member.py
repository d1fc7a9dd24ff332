"""One replica of a simulated service and its life, and what failures and drains did to requests."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..autoscale.contacts import Contact
from ..autoscale.mix import Column
from .serving_replica import Replica


@dataclass(slots=True, eq=False)
class Member:
    """One replica and its life."""

    name: str
    column: Column
    ready_s: float
    replica: Replica
    woken: bool
    began_s: float
    """When its process began."""
    draining_s: float | None = None
    """Since when it takes no more requests."""
    moved_bytes: float = 0.0
    """Of its streams, sent to others."""
    place: str = ""
    """Its name at `Places`."""
    ends_s: float = math.inf
    """When its process fails by itself."""
    hangs_s: float = math.inf
    """When it hangs by itself."""
    failed_s: float | None = None
    """Since when it answers nobody."""
    open_s: float = 0.0
    """For so long after that, requests are still sent there."""
    away_s: float | None = None
    """Since when its node is away."""
    on_silent_node: bool = False
    """Kubernetes says that its node does not answer."""
    lost_s: float | None = None
    """When the operator noted that it answers nobody; None: it does not say so."""
    unanswered_since: list[float] = field(default_factory=list)
    """Since when each request there waits in vain."""
    contact: Contact = field(default_factory=Contact)
    """What the gateway has had from it."""

    @property
    def replaced(self) -> bool:
        """Whether another one is wanted in its place."""
        return self.on_silent_node or self.lost_s is not None


@dataclass(slots=True)
class Told:
    """What failures and drains did, to requests that count."""

    node_failures: int = 0
    replica_failures: int = 0
    """Processes that ended."""
    replica_hangs: int = 0
    lost_replicas: int = 0
    """By nodes."""
    by_gateway: int = 0
    """Replicas beside which others were wanted because they answered nobody, before Kubernetes said so of their nodes."""
    by_node: int = 0
    """The same because Kubernetes said so first."""
    resumed: int = 0
    """Streams that went on elsewhere with everything computed anew."""
    retried: int = 0
    """Requests without a token that went to another replica after a failure."""
    moved: int = 0
    """Streams that a drain moved with their keys and values."""

    @property
    def stopped(self) -> int:
        """Replicas that failed, for whatever reason."""
        return self.lost_replicas + self.replica_failures + self.replica_hangs

    def sentence(self) -> str:
        """What failed, and what became of the requests."""
        return (
            f"{self.node_failures} nodes and {self.replica_failures} replicas failed and {self.replica_hangs} hung, which"
            f" stopped {self.stopped} replicas. Others started beside {self.by_gateway} because the gateway missed answers"
            f" and beside {self.by_node} because Kubernetes missed their nodes; {self.resumed} streams were resumed and"
            f" {self.retried} requests retried elsewhere."
        )
