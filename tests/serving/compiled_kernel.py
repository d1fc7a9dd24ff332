"""Compiles our kernels for GPUs that need not be there: `python -m tests.serving.compiled_kernel 90:bf16 75:fp16`.

Prints JSON: for each of them the bytes of shared memory of each kernel.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from busbar.workloads.serving import decode_kernel, layer_kernels

SHARES = {
    "HEADS": 32,
    "GROUP": 4,
    "PADDED_GROUP": 16,
    "DIM": 128,
    "PADDED_DIM": 128,
    "SLOTS": 64,
    "TILE": decode_kernel.TILE,
}
TURNS = {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "PADDED_DIM": 128, "NORMS": True}
CODES = {"terms": "*fp16"}
Variant = tuple[Any, dict[str, int | bool], dict[str, str]]
VARIANTS: dict[str, Variant] = {
    "shares": (decode_kernel._attend_shares, {**SHARES, "BITS": 0}, {}),
    "shares of int8": (decode_kernel._attend_shares, {**SHARES, "BITS": 8}, {**CODES, "pool": "*i8"}),
    "shares of int4": (decode_kernel._attend_shares, {**SHARES, "BITS": 4}, {**CODES, "pool": "*u8"}),
    "merge": (
        decode_kernel._merge,
        {"HEADS": 32, "DIM": 128, "PADDED_DIM": 128, "PADDED_SPLITS": 8},
        {},
    ),
    "add and norm": (layer_kernels._add_norm, {"ADDS": True, "PADDED": 4096}, {}),
    "turn and store": (layer_kernels._turn_and_store, {**TURNS}, {}),
    "gate": (layer_kernels._gate, {"COLUMNS": layer_kernels.COLUMNS}, {}),
}
"""Kernels with their constants, and the arguments whose types are others than of plain numbers."""
NUMBERS = (
    *(
        "queries",
        "pool",
        "terms",
        "out",
        "x",
        "added",
        "weight",
        "total",
        "normed",
        "qkv",
        "cosines",
        "sines",
    ),
    *("query_norm", "key_norm", "keys", "gate_up"),
)
OTHERS = {
    "tables": "*i32",
    "lengths": "*i32",
    "mixed": "*fp32",
    "log_sums": "*fp32",
    "slots": "*i64",
    "scale": "fp32",
    "eps": "fp32",
}
"""Of the arguments that are neither numbers of the model's dtype nor int32."""


def shared_memory(capability: int, dtype: str) -> dict[str, int]:
    shared = {}
    for name, (kernel, constants, changes) in VARIANTS.items():
        types = OTHERS | dict.fromkeys(NUMBERS, f"*{dtype}") | changes
        signature = {each: types.get(each, "i32") for each in kernel.arg_names}
        source = ASTSource(
            fn=kernel, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants
        )
        built = triton.compile(
            source,
            target=GPUTarget("cuda", capability, 32),
            options={"num_stages": decode_kernel.STAGES},
        )
        shared[name] = built.metadata.shared
    return shared


if __name__ == "__main__":
    targets = [target.split(":") for target in sys.argv[1:]]
    print(json.dumps({capability: shared_memory(int(capability), dtype) for capability, dtype in targets}))
