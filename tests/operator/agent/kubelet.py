"""A server of the kubelet's PodResources API on a unix socket."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from busbar.operator.agent.pod_resources import MESSAGES, described

MORE: Mapping[str, tuple[tuple[str, int, str], ...]] = {
    **MESSAGES,
    "ContainerResources": (
        ("name", 1, ""),
        *MESSAGES["ContainerResources"],
        ("memory", 4, "ContainerMemory[]"),
    ),
    "ContainerMemory": (("memory_type", 1, ""),),
}
"""With fields that a kubelet sends and the agent does not read."""
Answer = described("v1", MORE)["ListPodResourcesResponse"]

Held = Mapping[str, Sequence[tuple[str, str]]]
"""By namespace/name: resource and device id; without an id, a claim of the driver that is named in the resource's place."""


def answer(held: Held) -> bytes:
    """What the kubelet says where each pod has one container."""
    made = Answer()
    for pod, devices in held.items():
        namespace, name = pod.split("/")
        container = made.pod_resources.add(name=name, namespace=namespace).containers.add(name="main")
        container.memory.add(memory_type="memory")
        for resource, device in devices:
            if device:
                container.devices.add(resource_name=resource, device_ids=[device])
            else:
                container.dynamic_resources.add().claim_resources.add(driver_name=resource)
    encoded: bytes = made.SerializeToString()
    return encoded


class Kubelet:
    """What it says can be changed while it runs."""

    def __init__(self) -> None:
        self.says = b""
        self.hangs = False
        self.asked = 0
        self._ends = threading.Event()

    @contextmanager
    def on(self, socket: Path) -> Iterator[None]:
        """It listens there."""
        socket.unlink(missing_ok=True)
        self._ends.clear()
        threads = ThreadPoolExecutor(4)
        server = grpc.server(threads)
        method = grpc.unary_unary_rpc_method_handler(self._list)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("v1.PodResourcesLister", {"List": method}),)
        )
        server.add_insecure_port(f"unix:{socket}")
        server.start()
        try:
            yield
        finally:
            self._ends.set()
            server.stop(None).wait()
            threads.shutdown()

    def _list(self, request: bytes, context: Any) -> bytes:
        self.asked += 1
        if self.hangs:
            self._ends.wait()
        return self.says


def within(limit: int, found: Callable[[], bool]) -> bool:
    """Whether it comes true within so many twentieths of a second."""
    pause = threading.Event()
    return any(found() or pause.wait(0.05) for _ in range(limit))
