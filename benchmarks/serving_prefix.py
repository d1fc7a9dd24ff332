"""What the prefix cache saves on the real engine, on one CPU thread: the same requests with the cache on and off.

    python benchmarks/serving_prefix.py [--repeats 3] [--out benchmarks/results/serving_prefix.json]

The row of the full size has 32 beginnings of 2,048 tokens and 1,024 requests with 128 tokens of their own. Here it is
scaled down to a quarter, so that the six runs of each row take minutes: 8 beginnings and 256 requests, each beginning
asked as often (32 times), of a random Llama of the demo's size (4 layers, width 256). Both sides run interleaved, each
repeat with new engines, so that every repeat starts with an empty cache. Times are CPU seconds of the process.
`benchmarks/serving_fairness.py` has the row in full size, with simulated step times.

  shuffled     all requests at once, in random order
  in a row     the requests of one beginning behind each other, in steps of 8,192 tokens instead of 512
  isolation    the time to the first token of single requests: one whose beginning the tenant has asked before,
               one whose beginning only another tenant has asked, and one whose beginning nobody has asked
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.gpu.serving import SHAPES, make_engine, make_model, random_prompt

from busbar.workloads.serving.core import EngineCore
from busbar.workloads.serving.fairness import Owner
from busbar.workloads.serving.sampling import SamplingParams

SHAPE = SHAPES["tiny"]
BEGINNINGS, BEGINNING, OWN, EACH, OUTPUT = 8, 2048, 128, 32, 16
RUNNING, KV_BYTES = 16, 512 * 2**20
SINGLE = 24
"""Requests of each kind in the row isolation."""
AIMS = {"computedTokensOverUnique": 1.05, "requestsPerSecondOverCacheOff": 2.5}
GREEDY = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Run:
    """One side of one repeat."""

    cpu_s: float
    computed: int
    cached: int
    answers: tuple[tuple[int, ...], ...]


def beginning(number: int) -> list[int]:
    return random_prompt(BEGINNING, SHAPE["vocab"], number)


def requests(order: str) -> list[list[int]]:
    found = [
        beginning(i // EACH) + random_prompt(OWN, SHAPE["vocab"], 1000 + i) for i in range(BEGINNINGS * EACH)
    ]
    if order == "shuffled":
        random.Random(0).shuffle(found)
    return found


def serve(model: Any, prompts: Sequence[list[int]], cache: bool, step_tokens: int) -> Run:
    core = engine(model, cache, step_tokens)
    answers: list[list[int]] = [[] for _ in prompts]
    began = time.process_time()
    for index, prompt in enumerate(prompts):
        core.submit(str(index), prompt, GREEDY, 0.0)
    while not core.idle:
        for delta in core.step():
            answers[int(delta.request_id)] += delta.tokens
    took = time.process_time() - began
    computed = round(core.speed.prefill_tokens + core.speed.decode_tokens)
    return Run(took, computed, core.scheduler.cache_hits, tuple(map(tuple, answers)))


def engine(model: Any, cache: bool, step_tokens: int) -> EngineCore:
    core = make_engine(model, KV_BYTES, RUNNING, prefix_cache=cache)
    core.scheduler.limits = replace(core.scheduler.limits, max_batched_tokens=step_tokens)
    return core


def shared(model: Any, order: str, step_tokens: int, repeats: int) -> dict[str, Any]:
    prompts = requests(order)
    runs: dict[str, list[Run]] = {"on": [], "off": []}
    for _ in range(repeats):
        for side, each in runs.items():
            each.append(serve(model, prompts, side == "on", step_tokens))
    median = {side: sorted(run.cpu_s for run in each)[repeats // 2] for side, each in runs.items()}
    unique = BEGINNINGS * BEGINNING + len(prompts) * (OWN + OUTPUT - 1)
    on, off = runs["on"][0], runs["off"][0]
    row = {
        "row": order,
        "requests": len(prompts),
        "stepTokens": step_tokens,
        "uniqueTokens": unique,
        "computedTokens": {"on": on.computed, "off": off.computed},
        "cachedTokens": on.cached,
        "computedTokensOverUnique": round(on.computed / unique, 3),
        "requestsPerSecondOverCacheOff": round(median["off"] / median["on"], 2),
        "equalAnswers": sum(a == b for a, b in zip(on.answers, off.answers, strict=True)),
        "cpuSeconds": {side: [round(run.cpu_s, 2) for run in each] for side, each in runs.items()},
    }
    met = {
        "computedTokensOverUnique": on.computed <= AIMS["computedTokensOverUnique"] * unique,
        "requestsPerSecondOverCacheOff": median["off"]
        >= AIMS["requestsPerSecondOverCacheOff"] * median["on"],
    }
    print(
        f"{order}: computed {row['computedTokensOverUnique']} x unique, "
        f"{row['requestsPerSecondOverCacheOff']}x requests/s, equal answers {row['equalAnswers']}",
        file=sys.stderr,
    )
    return {**row, "aims": AIMS, "aimsMet": met}


def isolation(model: Any) -> dict[str, Any]:
    """Single requests, the three kinds interleaved; milliseconds of CPU to the first token."""
    core = engine(model, True, 512)
    times: dict[str, list[float]] = {"own tenant": [], "other tenant": [], "nobody": []}
    cached: dict[str, int] = dict.fromkeys(times, 0)
    for number in range(SINGLE):
        ask(core, beginning(number), "a", number)
        kinds = {"own tenant": ("a", number), "other tenant": ("b", number), "nobody": ("b", 500 + number)}
        names = list(kinds)
        random.Random(number).shuffle(names)
        for name in names:
            tenant, place = kinds[name]
            took, found = ask(core, beginning(place), tenant, 2000 + number)
            times[name].append(took)
            cached[name] += found
    sorted_ms = {name: sorted(each) for name, each in times.items()}
    return {
        "row": "isolation",
        "requestsOfEachKind": SINGLE,
        "cachedTokens": cached,
        "firstTokenCpuMs": {
            name: {"p10": each[SINGLE // 10], "p50": each[SINGLE // 2], "p90": each[SINGLE * 9 // 10]}
            for name, each in sorted_ms.items()
        },
        "greatestDifferenceOfDistributions": {
            "other tenant, nobody": distance(times["other tenant"], times["nobody"]),
            "other tenant, own tenant": distance(times["other tenant"], times["own tenant"]),
        },
        "note": "two-sample Kolmogorov-Smirnov distance: 0 equal, 1 disjoint; two equal distributions of this size "
        f"stay under {1.358 * (2 / SINGLE) ** 0.5:.2f} in 95 of 100 runs",
    }


def ask(core: EngineCore, head: list[int], tenant: str, seed: int) -> tuple[float, int]:
    """(CPU milliseconds to the first token, cached tokens) of a request alone in the engine."""
    prompt = head + random_prompt(OWN, SHAPE["vocab"], seed)
    began = time.process_time()
    core.submit("one", prompt, replace(GREEDY, max_tokens=1), 0.0, Owner(tenant))
    while not (deltas := core.step()):
        pass
    return round((time.process_time() - began) * 1e3, 1), deltas[0].cached


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """The greatest difference of the two cumulative distributions."""
    points = sorted({*one, *other})
    return round(
        max(
            abs(sum(v <= p for v in one) / len(one) - sum(v <= p for v in other) / len(other)) for p in points
        ),
        3,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = make_model(SHAPE, torch.device("cpu"), torch.float32)
    rows = [
        shared(model, "shuffled", 512, arguments.repeats),
        shared(model, "in a row", 8192, arguments.repeats),
        isolation(model),
    ]
    result = {
        "benchmark": "serving_prefix",
        "command": " ".join(["python", "benchmarks/serving_prefix.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, 1 thread, shared",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "model": {**SHAPE, "dtype": "float32"},
        "beginnings": BEGINNINGS,
        "beginningTokens": BEGINNING,
        "ownTokens": OWN,
        "outputTokens": OUTPUT,
        "scaledDownFrom": "32 beginnings, 1,024 requests",
        "rows": rows,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
