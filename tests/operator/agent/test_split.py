"""A lease over boards: within it, within what each board takes and may have, and near the least loss."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.operator.agent.split import Board, split, wanted
from busbar.scheduler.power import PRIOR_CURVES, Phase
from busbar.scheduler.power.allocate import Floats

watts = st.floats(0.0, 400.0)
SLACK_W = 1e-3


@st.composite
def any_boards(draw: st.DrawFn) -> list[Board]:
    """Up to eight, of 50 to 150 W at their lowest limits, of which caps let some draw less than others."""
    found = []
    for number in range(draw(st.integers(1, 8))):
        floor_w = draw(st.sampled_from((50.0, 100.0, 150.0)))
        found.append(Board(f"b{number}", floor_w, max(floor_w, draw(watts)), draw(watts)))
    return found


def boards(*wants: float) -> list[Board]:
    return [Board(f"b{i}", 100.0, 400.0, want) for i, want in enumerate(wants)]


def test_equal_boards_get_equal_watts_and_one_that_is_idle_gives_to_those_that_work() -> None:
    assert list(split(1000.0, boards(400, 400, 400, 400)).values()) == pytest.approx([250.0] * 4)
    uneven = split(1000.0, boards(400, 400, 400, 60))
    assert uneven["b3"] < 110
    assert [uneven[f"b{i}"] for i in range(3)] == pytest.approx([(1000 - uneven["b3"]) / 3] * 3)
    assert list(split(250.0, boards(400, 400)).values()) == pytest.approx([125.0, 125.0])
    assert list(split(50.0, boards(400, 400)).values()) == [100.0, 100.0], "never below the lowest limit"
    assert list(split(900.0, boards(60, 60)).values()) == pytest.approx([400.0, 400.0])
    assert split(900.0, []) == {}


@settings(max_examples=150, derandomize=True, deadline=None)
@given(of=any_boards(), boards_w=st.floats(0.0, 3500.0))
def test_no_board_is_below_its_floor_or_above_its_most_and_the_sum_is_within_the_lease(
    of: list[Board], boards_w: float
) -> None:
    limits = split(boards_w, of)
    assert limits.keys() == {board.uuid for board in of}
    for board in of:
        assert board.floor_w <= limits[board.uuid] <= board.most_w + SLACK_W
    floors_w = sum(board.floor_w for board in of)
    assert sum(limits.values()) <= max(boards_w, floors_w)
    if boards_w >= sum(board.most_w for board in of):
        assert all(limits[board.uuid] >= board.most_w - SLACK_W for board in of), "enough for all"


@settings(max_examples=60, derandomize=True, deadline=None)
@given(of=any_boards(), boards_w=st.floats(0.0, 3500.0), more_w=st.floats(0.0, 400.0))
def test_what_a_board_would_draw_above_its_most_moves_no_watts(
    of: list[Board], boards_w: float, more_w: float
) -> None:
    bounded = [replace(board, want_w=min(board.want_w, board.most_w)) for board in of]
    beyond = [
        replace(board, want_w=board.most_w + more_w) if board.want_w >= board.most_w else board
        for board in of
    ]
    assert split(boards_w, beyond) == split(boards_w, bounded)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(of=any_boards(), boards_w=st.floats(0.0, 3500.0))
def test_the_order_of_boards_moves_no_watts_and_equal_boards_get_the_same(
    of: list[Board], boards_w: float
) -> None:
    twin = replace(of[0], uuid="twin")
    limits = split(boards_w, [*of, twin])
    assert limits["twin"] == pytest.approx(limits["b0"], abs=SLACK_W)
    turned = split(boards_w, [twin, *reversed(of)])
    assert turned == {uuid: pytest.approx(limit, abs=SLACK_W) for uuid, limit in limits.items()}


def lost(want_w: float, limits_w: Floats) -> Floats:
    """Of a second's work under each limit."""
    points = np.array(PRIOR_CURVES[Phase.TRAINING].points)
    found: Floats = 1 - 1 / np.interp(limits_w / want_w, points[:, 0], points[:, 1])
    return found


@pytest.mark.parametrize("part", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("caps", list(combinations_with_replacement((160.0, 200.0, 280.0, 400.0), 3)))
def test_boards_under_caps_lose_hardly_more_together_than_by_any_other_split(
    caps: tuple[float, ...], part: float
) -> None:
    boards_w = 300.0 + part * (sum(caps) - 300.0)
    limits = split(boards_w, [Board(f"b{at}", 100.0, most_w, 400.0) for at, most_w in enumerate(caps)])
    ours = sum(float(lost(cap, np.array(limit))) for cap, limit in zip(caps, limits.values(), strict=True))
    steps = [np.linspace(100.0, most_w, 25) for most_w in caps]
    every_w, every_lost = (np.add.outer(np.add.outer(a, b), c) for a, b, c in (steps, map(lost, caps, steps)))
    assert ours <= every_lost[every_w <= boards_w].min() + 0.05


def test_a_board_under_a_cap_counts_with_its_cap_and_not_with_its_nameplate() -> None:
    """A capped board and one without a cap, both busy, where 50 W are missing."""
    capped, whole = Board("capped", 100.0, 200.0, 400.0), Board("whole", 100.0, 400.0, 400.0)
    limits = split(550.0, [capped, whole])
    assert limits["capped"] > 185.0, "a watt less costs it twice the part of its work"
    assert limits["whole"] > 349.0


def test_a_want_rises_at_once_and_falls_when_its_peak_is_forgotten() -> None:
    idle = wanted(None, 60.0, 400.0, 400.0, 0.0)
    assert idle.watts == 80.0
    at_limit = wanted(idle, 97.0, 100.0, 400.0, 1.0)
    assert at_limit.watts == 400.0, "it may want anything"
    assert wanted(at_limit, 60.0, 400.0, 400.0, 10.9) is at_limit
    assert wanted(at_limit, 60.0, 400.0, 400.0, 11.1).watts == 80.0
