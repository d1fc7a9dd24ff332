"""Data-sheet numbers of accelerators: priors, replaced by measurements as soon as there are any.

They are those of the makers' data sheets, dense where these name sparse ones too; H20, which has no public one, as server
makers list it. A variant of a type with numbers of its own ("H100-NVL") is a type of its own. Of a range of watts the highest
counts.
"""

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
        Accelerator("B200", 2250, 184_320, 8000, 50, 1000),
        Accelerator("GH200", 989, 98_304, 4000, 400, 1000),
        Accelerator("H200", 989, 144_384, 4800, 50, 700),
        Accelerator("H200-NVL", 835, 144_384, 4800, 50, 600),
        Accelerator("H100", 989, 81_920, 3350, 50, 700, idle_watts=75),
        Accelerator("H100-NVL", 835, 96_256, 3900, 50, 400),
        Accelerator("H100-PCIe", 756, 81_920, 2000, 50, 350),
        Accelerator("H20", 148, 98_304, 4000, 50, 400),
        Accelerator("MI300X", 1307, 196_608, 5300, 50, 750),
        Accelerator("A100", 312, 81_920, 1935, 24, 400, idle_watts=63),
        Accelerator("A100-40GB", 312, 40_960, 1555, 24, 400),
        Accelerator("A30", 165, 24_576, 933, 24, 165),
        Accelerator("RTX-6000-Ada", 364, 49_152, 960, 24, 300, 0.35),
        Accelerator("L40S", 362, 49_152, 864, 24, 350, 0.35),
        Accelerator("L40", 181, 49_152, 864, 24, 300, 0.35),
        Accelerator("A40", 150, 49_152, 696, 24, 300, 0.35),
        Accelerator("A10", 125, 24_576, 600, 24, 150, 0.35),
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


_PROFILE = re.compile(r"(?P<compute>[1-7])g\.(?P<memory>\d+)gb")
"""NVIDIA's name of a slice (MIG): so many of `COMPUTE_SLICES`, and its memory."""
_SLICE = re.compile(rf"(?P<whole>.+)-{_PROFILE.pattern}")
"""Behind that of the device."""
COMPUTE_SLICES = 7
SLICE_MEMORY = 0.95
"""Part of the memory in a slice's name that it has: 4,864 MiB of 1g.5gb, 9,728 of 1g.10gb (NVIDIA's user guide to MIG)."""


_BY_NAME = {name.lower(): sheet for name, sheet in DATA_SHEETS.items()}


@lru_cache(maxsize=1024)
def accelerator(key: str) -> Accelerator | None:
    """By accelerator key: the data sheet of the type ("H100-SXM" is an H100), with the host link of the link class where
    that is a known one; None if the type is unknown. Of a slice ("H100-1g.10gb") it is its part of the device's."""
    name, link = type_of(key), link_of(key)
    part = _SLICE.fullmatch(name)
    if part is not None:
        whole = accelerator(accelerator_key(part["whole"], link))
        return None if whole is None else _slice(name, whole, int(part["compute"]), int(part["memory"]))
    words = name.lower().split("-")
    named = (_BY_NAME.get("-".join(words[:count])) for count in range(len(words), 0, -1))
    found = next(filter(None, named), None)
    if found is None or link not in LINK_GB_PER_S:
        return found
    return replace(found, link_gb_per_s=LINK_GB_PER_S[link])


def type_of_product(product: str) -> str:
    """The type in a product's name, with the profile of a slice of it: "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb" is "A100-1g.10gb".

    Of the data sheets whose words are all in the name it is the one with the most; "": there is none."""
    words = re.split(r"[-_ ]+", product.lower())
    known = [name for name in DATA_SHEETS if set(name.lower().split("-")) <= set(words)]
    if not known:
        return ""
    profiles = [word for word in words if _PROFILE.fullmatch(word)]
    return "-".join([max(known, key=lambda name: name.count("-")), *profiles])


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
