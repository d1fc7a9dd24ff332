"""A checkpoint of a training run, beside torch.save with fsync, torch.distributed.checkpoint, and the raw disk.

    python benchmarks/training_checkpoint.py --output benchmarks/results/training_checkpoint.json

The engine trains a model of the given size, and turn by turn the same state (weights and both moments) is made durable
in every way, on the same disk, so that the load of the machine meets all alike:

    engine            a checkpoint while steps go on: with buffers for everything, and with two buffers
    engine, no step   the same while the loop waits for it
    torch.save        torch.save and fsync; the loop waits
    dcp               torch.distributed.checkpoint.async_save (with its own fsync), while steps go on
    raw               the same number of bytes, written to a preallocated file with O_DIRECT by four threads, and fsync

Reported are the seconds that the loop was blocked, the seconds until the checkpoint was durable, and the seconds of
the steps meanwhile beside those of steps with no checkpoint in the same turn: medians over the turns, and the worst.
On a busy machine the CPU seconds of the computing thread say more: they grow with what a checkpoint does to caches and
memory, and not with other processes.
Each of the engine's checkpoints is read back and compared with a copy of the state at its step, bit for bit.
The bars are: blocked 48 times shorter than torch.save, no step 5 % slower, durable within 1.25 times of the raw disk.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import resource
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.progress import show
from torch.distributed.checkpoint.state_dict_saver import async_save

from busbar.workloads.machine.checksum import LIBRARY
from busbar.workloads.training.async_checkpoint import Saver
from busbar.workloads.training.checkpoint import CheckpointFolder
from busbar.workloads.training.choice import make_plan
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.model import measure_demand, open_model
from busbar.workloads.training.packing import Packed
from busbar.workloads.training.plan import MIN_BLOCKS, MemoryLimits
from busbar.workloads.training.trainer import Trainer

CPU, VOCABULARY, LENGTH, MIB = torch.device("cpu"), 8192, 128, 2**20
Row = dict[str, list[float]]  # one measure of each turn


def config(layers: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "tie_word_embeddings": True,
        "max_position_embeddings": LENGTH,
    }


def make_trainer(given: argparse.Namespace, buffers: int | None) -> Trainer:
    spec = parse_engine(
        {
            "model": {"config": config(given.layers)},
            "tokenizer": {"train": {"vocabSize": VOCABULARY}},
            "data": {"uri": "pvc://text", "sequenceLength": LENGTH},
            "steps": 100_000,
            "batch": {"sequences": given.sequences, "microBatch": given.sequences},
            "optimizer": {"learningRate": 1e-4, "schedule": "constant", "gradientClip": 1.0},
            "mode": given.mode,
            "dtype": given.dtype,
        }
    )
    recipe = open_model(spec, None, VOCABULARY, 0)
    plan = make_plan(measure_demand(recipe, spec, CPU), MemoryLimits(None, None, True), given.mode)
    if buffers is not None:
        plan = replace(plan, snapshot_blocks=buffers)
    return Trainer(spec, recipe, plan, CPU)


class Engine:
    """One trainer with its folder; steps are counted on."""

    def __init__(self, given: argparse.Namespace, buffers: int | None) -> None:
        self.trainer = make_trainer(given, buffers)
        place = given.folder / f"engine-{buffers}"
        shutil.rmtree(place, ignore_errors=True)
        self.folder = CheckpointFolder(place, 1, print)
        self.saver = Saver(self.folder, self.trainer.snapshot, {}, lambda: None, lambda *_: None)
        self._copies: list[torch.Tensor] = []
        self.step_cpu: list[float] = []  # CPU seconds of each step in the thread that computes
        tokens = np.random.default_rng(5).integers(0, VOCABULARY, LENGTH * given.sequences * 50)
        self.data = Packed.cut(tokens.astype(np.uint32), LENGTH, 0, given.sequences)

    def step(self) -> float:
        started, used = time.monotonic(), time.thread_time()
        self.trainer.step(self.data)
        self.step_cpu.append(time.thread_time() - used)
        return time.monotonic() - started

    def state(self) -> dict[str, torch.Tensor]:
        """All weights and moments, as they lie in memory."""
        atoms = {f"{name}/{start}": part for name, part, start in self._atoms()}
        weights = {name: p.detach() for name, p in self.trainer.model.named_parameters()}
        return {**weights, **atoms}

    def _atoms(self) -> list[tuple[str, torch.Tensor, int]]:
        found = self.trainer.optimizer.atoms()
        return [(name, part, at.start) for name, part, at in found if isinstance(part, torch.Tensor)]

    def expected(self) -> list[tuple[str, torch.Tensor, int]]:
        """A copy of the state, as checkpoints name it, in the same memory each time: a step after 400 MB were let go
        takes them from the system again, which costs it 6 %."""
        parts = [(f"weights/{n}", p.detach().view(-1), 0) for n, p in self.trainer.model.named_parameters()]
        parts += self._atoms()
        if not self._copies:
            self._copies = [torch.empty_like(part) for _, part, _ in parts]
        for copy, (_, part, _) in zip(self._copies, parts, strict=True):
            copy.copy_(part)
        return [(name, copy, start) for copy, (name, _, start) in zip(self._copies, parts, strict=True)]

    def check(self, step: int, expected: list[tuple[str, torch.Tensor, int]]) -> None:
        loaded = self.folder.newest().checkpoint
        assert loaded is not None
        assert loaded.step == step
        for name, tensor, start in expected:
            found = torch.empty_like(tensor)
            loaded.read_into(name, start, found)
            assert torch.equal(found, tensor), f"{name} is not that of step {step}"


def engine_rows(engine: Engine, given: argparse.Namespace, rows: dict[str, Row], name: str) -> None:
    """One checkpoint while steps go on, and one while the loop waits."""
    saver, trainer = engine.saver, engine.trainer
    plain = [engine.step() for _ in range(given.steps)]
    trainer.drain()
    plain_cpu = statistics.median(engine.step_cpu[-given.steps :])
    expected, step = engine.expected(), trainer.done
    before, used = saver.stalled_seconds, cpu_seconds()
    started = time.monotonic()
    saver.save(step, trainer.counters())
    meanwhile = [time.monotonic() - started]
    with_save = meanwhile.pop()
    while saver.durable_step != step:
        meanwhile.append(engine.step())
    saver.drain()
    meanwhile[0] += with_save
    add(
        rows, name, blockedSeconds=saver.stalled_seconds - before, durableSeconds=saver.durable_seconds or 0.0
    )
    add(rows, name, stepSeconds=statistics.median(plain), worstPlainStepSeconds=max(plain))
    add(
        rows,
        name,
        stepMeanwhileSeconds=statistics.median(meanwhile),
        worstStepMeanwhileSeconds=max(meanwhile),
    )
    meanwhile_cpu = engine.step_cpu[-len(meanwhile) :]
    add(rows, name, stepCpuSeconds=plain_cpu, worstStepCpuSecondsMeanwhile=max(meanwhile_cpu))
    add(rows, name, cpuSeconds=cpu_seconds() - used - sum(meanwhile_cpu), stepsMeanwhile=len(meanwhile))
    engine.check(step, expected)
    engine.step()
    trainer.drain()
    used = cpu_seconds()
    saver.save(trainer.done, trainer.counters())
    saver.drain()
    add(
        rows,
        f"{name}, no step",
        durableSeconds=saver.durable_seconds or 0.0,
        cpuSeconds=cpu_seconds() - used,
    )


def torch_save(engine: Engine, path: Path) -> dict[str, float]:
    engine.trainer.drain()
    used, started = cpu_seconds(), time.monotonic()
    with path.open("wb") as file:
        torch.save(engine.state(), file)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.monotonic() - started
    path.unlink()
    return {"blockedSeconds": seconds, "durableSeconds": seconds, "cpuSeconds": cpu_seconds() - used}


def dcp_async(engine: Engine, given: argparse.Namespace, rows: dict[str, Row]) -> None:
    folder = given.folder / "dcp"
    plain = [engine.step() for _ in range(given.steps)]
    engine.trainer.drain()
    used, started = cpu_seconds(), time.monotonic()
    future = async_save(engine.state(), checkpoint_id=folder)
    blocked = time.monotonic() - started
    meanwhile: list[float] = []
    finished: list[float] = []
    waits: Any = future
    waits.add_done_callback(lambda _: finished.append(time.monotonic() - started))
    while not finished:
        meanwhile.append(engine.step())
    meanwhile[0] += blocked
    waits.result()
    add(rows, "dcp", blockedSeconds=blocked, durableSeconds=finished[0], stepSeconds=statistics.median(plain))
    add(rows, "dcp", worstPlainStepSeconds=max(plain), worstStepMeanwhileSeconds=max(meanwhile))
    add(rows, "dcp", stepMeanwhileSeconds=statistics.median(meanwhile), stepsMeanwhile=len(meanwhile))
    add(rows, "dcp", cpuSeconds=cpu_seconds() - used - sum(engine.step_cpu[-len(meanwhile) :]))
    shutil.rmtree(folder)


def raw(path: Path, size: int, block: int = 16 * MIB, threads: int = 4) -> dict[str, float]:
    """`size` bytes, rounded up to whole blocks of 16 MiB."""
    buffer = mmap.mmap(-1, block)
    for start in range(0, block, MIB):
        buffer[start : start + MIB] = os.urandom(MIB)
    used, started = cpu_seconds(), time.monotonic()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    os.posix_fallocate(descriptor, 0, -(-size // block) * block)
    starts, lock = iter(range(0, size, block)), threading.Lock()

    def write() -> None:
        while True:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            assert os.pwrite(descriptor, buffer, start) == block

    workers = [threading.Thread(target=write) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    os.fsync(descriptor)
    seconds = time.monotonic() - started
    os.close(descriptor)
    path.unlink()
    return {"durableSeconds": seconds, "cpuSeconds": cpu_seconds() - used}


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def add(rows: dict[str, Row], name: str, **values: float) -> None:
    for key, value in values.items():
        rows.setdefault(name, {}).setdefault(key, []).append(value)


def measure(given: argparse.Namespace) -> tuple[dict[str, Row], dict[str, Any]]:
    torch.set_num_threads(1)
    rows: dict[str, Row] = {}
    engines = {"engine": Engine(given, None), "engine, two buffers": Engine(given, MIN_BLOCKS)}
    size = engines["engine"].trainer.snapshot.layout.size
    for turn, record in turns(given.turns, rows):
        for name, engine in engines.items():
            if turn == 0:
                engine.step()  # warms up
            engine_rows(engine, given, record, name)
        add(record, "raw", **raw(given.folder / "raw", size))
        add(record, "torch.save", **torch_save(engines["engine"], given.folder / "torch.pt"))
        dcp_async(engines["engine"], given, record)
    facts = {
        "bytes": size,
        "buffers": {name: engine.trainer.plan.snapshot_blocks for name, engine in engines.items()},
        "bufferBytes": engines["engine"].trainer.plan.snapshot_block_bytes,
    }
    for engine in engines.values():
        engine.saver.close()
        engine.trainer.close()
    return rows, facts


def turns(count: int, rows: dict[str, Row]) -> Iterator[tuple[int, dict[str, Row]]]:
    """Number and rows of each turn; the first one warms up, and its rows are thrown away."""
    started = time.monotonic()
    for turn in range(count + 1):
        yield turn, (rows if turn else {})
        left = (time.monotonic() - started) / (turn + 1) * (count - turn)
        show(f"{left:.0f} s left", turn, count)


def summary(rows: dict[str, Row]) -> dict[str, Any]:
    """Medians, and the bars' ratios: of the medians, and of each turn's pair where load matters."""
    found: dict[str, Any] = {
        name: {key: round(statistics.median(values), 5) for key, values in row.items()}
        for name, row in rows.items()
    }
    for name, row in rows.items():
        if "blockedSeconds" in row and name != "torch.save":
            pairs = zip(rows["torch.save"]["blockedSeconds"], row["blockedSeconds"], strict=True)
            found[name]["blockedShorterThanTorchSave"] = round(statistics.median(a / b for a, b in pairs), 1)
        if name != "raw":
            pairs = zip(row["durableSeconds"], rows["raw"]["durableSeconds"], strict=True)
            found[name]["durableToRaw"] = round(statistics.median(a / b for a, b in pairs), 3)
        if "stepSeconds" in row:
            for key, of, to in (
                ("stepMeanwhileToPlain", "stepMeanwhileSeconds", "stepSeconds"),
                ("worstMeanwhileToWorstPlain", "worstStepMeanwhileSeconds", "worstPlainStepSeconds"),
                ("worstCpuMeanwhileToPlain", "worstStepCpuSecondsMeanwhile", "stepCpuSeconds"),
            ):
                if of not in row:
                    continue
                ratios = [a / b for a, b in zip(row[of], row[to], strict=True)]
                found[name][key] = round(statistics.median(ratios), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--layers", type=int, default=10, help="of 3.2 million parameters; 38 MiB of state each"
    )
    parser.add_argument("--sequences", type=int, default=4, help="of 128 tokens in a step")
    parser.add_argument("--mode", default="resident", choices=["resident", "optimizer-offload"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="with no checkpoint, in each turn")
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", init_method=f"file://{given.folder}/store", rank=0, world_size=1)
    rows, facts = measure(given)
    dist.destroy_process_group()
    document = {
        "command": f"python benchmarks/training_checkpoint.py --layers {given.layers} --sequences {given.sequences} "
        f"--mode {given.mode} --dtype {given.dtype} --turns {given.turns} --steps {given.steps} --folder FOLDER",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, shared; one thread computes",
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "checksums": LIBRARY},
        "loadAverage": os.getloadavg(),
        **facts,
        "ways": summary(rows),
        "turns": {
            name: {k: [round(v, 4) for v in values] for k, values in row.items()}
            for name, row in rows.items()
        },
    }
    text = json.dumps(document, indent=2) + "\n"
    if given.output is not None:
        given.output.write_text(text)
    document.pop("turns")
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
