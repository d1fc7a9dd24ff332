"""Adapter weights in pages of slots, and their low-rank products over the rows of a step.

A page holds adapters of one form (padded rank, adapted layers) slot by slot, for each fused matrix one tensor of all
slots: A [slots, in, parts x rank], and for each part of the matrix B [slots, rank, out]. So the rows of neighbouring
slots are one batched product without copying a weight. Both lie as they are multiplied: with a transposed factor some
processors' libraries choose their kernel, and so the rounding, by the number of rows. Ranks are padded with zeros, which change no sum.

A step's rows with adapters are divided once (`group_rows`): few rows each go together, slot by slot, where a gap of
idle slots is computed and dropped if it is narrow; many rows (prompts) go alone. Rows without an adapter take part in
nothing, and a step without adapters has no groups at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from busbar.workloads.serving.adapter_files import MATRICES, AdapterFile, Part
from busbar.workloads.serving.architecture import Architecture
from busbar.workloads.serving.attention import MIN_ROWS
from busbar.workloads.serving.tensor_names import tensor_shapes

PAGE_SLOTS = 8
LEAST_RANK = 4
MOST_TOGETHER = 8
"""Rows of one adapter that are padded to those of the others; more are a product of their own."""
WIDEST_GAP = 2
"""Idle slots between two others that are computed with them, because two products cost more."""


@dataclass(frozen=True)
class Form:
    """What adapters on one page have in common."""

    rank: int
    """Padded."""
    parts: frozenset[Part]

    @classmethod
    def of(cls, file: AdapterFile) -> Form:
        return cls(max(LEAST_RANK, 1 << (file.rank - 1).bit_length()), frozenset(file.factors))

    def slot_bytes(self, arch: Architecture, dtype: torch.dtype) -> int:
        shapes = tensor_shapes(arch)
        sides = (sum(shapes[f"model.layers.{layer}.{name}.weight"]) for layer, name in self.parts)
        return self.rank * dtype.itemsize * sum(sides)


@dataclass(frozen=True)
class Factors:
    """One fused matrix of one layer, all slots."""

    a: torch.Tensor
    """[slots, in, parts x rank]."""
    b: tuple[torch.Tensor | None, ...]
    """[slots, rank, out] of each part that is adapted."""
    widths: tuple[int, ...]
    """Outputs of every part, adapted or not."""

    def product(self, x: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        """[slots, rows, out] of x [slots, rows, in], for the slots from `first` to before `stop`."""
        low = torch.bmm(x, self.a[first:stop])
        return self._raised(low, lambda part, b: torch.bmm(part, b[first:stop]))

    def product_of_one(self, x: torch.Tensor, slot: int) -> torch.Tensor:
        """[rows, out] of x [rows, in]."""
        return self._raised(torch.mm(x, self.a[slot]), lambda part, b: torch.mm(part, b[slot]))

    def _raised(self, low: torch.Tensor, product: _Product) -> torch.Tensor:
        outs: list[torch.Tensor] = []
        place = 0
        for b, width in zip(self.b, self.widths, strict=True):
            if b is None:
                outs.append(low.new_zeros((*low.shape[:-1], width)))
            else:
                outs.append(product(low[..., place : place + b.shape[1]], b))
                place += b.shape[1]
        return outs[0] if len(outs) == 1 else torch.cat(outs, -1)


class _Product(Protocol):
    def __call__(self, low: torch.Tensor, b: torch.Tensor, /) -> torch.Tensor: ...


class Page:
    """`slots` places for adapters of one form."""

    def __init__(
        self, form: Form, slots: int, arch: Architecture, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.form = form
        self.slots = slots
        self.bytes = slots * form.slot_bytes(arch, dtype)
        shapes = tensor_shapes(arch)
        self.layers: list[dict[str, Factors]] = []
        for layer in range(arch.layers):
            found: dict[str, Factors] = {}
            for matrix, names in MATRICES.items():
                adapted = [(layer, name) in form.parts for name in names]
                if not any(adapted):
                    continue
                sides = [shapes[f"model.layers.{layer}.{name}.weight"] for name in names]
                rows = sum(adapted) * form.rank
                found[matrix] = Factors(
                    torch.zeros((slots, sides[0][1], rows), device=device, dtype=dtype),
                    tuple(
                        torch.zeros((slots, form.rank, side[0]), device=device, dtype=dtype) if has else None
                        for side, has in zip(sides, adapted, strict=True)
                    ),
                    tuple(side[0] for side in sides),
                )
            self.layers.append(found)

    def write(self, slot: int, factors: Mapping[Part, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Puts an adapter of the page's form in a slot that nobody uses."""
        for layer, found in enumerate(self.layers):
            for matrix, fused in found.items():
                fused.a[slot].zero_()
                place = 0
                for name, b in zip(MATRICES[matrix], fused.b, strict=True):
                    if b is None:
                        continue
                    down, up = factors[layer, name]
                    rank = down.shape[0]
                    fused.a[slot, :, place : place + rank].copy_(down.T)
                    b[slot].zero_()
                    b[slot, :rank].copy_(up.T)
                    place += self.form.rank


@dataclass(frozen=True)
class Place:
    """Where an adapter is."""

    page: Page
    slot: int


class Group(Protocol):
    """Rows whose products are computed at once."""

    def add(self, layer: int, matrix: str, x: torch.Tensor, out: torch.Tensor) -> None:
        """Adds the adapters' part to the rows of `out` [rows, out] in place; x [rows, in] is what the fused matrix was
        given."""


@dataclass(frozen=True)
class Alone:
    """Rows of one adapter."""

    place: Place
    taken: torch.Tensor
    """Rows that are computed: the adapter's, the last one repeated where they are too few."""
    rows: torch.Tensor

    def add(self, layer: int, matrix: str, x: torch.Tensor, out: torch.Tensor) -> None:
        factors = self.place.page.layers[layer].get(matrix)
        if factors is not None:
            more = factors.product_of_one(x.index_select(0, self.taken), self.place.slot)
            out.index_add_(0, self.rows, more[: len(self.rows)])


@dataclass(frozen=True)
class Together:
    """The same number of rows for each of some neighbouring slots, padded with rows whose result is dropped."""

    page: Page
    first: int
    stop: int
    taken: torch.Tensor
    """[slots x rows] rows that are computed, slot by slot."""
    kept: torch.Tensor | None
    """Which of them are no padding; None: all."""
    rows: torch.Tensor
    """The rows to which these are added."""

    def add(self, layer: int, matrix: str, x: torch.Tensor, out: torch.Tensor) -> None:
        factors = self.page.layers[layer].get(matrix)
        if factors is not None:
            taken = x.index_select(0, self.taken).view(self.stop - self.first, -1, x.shape[1])
            more = factors.product(taken, self.first, self.stop).view(len(self.taken), -1)
            out.index_add_(0, self.rows, more if self.kept is None else more.index_select(0, self.kept))


@dataclass(frozen=True)
class AdapterRows:
    """A step's rows with adapters."""

    groups: tuple[Group, ...]
    wanted: tuple[Group, ...]
    """The same for the rows that are left where only sampled and pooled ones are computed."""


def group_rows(
    places: Sequence[Place | None], device: torch.device, together: bool = True
) -> tuple[Group, ...]:
    """Divides rows, each with the place of its adapter. Not `together`: a row's result does not depend on other
    adapters' rows, as far as the library's products do not depend on the number of rows."""
    rows_of: dict[Place, list[int]] = {}
    for row, place in enumerate(places):
        if place is not None:
            rows_of.setdefault(place, []).append(row)
    groups: list[Group] = []
    few: dict[Page, dict[int, list[int]]] = {}
    for place, rows in rows_of.items():
        if together and len(rows) <= MOST_TOGETHER:
            few.setdefault(place.page, {})[place.slot] = rows
            continue
        taken = torch.tensor(rows + rows[-1:] * (MIN_ROWS - len(rows)), device=device)
        groups.append(Alone(place, taken, taken[: len(rows)]))
    for page, by_slot in few.items():
        groups += [_together(page, by_slot, slots, device) for slots in _neighbours(sorted(by_slot))]
    return tuple(groups)


def _neighbours(slots: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for slot in slots:
        if runs and slot - runs[-1][-1] <= WIDEST_GAP + 1:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs


def _together(
    page: Page, by_slot: Mapping[int, list[int]], slots: Sequence[int], device: torch.device
) -> Together:
    first, stop = slots[0], slots[-1] + 1
    most = max(len(by_slot[slot]) for slot in slots)
    taken: list[int] = []
    kept: list[int] = []
    for slot in range(first, stop):
        rows = by_slot.get(slot, [])
        kept += range(len(taken), len(taken) + len(rows))
        taken += rows + [0] * (most - len(rows))
    return Together(
        page,
        first,
        stop,
        torch.tensor(taken, device=device),
        None if len(kept) == len(taken) else torch.tensor(kept, device=device),
        torch.tensor([taken[i] for i in kept], device=device),
    )
