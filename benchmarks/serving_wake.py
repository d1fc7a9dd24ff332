"""Waking a sleeping replica, and starting one again after a crash, beside a cold start: seconds to the first token, by one harness.

    python benchmarks/serving_wake.py [--repeats 3] [--out benchmarks/results/serving_wake.json]
    python benchmarks/serving_wake.py --model large --read-rate 1e9 --repeats 1 --out benchmarks/results/serving_restart.json

A random Llama behind `busbar serve`, on one thread: 33.6 M parameters (8 layers, width 512, 134 MB), or with `--model large`
380 M (10 layers, width 1536, 1.4 GiB in float32). In each repeat:

  cold       from the start of the process to the first event of a streamed answer; /ready is asked every 10 ms
  level 1    from sending POST /wake_up to the first event of the same request: weights were kept, the KV cache was not
  level 2    the same, where the weights were dropped too, and are read from the folder again
  keeping    as cold, with --keep-weights and an empty folder in memory: what it costs to keep weights
  restart    from SIGKILL of that server's engine to the first event of the next one's answer
  container  from the start of a new process, after SIGKILL of the whole one, as where the kubelet starts a container again

Files are in the page cache each time; with `--read-rate` a tensor of the checkpoint takes at least as long as at that rate, as from a
network volume (`paced_server.py`). Beside wall time, which includes waiting for neighbours on a shared machine, each row has
the CPU seconds of the server's processes, and what the engine says that its loading took. Rows of sleep have the process's resident set
before sleep and asleep, and rows of starts the tokens of a long answer per CPU second, since mapped weights lie in other pages.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.gpu.serving import make_model
from tests.serving.processes import with_descendants
from tokenizers import Tokenizer, models

REPOSITORY = Path(__file__).resolve().parents[1]
SHAPES: dict[str, dict[str, int]] = {
    "small": {"layers": 8, "hidden": 512, "heads": 8, "kv": 4, "mlp": 1536, "vocab": 8192},
    "large": {"layers": 10, "hidden": 1536, "heads": 12, "kv": 6, "mlp": 4608, "vocab": 32768},
}
PROMPT = 64
ANSWER = 24
"""Tokens of the answer whose speed is measured."""
LEVELS = (1, 2)
AIM = 9.0
"""Times faster to the first token than a cold start, in wall time and in CPU seconds."""
START_LIMIT_S = 900.0


@dataclass(frozen=True)
class Took:
    """Seconds."""

    wall_s: float
    cpu_s: float
    load_s: float = 0.0
    """The engine's own time of loading."""
    tokens_per_cpu_s: float = 0.0


class Server:
    """The first process of `busbar serve`: the front, or with `keep` what starts fronts."""

    def __init__(self, run: Run, port: int, keep: bool) -> None:
        self.port = port
        self.log = run.folder.with_name("log")
        program = ["-m", "busbar.workloads.serving"]
        variables = {k: v for k, v in os.environ.items() if not k.startswith("BUSBAR_")}
        variables |= {"PYTHONPATH": str(REPOSITORY / ".src"), "OMP_NUM_THREADS": "1"}
        if run.read_rate is not None:
            program = [str(REPOSITORY / "benchmarks" / "paced_server.py")]
            variables["BUSBAR_READ_RATE"] = str(run.read_rate)
        flags = ["--port", str(port), "--threads", "1", "--model-id", "model", *run.flags]
        if keep:
            flags += ["--keep-weights", str(run.keep)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program, str(run.folder), *flags], env=variables, stdout=log, stderr=log
            )

    def call(self, method: str, path: str, body: object = None) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_LIMIT_S)
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
        self._ask({"prompt": list(range(PROMPT)), "max_tokens": 2, "stream": True})

    def wait(self, began: float) -> None:
        """Until it has given a token."""
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > began + START_LIMIT_S:
                raise RuntimeError(f"the server does not become ready: {self.log.read_text()}")
            time.sleep(0.01)
        self.first_token()

    def speed(self) -> float:
        """Tokens per CPU second of an answer, without its prompt."""
        spent = []
        for count in (1, 1 + ANSWER):
            before = self.cpu_s
            self._ask({"prompt": list(range(9, 17)), "max_tokens": count})
            spent.append(self.cpu_s - before)
        return ANSWER / (spent[1] - spent[0])

    def load_s(self) -> float:
        """Of the last start."""
        return float(re.findall(r"loaded in ([0-9.]+) s", self.log.read_text())[-1])

    def _ask(self, body: dict[str, Any]) -> None:
        status = self.call("POST", "/v1/completions", {"model": "model", "ignore_eos": True} | body)
        if status != 200:
            raise RuntimeError(f"the server answers {status}")

    @property
    def processes(self) -> list[int]:
        """Those that live, parents first: what starts servers, if there is one, the front, and the engine."""
        return with_descendants(self.process.pid)

    @property
    def cpu_s(self) -> float:
        return sum(map(_cpu_s, self.processes))

    @property
    def resident_bytes(self) -> int:
        """Of both; what they share counts once."""
        texts = (Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in self.processes)
        kib = [
            int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("Pss:")
        ]
        return 1024 * sum(kib)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Run:
    """What is served, and how."""

    folder: Path
    keep: Path
    flags: tuple[str, ...]
    read_rate: float | None
    """Bytes per second of the checkpoint; None: what the page cache gives."""


@contextmanager
def started(run: Run, keep: bool = False) -> Iterator[tuple[Server, Took]]:
    """A server that was started and has given a token; nothing is left of it at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.monotonic()
    server = Server(run, port, keep)
    try:
        server.wait(began)
        took = Took(time.monotonic() - began, server.cpu_s)
        yield server, replace(took, load_s=server.load_s(), tokens_per_cpu_s=server.speed())
    finally:
        for pid in server.processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        server.process.wait()


def restart(server: Server) -> Took:
    """Kills the engine's process, and waits for the first token of the next one."""
    keeper, _, engine = server.processes
    keeper_s, loads = _cpu_s(keeper), server.log.read_text().count("loaded in")
    began = time.monotonic()
    os.kill(engine, signal.SIGKILL)
    while server.log.read_text().count("loaded in") == loads:
        if time.monotonic() > began + START_LIMIT_S:
            raise RuntimeError("the server is not started again")
        time.sleep(0.005)
    server.wait(began)
    took = Took(time.monotonic() - began, server.cpu_s - keeper_s)
    return replace(took, load_s=server.load_s(), tokens_per_cpu_s=server.speed())


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


def save_model(folder: Path, shape: dict[str, int]) -> None:
    make_model(shape, torch.device("cpu"), torch.float32).save_pretrained(folder)
    words = {f"w{i}": i for i in range(shape["vocab"])}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


def measure(
    repeats: int, shape: dict[str, int], flags: tuple[str, ...], rate: float | None
) -> list[dict[str, Any]]:
    names = ("cold", *(f"level {level}" for level in LEVELS), "keeping", "restart", "container")
    took: dict[str, list[Took]] = {name: [] for name in names}
    memory: dict[str, tuple[int, int]] = {}
    with tempfile.TemporaryDirectory() as parent, tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        run = Run(Path(parent) / "model", Path(shared) / "kept", flags, rate)
        save_model(run.folder, shape)
        for _ in range(repeats):
            with started(run) as (server, start):
                took["cold"].append(start)
                for level in LEVELS:
                    found, memory[f"level {level}"] = wake(server, level)
                    took[f"level {level}"].append(found)
            shutil.rmtree(run.keep, ignore_errors=True)
            with started(run, keep=True) as (server, start):
                took["keeping"].append(start)
                took["restart"].append(restart(server))
            with started(run, keep=True) as (server, start):
                took["container"].append(start)
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
    if each[0].load_s:
        row |= {
            "loadSeconds": statistics.median(t.load_s for t in each),
            "tokensPerCpuSecond": round(statistics.median(t.tokens_per_cpu_s for t in each), 2),
        }
    if name != "cold":
        row |= {
            "timesFasterThanCold": round(cold_s / wall, 1),
            "timesLessCpuThanCold": round(cold_cpu_s / cpu, 1),
        }
    if memory is not None or name == "restart":
        row |= {"aim": AIM, "aimMet": cold_s >= AIM * wall and cold_cpu_s >= AIM * cpu}
    if memory is not None:
        row["residentMiB"] = {"awake": memory[0] >> 20, "asleep": memory[1] >> 20}
    print(json.dumps(row), file=sys.stderr)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", choices=list(SHAPES), default="small")
    parser.add_argument("--weights-dtype", choices=["auto", "int8", "int4"], default="auto")
    parser.add_argument("--read-rate", type=float, help="bytes per second; default what the page cache gives")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    shape = SHAPES[arguments.model]
    result = {
        "benchmark": "serving_wake",
        "command": " ".join(["python", "benchmarks/serving_wake.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, 1 thread, shared",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "model": {**shape, "dtype": "float32", "weightsDtype": arguments.weights_dtype},
        "readRate": arguments.read_rate,
        "promptTokens": PROMPT,
        "rows": measure(
            arguments.repeats, shape, ("--weights-dtype", arguments.weights_dtype), arguments.read_rate
        ),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
