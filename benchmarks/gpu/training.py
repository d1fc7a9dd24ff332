"""The training engine's offload on this machine's GPU: bit-equality first, then speed. Needs only torch.

    python benchmarks/gpu/training.py --output benchmarks/results/gpu/training.json
    python benchmarks/gpu/training.py --shape miniature        the default on a machine without a GPU
    python benchmarks/gpu/training.py --shape 3b --dtype bfloat16 --ways offload,fsdp2
    python benchmarks/gpu/training.py --shape 13b --dtype bfloat16 --ways auto --checkpoint /scratch

One decoder (RMSNorm, rotary attention, SwiGLU, tied head; random tokens) is trained in several ways with one seed:

    plain       torch.optim.AdamW(fused=True), a loop without Busbar; fp32 masters under bfloat16
    resident    the engine, state on the device
    half        the engine, the state of the last groups on the host
    offload     the engine, all state on the host, streamed through staging slots
    blocking    the same, but each step waits for its updates; in all others they run beside the next forward pass
    auto        the engine, as much state on the host as this device and host need
    recompute   the engine, state on the device, activations of blocks computed again in backward
    swap        the same, inputs of blocks on the host until then
    tiles       as recompute, with the MLPs of the blocks in tiles of tokens: less memory, and other roundings
    sums        as resident, with gradients in float32: under bfloat16 other roundings
    bf16, int8  as offload, with AdamW's moments in this format: fewer bytes, and other numbers
    stream      the engine, weights too on the host, which updates them; two blocks at a time on the device
    zeroth      no backward pass: two forward passes at moved weights, with the weights on the device
    zeroth-stream   the same with the weights on the host, which updates them
    fsdp2       for comparison: torch's fully_shard with CPUOffloadPolicy on a GPU, AdamW(fused=True) on the host

All losses and final weights but the peer's and those of reduced moments, tiles and sums must be equal bit for bit, and those
without a backward pass to each other; of tiles and sums it is said how far losses are from the first way's;
otherwise the script says where they differ and exits 1. Those of the streamed ways must be on a CPU only: on a GPU they
update with other kernels than the others, those of the host, and where they differ is said alone. The result begins with
this machine's limits: matrix product, both directions of the link alone and together, copies in host memory. With
--checkpoint FOLDER each engine writes one checkpoint there while a step runs, beside torch.save and fsync of the same
state. Then tokens per second of each (median of the steps after warm-up, each until its loss is on the host), peak device
memory, and the bytes that crossed the link. The result is JSON with the command, versions, date and device. Without a GPU the
same code runs a miniature on the CPU and the result says so: then only the equality is meaningful, not the times.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # repeatable matrix products; before torch starts
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from benchmarks.gpu.training_ways import (
    DTYPES,
    PEERS,
    REDUCED,
    ROUNDED,
    SHAPES,
    ZEROTH,
    Engine,
    Shape,
    Zeroth,
    make,
    make_model,
)

from busbar.workloads.machine.streams import make_repeatable
from busbar.workloads.training.arena import Arena
from busbar.workloads.training.async_checkpoint import Saver
from busbar.workloads.training.checkpoint import CheckpointFolder
from busbar.workloads.training.snapshot import Snapshot


@dataclass(frozen=True)
class Outcome:
    name: str
    losses: list[float]
    weights: list[torch.Tensor]  # on the host
    report: dict[str, Any]


def batches(shape: Shape, device: torch.device) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(shape.steps):
        yield torch.randint(shape.vocabulary, (shape.batch, shape.sequence), generator=generator).to(device)


def limits_of(device: torch.device) -> dict[str, float]:
    """The machine's limits, to which the ways are compared."""
    on_gpu = device.type == "cuda"
    size = 8192 if on_gpu else 512
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    found = {"matmulTflops": 2 * size**3 / _best(device, lambda: left @ left) / 1e12}
    count = (1024 if on_gpu else 16) * 2**20
    here = torch.zeros(count, dtype=torch.uint8)
    other = torch.zeros(count, dtype=torch.uint8)
    found["hostCopyGBps"] = 2 * count / _best(torch.device("cpu"), lambda: other.copy_(here)) / 1e9
    if on_gpu:
        arena = Arena("limits", {"up": count, "down": count}, torch.device("cpu"))
        arena.pin()
        up, down = arena.carve("up", count, torch.uint8), arena.carve("down", count, torch.uint8)
        there, back = (torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2))
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

        def both() -> None:
            with torch.cuda.stream(side):
                there.copy_(up, non_blocking=True)
            down.copy_(back, non_blocking=True)

        found["hostToDeviceGBps"] = count / _best(device, lambda: there.copy_(up, non_blocking=True)) / 1e9
        found["deviceToHostGBps"] = count / _best(device, lambda: down.copy_(back, non_blocking=True)) / 1e9
        found["bothWaysGBps"] = 2 * count / _best(device, both) / 1e9
        arena.unpin()
    return {name: round(value, 3) for name, value in found.items()}


def _best(device: torch.device, work: Callable[[], object], times: int = 5) -> float:
    """Seconds of the fastest of a few repetitions, after one to warm up."""
    seconds = []
    for _ in range(times + 1):
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def checkpoint(way: Engine, tokens: torch.Tensor, folder: Path, device: torch.device) -> dict[str, Any]:
    """One checkpoint while a step runs, and torch.save of the same state with fsync, which blocks throughout."""
    target = folder / f"busbar-{way.name}"
    shutil.rmtree(target, ignore_errors=True)
    snapshot = Snapshot(way.groups, way.optimizer, way.host_arena, way.plan)
    saver = Saver(CheckpointFolder(target, 1), snapshot, {}, lambda: None, lambda *_: None)
    _wait(device)
    started = time.perf_counter()
    saver.save(1, {})
    way.step(tokens)
    way.drain()
    saver.drain()
    durable = time.perf_counter() - started
    blocked = saver.stalled_seconds  # in `save`, and in the step's update
    state = {f"state-{index}": chunk.state for index, chunk in enumerate(way.optimizer.chunks)}
    state |= {str(index): flat.weights for index, flat in enumerate(way.groups)}
    started = time.perf_counter()
    torch.save(state, target / "torch.pt")
    with (target / "torch.pt").open("rb") as file:
        os.fsync(file.fileno())
    saved = time.perf_counter() - started
    shutil.rmtree(target)
    return {
        "bytes": snapshot.layout.size,
        "buffers": way.plan.snapshot_blocks,
        "blocks": snapshot.blocks,
        "blockedSeconds": round(blocked, 6),
        "durableSeconds": round(durable, 6),
        "torchSaveSeconds": round(saved, 6),
        "torchSaveByBlocked": round(saved / blocked, 2),
    }


def run(
    name: str, shape: Shape, device: torch.device, dtype: str = "float32", folder: Path | None = None
) -> Outcome:
    """Train one way from the same weights on the same tokens."""
    on_gpu = device.type == "cuda"
    # The peer keeps its parameters on the host, in fp32; the engine moves them from there to the device.
    home = torch.device("cpu") if name in (*PEERS, "auto", "stream", "zeroth-stream") else device
    model = make_model(shape, home, DTYPES[dtype], device)
    way = make(name, model.float() if name in PEERS else model, device, dtype)
    if on_gpu:  # after the weights have moved into the arena, because during the move two copies exist
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    losses, seconds = [], []
    _wait(device)
    for tokens in batches(shape, device):
        started = time.perf_counter()
        losses.append(way.step(tokens).item())
        seconds.append(time.perf_counter() - started)
    if isinstance(way, Engine | Zeroth):
        way.drain()
    per_step = statistics.median(seconds[shape.warm_up :])
    report = {
        "tokensPerSecond": round(shape.batch * shape.sequence / per_step, 1),
        "stepSeconds": round(per_step, 6),
        "firstStepSeconds": round(seconds[0], 6),
        "peakDeviceBytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        **way.facts(),
    }
    weights = []
    if name not in PEERS:
        weights = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    if folder is not None and isinstance(way, Engine):
        report["checkpoint"] = checkpoint(way, tokens, folder, device)
    way.close()
    return Outcome(name, losses, weights, report)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(reference: Outcome, other: Outcome) -> dict[str, Any]:
    """Bit for bit: the first step whose loss differs, and how many parameters differ."""
    pairs = zip(reference.losses, other.losses, strict=True)
    first = next((step for step, (a, b) in enumerate(pairs, start=1) if a != b), None)
    differing = sum(not torch.equal(a, b) for a, b in zip(reference.weights, other.weights, strict=True))
    return {
        "with": reference.name,
        "lossesEqual": first is None,
        "firstDifferentStep": first,
        "weightsEqual": differing == 0,
        "differentParameters": differing,
    }


def machine(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "device": device.type,
        "gpu": None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["gpuBytes"] = torch.cuda.get_device_properties(device).total_memory
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Offload: equal, and how fast.")
    parser.add_argument("--shape", choices=SHAPES, help="default: 1b on a GPU, miniature without one")
    parser.add_argument(
        "--ways",
        default="plain,resident,half,offload,blocking,stream,fsdp2",
        help="which, in order; the first is compared with",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--checkpoint", type=Path, help="folder to measure checkpoints in")
    parser.add_argument("--output", type=Path, help="write the JSON here too")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        make_repeatable(device)
        torch.backends.cuda.matmul.allow_tf32 = False
    else:
        torch.set_num_threads(1)
        print("no GPU here: a CPU miniature of the same code; its times mean nothing", file=sys.stderr)
    chosen = options.shape or ("1b" if device.type == "cuda" else "miniature")
    limits = limits_of(device)
    outcomes: list[Outcome] = []
    for name in options.ways.split(","):
        outcome = run(name, SHAPES[chosen], device, options.dtype, options.checkpoint)
        outcomes.append(outcome)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"{name:<10} {outcome.report['tokensPerSecond']:>12,.0f} tokens/s", file=sys.stderr)
    reference = outcomes[0]
    speed = {outcome.name: outcome.report["tokensPerSecond"] for outcome in outcomes}
    ways = {o.name: {**o.report} for o in outcomes}
    for outcome in outcomes:
        if outcome.name not in PEERS:
            ratios = {peer: round(speed[outcome.name] / speed[peer], 3) for peer in PEERS & set(speed)}
            ways[outcome.name]["timesAsFastAs"] = ratios
        if outcome.name in ROUNDED:
            pairs = zip(outcome.losses, reference.losses, strict=True)
            ways[outcome.name]["lossesDifferBy"] = max(abs(one - other) for one, other in pairs)
        elif outcome.name not in PEERS | REDUCED:
            kind = [other for other in outcomes if (other.name in ZEROTH) is (outcome.name in ZEROTH)]
            ways[outcome.name]["equality"] = compare(kind[0], outcome)
    other_kernels = {"stream", "zeroth-stream"} if device.type == "cuda" else set()
    compared = [
        way["equality"] for name, way in ways.items() if "equality" in way and name not in other_kernels
    ]
    equal = all(found["lossesEqual"] and found["weightsEqual"] for found in compared)
    result = {
        "command": " ".join(["python", "benchmarks/gpu/training.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "miniature": device.type != "cuda",
        "machine": machine(device),
        "shape": {"name": chosen, **asdict(SHAPES[chosen])},
        "parameters": sum(weight.numel() for weight in reference.weights),
        "dtype": options.dtype,
        "limits": limits,
        "bitEqual": equal,
        "losses": {"first": reference.losses[0], "last": reference.losses[-1]},
        "ways": ways,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
