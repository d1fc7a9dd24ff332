"""Waking a sleeping replica beside starting one cold: seconds to the first token, by one harness.

    python benchmarks/serving_wake.py [--repeats 3] [--out benchmarks/results/serving_wake.json]

A random Llama of 33.6 M parameters (8 layers, width 512, 134 MB) behind `busbar serve`, on one thread. In each repeat a
process is started cold and then put to sleep and woken at both levels:

  cold      from the start of the process to the first event of a streamed answer; /ready is asked every 10 ms
  level 1   from sending POST /wake_up to the first event of the same request: weights were kept, the KV cache was not
  level 2   the same, where the weights were dropped too, and are read from the folder again

Files are in the page cache each time. Beside wall time, which includes waiting for neighbours on a shared machine, each
row has the CPU seconds of the server's process. The memory is the process's resident set before sleep and asleep.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.gpu.serving import make_model
from tokenizers import Tokenizer, models

REPOSITORY = Path(__file__).resolve().parents[1]
SHAPE: dict[str, int] = {"layers": 8, "hidden": 512, "heads": 8, "kv": 4, "mlp": 1536, "vocab": 8192}
PROMPT = 64
LEVELS = (1, 2)
AIM = 9.0
"""Times faster to the first token than a cold start, in wall time and in CPU seconds."""
START_LIMIT_S = 120.0


@dataclass(frozen=True)
class Took:
    """Seconds."""

    wall_s: float
    cpu_s: float


class Server:
    """A process of `busbar serve`."""

    def __init__(self, folder: Path, port: int) -> None:
        self.port = port
        command = [sys.executable, "-m", "busbar.workloads.serving", str(folder), "--port", str(port)]
        variables = {k: v for k, v in os.environ.items() if not k.startswith("BUSBAR_")}
        variables |= {"PYTHONPATH": str(REPOSITORY / ".src"), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*command, "--threads", "1"],
            env=variables,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def call(self, method: str, path: str, body: object = None) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
            answer.readline()  # of a stream, its first event
            return answer.status
        finally:
            connection.close()

    def is_ready(self) -> bool:
        try:
            return self.call("GET", "/ready") == 200
        except OSError:
            return False

    def first_token(self) -> None:
        body = {"model": "model", "prompt": list(range(PROMPT)), "max_tokens": 2, "stream": True}
        status = self.call("POST", "/v1/completions", body | {"ignore_eos": True})
        if status != 200:
            raise RuntimeError(f"the server answers {status}")

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def cold(folder: Path) -> Iterator[tuple[Server, Took]]:
    """A server that was started and has given a token."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.monotonic()
    server = Server(folder, port)
    try:
        while not server.is_ready():
            if server.process.poll() is not None or time.monotonic() > began + START_LIMIT_S:
                raise RuntimeError("the server does not become ready")
            time.sleep(0.01)
        server.first_token()
        yield server, Took(time.monotonic() - began, server.cpu_s)
    finally:
        server.process.kill()
        server.process.wait()


def wake(server: Server, level: int) -> tuple[Took, tuple[int, int]]:
    """(time to the first token, resident bytes before sleep and asleep)."""
    awake = server.resident_bytes
    if server.call("POST", f"/sleep?level={level}") != 200:
        raise RuntimeError("the server does not sleep")
    asleep, cpu_s, began = server.resident_bytes, server.cpu_s, time.monotonic()
    if server.call("POST", "/wake_up") != 200:
        raise RuntimeError("the server does not wake")
    server.first_token()
    return Took(time.monotonic() - began, server.cpu_s - cpu_s), (awake, asleep)


def save_model(folder: Path) -> None:
    make_model(SHAPE, torch.device("cpu"), torch.float32).save_pretrained(folder)
    words = {f"w{i}": i for i in range(SHAPE["vocab"])}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


def measure(repeats: int) -> list[dict[str, Any]]:
    took: dict[str, list[Took]] = {"cold": [], **{f"level {level}": [] for level in LEVELS}}
    memory: dict[str, tuple[int, int]] = {}
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        save_model(folder)
        for _ in range(repeats):
            with cold(folder) as (server, start):
                took["cold"].append(start)
                for level in LEVELS:
                    found, memory[f"level {level}"] = wake(server, level)
                    took[f"level {level}"].append(found)
    return [row_of(name, each, took["cold"], memory.get(name)) for name, each in took.items()]


def row_of(name: str, each: list[Took], start: list[Took], memory: tuple[int, int] | None) -> dict[str, Any]:
    wall, cpu = (statistics.median(values) for values in ([t.wall_s for t in each], [t.cpu_s for t in each]))
    cold_s, cold_cpu_s = (
        statistics.median(values) for values in ([t.wall_s for t in start], [t.cpu_s for t in start])
    )
    row: dict[str, Any] = {
        "row": name,
        "secondsToFirstToken": round(wall, 3),
        "cpuSeconds": round(cpu, 3),
        "allSeconds": [round(t.wall_s, 3) for t in each],
        "allCpuSeconds": [round(t.cpu_s, 3) for t in each],
    }
    if memory is not None:
        row |= {
            "timesFasterThanCold": round(cold_s / wall, 1),
            "timesLessCpuThanCold": round(cold_cpu_s / cpu, 1),
            "aim": AIM,
            "aimMet": cold_s >= AIM * wall and cold_cpu_s >= AIM * cpu,
            "residentMiB": {"awake": memory[0] >> 20, "asleep": memory[1] >> 20},
        }
    print(json.dumps(row), file=sys.stderr)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = {
        "benchmark": "serving_wake",
        "command": " ".join(["python", "benchmarks/serving_wake.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, 1 thread, shared",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "model": {**SHAPE, "dtype": "float32"},
        "promptTokens": PROMPT,
        "rows": measure(arguments.repeats),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
