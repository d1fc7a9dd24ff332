"""The projections of Pods and Nodes: the few fields that decisions read, as frozen dataclasses.

A pod object is 4–5 kB of JSON; its projection is about a tenth of that. ``project_pod`` and ``project_node`` are the
informers' projections and the only code that knows the pod's JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from busbar.kube.client import Object
from busbar.kube.contracts import bearers
from busbar.kube.informer import Key
from busbar.kube.types import quantity
from busbar.kube.types.engines import FOREIGN, ForeignEngine
from busbar.kube.types.meta import (
    LABEL_ADMISSION_ID,
    LABEL_ATTEMPT,
    LABEL_JOB,
    LABEL_KIND,
    LABEL_QUEUE,
    LABEL_RANK,
    LABEL_REPLACEMENT,
    SCHEDULING_GATE,
)

PORT_NAME = "busbar"
CONTAINER = "main"  # the workload's container in pods that the operator makes
HOSTNAME = "kubernetes.io/hostname"
_STOPPED = ("NodeLost", "Shutdown", "Terminated", "NodeShutdown", "Preempting")  # reasons of ended pods
_OF_NODE = "The node "  # start of the kubelet's message when it evicts a pod because the node lacks resources
ANNOTATION_NODE = "busbar.dev/node"
ANNOTATION_POOL = "busbar.dev/pool"
TAINT_POWER = "busbar.dev/power-not-ready"
"""Keeps pods off a node whose boards should be limited and are not known to be."""
ANNOTATION_DRAINING = "busbar.dev/draining-since"
ANNOTATION_UNANSWERED = "busbar.dev/unanswered-since"
"""Of a replica that answers nobody, before Kubernetes says so."""
ANNOTATION_PLACEMENT = "busbar.dev/placement"
ANNOTATION_SLEEP = "busbar.dev/sleep"
"""Of a replica: where it is between serving and sleeping (`Sleep`), a space, and since when."""


class Sleep(StrEnum):
    """Where a replica that was put to sleep is; one that never was has none."""

    SETTLING = "Settling"
    """It gets no new requests, and finishes those that it has."""
    ASLEEP = "Asleep"
    """It has no requests. Any job that waits may take its place."""
    WAKING = "Waking"
    """It is wanted again, and does not answer yet."""
    AWAKE = "Awake"
    """It serves again."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a pod's main container ended."""

    code: int
    reason: str
    message: str  # the termination message
    finished_at: datetime | None
    started_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Requests:
    """What a pod requests from its node."""

    cpu_m: int = 0
    memory_mib: int = 0
    ephemeral_mib: int = 0
    devices: tuple[tuple[str, int], ...] = ()  # extended resources, whole units

    def device(self, name: str) -> int:
        return dict(self.devices).get(name, 0)

    @property
    def device_count(self) -> int:
        """Of all kinds; a gang's pods may have devices of its network among them."""
        return sum(count for _, count in self.devices)


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod as decisions see it."""

    key: Key
    uid: str
    phase: str  # Pending, Running, Succeeded, Failed, Unknown
    created_at: datetime | None
    node: str  # the node it is bound to; "" before
    requests: Requests
    gates: tuple[str, ...] = ()
    deleting: bool = False
    deletes_at: datetime | None = (
        None  # when its grace period ends; the object stays until its kubelet reports the end
    )
    kind: str = ""  # our label: trainingjob, modelservice
    job: str = ""
    attempt: int = 0
    rank: int = 0
    replacement: int = 0  # counts the pods of its rank that took the place of a lost one
    admission: str = ""
    queued: bool = False  # opted in by label
    owner_uid: str = ""
    owner: str = ""  # of a pod that is not ours: kind and name of its controller, "ReplicaSet web-5d4c"
    pinned: str = ""  # the node we chose
    pool: str = ""  # the pool we chose
    placement: str = ""  # of a replica: its admission's placement, as JSON
    draining_since: datetime | None = None
    unanswered_since: datetime | None = None
    sleep: Sleep | None = None
    sleep_since: datetime | None = None
    ready: bool = False
    ready_since: datetime | None = None
    ip: str = ""
    host_network: bool = False
    port: int = 0  # the declared `busbar` port
    image: str = ""  # of the main container, as the spec names it
    image_id: str = ""  # the same image as its node reports it, with the digest
    bearers: str = ""  # the Secret with its bearers; "": made by a release that had no roles
    engine: ForeignEngine | None = None  # not ours: it takes no commands, and is read by its metrics
    served: str = ""  # by such an engine: a digest of its image and arguments, on which its speed depends
    started_at: datetime | None = None
    exit: Exit | None = None
    evicted: bool = False  # stopped by the cluster, not by a fault of its own
    restarts: int = 0
    problem: str = ""  # why it does not run, as the kubelet or kube-scheduler says
    unschedulable_since: datetime | None = None
    unmounted_since: datetime | None = None  # its node has prepared neither its volumes nor its network since
    node_selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[tuple[str, str, str, str], ...] = ()  # key, operator, value, effect
    priority: int = 0
    silent: bool = (
        False  # its node does not answer Kubernetes; told by who knows the nodes (pods/silent_nodes.py)
    )

    @property
    def gate_index(self) -> int:
        """Index of our gate; -1 where the pod does not have it (any more)."""
        return self.gates.index(SCHEDULING_GATE) if SCHEDULING_GATE in self.gates else -1

    @property
    def gated(self) -> bool:
        return self.gate_index >= 0

    @property
    def ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def leaving(self) -> bool:
        """Whether it has ended, or is on its way out."""
        return self.ended or self.deleting or self.draining_since is not None

    @property
    def stays(self) -> bool:
        """Whether it counts among the replicas that are wanted: it is not on its way out, and it and its node answer."""
        return not self.leaving and not self.silent and self.unanswered_since is None

    @property
    def parked(self) -> bool:
        """Whether it sleeps or is about to: a replica that shall not serve."""
        return self.sleep in (Sleep.SETTLING, Sleep.ASLEEP)

    @property
    def takes_requests(self) -> bool:
        """Whether this replica can be counted on for requests."""
        return self.stays and self.is_open

    @property
    def is_open(self) -> bool:
        """Whether the gateway may send requests to this replica: also to one that did not answer lately, which it leaves out by
        itself and asks again."""
        return self.ready and not self.leaving and not self.silent and self.sleep in (None, Sleep.AWAKE)

    @property
    def place(self) -> str:
        """The node whose resources the pod uses, or will use once it is bound."""
        return self.node or self.pinned


@dataclass(frozen=True, slots=True)
class Node:
    """One node as decisions see it."""

    name: str
    labels: tuple[tuple[str, str], ...]
    taints: tuple[tuple[str, str, str], ...]  # key, value, effect
    cpu_m: int
    memory_mib: int
    ephemeral_mib: int
    devices: tuple[tuple[str, int], ...]
    ready: bool
    cidrs: tuple[str, ...] = ()
    cordoned: bool = False  # then not ready, too
    silent_since: datetime | None = None  # its kubelet has not answered since then; None: it does
    is_tainted: bool = False  # whether its list of taints, which `taints` is a part of, has any
    power_taint: int = -1  # where in that list TAINT_POWER is; -1: it is not

    def device(self, name: str) -> int:
        return dict(self.devices).get(name, 0)


def project_pod(obj: Object) -> Pod:
    """The pod's projection."""
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    labels, notes = meta.get("labels") or {}, meta.get("annotations") or {}
    containers = spec.get("containers") or []
    container = _main(containers)
    main = _status_of(container, status.get("containerStatuses") or [])
    conditions = {c.get("type"): c for c in status.get("conditions") or ()}
    owner: dict[str, Any] = next((o for o in meta.get("ownerReferences") or () if o.get("controller")), {})
    state, mounted = main.get("state") or {}, _bearers(spec)
    engine = _engine(mounted)
    return Pod(
        key=Key(meta.get("namespace", ""), meta["name"]),
        uid=meta.get("uid", ""),
        phase=status.get("phase") or "Pending",
        created_at=time_of(meta.get("creationTimestamp")),
        node=spec.get("nodeName") or "",
        requests=requests_of(spec),
        gates=tuple(g["name"] for g in spec.get("schedulingGates") or ()),
        deleting=bool(meta.get("deletionTimestamp")),
        deletes_at=time_of(meta.get("deletionTimestamp")),
        kind=labels.get(LABEL_KIND, ""),
        job=labels.get(LABEL_JOB, ""),
        attempt=_number(labels.get(LABEL_ATTEMPT)),
        rank=_number(labels.get(LABEL_RANK)),
        replacement=_number(labels.get(LABEL_REPLACEMENT)),
        admission=labels.get(LABEL_ADMISSION_ID, ""),
        queued=labels.get(LABEL_QUEUE) == "true",
        owner_uid=owner.get("uid", ""),
        owner="" if labels.get(LABEL_KIND) or not owner else f"{owner.get('kind')} {owner.get('name')}",
        pinned=notes.get(ANNOTATION_NODE, "") or _pinned(labels, spec),
        pool=notes.get(ANNOTATION_POOL, ""),
        placement=notes.get(ANNOTATION_PLACEMENT, ""),
        draining_since=_noted_time(notes.get(ANNOTATION_DRAINING)),
        unanswered_since=_noted_time(notes.get(ANNOTATION_UNANSWERED)),
        **_sleep(notes.get(ANNOTATION_SLEEP)),
        ready=(conditions.get("Ready") or {}).get("status") == "True",
        ready_since=_since(conditions.get("Ready"), "True"),
        ip=status.get("podIP") or "",
        host_network=bool(spec.get("hostNetwork")),
        port=_port(containers),
        image=str(container.get("image") or ""),
        image_id=str(main.get("imageID") or ""),
        bearers=str(mounted.get("secretName") or ""),
        engine=engine,
        served=_served(container) if engine is not None else "",
        started_at=time_of((state.get("running") or {}).get("startedAt")),
        exit=_exit(state.get("terminated")),
        evicted=_evicted(status, conditions),
        restarts=int(main.get("restartCount") or 0),
        problem=_problem(status, state, conditions),
        unschedulable_since=_unschedulable(conditions.get("PodScheduled")),
        unmounted_since=_unmounted(status, conditions),
        node_selector=tuple(sorted((spec.get("nodeSelector") or {}).items())),
        tolerations=tuple(
            (t.get("key", ""), t.get("operator", "Equal"), t.get("value", ""), t.get("effect", ""))
            for t in (spec.get("tolerations") or () if labels.get(LABEL_QUEUE) == "true" else ())
        ),
        priority=int(spec.get("priority") or 0),
    )


def project_node(obj: Object) -> Node:
    """The node's projection."""
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    allocatable = status.get("allocatable") or {}
    said: dict[str, Any] = next((c for c in status.get("conditions") or () if c.get("type") == "Ready"), {})
    ready = said.get("status") == "True"
    cidrs = spec.get("podCIDRs") or ([spec["podCIDR"]] if spec.get("podCIDR") else [])
    base = _vector(allocatable)
    return Node(
        name=meta["name"],
        labels=tuple(sorted((meta.get("labels") or {}).items())),
        taints=tuple(
            (t["key"], t.get("value", ""), t.get("effect", "")) for t in spec.get("taints") or () if _holds(t)
        ),
        cpu_m=base.cpu_m,
        memory_mib=base.memory_mib,
        ephemeral_mib=base.ephemeral_mib,
        devices=base.devices,
        ready=ready and not spec.get("unschedulable") and not meta.get("deletionTimestamp"),
        cordoned=bool(spec.get("unschedulable")),
        silent_since=_since(said, "Unknown"),
        cidrs=tuple(cidrs),
        is_tainted=bool(spec.get("taints")),
        power_taint=next((i for i, t in enumerate(spec.get("taints") or ()) if t["key"] == TAINT_POWER), -1),
    )


def _holds(taint: dict[str, Any]) -> bool:
    # Set for a cordon, which `ready` already covers; no pool tolerates it.
    return taint.get("key") != "node.kubernetes.io/unschedulable"


def requests_of(spec: dict[str, Any]) -> Requests:
    """What kube-scheduler counts: the larger of all containers and any one init container; plus overhead."""
    running = [
        _vector((c.get("resources") or {}).get("requests") or {}) for c in spec.get("containers") or ()
    ]
    starting: list[Requests] = []
    for container in spec.get("initContainers") or ():
        vector = _vector((container.get("resources") or {}).get("requests") or {})
        (running if container.get("restartPolicy") == "Always" else starting).append(vector)
    total = _sum(running)
    if starting:
        total = _largest([total, *starting])
    if spec.get("overhead"):
        total = _sum([total, _vector(spec["overhead"])])
    return total


def _vector(quantities: dict[str, Any]) -> Requests:
    devices = tuple(
        sorted((k, int(quantity.parse(v))) for k, v in quantities.items() if "/" in k and str(v) != "0")
    )
    return Requests(
        cpu_m=quantity.to_millis(quantities.get("cpu", 0)),
        memory_mib=quantity.to_mib(quantities.get("memory")),
        ephemeral_mib=quantity.to_mib(quantities.get("ephemeral-storage")),
        devices=devices,
    )


def _sum(vectors: Iterable[Requests]) -> Requests:
    cpu = memory = disk = 0
    devices: dict[str, int] = {}
    for v in vectors:
        cpu, memory, disk = cpu + v.cpu_m, memory + v.memory_mib, disk + v.ephemeral_mib
        for name, count in v.devices:
            devices[name] = devices.get(name, 0) + count
    return Requests(cpu, memory, disk, tuple(sorted(devices.items())))


def _largest(vectors: list[Requests]) -> Requests:
    devices: dict[str, int] = {}
    for v in vectors:
        for name, count in v.devices:
            devices[name] = max(devices.get(name, 0), count)
    return Requests(
        max(v.cpu_m for v in vectors),
        max(v.memory_mib for v in vectors),
        max(v.ephemeral_mib for v in vectors),
        tuple(sorted(devices.items())),
    )


def _main(containers: list[dict[str, Any]]) -> dict[str, Any]:
    """The container that the operator named, whatever a webhook added; of another controller's pod the first."""
    return next((c for c in containers if c.get("name") == CONTAINER), containers[0] if containers else {})


def _status_of(container: dict[str, Any], statuses: list[dict[str, Any]]) -> dict[str, Any]:
    return next((s for s in statuses if s.get("name") == container.get("name")), {})


def _bearers(spec: dict[str, Any]) -> dict[str, Any]:
    """The volume's source of the Secret that is mounted under our volume's name."""
    found = (v.get("secret") or {} for v in spec.get("volumes") or () if v.get("name") == bearers.VOLUME)
    return next(found, {})


def _engine(mounted: dict[str, Any]) -> ForeignEngine | None:
    """Whose configuration file the pod mounts."""
    keys = {item.get("key") for item in mounted.get("items") or ()}
    return next((engine for engine in FOREIGN.values() if engine.config_file in keys), None)


def _served(container: dict[str, Any]) -> str:
    told = json.dumps([container.get(name) for name in ("image", "command", "args")])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _port(containers: list[dict[str, Any]]) -> int:
    for container in containers:
        for port in container.get("ports") or ():
            if port.get("name") == PORT_NAME:
                return int(port.get("containerPort") or 0)
    return 0


def _exit(terminated: dict[str, Any] | None) -> Exit | None:
    if not terminated:
        return None
    return Exit(
        code=int(terminated.get("exitCode") or 0),
        reason=str(terminated.get("reason") or ""),
        message=str(terminated.get("message") or ""),
        finished_at=time_of(terminated.get("finishedAt")),
        started_at=time_of(terminated.get("startedAt")),
    )


def _evicted(status: dict[str, Any], conditions: dict[Any, Any]) -> bool:
    """Whether the cluster stopped it. A kubelet also reports ``Evicted`` for a pod that exceeds its own limit of
    scratch space; then there is no DisruptionTarget condition, and the message is about the pod, not the node.
    """
    if (conditions.get("DisruptionTarget") or {}).get("status") == "True":
        return True
    if status.get("reason") == "Evicted":
        return " exceed" not in str(status.get("message")) or str(status.get("message")).startswith(_OF_NODE)
    return status.get("reason") in _STOPPED


def _problem(status: dict[str, Any], state: dict[str, Any], conditions: dict[Any, Any]) -> str:
    waiting = state.get("waiting") or {}
    if waiting.get("reason") and waiting["reason"] not in ("ContainerCreating", "PodInitializing"):
        return f"{waiting['reason']}: {waiting.get('message', '')}".strip(": ")[:500]
    scheduled = conditions.get("PodScheduled") or {}
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return f"Unschedulable: {scheduled.get('message', '')}".strip(": ")[:500]
    if status.get("phase") == "Failed" and (status.get("reason") or status.get("message")):
        return f"{status.get('reason', '')}: {status.get('message', '')}".strip(": ")[:500]
    return ""


def _unschedulable(condition: dict[str, Any] | None) -> datetime | None:
    if condition and condition.get("status") == "False" and condition.get("reason") == "Unschedulable":
        return time_of(condition.get("lastTransitionTime"))
    return None


def _unmounted(status: dict[str, Any], conditions: dict[Any, Any]) -> datetime | None:
    """Since when a pod that has its node waits for what comes before its containers."""
    if status.get("phase") != "Pending":
        return None
    return _since(conditions.get("PodReadyToStartContainers"), "False")


def _since(condition: dict[str, Any] | None, status: str) -> datetime | None:
    """Since when the condition has had the status; None while it has another."""
    if condition and condition.get("status") == status:
        return time_of(condition.get("lastTransitionTime"))
    return None


def time_of(text: str | None) -> datetime | None:
    """An RFC 3339 time, or None."""
    return datetime.fromisoformat(text) if text else None


def _noted_time(text: str | None) -> datetime | None:
    """A time in an annotation; outside tenants' namespaces anybody may have written it, so it may be malformed."""
    try:
        moment = time_of(text)
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC) if moment is not None and moment.tzinfo is None else moment


def _sleep(text: str | None) -> dict[str, Any]:
    """The fields of an annotation that anybody may have written outside tenants' namespaces."""
    word, _, moment = (text or "").partition(" ")
    since = _noted_time(moment or None)
    return {"sleep": Sleep(word), "sleep_since": since} if word in list(Sleep) and since is not None else {}


def _pinned(labels: dict[str, str], spec: dict[str, Any]) -> str:
    """The host we chose for another controller's pod; empty where the pod does not carry our admission label."""
    if labels.get(LABEL_QUEUE) != "true" or not labels.get(LABEL_ADMISSION_ID):
        return ""
    return str((spec.get("nodeSelector") or {}).get(HOSTNAME, ""))


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
