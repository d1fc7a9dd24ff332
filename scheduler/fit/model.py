"""The size of a causal language model, read from its transformers config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_TWO_MATRIX_MLP = frozenset(
    {"gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2"}
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions that memory and speed depend on."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = True
    gated: bool = True

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> ModelShape:
        """From the content of config.json (or `spec.engine.model.config`).

        Raises:
            ValueError: a dimension is missing; names the keys that were looked for.
        """
        kind = str(config.get("model_type") or _first_architecture(config))
        hidden = _number(config, "hidden_size", "n_embd", "d_model")
        heads = _number(config, "num_attention_heads", "n_head", "num_heads")
        return cls(
            architecture=kind,
            layers=_number(config, "num_hidden_layers", "n_layer", "num_layers"),
            hidden=hidden,
            intermediate=_number(config, "intermediate_size", "ffn_dim", "n_inner", default=4 * hidden),
            heads=heads,
            kv_heads=_number(config, "num_key_value_heads", default=heads),
            head_dim=_number(config, "head_dim", default=hidden // heads),
            vocabulary=_number(config, "vocab_size"),
            tied=bool(config.get("tie_word_embeddings", kind == "gpt2")),
            gated=kind not in _TWO_MATRIX_MLP,
        )

    @property
    def layer_parameters(self) -> int:
        """Weights of one block."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = (3 if self.gated else 2) * self.hidden * self.intermediate
        return attention + mlp + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """All weights."""
        embedding = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embedding + self.hidden


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What one optimizer step reads and trains."""

    sequences: int
    sequence_length: int
    micro_batch: int
    dtype: str = "float32"
    """"float32" or "bfloat16"."""
    activations: str = "auto"
    """Those inside a block, until backward: "keep", "recompute", or "auto", which keeps them where they fit."""
    freeze: tuple[str, ...] = ()
    """Patterns of the names of parameters that are not trained."""

    @property
    def weight_bytes(self) -> int:
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.sequences * self.sequence_length


def _first_architecture(config: Mapping[str, object]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list | tuple) and names else "unknown"


def _number(config: Mapping[str, object], *keys: str, default: int | None = None) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    if default is None:
        raise ValueError(f"the model's config needs {' or '.join(keys)} as a positive whole number")
    return default
