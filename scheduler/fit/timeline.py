"""The seconds of a training step whose optimizer state travels: what waits for what, chunk by chunk.

Four engines work side by side, each at one thing at a time: forward and backward, the link to the device, the update,
and the link back. The rules are those of the training engine:

    load     of a chunk: when its staging slot is free (its last user is stored)
    update   of a chunk, in forward order: when it is loaded and the step's gradient norm is known
    store    of a chunk: when it is updated
    forward  of a group: when its chunks are updated

In the gated schedule loads begin with the step, as far as there are slots, and the next forward pass runs beside the
updates. In the blocking one loads begin after backward, and the step ends when all is stored. Rates are constant, and
nothing is lost between the parts, so the result is a lower bound for what a step takes. With slots for most of the
state the gated step comes to max(compute, state bytes / link), and with few to backward + max(forward, update).

Where several processes share a step, the link between them is one more engine (`exchange` says for how long):

    gather   of a group's updated weights: when the forward pass comes to it, which waits for it; with `weights` beside the
             passes when it comes to the group before, if this one is updated by then
    reduce   of a group's gradients: behind all backward passes; with `gradients` beside the last one of them when that has
             computed the group and the exchange of the group behind is over, for which it waits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STEPS = 6
"""After so many steps the times no longer change; the last one is taken."""


@dataclass(frozen=True, slots=True)
class GroupWork:
    """A transformer block, or what stands before or after the blocks."""

    forward_s: float
    """Of the step's first micro-batch, which alone has to wait for updates."""
    backward_s: float
    """And all of the later micro-batches."""
    chunks: tuple[int, ...]
    """Parameters of each piece that is loaded, updated and stored at once."""
    travels: bool
    """Its optimizer state is on the host."""
    gather_s: float = 0.0
    """Until the other processes' parts of its updated weights are here."""
    reduce_s: float = 0.0
    """Until its gradients are added up over the processes."""
    last_backward_s: float = 0.0
    """Of `backward_s` that of the last micro-batch, beside which gradients may be exchanged."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What processes exchange beside the passes."""

    gradients: bool = False
    weights: bool = False
    busy: float = 0.0
    """Part of an exchange's seconds for which the device itself is held up by it."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one machine; both directions of the link while both are used."""

    load_bytes_per_s: float
    store_bytes_per_s: float
    update_parameters_per_s: float
    norm_s: float = 0.0
    """From the end of backward until updates may begin."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Of one step, in a steady run."""

    seconds: float
    compute_s: float
    """Forward and backward."""
    waited_s: float
    """Of forward passes at the gates, or for the updates at the end of a blocking step."""


def step_time(
    groups: Sequence[GroupWork],
    slots: int,
    state_bytes: float,
    rates: Rates,
    *,
    gated: bool,
    beside: Beside = Beside(),
) -> StepTime:
    """Seconds of a step; `groups` in forward order, `state_bytes` of one parameter."""
    clock = _Clock(groups, slots, state_bytes, rates, gated, beside)
    before = 0.0
    for _ in range(STEPS):
        before = clock.now
        clock.step()
    compute_s = sum(group.forward_s + group.backward_s for group in groups) + rates.norm_s
    seconds = clock.now - before
    return StepTime(seconds, compute_s, max(0.0, seconds - compute_s))


@dataclass(frozen=True, slots=True)
class StreamedBlock:
    """A transformer block whose weights are on the host. What stands around the blocks may be given as one without
    bytes."""

    forward_s: float
    """Of one micro-batch."""
    backward_s: float
    """The same, and to compute it again before."""
    weight_bytes: int
    gradient_bytes: int


def streamed_step_time(
    blocks: Sequence[StreamedBlock],
    micro_batches: int,
    load_bytes_per_s: float,
    store_bytes_per_s: float,
    update_s: float,
    *,
    gated: bool,
) -> float:
    """Seconds of a step whose weights come down block by block, and whose update runs on the host in `update_s`.

    While a block is computed the next one is loaded, and the gradients of the one before it go up. Updates run in
    forward order: in the gated schedule beside the next step's first forward pass, else behind backward.
    """
    forward_s = sum(max(each.forward_s, each.weight_bytes / load_bytes_per_s) for each in blocks)
    backward_s = sum(
        max(each.backward_s, each.weight_bytes / load_bytes_per_s, each.gradient_bytes / store_bytes_per_s)
        for each in blocks
    )
    first_s = max(forward_s, update_s) if gated else forward_s + update_s
    return first_s + (micro_batches - 1) * forward_s + micro_batches * backward_s


class _Clock:
    """When each engine is free again; `now` is that of forward and backward."""

    def __init__(
        self,
        groups: Sequence[GroupWork],
        slots: int,
        state_bytes: float,
        rates: Rates,
        gated: bool,
        beside: Beside,
    ) -> None:
        self.now = 0.0
        self._groups, self._rates, self._gated, self._beside = groups, rates, gated, beside
        self._bytes = [
            size * state_bytes for group in groups if group.travels for size in group.chunks
        ]  # of each travelling chunk
        self._freed = [0.0] * max(1, min(slots, len(self._bytes)))
        self._turn = 0
        self._updated = [0.0] * len(groups)
        self._load = self._update = self._store = 0.0
        self._loaded: list[tuple[float, int]] = []  # of this step: when, and into which slot

    def step(self) -> None:
        self._loaded = []
        if self._gated:
            self._prefetch()
        self._forward()
        self._backward()
        self.now += self._rates.norm_s
        self._prefetch()
        self._launch()
        if not self._gated:
            self.now = max(self.now, self._update, self._store)

    def _forward(self) -> None:
        ahead: float | None = None  # when the group's weights are here, if they are on their way already
        for index, group in enumerate(self._groups):
            here = self._gather(index) if ahead is None else ahead
            self.now = max(self.now, here)
            ahead = self._gather(index + 1) if self._comes_ahead(index + 1) else None
            self.now += group.forward_s

    def _comes_ahead(self, index: int) -> bool:
        """Whether the group's weights are gathered while the one before it is computed with."""
        return self._beside.weights and index < len(self._groups) and self._updated[index] <= self.now

    def _gather(self, index: int) -> float:
        self.now = max(self.now, self._updated[index])
        return self._exchange(self._groups[index].gather_s)

    def _backward(self) -> None:
        if not self._beside.gradients:
            self.now += sum(group.backward_s + group.reduce_s for group in self._groups)
            return
        self.now += sum(group.backward_s - group.last_backward_s for group in self._groups)
        over = self.now
        for group in reversed(self._groups):
            self.now = max(self.now + group.last_backward_s, over)
            over = self._exchange(group.reduce_s)
        self.now = max(self.now, over)

    def _exchange(self, seconds: float) -> float:
        """Begin one, while no other is under way; returns when it is over."""
        over = self.now + seconds
        self.now += self._beside.busy * seconds
        return over

    def _prefetch(self) -> None:
        while len(self._loaded) < min(len(self._freed), len(self._bytes)):
            self._load_next()

    def _load_next(self) -> None:
        slot, size = self._turn, self._bytes[len(self._loaded)]
        begun = max(self._load, self._freed[slot], self.now)
        self._load = begun + size / self._rates.load_bytes_per_s
        self._loaded.append((self._load, slot))
        self._turn = (slot + 1) % len(self._freed)

    def _launch(self) -> None:
        number = 0
        self._update = max(self._update, self.now)
        for index, group in enumerate(self._groups):
            for parameters in group.chunks:
                if not group.travels:
                    self._update += parameters / self._rates.update_parameters_per_s
                    continue
                self._through_a_slot(number, parameters)
                number += 1
            self._updated[index] = self._update

    def _through_a_slot(self, number: int, parameters: int) -> None:
        loaded, slot = self._loaded[number]
        self._update = max(self._update, loaded) + parameters / self._rates.update_parameters_per_s
        self._store = max(self._store, self._update) + self._bytes[number] / self._rates.store_bytes_per_s
        self._freed[slot] = self._store
        if len(self._loaded) < len(self._bytes):
            self._load_next()
