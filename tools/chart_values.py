"""The settings of `charts/busbar`, typed: `values.yaml` and `values.schema.json` are generated from these models.

A value that no template reads, or a template that reads a value that is not here, fails a test. Unknown keys are
refused by Helm itself, through the schema.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Text = Annotated[str, Field(max_length=512)]
Name = Annotated[str, Field(max_length=253, pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$")]
CpuOrMemory = Annotated[str, Field(max_length=32, pattern=r"^([0-9]+(\.[0-9]+)?([KMGTPE]i|[mkMGTPE])?)?$")]
Labels = dict[str, str]
Port = Annotated[int, Field(ge=0, le=65535)]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
OptionalDigest = Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64})?$")]
Directory = Annotated[str, Field(max_length=253, pattern=r"^(/[A-Za-z0-9._-]+)*$")]
HttpUrl = Annotated[str, Field(max_length=512, pattern=r"^(https?://[^\s]+)?$")]


class Section(BaseModel):
    """One level of the values."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, extra="forbid")


class PullPolicy(StrEnum):
    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class ServiceType(StrEnum):
    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    JSON = "json"
    TEXT = "text"


class SchedulingObjective(StrEnum):
    FAIRNESS = "fairness"
    MAKESPAN = "makespan"
    COST = "cost"
    FINISH_TIME_FAIRNESS = "finish-time-fairness"


class TaintEffect(StrEnum):
    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class ImageDigests(Section):
    """What the images are, whatever their tag comes to mean."""

    platform: OptionalDigest = Field(default="", description="Of busbar-platform; empty: by the tag alone.")
    workloads: OptionalDigest = Field(
        default="", description="Of busbar-workloads, without workloads.image; empty: by the tag alone."
    )


class Image(Section):
    """Both images have one registry and one tag."""

    registry: Text = Field(
        default="", description="Registry and path before the image names, e.g. registry.example.com/gpu."
    )
    tag: Annotated[str, Field(max_length=128, pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]*)?$")] = Field(
        default="", description="Tag of both images; empty: the chart's appVersion."
    )
    digests: ImageDigests = Field(
        default_factory=ImageDigests,
        description="Digests of their manifests, sha256:…: then nodes run nothing else, wherever the tag points.",
    )
    pull_policy: PullPolicy = Field(
        default=PullPolicy.IF_NOT_PRESENT, description="When nodes pull the images."
    )
    pull_secrets: list[Name] = Field(
        default_factory=list,
        description="Names of Secrets with registry credentials, for the platform's own pods.",
    )


class WorkloadsImage(Section):
    """The engines' image, if its registry differs from the platform's."""

    image: Text = Field(
        default="", description="Full reference; empty: busbar-workloads from image.registry with image.tag."
    )
    accepted_digests: Annotated[list[Digest], Field(max_length=64)] = Field(
        default_factory=list,
        description="Its digests, as nodes report them, whose speeds tenants share, besides one in image; none at "
        "all: any digest.",
    )


class Amounts(Section):
    cpu: CpuOrMemory = Field(default="", description="Cores; empty: none said.")
    memory: CpuOrMemory = Field(default="", description="Bytes; empty: none said.")


class Resources(Section):
    """Requests and limits of one of the platform's pods. There is no CPU limit, because throttling has no benefit
    here."""

    requests: Amounts = Field(
        default=Amounts(cpu="25m", memory="128Mi"), description="Set aside on the node."
    )
    limits: Amounts = Field(default=Amounts(cpu="", memory="512Mi"), description="The most it may use.")


class Toleration(Section):
    key: Text = Field(default="", description="Key of the taint.")
    operator: Annotated[str, Field(pattern="^(Exists|Equal)$")] = Field(
        default="Equal", description="Exists or Equal."
    )
    value: Text = Field(default="", description="Value of the taint.")
    effect: TaintEffect | None = Field(default=None, description="Effect of the taint.")


class Placement(Section):
    """Node selection for the platform's own pods."""

    node_selector: Labels = Field(default_factory=dict, description="Labels of the nodes.")
    tolerations: list[Toleration] = Field(default_factory=list, description="Taints that they tolerate.")
    priority_class_name: Name = Field(
        default="",
        description="PriorityClass; empty: the cluster's default, and the chart's own for the operator.",
    )


class SecretKey(Section):
    """One key of a Secret in the release's namespace."""

    name: Name = Field(default="", description="Name of the Secret; empty: not used.")
    key: Text = Field(default="", description="Key within it.")


class Persistence(Section):
    """A claim for data that must survive a restart."""

    enabled: bool = Field(
        default=True, description="Without it, an emptyDir: everything is lost with the pod."
    )
    existing_claim: Name = Field(default="", description="Use this claim instead of making one.")
    storage_class: Name = Field(default="", description="StorageClass; empty: the cluster's default.")
    size: Annotated[str, Field(pattern=r"^[0-9]+(Mi|Gi|Ti)$")] = Field(
        default="1Gi", description="Size of the claim."
    )


class Operator(Section):
    replicas: Annotated[int, Field(ge=1, le=3)] = Field(
        default=1,
        description="One leads, the others stand by. With 2, a lost leader is replaced within 20 s, for the memory "
        "of one more pod.",
    )
    lease_seconds: Annotated[int, Field(ge=5, le=60)] | None = Field(
        default=None,
        description="A leader that dies is replaced after this time; one that gets no answer for 4/5 of it stops "
        "writing. Empty: 30 with one replica, 12 with more.",
    )
    resources: Resources = Field(
        default_factory=lambda: Resources(requests=Amounts(cpu="250m", memory="128Mi")),
        description="Of the operator's pod. With fewer cores, a busy node makes all scheduling late.",
    )
    log_level: LogLevel = Field(default=LogLevel.INFO, description="How much it logs.")


class Scheduling(Section):
    """The scheduler's objective. Guarantees, fair shares and priorities apply with every objective."""

    objective: SchedulingObjective = Field(
        default=SchedulingObjective.FAIRNESS,
        description="fairness; makespan: the last job ends soon; cost: speed per money; finish-time-fairness: "
        "nobody waits long for its length.",
    )
    usage_half_life_hours: Annotated[int, Field(ge=1, le=8760)] = Field(
        default=168,
        description="Use that is older counts half when the same right is claimed by several tenants or users.",
    )
    guarantee_reclaim_seconds: Annotated[int, Field(ge=10, le=86400)] = Field(
        default=300,
        description="What others borrowed of a guarantee is back within this time, decided in the first half of it.",
    )
    node_lost_seconds: Annotated[int, Field(ge=10, le=86400)] = Field(
        default=60,
        description="After this time on a node that does not answer Kubernetes training goes on elsewhere, and replicas are given up; others start once it is silent.",
    )


class Oidc(Section):
    """Login by OpenID Connect, beside tokens. Off while issuer is empty."""

    issuer: HttpUrl = Field(default="", description="Issuer URL.")
    client_id: Text = Field(default="", description="Client id.")
    client_secret: SecretKey = Field(default_factory=SecretKey, description="Client secret.")
    groups_claim: Text = Field(
        default="groups", description="Claim with a person's groups, as Tenant members name them."
    )
    username_claim: Text = Field(
        default="email", description="Claim with a person's name, as Tenant members name it."
    )
    admin_group: Text = Field(
        default="", description="Its members are admins; empty: nobody becomes one by OIDC."
    )


class Tokens(Section):
    per_person: Annotated[int, Field(ge=1)] = Field(
        default=50, description="Live tokens that one person may have at a time."
    )
    days: Annotated[float, Field(gt=0)] = Field(
        default=90, description="Lifetime of a new token for which none was asked."
    )
    max_days: Annotated[float, Field(gt=0)] = Field(
        default=365, description="The longest lifetime that may be asked for."
    )
    creations_per_minute: Annotated[int, Field(ge=1)] = Field(
        default=30, description="Tokens that one person, and one address, may make in a minute."
    )


class Api(Section):
    resources: Resources = Field(default_factory=Resources, description="Of the API's pod.")
    persistence: Persistence = Field(default_factory=Persistence, description="The SQLite database.")
    database_url: SecretKey = Field(
        default_factory=SecretKey,
        description="A PostgreSQL URL, postgresql+asyncpg://…; then there is no claim, and SQLite is not used.",
    )
    replicas: Annotated[int, Field(ge=1, le=16)] = Field(
        default=1, description="More than one needs PostgreSQL: SQLite has one writer."
    )
    public_url: HttpUrl = Field(
        default="", description="The portal's address as people reach it; needed with OIDC."
    )
    public_gateway_url: HttpUrl = Field(default="", description="The gateway's address as people reach it.")
    secure_cookies: bool = Field(
        default=False, description="Says that all reach the portal over TLS, as a publicUrl with https does."
    )
    trusted_proxies: list[str] = Field(
        default_factory=list,
        description="Addresses and networks of proxies whose X-Forwarded-For and X-Forwarded-Proto are believed.",
    )
    logins_per_minute: Annotated[int, Field(ge=1)] = Field(
        default=30,
        description="Logins of one person, and wrong ones from one address, taken in a minute; wrong tokens at REST likewise.",
    )
    log_level: LogLevel = Field(default=LogLevel.INFO, description="How much it logs.")
    tokens: Tokens = Field(default_factory=Tokens, description="Bounds of new tokens.")
    oidc: Oidc = Field(default_factory=Oidc, description="Login by OpenID Connect.")


class Gateway(Section):
    replicas: Annotated[int, Field(ge=1, le=100)] = Field(
        default=1,
        description="Gateways. More than 1 share the limits of keys and tenants through the API, and an upgrade cuts nothing.",
    )
    resources: Resources = Field(default_factory=Resources, description="Of the gateway's pod.")
    persistence: Persistence = Field(
        default_factory=Persistence, description="Last routes and the usage that is not delivered yet."
    )
    hold_timeout_seconds: Annotated[int, Field(ge=1, le=3600)] = Field(
        default=300, description="Longest wait of a request for a replica; a cold start must fit in."
    )
    drain_seconds: Annotated[int, Field(ge=0, le=3600)] = Field(
        default=60, description="After SIGTERM: seconds for running streams to end."
    )
    log_level: LogLevel = Field(default=LogLevel.INFO, description="How much it logs.")
    metrics_subjects: list[Text] = Field(
        default_factory=list,
        description="Further subjects that may read metrics with one line per service, e.g. Prometheus's service account.",
    )


class Exposure(Section):
    """Access to the portal and the gateway."""

    type: ServiceType = Field(
        default=ServiceType.CLUSTER_IP, description="ClusterIP, NodePort or LoadBalancer."
    )
    portal_node_port: Port = Field(default=30080, description="With NodePort: the portal's port; 0: any.")
    gateway_node_port: Port = Field(default=30081, description="With NodePort: the gateway's port; 0: any.")


class NetworkPolicies(Section):
    enabled: bool = Field(
        default=True,
        description="For the platform's pods, and by the operator in tenants' namespaces; false removes them. "
        "Our own ports check their callers all the same.",
    )


class Admission(Section):
    """The admission policies: without them a tenant's own pods can use a pool's devices without queueing."""

    enabled: bool = Field(default=True, description="Install them.")
    admin_groups: list[Text] = Field(
        default=["system:masters", "kubeadm:cluster-admins"],
        description="Groups that may set by hand the labels that make a namespace a tenant's.",
    )
    schedulers: list[Text] = Field(
        default=["system:kube-scheduler"], description="Users that bind pods to nodes in tenants' namespaces."
    )
    pod_writers: list[Text] = Field(
        default_factory=list,
        description="Further users that write pods of jobs and services, e.g. a simulator of nodes, or a network "
        "plugin that annotates pods otherwise than through pods/status.",
    )


class Rules(Section):
    """The alerts of docs/runbooks.md, as a PrometheusRule."""

    enabled: bool = Field(default=False, description="Install them.")
    labels: Labels = Field(
        default_factory=dict,
        description="Labels by which Prometheus finds the object, e.g. release: kube-prometheus-stack.",
    )
    runbooks: Text = Field(
        default="docs/runbooks.md",
        description="Address of the runbooks, which alerts name with the section; set it to where your people read "
        "them.",
    )


class Monitors(Section):
    """What Prometheus reads: one PodMonitor for each of operator, API and gateway."""

    enabled: bool = Field(default=False, description="Install them.")
    labels: Labels = Field(default_factory=dict, description="Labels by which Prometheus finds the objects.")
    prometheus_namespace: Name = Field(
        default="",
        description="Namespace of Prometheus' pods, which NetworkPolicies then let read API and gateway; empty: none.",
    )


class Dashboards(Section):
    """Grafana dashboards in a ConfigMap, for Grafana's sidecar."""

    enabled: bool = Field(default=False, description="Install them.")
    labels: Labels = Field(
        default_factory=lambda: {"grafana_dashboard": "1"},
        description="Labels by which Grafana's sidecar finds the ConfigMap.",
    )


class Monitoring(Section):
    """Alerts and metrics for the Prometheus Operator, whose types (monitoring.coreos.com/v1) the cluster must have;
    dashboards for Grafana."""

    rules: Rules = Field(default_factory=Rules, description="The alerts of docs/runbooks.md.")
    pod_monitors: Monitors = Field(
        default_factory=Monitors, description="Reading the metrics of operator, API and gateway."
    )
    dashboards: Dashboards = Field(
        default_factory=Dashboards,
        description="Grafana dashboards: model services, power, energy and budgets.",
    )


class Pools(Section):
    """AcceleratorPools for devices that no pool describes."""

    discover: bool = Field(
        default=True, description="Let the operator make them from the labels of GPU nodes."
    )


class Agent(Section):
    """`busbar-agent`: says what the boards of its node draw, and limits them if it may."""

    enabled: bool = Field(default=False, description="Run one on each node that is selected.")
    node_selector: Labels = Field(default_factory=dict, description="Labels of the nodes.")
    tolerations: list[Toleration] = Field(default_factory=list, description="Taints that they tolerate.")
    runtime_class_name: Name = Field(
        default="", description="RuntimeClass that gives a container the driver's libraries, e.g. nvidia."
    )
    set_limits: bool = Field(
        default=False,
        description="Let agents limit boards, by docs/power.md: as root, with a guard beside each. "
        "Played nodes too. Nodes without limits get a taint.",
    )
    kubelet_dir: Directory = Field(
        default="",
        description="The kubelets' directory, /var/lib/kubelet mostly: agents ask there, as root, which pods hold which boards.",
    )
    resources: Resources = Field(
        default_factory=lambda: Resources(limits=Amounts(cpu="", memory="128Mi")),
        description="Of an agent's container, and of its guard's.",
    )
    log_level: LogLevel = Field(default=LogLevel.INFO, description="How much it logs.")


class Power(Section):
    """What PowerDomains are measured and kept with."""

    agent: Agent = Field(default_factory=Agent, description="The node agent.")
    simulated_nodes: Annotated[list[Name], Field(max_length=1000)] = Field(
        default_factory=list,
        description="Names of nodes whose watts are invented, for demonstrations; each also needs the label "
        "sim.busbar.dev/power.",
    )
    meter_secrets: Annotated[list[Name], Field(max_length=100)] = Field(
        default_factory=list,
        description="Names of Secrets in this namespace with credentials of feeds' meters (PowerDomain spec.meter), which the "
        "operator may then read; it may read no other.",
    )


class Values(Section):
    """All settings of the chart."""

    image: Image = Field(default_factory=Image, description="The images.")
    workloads: WorkloadsImage = Field(default_factory=WorkloadsImage, description="The engines' image.")
    placement: Placement = Field(
        default_factory=Placement, description="Node selection for the platform's own pods."
    )
    log_format: LogFormat = Field(
        default=LogFormat.JSON,
        description="Log lines of operator, API and gateway: json, or text with key=value pairs.",
    )
    operator: Operator = Field(default_factory=Operator, description="The operator.")
    scheduling: Scheduling = Field(
        default_factory=Scheduling,
        description="What the scheduler wants; guarantees, fair shares and priorities hold whatever it is.",
    )
    api: Api = Field(default_factory=Api, description="REST, portal and database.")
    gateway: Gateway = Field(default_factory=Gateway, description="The OpenAI front door.")
    service: Exposure = Field(default_factory=Exposure, description="Access to the portal and the gateway.")
    network_policies: NetworkPolicies = Field(
        default_factory=NetworkPolicies, description="NetworkPolicy objects."
    )
    pools: Pools = Field(
        default_factory=Pools, description="AcceleratorPools for devices that no pool describes."
    )
    admission: Admission = Field(default_factory=Admission, description="The policies that keep the queue.")
    power: Power = Field(default_factory=Power, description="What PowerDomains are measured and kept with.")
    monitoring: Monitoring = Field(
        default_factory=Monitoring,
        description="Alerts and metrics, for clusters with the Prometheus Operator, and dashboards for Grafana.",
    )
