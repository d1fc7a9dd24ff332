"""How many parameters an adapter has, from a model's dimensions alone. No torch here: `busbar plan` runs without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from busbar.workloads.training.demand import GroupSize
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.settings import Adapter

if TYPE_CHECKING:
    from busbar.scheduler.fit import ModelShape

GRAIN = 1024  # elements at whose multiples a parameter begins (`groups`)
Matrices = dict[str, tuple[int, int]]  # by name: inputs and outputs


def linear_layers(shape: ModelShape) -> Matrices:
    """The linear layers of one block: those of Llama and its many relatives, or of GPT-2."""
    hidden, inner = shape.hidden, shape.intermediate
    if shape.architecture == "gpt2":
        return {
            "attn.c_attn": (hidden, 3 * hidden),
            "attn.c_proj": (hidden, hidden),
            "mlp.c_fc": (hidden, inner),
            "mlp.c_proj": (inner, hidden),
        }
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layers = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
    }
    if shape.experts:  # they are stacked, so no linear layers
        return layers
    layers |= {"mlp.up_proj": (hidden, inner), "mlp.down_proj": (inner, hidden)}
    return layers | ({"mlp.gate_proj": (hidden, inner)} if shape.gated else {})


def adapted(shape: ModelShape, adapter: Adapter) -> Matrices:
    """Those that the adapter is for. Raises InvalidJob."""
    layers = linear_layers(shape)
    if adapter.targets is None:
        return layers
    unknown = [t for t in adapter.targets if not any(f".{name}".endswith(f".{t}") for name in layers)]
    if unknown:
        raise InvalidJob(
            "spec.engine.adapter.targets",
            f"{unknown[0]} has no size that is known without the model",
            f"name some of {', '.join(name.rpartition('.')[2] for name in layers)}; the engine reads the model itself",
        )
    return {
        name: size
        for name, size in layers.items()
        if any(f".{name}".endswith(f".{target}") for target in adapter.targets)
    }


def parameters(shape: ModelShape, adapter: Adapter) -> int:
    return shape.layers * sum(
        adapter.rank * (rows + columns) + (columns if adapter.dora else 0)
        for rows, columns in adapted(shape, adapter).values()
    )


def group_sizes(shape: ModelShape, adapter: Adapter) -> tuple[GroupSize, ...]:
    """The engine's groups: the adapter of each block, every tensor at a multiple of GRAIN."""
    block = sum(
        _grain(adapter.rank * rows)
        + _grain(adapter.rank * columns)
        + (_grain(columns) if adapter.dora else 0)
        for rows, columns in adapted(shape, adapter).values()
    )
    return tuple(GroupSize(f"block-{index}", block) for index in range(shape.layers))


def merge_bytes(shape: ModelShape, adapter: Adapter, weight_bytes: int) -> int:
    """What adding it to the weights needs, as `adapter.merge_bytes` says of the model itself."""
    largest = max(rows * columns for rows, columns in adapted(shape, adapter).values())
    return 4 * largest * weight_bytes if adapter.merge else 0


def _grain(elements: int) -> int:
    return -(-elements // GRAIN) * GRAIN
