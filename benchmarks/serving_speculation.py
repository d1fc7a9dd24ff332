"""Speculation by prompt lookup, on and off in one run, on one CPU thread: tokens per CPU second and equality of tokens.

    python benchmarks/serving_speculation.py [--repeats 3] [--out benchmarks/results/serving_speculation.json]

A random Llama of 33.6 M parameters (8 layers, width 512). A random model copies nothing, so the texts of most rows are
scripted: the model computes every step as always, and behind it the logit of the script's next token is raised, on both
sides alike. How often guesses are right is then a property of the text:

  copy         the answer is the prompt's document, with another token in every 24th place
  loop         the answer repeats 8 tokens that the prompt does not have
  misleading   four tokens in random order: every guess finds a place, and three of four are wrong
  random       tokens of the whole vocabulary in random order
  half         of a batch, every second request is `copy` and the others are `random`
  own          no script: greedy tokens of the model itself
  sampled      no script: temperature 0.8 among 8 tokens that a logit bias leaves, with a seed

Each side is one engine for all rows, as one that serves: what it has learned in one row it carries into the next. The
two sides take their steps in turn, so that both meet the same neighbours on a shared machine; rows are interleaved by
repeat, and before the first repeat each side serves one request. A row counts the whole run, prompts included. The
engine's clock is the CPU time of the process.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.gpu.serving import make_model
from tokenizers import Tokenizer, models

from busbar.workloads.serving.architecture import Architecture, parse_architecture
from busbar.workloads.serving.core import EngineCore
from busbar.workloads.serving.loader import assemble
from busbar.workloads.serving.runner import Outcome, Runner
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.sequence import Step
from busbar.workloads.serving.settings import EngineSettings
from busbar.workloads.serving.weights import Weights, fuse_weights

SHAPE: dict[str, int] = {"layers": 8, "hidden": 512, "heads": 8, "kv": 4, "mlp": 1536, "vocab": 8192}
PROMPT, OUTPUT, GUESSES = 192, 128, 7
KV_BYTES = 256 * 2**20
ROWS = [
    *((1, text) for text in ("copy", "loop", "misleading", "random", "own", "sampled")),
    *((4, text) for text in ("copy", "half")),
    *((16, text) for text in ("copy", "misleading", "random", "half")),
]
AIMS = {"copy at batch 1": 1.3, "every row of batch 16": 0.97}
GREEDY = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
RAISED = 100.0
"""Added to the logit of a script's next token."""


@dataclass
class Run:
    """One side of one repeat."""

    cpu_s: float
    proposed: int
    accepted: int
    answers: list[list[int]] = field(default_factory=list)


class Scripted(Runner):
    """A runner whose model says what a script says: by the first token of a prompt, all its tokens."""

    scripts: Mapping[int, Sequence[int]] = {}

    @torch.inference_mode()
    def run(self, step: Step) -> Outcome:
        outcome = super().run(step)
        for row, chunk in enumerate(outcome.chunks):
            script = self.scripts.get(chunk.sequence.tokens[0])
            if script is not None:
                outcome.logits[row, script[chunk.start + chunk.count]] += RAISED
        return outcome


def script(text: str, number: int) -> list[int]:
    """Prompt and answer; the first token tells requests apart, and the next ones one row from another."""
    rng = random.Random(f"{text} {number}")
    document = [rng.randrange(1000, SHAPE["vocab"]) for _ in range(PROMPT - 1)]
    answer = [rng.randrange(1000, SHAPE["vocab"]) for _ in range(OUTPUT + 1)]
    if text == "half":
        text = "copy" if number % 2 else "random"
    if text == "copy":
        start = 16
        answer = [token if i % 24 == 23 else document[start + i] for i, token in enumerate(answer)]
        document[-4:] = document[start - 4 : start]  # what is asked for begins there
    elif text == "loop":
        answer = (answer[:8] * OUTPUT)[: OUTPUT + 1]
    elif text == "misleading":
        document, answer = ([rng.choice(answer[:4]) for _ in each] for each in (document, answer))
    return [number, *document, *answer]


def make_sides(model: Any) -> dict[str, EngineCore]:
    """Two engines on the same weights: where copies of them lie in memory changes their speed by some percent."""
    arch = parse_architecture(model.config.to_dict())
    weights = fuse_weights(model.state_dict(), arch, model.device, model.dtype)
    return {side: make_engine(arch, weights, most) for side, most in (("on", GUESSES), ("off", 0))}


def make_engine(arch: Architecture, weights: Weights, speculate: int) -> EngineCore:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(arch.vocab_size)}, unk_token="w0"))
    settings = EngineSettings(Path("in-memory"), kv_bytes=KV_BYTES, prefix_cache=False, speculate=speculate)
    core, _, _ = assemble(
        settings, arch, weights, torch.float32, tokenizer, "random", clock=time.process_time
    )
    runner = core.runner
    core.runner = Scripted(runner.decoder, runner.cache, runner.adapters_together)
    return core


def serve(sides: Mapping[str, EngineCore], text: str, batch: int) -> dict[str, Run]:
    """The same requests on all sides, a step of each in turn."""
    scripts = [script(text, number) for number in range(batch)]
    runs: dict[str, Run] = {}
    for side, core in sides.items():
        assert isinstance(core.runner, Scripted)
        core.runner.scripts = {} if text in ("own", "sampled") else dict(enumerate(scripts))
        proposed, accepted = counts(core)
        runs[side] = Run(0.0, -proposed, -accepted, [[] for _ in scripts])
        for number, tokens in enumerate(scripts):
            core.submit(str(number), tokens[:PROMPT], params_of(text, number), time.process_time())
    order = list(sides)
    while any(not core.idle for core in sides.values()):
        order.reverse()
        for side in order:
            began = time.process_time()
            deltas = [] if sides[side].idle else sides[side].step()
            runs[side].cpu_s += time.process_time() - began
            for delta in deltas:
                runs[side].answers[int(delta.request_id)] += delta.tokens
    for side, core in sides.items():
        proposed, accepted = counts(core)
        runs[side].proposed += proposed
        runs[side].accepted += accepted
    return runs


def params_of(text: str, number: int) -> SamplingParams:
    if text != "sampled":
        return GREEDY
    bias = tuple((token, 20.0) for token in range(2000, 2008))
    return SamplingParams(max_tokens=OUTPUT, temperature=0.8, seed=number, ignore_eos=True, logit_bias=bias)


def counts(core: EngineCore) -> tuple[int, int]:
    found = core.speculation
    return (0, 0) if found is None else (found.proposed_total, found.accepted_total)


def measure(repeats: int) -> list[dict[str, Any]]:
    sides = make_sides(make_model(SHAPE, torch.device("cpu"), torch.float32))
    serve(sides, "own", 1)
    runs: dict[tuple[int, str], dict[str, list[Run]]] = {row: {"on": [], "off": []} for row in ROWS}
    for _ in range(repeats):
        for batch, text in ROWS:
            for side, run in serve(sides, text, batch).items():
                runs[batch, text][side].append(run)
    return [row_of(batch, text, both) for (batch, text), both in runs.items()]


def row_of(batch: int, text: str, runs: dict[str, list[Run]]) -> dict[str, Any]:
    seconds = {side: statistics.median(run.cpu_s for run in each) for side, each in runs.items()}
    ratio = seconds["off"] / seconds["on"]
    last = runs["on"][-1]
    equal = all(on.answers == off.answers for on, off in zip(runs["on"], runs["off"], strict=True))
    aim = (
        AIMS["every row of batch 16"]
        if batch == 16
        else AIMS["copy at batch 1"]
        if (batch, text) == (1, "copy")
        else None
    )
    print(f"batch {batch:2} {text:10} {ratio:.3f}x {last.proposed} {last.accepted} {equal}", file=sys.stderr)
    return {
        "batch": batch,
        "text": text,
        "onOverOff": round(ratio, 3),
        "aim": aim,
        "aimMet": None if aim is None else ratio >= aim,
        "sameTokens": equal,
        "tokensPerCpuSecond": {side: round(batch * OUTPUT / each, 1) for side, each in seconds.items()},
        "guessedTokens": [run.proposed for run in runs["on"]],
        "guessedRight": [run.accepted for run in runs["on"]],
        "cpuSeconds": {side: [round(run.cpu_s, 3) for run in each] for side, each in runs.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(arguments.repeats)
    result = {
        "benchmark": "serving_speculation",
        "command": " ".join(["python", "benchmarks/serving_speculation.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, 1 thread, shared",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "model": {**SHAPE, "dtype": "float32"},
        "promptTokens": PROMPT,
        "outputTokens": OUTPUT,
        "speculate": GUESSES,
        "aims": AIMS,
        "rows": rows,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0 if all(row["sameTokens"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
