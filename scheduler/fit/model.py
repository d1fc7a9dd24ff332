"""The size of a causal language model, read from its transformers config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_TWO_MATRIX_MLP = frozenset(
    {"gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2"}
)
_EXPERTS = frozenset({"mixtral", "qwen3_moe"})
"""Architectures whose every layer is attention and experts. Of others with experts only the dense part is counted."""
MOST_LAYERS = 10_000
"""A plan has groups of each."""
MOST_PARAMETERS = 10**13
"""Five times the largest models that are known. A plan has chunks of them, and anybody may write a config."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions that memory and speed depend on."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    """Of the MLP, or of one expert."""
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = True
    gated: bool = True
    experts: int = 0
    """In a layer, in the place of the MLP; 0: it is dense."""
    experts_per_token: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> ModelShape:
        """From the content of config.json (or `spec.engine.model.config`).

        Raises:
            ValueError: a dimension is missing; names the keys that were looked for. Or the model is larger than any, or
                layers are not of one form.
        """
        kind = str(config.get("model_type") or _first_architecture(config))
        hidden = _number(config, "hidden_size", "n_embd", "d_model")
        heads = _number(config, "num_attention_heads", "n_head", "num_heads")
        experts, per_token = _experts(config) if kind in _EXPERTS else (0, 0)
        inner = (
            ("moe_intermediate_size",) if kind == "qwen3_moe" else ("intermediate_size", "ffn_dim", "n_inner")
        )
        made = cls(
            architecture=kind,
            layers=_number(config, "num_hidden_layers", "n_layer", "num_layers"),
            hidden=hidden,
            intermediate=_number(config, *inner, default=None if experts else 4 * hidden),
            heads=heads,
            kv_heads=_number(config, "num_key_value_heads", default=heads),
            head_dim=_number(config, "head_dim", default=hidden // heads),
            vocabulary=_number(config, "vocab_size"),
            tied=bool(config.get("tie_word_embeddings", kind == "gpt2")),
            gated=kind not in _TWO_MATRIX_MLP,
            experts=experts,
            experts_per_token=per_token,
        )
        made._refuse_sizes()
        return made

    def _refuse_sizes(self) -> None:
        """Raises ValueError."""
        if self.head_dim < 1:
            raise ValueError(
                f"the model's config has {self.heads} attention heads and only {self.hidden} hidden elements to divide among"
                " them"
            )
        if self.layers > MOST_LAYERS:
            raise ValueError(f"the model's config has more than {MOST_LAYERS:,} layers")
        if self.parameters > MOST_PARAMETERS:
            raise ValueError(f"the model's config has more than {MOST_PARAMETERS:,} parameters")

    @property
    def layer_parameters(self) -> int:
        """Weights of one block."""
        return self._layer(self.experts or 1)

    @property
    def parameters(self) -> int:
        """All weights."""
        return self._whole(self.layer_parameters)

    @property
    def active_layer_parameters(self) -> int:
        """Of those of one block the ones that a token is multiplied with: of experts only the chosen ones."""
        return self._layer(self.experts_per_token or 1)

    @property
    def active_mlp_parameters(self) -> int:
        """Of these the ones in its MLP, or in its experts."""
        return self.active_layer_parameters - self._layer(0)

    @property
    def active_parameters(self) -> int:
        """The same of all weights."""
        return self._whole(self.active_layer_parameters)

    @property
    def active_intermediate(self) -> int:
        """Inner elements of a token in one block."""
        return self.intermediate * (self.experts_per_token or 1)

    def read_layer_parameters(self, tokens: int) -> float:
        """Of those of one block the ones that a step of so many tokens reads. Of E experts, of which each token chooses k,
        E (1 - (1 - k / E) ^ tokens) are read on average where tokens choose alike often and by themselves."""
        if not self.experts:
            return float(self.layer_parameters)
        skipped = (1 - self.experts_per_token / self.experts) ** tokens
        return self._layer(0) + (self.layer_parameters - self._layer(0)) * (1 - skipped)

    def _layer(self, mlps: int) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = (3 if self.gated else 2) * self.hidden * self.intermediate
        return attention + mlps * mlp + self.experts * self.hidden + 2 * self.hidden

    def _whole(self, layer: int) -> int:
        embedding = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + embedding + self.hidden


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What one optimizer step reads and trains."""

    sequences: int
    sequence_length: int
    micro_batch: int
    dtype: str = "float32"
    """"float32" or "bfloat16"."""
    activations: str = "auto"
    """Those inside a block, until backward: "keep", "recompute", "swap", which recomputes them from inputs of the block that
    were on the host meanwhile, or "auto", the first of these that fits."""
    freeze: tuple[str, ...] = ()
    """Patterns of the names of parameters that are not trained."""
    loss: str = "whole"
    """"whole", or "tiled": the logits of `TILE_TOKENS` tokens exist at a time, and are computed twice."""
    scratch_disk_bytes: int = 0
    """Of a disk, which optimizer state may take where weights are on the host."""
    optimizer: str = "AdamW"
    """"AdamW", or "ZerothOrder", which has two forward passes and no backward pass."""

    state: str = "exact"
    """Of AdamW's moments: "exact", "bf16" or "int8"."""
    mlp: str = "whole"
    """"whole", or "tiled": the MLPs of the blocks are computed for `mlp_tile_rows` tokens at a time, and twice."""
    sequence_parallel: int = 1
    """Accelerators that share each sequence."""
    gradient_sums: str = "weights"
    """Type of gradients: "weights", as those, or "float32"."""
    packing: str = "across-documents"
    """What attention sees of a sequence of several documents: "across-documents", or "within-documents", which needs a mask."""

    @property
    def weight_bytes(self) -> int:
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def gradient_bytes(self) -> int:
        return 4 if self.gradient_sums == "float32" else self.weight_bytes

    @property
    def is_zeroth_order(self) -> bool:
        return self.optimizer == "ZerothOrder"

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch that one accelerator has."""
        return self.micro_batch * self.sequence_length // self.sequence_parallel

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.sequences * self.sequence_length


def _first_architecture(config: Mapping[str, object]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list | tuple) and names else "unknown"


def _experts(config: Mapping[str, object]) -> tuple[int, int]:
    """(in a layer, of a token)."""
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            "the model's config has layers with experts and layers without (mlp_only_layers, decoder_sparse_step), whose "
            "size no formula describes"
        )
    return _number(config, "num_local_experts", "num_experts"), _number(config, "num_experts_per_tok")


def _number(config: Mapping[str, object], *keys: str, default: int | None = None) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    if default is None:
        raise ValueError(f"the model's config needs {' or '.join(keys)} as a positive whole number")
    return default
