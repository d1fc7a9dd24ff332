"""Fair scheduling, the prefix cache and the limit on step time, on the engine's own scheduler: no model, no clock,
exact counts.

    python benchmarks/serving_fairness.py [--out benchmarks/results/serving_fairness.json]

Step times follow a step model (milliseconds: 5 + 0.05 a sequence + 0.02 a prompt token), so the results depend only
on the scheduler and are the same on every machine. Three comparisons:

  prefixes   32 beginnings of 2,048 tokens with 128 of their own each, 1,024 requests: cache on, off
  keys       one key at ten times the rate of four others: counters, first come first served, each light key alone
  promise    chat-like prompts beside decoding requests, 20 ms a token promised: the budget
             from the step model beside constant budgets
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))

from busbar.workloads.serving.blocks import BlockPool
from busbar.workloads.serving.budget import step_budget
from busbar.workloads.serving.fairness import Owner
from busbar.workloads.serving.prefix import salt_of
from busbar.workloads.serving.scheduler import Scheduler, StepLimits
from busbar.workloads.serving.sequence import Sequence
from busbar.workloads.serving.speed import StepModel

BASE_MS, SEQUENCE_MS, PROMPT_MS = 5.0, 0.05, 0.02


@dataclass(frozen=True)
class Request:
    at_ms: float
    tokens: list[int]
    output: int
    owner: Owner


@dataclass
class Outcome:
    """The counts of a run of the simulated engine."""

    ms: float = 0.0
    computed: int = 0
    first_ms: dict[str, list[float]] = None  # type: ignore[assignment]
    gaps_ms: list[list[float]] = None  # type: ignore[assignment]
    work: dict[str, float] = None  # type: ignore[assignment]


def simulate(
    requests: list[Request],
    *,
    blocks: int,
    budget: int,
    cache: bool = False,
    fair: bool = True,
    tpot_ms: float | None = None,
    until_ms: float | None = None,
) -> Outcome:
    """Runs the requests to their end, or for some time."""
    scheduler = Scheduler(BlockPool(blocks), StepLimits(64, budget, 64, prefix_cache=cache))
    model, now, waiting = StepModel(), 0.0, sorted(requests, key=lambda r: r.at_ms)
    arrived: dict[Sequence, Request] = {}
    last: dict[Sequence, float] = {}
    gaps: dict[Sequence, list[float]] = defaultdict(list)
    result = Outcome(first_ms=defaultdict(list), gaps_ms=[], work=defaultdict(float))
    position = 0
    while (position < len(waiting) or not scheduler.idle) and (until_ms is None or now < until_ms):
        if scheduler.idle:
            now = max(now, waiting[position].at_ms)
        while position < len(waiting) and waiting[position].at_ms <= now:
            request = waiting[position]
            owner = request.owner if fair else Owner()
            made = Sequence(
                position,
                list(request.tokens),
                len(request.tokens) + request.output,
                owner=owner,
                salt=salt_of(request.owner.tenant),
            )
            scheduler.add(made)
            arrived[made] = request
            position += 1
        decoding = [s for s in scheduler.running if s.missing == 1]
        context = sum(len(s.tokens) for s in decoding)
        allowed = step_budget(
            model, None if tpot_ms is None else tpot_ms / 1e3, len(decoding), context, 32, budget
        )
        step = scheduler.plan(allowed.tokens)
        prompt = sum(c.count for c in step.chunks if c.count > 1)
        singles = sum(c.count == 1 for c in step.chunks)
        took = BASE_MS + SEQUENCE_MS * singles + PROMPT_MS * prompt
        model.learn(singles, sum(c.start for c in step.chunks), prompt, took / 1e3)
        now += took
        result.computed += step.token_count
        sampled = {c.sequence: 7 for c in step.chunks if c.samples}
        for chunk in step.chunks:
            key = arrived[chunk.sequence].owner.key
            result.work[key] += chunk.count if chunk.start < chunk.sequence.prompt_len else 0
        scheduler.commit(step, sampled)
        for sequence in sampled:
            request = arrived[sequence]
            result.work[request.owner.key] += 2
            if sequence in last:
                gaps[sequence].append(now - last[sequence])
            else:
                result.first_ms[request.owner.key].append(now - request.at_ms)
            last[sequence] = now
            if len(sequence.tokens) >= sequence.max_total:
                scheduler.finish(sequence)
    result.ms = now
    result.gaps_ms = [each for each in gaps.values() if each]
    return result


def prefixes() -> dict[str, Any]:
    rng = random.Random(0)
    heads = [[rng.randrange(32000) for _ in range(2048)] for _ in range(32)]
    requests = [
        Request(0.0, heads[i % 32] + [rng.randrange(32000) for _ in range(128)], 64, Owner())
        for i in range(1024)
    ]
    rng.shuffle(requests)
    runs = {name: simulate(requests, blocks=6000, budget=2048, cache=name == "on") for name in ("on", "off")}
    unique = 32 * 2048 + 1024 * (128 + 63)
    return {
        "row": "prefixes",
        "computedTokensOverUnique": round(runs["on"].computed / unique, 3),
        "requestsPerSecondOverCacheOff": round(runs["off"].ms / runs["on"].ms, 2),
        "aims": {"computedTokensOverUnique": "<= 1.05", "requestsPerSecondOverCacheOff": ">= 2.5"},
    }


def keys() -> dict[str, Any]:
    rng = random.Random(1)
    end_ms, mean_ms = 60_000.0, 150.0

    def stream(key: str, rate: float) -> list[Request]:
        at, found = 0.0, []
        while at < end_ms:
            at += rng.expovariate(rate / mean_ms)
            tokens = [rng.randrange(32000) for _ in range(rng.randrange(200, 600))]
            found.append(Request(at, tokens, rng.randrange(50, 150), Owner("tenant", key)))
        return found

    light = {f"light{i}": stream(f"light{i}", 1.0) for i in range(4)}
    everybody = [*stream("heavy", 10.0), *(r for each in light.values() for r in each)]
    fair = simulate(everybody, blocks=2000, budget=512, until_ms=end_ms)
    first = simulate(everybody, blocks=2000, budget=512, until_ms=end_ms, fair=False)
    alone = {key: simulate(each, blocks=2000, budget=512) for key, each in light.items()}

    def p99(values: list[float]) -> float:
        return sorted(values)[int(0.99 * len(values))]

    def slowdown(run: Outcome) -> float:
        return max(p99(run.first_ms[key]) / p99(alone[key].first_ms[key]) for key in light)

    return {
        "row": "keys",
        "lightKeysP99FirstTokenOverAlone": {
            "counters": round(slowdown(fair), 2),
            "firstCome": round(slowdown(first), 2),
        },
        "throughputOverFirstCome": round(sum(fair.work.values()) / sum(first.work.values()), 3),
        "aims": {"lightKeysP99FirstTokenOverAlone": "<= 1.5", "throughputOverFirstCome": ">= 0.92"},
    }


def promise() -> dict[str, Any]:
    rng = random.Random(2)
    at, requests = 0.0, []
    for _ in range(600):
        at += rng.expovariate(1 / 120.0)
        length = min(4000, int(rng.lognormvariate(6.8, 0.9)) + 1)
        tokens = [rng.randrange(32000) for _ in range(length)]
        requests.append(Request(at, tokens, rng.randrange(50, 300), Owner()))
    rows = {}
    for name, budget, tpot in (("promise", 8192, 20.0), *((str(n), n, None) for n in (128, 512, 2048, 8192))):
        run = simulate(requests, blocks=6000, budget=budget, tpot_ms=tpot)
        kept = [sum(each) / len(each) <= 20.0 for each in run.gaps_ms]
        steps = [gap for each in run.gaps_ms for gap in each]
        first = sorted(t for each in run.first_ms.values() for t in each)
        rows[name] = {
            "requestsThatKeep20msPerToken": round(sum(kept) / len(kept), 3),
            "gapsWithin20ms": round(sum(gap <= 20.0 for gap in steps) / len(steps), 3),
            "medianFirstTokenMs": round(first[len(first) // 2], 1),
            "tokensPerSecond": round(1e3 * run.computed / run.ms, 1),
        }
    best = max(
        (r["tokensPerSecond"] for n, r in rows.items() if n != "promise"),
    )
    return {
        "row": "promise",
        "budgets": rows,
        "tokensPerSecondOverBestConstant": round(rows["promise"]["tokensPerSecond"] / best, 3),
        "aims": {"requestsThatKeep20msPerToken": ">= 0.95", "tokensPerSecondOverBestConstant": ">= 0.9"},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for number, part in enumerate((prefixes, keys, promise), 1):
        print(f"[{number}/3] {part.__name__} …", file=sys.stderr)
        rows.append(part())
    result = {
        "benchmark": "serving_fairness",
        "command": " ".join(["python", "benchmarks/serving_fairness.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": "simulated steps: the same on every machine",
        "versions": {"python": platform.python_version()},
        "rows": rows,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
