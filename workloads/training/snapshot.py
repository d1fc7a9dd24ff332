"""The bytes of a checkpoint: where they lie, and the host buffers through which they go to disk.

Tensors stand in the file group by group in forward order, so that what the next update changes first is also copied
first. The bytes are cut into blocks of one size, and a group's range of blocks is what an update of it waits for
(see `capture`). Within a group wide types come first; what a weight has in types of two bytes adds up to four or eight,
and what it has in one byte is rounded up to 256, so no tensor is misaligned.
"""

from __future__ import annotations

import bisect
import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from busbar.workloads.machine.streams import CallerStream, CudaStream, Stream
from busbar.workloads.training.arena import Arena
from busbar.workloads.training.capture import Capture, Source
from busbar.workloads.training.disk_tensor import DiskTensor
from busbar.workloads.training.groups import FlatGroup
from busbar.workloads.training.layout import Entry, Extent, Layout
from busbar.workloads.training.loaded import READ_BYTES, Loaded
from busbar.workloads.training.moments import elements_of
from busbar.workloads.training.optimizer import Optimizer
from busbar.workloads.training.plan import MemoryPlan


@dataclass(frozen=True)
class _Run:
    """Bytes of one tensor, and where they go in the data section."""

    begin: int
    source: torch.Tensor | DiskTensor  # uint8, flat

    @property
    def end(self) -> int:
        return self.begin + self.source.numel()

    def copy(self, low: int, high: int, target: torch.Tensor) -> None:
        """Bytes `low` to `high` of the data section into `target`."""
        part = self.source[low - self.begin : high - self.begin]
        if isinstance(part, DiskTensor):
            part.read(target)
        else:
            target.copy_(part, non_blocking=True)


class Snapshot:
    """Buffers of the host arena, and the places that they are filled from."""

    def __init__(
        self, groups: Sequence[FlatGroup], optimizer: Optimizer, host: Arena, plan: MemoryPlan
    ) -> None:
        self._groups, self._optimizer = groups, optimizer
        ranks = groups[0].ranks
        random = random_states() if groups[0].rank == 0 else {}
        self._random = {name: torch.empty_like(state) for name, state in random.items()}
        own = _own_parts([*self._weights(), *optimizer.atoms()])
        order = {member.name: n for n, flat in enumerate(groups) for member in flat.group.members}
        tensors = [(name, dtype, extent.stop - extent.start) for name, (dtype, extent) in own.items()]
        tensors.sort(key=lambda item: (order[_parameter(item[0])], -item[1].itemsize))
        tensors += [(name, state.dtype, state.numel()) for name, state in random.items()]
        wholes = {member.name: member.parameter.numel() for flat in groups for member in flat.group.members}
        extents = {
            name: Extent(part.start, elements_of(_kind(name), wholes[_parameter(name)]))
            for name, (_, part) in own.items()
        }
        elements = {
            **{
                f"{kind}/{name}": elements_of(kind, size)
                for kind in sorted({_kind(name) for name in own})
                for name, size in wholes.items()
            },
            **{name: state.numel() for name, state in random.items()},
        }
        self.layout = Layout.of(tensors, *((extents, elements) if ranks > 1 else ()))
        self._runs = sorted(self._find_runs(), key=lambda run: run.begin)
        self.block_bytes = plan.snapshot_block_bytes
        self.blocks = -(-self.layout.size // self.block_bytes)
        self.group_blocks = _group_blocks(groups, self.layout, self.block_bytes)
        self.capture: Capture | None = None  # the last one that was begun
        self.copies = _copies(groups[0].weights.device)
        self.free: queue.LifoQueue[torch.Tensor] = queue.LifoQueue()
        for _ in range(min(plan.snapshot_blocks, self.blocks)):
            self.free.put(host.carve("checkpoint", self.block_bytes, torch.uint8))
        optimizer.before_update = self.before_update

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
                weights = flat.own_weights[piece.offset :][: piece.length]
                extent = slice(piece.start, piece.start + piece.length)
                yield f"weights/{piece.member.name}", weights, extent

    def begin(self) -> Capture:
        """Start to copy the state as it is now. Until that is done, updates wait for what they would change."""
        for name, state in random_states().items() if self._random else ():
            self._random[name].copy_(state)
        self.copies.wait(self._optimizer.streams.compute.record())
        source = Source(
            self._fill, self.layout.size, self.block_bytes, self.group_blocks, self.copies, self.free
        )
        self.capture = Capture(source)
        self.capture.start()
        return self.capture

    def before_update(self, flat: FlatGroup, stream: Stream) -> None:
        """Called before `stream` changes weights or state of a group: its copy comes first."""
        if self.capture is not None:
            copied = self.capture.wait_for(flat.group.name)
            if copied is not None:
                stream.wait(copied)

    def _fill(self, start: int, data: torch.Tensor) -> None:
        """Copy what stands at byte `start` of the data section, and after it, into `data`."""
        end = start + data.numel()
        first = bisect.bisect_right(self._runs, start, key=lambda run: run.end)
        for run in self._runs[first:]:
            if run.begin >= end:
                break
            low, high = max(run.begin, start), min(run.end, end)
            run.copy(low, high, data[low - start : high - start])

    def restore(self, loaded: Loaded) -> None:
        """Load a checkpoint's tensors into the places of this run's plan, and of this rank's slices."""
        with torch.no_grad():
            for name, part, extent in [*self._weights(), *self._optimizer.atoms()]:
                if isinstance(part, DiskTensor):
                    _restore_to_disk(loaded, name, extent.start, part)
                else:
                    loaded.read_into(name, extent.start, part)


def _restore_to_disk(loaded: Loaded, name: str, start: int, target: DiskTensor) -> None:
    room = torch.empty(min(target.numel(), READ_BYTES // target.dtype.itemsize), dtype=target.dtype)
    for first in range(0, target.numel(), room.numel()):
        part = target[first : first + room.numel()]
        loaded.read_into(name, start + first, room[: part.numel()])
        part.write(room[: part.numel()])


def _own_parts(
    pieces: Sequence[tuple[str, torch.Tensor | DiskTensor, slice]],
) -> dict[str, tuple[torch.dtype, slice]]:
    """Type and extent of each tensor that `pieces` make up; a slice has one run of a parameter at most."""
    found: dict[str, tuple[torch.dtype, slice]] = {}
    for name, part, extent in pieces:
        _, known = found.get(name, (part.dtype, extent))
        found[name] = part.dtype, slice(min(known.start, extent.start), max(known.stop, extent.stop))
    return found


def _kind(name: str) -> str:
    """`m` of a tensor such as `m/model.norm.weight`."""
    return name.partition("/")[0]


def _parameter(name: str) -> str:
    """`model.norm.weight` of it."""
    return name.partition("/")[2]


def _group_blocks(groups: Sequence[FlatGroup], layout: Layout, size: int) -> dict[str, range]:
    """The blocks that hold bytes of each group."""
    names = {member.name: flat.group.name for flat in groups for member in flat.group.members}
    found: dict[str, range] = {flat.group.name: range(0) for flat in groups}
    for entry in layout.entries:
        group = names.get(_parameter(entry.name))
        if group is not None and entry.size:
            first, after = entry.begin // size, -(-entry.end // size)
            found[group] = range(found[group].start if found[group] else first, after)
    return found


def _copies(device: torch.device) -> Stream:
    """Where the copies run: beside the updates, but in the thread that asks for them where there is no device."""
    if device.type == "cuda":
        return CudaStream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    return CallerStream()


def _run(entry: Entry, source: torch.Tensor | DiskTensor, start: int) -> _Run:
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
