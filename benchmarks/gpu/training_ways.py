"""The model and the ways of training it that `training.py` compares on a GPU. Needs only torch, and Busbar's engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from busbar.workloads.machine.limits import host_limit_bytes
from busbar.workloads.machine.streams import CallerStream, Streams, open_streams
from busbar.workloads.training import tiled_mlp
from busbar.workloads.training.arena import Arena
from busbar.workloads.training.block_slots import BlockSlots
from busbar.workloads.training.choice import make_plan
from busbar.workloads.training.demand import AUTO, RECOMPUTE, SWAP, Demand, aligned
from busbar.workloads.training.gates import Gates
from busbar.workloads.training.groups import FlatGroup, bind, make_groups, rebind_gradients
from busbar.workloads.training.input_swap import InputSwap
from busbar.workloads.training.optimizer import OffloadedAdamW
from busbar.workloads.training.plan import MemoryLimits, lay_out
from busbar.workloads.training.recompute import recompute_blocks
from busbar.workloads.training.settings import BF16, EXACT, INT8, OptimizerSpec
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
AGAIN = {"recompute": RECOMPUTE, "swap": SWAP, "tiles": RECOMPUTE}
ROUNDED = {"tiles", "sums"}  # their sums are rounded otherwise than a plain loop's
ACTIVATION_BYTES = 20 * 2**30  # kept free by `auto` on a GPU; the engine itself measures this on fake tensors


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)
        return x * scale * self.weight


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        result: torch.Tensor = self.down(silu(gate) * up)
        return result


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.before_attention, self.before_mlp = Norm(width), Norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = Mlp(width, shape.inner)

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        mixed = scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        result: torch.Tensor = x + self.mlp(self.before_mlp(x))
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
        sums = torch.float32 if name == "sums" else DTYPES[dtype]
        for parameter in model.parameters():
            parameter.grad_dtype = sums
        if name == "tiles":
            tiled_mlp.tile(model)
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
            gradient_dtype="float32" if name == "sums" else dtype,
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
        self.groups: tuple[FlatGroup, ...] = bind(groups, home, DTYPES[dtype], sums=sums)
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


def make(
    name: str, model: Decoder, device: torch.device, dtype: str = "float32"
) -> Plain | Engine | FullyShard | Zeroth:
    shares: dict[str, Callable[[int], int] | None] = {
        "auto": None,
        "resident": lambda groups: 0,
        "half": lambda groups: groups // 2,
        "recompute": lambda groups: 0,
        "swap": lambda groups: 0,
        "tiles": lambda groups: 0,
        "sums": lambda groups: 0,
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
