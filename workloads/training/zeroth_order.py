"""Training without a backward pass: two forward passes tell the slope along a random direction.

With the weights w, a direction z of signs (`directions`) and a distance d, a step is

    slope    s = (loss(w + d z) - loss(w - d z)) / 2d        of the same micro-batches, without dropout
    update   w = (1 - rate x decay) w - rate x s z           decay of matrices alone, as in AdamW

so that neither gradients nor moments nor kept activations need memory. The same method with Gaussian directions is known
as MeZO. `gradientClip` bounds |s|, which is about the norm of the gradient.

The weights themselves are never changed for a pass: what a block is computed with is a second copy, made when the block
begins, and that of what stands around the blocks when a pass begins. So no rounding adds up, and the copies are made of
the weights on the device or of those in a slot alike (`block_slots`): placements differ in no bit. Under bfloat16 the
update is that of an fp32 master, whose low half is kept (see `optimizer`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from busbar.workloads.machine.streams import Event, Stream, Streams
from busbar.workloads.training.arena import Arena
from busbar.workloads.training.chunks import Chunk
from busbar.workloads.training.directions import WORD, Direction
from busbar.workloads.training.disk_tensor import DiskTensor
from busbar.workloads.training.groups import FlatGroup, Member, blocks
from busbar.workloads.training.optimizer import join, split
from busbar.workloads.training.plan import MemoryPlan
from busbar.workloads.training.settings import OptimizerSpec


class Perturbation:
    """Has a model compute with weights that are moved along a direction. It takes over the blocks' `forward`.

    Made before `BlockSlots`, so that it finds a block's weights in their slot; `watch` comes after that.
    """

    def __init__(
        self, model: nn.Module, groups: Sequence[FlatGroup], plan: MemoryPlan, device: Arena
    ) -> None:
        self._most = plan.chunk_parameters
        self._direction: Direction | None = None  # None: the weights are as they are
        self._distance = 0.0
        by_name = {flat.group.name: index for index, flat in enumerate(groups)}
        self._groups = groups
        self._outer = {
            index: device.carve("moved", flat.group.elements, flat.weights.dtype)
            for index, flat in enumerate(groups)
            if not flat.group.size.is_block
        }
        largest = max((flat.group.elements for flat in groups if flat.group.size.is_block), default=0)
        self._room = device.carve("moved", largest, groups[0].weights.dtype)
        for number, block in enumerate(blocks(model)):
            if (index := by_name.get(f"block-{number}")) is not None:
                setattr(block, "forward", self._moved(index, block.forward))  # noqa: B010

    def watch(self, model: nn.Module) -> None:
        """Move what stands around the blocks when a forward pass begins."""
        model.register_forward_pre_hook(lambda *_: self._begin())

    @contextmanager
    def along(self, direction: Direction, distance: float) -> Iterator[None]:
        """Forward passes in here are computed with the weights moved by `distance`."""
        there = {index: self._weights(index) for index in self._outer}
        self._direction, self._distance = direction, distance
        try:
            yield
        finally:
            self._direction = None
            for index, weights in there.items():
                self._refer(index, weights)

    def _begin(self) -> None:
        """Of each forward pass; where the weights are on the device, those of the one before are moved still."""
        if self._direction is None:
            return
        for index, room in self._outer.items():
            first = self._groups[index].group.members[0]
            if first.parameter.data.data_ptr() != first.view(room).data_ptr():
                self._move(index, room)

    def _weights(self, index: int) -> list[torch.Tensor]:
        return [member.parameter.data for member in self._groups[index].group.members]

    def _refer(self, index: int, weights: Sequence[torch.Tensor]) -> None:
        for member, each in zip(self._groups[index].group.members, weights, strict=True):
            member.parameter.data = each

    def _moved(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._direction is None:
                return forward(*args, **kwargs)
            there = self._weights(index)
            self._move(index, self._room)
            result = forward(*args, **kwargs)
            self._refer(index, there)
            return result

        return run

    def _move(self, index: int, room: torch.Tensor) -> None:
        """Have the parameters of a group refer to moved copies of what they refer to."""
        assert self._direction is not None
        for member in self._groups[index].group.members:
            source, target = member.parameter.data, member.view(room)
            flat_source, flat_target = source.reshape(-1), target.view(-1)
            for start, length in runs(member, self._most):
                signs = self._direction.signs(index, member.start + start, length, room.device)
                moved = signs.mul_(self._distance).add_(flat_source[start:][:length])
                flat_target[start:][:length].copy_(moved)
            member.parameter.data = target


class ZerothOrder:
    """The optimizer of such a run: it keeps weights, and under bfloat16 the low halves of their masters."""

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        settings: OptimizerSpec,
        plan: MemoryPlan,
        home: Arena,
        streams: Streams,
        seed: int,
    ) -> None:
        """`home` is where the weights are, and where they are updated."""
        self.settings, self.streams, self._groups, self._seed = settings, streams, groups, seed
        self.chunks: list[Chunk] = []
        self._most = plan.chunk_parameters
        self._low: list[torch.Tensor] = []
        self._wide: list[torch.Tensor] = []
        if plan.dtype != "float32":
            self._low = [home.carve("optimizer", flat.group.elements, torch.int16) for flat in groups]
            self._wide = [home.carve("staging", plan.chunk_parameters, torch.float32) for _ in range(2)]
        self.updates = 0
        self.skipped = 0  # steps whose slope was not finite
        self.missed: Counter[str] = Counter()  # no step leaves anything out
        self.loaded_bytes = self.stored_bytes = 0  # of state that travels: none does
        self._slope = math.nan
        self._direction = Direction(seed, 0)
        self.before_update: Callable[[FlatGroup, Stream], object] = lambda flat, stream: None

    def direction(self, step: int) -> Direction:
        """Of the step with this number."""
        return Direction(self._seed, step)

    def compare(self, step: int, ahead: torch.Tensor, behind: torch.Tensor) -> None:
        """The losses at the two points of a step."""
        self._slope = (float(ahead) - float(behind)) / (2 * self.settings.perturbation)
        self._direction = self.direction(step)

    def prefetch(self, left_out: Collection[str] = ()) -> None:
        """Nothing travels."""

    def step(self, learning_rate: float, left_out: Collection[str] = ()) -> tuple[float, list[Event]]:
        """Queue the update of every parameter.

        Returns:
            |slope| before clipping (not finite: nothing is changed), and an event per group: its weights are updated.
        """
        slope, queue = self._slope, self.streams.update
        if not math.isfinite(slope):
            self.skipped += 1
            return abs(slope), [queue.record() for _ in self._groups]
        limit = self.settings.gradient_clip
        if limit is not None:
            slope = max(-limit, min(limit, slope))
        queue.wait(self.streams.compute.record())
        done = []
        for index, flat in enumerate(self._groups):
            queue.submit(lambda flat=flat: self.before_update(flat, queue))  # type: ignore[misc]
            queue.submit(lambda index=index: self._update(index, learning_rate, slope))  # type: ignore[misc]
            done.append(queue.record())
        self.updates += 1
        return abs(self._slope), done

    def drain(self) -> None:
        self.streams.update.synchronize()

    def _update(self, index: int, rate: float, slope: float) -> None:
        flat = self._groups[index]
        for member in flat.group.members:
            decay = self.settings.weight_decay if member.decayed else 0.0
            for start, length in runs(member, self._most):
                begin = member.start + start
                weights = flat.weights[begin:][:length]
                signs = self._direction.signs(index, begin, length, weights.device)
                master = weights
                if self._low:
                    master = self._wide[0][:length]
                    join(weights, self._low[index][begin:][:length], master)
                master.mul_(1.0 - rate * decay).add_(signs, alpha=-rate * slope)
                if self._low:
                    split(master, weights, self._low[index][begin:][:length], self._wide[1][:length])

    def atoms(self) -> Iterator[tuple[str, torch.Tensor | DiskTensor, slice]]:
        for flat, low in zip(self._groups, self._low, strict=False):
            for member in flat.group.members:
                size = member.parameter.numel()
                yield f"low/{member.name}", low[member.start :][:size], slice(0, size)


def runs(member: Member, most: int) -> Iterator[tuple[int, int]]:
    """(start, length) of runs of a parameter, of `most` elements at most, which is a multiple of 32."""
    assert most % WORD == 0
    size = member.parameter.numel()
    for start in range(0, size, most):
        yield start, min(most, size - start)
