"""What updates beside the next forward pass save where host and device are joined by a slow link.

    python benchmarks/training_overlap.py --output benchmarks/results/training_overlap.json

Device and link are emulated at stated rates, and what they do is done for real. A copy takes as long as its bytes need
at the link's rate, and a block's forward pass `--block-ms`, its backward pass twice that: whoever is done earlier sleeps,
which takes no CPU from anybody. So the numbers do not hang on what else runs on the machine, as long as the real
work needs less than the stated time (the share of passes and copies that did not is reported as `late`).
The link's rate is chosen so that the state of the model needs `--ratios` times the seconds of forward and backward to go
down and up at once. With it, turn by turn, step

    blocking, gated     the engine in both schedules, all state on the host; gated with staging slots for `--room` of the
                        state, and with three. What has no slot is loaded when the norm is known, which no schedule
                        with exact clipping can hide behind backward
    resident            the engine with all state on the device, and no link

Beside each stand `bound`, the fluid model (`scheduler/fit/timeline.py`: constant rates, nothing lost between the parts)
with the forward, backward and update seconds that were measured in the resident engine's turns, and `predicted`, which
the engine's own `probe` and `prediction` said before the turns.

Then, without pacing, the resident engine and plain transformers with torch.optim.AdamW(fused=True) and clip_grad_norm_
take turns on the same threads with a larger model. Their ratio is that of CPU seconds (and of wall-clock beside it).

The bars: gated within 1.1 of the bound, at least 1.5 times faster than blocking where update and computation take
equally long, predicted within 15 % of measured, and plain to resident at least 0.98.
Losses of all ways of a model are compared: they are equal bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from benchmarks.progress import show

from busbar.scheduler.fit.timeline import GroupWork, Rates, step_time
from busbar.workloads.machine.streams import CallerStream, Streams, WorkerStream
from busbar.workloads.training import probe
from busbar.workloads.training.choice import make_plan
from busbar.workloads.training.demand import chunk_sizes
from busbar.workloads.training.division import divide
from busbar.workloads.training.groups import blocks
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.model import ModelRecipe, measure_demand, open_model
from busbar.workloads.training.packing import Packed
from busbar.workloads.training.plan import MemoryLimits, lay_out
from busbar.workloads.training.prediction import predict
from busbar.workloads.training.trainer import Trainer

CPU, VOCABULARY, MIB = torch.device("cpu"), 2048, 2**20
LINKED = ("blocking", "gated", "gated, three slots")
FILLING = 2  # steps of a turn until the gated schedule is steady
Row = dict[str, list[float]]


class Link(WorkerStream):
    """A direction of the link: a copy ends when its bytes have had the time that they need at the stated rate."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.bytes_per_s = float("inf")
        self._free_at = 0.0
        self.late = self.copies = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        def paced() -> None:
            begun = max(time.monotonic(), self._free_at)
            target.copy_(source)
            self._free_at = begun + target.numel() * target.element_size() / self.bytes_per_s
            self.copies += 1
            self.late += not sleep_until(self._free_at)

        self.submit(paced)


def sleep_until(moment: float) -> bool:
    """False if it has passed."""
    left = moment - time.monotonic()
    time.sleep(max(0.0, left))
    return left >= 0


class Pace:
    """The emulated device's seconds of each block."""

    def __init__(self, forward_s: float) -> None:
        self.forward_s = forward_s
        self.late = self.passes = 0

    def attach(self, model: torch.nn.Module) -> None:
        for block in blocks(model):
            begun = [0.0]
            block.register_forward_pre_hook(partial(self._begin, begun))
            block.register_forward_hook(partial(self._end, begun, self.forward_s))
            block.register_full_backward_pre_hook(partial(self._begin, begun))
            block.register_full_backward_hook(partial(self._end, begun, 2 * self.forward_s))

    def _begin(self, begun: list[float], *_: object) -> None:
        begun[0] = time.monotonic()

    def _end(self, begun: list[float], seconds: float, *_: object) -> None:
        self.passes += 1
        self.late += not sleep_until(begun[0] + seconds)


@dataclass(frozen=True)
class PacedRecipe(ModelRecipe):
    """Makes models whose blocks take as long as the emulated device needs."""

    pace: Pace | None = None

    def build(self) -> torch.nn.Module:
        model = super().build()
        if self.pace is not None:
            self.pace.attach(model)
        return model


@dataclass(frozen=True)
class Size:
    """Of a model and its batch."""

    hidden: int
    layers: int
    length: int
    sequences: int
    dtype: str

    def config(self) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.hidden * 11 // 4,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // 64,
            "tie_word_embeddings": True,
            "max_position_embeddings": self.length,
        }

    def data(self) -> Packed:
        tokens = np.random.default_rng(5).integers(0, VOCABULARY, self.length * self.sequences * 400)
        return Packed.cut(tokens.astype(np.uint32), self.length, 0, self.sequences)


class Way:
    """One trainer, stepped turn by turn; its steps are timed."""

    def __init__(self, size: Size, mode: str, schedule: str, room: float, pace: Pace | None) -> None:
        spec = parse_engine(
            {
                "model": {"config": size.config()},
                "tokenizer": {"train": {"vocabSize": VOCABULARY}},
                "data": {"uri": "pvc://text", "sequenceLength": size.length},
                "steps": 100_000,
                "batch": {"sequences": size.sequences, "microBatch": size.sequences},
                "optimizer": {"learningRate": 1e-4, "schedule": "constant", "gradientClip": 1.0},
                "mode": mode,
                "dtype": size.dtype,
                "schedule": schedule,
                "threads": 1,
                "activations": "keep",
            }
        )
        plainly = open_model(spec, None, VOCABULARY, 0)
        self.recipe = PacedRecipe(plainly.config, None, plainly.dtype, plainly.seed, pace=pace)
        self.demand = measure_demand(self.recipe, spec, CPU)
        limits = unlimited = MemoryLimits(None, None, True)
        if mode != "resident":
            state = self.demand.parameters * self.demand.state_bytes_per_parameter
            least = lay_out(self.demand, unlimited, mode, len(self.demand.groups)).device_bytes
            limits = MemoryLimits(least + int(room * state), None, True)
        self.plan = make_plan(self.demand, limits, mode)
        self.load, self.store = Link("load"), Link("store")
        caller = CallerStream()
        update = WorkerStream("update") if schedule == "gated" else caller
        streams = Streams(self.load, caller, update, self.store)
        self.trainer = Trainer(spec, self.recipe, self.plan, CPU, streams=streams)
        self.data = size.data()
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self.losses: list[float] = []

    @property
    def travelling_bytes(self) -> int:
        """Each way, in a step."""
        return self.plan.host["optimizer"]

    def set_link(self, bytes_per_s: float) -> None:
        self.load.bytes_per_s = self.store.bytes_per_s = bytes_per_s

    def steps(self, count: int) -> None:
        for _ in range(count):
            started, used = time.monotonic(), time.process_time()
            self.losses.append(self.trainer.step(self.data).loss)
            self.seconds.append(time.monotonic() - started)
            self.cpu.append(time.process_time() - used)

    def rest(self) -> None:
        """Leave nothing running beside what is measured next."""
        self.trainer.drain()


class Plain:
    """The loop that a person would write."""

    def __init__(self, size: Size, like: Way) -> None:
        self.model: Any = like.recipe.build()
        self.model.train()
        settings = like.trainer.spec.optimizer
        groups = [
            {
                "params": [p for p in self.model.parameters() if (p.ndim >= 2) is decayed],
                "weight_decay": decay,
            }
            for decayed, decay in ((True, settings.weight_decay), (False, 0.0))
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=True
        )
        self.data, self.done, self.size = size.data(), 0, size.sequences
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self.losses: list[float] = []

    def steps(self, count: int) -> None:
        for _ in range(count):
            started, used = time.monotonic(), time.process_time()
            batch = torch.from_numpy(self.data.batch(self.done, self.size))
            loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)
            self.losses.append(float(loss.detach()))
            self.done += 1
            self.seconds.append(time.monotonic() - started)
            self.cpu.append(time.process_time() - used)

    def rest(self) -> None:
        return


class Parts:
    """When each group's forward pass begins, and when forward and backward end, in the resident trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._times: list[float] = []
        self.forward: dict[str, list[float]] = {}
        self.backward: list[float] = []
        self.update: list[float] = []
        inner = list(blocks(trainer.model))
        for block in inner:
            block.register_forward_pre_hook(lambda *_: self._mark())
        inner[-1].register_forward_hook(lambda *_: self._mark())
        self._wrap()

    def _mark(self) -> None:
        self._times.append(time.monotonic())

    def _wrap(self) -> None:
        trainer: Any = self.trainer
        measured, step = trainer._measured, trainer.optimizer.step

        def timed(part: Any) -> Any:
            self._times = []
            self._mark()
            return measured(part)

        def stepped(*given: Any) -> Any:
            begun = time.monotonic()
            names = [flat.group.name for flat in self.trainer.groups]
            marks = self._times
            own = [b - a for a, b in pairwise(marks)]  # embedding, and each block
            for name, seconds in zip(names, own, strict=False):
                self.forward.setdefault(name, []).append(seconds)
            self.backward.append(begun - marks[-1])  # and the head's forward pass
            result = step(*given)
            self.update.append(time.monotonic() - begun)
            return result

        trainer._measured, trainer.optimizer.step = timed, stepped

    def forget(self) -> None:
        for values in (*self.forward.values(), self.backward, self.update):
            del values[:-1]

    def compute_s(self, newest: int = 0) -> float:
        """Forward and backward, of all steps or of the newest ones."""
        return sum(statistics.median(each[-newest:]) for each in (*self.forward.values(), self.backward))

    def work(self, plan: Any, demand: Any) -> list[GroupWork]:
        """Medians, as the formulas take them."""
        groups = []
        backward = statistics.median(self.backward)
        for group in demand.groups:
            forward = statistics.median(self.forward.get(group.name, [0.0]))
            sizes = tuple(chunk_sizes(group.parameters, plan.chunk_parameters))
            last = group.name == demand.groups[-1].name
            groups.append(GroupWork(forward, backward if last else 0.0, sizes, group.name in plan.offloaded))
        return groups


def overlap(given: argparse.Namespace) -> dict[str, Any]:
    """The rows on the emulated device and link."""
    size, pace = Size(256, given.layers, 64, 2, given.dtype), Pace(given.block_ms / 1000)
    resident = Way(size, "resident", "blocking", 0, pace)
    ways = {"resident": resident}
    parts = Parts(resident.trainer)
    for name, schedule, room in (
        ("blocking", "blocking", 0.0),
        ("gated", "gated", given.room),
        ("gated, three slots", "gated", 0.0),
    ):
        ways[name] = Way(size, "optimizer-offload", schedule, room, pace)
    for way in ways.values():
        way.steps(3)
        way.rest()
    rows: dict[str, Any] = {}
    for number, ratio in enumerate(given.ratios):
        link = ways["blocking"].travelling_bytes / (parts.compute_s(6) * ratio)
        for name in LINKED:
            ways[name].set_link(link)
        parts.forget()
        predicted = predictions(ways, link)
        times = take_turns(ways, given, f"ratio {ratio:g} ({number + 1} of {len(given.ratios)})")
        rows[f"ratio {ratio:g}"] = row(ways, parts, times, link, predicted)
    count = min(len(way.losses) for way in ways.values())
    for name, way in ways.items():
        assert way.losses[:count] == resident.losses[:count], f"{name}: other losses"
    copies = [stream for name in LINKED for stream in (ways[name].load, ways[name].store)]
    return {
        "rows": rows,
        "slots": {name: ways[name].plan.slots for name in LINKED},
        "chunks": len(ways["gated"].trainer.optimizer.chunks),
        "blockMilliseconds": given.block_ms,
        "late": {
            "passes": round(pace.late / pace.passes, 4),
            "copies": round(sum(each.late for each in copies) / sum(each.copies for each in copies), 4),
        },
        "equalSteps": count,
    }


def resident_beside_plain(given: argparse.Namespace) -> dict[str, Any]:
    """The engine and the loop that a person would write, without any pacing."""
    size = Size(512, 8, 128, 4, given.dtype)
    engine = Way(size, "resident", "blocking", 0, None)
    ways: dict[str, Any] = {"plain": Plain(size, engine), "resident": engine}
    for way in ways.values():
        way.steps(2)
    times = take_turns(ways, given, "resident beside plain")
    equal = ways["plain"].losses == engine.losses
    assert equal or given.dtype != "float32", "other losses than the plain loop"
    return {
        "plainToResidentCpuSeconds": pairs(times, "plain", "resident", "cpuSeconds"),
        "plainToResidentSeconds": pairs(times, "plain", "resident", "seconds"),
        "equalLosses": equal,
        "turns": times,
    }


def pairs(times: dict[str, Row], of: str, to: str, measure: str) -> float:
    """The median of the turns' ratios."""
    both = zip(times[of][measure], times[to][measure], strict=True)
    return round(statistics.median(a / b for a, b in both), 3)


def predictions(ways: dict[str, Any], link: float) -> dict[str, float]:
    """Seconds per step of each way, from what the engine's probe measures now."""

    def streams() -> Streams:
        load, store = Link("load"), Link("store")
        load.bytes_per_s = store.bytes_per_s = link
        return Streams(load, CallerStream(), CallerStream(), store)

    found = {}
    with TemporaryDirectory() as folder:
        for name in ("resident", *LINKED):
            way = ways[name]
            spec, plan, demand = way.trainer.spec, way.plan, way.demand
            probed = probe.measure(spec, way.recipe, demand, plan, CPU, Path(folder), streams)
            found[name] = predict(plan, demand, probed, divide(1, 1, 1, "fast")).step_s
    return found


def take_turns(ways: dict[str, Any], given: argparse.Namespace, what: str) -> dict[str, Row]:
    """Seconds and CPU seconds per step of each way, one number per turn."""
    found: dict[str, Row] = {name: {"seconds": [], "cpuSeconds": []} for name in ways}
    started = time.monotonic()
    for turn in range(given.turns):
        for name, way in ways.items():
            way.seconds, way.cpu = [], []
            way.steps(given.steps)
            way.rest()
            found[name]["seconds"].append(statistics.mean(way.seconds[FILLING:]))
            found[name]["cpuSeconds"].append(statistics.mean(way.cpu[FILLING:]))
        left = (time.monotonic() - started) / (turn + 1) * (given.turns - turn - 1)
        show(f"{what}, {left:.0f} s left", turn + 1, given.turns)
    return found


def row(
    ways: dict[str, Any], parts: Parts, times: dict[str, Row], link: float, predicted: dict[str, float]
) -> dict[str, Any]:
    """Medians over the turns, and ratios of each turn's pair."""
    found: dict[str, Any] = {
        name: {key: round(statistics.median(values), 4) for key, values in each.items()}
        for name, each in times.items()
    }
    for name, seconds in predicted.items():
        found[name]["predictedSeconds"] = round(seconds, 4)
        found[name]["predictedToMeasured"] = round(seconds / found[name]["seconds"], 3)
    for name in LINKED:
        way = ways[name]
        groups = parts.work(way.plan, way.demand)
        each = way.demand.state_bytes_per_parameter
        rates = Rates(link, link, way.demand.parameters / statistics.median(parts.update))
        bound = step_time(groups, way.plan.slots, each, rates, gated=name != "blocking").seconds
        found[name]["boundSeconds"] = round(bound, 4)
        found[name]["toBound"] = round(found[name]["seconds"] / bound, 3)
    return {
        "linkGBPerSecond": round(link / 1e9, 4),
        "updateToCompute": round(ways["blocking"].travelling_bytes / link / parts.compute_s(), 3),
        "ways": found,
        "blockingToGated": pairs(times, "blocking", "gated", "seconds"),
        "blockingToGatedThreeSlots": pairs(times, "blocking", "gated, three slots", "seconds"),
        "turns": {name: each["seconds"] for name, each in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--block-ms", type=float, default=40, help="forward pass of a block on the emulated device"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--room", type=float, default=0.5, help="share of the state for which slots fit")
    parser.add_argument("--ratios", type=float, nargs="+", default=[1.0, 0.5, 2.0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=5, help="of each way in a turn; the first two are not counted"
    )
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    document = {
        "command": "python benchmarks/training_overlap.py " + " ".join(sys.argv[1:]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, shared; one thread computes",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "loadAverageBefore": os.getloadavg(),
        **overlap(given),
        "resident": resident_beside_plain(given),
        "loadAverage": os.getloadavg(),
    }
    text = json.dumps(document, indent=2) + "\n"
    if given.output is not None:
        given.output.write_text(text)
    sys.stdout.write("\n" + text)


if __name__ == "__main__":
    main()
