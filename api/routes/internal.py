"""The internal port: what the gateway asks and reports. Nobody else may call it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request

from busbar.api.access.identity import Caller
from busbar.api.dependencies import GatewayOnly, services_of
from busbar.api.routes.schemas import errors
from busbar.kube.contracts import budget_leases, keys, usage

Gateway = Annotated[Caller, Depends(GatewayOnly())]


def router() -> APIRouter:
    routes = APIRouter(tags=["Internal"])

    @routes.post(
        keys.PATH,
        operation_id="lookUpKey",
        response_model=keys.KeyIdentity,
        response_model_exclude_none=True,
        responses=errors(401, 403, 404, 422, 503),
    )
    async def look_up(request: Request, body: keys.KeyLookup, _caller: Gateway) -> keys.KeyIdentity:
        return await services_of(request).keys.lookup(body.sha256, body.gateway)

    @routes.post(
        usage.PATH,
        operation_id="reportUsage",
        response_model=usage.UsageAccepted,
        responses=errors(401, 403, 413, 422, 503),
    )
    async def report(request: Request, body: usage.UsageBatch, _caller: Gateway) -> usage.UsageAccepted:
        through = await services_of(request).usage_ledger.accept(body.gateway, body.records)
        return usage.UsageAccepted(accepted_through=through)

    @routes.post(
        budget_leases.PATH,
        operation_id="renewBudgetLeases",
        response_model=budget_leases.LeaseAnswer,
        responses=errors(401, 403, 413, 422, 503),
    )
    async def renew(
        request: Request, body: budget_leases.LeaseRequest, _caller: Gateway
    ) -> budget_leases.LeaseAnswer:
        return await services_of(request).budget_leases.renew(body)

    return routes
