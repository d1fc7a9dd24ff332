"""A service's load over time, for callers who may read the service."""

from __future__ import annotations

from busbar.api.access.identity import Caller
from busbar.api.objects.objects import Objects
from busbar.api.objects.operator_client import Operator
from busbar.kube.contracts.service_series import SeriesSpan, ServiceSeries
from busbar.kube.resources import MODEL_SERVICES


class ServiceLoads:
    """Passes on what the operator has."""

    def __init__(self, objects: Objects, operator: Operator) -> None:
        self._objects, self._operator = objects, operator

    async def series(self, caller: Caller, namespace: str, name: str, span: SeriesSpan) -> ServiceSeries:
        """Demand, capacity, replicas, tokens and times of the last hour or day.

        Raises:
            NotFound: there is no such service, or it is not theirs to see.
            Unavailable: the operator is away.
        """
        await self._objects.exists(caller, MODEL_SERVICES, namespace, name)
        return await self._operator.service_series(namespace, name, span)
