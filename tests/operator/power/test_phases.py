"""Two levels in a node's draw, and which are taken for prompts."""

from __future__ import annotations

from busbar.operator.power.phases import fitted
from busbar.scheduler.power import NodePower, Phase

NODE = NodePower("n", 500.0, 4, 100.0, 400.0)


def _phases(*draws: float) -> dict[Phase, tuple[float, float, float]]:
    found, _ = fitted(draws, 380.0, NODE)
    return {load.phase: (load.share, load.board_w, load.stretch_s) for load in found}


def test_short_peaks_are_prompts_and_the_rest_is_decoding() -> None:
    found = _phases(*([150.0, 150.0, 350.0, 360.0] * 10))
    assert found == {Phase.PREFILL: (0.5, 380.0, 2.0), Phase.DECODE: (0.5, 150.0, 0.0)}
    _, spread_w = fitted([150.0, 150.0, 350.0, 350.0] * 10, 380.0, NODE)
    assert spread_w == 400.0


def test_steady_work_a_return_from_a_pause_and_too_little_are_training() -> None:
    steady = {Phase.TRAINING: (1.0, 380.0, 0.0)}
    assert _phases(*([350.0, 360.0] * 20)) == steady
    assert _phases(*[60.0] * 20, *[390.0] * 20) == steady
    assert _phases(150.0, 350.0) == steady
    assert _phases() == steady
