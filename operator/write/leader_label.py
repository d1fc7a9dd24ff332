"""The label by which the operator's Service finds the one pod that leads.

Every replica is ready, so that a rollout does not wait for the lease; the Service selects the label. A new leader takes it
from every other pod before it sets it on its own: the one before may be dead on a node that nobody has missed yet.
The writes are fenced like all others, so a process that leads no more labels nothing.
"""

from __future__ import annotations

import asyncio
import logging

from busbar.kube.client import KubeClient
from busbar.kube.errors import ApiError, ConnectionFailed, NotFound
from busbar.kube.resources import PODS
from busbar.kube.types.meta import LABEL_LEADER
from busbar.operator.errors import Fenced

log = logging.getLogger(__name__)

YES = "true"
LOOK_S = 30.0
"""The label is put back within this time where somebody takes it off."""
AGAIN_S = 1.0


class LeaderLabel:
    """Keeps the label on this process's pod alone, while it leads."""

    def __init__(self, reader: KubeClient, writer: KubeClient, namespace: str, pod: str) -> None:
        self._reader, self._writer = reader, writer
        self._namespace, self._pod = namespace, pod

    async def run(self) -> None:
        """Runs until cancelled; does nothing in a process that does not know its pod."""
        while self._pod:
            try:
                await self.put()
                await asyncio.sleep(LOOK_S)
            except (ApiError, ConnectionFailed, Fenced) as error:
                log.warning("the leader's label is not set", extra={"pod": self._pod, "error": str(error)})
                await asyncio.sleep(LOOK_S if isinstance(error, NotFound) else AGAIN_S)

    async def put(self) -> None:
        """Makes this pod the only one with the label.

        Raises:
            NotFound: there is no such pod.
        """
        marked, _ = await self._reader.list(PODS, self._namespace, label_selector=f"{LABEL_LEADER}={YES}")
        names = {pod["metadata"]["name"] for pod in marked}
        for name in sorted(names - {self._pod}):
            try:
                await self._label(name, None)
            except NotFound:
                continue
        if self._pod not in names:
            await self._label(self._pod, YES)
            log.info("leader's label set", extra={"pod": self._pod})

    async def _label(self, pod: str, value: str | None) -> None:
        await self._writer.patch(PODS, pod, {"metadata": {"labels": {LABEL_LEADER: value}}}, self._namespace)
