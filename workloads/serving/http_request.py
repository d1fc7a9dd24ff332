"""What every route reads of an HTTP request, and how a refusal is answered: OpenAI's error JSON."""

from __future__ import annotations

import re
import uuid
from math import inf

from aiohttp import web

from busbar.kube.contracts.workload import BATCH_HEADER, KEY_HEADER, TENANT_HEADER, WEIGHT_HEADER
from busbar.kube.documents import DocumentError, shown, value_of_json
from busbar.kube.http_connection import body_problem
from busbar.workloads.serving.errors import BadRequest, MethodNotAllowed, NotFound, RequestError, TooLarge
from busbar.workloads.serving.fairness import Owner
from busbar.workloads.serving.openai_response import error_body

REQUEST_ID_HEADER = "x-busbar-request-id"


def owner_of(request: web.Request) -> Owner:
    """The request's owner from the gateway's headers."""
    headers = request.headers
    weight = headers.get(WEIGHT_HEADER, "1")
    try:
        share = float(weight)
    except ValueError:
        share = 0.0
    if not 0 < share < inf:
        raise BadRequest(f"{WEIGHT_HEADER} must be a number above 0, not {shown(weight)}")
    batch = BATCH_HEADER in headers
    return Owner(headers.get(TENANT_HEADER, ""), headers.get(KEY_HEADER, ""), share, batch)


def refusal(error: RequestError | web.HTTPException, request: web.Request, most_bytes: int) -> web.Response:
    """The answer to an error, ours or that of aiohttp; `most_bytes` of a body are read."""
    if isinstance(error, RequestError):
        return answer_to(error)
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        told = request.content_length
        size = f"more than {most_bytes}" if told is None or told <= most_bytes else str(told)
        return answer_to(TooLarge(f"the body has {size} bytes; at most {most_bytes} are read"))
    if isinstance(error, web.HTTPMethodNotAllowed):
        answer = answer_to(
            MethodNotAllowed(f"{request.path} does not take {request.method}; see the Allow header")
        )
        answer.headers["Allow"] = error.headers["Allow"]
        return answer
    found = NotFound(f"{request.method} {request.path}: {error.reason}")
    found.status = error.status
    return answer_to(found)


def refuse(status: int, problem: str) -> web.Response:
    """The answer to what is not a request."""
    found = BadRequest(problem)
    found.status = status
    return answer_to(found)


def answer_to(error: RequestError) -> web.Response:
    """OpenAI's error JSON."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(error_body(error), status=error.status, headers=headers)


async def read_json(request: web.Request) -> object:
    try:
        data = await request.read()
    except web.RequestPayloadError as error:
        raise BadRequest(body_problem(error)) from error
    try:
        return value_of_json(data)
    except DocumentError as error:
        raise BadRequest(f"the body is not JSON: {error}", param=error.field) from error


def request_id_of(request: web.Request) -> str:
    """The caller's id, or a new one. A retry may carry one that is in use: the engine has its own."""
    given = request.headers.get(REQUEST_ID_HEADER) or request.headers.get("x-request-id")
    if given is None:
        return uuid.uuid4().hex
    if not re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", given):
        raise BadRequest(
            f"{REQUEST_ID_HEADER} (or x-request-id) must be up to 128 letters, digits or . _ : -"
        )
    return given
