"""The gateway's requests to the API: looking up a key, parts of shared limits, usage records, and files and batches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import aiohttp
from pydantic import ValidationError

from busbar.gateway.errors import GatewayError
from busbar.gateway.keys import ApiUnreachable
from busbar.gateway.spool import Record
from busbar.kube.contracts import budget_leases, keys, usage
from busbar.kube.contracts.wire import WireModel
from busbar.kube.token_file import TokenFile

_TIMEOUT = aiohttp.ClientTimeout(total=10, connect=3)
_LONG = aiohttp.ClientTimeout(total=60, connect=3)
_ANSWER_BYTES = 256 * 1024
_LENT_BYTES = 32 << 20
"""Lines of batches, as JSON within JSON."""
M = TypeVar("M", bound=WireModel)


class ApiRefused(GatewayError):
    """The API says that the request is wrong."""

    def __init__(self, status: int, message: str, field: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.field = field


class ApiClient:
    """Client of the API's internal port."""

    def __init__(self, session: aiohttp.ClientSession, url: str, token: TokenFile) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._token = token

    async def lookup(self, sha256: str, gateway_id: str) -> keys.KeyIdentity | None:
        """What the key with this SHA-256 may do; None when there is none. Raises ApiUnreachable."""
        status, answer = await self._post(keys.PATH, {"sha256": sha256, "gateway": gateway_id})
        if status == 404:
            return None
        try:
            return keys.KeyIdentity.model_validate_json(answer)
        except ValidationError as error:
            raise ApiUnreachable(f"{self._url}{keys.PATH}: {error}") from error

    async def deliver(self, gateway_id: str, records: list[Record]) -> int:
        """Hand over usage; the highest number the API has taken. Raises ApiUnreachable."""
        path = usage.PATH
        status, answer = await self._post(path, {"gateway": gateway_id, "records": records})
        try:
            if status != 200:
                raise ValueError(f"status {status}")
            return usage.UsageAccepted.model_validate_json(answer).accepted_through
        except ValueError as error:
            raise ApiUnreachable(f"{self._url}{path}: {error}") from error

    async def renew(self, request: budget_leases.LeaseRequest) -> budget_leases.LeaseAnswer:
        """Tell what this gateway holds of limits; what it holds now. Raises ApiUnreachable."""
        status, answer = await self._post(budget_leases.PATH, request.to_wire())
        try:
            if status != 200:
                raise ValueError(f"status {status}")
            return budget_leases.LeaseAnswer.model_validate_json(answer)
        except ValueError as error:
            raise ApiUnreachable(f"{self._url}{budget_leases.PATH}: {error}") from error

    async def ask(self, path: str, document: WireModel, kind: type[M]) -> M:
        """What the API says of files and batches. Raises ApiRefused or ApiUnreachable."""
        async with self.call("POST", path, json=document.to_wire()) as response:
            data = await _whole(response, _LENT_BYTES)
        try:
            return kind.model_validate_json(data)
        except ValidationError as error:
            raise ApiUnreachable(f"{self._url}{path}: {error}") from error

    @asynccontextmanager
    async def call(
        self, method: str, path: str, *, json: object = None, data: bytes | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer of the API that is a success. Raises ApiRefused or ApiUnreachable."""
        url = self._url + path
        try:
            async with self._session.request(
                method,
                url,
                json=json,
                data=data,
                headers=self._token.header(),
                timeout=_LONG,
                allow_redirects=False,
            ) as response:
                if 400 <= response.status < 500 and response.status not in (401, 403):
                    problem = (await response.json()).get("error", {})
                    raise ApiRefused(response.status, str(problem.get("message", "")), problem.get("field"))
                if response.status >= 300:
                    raise ApiUnreachable(f"{url}: status {response.status}")
                yield response
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            raise ApiUnreachable(f"{url}: {type(error).__name__} {error}") from error

    async def _post(self, path: str, document: object) -> tuple[int, bytes]:
        url = self._url + path
        try:
            headers = self._token.header()
            async with self._session.post(
                url, json=document, headers=headers, timeout=_TIMEOUT, allow_redirects=False
            ) as response:
                if response.status not in (200, 404):
                    raise ApiUnreachable(f"{url}: status {response.status}")
                return response.status, await _whole(response, _ANSWER_BYTES)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ApiUnreachable(f"{url}: {type(error).__name__} {error}") from error


async def _whole(response: aiohttp.ClientResponse, most: int) -> bytes:
    answer = bytearray()
    async for piece in response.content.iter_any():
        answer += piece
        if len(answer) > most:
            raise ApiUnreachable(f"{response.url}: an answer over {most} bytes")
    return bytes(answer)
