"""A model and a small draft of it, each trained on the same text until it knows much of it by heart.

    python benchmarks/draft_pair.py DIR

writes DIR/target (8 layers of width 512, 29.4 M parameters) and DIR/draft (2 layers of width 256, 3.6 M), with one tokenizer
of 4,096 tokens. The text is the beginning of 16 long topics of Python's own help (`pydoc_data.topics`): English prose that
every machine has, about 8,000 tokens. The draft sees the same text and nothing of the target. So where both recite, they
agree, and elsewhere they need not: a model and a draft that know what they are asked about, like a large and a small one on
everyday text. How often they agree is what they have learned, and nobody sets it.

Training multiplies in bfloat16, and takes about ten minutes on one core that has such products.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.gpu.serving import make_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ABOUT = "about.json"
VOCABULARY, WINDOW, BATCH = 4096, 128, 8
TEXTS, CHARACTERS = 16, 2000
SHAPES: dict[str, dict[str, int]] = {
    "target": {"layers": 8, "hidden": 512, "heads": 8, "kv": 4, "mlp": 1536, "vocab": VOCABULARY},
    "draft": {"layers": 2, "hidden": 256, "heads": 4, "kv": 2, "mlp": 704, "vocab": VOCABULARY},
}
STEPS = {"target": 400, "draft": 500}
RATES = {"target": 0.0015, "draft": 0.003}
"""Of learning, at most."""
WARM_UP = 50


def texts() -> list[str]:
    """What is trained on."""
    longest = sorted(pydoc_data.topics.topics.values(), key=len, reverse=True)
    return [text[:CHARACTERS] for text in longest[:TEXTS]]


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pydoc_data.topics.topics.values(), trainer)
    return tokenizer


def batches(tokenizer: Tokenizer, steps: int) -> Iterator[torch.Tensor]:
    """[BATCH, WINDOW] tokens."""
    tokens = torch.tensor([token for text in texts() for token in tokenizer.encode(text).ids])
    rng = random.Random(0)
    for _ in range(steps):
        starts = [rng.randrange(len(tokens) - WINDOW) for _ in range(BATCH)]
        yield torch.stack([tokens[start : start + WINDOW] for start in starts])


def train(name: str, tokenizer: Tokenizer, folder: Path) -> float:
    """Trains a model and saves it; the mean loss of the last 25 steps, in nats per token."""
    steps = STEPS[name]
    model: Any = make_model(SHAPES[name], torch.device("cpu"), torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), RATES[name], (0.9, 0.95), weight_decay=0.1)

    def rate(step: int) -> float:
        return min((step + 1) / WARM_UP, 0.51 + 0.49 * math.cos(math.pi * step / steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses: list[float] = []
    began = time.monotonic()
    for step, tokens in enumerate(batches(tokenizer, steps)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 25 == 24:
            mean, seconds = sum(losses[-25:]) / 25, time.monotonic() - began
            print(f"{name} {step + 1} {mean:.3f} {seconds:.0f} s", file=sys.stderr)
    model.eval().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return sum(losses[-25:]) / 25


def make_pair(where: Path) -> None:
    """Writes both models below `where`."""
    tokenizer = make_tokenizer()
    found = {name: round(train(name, tokenizer, where / name), 3) for name in SHAPES}
    about = {"steps": STEPS, "tokensPerStep": BATCH * WINDOW, "natsPerToken": found}
    (where / ABOUT).write_text(json.dumps(about) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    make_pair(arguments.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
