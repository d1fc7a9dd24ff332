"""config.json: each refused value beside an accepted one."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from busbar.workloads.serving.architecture import Routing, parse_architecture, read_architecture
from busbar.workloads.serving.errors import ModelCorrupt, ModelError, ModelFileMissing, ModelUnsupported
from busbar.workloads.serving.tensor_names import tensor_shapes

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

MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
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


@pytest.mark.parametrize("more", [{}, MIXTRAL, QWEN3_MOE], ids=["llama", "mixtral", "qwen3_moe"])
def test_the_parameter_count_is_that_of_the_tensors(more: dict[str, Any]) -> None:
    arch = parse_architecture(CONFIG | more)
    shapes = tensor_shapes(arch)
    total = sum(
        prod(shape) for name, shape in shapes.items() if "q_norm" not in name and "k_norm" not in name
    )
    assert arch.parameter_count == total
    experts = [prod(shape) for name, shape in shapes.items() if ".experts." in name]
    used = 1.0 if arch.routing is None else arch.routing.per_token / arch.routing.experts
    assert arch.active_parameter_count == pytest.approx(total - sum(experts) * (1 - used))


def test_experts_are_named_as_each_family_names_them() -> None:
    mixtral, qwen = (tensor_shapes(parse_architecture(CONFIG | more)) for more in (MIXTRAL, QWEN3_MOE))
    assert mixtral["model.layers.1.block_sparse_moe.experts.7.w2.weight"] == (32, 64)
    assert qwen["model.layers.0.mlp.experts.5.up_proj.weight"] == (24, 32)
    assert qwen["model.layers.1.mlp.gate.weight"] == (6, 32)
    assert parse_architecture(CONFIG | MIXTRAL | {"attention_bias": True}).qkv_bias is False
    assert parse_architecture(CONFIG | QWEN3_MOE | {"attention_bias": True}).o_bias is True
    routing = parse_architecture(CONFIG | QWEN3_MOE).routing
    assert routing == Routing(6, 2, normalised=False)
    assert parse_architecture(CONFIG | QWEN3_MOE | {"norm_topk_prob": True}).routing == replace(
        routing, normalised=True
    )


@pytest.mark.parametrize(
    ("change", "message", "neighbour"),
    [
        ({"mlp_only_layers": [0]}, r"mlp_only_layers \[0\] is not served", {"mlp_only_layers": []}),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2 is not served", {"decoder_sparse_step": 1}),
        ({"num_experts": 0}, "num_experts must be a positive", {"num_experts": 2}),
        ({"num_local_experts": "many"}, "num_local_experts must be a positive", {"num_local_experts": 4}),
        ({"num_experts_per_tok": 7}, "7 is more than the 6 experts", {"num_experts_per_tok": 6}),
        ({"moe_intermediate_size": None}, "moe_intermediate_size must be", {"moe_intermediate_size": 8}),
    ],
)
def test_experts_that_are_not_served_are_refused_by_name(
    change: dict[str, Any], message: str, neighbour: dict[str, Any]
) -> None:
    with pytest.raises((ModelUnsupported, ModelCorrupt), match=message):
        parse_architecture(CONFIG | QWEN3_MOE | change)
    parse_architecture(CONFIG | QWEN3_MOE | neighbour)


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
