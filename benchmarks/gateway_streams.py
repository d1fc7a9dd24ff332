"""What the gateway costs per streamed event: many slow streams, directly and through the gateway in turns.

    python benchmarks/gateway_streams.py [--streams N] [--rate R] [--seconds S] [--rounds N] [--engine busbar|usage]

Three processes: the gateway, pinned to one core; the model server's stand-in, which serves several replicas, and this
one, the client, on the others. Each event carries the time at which it was written, and the client compares that with the time at
which it read it. Events come either spread evenly over time, or in bursts: one replica writes an event to each of its
64 streams at once, as an engine's step does, and the replicas take turns.

CPU is the gateway's, over a window in which all streams run, so requests that begin and end are not part of it. The
script checks that every event that was written was received, and that every token was counted once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.gateway.parts import KEY_A, House, route
from tests.gateway.test_process import Process

REPLICA_STREAMS = 64
BAR_US, BAR_MS = 60.0, 5.0
_STAMP = re.compile(rb'"text":" (\d+)"')
_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    b"x-busbar-stream-digest: d\r\n\r\n"
)
_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,"model":"m",'
    b'"choices":[{"index":0,"text":" %d","logprobs":null,"finish_reason":null}]'
)


class Writer(asyncio.Protocol):
    """One stream of the stand-in."""

    def __init__(self, streams: list[Writer], sided: bool) -> None:
        self._streams = streams
        self._sided = sided
        self._data = b""
        self._count = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        if found and len(body) >= int(re.search(rb"(?i)content-length: (\d+)", head)[1]):  # type: ignore[index]
            self._data = b""
            self.transport.write(_HEAD)
            self._streams.append(self)
            self.event()

    def event(self) -> None:
        self._count += 1
        text = _EVENT % time.monotonic_ns()
        if self._sided:
            self._chunk(text + b"}\n:busbar 0 0 7 0 %d\n\n" % self._count)
        else:
            usage = b',"usage":{"prompt_tokens":7,"completion_tokens":%d,"total_tokens":%d}}\n\n'
            self._chunk(text + usage % (self._count, self._count + 7))

    def end(self) -> None:
        self._chunk(b"data: [DONE]\n\n")
        self.transport.write(b"0\r\n\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._streams:
            self._streams.remove(self)

    def _chunk(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


async def stand_in(replicas: int, rate: float, bursts: bool, sided: bool) -> None:
    """Serves `replicas` ports, prints them, writes `rate` events a second to each stream until SIGUSR1, which
    ends the streams there are."""
    loop = asyncio.get_running_loop()
    streams: list[list[Writer]] = [[] for _ in range(replicas)]
    ports = []
    for of_one in streams:
        server = await loop.create_server(
            lambda of_one=of_one: Writer(of_one, sided),  # type: ignore[misc]
            "127.0.0.1",
            0,
            backlog=512,
        )
        ports.append(server.sockets[0].getsockname()[1])

    def end() -> None:
        for stream in [stream for of_one in streams for stream in of_one]:
            stream.end()
        for of_one in streams:
            of_one.clear()

    loop.add_signal_handler(signal.SIGUSR1, end)
    print(json.dumps(ports), flush=True)
    slots = replicas if bursts else 8 * replicas
    due, turn = loop.time(), 0
    while True:
        due += 1 / (rate * slots)
        await asyncio.sleep(max(0.0, due - loop.time()))
        place = streams[turn % replicas]
        for stream in place if bursts else place[turn // replicas :: 8]:
            stream.event()
        turn = (turn + 1) % slots


class Reader(asyncio.Protocol):
    """One stream of the client."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.delays_ns: list[int] = []
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        data = self._tail + data
        end = 0
        for found in _STAMP.finditer(data):
            self.delays_ns.append(now - int(found[1]))
            end = found.end()
        self._tail = data[end:]
        if self._tail.endswith(b"0\r\n\r\n") and not self.ended.done():
            self.ended.set_result(b"[DONE]" in self._tail)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(False)


@dataclass(frozen=True)
class Run:
    """One measured window."""

    events: int
    seconds: float
    p50_ms: float
    p99_ms: float
    cpu_us_per_event: float
    kernel_us_per_event: float
    """Of these, in the kernel: reading and writing sockets."""
    core: float
    """Of one core, in use by the gateway."""
    waited_for_core: float
    """Share of the window in which the gateway could run and other processes had its core."""


def cpu_s(pid: int) -> tuple[float, float]:
    """CPU seconds of a process: in all, and those of them in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own, kernel = (int(field) / os.sysconf("SC_CLK_TCK") for field in fields[11:13])
    return own + kernel, kernel


def waited_s(pid: int) -> float:
    """Seconds in which a process could run and did not get a core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


async def measure(ports: list[int], streams: int, seconds: float, pid: int, engine: int) -> tuple[Run, int]:
    """A window of `seconds` while all streams run, and the events received in all."""
    loop = asyncio.get_running_loop()
    body = json.dumps({"model": "m", "prompt": "x", "stream": True}).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n%b" % (KEY_A.encode(), len(body), body)
    )
    readers = []
    for index in range(streams):
        port = ports[index % len(ports)]
        _, reader = await loop.create_connection(lambda: Reader(request), "127.0.0.1", port)
        readers.append(reader)
    while not all(reader.delays_ns for reader in readers):  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)
    before = [len(reader.delays_ns) for reader in readers]
    begin, cpu, wait = time.monotonic(), cpu_s(pid), waited_s(pid)
    await asyncio.sleep(seconds)
    after = [len(reader.delays_ns) for reader in readers]
    used, kernel = (end - start for end, start in zip(cpu_s(pid), cpu, strict=True))
    waited, took = waited_s(pid) - wait, time.monotonic() - begin
    os.kill(engine, signal.SIGUSR1)
    assert all(await asyncio.gather(*(reader.ended for reader in readers))), "a stream broke"
    delays = sorted(
        delay
        for reader, low, high in zip(readers, before, after, strict=True)
        for delay in reader.delays_ns[low:high]
    )
    run = Run(
        events=len(delays),
        seconds=round(took, 2),
        p50_ms=round(delays[len(delays) // 2] / 1e6, 3),
        p99_ms=round(delays[len(delays) * 99 // 100] / 1e6, 3),
        cpu_us_per_event=round(used / len(delays) * 1e6, 1),
        kernel_us_per_event=round(kernel / len(delays) * 1e6, 1),
        core=round(used / took, 2),
        waited_for_core=round(waited / took, 2),
    )
    return run, sum(len(reader.delays_ns) for reader in readers)


async def shape(given: argparse.Namespace, bursts: bool) -> dict[str, list[Run]]:
    """Runs of one shape of arrivals, directly and through the gateway in turns."""
    replicas = -(-given.streams // REPLICA_STREAMS)
    cores = sorted(os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, set(cores[1:]) or set(cores))
        return await in_turns(given, bursts, replicas, cores[0])
    finally:
        os.sched_setaffinity(0, set(cores))
        if given.realtime:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


async def in_turns(given: argparse.Namespace, bursts: bool, replicas: int, core: int) -> dict[str, list[Run]]:
    """The runs, with the gateway on `core`."""
    command = [sys.executable, __file__, "--serve", str(replicas), "--rate", str(given.rate)]
    command += ["--engine", given.engine, *(["--bursts"] if bursts else [])]
    engine = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert engine.stdout is not None
    ports: list[int] = json.loads(await engine.stdout.readline())
    runs: dict[str, list[Run]] = {"direct": [], "gateway": []}
    with tempfile.TemporaryDirectory() as folder:
        house = House(Path(folder))
        house.overrides.update(max_requests=2 * given.streams, replica_in_flight=2 * REPLICA_STREAMS)
        await house.start_neighbours()
        process = Process(house)
        try:
            places: list[Any] = [
                {"pod": f"m-{port}", "url": f"http://127.0.0.1:{port}", "ready": True, "draining": False}
                for port in ports
            ]
            await house.operator.publish(route("m", *places))
            await process.start()
            assert process.process is not None
            pid = process.process.pid
            os.sched_setaffinity(pid, {core})
            if given.realtime:
                for each in (pid, engine.pid, os.getpid()):
                    os.sched_setscheduler(each, os.SCHED_RR, os.sched_param(1))
            events = 0
            for turn in range(given.rounds):
                run, _ = await measure(ports, given.streams, given.seconds, pid, engine.pid)
                runs["direct"].append(run)
                run, received = await measure([process.port], given.streams, given.seconds, pid, engine.pid)
                runs["gateway"].append(run)
                events += received
                requests = (turn + 1) * given.streams
                await house.api.wait_for(requests)
                assert house.api.total("id-a") == (requests, 7 * requests, events)
        finally:
            engine.kill()
            await engine.wait()
            if process.process is not None:
                process.process.terminate()
                await process.process.wait()
            await house.stop()
    return runs


def verdict(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """Medians of the rounds, beside the bars."""

    def median(kind: str, name: str) -> float:
        values: list[float] = [getattr(run, name) for run in runs[kind]]
        return statistics.median(values)

    added = statistics.median(
        through.p99_ms - direct.p99_ms for direct, through in zip(*runs.values(), strict=True)
    )
    cpu = median("gateway", "cpu_us_per_event")
    return {
        "eventsPerSecond": round(statistics.median(r.events / r.seconds for r in runs["gateway"])),
        "directP50Milliseconds": median("direct", "p50_ms"),
        "gatewayP50Milliseconds": median("gateway", "p50_ms"),
        "directP99Milliseconds": median("direct", "p99_ms"),
        "gatewayP99Milliseconds": median("gateway", "p99_ms"),
        "p99RatioToDirect": round(median("gateway", "p99_ms") / median("direct", "p99_ms"), 2),
        "addedP99Milliseconds": round(added, 3),
        "addedP99Bar": f"{BAR_MS} ms: {'met' if added < BAR_MS else 'missed'}, {added / BAR_MS:.2f} of it",
        "cpuMicrosecondsPerEvent": cpu,
        "kernelMicrosecondsPerEvent": median("gateway", "kernel_us_per_event"),
        "cpuBar": f"{BAR_US} µs: {'met' if cpu <= BAR_US else 'missed'}, {cpu / BAR_US:.2f} of it",
        "gatewayCore": median("gateway", "core"),
        "gatewayWaitedForCore": median("gateway", "waited_for_core"),
        "rounds": {kind: [asdict(run) for run in of_kind] for kind, of_kind in runs.items()},
    }


async def run(given: argparse.Namespace) -> dict[str, Any]:
    shapes = {}
    for name in given.shapes.split(","):
        shapes[name] = verdict(await shape(given, name == "bursts"))
    arguments = ["--streams", given.streams, "--rate", given.rate, "--seconds", given.seconds]
    arguments += ["--rounds", given.rounds, "--engine", given.engine, "--shapes", given.shapes]
    arguments += ["--realtime"] if given.realtime else []
    return {
        "command": " ".join(["python benchmarks/gateway_streams.py", *map(str, arguments)]),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), "aiohttp": aiohttp.__version__},
        "machine": f"{os.cpu_count()} {platform.machine()} cores, shared; load {os.getloadavg()[0]:.1f} at the end",
        "shapes": shapes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--rate", type=float, default=20.0, help="events a second of each stream")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a measured window")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", default="spread,bursts")
    parser.add_argument(
        "--engine", choices=["busbar", "usage"], default="busbar", help="side lines, or usage"
    )
    parser.add_argument("--realtime", action="store_true", help="run before other processes (needs root)")
    parser.add_argument("--out", type=Path, help="also write the result there, as JSON")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--bursts", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(stand_in(given.serve, given.rate, given.bursts, given.engine == "busbar"))
        return
    text = json.dumps(asyncio.run(run(given)), indent=2, ensure_ascii=False)
    if given.out is not None:
        given.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
