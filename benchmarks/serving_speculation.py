"""Speculation by prompt lookup and by a draft model, on and off in one run, on one CPU thread: tokens per CPU second and
equality of tokens.

    python benchmarks/serving_speculation.py --part lookup [--repeats 3] [--out benchmarks/results/serving_speculation.json]
    python benchmarks/serving_speculation.py --part draft --pair DIR [--out benchmarks/results/serving_draft.json]

Part `lookup`. A random Llama of 33.6 M parameters (8 layers, width 512). A random model copies nothing, so the texts of most rows are
scripted: the model computes every step as always, and behind it the logit of the script's next token is raised, on both
sides alike. How often guesses are right is then a property of the text:

  copy         the answer is the prompt's document, with another token in every 24th place
  loop         the answer repeats 8 tokens that the prompt does not have
  misleading   four tokens in random order: every guess finds a place, and three of four are wrong
  random       tokens of the whole vocabulary in random order
  half         of a batch, every second request is `copy` and the others are `random`
  own          no script: greedy tokens of the model itself
  sampled      no script: temperature 0.8 among 8 tokens that a logit bias leaves, with a seed

Part `draft`. A model of 29.4 M parameters and a draft of 3.6 M, each trained on the same small text by `draft_pair.py`; where
DIR has none, they are trained first (about ten minutes). Nothing is scripted: prompts are the beginnings of the texts, which
both know more or less by heart, and how often the draft is right is what both have learned.

  greedy       greedy answers
  hot          temperature 0.8 with a seed
  useless      greedy answers, with a draft of random weights: what it costs to find that out, and to try again now and then

A third side, `lookup`, has the guesses by lookup alone.

Each side is one engine for all rows, as one that serves: what it has learned in one row it carries into the next. The
sides take their steps in turn, so that both meet the same neighbours on a shared machine; rows are interleaved by
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.draft_pair import ABOUT, SHAPES, WINDOW, make_pair, texts
from benchmarks.gpu.serving import make_model
from tokenizers import Tokenizer, models

from busbar.workloads.serving.architecture import Architecture, parse_architecture, read_architecture
from busbar.workloads.serving.core import EngineCore
from busbar.workloads.serving.draft_load import DraftWeights
from busbar.workloads.serving.loader import assemble
from busbar.workloads.serving.runner import Outcome, Runner
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.sequence import Step
from busbar.workloads.serving.settings import EngineSettings
from busbar.workloads.serving.text import load_tokenizer
from busbar.workloads.serving.weights import Weights, fuse_weights, load_weights

SHAPE: dict[str, int] = {"layers": 8, "hidden": 512, "heads": 8, "kv": 4, "mlp": 1536, "vocab": 8192}
PROMPT, OUTPUT, GUESSES = 192, 128, 7
DRAFT_PROMPT, DRAFT_OUTPUT = 32, WINDOW - 32
"""Of the part `draft`: its models know nothing of contexts that are longer than what they were trained on."""
KV_BYTES = 256 * 2**20
LOOKUP_ROWS = [
    *((1, text) for text in ("copy", "loop", "misleading", "random", "own", "sampled")),
    *((4, text) for text in ("copy", "half")),
    *((16, text) for text in ("copy", "misleading", "random", "half")),
]
ALONE = 4
"""Requests of a row at batch 1 of that part, one after another."""
DRAFT_TEXTS = ("greedy", "hot", "useless")
DRAFT_ROWS = [
    *((1, text) for text in DRAFT_TEXTS),
    *((4, text) for text in ("greedy", "hot")),
    *((16, text) for text in DRAFT_TEXTS),
]
AIMS = {"copy, greedy and hot at batch 1": 1.3, "every row of batch 16": 0.97}
GREEDY = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
RAISED = 100.0
"""Added to the logit of a script's next token."""


@dataclass
class Run:
    """One side of one repeat."""

    cpu_s: float
    proposed: int
    accepted: int
    drafted: int = 0
    """Of those proposed."""
    drafted_right: int = 0
    draft_s: float = 0.0
    """Of the seconds."""
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


class Pair:
    """The engines of a model with and without its draft, and with one that has learned nothing."""

    def __init__(self, folder: Path) -> None:
        target, draft = folder / "target", folder / "draft"
        self.arch, weights = read_architecture(target), self._weights(target)
        draft_arch = read_architecture(draft)
        nothing = make_model(SHAPES["draft"], torch.device("cpu"), torch.float32)
        useless = fuse_weights(nothing.state_dict(), draft_arch, nothing.device, nothing.dtype)
        off = make_engine(self.arch, weights, 0)
        self.trained = {
            "on": make_engine(self.arch, weights, GUESSES, DraftWeights(draft_arch, self._weights(draft))),
            "lookup": make_engine(self.arch, weights, GUESSES),
            "off": off,
        }
        self.useless = {
            "on": make_engine(self.arch, weights, GUESSES, DraftWeights(draft_arch, useless)),
            "off": off,
        }
        tokenizer = load_tokenizer(target)
        self.prompts = [tokenizer.encode(text).ids[:DRAFT_PROMPT] for text in texts()]

    @staticmethod
    def _weights(folder: Path) -> Weights:
        return load_weights(folder, read_architecture(folder), torch.device("cpu"), torch.float32)


def make_engine(
    arch: Architecture, weights: Weights, speculate: int, draft: DraftWeights | None = None
) -> EngineCore:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(arch.vocab_size)}, unk_token="w0"))
    settings = EngineSettings(Path("in-memory"), kv_bytes=KV_BYTES, prefix_cache=False, speculate=speculate)
    core, _, _ = assemble(
        settings, arch, weights, torch.float32, tokenizer, "random", time.process_time, draft
    )
    runner = core.runner
    core.runner = Scripted(runner.decoder, runner.cache, runner.adapters_together)
    return core


def serve_scripts(sides: Mapping[str, EngineCore], text: str, batch: int) -> dict[str, Run]:
    """Requests of the part `lookup`."""
    scripts = [script(text, number) for number in range(batch)]
    for core in sides.values():
        assert isinstance(core.runner, Scripted)
        core.runner.scripts = {} if text in ("own", "sampled") else dict(enumerate(scripts))
    return serve(sides, text, [tokens[:PROMPT] for tokens in scripts])


def serve(sides: Mapping[str, EngineCore], text: str, prompts: Sequence[list[int]]) -> dict[str, Run]:
    """The same requests on all sides, a step of each in turn."""
    before = {side: counts(core) for side, core in sides.items()}
    runs = {side: Run(0.0, 0, 0, answers=[[] for _ in prompts]) for side in sides}
    for core in sides.values():
        for number, tokens in enumerate(prompts):
            core.submit(str(number), tokens, params_of(text, number), time.process_time())
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
        found = (now - then for now, then in zip(counts(core), before[side], strict=True))
        proposed, accepted, drafted, drafted_right, draft_s = found
        run = Run(runs[side].cpu_s, int(proposed), int(accepted), int(drafted), int(drafted_right), draft_s)
        runs[side] = replace(run, answers=runs[side].answers)
    return runs


def params_of(text: str, number: int) -> SamplingParams:
    if text in DRAFT_TEXTS:
        temperature = 0.8 if text == "hot" else 0.0
        return SamplingParams(max_tokens=DRAFT_OUTPUT, temperature=temperature, seed=number, ignore_eos=True)
    if text != "sampled":
        return GREEDY
    bias = tuple((token, 20.0) for token in range(2000, 2008))
    return SamplingParams(max_tokens=OUTPUT, temperature=0.8, seed=number, ignore_eos=True, logit_bias=bias)


def counts(core: EngineCore) -> tuple[int, int, int, int, float]:
    """Guesses and right ones, those of the draft, and its seconds."""
    found = core.speculation
    if found is None:
        return 0, 0, 0, 0, 0.0
    drafts = found.drafts
    own = (
        (0, 0, 0.0)
        if drafts is None
        else (drafts.proposed_total, drafts.accepted_total, drafts.model.seconds)
    )
    return found.proposed_total, found.accepted_total, *own


Serve = Callable[[str, int], dict[str, Run]]
"""A text and a batch size to the run of each side."""


def lookup_part() -> Serve:
    sides = make_sides(make_model(SHAPE, torch.device("cpu"), torch.float32))
    serve_scripts(sides, "own", 1)
    return partial(serve_scripts, sides)


def draft_part(folder: Path) -> Serve:
    pair = Pair(folder)

    def serve_pair(text: str, batch: int) -> dict[str, Run]:
        sides = pair.useless if text == "useless" else pair.trained
        if batch > 1:
            return serve(sides, text, pair.prompts[:batch])
        return one_after_another([serve(sides, text, [prompt]) for prompt in pair.prompts[:ALONE]])

    for text in ("greedy", "useless"):
        serve_pair(text, 1)
    return serve_pair


def one_after_another(runs: Sequence[Mapping[str, Run]]) -> dict[str, Run]:
    """Their sums."""
    found: dict[str, Run] = {}
    for side in runs[0]:
        each = [run[side] for run in runs]
        answers = [answer for run in each for answer in run.answers]
        names = ("cpu_s", "proposed", "accepted", "drafted", "drafted_right", "draft_s")
        found[side] = Run(
            **{name: sum(getattr(run, name) for run in each) for name in names}, answers=answers
        )
    return found


def measure(repeats: int, rows: Sequence[tuple[int, str]], run_row: Serve) -> list[dict[str, Any]]:
    runs: dict[tuple[int, str], dict[str, list[Run]]] = {row: {} for row in rows}
    for _ in range(repeats):
        for batch, text in rows:
            for side, run in run_row(text, batch).items():
                runs[batch, text].setdefault(side, []).append(run)
    return [row_of(batch, text, each) for (batch, text), each in runs.items()]


def row_of(batch: int, text: str, runs: dict[str, list[Run]]) -> dict[str, Any]:
    seconds = {side: statistics.median(run.cpu_s for run in each) for side, each in runs.items()}
    ratio = seconds["off"] / seconds["on"]
    last = runs["on"][-1]
    tokens = sum(map(len, last.answers))
    equal = all(
        run.answers == off.answers
        for each in runs.values()
        for run, off in zip(each, runs["off"], strict=True)
    )
    aim = (
        AIMS["every row of batch 16"]
        if batch == 16
        else AIMS["copy, greedy and hot at batch 1"]
        if batch == 1 and text in ("copy", "greedy", "hot")
        else None
    )
    print(
        f"batch {batch:2} {text:10} {ratio:.3f}x {last.proposed} {last.accepted} {last.drafted} {equal}",
        file=sys.stderr,
    )
    return {
        "batch": batch,
        "text": text,
        "onOverOff": round(ratio, 3),
        **({"lookupOverOff": round(seconds["off"] / seconds["lookup"], 3)} if "lookup" in runs else {}),
        "aim": aim,
        "aimMet": None if aim is None else ratio >= aim,
        "sameTokens": equal,
        "tokensPerCpuSecond": {side: round(tokens / each, 1) for side, each in seconds.items()},
        "guessedTokens": [run.proposed for run in runs["on"]],
        "guessedRight": [run.accepted for run in runs["on"]],
        "draftedTokens": [run.drafted for run in runs["on"]],
        "draftedRight": [run.drafted_right for run in runs["on"]],
        "draftCpuSeconds": [round(run.draft_s, 3) for run in runs["on"]],
        "cpuSeconds": {side: [round(run.cpu_s, 3) for run in each] for side, each in runs.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("lookup", "draft"), default="lookup")
    parser.add_argument("--pair", type=Path, help="folder of the models of the part draft")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.part == "lookup":
        about: dict[str, Any] = dict(SHAPE)
        rows = measure(arguments.repeats, LOOKUP_ROWS, lookup_part())
    elif arguments.pair is None:
        parser.error("--part draft needs --pair DIR, where its models are or will be")
    else:
        if not (arguments.pair / ABOUT).is_file():
            make_pair(arguments.pair)
        about = {**SHAPES, "trained": json.loads((arguments.pair / ABOUT).read_text())}
        rows = measure(arguments.repeats, DRAFT_ROWS, draft_part(arguments.pair))
    result = {
        "benchmark": "serving_speculation",
        "command": " ".join(["python", "benchmarks/serving_speculation.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, 1 thread, shared",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "model": {**about, "dtype": "float32"},
        "promptTokens": PROMPT if arguments.part == "lookup" else DRAFT_PROMPT,
        "outputTokens": OUTPUT if arguments.part == "lookup" else DRAFT_OUTPUT,
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
