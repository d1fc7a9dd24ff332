"""Flat tensors in a scratch file: optimizer state for which neither device nor host has room.

They have the few properties of a torch tensor by which state is cut into parts, and are read and written whole or in
part. The file is read and written past the page cache where memory, place and size are whole pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from busbar.workloads.machine.direct_file import PAGE, ScratchFile, page_memory

MEASURED_BYTES = 64 * 2**20
"""Written and read to tell the speed of a disk."""


@dataclass(frozen=True)
class DiskTensor:
    """A run of a file."""

    file: ScratchFile
    begin: int  # bytes in the file
    elements: int
    dtype: torch.dtype

    def numel(self) -> int:
        return self.elements

    @property
    def size(self) -> int:
        """Bytes."""
        return self.elements * self.dtype.itemsize

    def __getitem__(self, run: slice) -> DiskTensor:
        start, stop, _ = run.indices(self.elements)
        begin = self.begin + start * self.dtype.itemsize
        return DiskTensor(self.file, begin, max(0, stop - start), self.dtype)

    def view(self, dtype: torch.dtype) -> DiskTensor:
        """The same bytes as another type."""
        return DiskTensor(self.file, self.begin, self.size // dtype.itemsize, dtype)

    def read(self, into: torch.Tensor) -> None:
        """Fill a tensor of this size on the host. Raises OSError."""
        self.file.read(into.view(torch.uint8), self.begin)

    def write(self, data: torch.Tensor) -> None:
        """Become what a tensor of this size on the host holds. Raises OSError."""
        self.file.write(data.view(torch.uint8), self.begin)


def whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


@dataclass(frozen=True)
class DiskRates:
    """Bytes per second, one at a time."""

    read: float
    write: float

    def seconds(self, size: int) -> float:
        """To read `size` bytes and to write them back."""
        return size / self.read + size / self.write


def measure_disk(folder: Path, note: Callable[[str], object] = lambda text: None) -> DiskRates:
    """The speed of the disk of `folder`, past the page cache; `note` is told if its file system cannot. Raises OSError."""
    data = page_memory(MEASURED_BYTES).fill_(1)
    file = ScratchFile(folder, MEASURED_BYTES, note)
    try:
        times = [time.monotonic()]
        for move in (file.write, file.read):
            move(data, 0)
            times.append(time.monotonic())
    finally:
        file.close()
    write_s, read_s = (after - before for before, after in pairwise(times))
    return DiskRates(MEASURED_BYTES / max(read_s, 1e-9), MEASURED_BYTES / max(write_s, 1e-9))
