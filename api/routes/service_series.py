"""REST: a service's load over time, and the replicas that there were for it."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from pydantic import Field

from busbar.api.access.identity import Caller
from busbar.api.dependencies import InNamespace, services_of
from busbar.api.routes.schemas import Answer, errors
from busbar.kube.contracts.service_series import SeriesSpan
from busbar.kube.resources import MODEL_SERVICES

Numbers = list[float | None]


class PoolSeriesInfo(Answer):
    pool: str
    accelerator: str = Field(description="Its type; empty: the pool is deleted.")
    ready_replicas: Numbers = Field(description="That took requests, in the mean of each period.")
    capacity_per_second: Numbers = Field(description="Their part of the service's `capacityPerSecond`.")


class ServiceSeriesInfo(Answer):
    """Numbers by period, oldest first; the last period is still going on. Null where nothing is known."""

    span: SeriesSpan
    period_seconds: int
    begins: datetime = Field(description="When the first period began.")
    percentile: float = Field(description="Of `ttftMilliseconds` and `tpotMilliseconds`.")
    requests_per_second: Numbers = Field(description="That came.")
    capacity_per_second: Numbers = Field(
        description="Requests per second that the ready replicas sustain within the latency target; null without a "
        "target, and where no speed is known."
    )
    tokens_per_second: Numbers = Field(description="Output tokens of what was answered.")
    attainment: Numbers = Field(
        description="Answers within the latency target, as a part of all requests that were answered or refused."
    )
    ttft_milliseconds: Numbers = Field(description="Time to the first token.")
    ttft_median_milliseconds: Numbers
    tpot_milliseconds: Numbers = Field(description="Mean time of each later token of a stream.")
    tpot_median_milliseconds: Numbers
    pools: list[PoolSeriesInfo] = Field(description="Those that had replicas within the span, by name.")


def router() -> APIRouter:
    """The series."""
    routes = APIRouter(tags=["ModelServices"])

    @routes.get(
        "/namespaces/{namespace}/modelservices/{name}/series",
        operation_id="readModelServiceSeries",
        summary="Demand, capacity and replicas by pool, tokens and latency: by minute, or by five minutes over a day",
        response_model=ServiceSeriesInfo,
        responses=errors(401, 403, 404, 422, 503),
    )
    async def series(
        request: Request,
        namespace: str,
        name: str,
        caller: Annotated[Caller, Depends(InNamespace("get", MODEL_SERVICES))],
        span: Annotated[SeriesSpan, Query(description="How far back.")] = SeriesSpan.HOUR,
    ) -> ServiceSeriesInfo:
        found = await services_of(request).service_loads.series(caller, namespace, name, span)
        told = found.model_dump() | {"period_seconds": span.period_s}
        return ServiceSeriesInfo.model_validate(told)

    return routes
