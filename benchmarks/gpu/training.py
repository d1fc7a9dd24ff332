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
    bf16, int8  as offload, with AdamW's moments in this format: fewer bytes, and other numbers
    stream      the engine, weights too on the host, which updates them; two blocks at a time on the device
    zeroth      no backward pass: two forward passes at moved weights, with the weights on the device
    zeroth-stream   the same with the weights on the host, which updates them
    fsdp2       for comparison: torch's fully_shard with CPUOffloadPolicy on a GPU, AdamW(fused=True) on the host

All losses and final weights but the peer's and those of reduced moments must be equal bit for bit, and those without a
backward pass to each other;
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

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from busbar.workloads.machine.limits import host_limit_bytes
from busbar.workloads.machine.streams import CallerStream, Streams, make_repeatable, open_streams
from busbar.workloads.training.arena import Arena
from busbar.workloads.training.async_checkpoint import Saver
from busbar.workloads.training.block_slots import BlockSlots
from busbar.workloads.training.checkpoint import CheckpointFolder
from busbar.workloads.training.choice import make_plan
from busbar.workloads.training.gates import Gates
from busbar.workloads.training.groups import FlatGroup, bind, make_groups, rebind_gradients
from busbar.workloads.training.input_swap import InputSwap
from busbar.workloads.training.optimizer import OffloadedAdamW
from busbar.workloads.training.plan import AUTO, RECOMPUTE, SWAP, Demand, MemoryLimits, aligned, lay_out
from busbar.workloads.training.recompute import recompute_blocks
from busbar.workloads.training.settings import BF16, EXACT, INT8, OptimizerSpec
from busbar.workloads.training.snapshot import Snapshot
from busbar.workloads.training.step_clock import StepClock
from busbar.workloads.training.streamed_plan import PARAMETER_OFFLOAD
from busbar.workloads.training.zeroth_order import Perturbation, ZerothOrder

REDUCED = {BF16, INT8}
ZEROTH = ("zeroth", "zeroth-stream")
SETTINGS = OptimizerSpec(
    learning_rate=3e-4,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.1,
    warmup_steps=0,
    schedule="constant",
    gradient_clip=1.0,
)


@dataclass(frozen=True)
class Shape:
    """Dimensions of the decoder and of one step."""

    layers: int
    width: int
    inner: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int
    steps: int
    warm_up: int


SHAPES = {
    "miniature": Shape(2, 64, 176, 4, 512, 32, 4, 6, 2),
    "100m": Shape(12, 768, 2048, 12, 32000, 1024, 8, 30, 5),
    "1b": Shape(22, 2048, 5632, 32, 32000, 2048, 4, 20, 5),
    "3b": Shape(28, 3072, 8192, 24, 32000, 4096, 1, 12, 3),
    "13b": Shape(40, 5120, 13824, 40, 32000, 4096, 4, 8, 3),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PEERS = {"fsdp2"}  # their numerics differ from ours
AGAIN = {"recompute": RECOMPUTE, "swap": SWAP}
ACTIVATION_BYTES = 20 * 2**30  # kept free by `auto` on a GPU; the engine itself measures this on fake tensors


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)
        return x * scale * self.weight


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.before_attention, self.before_mlp = Norm(width), Norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, width, bias=False)

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        mixed = scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, dim=-1)
        result: torch.Tensor = x + self.down(silu(gate) * up)
        return result


def rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    cosine, sine = rotation
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss of predicting each next token."""
        x = self.embedding(tokens)
        size = self.shape.width // self.shape.heads
        inverse = 10000.0 ** (-torch.arange(0, size, 2, device=x.device) / size)
        angles = torch.arange(tokens.shape[1], device=x.device)[:, None] * inverse
        rotation = (angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        for block in self.blocks:
            x = block(x, rotation)
        logits = nn.functional.linear(self.norm(x), self.embedding.weight)[:, :-1]
        loss: torch.Tensor = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        return loss


def make_model(shape: Shape, home: torch.device, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A decoder whose weights lie on `home`. They are drawn on `device`, so they are the same wherever they lie: the generators
    of a CPU and a GPU give different numbers."""
    with torch.device("meta"):
        model = Decoder(shape).to(dtype)
    model.to_empty(device=home)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0)
            else:
                drawn = torch.empty(parameter.shape, dtype=dtype, device=device)
                parameter.copy_(drawn.normal_(std=0.02, generator=generator))
    return model


class Plain:
    """The reference: torch's own optimizer, without Busbar."""

    name = "plain"

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.narrow = list(model.parameters())
        self.masters = self.narrow
        if self.narrow[0].dtype != torch.float32:
            self.masters = [nn.Parameter(p.detach().float()) for p in self.narrow]
        matrices = [p for p in self.masters if p.ndim >= 2]
        vectors = [p for p in self.masters if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": SETTINGS.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=SETTINGS.learning_rate,
            betas=SETTINGS.betas,
            eps=SETTINGS.eps,
            fused=True,
        )

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        self.model.zero_grad(set_to_none=True)
        loss: torch.Tensor = self.model(tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.narrow, SETTINGS.gradient_clip or 0.0)
        pairs = [(m, p) for m, p in zip(self.masters, self.narrow, strict=True) if m is not p]
        for master, parameter in pairs:
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in pairs:
                parameter.copy_(rounded(master))
                master.grad = None
        return loss.detach()

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        return


def rounded(master: torch.Tensor) -> torch.Tensor:
    """The nearest bfloat16, half away from zero: the rounding of the engine's split master weights."""
    bits = master.view(torch.int32)
    return (((bits + 0x8000) >> 16) << 16).view(torch.float32).bfloat16()


class FullyShard:
    """torch's FSDP2 on one process: parameters, gradients and optimizer on the host where there is a GPU."""

    name = "fsdp2"

    def __init__(self, model: Decoder, device: torch.device, dtype: torch.dtype) -> None:
        import tempfile

        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        self.model, self._distributed = model, distributed
        on_gpu = device.type == "cuda"
        if not distributed.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
            place = f"file://{tempfile.mkdtemp()}/store"
            distributed.init_process_group(backend, init_method=place, rank=0, world_size=1)
        mesh = init_device_mesh(device.type, (1,))
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        offload = CPUOffloadPolicy() if on_gpu else OffloadPolicy()
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=offload)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=SETTINGS.learning_rate, betas=SETTINGS.betas, eps=SETTINGS.eps, fused=True
        )

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss: torch.Tensor = self.model(tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), SETTINGS.gradient_clip or 0.0)
        self.optimizer.step()
        return loss.detach()

    def facts(self) -> dict[str, Any]:
        return {"decaysVectorsToo": True}

    def close(self) -> None:
        self._distributed.destroy_process_group()


class Engine:
    """Busbar's optimizer with a given share of the groups' state on the host."""

    def __init__(
        self,
        name: str,
        model: Decoder,
        device: torch.device,
        offloaded: Callable[[int], int] | None,
        dtype: str = "float32",
    ) -> None:
        self.name, self.model, self.gated = name, model, name != "blocking"
        groups = make_groups(model)
        on_gpu = device.type == "cuda"
        kept, streamed = ACTIVATION_BYTES if on_gpu else 0, name == "stream"
        demand = Demand(
            tuple(group.size for group in groups),
            dtype,
            1,
            kept,
            activations=AGAIN.get(name, AUTO),
            state=name if name in REDUCED else EXACT,
            recompute_bytes=kept if streamed or name in AGAIN else None,
            swap_bytes=kept if name in AGAIN else None,
            swapped_bytes=_inputs(model.shape, dtype),
        )
        if streamed:
            limits = MemoryLimits(None, host_limit_bytes(), device_is_host=not on_gpu)
            self.plan = make_plan(demand, limits, PARAMETER_OFFLOAD)
        elif offloaded is None:
            whole = torch.cuda.get_device_properties(device).total_memory if on_gpu else None
            limits = MemoryLimits(whole, host_limit_bytes(), device_is_host=not on_gpu)
            self.plan = make_plan(demand, limits, "auto")
        else:
            mode = "optimizer-offload" if offloaded(len(groups)) else "resident"
            limits = MemoryLimits(None, host_limit_bytes(), device_is_host=not on_gpu)
            self.plan = lay_out(demand, limits, mode, offloaded(len(groups)))
        self.device_arena = Arena("device", self.plan.device, device, reserved=("activations",))
        self.host_arena = Arena("host", self.plan.host, torch.device("cpu"))
        if device.type == "cuda":
            self.host_arena.pin()
        home = self.host_arena if streamed else self.device_arena
        self.groups: tuple[FlatGroup, ...] = bind(groups, home, DTYPES[dtype])
        self.streams: Streams = open_streams(device, gated=self.gated, on_host=streamed)
        self.blocks: BlockSlots | None = None
        if streamed:
            arenas = self.device_arena, self.host_arena
            self.blocks = BlockSlots(model, self.groups, self.plan, *arenas, self.streams, StepClock(device))
            self.blocks.refresh()
        self.swap: InputSwap | None = None
        if name == "swap":
            room = self.host_arena.carve("activations", self.plan.host["activations"], torch.uint8)
            own = open_streams(device, gated=False)
            self.swap = InputSwap(room, model.shape.layers - 1, own, StepClock(device))
        if name in AGAIN:
            recompute_blocks(model, self.swap)
        self.optimizer = OffloadedAdamW(
            self.groups, SETTINGS, self.plan, home, self.host_arena, self.streams, fused=True
        )
        if self.blocks is None:
            self.gates = Gates(model, self.groups, self.streams.compute)
        else:
            self.gates = Gates(model, self.groups, CallerStream(), self.blocks.arrive)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        rebind_gradients(self.groups)
        if self.gated:
            self.optimizer.pipeline.prefetch()
        loss: torch.Tensor = self.model(tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.blocks is not None:
            self.blocks.end_backward()
            self.blocks.collect()
        _, updated = self.optimizer.step(SETTINGS.learning_rate)
        if self.blocks is not None:
            self.blocks.updated(updated)
        self.gates.shut(updated)
        if not self.gated:
            self.drain()
        return loss.detach()

    def drain(self) -> None:
        self.gates.reach_all()
        self.optimizer.pipeline.drain()

    def facts(self) -> dict[str, Any]:
        moved = self.optimizer.pipeline.loaded_bytes + self.optimizer.pipeline.stored_bytes
        if self.blocks is not None:
            moved = self.blocks.traffic.loaded + self.blocks.traffic.collected
        inputs = 0 if self.swap is None else 2 * self.swap.used  # there and back
        return {
            "plan": self.plan.to_json(),
            "chunks": len(self.optimizer.chunks),
            "linkBytesPerStep": inputs + moved // max(1, self.optimizer.updates),
        }

    def close(self) -> None:
        if self.swap is not None:
            self.swap.close()
        self.streams.close()
        self.host_arena.unpin()


def _inputs(shape: Shape, dtype: str) -> int:
    """Bytes of the inputs of all blocks but the last."""
    one = shape.batch * shape.sequence * shape.width * DTYPES[dtype].itemsize
    return (shape.layers - 1) * aligned(one)


class Zeroth:
    """Busbar's training without a backward pass."""

    def __init__(self, name: str, model: Decoder, device: torch.device, dtype: str) -> None:
        self.name, self.model = name, model
        groups, on_gpu, streamed = make_groups(model), device.type == "cuda", name == "zeroth-stream"
        sizes, kept = tuple(group.size for group in groups), ACTIVATION_BYTES if on_gpu else 0
        limits = MemoryLimits(None, host_limit_bytes(), device_is_host=not on_gpu)
        demand = Demand(sizes, dtype, 1, kept, zeroth_order=True)
        self.plan = make_plan(demand, limits, PARAMETER_OFFLOAD if streamed else "resident")
        self.device_arena = Arena("device", self.plan.device, device, reserved=("activations",))
        self.host_arena = Arena("host", self.plan.host, torch.device("cpu"))
        if on_gpu:
            self.host_arena.pin()
        home = self.host_arena if streamed else self.device_arena
        self.groups = bind(groups, home, DTYPES[dtype], gradients=False)
        self.streams = open_streams(device, gated=False, on_host=streamed)
        self.perturbation = Perturbation(model, self.groups, self.plan, self.device_arena)
        self.blocks: BlockSlots | None = None
        self.gates = Gates(model, self.groups, self.streams.compute)
        if streamed:
            arenas = self.device_arena, self.host_arena
            self.blocks = BlockSlots(model, self.groups, self.plan, *arenas, self.streams, StepClock(device))
            self.blocks.refresh()
            self.gates = Gates(model, self.groups, CallerStream(), self.blocks.arrive)
        self.perturbation.watch(model)
        self.optimizer = ZerothOrder(self.groups, SETTINGS, self.plan, home, self.streams, 0)
        self.done = 0

    @torch.no_grad()
    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        losses = []
        for distance in (SETTINGS.perturbation, -SETTINGS.perturbation):
            self.gates.reach_all()
            with self.perturbation.along(self.optimizer.direction(self.done), distance):
                losses.append(self.model(tokens))
        self.optimizer.compare(self.done, *losses)
        _, updated = self.optimizer.step(SETTINGS.learning_rate)
        if self.blocks is not None:
            self.blocks.updated(updated)
        self.gates.shut(updated)
        self.done += 1
        return torch.stack(losses).mean()

    def drain(self) -> None:
        self.gates.reach_all()
        self.optimizer.drain()
        if self.blocks is not None:
            self.blocks.collect()

    def facts(self) -> dict[str, Any]:
        moved = 0 if self.blocks is None else self.blocks.traffic.loaded
        return {"plan": self.plan.to_json(), "linkBytesPerStep": moved // max(1, self.done)}

    def close(self) -> None:
        self.streams.close()
        self.host_arena.unpin()


@dataclass(frozen=True)
class Outcome:
    name: str
    losses: list[float]
    weights: list[torch.Tensor]  # on the host
    report: dict[str, Any]


def make(
    name: str, model: Decoder, device: torch.device, dtype: str = "float32"
) -> Plain | Engine | FullyShard | Zeroth:
    shares: dict[str, Callable[[int], int] | None] = {
        "auto": None,
        "resident": lambda groups: 0,
        "half": lambda groups: groups // 2,
        "recompute": lambda groups: 0,
        "swap": lambda groups: 0,
        "offload": lambda groups: groups,
        BF16: lambda groups: groups,
        INT8: lambda groups: groups,
        "blocking": lambda groups: groups,
        "stream": lambda groups: groups,
    }
    if name in ZEROTH:
        return Zeroth(name, model, device, dtype)
    if name == "fsdp2":
        return FullyShard(model, device, DTYPES[dtype])
    return Plain(model) if name == "plain" else Engine(name, model, device, shares[name], dtype)


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
        if outcome.name not in PEERS | REDUCED:
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
