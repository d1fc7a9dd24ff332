"""Two levels in a node's draw, and which are taken for prompts."""

from __future__ import annotations

from busbar.operator.power.phases import fitted
from busbar.operator.power.work import NodeWork, WorkKind
from busbar.scheduler.power import CapCurve, NodePower, Phase

NODE = NodePower("n", 500.0, 4, 100.0, 400.0)


def _phases(*draws: float, kind: WorkKind = WorkKind.UNKNOWN) -> dict[Phase, tuple[float, float, float]]:
    found, _ = fitted(draws, 380.0, NODE, NodeWork(kind=kind))
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


def test_what_is_known_of_the_work_goes_before_the_draw() -> None:
    peaks = [150.0, 150.0, 350.0, 360.0] * 10
    assert _phases(*peaks, kind=WorkKind.TRAINING) == {Phase.TRAINING: (1.0, 380.0, 0.0)}
    assert set(_phases(*peaks, kind=WorkKind.SERVING)) == {Phase.PREFILL, Phase.DECODE}
    assert _phases(*[350.0] * 40, kind=WorkKind.SERVING) == {Phase.PREFILL: (1.0, 380.0, 0.0)}


def test_steady_serving_is_divided_as_its_engines_count() -> None:
    def found(prompts: float | None, *draws: float, kind: WorkKind = WorkKind.SERVING) -> dict[Phase, float]:
        loads, _ = fitted(draws or [350.0] * 40, 380.0, NODE, NodeWork(kind=kind, prompt_part=prompts))
        assert {load.board_w for load in loads} <= {380.0, 150.0}
        return {load.phase: load.share for load in loads}

    assert found(0.25) == {Phase.PREFILL: 0.25, Phase.DECODE: 0.75}
    assert found(0.0) == {Phase.DECODE: 1.0}
    assert found(1.0) == found(None) == {Phase.PREFILL: 1.0}
    assert found(0.25, *([150.0, 150.0, 350.0, 360.0] * 10)) == {Phase.PREFILL: 0.5, Phase.DECODE: 0.5}
    assert found(0.25, kind=WorkKind.TRAINING) == {Phase.TRAINING: 1.0}


def test_each_phase_has_the_curve_of_its_work() -> None:
    training, prefill, decode = (CapCurve(((0.5, slow), (1.0, 1.0))) for slow in (1.1, 1.2, 1.3))
    curves = {Phase.TRAINING: training, Phase.PREFILL: prefill, Phase.DECODE: decode}

    def found(kind: WorkKind, *draws: float) -> dict[Phase, CapCurve | None]:
        loads, _ = fitted(draws, 380.0, NODE, NodeWork(kind=kind, prompt_part=0.5, curves=curves))
        return {load.phase: load.curve for load in loads}

    steady, peaks = [350.0] * 40, [150.0, 150.0, 350.0, 360.0] * 10
    assert found(WorkKind.TRAINING, *steady) == {Phase.TRAINING: training}
    assert found(WorkKind.SERVING, *steady) == {Phase.PREFILL: prefill, Phase.DECODE: decode}
    assert found(WorkKind.SERVING, *peaks) == {Phase.PREFILL: prefill, Phase.DECODE: decode}
