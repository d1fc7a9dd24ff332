"""Data-sheet numbers of accelerators: priors, replaced by measurements as soon as there are any."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from ..model.table import accelerator_key, link_of, type_of


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator as its maker describes it."""

    name: str
    tflops: float
    """Dense 16-bit tensor throughput (float32 where there are no tensor cores), 1e12 per second."""
    memory_mib: int
    memory_gb_per_s: float
    link_gb_per_s: float
    """One direction between host and device, as usually reached."""
    watts: float
    utilisation: float = 0.4
    """Part of `tflops` that a well-fed transformer reaches."""
    has_bfloat16: bool = True
    idle_watts: float = 0.0
    """With nothing running; 0: not known. The numbers are those of the Splitwise simulator's model (arXiv 2311.18677)."""

    @property
    def rate(self) -> float:
        """Exchange rate relative to one A100."""
        return self.tflops * self.utilisation / (312 * 0.4)


DATA_SHEETS: dict[str, Accelerator] = {
    item.name: item
    for item in (
        Accelerator("H200", 989, 144_384, 4800, 50, 700),
        Accelerator("H100", 989, 81_920, 3350, 50, 700, idle_watts=75),
        Accelerator("A100", 312, 81_920, 1935, 24, 400, idle_watts=63),
        Accelerator("A100-40GB", 312, 40_960, 1555, 24, 400),
        Accelerator("L40S", 362, 49_152, 864, 24, 350, 0.35),
        Accelerator("A40", 150, 49_152, 696, 24, 300, 0.35),
        Accelerator("A10G", 70, 24_576, 600, 24, 300, 0.4),
        Accelerator("L4", 121, 24_576, 300, 24, 72, 0.3),
        Accelerator("V100", 125, 32_768, 900, 12, 300, 0.35, has_bfloat16=False),
        Accelerator("T4", 65, 16_384, 300, 12, 70, 0.25, has_bfloat16=False),
        Accelerator("P100", 18.7, 16_384, 732, 12, 250, 0.4, has_bfloat16=False),
        Accelerator("K80", 4.1, 12_288, 240, 10, 150, 0.4, has_bfloat16=False),
        # One core; its memory is the host's.
        Accelerator("cpu", 0.06, 0, 10, 10, 10, 0.5),
    )
}


LINK_GB_PER_S = {"pcie3": 12, "pcie4": 24, "pcie5": 50, "pcie6": 100, "nvlink-c2c": 400}
"""One direction between host and device by link class, as usually reached (of sixteen lanes, or a GH200's link)."""


_SLICE = re.compile(r"(?P<whole>.+)-(?P<compute>[1-7])g\.(?P<memory>\d+)gb")
"""NVIDIA's name of a slice (MIG) behind that of the device: so many of `COMPUTE_SLICES`, and its memory."""
COMPUTE_SLICES = 7
SLICE_MEMORY = 0.95
"""Part of the memory in a slice's name that it has: 4,864 MiB of 1g.5gb, 9,728 of 1g.10gb (NVIDIA's user guide to MIG)."""


@lru_cache(maxsize=1024)
def accelerator(key: str) -> Accelerator | None:
    """By accelerator key: the data sheet of the type ("H100-SXM" is an H100), with the host link of the link class where
    that is a known one; None if the type is unknown. Of a slice ("H100-1g.10gb") it is its part of the device's."""
    name, link = type_of(key), link_of(key)
    part = _SLICE.fullmatch(name)
    if part is not None:
        whole = accelerator(accelerator_key(part["whole"], link))
        return None if whole is None else _slice(name, whole, int(part["compute"]), int(part["memory"]))
    found = DATA_SHEETS.get(name)
    if found is None:
        stem = name.split("-")[0]
        found = DATA_SHEETS.get(stem) or DATA_SHEETS.get(stem.upper()) or DATA_SHEETS.get(stem.lower())
    if found is None or link not in LINK_GB_PER_S:
        return found
    return replace(found, link_gb_per_s=LINK_GB_PER_S[link])


def _slice(name: str, whole: Accelerator, compute: int, memory_gib: int) -> Accelerator:
    """Its part of the multiprocessors, and of what is shared: watts and the host's link by these, memory and its bandwidth by the
    memory."""
    part, memory_mib = compute / COMPUTE_SLICES, round(memory_gib * 1024 * SLICE_MEMORY)
    return replace(
        whole,
        name=name,
        tflops=whole.tflops * part,
        memory_mib=memory_mib,
        memory_gb_per_s=whole.memory_gb_per_s * min(1.0, memory_mib / SLICE_MEMORY / whole.memory_mib),
        link_gb_per_s=whole.link_gb_per_s * part,
        watts=whole.watts * part,
        idle_watts=whole.idle_watts * part,
    )
