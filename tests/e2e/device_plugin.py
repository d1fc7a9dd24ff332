"""A device plugin (DevicePlugin API v1beta1): it offers devices that do not exist to a real kubelet.

Names and numbers of the fields: deviceplugin/v1beta1/api.proto of the Go module k8s.io/kubelet.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from busbar.operator.agent.pod_resources import described

VERSION = "v1beta1"
SERVICE = f"{VERSION}.DevicePlugin"
DIRECTORY = "var/lib/kubelet/device-plugins"
"""Kubelets look for plugins here, wherever their other files are."""
MESSAGES = described(
    VERSION,
    {
        "Empty": (),
        "DevicePluginOptions": (),
        "RegisterRequest": (("version", 1, ""), ("endpoint", 2, ""), ("resource_name", 3, "")),
        "ListAndWatchResponse": (("devices", 1, "Device[]"),),
        "Device": (("ID", 1, ""), ("health", 2, "")),
        "AllocateRequest": (("container_requests", 1, "ContainerAllocateRequest[]"),),
        "ContainerAllocateRequest": (("devices_ids", 1, "[]"),),
        "AllocateResponse": (("container_responses", 1, "ContainerAllocateResponse[]"),),
        "ContainerAllocateResponse": (),
    },
)


class DevicePlugin:
    """Devices of one resource; a container that gets one gets nothing with it."""

    def __init__(self, resource: str, devices: Sequence[str]) -> None:
        self._resource, self._devices = resource, devices
        self._ends = threading.Event()

    @contextmanager
    def on(self, root: Path) -> Iterator[None]:
        """It is registered with the kubelet that sees this folder as its root."""
        socket = root / DIRECTORY / f"{self._resource.replace('/', '-')}.sock"
        socket.unlink(missing_ok=True)
        threads = ThreadPoolExecutor(4)
        server = grpc.server(threads)
        server.add_generic_rpc_handlers((self._handlers(),))
        server.add_insecure_port(f"unix:{socket}")
        server.start()
        try:
            self._register(root, socket.name)
            yield
        finally:
            self._ends.set()
            server.stop(None).wait()
            threads.shutdown()
            socket.unlink(missing_ok=True)

    def _register(self, root: Path, endpoint: str) -> None:
        request = MESSAGES["RegisterRequest"](
            version=VERSION, endpoint=endpoint, resource_name=self._resource
        )
        with grpc.insecure_channel(f"unix:{root / DIRECTORY / 'kubelet.sock'}") as channel:
            register = channel.unary_unary(
                f"/{VERSION}.Registration/Register",
                request_serializer=MESSAGES["RegisterRequest"].SerializeToString,
                response_deserializer=MESSAGES["Empty"].FromString,
            )
            register(request, timeout=10)

    def _handlers(self) -> Any:
        def serialize(message: Any) -> bytes:
            encoded: bytes = message.SerializeToString()
            return encoded

        options = grpc.unary_unary_rpc_method_handler(
            lambda request, context: MESSAGES["DevicePluginOptions"](), response_serializer=serialize
        )
        allocate = grpc.unary_unary_rpc_method_handler(
            self._allocate,
            request_deserializer=MESSAGES["AllocateRequest"].FromString,
            response_serializer=serialize,
        )
        watch = grpc.unary_stream_rpc_method_handler(self._watch, response_serializer=serialize)
        methods = {"GetDevicePluginOptions": options, "Allocate": allocate, "ListAndWatch": watch}
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _watch(self, request: bytes, context: Any) -> Iterator[Any]:
        answer = MESSAGES["ListAndWatchResponse"]()
        for device in self._devices:
            answer.devices.add(ID=device, health="Healthy")
        yield answer
        self._ends.wait()

    def _allocate(self, request: Any, context: Any) -> Any:
        answer = MESSAGES["AllocateResponse"]()
        for _ in request.container_requests:
            answer.container_responses.add()
        return answer
