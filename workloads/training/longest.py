"""The longest sequence that fits, by mode and by what happens to activations. No torch here.

A search over the length of the sequence, with the formulas and the layouts of `busbar plan`: all bytes that grow with it
grow monotonically. The micro-batch stays as the job has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from busbar.workloads.training.demand import Demand
from busbar.workloads.training.layouts import first_that_fits
from busbar.workloads.training.plan import WAYS, MemoryLimits

SHORTEST, LONGEST = 8, 1_048_576  # bounds of data.sequenceLength
DemandOf = Callable[[str, int], Demand]  # by what happens to activations, and tokens of a sequence


def longest_sequences(
    demand_of: DemandOf, limits: MemoryLimits, modes: Iterable[str], multiple: int = 1
) -> dict[str, dict[str, int]]:
    """By mode and activations: tokens of the longest sequence that fits, a multiple of `multiple`; 0: not even the shortest
    does."""

    def longest(mode: str, way: str) -> int:
        found = _longest(partial(demand_of, way), limits, mode)
        return found - found % multiple

    return {mode: {way: longest(mode, way) for way in WAYS} for mode in modes}


def _longest(demand_of: Callable[[int], Demand], limits: MemoryLimits, mode: str) -> int:
    def fits(tokens: int) -> bool:
        return first_that_fits(demand_of(tokens), limits, mode) is not None

    if not fits(SHORTEST):
        return 0
    good, bad = SHORTEST, LONGEST + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def as_text(answer: Mapping[str, Any]) -> list[str]:
    """The part of `busbar plan` that `--longest` adds, as lines."""
    rows = [
        f"Longest sequence that fits, in tokens, with {answer['microBatch']} in a micro-batch:",
        f"{'mode':<19}" + "".join(f" {name:>18}" for name in WAYS.values()),
    ]
    for mode, found in answer["longest"].items():
        rows.append(f"{mode:<19}" + "".join(f" {_shown(found[way]):>18}" for way in WAYS))
    known = answer["maxPositions"]
    if known is not None and any(
        each > known for found in answer["longest"].values() for each in found.values()
    ):
        rows.append(
            f"The model's config stops at {known:,} positions; a longer sequence is refused until it says more."
        )
    return rows


def _shown(tokens: int) -> str:
    if tokens == 0:
        return "none"
    return f"{tokens:,} or more" if tokens == LONGEST else f"{tokens:,}"
