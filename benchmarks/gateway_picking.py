"""Which replica the gateway picks, in simulated time: its own endpoint picker in front of replicas that run the engine's
own scheduler with prefix caches. No model and no clock of the machine, so the results are the same everywhere.

    python benchmarks/gateway_picking.py [--part keys] [--out benchmarks/results/gateway_picking.json]

Two replicas of one speed and two that are four times slower. Requests have one of 24 beginnings of 1,024 tokens
(a system prompt, a document) and 64 to 512 tokens of their own, arrive at random at three loads, and get 32 to 128
tokens. In turns on the same requests:

  picked       the predicted first token: step models, prefixes, load
  prefix       no step models: the prefix while its replica is not much busier, else the idler of two
  least busy   the replica with the fewest requests, of all
  round robin  one after the other

Then one key at ten times the rate of four others, below and past the knee of two fast replicas; the others ask for less than
their share, for as long as each of them has 240 requests, so that a p99 is not the slowest one. The gateway holds back what replicas cannot run soon; or sends 128 requests to each, as it did; replicas are fair
themselves, or first come, first served, as vLLM is; or everything is first come, first served. Peers: each light key alone, and first come, first served.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import platform
import random
import sys
import time
from collections import abc, defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))

from busbar.gateway.endpoint_picker import EndpointPicker, Lease, QueueLimits
from busbar.gateway.picking import Ask, Candidate, Choice, choose
from busbar.gateway.prefix_table import blocks_of
from busbar.gateway.routes import RouteTable
from busbar.kube.contracts.routes import Endpoint, ReplicaSpeed, Routes, ServiceRoute
from busbar.workloads.serving.blocks import BlockPool
from busbar.workloads.serving.fairness import Owner
from busbar.workloads.serving.prefix import salt_of
from busbar.workloads.serving.scheduler import Scheduler, StepLimits
from busbar.workloads.serving.sequence import Sequence

FAST = ReplicaSpeed(
    per_step_s=0.005, per_sequence_s=0.0001, per_context_token_s=2e-7, per_prompt_token_s=4e-5
)
SLOW = ReplicaSpeed(
    per_step_s=0.02, per_sequence_s=0.0004, per_context_token_s=8e-7, per_prompt_token_s=16e-5
)
Speeds = tuple[ReplicaSpeed, ...]
SPEEDS = (FAST, FAST, SLOW, SLOW)
KEYS_SPEEDS = (FAST, FAST)
BLOCKS = 600
"""Of a replica's KV cache: 38,400 tokens, so that not every beginning fits everywhere."""
RUNNING = 32


@dataclass(frozen=True)
class Request:
    at: float
    tokens: list[int]
    output: int
    key: str = "k"


@dataclass(eq=False)
class Replica:
    """One simulated replica: the engine's scheduler, and steps that take what its speed says."""

    speed: ReplicaSpeed
    scheduler: Scheduler
    requests: dict[Sequence, tuple[Request, Lease]] = field(default_factory=dict)
    stepping: bool = False


@dataclass
class Outcome:
    first_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    work: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    computed: int = 0
    prompts: int = 0
    end: float = 0.0
    pick_s: float = 0.0


class Fixed(random.Random):
    """Ties are broken the same way in every run."""


class Simulation:
    """Requests through the picker to the replicas, in simulated time."""

    def __init__(
        self,
        requests: list[Request],
        *,
        policy: str,
        held: bool = True,
        fair: bool = True,
        engine_fair: bool = True,
        speeds: Speeds = SPEEDS,
    ) -> None:
        self.now = 0.0
        self.requests = requests
        self.policy = policy
        self.fair = fair
        self.engine_fair = engine_fair and fair
        limits = QueueLimits(1e9, 10**6, 10**6, 128, 1.0, 1.0)
        self.picker = EndpointPicker(limits, lambda: self.now, Fixed(0), other_policies().get(policy, choose))
        self.turn = itertools.count()
        ends = [
            Endpoint(
                pod=f"r{n}",
                url=f"http://r{n}",
                ready=True,
                speed=speed if policy == "picked" else None,
                kv_tokens=BLOCKS * 64 if held else None,
                most_running=RUNNING if held else None,
            )
            for n, speed in enumerate(speeds)
        ]
        self.service = ServiceRoute(
            tenant="t", namespace="n", name="m", uid="u", model_id="m", bearer="b", endpoints=ends
        )
        self.picker.update(RouteTable(Routes(revision=1, services=[self.service])))
        self.replicas = {
            end.url: Replica(
                speed, Scheduler(BlockPool(BLOCKS), StepLimits(64, 512, RUNNING, prefix_cache=True))
            )
            for end, speed in zip(ends, speeds, strict=True)
        }
        self.events: list[tuple[float, int, str, Any]] = []
        self.order = itertools.count()
        self.result = Outcome()
        self.seen: set[Sequence] = set()

    def at(self, when: float, what: str, which: Any) -> None:
        heapq.heappush(self.events, (when, next(self.order), what, which))

    async def run(self, until: float | None = None) -> Outcome:
        for request in self.requests:
            self.at(request.at, "arrives", request)
        tasks: set[asyncio.Task[None]] = set()
        while self.events:
            self.now, _, what, which = heapq.heappop(self.events)
            if until is not None and self.now > until:
                break
            if what == "arrives":
                tasks.add(asyncio.create_task(self.serve(which)))
            else:
                self.stepped(*which)
            for _ in range(4):
                await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.result.end = self.now
        return self.result

    async def serve(self, request: Request) -> None:
        begun = time.process_time()
        blocks = blocks_of({"prompt": request.tokens}, "t") if self.policy in ("picked", "prefix") else ()
        ask = Ask(len(request.tokens), request.output, blocks)
        self.result.pick_s += time.process_time() - begun
        who = ("t", "u", request.key if self.fair else "everybody")
        lease = await self.picker.enter(self.service, who, 1e9, ask=ask)
        replica = self.replicas[lease.endpoint.url]
        total = len(request.tokens) + request.output
        made = Sequence(
            next(self.order),
            list(request.tokens),
            total,
            owner=Owner("t", request.key if self.engine_fair else "everybody"),
            salt=salt_of("t"),
        )
        replica.scheduler.add(made)
        replica.requests[made] = request, lease
        self.step(replica)

    def step(self, replica: Replica) -> None:
        if replica.stepping or replica.scheduler.idle:
            return
        step = replica.scheduler.plan(512)
        speed = replica.speed
        prompt = sum(c.count for c in step.chunks if c.count > 1)
        singles = sum(c.count == 1 for c in step.chunks)
        took = speed.per_step_s + speed.per_sequence_s * singles + speed.per_prompt_token_s * prompt
        took += speed.per_context_token_s * sum(c.start for c in step.chunks)
        replica.stepping = True
        self.at(self.now + took, "stepped", (replica, step))

    def stepped(self, replica: Replica, step: Any) -> None:
        replica.stepping = False
        self.result.computed += sum(c.count for c in step.chunks if c.start < c.sequence.prompt_len)
        sampled = {c.sequence: 7 for c in step.chunks if c.samples}
        replica.scheduler.commit(step, sampled)
        for sequence in sampled:
            request, lease = replica.requests[sequence]
            self.result.work[request.key] += 2
            if sequence not in self.seen:
                self.seen.add(sequence)
                lease.work.begun = True
                self.result.first_s[request.key].append(self.now - request.at)
                self.result.prompts += sequence.prompt_len
                self.result.work[request.key] += sequence.prompt_len
            if len(sequence.tokens) >= sequence.max_total:
                replica.scheduler.finish(sequence)
                del replica.requests[sequence]
                self.picker.leave(lease)
                who = ("t", "u", request.key if self.fair else "everybody")
                used = (sequence.prompt_len, sequence.cached, request.output)
                self.picker.settle(self.service, who, lease.work.ask, used)
        self.step(replica)


def other_policies() -> dict[str, Choice]:
    """The peers, in place of `choose`."""
    turn = itertools.count()

    def least_busy(candidates: abc.Sequence[Candidate], ask: Ask, rng: random.Random) -> Candidate | None:
        fewest = min((c.running for c in candidates), default=0)
        return rng.choice([c for c in candidates if c.running == fewest]) if candidates else None

    def round_robin(candidates: abc.Sequence[Candidate], ask: Ask, rng: random.Random) -> Candidate | None:
        return candidates[next(turn) % len(candidates)] if candidates else None

    return {"least busy": least_busy, "round robin": round_robin}


def run(requests: list[Request], policy: str, *, until: float | None = None, **more: Any) -> Outcome:
    return asyncio.run(Simulation(requests, policy=policy, **more).run(until))


def mixed(per_second: float, seconds: float) -> list[Request]:
    rng = random.Random(1)
    heads = [[rng.randrange(32000) for _ in range(1024)] for _ in range(24)]
    at, found = 0.0, []
    while at < seconds:
        at += rng.expovariate(per_second)
        head = heads[min(int(rng.paretovariate(0.8)) - 1, 23)]
        own = [rng.randrange(32000) for _ in range(rng.randrange(64, 512))]
        found.append(Request(at, head + own, rng.randrange(32, 128)))
    return found


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def picking(seconds: float) -> dict[str, Any]:
    rows = {}
    for per_second in (8.0, 20.0, 32.0):
        requests = mixed(per_second, seconds)
        row = {}
        for policy in ("picked", "prefix", "least busy", "round robin"):
            found = run(requests, policy)
            first = found.first_s["k"]
            row[policy] = {
                "firstTokenMeanS": round(sum(first) / len(first), 4),
                "firstTokenP99S": round(percentile(first, 0.99), 4),
                "computedOfPrompts": round(found.computed / found.prompts, 3),
            }
        for policy in ("prefix", "least busy", "round robin"):
            for name in ("firstTokenMeanS", "firstTokenP99S"):
                row[policy][name + "OverPicked"] = round(row[policy][name] / row["picked"][name], 2)
        rows[f"{per_second:g} requests/s"] = row
        print(json.dumps({f"{per_second:g} requests/s": row}, indent=1), file=sys.stderr)
    return rows


def keys(requests: int) -> dict[str, Any]:
    return {
        **{f"a light key asks every {gap_s:g} s": keys_at(gap_s, requests * gap_s) for gap_s in (0.5, 0.25)},
        "aims": {
            "lightKeysP99FirstTokenOverAlone": "<= 1.5",
            "throughputOverFirstCome": ">= 0.92",
            "jainOfLightKeysPart": ">= 0.95",
        },
    }


def keys_at(gap_s: float, seconds: float) -> dict[str, Any]:
    """Four keys, and one with ten times the requests of each."""
    rng = random.Random(2)

    def stream(key: str, gap_s: float) -> list[Request]:
        at, found = 0.0, []
        while at < seconds:
            at += rng.expovariate(1 / gap_s)
            own = [rng.randrange(32000) for _ in range(rng.randrange(200, 600))]
            found.append(Request(at, own, rng.randrange(50, 150), key))
        return found

    light = {f"light{n}": stream(f"light{n}", gap_s) for n in range(4)}
    quiet = sorted(itertools.chain(*light.values()), key=lambda r: r.at)
    together = sorted([*stream("heavy", gap_s / 10), *quiet], key=lambda r: r.at)
    alone = {key: run(mine, "picked", until=seconds, speeds=KEYS_SPEEDS) for key, mine in light.items()}
    rows: dict[str, Any] = {}
    for name, requests, more in (
        ("held back, fair", together, {}),
        ("not held back, fair", together, {"held": False}),
        ("held back, replicas first come", together, {"engine_fair": False}),
        ("not held back, replicas first come", together, {"held": False, "engine_fair": False}),
        ("first come, first served", together, {"held": False, "fair": False}),
        ("held back, fair, without the heavy key", quiet, {}),
    ):
        found = run(requests, "picked", until=seconds, speeds=KEYS_SPEEDS, **more)
        ratios = [
            percentile(found.first_s[key], 0.99) / percentile(alone[key].first_s[key], 0.99) for key in light
        ]
        met = [found.work[key] / alone[key].work[key] for key in light]
        rows[name] = {
            "lightKeysP99FirstTokenOverAlone": round(max(ratios), 2),
            "eachLightKeysP99FirstTokenOverAlone": [round(ratio, 2) for ratio in ratios],
            "lightKeysP99FirstTokenS": round(max(percentile(found.first_s[key], 0.99) for key in light), 3),
            "leastPartOfALightKeysWorkAlone": round(min(met), 3),
            "jainOfLightKeysPart": round(sum(met) ** 2 / (len(met) * sum(part * part for part in met)), 4),
            "workPerSecond": round(sum(found.work.values()) / found.end),
        }
    usual = rows["first come, first served"]["workPerSecond"]
    for name in [name for name in rows if "without" not in name]:
        rows[name]["throughputOverFirstCome"] = round(rows[name]["workPerSecond"] / usual, 3)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="simulated, of each load of the first part"
    )
    parser.add_argument(
        "--requests", type=int, default=240, help="of each light key, in the mean, of the second part"
    )
    parser.add_argument("--part", choices=("picking", "keys"), help="only this one; --out keeps the other")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    begun = time.process_time()
    document: dict[str, Any] = {}
    if asked.part is not None and asked.out is not None and asked.out.exists():
        document = json.loads(asked.out.read_text())
    document |= {
        "benchmark": "gateway_picking",
        "command": "python benchmarks/gateway_picking.py",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, Python {platform.python_version()}; simulated time",
    }
    if asked.part != "keys":
        document["picking"] = picking(asked.seconds)
    if asked.part != "picking":
        document["keys"] = keys(asked.requests)
    document["cpuSeconds"] = round(time.process_time() - begun, 1)
    text = json.dumps(document, indent=1) + "\n"
    if asked.out is not None:
        asked.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
