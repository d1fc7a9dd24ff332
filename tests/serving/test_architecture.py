"""config.json: each refused value beside an accepted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from busbar.workloads.serving.architecture import parse_architecture, read_architecture
from busbar.workloads.serving.errors import ModelCorrupt, ModelError, ModelFileMissing, ModelUnsupported

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("change", "message", "neighbour"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not served", {"model_type": "qwen2"}),
        ({"model_type": None}, "model_type None", {"model_type": "mistral"}),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'", {"hidden_act": "silu"}),
        ({"quantization_config": {"bits": 4}}, "quantization_config", {"quantization_config": None}),
        ({"num_key_value_heads": 3}, "cannot share 3", {"num_key_value_heads": 1}),
        ({"head_dim": 7}, "head_dim 7 is odd", {"head_dim": 6}),
        ({"hidden_size": 0}, "hidden_size must be a positive", {"hidden_size": 64}),
        ({"vocab_size": "many"}, "vocab_size must be a positive", {"vocab_size": 7}),
        ({"num_hidden_layers": None}, "num_hidden_layers must be", {"num_hidden_layers": 1}),
        ({"rope_scaling": {"type": "longrope"}}, "rope type 'longrope'", {"rope_scaling": None}),
        (
            {"rope_parameters": {"rope_type": "linear"}},
            "needs the number 'factor'",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        ),
        (
            {"rope_parameters": {**LLAMA3, "low_freq_factor": None}},
            "needs the number 'low_freq_factor'",
            {"rope_parameters": LLAMA3},
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}},
            "mscale=0.7",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
        ),
    ],
)
def test_what_we_would_compute_wrongly_is_refused_by_name(
    change: dict[str, Any], message: str, neighbour: dict[str, Any]
) -> None:
    with pytest.raises((ModelUnsupported, ModelCorrupt), match=message):
        parse_architecture(CONFIG | change)
    parse_architecture(CONFIG | neighbour)


def test_both_spellings_of_rope_are_read() -> None:
    old = parse_architecture(CONFIG | {"rope_theta": 5e5, "rope_scaling": LLAMA3}).rope
    new = parse_architecture(CONFIG | {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}).rope
    assert (old.theta, old.kind, old.original_max) == (new.theta, new.kind, new.original_max)
    assert old.kind == "llama3"


def test_a_sliding_window_caps_the_context_only_where_it_is_used() -> None:
    window = {"sliding_window": 64}
    assert parse_architecture(CONFIG | {"model_type": "mistral"} | window).max_positions == 64
    assert parse_architecture(CONFIG | {"model_type": "qwen2"} | window).max_positions == 128
    used = {"model_type": "qwen2", "use_sliding_window": True}
    assert parse_architecture(CONFIG | used | window).max_positions == 64


def test_end_tokens_come_from_the_generation_config_first() -> None:
    assert parse_architecture(CONFIG).eos == {2}
    assert parse_architecture(CONFIG, {"eos_token_id": [5, 6]}).eos == {5, 6}


def test_the_parameter_count_is_that_of_the_tensors() -> None:
    from busbar.workloads.serving.weights import tensor_shapes

    arch = parse_architecture(CONFIG)
    total = 0
    for shape in tensor_shapes(arch).values():
        size = 1
        for side in shape:
            size *= side
        total += size
    assert arch.parameter_count == total


@pytest.mark.parametrize(
    ("content", "error"), [(None, ModelFileMissing), ("{", ModelCorrupt), ("[]", ModelCorrupt)]
)
def test_a_missing_or_broken_config_says_which_file(
    tmp_path: Path, content: str | None, error: type[ModelError]
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(error, match=r"config\.json"):
        read_architecture(tmp_path)
    with pytest.raises(ModelFileMissing, match="does not exist"):
        read_architecture(tmp_path / "nowhere")
