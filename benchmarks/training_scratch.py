"""What it costs to keep the optimizer's state on a disk, beside reading, updating and writing it one after the other.

    python benchmarks/training_scratch.py --output benchmarks/results/training_scratch.json

The disk is this machine's, past the page cache; the updates run on its processor. The device is emulated: a block's
forward pass takes a stated time, computing it again as long and its backward pass twice that, and whoever is done
earlier sleeps, which takes no CPU from anybody (`late` is the share that was not done earlier). Its time is chosen so
that forward and backward together take `--ratios` times as long as reading and writing the state one after the other.
At each ratio these take turns, step by step:

    in memory      `parameter-offload` with all state on the host
    on disk        the same with all state in a scratch file: what is read, updated and written overlaps, also with the
                   next forward pass
    synchronous    the same file, each chunk read, updated and written by one thread at the end of the step

`raw` is the time in which two threads read and write the same bytes at once, in chunks of the same size: no engine is
faster than backward and the longer of that and the next forward pass (`bound`), because state has no place to be read
to while backward runs. The bar: at least 2 times the speed of the synchronous way; `mostTimesSynchronous` is what the bound
would reach. Losses of all ways are compared: they are equal bit for bit. The last part trains in a process whose
memory the kernel limits to less than the state (RLIMIT_DATA), and compares losses again.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.progress import show
from benchmarks.result import circumstances, publish
from benchmarks.training_overlap import CPU, VOCABULARY, PacedRecipe, Size
from benchmarks.training_streaming import ReadyPace

from busbar.workloads.machine.direct_file import ScratchFile, page_memory
from busbar.workloads.machine.streams import CallerStream
from busbar.workloads.training.demand import Demand
from busbar.workloads.training.disk_tensor import DiskTensor, measure_disk
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.model import measure_demand, open_model
from busbar.workloads.training.plan import MemoryLimits, MemoryPlan
from busbar.workloads.training.settings import EngineSpec
from busbar.workloads.training.streamed_plan import PARAMETER_OFFLOAD, lay_out_streamed
from busbar.workloads.training.trainer import Trainer

MEMORY, DISK, SYNCHRONOUS = "in memory", "on disk", "synchronous"
BAR = 2.0
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # of glibc's malloc.h
ALLOWANCE = 160 * 2**20  # torch's libraries, threads and first step, which are in the engine's reserve


def spec_of(size: Size, schedule: str) -> EngineSpec:
    return parse_engine(
        {
            "model": {"config": size.config()},
            "tokenizer": {"train": {"vocabSize": VOCABULARY}},
            "data": {"uri": "pvc://text", "sequenceLength": size.length},
            "steps": 100_000,
            "batch": {"sequences": size.sequences, "microBatch": size.sequences},
            "optimizer": {"learningRate": 1e-4, "schedule": "constant", "gradientClip": 1.0},
            "mode": PARAMETER_OFFLOAD,
            "dtype": size.dtype,
            "schedule": schedule,
            "scratchDisk": "1Ti",
            "threads": 1,
        }
    )


def plan_of(demand: Demand, *, on_disk: bool) -> MemoryPlan:
    """With two buffers for checkpoints, which none of the ways writes."""
    limits = MemoryLimits(None, 0, True, disk_bytes=2**60)
    return lay_out_streamed(demand, limits, "", len(demand.groups) if on_disk else 0)


class Way:
    """One trainer, stepped turn by turn; its steps are timed."""

    def __init__(self, name: str, size: Size, pace: ReadyPace | None, folder: Path) -> None:
        spec = spec_of(size, "blocking" if name == SYNCHRONOUS else "gated")
        plainly = open_model(spec, None, VOCABULARY, 0)
        recipe = PacedRecipe(plainly.config, None, plainly.dtype, plainly.seed, pace=pace)
        demand = measure_demand(plainly, spec, CPU)
        self.plan = plan_of(demand, on_disk=name != MEMORY)
        self.trainer = Trainer(spec, recipe, self.plan, CPU, scratch=folder)
        if name == SYNCHRONOUS:
            optimizer: Any = self.trainer.optimizer
            caller, pipeline = CallerStream(), optimizer.pipeline
            pipeline._streams = replace(pipeline._streams, load=caller, update=caller, store=caller)
        self.data = size.data()
        self.losses: list[float] = []

    def steps(self, count: int) -> float:
        """Seconds of one of `count` steps, all of which are done."""
        begun = time.monotonic()
        for _ in range(count):
            self.losses.append(self.trainer.step(self.data).loss)
        return (time.monotonic() - begun) / count

    def rest(self) -> None:
        """Leave nothing running beside what is measured next."""
        self.trainer.drain()

    def close(self) -> None:
        self.rest()
        self.trainer.close()


def raw_seconds(trainer: Trainer, folder: Path) -> float:
    """Of reading all chunks of state and writing as many at once, in a file of their own."""
    chunks = [chunk.state for chunk in trainer.optimizer.chunks if isinstance(chunk.state, DiskTensor)]
    whole = max(chunk.begin + chunk.size for chunk in chunks)
    largest = max(chunk.size for chunk in chunks)
    file = ScratchFile(folder, whole)
    rooms = [page_memory(largest).fill_(1) for _ in range(2)]
    try:
        for chunk in chunks:
            file.write(rooms[1][: chunk.size], chunk.begin)

        def read() -> None:
            for chunk in chunks:
                file.read(rooms[0][: chunk.size], chunk.begin)

        begun, reader = time.monotonic(), threading.Thread(target=read)
        reader.start()
        for chunk in chunks:
            file.write(rooms[1][: chunk.size], chunk.begin)
        reader.join()
        return time.monotonic() - begun
    finally:
        file.close()


def rows(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    size, pace = Size(given.hidden, given.layers, 8, 2, given.dtype), ReadyPace(0.0)
    ways = {name: Way(name, size, pace, folder) for name in (MEMORY, DISK, SYNCHRONOUS)}
    for way in ways.values():
        way.steps(2)
        way.rest()
    plan, found = ways[DISK].plan, {}
    for number, ratio in enumerate(given.ratios):
        disk_s = measure_disk(folder).seconds(plan.disk_bytes)
        compute_s = ratio * disk_s
        pace.forward_s = compute_s / 4 / given.layers
        pace.late = pace.passes = 0
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        raw = []
        for turn in range(given.turns):
            what = f"ratio {ratio:g} ({number + 1} of {len(given.ratios)})"
            show(what, turn, given.turns)
            for name, way in ways.items():
                way.steps(1)  # fills the gated schedule
                seconds[name].append(way.steps(given.steps))
                way.rest()
            raw.append(raw_seconds(ways[DISK].trainer, folder))
        show(what, given.turns, given.turns)
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        raw_s = statistics.median(raw)
        bound = compute_s * 3 / 4 + max(raw_s, compute_s / 4)
        found[f"ratio {ratio:g}"] = {
            "computeSeconds": round(compute_s, 3),
            "rawSeconds": round(raw_s, 3),
            "secondsPerStep": {name: round(each, 3) for name, each in medians.items()},
            "leastAndMost": {name: [round(min(e), 3), round(max(e), 3)] for name, e in seconds.items()},
            "timesSynchronous": round(medians[SYNCHRONOUS] / medians[DISK], 3),
            "ofBound": round(medians[DISK] / bound, 3),
            "mostTimesSynchronous": round(medians[SYNCHRONOUS] / bound, 3),
            "late": round(pace.late / max(1, pace.passes), 4),
        }
    least = min(len(way.losses) for way in ways.values())
    for name, way in ways.items():
        assert way.losses[:least] == ways[MEMORY].losses[:least], f"{name}: other losses"
        way.close()
    return {
        "rows": found,
        "met": max(row["timesSynchronous"] for row in found.values()) >= BAR,
        "equalSteps": least,
        "stateBytes": plan.disk_bytes,
        "chunkParameters": plan.chunk_parameters,
        "hostBytes": {name: way.plan.host_bytes for name, way in ways.items()},
    }


def _limited(size: Size, folder: Path, count: int, told: Any) -> None:
    torch.set_num_threads(1)
    threading.stack_size(2**18)
    libc = ctypes.CDLL(None)
    libc.mallopt(
        M_MMAP_THRESHOLD, 2**20
    )  # or glibc keeps freed pieces, by chance (see tests/training/test_phases.py)
    libc.mallopt(M_ARENA_MAX, 1)
    spec = spec_of(size, "gated")
    plan = plan_of(measure_demand(open_model(spec, None, VOCABULARY, 0), spec, CPU), on_disk=True)
    rows = Path("/proc/self/status").read_text().splitlines()
    now = next(int(row.split()[1]) * 1024 for row in rows if row.startswith("VmData:"))
    limit = plan.host_bytes + ALLOWANCE
    resource.setrlimit(resource.RLIMIT_DATA, (now + limit, resource.RLIM_INFINITY))
    way = Way(DISK, size, None, folder)
    way.steps(count)
    way.close()
    told.send((limit, plan.disk_bytes, way.losses))


def limited(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A process with less memory than state takes the steps of one that has it all in memory."""
    size = Size(given.hidden, given.deep, 8, 2, given.dtype)
    show("less memory than state", 0, 2)
    context = multiprocessing.get_context("spawn")
    answer, told = context.Pipe(duplex=False)
    child = context.Process(target=_limited, args=(size, folder, 3, told))
    child.start()
    told.close()  # here: if the child dies there is nothing to wait for
    limit, state, losses = answer.recv()
    child.join()
    show("less memory than state", 1, 2)
    way = Way(MEMORY, size, None, folder)
    way.steps(3)
    way.close()
    show("less memory than state", 2, 2)
    assert losses == way.losses
    return {
        "limitBytes": limit,
        "stateBytes": state,
        "stateOfLimit": round(state / limit, 3),
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk in question"
    )
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--deep", type=int, default=20, help="blocks of the model whose state exceeds the memory"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="of a turn")
    given = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()
    rates = measure_disk(given.folder)
    result = {
        **circumstances(),
        "diskGBPerSecond": {"read": round(rates.read / 1e9, 2), "write": round(rates.write / 1e9, 2)},
        "bar": BAR,
        **rows(given, given.folder),
        "lessMemoryThanState": limited(given, given.folder),
        "load": {"before": load, "after": os.getloadavg()},
    }
    publish(result, given.output)


if __name__ == "__main__":
    main()
