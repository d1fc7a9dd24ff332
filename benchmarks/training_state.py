"""What it costs to keep AdamW's moments in fewer bytes: loss, update speed, and bytes.

    python benchmarks/training_state.py --output benchmarks/results/training_state.json

Loss: a small Llama reads the source text of Python's standard library, byte by byte, once per format and seed. All runs of a
seed begin with the same weights and read the same batches, so their losses differ by the format alone; how much the
exact format differs from seed to seed stands beside it. Reported are the mean loss of the last steps, and bits per byte
on files that are not trained on.

Update: seconds of CPU that the updates of a larger model take on one thread, formats turn by turn, and the parameters per
second of torch's own fused AdamW in the same turns.

Bytes: of the optimizer's state by the arenas' own count, and over the link in each step of `optimizer-offload`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.progress import show
from benchmarks.result import circumstances, publish

from busbar.workloads.training.choice import make_plan
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.model import measure_demand, open_model
from busbar.workloads.training.packing import Packed
from busbar.workloads.training.plan import MemoryLimits
from busbar.workloads.training.settings import BF16, EXACT, INT8
from busbar.workloads.training.trainer import Trainer

CPU, VOCABULARY = torch.device("cpu"), 257  # bytes, and what separates documents
FORMATS = (EXACT, BF16, INT8)
UNLIMITED = MemoryLimits(None, None, True)


def document(state: str, width: int, blocks: int, mode: str, **changes: Any) -> dict[str, Any]:
    return {
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": width,
                "intermediate_size": width * 11 // 4,
                "num_hidden_layers": blocks,
                "num_attention_heads": width // 32,
                "tie_word_embeddings": True,
                "max_position_embeddings": 1024,
            }
        },
        "tokenizer": {"train": {"vocabSize": VOCABULARY}},
        "data": {"uri": "pvc://text", "sequenceLength": 128},
        "steps": 1000,
        "batch": {"sequences": 8, "microBatch": 8},
        "optimizer": {"learningRate": 1e-3, "warmupSteps": 20, "gradientClip": 1.0},
        "mode": mode,
        "state": state,
        **changes,
    }


def open_trainer(given: dict[str, Any]) -> Trainer:
    spec = parse_engine(given)
    recipe = open_model(spec, None, VOCABULARY, 0)
    return Trainer(spec, recipe, make_plan(measure_demand(recipe, spec, CPU), UNLIMITED, spec.mode), CPU)


def texts() -> Iterator[bytes]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield path.read_bytes()


def corpus() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Bytes that are trained on, and those of every tenth file, which are not."""
    parts = list(texts())
    held_out = [part for index, part in enumerate(parts) if index % 10 == 0]
    train = [part for index, part in enumerate(parts) if index % 10]
    found = [np.frombuffer(b"".join(each), dtype=np.uint8).astype(np.uint32) for each in (train, held_out)]
    return found[0], found[1]


def losses_of(state: str, seed: int, given: argparse.Namespace, text: np.ndarray[Any, Any]) -> dict[str, Any]:
    asked = document(state, 128, 4, "resident", steps=given.steps, seed=seed, threads=1)
    trainer, data = open_trainer(asked), Packed.cut(text, 128, seed, 8)
    losses = []
    for step in range(given.steps):
        losses.append(trainer.step(data).loss)
        show(f"{state}, seed {seed}", step + 1, given.steps)
    trainer.close()
    return {"trainer": trainer, "loss": statistics.fmean(losses[-given.last :])}


def bits_per_byte(trainer: Trainer, text: np.ndarray[Any, Any]) -> float:
    """Of whole sequences of held-out text."""
    rows = text[: 64 * 128].reshape(64, 128).astype(np.int64)
    model = trainer.model.eval()
    with torch.no_grad():
        parts = [torch.from_numpy(rows[index : index + 8]) for index in range(0, 64, 8)]
        found = [float(model(input_ids=part, labels=part).loss) for part in parts]
    return statistics.fmean(found) / math.log(2)


def quality(given: argparse.Namespace) -> dict[str, Any]:
    train, held_out = corpus()
    loss: dict[str, list[float]] = {state: [] for state in FORMATS}
    bits: dict[str, list[float]] = {state: [] for state in FORMATS}
    for seed in range(given.seeds):
        for state in FORMATS:
            found = losses_of(state, seed, given, train)
            loss[state].append(found["loss"])
            bits[state].append(bits_per_byte(found["trainer"], held_out))
    return {
        "steps": given.steps,
        "tokensPerStep": 8 * 128,
        "loss": {state: [round(each, 5) for each in loss[state]] for state in FORMATS},
        "heldOutBitsPerByte": {state: [round(each, 5) for each in bits[state]] for state in FORMATS},
        "spreadOfSeeds": {
            "loss": round(max(loss[EXACT]) - min(loss[EXACT]), 5),
            "heldOutBitsPerByte": round(max(bits[EXACT]) - min(bits[EXACT]), 5),
        },
        "moreThanExact": {
            state: {
                "loss": round(_mean_difference(loss[state], loss[EXACT]), 5),
                "heldOutBitsPerByte": round(_mean_difference(bits[state], bits[EXACT]), 5),
            }
            for state in (BF16, INT8)
        },
    }


def _mean_difference(ours: list[float], theirs: list[float]) -> float:
    return statistics.fmean(one - other for one, other in zip(ours, theirs, strict=True))


class Peer:
    """torch's own AdamW on tensors of the same sizes."""

    def __init__(self, trainer: Trainer) -> None:
        parameters = [torch.nn.Parameter(each.detach().clone()) for each in trainer.model.parameters()]
        for each in parameters:
            each.grad = torch.randn_like(each)
        self._optimizer = torch.optim.AdamW(parameters, lr=0.0, fused=True)

    def update(self) -> None:
        self._optimizer.step()


def updates(given: argparse.Namespace) -> dict[str, Any]:
    """CPU seconds of an update, and bytes of the state."""
    asked = {state: document(state, 512, 8, "optimizer-offload", schedule="blocking") for state in FORMATS}
    resident = {state: document(state, 512, 8, "resident") for state in FORMATS}
    trainers = {state: open_trainer(resident[state]) for state in FORMATS}
    peer = Peer(trainers[EXACT])
    seconds: dict[str, list[float]] = {name: [] for name in (*FORMATS, "torch")}
    for turn in range(given.turns + 1):
        for trainer in trainers.values():
            for flat in trainer.groups:
                flat.gradients.normal_()  # an update leaves zeros
        for name in seconds:
            begun = time.process_time()
            if name == "torch":
                peer.update()
            else:
                trainers[name].optimizer.step(0.0)
                trainers[name].drain()
            if turn:
                seconds[name].append(time.process_time() - begun)
        show("updates", turn, given.turns)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    parameters = sum(flat.length for flat in trainers[EXACT].groups)
    for trainer in trainers.values():
        trainer.close()
    kept = {state: trainers[state].device_arena.used["optimizer"] for state in FORMATS}
    link = {}
    for state in FORMATS:
        trainer = open_trainer(asked[state])
        trainer.optimizer.step(0.0)
        trainer.drain()
        link[state] = trainer.optimizer.loaded_bytes + trainer.optimizer.stored_bytes
        trainer.close()
    return {
        "parameters": parameters,
        "cpuSecondsPerUpdate": {name: round(each, 4) for name, each in medians.items()},
        "updateToExact": {state: round(medians[state] / medians[EXACT], 3) for state in FORMATS},
        "stateBytesPerParameter": {state: round(size / parameters, 4) for state, size in kept.items()},
        "linkBytesPerStep": link,
        "linkToExact": {state: round(link[state] / link[EXACT], 4) for state in FORMATS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--last", type=int, default=50, help="steps whose mean loss is reported")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        **circumstances(),
        "updates": updates(given),
        "quality": quality(given),
    }
    publish(result, given.output)


if __name__ == "__main__":
    main()
