"""The prior formulas agree with known models and with common sense."""

from __future__ import annotations

from dataclasses import replace

import pytest

from busbar.scheduler.fit import (
    DATA_SHEETS,
    BatchShape,
    ModelShape,
    accelerator,
    decided,
    freezes_all,
    frozen_parameters,
    memory,
    prior,
    tokens_per_s,
    unknown_patterns,
    workload_class,
)
from busbar.scheduler.fit.memory import MODES, swapped_activations
from busbar.scheduler.fit.speed import step_seconds

LLAMA_7B = ModelShape.from_config(
    {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    }
)
GPT2 = ModelShape.from_config(
    {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
)
BATCH = BatchShape(sequences=8, sequence_length=2048, micro_batch=1, dtype="bfloat16")


@pytest.mark.parametrize(("model", "billions"), [(LLAMA_7B, 6.738), (GPT2, 0.1237)])
def test_parameters_are_those_of_the_published_models(model: ModelShape, billions: float) -> None:
    assert model.parameters == pytest.approx(billions * 1e9, rel=0.01)


def test_a_7b_model_needs_offload_on_80_gib() -> None:
    gib = 2**30
    assert memory(LLAMA_7B, BATCH, "resident").device_bytes > 80 * gib
    assert memory(LLAMA_7B, BATCH, "optimizer-offload").device_bytes < 80 * gib


def test_every_mode_that_saves_device_memory_costs_speed() -> None:
    device = accelerator("A100")
    assert device is not None
    speeds = [tokens_per_s(LLAMA_7B, BATCH, mode, device) for mode in ("resident", "optimizer-offload")]
    assert speeds == sorted(speeds, reverse=True)


def test_a_slice_is_its_part_of_the_device() -> None:
    whole, seventh, half = (accelerator(name) for name in ("H100", "H100-1g.10gb", "H100-3g.40gb/pcie5"))
    assert whole is not None
    assert seventh is not None
    assert half is not None
    assert (seventh.rate, seventh.watts) == pytest.approx((whole.rate / 7, whole.watts / 7))
    assert (seventh.memory_mib, half.memory_mib) == (9728, 38_912)
    assert half.memory_gb_per_s == pytest.approx(whole.memory_gb_per_s / 2)
    assert half.tflops == pytest.approx(whole.tflops * 3 / 7)
    all_of_it = accelerator("A100-40GB-7g.40gb")
    assert all_of_it is not None
    assert all_of_it.rate == pytest.approx(DATA_SHEETS["A100-40GB"].rate)
    assert accelerator("XPU-1g.10gb") is None
    assert accelerator("H100-8g.80gb") == whole, "no profile: another name of the type"


@pytest.mark.parametrize("name", sorted(DATA_SHEETS))
def test_a_longer_name_is_that_of_the_nearest_type_in_any_case_of_letters(name: str) -> None:
    sheet = DATA_SHEETS[name]
    assert accelerator(name) == accelerator(name.lower()) == accelerator(f"{name.upper()}-SXM-64GB") == sheet


def test_a_variant_has_the_memory_speed_and_watts_of_its_own_data_sheet() -> None:
    plain, variant = accelerator("H100"), accelerator("H100-NVL-94GB")
    assert plain is not None
    assert variant is not None
    assert (variant.memory_mib, variant.watts) == (94 * 1024, 400)
    assert variant.rate < 0.9 * plain.rate


@pytest.mark.parametrize("name", sorted(DATA_SHEETS))
@pytest.mark.parametrize("micro_batch", [1, 8])
def test_weights_on_the_host_are_never_chosen_where_the_state_alone_would_do(
    name: str, micro_batch: int
) -> None:
    batch = replace(BATCH, micro_batch=micro_batch)
    modes = ("optimizer-offload", "parameter-offload")
    state, weights = (tokens_per_s(LLAMA_7B, batch, mode, DATA_SHEETS[name]) for mode in modes)
    assert 0 < weights <= state
    needs = [memory(LLAMA_7B, decided(LLAMA_7B, batch, mode, None), mode).device_bytes for mode in modes]
    assert needs[1] < 0.4 * needs[0]


def test_a_missing_dimension_is_named() -> None:
    with pytest.raises(ValueError, match="hidden_size or n_embd"):
        ModelShape.from_config({"model_type": "llama"})


@pytest.mark.parametrize(
    ("name", "bad", "good", "words"),
    [
        ("num_hidden_layers", 10**9, 10_000, "more than 10,000 layers"),
        ("num_hidden_layers", 10**30, 1, "more than 10,000 layers"),
        ("hidden_size", 2**31, 8192, "more than 10,000,000,000,000 parameters"),
        ("vocab_size", 10**12, 10**6, "more than 10,000,000,000,000 parameters"),
        ("num_attention_heads", 129, 128, "129 attention heads and only 128 hidden elements"),
    ],
)
def test_a_config_larger_than_any_model_is_refused_at_once(
    name: str, bad: int, good: int, words: str
) -> None:
    """Plans are made of its layers and chunks, also by the operator, for whoever writes a job."""
    config = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000}
    assert ModelShape.from_config({**config, name: good}).parameters > 0
    with pytest.raises(ValueError, match=words):
        ModelShape.from_config({**config, name: bad})


def test_a_prior_is_marked_as_such_and_has_an_error_bound() -> None:
    cell = prior(GPT2, BATCH, "resident", "H100-nvlink")
    assert cell.source == "formula"
    assert cell.low is not None
    assert cell.low < cell.speed
    assert workload_class(GPT2, BATCH) != workload_class(LLAMA_7B, BATCH)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="warp"):
        memory(GPT2, BATCH, "warp")


AUTO = replace(BATCH, sequence_length=16_384)
KEPT, AGAIN, SWAPPED = (replace(AUTO, activations=each) for each in ("keep", "recompute", "swap"))


def test_recomputed_activations_cost_one_more_forward_pass_and_save_most_of_the_bytes() -> None:
    device = accelerator("H100")
    assert device is not None
    kept, recomputed = (memory(LLAMA_7B, each, "optimizer-offload").device_bytes for each in (KEPT, AGAIN))
    assert recomputed < kept / 2
    speeds = [tokens_per_s(LLAMA_7B, each, "resident", device) for each in (KEPT, AGAIN)]
    assert speeds[0] / speeds[1] == pytest.approx(4 / 3, rel=0.03)


@pytest.mark.parametrize("mode", MODES)
def test_swapped_activations_are_on_the_host_but_for_two_blocks(mode: str) -> None:
    again, swapped = (memory(LLAMA_7B, each, mode) for each in (AGAIN, SWAPPED))
    one = AUTO.micro_batch * AUTO.sequence_length * AUTO.weight_bytes * LLAMA_7B.hidden
    layers = LLAMA_7B.layers
    assert swapped_activations(LLAMA_7B, SWAPPED) == (layers - 1) * one
    assert (layers - 2) * one <= again.device_bytes - swapped.device_bytes <= (layers - 1) * one
    assert swapped.host_bytes - again.host_bytes <= (layers - 1) * one
    if mode == "optimizer-offload":  # whose host needs more in a step than while the model is made
        assert swapped.host_bytes - again.host_bytes == (layers - 1) * one


def test_inputs_on_their_way_cost_time_only_where_the_link_is_the_slower_one() -> None:
    device = accelerator("H100")
    assert device is not None
    seconds = [step_seconds(LLAMA_7B, each, "resident", device) for each in (AGAIN, SWAPPED)]
    assert seconds[1] == seconds[0]
    slow = replace(device, link_gb_per_s=0.5)
    moved = swapped_activations(LLAMA_7B, SWAPPED) * AUTO.sequences / AUTO.micro_batch
    assert step_seconds(LLAMA_7B, SWAPPED, "resident", slow) > 2 * moved / 0.5e9
    cpu = accelerator("cpu")
    assert cpu is not None
    assert step_seconds(LLAMA_7B, SWAPPED, "resident", cpu) > step_seconds(LLAMA_7B, AGAIN, "resident", cpu)


def test_reduced_moments_need_fewer_bytes_and_their_updates_more_time() -> None:
    device, link = accelerator("H100"), "optimizer-offload"
    assert device is not None
    exact, bf16, int8 = (replace(BATCH, state=each) for each in ("exact", "bf16", "int8"))
    on_host = [memory(LLAMA_7B, each, link).host_bytes for each in (exact, bf16, int8)]
    assert on_host[0] - on_host[1] == pytest.approx(4 * LLAMA_7B.parameters, rel=0.001)
    assert on_host[0] - on_host[2] == pytest.approx((8 - 2.03125) * LLAMA_7B.parameters, rel=0.001)
    resident = [memory(LLAMA_7B, each, "resident").device_bytes for each in (exact, bf16, int8)]
    assert resident[0] > resident[1] > resident[2]
    seconds = [step_seconds(LLAMA_7B, each, "resident", device) for each in (exact, bf16, int8)]
    assert seconds[0] < seconds[1] < seconds[2] < 1.5 * seconds[0]
    offloaded = [step_seconds(LLAMA_7B, each, link, device) for each in (exact, bf16, int8)]
    assert offloaded[0] > offloaded[1] > offloaded[2]  # the link is what they wait for
    assert len({workload_class(LLAMA_7B, each) for each in (exact, bf16, int8)}) == 3


def test_auto_counts_what_the_engine_will_do_on_the_device() -> None:
    mode, gib = "optimizer-offload", 2**30
    kept = memory(LLAMA_7B, KEPT, mode).device_bytes
    assert memory(LLAMA_7B, AGAIN, mode).device_bytes < 80 * gib < kept
    assert decided(LLAMA_7B, AUTO, mode, kept) == KEPT
    assert decided(LLAMA_7B, AUTO, mode, None) == KEPT
    assert decided(LLAMA_7B, AUTO, mode, kept - 1) == AGAIN
    again = memory(LLAMA_7B, AGAIN, mode).device_bytes
    assert decided(LLAMA_7B, AUTO, mode, again - 1) == SWAPPED
    assert decided(LLAMA_7B, AUTO, mode, 1) == SWAPPED  # which needs the least
    assert decided(LLAMA_7B, KEPT, mode, 1) == KEPT  # as the job says
    on_h100, on_h200 = (prior(LLAMA_7B, AUTO, mode, key) for key in ("H100", "H200"))
    assert on_h100.memory_mib == memory(LLAMA_7B, AGAIN, mode).device_mib
    assert on_h200.memory_mib == memory(LLAMA_7B, KEPT, mode).device_mib
    assert on_h100.speed < 0.8 * on_h200.speed
    assert prior(LLAMA_7B, AUTO, mode, "H200", memory_mib=80 * 1024).memory_mib == on_h100.memory_mib


def test_a_class_has_the_name_that_it_had_before_activations_were_a_setting() -> None:
    assert workload_class(GPT2, BATCH) == "gpt2-124M-c5a44aee"
    said = {workload_class(GPT2, replace(BATCH, activations=each)) for each in ("auto", "keep", "recompute")}
    assert len(said) == 3  # what a job says decides whether it fits


FROZEN = replace(BATCH, freeze=("model.layers.[0-9].*", "model.embed_tokens.*"))


def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    frozen = frozen_parameters(LLAMA_7B, FROZEN.freeze)
    assert frozen == 10 * LLAMA_7B.layer_parameters + LLAMA_7B.vocabulary * LLAMA_7B.hidden
    everything, less = (memory(LLAMA_7B, each, "resident").device_bytes for each in (BATCH, FROZEN))
    assert everything - less == pytest.approx(12 * frozen, rel=0.01)
    device = accelerator("H100")
    assert device is not None
    speeds = [tokens_per_s(LLAMA_7B, each, "optimizer-offload", device) for each in (BATCH, FROZEN)]
    assert 1 < speeds[1] / speeds[0] < LLAMA_7B.parameters / (LLAMA_7B.parameters - frozen)


def test_names_that_are_not_known_count_as_trained() -> None:
    other = replace(LLAMA_7B, architecture="gpt_neox")
    assert frozen_parameters(other, ("*",)) == 0
    assert frozen_parameters(LLAMA_7B, ("*.bias", "layers.0.*")) == 0
    assert unknown_patterns(LLAMA_7B, ("*.bias", "lm_head.*")) == ["*.bias"]
    assert frozen_parameters(GPT2, ("lm_head.weight",)) == GPT2.vocabulary * GPT2.hidden  # it is tied


def test_all_is_frozen_only_where_biases_are_too() -> None:
    assert freezes_all(LLAMA_7B, ("model.*", "lm_head.*"))
    assert not freezes_all(LLAMA_7B, ("*.weight",))
    assert not freezes_all(LLAMA_7B, ("model.layers.*", "lm_head.*"))
    assert not freezes_all(replace(LLAMA_7B, architecture="gpt_neox"), ("*",))


def test_what_is_frozen_decides_the_class_and_the_order_of_the_patterns_does_not() -> None:
    turned = replace(BATCH, freeze=FROZEN.freeze[::-1])
    assert workload_class(LLAMA_7B, turned) == workload_class(LLAMA_7B, FROZEN)
    others = [BATCH, FROZEN, replace(BATCH, freeze=("model.layers.[1-9].*", "model.layers.10.*"))]
    assert len({workload_class(LLAMA_7B, each) for each in others}) == 3
