"""Eight LoRA adapters in one batch, beside the same batch without adapters and beside eight merged models, on one CPU
thread.

    python benchmarks/serving_adapters.py [--repeats 3] [--out benchmarks/results/serving_adapters.json]

A random Llama of 33.6 M parameters (8 layers, width 512) and eight random adapters on all its linear layers, saved by
PEFT. 16 requests of 32 to 256 tokens in and 64 out, two for each adapter, all of them there at the start:

  base       no request has an adapter
  adapters   one batch, two requests for each adapter
  merged     eight models that PEFT has merged, one after another, each with its two requests; putting a model in
             memory is not counted, so this is the least that swapping models can take

Sides run interleaved; times are CPU seconds of the process, because wall time on a shared machine is noise. A
request's latency is the CPU time from the start of the run to its last token. Tokens of `adapters` and `merged` are
compared one by one.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import peft
import torch
import transformers
from benchmarks.gpu.serving import make_engine, make_model, random_prompt

from busbar.workloads.serving.adapters import AdapterStore
from busbar.workloads.serving.core import EngineCore
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.settings import AdapterSource

SHAPE: dict[str, int] = {"layers": 8, "hidden": 512, "heads": 8, "kv": 4, "mlp": 1536, "vocab": 8192}
ADAPTERS, EACH, OUTPUT = 8, 2, 64
RANKS = (8, 16)
KV_BYTES, ADAPTER_BYTES = 256 * 2**20, 2**30
AIMS = {"tokensPerCpuSecondOverBase": 0.7, "p95LowerThanMerged": 0.335}
GREEDY = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)


@dataclass
class Run:
    """One side of one repeat."""

    cpu_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [random_prompt(rng.randrange(32, 257), SHAPE["vocab"], i) for i in range(ADAPTERS * EACH)]


def save_adapters(model: Any, folder: Path, rank: int) -> list[Any]:
    """Writes the adapters to `folder`/0, 1, …; the models with each merged."""
    merged = []
    for number in range(ADAPTERS):
        torch.manual_seed(100 + number)
        config = peft.LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            target_modules="all-linear",
            init_lora_weights=False,
            task_type="CAUSAL_LM",
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted: Any = peft.get_peft_model(copy.deepcopy(model), config)
            adapted.save_pretrained(folder / str(number))
            merged.append(adapted.merge_and_unload())
    return merged


def serve(
    core: EngineCore, store: AdapterStore | None, asked: Sequence[list[int]], began: float, into: Run
) -> None:
    """Runs requests to their ends; with a store, request i has the adapter i modulo their number."""
    answers: list[list[int]] = [[] for _ in asked]
    for index, prompt in enumerate(asked):
        adapter = None if store is None else store.held(str(index % ADAPTERS))
        core.submit(str(index), prompt, GREEDY, 0.0, adapter=adapter)
    while not core.idle:
        for delta in core.step():
            answers[int(delta.request_id)] += delta.tokens
            if delta.finish is not None:
                into.latencies_s.append(time.process_time() - began)
    into.answers += answers


def one_batch(core: EngineCore, store: AdapterStore | None, asked: Sequence[list[int]]) -> Run:
    run, began = Run(), time.process_time()
    serve(core, store, asked, began, run)
    run.cpu_s = time.process_time() - began
    return run


def one_after_another(cores: Sequence[EngineCore], asked: Sequence[list[int]]) -> Run:
    run, began = Run(), time.process_time()
    for number, core in enumerate(cores):
        serve(core, None, asked[number::ADAPTERS], began, run)
    run.cpu_s = time.process_time() - began
    return run


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(rank: int, repeats: int) -> dict[str, Any]:
    asked = prompts()
    model = make_model(SHAPE, torch.device("cpu"), torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        merged = save_adapters(model, Path(folder), rank)
        core = make_engine(model, KV_BYTES, len(asked))
        store = AdapterStore(core.runner.decoder.arch, torch.device("cpu"), torch.float32, ADAPTER_BYTES)
        for number in range(ADAPTERS):
            store.add(AdapterSource(str(number), Path(folder) / str(number)))
    cores = [make_engine(each, KV_BYTES, EACH) for each in merged]
    sides: dict[str, Callable[[], Run]] = {
        "base": partial(one_batch, core, None, asked),
        "adapters": partial(one_batch, core, store, asked),
        "merged": partial(one_after_another, cores, asked),
    }
    runs: dict[str, list[Run]] = {side: [] for side in sides}
    for repeat in range(repeats + 1):
        for side, serve_all in sides.items():
            found = serve_all()
            if repeat:  # the first is a warm-up
                runs[side].append(found)
    return row_of(rank, runs, store.bytes)


def row_of(rank: int, runs: dict[str, list[Run]], adapter_bytes: int) -> dict[str, Any]:
    seconds = {side: statistics.median(run.cpu_s for run in each) for side, each in runs.items()}
    p95 = {
        side: statistics.median(percentile(run.latencies_s, 0.95) for run in each)
        for side, each in runs.items()
    }
    tokens = ADAPTERS * EACH * OUTPUT
    in_order = [runs["adapters"][0].answers[i::ADAPTERS] for i in range(ADAPTERS)]
    ours = [answer for pair in in_order for answer in pair]
    ratio = seconds["base"] / seconds["adapters"]
    lower = 1 - p95["adapters"] / p95["merged"]
    row = {
        "rank": rank,
        "requests": ADAPTERS * EACH,
        "tokensPerCpuSecond": {side: round(tokens / each, 1) for side, each in seconds.items()},
        "tokensPerCpuSecondOverBase": round(ratio, 3),
        "tokensPerCpuSecondOverMerged": round(seconds["merged"] / seconds["adapters"], 2),
        "p95LatencyCpuSeconds": {side: round(each, 3) for side, each in p95.items()},
        "p95LowerThanMerged": round(lower, 3),
        "answersEqualToMerged": sum(a == b for a, b in zip(ours, runs["merged"][0].answers, strict=True)),
        "adapterBytes": adapter_bytes,
        "cpuSeconds": {side: [round(run.cpu_s, 3) for run in each] for side, each in runs.items()},
        "aims": AIMS,
        "aimsMet": {
            "tokensPerCpuSecondOverBase": ratio >= AIMS["tokensPerCpuSecondOverBase"],
            "p95LowerThanMerged": lower >= AIMS["p95LowerThanMerged"],
        },
    }
    print(
        f"rank {rank}: {row['tokensPerCpuSecond']} tokens per CPU second, {ratio:.2f}x base, p95 {lower:.0%} lower "
        f"than merged models, equal answers {row['answersEqualToMerged']}",
        file=sys.stderr,
    )
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(rank, arguments.repeats) for rank in RANKS]
    result = {
        "benchmark": "serving_adapters",
        "command": " ".join(["python", "benchmarks/serving_adapters.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, 1 thread, shared",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
        },
        "model": {**SHAPE, "dtype": "float32"},
        "adapters": ADAPTERS,
        "adaptedLayers": "all linear layers",
        "outputTokens": OUTPUT,
        "rows": rows,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0 if all(row["answersEqualToMerged"] == row["requests"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
