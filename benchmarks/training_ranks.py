"""Two ranks on one machine: the engine against torch's DistributedDataParallel, alone and with ZeroRedundancyOptimizer.

    python benchmarks/training_ranks.py --output benchmarks/results/training_ranks.json

All ways train the same model on the same tokens in the same two processes (gloo, one thread each), turn by turn, so the
load of the machine meets all alike. Reported are the medians of seconds and CPU seconds per step, each way's optimizer
state per rank, and ratios to the fastest peer. DDP and the engine add gradients up while backward runs; one way is the
engine adding them up after it.

    python benchmarks/training_ranks.py --link --output benchmarks/results/training_ranks_link.json

The engine alone, on an emulated link: an exchange of gradients or weights is done for real, and takes as long as its bytes
need at a rate at which all of a step's take --share of the seconds that the step takes without the link. --schedule gated has
updates beside the next forward pass as well. Beside the three ways stands what no order of the same work can be below: the longer of both times, and those exchanges of the first group that
nothing runs beside: its weights come first, and its gradients last.

    python benchmarks/training_ranks.py --predict --output benchmarks/results/training_ranks_predicted.json

Predicted beside measured seconds per step, of 2 and 4 ranks, for each value of `parallelism.sharding`, without a link and with
one emulated at two rates. In each round the engine's own probe measures the machine and the link, and then steps are taken,
so both meet the same load; reported are medians over the rounds, that of the ratio of each round too, whose bar is 15 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gang_here import run_gang
from benchmarks.progress import show
from benchmarks.result import circumstances, publish

from busbar.scheduler.fit.exchange import Links
from busbar.workloads.training import gang_probe, probe
from busbar.workloads.training.choice import make_plan
from busbar.workloads.training.division import divide
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.model import measure_demand, open_model
from busbar.workloads.training.packing import Packed
from busbar.workloads.training.plan import MemoryLimits
from busbar.workloads.training.prediction import Prediction, Probe, predict
from busbar.workloads.training.ranks import Gang, Pending
from busbar.workloads.training.settings import BLOCKING, GATED, GRADIENTS, OPTIMIZER, PARAMETERS
from busbar.workloads.training.trainer import Trainer

RANKS, CPU = 2, torch.device("cpu")
VOCABULARY, LENGTH, SEQUENCES = 4096, 128, 8
CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "tie_word_embeddings": True,
    "max_position_embeddings": LENGTH,
}
MODEL = CONFIG | {"vocab_size": VOCABULARY}
SHARDINGS = (OPTIMIZER, GRADIENTS, PARAMETERS)
LINKS = {"no link": float("inf"), "100 MB/s": 100e6, "30 MB/s": 30e6}
WARM_UP, BAR = 3, 0.15
AFTER, GRADIENTS_BESIDE, BESIDE = "between the passes", "gradients alone beside them", "beside them"
Step = Callable[[int], float]  # of step n: the loss


def spec(
    order: str,
    micro_batch: int = SEQUENCES // RANKS,
    sharding: str = OPTIMIZER,
    schedule: str = BLOCKING,
) -> Any:
    return parse_engine(
        {
            "model": {"config": dict(CONFIG)},
            "tokenizer": {"train": {"vocabSize": VOCABULARY}},
            "data": {"uri": "pvc://text", "sequenceLength": LENGTH},
            "steps": 1000,
            "batch": {"sequences": SEQUENCES, "microBatch": micro_batch},
            "optimizer": {"learningRate": 1e-3, "schedule": "constant", "gradientClip": 1.0},
            "mode": "resident",
            "schedule": schedule,
            "parallelism": {"order": order, "sharding": sharding},
        }
    )


def packed() -> Packed:
    tokens = np.random.default_rng(5).integers(0, VOCABULARY, LENGTH * SEQUENCES * 200).astype(np.uint32)
    return Packed.cut(tokens, LENGTH, 0, SEQUENCES)


def engine(gang: Gang, order: str, *, early: bool = True) -> tuple[Step, int]:
    """A step of the engine, and the bytes of this rank's optimizer state."""
    trainer, state = engine_trainer(gang, order)
    if not early:
        _exchange_between(trainer)
    data = packed()
    return lambda step: trainer.step(data).loss, state


def engine_trainer(gang: Gang, order: str, schedule: str = BLOCKING) -> tuple[Trainer, int]:
    asked = spec(order, schedule=schedule)
    recipe = open_model(asked, None, VOCABULARY, 0)
    plan = make_plan(measure_demand(recipe, asked, CPU, RANKS), MemoryLimits(None, None, True), "resident")
    trainer = Trainer(asked, recipe, plan, CPU, ranks=gang)
    return trainer, sum(chunk.state.numel() * 4 for chunk in trainer.optimizer.chunks)


class Linked:
    """A gang behind a link: an exchange that has begun is over when its bytes have had their time."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self.bytes_per_s = float("inf")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gang, name)

    def start_reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor) -> Pending:
        over = time.monotonic() + (whole.nbytes - own.nbytes) / self.bytes_per_s
        return _Paced(self._gang.start_reduce_scatter(own, whole), over)

    def start_all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> Pending:
        over = time.monotonic() + (whole.nbytes - own.nbytes) / self.bytes_per_s
        return _Paced(self._gang.start_all_gather(whole, own), over)

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        self.start_all_gather(whole, own).wait()

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor) -> None:
        self.start_reduce_scatter(own, whole).wait()


class _Paced:
    def __init__(self, inner: Pending, over: float) -> None:
        self._inner, self._over = inner, over

    def wait(self) -> None:
        self._inner.wait()
        time.sleep(max(0.0, self._over - time.monotonic()))


def measure_link(gang: Gang, rounds: int, steps: int, share: float, schedule: str) -> dict[str, Any]:
    """Seconds per step with gradients and weights exchanged between the passes and beside them, with the link and without it,
    turn by turn."""
    ways = {way: _linked(gang, way, schedule) for way in (AFTER, GRADIENTS_BESIDE, BESIDE)}
    data, seconds = packed(), {(way, paced): list[float]() for way in ways for paced in (False, True)}
    groups = ways[AFTER][0].groups
    sizes = [
        (gang.size - 1) * flat.length * (flat.gradients.itemsize + flat.weights.itemsize) for flat in groups
    ]
    exchange = 0.0
    for turn in range(rounds + 1):  # the first one warms up
        for (way, paced), found in seconds.items():
            trainer, link = ways[way]
            link.bytes_per_s = sum(sizes) / exchange if paced and turn else float("inf")
            for _ in range(steps):
                gang.gather("together")
                started = time.monotonic()
                trainer.step(data)
                found.append(time.monotonic() - started)
        if not turn:
            slowest = max(gang.gather(statistics.median(seconds[AFTER, False])))
            exchange = share * slowest
            for found in seconds.values():
                found.clear()
        if gang.rank == 0:
            show("rounds", turn, rounds)
    medians = {key: statistics.median(found) for key, found in seconds.items()}
    return {
        "exchangeSeconds": exchange,
        "withoutLink": {way: medians[way, False] for way in ways},
        "secondsPerStep": {way: medians[way, True] for way in ways},
        "bound": max(medians[BESIDE, False], exchange) + exchange * sizes[0] / sum(sizes),
    }


def _linked(gang: Gang, way: str, schedule: str) -> tuple[Trainer, Linked]:
    link = Linked(gang)
    trainer, _ = engine_trainer(link, "fast", schedule)  # type: ignore[arg-type]
    if way == AFTER:
        _exchange_between(trainer)
    elif way == GRADIENTS_BESIDE:
        trainer.gates.ahead = False
    return trainer, link


def _exchange_between(trainer: Trainer) -> None:
    """Have it exchange nothing beside its passes."""
    assert trainer.spread is not None
    trainer.spread.early = None
    trainer.gates.ahead = False


def peer(gang: Gang, *, sharded: bool) -> tuple[Step, int]:
    """A step of DistributedDataParallel with fused AdamW, whose state ZeroRedundancyOptimizer may shard."""
    model = DistributedDataParallel(open_model(spec("fast"), None, VOCABULARY, 0).build())
    settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    optimizer: Any
    if sharded:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **settings)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
    data, each = packed(), SEQUENCES // RANKS

    def step(number: int) -> float:
        tokens = torch.from_numpy(data.batch(number, SEQUENCES))[gang.rank * each :][:each]
        optimizer.zero_grad(set_to_none=False)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss)

    step(0)
    inner = optimizer.optim if sharded else optimizer
    state = [value for each in inner.state.values() for value in each.values() if value.numel() > 1]
    return step, sum(value.numel() * value.itemsize for value in state)


def measure(gang: Gang, rounds: int, steps: int) -> dict[str, Any]:
    ways = {
        "engine, order fast": engine(gang, "fast"),
        "engine, order fast, exchanges between the passes": engine(gang, "fast", early=False),
        "engine, order fixed": engine(gang, "fixed"),
        "DDP, fused AdamW": peer(gang, sharded=False),
        "DDP, ZeroRedundancyOptimizer": peer(gang, sharded=True),
    }
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    number = 1
    for turn in range(rounds + 1):  # the first one warms up
        for name, (step, _) in ways.items():
            for offset in range(steps):
                started, used = time.monotonic(), time.process_time()
                step(number + offset)
                if turn:
                    wall[name].append(time.monotonic() - started)
                    cpu[name].append(time.process_time() - used)
        number += steps
        if gang.rank == 0:
            show("rounds", turn, rounds)
    return {
        name: {
            "secondsPerStep": statistics.median(wall[name]),
            "cpuSecondsPerStep": statistics.median(cpu[name]),
            "stateBytesPerRank": state,
        }
        for name, (_, state) in ways.items()
    }


class Predicted:
    """The engine on one rank with one value of `parallelism.sharding`, behind an emulated link."""

    def __init__(self, gang: Gang, sharding: str) -> None:
        self._link: Any = Linked(gang)
        self._spec = spec("fast", SEQUENCES // 4, sharding)
        self._recipe = open_model(self._spec, None, VOCABULARY, 0)
        self._demand = measure_demand(self._recipe, self._spec, CPU, gang.size)
        self._plan = make_plan(self._demand, MemoryLimits(None, None, True), "resident")
        batch = self._spec.batch
        self._division = divide(batch.sequences, batch.micro_batch, gang.size, "fast")
        self._trainer = Trainer(self._spec, self._recipe, self._plan, CPU, ranks=self._link)
        self._data = packed()
        for _ in range(WARM_UP):
            self._trainer.step(self._data)

    def measure(self, steps: int) -> dict[str, tuple[Prediction, float]]:
        """By link, the prediction and the median of the seconds of `steps` steps."""
        self._link.bytes_per_s = float("inf")
        with tempfile.TemporaryDirectory() as folder:
            probed = gang_probe.together(
                self._link, Path(folder) / "probe.json", "", lambda: self._own(Path(folder)), self._links
            )
        found = {}
        for name, rate in LINKS.items():
            self._trainer.drain()
            self._link.bytes_per_s = rate
            said = predict(self._plan, self._demand, replace(probed, links=self._links()), self._division)
            self._trainer.step(self._data)
            found[name] = said, statistics.median(self._seconds() for _ in range(steps))
        return found

    def _own(self, folder: Path) -> Probe:
        return probe.measure(self._spec, self._recipe, self._demand, self._plan, CPU, folder)

    def _links(self) -> Links:
        largest = max(group.parameters for group in self._demand.groups)
        return gang_probe.measure_links(self._link, CPU, largest, torch.float32, torch.float32, fixed=False)

    def _seconds(self) -> float:
        started = time.monotonic()
        self._trainer.step(self._data)
        return time.monotonic() - started


def measure_predictions(gang: Gang, rounds: int, steps: int) -> dict[str, Any]:
    """Predicted and measured seconds per step by sharding and link."""
    found: dict[str, Any] = {}
    engines = {sharding: Predicted(gang, sharding) for sharding in SHARDINGS}
    for turn in range(rounds):
        for sharding, engine in engines.items():
            for name, (said, seconds) in engine.measure(steps).items():
                row = found.setdefault(f"{sharding}, {name}", {"rounds": [], "sentBytes": said.sent_bytes})
                slowest = max(gang.gather(seconds))
                row["rounds"].append([said.step_s, slowest, said.exposed_s])
            if gang.rank == 0:
                show(f"{gang.size} ranks, {sharding}", turn + 1, rounds)
    return found


def rows_of(rank: dict[str, Any]) -> dict[str, Any]:
    """What one rank of a gang has found: medians over the rounds, and whether their ratio is within the bar."""
    rows = {}
    for name, found in rank.items():
        predicted, measured, exposed = zip(*found["rounds"], strict=True)
        ratios = [one / other for one, other in zip(predicted, measured, strict=True)]
        rows[name] = {
            "predictedSeconds": statistics.median(predicted),
            "measuredSeconds": statistics.median(measured),
            "exposedSeconds": statistics.median(exposed),
            "sentBytes": found["sentBytes"],
            "ratio": round(statistics.median(ratios), 3),
            "ratioOfEachRound": [round(each, 3) for each in ratios],
            "within": abs(statistics.median(ratios) - 1) <= BAR,
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5, help="of each way in a round")
    parser.add_argument("--link", action="store_true", help="the engine on an emulated link")
    parser.add_argument("--schedule", choices=(BLOCKING, GATED), default=BLOCKING, help="on that link")
    parser.add_argument("--share", type=float, default=0.4, help="of a step, that its exchanges take")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--predict", action="store_true", help="predicted beside measured seconds")
    given = parser.parse_args()
    if given.predict:
        ranks = {
            str(size): rows_of(run_gang(size, measure_predictions, given.rounds, given.steps)[0])
            for size in (2, 4)
        }
        every = [row for rows in ranks.values() for row in rows.values()]
        within = f"{sum(row['within'] for row in every)} of {len(every)}"
        publish(
            {**circumstances(), "model": MODEL, "bar": BAR, "within": within, "ranks": ranks}, given.output
        )
        return
    if given.link:
        found = run_gang(RANKS, measure_link, given.rounds, given.steps, given.share, given.schedule)
        after, gradients, beside = (
            max(each["secondsPerStep"][way] for each in found) for way in (AFTER, GRADIENTS_BESIDE, BESIDE)
        )
        bound = max(each["bound"] for each in found)
        ratios = {
            "afterToBeside": round(after / beside, 3),
            "gradientsAloneToBeside": round(gradients / beside, 3),
            "besideToBound": round(beside / bound, 3),
            "afterToBound": round(after / bound, 3),
        }
        publish({**circumstances(), "model": MODEL, "ratios": ratios, "ranks": found}, given.output)
        return
    every = run_gang(RANKS, measure, given.rounds, given.steps)
    rows = {
        name: {
            **every[0][name],
            "cpuSecondsPerStep": sum(rank[name]["cpuSecondsPerStep"] for rank in every),
            "stateBytesPerRank": [rank[name]["stateBytesPerRank"] for rank in every],
        }
        for name in every[0]
    }
    best = min(row["secondsPerStep"] for name, row in rows.items() if name.startswith("DDP"))
    least = min(row["cpuSecondsPerStep"] for name, row in rows.items() if name.startswith("DDP"))
    for row in rows.values():
        row["secondsToBestPeer"] = round(row["secondsPerStep"] / best, 3)
        row["cpuToBestPeer"] = round(row["cpuSecondsPerStep"] / least, 3)
    publish(
        {**circumstances(), "model": MODEL, "tokensPerStep": SEQUENCES * LENGTH, "ways": rows}, given.output
    )


if __name__ == "__main__":
    main()
