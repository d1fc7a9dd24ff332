"""Ranks that share each sequence (`parallelism.sequence`): length, memory, bytes handed over, and CPU seconds.

    python benchmarks/training_sequences.py --output benchmarks/results/training_sequences.json

Two series, each of 1, 2 and 4 ranks (gloo, one thread each). In `same length` all train the same tokens, and the CPU seconds
of a step, over all ranks, are set against those of one rank, which is the least that can be reached; losses are compared
with those of one rank. In `growing together` the length is 1,024 tokens per rank: what a rank hands over to the others in a
step and what its activations take should not grow. A rank keeps 1 / n of what it exchanges, so (n - 1) / n of it are handed
over; `ofItsPart` is the part before that. Last, the longest sequence that fits under one `deviceMemory` for 1 to 8 ranks, by the
engine's own plan on fake tensors. Activations are recomputed, logits and MLPs in tiles.

Ranks are timed turn by turn with one rank alone; CPU seconds on a busy machine say more than seconds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gang_here import run_gang
from benchmarks.progress import say

from busbar.workloads.training.choice import make_plan
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.layouts import first_that_fits
from busbar.workloads.training.model import measure_demand, open_model
from busbar.workloads.training.packing import Packed
from busbar.workloads.training.plan import MemoryLimits
from busbar.workloads.training.ranks import Alone, Ranks
from busbar.workloads.training.trainer import Trainer

CPU, VOCABULARY, POSITIONS, MIB = torch.device("cpu"), 4096, 131_072, 2**20
WORLDS, EACH, TOGETHER = (1, 2, 4), 1024, 4096  # ranks; tokens of a rank, and of all in the first series
CAP_MIB = 256
CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "max_position_embeddings": POSITIONS,
}


def spec(tokens: int, ranks: int) -> Any:
    return parse_engine(
        {
            "model": {"config": dict(CONFIG)},
            "tokenizer": {"train": {"vocabSize": VOCABULARY}},
            "data": {"uri": "pvc://text", "sequenceLength": tokens},
            "steps": 1000,
            "batch": {"sequences": 1, "microBatch": 1},
            "optimizer": {"learningRate": 1e-3, "schedule": "constant", "gradientClip": 1.0},
            "mode": "resident",
            "activations": "recompute",
            "loss": "tiled",
            "mlp": "tiled",
            "parallelism": {"sequence": ranks},
        }
    )


def train(ranks: Ranks, tokens: int, steps: int) -> dict[str, Any]:
    asked = spec(tokens, ranks.size)
    recipe = open_model(asked, None, VOCABULARY, 0)
    plan = make_plan(
        measure_demand(recipe, asked, CPU, ranks.size), MemoryLimits(None, None, True), "resident"
    )
    trainer = Trainer(asked, recipe, plan, CPU, ranks=ranks)
    found = np.random.default_rng(5).integers(0, VOCABULARY, tokens * 64).astype(np.uint32)
    data, losses, cpu, wall = Packed.cut(found, tokens, 0, 1), [], [], []
    for _ in range(steps + 1):  # the first one warms up
        started, used = time.monotonic(), time.process_time()
        losses.append(trainer.step(data).loss)
        wall.append(time.monotonic() - started)
        cpu.append(time.process_time() - used)
    planned, seen = plan.device["activations"], trainer.device_arena.peak["activations"]
    return {
        "losses": losses,
        "cpuSecondsPerStep": statistics.median(cpu[1:]),
        "secondsPerStep": statistics.median(wall[1:]),
        "plannedActivationBytes": planned,
        "measuredActivationBytes": seen,
        "sentBytesPerStep": 0 if trainer.sequence is None else trainer.sequence.sent_bytes // (steps + 1),
    }


def run(ranks: int, tokens: int, steps: int) -> dict[str, Any]:
    """One row: CPU seconds over all ranks, the rest of the rank that has most."""
    say(f"{ranks} ranks, {tokens:,} tokens")
    every = [train(Alone(), tokens, steps)] if ranks == 1 else run_gang(ranks, train, tokens, steps)
    most = max(each["measuredActivationBytes"] for each in every)
    sent = every[0]["sentBytesPerStep"]
    return {
        "ranks": ranks,
        "tokens": tokens,
        "losses": every[0]["losses"],
        "cpuSecondsPerStep": round(sum(each["cpuSecondsPerStep"] for each in every), 3),
        "secondsPerStep": round(every[0]["secondsPerStep"], 3),
        "measuredActivationBytes": most,
        "measuredToPlanned": round(most / every[0]["plannedActivationBytes"], 4),
        "sentBytesPerStep": sent,
        "ofItsPart": 0 if ranks == 1 else sent * ranks // (ranks - 1),
    }


def beside_one(ranks: int, rounds: int, steps: int) -> dict[str, Any]:
    """A row of the first series: medians of ratios, each of a pair of runs one after the other."""
    pairs = [(run(1, TOGETHER, steps), run(ranks, TOGETHER, steps)) for _ in range(rounds)]
    row = pairs[0][1]
    losses = zip(pairs[0][0]["losses"], row.pop("losses"), strict=True)
    return row | {
        "cpuToOneRank": round(
            statistics.median(b["cpuSecondsPerStep"] / a["cpuSecondsPerStep"] for a, b in pairs), 3
        ),
        "activationsToOneRank": round(
            row["measuredActivationBytes"] / pairs[0][0]["measuredActivationBytes"], 3
        ),
        "largestDifferenceOfLosses": max(abs(a - b) for a, b in losses),
    }


def longest(ranks: int) -> int:
    limits = MemoryLimits(CAP_MIB * MIB, None, device_is_host=True)
    good, bad = 8, POSITIONS + ranks
    while bad - good > ranks:
        middle = (good + bad) // 2 // ranks * ranks
        asked = spec(middle, ranks)
        demand = measure_demand(open_model(asked, None, VOCABULARY, 0), asked, CPU, ranks)
        good, bad = (middle, bad) if first_that_fits(demand, limits, "resident") else (good, middle)
        say(f"longest sequence of {ranks} ranks: between {good:,} and {bad:,}")
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of each run, after one that warms up")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    import transformers

    found = {ranks: longest(ranks) for ranks in (1, 2, 4, 8)}
    document: dict[str, Any] = {
        "command": f"python benchmarks/training_sequences.py --rounds {given.rounds} --steps {given.steps}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, one thread per rank",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "model": CONFIG | {"vocab_size": VOCABULARY},
        "sameLength": [beside_one(ranks, given.rounds, given.steps) for ranks in WORLDS if ranks > 1],
        "growingTogether": [run(ranks, EACH * ranks, 1) for ranks in WORLDS],
        "longest": {
            "deviceMemoryBytes": CAP_MIB * MIB,
            "tokens": found,
            "toOneRank": {ranks: round(each / found[1], 2) for ranks, each in found.items()},
        },
    }
    for row in document["growingTogether"]:
        row.pop("losses")
    text = json.dumps(document, indent=2) + "\n"
    if given.output is not None:
        given.output.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
