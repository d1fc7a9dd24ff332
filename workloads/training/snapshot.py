"""A consistent copy of weights and optimizer state, taken through the host buffers that the plan granted.

The bytes of a checkpoint's data section are cut into blocks of one size. `take` fills one buffer after another
and passes each to the writer, which returns it when its content is on disk. With as many buffers as blocks, training
waits for the copy only. With fewer it also waits until all but the last few blocks are written; two are enough.
Nothing may update weights or state while `take` runs, so what is written is the state of one step.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from busbar.workloads.training.arena import Arena
from busbar.workloads.training.checkpoint import Entry, Layout, Loaded
from busbar.workloads.training.groups import FlatGroup, members
from busbar.workloads.training.optimizer import OffloadedAdamW
from busbar.workloads.training.plan import MemoryPlan
from busbar.workloads.training.streams import Event


@dataclass(frozen=True)
class Block:
    """Bytes of the data section in a buffer; `copied` happens when they are there."""

    data: torch.Tensor  # uint8
    copied: Event
    buffer: torch.Tensor  # to give back


@dataclass(frozen=True)
class _Run:
    """Bytes of one tensor in memory, and where they go in the data section."""

    begin: int
    source: torch.Tensor  # uint8, flat

    @property
    def end(self) -> int:
        return self.begin + self.source.numel()


class Snapshot:
    """Buffers of the host arena, and the places that they are filled from."""

    def __init__(
        self, groups: Sequence[FlatGroup], optimizer: OffloadedAdamW, host: Arena, plan: MemoryPlan
    ) -> None:
        self._groups, self._optimizer = groups, optimizer
        random = random_states()
        self._random = {name: torch.empty_like(state) for name, state in random.items()}
        self.layout = Layout.of(
            [
                *(
                    (f"weights/{member.name}", flat.weights.dtype, member.parameter.numel())
                    for flat, member in members(groups)
                ),
                *_state_sizes(optimizer),
                *((name, state.dtype, state.numel()) for name, state in random.items()),
            ]
        )
        self._runs = sorted(self._find_runs(), key=lambda run: run.begin)
        self.block_bytes = plan.snapshot_block_bytes
        self.blocks = -(-self.layout.size // self.block_bytes)
        self.free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(min(plan.snapshot_blocks, self.blocks)):
            self.free.put(host.carve("checkpoint", self.block_bytes, torch.uint8))

    def _find_runs(self) -> list[_Run]:
        entries = {entry.name: entry for entry in self.layout.entries}
        runs = []
        for _, member in members(self._groups):
            runs.append(_run(entries[f"weights/{member.name}"], member.parameter.detach().view(-1), 0))
        for name, part, extent in self._optimizer.atoms():
            runs.append(_run(entries[name], part, extent.start))
        runs += [_run(entries[name], state, 0) for name, state in self._random.items()]
        return runs

    def take(self, ready: queue.SimpleQueue[Block | None]) -> None:
        """Copy the current state, block by block, into `ready`, and end it with None."""
        for name, state in random_states().items():
            self._random[name].copy_(state)
        first = 0
        for start in range(0, self.layout.size, self.block_bytes):
            buffer = self.free.get()
            data = buffer[: min(self.block_bytes, self.layout.size - start)]
            first = self._fill(data, start, first)
            ready.put(Block(data, self._optimizer.streams.compute.record(), buffer))
        ready.put(None)

    def _fill(self, data: torch.Tensor, start: int, first: int) -> int:
        """Copy bytes [start, start + len(data)); returns the first run that reaches beyond them."""
        end = start + data.numel()
        for index in range(first, len(self._runs)):
            run = self._runs[index]
            low, high = max(run.begin, start), min(run.end, end)
            data[low - start : high - start].copy_(
                run.source[low - run.begin : high - run.begin], non_blocking=True
            )
            if run.end > end:
                return index
        return len(self._runs)

    def restore(self, loaded: Loaded) -> None:
        """Load a checkpoint's tensors into the places of this run's plan."""
        with torch.no_grad():
            for _, member in members(self._groups):
                loaded.read_into(f"weights/{member.name}", 0, member.parameter.detach().view(-1))
            for name, part, extent in self._optimizer.atoms():
                loaded.read_into(name, extent.start, part)


def _state_sizes(optimizer: OffloadedAdamW) -> list[tuple[str, torch.dtype, int]]:
    """(name, dtype, elements) of the optimizer's tensors, each of which lies in one or more chunks."""
    sizes: dict[str, tuple[torch.dtype, int]] = {}
    for name, part, extent in optimizer.atoms():
        sizes[name] = (part.dtype, max(extent.stop, sizes.get(name, (part.dtype, 0))[1]))
    return [(name, dtype, elements) for name, (dtype, elements) in sizes.items()]


def _run(entry: Entry, source: torch.Tensor, start: int) -> _Run:
    return _Run(entry.begin + start * entry.dtype.itemsize, source.view(torch.uint8))


def random_states() -> dict[str, torch.Tensor]:
    states = {"rng/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"rng/cuda-{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def restore_random_states(loaded: Loaded) -> None:
    torch.set_rng_state(loaded.tensor("rng/cpu"))
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"rng/cuda-{index}" in loaded.entries:
                torch.cuda.set_rng_state(loaded.tensor(f"rng/cuda-{index}"), index)
