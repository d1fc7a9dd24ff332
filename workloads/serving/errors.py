"""What can go wrong, as one tree.

    ServingError (code, http status)
    ├── SettingsError        bad flag, environment variable or spec               (exit 2)
    ├── ModelError           the model folder cannot be served                    (exit 1)
    │   ├── ModelFileMissing
    │   ├── ModelUnsupported
    │   └── ModelCorrupt
    ├── MemoryTooSmall       not one KV block fits, or the model does not         (exit 1)
    └── RequestError         one HTTP request is refused
        ├── BadRequest           400
        ├── Unauthorized         401
        ├── NotFound             404
        ├── TooLarge             413
        ├── Overloaded           503 + Retry-After (queue full, draining, loading)
        └── EngineFailed         500

Every message says what was wrong, where, and what to do. `code` is stable.
"""

from __future__ import annotations


class ServingError(Exception):
    """Base of everything this package raises on purpose."""

    code = "ServingError"
    exit_status = 1


class SettingsError(ServingError):
    code = "SettingsError"
    exit_status = 2


class ModelError(ServingError):
    code = "ModelError"


class ModelFileMissing(ModelError):
    code = "ModelFileMissing"


class ModelUnsupported(ModelError):
    code = "ModelUnsupported"


class ModelCorrupt(ModelError):
    code = "ModelCorrupt"


class MemoryTooSmall(ServingError):
    code = "MemoryTooSmall"


class RequestError(ServingError):
    """Refusal of one request; rendered as OpenAI error JSON."""

    code = "RequestError"
    status = 400
    retry_after_s: int | None = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.param = param
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s


class BadRequest(RequestError):
    code = "BadRequestError"


class Unauthorized(RequestError):
    code = "AuthenticationError"
    status = 401


class NotFound(RequestError):
    code = "NotFoundError"
    status = 404


class TooLarge(RequestError):
    code = "RequestTooLarge"
    status = 413


class Overloaded(RequestError):
    code = "ServiceUnavailableError"
    status = 503
    retry_after_s = 1


class EngineFailed(RequestError):
    code = "InternalServerError"
    status = 500
