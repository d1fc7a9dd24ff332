"""The tensors of a checkpoint, and which of them each part of a layer is made of."""

from __future__ import annotations

from collections.abc import Mapping

from busbar.workloads.serving.architecture import Architecture

MATRICES = ("qkv", "out", "gate_up", "down")
"""Parts of a layer that may be kept in codes. Of experts, `gate_up` and `down` hold those of all, one below the other."""
ROUTER = "router"
"""The matrix that chooses experts, always in float."""
_EXPERT_NAMES: Mapping[str, tuple[str, str, str, str]] = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
}
"""By family: what holds the experts, and in each of them gate, up and down."""


def fused_names(arch: Architecture) -> dict[str, tuple[str, ...]]:
    """Part of a layer → the tensors below `model.layers.N` that it is made of, one below the other."""
    found = {
        "input_norm": ("input_layernorm.weight",),
        "q_norm": ("self_attn.q_norm.weight",),
        "k_norm": ("self_attn.k_norm.weight",),
        "mlp_norm": ("post_attention_layernorm.weight",),
    }
    matrices: dict[str, tuple[str, ...]] = {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "out": ("self_attn.o_proj",),
    }
    if arch.routing is None:
        matrices |= {"gate_up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",)}
    else:
        block, gate, up, down = _EXPERT_NAMES[arch.family]
        each = [f"{block}.experts.{index}" for index in range(arch.routing.experts)]
        matrices |= {
            ROUTER: (f"{block}.gate",),
            "gate_up": tuple(f"{expert}.{name}" for expert in each for name in (gate, up)),
            "down": tuple(f"{expert}.{down}" for expert in each),
        }
    return found | {
        f"{name}.{kind}": tuple(f"{part}.{kind}" for part in parts)
        for name, parts in matrices.items()
        for kind in ("weight", "bias")
    }


def of_experts(part: str) -> bool:
    """Whether a part, as `down.weight`, is of the MLP, or of experts in its place."""
    return part.partition(".")[0] in ("gate_up", "down")


def tensor_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor the checkpoint must hold."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (arch.vocab_size, arch.hidden),
        "model.norm.weight": (arch.hidden,),
    }
    if not arch.tied:
        shapes["lm_head.weight"] = (arch.vocab_size, arch.hidden)
    inside = _layer_shapes(arch)
    for index in range(arch.layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in inside.items()}
    return shapes


def _layer_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    linear = {
        "self_attn.q_proj": (q, arch.hidden, arch.qkv_bias),
        "self_attn.k_proj": (kv, arch.hidden, arch.qkv_bias),
        "self_attn.v_proj": (kv, arch.hidden, arch.qkv_bias),
        "self_attn.o_proj": (arch.hidden, q, arch.o_bias),
    }
    up, down = (
        (arch.intermediate, arch.hidden, arch.mlp_bias),
        (arch.hidden, arch.intermediate, arch.mlp_bias),
    )
    if arch.routing is None:
        linear |= {"mlp.gate_proj": up, "mlp.up_proj": up, "mlp.down_proj": down}
    else:
        block, *names = _EXPERT_NAMES[arch.family]
        linear[f"{block}.gate"] = (arch.routing.experts, arch.hidden, False)
        for index in range(arch.routing.experts):
            linear |= {
                f"{block}.experts.{index}.{name}": shape
                for name, shape in zip(names, (up, up, down), strict=True)
            }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns, bias) in linear.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    norms = {"input_layernorm": arch.hidden, "post_attention_layernorm": arch.hidden}
    if arch.qk_norm:
        norms |= {"self_attn.q_norm": arch.head_dim, "self_attn.k_norm": arch.head_dim}
    return shapes | {f"{name}.weight": (width,) for name, width in norms.items()}
