"""A model, a corpus and a job small enough to train in a second."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}

VOCABULARY, SEQUENCE, SEQUENCES = 320, 32, 4


def _texts() -> dict[str, str]:
    """Sentences from a tiny grammar: enough regularity to learn, the same on every machine."""
    source = random.Random(7)
    subjects, verbs = (
        ["the pump", "a valve", "one feeder", "the bus bar"],
        ["opens", "feeds", "drops", "holds"],
    )
    objects = ["the line", "two cells", "a phase", "its load"]
    texts = {}
    for number in range(12):
        lines = [
            f"{source.choice(subjects)} {source.choice(verbs)} {source.choice(objects)} {source.randint(1, 40)}.\n"
            for _ in range(60)
        ]
        texts[f"part-{number:02d}.txt"] = "".join(lines)
    return texts


TEXTS = _texts()


def with_text(claim: Path) -> Path:
    """The folder of a claim, made where it is missing, with `TEXTS` in its folder `text`."""
    (claim / "text").mkdir(parents=True, exist_ok=True)
    for name, text in TEXTS.items():
        (claim / "text" / name).write_text(text)
    return claim


def engine(**changes: Any) -> dict[str, Any]:
    """`spec.engine` of a small job on a claim's folder, with fields replaced."""
    document: dict[str, Any] = {
        "model": {"config": dict(LLAMA)},
        "tokenizer": {"train": {"vocabSize": VOCABULARY}},
        "data": {"uri": "pvc://text", "sequenceLength": SEQUENCE, "holdoutFraction": 0.2},
        "steps": 12,
        "batch": {"sequences": SEQUENCES, "microBatch": 2},
        "optimizer": {"learningRate": 3e-3, "warmupSteps": 3, "schedule": "linear", "gradientClip": 0.5},
        "mode": "optimizer-offload",
        "threads": 1,
    }
    document.update(changes)
    return document


def manifest(**changes: Any) -> dict[str, Any]:
    """A whole TrainingJob around `engine(**changes)`."""
    return {
        "apiVersion": "busbar.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "small"},
        "spec": {
            "engine": engine(**changes),
            "output": {"uri": "pvc://out/model"},
            "checkpoint": {"everySteps": 4},
        },
    }
