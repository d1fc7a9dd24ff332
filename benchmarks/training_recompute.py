"""The longest sequence that trains under one `deviceMemory`, with activations kept, recomputed and swapped, and with logits
or MLPs in tiles.

    python benchmarks/training_recompute.py --output benchmarks/results/training_recompute.json
    python benchmarks/training_recompute.py --cases tiled --rounds 3      only what tiles add to recomputation
    python benchmarks/training_recompute.py --cases swapped --rounds 3    only what inputs on the host add to it
    python benchmarks/training_recompute.py --cases mlps --rounds 3       only what MLPs in tiles add to these

For each model the engine's own plan (fake tensors, nothing allocated) finds the longest sequence that fits both ways.
Both are then trained for real at that length, and the measured peak is compared with the planned one. At the longest
sequence of kept activations four ways train the same tokens turn by turn, so the load of the machine meets all alike:
the engine, kept and recomputed, and plain `transformers` with fused AdamW, without and with
`gradient_checkpointing_enable`. Reported are medians of seconds and CPU seconds per step. At the longest sequence of
recomputed activations the engine and `transformers` with checkpointing are compared in the same way. Tiles
(`loss: tiled`) are compared with the whole at the longest sequence of recomputation, and trained at their own longest;
so are swapped activations, with whole logits and with tiles, and MLPs in tiles (`mlp: tiled`).

Peaks count what torch allocates for weights, gradients, optimizer and activations, not the scratch memory of kernels.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from benchmarks.progress import say, show

from busbar.workloads.training.activations import LiveBytes, known_tensors
from busbar.workloads.training.choice import make_plan
from busbar.workloads.training.demand import KEEP, RECOMPUTE, SWAP, Demand
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.layouts import first_that_fits
from busbar.workloads.training.model import measure_demand, open_model
from busbar.workloads.training.packing import Packed
from busbar.workloads.training.plan import MemoryLimits
from busbar.workloads.training.settings import TILED, WHOLE
from busbar.workloads.training.trainer import Trainer

CPU, POSITIONS, MIB = torch.device("cpu"), 65_536, 2**20
BASE = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "tie_word_embeddings": True,
    "max_position_embeddings": POSITIONS,
}
CASES: dict[str, tuple[int, ...]] = {  # layers, vocabulary, deviceMemory in MiB
    "8 blocks, vocabulary of 4,096": (8, 4096, 256),
    "16 blocks, vocabulary of 512": (16, 512, 256),
    "4 blocks, vocabulary of 32,768": (4, 32_768, 384),
}
DEEP: dict[str, tuple[int, ...]] = {"64 blocks of width 128, vocabulary of 512": (64, 512, 256, 128)}


class Tiles(NamedTuple):
    """What is computed in tiles."""

    logits: bool = False
    mlps: bool = False

    @property
    def words(self) -> str:
        return " and ".join(name for name, is_tiled in self._asdict().items() if is_tiled) or "nothing"


NONE, LOGITS, MLPS, BOTH = Tiles(), Tiles(logits=True), Tiles(mlps=True), Tiles(True, True)
Step = Callable[[int], float]  # of step n: the loss


class Case:
    """One model under one limit."""

    def __init__(self, layers: int, vocabulary: int, limit_mib: int, width: int = 256) -> None:
        self.config = {
            **BASE,
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": width * 43 // 16,
        }
        self.vocabulary, self.limit_mib = vocabulary, limit_mib
        self.limits = MemoryLimits(limit_mib * MIB, None, device_is_host=True)
        self.demand = cache(self._demand)

    def spec(self, tokens: int, activations: str, tiles: Tiles = NONE) -> Any:
        return parse_engine(
            {
                "model": {"config": dict(self.config)},
                "tokenizer": {"train": {"vocabSize": self.vocabulary}},
                "data": {"uri": "pvc://text", "sequenceLength": tokens},
                "steps": 1000,
                "batch": {"sequences": 1, "microBatch": 1},
                "optimizer": {"learningRate": 1e-3, "schedule": "constant", "gradientClip": 1.0},
                "mode": "resident",
                "deviceMemory": f"{self.limit_mib}Mi",
                "activations": activations,
                "loss": TILED if tiles.logits else WHOLE,
                "mlp": TILED if tiles.mlps else WHOLE,
            }
        )

    def _demand(self, tokens: int, activations: str, tiles: Tiles = NONE) -> Demand:
        asked = self.spec(tokens, activations, tiles)
        return measure_demand(open_model(asked, None, self.vocabulary, 0), asked, CPU)

    def longest(self, activations: str, tiles: Tiles = NONE) -> int:
        good, bad = 8, POSITIONS + 1
        while bad - good > 1:
            middle = (good + bad) // 2
            fits = first_that_fits(self.demand(middle, activations, tiles), self.limits, "resident")
            good, bad = (middle, bad) if fits else (good, middle)
            say(
                f"longest sequence with activations {activations}, {tiles.words} in tiles: between {good} and {bad}"
            )
        return good

    def data(self, tokens: int) -> Packed:
        found = np.random.default_rng(5).integers(0, self.vocabulary, tokens * 64).astype(np.uint32)
        return Packed.cut(found, tokens, 0, 1)

    def engine(self, tokens: int, activations: str, tiles: Tiles = NONE) -> tuple[Step, Trainer]:
        asked = self.spec(tokens, activations, tiles)
        plan = make_plan(self.demand(tokens, activations, tiles), self.limits, "resident")
        assert plan.activations == activations
        trainer, data = (
            Trainer(asked, open_model(asked, None, self.vocabulary, 0), plan, CPU),
            self.data(tokens),
        )
        return lambda number: trainer.step(data).loss, trainer

    def peer(self, tokens: int, *, checkpointing: bool) -> tuple[Step, Callable[[], int]]:
        """A step of plain transformers, and the bytes of activations that its first one needed."""
        model: Any = open_model(self.spec(tokens, KEEP), None, self.vocabulary, 0).build()
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        data, peaks = self.data(tokens), list[int]()

        def forward_and_backward(batch: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        def step(number: int) -> float:
            batch = torch.from_numpy(data.batch(number, 1))
            optimizer.zero_grad(set_to_none=False)
            if peaks:
                loss = forward_and_backward(batch)
            else:
                with LiveBytes([*known_tensors(model), batch]) as count:
                    loss = forward_and_backward(batch)
                peaks.append(count.peak)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return float(loss)

        return step, lambda: peaks[0]


def measure(ways: Mapping[str, Step], rounds: int) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Medians per step of each way, turn by turn, and the losses of each; the first round warms up."""
    wall: dict[str, list[float]] = {name: [] for name in ways}
    used: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, step in ways.items():
            started, before = time.monotonic(), time.process_time()
            losses[name].append(step(turn))
            if turn:
                wall[name].append(time.monotonic() - started)
                used[name].append(time.process_time() - before)
            show(f"turn {turn} of {rounds}: {name}", turn, rounds)
    rows = {
        name: {
            "secondsPerStep": round(statistics.median(wall[name]), 4),
            "cpuSecondsPerStep": round(statistics.median(used[name]), 4),
        }
        for name in ways
    }
    return rows, losses


def peaks(trainer: Trainer) -> dict[str, Any]:
    planned, seen = trainer.plan.device["activations"], trainer.device_arena.peak["activations"]
    return {
        "plannedDeviceBytes": trainer.plan.device_bytes,
        "measuredDeviceBytes": trainer.peak_device_bytes(),
        "plannedActivationBytes": planned,
        "measuredActivationBytes": seen,
        "measuredToPlanned": round(seen / planned, 4),
    }


def ratio(rows: Mapping[str, Any], one: str, other: str) -> dict[str, float]:
    fields = {"seconds": "secondsPerStep", "cpu": "cpuSecondsPerStep"}
    return {name: round(rows[one][field] / rows[other][field], 3) for name, field in fields.items()}


def run_beside(
    name: str, case: Case, rounds: int, label: str, activations: str, tiles: Tiles
) -> dict[str, Any]:
    """What other activations or another form of the loss add to recomputed activations and whole logits."""
    say(f"{name}, {label}")
    recomputed, longer = case.longest(RECOMPUTE), case.longest(activations, tiles)
    before, before_trainer = case.engine(recomputed, RECOMPUTE)
    after, after_trainer = case.engine(recomputed, activations, tiles)
    rows, losses = measure({"recomputed": before, label: after}, rounds)
    rows["recomputed"] |= peaks(before_trainer)
    rows[label] |= peaks(after_trainer)
    for trainer in (before_trainer, after_trainer):
        trainer.close()
    del before, after, before_trainer, after_trainer, trainer
    longest, trainer = case.engine(longer, activations, tiles)
    at_longest, _ = measure({label: longest}, 1)
    at_longest[label] |= peaks(trainer)
    trainer.close()
    return {
        "model": case.config | {"vocab_size": case.vocabulary},
        "deviceMemoryBytes": case.limit_mib * MIB,
        "longestRecomputed": recomputed,
        "longest": longer,
        "longestRatio": round(longer / recomputed, 3),
        "largestDifferenceOfLosses": max(
            abs(a - b) for a, b in zip(losses["recomputed"], losses[label], strict=True)
        ),
        "atLongestRecomputed": rows,
        "toRecomputed": ratio(rows, label, "recomputed"),
        "atLongest": at_longest,
    }


def gradient_errors(tokens: int = 8192) -> dict[str, Any]:
    """How far gradients of MLPs in bfloat16 are from those of the same weights in float32, with and without tiles."""
    say("errors of gradients")
    case = Case(4, 512, 4096)
    batch, found = torch.from_numpy(case.data(tokens).batch(0, 1)), dict[str, list[torch.Tensor]]()
    recipe = replace(open_model(case.spec(tokens, KEEP), None, case.vocabulary, 0), dtype=torch.bfloat16)
    weights = recipe.build().state_dict()
    for name, dtype, tiled in (
        ("exact", torch.float32, False),
        ("whole", torch.bfloat16, False),
        ("tiled", torch.bfloat16, True),
    ):
        model: Any = replace(recipe, dtype=dtype, tiled_mlps=tiled).build()
        model.load_state_dict(weights)
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        found[name] = [p.grad.double() for key, p in model.named_parameters() if ".mlp." in key]
        say(name)

    def error(name: str) -> float:
        off = sum(float((a - b).square().sum()) for a, b in zip(found[name], found["exact"], strict=True))
        return math.sqrt(off / sum(float(each.square().sum()) for each in found["exact"]))

    return {"tokens": tokens, "whole": round(error("whole"), 5), "tiled": round(error("tiled"), 5)}


def run_case(name: str, case: Case, rounds: int) -> dict[str, Any]:
    say(name)
    kept, recomputed = case.longest(KEEP), case.longest(RECOMPUTE)
    keeping, kept_trainer = case.engine(kept, KEEP)
    again, again_trainer = case.engine(kept, RECOMPUTE)
    plain, plain_peak = case.peer(kept, checkpointing=False)
    checked, checked_peak = case.peer(kept, checkpointing=True)
    ways = {
        "engine, kept": keeping,
        "engine, recomputed": again,
        "transformers": plain,
        "transformers, gradient checkpointing": checked,
    }
    at_kept, losses = measure(ways, rounds)
    at_kept["engine, kept"] |= peaks(kept_trainer)
    at_kept["engine, recomputed"] |= peaks(again_trainer)
    at_kept["transformers"]["measuredActivationBytes"] = plain_peak()
    at_kept["transformers, gradient checkpointing"]["measuredActivationBytes"] = checked_peak()
    equal = losses["engine, kept"] == losses["engine, recomputed"]
    for trainer in (kept_trainer, again_trainer):
        trainer.close()
    del ways, keeping, again, plain, checked, kept_trainer, again_trainer, trainer
    long, long_trainer = case.engine(recomputed, RECOMPUTE)
    peer, peer_peak = case.peer(recomputed, checkpointing=True)
    at_long, _ = measure({"engine, recomputed": long, "transformers, gradient checkpointing": peer}, rounds)
    at_long["engine, recomputed"] |= peaks(long_trainer)
    at_long["transformers, gradient checkpointing"]["measuredActivationBytes"] = peer_peak()
    long_trainer.close()
    return {
        "model": case.config | {"vocab_size": case.vocabulary},
        "deviceMemoryBytes": case.limit_mib * MIB,
        "longestKept": kept,
        "longestRecomputed": recomputed,
        "longestRatio": round(recomputed / kept, 3),
        "lossesBitEqual": equal,
        "atLongestKept": at_kept,
        "recomputedToKept": ratio(at_kept, "engine, recomputed", "engine, kept"),
        "keptToTransformers": ratio(at_kept, "engine, kept", "transformers"),
        "recomputedToCheckpointing": ratio(
            at_kept, "engine, recomputed", "transformers, gradient checkpointing"
        ),
        "atLongestRecomputed": at_long,
        "longRecomputedToCheckpointing": ratio(
            at_long, "engine, recomputed", "transformers, gradient checkpointing"
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--cases",
        choices=("all", "tiled", "swapped", "mlps", "activations"),
        default="all",
        help="which comparisons",
    )
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    import transformers

    document: dict[str, Any] = {
        "command": f"python benchmarks/training_recompute.py --cases {given.cases} --rounds {given.rounds} "
        f"--threads {given.threads}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {given.threads} threads",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
    if given.cases in ("all", "activations"):
        document["cases"] = {name: run_case(name, Case(*case), given.rounds) for name, case in CASES.items()}
    for kind, label, activations, tiles in (
        ("tiled", "tiled", RECOMPUTE, LOGITS),
        ("swapped", "swapped", SWAP, NONE),
        ("swapped", "swapped and tiled", SWAP, LOGITS),
        ("mlps", "tiled MLPs", RECOMPUTE, MLPS),
        ("mlps", "all tiled", RECOMPUTE, BOTH),
        ("mlps", "swapped and all tiled", SWAP, BOTH),
    ):
        if given.cases in ("all", kind):
            models = CASES | ({} if kind == "tiled" else DEEP)
            document[label] = {
                name: run_beside(name, Case(*case), given.rounds, label, activations, tiles)
                for name, case in models.items()
            }
    if given.cases in ("all", "mlps"):
        document["relativeErrorOfBfloat16Gradients"] = gradient_errors()
    text = json.dumps(document, indent=2) + "\n"
    if given.output is not None:
        given.output.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
