"""What the routes of a kind share: its addresses, its names in the description, and its permissions."""

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Depends

from busbar.api.dependencies import InNamespace
from busbar.api.routes import schemas
from busbar.kube.resources import Resource
from busbar.kube.types.meta import Resource as Kind


@dataclass(frozen=True)
class Served:
    """A kind as REST serves it."""

    resource: Resource
    model: type[Kind]
    many: type[schemas.Answer]

    @property
    def kind(self) -> str:
        return self.resource.kind

    @property
    def everywhere(self) -> str:
        """Address of the list over all namespaces."""
        return f"/{self.resource.plural}"

    @property
    def collection(self) -> str:
        return f"/namespaces/{{namespace}}/{self.resource.plural}"

    @property
    def one(self) -> str:
        return f"{self.collection}/{{name}}"

    def routes(self) -> APIRouter:
        """An empty router under the kind's tag."""
        return APIRouter(tags=[f"{self.kind}s"])

    def may(self, verb: str) -> Any:
        """The permission to do `verb` to the kind in the namespace of the path."""
        return Depends(InNamespace(verb, self.resource))
