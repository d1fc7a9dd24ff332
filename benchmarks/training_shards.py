"""Two ranks on one machine: what the engine divides between them, against torch's FSDP2 (`fully_shard`).

    python benchmarks/training_shards.py --output benchmarks/results/training_shards.json

The ways are the engine's three values of `parallelism.sharding` (ZeRO stages 1, 2 and 3, in order fast), and FSDP2 with
one unit per block: with weights that go after the forward pass (stage 3), and with weights that stay until backward is
over. All train the same model on the same tokens (gloo, two ranks of one thread, two micro-batches per rank and step,
AdamW's fused kernel, clipping). Each way runs in a pair of processes of its own, round after round, so the load of the
machine meets all alike.

Reported per way: medians of seconds and CPU seconds per step (of both ranks together), the peak of the resident set in
steps above that before the model was made (the larger of both ranks),
the bytes of weights, gradients and optimizer state that a rank holds between two micro-batches beside ZeRO's formula for
them, and the last loss. Ratios are to FSDP2 of the same stage; stage 1 has no peer there, and is compared with that of
stage 2.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.progress import show
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from busbar.workloads.machine.limits import PeakMeter
from busbar.workloads.training.choice import make_plan
from busbar.workloads.training.groups import blocks, release_free_memory
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.meeting import connect
from busbar.workloads.training.model import measure_demand, open_model
from busbar.workloads.training.packing import Packed
from busbar.workloads.training.plan import MemoryLimits
from busbar.workloads.training.ranks import Gang
from busbar.workloads.training.settings import GRADIENTS, OPTIMIZER, PARAMETERS
from busbar.workloads.training.trainer import Trainer
from busbar.workloads.training.world import World

RANKS, CPU = 2, torch.device("cpu")
VOCABULARY, LENGTH, SEQUENCES, MICRO_BATCH = 2048, 64, 4, 1
CONFIG = {
    "model_type": "llama",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "tie_word_embeddings": True,
    "max_position_embeddings": LENGTH,
}
TINY = CONFIG | {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
"""Of the same way, trained before anything is measured, so that code that is loaded on first use counts nowhere."""
STAGES = {OPTIMIZER: 1, GRADIENTS: 2, PARAMETERS: 3}
GATHERED, KEPT = "FSDP2, weights go after forward", "FSDP2, weights stay until backward is over"
WAYS = {**{f"engine, stage {stage}": sharding for sharding, stage in STAGES.items()}, GATHERED: "", KEPT: ""}
PEERS = {"engine, stage 1": KEPT, "engine, stage 2": KEPT, "engine, stage 3": GATHERED}
Step = Callable[[int], float]  # of step n: the loss


def spec(sharding: str, config: dict[str, Any]) -> Any:
    return parse_engine(
        {
            "model": {"config": dict(config)},
            "tokenizer": {"train": {"vocabSize": VOCABULARY}},
            "data": {"uri": "pvc://text", "sequenceLength": LENGTH},
            "steps": 1000,
            "batch": {"sequences": SEQUENCES, "microBatch": MICRO_BATCH},
            "optimizer": {"learningRate": 1e-3, "schedule": "constant", "gradientClip": 1.0},
            "mode": "resident",
            "activations": "keep",
            "parallelism": {"sharding": sharding},
        }
    )


def packed() -> Packed:
    tokens = np.random.default_rng(5).integers(0, VOCABULARY, LENGTH * SEQUENCES * 200).astype(np.uint32)
    return Packed.cut(tokens, LENGTH, 0, SEQUENCES)


def engine(gang: Gang, sharding: str, config: dict[str, Any]) -> tuple[Step, Callable[[], int]]:
    """A step of the engine, and the bytes of this rank's weights, gradients and optimizer state."""
    asked = spec(sharding, config)
    recipe = open_model(asked, None, VOCABULARY, 0)
    plan = make_plan(measure_demand(recipe, asked, CPU, RANKS), MemoryLimits(None, None, True), "resident")
    trainer, data = Trainer(asked, recipe, plan, CPU, ranks=gang), packed()
    held = trainer.device_arena.used
    return (
        lambda step: trainer.step(data).loss,
        lambda: held["parameters"] + held["gradients"] + held["optimizer"],
    )


def peer(gang: Gang, config: dict[str, Any], *, reshards: bool) -> tuple[Step, Callable[[], int]]:
    """The same of FSDP2 with fused AdamW."""
    model: Any = open_model(spec(OPTIMIZER, config), None, VOCABULARY, 0).build()
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
    named = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [each for each in named if each.ndim >= 2], "weight_decay": 0.1},
            {"params": [each for each in named if each.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.9, 0.95),
        fused=True,
    )
    release_free_memory()
    data, own = packed(), SEQUENCES // RANKS

    def step(number: int) -> float:
        tokens = torch.from_numpy(data.batch(number, SEQUENCES))[gang.rank * own :][:own]
        optimizer.zero_grad(set_to_none=False)
        total = torch.zeros(())
        parts = torch.split(tokens, MICRO_BATCH)
        for part in parts:
            loss = model(input_ids=part, labels=part, use_cache=False).loss / len(parts)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        gang.add_up(total)
        return float(total) / RANKS

    def held() -> int:
        found = [tensor for each in named for tensor in (each, each.grad) if tensor is not None]
        found += [value for each in optimizer.state.values() for value in each.values() if value.numel() > 1]
        local = [each.to_local() if hasattr(each, "to_local") else each for each in found]
        return sum(each.numel() * each.itemsize for each in local)

    return step, held


def way_of(gang: Gang, way: str, config: dict[str, Any]) -> tuple[Step, Callable[[], int]]:
    if WAYS[way]:
        return engine(gang, WAYS[way], config)
    return peer(gang, config, reshards=way == GATHERED)


def measure(world: World, way: str, steps: int, output: Path) -> None:
    torch.set_num_threads(1)
    patience = timedelta(minutes=5)
    gang = Gang(world, CPU, connect(world, patience, serve=True), patience)
    way_of(gang, way, TINY)[0](0)
    gc.collect()
    release_free_memory()
    meter = PeakMeter()
    step, held = way_of(gang, way, CONFIG)
    step(0)  # which makes the optimizer's state, and measures activations
    gc.collect()
    release_free_memory()
    meter.reset()
    wall, cpu, loss = [], [], 0.0
    for number in range(1, steps + 1):
        started, used = time.monotonic(), time.process_time()
        loss = step(number)
        wall.append(time.monotonic() - started)
        cpu.append(time.process_time() - used)
    peak = meter.peak_bytes()
    every = gang.gather(
        {
            "wall": wall,
            "cpu": cpu,
            "loss": loss,
            "peak": peak,
            "held": held(),
        }
    )
    if world.rank == 0:
        output.write_text(json.dumps(every))
    gang.gather("done")
    os._exit(0)


def run_pair(way: str, steps: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank measured."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    output = folder / "measured.json"
    output.unlink(missing_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "transformers.models.llama.modeling_llama", "torch.distributed.fsdp"]
    )
    processes = [
        context.Process(target=measure, args=(World(rank, RANKS, "127.0.0.1", port), way, steps, output))
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if not output.exists():
        raise SystemExit(f"{way}: a rank failed, see above")
    found: list[dict[str, Any]] = json.loads(output.read_text())
    return found


def rows_of(measured: dict[str, list[list[dict[str, Any]]]]) -> dict[str, dict[str, Any]]:
    """A row per way, of all rounds."""
    rows: dict[str, dict[str, Any]] = {}
    for way, rounds in measured.items():
        each_step = [
            sum(used) for ranks in rounds for used in zip(*(rank["cpu"] for rank in ranks), strict=True)
        ]
        rows[way] = {
            "secondsPerStep": statistics.median(s for ranks in rounds for s in ranks[0]["wall"]),
            "cpuSecondsPerStep": statistics.median(each_step),
            "peakBytes": max(rank["peak"] for ranks in rounds for rank in ranks),
            "heldBytes": max(rank["held"] for rank in rounds[0]),
            "lastLoss": rounds[0][0]["loss"],
        }
    for way, known in PEERS.items():
        rows[way]["peer"] = known
        for name in ("secondsPerStep", "cpuSecondsPerStep", "peakBytes", "heldBytes"):
            rows[way][f"{name}ToPeer"] = round(rows[way][name] / rows[known][name], 3)
        parameters = 4 * parameters_of_model()
        stage = STAGES[WAYS[way]]
        divided = [2 * parameters / RANKS] + [
            parameters / (RANKS if stage > least else 1) for least in (1, 2)
        ]
        rows[way]["heldToFormula"] = round(rows[way]["heldBytes"] / sum(divided), 4)
    return rows


def parameters_of_model() -> int:
    with torch.device("meta"):
        model = open_model(spec(OPTIMIZER, CONFIG), None, VOCABULARY, 0).empty()
    return sum(each.numel() for each in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="of each way in a round")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    measured: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in WAYS}
    whole = given.rounds * len(WAYS)
    with tempfile.TemporaryDirectory() as folder:
        for done in range(whole):
            way = list(WAYS)[done % len(WAYS)]
            measured[way].append(run_pair(way, given.steps, Path(folder)))
            show(way, done + 1, whole)
    document = {
        "command": f"python benchmarks/training_shards.py --rounds {given.rounds} --steps {given.steps}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, one thread per rank, "
        f"load {os.getloadavg()[1]:.0f} over five minutes",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "model": CONFIG | {"vocab_size": VOCABULARY},
        "parameters": parameters_of_model(),
        "tokensPerStep": SEQUENCES * LENGTH,
        "ways": rows_of(measured),
    }
    text = json.dumps(document, indent=2) + "\n"
    if given.output is not None:
        given.output.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
