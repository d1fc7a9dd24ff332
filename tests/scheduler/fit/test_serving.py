"""Serving modes: what they need, how long a step takes, and which one a device gets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from busbar.scheduler.fit.accelerators import accelerator
from busbar.scheduler.fit.model import ModelShape
from busbar.scheduler.fit.serving import (
    SERVING_MODES,
    ServingShape,
    choose_mode,
    serving_memory,
    serving_step_s,
    streamed_bytes,
)

MODEL = ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128256, tied=False)
SERVING = ServingShape(context=2048)
GIB = 2**30


def test_modes_need_less_in_their_order() -> None:
    need = [serving_memory(MODEL, SERVING, mode).device_bytes for mode in SERVING_MODES]
    assert need == sorted(need, reverse=True)
    assert need[0] > 2 * MODEL.parameters
    assert need[0] - need[1] == MODEL.layers * MODEL.layer_parameters
    with pytest.raises(ValueError, match="fp8"):
        serving_memory(MODEL, SERVING, "fp8")


def test_a_step_of_streamed_weights_takes_the_time_of_the_link() -> None:
    device = accelerator("A10G")
    assert device is not None
    least = serving_memory(MODEL, SERVING, "stream").device_bytes
    everything = MODEL.layers * MODEL.layer_parameters * 2
    assert streamed_bytes(MODEL, SERVING, least) == everything
    assert serving_step_s(MODEL, SERVING, "stream", device, least) == pytest.approx(everything / 24e9)
    more = least + 10 * MODEL.layer_parameters * 2
    assert streamed_bytes(MODEL, SERVING, more) == everything - 10 * MODEL.layer_parameters * 2
    assert streamed_bytes(MODEL, SERVING, 100 * GIB) == 0
    assert serving_step_s(MODEL, SERVING, "stream", device, 100 * GIB) < 0.1


@pytest.mark.parametrize(
    ("gib", "mode", "fits"),
    [(24, "resident", True), (12, "int8", True), (6, "stream", True), (3, "stream", False)],
)
def test_the_first_mode_that_fits_is_chosen_and_the_reason_names_the_others(
    gib: int, mode: str, fits: bool
) -> None:
    device = accelerator("A10G")
    assert device is not None
    choice = choose_mode(MODEL, SERVING, device, gib * GIB)
    assert (choice.mode, choice.fits) == (mode, fits)
    for other in SERVING_MODES[: SERVING_MODES.index(mode)] if fits else ():
        need = serving_memory(MODEL, SERVING, other).device_bytes
        assert f"{other} needs {need / GIB:.1f} GiB" in choice.reason
    assert ("a step of 64 requests takes about" in choice.reason) is (fits and mode != "resident")


def test_keys_and_values_that_are_asked_for_count() -> None:
    plain = serving_memory(MODEL, SERVING, "resident").device_bytes
    asked = serving_memory(MODEL, replace(SERVING, kv_bytes=GIB), "resident").device_bytes
    assert asked - plain == GIB - 2 * 32 * 8 * 128 * 2 * 2048
