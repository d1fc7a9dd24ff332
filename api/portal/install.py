"""Puts the portal's routes into the application, and shows its errors as pages."""

from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import RedirectResponse, Response

from busbar.api.dependencies import Public
from busbar.api.errors import ApiError, Unauthenticated
from busbar.api.portal import (
    account,
    batch_pages,
    cluster_pages,
    front_page,
    jobs,
    login,
    power_page,
    services_pages,
    submit,
)
from busbar.api.portal.render import html, is_fragment, static_response
from busbar.api.services import Services


def install(app: FastAPI, services: Services) -> None:
    """All pages; none of them is part of REST's description."""
    for router in (
        _static(),
        login.router(),
        front_page.router(),
        jobs.router(),
        services_pages.router(),
        batch_pages.router(),
        submit.router(),
        cluster_pages.router(),
        power_page.router(),
        account.router(),
    ):
        app.include_router(router, include_in_schema=False)
    if services.settings.oidc is not None:
        from busbar.api.portal.oidc import (
            install as install_oidc,
        )  # Authlib costs memory where it is not used

        install_oidc(app, services)


def _static() -> APIRouter:
    routes = APIRouter()
    anybody = Annotated[None, Depends(Public("the portal's own style and scripts"))]

    @routes.get("/static/{name:path}")
    async def static(name: str, _: anybody, v: Annotated[str | None, Query()] = None) -> Response:
        return static_response(name, v)

    @routes.get("/favicon.ico")
    async def favicon(_: anybody) -> Response:
        return static_response("icon.svg", None)

    return routes


def error_page(request: Request, error: ApiError) -> Response:
    """An error for a person: the login when they are unknown, else a page or a fragment with the sentence."""
    if isinstance(error, Unauthenticated):
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        where = "/login" if request.method != "GET" else f"/login?next={quote(target)}"
        if is_fragment(request):
            return Response(status_code=401, headers={"HX-Redirect": "/login"})
        return RedirectResponse(where, status_code=303)
    context = {"error": error}
    template = "error_fragment.html" if is_fragment(request) else "error.html"
    return html(template, context, error.status)
