"""Before anything is made: where it would run, when, in which mode, at what cost, or exactly why not.

    draft ── dry run at the API server (schema, rules, policies) ── the operator's answer, passed on

The operator has the snapshot, the planner and the memory of how jobs went; it is told whether the caller is an
admin, and leaves out of everybody else's answer what belongs to other tenants.
"""

from __future__ import annotations

from busbar.api.access.authorization import Authorizer
from busbar.api.access.identity import Caller
from busbar.api.errors import Conflict
from busbar.api.kubernetes.client import Object
from busbar.api.objects.objects import Objects, metadata_of
from busbar.api.objects.operator_client import Operator
from busbar.kube.contracts.preview import PreviewAnswer
from busbar.kube.contracts.service_plan import ServicePlanAnswer, ServicePlanRequest
from busbar.kube.resources import MODEL_SERVICES, Resource

DRAFT_NAME = "preview"


class Previews:
    """Previews of drafts, and plans of services, for callers."""

    def __init__(self, objects: Objects, operator: Operator, authorizer: Authorizer) -> None:
        self._objects = objects
        self._operator = operator
        self._authorizer = authorizer

    async def preview(
        self, caller: Caller, resource: Resource, namespace: str, body: Object
    ) -> PreviewAnswer:
        """What would happen to the draft.

        Raises:
            Invalid: it would not even be created; says which field.
            Conflict: there is an object of this name.
            Unavailable: the operator is away, or answers too many others.
        """
        body = dict(body)
        meta = dict(metadata_of(body))
        if not meta.get("name") and not meta.get("generateName"):
            meta["name"] = DRAFT_NAME
        body["metadata"] = meta
        draft = await self._objects.draft(caller, resource, namespace, body)
        try:
            stored = await self._objects.dry_run(resource, draft)
        except Conflict as error:
            raise Conflict(
                f"{resource.kind} {namespace}/{meta.get('name')} exists already, and its status says how it is; to preview "
                "another one like it, change metadata.name or leave it out",
                field="metadata.name",
            ) from error
        stored.setdefault("kind", resource.kind)
        stored.setdefault("apiVersion", resource.api_version)
        if (stored.get("spec") or {}).get("suspend"):
            return PreviewAnswer(
                starts_now=False,
                possible=True,
                reason="It is created suspended and starts when spec.suspend becomes false.",
                when="When it is resumed",
                code="Suspended",
            )
        return await self._operator.preview(stored, admin=await self._authorizer.is_admin(caller))

    async def service_plan(self, caller: Caller, asked: ServicePlanRequest) -> ServicePlanAnswer:
        """The cheapest replicas of a service for a stated load.

        Raises:
            NotFound: there is no such service, or it is not theirs to see.
            Unavailable: the operator is away, or answers too many others.
        """
        await self._objects.exists(caller, MODEL_SERVICES, asked.namespace, asked.name)
        return await self._operator.service_plan(asked)
