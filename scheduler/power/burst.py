"""The token bucket of a node: short peaks may pass above the lease, the mean may not.

The bucket holds joules, at most `burst_s` seconds of the lease. It fills with what the node draws below its lease and
empties with what it draws above. The emptier it is, the nearer the limits of the boards are to the lease, and at it when
it is empty. Over any time T the node draws at most lease · T + depth, plus what passes in the one interval until the limit
acts. So a domain is above its leases by the depths of all its buckets at most; `shared` divides what its breaker rides
through. All functions work on arrays, one element per node.
"""

from __future__ import annotations

import numpy as np

from .allocate import Floats

STEPS = 8
"""Of the limits between that of the lease and none."""
CLEARLY = 0.1
"""Of its depth: a bucket must hold so much more for limits to rise than for them to stay."""

_BAND = np.array([[0.0], [CLEARLY]])


def bucket_after(
    level_j: Floats, lease_w: Floats, drawn_w: Floats, burst_s: Floats, elapsed_s: float
) -> Floats:
    """The level after an interval; below zero: a debt that must be saved before the next peak."""
    after: Floats = np.minimum(level_j + (lease_w - drawn_w) * elapsed_s, lease_w * burst_s)
    return after


def passing(level_j: Floats, lease_w: Floats, burst_s: Floats, was: Floats) -> Floats:
    """How far the boards' limits are from that of the lease (0) to none (1): the root of how full the bucket is.

    A full bucket lets the start of a peak pass whole, and one that empties slows it down more and more. The joules last
    longer so, because the last watts of a board save the least time. Where the work wants more than the lease in the
    mean, the limits settle where they let that mean pass, and no watts go into moments at full draw.

    Args:
        was: the last answer. Limits move in steps, and rise only when the bucket is clearly above that of the step.
    """
    depth_j = lease_w * burst_s
    full = np.where(depth_j > 0, level_j / np.maximum(depth_j, 1e-9), 0.0)
    part_of_depth = np.minimum(np.maximum(full - _BAND, 0.0), 1.0)
    most, least = np.ceil(STEPS * np.sqrt(part_of_depth)) / STEPS
    part: Floats = np.minimum(np.maximum(was, least), most)
    return part


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
