"""How many parameters `spec.engine.freeze` keeps from being trained, as far as names and sizes are known without the model.

Known are the matrices and norms of Llama and of the architectures that name theirs as it does, and the matrices of
GPT-2. Of everything else, biases too, nothing is counted as frozen: such a job is taken to need the memory and the time
of training it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache

from .model import ModelShape

EMBEDDING, HEAD = "embedding", "head"
"""Parts of a model beside its blocks, which are `block-0` and so on."""
_AS_LLAMA = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def frozen_parameters(model: ModelShape, patterns: Iterable[str]) -> int:
    """Parameters that are surely not trained; those whose names are not known count as trained."""
    return sum(frozen_parts(model, tuple(patterns)).values())


@lru_cache(maxsize=1024)
def frozen_parts(model: ModelShape, patterns: tuple[str, ...]) -> Mapping[str, int]:
    """The same by part of the model; parts of which nothing is frozen are left out."""
    found: dict[str, int] = {}
    for part, tensors in _tensors(model).items() if patterns else ():
        size = sum(
            elements
            for names, elements in tensors
            if any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
        )
        if size:
            found[part] = size
    return found


def unknown_patterns(model: ModelShape, patterns: Iterable[str]) -> list[str]:
    """Those that match no name that is known here; the engine reads the model itself."""
    names = [name for tensors in _tensors(model).values() for each, _ in tensors for name in each]
    return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]


def freezes_all(model: ModelShape, patterns: Iterable[str]) -> bool:
    """Whether every known tensor matches, and would with a bias, which many of these architectures may have."""
    chosen, tensors = tuple(patterns), [each for part in _tensors(model).values() for each in part]
    return bool(tensors) and all(
        any(fnmatchcase(name.removesuffix("weight") + end, pattern) for name in names for pattern in chosen)
        for names, _ in tensors
        for end in ("weight", "bias")
    )


_Tensor = tuple[tuple[str, ...], int]  # its names, of which a tied one has two, and its elements


def _tensors(model: ModelShape) -> dict[str, list[_Tensor]]:
    """By part of the model."""
    table = model.vocabulary * model.hidden
    if model.architecture == "gpt2":
        embedding, blocks, norm, inside = "transformer.wte", "transformer.h", None, _inside_gpt2(model)
    elif model.architecture in _AS_LLAMA:
        embedding, blocks, norm = "model.embed_tokens", "model.layers", "model.norm"
        inside = _inside_llama(model)
    else:
        return {}
    tied = ("lm_head.weight",) if model.tied else ()
    head: list[_Tensor] = [] if norm is None else [((f"{norm}.weight",), model.hidden)]
    if not model.tied:
        head.append((("lm_head.weight",), table))
    return {
        EMBEDDING: [((f"{embedding}.weight", *tied), table)],
        **{
            f"block-{index}": [((f"{blocks}.{index}.{name}.weight",), size) for name, size in inside.items()]
            for index in range(model.layers)
        },
        HEAD: head,
    }


def _inside_llama(model: ModelShape) -> dict[str, int]:
    hidden, inner = model.hidden, model.intermediate
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return {
        "self_attn.q_proj": hidden * queries,
        "self_attn.k_proj": hidden * keys,
        "self_attn.v_proj": hidden * keys,
        "self_attn.o_proj": queries * hidden,
        "mlp.gate_proj": hidden * inner,
        "mlp.up_proj": hidden * inner,
        "mlp.down_proj": inner * hidden,
        "input_layernorm": hidden,
        "post_attention_layernorm": hidden,
    }


def _inside_gpt2(model: ModelShape) -> dict[str, int]:
    hidden, inner = model.hidden, model.intermediate
    return {
        "attn.c_attn": 3 * hidden * hidden,
        "attn.c_proj": hidden * hidden,
        "mlp.c_fc": hidden * inner,
        "mlp.c_proj": inner * hidden,
    }
