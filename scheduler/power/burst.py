"""The token bucket of a node: short peaks may pass above the lease, the mean may not.

The bucket holds joules, at most `burst_s` seconds of the lease. It fills with what the node draws below its lease and
empties with what it draws above. While it is empty the boards are limited to the lease. Over any time T the node
draws at most lease · T + depth, plus what passes in the one interval until the limit acts. All functions work on
numbers and on arrays alike, one element per node.
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
