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

CONSTANTS: dict[Any, dict[str, int | bool]] = {
    decode_kernel._attend_shares: {
        "HEADS": 32,
        "GROUP": 4,
        "PADDED_GROUP": 16,
        "DIM": 128,
        "PADDED_DIM": 128,
        "SLOTS": 64,
        "TILE": decode_kernel.TILE,
    },
    decode_kernel._merge: {"HEADS": 32, "DIM": 128, "PADDED_DIM": 128, "PADDED_SPLITS": 8},
    layer_kernels._add_norm: {"ADDS": True, "PADDED": 4096},
    layer_kernels._turn_and_store: {
        "HEADS": 32,
        "KV_HEADS": 8,
        "DIM": 128,
        "PADDED_DIM": 128,
        "NORMS": True,
    },
    layer_kernels._gate: {"COLUMNS": layer_kernels.COLUMNS},
}
NUMBERS = [
    "queries",
    "pool",
    "out",
    "x",
    "added",
    "weight",
    "total",
    "normed",
    "qkv",
    "cosines",
    "sines",
    "query_norm",
    "key_norm",
    "keys",
    "gate_up",
]
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
    types = OTHERS | dict.fromkeys(NUMBERS, f"*{dtype}")
    shared = {}
    for kernel, constants in CONSTANTS.items():
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        source = ASTSource(
            fn=kernel, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants
        )
        built = triton.compile(
            source,
            target=GPUTarget("cuda", capability, 32),
            options={"num_stages": decode_kernel.STAGES},
        )
        shared[kernel.__name__] = built.metadata.shared
    return shared


if __name__ == "__main__":
    targets = [target.split(":") for target in sys.argv[1:]]
    print(json.dumps({capability: shared_memory(int(capability), dtype) for capability, dtype in targets}))
