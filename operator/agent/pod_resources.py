"""Which pods hold which devices of the node, as its kubelet says: the call `List` of the PodResources API, v1.

The API is gRPC on a unix socket that only root may connect to. Of its messages only what is used here is described; the
rest of an answer is skipped. Names and numbers of the fields: podresources/v1/api.proto of the Go module k8s.io/kubelet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from busbar.kube.contracts.power import MOST_POD_NAME

LIST = "/v1.PodResourcesLister/List"
TIMEOUT_S = 1.0
RECONNECT_MS = 1000
"""At most between two attempts to reach a kubelet that was away."""

Fields = tuple[tuple[str, int, str], ...]
"""Of one message: name, number and type of each field, as `described` reads them."""
MESSAGES: Mapping[str, Fields] = {
    "ListPodResourcesRequest": (),
    "ListPodResourcesResponse": (("pod_resources", 1, "PodResources[]"),),
    "PodResources": (("name", 1, ""), ("namespace", 2, ""), ("containers", 3, "ContainerResources[]")),
    "ContainerResources": (
        ("devices", 2, "ContainerDevices[]"),
        ("dynamic_resources", 5, "DynamicResource[]"),
    ),
    "ContainerDevices": (("resource_name", 1, ""), ("device_ids", 2, "[]")),
    "DynamicResource": (("claim_resources", 4, "ClaimResource[]"),),
    "ClaimResource": (("driver_name", 2, ""),),
}


class KubeletSilent(Exception):
    """The kubelet has not answered, or not in a way that can be read; the text says why."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device that a pod holds."""

    pod: str
    """namespace/name"""
    resource: str
    """The name under which pods request it, e.g. nvidia.com/gpu; of a claim (DRA) the driver."""
    id: str
    """As its device plugin names it; of a claim it is empty, as drivers name devices in ways of their own."""


def described(package: str, messages: Mapping[str, Fields]) -> Mapping[str, type[Any]]:
    """The classes of these messages.

    The type of a field is "" for a string, or the name of a message; "[]" after it: repeated.
    """
    file = descriptor_pb2.FileDescriptorProto(
        name=f"busbar/{package}.proto", package=package, syntax="proto3"
    )
    field = descriptor_pb2.FieldDescriptorProto
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for of, number, kind in fields:
            base = kind.removesuffix("[]")
            message.field.add(
                name=of,
                number=number,
                type=field.TYPE_MESSAGE if base else field.TYPE_STRING,
                type_name=f".{package}.{base}" if base else None,
                label=field.LABEL_REPEATED if kind.endswith("[]") else field.LABEL_OPTIONAL,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
        for name in messages
    }


class PodResources:
    """A connection to the kubelet, which comes back by itself after the kubelet was away."""

    def __init__(self, socket: Path, timeout_s: float = TIMEOUT_S) -> None:
        classes = described("v1", MESSAGES)
        self._socket = socket
        self._made: tuple[int, int] | None = None
        options = [(f"grpc.{name}_reconnect_backoff_ms", RECONNECT_MS) for name in ("initial", "min", "max")]
        self._channel = grpc.insecure_channel(f"unix:{socket}", options=options)
        self._list = self._channel.unary_unary(
            LIST,
            request_serializer=classes["ListPodResourcesRequest"].SerializeToString,
            response_deserializer=classes["ListPodResourcesResponse"].FromString,
        )
        self._request, self._timeout_s = classes["ListPodResourcesRequest"](), timeout_s

    def devices(self) -> list[Device]:
        """All devices that pods hold. It takes `timeout_s` at most.

        Raises KubeletSilent, also once where the kubelet is another one than at the last call.
        """
        try:
            found = self._socket.stat()
        except OSError as error:
            raise KubeletSilent(str(error)) from error
        before, self._made = self._made, (found.st_ino, found.st_ctime_ns)
        if before not in (None, self._made):
            raise KubeletSilent("it has just started")
        try:
            answer = self._list(self._request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise KubeletSilent(f"{error.code().name}: {error.details()}") from error
        return [
            device
            for pod in answer.pod_resources
            for container in pod.containers
            for device in _held(_name(pod), container)
        ]

    def close(self) -> None:
        self._channel.close()


def _name(pod: Any) -> str:
    name = f"{pod.namespace}/{pod.name}"
    if not (pod.namespace and pod.name) or len(name) > MOST_POD_NAME:
        raise KubeletSilent(f"its answer has a pod named {name[:MOST_POD_NAME]!r}")
    return name


def _held(pod: str, container: Any) -> list[Device]:
    held = [Device(pod, of.resource_name, each) for of in container.devices for each in of.device_ids]
    claimed = [part for claim in container.dynamic_resources for part in claim.claim_resources]
    return held + [Device(pod, part.driver_name, "") for part in claimed]
