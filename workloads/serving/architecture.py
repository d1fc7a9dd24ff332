"""Reads a model folder's config.json into the few numbers the decoder needs, or refuses it.

Served: the Llama family as `transformers` writes it (`llama`, `mistral`, `qwen2`, `qwen3`): RMSNorm
before each half, rotary positions, grouped-query attention, a SiLU-gated MLP; and `mixtral` and `qwen3_moe`, which have
experts in the place of the MLP in every layer. A setting that the decoder would compute wrongly is refused here, by name;
no setting that changes tokens is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from busbar.workloads.serving.errors import ModelCorrupt, ModelFileMissing, ModelUnsupported

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
WITH_EXPERTS = ("mixtral", "qwen3_moe")
WITH_BIASES = ("llama", "qwen3", "qwen3_moe")
"""Families whose `attention_bias` is for all four matrices of attention."""
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "quantization_config": (None,),
}
_ALLOWED_OF: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    # Layers with a dense MLP among those with experts: all layers of a model are of one form here.
    "qwen3_moe": {"mlp_only_layers": ([], None), "decoder_sparse_step": (1,)},
}
"""Values of a setting that are served, the usual one first."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base wavelength and how it is stretched for long contexts."""

    theta: float
    kind: str
    parameters: Mapping[str, Any]
    original_max: int


@dataclass(frozen=True)
class Routing:
    """How a token chooses its experts."""

    experts: int
    """In a layer."""
    per_token: int
    normalised: bool
    """Whether the weights of the chosen ones are divided by their sum."""


@dataclass(frozen=True)
class Architecture:
    """Dimensions of a decoder."""

    family: str
    vocab_size: int
    hidden: int
    intermediate: int
    """Of the MLP, or of one expert."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    max_positions: int
    """Longest context the served computation is right for (a sliding window caps it)."""
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str
    """Of the checkpoint: float32, bfloat16 or float16."""
    eos: frozenset[int]
    bos: int | None
    routing: Routing | None
    """None: the MLP is dense."""

    @property
    def kv_values_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def parameter_count(self) -> int:
        """Weights of the decoder, counting a tied embedding once; biases left out."""
        return self._parameters(1 if self.routing is None else self.routing.experts)

    @property
    def active_parameter_count(self) -> int:
        """Of them those that a token is multiplied with: of the experts the chosen ones."""
        return self._parameters(1 if self.routing is None else self.routing.per_token)

    def _parameters(self, mlps: int) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        router = 0 if self.routing is None else self.routing.experts * self.hidden
        mlp = mlps * 3 * self.hidden * self.intermediate + router
        embeddings = self.vocab_size * self.hidden * (1 if self.tied else 2)
        return self.layers * (attention + mlp + 2 * self.hidden) + embeddings + self.hidden


def read_architecture(folder: Path) -> Architecture:
    """The architecture in `folder`/config.json (and end tokens of generation_config.json)."""
    if not folder.is_dir():
        raise ModelFileMissing(f"the model folder {folder} does not exist")
    config = _read_json(folder / "config.json", required=True)
    generation = _read_json(folder / "generation_config.json", required=False)
    return parse_architecture(config, generation, str(folder / "config.json"))


def parse_architecture(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None, where: str = "config.json"
) -> Architecture:
    """As `read_architecture`, from parsed JSON."""

    def number(key: str, default: int | None = None) -> int:
        return _number(config, where, key, default)

    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelUnsupported(
            f"{where}: model_type {family!r} is not served by the built-in engine (served: "
            f"{', '.join(FAMILIES)}); use engine: vllm with an image of your own"
        )
    for key, allowed in {**_ALLOWED, **_ALLOWED_OF.get(family, {})}.items():
        value = config.get(key, allowed[0])
        if value not in allowed:
            raise ModelUnsupported(f"{where}: {key} {value!r} is not served (only {allowed[0]!r})")
    heads, hidden = number("num_attention_heads"), number("hidden_size")
    kv_heads = number("num_key_value_heads", heads)
    head_dim = number("head_dim", 128 if family == "qwen3" else max(1, hidden // heads))
    if heads % kv_heads:
        raise ModelCorrupt(f"{where}: {heads} attention heads cannot share {kv_heads} key-value heads evenly")
    if head_dim % 2:
        raise ModelUnsupported(f"{where}: head_dim {head_dim} is odd; rotary positions need pairs")
    max_positions = number("max_position_embeddings")
    bias = family != "mixtral" and bool(config.get("attention_bias", False))
    generation = generation or {}
    return Architecture(
        family=family,
        vocab_size=number("vocab_size"),
        hidden=hidden,
        intermediate=number("moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"),
        layers=number("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config, max_positions, where),
        max_positions=_window(config, family, max_positions),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or bias,
        o_bias=family in WITH_BIASES and bias,
        mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        eos=frozenset(
            token
            for token in _ids(generation.get("eos_token_id", config.get("eos_token_id")))
            if 0 <= token < number("vocab_size")
        ),
        bos=next(iter(_ids(config.get("bos_token_id"))), None),
        routing=_routing(config, family, where) if family in WITH_EXPERTS else None,
    )


def _routing(config: Mapping[str, Any], family: str, where: str) -> Routing:
    """transformers writes `num_local_experts`, and reads `num_experts` besides."""
    name = "num_local_experts" if "num_local_experts" in config else "num_experts"
    experts, per_token = (_number(config, where, key) for key in (name, "num_experts_per_tok"))
    if per_token > experts:
        raise ModelCorrupt(
            f"{where}: num_experts_per_tok {per_token} is more than the {experts} experts of a layer"
        )
    normalised = family == "mixtral" or bool(config.get("norm_topk_prob", False))
    return Routing(experts, per_token, normalised)


def _rope(config: Mapping[str, Any], max_positions: int, where: str) -> Rope:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling`."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ModelUnsupported(f"{where}: rope type {kind!r} is not served (served: {', '.join(ROPE_TYPES)})")
    for key, neutral in (("partial_rotary_factor", 1.0), ("mscale", None), ("mscale_all_dim", None)):
        value = parameters.get(key, config.get(key, neutral))
        if value != neutral:
            raise ModelUnsupported(f"{where}: rope parameter {key}={value!r} is not served")
    required = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor",),
    }
    for key in required.get(kind, ()):
        if not isinstance(parameters.get(key), int | float):
            raise ModelCorrupt(f"{where}: rope type {kind!r} needs the number {key!r}")
    theta = parameters.get("rope_theta", config.get("rope_theta", 10000.0))
    original = parameters.get("original_max_position_embeddings") or max_positions
    return Rope(theta=float(theta), kind=kind, parameters=parameters, original_max=int(original))


def _window(config: Mapping[str, Any], family: str, max_positions: int) -> int:
    """Within a sliding window full attention gives the same result, so the context is capped at the window."""
    window = config.get("sliding_window")
    uses = family in ("mistral", "mixtral") or bool(config.get("use_sliding_window", False))
    return min(max_positions, int(window)) if window and uses else max_positions


def _number(config: Mapping[str, Any], where: str, key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelCorrupt(f"{where}: {key} must be a positive whole number, not {value!r}")
    return value


def _ids(value: object) -> frozenset[int]:
    if isinstance(value, int):
        return frozenset((value,))
    if isinstance(value, list):
        return frozenset(int(v) for v in value)
    return frozenset()


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        if not required:
            return {}
        raise ModelFileMissing(
            f"{path} is missing: the model folder must hold what `save_pretrained` writes "
            "(config.json, *.safetensors, tokenizer.json)"
        ) from None
    except ValueError as error:
        raise ModelCorrupt(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelCorrupt(f"{path} does not hold a JSON object")
    return content
