"""The allocation beside a brute-force search, and the hull beside its definition."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest
from tests.scheduler.power.row import CURVES, FLAT, SERVING, STEEP, node

from busbar.scheduler.errors import PowerError
from busbar.scheduler.power import CapCurve, Phase, PhaseLoad
from busbar.scheduler.power.allocate import Demand, Segments, _saved, allocate, fill, segments


def test_savings_fall_along_every_curve() -> None:
    demands = [
        Demand(node("a"), phases, spread_w, burst)
        for phases in (SERVING, FLAT, STEEP)
        for spread_w in (0, 300)
        for burst in (False, True)
    ]
    saved = segments(demands, CURVES).saved
    assert (np.diff(saved, axis=1) <= 1e-12).all()
    assert (saved >= 0).all()


def test_savings_are_the_slopes_of_the_lower_hull_and_none_where_watts_do_not_rise() -> None:
    random = np.random.default_rng(1)
    watts = np.cumsum(random.uniform(1, 50, (16, 40)), axis=0)
    watts[:, 7] = 300.0
    loss = random.uniform(0, 3, (16, 40))
    saved = _saved(watts, loss)
    for column in range(40):
        if column == 7:
            assert (saved[:, column] == 0).all()
            continue
        points = list(zip(watts[:, column], loss[:, column], strict=True))
        for k in range(15):
            least = [min((y - y0) / (x - x0) for x, y in points[k + 1 :]) for x0, y0 in points[: k + 1]]
            assert saved[k, column] == max(-max(least), 0.0)


def test_a_mean_lease_saves_nothing_above_the_mean_and_a_hard_one_does() -> None:
    serving = node(
        "a"
    )  # draws 1000 + 10 * (0.3 * 400 + 0.7 * 220) = 3,740 W in the mean, 5,000 W in a prefill
    found = segments([Demand(serving, SERVING, 0.0, False), Demand(serving, SERVING, 0.0, True)], CURVES)
    above = serving.floor_w + np.cumsum(found.watts[0]) - found.watts[0] > 3740
    assert (found.saved[0][above] > 0).all()
    assert found.saved[1][above].max() < 1e-9


def _saved_above(watts: float, target: float, stretch_s: float, burst_s: float, share: float = 0.3) -> float:
    """What the watts above these save at most on a node with a bucket that lasts so long."""
    phases = (
        PhaseLoad(Phase.PREFILL, share, 400.0, stretch_s),
        PhaseLoad(Phase.DECODE, 1 - share, 220.0),
    )
    serving = replace(node("a"), first_token=target)
    found = segments([Demand(serving, phases, 0.0, True, burst_s)], CURVES)
    above = serving.floor_w + np.cumsum(found.watts[0]) - found.watts[0] > watts
    return float(found.saved[0][above].max())


def test_a_target_for_first_tokens_wants_watts_for_queues_that_outlast_the_bucket() -> None:
    assert _saved_above(3800, target=0.0, stretch_s=0.5, burst_s=0.1) < 1e-9
    assert _saved_above(3800, target=1.0, stretch_s=0.5, burst_s=0.1) > 1e-5
    assert _saved_above(3800, target=1.0, stretch_s=0.5, burst_s=2.0) < 1e-9
    assert _saved_above(3800, target=1.0, stretch_s=0.02, burst_s=0.1) < 1e-9
    assert (
        _saved_above(3800, target=1.0, stretch_s=0.0, burst_s=2.0) > 1e-5
    )  # nobody knows how long they last


def test_the_longer_a_server_reads_the_more_its_first_tokens_lose() -> None:
    busy, calm = (_saved_above(4300, 1.0, 0.5, 0.1, share) for share in (0.5, 0.1))
    assert busy > 1.5 * calm


def test_a_bucket_lets_short_excesses_pass() -> None:
    flat, deep = (
        segments([Demand(node("a"), SERVING, 500.0, True, burst_s)], CURVES).saved[0]
        for burst_s in (0.0, 1.0)
    )
    assert deep[-6:].sum() < 0.1 * flat[-6:].sum()


def test_an_empty_bucket_wants_more_than_a_full_one_and_less_where_it_fills_by_itself() -> None:
    def saved(bucket_j: float | None, watts: float) -> float:
        serving = replace(node("a"), first_token=1.0)
        phases = (PhaseLoad(Phase.PREFILL, 0.3, 400.0, 0.2), PhaseLoad(Phase.DECODE, 0.7, 220.0))
        found = segments([Demand(serving, phases, 300.0, True, 0.2, bucket_j)], CURVES)
        above = serving.floor_w + np.cumsum(found.watts[0]) - found.watts[0] > watts
        return float((found.saved[0] * found.watts[0])[above].sum())

    full, half, empty = saved(800.0, 3000), saved(400.0, 3000), saved(0.0, 3000)
    assert full < half < empty
    assert full < saved(None, 3000) < empty
    assert saved(-500.0, 3700) > saved(0.0, 3700), "a debt is saved first"
    # What is above the mean of 3,740 W fills the bucket until the next leases are in force.
    assert saved(400.0, 3700) == pytest.approx(saved(800.0, 3700))


def test_training_loses_what_it_does_not_do_and_serving_the_part_by_which_requests_take_longer() -> None:
    steady = (PhaseLoad(Phase.TRAINING, 1.0, 400.0),), (PhaseLoad(Phase.DECODE, 1.0, 400.0),)
    curves = {
        Phase.TRAINING: CapCurve(((0.25, 4.0), (1.0, 1.0))),
        Phase.DECODE: CapCurve(((0.25, 4.0), (1.0, 1.0))),
    }
    found = segments([Demand(node("a"), phases, 0.0, False) for phases in steady], curves)
    trains, serves = (found.saved * found.watts).sum(axis=1)
    assert trains == pytest.approx(1 - 1 / 4)
    assert serves == pytest.approx(4 - 1)


def test_a_curve_of_ones_own_counts_from_what_boards_draw_at_most_and_beside_others() -> None:
    own = CapCurve(((0.25, 1.0), (0.5, 1.0), (1.0, 1.0)))
    steep = CapCurve(((0.25, 8.0), (1.0, 1.0)))
    loads = [PhaseLoad(Phase.TRAINING, 1.0, 400.0, curve=curve) for curve in (own, steep, None, steep)]
    demands = [Demand(node("a"), (load,), 0.0, False) for load in loads]
    found = segments(demands, {Phase.TRAINING: CapCurve(((0.25, 4.0), (1.0, 1.0)))})
    lost = (found.saved * found.watts).sum(axis=1)
    assert lost == pytest.approx([0.0, 1 - 1 / 8, 1 - 1 / 4, 1 - 1 / 8])


def test_a_board_that_wants_less_than_it_may_draw_loses_nothing_above_that() -> None:
    curve = CapCurve(((0.25, 2.0), (0.5, 1.2), (1.0, 1.0)))
    wants_half = Demand(node("a"), (PhaseLoad(Phase.TRAINING, 1.0, 200.0, curve=curve),), 0.0, False)
    found = segments([wants_half], {})
    above = node("a").floor_w + np.cumsum(found.watts[0]) - found.watts[0] >= 1000 + 10 * 200.0
    assert found.saved[0][above].max() < 1e-9
    assert (found.saved[0] * found.watts[0]).sum() == pytest.approx(1 - 1.2 / 2.0)


def test_the_allocation_of_a_tree_is_as_good_as_the_best_of_all() -> None:
    random = Random(3)
    for _ in range(20):
        saved = np.sort(np.array([[random.random() for _ in range(2)] for _ in range(4)]), axis=1)[:, ::-1]
        found = Segments(np.full((4, 2), 10.0), saved)
        rooms = ((0, 1), 10.0 * random.randint(0, 4)), ((2, 3), 10.0 * random.randint(0, 4))
        site = 10.0 * random.randint(0, 8)
        given = allocate(
            found,
            [
                *((np.array(rows, dtype=np.intp), room) for rows, room in rooms),
                (np.arange(4, dtype=np.intp), site),
            ],
        )
        assert given.sum() <= site + 1e-9
        best = 0.0
        for steps in product(range(3), repeat=4):
            fits = all(sum(10 * steps[row] for row in rows) <= room for rows, room in rooms)
            if fits and 10 * sum(steps) <= site:
                best = max(best, sum(10 * saved[row, :count].sum() for row, count in enumerate(steps)))
        ours = sum(np.clip(given[row] - 10 * k, 0, 10) * saved[row, k] for row in range(4) for k in range(2))
        assert ours >= best - 1e-9


def test_equal_segments_are_cut_in_proportion() -> None:
    given = fill(np.array([[2.0, 1.0], [2.0, 1.0]]), np.array([[10.0, 30.0], [10.0, 10.0]]), 30.0)
    assert given.tolist() == [[10.0, 7.5], [10.0, 2.5]]


@pytest.mark.parametrize(
    "points",
    [(), ((1.0, 1.0), (0.5, 1.2)), ((0.0, 2.0), (1.0, 1.0)), ((0.5, 0.9), (1.0, 1.0))],
)
def test_a_curve_that_cannot_be_is_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(PowerError):
        CapCurve(points)
    CapCurve(((0.5, 1.2), (1.0, 1.0)))
