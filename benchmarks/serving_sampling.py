"""The cost of sampling per step: 16 rows of a 128,256-token vocabulary, on one CPU thread.

    python benchmarks/serving_sampling.py [--repeats 7] [--out benchmarks/results/serving_sampling.json]

Beside it, in the same run and interleaved, a straightforward implementation of the same requests: every row
with a nucleus is sorted in float64, every bias is a write of its own, every row's log-probabilities are one
log-softmax. Times are CPU seconds of the process; rows named `flat` have nearly equal logits, so that no small set of
candidates contains the nucleus; this is the worst case, which language models do not produce.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))

import torch

from busbar.workloads.serving.sampler import Draw, sample
from busbar.workloads.serving.sampling import Randomness, SamplingParams
from busbar.workloads.serving.token_counts import TokenCounts

ROWS, VOCABULARY, SAMPLED = 16, 128_256, 500
BAR_MS = 10.0
ALL: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 0.9,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
    "logit_bias": tuple((token * 7, 1.0) for token in range(300)),
    "logprobs": 20,
}
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "greedy": ({"temperature": 0.0}, 4.0),
    "temperature": ({"temperature": 0.8}, 4.0),
    "top_p": ({"top_p": 0.9}, 4.0),
    "20 logprobs": ({"temperature": 0.0, "logprobs": 20}, 4.0),
    "all together": (ALL, 4.0),
    "all together without top_k": (ALL | {"top_k": 0}, 4.0),
    "flat: top_p": ({"top_p": 0.9}, 1.0),
}


def straightforward(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """A straightforward sampler."""
    logits = logits.clone()
    raw = logits.clone()
    chosen: list[int] = []
    for row, draw in zip(logits, draws, strict=True):
        params, counts = draw.params, draw.counts
        if counts is not None:
            old = row[counts.ids]
            old = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
            penalty = (
                params.presence_penalty * (counts.sampled > 0) + params.frequency_penalty * counts.sampled
            )
            row[counts.ids] = old - penalty
        for token, bias in params.logit_bias:
            row[token] += bias
        if params.greedy:
            chosen.append(int(row.argmax()))
        else:
            weights = torch.softmax(row / params.temperature, -1).double()
            order = None
            if params.needs_order:
                weights, order = weights.sort(descending=True, stable=True)
                weights[params.top_k or len(weights) :] = 0.0
                before = weights.cumsum(0) - weights
                weights[before >= params.top_p * weights.sum()] = 0.0
            heap = weights.cumsum(0)
            index = torch.searchsorted(heap, draw.randomness.uniform(draw.index) * heap[-1], right=True)
            chosen.append(int(index if order is None else order[index]))
    for row, draw in zip(raw, draws, strict=True):
        if draw.params.logprobs:
            torch.log_softmax(row, -1).topk(draw.params.logprobs).values.tolist()
    return chosen


def measure(name: str, asked: dict[str, Any], scale: float, repeats: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((ROWS, VOCABULARY), generator=generator) * scale
    params = SamplingParams(**asked)
    draws = []
    for number in range(ROWS):
        counts = TokenCounts(range(0, 3000, 3)) if params.penalises else None
        for token in range(SAMPLED if counts else 0):
            assert counts is not None
            counts.add(token * 11)
        draws.append(Draw(params, Randomness(number), 1, counts))
    sides: dict[str, Callable[[], list[int]]] = {
        "ours": lambda: [each.token for each in sample(logits, draws)],
        "straightforward": lambda: straightforward(logits, draws),
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    tokens: dict[str, list[int]] = {}
    for repeat in range(repeats + 1):
        for side, run in sides.items():
            began = time.process_time()
            tokens[side] = run()
            if repeat:
                times[side].append((time.process_time() - began) * 1e3)
    median = {side: sorted(each)[len(each) // 2] for side, each in times.items()}
    row = {
        "case": name,
        "oursCpuMs": round(median["ours"], 2),
        "straightforwardCpuMs": round(median["straightforward"], 2),
        "ratio": round(median["straightforward"] / median["ours"], 1),
        "leastCpuMs": {side: round(min(each), 2) for side, each in times.items()},
        "equalTokens": tokens["ours"] == tokens["straightforward"],
    }
    print(
        f"{name:27} ours {row['oursCpuMs']:8} ms, straightforward {row['straightforwardCpuMs']:8} ms: "
        f"{row['ratio']}x, equal tokens: {row['equalTokens']}",
        file=sys.stderr,
    )
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(name, *case, arguments.repeats) for name, case in CASES.items()]
    together = next(row for row in rows if row["case"] == "all together")
    result = {
        "benchmark": "serving_sampling",
        "command": " ".join(["python", "benchmarks/serving_sampling.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, 1 thread, shared",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "rowsPerStep": ROWS,
        "vocabulary": VOCABULARY,
        "barMs": BAR_MS,
        "barMet": together["oursCpuMs"] <= BAR_MS,
        "rows": rows,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
