"""Every error a caller of the API can meet.

    ApiError                        code                 HTTP
     ├─ Invalid                     Invalid              422   a field is wrong; `field` says which
     ├─ BadRequest                  BadRequest           400   the request itself cannot be read
     ├─ Unauthenticated             Unauthenticated      401   who is asking is not known
     ├─ Forbidden                   Forbidden            403   known, and not allowed
     ├─ NotFound                    NotFound             404   absent, or none of the caller's business
     ├─ Conflict                    Conflict             409   the object changed, or the name is taken
     ├─ TooLarge                    TooLarge             413   the body is larger than we read
     ├─ TooMany                     TooManyRequests      429   wait `retry_after_s`
     ├─ Unavailable                 Unavailable          503   another part (operator, gateway, Kubernetes) is away
     └─ Internal                    Internal             500   a defect of ours; the log has the details

Codes are frozen: clients and tests match on them. The body is always `{"error": {"code", "message", "field"?}}`.
A foreign object answers `NotFound`, never `Forbidden`: whether it exists is its tenant's business.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel


class ApiError(Exception):
    """Base of what the API answers instead of a result.

    Message and field may quote what the caller sent. Half surrogate pairs in them become `?`, because no answer
    could carry them.
    """

    code: ClassVar[str] = "Internal"
    status: ClassVar[int] = 500
    usual_wait_s: ClassVar[int | None] = None
    """`retry_after_s` where nothing better is known."""

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = _encodable(message)
        self.field = _encodable(field) if field is not None else None
        self.retry_after_s = self.usual_wait_s if retry_after_s is None else retry_after_s


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()


class Invalid(ApiError):
    code = "Invalid"
    status = 422


class BadRequest(ApiError):
    code = "BadRequest"
    status = 400


class Unauthenticated(ApiError):
    code = "Unauthenticated"
    status = 401


class Forbidden(ApiError):
    code = "Forbidden"
    status = 403


class NotFound(ApiError):
    code = "NotFound"
    status = 404


class Conflict(ApiError):
    code = "Conflict"
    status = 409


class TooLarge(ApiError):
    code = "TooLarge"
    status = 413


class TooMany(ApiError):
    code = "TooManyRequests"
    status = 429


class Unavailable(ApiError):
    code = "Unavailable"
    status = 503
    usual_wait_s = 5


class Internal(ApiError):
    code = "Internal"
    status = 500


class ErrorDetail(BaseModel):
    """What went wrong, where, and what to do."""

    code: str
    message: str
    field: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


def body_of(error: ApiError) -> dict[str, object]:
    """The JSON body for an error."""
    return {
        "error": ErrorDetail(code=error.code, message=error.message, field=error.field).model_dump(
            exclude_none=True
        )
    }
