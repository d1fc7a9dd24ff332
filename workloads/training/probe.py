"""What this machine does with this model, measured in a few seconds before the model is made.

Blocks of a model are alike, so models of one and of two of its blocks tell the seconds of a block, and of what stands
around the blocks: forward, backward and update, with the engine's own code at the job's micro-batch. Beside it, both
directions of the link while both are used, and the disk of the checkpoints. `prediction` makes a step of it.

The numbers are kept in a file beside the checkpoints for as long as host, device, driver, torch and model stay the same.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from busbar.scheduler.fit.exchange import Link, Links
from busbar.workloads.machine.direct_file import DirectFile
from busbar.workloads.machine.streams import Streams, open_streams
from busbar.workloads.training.demand import Demand
from busbar.workloads.training.documents import two_documents
from busbar.workloads.training.groups import release_free_memory
from busbar.workloads.training.layouts import first_that_fits
from busbar.workloads.training.model import ModelRecipe
from busbar.workloads.training.plan import MIN_BLOCKS, MemoryPlan
from busbar.workloads.training.prediction import PassTimes, Probe
from busbar.workloads.training.settings import BLOCKING, EngineSpec
from busbar.workloads.training.state_file import WRITERS
from busbar.workloads.training.trainer import MicroBatch, Trainer
from busbar.workloads.training.zeroth_order import Perturbation, ZerothOrder

ENOUGH_S = 0.7  # of repetitions of one measurement
MOST_TIMES = 7
DISK_BYTES = 64 * 2**20
LINK_BYTES = 32 * 2**20


def measure(
    spec: EngineSpec,
    recipe: ModelRecipe,
    demand: Demand,
    plan: MemoryPlan,
    device: torch.device,
    folder: Path,
    streams: Callable[[], Streams] | None = None,
    rank: int = 0,
) -> Probe:
    """Run the measurements of one process. Raises ValueError where blocks cannot be timed apart, and whatever the model's code
    does.

    Args:
        folder: on the disk of the checkpoints.
        rank: tells its file there from those of the others.
        streams: makes those of the run; None: those of the device.
    """
    depth = sum(group.is_block for group in demand.groups)
    if depth == 0 or spec.freeze:
        raise ValueError("it has no list of blocks that are alike")
    if spec.sequence > 1:
        raise ValueError("its ranks share sequences, and a part of the model has none to share them with")
    gc.freeze()  # what is there already need not be searched when the small models are freed
    try:
        one = _times(spec, recipe, demand, plan, device, 1)
        two = one if depth == 1 else _times(spec, recipe, demand, plan, device, 2)
    finally:
        gc.unfreeze()
    block = one if depth == 1 else _less(two, one)
    around = PassTimes(0.0, 0.0, 0.0, 0) if depth == 1 else _less(one, block)
    link = (float("inf"), float("inf"))
    if plan.offloaded:
        link = _link(plan, demand, device, streams or (lambda: open_streams(device, gated=plan.gated)))
    return Probe(block, around, *link, _disk(folder, min(DISK_BYTES, plan.checkpoint_bytes), rank))


def read(path: Path, key: str) -> Probe | None:
    """The probe of `key` that the file `path` has; None: it has another one, or none."""
    try:
        found = json.loads(path.read_text())
        if found["key"] != key:
            return None
        given = found["probe"]
        parts = {name: PassTimes(**given[name]) for name in ("block", "around")}
        links = given["links"]
        if links is not None:
            links = Links(Link(**links["gradients"]), Link(**links["weights"]), links["busy"])
        return Probe(**{**given, **parts, "links": links})
    except (OSError, ValueError, KeyError, TypeError):
        return None  # it is measured


def write(path: Path, key: str, probe: Probe) -> None:
    """Keep `probe` in the file `path`. Raises OSError."""
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps({"key": key, "probe": asdict(probe)}))
    unfinished.replace(path)


def key_of(
    spec: EngineSpec,
    recipe: ModelRecipe,
    plan: MemoryPlan,
    device: torch.device,
    threads: int,
    peers: Sequence[str] = (),
) -> str:
    """What the numbers depend on, as a digest; `peers` are the hosts of a gang's ranks."""
    gpu = [torch.cuda.get_device_name(device), torch.version.cuda] if device.type == "cuda" else []
    facts = [
        platform.node(),
        platform.processor(),
        torch.__version__,
        *gpu,
        threads,
        recipe.config.to_dict(),
        str(spec.adapter),
        spec.dtype,
        spec.batch.micro_batch,
        spec.data.sequence_length,
        spec.data.packing,
        plan.activations,
        plan.mode,
        plan.chunk_parameters,
        plan.sharding,
        spec.order,
        spec.optimizer.name,
        list(peers),
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _less(larger: PassTimes, smaller: PassTimes) -> PassTimes:
    """What is in `larger` beside `smaller`; not negative, whatever the noise."""
    return PassTimes(
        max(0.0, larger.forward_s - smaller.forward_s),
        max(0.0, larger.backward_s - smaller.backward_s),
        max(0.0, larger.update_s - smaller.update_s),
        larger.parameters - smaller.parameters,
    )


def _times(
    spec: EngineSpec, recipe: ModelRecipe, demand: Demand, plan: MemoryPlan, device: torch.device, blocks: int
) -> PassTimes:
    """A small model's seconds, all on the device; the medians of some passes."""
    config = copy.deepcopy(recipe.config)
    config.num_hidden_layers = blocks
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:blocks]
    kept = {f"block-{index}" for index in range(blocks)} | {"embedding", "head"}
    fewer = replace(
        demand,
        groups=tuple(group for group in demand.groups if group.name in kept),
        activations=plan.activations,
        schedule=BLOCKING,
        ranks=1,
        fixed_order=False,
        partial_sums=0,
    )
    laid = first_that_fits(fewer, plan.limits, "resident")
    if laid is None:
        raise ValueError(f"{blocks} of its blocks do not fit beside their state")
    buffers = MIN_BLOCKS * laid.snapshot_block_bytes
    small = replace(
        laid,
        chunk_parameters=plan.chunk_parameters,  # as large as in the run: what a chunk costs counts
        device={**laid.device, **{name: plan.device[name] for name in ("staging",) if name in plan.device}},
        host={**laid.host, "checkpoint": buffers},
        snapshot_blocks=MIN_BLOCKS,
    )
    asked = replace(spec, order="fast")
    trainer = Trainer(asked, replace(recipe, config=config, folder=None), small, device)
    try:
        return _pass_times(trainer, device)
    finally:
        trainer.close()
        del trainer
        gc.collect()  # hooks make it refer to itself
        release_free_memory()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _pass_times(trainer: Trainer, device: torch.device) -> PassTimes:
    batch, length = trainer.spec.batch.micro_batch, trainer.spec.data.sequence_length
    generator = torch.Generator().manual_seed(0)
    config: Any = trainer.model.config
    tokens = torch.randint(0, config.vocab_size, (batch, length), generator=generator)
    places = None
    if trainer.spec.data.keeps_documents_apart:
        places = two_documents(length, tokens.device).expand(batch, -1)
    part = MicroBatch(tokens, tokens, lambda mean: mean, places)
    found: list[tuple[float, float, float]] = []
    began = 0.0
    while len(found) < 2 or (len(found) <= MOST_TIMES and time.monotonic() - began < ENOUGH_S):
        times = [_now(device)]
        if trainer.perturbation is not None:
            _two_points(trainer, trainer.perturbation, part)
            times += [_now(device)] * 2
        else:
            loss = trainer.loss(part)
            times.append(_now(device))
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
            times.append(_now(device))
        trainer.optimizer.step(0.0)
        trainer.drain()
        times.append(_now(device))
        began = began or times[-1]  # the first one warms up
        found.append((times[1] - times[0], times[2] - times[1], times[3] - times[2]))
    forward, backward, update = (statistics.median(each) for each in zip(*found[1:], strict=True))
    return PassTimes(forward, backward, update, sum(flat.length for flat in trainer.groups))


def _two_points(trainer: Trainer, perturbation: Perturbation, part: MicroBatch) -> None:
    """The passes of a micro-batch where there is no backward pass."""
    assert isinstance(trainer.optimizer, ZerothOrder)
    direction, distance = trainer.optimizer.direction(0), trainer.spec.optimizer.perturbation
    found = []
    trainer.model.eval()
    for signed in (distance, -distance):
        with torch.no_grad(), perturbation.along(direction, signed):
            found.append(trainer.loss(part))
    trainer.optimizer.compare(0, *found)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()


def _link(
    plan: MemoryPlan, demand: Demand, device: torch.device, make: Callable[[], Streams]
) -> tuple[float, float]:
    """Bytes per second down and up, both at once, in copies of a chunk."""
    size = min(LINK_BYTES, demand.state_size(plan.chunk_parameters))
    pinned = device.type == "cuda"
    on_host = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    there = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = make()
    rates = []
    try:
        for count in (1, 3):  # the first one warms up
            started = _now(device)
            for _ in range(count):
                streams.load.copy(there[0], on_host[0])
                streams.store.copy(on_host[1], there[1])
            rates = [
                _rate(size * count, stream.synchronize, started) for stream in (streams.load, streams.store)
            ]
    finally:
        streams.close()
    return rates[0], rates[1]


def _rate(size: int, wait: Callable[[], object], started: float) -> float:
    wait()
    return size / max(1e-9, time.monotonic() - started)


def _disk(folder: Path, size: int, rank: int = 0) -> float:
    """Bytes per second until they are durable, written as checkpoints are. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"probe-{rank}.data"  # always the same: what a kill leaves is overwritten
    each = -(-size // WRITERS // 4096) * 4096
    room = torch.zeros(each + 4096, dtype=torch.uint8)
    data = room[-room.data_ptr() % 4096 :][:each]
    started = time.monotonic()
    try:
        with DirectFile(path, each * WRITERS) as file, ThreadPoolExecutor(WRITERS) as pool:
            for written in [pool.submit(file.write, data, index * each) for index in range(WRITERS)]:
                written.result()
        return each * WRITERS / (time.monotonic() - started)
    finally:
        path.unlink(missing_ok=True)
