"""Models with experts: the serving engine's tokens/s beside transformers' `generate`, on this CPU, in the same run.

    python benchmarks/serving_experts.py [--model mixtral] [--repeats 3] [--out benchmarks/results/serving_experts.json]

One thread, float32, random models of 4 layers and width 512 that use about 21 M parameters for a token:

  mixtral     8 experts of width 768 in a layer, 2 for each token
  qwen3_moe   32 experts of width 384, 4 for each token

16 requests of 32 to 256 tokens, 64 tokens each, all at once; `generate` gets them as one batch, padded on the left, with
each of its two ways to compute experts: torch's grouped product (its default) and one expert after the other. Times are
CPU seconds of the process, interleaved, medians after one warm-up. Every token of all sides is compared.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from benchmarks.gpu.serving import make_engine, random_prompt, run_ours
from benchmarks.serving_cpu import MIXED_OUTPUT, MIXED_REQUESTS, Tokens, padded_transformers
from rich.progress import Progress

from busbar.workloads.serving.checkpoint import Checkpoint

SHAPE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MODELS: dict[str, Any] = {
    "mixtral": transformers.MixtralConfig(
        **SHAPE, intermediate_size=768, num_local_experts=8, num_experts_per_tok=2
    ),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **(SHAPE | {"head_dim": 64}),
        moe_intermediate_size=384,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    ),
}
WAYS = ("grouped_mm", "eager")


def generated(model: Any, way: str, prompts: Tokens) -> Tokens:
    model.config._experts_implementation = way
    return padded_transformers(model, prompts, MIXED_OUTPUT)


def compare(family: str, repeats: int, advance: Callable[[], object]) -> dict[str, Any]:
    """One row."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[family]).eval()  # type: ignore[no-untyped-call]
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        core = make_engine(model, 256 * 2**20, MIXED_REQUESTS, tensors=Checkpoint(Path(folder)))
    rng = random.Random(0)
    vocabulary = SHAPE["vocab_size"]
    prompts = [random_prompt(rng.randrange(32, 257), vocabulary, i) for i in range(MIXED_REQUESTS)]
    sides: dict[str, Callable[[], Tokens]] = {"ours": partial(run_ours, core, prompts, MIXED_OUTPUT)}
    sides |= {way: partial(generated, model, way, prompts) for way in WAYS}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    outputs: dict[str, Tokens] = {}
    for repeat in range(repeats + 1):
        for side, run in sides.items():
            began = time.process_time()
            outputs[side] = run()
            if repeat:
                seconds[side].append(round(time.process_time() - began, 4))
            advance()
    median = {side: sorted(times)[len(times) // 2] for side, times in seconds.items()}
    tokens = sum(map(len, outputs["ours"]))
    arch = core.runner.decoder.arch
    return {
        "model": family,
        "parameters": arch.parameter_count,
        "activeParameters": arch.active_parameter_count,
        "tokens": tokens,
        "equalTokens": all(found == outputs["ours"] for found in outputs.values()),
        "tokensPerCpuSecond": {side: round(tokens / each, 1) for side, each in median.items()},
        "ratioToFasterPeer": round(min(median[way] for way in WAYS) / median["ours"], 3),
        "cpuSeconds": seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with Progress() as bar:
        runs = (1 + len(WAYS)) * (arguments.repeats + 1)
        for family in arguments.model or MODELS:
            task = bar.add_task(family, total=runs)
            rows.append(compare(family, arguments.repeats, partial(bar.advance, task)))
    result = {
        "benchmark": "serving_experts",
        "command": " ".join(["python", "benchmarks/serving_experts.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, 1 thread",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "rows": rows,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0 if all(row["equalTokens"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
