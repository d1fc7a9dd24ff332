"""Memory of an exact size in which every byte has an owner.

An arena is one region, allocated once with the size that the plan granted, and carved into flat tensors.
What cannot be carved because torch allocates it itself (activations) or what only borrows (the snapshot while
it is being written) is *reserved*: accounted, not carved. Asking for more than was granted to an owner is an
error, never a silent growth: on a GPU that is where a run dies hours later.

On a GPU the host arena is pinned by registering its pages (cudaHostRegister), because torch's own pinned
allocator rounds sizes up to a power of two. They must be let go again before the region is freed: the driver
would keep the old pages for that address range, and refuse the next arena that happens to lie there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from busbar.workloads.training.errors import OutOfArena
from busbar.workloads.training.plan import aligned


class Arena:
    """`grants` are bytes per owner; `reserved` names those owners whose bytes are accounted but not carved."""

    def __init__(
        self, name: str, grants: Mapping[str, int], device: torch.device, *, reserved: tuple[str, ...] = ()
    ) -> None:
        self.name, self.device = name, device
        self.grants = dict(grants)
        self.used: dict[str, int] = dict.fromkeys(grants, 0)
        self.peak: dict[str, int] = dict.fromkeys(grants, 0)
        self._reserved = set(reserved)
        carved = sum(size for owner, size in grants.items() if owner not in self._reserved)
        self._region = torch.empty(carved, dtype=torch.uint8, device=device)
        self._next = 0
        self._pinned = False

    @property
    def capacity_bytes(self) -> int:
        return sum(self.grants.values())

    @property
    def peak_bytes(self) -> int:
        """Upper bound of what was in use: the sum of the owners' peaks."""
        return sum(self.peak.values())

    def carve(self, owner: str, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A zeroed flat tensor of `elements` that belongs to `owner` for the arena's life."""
        size = aligned(elements * dtype.itemsize)
        self._charge(owner, size)
        view = self._region[self._next : self._next + elements * dtype.itemsize].view(dtype)
        self._next += size
        return view.zero_()

    def observe(self, owner: str, size: int) -> None:
        """Account `size` bytes that a reserved owner was seen to use at its worst moment."""
        if size > self.grants[owner]:
            raise OutOfArena(self._overdraft(owner, size))
        self.used[owner] = size
        self.peak[owner] = max(self.peak[owner], size)

    def _charge(self, owner: str, size: int) -> None:
        if owner in self._reserved or self.used[owner] + size > self.grants[owner]:
            raise OutOfArena(self._overdraft(owner, size))
        self.used[owner] += size
        self.peak[owner] = self.used[owner]

    def _overdraft(self, owner: str, size: int) -> str:
        return (
            f"{self.name} arena: {owner} asks for {size} bytes more than its plan left: "
            f"{self.used[owner]} of {self.grants[owner]} are used"
        )

    def pin(self) -> None:
        """Make the region's pages fixed for asynchronous copies to and from a GPU."""
        if self._region.numel() == 0:
            return
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        result = runtime.cudaHostRegister(self._region.data_ptr(), self._region.numel(), 0)
        if int(result) != 0:
            raise OutOfArena(
                f"{self.name} arena: the driver refused to pin {self._region.numel()} bytes: {result}; "
                "raise the container's locked-memory limit (ulimit -l), or offload less"
            )
        self._pinned = True

    def unpin(self) -> None:
        """Undo `pin` once no copy is under way; harmless when nothing is pinned."""
        if self._pinned:
            self._pinned = False
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._region.data_ptr())  # type: ignore[no-untyped-call]
