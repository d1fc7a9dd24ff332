"""The order of a step's loads, updates and stores.

Updates run in forward order. A chunk whose state is where the updates run is updated in place. One on the host, or on a
disk, goes through a ring of staging slots:

    load     wait freed[slot];  copy home -> slot;  record loaded
    update   wait loaded;       update the chunk;   record updated
    store    wait updated;      copy slot -> home;  record freed[slot]

Loads do not depend on the gradients, so in the gated schedule as many as there are slots are under way while forward
and backward run (`prefetch`). The host queues a whole step and waits for none of it: `launch` returns an event per
group, for which the next forward pass waits (see `gates`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

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
        # A slot more than there are chunks would let a chunk be loaded before its last store has ended.
        self._slots = slots[: len(self._travelling)]
        self._freed: list[Event | None] = [None] * len(self._slots)
        self._turn = 0  # the slot that is used next
        self._started = 0  # loads of the current step
        self._loaded: deque[tuple[Event, int]] = deque()
        self.loaded_bytes = self.stored_bytes = 0

    def prefetch(self) -> None:
        """Start to load the first chunks of a step, as many as there are slots."""
        while self._started < len(self._slots):
            self._load_next()

    def launch(
        self, begin: Callable[[FlatGroup], object], update: Update, finish: Callable[[FlatGroup], object]
    ) -> list[Event]:
        """Queue the updates of a step behind what is computed now; `begin` runs before those of a group, `finish` behind
        them.

        Returns:
            For each group, the event that its weights are updated.
        """
        self.prefetch()
        compute, queue = self._streams.compute, self._streams.update
        queue.wait(compute.record())
        done = []
        for flat, chunks in self._groups:
            queue.submit(lambda flat=flat: begin(flat))  # type: ignore[misc]
            for chunk in chunks:
                if chunk.resident:
                    assert isinstance(chunk.state, torch.Tensor)
                    queue.submit(lambda chunk=chunk: update(chunk, chunk.state))  # type: ignore[misc]
                else:
                    self._through_a_slot(chunk, update)
            queue.submit(lambda flat=flat: finish(flat))  # type: ignore[misc]
            done.append(queue.record())
        self._started = 0
        return done

    def drain(self) -> None:
        """Wait until all that was queued is done, and the state is where it lives. Raises what failed."""
        self._streams.load.synchronize()
        self._streams.update.synchronize()
        self._streams.store.synchronize()

    def _load_next(self) -> None:
        load, slot = self._streams.load, self._turn
        if (before := self._freed[slot]) is not None:
            load.wait(before)
        chunk = self._travelling[self._started]
        chunk.load(load, self._staging(slot, chunk))
        self._loaded.append((load.record(), slot))
        self._turn = (slot + 1) % len(self._slots)
        self._started += 1
        self.loaded_bytes += chunk.state.numel() * 4

    def _through_a_slot(self, chunk: Chunk, update: Update) -> None:
        queue, store = self._streams.update, self._streams.store
        loaded, slot = self._loaded.popleft()
        staging = self._staging(slot, chunk)
        queue.wait(loaded)
        queue.submit(lambda: update(chunk, staging))
        store.wait(queue.record())
        chunk.store(store, staging)
        self._freed[slot] = store.record()
        self.stored_bytes += staging.numel() * 4
        if self._started < len(self._travelling):
            self._load_next()

    def _staging(self, slot: int, chunk: Chunk) -> torch.Tensor:
        return self._slots[slot][: chunk.state.numel()]
