"""The token bucket: what a node can draw above its lease, and for how long."""

from __future__ import annotations

import numpy as np

from busbar.scheduler.power.burst import bucket_after, clamped, shared


def test_over_any_time_a_node_draws_its_lease_and_one_depth_more() -> None:
    lease, burst, step_s = np.array([4000.0]), np.array([0.1]), 0.1
    level, limited = lease * burst, np.zeros(1)
    drawn_j, above = 0.0, 0
    for _ in range(100):
        limited = clamped(level, lease, burst, limited)
        watts = np.where(limited > 0, lease, 5440.0)
        above += int(watts[0] > lease[0])
        drawn_j += float(watts[0]) * step_s
        level = bucket_after(level, lease, watts, burst, step_s)
    one_step_late_j = (5440.0 - 4000.0) * step_s
    assert drawn_j <= 4000 * 100 * step_s + 4000 * 0.1 + one_step_late_j
    assert above == 3


def test_the_bucket_is_full_again_after_a_pause() -> None:
    lease, burst = np.array([4000.0]), np.array([0.1])
    level = bucket_after(np.array([-50.0]), lease, np.array([3000.0]), burst, 1.0)
    assert level[0] == 400
    assert clamped(level, lease, burst, np.ones(1))[0] == 0


def test_the_joules_of_a_domain_are_shared_by_weight_and_none_is_left_while_one_can_use_it() -> None:
    weights = np.array([4.0, 4.0, 1.0, 1.0])
    assert shared(1000.0, weights, np.full(4, np.inf)).tolist() == [400, 400, 100, 100]
    assert shared(1000.0, weights, np.array([np.inf, 100, 100, np.inf])).tolist() == [640, 100, 100, 160]
    assert shared(1000.0, weights, np.full(4, 50.0)).tolist() == [50] * 4
    assert shared(1000.0, np.array([0.0, 1.0]), np.array([9.0, 9.0])).tolist() == [0, 9]
