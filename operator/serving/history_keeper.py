"""Keeps the services' last day, and how their load goes over a day, over restarts of the operator: one object, written once
a minute if something came or was spent, or five minutes of load are over, and at a clean stop.

What came while no operator read the gateway is not in it, nor the last minute of one that was killed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import Field, TypeAdapter

from busbar.kube.client import KubeClient
from busbar.operator.serving.history import HOUR_S, HOURS, History
from busbar.operator.serving.kept_services import KeptServices
from busbar.operator.settings import Settings
from busbar.operator.steady_clock import CLOCK
from busbar.operator.write.kept_object import KeptObject

NAME = "busbar-services"
WHAT = "the services' last day"
_Kept = TypeAdapter(Annotated[dict[str, History], Field(max_length=100_000)])


class HistoryKeeper:
    """`load` once, then `run`, then `save`. The histories, by the services' uids, are those that others add to."""

    def __init__(
        self,
        reader: KubeClient,
        writer: KubeClient,
        histories: dict[str, History],
        settings: Settings,
        wall_s: Callable[[], float] = CLOCK.now_s,
    ) -> None:
        self._settings, self._wall_s, self._histories = settings, wall_s, histories
        kept = KeptObject(reader, writer, settings.namespace, NAME, WHAT)
        self._kept = KeptServices(kept, _Kept, lambda found: sum(h.requests for h in found.hours), WHAT)

    async def load(self) -> None:
        """Lets the histories go on from what was kept, if there is something."""
        if self._settings.gateway_url:
            self._histories.update(await self._kept.load())

    async def run(self) -> None:
        """Runs until cancelled; without a gateway nothing is counted, and there is nothing to keep."""
        if self._settings.gateway_url:
            await self._kept.run(self._settings.history_period_s, self._copied)

    async def save(self) -> None:
        """Writes what is not written yet, once `run` has ended."""
        await self._kept.save(self._copied)

    def _copied(self) -> Callable[[], dict[str, History]]:
        copies = {uid: found.copied() for uid, found in sorted(self._histories.items())}

        def kept() -> dict[str, History]:
            oldest = int(self._wall_s() // HOUR_S) - HOURS
            candidates = ((uid, found.kept(oldest)) for uid, found in copies.items())
            return {uid: found for uid, found in candidates if found is not None}

        return kept
