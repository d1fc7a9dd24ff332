"""How often the numbers of what runs are written while nothing happens: the more runs, the less often each."""

from __future__ import annotations

from dataclasses import replace
from zlib import crc32

from busbar.operator.settings import Settings

MOST_USAGE_S = 720.0
"""The longest period of use, however much runs: twelve minutes, so that 2,000 jobs cause 2.8 writes a second.

A crash of the operator loses none of it, because the next one counts on from the moment that the last status says. What is
lost is the use since the last status of a job that is deleted while no operator runs.
"""


def paced(settings: Settings, running: int) -> Settings:
    """The settings with the periods that so many running jobs and replicas allow."""
    most_s = max(MOST_USAGE_S, settings.usage_period_s)
    return replace(
        settings,
        usage_period_s=min(most_s, max(settings.usage_period_s, running / settings.usage_writes_per_s)),
        progress_period_s=max(settings.progress_period_s, running / settings.progress_writes_per_s),
    )


def next_at_s(uid: str, last_s: float, period_s: float) -> float:
    """When an object's use is written after a write at `last_s`, both in seconds since 1970: at most a period and a second later.

    Each object has its own place in the period, so that what began together is not written together, not even at first.
    """
    place_s = period_s * crc32(uid.encode()) / 2**32
    at_s = ((last_s - place_s) // period_s + 1) * period_s + place_s
    return (
        at_s if at_s - last_s > 1 else at_s + period_s
    )  # not again at once where rounding puts it just before
