"""A model 2.5 times larger than its memory limit, streamed from the disk: beside a layer at a time, and beside enough memory.

    python benchmarks/serving_stream.py [--repeats 3] [--steps 5] [--out benchmarks/results/serving_stream.json]

A random Llama of about 2.3 GiB in float32 (48 layers, width 1024), on one CPU thread and the reading one. As root: each
side is a process of its own in a memory cgroup (version 1 or 2, without swap) whose limit is the file's size over 2.5.

  streamed        64 requests at once, the engine's own plan: two slots or more, layers that stay, large steps
  one at a time   the same engine with one slot and one request: each token loads each layer, and nothing is read ahead
  not ahead       one slot, 64 requests: what reading ahead is worth
  disk            the file of the layers by the plainest loop of direct reads, into one buffer of a layer: the rate that
                  bounds a step from below (under the same limit)
  resident        64 requests without a limit, weights in the fastest layout: the tokens, and the other bound

A side does `steps` decoding steps when it is told to, then the next side, and so on for each repeat, so that all meet the
same neighbours. Seconds are wall seconds: the disk is what is waited for. The bound of a step is the longer of reading what
the plan streams at the disk's rate, and the resident step. All answers must be those of `resident`, token by token.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from busbar.local import cgroups

SHAPE: dict[str, int] = {"layers": 48, "hidden": 1024, "heads": 16, "kv": 2, "mlp": 2816, "vocab": 8192}
SMALL: dict[str, int] = SHAPE | {"layers": 4}
OVER, BATCH, PROMPT = 2.5, 64, 16
SIDES = ("streamed", "one at a time", "not ahead", "disk", "resident")
LIMITED = SIDES[:-1]
AIMS = {"overPerTokenLoading": 20.0, "ofTheBound": 0.5}
GROUP = "busbar-serving-stream"


def main() -> int:
    return run(
        __doc__, 5, 5, measure, lambda given: side(given.side, given.folder, given.steps * given.repeats)
    )


def run(
    doc: str | None,
    steps: int,
    room_gib: int,
    measure: Callable[[Path, argparse.Namespace], dict[str, Any]],
    side: Callable[[argparse.Namespace], int],
) -> int:
    """The script: its arguments, and where its result goes. Also `serving_stream_experts.py`'s.

    Args:
        steps: decoding steps of a side per repeat, by default.
        room_gib: that its folder needs on the disk.
        measure: the result, with `sameTokens`.
        side: in a side's own process.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=steps, help="decoding steps of a side per repeat")
    parser.add_argument(
        "--folder",
        type=Path,
        help=f"on the disk to measure; needs {room_gib} GiB  [default: a temporary one]",
    )
    parser.add_argument(
        "--no-limit", action="store_true", help="a four-layer model without cgroups: tries the script"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        return side(given)
    if not given.no_limit and os.geteuid() != 0:
        parser.error("memory limits need root; --no-limit tries the script without")
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        result = measure(Path(folder), given)
    result["command"] = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    text = json.dumps(result, indent=2)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")
    return 0 if result["sameTokens"] else 1


def facts(benchmark: str, shape: dict[str, Any], size: int, limit: int | None) -> dict[str, Any]:
    """What a result says of where it was made. `size`: bytes of the model; `limit`: of memory."""
    import torch
    import transformers

    return {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpus": os.cpu_count(), "machine": platform.machine(), "load": os.getloadavg()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "shape": shape,
        "modelBytes": size,
        "limitBytes": limit,
        "modelOverLimit": None if limit is None else round(size / limit, 3),
    }


def measure(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    from rich.progress import track

    make(folder / "model", SMALL if given.no_limit else SHAPE)
    size = (folder / "model" / "model.safetensors").stat().st_size
    limit = None if given.no_limit else int(size / OVER)
    sides: dict[str, Side] = {}
    try:
        for name in track(SIDES, "starting"):  # one after the other: the first writes the file of layers
            sides[name] = Side(name, folder, given, limit if name in LIMITED else None)
        seconds: dict[str, list[float]] = {name: [] for name in SIDES}
        cpu: dict[str, list[float]] = {name: [] for name in SIDES}
        for turn in track(range(given.repeats * len(SIDES)), "measuring"):
            name = SIDES[turn % len(SIDES)]
            answer = sides[name].ask({"steps": given.steps})
            seconds[name].append(answer["seconds"])
            cpu[name].append(answer["cpuSeconds"])
        ends = {name: side.ask({"steps": 0}) for name, side in sides.items()}
        peaks = {name: side.peak() for name, side in sides.items()}
    finally:
        for side_ in sides.values():
            side_.end()
        if limit is not None:
            cgroups.remove(GROUP)
    step = {name: statistics.median(found) / given.steps for name, found in seconds.items()}
    plan = sides["streamed"].started
    disk_rate = plan["fileBytes"] / (step["disk"])
    disk_s = plan["passBytes"] / disk_rate
    bound = max(disk_s, step["resident"])
    rate = {"streamed": BATCH / step["streamed"], "one at a time": 1 / step["one at a time"]}
    tokens = {name: end["tokens"] for name, end in ends.items() if name != "disk"}
    return {
        **facts("serving_stream", SMALL if given.no_limit else SHAPE, size, limit),
        "plan": plan["text"],
        "peakBytesInCgroup": peaks,
        "secondsPerStep": {name: round(found, 4) for name, found in step.items()},
        "allSeconds": {name: [round(each, 3) for each in found] for name, found in seconds.items()},
        "cpuSecondsPerStep": {
            name: round(statistics.median(found) / given.steps, 4) for name, found in cpu.items()
        },
        "predictedSecondsPerStep": round(plan["passSeconds"], 4),
        "diskBytesPerSecond": round(disk_rate),
        "diskBoundSeconds": round(disk_s, 4),
        "computeBoundSeconds": round(step["resident"], 4),
        "tokensPerSecond": {name: round(found, 2) for name, found in rate.items()},
        "ratios": {
            "overPerTokenLoading": round(rate["streamed"] / rate["one at a time"], 2),
            "ofTheBound": round(bound / step["streamed"], 3),
            "overNotAhead": round(step["not ahead"] / step["streamed"], 3),
        },
        "aims": AIMS,
        "sameTokens": all(
            mine == theirs
            for name, found in tokens.items()
            for mine, theirs in zip(found, tokens["resident"], strict=False)
        ),
        "comparedTokens": {name: sum(map(len, found)) for name, found in tokens.items()},
    }


def make(folder: Path, shape: dict[str, int]) -> None:
    """In a process of its own, whose memory is gone before anything is measured."""
    code = (
        "import sys, json, torch; sys.path[:0] = json.loads(sys.argv[1]);"
        "from benchmarks.gpu.serving import make_model; from tokenizers import Tokenizer, models;"
        "shape = json.loads(sys.argv[2]);"
        "make_model(shape, torch.device('cpu'), torch.float32).save_pretrained(sys.argv[3], max_shard_size='100GB');"
        "Tokenizer(models.WordLevel({f'w{i}': i for i in range(shape['vocab'])}, unk_token='w0'))"
        ".save(sys.argv[3] + '/tokenizer.json')"
    )
    paths = json.dumps([sys.path[0], sys.path[1]])
    subprocess.run(
        [sys.executable, "-c", code, paths, json.dumps(shape), str(folder)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


class Side:
    """A process that works when it is told to."""

    def __init__(
        self,
        name: str,
        folder: Path,
        given: argparse.Namespace,
        limit: int | None,
        script: str = __file__,
        group: str | None = None,
    ) -> None:
        """`group`: its cgroup, where the limit is not None."""
        self.group = None if limit is None else group or f"{GROUP}/{SIDES.index(name)}"
        if self.group is not None:
            confine(self.group, limit)
        command = [sys.executable, script, "--side", name, "--folder", str(folder)]
        command += ["--steps", str(given.steps), "--repeats", str(given.repeats)]
        if given.no_limit:
            command.append("--no-limit")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "BUSBAR_GROUP": self.group or ""},
        )
        self.started = self._answer()

    def ask(self, what: dict[str, Any]) -> dict[str, Any]:
        stdin = self.process.stdin
        assert stdin is not None
        stdin.write(json.dumps(what) + "\n")
        stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a side ended with {self.process.wait()}; its error stands above")
        found: dict[str, Any] = json.loads(line)
        return found

    def peak(self) -> int | None:
        if self.group is None:
            return None
        folder = memory_folder(self.group)
        name = "memory.peak" if cgroups.is_v2() else "memory.max_usage_in_bytes"
        return int((folder / name).read_text())

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)
        if self.group is not None:
            cgroups.remove(self.group)


def memory_folder(group: str) -> Path:
    return (cgroups.ROOT if cgroups.is_v2() else cgroups.ROOT / "memory") / group


def confine(group: str, limit: int | None) -> None:
    """A cgroup with this limit, and no swap."""
    folder = memory_folder(group)
    if cgroups.is_v2():
        cgroups.create(group)
    folder.mkdir(parents=True, exist_ok=True)
    names = (
        ("memory.max", "memory.swap.max")
        if cgroups.is_v2()
        else (
            "memory.limit_in_bytes",
            "memory.memsw.limit_in_bytes",
        )
    )
    for name, value in zip(names, (limit, 0 if cgroups.is_v2() else limit), strict=True):
        if (folder / name).exists():
            (folder / name).write_text(str(value))


# -- in a side's process -------------------------------------------------------------------------------


def side(name: str, folder: Path, steps: int) -> int:
    group = os.environ["BUSBAR_GROUP"]
    if group:
        cgroups.enter(group, os.getpid())  # before torch is imported: everything counts
    answers = sys.stdout
    sys.stdout = sys.stderr
    work = disk_turns(folder, answers) if name == "disk" else engine_turns(name, folder, steps, answers)
    next(work)
    for line in sys.stdin:
        work.send(json.loads(line)["steps"])
    return 0


def tell(answers: TextIO, **what: Any) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def engine_turns(name: str, folder: Path, steps: int, answers: TextIO) -> Generator[None, int, None]:
    """Yields whenever it waits for the number of steps to do."""
    import torch

    from busbar.workloads.serving.loader import load
    from busbar.workloads.serving.sampling import SamplingParams
    from busbar.workloads.serving.settings import EngineSettings
    from busbar.workloads.serving.stream import StreamedLayers

    batch = 1 if name == "one at a time" else BATCH
    length = PROMPT + steps + 2
    blocks = batch * -(-length // 16) + 2
    block_bytes = 2 * SHAPE["layers"] * SHAPE["kv"] * (SHAPE["hidden"] // SHAPE["heads"]) * 16 * 4
    settings = EngineSettings(
        folder / "model",
        kv_bytes=blocks * block_bytes,
        max_model_len=length,
        max_running=BATCH,
        block_tokens=16,
        threads=1,
        weights="resident" if name == "resident" else "stream",
        stream_dir=None if name == "resident" else folder / "layers",
        stream_depth={"streamed": None, "resident": None}.get(name, 0),
        memory_bytes=None if os.environ["BUSBAR_GROUP"] or name == "resident" else SMALL_MEMORY,
    )
    loaded = load(settings, "random")
    core, streaming = loaded.core, loaded.streaming
    layers = core.runner.decoder.weights.layers
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(100, SHAPE["vocab"], (BATCH, PROMPT), generator=generator).tolist()
    params = SamplingParams(max_tokens=steps + 1, temperature=0.0, ignore_eos=True)
    found: list[list[int]] = [[] for _ in range(batch)]
    for index in range(batch):
        core.submit(str(index), prompts[index], params, 0.0)

    def step() -> None:
        for delta in core.step():
            found[int(delta.request_id)] += delta.tokens

    while not all(found):  # prompts
        step()
    tell(
        answers,
        text="" if streaming is None else streaming.text,
        passBytes=0 if streaming is None else streaming.plan.pass_bytes,
        fileBytes=0 if streaming is None else streaming.plan.needs.layer_bytes * loaded.arch.layers,
        passSeconds=0.0 if streaming is None else streaming.pass_s,
    )
    while True:
        wanted = yield
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(wanted):
            step()
        spent, used = time.perf_counter() - began, time.process_time() - cpu
        waited = layers.rate.waited_s if isinstance(layers, StreamedLayers) else 0.0
        tell(
            answers, seconds=spent, cpuSeconds=used, waitedSeconds=waited, tokens=found if not wanted else []
        )


SMALL_MEMORY = 270 * 2**20


def disk_turns(folder: Path, answers: TextIO) -> Generator[None, int, None]:
    """Reads the whole file of layers for each step."""
    import mmap

    (path,) = (folder / "layers").glob("*.layers")
    size = path.stat().st_size
    layer = size // SHAPE["layers"] // mmap.PAGESIZE * mmap.PAGESIZE
    buffer = mmap.mmap(-1, layer)
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    tell(answers)
    while True:
        wanted = yield
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(wanted):
            offset = 0
            while offset < size:
                offset += os.preadv(file, [buffer], offset) or size
        tell(answers, seconds=time.perf_counter() - began, cpuSeconds=time.process_time() - cpu, tokens=[])


if __name__ == "__main__":
    sys.exit(main())
