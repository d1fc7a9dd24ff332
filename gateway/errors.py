"""The errors of the gateway, and their form for an OpenAI client.

    GatewayError
    ├── SpoolError               the usage spool cannot be written or read
    └── ClientError              answered as OpenAI error JSON
        ├── BadRequest           400  the request itself is wrong
        ├── Unauthenticated      401  no key, or not a valid one
        ├── Forbidden            403  a valid key that may not do this
        ├── ModelNotFound        404  unknown and foreign models alike
        ├── NoSuchObject         404  unknown and foreign files and batches alike
        ├── UnknownRoute         404  no such path
        ├── MethodNotAllowed     405  a path that takes other methods
        ├── Conflict             409  a file or batch is not in the state for this
        ├── TooLarge             413  body over the limit
        ├── TooManyRequests      429  this key has too many requests waiting
        ├── RateLimited          429  a limit per minute of the key or its tenant
        ├── QuotaSpent           429  a budget of money of the key or its tenant
        ├── BadUpstream          502  the replica answered something that is not OpenAI
        └── Unavailable          503  no replica, queue full, shutting down, keys cannot be checked

`body()` is the one place where a code becomes JSON. What a caller sent stands in a message as `shown()` of kube/documents.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class GatewayError(Exception):
    """Base of every error of this package."""


class SpoolError(GatewayError):
    """The usage spool cannot be used: without it requests would go uncounted."""


class ClientError(GatewayError):
    """An error that a client of the OpenAI API gets to see."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "api_error"
    code: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.headers: Mapping[str, str] = headers or {}


class BadRequest(ClientError):
    status = 400
    type = "invalid_request_error"
    code = "bad_request"


class Unauthenticated(ClientError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(ClientError):
    status = 403
    type = "permission_error"
    code = "missing_scope"


class ModelNotFound(ClientError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class NoSuchObject(ClientError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class Conflict(ClientError):
    status = 409
    type = "invalid_request_error"
    code = "conflict"


class UnknownRoute(ClientError):
    status = 404
    type = "invalid_request_error"
    code = "unknown_route"


class MethodNotAllowed(ClientError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class TooLarge(ClientError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class TooManyRequests(ClientError):
    status = 429
    type = "rate_limit_error"
    code = "too_many_waiting"


class LimitReached(ClientError):
    """A limit of the key or its tenant."""

    status = 429
    code = "rate_limit_exceeded"
    kind = "money"
    short = False
    """Only this gateway's part of the limit is spent: the API may have more."""


class RateLimited(LimitReached):
    """`type` is what is limited, requests or tokens, as OpenAI has it; money where another gateway holds what is left."""

    def __init__(self, message: str, *, kind: str, retry_after_s: int, headers: Mapping[str, str]) -> None:
        super().__init__(message, retry_after_s=retry_after_s, headers=headers)
        self.kind = kind


class QuotaSpent(LimitReached):
    type = "insufficient_quota"
    code = "insufficient_quota"


class BadUpstream(ClientError):
    status = 502
    type = "api_error"
    code = "bad_upstream"


class Unavailable(ClientError):
    status = 503
    type = "service_unavailable_error"
    code = "unavailable"


def body(error: ClientError) -> dict[str, dict[str, str | None]]:
    """The OpenAI error document."""
    kind = error.kind if isinstance(error, RateLimited) else error.type
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
