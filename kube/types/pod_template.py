"""A user's own image and command, in a form that can express only what a tenant may set.

The operator makes the pods, so a full pod template would give the operator's rights to its author. This flat
form is an allow-list by construction: it has no field for host paths, host network, privilege, a node's name, a
scheduler or a service account, and the API server refuses unknown fields. Names that the platform sets itself
(environment variables of the gang, paths it mounts, labels it writes) are refused rather than overridden.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from busbar.kube.types.meta import DnsLabel, ObjectName, QualifiedKey, Quantity, SpecModel
from busbar.kube.types.rules import Rule, at_most_one_of, exactly_one_of

RESERVED_ENVIRONMENT = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
RESERVED_ENVIRONMENT_PREFIXES = ("BUSBAR_", "PET_")
RESERVED_TREES = ("/artifacts", "/dev", "/proc", "/sys", "/run", "/var/run")
"""Nothing is mounted here or below. In most images /var/run is a link to /run, and the bearers are below it."""
RESERVED_MOUNTS = ("/", "/tmp", "/etc", *RESERVED_TREES)
"""Nothing is mounted exactly here."""
_BELOW_RESERVED = tuple(f"{tree}/" for tree in RESERVED_TREES)
RESERVED_KEY_HOSTS = ("busbar.dev", "kubernetes.io", "k8s.io")

MapKeyName = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
EnvName = Annotated[str, Field(pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$", min_length=1, max_length=128)]
ConfigKey = Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$", min_length=1, max_length=253)]


class ImagePullPolicy(StrEnum):
    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class PodField(StrEnum):
    """Fields of the pod that an environment variable may repeat."""

    NAME = "metadata.name"
    NAMESPACE = "metadata.namespace"
    UID = "metadata.uid"
    POD_IP = "status.podIP"
    NODE_NAME = "spec.nodeName"


class LocalObject(SpecModel):
    """A named object in the same namespace."""

    name: ObjectName = Field(description="Name of the object.")


class KeySelector(SpecModel):
    """One key of a Secret or ConfigMap in the same namespace."""

    name: ObjectName = Field(description="Name of the object.")
    key: ConfigKey = Field(description="Key within it.")
    optional: bool | None = Field(
        default=None, description="Start the pod even if the object or key is missing."
    )


class FieldSelector(SpecModel):
    """One field of the pod itself."""

    field_path: PodField = Field(description="Which field.")


class EnvVarSource(SpecModel):
    """The source of an environment variable's value; exactly one."""

    rules = (
        exactly_one_of(
            "secretKeyRef",
            "configMapKeyRef",
            "fieldRef",
            message="valueFrom needs exactly one of secretKeyRef, configMapKeyRef and fieldRef",
        ),
    )

    secret_key_ref: KeySelector | None = Field(default=None, description="A key of a Secret.")
    config_map_key_ref: KeySelector | None = Field(default=None, description="A key of a ConfigMap.")
    field_ref: FieldSelector | None = Field(default=None, description="A field of the pod.")


def _reserved_environment(name: str) -> str:
    """A CEL expression: whether a name is one of those that Busbar sets."""
    prefixes = " || ".join(f"{name}.startsWith('{prefix}')" for prefix in RESERVED_ENVIRONMENT_PREFIXES)
    return f"({prefixes} || {name} in [{', '.join(map(repr, RESERVED_ENVIRONMENT))}])"


def _is_reserved_environment(name: str) -> bool:
    return name in RESERVED_ENVIRONMENT or name.startswith(RESERVED_ENVIRONMENT_PREFIXES)


def own_environment_rule(where: str, what: str) -> Rule:
    """A map of environment variables without those that Busbar sets; `what`: its name in the message."""
    return Rule(
        cel=f"!has(self.{where}) || self.{where}.all(k, !{_reserved_environment('k')})",
        message=f"{what}: BUSBAR_*, PET_* and the rendezvous variables are set by Busbar; remove them",
        field_path=f".{where}",
        holds=lambda model: not any(map(_is_reserved_environment, getattr(model, where) or {})),
    )


class EnvVar(SpecModel):
    """One environment variable of the user's container."""

    rules = (
        at_most_one_of(
            "value", "valueFrom", message="an environment variable has value or valueFrom, not both"
        ),
        Rule(
            cel=f"!{_reserved_environment('self.name')}",
            message="BUSBAR_*, PET_* and the rendezvous variables are set by Busbar; choose another name",
            field_path=".name",
            holds=lambda variable: not _is_reserved_environment(variable.name),
        ),
    )

    name: EnvName = Field(description="Name of the variable.")
    value: Annotated[str, Field(max_length=8192)] | None = Field(
        default=None, description="Its value as text."
    )
    value_from: EnvVarSource | None = Field(
        default=None, description="Source of its value, in place of value."
    )


class EnvFromSource(SpecModel):
    """All keys of a Secret or ConfigMap as environment variables; exactly one of them."""

    rules = (
        exactly_one_of(
            "secretRef",
            "configMapRef",
            message="an envFrom entry needs exactly one of secretRef and configMapRef",
        ),
    )

    prefix: Annotated[str, Field(pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$", max_length=64)] | None = Field(
        default=None, description="Text put before each name."
    )
    secret_ref: LocalObject | None = Field(default=None, description="A Secret in the same namespace.")
    config_map_ref: LocalObject | None = Field(default=None, description="A ConfigMap in the same namespace.")


class EmptyDir(SpecModel):
    """Scratch space that ends with the pod."""

    size_limit: Quantity | None = Field(default=None, description="Largest size, e.g. 2Gi.")


class Volume(SpecModel):
    """One thing mounted into the container; exactly one of claim, configMap, secret and emptyDir."""

    rules = (
        exactly_one_of(
            "claim",
            "configMap",
            "secret",
            "emptyDir",
            message="a volume needs exactly one of claim, configMap, secret and emptyDir",
        ),
        Rule(
            cel=f"!(self.mountPath in [{', '.join(map(repr, RESERVED_MOUNTS))}])"
            + "".join(f" && !self.mountPath.startsWith('{tree}')" for tree in _BELOW_RESERVED),
            message="this path belongs to the platform or the system; mount the volume elsewhere, e.g. /data",
            field_path=".mountPath",
            holds=lambda volume: (
                volume.mount_path not in RESERVED_MOUNTS and not volume.mount_path.startswith(_BELOW_RESERVED)
            ),
        ),
        Rule(
            cel="!self.name.startsWith('busbar-')",
            message="volume names that begin with busbar- are the platform's; choose another name",
            field_path=".name",
            holds=lambda volume: not volume.name.startswith("busbar-"),
        ),
    )

    name: DnsLabel = Field(description="Name of the volume, unique in this template.")
    mount_path: Annotated[
        str,
        Field(pattern=r"^/([A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*)?$", max_length=256),
    ] = Field(description="Absolute path in the container; no part may begin with a dot.")
    read_only: bool = Field(default=False, description="Mount read-only.")
    claim: ObjectName | None = Field(
        default=None, description="A PersistentVolumeClaim in the same namespace."
    )
    config_map: ObjectName | None = Field(default=None, description="A ConfigMap in the same namespace.")
    secret: ObjectName | None = Field(default=None, description="A Secret in the same namespace.")
    empty_dir: EmptyDir | None = Field(default=None, description="Scratch space.")


def _own_keys_only(where: str) -> str:
    hosts = " || ".join(
        f"k.startsWith('{host}/') || k.matches('^[^/]*[.]{host.replace('.', '[.]')}/')"
        for host in RESERVED_KEY_HOSTS
    )
    return f"!has(self.{where}) || self.{where}.all(k, !({hosts}))"


def _is_reserved_key(key: str) -> bool:
    host, slash, _ = key.partition("/")
    return bool(slash) and any(
        host == reserved or host.endswith(f".{reserved}") for reserved in RESERVED_KEY_HOSTS
    )


def _has_own_keys_only(where: str) -> Callable[[Any], bool]:
    return lambda metadata: not any(map(_is_reserved_key, getattr(metadata, where) or {}))


def own_keys_rule(where: str, what: str | None = None) -> Rule:
    """A map whose keys leave the platform's to the platform; `what`: its name in the message."""
    return Rule(
        cel=_own_keys_only(where),
        message=f"{what or where} under busbar.dev, kubernetes.io and k8s.io are the platform's; use your own key",
        field_path=f".{where}",
        holds=_has_own_keys_only(where),
    )


class TemplateMetadata(SpecModel):
    """Own labels and annotations of the pods."""

    rules = (own_keys_rule("labels"), own_keys_rule("annotations"))

    labels: (
        Annotated[dict[QualifiedKey, Annotated[str, Field(max_length=63)]], Field(max_length=32)] | None
    ) = Field(default=None, description="Labels added to each pod.")
    annotations: (
        Annotated[dict[QualifiedKey, Annotated[str, Field(max_length=4096)]], Field(max_length=32)] | None
    ) = Field(default=None, description="Annotations added to each pod.")


class PodTemplate(SpecModel):
    """The user's own image and command. Every pod of the gang runs it with the rendezvous variables set."""

    image: Annotated[str, Field(pattern=r"^[^\s]+$", min_length=1, max_length=512)] = Field(
        description="Container image. It runs as uid 65532, with a read-only root and a writable /tmp."
    )
    image_pull_policy: ImagePullPolicy | None = Field(default=None, description="When to pull the image.")
    image_pull_secrets: (
        Annotated[list[LocalObject], Field(max_length=8, json_schema_extra=MapKeyName)] | None
    ) = Field(default=None, description="Secrets of the same namespace that hold registry credentials.")
    command: Annotated[list[Annotated[str, Field(max_length=8192)]], Field(max_length=128)] | None = Field(
        default=None, description="Entry point; default the image's."
    )
    args: Annotated[list[Annotated[str, Field(max_length=8192)]], Field(max_length=256)] | None = Field(
        default=None, description="Arguments of the entry point."
    )
    env: Annotated[list[EnvVar], Field(max_length=128, json_schema_extra=MapKeyName)] | None = Field(
        default=None, description="Environment variables beside those that Busbar sets."
    )
    env_from: Annotated[list[EnvFromSource], Field(max_length=16)] | None = Field(
        default=None, description="Secrets and ConfigMaps whose keys become environment variables."
    )
    working_dir: Annotated[str, Field(pattern=r"^/", max_length=256)] | None = Field(
        default=None, description="Working directory; default the image's."
    )
    volumes: Annotated[list[Volume], Field(max_length=32, json_schema_extra=MapKeyName)] | None = Field(
        default=None, description="Claims, ConfigMaps, Secrets and scratch space mounted into the container."
    )
    metadata: TemplateMetadata | None = Field(
        default=None, description="Own labels and annotations of the pods."
    )
    port: bool = Field(
        default=False,
        description="The image serves /status and POST /checkpoint on the port named busbar (9400), so that "
        "the operator can read progress and request checkpoints. Without it the operator knows only the pod's phase.",
    )
