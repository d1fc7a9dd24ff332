"""AdamW whose state is where the plan put it, with results equal to `torch.optim.AdamW` bit for bit.

State is kept in chunks of a group. A chunk's fp32 tensors lie side by side, so that one chunk is one copy:

    float32     [ m | v ]
    bfloat16    [ m | v | low half of the master weight, int16 ]

Under bfloat16 the fp32 master weight is split: the weight is its high half, rounded half away from zero, and the
low half is what that leaves, `bits - (high << 16)`, which fits into 16 bits for every finite number. So the master
is exact and takes two bytes beside the weight instead of four.

A resident chunk is updated in place. A chunk on the host goes through a ring of staging slots:

    load     wait freed[slot];    copy host -> slot;   record loaded
    compute  wait loaded;         update the slot;     record updated
    store    wait updated;        copy slot -> host;   record freed[slot]

The update itself is torch's own functional AdamW on views, for both places and on every device: the equality
is by construction, as long as pieces are cut at multiples of 1024 elements (see `groups`). The clip factor is
known before any update (see `norm`). Over several ranks the chunks are those of this rank's slices. A step whose
gradient norm is not finite changes nothing: no weight, no moment, no step count of AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from busbar.workloads.training.arena import Arena
from busbar.workloads.training.groups import FlatGroup, Piece
from busbar.workloads.training.norm import Norm, ParameterNorm, gradient
from busbar.workloads.training.plan import MemoryPlan, chunk_sizes
from busbar.workloads.training.settings import AdamW
from busbar.workloads.training.streams import Event, Stream, Streams


@dataclass(frozen=True)
class Chunk:
    """A run of one group, its pieces, and where its state lives."""

    flat: FlatGroup
    start: int  # in the group, elements
    length: int
    pieces: tuple[Piece, ...]
    state: torch.Tensor  # flat, as fp32, on the device when resident, else on the host
    resident: bool

    def parts(self, buffer: torch.Tensor, piece: Piece) -> list[torch.Tensor]:
        """m, v and, under bfloat16, the low half of the master weight of `piece` as views of `buffer`."""
        found = [buffer[part * self.length + piece.offset :][: piece.length] for part in range(2)]
        if buffer.numel() > 2 * self.length:
            low = buffer[2 * self.length :].view(torch.int16)
            found.append(low[piece.offset :][: piece.length])
        return found


def state_elements(length: int, dtype: str) -> int:
    """Size of the state of `length` parameters, in fp32 elements."""
    return 2 * length if dtype == "float32" else 2 * length + length // 2


def join(high: torch.Tensor, low: torch.Tensor, target: torch.Tensor) -> None:
    """Put the master weights of bfloat16 `high` and int16 `low` into `target`, fp32."""
    bits = target.view(torch.int32)
    bits.copy_(high.view(torch.int16)).bitwise_left_shift_(16).add_(low)


def split(master: torch.Tensor, high: torch.Tensor, low: torch.Tensor, scratch: torch.Tensor) -> None:
    """Undo `join` with new values; `master` is used up, and `scratch` has its size and type."""
    bits, rounded = master.view(torch.int32), scratch.view(torch.int32)
    rounded.copy_(bits).add_(0x8000).bitwise_right_shift_(16)
    high.view(torch.int16).copy_(rounded)
    low.copy_(bits.sub_(rounded.bitwise_left_shift_(16)))


class OffloadedAdamW:
    """The optimizer of one run. `step` is called after backward with that step's learning rate."""

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        settings: AdamW,
        plan: MemoryPlan,
        device: Arena,
        host: Arena,
        streams: Streams,
        *,
        fused: bool = True,
        norm: Norm | None = None,
    ) -> None:
        self.settings, self.streams, self.fused = settings, streams, fused
        self._norm = norm or ParameterNorm(groups)
        self.chunks = [chunk for flat in groups for chunk in _cut(flat, plan, device, host)]
        size = state_elements(plan.chunk_parameters, plan.dtype)
        self._slots = [device.carve("staging", size, torch.float32) for _ in range(plan.slots)]
        self._wide = [  # a chunk's gradient and master weights in fp32, under bfloat16
            device.carve("staging", plan.chunk_parameters, torch.float32)
            for _ in range(0 if plan.dtype == "float32" else 2)
        ]
        self.updates = 0  # AdamW's step count: skipped steps are not in it
        self.skipped = 0  # steps whose gradient norm was not finite
        self.loaded_bytes = self.stored_bytes = 0
        # called before a stream changes weights or state of a group: a checkpoint may have to copy them first
        self.before_update: Callable[[FlatGroup, Stream], object] = lambda flat, stream: None

    def step(self, learning_rate: float) -> float:
        """Clip, then update every parameter (of this rank's slices), unless the gradient norm is not finite.

        Returns the norm before clipping.
        """
        total = self._norm.total()
        norm = float(total)
        if not math.isfinite(norm):
            self.skipped += 1
            return norm
        if self.settings.gradient_clip is not None:
            self._norm.clip(self.settings.gradient_clip, total)
        self.updates += 1
        resident = [chunk for chunk in self.chunks if chunk.resident]
        streamed = [chunk for chunk in self.chunks if not chunk.resident]
        self._stream(streamed, learning_rate, resident)
        return norm

    def _stream(self, chunks: Sequence[Chunk], learning_rate: float, resident: Sequence[Chunk]) -> None:
        """Update `chunks` through the slots; `resident` ones while the first loads are under way."""
        load, compute, store = self.streams.load, self.streams.compute, self.streams.store
        freed: list[Event | None] = [None] * len(self._slots)
        loaded: list[Event] = []

        def start_load(index: int) -> None:
            slot = index % len(self._slots)
            if (before := freed[slot]) is not None:
                load.wait(before)
            chunk, staging = chunks[index], self._staging(slot, chunks[index])
            load.submit(lambda: staging.copy_(chunk.state, non_blocking=True))
            loaded.append(load.record())
            self.loaded_bytes += staging.numel() * 4

        for index in range(min(len(self._slots), len(chunks))):
            start_load(index)
        for chunk in resident:
            self.before_update(chunk.flat, compute)
            compute.submit(lambda chunk=chunk: self._update(chunk, chunk.state, learning_rate))  # type: ignore[misc]
        for index, chunk in enumerate(chunks):
            slot = index % len(self._slots)
            staging = self._staging(slot, chunk)
            compute.wait(loaded[index])
            self.before_update(chunk.flat, compute)
            compute.submit(lambda c=chunk, s=staging: self._update(c, s, learning_rate))  # type: ignore[misc]
            store.wait(compute.record())
            store.submit(lambda c=chunk, s=staging: c.state.copy_(s, non_blocking=True))  # type: ignore[misc]
            freed[slot] = store.record()
            self.stored_bytes += staging.numel() * 4
            if index + len(self._slots) < len(chunks):
                start_load(index + len(self._slots))
        load.synchronize()
        store.synchronize()

    def _staging(self, slot: int, chunk: Chunk) -> torch.Tensor:
        return self._slots[slot][: chunk.state.numel()]

    def _update(self, chunk: Chunk, state: torch.Tensor, learning_rate: float) -> None:
        with torch.no_grad():
            for decay in (True, False):
                pieces = [piece for piece in chunk.pieces if piece.member.decayed is decay]
                if pieces:
                    self._adamw(chunk, pieces, state, learning_rate, decay)

    def _adamw(
        self, chunk: Chunk, pieces: list[Piece], state: torch.Tensor, learning_rate: float, decay: bool
    ) -> None:
        parts = [chunk.parts(state, piece) for piece in pieces]
        weights = [_view(piece, piece.member.parameter.detach()) for piece in pieces]
        gradients = [_view(piece, gradient(piece.member.parameter)) for piece in pieces]
        updated = weights
        if self._wide:  # bfloat16: update the fp32 master with the gradient in fp32, then split it again
            wide, updated = (
                [scratch[piece.offset :][: piece.length] for piece in pieces] for scratch in self._wide
            )
            for weight, part, master in zip(weights, parts, updated, strict=True):
                join(weight, part[2], master)
            for target, narrow in zip(wide, gradients, strict=True):
                target.copy_(narrow)
            gradients = wide
        adamw(
            updated,
            gradients,
            [part[0] for part in parts],
            [part[1] for part in parts],
            [],
            # filled there, not copied there: on a GPU a copy of one number would wait for the whole queue
            [torch.full((), float(self.updates - 1), device=self._step_device(state)) for _ in pieces],
            foreach=False,
            fused=self.fused,
            amsgrad=False,
            beta1=self.settings.betas[0],
            beta2=self.settings.betas[1],
            lr=learning_rate,
            weight_decay=self.settings.weight_decay if decay else 0.0,
            eps=self.settings.eps,
            maximize=False,
        )
        if self._wide:
            for weight, part, master, spent in zip(weights, parts, updated, gradients, strict=True):
                split(master, weight, part[2], spent)

    def _step_device(self, state: torch.Tensor) -> torch.device:
        return state.device if self.fused else torch.device("cpu")

    def atoms(self) -> Iterator[tuple[str, torch.Tensor, slice]]:
        """(name, piece of state, extent in the parameter) of all state: the plan-independent form."""
        for chunk in self.chunks:
            for piece in chunk.pieces:
                extent = slice(piece.start, piece.start + piece.length)
                for label, part in zip(("m", "v", "low"), chunk.parts(chunk.state, piece), strict=False):
                    yield f"{label}/{piece.member.name}", part, extent


def _cut(flat: FlatGroup, plan: MemoryPlan, device: Arena, host: Arena) -> Iterator[Chunk]:
    resident = flat.group.name not in plan.offloaded
    arena = device if resident else host
    start = flat.start  # of this rank's slice, which is all of the group where there is one rank
    for length in chunk_sizes(flat.length, plan.chunk_parameters):
        state = arena.carve("optimizer", state_elements(length, plan.dtype), torch.float32)
        yield Chunk(flat, start, length, tuple(flat.group.pieces(start, length)), state, resident)
        start += length


def _view(piece: Piece, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1)[piece.start : piece.start + piece.length]


def learning_rate(settings: AdamW, step: int, steps: int) -> float:
    """Rate of step `step` (from 0): linear warm-up, then the schedule down to zero at `steps`."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    done = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    share = 1 - done if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return settings.learning_rate * share
