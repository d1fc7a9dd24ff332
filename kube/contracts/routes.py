"""`GET /routes` of the operator: which replicas answer for which service, as a stream of whole documents.

NDJSON: one document for each change and one every 15 s, so a gateway that missed a line is right again soon, and
one that heard nothing for longer knows that its routes are old (it goes on with them).
"""

from pydantic import Field

from busbar.kube.contracts.wire import WireModel

PATH = "/routes"
RESEND_S = 15.0


class Endpoint(WireModel):
    """One replica."""

    pod: str
    url: str
    ready: bool
    draining: bool = False


class ServiceRoute(WireModel):
    """One ModelService, with the bearer that its replicas want."""

    tenant: str
    namespace: str
    name: str
    uid: str
    model_id: str
    desired_replicas: int = 0
    ready_replicas: int = 0
    suspended: bool = False
    min_replicas: int = 0
    max_replicas: int = 1
    bearer: str = Field(repr=False)
    endpoints: list[Endpoint] = Field(default_factory=list)

    @property
    def key(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"


class Routes(WireModel):
    """One whole document of the stream; the revision grows with each change while the operator lives."""

    revision: int
    services: list[ServiceRoute] = Field(default_factory=list)
