"""The errors of settings and of the Kubernetes client.

    SettingsError               Settings           environment variables are unknown, missing or wrong
    KubeError                   code
    ├── ConfigError             KubeConfig         no usable login; says what was tried and what to set
    ├── ConnectionFailed        KubeUnreachable    no answer: refused, reset, TLS, time-out
    └── ApiError                KubeApi            an answer that is not 2xx
        ├── BadRequest          KubeBadRequest     400
        ├── Unauthorized        KubeUnauthorized   401
        ├── Forbidden           KubeForbidden      403
        ├── NotFound            KubeNotFound       404
        ├── Conflict            KubeConflict       409: the object changed, read it again
        │   └── AlreadyExists   KubeAlreadyExists  409 with that reason
        ├── Gone                KubeGone           410: the resourceVersion is too old, list again
        ├── Invalid             KubeInvalid        422: refused by the schema, by a policy or by a test
        ├── TooManyRequests     KubeTooMany        429, after the retries were used up
        └── ServerError         KubeServer         5xx

``code`` never changes. A write that ends in ConnectionFailed may or may not have been done: callers are
level-triggered and read the state again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class SettingsError(Exception):
    """The process cannot start as it is configured; the message names each variable and says what to do."""

    code: ClassVar[str] = "Settings"


class KubeError(Exception):
    """Root of all errors that this package raises on purpose."""

    code: ClassVar[str] = "Kube"


class ConfigError(KubeError):
    """No login to a cluster could be found or read."""

    code = "KubeConfig"


class ConnectionFailed(KubeError):
    """The API server did not answer; a write may or may not have happened."""

    code = "KubeUnreachable"


class ApiError(KubeError):
    """The API server answered with a Status that is a failure."""

    code = "KubeApi"

    def __init__(
        self, status: int, reason: str, message: str, what: str, details: Mapping[str, Any] | None = None
    ):
        self.status = status
        self.reason = reason
        self.message = message
        self.what = what
        self.details: Mapping[str, Any] = details or {}
        super().__init__(f"{what}: {status} {reason}: {message}")


class BadRequest(ApiError):
    code = "KubeBadRequest"


class Unauthorized(ApiError):
    code = "KubeUnauthorized"


class Forbidden(ApiError):
    code = "KubeForbidden"


class NotFound(ApiError):
    code = "KubeNotFound"


class Conflict(ApiError):
    code = "KubeConflict"


class AlreadyExists(Conflict):
    code = "KubeAlreadyExists"


class Gone(ApiError):
    code = "KubeGone"


class Invalid(ApiError):
    code = "KubeInvalid"


class TooManyRequests(ApiError):
    code = "KubeTooMany"


class ServerError(ApiError):
    code = "KubeServer"


_BY_STATUS: dict[int, type[ApiError]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Invalid,
    429: TooManyRequests,
}


def api_error(status: int, body: object, what: str) -> ApiError:
    """The typed error for an answer: ``body`` is the Status object, or a proxy's text."""
    fields: Mapping[str, Any] = body if isinstance(body, Mapping) else {}
    reason = str(fields.get("reason") or "Unknown")
    message = str(fields.get("message") or (body if isinstance(body, str) else "no message"))[:2000]
    details = fields.get("details")
    kind = _BY_STATUS.get(status, ServerError if status >= 500 else ApiError)
    if kind is Conflict and reason == "AlreadyExists":
        kind = AlreadyExists
    if reason == "Expired":
        kind = Gone
    return kind(status, reason, message, what, details if isinstance(details, Mapping) else None)
