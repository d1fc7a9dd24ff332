"""Step models of types and engine modes that nobody has measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from busbar.scheduler.autoscale.predicted import Place, predicted, prior
from busbar.scheduler.autoscale.step_model import Bucket, Slo, StepModel, max_rate
from busbar.scheduler.errors import ServingModelError
from busbar.scheduler.fit.accelerators import accelerator
from busbar.scheduler.fit.model import ModelShape
from busbar.scheduler.fit.serving import SERVING_MODES, ServingShape, serving_step_s

MODEL = ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128256, tied=False)
SERVING = ServingShape(context=2048)
GIB = 2**30


def place(kind: str, gib: float, mode: str = "resident") -> Place:
    device = accelerator(kind)
    assert device is not None
    return Place(device, int(gib * GIB), mode)


def slower(model: StepModel, decode: float, prompt: float) -> StepModel:
    return replace(
        model,
        a_s=decode * model.a_s, b_s=decode * model.b_s, c_s=decode * model.c_s,
        d_s=prompt * model.d_s, e_s=prompt * model.e_s,
    )  # fmt: skip


def numbers(model: StepModel) -> list[float]:
    return [model.a_s, model.b_s, model.c_s, model.d_s, model.e_s]


@pytest.mark.parametrize("mode", SERVING_MODES)
def test_a_lone_step_takes_what_the_formula_of_the_mode_says(mode: str) -> None:
    at = place("A10G", 12 if mode == "stream" else 22, mode)
    alone = replace(SERVING, sequences=1)
    step = serving_step_s(MODEL, alone, mode, at.device, at.memory_bytes)
    assert prior(MODEL, SERVING, at).a_s - 0.002 == pytest.approx(step, rel=1e-6)


def test_codes_leave_more_room_for_the_cache_and_streamed_weights_none_but_what_was_asked_for() -> None:
    room = {mode: prior(MODEL, SERVING, place("A10G", 22, mode)).kv_tokens for mode in SERVING_MODES}
    assert room["int8"] > 2 * room["resident"] > 2 * room["stream"]
    assert room["stream"] == SERVING.context
    asked = replace(SERVING, kv_bytes=GIB)
    assert prior(MODEL, asked, place("A10G", 22)).kv_tokens == GIB / (2 * 32 * 8 * 128 * 2)
    with pytest.raises(ServingModelError, match=r"it needs .* GiB of 8.0 GiB"):
        prior(MODEL, SERVING, place("A10G", 8))


def test_what_software_loses_is_learnt_from_another_type_and_from_another_mode_of_this_one() -> None:
    far = place("A100", 73)
    measured = (far, slower(prior(MODEL, SERVING, far), 1.5, 2.0))
    here = place("L4", 12, "int8")
    found = predicted(MODEL, SERVING, here, [measured])
    assert numbers(found) == pytest.approx(numbers(slower(prior(MODEL, SERVING, here), 1.5, 2.0)))
    assert found.kv_tokens == prior(MODEL, SERVING, here).kv_tokens
    near = place("L4", 22)
    both = [measured, (near, slower(prior(MODEL, SERVING, near), 3.0, 1.0))]
    found = predicted(MODEL, SERVING, here, both)
    assert numbers(found) == pytest.approx(numbers(slower(prior(MODEL, SERVING, here), 3.0, 1.0)))
    other = place("H100", 73)
    quick = (other, slower(prior(MODEL, SERVING, other), 6.0, 8.0))
    mean = predicted(MODEL, SERVING, here, [measured, quick])
    assert (mean.a_s, mean.d_s) == pytest.approx(
        (3.0 * prior(MODEL, SERVING, here).a_s, 4.0 * prior(MODEL, SERVING, here).d_s)
    )


def test_the_prediction_is_what_max_rate_needs_and_nothing_comes_of_nothing() -> None:
    at = place("A100", 73)
    found = predicted(MODEL, SERVING, place("H100", 73), [(at, prior(MODEL, SERVING, at))])
    bucket = Bucket(512, 128)
    assert max_rate(found, bucket, Slo()) > max_rate(prior(MODEL, SERVING, at), bucket, Slo()) > 1
    with pytest.raises(ServingModelError, match="nothing was measured"):
        predicted(MODEL, SERVING, at, [])
