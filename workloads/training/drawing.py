"""A model whose tensors are made as its own code makes them, of which a few at a time are in memory.

Initial weights are drawn one after another from one generator, so those of a block are known only when all before them
were drawn. While a model is made here, every large tensor gives its memory back when another one needs room. What is
kept instead is the operations that wrote to it, each with the state of the generator before it. When a tensor is asked
for, those on which its content depends are carried out once more, so it has the same bits.

A write of a whole tensor ends what has to be carried out for it. A tensor that cannot be made again, because it was drawn
from another generator, stays in memory.

All of this happens below torch's functions, to real tensors of the host, so the model's code sees no difference.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from busbar.workloads.training.plan import DRAWN_ROOM

LARGE_BYTES = 16 * 1024  # smaller tensors stay in memory: norms and biases
_OVERWRITING = {
    torch.ops.aten.normal_,
    torch.ops.aten.uniform_,
    torch.ops.aten.zero_,
    torch.ops.aten.fill_,
    torch.ops.aten.copy_,
}
_UNDEFINED = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.new_empty,
    torch.ops.aten.empty_strided,
}


@dataclass
class _Paged:
    """A large tensor's memory."""

    storage: torch.UntypedStorage
    size: int
    there: bool = True
    pinned: bool = False

    def allocate(self) -> None:
        if not self.there:
            self.storage.resize_(self.size)
            self.there = True

    def give_back(self) -> None:
        if self.there:
            self.storage.resize_(0)
            self.there = False


@dataclass(frozen=True)
class _Operation:
    """One that wrote to large tensors; those are named by their storages."""

    func: Any
    args: Any
    kwargs: Any
    made: tuple[
        tuple[int, torch.Tensor], ...
    ]  # tensors with memory of their own, by their place in the result
    state: torch.Tensor | None  # of the generator before it
    reads: frozenset[int]
    writes: frozenset[int]
    defines: frozenset[int]  # of these all is written, whatever was there

    def repeat(self) -> None:
        if self.state is not None:
            torch.set_rng_state(self.state)
        result = self.func(*self.args, **self.kwargs)
        if self.func.overloadpacket in _UNDEFINED:
            return
        leaves = tree_leaves(result)
        for place, tensor in self.made:
            tensor.copy_(leaves[place])


class Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Active while a model is made; afterwards it tells the content of the model's tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._paged: dict[int, _Paged] = {}  # the one that was used last comes last
        self._log: list[_Operation] = []
        self._largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        used = {key for tensor in given if (key := _key(tensor)) in self._paged}
        if func.is_view:
            with self._for_shapes(used):
                return func(*args, **kwargs)
        written = [tensor for tensor in _written(func, args, kwargs) if _key(tensor) in self._paged]
        over = frozenset(
            _key(each) for each in written if func.overloadpacket in _OVERWRITING and self._is_all(each)
        )
        reads = frozenset() if func.overloadpacket in _UNDEFINED else frozenset(used) - over
        self._bring(reads)
        for key in used:
            self._paged[key].allocate()
        draws = torch.Tag.nondeterministic_seeded in func.tags
        state = torch.get_rng_state() if draws else None
        kept = tree_map(self._as_it_is, (args, kwargs))
        result = func(*args, **kwargs)
        made = tuple(self._meet(result))
        writes = frozenset(map(_key, written)) | {_key(tensor) for _, tensor in made}
        if writes:
            if draws and kwargs.get("generator") is not None:
                self._pin(writes)
            else:
                defines = over | {_key(tensor) for _, tensor in made}
                self._log.append(_Operation(func, kept[0], kept[1], made, state, reads, writes, defines))
        self._use(used | writes)
        return result

    @contextmanager
    def content(self, *tensors: torch.Tensor) -> Iterator[None]:
        """Have these in memory meanwhile."""
        keys = {key for tensor in tensors if (key := _key(tensor)) in self._paged}
        self._bring(keys)
        self._use(keys)
        yield

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have these in memory for ever."""
        for tensor in tensors:
            if (key := _key(tensor)) in self._paged:
                self._bring({key})
                self._pin({key})

    def give_back(self) -> None:
        """All memory of tensors that can be made again."""
        for paged in self._paged.values():
            if not paged.pinned:
                paged.give_back()

    def _meet(self, result: Any) -> Iterator[tuple[int, torch.Tensor]]:
        """Large tensors of a result that have memory which is not known yet, by their place."""
        for place, leaf in enumerate(tree_leaves(result)):
            if (
                not isinstance(leaf, torch.Tensor)
                or leaf.layout is not torch.strided
                or leaf.device.type != "cpu"
            ):
                continue
            storage = leaf.untyped_storage()
            if storage.nbytes() < LARGE_BYTES or storage._cdata in self._paged or not storage.resizable():
                continue
            self._paged[storage._cdata] = _Paged(storage, storage.nbytes())
            self._largest = max(self._largest, storage.nbytes())
            yield place, leaf.detach()

    def _as_it_is(self, leaf: Any) -> Any:
        """An argument as it is now: a parameter may refer to other memory later, and a small tensor may change."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach() if _key(leaf) in self._paged else leaf.detach().clone()

    @contextmanager
    def _for_shapes(self, keys: Collection[int]) -> Iterator[None]:
        """Memory for an operation that looks at no content: it is not touched, so it takes none."""
        missing = [self._paged[key] for key in keys if not self._paged[key].there]
        for paged in missing:
            paged.allocate()
        yield
        for paged in missing:
            paged.give_back()

    def _bring(self, keys: Collection[int]) -> None:
        """Make the content of these again, as far as it is not in memory."""
        if all(self._paged[key].there for key in keys):
            return
        chosen, involved = self._needed(keys)
        for key in involved:
            self._paged[key].allocate()
        state = torch.get_rng_state()
        with torch.no_grad():
            for operation in chosen:
                operation.repeat()
        torch.set_rng_state(state)
        for key in involved - set(keys):  # they have what they had in between
            self._paged[key].give_back()

    def _needed(self, keys: Collection[int]) -> tuple[list[_Operation], set[int]]:
        """The operations on which the content depends, in order, and all tensors that they read and write."""
        pinned = {key for key, paged in self._paged.items() if paged.pinned}
        wanted, chosen = set(keys) - pinned, []
        involved = set(wanted)
        for operation in reversed(self._log):
            if not wanted:
                break
            if operation.writes & wanted:
                chosen.append(operation)
                wanted = (wanted - operation.defines) | (operation.reads - pinned)
                involved |= operation.reads | operation.writes
        return chosen[::-1], involved - pinned

    def _pin(self, keys: Collection[int]) -> None:
        for key in keys:
            self._paged[key].pinned = True

    def _use(self, keys: Collection[int]) -> None:
        """Give memory back that was used longest ago, but none of these."""
        for key in keys:
            self._paged[key] = self._paged.pop(key)
        there = {key: paged for key, paged in self._paged.items() if paged.there and not paged.pinned}
        taken, room = sum(paged.size for paged in there.values()), DRAWN_ROOM * self._largest
        for key, paged in there.items():
            if taken <= room:
                return
            if key not in keys:
                paged.give_back()
                taken -= paged.size

    def _is_all(self, tensor: torch.Tensor) -> bool:
        """Whether a large tensor is all of its memory."""
        whole = tensor.is_contiguous() and tensor.storage_offset() == 0
        return bool(whole and tensor.numel() * tensor.itemsize == self._paged[_key(tensor)].size)


def _key(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return 0
    return int(tensor.untyped_storage()._cdata)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operation changes."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found
