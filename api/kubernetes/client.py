"""The part of Kubernetes that the API uses.

`KubeApi` is the part of `busbar.kube.client.KubeClient` that we call, plus reading a pod's log as a stream.
Errors of the client become errors of the API in one place (`translated`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from busbar.api.errors import (
    ApiError,
    BadRequest,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    TooMany,
    Unavailable,
)
from busbar.kube import errors as kube
from busbar.kube.client import KubeClient, Preconditions
from busbar.kube.resources import Resource
from busbar.kube.types.limits import QUOTA

Object = dict[str, Any]

LOG_CHUNK_BYTES = 16 * 1024
LOG_SILENCE_S = 30.0
"""Longest pause while reading a log that is complete; a followed log may pause for as long as its pod
runs."""


class KubeApi(Protocol):
    """The calls the API makes. `KubeClient` has them; tests bring their own."""

    async def get(
        self, resource: Resource, name: str, namespace: str | None = None, subresource: str | None = None
    ) -> Object: ...

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
        page: int = 500,
    ) -> tuple[list[Object], str]: ...

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        grace_s: int | None = None,
        propagation: str | None = "Background",
        preconditions: Preconditions | None = None,
    ) -> Object: ...

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: object | None = None,
        content_type: str = ...,
        params: Mapping[str, str] | None = None,
    ) -> Object: ...

    def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        params: Mapping[str, str],
        inactivity_s: float,
    ) -> AsyncIterator[Object]: ...

    def log(self, namespace: str, pod: str, *, params: Mapping[str, str]) -> AsyncGenerator[bytes]: ...

    async def close(self) -> None: ...


class Kubernetes(KubeClient):
    """The raw client, and pod logs as a stream of bytes."""

    async def log(self, namespace: str, pod: str, *, params: Mapping[str, str]) -> AsyncGenerator[bytes]:
        """A pod's log as it is written; with `follow=true` until the container ends.

        Raises:
            KubeError: the pod is gone, has not started, or the server does not answer.
        """
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
        silence_s = None if params.get("follow") == "true" else LOG_SILENCE_S
        async with self.stream(path, params, what=f"GET {path}", inactivity_s=silence_s) as response:
            async for chunk in response.content.iter_chunked(LOG_CHUNK_BYTES):
                yield chunk


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn errors of the Kubernetes client into errors of the API; `what` names the object in the message."""
    try:
        yield
    except kube.KubeError as error:
        raise _translate(error, what) from error


def _translate(error: kube.KubeError, what: str) -> ApiError:
    if isinstance(error, kube.ConnectionFailed):
        return Unavailable(f"{what}: Kubernetes does not answer; try again in a moment", retry_after_s=2)
    if not isinstance(error, kube.ApiError):
        return Unavailable(f"{what}: {error}")
    if isinstance(error, kube.NotFound):
        return NotFound(f"{what} does not exist")
    if isinstance(error, kube.AlreadyExists):
        return Conflict(f"{what} exists already; choose another name", field="metadata.name")
    if isinstance(error, kube.Conflict):
        return Conflict(f"{what} changed meanwhile; read it again and repeat")
    if isinstance(error, kube.Invalid):
        return Invalid(_sentence(error.message, what), field=_field(error))
    if isinstance(error, kube.BadRequest):
        return BadRequest(f"{what}: {error.message}", field=_field(error))
    if isinstance(error, kube.Forbidden) and f"exceeded quota: {QUOTA}" in error.message:
        return Forbidden(
            f"{what}: {error.message}: delete what is no longer needed, or ask an administrator of the platform to raise "
            "spec.limits of the Tenant"
        )
    if isinstance(error, kube.Forbidden):
        return Forbidden(f"{what}: {error.message}", field=_field(error))
    if isinstance(error, kube.TooManyRequests):
        return TooMany(f"{what}: Kubernetes is busy; try again shortly", retry_after_s=2)
    return Unavailable(f"{what}: Kubernetes answered {error.status}; try again in a moment", retry_after_s=2)


def _field(error: kube.ApiError) -> str | None:
    for cause in error.details.get("causes") or []:
        if isinstance(cause, Mapping) and cause.get("field"):
            return str(cause["field"])
    return None


def _sentence(message: str, what: str) -> str:
    """The server's sentence without the repeated `TrainingJob.busbar.dev "x" is invalid:` in front."""
    head, separator, rest = message.partition(" is invalid: ")
    return f"{what}: {rest}" if separator and '"' in head else f"{what}: {message}"
