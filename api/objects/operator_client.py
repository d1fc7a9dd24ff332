"""The operator's internal port: previews of drafts, plans and series of services, the load of nodes, and what they draw. Our projected token proves who we are."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from urllib.parse import urlencode

from pydantic import BaseModel, ValidationError

from busbar.api.errors import Invalid, Unavailable
from busbar.api.kubernetes.client import Object
from busbar.kube.contracts.power_view import PATH as POWER_PATH
from busbar.kube.contracts.power_view import SERIES_PATH, PowerPicture, PowerSeries, Resolution
from busbar.kube.contracts.preview import NODES_PATH, NodeLoad, NodeLoads, PreviewAnswer, PreviewRequest
from busbar.kube.contracts.preview import PATH as PREVIEW_PATH
from busbar.kube.contracts.service_plan import PATH as SERVICE_PLAN_PATH
from busbar.kube.contracts.service_plan import ServicePlanAnswer, ServicePlanRequest
from busbar.kube.contracts.service_series import PATH as SERVICE_SERIES_PATH
from busbar.kube.contracts.service_series import SeriesSpan, ServiceSeries
from busbar.kube.token_file import TokenFile

if TYPE_CHECKING:
    import aiohttp

TIMEOUT_S = 10.0
CURRENT_FOR_S = 2.0
"""How old the load of nodes may be; pages only show it (heat map)."""

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


class _Shared(Generic[T]):
    """An answer that many pages share, and its failure too: those who waited for it do not each wait for another."""

    def __init__(self, fetch: Callable[[], Awaitable[T]]) -> None:
        self._fetch = fetch
        self._current: tuple[float, T | Unavailable] | None = None
        self._refreshing = asyncio.Lock()

    async def get(self) -> T:
        """The answer, at most `CURRENT_FOR_S` old. Raises Unavailable."""
        async with self._refreshing:
            if self._current is None or time.monotonic() - self._current[0] >= CURRENT_FOR_S:
                found: T | Unavailable
                try:
                    found = await self._fetch()
                except Unavailable as error:
                    found = error
                self._current = (time.monotonic(), found)
            found = self._current[1]
        if isinstance(found, Unavailable):
            raise Unavailable(found.message, retry_after_s=found.retry_after_s)
        return found


class Operator(Protocol):
    """What the operator is asked."""

    async def nodes(self) -> list[NodeLoad]: ...

    async def power(self) -> PowerPicture: ...

    async def power_series(self, feed: str, node: str, resolution: Resolution) -> PowerSeries: ...

    async def preview(self, draft: Object, *, admin: bool) -> PreviewAnswer: ...

    async def service_plan(self, asked: ServicePlanRequest) -> ServicePlanAnswer: ...

    async def service_series(self, namespace: str, name: str, span: SeriesSpan) -> ServiceSeries: ...

    async def close(self) -> None: ...


class OperatorClient:
    """The operator over HTTP."""

    def __init__(self, url: str, token_file: str) -> None:
        self._url = url.rstrip("/")
        self._token = TokenFile(Path(token_file))
        self._session: aiohttp.ClientSession | None = None
        self._nodes = _Shared(self._fetch_nodes)
        self._power = _Shared(self._fetch_power)

    async def nodes(self) -> list[NodeLoad]:
        """The load of all nodes, at most `CURRENT_FOR_S` old.

        Raises:
            Unavailable: the operator does not answer.
        """
        return await self._nodes.get()

    async def power(self) -> PowerPicture:
        """What all feeds and nodes draw, at most `CURRENT_FOR_S` old. Raises Unavailable as `nodes` does."""
        return await self._power.get()

    async def power_series(self, feed: str, node: str, resolution: Resolution) -> PowerSeries:
        """The means of one feed, or of one node. Raises Unavailable as `nodes` does."""
        asked = urlencode({"feed": feed, "node": node, "resolution": resolution.value})
        return _read(PowerSeries, await self._fetch("GET", f"{SERIES_PATH}?{asked}", None))

    async def preview(self, draft: Object, *, admin: bool) -> PreviewAnswer:
        """What the next round would do with an object that nobody has created yet.

        Args:
            admin: whether the answer may name other tenants and nodes.

        Raises:
            Invalid: the operator cannot make a job of the draft; its sentence says why.
            Unavailable: the operator does not answer, or answers too many others.
        """
        body = PreviewRequest(object=draft, admin=admin).to_wire()
        return _read(PreviewAnswer, await self._fetch("POST", PREVIEW_PATH, body))

    async def service_plan(self, asked: ServicePlanRequest) -> ServicePlanAnswer:
        """The cheapest replicas of a service for a stated load. Raises Invalid and Unavailable as `preview` does."""
        return _read(ServicePlanAnswer, await self._fetch("POST", SERVICE_PLAN_PATH, asked.to_wire()))

    async def service_series(self, namespace: str, name: str, span: SeriesSpan) -> ServiceSeries:
        """A service's load over time, and its replicas. Raises Unavailable as `nodes` does."""
        asked = urlencode({"namespace": namespace, "name": name, "span": span.value})
        return _read(ServiceSeries, await self._fetch("GET", f"{SERVICE_SERIES_PATH}?{asked}", None))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _fetch_nodes(self) -> list[NodeLoad]:
        return _read(NodeLoads, await self._fetch("GET", NODES_PATH, None)).nodes

    async def _fetch_power(self) -> PowerPicture:
        return _read(PowerPicture, await self._fetch("GET", POWER_PATH, None))

    async def _fetch(self, method: str, path: str, body: object | None) -> str:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), trust_env=False
            )
        try:
            async with self._session.request(
                method,
                self._url + path,
                json=body,
                headers=self._token.header(),
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


def _read(model: type[M], text: str) -> M:
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise Unavailable("the operator's answer cannot be read", retry_after_s=5) from error


def _message(text: str) -> str:
    try:
        body: Any = json.loads(text)
    except ValueError:
        return text[:500]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
