"""How often the numbers of what runs are written while nothing happens: the more runs, the less often each."""

from __future__ import annotations

from dataclasses import replace
from zlib import crc32

from busbar.operator.settings import Settings

MOST_USAGE_S = 600.0
"""The longest period of use, however much runs: ten minutes, of which `spread` makes less.

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


def spread(uid: str) -> float:
    """A factor between 0.8 and 1 for an object's periods, so that what began together is not written together."""
    return 0.8 + 0.2 * crc32(uid.encode()) / 2**32
