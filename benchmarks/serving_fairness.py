"""Fair scheduling, the prefix cache and the limit on step time, on the engine's own scheduler: no model, no clock,
exact counts.

    python benchmarks/serving_fairness.py [--row keys] [--out benchmarks/results/serving_fairness.json]

Step times follow a step model (milliseconds: 5 + 0.05 a sequence + 0.02 a prompt token), so the results depend only
on the scheduler and are the same on every machine. Four comparisons:

  prefixes   32 beginnings of 2,048 tokens with 128 of their own each, 1,024 requests of eight keys: cache on, off
  batches    1,024 lines of a batch with these 32 beginnings in turn, 80 at a time, in a KV pool of 17 contexts: in the
             file's order, and as the API lends them, those that begin alike one after another
  keys       keys that ask much more than four others, at several rates: counters, first come first served, each light
             key alone, and the four without the heavy ones: what they cost each other, below which no rule for the
             heavy ones gets. `slowestPercentMs` takes the light keys' slowest first tokens apart
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
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))

from busbar.workloads.serving.fairness import Owner
from busbar.workloads.serving.prefix import salt_of
from busbar.workloads.serving.replay import StepTimes, simulated
from busbar.workloads.serving.scheduler import StepLimits
from busbar.workloads.serving.sequence import Sequence, Step

TIMES = StepTimes(0.005, 5e-5, 0.0, 2e-5)
HEAVY = "heavy"
"""How the names of keys begin that ask for more than the others."""


@dataclass(frozen=True)
class Request:
    at_ms: float
    tokens: list[int]
    output: int
    owner: Owner


@dataclass
class Parts:
    """Of what a first token waited for, milliseconds."""

    running_step: float = 0.0
    """Which ran when the request came."""
    own_prompt: float = 0.0
    light_prompts: float = 0.0
    """Of other requests."""
    heavy_prompts: float = 0.0
    heavy_decodes: float = 0.0
    """In steps until the token."""
    rest: float = 0.0
    """The steps themselves, and what light keys decode in them."""

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))

    def add(self, step: Step, took_ms: float) -> None:
        """Another step has passed."""
        token, row = 1e3 * TIMES.per_prompt_token_s, 1e3 * TIMES.per_sequence_s
        for chunk in step.chunks:
            is_heavy, is_prompt = chunk.sequence.owner.key.startswith(HEAVY), chunk.count > 1
            self.light_prompts += token * chunk.count if is_prompt and not is_heavy else 0.0
            self.heavy_prompts += token * chunk.count if is_prompt and is_heavy else 0.0
            self.heavy_decodes += row if is_heavy and not is_prompt else 0.0
        self.rest += took_ms - token * sum(c.count for c in step.chunks if c.count > 1)
        self.rest -= row * sum(c.count == 1 and c.sequence.owner.key.startswith(HEAVY) for c in step.chunks)

    def since(self, before: Parts, running_step: float, own_prompt: float) -> Parts:
        """What has come to it since `before`, for one request."""
        found = Parts(**{part: value - vars(before)[part] for part, value in vars(self).items()})
        found.running_step, found.own_prompt = running_step, own_prompt
        found.light_prompts -= own_prompt
        return found


@dataclass
class Outcome:
    """The counts of a run of the simulated engine."""

    ms: float = 0.0
    computed: int = 0
    first_ms: dict[str, list[float]] = None  # type: ignore[assignment]
    gaps_ms: list[list[float]] = None  # type: ignore[assignment]
    parts: list[Parts] = None  # type: ignore[assignment]
    """Of the first tokens of light keys."""
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
    passed = Parts()
    came: dict[Sequence, tuple[Parts, float]] = {}
    """What had passed when a light key's request came, and the rest of the step that ran."""
    result = Outcome(first_ms=defaultdict(list), gaps_ms=[], parts=[], work=defaultdict(float))
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
            if not request.owner.key.startswith(HEAVY):
                came[made] = replace(passed), now - request.at_ms
            position += 1
        begun = engine.begin()
        assert begun is not None, "nobody waits for nothing"
        step, took_s = begun
        now += 1e3 * took_s
        passed.add(step, 1e3 * took_s)
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
                if sequence in came:
                    own_ms = 1e3 * TIMES.per_prompt_token_s * sequence.prompt_len
                    result.parts.append(passed.since(*came.pop(sequence), own_ms))
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


@dataclass(frozen=True)
class Load:
    """Four light keys, each with a request every `gap_ms` in the mean, beside `heavy` ones with `ratio` times as many."""

    gap_ms: float
    ratio: float = 10.0
    heavy: int = 1
    light_prompts: tuple[int, int] = (200, 600)
    heavy_prompts: tuple[int, int] = (200, 600)
    requests: int = 100
    """Of each light key, in the mean."""


LOADS = {
    "a light key asks every 300 ms": Load(300.0, requests=300),
    "a light key asks every 150 ms": Load(150.0, requests=300),
    "every 600 ms, the heavy key 30 times as often": Load(600.0, ratio=30.0),
    "every 140 ms, the heavy key 3 times as often": Load(140.0, ratio=3.0),
    "every 400 ms, two heavy keys": Load(400.0, heavy=2),
    "every 300 ms, the heavy key 3 times as often, with prompts ten times as long": Load(
        300.0, ratio=3.0, heavy_prompts=(2000, 6000)
    ),
    "every 900 ms with prompts four times as long, the heavy key 40 times as often": Load(
        900.0, ratio=40.0, light_prompts=(800, 2400)
    ),
}
AIMS = {"jainOfWeightedTokens": 0.95, "lightKeysP99FirstTokenOverAlone": 1.5, "throughputOverFirstCome": 0.92}


def keys() -> dict[str, Any]:
    with ProcessPoolExecutor() as pool:
        return {
            "row": "keys",
            "loads": dict(zip(LOADS, pool.map(keys_at, LOADS.values()), strict=True)),
            "aims": AIMS,
        }


def streams(load: Load, end_ms: float) -> dict[str, list[Request]]:
    """The requests of each key."""
    rng = random.Random(1)

    def stream(key: str, rate: float, prompts: tuple[int, int]) -> list[Request]:
        at, found = 0.0, []
        while at < end_ms:
            at += rng.expovariate(rate / load.gap_ms)
            tokens = [rng.randrange(32000) for _ in range(rng.randrange(*prompts))]
            found.append(Request(at, tokens, rng.randrange(50, 150), Owner("tenant", key)))
        return found

    light = {f"light{i}": stream(f"light{i}", 1.0, load.light_prompts) for i in range(4)}
    names = [f"{HEAVY}{i}" for i in range(load.heavy)]
    return light | {name: stream(name, load.ratio, load.heavy_prompts) for name in names}


def keys_at(load: Load) -> dict[str, Any]:
    end_ms = load.requests * load.gap_ms
    asking = streams(load, end_ms)
    light = {key: mine for key, mine in asking.items() if not key.startswith(HEAVY)}
    quiet = [r for each in light.values() for r in each]
    everybody = quiet + [r for key, mine in asking.items() if key not in light for r in mine]
    fair = simulate(everybody, blocks=2000, budget=512, until_ms=end_ms)
    first = simulate(everybody, blocks=2000, budget=512, until_ms=end_ms, fair=False)
    alone = {key: simulate(each, blocks=2000, budget=512) for key, each in light.items()}
    without = simulate(quiet, blocks=2000, budget=512)
    asked: dict[str, float] = defaultdict(float)
    for request in everybody:
        asked[request.owner.key] += len(request.tokens) + 2 * request.output

    def p99(values: list[float]) -> float:
        return sorted(values)[int(0.99 * len(values))]

    def together(runs: Iterable[Outcome]) -> float:
        return p99([each for run in runs for key in light for each in run.first_ms.get(key, [])])

    def slowdown(run: Outcome) -> float:
        return round(max(p99(run.first_ms[key]) / p99(alone[key].first_ms[key]) for key in light), 2)

    slowest = sorted(fair.parts, key=lambda each: -each.total)[: max(1, len(fair.parts) // 100)]
    found = {
        "jainOfWeightedTokens": round(jain(asked, fair.work), 3),
        "lightKeysP99FirstTokenOverAlone": slowdown(fair),
        "throughputOverFirstCome": round(sum(fair.work.values()) / sum(first.work.values()), 3),
    }
    return {
        "demandOverServed": round(sum(asked.values()) / sum(fair.work.values()), 2),
        **found,
        "lightKeysTogetherP99OverAlone": round(together([fair]) / together(alone.values()), 2),
        "lightKeysTogetherP99WithoutHeavyKeysOverAlone": round(
            together([without]) / together(alone.values()), 2
        ),
        "jainOfFirstCome": round(jain(asked, first.work), 3),
        "lightKeysP99OfFirstComeOverAlone": slowdown(first),
        "lightKeysP99WithoutHeavyKeysOverAlone": slowdown(without),
        "lightKeysP99AloneMs": [round(p99(alone[key].first_ms[key]), 1) for key in light],
        "slowestPercentMs": {
            part: round(sum(vars(each)[part] for each in slowest) / len(slowest), 1)
            for part in vars(slowest[0])
        },
        "aimsMet": {
            name: found[name] <= aim if aim > 1 else found[name] >= aim for name, aim in AIMS.items()
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


ROWS = {"prefixes": prefixes, "batches": batches, "keys": keys, "promise": promise}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", choices=list(ROWS), help="only this one; --out keeps the others")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    kept: dict[str, Any] = {}
    if arguments.row and arguments.out and arguments.out.exists():
        kept = {row["row"]: row for row in json.loads(arguments.out.read_text())["rows"]}
    rows = []
    for number, (name, measured) in enumerate(ROWS.items(), 1):
        if arguments.row in (None, name):
            print(f"[{number}/{len(ROWS)}] {name} …", file=sys.stderr)
            rows.append(measured())
        elif name in kept:
            rows.append(kept[name])
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
