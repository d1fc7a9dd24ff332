"""The gateway's two requests to the API: looking up a key, and delivering usage records."""

from __future__ import annotations

import aiohttp
from pydantic import ValidationError

from busbar.gateway.keys import ApiUnreachable
from busbar.gateway.spool import Record
from busbar.kube.contracts import keys, usage
from busbar.kube.token_file import TokenFile

_TIMEOUT = aiohttp.ClientTimeout(total=10, connect=3)
_ANSWER_BYTES = 256 * 1024


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

    async def _post(self, path: str, document: object) -> tuple[int, bytes]:
        url = self._url + path
        try:
            headers = self._token.header()
            async with self._session.post(
                url, json=document, headers=headers, timeout=_TIMEOUT, allow_redirects=False
            ) as response:
                if response.status not in (200, 404):
                    raise ApiUnreachable(f"{url}: status {response.status}")
                answer = bytearray()
                async for piece in response.content.iter_any():
                    answer += piece
                    if len(answer) > _ANSWER_BYTES:
                        raise ApiUnreachable(f"{url}: an answer over {_ANSWER_BYTES} bytes")
                return response.status, bytes(answer)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ApiUnreachable(f"{url}: {type(error).__name__} {error}") from error
