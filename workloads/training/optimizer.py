"""AdamW whose state is where the plan put it, with results equal to `torch.optim.AdamW` bit for bit.

Under bfloat16 the fp32 master weight is split: the weight is its high half, rounded half away from zero, and the
low half is what that leaves, `bits - (high << 16)`, which fits into 16 bits for every finite number. So the master
is exact and takes two bytes beside the weight instead of four.

The update itself is torch's own functional AdamW on views, for both places of state and on every device (in a reduced
format of the moments, which is not torch's, on them widened: see `moments`): the equality is by construction, as long as pieces are cut at multiples of 1024 elements (see `groups`). Norm, clip factor and
whether the norm is finite stay on the device, so that the updates of a step are queued (see `pipeline`) before the host
knows any of them. Over several ranks the chunks are those of this rank's slices. A step whose gradient norm is not
finite changes nothing: no weight, no moment, no step count of AdamW. Each update leaves the gradients zero.

A group that a step leaves out (see `layer_drop`) stays as it is in it: weights, moments, and the number of updates by which AdamW
corrects the bias of the moments, as for a parameter without a gradient in torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.optim.adamw import adamw

from busbar.workloads.machine.direct_file import ScratchFile
from busbar.workloads.machine.streams import Event, Stream, Streams
from busbar.workloads.training.arena import Arena
from busbar.workloads.training.chunks import Chunk, Homes, state_elements
from busbar.workloads.training.demand import NARROW_RUN
from busbar.workloads.training.disk_tensor import DiskTensor, whole_pages
from busbar.workloads.training.groups import FlatGroup, Piece
from busbar.workloads.training.moments import narrow, widen
from busbar.workloads.training.norm import Norm, ParameterNorm, clip_factor
from busbar.workloads.training.pipeline import Pipeline
from busbar.workloads.training.plan import MemoryPlan
from busbar.workloads.training.settings import EXACT, INT8, OptimizerSpec


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


@dataclass(frozen=True)
class _Half:
    """The pieces of a chunk that weight decay applies to, or the others; views of their weights and gradients."""

    decayed: bool
    pieces: list[Piece]
    weights: list[torch.Tensor]
    gradients: list[torch.Tensor]


@dataclass(frozen=True)
class _Step:
    """What the updates of one step share. Tensors are on the device."""

    learning_rate: float
    factor: torch.Tensor | None  # by which gradients are multiplied; None: by nothing
    bad: torch.Tensor  # 1.0: the norm is not finite, and the step is to change nothing; else 0.0


class Optimizer(Protocol):
    """What changes the weights of a run."""

    streams: Streams
    chunks: list[Chunk]  # runs of state that is placed by the plan
    updates: int  # skipped steps are not in it
    skipped: int
    missed: Counter[str]  # updates that left a group out, by its name
    # called before a stream changes weights or state of a group: a checkpoint may have to copy them first
    before_update: Callable[[FlatGroup, Stream], object]

    @property
    def loaded_bytes(self) -> int:
        """State that was brought to where it is updated, so far."""

    @property
    def stored_bytes(self) -> int:
        """State that was brought back."""

    def prefetch(self, left_out: Collection[str] = ()) -> None:
        """Begin to load what the next step needs, which leaves these groups out."""

    def step(self, learning_rate: float, left_out: Collection[str] = ()) -> tuple[float, list[Event]]:
        """Queue the step's updates, but of groups that it left out; returns a norm, which is not finite where nothing is
        changed, and an event per group."""

    def drain(self) -> None:
        """Wait until all that was queued is done. Raises what failed."""

    def atoms(self) -> Iterator[tuple[str, torch.Tensor | DiskTensor, slice]]:
        """(name, piece of state, extent in the whole parameter's) of all state: the plan-independent form."""


class OffloadedAdamW:
    """The optimizer of one run. `step` is called after backward with that step's learning rate."""

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        settings: OptimizerSpec,
        plan: MemoryPlan,
        device: Arena,
        host: Arena,
        streams: Streams,
        *,
        fused: bool = True,
        norm: Norm | None = None,
        disk: ScratchFile | None = None,
    ) -> None:
        """`device` is where the updates run, and `disk` has room for the state of `plan.on_disk`."""
        self.settings, self.streams, self.fused = settings, streams, fused
        self._norm = norm or ParameterNorm(groups)
        homes = Homes(plan, device, host, disk)
        by_group = [(flat, list(homes.cut(flat))) for flat in groups]
        self.chunks = [chunk for _, chunks in by_group for chunk in chunks]
        self._halves = {id(chunk): _halves(chunk) for chunk in self.chunks}  # made once: it takes a while
        size, owner = state_elements(plan.chunk_parameters, homes.parts), "staging"
        if plan.on_disk:  # whole pages, which a disk reads and writes without a copy
            size, owner = whole_pages(size * 4) // 4, "disk"
        slots = [device.carve(owner, size, torch.float32) for _ in range(plan.slots)]
        self.pipeline = Pipeline(by_group, slots, streams)
        self._narrow_gradients = groups[0].gradients.dtype != torch.float32
        self._wide = [  # a chunk's master weights in fp32 under bfloat16, and its gradient where that is narrow too
            device.carve("staging", plan.chunk_parameters, torch.float32)
            for _ in range(0 if plan.dtype == "float32" else 2 if self._narrow_gradients else 1)
        ]
        self._state = plan.state
        self._moments = [  # of a chunk in fp32, where they are not kept so
            device.carve("staging", plan.chunk_parameters, torch.float32)
            for _ in range(0 if plan.state == EXACT else 2)
        ]
        run = min(NARROW_RUN, plan.chunk_parameters) if plan.state == INT8 else 0
        self._room = device.carve("staging", run, torch.float32)
        self.updates = 0  # AdamW's step count: skipped steps are not in it
        self.skipped = 0  # steps whose gradient norm was not finite
        self.missed: Counter[str] = Counter()
        # Held until the next step is queued: updates read its tensors on a stream of their own, beside the next forward
        # pass, and torch gives memory that nobody holds to the stream that it came from, at once.
        self._under_way: _Step | None = None
        self.before_update: Callable[[FlatGroup, Stream], object] = lambda flat, stream: None

    @property
    def loaded_bytes(self) -> int:
        return self.pipeline.loaded_bytes

    @property
    def stored_bytes(self) -> int:
        return self.pipeline.stored_bytes

    def prefetch(self, left_out: Collection[str] = ()) -> None:
        self.pipeline.prefetch(left_out)

    def drain(self) -> None:
        self.pipeline.drain()

    def step(self, learning_rate: float, left_out: Collection[str] = ()) -> tuple[float, list[Event]]:
        """Queue clipping and the update of every parameter (of this rank's slices) but those of groups that are left out.

        Returns:
            The norm before clipping (not finite: nothing is changed), and an event per group: its weights are updated.
        """
        total = self._norm.total(left_out)
        limit = self.settings.gradient_clip
        step = _Step(
            learning_rate,
            None if limit is None else clip_factor(limit, total),
            (~torch.isfinite(total)).float(),
        )
        counts = {name: float(self.updates - missed) for name, missed in self.missed.items()}
        usual = float(self.updates)
        done = self.pipeline.launch(
            lambda flat: self.before_update(flat, self.streams.update),
            lambda chunk, state: self._update(chunk, state, step, counts.get(chunk.flat.group.name, usual)),
            _clear_others,
            left_out,
        )
        self._under_way = step
        norm = float(total)  # on a GPU the host waits here, when all is queued
        if math.isfinite(norm):
            self.updates += 1
            self.missed.update(left_out)
        else:
            self.skipped += 1
        return norm, done

    def _update(self, chunk: Chunk, state: torch.Tensor, step: _Step, updates: float) -> None:
        """`updates` of this chunk by AdamW so far."""
        gradients = chunk.own(chunk.flat.own_gradients)
        with torch.no_grad():
            if self.fused or not bool(step.bad):  # the kernel that is not fused always updates
                if step.factor is not None:
                    gradients.mul_(step.factor)
                kept = chunk.tensors(state)
                with self._wide_moments(chunk, kept) as moments:
                    for part in self._halves[id(chunk)]:
                        self._adamw(part, moments, kept.get("low"), step, updates)
            gradients.zero_()  # while they are in the CPU's caches

    @contextmanager
    def _wide_moments(self, chunk: Chunk, kept: Mapping[str, torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Both moments of a chunk in fp32, to be changed."""
        if not self._moments:
            yield [kept["m"], kept["v"]]
            return
        first, second = (room[: chunk.length] for room in self._moments)
        widen(self._state, kept, first, second, self._room)
        yield [first, second]
        narrow(self._state, first, second, kept, self._room)

    def _adamw(
        self,
        half: _Half,
        moments: Sequence[torch.Tensor],
        low: torch.Tensor | None,
        step: _Step,
        updates: float,
    ) -> None:
        pieces, weights, gradients = half.pieces, half.weights, half.gradients
        firsts, seconds = ([_of(piece, each) for piece in pieces] for each in moments)
        lows = [] if low is None else [_of(piece, low) for piece in pieces]
        updated = weights
        if self._wide:  # bfloat16: update the fp32 master with the gradient in fp32, then split it again
            updated = [_of(piece, self._wide[0]) for piece in pieces]
            for weight, own_low, master in zip(weights, lows, updated, strict=True):
                join(weight, own_low, master)
            if self._narrow_gradients:
                wide = [_of(piece, self._wide[1]) for piece in pieces]
                for target, narrow in zip(wide, gradients, strict=True):
                    target.copy_(narrow)
                gradients = wide
        adamw(
            updated,
            gradients,
            firsts,
            seconds,
            [],
            # filled there, not copied there: on a GPU a copy of one number would wait for the whole queue
            list(torch.full((len(pieces),), updates, device=self._step_device(moments[0])).unbind()),
            foreach=False,
            fused=self.fused,
            found_inf=step.bad if self.fused else None,
            amsgrad=False,
            beta1=self.settings.betas[0],
            beta2=self.settings.betas[1],
            lr=step.learning_rate,
            weight_decay=self.settings.weight_decay if half.decayed else 0.0,
            eps=self.settings.eps,
            maximize=False,
        )
        if self._wide:
            for weight, own_low, master, spent in zip(weights, lows, updated, gradients, strict=True):
                split(master, weight, own_low, spent)

    def _step_device(self, moment: torch.Tensor) -> torch.device:
        return moment.device if self.fused else torch.device("cpu")

    def atoms(self) -> Iterator[tuple[str, torch.Tensor | DiskTensor, slice]]:
        for chunk in self.chunks:
            yield from chunk.atoms()


def _of(piece: Piece, flat: torch.Tensor) -> torch.Tensor:
    """What a piece has of a tensor of its whole chunk."""
    return flat[piece.offset :][: piece.length]


def _halves(chunk: Chunk) -> list[_Half]:
    found = []
    for decayed in (True, False):
        pieces = [piece for piece in chunk.pieces if piece.member.decayed is decayed]
        weights, gradients = (
            [_of(piece, chunk.own(flat)) for piece in pieces]
            for flat in (chunk.flat.own_weights, chunk.flat.own_gradients)
        )
        if pieces:
            found.append(_Half(decayed, pieces, weights, gradients))
    return found


def _clear_others(flat: FlatGroup) -> None:
    """Set the gradients to zero that other ranks' slices have; the updates did so with this rank's."""
    if flat.has_whole_gradients:
        flat.gradients[: flat.start].zero_()
        flat.gradients[flat.start + flat.length :].zero_()


def learning_rate(settings: OptimizerSpec, step: int, steps: int) -> float:
    """Rate of step `step` (from 0): linear warm-up, then the schedule down to zero at `steps`."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    done = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    share = 1 - done if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return settings.learning_rate * share
