"""What it costs to add gradients of micro-batches up in bfloat16 instead of float32 (`gradientSums`): loss, error, CPU seconds.

    python benchmarks/training_sums.py --output benchmarks/results/training_sums.json

Loss: a small Llama with weights in bfloat16 (and fp32 masters) reads the source text of Python's standard library, 32
micro-batches of one sequence a step, once per type and seed. All runs of a seed begin with the same weights and read the same
batches. Beside them stands a run with everything in float32, and how much seeds differ.

Error: relative error of the gradient of a whole step against float32 for 16, 64 and 256 micro-batches, at the first weights.

CPU seconds per step of the runs above, in which types take turns by whole runs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.progress import show
from benchmarks.result import circumstances, publish
from benchmarks.training_state import (
    VOCABULARY,
    bits_per_byte,
    corpus,
    document,
    open_trainer,
)

from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.model import open_model
from busbar.workloads.training.packing import Packed
from busbar.workloads.training.settings import EXACT

LENGTH, SEQUENCES = 128, 32
WAYS = {
    "bfloat16": {"dtype": "bfloat16", "gradientSums": "weights"},
    "float32": {"dtype": "bfloat16", "gradientSums": "float32"},
    "all in float32": {"dtype": "float32"},
}


def job(way: str, seed: int, steps: int) -> dict[str, Any]:
    batch = {"sequences": SEQUENCES, "microBatch": 1}
    return document(EXACT, 128, 4, "resident", steps=steps, seed=seed, threads=1, batch=batch, **WAYS[way])


def run(way: str, seed: int, given: argparse.Namespace, train: Any, held_out: Any) -> dict[str, float]:
    trainer, data = open_trainer(job(way, seed, given.steps)), Packed.cut(train, LENGTH, seed, SEQUENCES)
    losses, seconds = [], []
    for step in range(given.steps):
        begun = time.process_time()
        losses.append(trainer.step(data).loss)
        seconds.append(time.process_time() - begun)
        show(f"{way}, seed {seed}", step + 1, given.steps)
    found = {
        "loss": statistics.fmean(losses[-given.last :]),
        "heldOutBitsPerByte": bits_per_byte(trainer, held_out),
        "cpuSecondsPerStep": statistics.median(seconds),
    }
    trainer.close()
    return found


def quality(given: argparse.Namespace) -> dict[str, Any]:
    train, held_out = corpus()
    every: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for seed in range(given.seeds):
        for way in WAYS:
            every[way].append(run(way, seed, given, train, held_out))
    answer: dict[str, Any] = {"steps": given.steps, "microBatches": SEQUENCES}
    for name in ("loss", "heldOutBitsPerByte"):
        values = {way: [each[name] for each in runs] for way, runs in every.items()}
        answer[name] = {way: [round(each, 5) for each in own] for way, own in values.items()}
        answer[name]["spreadOfSeeds"] = round(max(values["float32"]) - min(values["float32"]), 5)
        pairs = zip(values["bfloat16"], values["float32"], strict=True)
        answer[name]["bfloat16MoreThanFloat32"] = [round(one - other, 5) for one, other in pairs]
    cpu = {way: statistics.median(each["cpuSecondsPerStep"] for each in runs) for way, runs in every.items()}
    answer["cpuSecondsPerStep"] = {way: round(each, 4) for way, each in cpu.items()}
    answer["float32CpuToBfloat16"] = round(cpu["float32"] / cpu["bfloat16"], 3)
    return answer


def errors(micro_batches: int) -> dict[str, float]:
    text = corpus()[0][: micro_batches * LENGTH].astype(np.int64)
    rows = torch.from_numpy(text.reshape(micro_batches, LENGTH))
    weights, found = None, {}
    for way in ("bfloat16", "float32", "all in float32"):
        recipe = open_model(parse_engine(job(way, 0, 100)), None, VOCABULARY, 0)
        model: Any = recipe.build()
        weights = weights or model.state_dict()
        model.load_state_dict(weights)
        for done, row in enumerate(rows.split(1)):  # type: ignore[no-untyped-call]
            (model(input_ids=row, labels=row, use_cache=False).loss / micro_batches).backward()
            show(f"{way}, {micro_batches} terms", done + 1, micro_batches)
        found[way] = torch.cat([each.grad.double().flatten() for each in model.parameters()])
    exact = found.pop("all in float32")
    return {way: round(float((each - exact).norm() / exact.norm()), 5) for way, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--last", type=int, default=50, help="steps whose mean loss is reported")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        **circumstances(),
        "relativeErrorOfGradients": {str(count): errors(count) for count in (16, 64, 256)},
        "quality": quality(given),
    }
    assert all(math.isfinite(each) for way in WAYS for each in result["quality"]["loss"][way])
    publish(result, given.output)


if __name__ == "__main__":
    main()
