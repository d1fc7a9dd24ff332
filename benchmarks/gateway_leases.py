"""What shared limits cost the gateway: a gateway alone and one of two, with the same limits, in turns.

    python benchmarks/gateway_leases.py [--streams N] [--rate R] [--seconds S] [--rounds N]

Per event: both gateways run on one core, and serve the same streams in turns (`gateway_streams.py`). Per request: accepting
and settling in this process, for a request whose key and tenant have limits of requests, tokens and money; the one of two
is asked for its leases once a second, as in the gateway, which is part of its cost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gateway_streams import REPLICA_STREAMS, Run, measure
from tests.gateway.parts import KEY_A, House, route
from tests.gateway.test_process import Process

from busbar.gateway.accounts import Accounts
from busbar.gateway.admissions import AdmissionRing
from busbar.gateway.errors import LimitReached
from busbar.gateway.request_cost import Estimate
from busbar.kube.contracts.allowances import NANO, Account, CostAllowance, Price
from busbar.kube.contracts.budget_leases import LeaseAnswer, LeaseGrant
from busbar.kube.contracts.keys import KeyIdentity
from busbar.kube.contracts.routes import ServiceRoute

STREAMS = Path(__file__).with_name("gateway_streams.py")
REQUESTS = 20_000
PRICE = {"prompt": 1.0, "cached": 0.5, "output": 2.0}


def limits() -> list[Account]:
    """Far away, so that nothing is refused."""
    now = datetime.now(UTC)
    month = CostAllowance(
        period="month", started=now - timedelta(days=1), ends=now + timedelta(days=9), limit_nano=10**6 * NANO
    )
    rates = {"requests_per_minute": 10**9, "tokens_per_minute": 10**12}
    return [Account(name=name, **rates, costs=[month]) for name in ("key/id-a", "tenant/tenant-a")]


async def per_event(given: argparse.Namespace, step: Callable[[], None]) -> dict[str, list[Run]]:
    """The runs of both gateways, each on the first core."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, set(cores[1:]) or set(cores))
    count = -(-given.streams // REPLICA_STREAMS)
    command = [sys.executable, str(STREAMS), "--serve", str(count), "--rate", str(given.rate)]
    engine = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert engine.stdout is not None
    ports: list[int] = json.loads(await engine.stdout.readline())
    runs: dict[str, list[Run]] = {"alone": [], "one of two": []}
    with tempfile.TemporaryDirectory() as folder:
        house = House(Path(folder))
        await house.start_neighbours()
        house.api.know(KEY_A, "tenant-a", "team-a", accounts=limits())
        gateways: dict[str, Process] = {}
        try:
            places: list[Any] = [
                {"pod": f"m-{port}", "url": f"http://127.0.0.1:{port}", "ready": True, "draining": False}
                for port in ports
            ]
            await house.operator.publish(route("m", *places, price=PRICE))
            for name, replicas in (("alone", 1), ("one of two", 2)):
                house.overrides.update(
                    max_requests=2 * given.streams,
                    replica_in_flight=2 * REPLICA_STREAMS,
                    replicas=replicas,
                    state_dir=Path(folder) / name,
                )
                gateways[name] = Process(replace(house, overrides=dict(house.overrides)))
                await gateways[name].start()
                os.sched_setaffinity(gateways[name].process.pid, {cores[0]})  # type: ignore[union-attr]
            for _ in range(given.rounds):
                for name, gateway in gateways.items():
                    assert gateway.process is not None
                    pid = gateway.process.pid
                    run, _ = await measure([gateway.port], given.streams, given.seconds, pid, engine.pid)
                    runs[name].append(run)
                    step()
            await house.api.wait_for(2 * given.rounds * given.streams)
        finally:
            engine.kill()
            await engine.wait()
            for gateway in gateways.values():
                if gateway.process is not None:
                    gateway.process.terminate()
                    await gateway.process.wait()
            await house.stop()
    return runs


def accepted(gateways: int, folder: Path) -> Iterator[float]:
    """CPU microseconds of a request, in rounds."""
    accounts = Accounts(gateways=gateways)
    accounts.restore(AdmissionRing(folder / f"ring-{gateways}"), {})
    key = KeyIdentity(key_id="id-a", subject="a", tenant="tenant-a", accounts=limits())
    accounts.learn(key, "g")
    names = {"tenant": "tenant-a", "namespace": "n", "name": "m", "uid": "u", "model_id": "m", "bearer": "b"}
    service = ServiceRoute(**names, price=Price(**PRICE))
    number = 0

    def told() -> None:
        nonlocal number
        if accounts.shared is not None:
            number += 1
            now = time.monotonic()
            grants = [
                LeaseGrant(account=ask.account, kind=ask.kind, amount=ask.limit, reach=ask.limit)
                for ask in accounts.shared.asks(now)
            ]
            accounts.shared.take(LeaseAnswer(number=number, grants=grants), now)

    asks = Estimate(7, 20, output_field="max_tokens")
    with contextlib.suppress(LimitReached):  # nothing is held before it is asked for
        accounts.accept(key, "req", asks, service).settle(20)
    told()
    while True:
        begin, second = time.process_time(), time.monotonic()
        for index in range(REQUESTS):
            accounts.accept(key, f"req-{index}", asks, service).settle(20)
            if time.monotonic() - second >= 1.0:
                told()
                second = time.monotonic()
        yield (time.process_time() - begin) / REQUESTS * 1e6


def per_request(rounds: int, step: Callable[[], None]) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        sides = {"alone": accepted(1, Path(folder)), "one of two": accepted(2, Path(folder))}
        found: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                found[name].append(round(next(side), 2))
                step()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rate", type=float, default=20.0, help="events a second of each stream")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a measured window")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests-only", action="store_true", help="leave the streams out")
    parser.add_argument("--out", type=Path, help="also write the result there, as JSON")
    given = parser.parse_args()
    with Progress() as bar:
        task = bar.add_task("rounds", total=(2 if given.requests_only else 4) * given.rounds)
        requests = per_request(given.rounds, lambda: bar.advance(task))
        runs = {} if given.requests_only else asyncio.run(per_event(given, lambda: bar.advance(task)))
    events = {name: statistics.median(run.cpu_us_per_event for run in each) for name, each in runs.items()}
    costs = {name: statistics.median(each) for name, each in requests.items()}
    result = {
        "command": f"python benchmarks/gateway_leases.py --streams {given.streams} --rate {given.rate} "
        f"--seconds {given.seconds} --rounds {given.rounds}{' --requests-only' * given.requests_only}",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), "aiohttp": aiohttp.__version__},
        "machine": f"{os.cpu_count()} {platform.machine()} cores, shared; load {os.getloadavg()[0]:.1f} at the end",
        "cpuMicrosecondsPerEvent": events,
        "eventRatio": round(events["one of two"] / events["alone"], 3) if events else None,
        "cpuMicrosecondsPerRequestInLimits": costs,
        "requestRatio": round(costs["one of two"] / costs["alone"], 3),
        "rounds": {
            "events": {name: [asdict(run) for run in each] for name, each in runs.items()},
            "requests": requests,
        },
    }
    text = json.dumps(result, indent=2, ensure_ascii=False)
    if given.out is not None:
        given.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
