"""Long prompts beside streams that decode: a prefill and a decode replica, beside two replicas that do both.

    python benchmarks/serving_roles.py [--rounds 3] [--seconds 45] [--output benchmarks/results/serving_roles.json]

Engine processes with one thread each serve a random Llama of 33.6 M parameters behind one gateway process, which gets
routes as the operator writes them (role, fitted step model, KV cache) and picks as it always does. Three services take turns
with the same clients, two replicas each, one pinned to each of two cores; those whose turn it is not stand idle:

    roles     one replica of the role prefill, one of the role decode
    both      two replicas of the role both
    promised  the same with a promised time per token (--tpot-ms), which cuts prompts into small pieces

The load is closed, so that it suits whatever the machine gives: clients that chat (a short prompt, a long answer), and clients
that send long prompts with short answers, each again and again. Every prompt is new. Counted are the time to the first token of
either kind, and the time between two events with text of the same stream; both by the client, in wall time. The ratios
are those of a round's arms, which ran after each other; the result has their medians. Below 1: roles are better.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

BEARER = "secret"
ARMS = ("roles", "both", "promised")
CHATS, LONGS = 4, 2
"""Clients of each kind."""
CHAT_PROMPT, CHAT_OUTPUT, LONG_PROMPT, LONG_OUTPUT = 32, 128, 1024, 24
PROMISE_MS = 60.0
PAUSE_S = 0.5
"""Of a client with long prompts, between two."""
WARM_S = 12.0
"""Of each arm before the first round."""
FITTING = 32
"""Requests of three steps."""
EVENT = b"data: {"


@dataclass
class Seen:
    """What the clients of one arm saw in one round."""

    first_s: dict[str, list[float]] = field(default_factory=lambda: {"chat": [], "long": []})
    between_s: dict[str, list[float]] = field(default_factory=lambda: {"chat": [], "long": []})
    failed: int = 0

    def figures(self) -> dict[str, float | None]:
        found: dict[str, float | None] = {"answers": float(sum(map(len, self.first_s.values())))}
        for name, of in (("firstMs", self.first_s), ("betweenMs", self.between_s)):
            for kind, values in of.items():
                for percent in (50, 99):
                    at = percentile(values, percent)
                    found[f"{kind}.{name}.p{percent}"] = None if at is None else round(1e3 * at, 1)
        return found


def main() -> None:
    from benchmarks.result import circumstances, publish
    from benchmarks.serving_migration import SHAPE, make_model

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name) / "model")
        found = asyncio.run(measure(Path(name), given.rounds, given.seconds))
    publish(
        {
            "benchmark": "serving_roles",
            **circumstances(),
            "model": {**SHAPE, "dtype": "float32"},
            "clients": {
                "chat": {"count": CHATS, "prompt": CHAT_PROMPT, "output": CHAT_OUTPUT},
                "long": {"count": LONGS, "prompt": LONG_PROMPT, "output": LONG_OUTPUT, "pauseS": PAUSE_S},
            },
            "promiseMs": PROMISE_MS,
            **found,
        },
        given.output,
    )


async def measure(folder: Path, rounds: int, seconds: float) -> dict[str, Any]:
    from tests.gateway.parts import House
    from tests.gateway.test_process import Process

    (folder / "house").mkdir()
    house = House(folder / "house")
    await house.start_neighbours()
    gateway, replicas = Process(house), start(folder / "model")
    try:
        await gateway.start()
        publishing = asyncio.create_task(publish_routes(house, replicas))
        await asyncio.gather(*(fit(house.session, arm, url) for arm in ARMS for _, url, _ in replicas[arm]))
        for arm in ARMS:
            await load(gateway, arm, WARM_S, 0)
        found: list[dict[str, Seen]] = []
        for number in range(rounds):
            order = ARMS if number % 2 == 0 else ARMS[::-1]
            found.append({arm: await load(gateway, arm, seconds, 1 + number) for arm in order})
        publishing.cancel()
        outcomes = await hand_overs(house, replicas)
    finally:
        for process, _, _ in (each for arm in replicas.values() for each in arm):
            process.kill()
        await gateway.end(signal.SIGTERM)
        await house.stop()
    return result_of(found, outcomes)


def start(model: Path) -> dict[str, list[Any]]:
    """(process, address, role) of the two replicas of each arm."""
    from tests.free_port import free_port
    from tests.serving import forked

    from busbar.kube.contracts.bearers import one_for_all
    from busbar.kube.contracts.workload import ReplicaRole
    from busbar.workloads.serving.settings import EngineSettings, ServerSettings

    cores = sorted(os.sched_getaffinity(0))[:2]
    replicas: dict[str, list[Any]] = {arm: [] for arm in ARMS}
    for arm, (place, core) in ((arm, each) for arm in ARMS for each in enumerate(cores)):
        role = (ReplicaRole.PREFILL, ReplicaRole.DECODE)[place] if arm == "roles" else ReplicaRole.BOTH
        promise = PROMISE_MS if arm == "promised" else None
        engine = EngineSettings(model, threads=1, kv_bytes=2**29, tpot_ms=promise)
        settings = ServerSettings(engine, arm, role=role, port=free_port(), bearers=one_for_all(BEARER))
        process = forked.start(settings, core)
        replicas[arm].append((process, f"http://127.0.0.1:{settings.port}", role))
    return replicas


async def publish_routes(house: Any, replicas: dict[str, list[Any]]) -> None:
    """Once a second, as the operator does: what each replica tells of itself."""
    from tests.gateway.parts import route

    while True:
        services = []
        for arm, of in replicas.items():
            endpoints = [await endpoint(house.session, url, role) for _, url, role in of]
            services.append(route(arm, *endpoints, bearer=BEARER))
        await house.operator.publish(*services)
        await asyncio.sleep(1.0)


async def endpoint(session: Any, url: str, role: str) -> dict[str, Any]:
    import aiohttp

    from busbar.kube.contracts.workload import MOST_RUNNING, ServingStatus
    from busbar.operator.serving.routes import speed_of

    found: dict[str, Any] = {"pod": url, "url": url, "ready": False, "role": str(role)}
    try:
        async with session.get(url + "/status", headers={"Authorization": f"Bearer {BEARER}"}) as answer:
            told = ServingStatus.model_validate(await answer.json())
    except aiohttp.ClientError:
        return found
    speed = speed_of(told.report)
    found |= {"ready": told.ready, "mostRunning": MOST_RUNNING}
    found |= {"kvTokens": told.report.cache_tokens if told.report is not None else None}
    return found | ({} if speed is None else {"speed": speed.to_wire()})


async def fit(session: Any, model: str, url: str) -> None:
    """So many steps that the replica tells its step model."""
    import aiohttp
    from benchmarks.serving_migration import ready

    rng = random.Random(url)
    await ready(session, url)
    for _ in range(FITTING):
        prompt = [rng.randrange(1, 8192) for _ in range(rng.randrange(8, 128))]
        body = {"model": model, "prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {BEARER}"}
        async with session.post(
            url + "/v1/completions", json=body, headers=headers, timeout=aiohttp.ClientTimeout(total=300)
        ) as answer:
            assert answer.status == 200, await answer.text()


async def load(gateway: Any, arm: str, seconds: float, number: int) -> Seen:
    """All clients at one service for so long."""
    seen = Seen()
    kinds = ["chat"] * CHATS + ["long"] * LONGS
    tasks = [
        asyncio.create_task(client(gateway, arm, kind, random.Random(f"{number}/{place}/{arm}"), seen))
        for place, kind in enumerate(kinds)
    ]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return seen


async def client(gateway: Any, arm: str, kind: str, rng: random.Random, seen: Seen) -> None:
    length, output = (CHAT_PROMPT, CHAT_OUTPUT) if kind == "chat" else (LONG_PROMPT, LONG_OUTPUT)
    while True:
        prompt = [rng.randrange(1, 8192) for _ in range(length)]
        body = {"model": arm, "prompt": prompt, "max_tokens": output, "temperature": 0, "stream": True}
        began, last, events = time.perf_counter(), 0.0, 0
        async with gateway.post(**body, ignore_eos=True) as answer:
            async for line in answer.content:
                if not line.startswith(EVENT):
                    continue
                now, events = time.perf_counter(), events + 1
                if events == 1:
                    seen.first_s[kind].append(now - began)
                else:
                    seen.between_s[kind].append(now - last)
                last = now
        seen.failed += answer.status != 200 or events < 2
        if kind == "long":
            await asyncio.sleep(PAUSE_S)


async def hand_overs(house: Any, replicas: dict[str, list[Any]]) -> dict[str, int]:
    """What became of the streams that the prefill replica was to hand over."""
    found: dict[str, int] = {}
    headers = {"Authorization": f"Bearer {BEARER}"}
    async with house.session.get(replicas["roles"][0][1] + "/metrics", headers=headers) as answer:
        for line in (await answer.text()).splitlines():
            if line.startswith("busbar:migrations_total{"):
                found[line.split('outcome="')[1].split('"')[0]] = int(float(line.rpartition(" ")[2]))
    return found


def result_of(found: list[dict[str, Seen]], outcomes: dict[str, int]) -> dict[str, Any]:
    rounds = [{arm: seen.figures() for arm, seen in each.items()} for each in found]
    ratios = {
        f"rolesOver{peer.capitalize()}": {
            name: middle(over(each["roles"][name], each[peer][name]) for each in rounds)
            for name in rounds[0]["roles"]
        }
        for peer in ARMS[1:]
    }
    failed = sum(seen.failed for each in found for seen in each.values())
    return {**ratios, "failed": failed, "handedOver": outcomes, "rounds": rounds}


def over(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 3) if known else None


def percentile(values: list[float], percent: int) -> float | None:
    order = sorted(values)
    return order[min(len(order) - 1, len(order) * percent // 100)] if order else None


if __name__ == "__main__":
    main()
