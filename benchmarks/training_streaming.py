"""What it costs to keep the weights on the host, where a slow link brings them to the device block by block.

    python benchmarks/training_streaming.py --output benchmarks/results/training_streaming.json

Device and link are emulated at stated rates, and what they do is done for real. A copy takes as long as its bytes need
at the link's rate, and a block's forward pass `--block-ms`, computing it again as long, its backward pass twice that:
whoever is done earlier sleeps, which takes no CPU from anybody (`late` is the share that was not done earlier). A block's
clock starts when its weights are there. The updates run on this machine's processor, at its own speed.

The link's rate is chosen so that a block's weights need `--ratios` times the seconds of its forward pass: 1 is the
smallest batch that hides them, the ratio falls as the batch grows. At each rate these take turns, step by step:

    resident, recomputing    everything on the device, which computes activations again as the streaming engine does
    resident, keeping        everything on the device, activations too: one forward pass less per step
    streamed                 `parameter-offload` in the gated schedule with as many slots as `--slots` says
    streamed, blocking       the same, ending each step when all updates are done

Without a backward pass (`ZerothOrder`) two more ways take turns: with the weights on the device, and streamed. Inputs of
blocks on the host (`activations: swap`) take turns with recomputing ones, at rates at which an input needs `--ratios` times
the seconds of its block's forward pass.

Beside the streamed rows stands the fluid model (`scheduler/fit/timeline.py`), with the forward and update seconds that
were measured. The bars: streamed at least 0.9 of the speed of `resident, recomputing` at the ratios of at most 1; peak
on the device at most 40 % of the resident engine's; and in a second model, whose weights are ten times `deviceMemory`,
a step is taken. Losses of all ways are compared: they are equal bit for bit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.progress import show
from benchmarks.result import circumstances, publish
from benchmarks.training_overlap import CPU, VOCABULARY, Link, Pace, PacedRecipe, Size, sleep_until

from busbar.scheduler.fit.timeline import StreamedBlock, streamed_step_time
from busbar.workloads.machine.streams import CallerStream, Streams, WorkerStream
from busbar.workloads.training.choice import make_plan
from busbar.workloads.training.demand import KEEP, RECOMPUTE, SWAP, Demand
from busbar.workloads.training.groups import blocks
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.model import measure_demand, open_model
from busbar.workloads.training.plan import MemoryLimits
from busbar.workloads.training.settings import ADAMW, ZEROTH_ORDER
from busbar.workloads.training.streamed_plan import PARAMETER_OFFLOAD, lay_out_streamed
from busbar.workloads.training.trainer import Trainer

MIB = 2**20
WAYS = {
    "resident, recomputing": ("resident", RECOMPUTE, "blocking", ADAMW),
    "resident, keeping": ("resident", KEEP, "blocking", ADAMW),
    "streamed": (PARAMETER_OFFLOAD, "auto", "gated", ADAMW),
    "streamed, blocking": (PARAMETER_OFFLOAD, "auto", "blocking", ADAMW),
}
ZEROTH = {
    "zeroth order, resident": ("resident", "auto", "auto", ZEROTH_ORDER),
    "zeroth order, streamed": (PARAMETER_OFFLOAD, "auto", "auto", ZEROTH_ORDER),
}
SWAPPED = {
    "resident, recomputing": WAYS["resident, recomputing"],
    "resident, swapped": ("resident", SWAP, "blocking", ADAMW),
}


class ReadyPace(Pace):
    """The emulated device's seconds of each block, from the moment on at which its weights are there."""

    def attach(self, model: torch.nn.Module) -> None:
        for block in blocks(model):
            ready = [0.0]
            setattr(block, "forward", self._paced(block.forward, ready))  # noqa: B010
            block.register_full_backward_pre_hook(lambda *_, ready=ready: self._ready(ready))
            block.register_full_backward_hook(
                lambda *_, ready=ready: self._until(ready[0] + 2 * self.forward_s)
            )

    def _paced(self, forward: Callable[..., Any], ready: list[float]) -> Callable[..., Any]:
        """Of a first pass, and of one in backward, which torch leaves before its end by an exception."""

        def run(*args: Any, **kwargs: Any) -> Any:
            begun = time.monotonic()
            try:
                return forward(*args, **kwargs)
            finally:
                self._until(begun + self.forward_s)
                ready[0] = time.monotonic()

        return run

    def _ready(self, ready: list[float]) -> None:
        ready[0] = time.monotonic()

    def _until(self, moment: float) -> None:
        self.passes += 1
        self.late += not sleep_until(moment)


class Way:
    """One trainer, stepped turn by turn; its steps are timed."""

    def __init__(
        self, name: str, size: Size, slots: int, pace: Pace | None, device_bytes: int | None
    ) -> None:
        self.name = name
        mode, activations, schedule, optimizer = {**WAYS, **ZEROTH, **SWAPPED}[name]
        spec = parse_engine(
            {
                "model": {"config": size.config()},
                "tokenizer": {"train": {"vocabSize": VOCABULARY}},
                "data": {"uri": "pvc://text", "sequenceLength": size.length},
                "steps": 100_000,
                "batch": {"sequences": size.sequences, "microBatch": size.sequences // 2},
                "optimizer": {
                    "name": optimizer,
                    "learningRate": 1e-4,
                    "schedule": "constant",
                    "gradientClip": 1.0,
                },
                "mode": mode,
                "activations": activations,
                "dtype": size.dtype,
                "schedule": schedule,
                "threads": 1,
            }
        )
        plainly = open_model(spec, None, VOCABULARY, 0)
        recipe = PacedRecipe(plainly.config, None, plainly.dtype, plainly.seed, pace=pace)
        self.demand = measure_demand(plainly, spec, CPU)
        limits = MemoryLimits(device_bytes, None, True)
        if name in WAYS and mode == PARAMETER_OFFLOAD and device_bytes is None:
            least = lay_out_streamed(self.demand, limits)
            more = (slots - least.weight_slots) * least.device["slots"] // least.weight_slots
            limits = MemoryLimits(least.device_bytes + more, None, True)
        self.plan = make_plan(self.demand, limits, mode)
        self.load, self.store = Link("load"), Link("store")
        caller = CallerStream()
        update = WorkerStream("update") if schedule == "gated" else caller
        streams = Streams(self.load, caller, update, self.store)
        self.links = [self.load, self.store]
        swap_streams = None
        if activations == SWAP:
            self.links = [Link("load"), Link("store")]
            swap_streams = Streams(self.links[0], caller, caller, self.links[1])
        self.trainer = Trainer(spec, recipe, self.plan, CPU, streams=streams, swap_streams=swap_streams)
        self.data = size.data()
        self.update_s: list[float] = []
        self.losses: list[float] = []
        self._time_updates()

    def _time_updates(self) -> None:
        """Seconds of all updates of a step, wherever they run."""
        optimizer: Any = self.trainer.optimizer
        update, step = optimizer._update, optimizer.step

        def timed(*args: Any) -> None:
            begun = time.monotonic()
            update(*args)
            self.update_s[-1] += time.monotonic() - begun

        def stepped(rate: float) -> Any:
            self.update_s.append(0.0)
            return step(rate)

        optimizer._update, optimizer.step = timed, stepped

    def steps(self, count: int) -> tuple[float, float]:
        """Seconds, and CPU seconds, of one of `count` steps."""
        begun, used = time.monotonic(), time.process_time()
        for _ in range(count):
            self.losses.append(self.trainer.step(self.data).loss)
        return (time.monotonic() - begun) / count, (time.process_time() - used) / count

    def close(self) -> None:
        self.trainer.drain()
        self.trainer.close()

    def rest(self) -> None:
        """Leave nothing running beside what is measured next."""
        self.trainer.drain()


def rows(given: argparse.Namespace) -> dict[str, Any]:
    """Steps per second of all ways, at each rate of the link."""
    size, pace = Size(256, given.layers, 64, 4, given.dtype), ReadyPace(given.block_ms / 1000)
    ways = {name: Way(name, size, given.slots, pace, None) for name in WAYS}
    for way in ways.values():
        way.steps(2)
        way.rest()
    streamed = ways["streamed"]
    inner = [group for group in streamed.demand.groups if group.is_block]
    weights = weights_of(streamed.demand)
    found: dict[str, Any] = {}
    for number, ratio in enumerate(given.ratios):
        link = weights / (pace.forward_s * ratio)
        for way in ways.values():
            way.load.bytes_per_s = way.store.bytes_per_s = link
        seconds: dict[str, list[float]] = {name: [] for name in WAYS}
        cpu: dict[str, list[float]] = {name: [] for name in WAYS}
        for turn in range(given.turns):
            show(f"ratio {ratio:g} ({number + 1} of {len(given.ratios)})", turn, given.turns)
            for name, way in ways.items():
                way.steps(1)  # fills the gated schedule
                wall, used = way.steps(given.steps)
                seconds[name].append(wall)
                cpu[name].append(used)
                way.rest()
        show(f"ratio {ratio:g} ({number + 1} of {len(given.ratios)})", given.turns, given.turns)
        found[f"ratio {ratio:g}"] = row(ways, seconds, cpu, link, weights, pace.forward_s, len(inner))
    least = min(len(way.losses) for way in ways.values())
    for name, way in ways.items():
        assert way.losses[:least] == streamed.losses[:least], f"{name}: other losses"
    for way in ways.values():
        way.close()
    peaks = {name: way.trainer.device_arena.peak_bytes for name, way in ways.items()}
    return {
        "rows": found,
        "equalSteps": least,
        "slots": streamed.plan.weight_slots,
        "blocks": len(inner),
        "blockMilliseconds": given.block_ms,
        "late": round(pace.late / pace.passes, 4),
        "devicePeakBytes": peaks,
        "peakOfResident": round(peaks["streamed"] / peaks["resident, recomputing"], 4),
        "peakOfResidentKeeping": round(peaks["streamed"] / peaks["resident, keeping"], 4),
    }


def row(
    ways: dict[str, Way],
    seconds: dict[str, list[float]],
    cpu: dict[str, list[float]],
    link: float,
    weights: int,
    forward_s: float,
    count: int,
) -> dict[str, Any]:
    """Medians of the turns; around the blocks the resident engine's rest is taken, which streams nothing."""
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    update_s = {
        name: statistics.median(way.update_s[-len(seconds[name]) * 2 :]) for name, way in ways.items()
    }
    base = "resident, recomputing"
    around_s = max(0.0, (medians[base] - update_s[base]) / 2 - 4 * forward_s * count)
    work = [StreamedBlock(forward_s, 3 * forward_s, weights, weights)] * count
    outer = StreamedBlock(around_s / 3, around_s * 2 / 3, 0, 0)
    fluid = {
        name: streamed_step_time([*work, outer], 2, link, link, update_s[name], gated=name == "streamed")
        for name in ("streamed", "streamed, blocking")
    }
    return {
        "linkGBPerSecond": round(link / 1e9, 4),
        "secondsPerStep": {name: round(each, 4) for name, each in medians.items()},
        "cpuSecondsPerStep": {name: round(statistics.median(each), 4) for name, each in cpu.items()},
        "updateSeconds": {name: round(each, 4) for name, each in update_s.items()},
        "speedOfResident": round(medians[base] / medians["streamed"], 4),
        "speedOfResidentKeeping": round(medians["resident, keeping"] / medians["streamed"], 4),
        "gatedOverBlocking": round(medians["streamed, blocking"] / medians["streamed"], 4),
        "measuredOfFluid": {name: round(medians[name] / each, 4) for name, each in fluid.items()},
    }


def weights_of(demand: Demand) -> int:
    """Bytes of a block's."""
    return next(group.parameters for group in demand.groups if group.is_block) * demand.weight_bytes


def input_of(demand: Demand) -> int:
    """Bytes of a block's input."""
    blocks_ = sum(group.is_block for group in demand.groups)
    return demand.swapped_bytes // (blocks_ - 1)


def pair_rows(
    given: argparse.Namespace, title: str, names: Iterable[str], moved: Callable[[Demand], int]
) -> dict[str, Any]:
    """Two ways turn by turn, of which the second has something on the host: `moved` bytes of each block."""
    size, pace = Size(256, given.layers, 64, 4, given.dtype), ReadyPace(given.block_ms / 1000)
    ways = {name: Way(name, size, given.slots, pace, None) for name in names}
    resident, streamed = ways.values()
    for way in ways.values():
        way.steps(2)
    bytes_ = moved(streamed.demand)
    found: dict[str, Any] = {}
    for number, ratio in enumerate(given.ratios):
        for way in ways.values():
            for link in way.links:
                link.bytes_per_s = bytes_ / (pace.forward_s * ratio)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(given.turns):
            show(f"{title} ({number + 1} of {len(given.ratios)})", turn, given.turns)
            for name, way in ways.items():
                seconds[name].append(way.steps(given.steps)[0])
        show(f"{title} ({number + 1} of {len(given.ratios)})", given.turns, given.turns)
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        found[f"ratio {ratio:g}"] = {
            "secondsPerStep": {name: round(each, 4) for name, each in medians.items()},
            "speedOfResident": round(medians[resident.name] / medians[streamed.name], 4),
        }
    assert resident.losses == streamed.losses
    for way in ways.values():
        way.close()
    peaks = {name: way.trainer.device_arena.peak_bytes for name, way in ways.items()}
    return {
        "rows": found,
        "equalSteps": len(resident.losses),
        "late": round(pace.late / pace.passes, 4),
        "devicePeakBytes": peaks,
        "peakOfResident": round(
            streamed.trainer.device_arena.peak_bytes / resident.trainer.device_arena.peak_bytes, 4
        ),
    }


def ten_times(given: argparse.Namespace) -> dict[str, Any]:
    """A model whose weights are ten times the device's memory, without pacing."""
    show("a model ten times deviceMemory", 0, 1)
    size = Size(256, given.deep, 64, 2, given.dtype)
    spec_way = Way("streamed", size, 2, None, None)  # for the sizes alone
    weights = spec_way.demand.model_bytes
    spec_way.close()
    del spec_way
    way = Way("streamed", size, 2, None, weights // 10)
    wall, _ = way.steps(2)
    way.close()
    peak = way.trainer.device_arena.peak_bytes
    resident = make_plan(way.demand, MemoryLimits(None, None, True), "resident").device_bytes
    show("a model ten times deviceMemory", 1, 1)
    return {
        "blocks": given.deep,
        "weightBytes": weights,
        "deviceMemoryBytes": weights // 10,
        "devicePeakBytes": peak,
        "weightsOverPeak": round(weights / peak, 3),
        "peakOfResident": round(peak / resident, 4),
        "secondsPerStep": round(wall, 3),
        "losses": way.losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument(
        "--deep", type=int, default=96, help="blocks of the model that is ten times deviceMemory"
    )
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--block-ms", type=float, default=20.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.9, 1.5])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="of a turn")
    parser.add_argument(
        "--only",
        choices=["zeroth", "swap"],
        help="the runs without a backward pass alone, or those with inputs of blocks on the host",
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    load_before = os.getloadavg()
    result: dict[str, Any] = {
        **circumstances(),
        "load": {"before": load_before},
    }
    if given.only is None:
        result |= rows(given)
    if given.only in (None, "zeroth"):
        result["zerothOrder"] = pair_rows(given, "zeroth order", ZEROTH, weights_of)
    if given.only in (None, "swap"):
        result["swapped"] = pair_rows(given, "swapped", SWAPPED, input_of)
    if given.only is None:
        result["tenTimes"] = ten_times(given)
    result["load"]["after"] = os.getloadavg()
    publish(result, given.output)


if __name__ == "__main__":
    main()
