"""The Kubernetes API for the administrator's commands, with the kubeconfig that kubectl uses.

REST serves what people may do; a backup also reads and writes what only Busbar's own service accounts write (status,
the requester of a job). The administrator's kubeconfig impersonates them, so every write passes the same admission
policies and is in Kubernetes' audit log under the administrator's name.
"""

from __future__ import annotations

import json
import time
from types import TracebackType
from typing import Any, Self

import httpx2

from busbar.cli.errors import BusbarError, Invalid, NotAuthorised, Unreachable, UsageProblem
from busbar.kube.errors import ConfigError
from busbar.kube.login import Login, find_login
from busbar.kube.resources import Resource

TIMEOUT = httpx2.Timeout(60.0, connect=5.0)
PAGE = 500
TRIES, LONGEST_WAIT_S = 6, 10.0
Document = dict[str, Any]

MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"


class Cluster:
    """One administrator's connection to one cluster."""

    def __init__(self, login: Login, system_namespace: str) -> None:
        self._login = login
        self.system_namespace = system_namespace
        try:
            context = login.ssl_context()
        except (OSError, ConfigError) as error:
            raise UsageProblem(f"the kubeconfig cannot be used: {error}") from error
        self._http = httpx2.Client(
            base_url=login.server,
            verify=True if context is None else context,
            timeout=TIMEOUT,
            proxy=login.proxy_url,
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def account(self, name: str) -> str:
        """The user name of one of Busbar's service accounts, for `by`."""
        return f"system:serviceaccount:{self.system_namespace}:{name}"

    def listing(self, resource: Resource, by: str | None = None) -> list[Document]:
        """All objects of a kind in all namespaces."""
        found: list[Document] = []
        following = ""
        while True:
            asked = {"limit": str(PAGE), **({"continue": following} if following else {})}
            page = self._call("GET", resource.path(), params=asked, by=by)
            found += page.get("items") or []
            following = (page.get("metadata") or {}).get("continue") or ""
            if not following:
                return found

    def get(self, resource: Resource, namespace: str | None, name: str) -> Document | None:
        found: Document | None = self._call("GET", resource.path(namespace, name), absent_is_none=True)
        return found

    def create(
        self, resource: Resource, namespace: str | None, document: Document, by: str | None = None
    ) -> Document:
        made: Document = self._call("POST", resource.path(namespace), document, by=by)
        return made

    def patch(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        patch: object,
        *,
        subresource: str | None = None,
        form: str = MERGE,
        by: str | None = None,
    ) -> Document | None:
        """The object as it is then; None where it is not there (any more)."""
        path = resource.path(namespace, name, subresource)
        changed: Document | None = self._call("PATCH", path, patch, form=form, by=by, absent_is_none=True)
        return changed

    def _call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        form: str = "application/json",
        params: dict[str, str] | None = None,
        by: str | None = None,
        absent_is_none: bool = False,
    ) -> Any:
        for attempt in range(TRIES):
            headers = {"Content-Type": form, "Accept": "application/json", "User-Agent": "busbar-backup"}
            if by is not None:
                headers["Impersonate-User"] = by
            token = self._login.credential().token
            if token is not None:
                headers["Authorization"] = f"Bearer {token}"
            content = None if body is None else json.dumps(body).encode()
            try:
                answer = self._http.request(method, path, content=content, params=params, headers=headers)
            except httpx2.TransportError as error:
                raise Unreachable(
                    f"{self._login.server} does not answer ({error or type(error).__name__})"
                ) from error
            if answer.status_code != 429 or attempt == TRIES - 1:
                break
            wait = answer.headers.get("Retry-After", "")
            time.sleep(min(LONGEST_WAIT_S, float(wait) if wait.isdigit() else 1.0))
        if absent_is_none and answer.status_code == 404:
            return None
        if not answer.is_success:
            raise _error(method, path, answer)
        return answer.json()


def connect(context: str | None, system_namespace: str) -> Cluster:
    """The cluster of the current context, or of the one named. Raises UsageProblem without one."""
    try:
        return Cluster(find_login(context=context), system_namespace)
    except ConfigError as error:
        raise UsageProblem(str(error)) from error


def _error(method: str, path: str, answer: httpx2.Response) -> BusbarError:
    try:
        told = str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        told = answer.text[:200]
    kinds: dict[int, type[BusbarError]] = {
        401: NotAuthorised,
        403: NotAuthorised,
        422: Invalid,
        503: Unreachable,
    }
    kind = kinds.get(answer.status_code, BusbarError)
    return kind(
        f"Kubernetes answered {answer.status_code} to {method} {path}: {told}", code=str(answer.status_code)
    )
