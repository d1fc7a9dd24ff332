"""A KV pool of a quarter of the contexts: swapping to host memory beside recomputing only, blocking copies and enough
memory; in one run, on one CPU thread and the copying one.

    python benchmarks/serving_swap.py [--repeats 3] [--out benchmarks/results/serving_swap.json]

A random Llama of 33.6 M parameters (8 layers, width 512; a block of 64 tokens is 1 MiB). REQUESTS requests come in equal
distances, with prompts and answers of random lengths. The sides:

  swap        a host tier of the size of all contexts
  blocking    the same, but the engine waits for every copy before it computes on
  recompute   no host tier: what was evicted is computed again
  enough      a pool that holds all contexts; no side can be better

Two workloads: `decode`, where answers are long, so that running requests are preempted; and `chats`, where each of
CHATS conversations comes back with a longer prompt after the others had theirs.

Times are CPU seconds of the engine's thread plus the seconds in which it waits for copies, so that neighbours on a
shared machine count on no side; gaps between tokens are measured with that clock. Sides are interleaved by repeat.
`needed` is what each side must compute at least: every token but the last of an answer once, and of chats what they had
before not again.

`longestPercent` tells of the 1 % longest gaps how many have a cause, the first that holds: the request was preempted, tokens
were computed again meanwhile, a prompt was computed for the first time, the engine waited for a copy. `p99GapOverFreeCopies`
is the p99 of each peer over that of `swap` less all of its waits for copies: no way of copying is better than that.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.gpu.serving import make_model
from tokenizers import Tokenizer, models

from busbar.workloads.serving.architecture import Architecture, parse_architecture
from busbar.workloads.serving.core import EngineCore
from busbar.workloads.serving.hosttier import Move
from busbar.workloads.serving.loader import assemble
from busbar.workloads.serving.mover import BlockMover
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.sequence import Sequence as Tokens
from busbar.workloads.serving.sequence import Step
from busbar.workloads.serving.settings import EngineSettings
from busbar.workloads.serving.weights import Weights, fuse_weights

SHAPE: dict[str, int] = {"layers": 8, "hidden": 512, "heads": 8, "kv": 4, "mlp": 1536, "vocab": 8192}
BLOCK_BYTES = SHAPE["layers"] * 2 * SHAPE["kv"] * 64 * 64 * 4
REQUESTS, CHATS, TURNS = 16, 12, 4
SIDES = ("swap", "blocking", "recompute", "enough")
P99_AIM, COMPUTED_AIM = 1.4, 1.05


@dataclass
class Request:
    """Comes when so many steps have run."""

    at: int
    prompt: list[int]
    output: int


class EngineClock:
    """CPU time of this thread and waits for copies."""

    def __init__(self) -> None:
        self.waited = 0.0

    def __call__(self) -> float:
        return time.thread_time() + self.waited


class TimedMover(BlockMover):
    """Counts the engine's waits; a blocking one waits for every copy at once."""

    blocking = False
    waits = EngineClock()

    def submit(self, moves: Sequence[Move]) -> None:
        super().submit(moves)
        if self.blocking and moves:
            self.wait(moves[-1].number)

    def wait(self, number: int) -> None:
        began, used = time.perf_counter(), time.thread_time()
        super().wait(number)
        self.waits.waited += time.perf_counter() - began - (time.thread_time() - used)


class Tally:
    """What the engine has computed."""

    def __init__(self) -> None:
        self.computed = self.again = self.prompts = 0
        """All tokens; of them those that had been computed before, and those of prompts that had not."""
        self._reached: dict[Tokens, int] = {}

    def add(self, step: Step) -> None:
        for chunk in step.chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.count
            reached = self._reached.get(sequence, 0)
            again = max(0, min(end, reached) - chunk.start)
            self.computed += chunk.count
            self.again += again
            self.prompts += max(0, min(end, sequence.prompt_len) - chunk.start - again)
            self._reached[sequence] = max(end, reached)


class Cause(StrEnum):
    """Why a gap between tokens is long: the first that holds."""

    PREEMPTED = "preempted"
    AGAIN = "computed again"
    PROMPT = "prompt"
    COPY = "copy"
    NONE = "none"


@dataclass(frozen=True)
class Moment:
    """When a request had its last token."""

    at: float
    waited: float
    """Seconds until then in which the engine waited for copies."""
    again: int
    prompts: int
    preemptions: int
    """Of the request."""


@dataclass(frozen=True)
class Gap:
    """Between two tokens of a request."""

    seconds: float
    waited: float
    cause: Cause


@dataclass
class Run:
    """One side of one repeat."""

    found: list[Gap] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    answers: dict[str, list[int]] = field(default_factory=dict)
    seconds: float = 0.0
    computed: int = 0
    preemptions: int = 0
    copied: int = 0
    waited: float = 0.0

    @property
    def gaps(self) -> list[float]:
        return [gap.seconds for gap in self.found]

    @property
    def gaps_with_free_copies(self) -> list[float]:
        return [gap.seconds - gap.waited for gap in self.found]


def decode_load(rng: random.Random) -> list[Request]:
    return [
        Request(2 * i, tokens(rng, rng.randrange(32, 129)), rng.randrange(160, 321)) for i in range(REQUESTS)
    ]


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, SHAPE["vocab"]) for _ in range(count)]


def make_engine(
    arch: Architecture, weights: Weights, side: str, contexts: int, clock: EngineClock
) -> tuple[EngineCore, Tally]:
    blocks = contexts // 64 + 1
    pool = 2 * blocks if side == "enough" else blocks // 4
    settings = EngineSettings(
        Path("in-memory"),
        kv_bytes=(pool + 1) * BLOCK_BYTES,
        host_kv_bytes=2 * blocks * BLOCK_BYTES if side in ("swap", "blocking") else 0,
        max_model_len=1024,
    )
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(arch.vocab_size)}, unk_token="w0"))
    core, _, _ = assemble(settings, arch, weights, torch.float32, tokenizer, "random", clock=clock)
    if core.runner.mover is not None:
        mover = TimedMover(core.runner.cache, core.runner.mover.slots)
        mover.blocking, mover.waits = side == "blocking", clock
        core.runner.mover = mover
    run, tally = core.runner.run, Tally()

    def counted(step: Step) -> Any:
        tally.add(step)
        return run(step)

    core.runner.run = counted  # type: ignore[method-assign]
    return core, tally


def params_of(output: int) -> SamplingParams:
    return SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)


class Client:
    """Submits requests and takes times."""

    def __init__(self, core: EngineCore, tally: Tally, clock: EngineClock) -> None:
        self.core, self.tally, self.clock, self.run = core, tally, clock, Run()
        self._asked: dict[str, float] = {}
        self._last: dict[str, Moment] = {}
        self._sequences: dict[str, Tokens] = {}

    def ask(self, name: str, prompt: list[int], output: int) -> None:
        self._asked[name] = self.clock()
        self.run.answers[name] = []
        self.core.submit(name, prompt, params_of(output), self.clock())
        sequence = self.core.sequence_of(name)
        assert sequence is not None
        self._sequences[name] = sequence

    def step(self) -> None:
        deltas, at, tally = self.core.step(), self.clock(), self.tally
        for delta in deltas:
            name = delta.request_id
            self.run.answers[name] += delta.tokens
            now = Moment(at, self.clock.waited, tally.again, tally.prompts, self._sequences[name].preemptions)
            if name in self._last:
                self.run.found.append(gap_between(self._last[name], now))
            else:
                self.run.firsts.append(at - self._asked[name])
            self._last[name] = now

    def finish(self) -> None:
        while not self.core.idle:
            self.step()


def gap_between(last: Moment, now: Moment) -> Gap:
    grew = {
        Cause.PREEMPTED: now.preemptions - last.preemptions,
        Cause.AGAIN: now.again - last.again,
        Cause.PROMPT: now.prompts - last.prompts,
        Cause.COPY: now.waited - last.waited,
    }
    cause = next((each for each, more in grew.items() if more > 0), Cause.NONE)
    return Gap(now.at - last.at, now.waited - last.waited, cause)


def serve_decode(client: Client, load: list[Request]) -> None:
    todo, steps = list(enumerate(load)), 0
    while todo or not client.core.idle:
        while todo and todo[0][1].at <= steps:
            number, request = todo.pop(0)
            client.ask(str(number), request.prompt, request.output)
        client.step()
        steps += 1


def serve_chats(client: Client, rng: random.Random) -> None:
    texts = {f"{chat}": tokens(rng, 160) for chat in range(CHATS)}
    for turn in range(TURNS):
        for chat, text in texts.items():
            text += tokens(rng, 24)
            client.ask(f"{chat}/{turn}", list(text), 32)
            client.finish()
            text += client.run.answers[f"{chat}/{turn}"]


def needed(workload: str, load: list[Request]) -> tuple[int, int]:
    """(tokens to compute at least, tokens of all contexts)."""
    if workload == "decode":
        every = [len(r.prompt) + r.output for r in load]
        return sum(every) - len(every), sum(every)
    context = 160 + TURNS * (24 + 32)
    return CHATS * (context - 1), CHATS * context


def measure(repeats: int) -> dict[str, dict[str, list[Run]]]:
    model = make_model(SHAPE, torch.device("cpu"), torch.float32)
    arch = parse_architecture(model.config.to_dict())
    weights = fuse_weights(model.state_dict(), arch, model.device, model.dtype)
    found: dict[str, dict[str, list[Run]]] = {w: {s: [] for s in SIDES} for w in ("decode", "chats")}
    for repeat in range(-1, repeats):  # the first one warms up
        for workload, sides in found.items():
            load = decode_load(random.Random(max(repeat, 0)))
            contexts = needed(workload, load)[1]
            order = SIDES if repeat % 2 else SIDES[::-1]
            for side in order:
                clock = EngineClock()
                core, tally = make_engine(arch, weights, side, contexts, clock)
                client, began, waited = Client(core, tally, clock), clock(), clock.waited
                if workload == "decode":
                    serve_decode(client, load)
                else:
                    serve_chats(client, random.Random(repeat))
                run = client.run
                run.seconds, run.waited = clock() - began, clock.waited - waited
                run.computed = tally.computed
                run.preemptions = core.scheduler.preemption_count
                run.copied = sum(core.scheduler.pool.host.moves_total.values())
                if repeat >= 0:
                    sides[side].append(run)
                    print(
                        f"{repeat} {workload:7} {side:10} {run.seconds:6.1f} s", file=sys.stderr, flush=True
                    )
    return found


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def longest_percent(runs: list[Run]) -> dict[str, int]:
    """How many of the 1 % longest gaps of each run have which cause."""
    longest = [
        gap
        for run in runs
        for gap in sorted(run.found, key=lambda gap: -gap.seconds)[: max(1, len(run.found) // 100)]
    ]
    return dict(Counter(str(gap.cause) for gap in longest))


def rows(found: dict[str, dict[str, list[Run]]]) -> list[dict[str, Any]]:
    made = []
    for workload, sides in found.items():
        table = {}
        for side, runs in sides.items():
            table[side] = {
                "p50GapMs": round(1e3 * statistics.median(quantile(r.gaps, 0.5) for r in runs), 2),
                "p99GapMs": round(1e3 * statistics.median(quantile(r.gaps, 0.99) for r in runs), 2),
                "maxGapMs": round(1e3 * statistics.median(max(r.gaps) for r in runs), 1),
                "p50FirstMs": round(1e3 * statistics.median(quantile(r.firsts, 0.5) for r in runs), 1),
                "p99FirstMs": round(1e3 * statistics.median(quantile(r.firsts, 0.99) for r in runs), 1),
                "engineSeconds": round(statistics.median(r.seconds for r in runs), 2),
                "computedOverNeeded": round(
                    statistics.median(
                        r.computed / needed(workload, decode_load(random.Random(i)))[0]
                        for i, r in enumerate(runs)
                    ),
                    4,
                ),
                "preemptions": [r.preemptions for r in runs],
                "blocksCopied": [r.copied for r in runs],
                "waitedSeconds": [round(r.waited, 4) for r in runs],
                "waitedMsPerCopiedBlock": [round(1e3 * r.waited / r.copied, 3) for r in runs if r.copied],
                "longestPercent": longest_percent(runs),
            }
        same = all(
            run.answers == sides["enough"][i].answers for runs in sides.values() for i, run in enumerate(runs)
        )
        ratio = {
            peer: {
                key: round(table[peer][key] / table["swap"][key], 3)  # type: ignore[operator]
                for key in ("p99GapMs", "maxGapMs", "p50FirstMs", "engineSeconds")
            }
            for peer in ("blocking", "recompute", "enough")
        }
        free = statistics.median(quantile(r.gaps_with_free_copies, 0.99) for r in sides["swap"])
        bound = {peer: round(table[peer]["p99GapMs"] / (1e3 * free), 3) for peer in ratio}  # type: ignore[operator]
        made.append(
            {
                "workload": workload,
                "sameTokens": same,
                "peerOverSwap": ratio,
                "p99GapOverFreeCopies": bound,
                "sides": table,
            }
        )
    return made


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "benchmark": "serving_swap",
        "command": " ".join(["python", "benchmarks/serving_swap.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, 1 thread, shared",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "model": {**SHAPE, "dtype": "float32", "blockBytes": BLOCK_BYTES},
        "requests": REQUESTS,
        "chats": [CHATS, TURNS],
        "aims": {"p99GapOverSwap": P99_AIM, "computedOverNeeded": COMPUTED_AIM},
        "rows": rows(measure(arguments.repeats)),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
