"""The bucket of a lease on the node: short peaks pass above the lease, the mean does not. Pure.

The rule is that of `busbar.scheduler.power.burst`. Only the boards are counted: what the lease leaves to the host counts as
drawn. A bucket begins empty, and is empty again after a lease without one, so nothing passes that was not saved before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from busbar.kube.contracts.power import LeaseState
from busbar.scheduler.power.burst import bucket_after, passing

from .leases import Held


@dataclass(frozen=True, slots=True)
class Bucket:
    """What the node may still draw above its lease."""

    joules: float = 0.0
    passes: float = 0.0
    """How far the boards' limits are from the lease's (0) to their own (1)."""

    def after(self, held: Held, boards_w: float, passed_s: float) -> Bucket:
        """After a time in which the boards drew so much."""
        if held.state is not LeaseState.LEASED or held.burst_j <= 0 or passed_s <= 0:
            return self.within(held)
        lease_w, depth_s = np.array([held.boards_w]), np.array([held.burst_j / max(held.boards_w, 1e-9)])
        level = bucket_after(np.array([self.joules]), lease_w, np.array([boards_w]), depth_s, passed_s)
        passes = passing(level, lease_w, depth_s, np.array([self.passes]))
        return Bucket(float(level[0]), float(passes[0]))

    def within(self, held: Held) -> Bucket:
        """Under another lease, which may have a smaller bucket or none."""
        if held.state is not LeaseState.LEASED or held.burst_j <= 0:
            return Bucket()
        return Bucket(min(self.joules, held.burst_j), self.passes)
