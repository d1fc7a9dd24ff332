"""Fair scheduling, the prefix cache and the limit on step time, on the engine's own scheduler: no model, no clock,
exact counts.

    python benchmarks/serving_fairness.py [--out benchmarks/results/serving_fairness.json]

Step times follow a step model (milliseconds: 5 + 0.05 a sequence + 0.02 a prompt token), so the results depend only
on the scheduler and are the same on every machine. Four comparisons:

  prefixes   32 beginnings of 2,048 tokens with 128 of their own each, 1,024 requests of eight keys: cache on, off
  batches    1,024 lines of a batch with these 32 beginnings in turn, 80 at a time, in a KV pool of 17 contexts: in the
             file's order, and as the API lends them, those that begin alike one after another
  keys       one key at ten times the rate of four others: counters, first come first served, each light key alone,
             and the four without the heavy one (what they cost each other)
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

from busbar.workloads.serving.fairness import Owner
from busbar.workloads.serving.prefix import salt_of
from busbar.workloads.serving.replay import StepTimes, simulated
from busbar.workloads.serving.scheduler import StepLimits
from busbar.workloads.serving.sequence import Sequence

TIMES = StepTimes(0.005, 5e-5, 0.0, 2e-5)


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
    most: int = 1 << 30,
) -> Outcome:
    """Runs the requests to their end, or for some time; at most `most` are with the engine at once."""
    promise_s = None if tpot_ms is None else tpot_ms / 1e3
    engine = simulated(TIMES, blocks, StepLimits(64, budget, 64, prefix_cache=cache), promise_s)
    scheduler, now, waiting = engine.scheduler, 0.0, sorted(requests, key=lambda r: r.at_ms)
    arrived: dict[Sequence, Request] = {}
    last: dict[Sequence, float] = {}
    gaps: dict[Sequence, list[float]] = defaultdict(list)
    result = Outcome(first_ms=defaultdict(list), gaps_ms=[], work=defaultdict(float))
    position = ended = 0
    while (position < len(waiting) or not scheduler.idle) and (until_ms is None or now < until_ms):
        if scheduler.idle:
            now = max(now, waiting[position].at_ms)
        while position < len(waiting) and waiting[position].at_ms <= now and position - ended < most:
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
        begun = engine.begin()
        assert begun is not None, "nobody waits for nothing"
        step, took_s = begun
        now += 1e3 * took_s
        for chunk in step.chunks:
            key = arrived[chunk.sequence].owner.key
            result.work[key] += chunk.count if chunk.start < chunk.sequence.prompt_len else 0
        for sequence in engine.end(step):
            request = arrived[sequence]
            result.work[request.owner.key] += 2
            if sequence in last:
                gaps[sequence].append(now - last[sequence])
            else:
                result.first_ms[request.owner.key].append(now - request.at_ms)
            last[sequence] = now
            if len(sequence.tokens) >= sequence.max_total:
                ended += 1
    result.ms, result.computed = now, engine.computed_tokens
    result.gaps_ms = [each for each in gaps.values() if each]
    return result


UNIQUE = 32 * 2048 + 1024 * (128 + 63)
"""Tokens that must be computed of the requests of `prefixes` and `batches`."""


def beginning_alike(keys: int) -> list[Request]:
    """1,024 requests, 32 in a row with one beginning."""
    rng = random.Random(0)
    heads = [[rng.randrange(32000) for _ in range(2048)] for _ in range(32)]
    return [
        Request(
            0.0, heads[i // 32] + [rng.randrange(32000) for _ in range(128)], 64, Owner("", f"key{i % keys}")
        )
        for i in range(1024)
    ]


def batches() -> dict[str, Any]:
    lent = beginning_alike(1)
    file = [lent[32 * (i % 32) + i // 32] for i in range(1024)]
    found = {
        name: simulate(order, blocks=600, budget=2048, cache=True, most=80)
        for name, order in (("file", file), ("lent", lent))
    }
    return {
        "row": "batches",
        "computedTokensOverUnique": {name: round(run.computed / UNIQUE, 3) for name, run in found.items()},
        "requestsPerSecondOverFileOrder": round(found["file"].ms / found["lent"].ms, 2),
        "aims": {"computedTokensOverUnique": "<= 1.05"},
    }


def prefixes() -> dict[str, Any]:
    requests, rng = beginning_alike(8), random.Random(1)
    orders = {"in a row": list(requests), "shuffled": requests}
    rng.shuffle(orders["shuffled"])
    rows = {}
    for name, order in orders.items():
        for budget in (512, 2048, 8192):
            on, off = (simulate(order, blocks=6000, budget=budget, cache=cache) for cache in (True, False))
            rows[f"{name}, steps of {budget}"] = {
                "computedTokensOverUnique": round(on.computed / UNIQUE, 3),
                "requestsPerSecondOverCacheOff": round(off.ms / on.ms, 2),
            }
    return {
        "row": "prefixes",
        "orders": rows,
        "aims": {"computedTokensOverUnique": "<= 1.05", "requestsPerSecondOverCacheOff": ">= 2.5"},
    }


def keys() -> dict[str, Any]:
    loads = {f"a light key asks every {gap_ms:.0f} ms": keys_at(gap_ms) for gap_ms in (300.0, 150.0)}
    return {
        "row": "keys",
        "loads": loads,
        "aims": {
            "jainOfWeightedTokens": ">= 0.95",
            "lightKeysP99FirstTokenOverAlone": "<= 1.5",
            "throughputOverFirstCome": ">= 0.92",
        },
    }


def keys_at(gap_ms: float) -> dict[str, Any]:
    """Four keys with requests every `gap_ms` in the mean, beside one with ten times as many."""
    rng = random.Random(1)
    end_ms = 90_000.0

    def stream(key: str, rate: float) -> list[Request]:
        at, found = 0.0, []
        while at < end_ms:
            at += rng.expovariate(rate / gap_ms)
            tokens = [rng.randrange(32000) for _ in range(rng.randrange(200, 600))]
            found.append(Request(at, tokens, rng.randrange(50, 150), Owner("tenant", key)))
        return found

    light = {f"light{i}": stream(f"light{i}", 1.0) for i in range(4)}
    quiet = [r for each in light.values() for r in each]
    everybody = [*stream("heavy", 10.0), *quiet]
    fair = simulate(everybody, blocks=2000, budget=512, until_ms=end_ms)
    first = simulate(everybody, blocks=2000, budget=512, until_ms=end_ms, fair=False)
    alone = {key: simulate(each, blocks=2000, budget=512) for key, each in light.items()}
    without = simulate(quiet, blocks=2000, budget=512)
    asked: dict[str, float] = defaultdict(float)
    for request in everybody:
        asked[request.owner.key] += len(request.tokens) + 2 * request.output

    def p99(values: list[float]) -> float:
        return sorted(values)[int(0.99 * len(values))]

    def slowdown(run: Outcome) -> float:
        return round(max(p99(run.first_ms[key]) / p99(alone[key].first_ms[key]) for key in light), 2)

    index, slower = jain(asked, fair.work), slowdown(fair)
    throughput = sum(fair.work.values()) / sum(first.work.values())
    return {
        "demandOverServed": round(sum(asked.values()) / sum(fair.work.values()), 2),
        "jainOfWeightedTokens": {
            "counters": round(index, 3),
            "firstCome": round(jain(asked, first.work), 3),
        },
        "lightKeysP99FirstTokenOverAlone": {
            "counters": slower,
            "firstCome": slowdown(first),
            "counters, without the heavy key": slowdown(without),
        },
        "throughputOverFirstCome": round(throughput, 3),
        "aimsMet": {
            "jainOfWeightedTokens": index >= 0.95,
            "lightKeysP99FirstTokenOverAlone": slower <= 1.5,
            "throughputOverFirstCome": throughput >= 0.92,
        },
    }


def jain(asked: dict[str, float], served: dict[str, float]) -> float:
    """Jain's index of what each key got over its max-min fair share of all that was served."""
    left, share = sum(served.values()), {}
    for place, key in enumerate(sorted(asked, key=lambda key: asked[key])):
        share[key] = min(asked[key], left / (len(asked) - place))
        left -= share[key]
    parts = [served[key] / share[key] for key in asked]
    return sum(parts) ** 2 / (len(parts) * sum(part**2 for part in parts))


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
    for number, part in enumerate((prefixes, batches, keys, promise), 1):
        print(f"[{number}/4] {part.__name__} …", file=sys.stderr)
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
