"""What a server answered: a typed result, or an error in one sentence with what, where and what to do.

Whatever it is that answers (a proxy, a page to log in, a newer version), nothing of it is taken for granted.
"""

from __future__ import annotations

import json
from typing import TypeVar

import httpx2
from pydantic import ValidationError

from busbar.cli.errors import BusbarError, Invalid, NotAuthorised, NotFound, Unreachable
from busbar.kube.contracts.wire import WireModel

W = TypeVar("W", bound=WireModel)


def parsed(model: type[W], document: object) -> W:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise unexpected_field(error) from error


def unexpected_field(error: ValidationError) -> BusbarError:
    """The first field of an answer that is not of its type."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "the whole"
    return unexpected(f"{error.title}, {where}: {first['msg']}")


def unexpected(what: str) -> BusbarError:
    """An answer that has another form than this version knows."""
    return BusbarError(
        f"the server's answer is not as expected: {what}. Is it a newer version of Busbar, or not Busbar at all?"
    )


def is_of(response: httpx2.Response, media_type: str) -> bool:
    return response.headers.get("content-type", "").partition(";")[0].strip().lower() == media_type


def unreachable(server: str, error: Exception) -> Unreachable:
    if (refused := untrusted(server, error)) is not None:
        return refused
    return Unreachable(
        f"{server} does not answer ({error or type(error).__name__}). Is the address right, and is it up?"
    )


def untrusted(server: str, error: BaseException) -> Unreachable | None:
    """That a server answers with a certificate which is not trusted; None: that is not what went wrong."""
    import ssl

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    return Unreachable(
        f"The certificate of {server} is not trusted ({cause.verify_message}). Use the name that it is for; where your organisation "
        "has signed it, give its certificates with `busbar login --ca-file FILE`, or BUSBAR_CA_FILE"
    )


def foreign(server: str, response: httpx2.Response) -> BusbarError:
    return BusbarError(
        f"{server} answered {response.status_code} to {response.request.url.path}, but not as Busbar does. "
        "Is this the address of the API and portal?"
    )


def error_of(server: str, response: httpx2.Response) -> BusbarError:
    status = response.status_code
    try:
        told = json.loads(response.content)["error"]
        message, code, field = str(told["message"] or status), str(told["code"]), told.get("field")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        if status in (502, 503, 504):
            return Unreachable(f"{server} answered {status}; try again in a moment")
        return foreign(server, response)
    if status == 401:
        return NotAuthorised(f"{message}. Log in again with `busbar login {server}`.", code=code, field=field)
    kinds: dict[int, type[BusbarError]] = {
        400: Invalid,
        403: NotAuthorised,
        404: NotFound,
        422: Invalid,
        503: Unreachable,
    }
    return kinds.get(status, BusbarError)(message, code=code, field=field)
