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


MIXTRAL: dict[str, object] = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN: dict[str, object] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [(MIXTRAL, 46.7, 12.9), (QWEN, 30.5, 3.35)],
    ids=["mixtral", "qwen3_moe"],
)
def test_models_with_experts_have_their_published_sizes(
    config: dict[str, object], billions: float, active: float
) -> None:
    """Mixtral 8x7B and Qwen3-30B-A3B."""
    model = ModelShape.from_config(config)
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.002)
    assert model.active_parameters / 1e9 == pytest.approx(active, rel=0.002)


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    model = ModelShape.from_config(QWEN)
    assert model.read_layer_parameters(1) == pytest.approx(model.active_layer_parameters)
    assert model.read_layer_parameters(10_000) == pytest.approx(model.layer_parameters)
    assert model.read_layer_parameters(4) < 0.3 * model.layer_parameters
    device = accelerator("A100")
    assert device is not None
    alone, many = (
        serving_step_s(model, replace(SERVING, sequences=count), "resident", device, 80 * GIB)
        for count in (1, 64)
    )
    read = 48 * model.active_layer_parameters + 151936 * 2048
    assert alone == pytest.approx(2 * read / (device.memory_gb_per_s * 1e9))
    assert 5 < many / alone < 10
    dense = replace(model, experts=0, experts_per_token=0)
    assert dense.read_layer_parameters(1) == dense.active_layer_parameters == dense.layer_parameters


@pytest.mark.parametrize("change", [{"mlp_only_layers": [3]}, {"decoder_sparse_step": 2}])
def test_layers_of_two_forms_have_no_formula(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="mlp_only_layers, decoder_sparse_step"):
        ModelShape.from_config(QWEN | change)
