"""The token bucket: what a node can draw above its lease, and for how long."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from busbar.scheduler.power.burst import bucket_after, passing, shared


@given(
    st.lists(st.floats(0, 3000), min_size=1, max_size=120),
    st.sampled_from((0.02, 0.1, 0.3)),
    st.floats(-200, 1200),
)
def test_over_any_time_a_node_draws_its_lease_and_one_depth_more(
    wants: list[float], depth_s: float, begin_j: float
) -> None:
    lease, burst, most_w, step_s = np.array([2000.0]), np.array([depth_s]), 3000.0, 0.1
    level, passes = np.minimum(np.array([begin_j]), lease * burst), np.ones(1)
    drawn_j = 0.0
    for want in wants:
        passes = passing(level, lease, burst, passes)
        watts = np.minimum(want, lease + passes * (most_w - lease))
        drawn_j += float(watts[0]) * step_s
        level = bucket_after(level, lease, watts, burst, step_s)
    one_step_late_j = (most_w - 2000.0) * step_s
    assert drawn_j <= 2000.0 * len(wants) * step_s + 2000.0 * depth_s + one_step_late_j + 1e-6


def test_the_emptier_the_bucket_the_nearer_the_limits_to_the_lease() -> None:
    lease, burst = np.full(6, 4000.0), np.full(6, 0.1)
    level = np.array([-50.0, 0.0, 20.0, 90.0, 210.0, 400.0])
    assert passing(level, lease, burst, np.ones(6)).tolist() == [0, 0, 0.25, 0.5, 0.75, 1]
    assert passing(level, lease, burst * 0, np.ones(6)).tolist() == [0] * 6, "a node without a bucket"


def test_limits_rise_only_when_the_bucket_is_clearly_fuller() -> None:
    lease, burst, was = np.array([4000.0]), np.array([0.1]), np.array([0.5])
    assert passing(np.array([110.0]), lease, burst, was)[0] == 0.5
    assert passing(np.array([110.0]), lease, burst, np.ones(1))[0] == 0.625
    assert passing(np.array([145.0]), lease, burst, was)[0] == 0.625


def test_the_bucket_is_full_again_after_a_pause() -> None:
    lease, burst = np.array([4000.0]), np.array([0.1])
    level = bucket_after(np.array([-50.0]), lease, np.array([3000.0]), burst, 1.0)
    assert level[0] == 400
    assert passing(level, lease, burst, np.zeros(1))[0] == 1


def test_the_joules_of_a_domain_are_shared_by_weight_and_none_is_left_while_one_can_use_it() -> None:
    weights = np.array([4.0, 4.0, 1.0, 1.0])
    assert shared(1000.0, weights, np.full(4, np.inf)).tolist() == [400, 400, 100, 100]
    assert shared(1000.0, weights, np.array([np.inf, 100, 100, np.inf])).tolist() == [640, 100, 100, 160]
    assert shared(1000.0, weights, np.full(4, 50.0)).tolist() == [50] * 4
    assert shared(1000.0, np.array([0.0, 1.0]), np.array([9.0, 9.0])).tolist() == [0, 9]
