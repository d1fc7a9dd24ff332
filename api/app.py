"""The two applications: REST and portal for people (:8080), look-ups, usage and metrics (:8081).

Both use the same services. Errors become answers in one place: JSON below `/api` and on the internal port, a
page or a redirect to the login everywhere else.
"""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import iter_route_contexts
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from busbar.api import portal
from busbar.api.database.engine import disk_is_full
from busbar.api.errors import (
    ApiError,
    BadRequest,
    Internal,
    Invalid,
    NotFound,
    TooLarge,
    Unauthenticated,
    Unavailable,
    body_of,
)
from busbar.api.middleware import SecurityMiddleware, with_security_headers
from busbar.api.routes import (
    batches,
    cluster,
    database,
    description,
    health,
    internal,
    kinds,
    people,
    power,
    usage,
)
from busbar.api.services import Services

BASE = "/api/v1alpha1"
TITLE = "Busbar"
DESCRIPTION = (
    "Training jobs and model services on every GPU you own. Objects are the same as in Kubernetes; every read "
    'and write is authorised by Kubernetes for the caller. Errors are `{"error": {"code", "message", "field"?}}`.'
)

log = logging.getLogger(__name__)


def rest_app() -> FastAPI:
    """The routes of REST and the probes, which OpenAPI describes. Without services it can only be described,
    not called."""
    app = FastAPI(
        title=TITLE,
        version="v1alpha1",
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        separate_input_output_schemas=False,
        redirect_slashes=False,
    )
    app.include_router(health.router())
    for router in (
        kinds.router(),
        cluster.router(),
        power.router(),
        usage.router(),
        people.router(),
        database.router(),
    ):
        app.include_router(router, prefix=BASE)
    return app


def public_app(services: Services) -> FastAPI:
    """REST below `/api/v1alpha1`, the portal at `/`."""
    app = rest_app()
    app.include_router(description.router(rest_app))
    portal.install(app, services)
    return _finish(app, services)


def internal_app(services: Services) -> FastAPI:
    """What the gateway calls, and `/metrics`."""
    app = FastAPI(
        title=f"{TITLE} internal", version="v1alpha1", docs_url=None, redoc_url=None, openapi_url=None
    )
    app.include_router(health.router())
    app.include_router(health.numbers())
    app.include_router(internal.router())
    app.include_router(batches.router())
    return _finish(app, services)


def _finish(app: FastAPI, services: Services) -> FastAPI:
    app.state.services = services
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(SQLAlchemyError, _on_database_error)
    app.add_exception_handler(RecursionError, _on_deep_nesting)
    app.add_exception_handler(Exception, _on_defect)
    app.add_middleware(SecurityMiddleware)
    return app


def answer(request: Request, error: ApiError) -> Response:
    """The response to an error, for programs or for people."""
    path = request.url.path
    if path.startswith(("/api/", "/internal/", "/health", "/ready")) or request.app.title != TITLE:
        return as_json(error)
    page = portal.error_page(request, error)
    page.headers.update(_retry_after(error))
    return page


def _retry_after(error: ApiError) -> dict[str, str]:
    return {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}


def as_json(error: ApiError) -> JSONResponse:
    headers = _retry_after(error)
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body_of(error), status_code=error.status, headers=headers)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return answer(request, error)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first: dict[str, Any] = dict(error.errors()[0])
    place = [str(part) for part in first.get("loc", ()) if part not in ("body", "query", "path")]
    field = ".".join(place) or None
    if first.get("type") == "json_invalid":
        return answer(request, BadRequest(f"the body is not JSON: {first.get('ctx', {}).get('error', '')}"))
    return answer(request, Invalid(f"{field or 'the body'}: {first.get('msg', 'not valid')}", field=field))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return answer(request, NotFound(f"{request.url.path} does not exist"))
    if error.status_code == 413:
        return answer(request, TooLarge("the body is too large"))
    headers, problem = dict(error.headers or {}), str(error.detail)
    if error.status_code == 405:
        headers["Allow"] = methods = _methods_of(request)
        problem = f"{request.url.path} takes {methods}, and no {request.method}"
    response = answer(request, BadRequest(problem))
    response.status_code = error.status_code
    response.headers.update(headers)
    return response


def _methods_of(request: Request) -> str:
    """What a path takes. Starlette names only the methods of the first of its routes."""
    path, found = request.url.path, set[str]()
    for route in iter_route_contexts(request.app.routes):
        if route.path is not None and compile_path(route.path)[0].match(path):
            found.update(route.methods or ())
    return ", ".join(sorted(found))


async def _on_deep_nesting(request: Request, error: Exception) -> Response:
    return answer(request, BadRequest("the body is nested too deeply"))


async def _on_defect(request: Request, error: Exception) -> Response:
    # Starlette logs the traceback; the answer says nothing of it. This runs outside of SecurityMiddleware.
    response = answer(request, Internal("something broke here; it is in the log of busbar-api"))
    response.raw_headers = with_security_headers(request.scope, response.raw_headers)
    return response


async def _on_database_error(request: Request, error: Exception) -> Response:
    full = disk_is_full(error)
    log.error("database error at %s: %s", request.url.path, "disk full" if full else type(error).__name__)
    if full:
        text = (
            "the database's disk is full: nothing can be written until an administrator has made room there"
        )
        return answer(request, Unavailable(text, retry_after_s=60))
    return answer(
        request, Unavailable("the database does not answer; try again in a moment", retry_after_s=2)
    )
