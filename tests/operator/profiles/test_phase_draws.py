"""What a board draws in each phase of serving, from parts of minutes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from tests.operator.builders import NOW
from tests.operator.profiles.parts import CLASS, look, profile, written
from tests.operator.profiles.test_serving_cells import learned, on_a100, under_caps

from busbar.kube.types.performance_profile import PhaseWatts
from busbar.operator.profiles import phase_draws
from busbar.operator.profiles.phase_draws import DrawPlace, PhaseDraw, PhaseDraws, ReplicaDraw

PLACE = DrawPlace(CLASS, "A100", 1, "resident")
TRUE = {"prefill": 380.0, "decode": 240.0, "idle": 60.0}
Parts = Callable[[int], tuple[float, float]]


def shifting(second: int) -> tuple[float, float]:
    """Parts of a second for prompts and for decoding: both come and go, each in its own time."""
    return 0.2 + 0.15 * math.sin(second / 400), 0.4 + 0.3 * math.sin(second / 900)


def learnt(parts: Parts, minutes: int = 60, part: Callable[[int], float] = lambda second: 1.0) -> PhaseDraws:
    draws, noise = PhaseDraws(), random.Random(5)
    prefill_s = decode_s = 0.0
    for second in range(60 * minutes):
        reads, decodes = parts(second)
        prefill_s, decode_s = prefill_s + reads, decode_s + decodes
        watts = reads * TRUE["prefill"] + decodes * TRUE["decode"] + (1 - reads - decodes) * TRUE["idle"]
        watts = min(watts, 400.0 * part(second)) + noise.gauss(0.0, 15.0)
        draw = ReplicaDraw("n0/r", PLACE, part(second), watts, 400.0, prefill_s, decode_s)
        draws.look([draw], float(second))
    return draws


def test_the_watts_of_each_phase_follow_from_minutes_with_different_parts_of_them() -> None:
    [(at, found)] = learnt(shifting).of_class(CLASS).items()
    assert at == (PLACE, 100)
    assert found.prefill == pytest.approx(TRUE["prefill"], rel=0.05)
    assert found.decode == pytest.approx(TRUE["decode"], rel=0.05)
    assert found.idle == pytest.approx(TRUE["idle"], abs=10.0)
    assert found.busy == pytest.approx((0.2 * 380 + 0.4 * 240) / 0.6, rel=0.08)
    assert learnt(shifting).of_class("other") == {}


def test_phases_that_always_come_together_have_only_a_mean() -> None:
    def together(second: int) -> tuple[float, float]:
        busy = 0.5 + 0.4 * math.sin(second / 500)
        return busy / 3, 2 * busy / 3

    [found] = learnt(together).of_class(CLASS).values()
    assert (found.prefill, found.decode) == (None, None)
    assert found.busy == pytest.approx((380 + 2 * 240) / 3, rel=0.05)
    assert found.idle == pytest.approx(TRUE["idle"], abs=10.0)


def test_a_phase_that_was_hardly_seen_is_not_told() -> None:
    [found] = learnt(lambda second: (0.0, 0.4 + 0.3 * math.sin(second / 300))).of_class(CLASS).values()
    assert found.prefill is None
    assert found.decode == pytest.approx(TRUE["decode"], rel=0.05)


@pytest.mark.parametrize(
    ("parts", "minutes", "part"),
    [
        (shifting, 9, lambda second: 1.0),
        (lambda second: (0.0, 0.0), 60, lambda second: 1.0),
        (shifting, 60, lambda second: 1.0 if second % 40 < 20 else 0.6),
        (lambda second: (0.2, -0.1), 60, lambda second: 1.0),
        (lambda second: (math.nan, 0.2), 60, lambda second: 1.0),
    ],
    ids=["a short time", "nothing to do", "a limit that moves", "counters that fall", "no numbers"],
)
def test_what_tells_nothing_is_left_out(parts: Parts, minutes: int, part: Callable[[int], float]) -> None:
    assert learnt(parts, minutes, part).of_class(CLASS) == {}
    assert learnt(shifting, 12).of_class(CLASS) != {}


def test_each_limit_has_its_own_watts() -> None:
    found = learnt(shifting, 80, lambda second: 1.0 if second // 600 % 2 else 0.6).of_class(CLASS)
    assert {level for _, level in found} == {60, 100}
    assert all(draw.busy <= 1.05 * 380 for draw in found.values())


def test_time_that_nobody_looked_at_and_places_beyond_the_bound_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draws = PhaseDraws()
    for second in range(0, 3600, 20):
        draws.look([ReplicaDraw("n", PLACE, 1.0, 300.0, 400.0, 0.5 * second, 0.0)], float(second))
    assert draws.of_class(CLASS) == {}
    monkeypatch.setattr(phase_draws, "MOST_PLACES", 2)
    monkeypatch.setattr(phase_draws, "LEAST_MINUTES", 1.0)
    for number in range(3):
        draw = ReplicaDraw("n", PLACE._replace(mode=f"mode-{number}"), 1.0, 300.0, 400.0, 0.0, 0.0)
        for second in range(400):
            watts = 100.0 + second / 2
            now = replace(draw, board_w=watts, prefill_s=second**2 / 1000)
            draws.look([now], 1000.0 * number + second)
    assert {place.mode for place, _ in draws.of_class(CLASS)} == {"mode-1", "mode-2"}


def test_a_profile_shows_the_watts_of_phases_and_keeps_them() -> None:
    whole, low = PhaseDraw(300.04, 380.0, 240.0, None), PhaseDraw(200.0, 230.0, 180.0, 60.0)
    draws = {(PLACE, 100): whole, (PLACE, 60): low}
    made = written(profile(), serving=on_a100(), limits=learned(), draws=draws)
    found = under_caps(made)
    assert (found[100].watts, found[100].phase_watts) == (300.0, PhaseWatts(prefill=380.0, decode=240.0))
    assert (found[60].watts, found[60].phase_watts) == (200.0, PhaseWatts(prefill=230.0, decode=180.0, idle=60.0))  # fmt: skip
    assert (found[70].watts, found[70].phase_watts) == (280.0, None), "what its cap allows"
    later = NOW + timedelta(days=1)
    slower = tuple(line.model_copy(update={"tokens_per_second": 406.15}) for line in on_a100())
    kept = under_caps(written(made, serving=slower, now=later))
    assert [kept[cap].phase_watts for cap in (100, 60)] == [found[cap].phase_watts for cap in (100, 60)]
    assert kept[60].watts == 200.0
    assert look(made, serving=on_a100(), now=later, draws={(PLACE, 100): replace(whole, decode=250.0)}).status is None  # fmt: skip
    assert look(made, serving=on_a100(), now=later, draws={(PLACE, 100): replace(whole, decode=290.0)}).status  # fmt: skip
