"""The errors of the serving engine.

    ServingError (code, http status)
    ├── SettingsError        bad flag, environment variable or spec               (exit 2)
    ├── ModelError           the model folder cannot be served                    (exit 1)
    │   ├── ModelFileMissing
    │   ├── ModelUnsupported
    │   ├── ModelCorrupt
    │   └── AdapterInvalid   an adapter's folder cannot be served with this model
    ├── MemoryTooSmall       not one KV block fits, or the model does not         (exit 1)
    ├── DiskTooSmall         no room for the file that layers are streamed from   (exit 1)
    ├── EngineLost           one of a replica's two processes ended               (exit 1)
    └── RequestError         one HTTP request is refused
        ├── BadRequest           400
        ├── Unauthorized         401
        ├── NotFound             404
        ├── MethodNotAllowed     405
        ├── OtherStream          409 (a resume of a stream that another model, or prompt, began)
        ├── Busy                 409 (asked to sleep while requests run, or between two levels)
        ├── TooLarge             413
        ├── Overloaded           503 + Retry-After (queue full, draining, loading)
        └── EngineFailed         500
            └── EngineLeaving        (the process shuts down)

Every message says what was wrong, where, and what to do. `code` is stable.
"""

from __future__ import annotations

from busbar.kube.contracts.workload import ExitCode


class ServingError(Exception):
    """Base of everything this package raises on purpose."""

    code = "ServingError"
    exit_status = int(ExitCode.FAILED)


class SettingsError(ServingError):
    code = "SettingsError"
    exit_status = int(ExitCode.INVALID)


class ModelError(ServingError):
    code = "ModelError"


class ModelFileMissing(ModelError):
    code = "ModelFileMissing"


class ModelUnsupported(ModelError):
    code = "ModelUnsupported"


class ModelCorrupt(ModelError):
    code = "ModelCorrupt"


class AdapterInvalid(ModelError):
    code = "AdapterInvalid"


class MemoryTooSmall(ServingError):
    code = "MemoryTooSmall"


class DiskTooSmall(ServingError):
    code = "DiskTooSmall"


class EngineLost(ServingError):
    code = "EngineLost"


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


class MethodNotAllowed(RequestError):
    code = "MethodNotAllowedError"
    status = 405


class OtherStream(RequestError):
    code = "ConflictError"
    status = 409


class Busy(RequestError):
    code = "ConflictError"
    status = 409


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


class EngineLeaving(EngineFailed):
    """The process shuts down, or the request moves; it may go on elsewhere, best at the address `moved_to`."""

    def __init__(self, message: str, moved_to: str = "") -> None:
        super().__init__(message)
        self.moved_to = moved_to
