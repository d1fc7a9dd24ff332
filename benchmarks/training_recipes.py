"""Short sequences first (`lengthWarmup`), and blocks that steps leave out (`layerDrop`): CPU seconds until a small model is as
good on held-out text as without.

    python benchmarks/training_recipes.py --output benchmarks/results/training_recipes.json
    python benchmarks/training_recipes.py --only layer-drop --output benchmarks/results/training_layer_drop.json

A small Llama reads the source text of Python's standard library as bytes, in sequences of 512. For each seed it is trained for
--steps steps as usual, and with each recipe for as many, and then for more of them, until it is as good on held-out
sequences of 512. Each run has its own schedule of learning rates, over all of its steps. Reported are the CPU seconds of the
steps, as a ratio to those without the recipe, at the first number of steps that is as good; and all runs with their loss.
A recipe that is never as good is said to be so.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.progress import show
from benchmarks.result import circumstances, publish
from benchmarks.training_state import corpus, document, open_trainer

from busbar.workloads.training.packing import Packed
from busbar.workloads.training.settings import EXACT

LENGTH, SEQUENCES, HELD_OUT = 512, 4, 64
RECIPES: dict[str, Callable[[int], dict[str, Any]]] = {  # fields of the job, by the number of steps
    "from 64, over half": lambda steps: {"lengthWarmup": {"start": 64, "steps": round(0.5 * steps)}},
    "from 64, over a quarter": lambda steps: {"lengthWarmup": {"start": 64, "steps": round(0.25 * steps)}},
    "layer-drop": lambda steps: {"layerDrop": {"keep": 0.5, "rate": 10 / steps}},
}
MORE = (1.0, 1.15, 1.3, 1.5)  # times the steps


def job(recipe: str | None, seed: int, steps: int) -> dict[str, Any]:
    batch = {"sequences": SEQUENCES, "microBatch": SEQUENCES}
    data = {"uri": "pvc://text", "sequenceLength": LENGTH}
    given = document(EXACT, 128, 4, "resident", steps=steps, seed=seed, threads=1, batch=batch, data=data)
    if recipe is not None:
        given |= RECIPES[recipe](steps)
    return given


def run(recipe: str | None, seed: int, steps: int, train: Any, held_out: Any) -> dict[str, float]:
    trainer, data = open_trainer(job(recipe, seed, steps)), Packed.cut(train, LENGTH, seed, SEQUENCES)
    tokens, begun = 0, time.process_time()
    for step in range(steps):
        tokens += trainer.step(data).tokens
        show(f"{recipe or 'whole'}, seed {seed}", step + 1, steps)
    seconds = time.process_time() - begun
    bits = bits_per_byte(trainer, held_out)
    trainer.close()
    return {
        "steps": steps,
        "tokens": tokens,
        "cpuSeconds": round(seconds, 2),
        "heldOutBitsPerByte": round(bits, 5),
    }


def bits_per_byte(trainer: Any, text: Any) -> float:
    rows = torch.from_numpy(text[: HELD_OUT * LENGTH].reshape(HELD_OUT, LENGTH).astype(np.int64))
    model = trainer.model.eval()
    with torch.no_grad():
        found = [float(model(input_ids=part, labels=part).loss) for part in rows.split(8)]  # type: ignore[no-untyped-call]
    return statistics.fmean(found) / math.log(2)


def compare(recipe: str, seed: int, whole: dict[str, float], train: Any, held_out: Any) -> dict[str, Any]:
    """The runs with a recipe until one is as good as `whole`."""
    runs: list[dict[str, float]] = []
    ratio = None
    for times in MORE:
        runs.append(run(recipe, seed, round(times * whole["steps"]), train, held_out))
        if runs[-1]["heldOutBitsPerByte"] <= whole["heldOutBitsPerByte"]:
            ratio = round(runs[-1]["cpuSeconds"] / whole["cpuSeconds"], 3)
            break
    return {"runs": runs, "cpuRatioWhenAsGood": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=RECIPES, help="this recipe, beside none")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    train, held_out = corpus()
    recipes = list(RECIPES) if given.only is None else [given.only]
    found: dict[str, Any] = {"whole": [], **{recipe: [] for recipe in recipes}}
    for seed in range(given.seeds):
        whole = run(None, seed, given.steps, train, held_out)
        found["whole"].append(whole)
        for recipe in recipes:
            found[recipe].append(compare(recipe, seed, whole, train, held_out))
    result = {
        **circumstances(),
        "cpuRatioWhenAsGood": {
            recipe: [each["cpuRatioWhenAsGood"] for each in found[recipe]] for recipe in recipes
        },
        "bySeed": found,
    }
    publish(result, given.output)


if __name__ == "__main__":
    main()
