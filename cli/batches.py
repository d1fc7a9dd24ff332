"""The gateway's /v1/files and /v1/batches as methods with typed results, for the Python client and `busbar batch`.

Files are sent and received in pieces, so a large one is never whole in memory; `told` hears of each piece's bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx2
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from busbar.cli.answers import untrusted
from busbar.cli.client import LONG, trust_of
from busbar.cli.errors import BusbarError, Invalid, NotAuthorised, NotFound, Unreachable, UsageProblem

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
Told = Callable[[int], None]
"""Hears of so many more bytes."""
B = TypeVar("B", bound=BaseModel)


class _Answer(BaseModel):
    """OpenAI's names are our names; fields that are not known are left out."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Counts(_Answer):
    """Requests of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Problem(_Answer):
    message: str


class Problems(_Answer):
    data: list[Problem] = Field(default_factory=list)


class Batch(_Answer):
    """A batch; times are Unix seconds."""

    id: str
    endpoint: str
    status: str
    input_file_id: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    expires_at: int
    errors: Problems | None = None
    request_counts: Counts = Counts()
    metadata: dict[str, str] | None = None

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def problem(self) -> str:
        """Why it failed as a whole; empty: it did not."""
        return "; ".join(each.message for each in self.errors.data) if self.errors else ""


class Uploaded(_Answer):
    id: str


class _Page(_Answer):
    data: list[Batch]
    has_more: bool = False


class BatchClient:
    """A connection to the gateway as one caller."""

    def __init__(
        self, gateway: str, token: str, *, ca_file: str | None = None, timeout: httpx2.Timeout = LONG
    ) -> None:
        """`gateway` is the base URL of the OpenAI API, which ends with /v1."""
        self.gateway = gateway.rstrip("/")
        self.token, self.ca_file = token, ca_file
        verify, trust_env = trust_of(self.gateway, ca_file)
        self._http = httpx2.Client(
            headers={"Authorization": f"Bearer {token}"},
            timeout=timeout,
            verify=verify,
            trust_env=trust_env,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def upload(self, path: Path, told: Told = lambda _: None) -> str:
        """Send a file of requests; its id."""
        with _Counted(path, told) as file:
            answer = self._send(
                "POST", "/files", files={"file": (path.name, file)}, data={"purpose": "batch"}
            )
        return _parse(Uploaded, answer).id

    def create(self, file_id: str, endpoint: str, metadata: Mapping[str, str] | None = None) -> Batch:
        """A batch of an uploaded file."""
        document = {
            "input_file_id": file_id,
            "endpoint": endpoint,
            "completion_window": "24h",
            "metadata": dict(metadata or {}),
        }
        return _parse(Batch, self._send("POST", "/batches", json=document))

    def batches(self) -> Iterator[Batch]:
        """The caller's batches, newest first; asks for page after page."""
        asked: dict[str, str] = {"limit": "100"}
        while True:
            page = _parse(_Page, self._send("GET", "/batches", params=asked))
            yield from page.data
            if not page.has_more or not page.data:
                return
            asked["after"] = page.data[-1].id

    def batch(self, batch_id: str) -> Batch:
        return _parse(Batch, self._send("GET", f"/batches/{quote(batch_id, safe='')}"))

    def cancel(self, batch_id: str) -> Batch:
        """What has not begun does not begin any more; what is answered stays."""
        return _parse(Batch, self._send("POST", f"/batches/{quote(batch_id, safe='')}/cancel"))

    def content(self, file_id: str) -> Iterator[bytes]:
        """A file in pieces."""
        url = f"{self.gateway}/files/{quote(file_id, safe='')}/content"
        try:
            with self._http.stream("GET", url) as response:
                if response.status_code != 200:
                    response.read()
                    raise error_of(self.gateway, response)
                yield from response.iter_bytes()
        except httpx2.RequestError as error:
            raise _unreachable(self.gateway, error) from error

    def _send(self, method: str, path: str, **more: Any) -> httpx2.Response:
        try:
            response = self._http.request(method, self.gateway + path, **more)
        except httpx2.RequestError as error:
            raise _unreachable(self.gateway, error) from error
        if response.status_code >= 300:
            raise error_of(self.gateway, response)
        return response


class _Counted:
    """A file that tells how much of it was read."""

    def __init__(self, path: Path, told: Told) -> None:
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise UsageProblem(f"{path}: {error.strerror}") from error
        self._told = told

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def fileno(self) -> int:
        return self._file.fileno()

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._told(len(data))
        return data


def endpoint_in(path: Path) -> str:
    """The path that the first request of a file names. Raises UsageProblem."""
    try:
        with path.open("rb") as file:
            first = next((line for line in file if line.strip()), b"")
        url = json.loads(first)["url"]
    except OSError as error:
        raise UsageProblem(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        url = None
    if not isinstance(url, str):
        raise UsageProblem(
            f'{path}: the first line is no request; write {{"custom_id": "1", "method": "POST", '
            '"url": "/v1/chat/completions", "body": {"model": "NAME", …}} in each line'
        )
    return url


def _parse(kind: type[B], response: httpx2.Response) -> B:
    try:
        return kind.model_validate_json(response.content)
    except ValidationError as error:
        raise Unreachable(
            f"{response.url} gave an answer that is not the OpenAI API's: {error.errors()[0]['msg']}"
        ) from error


def _unreachable(gateway: str, error: httpx2.RequestError) -> Unreachable:
    if (refused := untrusted(gateway, error)) is not None:
        return refused
    return Unreachable(f"{gateway} does not answer: {error}. --gateway names another address.")


def error_of(gateway: str, response: httpx2.Response) -> BusbarError:
    """OpenAI's error document as an exception."""
    status = response.status_code
    try:
        told = json.loads(response.content)["error"]
        message, code, field = str(told["message"]), str(told["code"]), told.get("param")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Unreachable(f"{gateway} answered {status}; is it the address of the OpenAI API?")
    kinds: dict[int, type[BusbarError]] = {
        400: Invalid,
        401: NotAuthorised,
        403: NotAuthorised,
        404: NotFound,
        413: Invalid,
        503: Unreachable,
    }
    return kinds.get(status, BusbarError)(message, code=code, field=field)
