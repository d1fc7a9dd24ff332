"""The routing table: which service a model name means for a key, and where its replicas are.

A table is one immutable document of the operator, indexed. It knows nothing of connections or of time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from busbar.gateway.errors import BadRequest, ModelNotFound
from busbar.kube.contracts.keys import KeyIdentity
from busbar.kube.contracts.routes import AdapterRoute, Routes, ServiceRoute
from busbar.kube.documents import shown


@dataclass(frozen=True)
class Target:
    """What a model name means."""

    service: ServiceRoute
    adapter: str = ""
    """Empty: the model alone."""


class RouteTable:
    """One routes document, looked up by key and model."""

    def __init__(self, document: Routes) -> None:
        self.document = document
        self.services = {service.key: service for service in document.services}

    def __len__(self) -> int:
        return len(self.services)

    def visible(self, key: KeyIdentity) -> list[ServiceRoute]:
        """The services a key may use: its tenant's, in the namespaces the key was given, and those that other tenants
        share with its own."""
        return [service for service in self.services.values() if _is_visible(service, key)]

    def names(self, key: KeyIdentity) -> list[tuple[str, ServiceRoute]]:
        """The shortest name of each visible service: its model id where that is unique among the tenant's own;
        `namespace/name` of another tenant's. Adapters are not among them."""
        services = self.visible(key)
        count = Counter(service.model_id for service in services if service.tenant == key.tenant)
        named = [
            (
                service.model_id
                if count[service.model_id] == 1 and service.tenant == key.tenant
                else service.key,
                service,
            )
            for service in services
        ]
        return sorted(named, key=lambda found: found[0])

    def resolve(self, key: KeyIdentity, model: str) -> Target:
        """The service that `model` means for this key, and the adapter where the name ends with `:adapter`.

        `namespace/name` is tried first and always works; a whole name goes before one with an adapter. Model ids are
        those of the tenant's own services, so nobody can take a name of somebody else's. Raises
        ModelNotFound, with the same words whether the model or adapter exists for somebody else or for nobody, or with the
        reason where no replica serves the adapter, and
        BadRequest when two of the key's own services share a model id.
        """
        services = self.visible(key)
        named = [
            (service, end)
            for service in services
            for end in ("", *(f":{each.name}" for each in adapters_for(service, key)))
        ]
        for service, end in named:
            if service.key + end == model:
                return _target(service, end[1:])
        own = [(service, end) for service, end in named if service.tenant == key.tenant]
        found = [(service, "") for service, end in own if not end and service.model_id == model]
        found = found or [(service, end) for service, end in own if service.model_id + end == model]
        if not found:
            raise ModelNotFound(
                f"The model {shown(model)} does not exist or this key may not use it. GET /v1/models lists what it may.",
                param="model",
            )
        if len(found) > 1:
            raise BadRequest(
                f"The model id {model!r} means several services; name one of {_listed(found)}.", param="model"
            )
        service, end = found[0]
        return _target(service, end[1:])


def _is_visible(service: ServiceRoute, key: KeyIdentity) -> bool:
    if service.tenant == key.tenant:
        return bool(service.tenant) and service.namespace in key.namespaces
    return service.terms_of(key.tenant) is not None


def _target(service: ServiceRoute, adapter: str) -> Target:
    """Raises ModelNotFound where no replica serves the adapter."""
    problem = next((each.problem for each in service.adapters if each.name == adapter), None)
    if problem is not None:
        raise ModelNotFound(
            f"No replica of {service.key} serves its adapter {adapter!r}: {problem}", param="model"
        )
    return Target(service, adapter)


def adapters_for(service: ServiceRoute, key: KeyIdentity) -> list[AdapterRoute]:
    """The service's adapters that the key's tenant may use."""
    return [a for a in service.adapters if a.tenants is None or key.tenant in a.tenants]


def _listed(found: Iterable[tuple[ServiceRoute, str]]) -> str:
    return ", ".join(sorted(service.key + end for service, end in found))
