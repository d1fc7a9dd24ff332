"""How much of its busy time each replica spends on prompts, from the seconds that its engine counts. Pure.

Draws of one second do not tell prompts from decoding where an engine mixes them in every step, and it knows what it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from busbar.kube.contracts.workload import PhaseSeconds, ServingStatus

LEAST_S = 5.0
"""Of busy time that a share is of: less is that of single requests."""
FORGET = 0.5
"""What the share before still counts, beside one of `LEAST_S` seconds or more."""


@dataclass(frozen=True, slots=True)
class _Known:
    since: PhaseSeconds
    seen: PhaseSeconds
    share: float | None = None


class PromptShares:
    """By pod."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def look(self, readings: Mapping[str, ServingStatus]) -> dict[str, float]:
        """By uid of a serving pod, the part of its busy seconds, 0 to 1; without those that have not told enough yet."""
        self._known = {
            uid: _after(self._known.get(uid), told)
            for uid, reading in readings.items()
            if (told := reading.phase_seconds) is not None
        }
        return {uid: known.share for uid, known in self._known.items() if known.share is not None}


def _after(before: _Known | None, told: PhaseSeconds) -> _Known:
    if before is None:
        return _Known(told, told)
    if told is before.seen:
        return before
    prefill, decode = told.prefill - before.since.prefill, told.decode - before.since.decode
    if min(prefill, decode) < 0:  # another process
        return _Known(told, told)
    if prefill + decode < LEAST_S:
        return _Known(before.since, told, before.share)
    now = prefill / (prefill + decode)
    share = now if before.share is None else FORGET * before.share + (1 - FORGET) * now
    return _Known(told, told, share)
