"""The prior formulas agree with known models and with common sense."""

from __future__ import annotations

import pytest

from busbar.scheduler.fit import (
    BatchShape,
    ModelShape,
    accelerator,
    memory,
    prior,
    tokens_per_s,
    workload_class,
)

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


def test_a_missing_dimension_is_named() -> None:
    with pytest.raises(ValueError, match="hidden_size or n_embd"):
        ModelShape.from_config({"model_type": "llama"})


def test_a_prior_is_marked_as_such_and_has_an_error_bound() -> None:
    cell = prior(GPT2, BATCH, "resident", "H100-nvlink")
    assert cell.source == "formula"
    assert cell.low is not None
    assert cell.low < cell.speed
    assert workload_class(GPT2, BATCH) != workload_class(LLAMA_7B, BATCH)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="warp"):
        memory(GPT2, BATCH, "warp")
