"""What stays in memory and what is streamed, where the weights are larger than the memory. Pure Python.

Layers that do not stay are read through slots: while one layer computes in its slot, the next ones are read into the
others. A pass over the layers costs the same time for one token as for as many as the processor computes meanwhile, so
memory goes, in this order, to

    1. what every step needs: embedding, head, the slots, logits, the least KV cache
    2. the work space of large steps, at most a quarter of the rest
    3. the KV cache: what was asked for, else at most half of the rest, so that many requests share a pass
    4. layers that stay, spread evenly, so that reading goes on while they compute

A model with experts is read by expert where memory holds the rest of all its layers, and places for the experts of two
tokens of layers that follow each other: in 1. that takes the place of the slots, and in 4. there are more places. What is
read is at most what whole layers would take, because no slots lie beside what stays; for few tokens it is much less.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from busbar.workloads.serving.errors import MemoryTooSmall

MOST_TOKENS, LEAST_TOKENS = 2048, 64
"""Of a step, where no number was asked for."""
IN_FLIGHT_BYTES = 8 * 2**20
"""Small layers are read further ahead than one, up to so many bytes: a disk needs them to reach its rate."""
MOST_SLOTS = 8
UNITS = ("auto", "layers", "experts")
"""What is read at a time; auto: experts where the model has them and the plan fits."""
LEAST_BLOCKS = 2
"""KV blocks: one is scratch."""
MIB = 2**20


@dataclass(frozen=True)
class ExpertNeeds:
    """Of a model with experts, where these are read one by one."""

    count: int
    """In a layer."""
    per_token: int
    bytes: int
    """Of one."""
    rest_bytes: int
    """Of a layer without them."""

    @property
    def least_places(self) -> int:
        """For one token: what a layer computes with, and what is read for the next one."""
        return 2 * self.per_token


@dataclass(frozen=True)
class Needs:
    """Bytes of a model, on the device that computes."""

    layers: int
    layer_bytes: int
    fixed_bytes: int
    """What always stays: embedding, head, norm, adapters, the logits of a step."""
    token_bytes: int
    """Work space for a token of a step."""
    block_bytes: int
    """Of a KV block."""
    most_blocks: int
    """More can never be used."""
    kv_bytes: int | None = None
    """Asked for."""
    tokens: int | None = None
    """Of a step, asked for."""
    depth: int | None = None
    """Layers read ahead, asked for; None: one, or more small ones."""
    draft_bytes: int = 0
    """Of a draft model: its weights and its logits of a step. Its part of a KV block is in `block_bytes`."""
    experts: ExpertNeeds | None = None
    unit: str = "auto"
    """Asked for, of `UNITS`."""

    @property
    def slots(self) -> int:
        if self.depth is not None:
            return min(self.depth + 1, self.layers)
        return min(max(2, min(MOST_SLOTS, 1 + IN_FLIGHT_BYTES // self.layer_bytes)), self.layers)

    @property
    def least_kv(self) -> int:
        return self.kv_bytes or LEAST_BLOCKS * self.block_bytes

    @property
    def least_tokens(self) -> int:
        return self.tokens or LEAST_TOKENS

    @property
    def least_bytes(self) -> int:
        """With which streaming works at all."""
        return min(self.least_of(unit) for unit in self.units)

    @property
    def units(self) -> tuple[str, ...]:
        """What may be read at a time, the preferred one first."""
        if self.unit != "auto":
            return (self.unit,)
        return ("layers",) if self.experts is None else ("experts", "layers")

    def unit_for(self, memory_bytes: int) -> str | None:
        """The preferred one that fits."""
        return next((unit for unit in self.units if self.least_of(unit) <= memory_bytes), None)

    def weights_of(self, unit: str) -> int:
        """The least of the layers in memory."""
        if unit == "layers" or self.experts is None:
            return self.slots * self.layer_bytes
        return self.layers * self.experts.rest_bytes + self.experts.least_places * self.experts.bytes

    def least_of(self, unit: str) -> int:
        """With which that can be read."""
        return self._always + self.weights_of(unit) + self.least_tokens * self.token_bytes

    @property
    def resident_bytes(self) -> int:
        """With which all layers stay."""
        work = self.least_tokens * self.token_bytes
        return self._always + self.layers * self.layer_bytes + work

    @property
    def _always(self) -> int:
        return self.fixed_bytes + self.draft_bytes + self.least_kv


@dataclass(frozen=True)
class StreamPlan:
    """What of the memory is for what."""

    needs: Needs
    memory_bytes: int
    streamed: tuple[int, ...]
    """Layers that are read in every pass; empty: all stay."""
    slots: int
    kv_bytes: int
    tokens: int
    """Of a step, at most."""
    places: int = 0
    """For experts, where these are read one by one: no layer is streamed then."""

    @property
    def all_stay(self) -> bool:
        return not (self.streamed or self.places)

    @property
    def pass_bytes(self) -> int:
        """Read in every step; of experts, in one that uses all of them."""
        experts = self.needs.experts
        if self.places and experts is not None:
            return (self.needs.layers * experts.count - self.places) * experts.bytes
        return len(self.streamed) * self.needs.layer_bytes

    @property
    def text(self) -> str:
        """For the log and the person who starts the engine."""
        needs, count, experts = self.needs, len(self.streamed), self.needs.experts
        if self.places and experts is not None:
            ahead = (
                "none read ahead" if needs.depth == 0 else "read ahead as the next layer's router foresees"
            )
            return (
                f"all {needs.layers} layers stay in memory but for their experts, which have {self.places} places of "
                f"{experts.bytes / MIB:.1f} MiB for {needs.layers * experts.count} ({ahead}), at most "
                f"{self.pass_bytes / MIB:.0f} MiB in a step{self._shares}"
            )
        if not count:
            return f"all {needs.layers} layers stay in memory; nothing is streamed"
        return (
            f"{needs.layers - count} of {needs.layers} layers stay in memory, {count} are streamed through {self.slots} "
            f"slots of {needs.layer_bytes / MIB:.1f} MiB ({self.slots - 1} read ahead), {self.pass_bytes / MIB:.0f} MiB in "
            f"every step{self._shares}"
        )

    @property
    def _shares(self) -> str:
        return (
            f"; KV cache {self.kv_bytes / MIB:.0f} MiB, steps of up to {self.tokens} tokens, "
            f"{self.memory_bytes / MIB:.0f} MiB of memory in all"
        )


def plan_stream(needs: Needs, memory_bytes: int, fixes: Iterable[tuple[str, Needs]] = ()) -> StreamPlan:
    """Divides the memory. Raises MemoryTooSmall where even the least does not fit.

    Args:
        fixes: what would help (a flag), and the needs with it, from the cheapest on.
    """
    unit = needs.unit_for(memory_bytes)
    if unit is None:
        raise MemoryTooSmall(_refusal(needs, memory_bytes, fixes))
    left = memory_bytes - needs.least_of(unit)
    tokens = needs.least_tokens
    if needs.tokens is None:
        while 2 * tokens <= MOST_TOKENS and (2 * tokens - LEAST_TOKENS) * needs.token_bytes <= left / 4:
            tokens *= 2
    left -= (tokens - needs.least_tokens) * needs.token_bytes
    kv = needs.least_kv
    if needs.kv_bytes is None:
        blocks = min(needs.most_blocks + 1 - LEAST_BLOCKS, left // 2 // needs.block_bytes)
        kv += max(0, blocks) * needs.block_bytes
    left -= kv - needs.least_kv
    experts = needs.experts
    if unit == "experts" and experts is not None:
        places = experts.least_places + left // experts.bytes
        if places >= needs.layers * experts.count:
            places = 0
        return StreamPlan(needs, memory_bytes, (), 0, kv, tokens, places)
    stays = left // needs.layer_bytes
    if stays + needs.slots >= needs.layers:  # the slots' memory holds the rest
        return StreamPlan(needs, memory_bytes, (), 0, kv, tokens)
    streamed = needs.layers - stays
    return StreamPlan(needs, memory_bytes, spread(streamed, needs.layers), needs.slots, kv, tokens)


def spread(some: int, of: int) -> tuple[int, ...]:
    """`some` of the numbers below `of`, evenly."""
    return tuple(i for i in range(of) if (i + 1) * some // of > i * some // of)


def _refusal(needs: Needs, memory_bytes: int, fixes: Iterable[tuple[str, Needs]]) -> str:
    unit, experts = min(needs.units, key=needs.least_of), needs.experts
    weights = f"{needs.weights_of(unit) / MIB:.0f} for "
    if unit == "experts" and experts is not None:
        weights += f"{needs.layers} layers without their experts and {experts.least_places} of these"
    else:
        weights += f"{needs.slots} of {needs.layers} layers"
    parts = (
        f"{needs.fixed_bytes / MIB:.0f} for embedding, head and logits, {weights}, {needs.least_kv / MIB:.1f} for keys and values, "
        f"{needs.least_tokens * needs.token_bytes / MIB:.1f} for a step of {needs.least_tokens} tokens"
    )
    if needs.draft_bytes:
        parts += f", {needs.draft_bytes / MIB:.0f} for the draft model"
    text = (
        f"the model does not fit into {memory_bytes / MIB:.0f} MiB even with its {unit} streamed: that takes "
        f"{needs.least_bytes / MIB:.0f} MiB ({parts})"
    )
    for name, changed in fixes:
        if changed.least_bytes <= memory_bytes:
            return f"{text}. It fits with {name}"
    return f"{text}. Give the engine {-(-needs.least_bytes // MIB)} MiB of memory"


def fixes_of(needs: Needs) -> list[tuple[str, Needs]]:
    """What can be given up, from the cheapest on, beside other forms of the weights."""
    found: list[tuple[str, Needs]] = []
    if needs.draft_bytes:
        found.append(("no draft model (no --draft)", replace(needs, draft_bytes=0)))
    if needs.tokens is not None and needs.tokens > LEAST_TOKENS:
        changed = replace(needs, tokens=LEAST_TOKENS)
        found.append((f"steps of {LEAST_TOKENS} tokens (--max-batched-tokens {LEAST_TOKENS})", changed))
    if needs.kv_bytes is not None and needs.kv_bytes > LEAST_BLOCKS * needs.block_bytes:
        changed = replace(needs, kv_bytes=None)
        found.append(("a smaller KV cache (no --kv-memory: it gets what is left)", changed))
    if needs.unit == "layers" and needs.experts is not None:
        found.append(("experts read one by one (no --stream-unit layers)", replace(needs, unit="auto")))
    if needs.slots > 2:
        found.append(("one layer read ahead (--stream-depth 1)", replace(needs, depth=1)))
    if needs.slots > 1:
        found.append(("no layer read ahead, which is slower (--stream-depth 0)", replace(needs, depth=0)))
    return found
