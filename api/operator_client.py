"""The operator's internal port: the one builder of scheduling snapshots, and the one place that forecasts.

Our projected token proves who we are. A snapshot comes back as `busbar.scheduler.Snapshot` in its JSON form; a
forecast as times and counts.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ValidationError

from busbar.api.errors import Invalid, Unavailable
from busbar.api.kubernetes import Object
from busbar.kube.contracts.forecast import PATH as FORECAST
from busbar.kube.contracts.forecast import ForecastAnswer

if TYPE_CHECKING:
    import aiohttp

    from busbar.scheduler import Snapshot

SNAPSHOT = "/snapshot"
TIMEOUT_S = 10.0
CURRENT_FOR_S = 2.0
"""How old the current snapshot may be for pages that only show it (heat map)."""


class Snapshots(Protocol):
    """Where snapshots come from."""

    async def current(self) -> Snapshot: ...

    async def with_draft(self, draft: Object) -> Snapshot: ...

    async def forecast(self, draft: Object) -> ForecastAnswer: ...

    async def close(self) -> None: ...


class OperatorClient:
    """Snapshots over HTTP."""

    def __init__(self, url: str, token_file: str) -> None:
        self._url = url.rstrip("/")
        self._token_file = Path(token_file)
        self._session: aiohttp.ClientSession | None = None
        self._current: tuple[float, Snapshot | Unavailable] | None = None
        self._refreshing = asyncio.Lock()

    async def current(self) -> Snapshot:
        """The snapshot of now, at most `CURRENT_FOR_S` old; many pages share one request, and its failure too:
        those who waited for it do not each wait for another.

        Raises:
            Unavailable: the operator does not answer.
        """
        async with self._refreshing:
            if self._current is None or time.monotonic() - self._current[0] >= CURRENT_FOR_S:
                found: Snapshot | Unavailable
                try:
                    found = await asyncio.to_thread(_decode, await self._fetch("GET", SNAPSHOT, None))
                except Unavailable as error:
                    found = error
                self._current = (time.monotonic(), found)
            found = self._current[1]
        if isinstance(found, Unavailable):
            raise Unavailable(found.message, retry_after_s=found.retry_after_s)
        return found

    async def with_draft(self, draft: Object) -> Snapshot:
        """The snapshot with an object added that nobody has created yet.

        Raises:
            Invalid: the operator cannot make a job of the draft; its sentence says why.
            Unavailable: the operator does not answer.
        """
        return await asyncio.to_thread(_decode, await self._fetch("POST", SNAPSHOT, {"object": draft}))

    async def forecast(self, draft: Object) -> ForecastAnswer:
        """When a draft that cannot start now would start, by the operator's memory of how jobs went.

        Raises:
            Invalid: the operator cannot make a job of the draft.
            Unavailable: the operator does not answer, or answers too many others.
        """
        text = await self._fetch("POST", FORECAST, {"object": draft})
        try:
            return ForecastAnswer.model_validate_json(text)
        except ValidationError as error:
            raise Unavailable("the operator's forecast cannot be read", retry_after_s=5) from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _fetch(self, method: str, path: str, body: object | None) -> str:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), trust_env=False
            )
        try:
            token = await asyncio.to_thread(self._token_file.read_text)
            async with self._session.request(
                method,
                self._url + path,
                json=body,
                headers={"Authorization": f"Bearer {token.strip()}"},
                allow_redirects=False,
            ) as response:
                text = await response.text()
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(
                "the operator does not answer, so nothing can be planned now; try again shortly",
                retry_after_s=5,
            ) from error
        if status in (400, 422):
            raise Invalid(_message(text))
        if status != 200:
            raise Unavailable(f"the operator answered {status}; try again shortly", retry_after_s=5)
        return text


def _decode(text: str) -> Snapshot:
    from busbar.scheduler import Snapshot

    return Snapshot.from_json(json.loads(text))


def _message(text: str) -> str:
    try:
        body: Any = json.loads(text)
    except ValueError:
        return text[:500]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
