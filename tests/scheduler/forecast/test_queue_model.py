"""The simplified queue model and the samples from history."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.scheduler.forecast.calibrate import quantile
from busbar.scheduler.forecast.history import Finished, History, Lengths, survival
from busbar.scheduler.forecast.queue_model import QueueModel
from busbar.scheduler.forecast.queue_types import (
    QueuedJob,
    QueueRequest,
    QueueStart,
    Rules,
    RunOption,
    Share,
    fair_shares,
)

RULES = Rules(
    lateness_s=10800, min_run_s=300, max_preemptions=5, churn=0.05, min_disruption_budget=8, restart_s=30
)
ONE = QueueRequest((RunOption(0, 1000, 1, 1.0),), 1000)
NODE = QueueRequest((RunOption(0, 8000, 1, 8.0),), 8000)
TWO_NODES = QueueRequest((RunOption(0, 8000, 2, 16.0),), 16000)


def start(nodes: int, *weights: float) -> QueueStart:
    shares = tuple(Share(weight, 0.0, math.inf) for weight in weights)
    return QueueStart(0.0, ((8000,) * nodes,), 8.0 * nodes, shares, RULES)


def run(
    request: QueueRequest, seconds: float, nodes: tuple[int, ...], tenant: int = 0, since: float = -1e4
) -> QueuedJob:
    return QueuedJob(tenant, request, since, seconds, request.options[0], nodes, since)


def wait_s(begin: QueueStart, jobs: list[QueuedJob], target: QueuedJob) -> float:
    """Nodes of running jobs are taken from the free ones."""
    free = [list(row) for row in begin.free]
    for item in jobs:
        for node in item.nodes:
            assert item.option is not None
            free[0][node] -= item.option.per_pod_m
    taken = QueueStart(
        begin.now, tuple(tuple(row) for row in free), begin.capacity, begin.shares, begin.rules
    )
    return QueueModel(taken, [*jobs, target], target).wait_s(iter(()), 1e6)


def test_a_gang_starts_when_all_its_nodes_are_free() -> None:
    target = QueuedJob(0, TWO_NODES, 0.0, 100.0)
    assert wait_s(start(2, 1.0), [run(NODE, 500, (0,)), run(NODE, 900, (1,))], target) == 900


def test_a_small_job_passes_a_gang_that_does_not_fit() -> None:
    target = QueuedJob(0, ONE, 0.0, 100.0)
    jobs = [
        run(NODE, 500, (0,)),
        *(run(ONE, 900, (1,)) for _ in range(7)),
        QueuedJob(0, TWO_NODES, -5e3, 10.0),
    ]
    assert wait_s(start(2, 1.0), jobs, target) == 0


def test_equals_start_in_the_order_of_submission() -> None:
    older = QueuedJob(0, NODE, -100.0, 50.0)
    target = QueuedJob(0, NODE, 0.0, 50.0)
    assert wait_s(start(1, 1.0), [run(NODE, 200, (0,)), older], target) == 250


def test_a_tenant_inside_its_share_takes_it_back_from_a_borrower() -> None:
    jobs = [run(ONE, 1e5, (0,), tenant=1) for _ in range(8)]
    assert wait_s(start(1, 1.0, 1.0), jobs, QueuedJob(0, ONE, 0.0, 10.0)) == 0
    # A job that has just started may not be preempted before `min_run_s`; no other job ends before that.
    fresh = [run(ONE, 1e5, (0,), tenant=1, since=0.0) for _ in range(8)]
    ends = run(ONE, 400, (0,), tenant=1, since=0.0)
    assert wait_s(start(1, 1.0, 1.0), [*fresh[:7], ends], QueuedJob(0, ONE, 0.0, 10.0)) == 400


def test_a_job_above_its_share_waits_for_room() -> None:
    jobs = [run(ONE, 700, (0,), tenant=0) for _ in range(4)] + [
        run(ONE, 900, (0,), tenant=1) for _ in range(4)
    ]
    assert wait_s(start(1, 1.0, 1.0), jobs, QueuedJob(0, ONE, 0.0, 10.0)) == 700


@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.floats(0.1, 5), st.floats(0, 8), st.floats(0, 60)),
        min_size=1,
        max_size=6,
    ),
    st.floats(50, 100),
)
def test_fair_shares_fill_the_capacity_and_no_more(
    rows: list[tuple[float, float, float, float]], capacity: float
) -> None:
    demand = [row[0] for row in rows]
    shares = [Share(weight, min(floor, limit), limit) for _, weight, floor, limit in rows]
    got = fair_shares(demand, shares, capacity)
    want = [min(d, s.limit) for d, s in zip(demand, shares, strict=True)]
    assert all(g <= w + 1e-6 for g, w in zip(got, want, strict=True))
    assert all(g >= min(s.floor, w) - 1e-6 for g, s, w in zip(got, shares, want, strict=True))
    assert sum(got) == pytest.approx(min(capacity, sum(want)), abs=1e-3)
    # A tenant that gets less than its demand has at least the level of every tenant above its guarantee.
    short = [g / s.weight for g, s, w in zip(got, shares, want, strict=True) if g < w - 1e-3]
    free = [g / s.weight for g, s in zip(got, shares, strict=True) if g > s.floor + 1e-3]
    assert not short or not free or min(short) >= max(free) - 1e-2


def test_running_jobs_are_counted_as_lasting_at_least_so_long() -> None:
    """Half of all jobs take 100 s, half 10,000 s; none of the long ones has ended yet."""
    ended = [(100.0, 1000.0 + 20 * i) for i in range(50)]
    running = [(900.0, 2000.0)] * 50
    assert survival(ended, []).left_s(0.0, np.array([0.2]))[0] == pytest.approx(99.9, abs=0.2)
    alive = survival(ended, running)
    assert math.exp(alive.log_alive[-1]) == pytest.approx(0.5, abs=0.02)


@settings(max_examples=50, deadline=None)
@given(st.floats(0, 5000), st.lists(st.floats(1, 10_000), min_size=1, max_size=40))
def test_time_left_is_conditional_on_age(age: float, lengths: list[float]) -> None:
    history = History(Finished("a", 1000, seconds) for seconds in lengths)
    draws = 1 - np.random.default_rng(0).random(200)
    left = Lengths(history, (), 0.0).left_s("a", 1000, age, draws)
    assert (left >= 1).all()
    inside = left + age <= max(lengths) + 1
    known = np.array(sorted({*lengths, age + 1}))
    assert all(np.abs(known - value).min() < 1e-6 * max(value, 1) for value in (left + age)[inside])


def test_another_tenants_lengths_stand_in_where_there_are_none() -> None:
    history = History(Finished("b", 1000, 500.0) for _ in range(30))
    draws = np.array([0.9, 0.5])
    assert (Lengths(history, (), 0.0).left_s("a", 1000, 100.0, draws) == 400).all()


def test_a_quantile_of_bounds_and_values() -> None:
    values, weight = np.array([1.0, 2.0, 3.0, 4.0]), np.ones(4)
    assert quantile(values, np.array([True] * 4), weight, 0.5) == 2
    # The second is censored at 2: its probability moves to the longer observations.
    assert quantile(values, np.array([True, False, True, True]), weight, 0.5) == 3


def test_jobs_sent_together_are_drawn_alike_as_much_as_they_were() -> None:
    def length_correlation(lengths: list[float]) -> float:
        rows = (Finished("a", 1000, seconds, float(i), float(i)) for i, seconds in enumerate(lengths))
        return History(rows).length_correlation("a", 1000)

    random = np.random.default_rng(1)
    mixed = random.exponential(1000.0, 200).tolist()
    sweeps = [length for length in random.exponential(1000.0, 4) for _ in range(50)]
    assert length_correlation(mixed) < 0.1
    assert (
        length_correlation(
            [one * length for one, length in zip(sweeps, random.uniform(0.9, 1.1, 200), strict=True)]
        )
        > 0.3
    )
    assert 0 < length_correlation(mixed[:10]) < 0.2, "too few to measure: the default"
