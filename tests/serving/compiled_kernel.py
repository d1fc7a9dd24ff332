"""Compiles the decoding kernel for GPUs that need not be there: `python -m tests.serving.compiled_kernel 90:bf16 75:fp16`.

Prints JSON: for each of them the bytes of shared memory of each kernel.
"""

from __future__ import annotations

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from busbar.workloads.serving import decode_kernel

SIZES = {
    "HEADS": 32,
    "GROUP": 4,
    "PADDED_GROUP": 16,
    "DIM": 128,
    "PADDED_DIM": 128,
    "SLOTS": 64,
    "TILE": decode_kernel.TILE,
    "PADDED_SPLITS": 8,
}


def shared_memory(capability: int, dtype: str) -> dict[str, int]:
    types = {
        "queries": f"*{dtype}",
        "pool": f"*{dtype}",
        "tables": "*i64",
        "lengths": "*i32",
        "mixed": "*fp32",
        "log_sums": "*fp32",
        "out": f"*{dtype}",
    } | dict.fromkeys(SIZES, "constexpr")
    shared = {}
    for kernel in (decode_kernel._attend_shares, decode_kernel._merge):
        names = kernel.arg_names
        source = ASTSource(
            fn=kernel,
            signature={name: types.get(name, "i32") for name in names},
            constexprs={name: value for name, value in SIZES.items() if name in names},
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
