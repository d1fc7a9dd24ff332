"""The token bucket of a node: short peaks may pass above the lease, the mean may not.

The bucket holds joules, at most `burst_s` seconds of the lease. It fills with what the node draws below its lease and
empties with what it draws above. While it is empty the boards are limited to the lease. Over any time T the node
draws at most lease · T + depth, plus what passes in the one interval until the limit acts. So a domain is above its
leases by the depths of all its buckets at most; `shared` divides what its breaker rides through. All functions work on
arrays, one element per node.
"""

from __future__ import annotations

import numpy as np

from .allocate import Floats


def bucket_after(
    level_j: Floats, lease_w: Floats, drawn_w: Floats, burst_s: Floats, elapsed_s: float
) -> Floats:
    """The level after an interval; below zero: a debt that must be saved before the next peak."""
    after: Floats = np.minimum(level_j + (lease_w - drawn_w) * elapsed_s, lease_w * burst_s)
    return after


def clamped(level_j: Floats, lease_w: Floats, burst_s: Floats, was: Floats) -> Floats:
    """1.0 where the boards must be limited to the lease: from empty until half full again."""
    half = 0.5 * lease_w * burst_s
    now: Floats = np.where(level_j <= 0, 1.0, np.where(level_j >= half, 0.0, was))
    return now


def shared(total_j: float, weights: Floats, most_j: Floats) -> Floats:
    """Joules for the buckets of nodes by weight; what is more than one can use goes to the others."""
    given = np.zeros_like(most_j)
    for _ in range(len(most_j)):
        takes = given < most_j
        left_j = total_j - float(given.sum())
        if left_j <= 1e-9 * total_j or not takes.any() or not weights[takes].any():
            break
        given = np.where(takes, np.minimum(given + left_j * weights / weights[takes].sum(), most_j), given)
    return given
