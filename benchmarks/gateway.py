"""The cost of the gateway: the same requests to a model server directly and through the gateway.

    python benchmarks/gateway.py [--requests N] [--streams N] [--words N]

The model server answers at once, so that only HTTP is measured. The gateway is a process of its own, with
API, operator, model server and client together in another, all on loopback and on the same cores: so the result is
the ratio to the direct run of the same process. Usage is spooled and fsync'd as in production, and the script checks
at the end that every token was counted once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.gateway.parts import KEY_A, House, route
from tests.gateway.test_process import Process

from busbar.gateway.settings import Settings


async def latency(session: aiohttp.ClientSession, url: str, bearer: str, requests: int) -> float:
    """Median seconds of one small request after another."""
    times = []
    for _ in range(requests):
        start = time.perf_counter()
        await ask(session, url, bearer, stream=False)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, which do not depend on other load."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def ask(session: aiohttp.ClientSession, url: str, bearer: str, *, stream: bool) -> None:
    body = {"model": "m", "prompt": "x", "stream": stream}
    async with session.post(url, json=body, headers={"Authorization": f"Bearer {bearer}"}) as response:
        assert response.status == 200, await response.text()
        await response.read()


async def rate(session: aiohttp.ClientSession, url: str, bearer: str, streams: int, words: int) -> float:
    """Events per second of many streams at once."""
    start = time.perf_counter()
    await asyncio.gather(*(ask(session, url, bearer, stream=True) for _ in range(streams)))
    return streams * words / (time.perf_counter() - start)


async def run(requests: int, streams: int, words: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        house = House(Path(folder))
        usual = Settings()
        house.overrides.update(
            replica_in_flight=streams,
            max_requests=usual.max_requests,
            usage_commit_s=usual.usage_commit_s,
            usage_delivery_s=usual.usage_delivery_s,
        )
        await house.start_neighbours()
        process = Process(house)
        try:
            engine = await house.engine(*["word "] * words)
            await house.operator.publish(route("m", engine))
            await process.start()
            direct = f"{engine.url}/v1/completions"
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as session:
                await ask(session, process.url, KEY_A, stream=True)  # looks the key up
                a = await latency(session, direct, engine.bearer, requests)
                pid = process.process.pid if process.process else 0
                before = cpu_s(pid)
                b = await latency(session, process.url, KEY_A, requests)
                after = cpu_s(pid)
                c = await rate(session, direct, engine.bearer, streams, words)
                d = await rate(session, process.url, KEY_A, streams, words)
                end = cpu_s(pid)
            total = 1 + requests + streams
            await house.api.wait_for(total)
            assert house.api.total("id-a") == (total, 7 * total, words * total)
            memory = Path(f"/proc/{pid}/status").read_text()
            peak = next(line.split()[1] for line in memory.splitlines() if line.startswith("VmHWM"))
        finally:
            if process.process is not None:
                process.process.terminate()
                await process.process.wait()
            await house.stop()
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"one request after another ({requests}, {words} words each, not streamed):")
    print(f"  direct {a * 1e3:6.2f} ms, through the gateway {b * 1e3:6.2f} ms: +{(b - a) * 1e3:.2f} ms")
    print(f"{streams} streams of {words} words at once:")
    print(f"  direct {c:8.0f} words/s, through the gateway {d:8.0f} words/s: {d / c:.2f} of direct")
    print(f"gateway's peak memory {int(peak) / 1024:.0f} MiB; all {total} requests counted once")
    per_request, per_word = (after - before) / requests, (end - after) / (streams * words)
    print(
        f"CPU of the gateway: {per_request * 1e3:.2f} ms a request, {per_word * 1e6:.0f} µs a streamed word"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--words", type=int, default=100)
    given = parser.parse_args()
    asyncio.run(run(given.requests, given.streams, given.words))


if __name__ == "__main__":
    main()
