"""Small plans against the best of all assignments (the row `oracle` has a thousand of them)."""

from __future__ import annotations

from statistics import median

from benchmarks.scheduling.oracle import LEAST_MEDIAN, NOW, POLICY, best, case

from busbar.scheduler import plan


def test_no_plan_is_worth_more_than_the_best_and_most_are_the_best() -> None:
    parts = []
    for seed in range(60):
        snapshot = case(seed)
        value, most = plan(snapshot, POLICY, NOW)[0].value, best(snapshot)
        assert value <= most + 1e-9, seed
        parts.append(1.0 if most == 0 else value / most)
    assert median(parts) >= LEAST_MEDIAN


def test_a_pod_that_fits_on_no_node_raises_no_price() -> None:
    """Case 626: a job of eight accelerators wants type A above all, whose nodes have four. It runs on B, the other on A."""
    snapshot = case(626)
    assert plan(snapshot, POLICY, NOW)[0].value == best(snapshot)
