"""Parameters and gradients as views of flat device buffers: one group per transformer block.

A group is the unit of placement (its optimizer state is on the device or on the host) and, cut into chunks,
the unit of streaming. What stands before the blocks (embedding) and after them (norm, head) forms a group
each; tied weights appear once, where they are registered first.

Over several ranks each updates one slice of every group, and keeps the optimizer's state of that slice alone. With
gradients divided too it keeps the slice of the gradients alone, and they have no views (see `gradient_shards`); with
weights divided, that of the weights too, and of what is not trained in the blocks (see `peer_slots`).

Within a group every parameter starts at a multiple of 1024 elements, and so does every rank's slice. Chunks are cut at such multiples, so
that a parameter's pieces see the same vector lanes as the whole parameter would: cutting elsewhere moves the
scalar tail of a vectorised loop, and tails may round differently.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from busbar.workloads.training.arena import Arena
from busbar.workloads.training.demand import GroupSize, aligned, sliced
from busbar.workloads.training.first_weights import IN_MODEL, Source, without_memory
from busbar.workloads.training.settings import OPTIMIZER, PARAMETERS

GRAIN = 1024
Named = tuple[int, str, nn.Parameter]  # index, name, parameter


@dataclass(frozen=True)
class Member:
    """One parameter and where it stands in its group's flat buffers (elements)."""

    name: str
    parameter: nn.Parameter
    start: int
    index: int  # in the order of model.parameters(), in which the gradient norm is summed

    @property
    def decayed(self) -> bool:
        """Weight decay applies to matrices, not to norms and biases."""
        return self.parameter.ndim >= 2

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """This parameter's part of a buffer of the whole group."""
        return flat[self.start :][: self.parameter.numel()].view(self.parameter.shape)


@dataclass(frozen=True)
class Piece:
    """A run of one parameter inside one chunk; offsets in elements."""

    member: Member
    start: int  # in the parameter
    length: int
    offset: int  # in the chunk


@dataclass(frozen=True)
class Group:
    name: str
    members: tuple[Member, ...]
    elements: int  # padding included

    @property
    def size(self) -> GroupSize:
        return GroupSize(self.name, self.elements)

    def pieces(self, start: int, length: int) -> list[Piece]:
        """The parts of parameters that lie in `[start, start + length)` of the flat buffer."""
        found = []
        for member in self.members:
            first = max(member.start, start)
            last = min(member.start + member.parameter.numel(), start + length)
            if first < last:
                found.append(Piece(member, first - member.start, last - first, first - start))
        return found


def make_groups(model: nn.Module, ranks: int = 1) -> tuple[Group, ...]:
    """Groups of `model`'s trainable parameters in forward order, which `ranks` can share evenly."""
    found = blocks(model)
    owner = {id(p): index for index, block in enumerate(found) for p in block.parameters()}
    before: list[Named] = []
    after: list[Named] = []
    inside: list[list[Named]] = [[] for _ in found]
    other = before
    for index, (name, parameter) in enumerate(model.named_parameters()):  # tied weights appear once
        if id(parameter) in owner:
            other = after
        if parameter.requires_grad:
            place = inside[owner[id(parameter)]] if id(parameter) in owner else other
            place.append((index, name, parameter))
    named = [("embedding", before)]
    named += [(f"block-{index}", members) for index, members in enumerate(inside)]
    named += [("head", after)]
    return tuple(_lay_out(name, members, GRAIN * ranks) for name, members in named if members)


def blocks(model: nn.Module) -> Sequence[nn.Module]:
    """The children of the module list that holds most parameters; none: everything is one group."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        return []
    return list(max(lists, key=_size))


def _size(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _lay_out(name: str, parameters: list[Named], unit: int) -> Group:
    members, start = [], 0
    for index, label, parameter in parameters:
        members.append(Member(label, parameter, start, index))
        start += -(-parameter.numel() // GRAIN) * GRAIN
    return Group(name, tuple(members), -(-start // unit) * unit)


@dataclass(frozen=True)
class FlatGroup:
    """A group with its buffers on the device; the model's parameters and gradients are views of those that are whole."""

    group: Group
    weights: torch.Tensor  # whole, or this rank's slice; so are the gradients
    gradients: torch.Tensor
    rank: int = 0  # of `ranks`, each of which updates a slice
    ranks: int = 1

    @property
    def length(self) -> int:
        """Elements of a slice: a multiple of 1024."""
        return self.group.elements // self.ranks

    @property
    def start(self) -> int:
        return self.rank * self.length

    @property
    def own_weights(self) -> torch.Tensor:
        return self._own(self.weights)

    @property
    def own_gradients(self) -> torch.Tensor:
        return self._own(self.gradients)

    @property
    def has_whole_weights(self) -> bool:
        return self.weights.numel() == self.group.elements

    @property
    def has_whole_gradients(self) -> bool:
        return self.gradients.numel() == self.group.elements

    def _own(self, flat: torch.Tensor) -> torch.Tensor:
        return flat if flat.numel() == self.length else flat[self.start :][: self.length]


def bind(
    groups: Sequence[Group],
    arena: Arena,
    dtype: torch.dtype,
    rank: int = 0,
    ranks: int = 1,
    sharding: str = OPTIMIZER,
    *,
    gradients: bool = True,
    sums: torch.dtype | None = None,
    source: Source = IN_MODEL,
) -> tuple[FlatGroup, ...]:
    """Move the parameters into the arena from where `source` has them, group by group, and give each a gradient view, where
    gradients are whole.

    Without `gradients` there are none at all; `sums` is their type (None: that of the weights). Of divided weights this
    rank's slices are kept, and the parameters refer to none (see `let_go`).
    """
    divided = sharding == PARAMETERS and ranks > 1
    weights = [
        arena.carve("parameters", group.elements // (ranks if divided else 1), dtype) for group in groups
    ]
    for group, flat_weights in zip(groups, weights, strict=True):
        if divided:
            length = flat_weights.numel()
            for piece in group.pieces(rank * length, length):
                own = flat_weights[piece.offset :][: piece.length]
                source.fill(own, piece.member.parameter, piece.start)
            let_go(group)
            continue
        for member in group.members:
            view = member.view(flat_weights)
            source.fill(view.view(-1), member.parameter, 0)
            member.parameter.data = view
    source.done()
    release_free_memory()  # before the gradients take theirs: at no time is there more than a copy of the weights
    parts = 1 if sharding == OPTIMIZER else ranks
    bound = []
    for group, flat_weights in zip(groups, weights, strict=True):
        size = group.elements // parts
        room = torch.empty(0, dtype=dtype)
        if gradients:
            room = arena.carve("gradients", size, sums or dtype)
        bound.append(FlatGroup(group, flat_weights, room, rank, ranks))
    rebind_gradients(bound)
    return tuple(bound)


def let_go(group: Group) -> None:
    """Have the parameters refer to no weights (see `without_memory`)."""
    for member in group.members:
        without_memory(member.parameter)


def settle(parameters: Sequence[nn.Parameter], arena: Arena, source: Source = IN_MODEL) -> None:
    """Move parameters that are not trained into the arena."""
    for parameter in parameters:
        view = arena.carve("base", parameter.numel(), parameter.dtype).view(parameter.shape)
        source.fill(view.view(-1), parameter, 0)
        parameter.data = view
    if parameters:
        release_free_memory()


def frozen_outside(model: nn.Module) -> list[nn.Parameter]:
    """The parameters around the blocks that are not trained."""
    inside = {id(parameter) for block in blocks(model) for parameter in block.parameters()}
    return [each for each in model.parameters() if not each.requires_grad and id(each) not in inside]


@dataclass(frozen=True)
class FrozenBlock:
    """The weights of a block that are not trained, of whose bytes this rank has a slice."""

    parameters: tuple[tuple[nn.Parameter, int], ...]  # and where each begins
    own: torch.Tensor  # uint8
    ranks: int

    @property
    def size(self) -> int:
        """Bytes on all ranks together."""
        return self.own.numel() * self.ranks

    def view(self, parameter: nn.Parameter, start: int, whole: torch.Tensor) -> torch.Tensor:
        """A parameter's part of the bytes of the whole block."""
        size = parameter.numel() * parameter.itemsize
        return whole[start:][:size].view(parameter.dtype).view(parameter.shape)


def divide_frozen(
    model: nn.Module, arena: Arena, source: Source, rank: int, ranks: int
) -> dict[int, FrozenBlock]:
    """Move this rank's slices of what is not trained in the blocks into the arena, by the blocks' numbers; the parameters
    refer to none then."""
    found = {}
    for number, block in enumerate(blocks(model)):
        placed, size = [], 0
        for parameter in block.parameters():
            if not parameter.requires_grad:
                placed.append((parameter, size))
                size += aligned(parameter.numel() * parameter.itemsize)
        if not placed:
            continue
        own = arena.carve("base", sliced(size, ranks), torch.uint8)
        for parameter, start in placed:
            _take(source, parameter, start, own, rank * own.numel())
            without_memory(parameter)
        found[number] = FrozenBlock(tuple(placed), own, ranks)
    release_free_memory()
    return found


def _take(source: Source, parameter: nn.Parameter, start: int, own: torch.Tensor, first: int) -> None:
    """Fill the part of a parameter, which begins at the byte `start` of its block, that lies in a slice from `first` on."""
    element = parameter.itemsize
    begin = max(start, first)
    end = min(start + parameter.numel() * element, first + own.numel())
    if begin < end:
        target = own[begin - first : end - first].view(parameter.dtype)
        source.fill(target, parameter, (begin - start) // element)


def release_free_memory() -> None:
    """Give what the allocator holds of freed tensors back to the system (glibc keeps it otherwise)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def rebind_gradients(groups: Sequence[FlatGroup]) -> None:
    """Make sure that each parameter's `.grad` is its view, or nothing where gradients are divided."""
    for flat in groups:
        for member in flat.group.members:
            whole = flat.has_whole_gradients
            member.parameter.grad = member.view(flat.gradients) if whole else None


def members(groups: Sequence[FlatGroup]) -> Iterator[tuple[FlatGroup, Member]]:
    for flat in groups:
        for member in flat.group.members:
            yield flat, member
