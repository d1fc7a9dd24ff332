"""A consistent copy of weights and optimizer state, taken through the host buffers that the plan granted.

The bytes of a checkpoint's data section are cut into blocks of one size. `take` fills one buffer after another
and passes each to the writer, which returns it when its content is on disk. With as many buffers as blocks, training
waits for the copy only. With fewer it also waits until all but the last few blocks are written; two are enough.
Nothing may update weights or state while `take` runs, so what is written is the state of one step.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from busbar.workloads.training.arena import Arena
from busbar.workloads.training.groups import FlatGroup
from busbar.workloads.training.layout import Entry, Extent, Layout
from busbar.workloads.training.loaded import Loaded
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
        ranks = groups[0].ranks
        random = random_states() if groups[0].rank == 0 else {}
        self._random = {name: torch.empty_like(state) for name, state in random.items()}
        own = _own_parts([*self._weights(), *optimizer.atoms()])
        tensors = [(name, dtype, extent.stop - extent.start) for name, (dtype, extent) in own.items()]
        tensors += [(name, state.dtype, state.numel()) for name, state in random.items()]
        wholes = {member.name: member.parameter.numel() for flat in groups for member in flat.group.members}
        extents = {
            name: Extent(part.start, wholes[name.partition("/")[2]]) for name, (_, part) in own.items()
        }
        elements = {
            **{f"{kind}/{name}": size for kind in _kinds(own) for name, size in wholes.items()},
            **{name: state.numel() for name, state in random.items()},
        }
        self.layout = Layout.of(tensors, *((extents, elements) if ranks > 1 else ()))
        self._runs = sorted(self._find_runs(), key=lambda run: run.begin)
        self.block_bytes = plan.snapshot_block_bytes
        self.blocks = -(-self.layout.size // self.block_bytes)
        self.free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(min(plan.snapshot_blocks, self.blocks)):
            self.free.put(host.carve("checkpoint", self.block_bytes, torch.uint8))

    def _find_runs(self) -> list[_Run]:
        entries = {entry.name: entry for entry in self.layout.entries}
        runs = []
        for name, part, extent in [*self._weights(), *self._optimizer.atoms()]:
            begin = self.layout.extents[name].start if name in self.layout.extents else 0
            runs.append(_run(entries[name], part, extent.start - begin))
        runs += [_run(entries[name], state, 0) for name, state in self._random.items()]
        return runs

    def _weights(self) -> Iterator[tuple[str, torch.Tensor, slice]]:
        """(name, weights, extent in the parameter) of this rank's slices; all of them where there is one rank."""
        for flat in self._groups:
            for piece in flat.group.pieces(flat.start, flat.length):
                extent = slice(piece.start, piece.start + piece.length)
                weights = piece.member.parameter.detach().view(-1)[extent]
                yield f"weights/{piece.member.name}", weights, extent

    def take(self, ready: queue.SimpleQueue[Block | None]) -> None:
        """Copy the current state, block by block, into `ready`, and end it with None."""
        for name, state in random_states().items() if self._random else ():
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
        """Load a checkpoint's tensors into the places of this run's plan, and of this rank's slices."""
        with torch.no_grad():
            for name, part, extent in [*self._weights(), *self._optimizer.atoms()]:
                loaded.read_into(name, extent.start, part)


def _own_parts(
    pieces: Sequence[tuple[str, torch.Tensor, slice]],
) -> dict[str, tuple[torch.dtype, slice]]:
    """Type and extent of each tensor that `pieces` make up; a slice has one run of a parameter at most."""
    found: dict[str, tuple[torch.dtype, slice]] = {}
    for name, part, extent in pieces:
        _, known = found.get(name, (part.dtype, extent))
        found[name] = part.dtype, slice(min(known.start, extent.start), max(known.stop, extent.stop))
    return found


def _kinds(names: Iterable[str]) -> list[str]:
    return sorted({name.partition("/")[0] for name in names})


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
            if f"rng/cuda-{index}" in loaded.names:
                torch.cuda.set_rng_state(loaded.tensor(f"rng/cuda-{index}"), index)
