"""TrainingJobs and ModelServices, as one service that REST and the portal share.

The API writes with its own service account. So it first asks Kubernetes whether the caller may, and passes on
only what users may set: name, their own labels and annotations, and the spec.

    create   the object, with the requester stamped on it
    change   a merge patch of the spec, labels and annotations
    cancel   `spec.suspend: true`: the job saves its state, gives everything back and keeps its object and
             output, so that `resume` continues from the checkpoint
    resume   `spec.suspend: false`
    delete   the object and its pods go; the output stays unless the object says otherwise
"""

from __future__ import annotations

import json
from typing import Any

from busbar.api.access.audit import Audit
from busbar.api.access.authorization import Authorizer, not_found
from busbar.api.access.identity import Caller
from busbar.api.errors import BadRequest, Conflict, Forbidden, Invalid, NotFound
from busbar.api.kubernetes.client import KubeApi, Object, translated
from busbar.api.kubernetes.store import Store
from busbar.api.kubernetes.typed import M, read, tidy
from busbar.kube.client import MERGE
from busbar.kube.resources import GROUP, MODEL_SERVICES, TRAINING_JOBS, Resource
from busbar.kube.types import ModelService, TrainingJob
from busbar.kube.types.meta import ANNOTATION_REQUESTER
from busbar.kube.types.meta import Resource as Model

Workload = TrainingJob | ModelService
KINDS: dict[Resource, type[Workload]] = {TRAINING_JOBS: TrainingJob, MODEL_SERVICES: ModelService}
_META = {"name", "generateName", "labels", "annotations", "namespace"}
_RESERVED = f"{GROUP}/"
STRICT = {"fieldValidation": "Strict"}
"""Refuse unknown fields, as kubectl asks for too, instead of dropping them silently."""


class Objects:
    """Reads and writes our namespaced kinds for callers."""

    def __init__(self, kube: KubeApi, store: Store, authorizer: Authorizer, audit: Audit) -> None:
        self._kube = kube
        self._store = store
        self._authorizer = authorizer
        self._audit = audit

    async def listing(self, caller: Caller, kind: type[M], namespace: str | None = None) -> list[M]:
        """Objects that the caller may see, newest first."""
        resource = resource_of(kind)
        if namespace is not None:
            await self._authorizer.require(caller, "list", resource, namespace)
            found = [o for o in self._store.all(kind) if o.metadata.namespace == namespace]
        else:
            reach = await self._authorizer.reach(caller, resource)
            found = [o for o in self._store.all(kind) if o.metadata.namespace in reach]
        return sorted(found, key=_made_at, reverse=True)

    async def get(self, caller: Caller, kind: type[M], namespace: str, name: str) -> M:
        """One object, from the API server.

        Raises:
            Conflict: it was written for another version of Busbar.
        """
        resource = resource_of(kind)
        await self._authorizer.require(caller, "get", resource, namespace, name=name)
        return _model(kind, await self._read(resource, namespace, name))

    async def exists(self, caller: Caller, resource: Resource, namespace: str, name: str) -> str:
        """Check that the object exists and the caller may see it; returns its uid.

        Raises:
            NotFound: there is none, or it is not theirs to see.
        """
        await self._authorizer.require(caller, "get", resource, namespace, name=name)
        return str((await self._read(resource, namespace, name))["metadata"]["uid"])

    async def create(self, caller: Caller, resource: Resource, namespace: str, body: Object) -> Workload:
        """Create the object that the caller sent."""
        name = str(metadata_of(body).get("name") or "")
        async with self._audit.ahead(
            caller.subject, "create", resource.kind, namespace=namespace, name=name, source=caller.source
        ):
            draft = await self.draft(caller, resource, namespace, body)
            with translated(f"{resource.kind} {namespace}/{name}"):
                made = await self._kube.call("POST", resource.path(namespace), body=draft, params=STRICT)
        return self._took(resource, made)

    async def draft(self, caller: Caller, resource: Resource, namespace: str, body: Object) -> Object:
        """The object to create: checked, reduced to what users may set, and stamped with the requester."""
        await self._authorizer.require(caller, "create", resource, namespace)
        kind, version = body.get("kind", resource.kind), body.get("apiVersion", resource.api_version)
        if kind != resource.kind:
            raise Invalid(f"kind is {kind!r}, this address takes {resource.kind}", field="kind")
        if version != resource.api_version:
            raise Invalid(f"apiVersion is {version!r}, it must be {resource.api_version}", field="apiVersion")
        if extra := sorted(set(body) - {"apiVersion", "kind", "metadata", "spec", "status"}):
            raise Invalid(f"unknown field {extra[0]!r}; an object has metadata and spec", field=extra[0])
        meta = metadata_of(body)
        if not (meta.get("name") or meta.get("generateName")):
            raise Invalid("the object needs a name", field="metadata.name")
        if unknown := sorted(set(meta) - _META):
            raise Invalid(f"metadata.{unknown[0]} cannot be set here", field=f"metadata.{unknown[0]}")
        if meta.get("namespace", namespace) != namespace:
            raise Invalid(f"metadata.namespace is not {namespace}, the address's", field="metadata.namespace")
        if not isinstance(body.get("spec"), dict):
            raise Invalid("the object needs a spec", field="spec")
        await self._check_access(caller, resource, namespace, body["spec"])
        annotations = _own("annotations", meta.get("annotations")) | {ANNOTATION_REQUESTER: caller.subject}
        clean: Object = {
            key: meta[key] for key in ("name", "generateName") if isinstance(meta.get(key), str) and meta[key]
        }
        clean |= {"namespace": namespace, "annotations": annotations}
        if labels := _own("labels", meta.get("labels")):
            clean["labels"] = labels
        return {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "metadata": clean,
            "spec": body["spec"],
        }

    async def dry_run(self, resource: Resource, draft: Object) -> Object:
        """The object as the API server would store it: schema, defaults, rules and policies applied.

        Raises:
            Invalid: what a creation would be refused for, with the field.
        """
        namespace, name = draft["metadata"]["namespace"], draft["metadata"].get("name", "")
        with translated(f"{resource.kind} {namespace}/{name}"):
            return await self._kube.call(
                "POST", resource.path(namespace), body=draft, params={**STRICT, "dryRun": "All"}
            )

    async def change(
        self,
        caller: Caller,
        resource: Resource,
        namespace: str,
        name: str,
        patch: Object,
        action: str = "change",
    ) -> Workload:
        """Apply a merge patch to the spec and the caller's own labels and annotations."""
        async with self._audit.ahead(
            caller.subject, action, resource.kind, namespace=namespace, name=name, source=caller.source
        ):
            await self._authorizer.require(caller, "patch", resource, namespace, name=name)
            if extra := sorted(set(patch) - {"spec", "metadata", "apiVersion", "kind"}):
                raise Invalid(f"{extra[0]} cannot be changed here; send spec", field=extra[0])
            clean: Object = {}
            if "spec" in patch:
                if not isinstance(patch["spec"], dict):
                    raise Invalid("spec must be an object with the fields to change", field="spec")
                await self._check_access(caller, resource, namespace, patch["spec"])
                clean["spec"] = patch["spec"]
            meta = metadata_of(patch)
            if unknown := sorted(set(meta) - {"labels", "annotations", "resourceVersion"}):
                raise Invalid(f"metadata.{unknown[0]} cannot be changed", field=f"metadata.{unknown[0]}")
            changes: Object = {key: _own(key, meta[key]) for key in ("labels", "annotations") if key in meta}
            if meta.get("resourceVersion"):
                changes["resourceVersion"] = str(meta["resourceVersion"])
            if changes:
                clean["metadata"] = changes
            if not clean:
                raise Invalid("nothing to change; send spec or metadata.labels", field="spec")
            with translated(f"{resource.kind} {namespace}/{name}"):
                made = await self._kube.call(
                    "PATCH", resource.path(namespace, name), body=clean, content_type=MERGE, params=STRICT
                )
        return self._took(resource, made)

    async def suspend(
        self, caller: Caller, resource: Resource, namespace: str, name: str, suspended: bool
    ) -> Workload:
        """Cancel (True) or resume (False)."""
        action = "cancel" if suspended else "resume"
        return await self.change(caller, resource, namespace, name, {"spec": {"suspend": suspended}}, action)

    async def scale(self, caller: Caller, namespace: str, name: str, replicas: int | None) -> Workload:
        """Set a ModelService's replica count; None gives it back to the autoscaler."""
        return await self.change(
            caller, MODEL_SERVICES, namespace, name, {"spec": {"replicas": replicas}}, "scale"
        )

    async def delete(self, caller: Caller, resource: Resource, namespace: str, name: str) -> None:
        """Delete an object; its pods follow."""
        async with self._audit.ahead(
            caller.subject, "delete", resource.kind, namespace=namespace, name=name, source=caller.source
        ):
            await self._authorizer.require(caller, "delete", resource, namespace, name=name)
            with translated(f"{resource.kind} {namespace}/{name}"):
                await self._kube.delete(resource, name, namespace)

    async def _check_access(self, caller: Caller, resource: Resource, namespace: str, spec: Object) -> None:
        """Who lets other tenants use a service needs the right to: the chart's policy busbar-access asks for it, and sees
        our own service account.

        Raises:
            Forbidden: the caller is no admin of the tenant.
        """
        if resource != MODEL_SERVICES or "access" not in spec:
            return
        if not await self._authorizer.allowed(caller, "update", MODEL_SERVICES, namespace, "access"):
            raise Forbidden(
                "spec.access lets other tenants use the service, at the cost of its replicas; ask an admin of the tenant "
                "to set or change it",
                field="spec.access",
            )

    async def _read(self, resource: Resource, namespace: str, name: str) -> Object:
        try:
            with translated(f"{resource.kind} {namespace}/{name}"):
                return await self._kube.get(resource, name, namespace)
        except NotFound as error:
            raise NotFound(not_found(resource, namespace, name)) from error

    def _took(self, resource: Resource, made: Object) -> Workload:
        self._store.observe(resource, made)
        return _model(KINDS[resource], made)


def resource_of(kind: type[Model]) -> Resource:
    """The Kubernetes resource of a kind."""
    return next(resource for resource, model in KINDS.items() if model is kind)


def _made_at(obj: Model) -> tuple[float, str]:
    made = obj.metadata.creation_timestamp
    return made.timestamp() if made is not None else 0.0, obj.metadata.name


def _model(kind: type[M], obj: Object) -> M:
    found = read(kind, tidy(obj))
    if found is None:
        raise Conflict(
            f"{obj['metadata'].get('namespace')}/{obj['metadata']['name']} was written for another version of "
            "Busbar, which this one cannot read; delete it, or write it again"
        )
    return found


def check_unicode(document: object) -> None:
    """Refuse what JSON in UTF-8 cannot say, though Python's parser reads it.

    Raises:
        BadRequest: half a surrogate pair in some text or key, NaN, infinity, or deeper nesting than we write.
    """
    try:
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise BadRequest(
            f"\\u{half:04x} is half of a surrogate pair, which is no character; remove it"
        ) from error
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


def metadata_of(body: Object) -> Object:
    """The metadata of a request's body; empty when there is none.

    Raises:
        Invalid: it is not an object.
    """
    meta = body.get("metadata")
    if meta is not None and not isinstance(meta, dict):
        raise Invalid("metadata must be an object", field="metadata")
    return meta or {}


def _own(what: str, given: Any) -> Object:
    """Labels or annotations that people may set: strings, and none of Busbar's own."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise Invalid(f"metadata.{what} must be an object of strings", field=f"metadata.{what}")
    for key, value in given.items():
        if key.startswith(_RESERVED):
            raise Invalid(f"metadata.{what}: {key} is Busbar's own", field=f"metadata.{what}")
        if value is not None and not isinstance(value, str):
            raise Invalid(f"metadata.{what}: the value of {key} must be a string", field=f"metadata.{what}")
    return dict(given)
