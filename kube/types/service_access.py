"""Who besides its own tenant may use a ModelService, and each one's part of it."""

from typing import Annotated

from pydantic import Field

from busbar.kube.types.inference import PerMinute
from busbar.kube.types.meta import DnsLabel, SpecModel
from busbar.kube.types.rules import Rule


class AllowedTenant(SpecModel):
    """A tenant that may use the service, and its part of it."""

    rules = (
        Rule(
            cel="!has(self.guaranteedKv) || !has(self.maxKv) || self.guaranteedKv <= self.maxKv",
            message="guaranteedKv must not be greater than maxKv",
            holds=lambda tenant: tenant.guaranteed_kv is None or tenant.guaranteed_kv <= (tenant.max_kv or 1),
        ),
    )

    name: DnsLabel = Field(description="The Tenant; the owner's own may be named for its weight.")
    weight: Annotated[float, Field(gt=0, le=1000)] = Field(
        default=1.0,
        description="Of its requests while they wait and inside the replicas; the owner's is 1 where it is not named.",
    )
    tokens_per_minute: PerMinute | None = Field(
        default=None,
        description="Prompt and output tokens of this service that it may use in any 60 seconds; absent: no limit.",
    )
    guaranteed_kv: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="Part of each replica's KV cache that it always gets; others use it while it is idle. It may change while "
        "replicas serve.",
    )
    max_kv: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="Most of each replica's KV cache that it may hold; absent: all. It may change while "
        "replicas serve; requests that were taken before run to their ends.",
    )

    @property
    def has_kv_quota(self) -> bool:
        return self.guaranteed_kv is not None or self.max_kv is not None


_PROMISED = "self.tenants.map(t, has(t.guaranteedKv) ? t.guaranteedKv : 0.0).sum()"


class Access(SpecModel):
    """Who besides the owner's tenant may use the service."""

    rules = (
        Rule(
            cel=f"{_PROMISED} <= 1.000001",  # ten tenths add up to more than 1 in some orders
            message="the guaranteedKv of all tenants together must not be greater than 1, the whole KV cache",
            holds=lambda access: sum(t.guaranteed_kv or 0 for t in access.tenants) <= 1.000001,
        ),
    )

    tenants: Annotated[
        list[AllowedTenant],
        Field(
            min_length=1,
            max_length=256,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = Field(description="These tenants; they ask for it as NAMESPACE/NAME.")
