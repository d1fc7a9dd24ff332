"""Memory of an exact size in which every byte has an owner.

An arena has one region per owner, allocated with the size that the plan granted when the owner carves its first
flat tensor from it: what is not needed yet takes no memory. What cannot be carved because torch allocates it itself (activations) or what only borrows (the snapshot while
it is being written) is *reserved*: accounted, not carved. A request above an owner's grant is an error and never
silent growth, which on a GPU would end the run hours later.

On a GPU the host arena is pinned by registering its pages (cudaHostRegister), because torch's own pinned
allocator rounds sizes up to a power of two. They must be unregistered before the region is freed: the driver would
keep the old pages for that address range, and refuse the next arena at the same addresses.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from busbar.workloads.training.demand import aligned
from busbar.workloads.training.errors import OutOfArena

PAGE = 4096


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
        self.regions: dict[str, torch.Tensor] = {}
        self._pin = False

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
        start = self.used[owner]
        self._charge(owner, size)
        if owner not in self.regions:
            self.regions[owner] = _allocate(self.grants[owner], self.device)
            if self._pin:
                self._register(self.regions[owner])
        return self.regions[owner][start : start + elements * dtype.itemsize].view(dtype).zero_()

    def carve_rest(self, owner: str) -> torch.Tensor:
        """What nobody has carved of an owner's region so far, as bytes."""
        return self.carve(owner, self.grants[owner] - self.used[owner], torch.uint8)

    def observe(self, owner: str, size: int) -> None:
        """Account `size` bytes as the measured peak of a reserved owner."""
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
        """Fix the pages of all regions, also of later ones, for asynchronous copies to and from a GPU."""
        self._pin = True
        for region in self.regions.values():
            self._register(region)

    def _register(self, region: torch.Tensor) -> None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        result = runtime.cudaHostRegister(region.data_ptr(), region.numel(), 0)
        if int(result) != 0:
            raise OutOfArena(
                f"{self.name} arena: the driver refused to pin {region.numel()} bytes: {result}; "
                "raise the container's locked-memory limit (ulimit -l), or offload less"
            )

    def unpin(self) -> None:
        """Unregister the pages once no copy is running; no effect when nothing is pinned."""
        if self._pin and self.regions:
            torch.cuda.synchronize()
            for region in self.regions.values():
                torch.cuda.cudart().cudaHostUnregister(region.data_ptr())  # type: ignore[no-untyped-call]
        self._pin = False


def _allocate(size: int, device: torch.device) -> torch.Tensor:
    """`size` bytes; on the host from the start of a page on, as direct writes to a disk need it."""
    if device.type != "cpu":
        return torch.empty(size, dtype=torch.uint8, device=device)
    room = torch.empty(size + PAGE, dtype=torch.uint8)
    return room[-room.data_ptr() % PAGE :][:size]
