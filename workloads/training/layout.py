"""Where each tensor stands in a file of checkpointed state, and the header that says so (safetensors)."""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

_TYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.int8: "I8",
}
DTYPES = {name: dtype for dtype, name in _TYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One flat tensor of the file; `begin` counts bytes from the start of the data section."""

    name: str
    dtype: torch.dtype
    elements: int
    begin: int

    @property
    def size(self) -> int:
        return self.elements * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.begin + self.size


@dataclass(frozen=True)
class Extent:
    """Which elements of a flat tensor a file has: from `start` on, of `whole`."""

    start: int
    whole: int


@dataclass(frozen=True)
class Layout:
    """The offset of every tensor in its file, in the order given; no gap is between them."""

    entries: tuple[Entry, ...]
    extents: Mapping[str, Extent] = field(default_factory=dict)  # of tensors of which the file has a part
    elements: Mapping[str, int] = field(default_factory=dict)  # of every tensor in all files

    @classmethod
    def of(
        cls,
        tensors: Sequence[tuple[str, torch.dtype, int]],
        extents: Mapping[str, Extent] | None = None,
        elements: Mapping[str, int] | None = None,
    ) -> Layout:
        """The layout of (name, dtype, elements). Raises ValueError if an element would be misaligned."""
        entries, begin = [], 0
        for name, dtype, count in tensors:
            if begin % dtype.itemsize:
                raise ValueError(
                    f"{name} would begin at byte {begin}, which is no multiple of {dtype.itemsize}"
                )
            entries.append(Entry(name, dtype, count, begin))
            begin = entries[-1].end
        return cls(tuple(entries), extents or {}, elements or {})

    @property
    def size(self) -> int:
        return self.entries[-1].end if self.entries else 0

    def parts(self, start: int, data: torch.Tensor) -> Iterator[tuple[Entry, int, torch.Tensor]]:
        """(tensor, byte of it, bytes from there on) of all tensors in `data`, which stands at byte `start`."""
        end = start + data.numel()
        first = bisect.bisect_right(self.entries, start, key=lambda entry: entry.begin) - 1
        for entry in self.entries[max(0, first) :]:
            low, high = max(entry.begin, start), min(entry.end, end)
            if entry.begin >= end:
                return
            if low < high:
                yield entry, low - entry.begin, data[low - start : high - start]

    def header(self) -> bytes:
        """The safetensors header, padded so that the data section starts at a multiple of 4096 bytes."""
        described = {
            entry.name: {
                "dtype": _TYPES[entry.dtype],
                "shape": [entry.elements],
                "data_offsets": [entry.begin, entry.end],
            }
            for entry in self.entries
        }
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % 4096)
        return len(text).to_bytes(8, "little") + text
