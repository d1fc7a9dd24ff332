"""Where a forward pass waits for the updates of the step before.

Each group of weights has a gate. A forward pass reaches the gates in forward order: that of a block when the block
begins, that of what follows the blocks when the last one has ended, and in any case when a module that owns weights
outside the blocks begins. On a GPU the stream waits, not the host.

Where the other ranks' part of a group is then gathered, that of the next group begins with each gate, if its update is over
by then, so that it comes while this group is computed with. Ranks may differ in when they begin, not in the order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn

from busbar.workloads.machine.streams import Event, Stream
from busbar.workloads.training.groups import FlatGroup, blocks
from busbar.workloads.training.ranks import Pending
from busbar.workloads.training.step_clock import StepClock


class Gates:
    """Of one model; open until they are shut by the events of an update."""

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[FlatGroup],
        stream: Stream,
        passed: Callable[[FlatGroup], Pending | None] = lambda flat: None,
        clock: StepClock | None = None,
        *,
        ahead: bool = False,
    ) -> None:
        """
        Args:
            stream: where the forward pass runs.
            passed: called for each group in order, when it was updated; what it began has to end before the group is used.
            ahead: call it for a group when the gate before is reached, if it was updated by then.
        """
        self._groups, self._stream, self._passed, self._clock = groups, stream, passed, clock
        self.ahead = ahead
        self._events: Sequence[Event] = ()
        self._left_out: Collection[str] = ()  # groups that were not updated
        self._begun: tuple[int, Pending | None] | None = None  # for the gate with this index
        self._next = 0  # the first gate that was not reached
        self._attach(model)

    def shut(self, events: Sequence[Event], left_out: Collection[str] = ()) -> None:
        """Make the next forward pass wait for `events`, one per group; groups that are left out were not updated."""
        self._events, self._left_out, self._next, self._begun = events, left_out, 0, None

    def reach(self, index: int) -> None:
        """Wait for the group with this index and all before it."""
        if not (self._next <= index and self._next < len(self._events)):
            return
        if self._clock is not None:
            self._clock.ended("forward")
        while self._next <= index and self._next < len(self._events):
            pending = self._begin(self._next)
            if pending is not None:
                pending.wait()
            self._next += 1
            if self.ahead and self._next < len(self._events) and self._events[self._next].is_set():
                self._begun = self._next, self._begin(self._next)
        if self._clock is not None:
            self._clock.ended("wait")

    def _begin(self, index: int) -> Pending | None:
        """What `passed` begins for the group with this index, which it may have begun already."""
        if self._begun is not None and self._begun[0] == index:
            return self._begun[1]
        self._stream.wait(self._events[index])
        flat = self._groups[index]
        return None if flat.group.name in self._left_out else self._passed(flat)

    def reach_all(self) -> None:
        """Wait for whatever no forward pass has reached."""
        self.reach(len(self._groups) - 1)

    def _attach(self, model: nn.Module) -> None:
        inner = blocks(model)
        by_name = {flat.group.name: index for index, flat in enumerate(self._groups)}
        owner = {
            id(member.parameter): index
            for index, flat in enumerate(self._groups)
            for member in flat.group.members
        }
        inside = {id(module) for block in inner for module in block.modules()}
        for module in model.modules():
            own = [owner[id(each)] for each in module.parameters(recurse=False) if id(each) in owner]
            if own and id(module) not in inside:
                self._before(module, max(own))
        for number, block in enumerate(inner):
            if (index := by_name.get(f"block-{number}")) is not None:
                self._before(block, index)
        if not inner:
            self._before(model, len(self._groups) - 1)
        elif (
            "embedding" in by_name
        ):  # also where the model's own code reads a table without calling its module
            self._before(model, by_name["embedding"])
        if inner and "head" in by_name:
            inner[-1].register_forward_hook(lambda *_: self._reached(by_name["head"]))

    def _before(self, module: nn.Module, index: int) -> None:
        module.register_forward_pre_hook(lambda *_: self._reached(index))

    def _reached(self, index: int) -> Any:
        self.reach(index)  # and None, which tells torch that the hook changes nothing
