"""From steps to the rate: our scheduler with the step times of a table, the fit in its loop, and `max_rate` beside what is
sustained."""

from __future__ import annotations

import pytest
from benchmarks.serving_scale.recorded import CONCAVE, PERCENTILE, RECORDED, SIZES, StepTable, trial

from busbar.scheduler.autoscale.step_model import Bucket


@pytest.mark.parametrize(
    ("table", "bucket", "slower"),
    [(CONCAVE, SIZES[0], 1.0), (CONCAVE, SIZES[1], 1.3), (RECORDED, SIZES[1], 1.0)],
)
def test_after_few_requests_for_a_long_time_the_rate_is_right_within_a_fifth(
    table: StepTable, bucket: Bucket, slower: float
) -> None:
    """The engine has seen hardly any batch lately, and the machine may have become slower meanwhile."""
    found = trial(table, bucket, slower)
    assert found.attained(0.8 * found.expected_rps) >= PERCENTILE / 100
    assert found.attained(1.2 * found.expected_rps) < PERCENTILE / 100
