"""A small in-memory `KubeApi`: objects, watches, reviews and pod logs, for tests that need no API server.

It behaves as the API server does in everything that `api/` depends on: resource versions, 404/409/422, merge
patches, dry runs that validate with our own models, watches that report every change, and SubjectAccessReview by
the roles that the operator would render from `Tenant.spec.members`.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

from pydantic import ValidationError

from busbar.kube import errors
from busbar.kube.client import MERGE, Preconditions
from busbar.kube.resources import (
    MODEL_SERVICES,
    TENANTS,
    TRAINING_JOBS,
    Resource,
)
from busbar.kube.types import KINDS

Object = dict[str, Any]
READ = {"get", "list", "watch"}
WRITE = READ | {"create", "update", "patch", "delete"}
OURS = {"trainingjobs", "modelservices"}


class MemoryKube:
    """The cluster of a test."""

    def __init__(self, now: Callable[[], str] = lambda: "2026-03-01T12:00:00Z") -> None:
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.revision = 100
        self.logs: dict[tuple[str, str], list[bytes]] = {}
        self.open_logs: dict[tuple[str, str], asyncio.Event] = {}
        self.users: dict[str, Object] = {}
        """Kubernetes token to the `status.user` of its review."""
        self.audiences: dict[str, list[str]] = {}
        self.reviews: list[Object] = []
        self.away = False
        self.closed = False
        self._now = now
        self._history: list[tuple[int, str, str, Object]] = []
        self._changed = asyncio.Condition()

    # -- seeding and scripting --------------------------------------------------------------------------

    def put(self, resource: Resource, obj: Object) -> Object:
        """Create or replace, as another client would."""
        stored = copy.deepcopy(obj)
        meta = stored.setdefault("metadata", {})
        stored.setdefault("apiVersion", resource.api_version)
        stored.setdefault("kind", resource.kind)
        key = (resource.plural, meta.get("namespace", ""), meta["name"])
        before = self.objects.get(key)
        meta.setdefault("uid", before["metadata"]["uid"] if before else str(uuid.uuid4()))
        meta.setdefault(
            "creationTimestamp", before["metadata"]["creationTimestamp"] if before else self._now()
        )
        self.revision += 1
        meta["resourceVersion"] = str(self.revision)
        self.objects[key] = stored
        self._tell("MODIFIED" if before else "ADDED", resource.plural, stored)
        return copy.deepcopy(stored)

    def status(self, resource: Resource, namespace: str, name: str, **status: Any) -> Object:
        """Merge into an object's status, as the operator would."""
        obj = copy.deepcopy(self.objects[resource.plural, namespace, name])
        obj["status"] = {**(obj.get("status") or {}), **status}
        return self.put(resource, obj)

    def remove(self, resource: Resource, name: str, namespace: str = "") -> None:
        gone = self.objects.pop((resource.plural, namespace, name))
        self.revision += 1
        gone["metadata"]["resourceVersion"] = str(self.revision)
        self._tell("DELETED", resource.plural, gone)

    def _tell(self, kind: str, plural: str, obj: Object) -> None:
        self._history.append((self.revision, plural, kind, copy.deepcopy(obj)))
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        task = loop.create_task(self._notify())
        task.add_done_callback(lambda t: t.exception())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # -- KubeApi ----------------------------------------------------------------------------------------

    async def close(self) -> None:
        self.closed = True

    async def get(
        self, resource: Resource, name: str, namespace: str | None = None, subresource: str | None = None
    ) -> Object:
        self._answering(f"GET {resource.plural}")
        return copy.deepcopy(self._find(resource, name, namespace))

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
        page: int = 500,
    ) -> tuple[list[Object], str]:
        self._answering(f"LIST {resource.plural}")
        found = [
            copy.deepcopy(obj)
            for (plural, space, _), obj in self.objects.items()
            if plural == resource.plural
            and namespace in (None, space)
            and _labels_match(obj, label_selector)
            and _fields_match(obj, field_selector)
        ]
        return found, str(self.revision)

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        grace_s: int | None = None,
        propagation: str | None = "Background",
        preconditions: Preconditions | None = None,
    ) -> Object:
        self._answering(f"DELETE {resource.plural}")
        self._find(resource, name, namespace)
        self.remove(resource, name, namespace or "")
        return {}

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: object | None = None,
        content_type: str = "application/json",
        params: Mapping[str, str] | None = None,
    ) -> Object:
        self._answering(f"{method} {path}")
        assert isinstance(body, dict)
        if path.endswith("/subjectaccessreviews"):
            self.reviews.append(body["spec"])
            return {"status": {"allowed": self._allowed(body["spec"])}}
        if path.endswith("/tokenreviews"):
            return {"status": self._authenticated(body["spec"])}
        assert params is not None
        assert params["fieldValidation"] == "Strict"
        if method == "PATCH":
            assert content_type == MERGE
            *_, namespace, plural, name = path.split("/")
            return self._patch(_resource(plural), name, body, namespace)
        assert method == "POST"
        *_, namespace, plural = path.split("/")
        resource = _resource(plural)
        stored = self._validated(resource, body, namespace)
        if params.get("dryRun") == "All":
            stored["metadata"] |= {"uid": "dry-run", "creationTimestamp": self._now()}
            return stored
        return self.put(resource, stored)

    def _patch(self, resource: Resource, name: str, patch: Object, namespace: str) -> Object:
        before = self._find(resource, name, namespace)
        wanted = (patch.get("metadata") or {}).get("resourceVersion")
        if wanted and wanted != before["metadata"]["resourceVersion"]:
            raise errors.api_error(409, {"reason": "Conflict", "message": "changed"}, "PATCH")
        merged = _merge(copy.deepcopy(before), patch)
        self._check(resource, merged)
        return self.put(resource, merged)

    async def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        params: Mapping[str, str],
        inactivity_s: float,
    ) -> AsyncIterator[Object]:
        self._answering(f"WATCH {resource.plural}")
        if params.get("sendInitialEvents"):
            raise errors.api_error(400, {"message": "streaming lists are not served"}, "WATCH")
        seen = int(params["resourceVersion"])
        while True:
            for revision, plural, kind, obj in [h for h in self._history if h[0] > seen]:
                seen = revision
                if plural == resource.plural:
                    yield {"type": kind, "object": copy.deepcopy(obj)}
            if self.away:
                raise errors.ConnectionFailed("cut")
            async with self._changed:
                if not any(h[0] > seen for h in self._history):
                    await self._changed.wait()

    async def log(self, namespace: str, pod: str, *, params: Mapping[str, str]) -> AsyncGenerator[bytes]:
        self._answering(f"LOG {pod}")
        if (namespace, pod) not in self.logs:
            raise errors.api_error(404, {"message": "no such pod"}, "LOG")
        sent = 0
        while True:
            lines = self.logs[namespace, pod]
            while sent < len(lines):
                yield lines[sent]
                sent += 1
            ended = self.open_logs.get((namespace, pod))
            if params.get("follow") != "true" or ended is None or ended.is_set():
                return
            await asyncio.sleep(0.01)

    # -- inside -----------------------------------------------------------------------------------------

    def _answering(self, what: str) -> None:
        if self.away:
            raise errors.ConnectionFailed(what)

    def _find(self, resource: Resource, name: str, namespace: str | None) -> Object:
        try:
            return self.objects[resource.plural, namespace or "", name]
        except KeyError:
            raise errors.api_error(
                404, {"reason": "NotFound", "message": f"{name} not found"}, "GET"
            ) from None

    def _validated(self, resource: Resource, body: Object, namespace: str | None) -> Object:
        stored = copy.deepcopy(body)
        meta = stored["metadata"]
        if not meta.get("name"):
            meta["name"] = meta["generateName"] + uuid.uuid4().hex[:5]
        meta["namespace"] = namespace
        if (resource.plural, namespace, meta["name"]) in self.objects:
            raise errors.api_error(409, {"reason": "AlreadyExists", "message": "already exists"}, "POST")
        self._check(resource, stored)
        stored.pop("status", None)
        return stored

    def _check(self, resource: Resource, obj: Object) -> None:
        model = KINDS.get(resource.kind)
        if model is None:
            return
        try:
            model.model_validate(obj)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            text = (
                f'{resource.kind}.busbar.dev "{obj["metadata"]["name"]}" is invalid: {place}: {first["msg"]}'
            )
            details = {"causes": [{"field": place, "message": first["msg"]}]}
            raise errors.api_error(
                422, {"reason": "Invalid", "message": text, "details": details}, "POST"
            ) from error

    def _authenticated(self, spec: Object) -> Object:
        user = self.users.get(spec["token"])
        audiences = [
            a for a in spec.get("audiences", []) if a in self.audiences.get(spec["token"], ["busbar-api"])
        ]
        if user is None or not audiences:
            return {"authenticated": False}
        return {"authenticated": True, "user": user, "audiences": audiences}

    def _allowed(self, spec: Object) -> bool:
        groups, asked = set(spec.get("groups") or []), spec["resourceAttributes"]
        if groups & {"busbar:admins", "system:masters"}:
            return True
        namespace = asked.get("namespace")
        if not namespace:
            return False
        for (plural, _, _), tenant in self.objects.items():
            if plural != TENANTS.plural or namespace not in (tenant["spec"].get("namespaces") or []):
                continue
            for member in tenant["spec"].get("members") or []:
                if _is(member["subject"], spec["user"], groups) and _role_allows(member["role"], asked):
                    return True
        return False


def _resource(plural: str) -> Resource:
    return next(r for r in (TRAINING_JOBS, MODEL_SERVICES) if r.plural == plural)


def _is(subject: Object, user: str, groups: set[str]) -> bool:
    if subject["kind"] == "Group":
        return subject["name"] in groups
    if subject["kind"] == "ServiceAccount":
        return user == f"system:serviceaccount:{subject['namespace']}:{subject['name']}"
    return bool(user == subject["name"])


def _role_allows(role: str, asked: Object) -> bool:
    verbs = READ if role == "viewer" else WRITE
    if asked.get("subresource") == "access":
        return role == "admin"
    if asked["group"] == "busbar.dev":
        return asked["resource"] in OURS and asked["verb"] in verbs
    return asked["resource"] in ("pods", "events") and asked["verb"] in READ


def _merge(into: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    into = into if isinstance(into, dict) else {}
    for key, value in patch.items():
        if value is None:
            into.pop(key, None)
        else:
            into[key] = _merge(into.get(key), value)
    return into


def _labels_match(obj: Object, selector: str | None) -> bool:
    labels = obj["metadata"].get("labels") or {}
    return all(
        labels.get(k) == v
        for k, _, v in (term.partition("=") for term in (selector or "").split(",") if term)
    )


def _fields_match(obj: Object, selector: str | None) -> bool:
    for term in (selector or "").split(","):
        if not term:
            continue
        path, _, wanted = term.partition("=")
        value: Any = obj
        for part in path.split("."):
            value = (value or {}).get(part)
        if value != wanted:
            return False
    return True
