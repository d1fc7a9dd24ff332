"""The collective operations of a gang, by torch.distributed: gloo between CPUs, NCCL between GPUs.

Tensors are flat. What host code agrees on (`gather`, `most`) goes through gloo on either device, so that it waits for
no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from busbar.workloads.training.sequence_parallel import Exchange
from busbar.workloads.training.step_clock import Stopwatch
from busbar.workloads.training.world import World

T = TypeVar("T")


class Pending(Protocol):
    """A collective operation that has begun."""

    def wait(self) -> object:
        """Until what it brings may be used. Raises RuntimeError when a rank is lost."""


class Ranks(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor) -> None:
        """Fill `own` with the sum over ranks of this rank's part of `whole`."""

    def all_to_all(self, parts: torch.Tensor, whole: torch.Tensor) -> None:
        """Fill `parts` with this rank's part of every rank's `whole`, in the order of ranks."""

    def start_reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor) -> Pending:
        """Begin what `reduce_scatter` does; all ranks begin theirs in the same order."""

    def start_all_to_all(self, parts: torch.Tensor, whole: torch.Tensor) -> Pending:
        """Begin what `all_to_all` does."""

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Fill `whole` with every rank's `own`, which may lie in it."""

    def start_all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> Pending:
        """Begin what `all_gather` does."""

    def add_up(self, values: torch.Tensor) -> None:
        """Add up the ranks' `values` in place."""

    def from_first(self, values: torch.Tensor) -> None:
        """Replace `values` by those of rank 0."""

    def gather(self, thing: T) -> list[T]:
        """What each rank brings."""

    def most(self, values: list[int]) -> list[int]:
        """The largest of each value over the ranks."""

    def at(self, place: str) -> None:
        """Say where this rank is, for the case that it does not come back from there."""

    def neighbours(self, size: int) -> Exchange:
        """The group of `size` consecutive ranks that this one is in; all ranks make theirs at the same time."""


class Done:
    """An operation that was over at once."""

    def wait(self) -> None:
        return


class Alone:
    """One process."""

    rank, size = 0, 1

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor) -> None:
        own.copy_(whole)

    def all_to_all(self, parts: torch.Tensor, whole: torch.Tensor) -> None:
        parts.copy_(whole)

    def start_reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor) -> Pending:
        self.reduce_scatter(own, whole)
        return Done()

    def start_all_to_all(self, parts: torch.Tensor, whole: torch.Tensor) -> Pending:
        self.all_to_all(parts, whole)
        return Done()

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        if whole.data_ptr() != own.data_ptr():
            whole.copy_(own)

    def start_all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> Pending:
        self.all_gather(whole, own)
        return Done()

    def add_up(self, values: torch.Tensor) -> None:
        return

    def from_first(self, values: torch.Tensor) -> None:
        return

    def gather(self, thing: T) -> list[T]:
        return [thing]

    def most(self, values: list[int]) -> list[int]:
        return values

    def at(self, place: str) -> None:
        return

    def neighbours(self, size: int) -> Exchange:
        return self


class Neighbours:
    """Some consecutive ranks of a gang."""

    def __init__(self, rank: int, size: int, waits: Stopwatch) -> None:
        self.rank, self.size, self._waits = rank % size, size, waits
        self._group, _ = dist.new_subgroups(size)

    def all_to_all(self, parts: torch.Tensor, whole: torch.Tensor) -> None:
        with self._waits:
            dist.all_to_all_single(_bytes(parts), _bytes(whole), group=self._group)


class Beside:
    """The ranks of a gang once more, between CPUs, for a thread beside the training loop; all make it at the same time."""

    def __init__(self, rank: int, timeout: timedelta) -> None:
        self.rank = rank
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout)

    def gather(self, thing: T) -> list[T]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, thing, self._group)
        return found

    def send(self, data: torch.Tensor, to: int) -> None:
        dist.send(data, to, self._group)

    def receive(self, data: torch.Tensor, source: int) -> None:
        dist.recv(data, source, self._group)

    def exchange(self, sent: torch.Tensor, to: int, received: torch.Tensor, source: int) -> None:
        for work in (dist.isend(sent, to, self._group), dist.irecv(received, source, self._group)):
            if work is not None:
                work.wait()


class _Work:
    """What torch has begun, and the time that the host, or the stream of its caller, waits for it."""

    def __init__(self, work: Any, waits: Stopwatch) -> None:
        self._work, self._waits = work, waits

    def wait(self) -> None:
        with self._waits:
            self._work.wait()


class Gang:
    """The processes of a world; `close` when the run is over."""

    def __init__(
        self,
        world: World,
        device: torch.device,
        store: Store,
        timeout: timedelta,
        at: Callable[[str], object] = lambda place: None,
    ) -> None:
        """Raises RuntimeError (torch's DistError) when the others do not come within `timeout`."""
        self.rank, self.size, self._at, self._timeout = world.rank, world.size, at, timeout
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        self.waits = Stopwatch(device)  # in what a step exchanges, for the others and for the link
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor) -> None:
        self.start_reduce_scatter(own, whole).wait()

    def all_to_all(self, parts: torch.Tensor, whole: torch.Tensor) -> None:
        self.start_all_to_all(parts, whole).wait()

    def start_reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor) -> Pending:
        with self.waits:
            return _Work(dist.reduce_scatter_tensor(own, whole, async_op=True), self.waits)

    def start_all_to_all(self, parts: torch.Tensor, whole: torch.Tensor) -> Pending:
        with self.waits:
            work = dist.all_to_all_single(_bytes(parts), _bytes(whole), async_op=True)
            return _Work(work, self.waits)

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        self.start_all_gather(whole, own).wait()

    def start_all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> Pending:
        with self.waits:
            work = dist.all_gather_into_tensor(_bytes(whole), _bytes(own), async_op=True)
            return _Work(work, self.waits)

    def add_up(self, values: torch.Tensor) -> None:
        with self.waits:
            dist.all_reduce(values)

    def from_first(self, values: torch.Tensor) -> None:
        dist.broadcast(values, 0)

    def gather(self, thing: T) -> list[T]:
        found: list[T | None] = [None] * self.size
        dist.all_gather_object(found, thing)
        return [each for each in found if each is not None]

    def most(self, values: list[int]) -> list[int]:
        found = torch.tensor(values)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return [int(value) for value in found]

    def at(self, place: str) -> None:
        self._at(place)

    def neighbours(self, size: int) -> Exchange:
        return Neighbours(self.rank, size, self.waits)

    def beside(self) -> Beside:
        return Beside(self.rank, self._timeout)

    def close(self) -> None:
        dist.destroy_process_group()


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    """What is only moved, moved as bytes: not every backend knows every type."""
    return flat.view(torch.uint8)
