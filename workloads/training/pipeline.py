"""The order of a step's loads, updates and stores.

Updates run in forward order. A chunk whose state is where the updates run is updated in place. One on the host, or on a
disk, goes through a ring of staging slots:

    load     wait freed[slot];  copy home -> slot;  record loaded
    update   wait loaded;       update the chunk;   record updated
    store    wait updated;      copy slot -> home;  record freed[slot]

Loads do not depend on the gradients, so in the gated schedule as many as there are slots are under way while forward
and backward run (`prefetch`). The host queues a whole step and waits for none of it: `launch` returns an event per
group, for which the next forward pass waits (see `gates`).

Groups that a step leaves out (see `layer_drop`) are not loaded, updated or stored in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

import torch

from busbar.workloads.machine.streams import Event, Streams
from busbar.workloads.training.chunks import Chunk
from busbar.workloads.training.groups import FlatGroup

Update = Callable[[Chunk, torch.Tensor], object]  # of a chunk, whose state is in that buffer on the device


class Pipeline:
    """Chunks by group in forward order, on their way through the slots."""

    def __init__(
        self,
        groups: Sequence[tuple[FlatGroup, Sequence[Chunk]]],
        slots: Sequence[torch.Tensor],
        streams: Streams,
    ) -> None:
        self._groups, self._streams = groups, streams
        self._travelling = [chunk for _, chunks in groups for chunk in chunks if not chunk.resident]
        self._slots = slots[: len(self._travelling)]
        self._freed: list[Event | None] = [None] * len(self._slots)
        self._turn = 0  # the slot that is used next
        # The last store of each chunk, by its place in `_travelling`: where some are left out, a chunk may come into another
        # slot before that has ended.
        self._stored: list[Event | None] = [None] * len(self._travelling)
        self._step: list[int] | None = None  # those that the current step loads; None: it is not known yet
        self._started = 0  # loads of it
        self._loaded: deque[tuple[Event, int, int]] = deque()
        self.loaded_bytes = self.stored_bytes = 0

    def prefetch(self, left_out: Collection[str] = ()) -> None:
        """Start to load the first chunks of a step, as many as there are slots; it leaves these groups out."""
        if self._step is None:
            self._step = [
                place for place, chunk in enumerate(self._travelling) if chunk.flat.group.name not in left_out
            ]
        while self._started < min(len(self._slots), len(self._step)):
            self._load_next(self._step)

    def launch(
        self,
        begin: Callable[[FlatGroup], object],
        update: Update,
        finish: Callable[[FlatGroup], object],
        left_out: Collection[str] = (),
    ) -> list[Event]:
        """Queue the updates of a step behind what is computed now; `begin` runs before those of a group, `finish` behind
        them. Groups that are left out are those that `prefetch` was told.

        Returns:
            For each group, the event that its weights are updated.
        """
        self.prefetch(left_out)
        compute, queue = self._streams.compute, self._streams.update
        queue.wait(compute.record())
        done = []
        for flat, chunks in self._groups:
            if flat.group.name in left_out:
                done.append(queue.record())
                continue
            queue.submit(lambda flat=flat: begin(flat))  # type: ignore[misc]
            for chunk in chunks:
                if chunk.resident:
                    assert isinstance(chunk.state, torch.Tensor)
                    queue.submit(lambda chunk=chunk: update(chunk, chunk.state))  # type: ignore[misc]
                else:
                    self._through_a_slot(chunk, update)
            queue.submit(lambda flat=flat: finish(flat))  # type: ignore[misc]
            done.append(queue.record())
        self._step, self._started = None, 0
        return done

    def drain(self) -> None:
        """Wait until all that was queued is done, and the state is where it lives. Raises what failed."""
        self._streams.load.synchronize()
        self._streams.update.synchronize()
        self._streams.store.synchronize()

    def _load_next(self, step: Sequence[int]) -> None:
        load, slot, place = self._streams.load, self._turn, step[self._started]
        for before in (self._freed[slot], self._stored[place]):
            if before is not None:
                load.wait(before)
        chunk = self._travelling[place]
        chunk.load(load, self._staging(slot, chunk))
        self._loaded.append((load.record(), slot, place))
        self._turn = (slot + 1) % len(self._slots)
        self._started += 1
        self.loaded_bytes += chunk.state.numel() * 4

    def _through_a_slot(self, chunk: Chunk, update: Update) -> None:
        queue, store = self._streams.update, self._streams.store
        loaded, slot, place = self._loaded.popleft()
        staging = self._staging(slot, chunk)
        queue.wait(loaded)
        queue.submit(lambda: update(chunk, staging))
        store.wait(queue.record())
        chunk.store(store, staging)
        self._freed[slot] = self._stored[place] = store.record()
        self.stored_bytes += staging.numel() * 4
        if self._step is not None and self._started < len(self._step):
            self._load_next(self._step)

    def _staging(self, slot: int, chunk: Chunk) -> torch.Tensor:
        return self._slots[slot][: chunk.state.numel()]
