"""What answers under a grammar cost: reading the vocabulary, the mask of a token, and sampling 16 masked rows.

    python benchmarks/serving_grammar.py [--repeats 7] [--out benchmarks/results/serving_grammar.json]

A byte-level vocabulary of 128,256 random tokens, one CPU thread. Masks are those of answers drawn at random under each
schema. The rows are sampled in turns with the same rows unmasked, at temperature 1 and with everything on: top-p, min-p,
temperature, a penalty and 20 logprobs. Times are CPU seconds of the process. The bar is 10 ms a step.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from busbar.workloads.serving.grammar import Allowed, Grammars
from busbar.workloads.serving.openai_format import GrammarKind, GrammarSpec
from busbar.workloads.serving.sampler import Draw, sample
from busbar.workloads.serving.sampling import Randomness, SamplingParams
from busbar.workloads.serving.token_counts import TokenCounts
from busbar.workloads.serving.vocabulary import Vocabulary

ROWS, VOCABULARY, TOKENS, END = 16, 128_256, 100, 0
BAR_MS = 10.0
EVERYTHING = SamplingParams(top_p=0.9, min_p=0.01, temperature=0.8, presence_penalty=0.5, logprobs=20)
LETTERS = 'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_{}[]":,.()\u0120'
TEXT = {"type": "string"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "any object": {"type": "object"},
    "two properties": {
        "type": "object",
        "properties": {"a": TEXT, "b": {"type": "integer"}},
        "required": ["a"],
    },
    "200 cases": {"enum": [f"case number {i}" for i in range(200)]},
}


def make_vocabulary() -> Vocabulary:
    rng = random.Random(0)
    names = {"<end>": None} | dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(names) < VOCABULARY:
        names["".join(rng.choices(LETTERS, k=rng.randint(2, 9)))] = None
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return Vocabulary(tokenizer)


def masks_of(grammars: Grammars, schema: dict[str, Any]) -> tuple[list[float], list[Allowed]]:
    """(seconds of each mask, the masks) of random answers, one after another."""
    grammar = grammars.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema), "schema"))
    rng, guide = random.Random(1), grammar.start()
    seconds: list[float] = []
    masks: list[Allowed] = []
    while len(masks) < TOKENS:
        if guide.over:
            guide = grammar.start()
        began = time.process_time()
        masks.append(guide.allowed())
        seconds.append(time.process_time() - began)
        guide.take((rng.choice(masks[-1].tokens()),))
    return seconds, masks


def sampling(masks: list[Allowed], repeats: int, params: SamplingParams) -> dict[str, float]:
    """Median CPU ms of a step, masked and not."""
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
    found: dict[str, list[float]] = {"plainCpuMs": [], "maskedCpuMs": []}
    for _ in range(repeats):
        for name, times in found.items():
            allowed = masks[-ROWS:] if name == "maskedCpuMs" else [None] * ROWS
            draws = [
                Draw(params, Randomness(i), 0, TokenCounts([1, 2, 3]), allowed=a)
                for i, a in enumerate(allowed)
            ]
            began = time.process_time()
            for _ in range(10):
                sample(logits, draws)
            times.append((time.process_time() - began) * 100)
    step = {name: round(statistics.median(times), 2) for name, times in found.items()}
    return step | {"ratio": round(step["maskedCpuMs"] / step["plainCpuMs"], 2)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    grammars = Grammars(make_vocabulary(), VOCABULARY, frozenset({END}), frozenset())
    began = time.process_time()
    grammars.prepare()
    read_s = time.process_time() - began
    rows = []
    for name, schema in SCHEMAS.items():
        seconds, masks = masks_of(grammars, schema)
        mask = {
            "maskMedianMs": round(statistics.median(seconds) * 1e3, 3),
            "maskMostMs": round(max(seconds) * 1e3, 3),
        }
        step = sampling(masks, arguments.repeats, SamplingParams())
        full = sampling(masks, arguments.repeats, EVERYTHING)
        met = {"barMet": step["maskedCpuMs"] <= BAR_MS, "barMetWithEverything": full["maskedCpuMs"] <= BAR_MS}
        rows.append({"schema": name, **mask, **step, "everything": full, **met})
    result = {
        "benchmark": "serving_grammar",
        "command": " ".join(["python", "benchmarks/serving_grammar.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, 1 thread, shared",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "llguidance": version("llguidance"),
        },
        "rowsPerStep": ROWS,
        "vocabulary": VOCABULARY,
        "barMs": BAR_MS,
        "readVocabularyCpuS": round(read_s, 2),
        "rows": rows,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
