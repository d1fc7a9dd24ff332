"""Shared by all our kinds: the base model, metadata, conditions, and bounded scalar types.

Fields are snake_case in Python and camelCase on the wire. A *spec* refuses unknown fields, because a job with a
silently dropped misspelt field would run wrongly. A *status* ignores them, so that an older reader can read a newer
writer's status. Every string and list has a bound: CEL cost and etcd size depend on it. `Model.to_wire()` gives the
JSON form.
"""

import re
from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from busbar.kube.types import quantity
from busbar.kube.types.rules import Rule

GROUP = "busbar.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
CATEGORY = "busbar"

SCHEDULING_GATE = f"{GROUP}/admission"
ANNOTATION_REQUESTER = f"{GROUP}/requester"
"""The user who made an object through the API; an admission policy lets nobody but the API set it."""
LABEL_JOB = f"{GROUP}/job"
LABEL_KIND = f"{GROUP}/kind"
LABEL_ATTEMPT = f"{GROUP}/attempt"
LABEL_RANK = f"{GROUP}/rank"
LABEL_REPLACEMENT = f"{GROUP}/replacement"
"""On a pod that takes the place of a lost one of its attempt: counts those of its rank."""
LABEL_ADMISSION_ID = f"{GROUP}/admission-id"
LABEL_TENANT = f"{GROUP}/tenant"
LABEL_RELEASED = f"{GROUP}/released"
"""On a namespace that its Tenant released, with that tenant's name: the policies apply until a person removes it."""
LABEL_LEADER = f"{GROUP}/leader"
"""On the pod of the operator that leads, with the value `true`: its Service selects it."""
LABEL_QUEUE = f"{GROUP}/queue"
"""Opt-in of another controller's pod or `batch/v1` Job; the value is "true"."""


class KubeModel(BaseModel):
    """Base of every model: camelCase aliases, and enforcement of the model's rules in Python and in the schema."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, validate_by_alias=True)
    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        for rule in type(self).rules:
            if rule.holds is not None and not rule.holds(self):
                raise ValueError(rule.message)
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        if cls.rules:
            handler.resolve_ref_schema(schema)["x-kubernetes-validations"] = [
                r.to_schema() for r in cls.rules
            ]
        return schema

    def to_wire(self) -> dict[str, Any]:
        """The JSON form: camelCase, absent fields left out, times as RFC 3339."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class SpecModel(KubeModel):
    """Part of a spec: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


class StatusModel(KubeModel):
    """Part of a status: unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


def _integer_to_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Quantity = Annotated[
    str,
    Field(
        pattern=quantity.PATTERN,
        max_length=32,
        json_schema_extra={"x-kubernetes-int-or-string": True},
    ),
    BeforeValidator(_integer_to_text),
]
"""A Kubernetes quantity; an integer is accepted and becomes its text. `busbar.kube.types.quantity` parses it."""

LABEL_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
SUBDOMAIN_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
CLAIM_PATH_PATTERN = r"^pvc://[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*/?$"
ACCELERATOR_PATTERN = r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"

DnsLabel = Annotated[str, Field(pattern=LABEL_PATTERN, min_length=1, max_length=63)]
_SHORT_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")

ObjectName = Annotated[str, Field(pattern=SUBDOMAIN_PATTERN, min_length=1, max_length=253)]
ClaimUri = Annotated[str, Field(pattern=CLAIM_PATH_PATTERN, max_length=512)]
"""`pvc://claim/path` in the object's own namespace; no segment may begin with a dot."""
AcceleratorName = Annotated[str, Field(pattern=ACCELERATOR_PATTERN, min_length=1, max_length=63)]
"""An accelerator type as pools name it: `H100`, `L4`, `cpu`."""
LinkClass = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=63)]
LabelValue = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$", max_length=63)]
QualifiedKey = Annotated[
    str,
    Field(
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        min_length=1,
        max_length=316,
    ),
]
CamelReason = Annotated[str, Field(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", max_length=128)]
Sentence = Annotated[str, Field(max_length=2048)]
ShortText = Annotated[str, Field(max_length=253)]


def claim_of(uri: str) -> tuple[str, str]:
    """(claim, path) of a `pvc://claim/path`; the path has no leading or trailing slash and may be empty."""
    if not uri.startswith("pvc://"):
        raise ValueError(f"{uri!r} is not a pvc://claim/path address")
    claim, _, path = uri.removeprefix("pvc://").partition("/")
    return claim, path.strip("/")


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(StatusModel):
    """One observation about the object, in the standard Kubernetes form (metav1.Condition)."""

    type: Annotated[str, Field(max_length=64)] = Field(description="What is observed, e.g. Ready.")
    status: ConditionStatus = Field(description="True, False or Unknown.")
    reason: CamelReason = Field(description="A stable word in CamelCase that says why.")
    message: Sentence = Field(default="", description="One sentence for people.")
    last_transition_time: datetime = Field(description="When the status last changed.")
    observed_generation: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="The metadata.generation that this condition describes."
    )


Conditions = Annotated[
    list[Condition],
    Field(
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    ),
]


class OwnerReference(StatusModel):
    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool | None = None


class ObjectMeta(StatusModel):
    """The part of an object's metadata that we read; the API server owns its schema."""

    name: str = ""
    generate_name: str | None = None
    namespace: str | None = None
    uid: str = ""
    resource_version: str | None = None
    generation: int = 0
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    owner_references: list[OwnerReference] = Field(default_factory=list)
    finalizers: list[str] = Field(default_factory=list)


class PrinterColumn(BaseModel):
    """One column of `kubectl get`."""

    name: str
    type: str
    json_path: str
    description: str
    priority: int = 0
    """0 is always shown; 1 with `-o wide`."""


AGE = PrinterColumn(name="Age", type="date", json_path=".metadata.creationTimestamp", description="Its age.")
READY_REASON = PrinterColumn(
    name="Reason",
    type="string",
    json_path='.status.conditions[?(@.type=="Ready")].reason',
    description="Why it is or is not ready.",
)


class KindInfo(BaseModel):
    """The parts of a kind's CRD beside its schema."""

    plural: str
    singular: str
    short_names: list[str]
    namespaced: bool
    columns: list[PrinterColumn]
    scale: dict[str, str] | None = None


def short_name_rule(limit: int, named_after: str) -> Rule:
    """Names of other objects are made from this object's name, so it must be a short DNS label."""
    return Rule(
        cel=f"self.metadata.name.size() <= {limit} && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        message=f"metadata.name must be at most {limit} lower-case letters, digits and hyphens, beginning with a "
        f"letter: {named_after} named after it",
        field_path=".metadata.name",
        holds=lambda resource: (
            not resource.metadata.name
            or (
                len(resource.metadata.name) <= limit
                and _SHORT_NAME.fullmatch(resource.metadata.name) is not None
            )
        ),
    )


class Resource(KubeModel):
    """Base of the kinds: apiVersion, kind, metadata, spec, status."""

    model_config = ConfigDict(extra="ignore")
    info: ClassVar[KindInfo]

    api_version: str = API_VERSION
    kind: str
    metadata: ObjectMeta = Field(default_factory=ObjectMeta)

    @property
    def key(self) -> str:
        """`namespace/name`, or the name of a cluster-scoped object."""
        return (
            f"{self.metadata.namespace}/{self.metadata.name}"
            if self.metadata.namespace
            else self.metadata.name
        )


MOST_SHARED = 10_000
"""Different sets of fields, and different parts, that are remembered: whoever writes objects decides which they have."""
_field_sets: dict[frozenset[str], set[str]] = {}
_leaves: dict[tuple[object, ...], object] = {}
_PLAIN = frozenset({type(None), str, int, float, bool, datetime})
"""Types with nothing in them."""


def share_equal_parts(model: BaseModel, done: BaseModel | None = None) -> None:
    """Lets a model that is kept, and all in it, share what others have, too: the sets of the fields that were given, and
    equal parts with nothing but plain values in them.

    Pydantic makes one set per model, and those of a TrainingJob take a third of its memory. The API server counts in
    whole seconds, so most conditions of a job are those of other jobs as well, and take a fourth. The model must not be
    assigned to afterwards, as is the rule for what a cache holds; copies have sets of their own.

    Args:
        done: a part of the model for which this was done before.
    """
    for remembered in (_field_sets, _leaves):
        if len(remembered) > MOST_SHARED:
            remembered.clear()
    parts: list[object] = [model]
    for part in parts:  # what is in a part is added while they are gone through
        if isinstance(part, list):
            items: Iterable[tuple[Any, object]] = enumerate(part)
            inside: Any = part
        elif isinstance(part, dict):
            items, inside = part.items(), part
        elif (given := _given(part)) is not None:
            known = _field_sets.setdefault(frozenset(given), given)
            object.__setattr__(part, "__pydantic_fields_set__", known)
            inside = vars(part)
            items = inside.items()
        else:
            continue
        for name, value in items:
            if type(value) in _PLAIN or value is done:
                continue
            given = _given(value)
            shared = value if given is None else _shared(value, given)
            if shared is value:
                parts.append(value)
            else:
                inside[name] = shared


def _given(part: object) -> set[str] | None:
    """The fields that a model was given; None: it is none. Faster than pydantic's `isinstance`."""
    return getattr(part, "__pydantic_fields_set__", None)


def _shared(part: object, given: set[str]) -> object:
    """The part that was seen first of those that equal this one."""
    try:
        return _leaves.setdefault((type(part), frozenset(given), *vars(part).values()), part)
    except TypeError:  # lists, dicts and models have no hash
        return part
